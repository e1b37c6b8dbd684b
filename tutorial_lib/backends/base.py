"""What every backend is to `LLM`: token ids in, generations out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ..config import SamplingParams
from ..results import Generation


class Backend(Protocol):
    tokenizer: Any
    info: dict[str, Any]

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        """Decode every prompt with its own params, in order."""

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generation]:
        """The generation so far, after every round; the last one is complete."""

    def close(self) -> None:
        """Free weights and caches. Calling it again does nothing."""
