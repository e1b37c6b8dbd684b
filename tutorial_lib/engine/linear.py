"""Matrix products with a weight that never changes: the kernels a CPU offers, and which one wins at which row count.

Decoding multiplies the same weight with 1 row (plain) or K + 1 rows (verification) and is bound by reading it.
Which kernel reads it fastest depends on machine and row count, so `build` times them (`choose_kernels`) and stores the
answer as the engine's tactic table; `make_linear` only looks it up. Forms of a weight:

  float32 / bfloat16   "plain"   torch.nn.functional.linear (MKL or the platform's BLAS)
                       "onednn"  weight pre-packed by oneDNN (private torch ops: probed, never assumed)
  int8                 "int8"    weight-only, one scale per output row; the product alone is in bfloat16
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from ..errors import OptionError

ROW_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)  # a count between two buckets uses the next larger one's kernel
INT8_COLUMNS = 16  # what torch's int8 product reads at once
ALIGNED_BYTES = 64  # where torch's own tensors begin
WORTH_A_SECOND_COPY = 0.9  # keep the weight in two forms only where the second saves a tenth of the step

Linear = Callable[[torch.Tensor], torch.Tensor]


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per output row. weight [out, in] -> (int8 [out, in], float32 scale [out])."""
    scale = weight.abs().amax(dim=1).float().clamp_min(1e-12) / 127.0
    return torch.round(weight.float() / scale[:, None]).clamp_(-127, 127).to(torch.int8), scale


# ---------------------------------------------------------------------------------------------------------- kernels


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return lambda x: F.linear(x, weight, bias)


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, bias, "none", [], "")


def _int8(quantized: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    ones = torch.ones_like(scale, dtype=torch.bfloat16)  # the kernel's own scale is bf16: scale afterwards, exactly
    quantized = _for_vectors(quantized)

    def product(x: torch.Tensor) -> torch.Tensor:
        y = torch._weight_int8pack_mm(_for_vectors(x.to(torch.bfloat16)), quantized, ones).float().mul_(scale)
        return (y if bias is None else y + bias).to(x.dtype)

    return product


def _for_vectors(matrix: torch.Tensor) -> torch.Tensor:
    """As torch's int8 product takes it where it has AVX-512: rows of whole vectors (else its result is wrong, with no
    word) that begin at a whole vector (else it crashes; a file mapped into memory begins anywhere)."""
    if left := -matrix.shape[1] % INT8_COLUMNS:
        return F.pad(matrix, (0, left))
    if matrix.is_contiguous() and matrix.data_ptr() % ALIGNED_BYTES == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


KERNELS: Mapping[str, Callable[..., Linear]] = {"plain": _plain, "onednn": _onednn}


def usable_kernels(dtype: torch.dtype) -> dict[str, str]:
    """Kernel name -> "" if it computes the right product on this machine, else the reason why it is left out."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    expected = F.linear(x, weight).float()
    tolerance = 1e-4 if dtype == torch.float32 else 0.25
    answers = {}
    for name, make in KERNELS.items():
        try:
            error = (make(weight, None)(x).float() - expected).abs().max().item()
            answers[name] = "" if error < tolerance else f"wrong by {error:.2g}"
        except (RuntimeError, AttributeError, NotImplementedError) as problem:
            answers[name] = str(problem).splitlines()[0][:120]
    return answers


# ---------------------------------------------------------------------------------------------------------- tactics


def choose_kernels(weights: Sequence[torch.Tensor], *, repeats: int = 5) -> dict:
    """Time every usable kernel on weights of one shape at every row bucket and pick.

    weights: all layers' weights [out, in] of one kind; they are visited in turn, as a step does, so that caches are no
    warmer than in use. Returns {"kernel_by_rows": {rows: name}, "ms_by_rows": {name: {rows: ms per product}},
    "left_out": {name: reason}}. A second weight form is kept only where it is worth its memory.
    """
    usable = usable_kernels(weights[0].dtype)
    timings: dict[str, dict[int, float]] = {}
    generator = torch.Generator().manual_seed(1)
    inputs = {r: torch.randn(r, weights[0].shape[1], generator=generator).to(weights[0].dtype) for r in ROW_BUCKETS}
    for name in (n for n, problem in usable.items() if not problem):
        products = [KERNELS[name](w, None) for w in weights]
        timings[name] = {rows: _least_ms(products, x, repeats) for rows, x in inputs.items()}
    return {
        "kernel_by_rows": {str(r): k for r, k in _pick(timings).items()},
        "ms_by_rows": {n: {str(r): round(ms, 4) for r, ms in t.items()} for n, t in timings.items()},
        "left_out": {n: problem for n, problem in usable.items() if problem},
    }


@torch.inference_mode()
def _least_ms(products: Sequence[Linear], x: torch.Tensor, repeats: int) -> float:
    """The fastest pass: other work on the machine only ever adds time, and the choice should not depend on it."""
    samples = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for product in products:
            product(x)
        samples.append((time.perf_counter() - start) / len(products) * 1e3)
    return min(samples[1:])


def _pick(timings: Mapping[str, Mapping[int, float]]) -> dict[int, str]:
    """The kernel with the least total time serves every bucket, except where another is clearly faster."""
    usual = min(timings, key=lambda name: sum(timings[name].values()))
    picked = {}
    for rows in ROW_BUCKETS:
        best = min(timings, key=lambda name: timings[name][rows])
        picked[rows] = best if timings[best][rows] < WORTH_A_SECOND_COPY * timings[usual][rows] else usual
    return picked


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, kernel_by_rows: Mapping[str, str]) -> Linear:
    """The product for one weight [out, in] by a tactic table {rows: kernel}. x [rows, in] -> [rows, out].

    Raises `OptionError` if the table names a kernel that this torch does not have.
    """
    made: dict[str, Linear] = {}
    for name in kernel_by_rows.values():
        if name not in KERNELS:
            raise OptionError(f"the tactic table names kernel {name!r}", f"one of {', '.join(KERNELS)}", "rebuild")
        if name not in made:
            made[name] = KERNELS[name](weight, bias)
    if len(made) == 1:
        return next(iter(made.values()))
    buckets = sorted((int(rows), made[name]) for rows, name in kernel_by_rows.items())
    table = [next((p for rows, p in buckets if rows >= n), buckets[-1][1]) for n in range(buckets[-1][0] + 1)]
    last = len(table) - 1
    return lambda x: table[min(x.shape[0], last)](x)


def make_int8_linear(quantized: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Weight-only int8: x [rows, in] -> [rows, out] in x's dtype, multiplied in bfloat16."""
    return _int8(quantized, scale, bias)
