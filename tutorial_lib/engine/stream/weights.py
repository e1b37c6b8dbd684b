"""A `GpuModel`'s weights as the whole-step kernel reads them: packed in the order of the stream, and where they are.

Natural weights are [rows, K]; `pack` permutes them matrix by matrix, so that no more than one of them is in memory
twice. `in_place` writes each packed one over its natural one (or frees that, where the plan pads); the Triton kernels
cannot read the model after that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..gpu_model import GpuModel, Weight
from ..model import ModelConfig
from .pack import halves_together, pack
from .plan import Matrix, Plan


@dataclass(frozen=True)
class PackedWeights:
    """fields: values of `params.FIELDS` that hold for the life of the model. matrices: layer by layer, then the head;
    kept, since `fields` has their addresses only."""

    fields: dict[str, torch.Tensor]
    matrices: list[tuple[torch.Tensor, ...]]


def pack_weights(model: GpuModel, plan: Plan, *, in_place: bool) -> PackedWeights:
    """Pack every product of `model`. Fields of what it has not (scales, biases, norms of q and k) are left out."""
    matrices: list[tuple[torch.Tensor, ...]] = []
    scales: list[tuple[torch.Tensor, ...]] = []
    orders = stream_orders(model.config)
    for layer in model.layers:
        weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
        pairs = list(zip(weights, plan.matrices, strict=True))
        scales.append(tuple(_scale(weight, matrix, orders.get(matrix.name)) for weight, matrix in pairs))
        packed = (_packed(weight, matrix, orders.get(matrix.name), in_place) for weight, matrix in pairs)
        matrices.append(tuple(packed))
    is_shared = model.head.data.data_ptr() == model.embed.data_ptr()
    head_scale = _scale(model.head, plan.head, None)
    head = _packed(model.head, plan.head, None, in_place and not is_shared)
    first, every = model.layers[0], model.layers
    fields = {
        "embedding": model.embed,
        "weights": _addresses(matrices, model.device),
        "norms": torch.stack([*(n for layer in every for n in (layer.input_norm, layer.post_norm)), model.norm]),
        "cos": first.cos,
        "sin": first.sin,
        "head": head,
        "cache": model.cache,
    }
    if first.is_fp8:
        inputs = [torch.stack([_known(getattr(layer, f"{name}_in")) for name in _PRODUCTS]) for layer in every]
        fields |= {"scales": _addresses(scales, model.device), "input_scales": torch.stack(inputs).float()}
    if model.head.scale is not None:
        fields["head_scale"] = head_scale
    for name in ("qkv_bias", "q_norm", "k_norm", "kv_scale"):
        if getattr(first, name) is not None:
            fields[name] = torch.stack([getattr(layer, name) for layer in every])
    return PackedWeights(fields, [*matrices, *scales, (head, head_scale)])


_PRODUCTS = ("qkv", "o", "gate_up", "down")


def stream_orders(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Of the matrices whose rows do not stand in the stream as they do in nature: stream row -> natural row.

    Heads of q and k have the rotary pairs together, v is as it was; gate and up go side by side."""
    rotated = (config.num_heads + config.num_kv_heads) * config.head_dim
    values = torch.arange(rotated, config.qkv_rows)
    inner = 2 * config.intermediate_size
    return {
        "qkv": torch.cat([halves_together(rotated, config.head_dim), values]),
        "gate_up": halves_together(inner, inner),
    }


def _packed(weight: Weight, matrix: Matrix, order: torch.Tensor | None, in_place: bool) -> torch.Tensor:
    packed = pack(weight.data, matrix, order)
    if not in_place:
        return packed
    natural = weight.data.view(torch.uint8)
    if natural.is_contiguous() and natural.numel() == packed.numel():
        packed = natural.view(-1).copy_(packed)
    weight.data = packed
    return packed


def _scale(weight: Weight, matrix: Matrix, order: torch.Tensor | None) -> torch.Tensor:
    """float32 [groups * group] in stream order, 0 where the plan pads; empty for bf16 weights."""
    if weight.scale is None:
        return torch.empty(0, device=weight.data.device)
    scale = weight.scale.float().expand(matrix.rows)
    scale = scale if order is None else scale[order.to(scale.device)]
    return F.pad(scale, (0, matrix.groups * matrix.group - matrix.rows)).contiguous()


def _addresses(tensors: list[tuple[torch.Tensor, ...]], device: torch.device) -> torch.Tensor:
    return torch.tensor([[t.data_ptr() for t in row] for row in tensors], dtype=torch.int64, device=device)


def _known(scale: torch.Tensor | None) -> torch.Tensor:
    assert scale is not None  # `plan_for` refuses scales that each row finds for itself
    return scale
