"""What this machine's CPU reaches at best: bytes read, operations done, and what one operator costs. About 2 seconds.

Three ceilings that `hardware_model` turns into step times. Each is the best of some passes over work as decoding does
it: a product with one row, which only reads; one with rows enough that arithmetic binds; an operator on next to
nothing. A GPU's ceilings come from its records (`evidence.gpu_ceilings`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..results import provenance

READ_MATRIX = (32768, 4096)  # 512 MiB in float32: beyond the caches
SQUARE = 1024
TINY_CALLS = 2000


def measure_cpu(command: str = "", passes: int = 7) -> dict[str, Any]:
    """A record of kind "ceilings" with bytes_per_s, flops_per_s and launch_s in float32, on PyTorch's threads."""
    import torch

    origin = provenance(command, None)
    matrix, row = torch.ones(READ_MATRIX), torch.ones(READ_MATRIX[1])
    square, tiny = torch.ones(SQUARE, SQUARE), torch.ones(8)
    read_s = _best_s(lambda: torch.mv(matrix, row), passes)
    product_s = _best_s(lambda: torch.mm(square, square), passes)

    def operators() -> None:
        for _ in range(TINY_CALLS):
            tiny.mul_(1.0)

    return {
        "kind": "ceilings",
        "machine": f"{origin['hardware']['cpu']}, {origin['hardware']['cores']} cores",
        "dtype": "float32",
        "bytes_per_s": 4.0 * READ_MATRIX[0] * READ_MATRIX[1] / read_s,
        "flops_per_s": 2.0 * SQUARE**3 / product_s,
        "launch_s": _best_s(operators, passes) / TINY_CALLS,
        "passes": passes,
        "provenance": origin,
    }


def _best_s(work: Callable[[], object], passes: int) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(passes))
