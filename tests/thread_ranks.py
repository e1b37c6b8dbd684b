"""Ranks that are threads of one process and meet at a barrier: what tests of slices and sums run on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tutorial_lib.engine.parallel import Ranks


class ThreadRanks(Ranks):
    """One of the ranks that `on_ranks` makes."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, table: list[Any]) -> None:
        super().__init__(rank, size)
        self.barrier, self.table = barrier, table

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.table[self.rank] = x
        self.barrier.wait()
        found = [part.clone() for part in self.table]
        self.barrier.wait()
        return found

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self.gather(x)))


def on_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """`work(ranks)` on every rank at once: the results by rank. A rank that fails ends the others' waiting."""
    barrier, table = threading.Barrier(size, timeout=20), [None] * size

    def run(rank: int) -> Any:
        try:
            return work(ThreadRanks(rank, size, barrier, table))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
