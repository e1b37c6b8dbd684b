"""The functions of `kernels.py` in plain torch: what each kernel is tested against, and what runs in its place when it
is switched off by name. Same arguments, same results up to rounding; any device; free to be slow."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .device_sampling import accept_greedy

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
PAGE = 64  # tokens per block of the KV cache, and per attention tile


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, saturated to the range of e4m3 and rounded."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def linear(x, x_scale, weight, weight_scale, tactic=None, pdl=False) -> torch.Tensor:
    out = x.float() @ weight.float().t()
    if weight_scale is not None:
        out = out * x_scale[: x.shape[0], None] * weight_scale[None, :]
    return out[None]


def gate_up(x, x_scale, weight, weight_scale, out_scale, tactic=None, pdl=False) -> torch.Tensor:
    gate, up = linear(x, x_scale, weight, weight_scale)[0].chunk(2, -1)
    hidden = F.silu(gate) * up
    return hidden.to(torch.bfloat16) if out_scale is None else to_fp8(hidden, out_scale)


def add_norm(residual, parts, weight, eps, scale, is_quantized, pdl=False):
    x = residual.float()
    if parts is not None:
        x = (x + parts.sum(0)).to(torch.bfloat16).float()
        residual.copy_(x)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    if not is_quantized:
        return x.to(torch.bfloat16), None
    scales = scale.expand(x.shape[0]) if scale is not None else x.abs().amax(-1).clamp_min(1e-6) / FP8_MAX
    return to_fp8(x, scales[:, None]), scales.contiguous()


def embed_norm(tokens, embed, weight, eps, scale, is_quantized, pdl=False):
    residual = F.embedding(tokens, embed)
    return residual, *add_norm(residual, None, weight, eps, scale, is_quantized)


def quantize_rows(x, pdl=False):
    scales = x.float().abs().amax(-1).clamp_min(1e-6) / FP8_MAX
    return to_fp8(x, scales[:, None]), scales


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., rows, heads, dim] by angles [rows, dim / 2]: halves (a, b) become (a cos - b sin, b cos + a sin)."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(
    parts, layer, cache, block_table, lengths, slots, rows, max_positions, scratch, out_scale, *, tree=None, pdl=False
) -> torch.Tensor:
    config = layer.config
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    sequences = lengths.shape[0]
    qkv = parts.sum(0)
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias.float()
    qkv = qkv.view(sequences, rows, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 2)
    if layer.q_norm is not None:
        q = F.rms_norm(q, (dim,), layer.q_norm.float(), config.rms_norm_eps)
        k = F.rms_norm(k, (dim,), layer.k_norm.float(), config.rms_norm_eps)
    index = torch.arange(rows, device=parts.device)
    depth = index.expand(sequences, rows) if tree is None else tree[1].view(sequences, rows).long()
    where = lengths[:, None].long() + depth
    cos, sin = layer.cos[where], layer.sin[where]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if layer.kv_scale is not None:
        k, v = to_fp8(k, layer.kv_scale[0]), to_fp8(v, layer.kv_scale[1])
    at = lengths[:, None].long() + index
    pages = block_table[slots.long()[:, None], at // PAGE].long()
    cache[pages, 0, :, at % PAGE] = k.to(cache.dtype)
    cache[pages, 1, :, at % PAGE] = v.to(cache.dtype)

    blocks = min(-(-max_positions // PAGE), block_table.shape[1])
    held = cache[block_table[slots.long(), :blocks].long()].float()  # [sequences, blocks, 2, kv, PAGE, dim]
    held = held.permute(2, 0, 3, 1, 4, 5).reshape(2, sequences, kv_heads, blocks * PAGE, dim)
    position = torch.arange(blocks * PAGE, device=parts.device)
    offset = position[None, :] - lengths[:, None]
    if tree is None:
        seen = position[None, None, :] <= at[:, :, None]
    else:
        inside = (offset >= 0) & (offset < rows)
        chosen = offset.clamp(0, rows - 1).long()[:, None, :].expand(sequences, rows, -1)
        allowed = tree[0].view(sequences, rows, rows).gather(2, chosen) != 0
        seen = (offset < 0)[:, None, :] | (inside[:, None, :] & allowed)
    if config.sliding_window is not None:
        seen = seen & (position[None, None, :] > where[:, :, None] - config.sliding_window)
    held = held.masked_fill(~(position < lengths[:, None] + rows)[None, :, None, :, None], 0.0)
    if layer.kv_scale is not None:
        held = held * layer.kv_scale.view(2, 1, 1, 1, 1)
    k_all, v_all = (x.repeat_interleave(heads // kv_heads, 1) for x in held)
    q = (q.transpose(1, 2) * dim**-0.5).to(torch.bfloat16).float()
    scores = (q @ k_all.to(torch.bfloat16).float().transpose(-1, -2)).masked_fill(~seen[:, None], -1e30)
    out = torch.softmax(scores, -1) @ v_all
    out = out.transpose(1, 2).reshape(sequences * rows, heads * dim)
    return out.to(torch.bfloat16) if out_scale is None else to_fp8(out, out_scale)


def argmax(logits, out, pdl=False, *, ids=None, damage=None) -> None:
    best, where = logits.nan_to_num(torch.inf, torch.inf, -torch.inf).max(-1)
    out.copy_(where if ids is None else ids[where])
    if damage is not None:
        damage |= best.isinf().view(damage.shape[0], -1).any(-1).int()


def begin_round(slots, length, last, slots_out, starts, tokens, pair, damage, common, pdl=False) -> None:
    damage.zero_()
    slots_out.copy_(slots)
    starts.copy_(length[slots] - 2 + torch.arange(starts.shape[0], dtype=torch.int32, device=starts.device)[:, None])
    tokens[:, 0] = last[slots, 1]
    pair.copy_(torch.where(last[slots] < common, last[slots], 0))


def finish_round(
    slots, length, last, text, tokens, choices, drafted_len, forced, counter, out, *, decided=None, pdl=False
) -> None:
    drafts, at = tokens[:, 1:], torch.arange(tokens.shape[1], device=tokens.device)
    if decided is not None:
        accepted, token = decided
    else:
        accepted = accept_greedy(drafts, choices, drafted_len)
        if forced is not None:
            accepted = forced[counter % forced.shape[0]].long().expand(tokens.shape[0])
        token = choices.gather(1, accepted[:, None])[:, 0]
    out[:, 0], out[:, 1], out[:, 2:] = accepted.int(), token.int(), drafts
    emitted = torch.where(at < accepted[:, None], torch.cat([drafts, tokens[:, :1]], 1), token.int()[:, None])
    where = length[slots].long()[:, None] + at
    rows = slots[:, None].expand_as(where)
    text[rows, where] = torch.where(at <= accepted[:, None], emitted, text[rows, where])
    before = tokens.gather(1, accepted[:, None])[:, 0]
    is_real = slots < length.shape[0] - 1
    length[slots] += torch.where(is_real, accepted + 1, 0).int()
    last[slots] = torch.stack([before, token.int()], 1)
    counter += 1
