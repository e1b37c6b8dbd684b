"""The acceptance rule: which draft tokens stay, and the token that the target adds for free.

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318): a token drafted from q is accepted
with probability min(1, p / q); the first rejection is replaced by a draw from norm(max(0, p - q)); if none is
rejected, one more token is drawn from p. The result is distributed exactly as if the target had drawn every token.
Greedy decoding is the special case of one-hot p and q: accept while the argmax agrees.

A draft may be a tree (Miao et al. 2024, SpecInfer, arXiv 2305.09781): several candidates follow one token. They are
offered one after another, each to what the rejections before it have left of p; a chain has one candidate at a time.
Row 0 of the target's rows is the one after the text, row i + 1 the one after draft token i.

Pure functions; they know neither models nor drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from .sampling import Purpose, draw

T_co = TypeVar("T_co", covariant=True)


class Rows(Protocol[T_co]):
    """One value for each of the target's rows: a list, or something that computes a row once it is asked for."""

    def __getitem__(self, row: int, /) -> T_co: ...


@dataclass(frozen=True)
class Verdict:
    """accepted: how many draft tokens stay. emitted: those tokens and the bonus token after them. path: where the
    accepted tokens stand in the draft; of a chain it is the leading run and need not be given."""

    accepted: int
    emitted: tuple[int, ...]
    path: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.path:
            object.__setattr__(self, "path", tuple(range(self.accepted)))

    @property
    def rows(self) -> tuple[int, ...]:
        """The target's rows that the emitted tokens come from, one for each."""
        return (0, *(index + 1 for index in self.path))


def accept_greedy(drafted: Sequence[int], argmax: Rows[int], parents: Sequence[int] | None = None) -> Verdict:
    """Walk from the text into the draft as long as a candidate equals the target's choice.

    drafted: K ids. argmax: K + 1 ids, the target's choice in every row. parents: None for a chain, else for every
    draft token the index of the one that it follows, -1 for the text.
    """
    children = candidates(len(drafted), parents)
    path: list[int] = []
    row = 0
    while True:
        choice = argmax[row]
        kept = next((i for i in children[row] if drafted[i] == choice), None)
        if kept is None:
            return Verdict(len(path), (*(drafted[i] for i in path), choice), tuple(path))
        path.append(kept)
        row = kept + 1


def accept_sampled(
    drafted: Sequence[int],
    q: torch.Tensor | None,
    p: Rows[torch.Tensor],
    number: Callable[[int, Purpose], float],
    parents: Sequence[int] | None = None,
) -> Verdict:
    """Rejection sampling over a chain or a tree of drafts.

    drafted: K ids. q: [K, V], the distributions they were drawn from, or None if they were certain (n-gram lookup,
    greedy drafting), which is q one-hot; tokens that follow the same one were drawn from one q without replacement.
    p: K + 1 target distributions [V], one for every row. number(i, purpose): the uniform number for the i-th position
    of this round. parents as in `accept_greedy`.
    """
    children = candidates(len(drafted), parents)
    path: list[int] = []
    row = 0
    while True:
        kept, left = None, p[row]
        if children[row]:
            kept, left = offer(children[row], drafted, q, left, number(len(path), Purpose.ACCEPT))
        if kept is None:  # all rejected: a replacement from what they left; nothing drafted here: the bonus from p
            token = draw(left, number(len(path), Purpose.TOKEN))
            return Verdict(len(path), (*(drafted[i] for i in path), token), tuple(path))
        path.append(kept)
        row = kept + 1


def offer(
    siblings: Sequence[int], drafted: Sequence[int], q: torch.Tensor | None, p: torch.Tensor, u: float
) -> tuple[int | None, torch.Tensor]:
    """Offer the candidates of one position in turn: the index of the first that stays, else None, and what is left
    of p. One uniform number does for all: once u has missed a threshold, its place above that is uniform again."""
    q_left = None if q is None else q[siblings[0]]
    for index in siblings:
        token = drafted[index]
        p_token, q_token = float(p[token]), 1.0 if q_left is None else float(q_left[token])
        if q_token == 0:  # q could not have yielded it: no draw, and no chance
            continue
        if u * q_token < p_token:  # accepted with probability min(1, p / q)
            return index, p
        u = (u - p_token / q_token) / (1 - p_token / q_token)
        p = residual(p, token if q_left is None else q_left)
        q_left = None if q_left is None else residual(q_left, token)  # the next one was drawn without this one
    return None, p


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


def candidates(count: int, parents: Sequence[int] | None) -> list[list[int]]:
    """For each of the count + 1 rows the draft tokens that directly follow it, in the order of the draft."""
    found: list[list[int]] = [[] for _ in range(count + 1)]
    for index, parent in enumerate(range(-1, count - 1) if parents is None else parents):
        found[parent + 1].append(index)
    return found
