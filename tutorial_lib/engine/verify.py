"""The acceptance rule: which draft tokens stay, and the token that the target adds for free.

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318): a token drafted from q is accepted
with probability min(1, p / q); the first rejection is replaced by a draw from norm(max(0, p - q)); if none is
rejected, one more token is drawn from p. The result is distributed exactly as if the target had drawn every token.
Greedy decoding is the special case of one-hot p and q: accept while the argmax agrees.

Pure functions; they know neither models nor drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .sampling import Purpose, draw


@dataclass(frozen=True)
class Verdict:
    """accepted: how many draft tokens stay (a leading run). emitted: those tokens and the bonus token after them."""

    accepted: int
    emitted: tuple[int, ...]


def accept_greedy(drafted: Sequence[int], argmax: Sequence[int]) -> Verdict:
    """Keep the leading run of drafts that equal the target's choice.

    drafted: K ids. argmax: K + 1 ids, the target's choice at each drafted position and at the one after.
    """
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == argmax[accepted]:
        accepted += 1
    return Verdict(accepted, (*drafted[:accepted], argmax[accepted]))


def accept_sampled(
    drafted: Sequence[int],
    q: torch.Tensor | None,
    p: Sequence[torch.Tensor],
    number: Callable[[int, Purpose], float],
) -> Verdict:
    """Rejection sampling over a chain of drafts.

    drafted: K ids. q: [K, V], the distributions they were drawn from, or None if they were certain (n-gram lookup,
    greedy drafting), which is q one-hot. p: K + 1 target distributions [V]. number(i, purpose): the uniform number
    for the i-th position of this round.
    """
    for i, token in enumerate(drafted):
        q_token = 1.0 if q is None else float(q[i, token])
        if number(i, Purpose.ACCEPT) * q_token >= float(p[i][token]):  # rejected with probability 1 - min(1, p / q)
            replacement = draw(residual(p[i], token if q is None else q[i]), number(i, Purpose.TOKEN))
            return Verdict(i, (*drafted[:i], replacement))
    bonus = draw(p[len(drafted)], number(len(drafted), Purpose.TOKEN))
    return Verdict(len(drafted), (*drafted, bonus))


def residual(p: torch.Tensor, q: torch.Tensor | int) -> torch.Tensor:
    """norm(max(0, p - q)) [V], over the whole vocabulary. q: [V], or an id for a one-hot q.

    Where p equals q everywhere nothing can be rejected; if rounding makes it happen, p itself is returned.
    """
    if isinstance(q, int):
        left = p.index_fill(0, torch.tensor(q, device=p.device), 0.0)
    else:
        left = (p - q).clamp_min(0.0)
    total = left.sum()
    return left / total if total > 0 else p
