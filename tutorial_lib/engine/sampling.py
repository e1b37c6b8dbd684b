"""From logits to the distribution a token is drawn from, and the draw itself.

The order is the usual one: repetition penalty, temperature, top-k, top-p, softmax. Target and drafter go through the
same function, because the acceptance rule is only right for the distributions that tokens really come from.

Randomness is counter-based (Philox): a number depends on (request seed, position in the text, purpose) and on nothing
else, so a request's result depends neither on its batch neighbours nor on earlier calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

from ..config import SamplingParams


class Purpose(IntEnum):
    """What a random number decides; each has its own stream."""

    DRAFT = 0  # which token the drafter proposes
    ACCEPT = 1  # whether a proposed token stays
    TOKEN = 2  # the bonus token, the replacement of a rejected one, and every token of plain decoding


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A uniform number in [0, 1) for one decision. Pure: the same arguments give the same number."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=[position, int(purpose), 0, 0]).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def penalize_repetition(logits: torch.Tensor, token_ids: Sequence[int], penalty: float) -> torch.Tensor:
    """Divide positive and multiply negative logits [V] of ids already in the text by `penalty` (Keskar et al. 2019).

    Ids beyond the row (a larger vocabulary's) are left out; values stay finite, however small the penalty. Returns a
    new tensor.
    """
    largest = torch.finfo(logits.dtype).max
    seen = torch.tensor(sorted({t for t in token_ids if t < logits.shape[-1]}), dtype=torch.long, device=logits.device)
    values = logits[seen]
    scaled = torch.where(values > 0, values / penalty, values * penalty).clamp(-largest, largest)
    return logits.index_copy(0, seen, scaled)


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float32 [V]: what a token is drawn from after temperature, top-k and top-p. Greedy is one-hot at the argmax.

    top-k keeps ties with the k-th; top-p keeps the smallest leading set whose probability reaches p, at least one.
    """
    logits = logits.float()
    if not params.temperature:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    logits = (logits - logits.max()) / params.temperature  # at most 0: the coldest temperature overflows to -inf only
    if params.top_k and params.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < torch.topk(logits, params.top_k).values[-1], -torch.inf)
    probs = torch.softmax(logits, dim=-1)
    if params.top_p is not None and params.top_p < 1:
        ordered, order = probs.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        probs = probs.index_fill(0, order[before >= params.top_p], 0.0)
        probs = probs / probs.sum()
    return probs


def draw(probs: torch.Tensor, u: float) -> int:
    """The token at which the cumulative distribution passes `u`. probs: [V], non-negative, summing to about 1."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return index if index < probs.shape[-1] else int(torch.nonzero(probs)[-1])  # past the end: u was rounded up to 1
