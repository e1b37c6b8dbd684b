"""What `--drafter` and its options ask for, as a configuration. Needs no model: mistakes show before any work.

A drafter is named by its method, or by its weights: then what they hold says which method they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    LayerSkipDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
)
from .errors import NOT_JSON, OptionError

DEFAULT_DRAFT_LEN = 4
EMBEDDED = {"medusa": "embedded:medusa", "eagle3": "embedded:eagle3"}  # the heads meant by a method's name alone


@dataclass(frozen=True)
class DrafterOptions:
    """The options as they were written; None: not given. `drafter` is a method, a checkpoint or an engine directory."""

    drafter: str | None = None
    max_draft_len: int | None = None
    confidence_threshold: float | None = None
    ngram_size: int | None = None
    lookahead: str | None = None
    skip_layers: str | None = None
    tree: str | None = None

    @property
    def k(self) -> int:
        return DEFAULT_DRAFT_LEN if self.max_draft_len is None else self.max_draft_len


def decoding_config(options: DrafterOptions) -> DecodingBaseConfig | None:
    """The configuration, None for plain decoding. Raises `OptionError`, also for an option that has no effect."""
    if options.drafter is None:
        _refuse_others(options, ("max_draft_len",), "without --drafter")
        DecodingBaseConfig(max_draft_len=options.k)  # refuses a K that makes no sense
        return None
    if not options.drafter.strip():
        raise OptionError("--drafter is empty", "a method, a checkpoint or an engine directory", "or leave it out")
    make, understood = METHODS[method_of(options.drafter)]
    _refuse_others(options, understood, f"with --drafter {options.drafter}")
    return make(options)


def method_of(drafter: str) -> str:
    """The method behind a value of `--drafter`: its own name, or what the configuration beside the weights says."""
    if drafter in METHODS:
        return drafter
    for method, name in EMBEDDED.items():
        if drafter == name:
            return method
    from .models import head_kind

    try:
        content = json.loads((Path(drafter).expanduser() / "config.json").read_text("utf-8"))
    except (OSError, *NOT_JSON):  # an engine directory, a Hub id, or nothing at all: whoever opens it says so
        return MODEL
    return (head_kind(content) if isinstance(content, dict) else "") or MODEL


def _refuse_others(options: DrafterOptions, understood: tuple[str, ...], where: str) -> None:
    for field in fields(options):
        name = field.name
        if name not in ("drafter", *understood) and getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} has no effect {where}", "only options that have one", "leave it out")


# ---- one maker per method -------------------------------------------------------------------------------------------


def _draft_model(o: DrafterOptions) -> DecodingBaseConfig:
    return DraftTargetDecodingConfig(
        max_draft_len=o.k, speculative_model_dir=o.drafter, confidence_threshold=o.confidence_threshold
    )


def _ngram(o: DrafterOptions) -> DecodingBaseConfig:
    sizes = {"max_draft_len": o.k} | _given(max_matching_ngram_size=o.ngram_size)
    return NGramDecodingConfig(**sizes)


def _suffix(o: DrafterOptions) -> DecodingBaseConfig:
    sizes = {"max_draft_len": o.k} | _given(max_matching_ngram_size=o.ngram_size)
    return SADecodingConfig(**sizes)


def _lookahead(o: DrafterOptions) -> DecodingBaseConfig:
    if o.lookahead is None:
        return LookaheadDecodingConfig()
    numbers = _numbers("--lookahead", o.lookahead)
    if len(numbers) != 3:
        raise OptionError(f"--lookahead is {o.lookahead!r}", "three whole numbers W,N,G", "write for example 4,3,4")
    return LookaheadDecodingConfig(
        max_window_size=numbers[0], max_ngram_size=numbers[1], max_verification_set_size=numbers[2]
    )


def _layer_skip(o: DrafterOptions) -> DecodingBaseConfig:
    skipped = None if o.skip_layers is None else _numbers("--skip-layers", o.skip_layers)
    return LayerSkipDecodingConfig(max_draft_len=o.k, skip_layers=skipped, confidence_threshold=o.confidence_threshold)


def _medusa(o: DrafterOptions) -> DecodingBaseConfig:
    tree = None if o.tree is None else _paths(o.tree)
    return MedusaDecodingConfig(max_draft_len=o.k, speculative_model_dir=_heads(o, "medusa"), medusa_choices=tree)


def _eagle3(o: DrafterOptions) -> DecodingBaseConfig:
    tree: dict[str, Any] = {}
    if o.tree is not None and o.tree.startswith("dynamic:"):
        numbers = _numbers("--tree", o.tree.removeprefix("dynamic:"))
        if len(numbers) != 2:
            raise OptionError(f"--tree is {o.tree!r}", "dynamic:TOPK,TOTAL", "write for example dynamic:4,16")
        tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": numbers[0], "max_total_draft_tokens": numbers[1]}
    elif o.tree is not None:
        tree = {"eagle_choices": _paths(o.tree)}
    return EagleDecodingConfig(
        max_draft_len=o.k,
        speculative_model_dir=_heads(o, "eagle3"),
        confidence_threshold=o.confidence_threshold,
        **tree,
    )


MODEL = "a draft model"
METHODS: dict[str, tuple[Callable[[DrafterOptions], DecodingBaseConfig], tuple[str, ...]]] = {  # and what each takes
    MODEL: (_draft_model, ("max_draft_len", "confidence_threshold")),
    "ngram": (_ngram, ("max_draft_len", "ngram_size")),
    "suffix": (_suffix, ("max_draft_len", "ngram_size")),
    "lookahead": (_lookahead, ("lookahead",)),
    "layer-skip": (_layer_skip, ("max_draft_len", "skip_layers", "confidence_threshold")),
    "medusa": (_medusa, ("max_draft_len", "tree")),
    "eagle3": (_eagle3, ("max_draft_len", "tree", "confidence_threshold")),
}


def _heads(o: DrafterOptions, method: str) -> str | None:
    return EMBEDDED[method] if o.drafter == method else o.drafter


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _paths(text: str) -> list[list[int]]:
    """ "0/1/0.0" as [[0], [1], [0, 0]]."""
    return [_numbers("--tree", path, ".") for path in text.split("/")]


def _numbers(option: str, text: str, separator: str = ",") -> list[int]:
    try:
        return [int(part) for part in text.split(separator)]
    except ValueError:
        raise OptionError(
            f"{option} holds {text!r}", f"whole numbers with {separator!r} between them", f"correct {option}"
        ) from None
