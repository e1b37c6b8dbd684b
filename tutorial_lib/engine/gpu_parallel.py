"""A rank's part of a model on a GPU: `GpuModel`'s step with a sum after o and after down, and logits gathered.

The step stays a fixed sequence over fixed buffers: on several GPUs its sums are NCCL collectives that a CUDA graph
holds like any kernel, so a round would be one graph per rank. **Never run on more than one GPU**: the tests run it as
plain torch, ranks being threads. What is missing for several GPUs, apart from such a run: products timed in the shapes
of a slice, weights that no single GPU can build, processes that open such a model, and Medusa and EAGLE heads, which
read the target's output head, of which a rank has only its ids. `LLM` therefore refuses several GPUs.

What the ranks exchange is the partial sums in float32, before they meet the bf16 residual.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from .gpu_build import assemble
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


def assemble_rank(config: ModelConfig, packed: Mapping[str, Any], ranks: Ranks, **options: Any) -> ParallelGpuModel:
    """`gpu_build.assemble` of this rank's share of packed tensors, with plain tactics: no slice has been timed.

    options: what `assemble` takes. Raises `OptionError` if the model does not divide so.
    """
    check_split(config, ranks.size)
    own = shard(packed, config, ranks.rank, ranks.size)
    return ParallelGpuModel.of(assemble(rank_config(config, ranks.size), own, {}, **options), ranks)
