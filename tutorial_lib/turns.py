"""A lock that serves its waiters in the order in which they came.

`threading.Lock` lets a thread that releases it take it again at once, before a waiting one wakes up. Several readers
of one engine would then starve while one of them makes all the progress.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """`with turns:` waits for its turn. Not reentrant."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._line: deque[threading.Lock] = deque()
        self._is_taken = False

    def try_enter(self) -> bool:
        """Take the turn if nobody has it; never waits."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            is_mine, self._is_taken = not self._is_taken, True
            return is_mine
        finally:
            self._guard.release()

    def __enter__(self) -> Turns:
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return self
            called = threading.Lock()
            called.acquire()
            self._line.append(called)
        try:
            called.acquire()
        except BaseException:  # an interrupt while waiting: out of the line, or the turn on to the next
            with self._guard:
                is_waiting = called in self._line
                if is_waiting:
                    self._line.remove(called)
            if not is_waiting:
                self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with self._guard:
            if self._line:
                self._line.popleft().release()
            else:
                self._is_taken = False
