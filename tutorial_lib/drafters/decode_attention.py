"""One query token per row against that row's own past, in Triton: what decoding thousands of uneven rows needs.

Imported on a CUDA device only (see `corpus.BatchDecoder`). Query heads that share a key head are rows of one small
matrix product, so each key and value is read once; softmax is taken online over blocks of positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _attend(
    q, k, v, out, lengths, scale, room, KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row)
    group, dims = tl.arange(0, 16), tl.arange(0, D)
    here = (row * KV + head) * G * D + group[:, None] * D + dims[None, :]
    query = tl.load(q + here, mask=group[:, None] < G, other=0.0)
    past = (row * KV + head) * room * D
    best = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = past + at[:, None] * D + dims[None, :]
        is_past = at < length
        keys = tl.load(k + place, mask=is_past[:, None], other=0.0)
        scores = tl.where(is_past[None, :], tl.dot(query, tl.trans(keys)) * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + place, mask=is_past[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        best = higher
    tl.store(out + here, (acc / total[:, None]).to(out.dtype.element_ty), mask=group[:, None] < G)


def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """q [rows, kv_heads, group, D]; k, v [rows, kv_heads, room, D], of which row r has filled lengths[r] >= 1
    positions (int32 [rows]). All bf16 and contiguous, group <= 16. Returns [rows, kv_heads, group, D]."""
    rows, kv_heads, group, head_dim = q.shape
    if group > 16 or not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        raise ValueError(f"contiguous tensors and at most 16 query heads per key head are needed, not {q.shape}")
    out = torch.empty_like(q)
    scale = head_dim**-0.5 * 1.4426950408889634  # exp2 instead of exp
    _attend[(rows, kv_heads)](
        q, k, v, out, lengths, scale, k.shape[2], KV=kv_heads, G=group, D=head_dim, BLOCK=64, num_warps=2
    )
    return out
