"""Tiny heads for the `dummy:` models, written as each project writes them, and slow references for what they compute.

The references follow the papers' formulas one token at a time, without caches and without the package's own layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tutorial_lib.engine.model import Model, Segment
from tutorial_lib.models import Checkpoint, resolve

H, V, INNER, HEADS, KV_HEADS, D = 64, 320, 96, 4, 2, 16
EPS, THETA = 1e-5, 10000.0
TARGET = "dummy:tiny-llama?seed=5&layers=7"  # the fewest layers in which the default choice of three makes sense
LAYERS, DEFAULT_LAYERS = (1, 3, 6), (2, 3, 4)
SHORTLIST = torch.tensor(sorted({*range(0, V, 4), 5, 13, 311}))
EAGLE_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": D,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "rope_scaling": None,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "vocab_size": V,
    "tie_word_embeddings": True,  # as published configs say although the file has a head of its own
}


def eagle_tensors(seed: int = 0, ids: torch.Tensor | None = SHORTLIST) -> dict[str, torch.Tensor]:
    """A random head in SpecForge's names, scaled so that its context and its features both matter."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale / math.sqrt(shape[-1])

    size = V if ids is None else len(ids)
    tensors = {
        "fc.weight": normal(H, 3 * H, scale=2.0),
        "midlayer.self_attn.q_proj.weight": normal(HEADS * D, 2 * H, scale=2.0),
        "midlayer.self_attn.k_proj.weight": normal(KV_HEADS * D, 2 * H, scale=2.0),
        "midlayer.self_attn.v_proj.weight": normal(KV_HEADS * D, 2 * H, scale=3.0),
        "midlayer.self_attn.o_proj.weight": normal(H, HEADS * D, scale=3.0),
        "midlayer.mlp.gate_proj.weight": normal(INNER, H),
        "midlayer.mlp.up_proj.weight": normal(INNER, H),
        "midlayer.mlp.down_proj.weight": normal(H, INNER),
        "lm_head.weight": normal(size, H, scale=3.0),
    }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(H, generator=generator)
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write(folder: Path, config: Mapping, tensors: Mapping[str, torch.Tensor], file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / file))
    return folder


def specforge(folder: Path, tensors: Mapping[str, torch.Tensor], **config) -> Checkpoint:
    """SpecForge names the layers whose outputs it reads: one less than the hidden state's number."""
    draft = {"draft_vocab_size": tensors["lm_head.weight"].shape[0]} if "lm_head.weight" in tensors else {}
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [n - 1 for n in LAYERS]}}
    return resolve(write(folder, {**EAGLE_CONFIG, **draft, **layers, **config}, tensors))


def speculators(folder: Path, tensors: Mapping[str, torch.Tensor], **config) -> Checkpoint:
    """The speculators library: `layers.0`, the layer's sizes nested, hidden states by their number."""
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": tensors["lm_head.weight"].shape[0],
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "transformer_layer_config": {k: v for k, v in EAGLE_CONFIG.items() if k != "architectures"},
        "norm_before_residual": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "dummy"}},
    }
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return resolve(write(folder, {**outer, **config}, renamed))


def eagle_project(folder: Path, tensors: Mapping[str, torch.Tensor], **config) -> Checkpoint:
    """The EAGLE project calls its heads LlamaForCausalLM and names no layers."""
    own = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": tensors["lm_head.weight"].shape[0]}
    return resolve(write(folder, {**EAGLE_CONFIG, **own, **config}, tensors))


# ---- references ------------------------------------------------------------------------------------------------------


def features_of(model: Model, ids: Sequence[int], layers: Sequence[int] = LAYERS) -> torch.Tensor:
    """[len(ids), len(layers) * H], from a forward over the whole text."""
    model.forward(ids, [Segment(model.max_slots - 1, 0, len(ids))], feature_layers=tuple(layers))
    assert model.features is not None
    return model.features.clone()


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def _turn(x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary embedding of [heads, D] in halves."""
    angle = position * THETA ** (-torch.arange(0, D, 2) / D)
    a, b = x[:, : D // 2], x[:, D // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class SlowEagle:
    """The draft layer pair by pair; `keys` and `values` hold what it has seen. A drafted token's pair is dropped by
    cutting both lists, so every round begins from true features only."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], embed: torch.Tensor, is_residual_normed=False) -> None:
        self.t, self.embed, self.is_residual_normed = tensors, embed, is_residual_normed
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.t["fc.weight"] @ features

    def pair(self, g: torch.Tensor, token: int) -> torch.Tensor:
        """Append the pair (g, token); the layer's output."""
        t, position = self.t, len(self.keys)
        normed = _norm(g, t["midlayer.hidden_norm.weight"])
        both = torch.cat([_norm(self.embed[token], t["midlayer.input_layernorm.weight"]), normed])
        q, k, v = ((t[f"midlayer.self_attn.{x}_proj.weight"] @ both).view(-1, D) for x in "qkv")
        self.keys.append(_turn(k, position))
        self.values.append(v)
        keys, values = torch.stack(self.keys), torch.stack(self.values)
        mixed = []
        for head, query in enumerate(_turn(q, position)):
            shared = head // (HEADS // KV_HEADS)
            weights = torch.softmax(keys[:, shared] @ query / math.sqrt(D), 0)
            mixed.append(weights @ values[:, shared])
        x = (normed if self.is_residual_normed else g) + t["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        inner = _norm(x, t["midlayer.post_attention_layernorm.weight"])
        gate, up = t["midlayer.mlp.gate_proj.weight"] @ inner, t["midlayer.mlp.up_proj.weight"] @ inner
        return x + t["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.t["lm_head.weight"] @ _norm(x, self.t["norm.weight"])

    def read(self, features: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
        """Forget everything, then all pairs of `text` from true features [len(text) - 1, 3 * H]. The last output."""
        self.keys, self.values = [], []
        for row, token in zip(features, text[1:], strict=True):
            x = self.pair(self.fuse(row), token)
        return x

    def behind(self, x: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Logits behind drafted `tokens` that follow output x; the lists are left as they were."""
        kept = len(self.keys)
        for token in tokens:
            x = self.pair(x, token)
        del self.keys[kept:], self.values[kept:]
        return self.logits(x)


# ---- Medusa ----------------------------------------------------------------------------------------------------------

MEDUSA_HEADS, BLOCKS = 3, 2


def medusa_tensors(seed: int = 0, *, outputs: int = 0) -> dict[str, torch.Tensor]:
    """Random heads in the Medusa project's names; `outputs` of them with an output matrix of their own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(MEDUSA_HEADS):
        for block in range(BLOCKS):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(H, H, generator=generator) * 3 / math.sqrt(H)
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(H, generator=generator)
        if head < outputs:
            tensors[f"{head}.{BLOCKS}.weight"] = torch.randn(V, H, generator=generator) / math.sqrt(H)
    return tensors


def medusa_project(folder: Path, tensors: Mapping[str, torch.Tensor], **config) -> Checkpoint:
    """No sizes in its config, and a file name of its own."""
    own = {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": BLOCKS, "base_model_name_or_path": "dummy"}
    return resolve(write(folder, {**own, **config}, tensors, "medusa_lm_head.safetensors"))


def medusa_vllm(folder: Path, tensors: Mapping[str, torch.Tensor], **config) -> Checkpoint:
    own = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": MEDUSA_HEADS,
        "num_hidden_layers": BLOCKS,
        "hidden_size": H,
        "vocab_size": V,
        "medusa_fc_bias": True,
    }
    renamed = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        if not head.isdigit():
            renamed[name] = tensor
        elif ".linear." in name:
            renamed[f"blocks.{head}.layers.{rest.replace('.linear', '')}"] = tensor
        else:
            renamed[f"lm_heads.{head}.weight"] = tensor
    return resolve(write(folder, {**own, **config}, renamed))


def medusa_own(folder: Path, tensors: Mapping[str, torch.Tensor], **config) -> Checkpoint:
    own = {
        "architectures": ["MedusaModel"],
        "medusa_num_heads": MEDUSA_HEADS,
        "medusa_num_layers": BLOCKS,
        "hidden_size": H,
        "vocab_size": V,
        "medusa_choices": [[0], [1], [0, 0], [0, 0, 0]],
    }
    named = {n if n == "draft_vocab" else f"medusa_heads.{n}": t for n, t in tensors.items()}
    return resolve(write(folder, {**own, **config}, named))


def slow_medusa(tensors: Mapping[str, torch.Tensor], hidden: torch.Tensor, head: int) -> torch.Tensor:
    """What head `head` makes of one hidden state [H] before its output matrix."""
    x = hidden
    for block in range(BLOCKS):
        y = tensors[f"{head}.{block}.linear.weight"] @ x + tensors[f"{head}.{block}.linear.bias"]
        x = x + y * torch.sigmoid(y)
    return x


def as_int8(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every matrix as int8 with a scale a row, as the shipped heads are stored."""
    stored = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            scale = tensor.abs().amax(1) / 127
            stored[name] = torch.round(tensor / scale[:, None]).to(torch.int8)
            stored[f"{name}_scale"] = scale
        else:
            stored[name] = tensor
    return stored
