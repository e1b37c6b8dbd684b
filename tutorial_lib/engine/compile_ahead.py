"""Compile Triton kernels before they are needed, many at a time.

Triton compiles a kernel at its first launch, one after another, which is most of what a build and a first load take.
Here a piece of work is gone through once with launches of uncompiled kernels noted instead of made, then the noted
ones are compiled in threads (Triton's passes let go of Python's lock). They land where a launch looks: in the process
and in Triton's cache on disk. Needs no GPU beyond its description, see `tests/engine/test_compile_ahead.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton


def compile_ahead(work: Callable[[], object], *, threads: int | None = None) -> int:
    """Compile what `work()` would launch and what is not compiled yet; returns how many kernels that were.

    Kernels that are skipped leave their outputs as they were, so nothing that `work` computes may be used as an index
    or kept. One that cannot be compiled is left to its launch, which says why.
    """
    missing = _uncompiled(work)
    with ThreadPoolExecutor(threads or _cores()) as pool:
        done = [pool.submit(function.preload, request) for function, request in missing]
    return sum(future.exception() is None for future in done)


def _uncompiled(work: Callable[[], object]) -> list[tuple[Any, str]]:
    """(kernel, Triton's description of one specialization) of every launch in `work` that would compile first."""
    found: dict[tuple[str, str], tuple[Any, str]] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found[fn.name, compile["key"]] = (fn.jit_function, compile["specialization_data"])
        return True  # Triton then neither compiles nor launches

    hook = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = note
    try:
        work()
    finally:
        triton.knobs.runtime.jit_cache_hook = hook
    return list(found.values())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
