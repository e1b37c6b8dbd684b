"""A rank's part of a model on a GPU: `GpuModel`'s step with a sum after o and after down, and logits gathered.

The step stays a fixed sequence over fixed buffers: on several GPUs its sums are NCCL collectives that a CUDA graph
holds like any kernel, so a round would be one graph per rank. **Never run on more than one GPU**: the tests run it as
plain torch, ranks being threads. A rank reads its share of an engine directory, or makes its share of a dummy shape,
without ever holding the whole. What is missing for several GPUs, apart from such a run: products timed in the shapes
of a slice, a build of weights that no single GPU can hold (they are packed, quantized and timed on one), processes
that open such a model, and Medusa and EAGLE heads, which read the target's output head, of which a rank has only its
ids. `LLM` therefore refuses several GPUs.

What the ranks exchange is the partial sums in float32, before they meet the bf16 residual.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from safetensors import safe_open

from ..config import Fp8Config
from ..engine_dir import EngineInfo
from ..errors import OptionError
from .build import WEIGHTS
from .gpu_build import assemble, random_tensors
from .gpu_model import GpuModel, Weight
from .model import ModelConfig
from .parallel import Ranks, check_split, gather_vocabulary, rank_config, shard


class ParallelGpuModel(GpuModel):
    """`GpuModel` with a rank's heads, MLP columns and vocabulary. Logits and hidden states are whole on every rank."""

    ranks: Ranks
    summed: frozenset[int]  # ids of the weights whose products are parts of a sum

    @classmethod
    def of(cls, model: GpuModel, ranks: Ranks) -> ParallelGpuModel:
        """`model`, made of this rank's share, as one of several. It shares all it has with it."""
        made = cls.__new__(cls)
        made.__dict__ = model.__dict__.copy()
        made.ranks = ranks
        made.summed = frozenset(id(weight) for layer in model.layers for weight in (layer.o, layer.down))
        return made

    def step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        own = super().step(*arguments, **options)
        return gather_vocabulary(own, self.config.vocab_size, self.ranks)

    def without_layers(self, skipped: Collection[int]) -> ParallelGpuModel:
        return self.of(super().without_layers(skipped), self.ranks)

    def _product(self, weight: Weight, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        parts = super()._product(weight, x, scale)
        if id(weight) not in self.summed:
            return parts
        return self.ranks.sum(parts if parts.shape[0] == 1 else parts.sum(0, keepdim=True))


def rank_tensors(info: EngineInfo, ranks: Ranks, device: str) -> dict[str, torch.Tensor]:
    """This rank's share, on `device`, of the packed tensors of a GPU engine directory: what `assemble_rank` would cut.

    A checkpoint's are read slice by slice; a dummy's in FP8 are made whole one after the other, from the same seed on
    every rank, and cut at once. Raises `OptionError` if the model does not divide so, and for a dummy in bf16.
    """
    config, facts = ModelConfig.from_hf(info.model_config), info.manifest["build"]
    check_split(config, ranks.size)
    if not facts["is_dummy"]:
        with safe_open(info.path / WEIGHTS, "pt", device=device) as file:
            slices = ((name, file.get_slice(name)) for name in file.keys())
            return {name: own.to(device) for name, own in shard(slices, config, ranks.rank, ranks.size).items()}
    if info.dtype != "fp8":
        raise OptionError(
            f"{info.checkpoint} in {info.dtype} has no weights that one rank can make alone", "dtype 'fp8'",
            "build with --dtype fp8",
        )  # fmt: skip
    made = info.manifest.get("fp8") or asdict(Fp8Config())
    tensors = random_tensors(
        config, device, seed=facts["seed"], is_head_fp8=made["quantize_head"],
        is_dynamic=made["activation_scales"] == "dynamic",
    )  # fmt: skip
    return shard(tensors, config, ranks.rank, ranks.size)


def assemble_rank(
    config: ModelConfig, packed: Mapping[str, Any] | Iterable[tuple[str, Any]], ranks: Ranks, **options: Any
) -> ParallelGpuModel:
    """`assemble_share` of this rank's share of packed tensors. Raises `OptionError` if the model does not divide so."""
    check_split(config, ranks.size)
    return assemble_share(config, shard(packed, config, ranks.rank, ranks.size), ranks, **options)


def assemble_share(
    config: ModelConfig, own: Mapping[str, torch.Tensor], ranks: Ranks, **options: Any
) -> ParallelGpuModel:
    """`gpu_build.assemble` of what `rank_tensors` or `shard` gave, with plain tactics: no slice has been timed.

    config: of the whole model. options: what `assemble` takes.
    """
    return ParallelGpuModel.of(assemble(rank_config(config, ranks.size), own, {}, **options), ranks)
