"""Suffix decoding: propose what most often followed the longest stretch of text that has been there before.

Oliaro et al. 2024 (arXiv 2411.04975) keep a suffix tree of the request and of earlier outputs; here a suffix automaton
does the same (Blumer et al. 1985, online), with an occurrence count in every state. Prompt lookup compares three tokens
and copies one place; this compares as many as agree, and where several places agree their continuations are counted.
Nothing found means nothing proposed. The options are TensorRT-LLM's `SADecodingConfig`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..config import SADecodingConfig
from .base import Draft, Outcome, SlotState

START = 0  # the state of the empty string
MAX_WALK = 512  # states counted for one token: only a text that repeats itself more often than this reaches it
MIN_REBUILD = 4096  # tokens: a pool forgets by counting down, and is built anew when most of it is forgotten


class SuffixAutomaton:
    """Every stretch of every text that was added, with how often it occurs and where it occurred last.

    A state stands for stretches that end at the same places; `length` is its longest one's. `follow`: the state after
    one more token. `link`: the state of the longest shorter suffix that also occurs elsewhere. A token costs one step
    (amortised) plus one count for every suffix that has been seen before: a handful in ordinary text.
    """

    def __init__(self) -> None:
        self.follow: list[dict[int, int]] = [{}]
        self.link, self.length, self.count, self.latest = [-1], [0], [0], [-1]
        self.size = 0  # tokens added

    def extend(self, last: int, token: int) -> int:
        """The text at state `last` goes on with `token`; returns its new state. A new text begins at `START`."""
        known = self.follow[last].get(token)
        if known is None:
            state = self._new_state(self.length[last] + 1)
            at = last
            while at >= 0 and token not in self.follow[at]:
                self.follow[at][token] = state
                at = self.link[at]
            self.link[state] = START if at < 0 else self._exact(at, token)
        else:  # another text began the same way
            state = self._exact(last, token)
        self._tally(state, 1)
        self.size += 1
        return state

    def forget(self, text: Sequence[int]) -> None:
        """Count one occurrence of a text less. Its states stay; what no text holds any more is never proposed."""
        state = START
        for token in text:
            state = self.follow[state][token]
            self._tally(state, -1)

    def longest(self, state: int, length: int, token: int) -> tuple[int, int]:
        """(state, length) of the longest suffix of (the stretch at `state`, `length` tokens of it) + `token`."""
        while state >= 0:
            after = self.follow[state].get(token)
            if after is not None and self.count[after]:
                return after, length + 1
            state = self.link[state]
            length = self.length[state] if state >= 0 else 0
        return START, 0

    def continued(self, state: int, length: int, limit: int) -> tuple[int, int]:
        """The longest suffix, at most `limit` tokens (-1: any), that something followed; (START, 0) if none is."""
        while state > START:
            if 0 <= limit < length and self.length[self.link[state]] >= limit:
                state, length = self.link[state], self.length[self.link[state]]
                continue
            if any(self.count[after] for after in self.follow[state].values()):
                return state, length if limit < 0 else min(length, limit)
            state, length = self.link[state], self.length[self.link[state]]
        return START, 0

    def continuations(self, state: int) -> Iterable[tuple[int, int, int]]:
        """(token, how often it followed, where last) for what followed the stretch."""
        for token, after in self.follow[state].items():
            if self.count[after]:
                yield token, self.count[after], self.latest[after]

    def _exact(self, state: int, token: int) -> int:
        """The state of (the longest stretch at `state`) + `token`, split off from longer stretches if need be."""
        after = self.follow[state][token]
        if self.length[after] == self.length[state] + 1:
            return after
        clone = self._new_state(self.length[state] + 1)
        self.follow[clone] = dict(self.follow[after])
        self.link[clone], self.count[clone], self.latest[clone] = (
            self.link[after],
            self.count[after],
            self.latest[after],
        )
        self.link[after] = clone
        while state >= 0 and self.follow[state].get(token) == after:
            self.follow[state][token] = clone
            state = self.link[state]
        return clone

    def _tally(self, state: int, change: int) -> None:
        """The stretch that ends here, and each of its suffixes, occurs once more (or less)."""
        for _ in range(MAX_WALK):
            if state <= START:
                return
            self.count[state] += change
            if change > 0:
                self.latest[state] = self.size
            state = self.link[state]

    def _new_state(self, length: int) -> int:
        self.follow.append({})
        self.link.append(START)
        self.length.append(length)
        self.count.append(0)
        self.latest.append(-1)
        return len(self.link) - 1


@dataclass
class _Slot:
    """One request's own text: its automaton, the state of all of it, how many tokens are in, where the prompt ends;
    and the longest suffix of it that the pool holds."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    last: int = START
    text: list[int] = field(default_factory=list)
    prompt_len: int = 0
    pooled: tuple[int, int] = (START, 0)
    pool_version: int = -1
    proposed: tuple[int, ...] = ()


class SuffixDrafter:
    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: SADecodingConfig, stop_ids: Iterable[int]) -> None:
        self._limit = config.max_matching_ngram_size
        self._stop_ids = frozenset(stop_ids)  # never proposed: copied out of a chat history they would only be rejected
        self._pool = _Pool(config.global_pool_size) if config.enable_global_pool else None
        self._slots: dict[int, _Slot] = {}

    def reset(self, slot: int, prompt_ids: Sequence[int], features: object = None) -> None:
        """The request that held the slot is over: its output, as far as it was seen here, goes to the pool."""
        before = self._slots.get(slot)
        if before is not None and self._pool is not None:
            self._pool.add(before.text[before.prompt_len :])
        self._slots[slot] = _Slot(prompt_len=len(prompt_ids))
        self._read(self._slots[slot], prompt_ids)

    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        return [Draft(self._draft(s)) for s in states]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Only emitted text is entered. With a pool, what was accepted is entered now: after a request's last round
        there is no further `propose` to show it."""
        if self._pool is None:
            return
        for outcome in outcomes:
            own = self._slots[outcome.slot]
            self._read(own, [own.proposed[i] for i in outcome.path])

    def _draft(self, state: SlotState) -> tuple[int, ...]:
        own = self._slots[state.slot]
        self._read(own, state.token_ids[len(own.text) :])
        link = own.automaton.link[own.last]
        places = [(own.automaton, link, own.automaton.length[link])]
        if self._pool is not None:
            places.append((self._pool.automaton, *own.pooled))
        drafted: list[int] = []
        while len(drafted) < state.budget:
            places = [(a, *a.continued(at, length, self._limit)) for a, at, length in places]
            token = _most_frequent(places)
            if token is None or token in self._stop_ids:
                break
            drafted.append(token)
            places = [(a, *a.longest(at, length, token)) for a, at, length in places]
        own.proposed = tuple(drafted)
        return own.proposed

    def _read(self, own: _Slot, fresh: Sequence[int]) -> None:
        """Enter the tokens by which the text has grown."""
        for token in fresh:
            own.last = own.automaton.extend(own.last, token)
        own.text += fresh
        if self._pool is None:
            return
        if own.pool_version != self._pool.version:  # states were split or renumbered since: match anew
            own.pooled, own.pool_version, fresh = (START, 0), self._pool.version, own.text
        for token in fresh:
            own.pooled = self._pool.automaton.longest(*own.pooled, token)


def _most_frequent(places: Sequence[tuple[SuffixAutomaton, int, int]]) -> int | None:
    """The most frequent continuation at the longest suffix; of equally frequent ones the latest. Where text and pool
    share the longest suffix their counts are added, and a place in the text (the first of `places`) is the later."""
    longest = max(length for _, _, length in places)
    if longest == 0:
        return None
    votes: dict[int, tuple[int, int, int]] = {}  # token -> (count, whether in the text, where last)
    for order, (automaton, state, length) in enumerate(places):
        if length < longest:
            continue
        for token, count, latest in automaton.continuations(state):
            before = votes.get(token)
            votes[token] = (count, -order, latest) if before is None else (before[0] + count, *before[1:])
    return max(votes, key=lambda token: votes[token])


class _Pool:
    """The latest `size` outputs of earlier requests (None: all), searched as one."""

    def __init__(self, size: int | None) -> None:
        self.automaton, self.version = SuffixAutomaton(), 0
        self._size, self._outputs = size, deque[list[int]]()

    def add(self, output: list[int]) -> None:
        if not output:
            return
        self._enter(output)
        self._outputs.append(output)
        if self._size is not None and len(self._outputs) > self._size:
            self.automaton.forget(self._outputs.popleft())
            live = sum(map(len, self._outputs))
            if self.automaton.size > max(MIN_REBUILD, 2 * live):
                self.automaton = SuffixAutomaton()
                for kept in self._outputs:
                    self._enter(kept)
        self.version += 1

    def _enter(self, output: Sequence[int]) -> None:
        state = START
        for token in output:
            state = self.automaton.extend(state, token)
