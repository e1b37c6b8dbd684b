"""Block reuse at work: one request, then others that begin as it did, and the cache's blocks before and meanwhile.

For the lesson on the KV cache; `show.cache` draws what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import SamplingParams
from ..results import Generation


@dataclass(frozen=True)
class Reuse:
    """moments: `block_map` by when it was made. generations: the requests in the order of their arrival."""

    moments: dict[str, list[dict[str, Any]]]
    generations: list[Generation]


def one_then_others(llm: Any, first: Sequence[int], others: Sequence[Sequence[int]], *, output_len: int = 4) -> Reuse:
    """Answer `first` alone, then all of `others` at once. llm: with block reuse, and nobody else served by it."""
    params, engine = SamplingParams(max_tokens=output_len, ignore_eos=True), llm.engine
    (alone,) = engine.generate([list(first)], [params])
    moments = {"the first has ended": block_map(engine)}
    opened = engine.open([list(ids) for ids in others], [params] * len(others))
    engine.step()
    moments["the others have been read"] = block_map(engine)
    while not all(stream.is_over for stream in opened):
        engine.step()
    return Reuse(moments, [alone, *(stream.generation() for stream in opened)])


def block_map(engine: Any) -> list[dict[str, Any]]:
    """Every block of a running engine's cache, in order: who holds it, and whether its content can be found again.
    Running requests are A, B, C, … in the order in which they got their slot."""
    pool = engine.cache.pool
    holders: dict[int, str] = {}
    for number, request in enumerate(engine.scheduler.running):
        for block in request.holding.table:
            holders[block] = holders.get(block, "") + chr(ord("A") + number % 26)
    return [{"holders": holders.get(i, ""), "is_known": b.key is not None} for i, b in enumerate(pool.blocks)]
