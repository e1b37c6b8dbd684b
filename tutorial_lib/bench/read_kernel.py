"""How fast this GPU's memory can be read: the ceiling that every decode step is held against.

A decode step at batch 1 does little but read weights, so its best case is a kernel that does nothing else: many
programs, each streaming a few tiles with several loads in flight. The best of some passes over far more than the
caches hold is the ceiling; a copy would not do, since it also writes.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import triton
import triton.language as tl

TILE = 4096  # float32 numbers
TILES = 8  # per program
MIN_BYTES = 1 << 28  # beyond the caches of any GPU


@triton.jit
def _read_kernel(x_ptr, out_ptr, TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr):
    """out[program] = sum of its TILES tiles, so that no load can be left out."""
    program = tl.program_id(0)
    at = x_ptr + program.to(tl.int64) * (TILE * TILES) + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for i in tl.range(0, TILES, num_stages=STAGES):
        total += tl.load(at + i * TILE)
    tl.store(out_ptr + program, tl.sum(total, 0))


def read_sums(x: torch.Tensor) -> torch.Tensor:
    """Sum of every stretch of TILE * TILES numbers of x (float32, a whole number of stretches)."""
    programs = x.numel() // (TILE * TILES)
    out = torch.empty(programs, device=x.device, dtype=torch.float32)
    _read_kernel[(programs,)](x, out, TILE=TILE, TILES=TILES, STAGES=4, num_warps=8)
    return out


def read_ceiling(size_bytes: int = 8 << 30, passes: int = 12) -> dict[str, Any]:
    """Read rate of the current GPU over `size_bytes` of random numbers (at most half of what is free).

    Returns {"tb_s": best pass, "median_tb_s", "bytes", "passes"}.
    """
    free, _ = torch.cuda.mem_get_info()
    stretch = TILE * TILES
    programs = max(MIN_BYTES, min(size_bytes, free // 2)) // (4 * stretch)
    x = torch.empty(programs * stretch, device="cuda").normal_()  # zeros would draw less power than weights do
    rates = []
    for _ in range(passes + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        read_sums(x)
        end.record()
        end.synchronize()
        rates.append(4 * x.numel() / begin.elapsed_time(end) / 1e9)
    del x
    torch.cuda.empty_cache()
    rates = rates[2:]
    return {
        "tb_s": round(max(rates), 4),
        "median_tb_s": round(statistics.median(rates), 4),
        "bytes": programs * stretch * 4,
        "passes": passes,
    }
