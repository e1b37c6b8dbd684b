"""Who runs: requests wait in the order of their arrival and join the batch between two rounds (Yu et al. 2022, Orca).

A request that has a slot and blocks of the cache is running: first its prompt is read, in pieces, then every round
serves it. It leaves the batch the moment it ends, and the next one takes its place. Where blocks run out the latest
arrival gives up its own and waits at the head of the line; it is read anew when there is room, prompt and output,
which is cheaper than it sounds because reading is one pass for many tokens.

The scheduler decides, the engine computes (`engine.py`); neither knows how the other does it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from .kv_cache import BlockCache, Holding

if TYPE_CHECKING:
    from .engine import Request

# Rows of prompts that are read between two rounds. Fewer let the running requests wait less; a matrix product with
# fewer rows costs more for each.
PIECE = 128


class Scheduler:
    """waiting: first come, first served. running: those with a slot, in the order in which they got it.

    max_rows: the most rows of one prompt in one pass. pass_rows: what a pass costs, however few rows of it are used.
    slack: positions behind its text that a request must have to take part in a round."""

    def __init__(self, slots: int, cache: BlockCache, *, max_rows: int, pass_rows: int = 1, slack: int = 0) -> None:
        self.cache, self.max_rows, self.pass_rows, self.slack = cache, max_rows, pass_rows, slack
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free = list(range(slots))[::-1]

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def retire(self) -> None:
        """Take out what has ended or was cancelled, whether it runs or waits."""
        for request in [r for r in self.running if r.is_over]:
            self._leave(request)
        if any(r.is_over for r in self.waiting):
            self.waiting = deque(r for r in self.waiting if not r.is_over)

    def admit(self) -> None:
        """Give slots and blocks to those that wait, as long as there are any. Nobody overtakes the one in front."""
        while self.waiting and self.free:
            request, slot = self.waiting[0], self.free[-1]
            text = request.context
            most_reused = len(text) - (not request.output_ids)
            holding = self.cache.begin(slot, text, most_reused, len(text) + 1 + self.slack)
            if holding is None:
                return
            self.waiting.popleft()
            request.slot, request.holding, request.computed = self.free.pop(), holding, holding.reused
            request.admitted_s = request.admitted_s or time.perf_counter()
            request.features = [] if holding.prefix is None else [holding.prefix]
            request.is_reading = True
            if not request.output_ids:
                request.cached_tokens = holding.reused
            self.running.append(request)

    def decoding(self, positions: Callable[[Request], int]) -> list[Request]:
        """Those that take part in the next round: their text is in the cache, and so is room for `positions` of it.
        The latest arrivals give their blocks up where there are too few."""
        chosen: list[Request] = []
        for request in [r for r in self.running if not r.is_reading]:
            while request.slot >= 0 and not self.cache.grow(request.holding, positions(request)):
                self.preempt(self.running[-1])
            if request.slot >= 0:
                chosen.append(request)
        return [r for r in chosen if r.slot >= 0]

    def reading(self, most: int) -> list[tuple[Request, int]]:
        """Whose prompts are read next and how many tokens of each, `most` rows together: first come, first served."""
        pieces = []
        for request in self.running:
            unread = len(request.context) - request.computed
            if request.is_reading and (most > 0 or unread == 0):
                count = min(most, unread, self.max_rows)
                pieces.append((request, count))
                most -= -(-count // self.pass_rows) * self.pass_rows
        return pieces

    def preempt(self, request: Request) -> None:
        """Back to the head of the line, without slot and blocks; what it has written stays written."""
        self._leave(request)
        request.preemptions += 1
        self.waiting.appendleft(request)

    def restart(self) -> None:
        """After an error in mid-round nobody's rows can be trusted: all that run are read anew."""
        for request in self.running[::-1]:
            self.preempt(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.end(request.holding)
        self.free.append(request.slot)
        request.slot, request.holding, request.computed, request.features = -1, Holding(), 0, []
