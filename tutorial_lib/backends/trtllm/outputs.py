"""What the library returns as `Generation`s: token ids, text, rounds, times. Pure functions of what was observed.

The LLM classes report how many iterations a request took (`decoding_iter`) and hand out tokens as they come; the
command line's `generate()` calls are timed one by one (`worker.py`). Neither says which draft tokens were rejected:
they appear as `UNKNOWN_TOKEN`, so that counts and rates are right and nothing is made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...config import SamplingParams
from ...engine.detokenize import Detokenizer
from ...errors import BackendUnavailable
from ...results import Generation, Round

UNKNOWN_TOKEN = -1  # a draft token that was proposed and rejected, and that the library does not name


@dataclass
class LibraryGeneration(Generation):
    """A `Generation` with TensorRT-LLM's own count. `acceptance_length` is tokens / (decoding_iter + 1), as
    trtllm-bench prints it: prefill is one of its iterations, so it is a little below the figure over rounds."""

    decoding_iter: int | None = None
    acceptance_length: float | None = None


@dataclass(frozen=True)
class Arrival:
    """At `seconds` after the request's start `count` output tokens were there."""

    seconds: float
    count: int


def acceptance_length(tokens: int, decoding_iter: int) -> float:
    """As trtllm-bench counts it."""
    return tokens / (decoding_iter + 1)


# ---- the LLM classes ------------------------------------------------------------------------------------------------


def from_request_output(
    prompt_ids: Sequence[int],
    output: Any,
    arrivals: Sequence[Arrival],
    params: SamplingParams,
    *,
    max_draft_len: int,
    eos_token_ids: frozenset[int],
    tokenizer: Any,
    is_simulated: bool = False,
) -> LibraryGeneration:
    """A `RequestOutput` and when its tokens arrived. max_draft_len 0: no drafter."""
    completion = output.outputs[0]
    ids = [int(token) for token in completion.token_ids]
    if completion.finish_reason not in ("stop", "length", None):
        raise BackendUnavailable(f"a request ended by {completion.finish_reason!r}", "'stop' or 'length'", "try again")
    iterations = getattr(output, "decoding_iter", None)
    stop = completion.stop_reason
    return LibraryGeneration(
        prompt_token_ids=list(prompt_ids),
        token_ids=ids,
        text="" if is_simulated else text_of(ids, params, tokenizer),
        finish_reason=completion.finish_reason or "length",
        rounds=rounds_of(ids, arrivals, iterations, max_draft_len),
        ttft_s=arrivals[0].seconds if arrivals else 0.0,
        latency_s=arrivals[-1].seconds if arrivals else 0.0,
        logprobs=_logprobs(completion, params),
        stop_reason=None if stop in eos_token_ids and stop not in (params.stop_token_ids or ()) else stop,
        is_simulated=is_simulated,
        decoding_iter=iterations,
        acceptance_length=None if iterations is None or not ids else acceptance_length(len(ids), iterations),
    )


def rounds_of(
    ids: Sequence[int], arrivals: Sequence[Arrival], iterations: int | None, max_draft_len: int
) -> list[Round]:
    """The rounds behind a request's tokens. The first token comes from prefill and belongs to none.

    Every arrival is a round, unless some were merged on their way (fewer arrivals than iterations, or more tokens
    than a round can emit): then the tokens are dealt out evenly over the iterations that the engine counted.
    """
    if len(ids) < 2 or not arrivals:
        return []
    counts = [arrival.count for arrival in arrivals]
    sizes = [1, *(later - earlier for earlier, later in pairwise(counts))]
    sizes[0] = counts[0] - 1  # what came with the first token
    ends = [arrival.seconds for arrival in arrivals]
    observed = [(size, end) for size, end in zip(sizes, ends, strict=True) if size > 0]
    is_whole = sizes[0] == 0 and max(size for size, _ in observed) <= max_draft_len + 1
    if iterations is not None:
        is_whole = is_whole and len(observed) in (iterations, iterations - 1)
    if not is_whole:
        number = iterations if iterations else len(ids) - 1
        observed = _even(len(ids) - 1, max(1, min(number, len(ids) - 1)), arrivals[0].seconds, arrivals[-1].seconds)
    rounds, at, before = [], 1, arrivals[0].seconds
    for size, end in observed:
        emitted = tuple(ids[at : at + size])
        rounds.append(_round(emitted, max_draft_len, end - before, end))
        at, before = at + size, end
    return rounds


def _even(tokens: int, number: int, start: float, end: float) -> list[tuple[int, float]]:
    """`tokens` over `number` rounds with the least variance, at even times."""
    cuts = [tokens * i // number for i in range(number + 1)]
    return [(b - a, start + (end - start) * (i + 1) / number) for i, (a, b) in enumerate(pairwise(cuts))]


def _round(emitted: tuple[int, ...], max_draft_len: int, seconds: float, end: float) -> Round:
    """Drafting and verifying are one step inside the library: all of a round's time counts as verifying."""
    if max_draft_len == 0:
        return Round((), 0, emitted, 0.0, seconds, end)
    accepted = min(len(emitted) - 1, max_draft_len)
    drafted = emitted[:accepted] + (UNKNOWN_TOKEN,) * (max_draft_len - accepted)
    return Round(drafted, accepted, emitted, 0.0, seconds, end)


def _logprobs(completion: Any, params: SamplingParams) -> list[dict[int, float]] | None:
    if params.logprobs is None or not completion.logprobs:
        return None
    return [
        {int(token): float(getattr(value, "logprob", value)) for token, value in entry.items()}
        for entry in completion.logprobs
    ]


def text_of(ids: Sequence[int], params: SamplingParams, tokenizer: Any) -> str:
    """The text of `ids`, cut before a stop string."""
    reader = Detokenizer(tokenizer, params.stop_strings)
    for token in ids:
        if reader.push(token):
            break
    return reader.finish()


# ---- the command line's generate() calls ---------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineCall:
    """One `generate()` of run.py as the worker saw it. arrivals: for a streaming call, when how many tokens were
    there; drafted: the draft tokens that the target was given; tokens: what came out after the input."""

    is_drafter: bool
    start: float
    end: float
    drafted: tuple[int, ...]
    tokens: tuple[int, ...]
    arrivals: tuple[Arrival, ...] = ()


def from_engine_calls(
    prompt_ids: Sequence[int],
    calls: Sequence[EngineCall],
    params: SamplingParams,
    *,
    max_draft_len: int,
    eos_token_ids: frozenset[int],
    tokenizer: Any,
    has_outside_drafts: bool,
    placeholder: int | None = None,
) -> Generation:
    """One request from its calls. With a draft model or a look-up (has_outside_drafts) every target call is a round,
    the first one too (it prefills and verifies at once); otherwise there is one call, and its arrivals are the rounds.
    placeholder: the token that run.py hands over where a look-up found nothing; alone and rejected it is no draft."""
    targets = [call for call in calls if not call.is_drafter]
    start = calls[0].start
    if has_outside_drafts:
        rounds = _drafted_rounds(calls, start, placeholder)
        ttft = rounds[0].end_s
        ids = [token for round_ in rounds for token in round_.emitted]
    else:
        call = targets[-1]
        arrivals = call.arrivals or (Arrival(call.end - call.start, len(call.tokens)),)
        ids, ttft = list(call.tokens), arrivals[0].seconds
        rounds = rounds_of(ids, arrivals, None, max_draft_len) if call.arrivals else []
    ids, reason = _cut(ids, params, eos_token_ids)
    rounds = _cut_rounds(rounds, len(ids))
    return Generation(
        prompt_token_ids=list(prompt_ids),
        token_ids=ids,
        text=text_of(ids, params, tokenizer),
        finish_reason=reason,
        rounds=rounds,
        ttft_s=ttft,
        latency_s=targets[-1].end - start,
    )


def _drafted_rounds(calls: Sequence[EngineCall], start: float, placeholder: int | None) -> list[Round]:
    rounds, draft_s = [], 0.0
    for call in calls:
        if call.is_drafter:
            draft_s += call.end - call.start
            continue
        accepted = 0
        for proposed, came in zip(call.drafted, call.tokens, strict=False):
            if proposed != came:
                break
            accepted += 1
        drafted = () if call.drafted == (placeholder,) and not accepted else call.drafted
        rounds.append(Round(drafted, accepted, call.tokens, draft_s, call.end - call.start, call.end - start))
        draft_s = 0.0
    return [round_ for round_ in rounds if round_.emitted]


def _cut(ids: list[int], params: SamplingParams, eos_token_ids: frozenset[int]) -> tuple[list[int], str]:
    """run.py knows one end token and may overshoot: all of the target's EOS ids end an answer, and max_tokens holds."""
    if not params.ignore_eos:
        for place, token in enumerate(ids[: params.max_tokens]):
            if token in eos_token_ids:
                return ids[: place + 1], "stop"
    return ids[: params.max_tokens], "length"


def _cut_rounds(rounds: list[Round], tokens: int) -> list[Round]:
    """Rounds over the last `tokens` minus prefill: what was emitted after the end is dropped."""
    surplus = sum(len(r.emitted) for r in rounds) - tokens
    while rounds and surplus > 0:
        last = rounds[-1]
        keep = max(0, len(last.emitted) - surplus)
        surplus -= len(last.emitted) - keep
        rounds = rounds[:-1]
        if keep:
            emitted = last.emitted[:keep]
            rounds.append(Round(last.drafted, last.accepted, emitted, last.draft_s, last.verify_s, last.end_s))
    return rounds
