"""The drafter interface: three methods, and the verifier knows nothing of which drafter it serves.

A drafter sees token ids, and if it asks for them the target's hidden states ("features"). It keeps its own state per
slot (KV cache, lookup tables, pending features) and follows the text by comparing what it last proposed with
`state.token_ids`, so that a rejected draft leaves no trace.

Every proposal is a tree whose root is the text's last token; a chain is the tree in which each token's parent is the
one before it. One form serves all methods: several candidates at a position are siblings, several continuations are
branches, and the window of lookahead decoding is a comb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..config import SamplingParams

ROOT = -1  # parent of the tokens that directly follow the text


@dataclass
class SlotState:
    """What a drafter may know of one active request.

    token_ids: prompt + emitted ids so far; the last one has not been seen by the target yet. budget: how deep a
    proposal may usefully go now (K, cut to what length limits leave). params: how this request samples. seed: the
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

    tokens: ids, possibly none; every token comes after its parent. parents: None for a chain; otherwise for every
    token the index of its parent in `tokens`, `ROOT` for the text's last token. probs: None if the proposal was
    deterministic (q is one-hot: greedy, n-gram); otherwise float32 [len(tokens), vocab], for every token the
    distribution that it and its siblings were drawn from, in the order of the tokens and without replacement.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probs: torch.Tensor | None = None

    @property
    def tree(self) -> tuple[int, ...]:
        """`parents`, spelled out for a chain too."""
        return tuple(range(-1, len(self.tokens) - 1)) if self.parents is None else self.parents

    @property
    def depths(self) -> tuple[int, ...]:
        """How many tokens behind the text's last one each token stands: 1 for those that follow it directly."""
        found: list[int] = []
        for parent in self.tree:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return tuple(found)


@dataclass(frozen=True)
class Outcome:
    """What verification found for one slot.

    path: indices into the draft's tokens that were accepted, in the order of the text (a chain: 0, 1, …). choices: the
    target's most likely id after the root and after every draft token that was verified: len(tokens) + 1 of them, or
    fewer where the cache had no room for all and the draft was cut to its beginning. features: float
    [len(path) + 1, len(feature_layers) * H], the target's hidden states at the root and along the path; None if the
    drafter has no `feature_layers`.
    """

    slot: int
    path: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    features: torch.Tensor | None = None


class Drafter(Protocol):
    """feature_layers: which hidden states of the target the drafter wants: n is the residual stream after n layers
    (0: the embeddings), one more than the number of layers is the normed state that the output head reads."""

    feature_layers: tuple[int, ...]

    def reset(self, slot: int, prompt_ids: Sequence[int], features: torch.Tensor | None = None) -> None:
        """A new request takes `slot`; forget the one before. features: [len(prompt_ids), len(feature_layers) * H]."""

    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        """One draft per state, in order."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """After verification: the outcome of every state of the last `propose`."""
