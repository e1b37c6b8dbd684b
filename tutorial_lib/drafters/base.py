"""The drafter interface: three methods, and the verifier knows nothing of which drafter it serves.

A drafter sees token ids only. It keeps its own state per slot (KV cache, lookup tables) and follows the text by
comparing what it last proposed with `state.token_ids`, so that a rejected draft leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..config import SamplingParams


@dataclass
class SlotState:
    """What a drafter may know of one active request.

    token_ids: prompt + emitted ids so far; the last one has not been seen by the target yet. budget: the most draft
    tokens worth proposing now (K, cut to what length limits leave). params: how this request samples. seed: the
    request's random key (see `engine.sampling`).
    """

    slot: int
    token_ids: list[int]
    budget: int
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class Draft:
    """What was proposed for one slot.

    tokens: at most `budget` ids, possibly none. parents: None for a chain; otherwise for every token the index of its
    parent in `tokens`, -1 for the root. probs: None if the proposal was deterministic (q is one-hot: greedy, n-gram);
    otherwise float32 [len(tokens), vocab], the very distribution each token was drawn from.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probs: torch.Tensor | None = None


class Drafter(Protocol):
    def reset(self, slot: int, prompt_ids: Sequence[int]) -> None:
        """A new request takes `slot`; forget the one before."""

    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        """One draft per state, in order."""

    def observe(self, accepted: Sequence[tuple[int, int]]) -> None:
        """After verification: (slot, number of accepted draft tokens) for every state of the last `propose`."""
