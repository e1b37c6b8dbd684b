"""What both adapters of the TensorRT-LLM backend share: the options they were made with, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import DecodingBaseConfig, KvCacheConfig, SamplingParams
from ...errors import OptionError, PromptError
from .support import Version

STAND_IN_NOTE = "a stand-in of the library answered: nothing was computed, no figure means anything"


@dataclass(frozen=True)
class Setup:
    """The backend's options as they reach an adapter. tp: GPUs that share the target."""

    version: Version
    is_stand_in: bool
    speculative: DecodingBaseConfig | None
    kv: KvCacheConfig | None
    dtype: str
    max_batch_size: int | None
    max_seq_len: int | None
    tp: int
    forced: int | None
    say: Callable[[str], None]


def drafter_label(config: DecodingBaseConfig | None, drafter: Any) -> str | None:
    if drafter is not None:
        return drafter.name
    folder = getattr(config, "speculative_model_dir", None)
    return str(folder) if folder is not None else (None if config is None else config.decoding_type.lower())


def check_length(prompt: Sequence[int], params: SamplingParams, limit: int, which: str) -> None:
    if not prompt:
        raise PromptError("the prompt is empty", "at least one token", "give it text")
    if len(prompt) + params.max_tokens > limit:
        raise PromptError(
            f"prompt of {len(prompt)} tokens and {params.max_tokens} new ones",
            f"at most {limit} together ({which})",
            "shorten the prompt or ask for fewer tokens",
        )


def refused(option: str, why: str) -> OptionError:
    return OptionError(f"the tensorrt_llm backend cannot honour {option}: {why}", "it left out", "or another backend")
