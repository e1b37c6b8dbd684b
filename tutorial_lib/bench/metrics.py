"""The figures of a run, computed from its generations and their rounds. Pure: nothing here measures or prints.

Requests that ran together are passed in the order they were given, with the batch size. Every figure that does not
apply (the acceptance of a plain run, the TPOT of one-token answers) is None, never 0. `DEFINITIONS` says in one
sentence what each figure is; records carry it. Output and decode throughput follow NVIDIA's posts and TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..results import Generation, Round

DEFINITIONS: dict[str, str] = {
    "requests": "Number of requests answered.",
    "output_tokens": "Tokens that entered the answers, the stop token included, prompt tokens not.",
    "output_tok_s": "Output throughput: output tokens of all requests / their end-to-end latency, TTFT included, in "
    "tokens per second; a batch counts from its start to its last token.",
    "decode_tok_s": "Decode throughput: (output tokens - 1 per request) / (latency - TTFT), in tokens per second.",
    "ttft_s": "Time to first token: from the request's start until its first token is known, mean over requests, in s.",
    "tpot_ms": "Time per output token after the first: sum of (latency - TTFT) / sum of (output tokens - 1), in ms.",
    "latency_s": "From the request's start until its last token was known, mean over requests, in s.",
    "rounds": "Rounds of all requests; a round is one draft and one verification, for a plain run one target step. "
    "The first token comes from prefill and belongs to no round.",
    "round_ms": "Mean time of a round: sum of (latency - TTFT) / rounds, in ms.",
    "draft_ms_per_round": "Mean time a round spent drafting, in ms.",
    "verify_ms_per_round": "Mean time a round spent in the target (for a plain run: in its step), in ms.",
    "overhead_ms_per_round": "What is left of the mean round time after drafting and verifying, in ms.",
    "first_round_overhead_ms": "What is left of a request's first round after drafting and verifying, mean over "
    "requests, in ms: there a draft model reads the prompt.",
    "drafted": "Draft tokens proposed in all rounds, of trees those on every branch.",
    "accepted": "Draft tokens accepted in all rounds: of every round the leading run of right ones only, of a tree the "
    "right ones along one branch from its root.",
    "cut_tokens": "Tokens verified in a last round but dropped, because the request stopped inside it.",
    "acceptance_length": "Acceptance length: tokens emitted in rounds / rounds, pooled over all requests, bonus token "
    "included, the first token (prefill) and tokens cut off by a stop not counted.",
    "acceptance_length_request_mean": "Mean over requests of each request's own acceptance length; long answers weigh "
    "no more than short ones.",
    "acceptance_rate": "Accepted / drafted, bonus tokens in neither; it is not the per-token probability alpha, since "
    "tokens after the first rejected one count as drafted, and so do all branches of a tree.",
    "mean_draft_len": "Drafted / rounds: the draft length that really ran, of trees the number of their tokens.",
    "acceptance_by_position": "For position k: rounds that accepted k or more / rounds that drafted k or more deep; a "
    "token's position is the number of tokens from the text to it, so siblings of a tree share one.",
    "conditional_acceptance_by_position": "For position k: rounds that accepted k or more / rounds that accepted the "
    "k-1 before it and drafted k or more deep.",
    "accepted_histogram": "Number of rounds that accepted 0, 1, 2, ... draft tokens.",
}


def leading_run(mask: Iterable[object]) -> int:
    """How many of a round's draft tokens count as accepted: right ones before the first wrong one."""
    count = 0
    for is_right in mask:
        if not is_right:
            break
        count += 1
    return count


def output_tok_s(generations: Sequence[Generation], batch_size: int = 1) -> float | None:
    """Output throughput of requests that ran `batch_size` at a time, in tokens per second."""
    seconds = sum(max(g.latency_s for g in batch) for batch in _batches(generations, batch_size))
    return _ratio(sum(len(g.token_ids) for g in generations), seconds)


def decode_tok_s(generations: Sequence[Generation], batch_size: int = 1) -> float | None:
    """Decode throughput: what follows the first tokens, in tokens per second."""
    batches = _batches(generations, batch_size)
    seconds = sum(max(g.latency_s for g in batch) - min(g.ttft_s for g in batch) for batch in batches)
    tokens = sum(len(g.token_ids) - 1 for g in generations)
    return _ratio(tokens, seconds) if tokens else None


def tpot_ms(generations: Sequence[Generation]) -> float | None:
    """Milliseconds per output token after the first; None if no request has a second one."""
    many = [g for g in generations if len(g.token_ids) > 1]
    tokens = sum(len(g.token_ids) - 1 for g in many)
    return _ratio(1e3 * sum(g.latency_s - g.ttft_s for g in many), tokens)


def acceptance_length(generations: Sequence[Generation]) -> float | None:
    """Tokens emitted per round, pooled: every round weighs the same."""
    rounds = _rounds(generations)
    return _ratio(sum(len(r.emitted) for r in rounds), len(rounds))


def acceptance_length_request_mean(generations: Sequence[Generation]) -> float | None:
    """The same per request, then averaged: every request weighs the same."""
    return _mean([x for g in generations if (x := acceptance_length([g])) is not None])


def acceptance_rate(generations: Sequence[Generation]) -> float | None:
    """Accepted / drafted, 0 to 1; None if nothing was drafted."""
    rounds = _rounds(generations)
    return _ratio(sum(r.accepted for r in rounds), sum(len(r.drafted) for r in rounds))


def acceptance_by_position(generations: Sequence[Generation]) -> list[float]:
    """Element k-1: how often a k-th draft token was accepted, where one was drafted (in a tree: on any branch). It
    falls along a fixed K."""
    rounds = _rounds(generations)
    deepest = max((r.depth for r in rounds), default=0)
    drafted = [[r for r in rounds if r.depth >= k] for k in range(1, deepest + 1)]
    return [sum(r.accepted >= k for r in some) / len(some) for k, some in enumerate(drafted, start=1)]


def conditional_acceptance_by_position(generations: Sequence[Generation]) -> list[float | None]:
    """Element k-1: the same, only among rounds whose earlier draft tokens were all accepted; None if there are none.
    The cost model multiplies these."""
    rounds = _rounds(generations)
    deepest = max((r.depth for r in rounds), default=0)
    reached = [[r for r in rounds if r.depth >= k and r.accepted >= k - 1] for k in range(1, deepest + 1)]
    return [_ratio(sum(r.accepted >= k for r in some), len(some)) for k, some in enumerate(reached, start=1)]


def accepted_histogram(generations: Sequence[Generation]) -> list[int]:
    """Element n: rounds that accepted exactly n draft tokens."""
    rounds = _rounds(generations)
    deepest = max((r.depth for r in rounds), default=0)
    return [sum(r.accepted == n for r in rounds) for n in range(deepest + 1)]


def time_split_ms(generations: Sequence[Generation]) -> dict[str, float | None]:
    """Mean milliseconds of a round and its parts: round, draft, verify, overhead."""
    rounds = _rounds(generations)
    whole = _ratio(1e3 * sum(g.latency_s - g.ttft_s for g in generations if g.rounds), len(rounds))
    draft = _ratio(1e3 * sum(r.draft_s for r in rounds), len(rounds))
    verify = _ratio(1e3 * sum(r.verify_s for r in rounds), len(rounds))
    if whole is None or draft is None or verify is None:
        return {"round": None, "draft": None, "verify": None, "overhead": None}
    return {"round": whole, "draft": draft, "verify": verify, "overhead": whole - draft - verify}


def first_round_overhead_ms(generations: Sequence[Generation]) -> float | None:
    """Milliseconds of a request's first round outside drafting and verifying; None without rounds."""
    first = [(g.rounds[0], g.ttft_s) for g in generations if g.rounds]
    rest = _mean([r.end_s - ttft_s - r.draft_s - r.verify_s for r, ttft_s in first])
    return None if rest is None else 1e3 * rest


def figures(generations: Sequence[Generation], *, batch_size: int = 1, is_speculative: bool = True) -> dict[str, Any]:
    """All figures of `DEFINITIONS` for requests that ran `batch_size` at a time.

    A plain run has no drafts, so whatever speaks of drafting or acceptance is None. A backend that reports no rounds
    leaves their figures None as well.
    """
    rounds = _rounds(generations)
    split = time_split_ms(generations)
    found: dict[str, Any] = {
        "requests": len(generations),
        "output_tokens": sum(len(g.token_ids) for g in generations),
        "output_tok_s": output_tok_s(generations, batch_size),
        "decode_tok_s": decode_tok_s(generations, batch_size),
        "ttft_s": _mean([g.ttft_s for g in generations]),
        "tpot_ms": tpot_ms(generations),
        "latency_s": _mean([g.latency_s for g in generations]),
        "rounds": len(rounds) or None,
        "round_ms": split["round"],
        "draft_ms_per_round": split["draft"] if is_speculative else None,
        "verify_ms_per_round": split["verify"],
        "overhead_ms_per_round": split["overhead"],
        "first_round_overhead_ms": first_round_overhead_ms(generations),
    }
    acceptance: dict[str, Any] = {
        "drafted": sum(len(r.drafted) for r in rounds),
        "accepted": sum(r.accepted for r in rounds),
        "cut_tokens": sum(r.accepted + 1 - len(r.emitted) for r in rounds),
        "acceptance_length": acceptance_length(generations),
        "acceptance_length_request_mean": acceptance_length_request_mean(generations),
        "acceptance_rate": acceptance_rate(generations),
        "mean_draft_len": _ratio(sum(len(r.drafted) for r in rounds), len(rounds)),
        "acceptance_by_position": acceptance_by_position(generations),
        "conditional_acceptance_by_position": conditional_acceptance_by_position(generations),
        "accepted_histogram": accepted_histogram(generations),
    }
    applies = is_speculative and bool(rounds)
    return found | {name: value if applies else None for name, value in acceptance.items()}


def _rounds(generations: Sequence[Generation]) -> list[Round]:
    return [r for g in generations for r in g.rounds]


def _batches(generations: Sequence[Generation], batch_size: int) -> list[Sequence[Generation]]:
    return [generations[i : i + batch_size] for i in range(0, len(generations), batch_size)]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
