"""Heads from the field, read into one form: EAGLE-3 and Medusa checkpoints of the projects that train them.

EAGLE-3: as SpecForge and SGLang (`midlayer.*`), the speculators library (`layers.0.*`), vLLM and the EAGLE project
write them. Medusa: as the Medusa project (`0.0.linear.weight`), vLLM (`blocks.0.layers.0.weight`) and this workbook
(`medusa_heads.0.0.linear.weight`, int8 with scales) write them. Safetensors only.

A head that is read wrongly still runs: its drafts are just never accepted. So whatever does not fit the target, or
is not understood, is a `ModelError` here: sizes, vocabulary maps, layer ids, tensors that are missing or unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from ..config import check_choices
from ..engine.linear import make_int8_linear, quantize_int8
from ..engine.model import Model, ModelConfig
from ..errors import ModelError
from ..models import Checkpoint

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Matrix:
    """A weight [out, in]: float32, or int8 with `scale` float32 [out]."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None

    def dense(self) -> torch.Tensor:
        return self.weight if self.scale is None else self.weight.float() * self.scale[:, None]

    def linear(self) -> Linear:
        """x [rows, in] -> [rows, out]."""
        if self.scale is not None:
            return make_int8_linear(self.weight, self.scale, None)
        weight = self.weight
        return lambda x: F.linear(x, weight)

    def rows(self, ids: torch.Tensor) -> Matrix:
        return Matrix(self.weight[ids], None if self.scale is None else self.scale[ids])


def stack(parts: Sequence[Matrix]) -> Matrix:
    """Several weights of the same width as one: one product instead of several."""
    scales = [part.scale for part in parts if part.scale is not None]
    if len(scales) == len(parts):
        return Matrix(torch.cat([part.weight for part in parts]), torch.cat(scales))
    return Matrix(torch.cat([part.dense() for part in parts]))


@dataclass(frozen=True)
class Eagle3Head:
    """One EAGLE-3 draft layer.

    shape: of the layer (heads, rope, norm epsilon). feature_layers: the target's hidden states that `fc` [H, F * H]
    joins. is_residual_normed: the residual stream begins at hidden_norm(g) and not at g. draft_ids: int64 [V_d], the
    target's id of every output row; None if row i is id i. lm_head: None where the target's own is meant. embed: the
    head's own embeddings, None for the target's.
    """

    shape: ModelConfig
    feature_layers: tuple[int, ...]
    is_residual_normed: bool
    fc: Matrix
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: torch.Tensor
    hidden_norm: torch.Tensor
    post_norm: torch.Tensor
    norm: torch.Tensor
    lm_head: Matrix | None
    embed: torch.Tensor | None
    draft_ids: torch.Tensor | None


@dataclass(frozen=True)
class MedusaHeads:
    """Medusa heads. blocks: one (weight [heads, H, H], bias [heads, H]) for every residual block. outputs: one matrix
    for each head, one for all, or none where the target's own is meant. draft_ids: as in `Eagle3Head`. choices: the
    tree that the checkpoint recommends, if it does."""

    num_heads: int
    blocks: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    outputs: tuple[Matrix, ...]
    draft_ids: torch.Tensor | None
    choices: tuple[tuple[int, ...], ...] | None
    is_int8: bool


def output_head(own: Matrix | None, draft_ids: torch.Tensor | None, target: Model, *, is_int8: bool = False) -> Linear:
    """What turns normed hidden states [rows, H] into float32 logits [rows, V_d]: the head's own matrix, or the rows
    of the target's that `draft_ids` names (all of them without)."""
    if own is not None:
        product = own.linear()
        return lambda x: product(x).float()
    if draft_ids is None:
        return lambda x: target.logits(x.to(target.dtype))
    if not target.config.tie_word_embeddings:  # its packed matrix cannot be cut: multiply all, keep some
        return lambda x: target.logits(x.to(target.dtype))[:, draft_ids]
    rows = target.embed[draft_ids].float()
    return (Matrix(*quantize_int8(rows)) if is_int8 else Matrix(rows)).linear()


# ------------------------------------------------------------------------------------------------------------ tensors


class _Tensors:
    """The tensors of a checkpoint, taken one by one with the shape that is needed; what is left over is unknown."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.name, self.left = name, dict(tensors)

    @classmethod
    def read(cls, checkpoint: Checkpoint, rename: Callable[[str], str]) -> _Tensors:
        found: dict[str, torch.Tensor] = {}
        for file in checkpoint.weight_files():
            found |= {rename(name): tensor for name, tensor in load_file(str(file)).items()}
        for name, tensor in found.items():  # drafts of such a head are refused without a word, one and all
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise ModelError(
                    f"{name} of {checkpoint.name} holds NaN or infinity", "sound weights", "fetch it again"
                )
        return cls(checkpoint.name, found)

    def optional(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor | None:
        tensor = self.left.pop(name, None)
        if tensor is not None and shape is not None and tuple(tensor.shape) != shape:
            raise ModelError(
                f"{name} of {self.name} is {list(tensor.shape)}",
                f"{list(shape)}, as the target and config.json say",
                "take a head that was trained for this target",
            )
        return tensor

    def get(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        tensor = self.optional(name, shape)
        if tensor is None:
            raise ModelError(f"{self.name} has no tensor {name}", "every tensor of the head", "fetch it again")
        return tensor

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._numbers(name, self.get(name, (size,)))

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        weight = self.get(name, (rows, columns))
        if weight.dtype != torch.int8:
            return Matrix(self._numbers(name, weight))
        return Matrix(weight, self.get(f"{name}_scale", (rows,)).float())

    def _numbers(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            raise ModelError(f"{name} of {self.name} is stored as {tensor.dtype}", "floating point", "fetch it again")
        return tensor.float()

    def optional_matrix(self, name: str, rows: int, columns: int) -> Matrix | None:
        return self.matrix(name, rows, columns) if name in self.left else None

    def refuse_rest(self, layout: str) -> None:
        """Whatever is left changes what the head computes, or belongs to another kind of head."""
        rest = sorted(n for n in self.left if not n.endswith("rotary_emb.inv_freq") and not n.startswith("verifier_"))
        if rest:
            raise ModelError(
                f"{self.name} holds {len(rest)} tensor(s) that {layout} does not have: {', '.join(rest[:3])}",
                f"exactly the tensors of {layout}",
                "take a head of that layout",
            )


def _number(name: str, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"config.json of {name} says {key} = {value!r}", "a whole number", "fetch the head again")
    return value


def _need_equal(name: str, what: str, found: int, needed: int) -> None:
    if found != needed:
        raise ModelError(
            f"{name} was made for a target with {what} {found}", f"{needed}", "take a head trained for this target"
        )


def _checked_ids(name: str, ids: torch.Tensor, draft_size: int, vocab_size: int, what: str) -> torch.Tensor:
    """Target ids int64 [draft_size], each in range and named once."""
    if tuple(ids.shape) != (draft_size,):
        raise ModelError(
            f"{what} of {name} has shape {list(ids.shape)}",
            f"one entry for each of the {draft_size} output rows",
            "fetch the head again",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ModelError(
            f"{what} of {name} leads to ids from {low} to {high}",
            f"ids of the target, 0 to {vocab_size - 1}",
            "take a head that was trained for this target",
        )
    if len(torch.unique(ids)) != draft_size:
        raise ModelError(f"{what} of {name} names a target id twice", "every id once", "fetch the head again")
    return ids


# ------------------------------------------------------------------------------------------------------------ EAGLE-3

_EAGLE_LAYOUT = "an EAGLE-3 head of one Llama layer"


def read_eagle3(checkpoint: Checkpoint, target: ModelConfig) -> Eagle3Head:
    """The EAGLE-3 head in `checkpoint`, checked against the target it will draft for. Raises `ModelError`."""
    name, config = checkpoint.name, _eagle_config(checkpoint)
    shape, width = _eagle_shape(name, config, target), target.hidden_size
    tensors = _Tensors.read(checkpoint, _eagle_name)
    if deeper := [t for t in tensors.left if re.match(r"layers\.[1-9]", t)]:
        raise ModelError(f"{name} has more than one layer ({deeper[0]})", _EAGLE_LAYOUT, "take a head of one layer")

    fc_shape = tuple(tensors.left["fc.weight"].shape) if "fc.weight" in tensors.left else (width, 3 * width)
    if len(fc_shape) != 2 or fc_shape[0] != width or fc_shape[1] % width:
        raise ModelError(
            f"fc.weight of {name} is {list(fc_shape)}",
            f"[{width}, a multiple of {width}], as the target's hidden size is {width}",
            "take a head that was trained for this target",
        )
    layers = _feature_layers(name, config, fc_shape[1] // width, target.num_layers)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    draft_size, draft_ids = _draft_vocabulary(name, config, tensors, target.vocab_size)

    def linear(part: str, rows: int, columns: int) -> Matrix:
        return tensors.matrix(f"midlayer.{part}.weight", rows, columns)

    head = Eagle3Head(
        shape=shape,
        feature_layers=layers,
        is_residual_normed=bool(config.get("norm_before_residual", False)),
        fc=tensors.matrix("fc.weight", *fc_shape),
        qkv=stack([linear(f"self_attn.{x}_proj", queries if x == "q" else keys, 2 * width) for x in "qkv"]),
        o=linear("self_attn.o_proj", width, queries),
        gate_up=stack([linear(f"mlp.{x}_proj", shape.intermediate_size, width) for x in ("gate", "up")]),
        down=linear("mlp.down_proj", width, shape.intermediate_size),
        input_norm=tensors.vector("midlayer.input_layernorm.weight", width),
        hidden_norm=tensors.vector("midlayer.hidden_norm.weight", width),
        post_norm=tensors.vector("midlayer.post_attention_layernorm.weight", width),
        norm=tensors.vector("norm.weight", width),
        lm_head=_eagle_output(name, config, tensors, draft_size, target),
        embed=_float(tensors.optional("embed_tokens.weight", (target.vocab_size, width))),
        draft_ids=draft_ids,
    )
    tensors.refuse_rest(_EAGLE_LAYOUT)
    return head


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()


def _eagle_name(name: str) -> str:
    """One name for what the projects call differently: `model.layers.0.x`, `layers.0.x` and `midlayer.x`."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def _eagle_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config with the layer's own sizes at its top, where only the speculators library nests them."""
    name, config = checkpoint.name, dict(checkpoint.config)
    kind = config.get("speculators_model_type", "eagle3")
    if checkpoint.head_kind != "eagle3" or kind != "eagle3":
        found = kind if kind != "eagle3" else checkpoint.head_kind or "whole model"
        raise ModelError(f"{name} is of kind {found!r}", "an EAGLE-3 head", "choose the drafter that it belongs to")
    return {**_table(name, config, "transformer_layer_config"), **config}


def _table(name: str, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside config.json, empty if it is not there."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json of {name} says {key} = {found!r}"[:200], "an object", "fetch the head again")
    return found


def _layer_ids(name: str, table: Mapping[str, Any]) -> list[int]:
    """`eagle_aux_hidden_state_layer_ids`, empty if it is not there."""
    found = table.get("eagle_aux_hidden_state_layer_ids") or []
    if not isinstance(found, (list, tuple)) or not all(type(layer) is int for layer in found):
        raise ModelError(
            f"eagle_aux_hidden_state_layer_ids of {name} is {found!r}"[:200],
            "a list of layers",
            "correct its config.json",
        )
    return list(found)


def _eagle_shape(name: str, config: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        _number(name, config, key)
    _need_equal(name, "hidden size", config.get("target_hidden_size") or config["hidden_size"], target.hidden_size)
    _need_equal(name, "hidden size", config["hidden_size"], target.hidden_size)
    _need_equal(name, "vocabulary size", config["vocab_size"], target.vocab_size)
    layers = config.get("num_hidden_layers", 1)
    if layers != 1:
        raise ModelError(f"{name} has {layers} layers", _EAGLE_LAYOUT, "take a head of one layer")
    for key, meaning in (("norm_before_fc", "norms features"), ("attention_bias", "adds a bias in attention")):
        if config.get(key):
            raise ModelError(f"{name} {meaning} ({key})", _EAGLE_LAYOUT, "take a head without it")
    # Projects write "qwen3" or "llama" here for the same layer; whether it is the same its tensors show.
    return ModelConfig.from_hf({**config, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1})


def _feature_layers(name: str, config: Mapping[str, Any], count: int, num_layers: int) -> tuple[int, ...]:
    """Which hidden states the head was trained on, as the residual stream after n layers.

    vLLM and the speculators library write `eagle_aux_hidden_state_layer_ids` at the top and count as we do. SpecForge
    and SGLang write it inside `eagle_config` and name layers by index, whose output is one further on. The EAGLE
    project writes nothing and takes (2, n / 2, n - 3), which is everybody's default.
    """
    inner = _table(name, config, "eagle_config")
    if inner.get("use_aux_hidden_state") is False:
        raise ModelError(f"{name} reads the target's last layer only (an EAGLE-1 head)", "an EAGLE-3 head")
    ids, nested = _layer_ids(name, config), _layer_ids(name, inner)
    if nested and not ids and config.get("tie_lm_head_to_target"):  # only this workbook writes that key
        raise ModelError(
            f"{name} was exported by this workbook and names its layers only inside eagle_config ({nested})",
            "eagle_aux_hidden_state_layer_ids at the top, the number of layers before each hidden state; inside "
            "eagle_config each is one less",
            "export it again, or correct its config.json",
        )
    if nested:
        nested = [layer + 1 for layer in nested]
        if ids and ids != nested:
            raise ModelError(
                f"{name} names its layers twice and differently: hidden states {ids} at the top, the outputs of "
                f"layers {[layer - 1 for layer in nested]} in eagle_config",
                "the same layers, the inner ids one lower",
                "correct its config.json",
            )
    ids = ids or nested or [2, num_layers // 2, num_layers - 3]
    if len(ids) != count or len(set(ids)) != count or min(ids) < 0 or max(ids) > num_layers:
        raise ModelError(
            f"{name} reads hidden states {ids} and its fc.weight joins {count}",
            f"{count} different ones from 0 to {num_layers}, as the target has {num_layers} layers",
            "take a head trained for this target, or correct eagle_aux_hidden_state_layer_ids in its config.json",
        )
    return tuple(ids)


def _draft_vocabulary(
    name: str, config: Mapping[str, Any], tensors: _Tensors, vocab_size: int
) -> tuple[int, torch.Tensor | None]:
    """Size of the head's own vocabulary and the target ids of its rows: id = row + d2t[row].

    t2d, a flag for every target id, holds nothing that d2t does not: it is checked where it is there.
    """
    size = config.get("draft_vocab_size") or vocab_size
    d2t, t2d = tensors.optional("d2t"), tensors.optional("t2d")
    if t2d is not None and tuple(t2d.shape) != (vocab_size,):
        raise ModelError(
            f"t2d of {name} has {t2d.numel()} entries",
            f"one for each of the target's {vocab_size} ids",
            "take a head that was trained for this target",
        )
    if d2t is None:
        if size != vocab_size:
            raise ModelError(
                f"{name} drafts over {size} of {vocab_size} ids and has no map d2t from its ids to the target's",
                "the tensor d2t, which its training wrote",
                "fetch the head again, or export it again with the map",
            )
        return size, None
    ids = d2t.long()
    if tuple(ids.shape) == (size,):
        ids = ids + torch.arange(size)
    ids = _checked_ids(name, ids, size, vocab_size, "d2t")
    is_identity = bool((ids == torch.arange(size)).all())
    if t2d is not None and (int(t2d.bool().sum()) != size or not bool(t2d.bool()[ids].all())):
        raise ModelError(
            f"d2t and t2d of {name} name different ids" + (": d2t was never filled in" if is_identity else ""),
            "one map and its reverse",
            "fetch the head again, or export it again with the map",
        )
    if is_identity and size != vocab_size and t2d is None:
        raise ModelError(
            f"d2t of {name} is zero everywhere: it was never filled in",
            f"the {size} target ids that its rows stand for",
            "export the head again with the map",
        )
    return size, None if is_identity and size == vocab_size else ids


def _eagle_output(
    name: str, config: Mapping[str, Any], tensors: _Tensors, draft_size: int, target: ModelConfig
) -> Matrix | None:
    own = tensors.optional_matrix("lm_head.weight", draft_size, target.hidden_size)
    if own is None and draft_size != target.vocab_size and not config.get("tie_lm_head_to_target"):
        raise ModelError(
            f"{name} has no lm_head.weight for its {draft_size} ids",
            "that tensor, or tie_lm_head_to_target in config.json",
            "fetch the head again",
        )
    return own


# ------------------------------------------------------------------------------------------------------------- Medusa

_MEDUSA_LAYOUT = "Medusa heads of residual blocks"


def read_medusa(checkpoint: Checkpoint, target: ModelConfig) -> MedusaHeads:
    """The Medusa heads in `checkpoint`, checked against the target they will draft for. Raises `ModelError`."""
    name, config, width = checkpoint.name, checkpoint.config, target.hidden_size
    if checkpoint.head_kind != "medusa":
        found = checkpoint.head_kind or "whole model"
        raise ModelError(f"{name} is of kind {found!r}", "Medusa heads", "choose the drafter that it belongs to")
    # The Medusa project names no sizes: there the shapes alone must fit.
    _need_equal(name, "hidden size", config.get("hidden_size", width), width)
    _need_equal(name, "vocabulary size", config.get("vocab_size", target.vocab_size), target.vocab_size)
    tensors = _Tensors.read(checkpoint, _medusa_name)
    heads, layers = _medusa_counts(name, config, tensors)
    is_int8 = any(t.dtype == torch.int8 for t in tensors.left.values())
    draft_ids = _medusa_ids(name, config, tensors, target.vocab_size)
    blocks = []
    for layer in range(layers):
        weights = [tensors.matrix(f"{h}.{layer}.linear.weight", width, width).dense() for h in range(heads)]
        biases = [_float(tensors.optional(f"{h}.{layer}.linear.bias", (width,))) for h in range(heads)]
        blocks.append((torch.stack(weights), torch.stack([torch.zeros(width) if b is None else b for b in biases])))
    outputs = _medusa_outputs(name, tensors, heads, layers, draft_ids, target)
    tensors.refuse_rest(f"{_MEDUSA_LAYOUT} ({heads} heads of {layers})")
    choices = config.get("medusa_choices")
    return MedusaHeads(
        num_heads=heads,
        blocks=tuple(blocks),
        outputs=outputs,
        draft_ids=draft_ids,
        choices=None if choices is None else check_choices(f"medusa_choices of {name}", choices),
        is_int8=is_int8,
    )


def _medusa_name(name: str) -> str:
    """The Medusa project's own names, `head.block.linear.weight` and `head.blocks.weight`, for everybody's.

    vLLM's output matrices are numbered apart from the blocks and become `out.head.weight`.
    """
    name = re.sub(r"^medusa_heads?\.", "", name)
    name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
    return re.sub(r"^lm_heads\.(\d+)\.", r"out.\1.", name)


def _medusa_counts(name: str, config: Mapping[str, Any], tensors: _Tensors) -> tuple[int, int]:
    """Heads and residual blocks of each, as config.json says and the tensors confirm."""
    places = [tuple(map(int, m.groups())) for t in tensors.left if (m := re.match(r"(\d+)\.(\d+)\.linear\.weight$", t))]
    if not places:
        raise ModelError(
            f"{name} holds no residual block of a Medusa head, but {', '.join(sorted(tensors.left)[:3]) or 'nothing'}",
            "tensors such as 0.0.linear.weight or blocks.0.layers.0.weight",
            "take heads in the form of the Medusa project, of vLLM or of this workbook",
        )
    found = 1 + max(head for head, _ in places), 1 + max(layer for _, layer in places)
    for what, count, keys in (
        ("heads", found[0], ("medusa_num_heads", "num_heads")),
        ("residual blocks in a head", found[1], ("medusa_num_layers", "num_hidden_layers")),
    ):
        said = next((config[key] for key in keys if config.get(key) is not None), count)
        if said != count:
            raise ModelError(
                f"config.json of {name} says {said} {what} and its weights hold {count}",
                "the same number in both",
                "fetch it again",
            )
    return found


def _medusa_ids(name: str, config: Mapping[str, Any], tensors: _Tensors, vocab_size: int) -> torch.Tensor | None:
    """Target ids of the output rows: `draft_vocab` (ours) or `token_map` (vLLM), both ids and not offsets."""
    size = config.get("draft_vocab_size") or config.get("truncated_vocab_size") or vocab_size
    ids = tensors.optional("draft_vocab")
    ids = tensors.optional("token_map") if ids is None else ids
    if ids is not None:
        return _checked_ids(name, ids.long(), size, vocab_size, "the vocabulary map")
    if size != vocab_size:
        raise ModelError(
            f"{name} drafts over {size} of {vocab_size} ids and has no map from its ids to the target's",
            "the tensor draft_vocab or token_map",
            "fetch it again, or export it again with the map",
        )
    return None


def _medusa_outputs(
    name: str, tensors: _Tensors, heads: int, layers: int, ids: torch.Tensor | None, target: ModelConfig
) -> tuple[Matrix, ...]:
    """The heads' own output matrices, cut to the shortlist: one each, one for all, or none (the target's)."""
    shared = ["lm_head.weight"] if "lm_head.weight" in tensors.left else []
    own = shared or [n for h in range(heads) for n in (f"{h}.{layers}.weight", f"out.{h}.weight") if n in tensors.left]
    if own and len(own) not in (1, heads):
        raise ModelError(
            f"{name} has output matrices for {len(own)} of {heads} heads",
            "one for each, one for all, or none",
            "fetch it again",
        )
    outputs = []
    for tensor in own:
        is_cut = ids is not None and tensors.left[tensor].shape[0] == len(ids)
        rows = len(ids) if ids is not None and is_cut else target.vocab_size
        matrix = tensors.matrix(tensor, rows, target.hidden_size)
        outputs.append(matrix if ids is None or is_cut else matrix.rows(ids))
    return tuple(outputs)
