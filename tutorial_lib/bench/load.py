"""An engine under load: requests that come while others run, what each of them waits for, what the machine yields.

`serve` puts one load on an engine turn by turn, by the real clock, and keeps the four times of every request: arrival,
slot, first token, end. A load is closed (so many clients, each asks again when it was answered) or Poisson (arrivals at
a rate, whatever the engine does; a request that comes in mid-turn has waited since then). Batching is in flight, or
static for comparison: a batch that nobody joins until its last request has ended. An engine is known here by `open`,
`step` and `occupancy`, whatever it runs on. What is run and compared: `load_run`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..config import SamplingParams
from ..results import Generation
from . import metrics

IN_FLIGHT, STATIC = "in flight", "static"
CLOSED, POISSON = "closed", "poisson"
PERCENTILES = (50, 90, 99)
SAMPLES = 200  # most points of a run's curve of cache use
Clock = Callable[[], float]
Record = dict[str, Any]

_TIMES = {
    "ttft_s": "Time to first token: from the request's arrival until its first token is known, waiting included, in s",
    "tpot_ms": "Time per output token after the first, of each request: (end - first token) / (its output tokens - 1), "
    "in ms",
    "latency_s": "From the request's arrival until its last token is known, in s",
    "queued_s": "From the request's arrival until it has a slot in the batch, in s",
}
DEFINITIONS: dict[str, str] = {
    "requests": metrics.DEFINITIONS["requests"],
    "output_tokens": metrics.DEFINITIONS["output_tokens"],
    "seconds": "From the first arrival until the last request has ended, in s.",
    "output_tok_s": "Output throughput under load: output tokens of all requests / seconds, in tokens per second; the "
    "end of the run, when fewer requests are left than could be served, is part of it.",
    "requests_per_s": "Requests / seconds.",
    **{name: f"{what}; mean over requests." for name, what in _TIMES.items()},
    **{
        f"{name}_p{p}": f"{what}; {p}th percentile over requests." for name, what in _TIMES.items() for p in PERCENTILES
    },
    "mean_running": "Requests with a slot, mean over turns of the engine.",
    "kv_use_mean": "Blocks of the KV cache that requests hold / all of its blocks, mean over turns of the engine.",
    "kv_use_max": "The same at its largest.",
    "preemptions": "How often a request lost its slot again, because blocks ran out, and was read anew.",
    **{
        name: metrics.DEFINITIONS[name]
        for name in ("drafted", "accepted", "acceptance_length", "acceptance_rate", "mean_draft_len")
    },
}
BATCHING = {
    IN_FLIGHT: "Requests join and leave between two rounds, as soon as a place is free.",
    STATIC: "A batch takes what waits, up to the concurrency; nobody joins until its last request has ended.",
}


class Stream(Protocol):
    """One open request, see `engine.engine.RequestStream`."""

    @property
    def is_over(self) -> bool: ...
    @property
    def start_s(self) -> float: ...
    def generation(self) -> Generation: ...


class Server(Protocol):
    """What a load needs of an engine, see `engine.engine.Engine`."""

    def open(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Sequence[Stream]: ...
    def step(self) -> None: ...
    def occupancy(self) -> tuple[int, int, float]: ...


# ---- what comes when ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """jobs: what is asked, in order: prompt ids and how many tokens to write. concurrency: the clients of a closed
    load; of a Poisson load the most requests at once. at_s: seconds from the start at which each job arrives; None: a
    closed load."""

    jobs: tuple[tuple[tuple[int, ...], int], ...]
    concurrency: int
    at_s: tuple[float, ...] | None = None


def poisson_times(rate: float, count: int, seed: int = 0) -> tuple[float, ...]:
    """Arrival times of a Poisson process of `rate` requests per second, the first at 0."""
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return tuple(times)


@dataclass
class Served:
    """One request of a load; times are seconds from the start of the load."""

    arrival_s: float
    opened_s: float = 0.0
    generation: Generation | None = None

    @property
    def done(self) -> Generation:
        if self.generation is None:
            raise ValueError("this request has not ended")
        return self.generation

    @property
    def admitted_s(self) -> float | None:
        return None if self.done.queued_s is None else self.opened_s + self.done.queued_s

    @property
    def first_token_s(self) -> float:
        return self.opened_s + self.done.ttft_s

    @property
    def end_s(self) -> float:
        return self.opened_s + self.done.latency_s

    def times(self) -> Record:
        """Its own four durations, by the names of `DEFINITIONS`."""
        count = len(self.done.token_ids)
        return {
            "ttft_s": self.first_token_s - self.arrival_s,
            "tpot_ms": 1e3 * (self.end_s - self.first_token_s) / (count - 1) if count > 1 else None,
            "latency_s": self.end_s - self.arrival_s,
            "queued_s": None if self.admitted_s is None else self.admitted_s - self.arrival_s,
        }


@dataclass
class Outcome:
    """requests: in the order of the load's jobs. samples: one for each turn of the engine: seconds from the start,
    requests with a slot, requests that wait, share of the cache's blocks that are held."""

    requests: list[Served]
    samples: list[tuple[float, int, int, float]] = field(default_factory=list)


def serve(
    engine: Server,
    load: Load,
    *,
    batching: str = IN_FLIGHT,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Put `load` on `engine` and wait for its end. `clock` must be the one by which the engine's requests count."""
    coming = deque(range(len(load.jobs)))
    waiting: deque[int] = deque()
    live: dict[int, Stream] = {}
    served: dict[int, Served] = {}
    samples: list[tuple[float, int, int, float]] = []
    start = clock()
    while coming or waiting or live:
        now = clock() - start
        while coming and _has_arrived(load, coming[0], now, len(waiting) + len(live)):
            served[coming[0]] = Served(now if load.at_s is None else load.at_s[coming[0]])
            waiting.append(coming.popleft())
        if batching == IN_FLIGHT or not live:
            while waiting and len(live) < load.concurrency:
                number = waiting.popleft()
                ids, count = load.jobs[number]
                (live[number],) = engine.open([ids], [SamplingParams(max_tokens=count, ignore_eos=True)])
                served[number].opened_s = live[number].start_s - start
        if not live:
            sleep(max(0.0, (load.at_s or ())[coming[0]] - (clock() - start)))
            continue
        engine.step()
        running, queued, use = engine.occupancy()
        samples.append((clock() - start, running, queued + len(waiting), use))
        for number in [n for n, stream in live.items() if stream.is_over]:
            served[number].generation = live.pop(number).generation()
    return Outcome([served[n] for n in range(len(load.jobs))], samples)


def _has_arrived(load: Load, number: int, now: float, unanswered: int) -> bool:
    return unanswered < load.concurrency if load.at_s is None else load.at_s[number] <= now


# ---- what it comes to -----------------------------------------------------------------------------------------------


def figures(outcome: Outcome, *, is_speculative: bool) -> Record:
    """All figures of `DEFINITIONS`; None for what does not apply."""
    requests = outcome.requests
    done = [r.done for r in requests]
    seconds = max(r.end_s for r in requests) - min(r.arrival_s for r in requests)
    tokens = sum(len(g.token_ids) for g in done)
    found: Record = {
        "requests": len(requests),
        "output_tokens": tokens,
        "seconds": seconds,
        "output_tok_s": tokens / seconds,
        "requests_per_s": len(requests) / seconds,
        "mean_running": float(np.mean([s[1] for s in outcome.samples])),
        "kv_use_mean": float(np.mean([s[3] for s in outcome.samples])),
        "kv_use_max": max(s[3] for s in outcome.samples),
        "preemptions": sum(g.preemptions for g in done),
    }
    times = [r.times() for r in requests]
    for name in _TIMES:
        values = [t[name] for t in times if t[name] is not None]
        found[name] = float(np.mean(values)) if values else None
        found |= {f"{name}_p{p}": float(np.percentile(values, p)) if values else None for p in PERCENTILES}
    of_drafts = metrics.figures(done, is_speculative=is_speculative)
    names = ("drafted", "accepted", "acceptance_length", "acceptance_rate", "mean_draft_len")
    return found | {name: of_drafts[name] for name in names}


def thinned(samples: Sequence[tuple[float, int, int, float]]) -> list[list[float]]:
    """At most `SAMPLES` of them, evenly, the last one among them."""
    step = -(-len(samples) // SAMPLES)
    return [[round(t, 4), running, waiting, round(use, 4)] for t, running, waiting, use in samples[::-step][::-1]]


def timeline(outcome: Outcome) -> list[Record]:
    """Every request as a row of a record: its times, in seconds from the start, and its counts."""
    return [
        {
            "arrival_s": r.arrival_s,
            "admitted_s": r.admitted_s,
            "first_token_s": r.first_token_s,
            "end_s": r.end_s,
            "prompt_tokens": len(r.done.prompt_token_ids),
            "output_tokens": len(r.done.token_ids),
            "rounds": len(r.done.rounds),
            "drafted": sum(len(x.drafted) for x in r.done.rounds),
            "accepted": sum(x.accepted for x in r.done.rounds),
            "preemptions": r.done.preemptions,
        }
        for r in outcome.requests
    ]
