"""Self-drafting: the target with some of its layers left out proposes, and the whole target verifies.

Zhang et al. 2023 (arXiv 2309.08168, "draft & verify"). The drafter is a view of the target: the same matrices, norms,
embeddings and output head, fewer layers, so it costs no weights. It has a KV cache of its own. The target's would not
do: behind a skipped layer the hidden states differ, and so do the keys and values of every layer after it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace

import torch

from ..config import LayerSkipDecodingConfig
from ..engine.model import Model
from ..errors import OptionError
from .draft_model import DraftModelDrafter


class LayerSkipDrafter(DraftModelDrafter):
    """Drafts like any draft model, with a part of `target`."""

    def __init__(self, config: LayerSkipDecodingConfig, target: Model) -> None:
        self.skipped = layers_to_skip(config, target.config.num_layers)
        super().__init__(
            without_layers(target, self.skipped),
            target.config.vocab_size,
            confidence_threshold=config.confidence_threshold,
        )


def layers_to_skip(config: LayerSkipDecodingConfig, num_layers: int) -> tuple[int, ...]:
    """The layers left out, in order: every second one between the first two and the last two, unless they are given.

    Raises `OptionError` if a layer does not exist or none would be left out, or none left.
    """
    if config.skip_layers is None:
        chosen = tuple(range(2, num_layers - 2, 2))
        hint = "give skip_layers"
    else:
        chosen = tuple(sorted(set(config.skip_layers)))
        hint = "correct skip_layers"
    if chosen and chosen[-1] >= num_layers:
        raise OptionError(f"skip_layers holds {chosen[-1]}", f"layers from 0 to {num_layers - 1}", hint)
    if not 0 < len(chosen) < num_layers:
        what = "all" if chosen else "none"
        raise OptionError(
            f"skip_layers leaves out {what} of the target's {num_layers} layers", "some of them, not all", hint
        )
    return chosen


def without_layers(target: Model, skipped: Collection[int]) -> Model:
    """A model that shares everything with `target` but the layers in `skipped`, and the cache."""
    view = copy.copy(target)
    view.layers = [layer for i, layer in enumerate(target.layers) if i not in skipped]
    view.config = replace(target.config, num_layers=len(view.layers))
    view.cache = torch.empty_like(target.cache[: len(view.layers)])
    return view
