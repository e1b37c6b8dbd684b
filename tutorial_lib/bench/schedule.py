"""How many tokens to draft at which load: K by number of running requests, down to 0 where drafting no longer pays.

A round serves all running requests at once: K more tokens for each of them are K x batch more rows, which are nearly
free while the weights' reading takes the time, and are not once the arithmetic does (`cost_model.ridge_tokens`). So the
best K falls as the batch grows. `choose` takes the times of whole rounds and an acceptance and is pure; `measured`
takes both from an open `LLM`. The result is what `draft_len_schedule` takes, here and in TensorRT-LLM 1.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..config import DecodingBaseConfig, SamplingParams
from ..errors import OptionError
from . import metrics
from .cost_model import expected_tokens, expected_tokens_by_position
from .prompts import load_prompts, render, select

BATCHES = (1, 2, 4, 8)
MARGIN = 0.02  # a smaller K within this of the best is taken: it is less work for as much, and times are noisy
TOKENS = 32  # of each answer from which acceptance is measured
Config = TypeVar("Config", bound=DecodingBaseConfig)


@dataclass(frozen=True)
class Choice:
    """What `max_draft_len` tokens a round would yield with `batch` requests running."""

    batch: int
    max_draft_len: int
    acceptance_length: float
    round_s: float

    @property
    def output_tok_s(self) -> float:
        """Of all requests together, prefill left out."""
        return self.batch * self.acceptance_length / self.round_s


@dataclass(frozen=True)
class Schedule:
    """draft_len_schedule: from so many requests on -> K. choices: every batch and K that was compared."""

    draft_len_schedule: dict[int, int]
    choices: tuple[Choice, ...]

    @property
    def max_draft_len(self) -> int:
        """K of a single request, the largest; 0 if drafting pays at no load."""
        return self.draft_len_schedule[1]

    def chosen(self, batch: int) -> int:
        """K with so many requests: the entry of the largest number that is not larger."""
        return self.draft_len_schedule[max(size for size in self.draft_len_schedule if size <= batch)]

    def apply(self, config: Config) -> Config:
        """`config` with this schedule; `OptionError` if drafting pays at no load."""
        if not self.max_draft_len:
            raise OptionError("drafting pays at no load measured", "one at which it does", "decode plainly")
        schedule = self.draft_len_schedule
        return replace(config, max_draft_len=self.max_draft_len, draft_len_schedule=schedule)


def choose(round_s: Mapping[tuple[int, int], float], acceptance: float | Sequence[float]) -> Schedule:
    """The K of the greatest output throughput for every batch size in `round_s`.

    round_s: (batch, K) -> seconds of a round that serves so many requests at that K; for each batch K = 0, plain
    decoding, must be there. acceptance: per-token probability, or conditional rates by position; it is taken to hang
    on the text and not on the load. A larger batch never gets a larger K: its rows only cost more.
    """
    batches = sorted({batch for batch, _ in round_s})
    if not batches or batches[0] != 1 or any((batch, 0) not in round_s for batch in batches):
        raise OptionError(f"rounds were timed for batches {batches}", "1 among them, and each at K = 0 too")
    choices = tuple(Choice(b, k, _length(acceptance, k), s) for (b, k), s in sorted(round_s.items()))
    schedule: dict[int, int] = {}
    most = max(k for _, k in round_s)
    for batch in batches:
        here = [c for c in choices if c.batch == batch and c.max_draft_len <= most]
        best = max(c.output_tok_s for c in here)
        chosen = min(c.max_draft_len for c in here if c.output_tok_s >= best * (1 - MARGIN))
        if not schedule or chosen < most:
            schedule[batch] = most = chosen
    return Schedule(schedule, choices)


def _length(acceptance: float | Sequence[float], k: int) -> float:
    if isinstance(acceptance, (int, float)):
        return expected_tokens(acceptance, k)
    if k > len(acceptance):
        raise OptionError(f"acceptance is known of {len(acceptance)} positions", f"of {k}, the largest K timed")
    return expected_tokens_by_position(acceptance[:k])


def measured(
    llm: Any,
    *,
    batches: Sequence[int] = BATCHES,
    acceptance: float | Sequence[float] | None = None,
    context: int = 128,
    say: Callable[[str], None] = lambda line: None,
) -> Schedule:
    """`choose` with rounds timed on `llm`, at every K up to its own, and without `acceptance` with that of short
    answers to a bundled prompt of each kind. `llm` must draft always (no schedule of its own)."""
    longest = llm.info["max_draft_len"]
    if not longest:
        raise OptionError("this LLM has no drafter", "one that drafts", "give it a speculative_config")
    if any(size < 1 for size in batches) or 1 not in batches:
        raise OptionError(f"batches are {list(batches)}", "whole numbers >= 1, and 1 among them")
    if acceptance is None:
        acceptance = _acceptance(llm, longest)
        say("acceptance by position, given those before: " + ", ".join(f"{rate:.2f}" for rate in acceptance))
    deepest = longest if isinstance(acceptance, (int, float)) else min(longest, len(acceptance))
    times = {}
    for batch in sorted(set(batches)):
        for k in range(deepest + 1):
            times[batch, k] = llm.time_rounds(batch, k, context)
        say(f"{batch} at once: " + ", ".join(f"K = {k} {1e3 * times[batch, k]:.1f} ms" for k in range(deepest + 1)))
    return choose(times, acceptance)


def _acceptance(llm: Any, longest: int) -> list[float]:
    """Conditional acceptance by position; it ends before the first position that was never reached."""
    prompts = [render(p, llm.tokenizer) for p in select(load_prompts(), 1)]
    done = [llm.generate(ids, SamplingParams(max_tokens=TOKENS)) for ids in prompts]
    rates = metrics.conditional_acceptance_by_position(done)[:longest]
    known: list[float] = []
    for rate in rates:
        if rate is None:
            break
        known.append(rate)
    return known
