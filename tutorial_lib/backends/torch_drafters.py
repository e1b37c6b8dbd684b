"""Which drafter a configuration asks for: what runs on which device, whose weights it needs, how it is opened.

Modules of a method are imported when the method is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from ..config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    LayerSkipDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
)
from ..drafters.base import Drafter
from ..engine.model import Model, ModelConfig
from ..errors import OptionError
from ..models import Checkpoint, resolve

if TYPE_CHECKING:
    from ..engine.drafting import Drafting
    from ..engine.gpu_model import GpuModel

RUNS = (
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    LookaheadDecodingConfig,
    LayerSkipDecodingConfig,
    MedusaDecodingConfig,
    EagleDecodingConfig,
)
ON_HOST = (SADecodingConfig, LookaheadDecodingConfig)  # draft on the host on a GPU too
HEADS: dict[type[DecodingBaseConfig], tuple[str, str, str]] = {  # module, function, the heads for embedded:target
    MedusaDecodingConfig: ("medusa", "open_medusa", "embedded:medusa"),
    EagleDecodingConfig: ("eagle", "open_eagle", "embedded:eagle3"),
}


def refuse_unsupported(config: DecodingBaseConfig | None, device: str) -> None:
    """`OptionError` for a method or an option of it that this backend does not run on `device`."""
    if config is None:
        return
    name = type(config).__name__
    if not isinstance(config, RUNS):
        raise OptionError(
            f"the torch backend does not run {name}",
            f"one of {', '.join(kind.__name__ for kind in RUNS)}",
            "choose one of these",
        )
    if device == "cuda" and getattr(config, "confidence_threshold", None) is not None:
        raise OptionError(
            f"the torch backend on a GPU cannot honour {name}(confidence_threshold=…)",
            "None: a round there is one graph that always drafts and verifies max_draft_len tokens, so that ending a "
            "draft early would save no time and only lose tokens",
            "leave it out, or use device='cpu'",
        )


def resolve_head(config: DecodingBaseConfig | None, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint of the heads that a Medusa or EAGLE-3 configuration names; None for other methods."""
    if not isinstance(config, (MedusaDecodingConfig, EagleDecodingConfig)):
        return None
    if config.speculative_model_dir is None:
        raise OptionError(
            f"{type(config).__name__} has no speculative_model_dir",
            "the weights of its heads",
            f"give it a folder or a Hub id; {HEADS[type(config)][2]!r} goes with embedded:target",
        )
    return resolve(str(config.speculative_model_dir), say=say)


def refuse_heads(checkpoint: Checkpoint) -> None:
    """`OptionError` for heads given as a draft model: alone they cannot run."""
    if checkpoint.head_kind:
        kind = MedusaDecodingConfig if checkpoint.head_kind == "medusa" else EagleDecodingConfig
        raise OptionError(
            f"{checkpoint.name} holds {checkpoint.head_kind} heads and was given as a draft model",
            "a model of its own",
            f"use {kind.__name__} for it",
        )


def make_drafter(
    config: DecodingBaseConfig | None, target: Model, stop_ids: Iterable[int], head: Checkpoint | None
) -> tuple[Drafter | None, int]:
    """The drafter of a method that has no model of its own, and how many tokens behind the text its proposals reach.
    (None, 0) for others. head: what `resolve_head` found."""
    if isinstance(config, NGramDecodingConfig):
        from ..drafters.ngram import NGramDrafter

        return NGramDrafter(config, stop_ids), config.max_draft_len
    if isinstance(config, SADecodingConfig):
        from ..drafters.suffix import SuffixDrafter

        return SuffixDrafter(config, stop_ids), config.max_draft_len
    if isinstance(config, LookaheadDecodingConfig):
        from ..drafters.lookahead import LookaheadDrafter

        lookahead = LookaheadDrafter(config, stop_ids)
        return lookahead, lookahead.max_depth  # the window's far end, beyond the longest n-gram
    if isinstance(config, LayerSkipDecodingConfig):
        from ..drafters.layer_skip import LayerSkipDrafter

        return LayerSkipDrafter(config, target), config.max_draft_len
    if config is not None and head is not None:
        module, function, _ = HEADS[type(config)]
        open_heads = getattr(import_module(f"..drafters.{module}", __package__), function)
        return open_heads(config, target, head), config.max_draft_len
    return None, 0


# ------------------------------------------------------------------------------------------------------------- on a GPU


def gpu_draft_rows(config: DecodingBaseConfig | None, head: Checkpoint | None, target: ModelConfig) -> int:
    """Positions behind the text that one round on a GPU writes at most: K, or all tokens of a tree."""
    if isinstance(config, MedusaDecodingConfig) and head is not None:
        from ..drafters.checkpoints import read_medusa
        from ..drafters.medusa import choose_tree

        return len(choose_tree(config, read_medusa(head, target), target.vocab_size, head.name))
    if isinstance(config, EagleDecodingConfig) and config.eagle_choices is not None:
        return len(config.eagle_choices)
    if isinstance(config, EagleDecodingConfig) and config.use_dynamic_tree:
        from ..engine.head_drafting import Growth

        return Growth.of(config, target.vocab_size).reach
    if isinstance(config, LookaheadDecodingConfig):
        from ..drafters.lookahead import LookaheadDrafter
        from ..engine.gpu_model import MAX_STEP_ROWS

        if (tokens := LookaheadDrafter(config, ()).max_tokens) >= MAX_STEP_ROWS:
            raise OptionError(
                f"lookahead's window and n-grams are up to {tokens} tokens",
                f"at most {MAX_STEP_ROWS - 1} on a GPU",
                "make W, N or G smaller",
            )
        return tokens
    return config.max_draft_len if config else 0


def make_drafting(
    config: DecodingBaseConfig | None,
    target: GpuModel,
    stop_ids: Iterable[int],
    head: Checkpoint | None,
    max_sequences: int,
) -> Drafting | Drafter | None:
    """`make_drafter` for a GPU: what drafts inside a round's graph, or on the host for a configuration in `ON_HOST`."""
    if isinstance(config, NGramDecodingConfig):
        from ..engine.drafting import NGramDrafting

        return NGramDrafting(config, target.config.vocab_size, stop_ids, target.device)
    if isinstance(config, SADecodingConfig):
        from ..drafters.suffix import SuffixDrafter

        return SuffixDrafter(config, stop_ids)
    if isinstance(config, LookaheadDecodingConfig):
        from ..drafters.lookahead import LookaheadDrafter

        return LookaheadDrafter(config, stop_ids)
    if isinstance(config, LayerSkipDecodingConfig):
        from ..drafters.layer_skip import layers_to_skip
        from ..engine.drafting import ModelDrafting

        return ModelDrafting(target.without_layers(layers_to_skip(config, target.config.num_layers)))
    if head is None:
        return None
    from ..drafters.checkpoints import read_eagle3, read_medusa
    from ..engine.head_drafting import open_eagle_drafting, open_medusa_drafting

    if isinstance(config, MedusaDecodingConfig):
        return open_medusa_drafting(config, target, read_medusa(head, target.config), head.name)
    if isinstance(config, EagleDecodingConfig):
        return open_eagle_drafting(config, target, read_eagle3(head, target.config), max_sequences)
    return None
