"""Lookahead decoding: the target guesses its own future in parallel, and n-grams that it produced are verified.

Fu et al. 2024 (arXiv 2402.02057). A window of W columns and N - 1 levels holds Jacobi iterations: the token at level l
of column j is a guess for the position j + l behind the text's last token, made from the level before. One pass of the
target makes the next level; every column then is an n-gram (N tokens) and goes to a pool, and the oldest level leaves.
Up to G n-grams of the pool that begin with the text's last token are verified in the same pass.

Window and n-grams are one tree. The root is the text's last token and stands at level 0 of column 0; a token at
(level, column) hangs on (level - 1, column), one at level 0 on its left neighbour. Equal tokens behind the same parent
are one node: what follows them is the same. As in the authors' program, n-grams of the text itself enter the pool too.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..config import LookaheadDecodingConfig
from .base import ROOT, Draft, Outcome, SlotState

MAX_KEYS = 8192  # first tokens that a pool knows at once


class NGramPool:
    """For every first token the latest `per_key` n-grams that begin with it; the least recently used first token goes
    when there are more than `max_keys`."""

    def __init__(self, per_key: int, max_keys: int = MAX_KEYS) -> None:
        self._per_key, self._max_keys = per_key, max_keys
        self._keys: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, ngram: Sequence[int]) -> None:
        key, rest = ngram[0], tuple(ngram[1:])
        known = self._keys.setdefault(key, OrderedDict())
        known[rest] = None
        known.move_to_end(rest)
        if len(known) > self._per_key:
            known.popitem(last=False)
        self._keys.move_to_end(key)
        if len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def behind(self, key: int) -> list[tuple[int, ...]]:
        """What followed `key` in its n-grams, the latest first."""
        if key not in self._keys:
            return []
        self._keys.move_to_end(key)
        return list(reversed(self._keys[key]))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return ((key, *rest) for key, known in self._keys.items() for rest in known)


class _Tree:
    """Tokens and parents, each (parent, token) once; a token deeper than `max_depth` is left out."""

    def __init__(self, max_depth: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._max_depth, self._depths = max_depth, {ROOT: 0}
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, parent: int | None, token: int) -> int | None:
        """The node of `token` behind `parent`; None if it is left out, or its parent was."""
        if parent is None or self._depths[parent] == self._max_depth:
            return None
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self._depths[node] = self._depths[parent] + 1
        return node


@dataclass
class _Slot:
    """window: the levels there are, the oldest first; level 0 lacks column 0, which is the text's last token. top: the
    nodes of the newest level in the last proposal, one per column; empty if they were not all proposed."""

    pool: NGramPool
    window: list[list[int]]
    read: int = 0
    last: int = -1
    top: list[int] = field(default_factory=list)


class LookaheadDrafter:
    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: LookaheadDecodingConfig, stop_ids: Iterable[int]) -> None:
        self._width, self._n = config.max_window_size, config.max_ngram_size
        self._guesses = config.max_verification_set_size
        self._stop_ids = frozenset(stop_ids)  # an n-gram is verified up to one of them
        self._slots: dict[int, _Slot] = {}

    @property
    def max_depth(self) -> int:
        """How deep a proposal reaches: the window's last column at its newest level, or an n-gram."""
        return 0 if self._n == 1 else max(self._width + self._n - 3, self._n - 1)

    @property
    def max_tokens(self) -> int:
        """The most tokens of a proposal: those of the window but its root, and of all n-grams behind their first."""
        if self._n == 1:
            return 0
        return self._width * (self._n - 1) - 1 + self._guesses * (self._n - 1)

    def reset(self, slot: int, prompt_ids: Sequence[int], features: object = None) -> None:
        """The window begins as level 0 alone, with tokens of the prompt: any guess will do, these are likelier."""
        first = random.Random(0).choices(prompt_ids, k=self._width - 1)
        self._slots[slot] = _Slot(NGramPool(self._guesses), [first])

    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        return [self._draft(s) for s in states]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The target's choice after each of the newest level's tokens is the next level. Near the end of a request, or
        of the cache, the window is not verified whole; it stays as it is."""
        for outcome in outcomes:
            slot = self._slots[outcome.slot]
            if slot.top and max(slot.top) + 1 < len(outcome.choices):
                self._advance(slot, [outcome.choices[node + 1] for node in slot.top])

    def _draft(self, state: SlotState) -> Draft:
        slot = self._slots[state.slot]
        slot.top, slot.last = [], state.token_ids[-1]
        if self._n == 1 or state.budget == 0:
            return Draft()
        self._read(slot, state.token_ids)
        tree = _Tree(state.budget)
        for ngram in slot.pool.behind(slot.last):
            at: int | None = ROOT
            for token in ngram:
                if token in self._stop_ids:
                    break
                at = tree.add(at, token)
        top = self._hang(slot.window, tree)
        slot.top = [] if None in top else [node for node in top if node is not None]
        return Draft(tuple(tree.tokens), tuple(tree.parents)) if tree.tokens else Draft()

    @staticmethod
    def _hang(window: Sequence[Sequence[int]], tree: _Tree) -> list[int | None]:
        """Enter the window in the tree; the nodes of its newest level."""
        row: list[int | None] = [ROOT]
        for token in window[0]:
            row.append(tree.add(row[-1], token))
        for level in window[1:]:
            row = [tree.add(parent, token) for parent, token in zip(row, level, strict=True)]
        return row

    def _advance(self, slot: _Slot, newest: list[int]) -> None:
        levels = [*slot.window, newest]
        if len(levels) < self._n:  # still filling
            slot.window = levels
            return
        for ngram in zip([slot.last, *levels[0]], *levels[1:], strict=True):
            slot.pool.add(ngram)
        slot.window = [levels[1][1:], *levels[2:]]

    def _read(self, slot: _Slot, ids: Sequence[int]) -> None:
        """Enter the n-grams that end in what is new of the text."""
        for end in range(max(slot.read + 1, self._n), len(ids) + 1):
            slot.pool.add(ids[end - self._n : end])
        slot.read = len(ids)
