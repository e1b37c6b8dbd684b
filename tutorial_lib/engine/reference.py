"""The functions of `kernels.py` in plain torch: what each kernel is tested against, and what runs in its place when it
is switched off by name. Same arguments, same results up to rounding; any device; free to be slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True)
class Tap:
    """Where a norm leaves a copy: row i of its residual (`is_normed`: of its result) in bf16 goes to out[rows[i]].

    out: bf16 [any, width], any row stride. rows: int32 [rows].
    """

    out: torch.Tensor
    rows: torch.Tensor
    is_normed: bool = False


class Candidates(NamedTuple):
    """All nodes that a growing tree may come to have, in the order they were found, [B, count] each. tokens int32;
    scores float64, the log-probability of the whole path; parents int32, the number of another candidate, -1 the
    root."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


class Beam(NamedTuple):
    """The nodes of one depth that the layer runs next. numbers int32 [B, width]: which candidates they are; sums
    float64 [B, width]: their scores. seen int8 [B * width, span]: which of the nodes that were run, these the last of
    them, are on the path of each. words int32 [B * width]: their tokens; behind int32 [B * width]: where the output of
    each one's parent lies."""

    numbers: torch.Tensor
    sums: torch.Tensor
    seen: torch.Tensor
    words: torch.Tensor
    behind: torch.Tensor


def add_norm(residual, parts, weight, eps, scale, is_quantized, pdl=False, *, out=None, tap=None):
    x = residual.float()
    if parts is not None:
        x = (x + parts.sum(0)).to(torch.bfloat16).float()
        residual.copy_(x)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    if tap is not None:
        tap.out[tap.rows] = (normed if tap.is_normed else x).to(torch.bfloat16)
    x, scales = normed, None
    if is_quantized:
        scales = scale.expand(x.shape[0]) if scale is not None else x.abs().amax(-1).clamp_min(1e-6) / FP8_MAX
        x, scales = to_fp8(x, scales[:, None]), scales.contiguous()
    result = x if is_quantized else x.to(torch.bfloat16)
    return (result if out is None else out.copy_(result)), scales


def embed_norm(tokens, embed, weight, eps, scale, is_quantized, pdl=False, *, out=None, tap=None, places=None):
    residual = F.embedding(tokens if places is None else tokens[places], embed)
    return residual, *add_norm(residual, None, weight, eps, scale, is_quantized, out=out, tap=tap)


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
        span = tree[0].shape[1]
        offset = offset + span - rows
        inside = (offset >= 0) & (offset < span)
        chosen = offset.clamp(0, span - 1).long()[:, None, :].expand(sequences, rows, -1)
        allowed = tree[0].view(sequences, rows, span).gather(2, chosen) != 0
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


def top_tokens(logits, out, source, ranks, pdl=False, *, ids=None, scores=None) -> None:
    values = logits.nan_to_num(torch.inf, torch.inf, -torch.inf)
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :ranks]
    tokens = (order if ids is None else ids[order]).flatten(1)
    at = source.clamp_min(0).long()
    out.copy_(torch.where(source >= 0, tokens[:, at].int(), out))
    if scores is not None:
        found = torch.log_softmax(logits, -1).gather(-1, order).flatten(1)
        scores.copy_(torch.where(source >= 0, found[:, at], scores))


def begin_round(slots, length, last, slots_out, starts, tokens, pair, damage, common, pdl=False) -> None:
    damage.zero_()
    slots_out.copy_(slots)
    starts.copy_(length[slots] - 2 + torch.arange(starts.shape[0], dtype=torch.int32, device=starts.device)[:, None])
    tokens[:, 0] = last[slots, 1]
    pair.copy_(torch.where(last[slots] < common, last[slots], 0))


def finish_round(
    slots, length, last, text, row, tokens, choices, drafted_len, forced, counter, out, *,
    decided=None, parents=None, path=None, kept=None, pdl=False,
) -> None:  # fmt: skip
    drafts, at = tokens[:, 1:], torch.arange(tokens.shape[1], device=tokens.device)
    most = None if forced is None else forced[counter % forced.shape[0]].long().expand(tokens.shape[0])
    if parents is not None:
        accepted, rows = _walk(tokens, choices, parents, path, most)
        kept[slots] = torch.where((slots < length.shape[0] - 1)[:, None], path, kept[slots])
        ends = rows.gather(1, accepted[:, None])
        emitted = torch.cat([tokens.gather(1, rows[:, 1:]), tokens[:, :1]], 1)
        token, before = choices.gather(1, ends)[:, 0], tokens.gather(1, ends)[:, 0]
        ended = ends[:, 0]
    else:
        if decided is not None:
            accepted, token = decided
        else:
            accepted = accept_greedy(drafts, choices, drafted_len) if most is None else most
            token = choices.gather(1, accepted[:, None])[:, 0]
        before, emitted = tokens.gather(1, accepted[:, None])[:, 0], torch.cat([drafts, tokens[:, :1]], 1)
        ended = accepted
    out[:, 0], out[:, 1], out[:, 2:] = accepted.int(), token.int(), drafts
    at = at[: emitted.shape[1]]
    emitted = torch.where(at < accepted[:, None], emitted, token.int()[:, None])
    where = length[slots].long()[:, None] + at
    owner = slots[:, None].expand_as(where)
    text[owner, where] = torch.where(at <= accepted[:, None], emitted, text[owner, where])
    is_real = slots < length.shape[0] - 1
    row[slots] = torch.where(is_real, ended.int(), row[slots])
    length[slots] += torch.where(is_real, accepted + 1, 0).int()
    last[slots] = torch.stack([before, token.int()], 1)
    counter += 1


def _walk(tokens, choices, parents, path, most):
    """From the root down a tree, into `path`; `most`: that far along first children instead, if acceptance is forced.
    Returns how far [B], and the rows walked over [B, depth + 1] (int64, the root first)."""
    batch, count = tokens.shape
    index = torch.arange(count, device=tokens.device)
    rows = torch.zeros(batch, path.shape[1] + 1, dtype=torch.long, device=tokens.device)
    accepted = torch.zeros(batch, dtype=torch.long, device=tokens.device)
    for depth in range(path.shape[1]):
        here = rows[:, depth]
        is_hit = (parents == here[:, None]) & (index > 0)
        if most is None:
            is_hit &= tokens == choices.gather(1, here[:, None])
        else:
            is_hit &= (depth < most)[:, None]
        first = torch.where(is_hit, index, count).amin(1)
        goes_on = (first < count) & (accepted == depth)
        rows[:, depth + 1] = torch.where(goes_on, first, 0)
        accepted = accepted + goes_on
    path.copy_(rows[:, 1:])
    return accepted, rows


def keep_path(cache, table, slots, starts, path, pdl=False) -> None:
    for depth in range(path.shape[1]):
        row = path[:, depth].long()
        aim = starts.long() + depth + 1
        source = torch.where(row > depth + 1, starts.long() + row, aim)
        pages = [table[slots.long(), at // PAGE].long() for at in (source, aim)]
        cache[:, pages[1], :, :, aim % PAGE] = cache[:, pages[0], :, :, source % PAGE]


def tree_rows(parents, mask, depths, most, pdl=False) -> None:
    batch, rows = parents.shape
    index = torch.arange(rows, device=parents.device)
    at = index.repeat(batch, 1)
    seen, depth = at[..., None] == index, torch.zeros_like(at)
    for _ in range(most):
        at = torch.where(at > 0, parents.gather(1, at.clamp_min(0)).long(), -1)
        depth += at >= 0
        seen |= at[..., None] == index
    depths.copy_(depth.view(-1))
    mask.copy_(seen.view(batch * rows, rows))


def grow_tree(found, first, fresh, rows, before, after, width, pdl=False) -> None:
    batch, count = fresh.shape
    node = torch.arange(count, device=fresh.device) // width
    own = slice(first, first + count)
    found.scores[:, own] = fresh.double() if before is None else before.sums[:, node] + fresh.double()
    found.parents[:, own] = -1 if before is None else before.numbers[:, node]
    if after is None:
        return
    best = found.scores[:, own].sort(dim=1, descending=True, stable=True).indices[:, :width].sort(dim=1).values
    after.numbers.copy_(first + best)
    after.sums.copy_(found.scores[:, own].gather(1, best))
    after.words.copy_(found.tokens[:, own].gather(1, best).view(-1))
    after.behind.copy_(rows.view(batch, -1)[:, node].gather(1, best).view(-1))
    itself = torch.eye(width, dtype=torch.int8, device=fresh.device).repeat(batch, 1)
    if before is None:
        after.seen.copy_(itself)
    else:
        seen = before.seen.view(batch, width, -1).gather(1, node[best][..., None].expand(-1, -1, before.seen.shape[1]))
        after.seen.copy_(torch.cat([seen.flatten(0, 1), itself], 1))


def prune_tree(found, tokens, parents, pdl=False) -> None:
    count = tokens.shape[1] - 1
    kept = found.scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    rows = torch.arange(1, count + 1, dtype=torch.int32, device=tokens.device).expand_as(kept)
    row_of = torch.zeros_like(found.parents).scatter_(1, kept, rows)
    parent = found.parents.gather(1, kept).long()
    tokens[:, 1:] = found.tokens.gather(1, kept)
    parents[:, 0] = -1
    parents[:, 1:] = torch.where(parent < 0, 0, row_of.gather(1, parent.clamp_min(0)))


def gather_pairs(slots, length, row, kept, text, features, slot_rows, pairs, pdl=False):
    steps = torch.arange(pairs, device=slots.device)
    rows = steps.expand(slots.shape[0], pairs)
    accepted = row[slots]
    if kept is not None:
        accepted = (kept[slots] > 0).sum(1).int()
        rows = F.pad(kept[slots], (1, 0))[:, :pairs]
    first = length[slots] - 2 - accepted
    words = text[slots].gather(1, first[:, None].long() + 1 + steps)
    last = (torch.arange(slots.shape[0], device=slots.device) * pairs + accepted).int()
    return first, last, words.view(-1), features[(slots[:, None] * slot_rows + rows).view(-1)]


def match_ngram(slots, length, text, tokens, drafted_len, stop_ids, size, is_oldest, pdl=False) -> None:
    k, positions = tokens.shape[1] - 1, torch.arange(text.shape[1], device=text.device)
    own, count = text[slots], length[slots].long()
    matched = torch.zeros_like(own)
    for j in range(size):
        end = own.gather(1, (count - 1 - j).clamp_min(0)[:, None])
        before = own.roll(j + 1, 1)
        is_same = (before == end) & (positions > j) & (positions < count[:, None]) & (count > j)[:, None]
        matched += is_same & (matched == j)
    best = matched.amax(1)
    order = positions if not is_oldest else -positions
    place = torch.where(matched == best[:, None], order, -(2**31)).amax(1).abs()
    span = (count - place).clamp_min(1)
    steps = torch.arange(k, device=text.device)
    drafts = own.gather(1, (place[:, None] + steps % span[:, None]).clamp(max=text.shape[1] - 1))
    drafts = torch.where(best[:, None] > 0, drafts, 0)
    is_stop = (drafts[..., None] == stop_ids).any(-1) if k else drafts.bool()
    ends = torch.where(is_stop, steps, k).amin(1) if k else count * 0
    tokens[:, 1:] = drafts
    drafted_len.copy_(torch.where(best > 0, ends, 0))
