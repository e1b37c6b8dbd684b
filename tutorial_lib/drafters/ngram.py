"""Prompt lookup: propose what followed the same words earlier in the text. No model, no training.

Saxena 2023 ("prompt lookup decoding"); the options are TensorRT-LLM's `NGramDecodingConfig`. The longest n-gram that
ends the text is looked up; what followed it then is proposed now. A proposal that runs into the end of the text goes
on with its own first tokens, so a loop is drafted at full length. Nothing found means nothing proposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..config import NGramDecodingConfig
from ..errors import OptionError
from .base import Draft, Outcome, SlotState

LONGEST = 64  # tokens of an n-gram: the index holds one of each length for every token of the text


class NGramDrafter:
    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: NGramDecodingConfig, stop_ids: Iterable[int]) -> None:
        if config.max_matching_ngram_size > LONGEST:
            raise OptionError(
                f"max_matching_ngram_size is {config.max_matching_ngram_size}",
                f"at most {LONGEST}: every n-gram of every length is kept",
                "take SADecodingConfig (--drafter suffix), which compares any length",
            )
        self._sizes = range(config.max_matching_ngram_size, 0, -1)
        self._is_use_oldest = config.is_use_oldest
        self._stop_ids = frozenset(stop_ids)  # never proposed: copied out of a chat history they would only be rejected
        self._follows: dict[int, dict[tuple[int, ...], int]] = {}  # slot -> n-gram -> index of the token after it
        self._indexed: dict[int, int] = {}  # slot -> how many tokens are indexed

    def reset(self, slot: int, prompt_ids: Sequence[int], features: object = None) -> None:
        self._follows[slot], self._indexed[slot] = {}, 0

    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        return [Draft(tuple(self._lookup(s))) for s in states]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Only emitted text is indexed, so there is nothing to take back."""

    def _lookup(self, state: SlotState) -> list[int]:
        ids, follows = state.token_ids, self._follows[state.slot]
        self._index(state.slot, ids)
        start = next((follows[key] for n in self._sizes if (key := tuple(ids[-n:])) in follows), None)
        drafted: list[int] = []
        while start is not None and len(drafted) < state.budget:
            index = start + len(drafted)
            token = ids[index] if index < len(ids) else drafted[index - len(ids)]
            if token in self._stop_ids:
                break
            drafted.append(token)
        return drafted

    def _index(self, slot: int, ids: Sequence[int]) -> None:
        """Enter every n-gram that has a successor: those ending before the last token."""
        follows = self._follows[slot]
        for end in range(max(1, self._indexed[slot]), len(ids)):
            for n in self._sizes:
                if n <= end:
                    key = tuple(ids[end - n : end])
                    if not self._is_use_oldest or key not in follows:
                        follows[key] = end
        self._indexed[slot] = len(ids)
