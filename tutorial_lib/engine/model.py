"""One decoder for the Llama family: configuration, packed weights, and the forward pass over ragged rows.

A forward takes rows, not a padded batch: every active sequence contributes the tokens it needs now (a whole prompt,
one token, or K + 1 tokens to verify), the matrix products run over all rows together and attention runs per sequence
against that sequence's own cache. Sequences of different lengths therefore never see each other.

A sequence's rows may form a tree (several continuations of one text in a single pass): a row then stands at the depth
of its branch and sees the text and its own ancestors only. A chain is the tree without branches.

Packing (done once, by `build`) fuses q, k, v and gate, up, and interleaves each head's rotary pairs so that rotation
is one complex multiplication. Follows `transformers`' Llama, Qwen2 (bias), Qwen3 (q/k norm) and Mistral (window);
rope scaling "llama3" as in Meta's Llama 3.1. Knows nothing of drafting and acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import ModelError, OptionError

PREFILL_CHUNK = 512  # rows per prefill pass: bounds the attention mask's memory
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model, read from a Hugging Face `config.json`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    sliding_window: int | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config as transformers 4.57 (`rope_theta`, `rope_scaling`) or 5.x (`rope_parameters`) writes it.

        Raises `ModelError` for an architecture, activation or rope type that this engine does not compute.
        """
        architecture = (config.get("architectures") or ["?"])[0]
        if architecture not in ARCHITECTURES:
            raise ModelError(f"the model is a {architecture}", f"one of {', '.join(ARCHITECTURES)}")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act is {config['hidden_act']!r}", "'silu'")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ModelError(f"rope type is {kind!r}", "'default' or 'llama3'")
        heads = config["num_attention_heads"]
        return cls(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
            rope_theta=theta,
            rope_scaling=rope if kind == "llama3" else None,
            max_position_embeddings=config.get("max_position_embeddings") or 2048,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            sliding_window=_sliding_window(config, architecture),
        )

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    """The window that every layer attends through, None without one; `ModelError` if only some layers have it."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    is_qwen = architecture.startswith("Qwen")
    if architecture == "LlamaForCausalLM" or window is None or (is_qwen and not config.get("use_sliding_window")):
        return None
    kinds = config.get("layer_types")
    if kinds is not None:
        windowed = sum(kind == "sliding_attention" for kind in kinds)
    else:
        windowed = max(0, layers - config.get("max_window_layers", 28)) if is_qwen else layers
    if 0 < windowed < layers:
        raise ModelError(f"{windowed} of {layers} layers have a sliding window", "all of them or none")
    return window if windowed else None


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Rotary inverse frequencies, float32 [head_dim / 2], with llama3 scaling where the config has it.

    llama3: wavelengths longer than original / low_freq_factor are divided by `factor`, those shorter than
    original / high_freq_factor are kept, and between the two the divisor is blended linearly.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponent
    if config.rope_scaling is None:
        return inv_freq
    scaling = config.rope_scaling
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / factor


def rotary_table(config: ModelConfig, positions: int) -> torch.Tensor:
    """complex64 [positions, 1, head_dim / 2]: unit rotations by position times inverse frequency."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(config))
    return torch.polar(torch.ones_like(angles), angles)[:, None, :]


# ---------------------------------------------------------------------------------------------------------- packing


def pack(
    tensors: Mapping[str, torch.Tensor],
    config: ModelConfig,
    head_ids: torch.Tensor | None = None,
    *,
    is_interleaved: bool = True,
) -> dict:
    """Fuse and reorder a checkpoint's tensors into the engine's own names.

    Returns `embed` [V, H], `head` [V or len(head_ids), H] (absent if it is the embedding itself), `norm` [H] and for
    every layer `L.qkv`, `L.o`, `L.gate_up`, `L.down`, `L.input_norm`, `L.post_norm`, with `.bias`, `L.q_norm`,
    `L.k_norm` where the checkpoint has them. `head_ids` keeps only those rows of the output head (a drafter's
    shortlist). `is_interleaved` puts rotary pairs side by side, as `Model` wants them; `GpuModel` keeps the halves.
    A missing tensor is a `ModelError` naming it.
    """

    def get(name: str) -> torch.Tensor:
        if name not in tensors:
            raise ModelError(f"the checkpoint has no tensor {name}", "every weight its config names")
        return tensors[name]

    embed = get("model.embed_tokens.weight")
    packed = {"embed": embed, "norm": get("model.norm.weight")}
    head = embed if config.tie_word_embeddings else get("lm_head.weight")
    if head_ids is not None:
        if int(head_ids.min()) < 0 or int(head_ids.max()) >= head.shape[0]:
            raise ModelError(
                f"draft_vocab reaches from {int(head_ids.min())} to {int(head_ids.max())}",
                f"ids from 0 to {head.shape[0] - 1}, the rows of the output head",
            )
        packed["head"] = head[head_ids].contiguous()
    elif not config.tie_word_embeddings:
        packed["head"] = head
    pair = _interleave if is_interleaved else _keep
    for i in range(config.num_layers):
        packed |= {f"{i}.{name}": t for name, t in _pack_layer(get, tensors, f"model.layers.{i}.", config, pair)}
    return packed


def _pack_layer(
    find: Callable[[str], torch.Tensor], tensors: Mapping, prefix: str, config: ModelConfig, pair: Callable
) -> list:
    heads, kv_heads = config.num_heads, config.num_kv_heads

    def get(name: str) -> torch.Tensor:
        return find(prefix + name)

    def fused_qkv(suffix: str) -> torch.Tensor:
        return torch.cat(
            [
                pair(get("self_attn.q_proj." + suffix), heads, config.head_dim),
                pair(get("self_attn.k_proj." + suffix), kv_heads, config.head_dim),
                get("self_attn.v_proj." + suffix),
            ]
        )

    out = [
        ("qkv", fused_qkv("weight")),
        ("o", get("self_attn.o_proj.weight")),
        ("gate_up", torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])),
        ("down", get("mlp.down_proj.weight")),
        ("input_norm", get("input_layernorm.weight")),
        ("post_norm", get("post_attention_layernorm.weight")),
    ]
    if prefix + "self_attn.q_proj.bias" in tensors:
        out.append(("qkv.bias", fused_qkv("bias")))
    if prefix + "self_attn.o_proj.bias" in tensors:
        out.append(("o.bias", get("self_attn.o_proj.bias")))
    if prefix + "mlp.down_proj.bias" in tensors:
        out.append(("gate_up.bias", torch.cat([get("mlp.gate_proj.bias"), get("mlp.up_proj.bias")])))
        out.append(("down.bias", get("mlp.down_proj.bias")))
    if config.architecture == "Qwen3ForCausalLM":
        out += [(f"{x}_norm", pair(get(f"self_attn.{x}_norm.weight"), 1, config.head_dim)) for x in "qk"]
    return out


def _keep(weight: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    return weight


def _interleave(weight: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """Reorder each head's rows from (first half, second half) to adjacent pairs: row i + D/2 moves beside row i."""
    pairs = torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)
    shape = weight.shape
    return weight.reshape(heads, head_dim, -1)[:, pairs.to(weight.device)].reshape(shape)


# ---------------------------------------------------------------------------------------------------------- forward


@dataclass(frozen=True)
class Segment:
    """`rows` consecutive rows of a forward that belong to `slot`; their keys and values go to cache rows `start` …
    `start + rows - 1`, in order.

    parents: None for a chain, each row of which follows the one before. For a tree an entry for every row but the
    first, the root: row i + 1 follows row `parents[i] + 1`, an earlier one (-1 is the root).
    """

    slot: int
    start: int
    rows: int
    parents: tuple[int, ...] | None = None

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How far behind the first row each one stands: its position is `start` + depth."""
        if self.parents is None:
            return tuple(range(self.rows))
        found = [0]
        for parent in self.parents:
            found.append(found[parent + 1] + 1)
        return tuple(found)

    def visible(self) -> torch.Tensor:
        """bool [rows, rows]: which rows of the segment a row sees, its ancestors and itself."""
        if self.parents is None:
            return torch.ones(self.rows, self.rows, dtype=torch.bool).tril_()
        seen = np.eye(self.rows, dtype=bool)
        for i, parent in enumerate(self.parents):
            seen[i + 1] |= seen[parent + 1]
        return torch.from_numpy(seen)


Linear = Callable[[torch.Tensor], torch.Tensor]


class DecoderLayer(NamedTuple):
    """What one layer computes with."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


def _layer(i: int, linears: Mapping[str, Linear], vectors: Mapping[str, torch.Tensor]) -> DecoderLayer:
    return DecoderLayer(
        linears[f"{i}.qkv"],
        linears[f"{i}.o"],
        linears[f"{i}.gate_up"],
        linears[f"{i}.down"],
        vectors[f"{i}.input_norm"],
        vectors[f"{i}.post_norm"],
        vectors.get(f"{i}.q_norm"),
        vectors.get(f"{i}.k_norm"),
    )


class Model:
    """The packed decoder with its KV cache. Everything is written in place; rolling back is moving a length.

    linears: name -> callable x [rows, in] -> [rows, out]; vectors: norms; embed: [V, H]. cache: one tensor
    [layers, slots, 2 * kv_heads, rows, head_dim] (keys, then values). Rows at and after a segment's end are never read,
    so what a rejected draft left there cannot matter. features: [rows, layers * H], the hidden states that the latest
    `forward` or `prefill` was asked for; None if it was not asked.

    A cache has `max_seq_len` rows for each slot. ring_room: where the model has a sliding window, only as many as the
    window and that many new rows take; position p then lies in row p modulo their number, over one that no row can see
    any more. A segment has at most `max_rows` rows, the room.
    """

    features: torch.Tensor | None = None

    def __init__(
        self,
        config: ModelConfig,
        linears: Mapping[str, Linear],
        vectors: Mapping[str, torch.Tensor],
        embed: torch.Tensor,
        *,
        max_slots: int,
        max_seq_len: int,
        ring_room: int | None = None,
    ) -> None:
        self.config, self.embed = config, embed
        self.dtype, self.device = embed.dtype, embed.device
        self.max_slots, self.max_seq_len = max_slots, max_seq_len
        self.head, self.norm = linears["head"], vectors["norm"]
        self.layers = [_layer(i, linears, vectors) for i in range(config.num_layers)]
        ring = None if ring_room is None else (config.sliding_window or max_seq_len) + ring_room - 1
        self.is_ring = ring is not None and ring < max_seq_len
        self.max_rows = ring_room if ring_room is not None and self.is_ring else max_seq_len
        self.cache_rows = ring if ring is not None and self.is_ring else max_seq_len
        shape = (config.num_layers, max_slots, 2 * config.num_kv_heads, self.cache_rows, config.head_dim)
        try:
            self.cache = torch.empty(shape, dtype=self.dtype, device=self.device)
        except (RuntimeError, TypeError) as error:  # TypeError: a number of bytes beyond 64 bits
            gb = math.prod(shape) * self.dtype.itemsize / 1e9
            raise OptionError(
                f"a KV cache for max_batch_size {max_slots} and max_seq_len {max_seq_len} takes {gb:.4g} GB",
                "what this machine's memory holds",
                "ask for fewer requests at once, or shorter ones",
            ) from error
        self.rotations = rotary_table(config, max_seq_len).to(self.device)
        self._masks: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], segments: Sequence[Segment], *, feature_layers: Sequence[int] = ()
    ) -> torch.Tensor:
        """Run the rows and write their keys and values. Returns final hidden states [rows, H], normed for the head.

        feature_layers: whose states to leave in `features`, side by side: n is the residual stream after n layers (0:
        the embeddings), `num_layers` + 1 what is returned. The caller keeps every cache row below `max_seq_len` and
        every slot below `max_slots`.
        """
        config = self.config
        heads, kv_heads, head_dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        ids = torch.tensor(token_ids, device=self.device)
        rows, width, inner = len(token_ids), (config.hidden_size,), config.intermediate_size
        rotations, masks = self._rotations(segments), [self._mask(s) for s in segments]
        x = F.embedding(ids, self.embed)
        states = {0: x}
        for layer, (qkv_proj, o_proj, gate_up, down, input_norm, post_norm, q_norm, k_norm) in enumerate(self.layers):
            qkv = qkv_proj(F.rms_norm(x, width, input_norm, eps)).view(rows, heads + 2 * kv_heads, head_dim)
            if q_norm is not None:
                qkv[:, :heads] = F.rms_norm(qkv[:, :heads], (head_dim,), q_norm, eps)
                qkv[:, heads : heads + kv_heads] = F.rms_norm(
                    qkv[:, heads : heads + kv_heads], (head_dim,), k_norm, eps
                )
            qkv = _rotate(qkv, heads + kv_heads, rotations)
            x = x + o_proj(self._attend(layer, qkv, segments, masks))
            hidden = gate_up(F.rms_norm(x, width, post_norm, eps))
            x = x + down(F.silu(hidden[:, :inner]).mul_(hidden[:, inner:]))
            if layer + 1 in feature_layers:
                states[layer + 1] = x
        x = states[config.num_layers + 1] = F.rms_norm(x, width, self.norm, eps)
        self.features = torch.cat([states[n] for n in feature_layers], -1) if feature_layers else None
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, head rows]."""
        return self.head(hidden).float()

    @torch.inference_mode()
    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Make one branch of a tree the text: move the keys and values of its rows (counted from `start`, the root,
        in increasing order) to the places behind `start`, in every layer and in place."""
        if any(row != place for place, row in enumerate(rows, start=1)):
            cache, around = self.cache[:, slot], self.cache_rows
            kept = cache[:, :, [(start + row) % around for row in rows]]
            cache[:, :, [(start + place) % around for place in range(1, len(rows) + 1)]] = kept

    def _rotations(self, segments: Sequence[Segment]) -> torch.Tensor:
        parts = [
            self.rotations[s.start : s.start + s.rows]
            if s.parents is None
            else self.rotations[[s.start + depth for depth in s.depths]]
            for s in segments
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self, layer: int, qkv: torch.Tensor, segments: Sequence[Segment], masks: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Append each segment's keys and values, then attend over that slot's own past. Returns [rows, heads * D]."""
        if len(segments) == 1:
            return self._attend_one(layer, qkv, segments[0], masks[0])
        out, row = [], 0
        for segment, mask in zip(segments, masks, strict=True):
            out.append(self._attend_one(layer, qkv[row : row + segment.rows], segment, mask))
            row += segment.rows
        return torch.cat(out)

    def _attend_one(self, layer: int, qkv: torch.Tensor, segment: Segment, mask: torch.Tensor | None) -> torch.Tensor:
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        group, rows, end = heads // kv_heads, segment.rows, segment.start + segment.rows
        cache = self.cache[layer, segment.slot]
        if self.is_ring:
            cache[:, torch.arange(segment.start, end) % self.cache_rows] = qkv[:, heads:].transpose(0, 1)
            past = cache[:, :end]
        else:
            cache[:, segment.start : end] = qkv[:, heads:].transpose(0, 1)
            past = cache[:, self._first_visible(segment) : end]
        # Query heads that share a key head are stacked as rows, so grouped attention is one batched product.
        if rows == 1:
            queries = qkv[:, :heads].reshape(1, kv_heads, group, head_dim)
        else:
            queries = qkv[:, :heads].view(rows, kv_heads, group, head_dim).permute(1, 0, 2, 3)
            queries = queries.reshape(1, kv_heads, rows * group, head_dim)
        out = F.scaled_dot_product_attention(
            queries, past[:kv_heads].unsqueeze(0), past[kv_heads:].unsqueeze(0), attn_mask=mask
        )
        if rows == 1:
            return out.reshape(1, heads * head_dim)
        return out.view(kv_heads, rows, group, head_dim).permute(1, 0, 2, 3).reshape(rows, heads * head_dim)

    def _first_visible(self, segment: Segment) -> int:
        window = self.config.sliding_window
        return 0 if window is None else max(0, segment.start - window + 1)

    def _mask(self, segment: Segment) -> torch.Tensor | None:
        """Additive mask [rows * group, cache rows from the first visible one]: a row sees the past, its ancestors and
        itself, at most a window back. None for a single row, which sees all of that."""
        rows, start, first = segment.rows, segment.start, self._first_visible(segment)
        group = self.config.num_heads // self.config.num_kv_heads
        window = self.config.sliding_window
        if self.is_ring:
            return self._ring_mask(segment, group)
        if rows == 1:
            return None
        if window is None and segment.parents is None and rows <= 64:
            base = self._masks.get(rows)
            if base is None:  # every chain of this many rows sees all of the past: one wide mask, sliced at the left
                base = self._masks[rows] = self._additive(F.pad(~segment.visible(), (self.max_seq_len, 0)), group)
            return base[:, self.max_seq_len - start :]
        hidden = F.pad(~segment.visible(), (start - first, 0))
        if window is not None:
            query = torch.tensor(segment.depths) + start
            key = torch.cat([torch.arange(first, start), query])
            hidden |= key <= query[:, None] - window
        return self._additive(hidden, group)

    def _ring_mask(self, segment: Segment, group: int) -> torch.Tensor:
        """Like `_mask`, over the ring's rows in the order in which they lie."""
        start, end = segment.start, segment.start + segment.rows
        query = torch.tensor(segment.depths) + start
        place = torch.arange(min(end, self.cache_rows))
        row = (
            end - 1 - (end - 1 - place) % self.cache_rows
        )  # the latest one written there, counted from the text's begin
        own = (row - start).clamp_min(0)  # in the segment, for those that are its own
        position = torch.where(row < start, row, query[own])
        hidden = position <= query[:, None] - (self.config.sliding_window or 0)
        hidden |= (row >= start) & ~segment.visible()[:, own]
        return self._additive(hidden, group)

    def _additive(self, hidden: torch.Tensor, group: int) -> torch.Tensor:
        """-inf where `hidden` [rows, keys] and 0 elsewhere, every row for its `group` of query heads."""
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -math.inf)
        return mask.repeat_interleave(group, 0).to(self.device)


def prefill(model: Model, token_ids: Sequence[int], slot: int, feature_layers: Sequence[int] = ()) -> torch.Tensor:
    """Append a text to the empty `slot`, `PREFILL_CHUNK` rows a pass. Final hidden states of the last pass; the
    features of the whole text are left in `model.features`."""
    features, most = [], min(PREFILL_CHUNK, model.max_rows)
    for start in range(0, len(token_ids), most):
        chunk = token_ids[start : start + most]
        hidden = model.forward(chunk, [Segment(slot, start, len(chunk))], feature_layers=feature_layers)
        if model.features is not None:
            features.append(model.features)
    if features:
        model.features = torch.cat(features)
    return hidden


def _rotate(qkv: torch.Tensor, rotated_heads: int, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate the first `rotated_heads` heads (queries and keys) of [rows, heads, D] by float32 complex products."""
    if qkv.dtype == torch.float32:
        pairs = torch.view_as_complex(qkv[:, :rotated_heads].unflatten(-1, (-1, 2)))
        pairs.mul_(rotations)
        return qkv
    full = qkv.float()
    torch.view_as_complex(full[:, :rotated_heads].unflatten(-1, (-1, 2))).mul_(rotations)
    return full.to(qkv.dtype)
