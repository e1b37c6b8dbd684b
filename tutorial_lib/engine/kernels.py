"""The Triton kernels of a decode step, for NVIDIA GPUs from compute capability 8.0 on.

A step at batch 1 reads every weight once and does little else, so there are few kernels and each is shaped for 1 to 64
rows. One layer is seven launches:

    add_norm      residual += sum of split-K partials; RMSNorm; quantize    (first layer: embed_norm, look up and norm)
    linear        q, k, v                                        (skinny product, split over K where that is faster)
    attention     sum partials, rotate, append to the paged cache, attend, combine splits, quantize
    linear        output projection
    add_norm
    gate_up       gate and up in one product, SiLU(gate) * up, quantize
    linear        down projection, whose partials the next add_norm sums

A round adds `begin_round` (where every step starts), an `argmax` or `top_tokens` after each output head, and
`finish_round` (accept, advance). Trees that a round forms anew add `tree_rows`, and EAGLE-3's dynamic one `grow_tree`
at every depth and `prune_tree`.

The order in which a row's numbers are added never depends on how many rows there are: tiles and splits are fixed
positions in K and in the sequence. So a token verified among K others gets the very logits that plain decoding gives.

Every launch may overlap the tail of the one before (programmatic dependent launch): it waits with `gdc_wait` before it
touches anything another kernel wrote. `reference.py` has the same functions in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from .reference import FP8, PAGE, Beam, Tap

MAX_PROGRAMS = 32  # attention programs per head: beyond this many pages each takes several
MAX_LANES = 32  # query vectors (rows times heads of a group) per attention program: more would combine alone
ONE_ARGMAX, ARGMAX_TILE = 16384, 2048  # rows up to the first are searched by one program, longer ones in tiles
TOP_TILE = 1024  # likewise for the several largest of a row: each of them is one more search
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
_WIDEN = tl.constexpr(IS_INTERPRETED)  # Triton's interpreter cannot multiply bf16: there, and only there, widen first


@dataclass(frozen=True)
class Tactic:
    """How one matrix shape is multiplied: tile of output features, tile of K, K splits, pipeline stages, warps."""

    block_n: int = 64
    block_k: int = 256
    split_k: int = 1
    stages: int = 4
    warps: int = 4


def row_block(rows: int) -> int:
    """Rows a product is padded to: the tensor cores work on 16 at least."""
    return max(16, triton.next_power_of_2(rows))


def launch_options(pdl: bool) -> dict:
    return {"launch_pdl": True} if pdl and not IS_INTERPRETED else {}


@triton.jit
def _dot(a, b, acc):
    if _WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


# --------------------------------------------------------------------------------------------------------- products


@triton.jit(do_not_specialize=["rows"])  # one compiled kernel for all row counts: same sums, less to compile
def _linear_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, rows, n, k,
    SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[split, m, n] = sum over this split's k of w[n, k] x[m, k], times both scales."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    depth = tl.arange(0, BLOCK_K)
    k_per_split = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT_K) * BLOCK_K
    start = split * k_per_split
    end = tl.minimum(start + k_per_split, k)
    inside_n = features[:, None] < n
    if PDL:
        tl_cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        kk = at + depth
        w = tl.load(
            w_ptr + features[:, None].to(tl.int64) * k + kk[None, :], mask=inside_n & (kk[None, :] < end), other=0.0
        )
        x = tl.load(x_ptr + m[None, :] * k + kk[:, None], mask=(m[None, :] < rows) & (kk[:, None] < end), other=0.0)
        acc = _dot(w, x, acc)
    if PDL:
        tl_cuda.gdc_launch_dependents()
    if SCALED:
        w_scale = tl.load(w_scale_ptr + features, mask=features < n, other=0.0)
        x_scale = tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)
        acc = acc * w_scale[:, None] * x_scale[None, :]
    out = out_ptr + split * rows * n + m[None, :] * n + features[:, None]
    tl.store(out, acc, mask=inside_n & (m[None, :] < rows))


@triton.jit(do_not_specialize=["rows"])
def _gate_up_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, out_scale_ptr, rows, inner, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SCALED: tl.constexpr, QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[m, n] = SiLU(gate row n of w · x[m]) * (up row n of w · x[m]); up rows start at `inner`."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    depth = tl.arange(0, BLOCK_K)
    inside = features[:, None] < inner
    gate_rows = w_ptr + features[:, None].to(tl.int64) * k
    up_rows = gate_rows + inner.to(tl.int64) * k
    if PDL:
        tl_cuda.gdc_wait()
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        kk = at + depth
        inside_w = inside & (kk[None, :] < k)
        x = tl.load(x_ptr + m[None, :] * k + kk[:, None], mask=(m[None, :] < rows) & (kk[:, None] < k), other=0.0)
        gate = _dot(tl.load(gate_rows + kk[None, :], mask=inside_w, other=0.0), x, gate)
        up = _dot(tl.load(up_rows + kk[None, :], mask=inside_w, other=0.0), x, up)
    if PDL:
        tl_cuda.gdc_launch_dependents()
    if SCALED:
        x_scale = tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)[None, :]
        gate *= tl.load(w_scale_ptr + features, mask=features < inner, other=0.0)[:, None] * x_scale
        up *= tl.load(w_scale_ptr + inner + features, mask=features < inner, other=0.0)[:, None] * x_scale
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    if QUANTIZED:
        hidden = tl.clamp(hidden / tl.load(out_scale_ptr), -448.0, 448.0)
    out = out_ptr + m[None, :] * inner + features[:, None]
    tl.store(out, hidden.to(out_ptr.dtype.element_ty), mask=inside & (m[None, :] < rows))


def linear(x, x_scale, weight, weight_scale, tactic: Tactic, pdl: bool = False) -> torch.Tensor:
    """Partial sums of x · weightᵀ: float32 [split_k, rows, n]. x [rows, k] and weight [n, k] share a dtype; the
    scales ([rows] and [n], float32) are None for bf16."""
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty(tactic.split_k, rows, n, device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(n, tactic.block_n), tactic.split_k)
    _linear_kernel[grid](
        x, x_scale, weight, weight_scale, out, rows, n, k,
        SPLIT_K=tactic.split_k, BLOCK_M=row_block(rows), BLOCK_N=tactic.block_n, BLOCK_K=tactic.block_k,
        STAGES=tactic.stages, SCALED=weight_scale is not None, PDL=pdl and not IS_INTERPRETED,
        num_warps=tactic.warps, **launch_options(pdl),
    )  # fmt: skip
    return out


def gate_up(x, x_scale, weight, weight_scale, out_scale, tactic: Tactic, pdl: bool = False) -> torch.Tensor:
    """SiLU(gate) * up, [rows, inner]: FP8 by `out_scale` (a float32 scalar tensor), or bf16 if that is None.
    weight: [2 * inner, k], gate rows first."""
    rows, k = x.shape
    inner = weight.shape[0] // 2
    out = torch.empty(rows, inner, device=x.device, dtype=FP8 if out_scale is not None else torch.bfloat16)
    _gate_up_kernel[(triton.cdiv(inner, tactic.block_n),)](
        x, x_scale, weight, weight_scale, out, out_scale, rows, inner, k,
        BLOCK_M=row_block(rows), BLOCK_N=tactic.block_n, BLOCK_K=tactic.block_k, STAGES=tactic.stages,
        SCALED=weight_scale is not None, QUANTIZED=out_scale is not None, PDL=pdl and not IS_INTERPRETED,
        num_warps=tactic.warps, **launch_options(pdl),
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------------- norm and quantize


@triton.jit(do_not_specialize=["rows"])
def _add_norm_kernel(
    residual_ptr, parts_ptr, token_ptr, place_ptr, embed_ptr, weight_ptr, out_ptr, scale_in_ptr, scale_out_ptr,
    tap_ptr, tap_row_ptr, rows, width, token_stride, out_stride, tap_stride, eps,
    SPLITS: tl.constexpr, IS_LOOKUP: tl.constexpr, HAS_PLACES: tl.constexpr, TAP: tl.constexpr, BLOCK: tl.constexpr,
    QUANT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: residual += sum of partials (or = the row of a token), then RMSNorm. QUANT: 0 bf16 out, 1 given scale,
    2 this row's own. TAP: 1 copies the residual, 2 the normed row."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < width
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if IS_LOOKUP:
        place = row
        if HAS_PLACES:
            place = tl.load(place_ptr + row)
        token = tl.load(token_ptr + place * token_stride).to(tl.int64)
        x = tl.load(embed_ptr + token * width + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + row * width + i, x.to(tl.bfloat16), mask=inside)
    else:
        x = tl.load(residual_ptr + row * width + i, mask=inside, other=0.0).to(tl.float32)
    if SPLITS > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for s in tl.static_range(SPLITS):
            added += tl.load(parts_ptr + (s * rows + row) * width + i, mask=inside, other=0.0)
        x = (x + added).to(tl.bfloat16).to(tl.float32)
        tl.store(residual_ptr + row * width + i, x.to(tl.bfloat16), mask=inside)
    if TAP > 0:
        tap = tap_ptr + tl.load(tap_row_ptr + row).to(tl.int64) * tap_stride + i
    if TAP == 1:
        tl.store(tap, x.to(tl.bfloat16), mask=inside)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    if TAP == 2:
        tl.store(tap, x.to(tl.bfloat16), mask=inside)
    if QUANT == 0:
        tl.store(out_ptr + row * out_stride + i, x.to(tl.bfloat16), mask=inside)
    else:
        if QUANT == 1:
            scale = tl.load(scale_in_ptr)
        else:
            scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-6) / 448.0
        tl.store(scale_out_ptr + row, scale)
        x = tl.clamp(x / scale, -448.0, 448.0)
        tl.store(out_ptr + row * out_stride + i, x.to(tl.float8e4nv), mask=inside)


def add_norm(
    residual,
    parts,
    weight,
    eps: float,
    scale,
    is_quantized: bool,
    pdl: bool = False,
    *,
    out=None,
    tap: Tap | None = None,
):
    """residual [rows, width] bf16 += sum(parts [splits, rows, width] float32), in place; returns its RMSNorm.

    (bf16 [rows, width], None), or if `is_quantized` (FP8 [rows, width], float32 scales [rows]): by the calibrated
    `scale` (float32 scalar tensor), or by each row's own largest value if `scale` is None. parts may be None. out:
    [rows, width] of any row stride that gets the result. tap: where a copy goes.
    """
    return _norm(residual, parts, None, None, None, weight, eps, scale, is_quantized, pdl, out, tap)


def embed_norm(
    tokens, embed, weight, eps: float, scale, is_quantized: bool, pdl: bool = False, *,
    out=None, tap: Tap | None = None, places=None,
):  # fmt: skip
    """What a step begins with: (residual bf16 [rows, width], and its RMSNorm as from `add_norm`). tokens: int [rows],
    any stride; embed: bf16 [vocab, width]. places: int32 [rows], row i looks up tokens[places[i]]."""
    rows = (tokens if places is None else places).shape[0]
    residual = torch.empty(rows, embed.shape[1], device=embed.device, dtype=embed.dtype)
    return residual, *_norm(residual, None, tokens, places, embed, weight, eps, scale, is_quantized, pdl, out, tap)


def _norm(residual, parts, tokens, places, embed, weight, eps, scale, is_quantized, pdl, out, tap):
    rows, width = residual.shape
    if out is None:
        out = torch.empty(rows, width, device=residual.device, dtype=FP8 if is_quantized else torch.bfloat16)
    scales = torch.empty(rows, device=residual.device, dtype=torch.float32) if is_quantized else None
    _add_norm_kernel[(rows,)](
        residual, parts, tokens, places, embed, weight, out, scale, scales,
        None if tap is None else tap.out, None if tap is None else tap.rows,
        rows, width, 0 if tokens is None else tokens.stride(0), out.stride(0), 0 if tap is None else tap.out.stride(0),
        eps,
        SPLITS=0 if parts is None else parts.shape[0], IS_LOOKUP=tokens is not None, HAS_PLACES=places is not None,
        TAP=0 if tap is None else 2 if tap.is_normed else 1,
        BLOCK=triton.next_power_of_2(width), QUANT=0 if not is_quantized else 1 if scale is not None else 2,
        PDL=pdl and not IS_INTERPRETED, num_warps=16 if width >= 4096 else 8, **launch_options(pdl),
    )  # fmt: skip
    return out, scales


@triton.jit
def _quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    largest = tl.zeros([BLOCK], tl.float32)
    for at in range(0, width, BLOCK):
        i = at + tl.arange(0, BLOCK)
        largest = tl.maximum(
            largest, tl.abs(tl.load(x_ptr + row * width + i, mask=i < width, other=0.0).to(tl.float32))
        )
    scale = tl.maximum(tl.max(largest, 0), 1e-6) / 448.0
    tl.store(scale_ptr + row, scale)
    for at in range(0, width, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * width + i, mask=i < width, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * width + i, tl.clamp(x / scale, -448.0, 448.0).to(tl.float8e4nv), mask=i < width)


def quantize_rows(x, pdl: bool = False):
    """bf16 [rows, width] -> (FP8 [rows, width], float32 scales [rows]), each row by its own largest value."""
    rows, width = x.shape
    out = torch.empty(rows, width, device=x.device, dtype=FP8)
    scales = torch.empty(rows, device=x.device, dtype=torch.float32)
    block = min(8192, triton.next_power_of_2(width))
    _quantize_rows_kernel[(rows,)](
        x, out, scales, width, BLOCK=block, PDL=pdl and not IS_INTERPRETED, num_warps=8, **launch_options(pdl)
    )
    return out, scales


# -------------------------------------------------------------------------------------------------------- attention


@triton.jit
def _rotated_head(
    parts_ptr, bias_ptr, norm_ptr, token, keep, column, cos, sin, total_rows, width, eps,
    SPLITS: tl.constexpr, HALF: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Sum partials of one head vector per lane row, add bias, normalize, rotate. Returns both halves, float32."""
    d = tl.arange(0, HALF)
    first = tl.zeros([token.shape[0], HALF], tl.float32)
    second = tl.zeros([token.shape[0], HALF], tl.float32)
    at = token[:, None] * width + column[:, None] + d[None, :]
    for s in tl.static_range(SPLITS):
        first += tl.load(parts_ptr + s * total_rows * width + at, mask=keep[:, None], other=0.0)
        second += tl.load(parts_ptr + s * total_rows * width + at + HALF, mask=keep[:, None], other=0.0)
    if HAS_BIAS:
        first += tl.load(bias_ptr + column[:, None] + d[None, :]).to(tl.float32)
        second += tl.load(bias_ptr + column[:, None] + d[None, :] + HALF).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        r = tl.rsqrt(mean + eps)[:, None]
        first = first * r * tl.load(norm_ptr + d).to(tl.float32)[None, :]
        second = second * r * tl.load(norm_ptr + d + HALF).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["rows", "total_rows", "before"])
def _attention_kernel(
    parts_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, cache_ptr, kv_scale_ptr,
    table_ptr, length_ptr, slot_ptr, mask_ptr, depth_ptr,
    max_ptr, sum_ptr, acc_ptr, counter_ptr, out_ptr, out_scale_ptr,
    rows, total_rows, before, max_blocks, softmax_scale, eps, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, NEW: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, PROGRAMS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    FP8_CACHE: tl.constexpr, QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one sequence, one key head, TILES * TOKENS cache positions, up to LANES query vectors.

    New rows sit at cache positions length … length + rows - 1. The program whose positions include a new row rotates
    and appends that row's key and value itself, then reads its positions back like all others, so the order of
    summation is that of absolute positions. The last program of a head to finish combines all of them.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    DIM: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    SPAN: tl.constexpr = TILES * TOKENS
    sequence = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    program = tl.program_id(1)
    lanes_of = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    length = tl.load(length_ptr + sequence)
    begin = program * SPAN
    total = length + rows
    if begin < total:
        slot = tl.load(slot_ptr + sequence)
        table = table_ptr + slot * max_blocks
        d_half = tl.arange(0, HALF)
        d = tl.arange(0, DIM)
        page_stride = 2 * KV_HEADS * TOKENS * DIM
        if FP8_CACHE:
            k_scale = tl.load(kv_scale_ptr)
            v_scale = tl.load(kv_scale_ptr + 1)

        # ---- append the new keys and values that belong to these positions
        new = tl.arange(0, NEW)
        at = length + new
        mine = (new < rows) & (at >= begin) & (at < begin + SPAN)
        if length + rows > begin:
            row = sequence * rows + new
            where = at
            if HAS_TREE:
                where = length + tl.load(depth_ptr + row, mask=new < rows, other=0)
            cos = tl.load(cos_ptr + where[:, None] * HALF + d_half[None, :], mask=mine[:, None], other=0.0)
            sin = tl.load(sin_ptr + where[:, None] * HALF + d_half[None, :], mask=mine[:, None], other=0.0)
            column = tl.zeros([NEW], tl.int32) + (HEADS + kv_head) * DIM
            k1, k2 = _rotated_head(
                parts_ptr, bias_ptr, k_norm_ptr, row, mine, column, cos, sin, total_rows, WIDTH, eps,
                SPLITS, HALF, HAS_BIAS, HAS_NORM,
            )  # fmt: skip
            v = tl.zeros([NEW, DIM], tl.float32)
            v_at = row[:, None] * WIDTH + (HEADS + KV_HEADS + kv_head) * DIM + d[None, :]
            for s in tl.static_range(SPLITS):
                v += tl.load(parts_ptr + s * total_rows * WIDTH + v_at, mask=mine[:, None], other=0.0)
            if HAS_BIAS:
                v += tl.load(bias_ptr + (HEADS + KV_HEADS + kv_head) * DIM + d).to(tl.float32)[None, :]
            if FP8_CACHE:
                k1 = tl.clamp(k1 / k_scale, -448.0, 448.0)
                k2 = tl.clamp(k2 / k_scale, -448.0, 448.0)
                v = tl.clamp(v / v_scale, -448.0, 448.0)
            page = tl.load(table + at // TOKENS, mask=mine, other=0).to(tl.int64)
            k_at = page * page_stride + (kv_head * TOKENS + at % TOKENS) * DIM
            v_at2 = k_at + KV_HEADS * TOKENS * DIM
            kind = cache_ptr.dtype.element_ty
            tl.store(cache_ptr + k_at[:, None] + d_half[None, :], k1.to(kind), mask=mine[:, None])
            tl.store(cache_ptr + k_at[:, None] + HALF + d_half[None, :], k2.to(kind), mask=mine[:, None])
            tl.store(cache_ptr + v_at2[:, None] + d[None, :], v.to(kind), mask=mine[:, None])
            tl.debug_barrier()

        # ---- queries: one lane per (row, head of the group)
        lane = tl.arange(0, LANES)
        vector = tl.program_id(2) * LANES + lane
        q_new = vector // GROUP
        q_head = kv_head * GROUP + vector % GROUP
        is_lane = q_new < rows
        q_row = sequence * rows + q_new
        q_at = length + q_new
        q_where = q_at
        if HAS_TREE:
            q_where = length + tl.load(depth_ptr + q_row, mask=is_lane, other=0)
        q_cos = tl.load(cos_ptr + q_where[:, None] * HALF + d_half[None, :], mask=is_lane[:, None], other=0.0)
        q_sin = tl.load(sin_ptr + q_where[:, None] * HALF + d_half[None, :], mask=is_lane[:, None], other=0.0)
        q1, q2 = _rotated_head(
            parts_ptr, bias_ptr, q_norm_ptr, q_row, is_lane, q_head * DIM, q_cos, q_sin, total_rows, WIDTH, eps,
            SPLITS, HALF, HAS_BIAS, HAS_NORM,
        )  # fmt: skip
        q1 = (q1 * softmax_scale).to(tl.bfloat16)
        q2 = (q2 * softmax_scale).to(tl.bfloat16)

        # ---- online softmax over this program's tiles
        top = tl.full([LANES], -1.0e30, tl.float32)
        denominator = tl.zeros([LANES], tl.float32)
        acc = tl.zeros([LANES, DIM], tl.float32)
        token = tl.arange(0, TOKENS)
        for tile in range(TILES):
            first = begin + tile * TOKENS
            if first < total:
                page = tl.load(table + first // TOKENS).to(tl.int64)
                base = cache_ptr + page * page_stride + kv_head * TOKENS * DIM
                position = first + token
                filled = position < total
                k1 = tl.load(base + token[None, :] * DIM + d_half[:, None], mask=filled[None, :], other=0.0)
                k2 = tl.load(base + token[None, :] * DIM + HALF + d_half[:, None], mask=filled[None, :], other=0.0)
                v_base = base + KV_HEADS * TOKENS * DIM
                v = tl.load(v_base + token[:, None] * DIM + d[None, :], mask=filled[:, None], other=0.0)
                if HALF >= 16:
                    scores = tl.zeros([LANES, TOKENS], tl.float32)
                    scores = _dot(q1, k1.to(tl.bfloat16), scores)
                    scores = _dot(q2, k2.to(tl.bfloat16), scores)
                else:  # too short for the tensor cores: heads of tiny models
                    scores = tl.sum(q1.to(tl.float32)[:, :, None] * k1.to(tl.float32)[None, :, :], 1)
                    scores += tl.sum(q2.to(tl.float32)[:, :, None] * k2.to(tl.float32)[None, :, :], 1)
                if FP8_CACHE:
                    scores *= k_scale
                seen = position[None, :] <= q_at[:, None]
                if HAS_TREE:
                    offset = position - length + before
                    inside = (offset >= 0) & (offset < before + rows)
                    allowed = tl.load(
                        mask_ptr + q_row[:, None] * (before + rows) + offset[None, :],
                        mask=inside[None, :] & is_lane[:, None], other=0,
                    )  # fmt: skip
                    seen = (offset < 0)[None, :] | (inside[None, :] & (allowed != 0))
                if HAS_WINDOW:
                    seen = seen & (position[None, :] > q_where[:, None] - window)
                scores = tl.where(seen, scores, -1.0e30)
                new_top = tl.maximum(top, tl.max(scores, 1))
                weight = tl.where(seen, tl.exp(scores - new_top[:, None]), 0.0)
                rescale = tl.exp(top - new_top)
                denominator = denominator * rescale + tl.sum(weight, 1)
                acc = _dot(weight.to(tl.bfloat16), v.to(tl.bfloat16), acc * rescale[:, None])
                top = new_top
        if FP8_CACHE:
            acc = acc * v_scale

        # ---- combine: the last program of these lanes to arrive adds up all of them, in order
        programs = tl.cdiv(total, SPAN)
        scratch = (lanes_of * PROGRAMS + program) * LANES
        tl.store(max_ptr + scratch + lane, top)
        tl.store(sum_ptr + scratch + lane, denominator)
        tl.store(acc_ptr + (scratch + lane)[:, None] * DIM + d[None, :], acc, mask=is_lane[:, None])
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + lanes_of, 1, sem="acq_rel")
        if arrived == programs - 1:
            tl.store(counter_ptr + lanes_of, 0)
            first = lanes_of * PROGRAMS * LANES
            p = tl.arange(0, PROGRAMS)
            at_all = first + p[:, None] * LANES + lane[None, :]
            is_there = (p < programs)[:, None]
            tops = tl.load(max_ptr + at_all, mask=is_there, other=-1.0e30)
            best = tl.max(tops, 0)
            sums = tl.load(sum_ptr + at_all, mask=is_there, other=0.0)
            below = tl.sum(tl.exp(tops - best[None, :]) * sums, 0)
            mixed = tl.zeros([LANES, DIM], tl.float32)
            for group in range(0, programs, 4):  # four at a time, so that their loads overlap
                for j in tl.static_range(4):
                    at_p = first + (group + j) * LANES + lane
                    keep = ((lane * 0 + group + j) < programs) & is_lane
                    factor = tl.exp(tl.load(max_ptr + at_p, mask=keep, other=-1.0e30) - best)
                    part = tl.load(acc_ptr + at_p[:, None] * DIM + d[None, :], mask=keep[:, None], other=0.0)
                    mixed += tl.where(keep, factor, 0.0)[:, None] * part
            mixed = mixed / below[:, None]
            if QUANTIZED:
                mixed = tl.clamp(mixed / tl.load(out_scale_ptr), -448.0, 448.0)
            out = out_ptr + q_row[:, None] * (HEADS * DIM) + q_head[:, None] * DIM + d[None, :]
            tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=is_lane[:, None])


def attention_shape(rows: int, group: int, max_positions: int) -> tuple[int, int, int, int]:
    """(lanes per program, lane blocks, tiles per program, programs) of an attention launch."""
    lanes = min(MAX_LANES, row_block(rows * group))
    pages = triton.cdiv(max_positions, PAGE)
    tiles = triton.next_power_of_2(triton.cdiv(pages, MAX_PROGRAMS))
    return lanes, triton.cdiv(rows * group, lanes), tiles, triton.next_power_of_2(triton.cdiv(pages, tiles))


@dataclass
class AttentionScratch:
    """Where programs leave their partial results: made once for the largest launch, shared by all layers."""

    top: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor
    counter: torch.Tensor

    @classmethod
    def for_steps(cls, sequences: int, rows: int, config, max_positions: int, device) -> AttentionScratch:
        """Enough for every step of at most `rows` rows, spread evenly over at most `sequences` sequences."""
        group = config.num_heads // config.num_kv_heads
        heads = vectors = 1
        for n in range(1, min(sequences, rows) + 1):
            lanes, blocks, _, programs = attention_shape(rows // n, group, max_positions)
            heads = max(heads, n * blocks * config.num_kv_heads)
            vectors = max(vectors, n * blocks * config.num_kv_heads * programs * lanes)

        def empty(count: int) -> torch.Tensor:
            return torch.empty(count, device=device, dtype=torch.float32)

        counter = torch.zeros(heads, device=device, dtype=torch.int32)
        return cls(empty(vectors), empty(vectors), empty(vectors * config.head_dim), counter)


def attention(
    parts, layer, cache, block_table, lengths, slots, rows: int, max_positions: int, scratch: AttentionScratch,
    out_scale, *, tree=None, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Rotate, append, attend. Returns [sequences * rows, heads * dim]: FP8 by `out_scale`, or bf16 if that is None.

    parts: float32 [splits, sequences * rows, (heads + 2 kv_heads) * dim], the q, k, v product. layer: an object with
    `config`, `cos`, `sin` [positions, dim / 2], `qkv_bias`, `q_norm`, `k_norm`, `kv_scale` (float32 [2] or None).
    cache: [pages, 2, kv_heads, PAGE, dim], bf16 or FP8, new rows are written into it. block_table: int32
    [slots, blocks]. lengths: int32 [sequences], tokens already in the cache. slots: int32 [sequences]. max_positions:
    the most tokens any sequence may hold after this step (fixes the launch). tree: None for a chain, else
    (mask int8 [sequences * rows, span], depth int32 [sequences * rows]): which of the last `span` positions, the new
    rows among them, a row sees (all before those), and where it stands behind `lengths`.
    """
    config = layer.config
    sequences, half = lengths.shape[0], config.head_dim // 2
    group = config.num_heads // config.num_kv_heads
    lanes, lane_blocks, tiles, programs = attention_shape(rows, group, max_positions)
    out = torch.empty(
        sequences * rows, config.num_heads * config.head_dim, device=parts.device,
        dtype=FP8 if out_scale is not None else torch.bfloat16,
    )  # fmt: skip
    window = config.sliding_window
    _attention_kernel[(sequences * config.num_kv_heads, programs, lane_blocks)](
        parts, layer.qkv_bias, layer.q_norm, layer.k_norm, layer.cos, layer.sin, cache, layer.kv_scale,
        block_table, lengths, slots, tree[0] if tree else None, tree[1] if tree else None,
        scratch.top, scratch.total, scratch.acc, scratch.counter, out, out_scale,
        rows, sequences * rows, tree[0].shape[1] - rows if tree else 0, block_table.shape[1],
        config.head_dim**-0.5, config.rms_norm_eps, window or 0,
        HEADS=config.num_heads, KV_HEADS=config.num_kv_heads, HALF=half, LANES=lanes, NEW=row_block(rows),
        SPLITS=parts.shape[0], TILES=tiles, PROGRAMS=programs, TOKENS=PAGE,
        HAS_BIAS=layer.qkv_bias is not None, HAS_NORM=layer.q_norm is not None, HAS_TREE=tree is not None,
        HAS_WINDOW=window is not None, FP8_CACHE=cache.dtype == FP8, QUANTIZED=out_scale is not None,
        PDL=pdl and not IS_INTERPRETED, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------- argmax, rounds


@triton.jit
def _argmax_kernel(
    logits_ptr, stride, best_ptr, where_ptr, ids_ptr, out_ptr, out_stride, damage_ptr, damage_rows, vocab, tiles,
    IS_ONE: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DAMAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    i = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + i, mask=i < vocab, other=-float("inf"))
    x = tl.where(x == x, x, float("inf"))  # NaN: reported like infinity, and the result stays an index
    best, where = tl.max(x, 0), tile * BLOCK + tl.argmax(x, 0)
    if IS_ONE:
        _store_choice(best, where, row, ids_ptr, out_ptr, out_stride, damage_ptr, damage_rows, HAS_IDS, HAS_DAMAGE)
    else:
        tl.store(best_ptr + row * tiles + tile, best)
        tl.store(where_ptr + row * tiles + tile, where)


@triton.jit
def _store_choice(
    best, where, row, ids_ptr, out_ptr, out_stride, damage_ptr, damage_rows,
    HAS_IDS: tl.constexpr, HAS_DAMAGE: tl.constexpr,
):  # fmt: skip
    if HAS_IDS:
        where = tl.load(ids_ptr + where).to(tl.int32)
    tl.store(out_ptr + row * out_stride, where)
    if HAS_DAMAGE:
        if tl.abs(best) == float("inf"):
            tl.store(damage_ptr + row // damage_rows, 1)


@triton.jit
def _argmax_finish_kernel(
    best_ptr, where_ptr, ids_ptr, out_ptr, out_stride, damage_ptr, damage_rows, tiles,
    HAS_IDS: tl.constexpr, HAS_DAMAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    x = tl.load(best_ptr + row * tiles + i, mask=i < tiles, other=-float("inf"))
    where = tl.load(where_ptr + row * tiles + tl.argmax(x, 0))
    _store_choice(tl.max(x, 0), where, row, ids_ptr, out_ptr, out_stride, damage_ptr, damage_rows, HAS_IDS, HAS_DAMAGE)


def argmax(logits, out, pdl: bool = False, *, ids=None, damage=None) -> None:
    """out[row] = index of the largest logit (the first of equals), or `ids` there.

    logits float32 [rows, vocab], rows any distance apart; out int32 [rows], any stride; ids int [vocab]: what each
    index stands for (a shortlist). damage int32 [B]: entry i becomes 1 if the largest logit in one of the i-th rows / B
    rows is NaN or infinite.
    """
    rows, vocab = logits.shape
    is_one = vocab <= ONE_ARGMAX
    block = triton.next_power_of_2(vocab) if is_one else ARGMAX_TILE
    tiles = triton.cdiv(vocab, block)
    each = 1 if damage is None else rows // damage.shape[0]
    best = where = None
    if not is_one:
        best = torch.empty(rows, tiles, device=logits.device, dtype=torch.float32)
        where = torch.empty(rows, tiles, device=logits.device, dtype=torch.int32)
    options = {"HAS_IDS": ids is not None, "HAS_DAMAGE": damage is not None, "PDL": pdl and not IS_INTERPRETED}
    options |= launch_options(pdl)
    _argmax_kernel[(rows, tiles)](
        logits, logits.stride(0), best, where, ids, out, out.stride(0), damage, each, vocab, tiles,
        IS_ONE=is_one, BLOCK=block, num_warps=min(16, max(4, block // 1024)), **options,
    )  # fmt: skip
    if not is_one:
        _argmax_finish_kernel[(rows,)](
            best, where, ids, out, out.stride(0), damage, each, tiles, BLOCK=triton.next_power_of_2(tiles), **options
        )


@triton.jit(do_not_specialize=["nodes", "tiles", "ranks"])  # one compiled kernel for every level of a tree
def _top_tile_kernel(
    logits_ptr, best_ptr, where_ptr, sum_ptr, batch_stride, node_stride, nodes, vocab, tiles, ranks,
    HAS_SCORES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest of one tile of one row, in order."""
    row, tile = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    start = (row // nodes).to(tl.int64) * batch_stride + (row % nodes).to(tl.int64) * node_stride + tile * BLOCK
    x = tl.load(logits_ptr + start + i, mask=tile * BLOCK + i < vocab, other=-float("inf"))
    x = tl.where(x == x, x, float("inf"))
    to = (row * tiles + tile) * ranks
    if HAS_SCORES:
        tl.store(sum_ptr + row * tiles + tile, tl.sum(tl.exp(x - tl.max(x, 0)), 0))
    for rank in range(ranks):
        at = tl.argmax(x, 0)
        tl.store(best_ptr + to + rank, tl.max(x, 0))
        tl.store(where_ptr + to + rank, tile * BLOCK + at)
        x = tl.where(i == at, -float("inf"), x)


@triton.jit(do_not_specialize=["nodes", "columns", "tiles", "ranks", "out_stride", "score_stride"])
def _top_finish_kernel(
    best_ptr, where_ptr, sum_ptr, ids_ptr, source_ptr, out_ptr, score_ptr,
    nodes, columns, tiles, ranks, out_stride, score_stride,
    HAS_IDS: tl.constexpr, HAS_SCORES: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest of one row out of those of its tiles, each to the columns that want it."""
    row = tl.program_id(0)
    c, i, t = tl.arange(0, COLUMNS), tl.arange(0, BLOCK), tl.arange(0, TILES)
    source = tl.load(source_ptr + c, mask=c < columns, other=-1)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    x = tl.load(best_ptr + row * tiles * ranks + i, mask=i < tiles * ranks, other=-float("inf"))
    if HAS_SCORES:
        tops = tl.load(best_ptr + (row * tiles + t) * ranks, mask=t < tiles, other=-float("inf"))
        sums = tl.load(sum_ptr + row * tiles + t, mask=t < tiles, other=0.0)
        top = tl.max(tops, 0)
        whole = top + tl.log(tl.sum(tl.exp(tops - top) * sums, 0))
    out = out_ptr + (row // nodes) * out_stride + c
    for rank in range(ranks):
        at, best = tl.argmax(x, 0), tl.max(x, 0)
        token = tl.load(where_ptr + row * tiles * ranks + at)
        if HAS_IDS:
            token = tl.load(ids_ptr + token).to(tl.int32)
        is_wanted = source == (row % nodes) * ranks + rank
        tl.store(out, tl.zeros([COLUMNS], tl.int32) + token, mask=is_wanted)
        if HAS_SCORES:
            score = score_ptr + (row // nodes) * score_stride + c
            tl.store(score, tl.zeros([COLUMNS], tl.float32) + (best - whole), mask=is_wanted)
        x = tl.where(i == at, -float("inf"), x)


def top_tokens(logits, out, source, ranks: int, pdl: bool = False, *, ids=None, scores=None) -> None:
    """The `ranks` likeliest tokens of every row, the first of equals first, each to where it is wanted.

    logits float32 [B, nodes, vocab], rows any distance apart. source int32 [columns]: column c of out int32
    [B, columns] (rows any distance apart) gets the token of rank source[c] % ranks of node source[c] // ranks, and
    stays as it is if source[c] is negative. ids int [vocab]: what each index stands for. scores float32 [B, columns]:
    the log-probabilities of those tokens.
    """
    batch, nodes, vocab = logits.shape
    tiles, columns = triton.cdiv(vocab, TOP_TILE), source.shape[0]
    best = torch.empty(batch * nodes, tiles, ranks, device=logits.device, dtype=torch.float32)
    where = torch.empty(batch * nodes, tiles, ranks, device=logits.device, dtype=torch.int32)
    sums = None if scores is None else torch.empty(batch * nodes, tiles, device=logits.device, dtype=torch.float32)
    options = {"HAS_SCORES": scores is not None, "PDL": pdl and not IS_INTERPRETED}
    options |= launch_options(pdl)
    _top_tile_kernel[(batch * nodes, tiles)](
        logits, best, where, sums, logits.stride(0), logits.stride(1), nodes, vocab, tiles, ranks, BLOCK=TOP_TILE,
        num_warps=4, **options,
    )  # fmt: skip
    _top_finish_kernel[(batch * nodes,)](
        best, where, sums, ids, source, out, scores, nodes, columns, tiles, ranks, out.stride(0),
        0 if scores is None else scores.stride(0), HAS_IDS=ids is not None,
        BLOCK=max(128, triton.next_power_of_2(tiles * ranks)), TILES=triton.next_power_of_2(tiles),
        COLUMNS=triton.next_power_of_2(columns), num_warps=4, **options,
    )  # fmt: skip


@triton.jit
def _begin_round_kernel(
    slots_ptr, length_ptr, last_ptr, slots_out_ptr, starts_ptr, tokens_ptr, pair_ptr, damage_ptr,
    batch, token_stride, steps, common,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BLOCK)
    inside = b < batch
    slot = tl.load(slots_ptr + b, mask=inside, other=0).to(tl.int32)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    length = tl.load(length_ptr + slot, mask=inside, other=2)
    before = tl.load(last_ptr + 2 * slot, mask=inside, other=0)
    last = tl.load(last_ptr + 2 * slot + 1, mask=inside, other=0)
    tl.store(slots_out_ptr + b, slot, mask=inside)
    for i in range(0, steps):
        tl.store(starts_ptr + i * batch + b, length - 2 + i, mask=inside)
    tl.store(tokens_ptr + b * token_stride, last, mask=inside)
    tl.store(pair_ptr + 2 * b, tl.where(before < common, before, 0), mask=inside)
    tl.store(pair_ptr + 2 * b + 1, tl.where(last < common, last, 0), mask=inside)
    tl.store(damage_ptr + b, 0, mask=inside)


def begin_round(slots, length, last, slots_out, starts, tokens, pair, damage, common: int, pdl: bool = False) -> None:
    """What the steps of a round start from, for the `slots` int64 [B] of `length` int32 and `last` int32 [.., 2].

    slots_out int32 [B]: the slots. starts int32 [K + 2, B]: row j is the position length - 2 + j. tokens int32
    [B, K + 1]: its first column becomes the last token. pair int32 [B, 2]: the last two tokens, 0 for those from
    `common` on (ids that the drafter lacks). damage int32 [B] becomes 0.
    """
    batch = slots.shape[0]
    _begin_round_kernel[(1,)](
        slots, length, last, slots_out, starts, tokens, pair, damage,
        batch, tokens.stride(0), starts.shape[0], common,
        BLOCK=triton.next_power_of_2(batch), PDL=pdl and not IS_INTERPRETED, num_warps=1, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _finish_round_kernel(
    slots_ptr, length_ptr, last_ptr, text_ptr, row_ptr, tokens_ptr, choices_ptr, drafted_len_ptr, forced_ptr,
    counter_ptr, accepted_ptr, token_ptr, parents_ptr, out_ptr, path_ptr, kept_ptr,
    batch, draft_len, text_stride, period, scratch_slot,
    KIND: tl.constexpr, TREE_DEPTH: tl.constexpr, BATCH: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KIND: 0 greedy, 1 forced, 2 decided already. TREE_DEPTH: 0 for a chain."""
    b, k = tl.arange(0, BATCH), tl.arange(0, DEPTH)
    inside = b < batch
    drafted_len = tl.load(drafted_len_ptr + b, mask=inside, other=0)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + b, mask=inside, other=0).to(tl.int32)
    at = b[:, None] * (draft_len + 1) + k[None, :]
    is_row = inside[:, None] & (k <= draft_len)[None, :]
    tokens = tl.load(tokens_ptr + at, mask=is_row, other=0)  # the last token, then the drafts
    drafts = tl.load(tokens_ptr + at + 1, mask=inside[:, None] & (k < draft_len)[None, :], other=0)
    length = tl.load(length_ptr + slot, mask=inside, other=0)
    text = text_ptr + slot.to(tl.int64) * text_stride + length
    if TREE_DEPTH > 0:
        # walk from the root: to the child that holds what the target chose, as long as there is one
        choices = tl.load(choices_ptr + at, mask=is_row, other=-1)
        parents = tl.load(parents_ptr + at, mask=is_row, other=-2)
        row, accepted = tl.zeros([BATCH], tl.int32), tl.zeros([BATCH], tl.int32)
        before = tl.sum(tl.where(k[None, :] == 0, tokens, 0), 1)
        token = tl.sum(tl.where(k[None, :] == 0, choices, 0), 1)
        if KIND == 1:
            most = tl.load(forced_ptr + tl.load(counter_ptr) % period)
        for depth in range(TREE_DEPTH):
            is_child = (parents == row[:, None]) & is_row & (k > 0)[None, :]
            if KIND == 1:  # the first child stands in for the right one
                hit = tl.min(tl.where(is_child, k[None, :], DEPTH), 1)
                goes_on = (accepted < most) & (hit < DEPTH) & (accepted == depth)
            else:
                hit = tl.min(tl.where(is_child & (tokens == token[:, None]), k[None, :], DEPTH), 1)
                goes_on = (hit < DEPTH) & (accepted == depth)
            child = tl.sum(tl.where(k[None, :] == hit[:, None], tokens, 0), 1)
            tl.store(text + depth, child, mask=inside & goes_on)
            tl.store(path_ptr + b * TREE_DEPTH + depth, tl.where(goes_on, hit, 0), mask=inside)
            at_kept = kept_ptr + slot * TREE_DEPTH + depth
            tl.store(at_kept, tl.where(goes_on, hit, 0), mask=inside & (slot < scratch_slot))
            before = tl.where(goes_on, child, before)
            row = tl.where(goes_on, hit, row)
            accepted += goes_on.to(tl.int32)
            token = tl.where(goes_on, tl.sum(tl.where(k[None, :] == row[:, None], choices, 0), 1), token)
        tl.store(text + accepted, token, mask=inside)
    elif KIND == 2:
        accepted = tl.load(accepted_ptr + b, mask=inside, other=0).to(tl.int32)
        token = tl.load(token_ptr + b, mask=inside, other=0).to(tl.int32)
    else:
        choices = tl.load(choices_ptr + at, mask=is_row, other=0)
        if KIND == 1:
            counter = tl.load(counter_ptr)
            accepted = tl.zeros([BATCH], tl.int32) + tl.load(forced_ptr + counter % period)
        else:
            is_kept = (drafts == choices) & (k[None, :] < drafted_len[:, None]) & (k < draft_len)[None, :]
            accepted = tl.min(tl.where(is_kept, draft_len, k[None, :]), 1)
            accepted = tl.minimum(accepted, draft_len)
        token = tl.sum(tl.where(k[None, :] == accepted[:, None], choices, 0), 1)
    if TREE_DEPTH == 0:
        row = accepted
        before = tl.sum(tl.where(k[None, :] == accepted[:, None], tokens, 0), 1)
        emitted = tl.where(k[None, :] < accepted[:, None], drafts, token[:, None])
        tl.store(text[:, None] + k[None, :], emitted, mask=is_row & (k[None, :] <= accepted[:, None]))
    tl.store(row_ptr + slot, row, mask=inside & (slot < scratch_slot))
    tl.store(length_ptr + slot, length + accepted + 1, mask=inside & (slot < scratch_slot))
    tl.store(last_ptr + 2 * slot, before, mask=inside)
    tl.store(last_ptr + 2 * slot + 1, token, mask=inside)
    out = out_ptr + b * (draft_len + 2)
    tl.store(out, accepted, mask=inside)
    tl.store(out + 1, token, mask=inside)
    tl.store(out[:, None] + 2 + k[None, :], drafts, mask=inside[:, None] & (k < draft_len)[None, :])
    tl.store(counter_ptr, tl.load(counter_ptr) + 1)


def finish_round(
    slots, length, last, text, row, tokens, choices, drafted_len, forced, counter, out, *,
    decided=None, parents=None, path=None, kept=None, pdl: bool = False,
) -> None:  # fmt: skip
    """Accept, and move every sequence on.

    tokens int32 [B, K + 1]: last token and drafts. choices int32 [B, K + 1]: the target's. drafted_len int32 [B].
    forced int32 [period] or None: accepted drafts of round `counter` (int64 [1]). decided: (accepted, token after
    them) int64 [B] each, where sampling has settled that. Writes `out` int32 [B, K + 2] (accepted, token, drafts),
    appends to `text` int32 [slots, ...], and advances `length`, `last` and `counter`; `row` int32 [slots] becomes the
    row of the last accepted token. The last slot is scratch: its length, row and kept stay.

    A tree (`drafted_len` does not count): parents int32 [B, K + 1], of every row the row of its parent, the first -1,
    -2 for rows without a draft. path int32 [B, depth] gets the accepted rows, 0 behind them, and so does each slot's
    row of kept int32 [slots, depth].
    """
    batch, width = tokens.shape
    accepted, token = decided if decided is not None else (None, None)
    _finish_round_kernel[(1,)](
        slots, length, last, text, row, tokens, choices, drafted_len, forced, counter, accepted, token, parents, out,
        path, kept, batch, width - 1, text.stride(0), 1 if forced is None else forced.shape[0], length.shape[0] - 1,
        KIND=2 if decided is not None else 1 if forced is not None else 0,
        TREE_DEPTH=0 if parents is None else path.shape[1],
        BATCH=triton.next_power_of_2(batch), DEPTH=triton.next_power_of_2(width), PDL=pdl and not IS_INTERPRETED,
        num_warps=1, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _keep_path_kernel(
    cache_ptr, table_ptr, slots_ptr, starts_ptr, path_ptr, layer_stride, max_blocks,
    HALVES: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one sequence, one layer, one key or value head."""
    sequence, layer, half = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, DIM)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    table = table_ptr + tl.load(slots_ptr + sequence) * max_blocks
    start = tl.load(starts_ptr + sequence)
    base = cache_ptr + layer.to(tl.int64) * layer_stride + half * TOKENS * DIM
    for depth in range(DEPTH):
        row = tl.load(path_ptr + sequence * DEPTH + depth)
        if row > depth + 1:
            source, aim = start + row, start + depth + 1
            page = tl.load(table + source // TOKENS).to(tl.int64)
            vector = tl.load(base + page * (HALVES * TOKENS * DIM) + (source % TOKENS) * DIM + d)
            page = tl.load(table + aim // TOKENS).to(tl.int64)
            tl.store(base + page * (HALVES * TOKENS * DIM) + (aim % TOKENS) * DIM + d, vector)


def keep_path(cache, table, slots, starts, path, pdl: bool = False) -> None:
    """Move an accepted branch's keys and values to where a chain's would lie, in every layer, in place.

    cache [layers, pages, 2, kv_heads, PAGE, dim]; table int32 [slots, blocks]; slots, starts int32 [B]: the position of
    each sequence's root. path int32 [B, depth]: accepted rows behind the root, ascending, 0 behind the last; the
    d-th of them moves to position start + d + 1.
    """
    layers, _, two, kv_heads, tokens, dim = cache.shape
    _keep_path_kernel[(slots.shape[0], layers, two * kv_heads)](
        cache, table, slots, starts, path, cache.stride(0), table.shape[1],
        HALVES=two * kv_heads, TOKENS=tokens, DIM=dim, DEPTH=path.shape[1], PDL=pdl and not IS_INTERPRETED,
        num_warps=1, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _tree_rows_kernel(parents_ptr, mask_ptr, depth_ptr, rows, most, ROWS: tl.constexpr, PDL: tl.constexpr):
    """One program: one row, which walks to its root."""
    own = tl.program_id(0)
    parents, at = parents_ptr + own // rows * rows, own % rows
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    column = tl.arange(0, ROWS)
    seen, depth = (column == at).to(tl.int32), at * 0
    for _ in range(most):
        if at > 0:
            at = tl.maximum(tl.load(parents + at), -1)
            depth += (at >= 0).to(tl.int32)
        seen = tl.where(column == at, 1, seen)
    tl.store(mask_ptr + own * rows + column, seen.to(tl.int8), mask=column < rows)
    tl.store(depth_ptr + own, depth)


def tree_rows(parents, mask, depths, most: int, pdl: bool = False) -> None:
    """What attention takes of trees at most `most` deep, from parents int32 [B, rows] (see `finish_round`): mask int8
    [B * rows, rows] and depths int32 [B * rows]. A row without a draft sees itself, at depth 0."""
    batch, rows = parents.shape
    _tree_rows_kernel[(batch * rows,)](
        parents, mask, depths, rows, most, ROWS=triton.next_power_of_2(rows), PDL=pdl and not IS_INTERPRETED,
        num_warps=1, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _ranks(value, index, score_ptr, count, CHUNK: tl.constexpr):
    """How many of the `count` scores at score_ptr are better than each value: larger, or equal and before it."""
    found = tl.zeros([index.shape[0]], tl.int32)
    for start in range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        score = tl.load(score_ptr + other, mask=other < count, other=-float("inf"))
        is_before = (other < count)[None, :] & (other[None, :] < index[:, None])
        is_better = (score[None, :] > value[:, None]) | ((score[None, :] == value[:, None]) & is_before)
        found += tl.sum(is_better.to(tl.int32), 1)
    return found


@triton.jit(do_not_specialize=["found_stride", "first", "nodes", "count", "width", "span_in", "span_out"])
def _grow_tree_kernel(
    found_token_ptr, found_score_ptr, found_parent_ptr, fresh_ptr, row_ptr,
    number_in_ptr, sum_in_ptr, seen_in_ptr, number_out_ptr, sum_out_ptr, seen_out_ptr, word_ptr, behind_ptr,
    found_stride, first, nodes, count, width, span_in, span_out,
    HAS_BEAM: tl.constexpr, IS_LAST: tl.constexpr, COUNT: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the children of one sequence's beam."""
    b = tl.program_id(0)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    c = tl.arange(0, COUNT)
    inside = c < count
    node = b * nodes + tl.minimum(c, count - 1) // width
    at = b * found_stride + first + c
    score = tl.load(fresh_ptr + b * count + c, mask=inside, other=-float("inf")).to(tl.float64)
    parent = tl.zeros([COUNT], tl.int32) - 1
    if HAS_BEAM:
        score += tl.load(sum_in_ptr + node)
        parent = tl.load(number_in_ptr + node)
    tl.store(found_score_ptr + at, score, mask=inside)
    tl.store(found_parent_ptr + at, parent, mask=inside)
    if not IS_LAST:
        tl.debug_barrier()
        rank = _ranks(score, c, found_score_ptr + b * found_stride + first, count, 32)
        is_chosen = inside & (rank < width)
        place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        is_chosen = is_chosen & (place < width)  # NaN is no better than anything: then there may be more
        to = b * width + place
        tl.store(number_out_ptr + to, first + c, mask=is_chosen)
        tl.store(sum_out_ptr + to, score, mask=is_chosen)
        tl.store(word_ptr + to, tl.load(found_token_ptr + at, mask=inside, other=0), mask=is_chosen)
        tl.store(behind_ptr + to, tl.load(row_ptr + node), mask=is_chosen)
        column = tl.arange(0, SPAN)
        seen = (column[None, :] == (span_in + place)[:, None]).to(tl.int8)
        if HAS_BEAM:
            known = tl.load(
                seen_in_ptr + node[:, None] * span_in + column[None, :],
                mask=is_chosen[:, None] & (column < span_in)[None, :], other=0,
            )  # fmt: skip
            seen = tl.maximum(seen, known)
        inside_span = is_chosen[:, None] & (column < span_out)[None, :]
        tl.store(seen_out_ptr + to[:, None] * span_out + column[None, :], seen, mask=inside_span)


def grow_tree(found, first: int, fresh, rows, before: Beam | None, after: Beam | None, width: int, pdl=False) -> None:
    """Put the children of a beam among the candidates, and make the next beam of the `width` likeliest of them.

    found: a `Candidates`, whose tokens from `first` on are in place already. fresh float32 [B, nodes * width]: their
    log-probabilities behind their parents, parent by parent. rows int32 [B * nodes]: where the parents' outputs lie.
    before: the beam whose children they are; None for those of the root. after: the beam to make; None for the last.
    """
    batch, count = fresh.shape
    span_in = 0 if before is None else before.seen.shape[1]
    none = (None,) * 5
    _grow_tree_kernel[(batch,)](
        found.tokens, found.scores, found.parents, fresh, rows, *(before or none)[:3], *(after or none),
        found.tokens.shape[1], first, count // width, count, width, span_in, span_in + width,
        HAS_BEAM=before is not None, IS_LAST=after is None, COUNT=triton.next_power_of_2(count),
        SPAN=max(16, triton.next_power_of_2(span_in + width)), PDL=pdl and not IS_INTERPRETED, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _prune_tree_kernel(
    found_token_ptr, found_score_ptr, found_parent_ptr, row_ptr, token_ptr, parent_ptr,
    count, rows, token_stride,
    COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one sequence."""
    b = tl.program_id(0)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    c = tl.arange(0, COUNT)
    inside = c < count
    at = b * count + c
    score = tl.load(found_score_ptr + at, mask=inside, other=-float("inf"))
    rank = _ranks(score, c, found_score_ptr + b * count, count, 32)
    is_kept = inside & (rank < rows - 1)
    row = tl.cumsum(is_kept.to(tl.int32), 0)
    is_kept = is_kept & (row < rows)
    tl.store(row_ptr + at, tl.where(is_kept, row, 0), mask=inside)
    tl.debug_barrier()
    parent = tl.load(found_parent_ptr + at, mask=inside, other=-1)
    parent_row = tl.load(row_ptr + b * count + tl.maximum(parent, 0), mask=inside & (parent >= 0), other=0)
    tl.store(token_ptr + b * token_stride + row, tl.load(found_token_ptr + at, mask=inside, other=0), mask=is_kept)
    tl.store(parent_ptr + b * rows + row, parent_row, mask=is_kept)
    tl.store(parent_ptr + b * rows, -1)


def prune_tree(found, tokens, parents, pdl: bool = False) -> None:
    """The likeliest K of the candidates become the drafts, in their order: tokens int32 [B, K + 1] behind its first
    column, parents int32 [B, K + 1] as `finish_round` takes them. A candidate comes after its parent and is never
    likelier, so what is left is a tree."""
    batch, count = found.tokens.shape
    row = torch.empty(batch, count, device=tokens.device, dtype=torch.int32)
    _prune_tree_kernel[(batch,)](
        found.tokens, found.scores, found.parents, row, tokens, parents, count, tokens.shape[1], tokens.stride(0),
        COUNT=triton.next_power_of_2(count), PDL=pdl and not IS_INTERPRETED, num_warps=8, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _gather_pairs_kernel(
    slots_ptr, length_ptr, row_ptr, kept_ptr, text_ptr, feature_ptr, first_ptr, last_ptr, word_ptr, out_ptr,
    slot_rows, text_stride, width, kept_depth,
    PAIRS: tl.constexpr, IS_TREE: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one pair of one sequence."""
    b, pair = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + b)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    length = tl.load(length_ptr + slot)
    if IS_TREE:
        d = tl.arange(0, DEPTH)
        kept = tl.load(kept_ptr + slot * kept_depth + d, mask=d < kept_depth, other=0)
        accepted = tl.sum((kept > 0).to(tl.int32), 0)
        row = tl.sum(tl.where(d == pair - 1, kept, 0), 0)
    else:
        accepted = tl.load(row_ptr + slot)
        row = pair
    first = length - 2 - accepted
    if pair == 0:
        tl.store(first_ptr + b, first)
        tl.store(last_ptr + b, b * PAIRS + accepted)
    tl.store(word_ptr + b * PAIRS + pair, tl.load(text_ptr + slot * text_stride + first + 1 + pair))
    for at in range(0, width, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(feature_ptr + (slot * slot_rows + row) * width + i, mask=i < width, other=0.0)
        tl.store(out_ptr + (b * PAIRS + pair).to(tl.int64) * width + i, x, mask=i < width)


def gather_pairs(slots, length, row, kept, text, features, slot_rows: int, pairs: int, pdl: bool = False):
    """What a head that reads features makes of the last verification: (first, last int32 [B], words int32
    [B * pairs], features bf16 [B * pairs, W]).

    slots int64 [B]; length int32 [slots], text int32 [slots, ...]; features bf16 [any, W], those of a slot from row
    slot * slot_rows on. Pair i of a sequence joins the features of the i-th row that was accepted, the root the 0th,
    with the token after it; it stands at position first + i. The last true one is number `last` of all; those behind
    it are made of guesses. A chain accepted rows 1 … row (int32 [slots]); a tree those in kept (int32 [slots, depth],
    0 behind the last), which is None for a chain.
    """
    batch, width, device = slots.shape[0], features.shape[1], features.device
    first, last, words = (torch.empty(n, device=device, dtype=torch.int32) for n in (batch, batch, batch * pairs))
    out = torch.empty(batch * pairs, width, device=device, dtype=features.dtype)
    depth = 1 if kept is None else kept.shape[1]
    _gather_pairs_kernel[(batch, pairs)](
        slots, length, row, kept, text, features, first, last, words, out, slot_rows, text.stride(0), width, depth,
        PAIRS=pairs, IS_TREE=kept is not None, DEPTH=triton.next_power_of_2(depth),
        BLOCK=min(4096, triton.next_power_of_2(width)), PDL=pdl and not IS_INTERPRETED, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    return first, last, words, out


@triton.jit
def _match_ngram_kernel(
    slots_ptr, length_ptr, text_ptr, tokens_ptr, drafted_len_ptr, stop_ptr, draft_len, text_stride, stops,
    SIZE: tl.constexpr, IS_OLDEST: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one sequence. Place p is worth the number of tokens before it that equal the text's last ones."""
    b = tl.program_id(0)
    slot = tl.load(slots_ptr + b)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    text = text_ptr + slot.to(tl.int64) * text_stride
    length = tl.load(length_ptr + slot)
    best, place = length * 0, length * 0
    for at in range(1, length, BLOCK):
        p = at + tl.arange(0, BLOCK)
        matched = tl.zeros([BLOCK], tl.int32)
        for j in tl.static_range(SIZE):
            own = tl.load(text + p - 1 - j, mask=(p - 1 - j >= 0) & (p < length), other=-1)
            end = tl.load(text + tl.maximum(length - 1 - j, 0))  # shorter texts: no place is that far in either
            matched += ((own == end) & (matched == j)).to(tl.int32)
        top = tl.max(matched, 0)
        if IS_OLDEST:
            first = tl.min(tl.where(matched == top, p, 2147483647), 0)
            is_better = top > best
        else:
            first = tl.max(tl.where(matched == top, p, 0), 0)
            is_better = (top >= best) & (top > 0)
        place = tl.where(is_better, first, place)
        best = tl.where(is_better, top, best)
    k = tl.arange(0, DEPTH)
    ends = tl.where(best > 0, draft_len, 0)
    is_draft = k < ends
    span = tl.maximum(length - place, 1)  # what follows the place; drafts that outrun the text begin it again
    drafts = tl.load(text + place + k % span, mask=is_draft, other=0)
    for i in range(stops):  # never proposed: copied out of a chat history they would only be rejected
        stop = tl.load(stop_ptr + i)
        ends = tl.minimum(ends, tl.min(tl.where((drafts == stop) & is_draft, k, draft_len), 0))
    tl.store(tokens_ptr + b * (draft_len + 1) + 1 + k, drafts, mask=k < draft_len)
    tl.store(drafted_len_ptr + b, ends)


def match_ngram(
    slots, length, text, tokens, drafted_len, stop_ids, size: int, is_oldest: bool, pdl: bool = False
) -> None:
    """Prompt lookup: the longest n-gram, up to `size`, that ends the text and occurred before; what followed it there.

    slots int64 [B]; length int32 [slots] and text int32 [slots, ...]. Writes the drafts behind the first column of
    tokens int32 [B, K + 1] and how many count into drafted_len int32 [B]: none without a match, and none from one of
    stop_ids int32 [any] on. is_oldest: of equally long matches the first in the text, else the latest.
    """
    k = tokens.shape[1] - 1
    _match_ngram_kernel[(slots.shape[0],)](
        slots, length, text, tokens, drafted_len, stop_ids, k, text.stride(0), stop_ids.shape[0],
        SIZE=size, IS_OLDEST=is_oldest, BLOCK=1024, DEPTH=triton.next_power_of_2(max(k, 1)),
        PDL=pdl and not IS_INTERPRETED, num_warps=4, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _stamp_kernel(out_ptr):
    tl.store(out_ptr, tl_cuda.globaltimer())


def stamp(out: torch.Tensor) -> None:
    """Write the GPU's clock (nanoseconds, int64) into `out` [1] when everything before it on the stream has run."""
    _stamp_kernel[(1,)](out, num_warps=1)
