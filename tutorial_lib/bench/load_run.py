"""The experiment `load`: the same arrivals on plain decoding, on drafting methods, and on static batching.

`settings_for` fills in what a profile and a target leave open, `bench_load` opens the engines and puts every load on
each of them in turns, `summarize` says what each yields beside plain decoding, and where it stops paying. Shapes with
random weights run with forced acceptance: their times are real, their text is nobody's, and records say so.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config import DecodingBaseConfig, KvCacheConfig, Profile, SamplingParams, SimulatedAcceptance
from ..config import profile as profile_named
from ..errors import OptionError, PromptError
from ..results import Generation, provenance, without_folders
from . import load as loads
from .load import CLOSED, IN_FLIGHT, POISSON, STATIC, Load, Outcome, Record
from .methods import METHODS, options_of
from .prompts import load_prompts, prompt_set_sha256, render
from .summary import PLAIN

EXPERIMENT = "load"
BUNDLED_LONGEST = 128  # tokens of a bundled prompt that is taken: its prefill shall not outweigh a short output
BUILT_SLOTS, BUILT_LEN = 8, 2048  # of an engine that is built without asking for more
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `bench_load` runs.

    concurrency: clients of the closed loads, in this order; with Poisson arrivals one number, the most at once. rates:
    requests per second. requests_per_client: of a closed load; a Poisson load has that many times its concurrency.
    output_len: mean; outputs are half to one and a half of it, since a static batch waits for its longest, or all the
    same with `is_even`. input_len: prompts of exactly that many tokens, cut from the bundled text; None: the bundled
    prompts. acceptance_length: forced, on a GPU. kv_tokens: room of the cache, to see it run out. static_from: the
    smallest concurrency at which static batching is run too (alone it would be the same); None: nowhere.
    """

    target: str
    drafter: str
    dtype: str
    methods: tuple[str, ...]
    concurrency: tuple[int, ...]
    requests_per_client: int
    output_len: int
    max_draft_len: int
    arrival: str = CLOSED
    rates: tuple[float, ...] = ()
    input_len: int | None = None
    is_even: bool = False
    draft_len_schedule: Mapping[int, int] | None = None
    acceptance_length: float | None = None
    kv_tokens: int | None = None
    static_from: int | None = 2
    seed: int = 0


def settings_for(profile: Profile, **given: Any) -> Settings:
    """`given` (what is None counts as not given), and for the rest what suits the profile and the target. Shapes with
    random weights are run as others publish them: 128 tokens in, 128 out, FP8, and the acceptance length that
    SPEED-Bench reports of a 1B drafter at K = 3, 2.44. Raises `OptionError` for what cannot be."""
    if profile.is_replay or profile.backend != "torch":
        raise OptionError(f"profile {profile.name} does not run experiment {EXPERIMENT}", "profile cpu or h200")
    given = {name: value for name, value in given.items() if value is not None}
    if "max_draft_len" not in given and 1 in given.get("draft_len_schedule", {}):
        given["max_draft_len"] = given["draft_len_schedule"][1]
    target, is_gpu = given.get("target", profile.target), profile.device == "cuda"
    is_dummy, is_closed = target.startswith("dummy:"), given.get("arrival", CLOSED) == CLOSED
    is_forced = is_dummy and is_gpu
    sweep = (1, 2, 4, 8, 16, 32, 64) if is_gpu else (1, 2, 4, 8)
    suiting = {
        "target": target,
        "drafter": profile.drafter,
        "dtype": "fp8" if is_forced else profile.dtype,
        "methods": (PLAIN, "draft_target"),
        "concurrency": sweep if is_closed else (8,),
        "rates": () if is_closed else (1.0,),
        "requests_per_client": 4 if is_gpu else 2,
        "input_len": 128 if is_dummy else None,
        "output_len": 128 if is_gpu else 16,
        "is_even": is_forced,
        "max_draft_len": 3 if is_forced else profile.max_draft_len,
        "acceptance_length": 2.44 if is_forced else None,
    }
    settings = Settings(**(suiting | given))  # type: ignore[arg-type]
    _check(settings)
    return settings


def _check(s: Settings) -> None:
    if s.arrival not in (CLOSED, POISSON):
        raise OptionError(f"arrival is {s.arrival!r}", f"{CLOSED!r} or {POISSON!r}")
    if s.arrival == CLOSED and s.rates:
        raise OptionError("a rate with closed arrivals", "none: a client asks when it was answered", "leave it out")
    if s.arrival == POISSON and len(s.concurrency) != 1:
        raise OptionError(f"Poisson arrivals with {len(s.concurrency)} concurrencies", "one, the most at once")
    whole = [("concurrency", c) for c in s.concurrency]
    whole += [(n, getattr(s, n)) for n in ("requests_per_client", "output_len", "input_len", "max_draft_len")]
    for name, value in whole:
        if value is not None and value < 1:
            raise OptionError(f"{name} is {value}", "a whole number >= 1")
    if not s.concurrency or len(set(s.concurrency)) < len(s.concurrency):
        raise OptionError(f"concurrency is {list(s.concurrency)}", "at least one number, each once")
    for rate in s.rates:
        if not rate > 0:
            raise OptionError(f"a rate is {rate:g} requests per second", "above 0")
    if unknown := [m for m in s.methods if m != PLAIN and m not in METHODS]:
        raise OptionError(f"method {unknown[0]!r} is unknown", f"some of {', '.join((PLAIN, *METHODS))}")
    if PLAIN not in s.methods or len(set(s.methods)) < len(s.methods):
        raise OptionError(f"methods are {', '.join(s.methods) or 'none'}", f"{PLAIN} and others, each once")
    if s.draft_len_schedule is not None and s.methods == (PLAIN,):
        raise OptionError("a draft_len_schedule without a drafting method", "one that drafts")
    for name in s.methods:
        _config(name, s)  # refuses options that do not go together


# ---- what is asked --------------------------------------------------------------------------------------------------


def loads_of(s: Settings, tokenizer: Any) -> list[tuple[int, float | None, Load]]:
    """Concurrency, rate and load of every point of the sweep. The first requests are the same at every concurrency."""
    most = max(s.concurrency)
    jobs = _jobs(s, tokenizer, max(2, s.requests_per_client * most))
    if s.arrival == POISSON:
        return [(most, r, Load(jobs, most, loads.poisson_times(r, len(jobs), s.seed))) for r in s.rates]
    return [(c, None, Load(jobs[: max(2, s.requests_per_client * c)], c)) for c in s.concurrency]


def _jobs(s: Settings, tokenizer: Any, count: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    rng = random.Random(s.seed)
    known = _prompts(s.input_len, tokenizer)
    rng.shuffle(known)
    least = s.output_len if s.is_even else max(1, s.output_len - s.output_len // 2)
    lengths = [rng.randint(least, 2 * s.output_len - least) for _ in range(count)]
    return tuple((known[i % len(known)], length) for i, length in enumerate(lengths))


def _prompts(input_len: int | None, tokenizer: Any) -> list[tuple[int, ...]]:
    prompts = load_prompts()
    if input_len is None:
        known = [ids for p in prompts if len(ids := tuple(render(p, tokenizer))) <= BUNDLED_LONGEST]
        if not known:
            raise PromptError("every bundled prompt is longer", f"{BUNDLED_LONGEST} tokens", "give an input length")
        return known
    text = list(tokenizer("\n".join(turn for p in prompts for turn in p.turns))["input_ids"])
    whole = text * (2 + input_len // len(text))
    return [tuple(whole[i : i + input_len]) for i in range(0, len(text), max(1, len(text) // 97))]


# ---- run ------------------------------------------------------------------------------------------------------------


def bench_load(
    profile: Profile | str,
    settings: Settings | None = None,
    *,
    budget_s: float | None = None,
    command: str = "",
    say: Say = print,
    make_llm: Callable[..., Any] | None = None,
) -> Record:
    """Every load on every method in turns: {"experiment", "profile", "runs", "parts", "summary"}. Each run carries the
    definitions of its figures.

    budget_s: runs that would end later, judged by the run of the same kind before, are left out and named in "parts".
    Raises `OptionError` before anything is loaded.
    """
    profile = profile_named(profile) if isinstance(profile, str) else profile
    s = settings or settings_for(profile)
    if budget_s is not None and not budget_s > 0:
        raise OptionError(f"the budget is {budget_s:g} s", "seconds above 0")
    began, origin = time.perf_counter(), provenance(command, s.seed)
    records: list[Record] = []
    parts: list[Record] = []
    lasted: dict[tuple[str, str], float] = {}
    with ExitStack() as stack:
        llms = {name: _open(name, s, profile, make_llm, stack, say) for name in s.methods}
        warm: set[tuple[str, int]] = set()
        for concurrency, rate, load in loads_of(s, llms[PLAIN].tokenizer):
            for name, batching in _runs(s, concurrency):
                label = f"{name}, {batching}, " + (f"{rate:g} requests/s" if rate else f"{concurrency} at once")
                used = time.perf_counter() - began
                if budget_s is not None and records and used + 1.3 * lasted.get((name, batching), 0.0) > budget_s:
                    parts.append({"part": label, "status": "skipped", "seconds": None})
                    say(f"{label}: left out, {max(0.0, budget_s - used):.0f} s of {budget_s:g} s are left")
                    continue
                _warm_up(llms[name], name, load, warm)
                outcome = loads.serve(llms[name].engine, load, batching=batching)
                about = {"method": name, "batching": batching, "concurrency": concurrency, "rate": rate}
                records.append(_record(llms[name], about, outcome, s, profile, origin))
                lasted[name, batching] = time.perf_counter() - began - used
                parts.append({"part": label, "status": "done", "seconds": round(lasted[name, batching], 3)})
                say(f"{label}: {_in_words(records[-1]['figures'])}")
    summary = summarize(records)
    for line in describe(summary):
        say(line)
    return {
        "experiment": EXPERIMENT,
        "profile": profile.name,
        "runs": records,
        "parts": parts,
        "summary": summary,
    }


def _runs(s: Settings, concurrency: int) -> Iterable[tuple[str, str]]:
    for name in s.methods:
        yield name, IN_FLIGHT
        if name == PLAIN and s.static_from is not None and concurrency >= s.static_from:
            yield name, STATIC


def _open(
    name: str, s: Settings, profile: Profile, make_llm: Callable[..., Any] | None, stack: ExitStack, say: Say
) -> Any:
    from ..api import LLM

    say(f"loading {name}")
    config, sizes = _config(name, s), {}
    if max(s.concurrency) > BUILT_SLOTS:
        sizes["max_batch_size"] = max(s.concurrency)
    longest = (s.input_len or BUNDLED_LONGEST) + 2 * s.output_len
    if longest > BUILT_LEN or profile.device == "cuda":
        sizes["max_seq_len"] = -(-longest // 256) * 256
    forced = None
    if config is not None and s.acceptance_length is not None:
        forced = SimulatedAcceptance(acceptance_length=s.acceptance_length)
    make: Callable[..., Any] = make_llm or LLM
    llm = make(
        s.target,
        backend=profile.backend,
        speculative_config=config,
        kv_cache_config=None if s.kv_tokens is None else KvCacheConfig(max_tokens=s.kv_tokens),
        dtype=s.dtype,
        device=profile.device,
        kernel=profile.kernel,
        simulated_acceptance=forced,
        **sizes,
    )
    stack.callback(llm.close)
    return llm


def _config(name: str, s: Settings) -> DecodingBaseConfig | None:
    if name == PLAIN:
        return None
    config = METHODS[name].make(s.max_draft_len, s.drafter)
    return config if s.draft_len_schedule is None else replace(config, draft_len_schedule=s.draft_len_schedule)


def _warm_up(llm: Any, name: str, load: Load, done: set[tuple[str, int]]) -> None:
    """A few rounds, once for each engine: on a GPU at every batch bucket that the load passes through, each of which is
    a graph of its own; on a CPU at the first concurrency."""
    sizes = [2**i for i in range(load.concurrency.bit_length()) if 2**i < load.concurrency] + [load.concurrency]
    if not str(llm.info.get("device", "")).startswith("cuda"):
        sizes = [] if any(known == name for known, _ in done) else [load.concurrency]
    few = SamplingParams(max_tokens=3 * (llm.info.get("max_draft_len", 0) + 1), ignore_eos=True)
    for size in [n for n in sizes if (name, n) not in done]:
        llm.generate([list(load.jobs[i % len(load.jobs)][0]) for i in range(size)], few)
        done.add((name, size))


def _record(llm: Any, about: Record, outcome: Outcome, s: Settings, profile: Profile, origin: Record) -> Record:
    """One run: the fields by which figures are labelled (as of `measure`), and those of a load."""
    info, done = llm.info, [r.done for r in outcome.requests]
    config, is_simulated = _config(about["method"], s), bool(info.get("is_simulated"))
    longest = SamplingParams(max_tokens=max(len(g.token_ids) for g in done), ignore_eos=True)
    return {
        "kind": "load",
        "experiment": EXPERIMENT,
        **about,
        "arrival": s.arrival,
        "backend": info["backend"],
        "target": without_folders([info["target"]]),
        "drafter": without_folders([info["drafter"]]) if info.get("drafter") else None,
        "dtype": info["dtype"],
        "device": info["device"],
        **({"kernels": info["kernels"]} if info.get("kernels") else {}),
        "profile": profile.name,
        "max_draft_len": s.max_draft_len if config else 0,
        "options": options_of(config),
        "batch_size": about["concurrency"],
        "input_len": s.input_len,
        "output_len": s.output_len,
        "kv_tokens": s.kv_tokens,
        "sampling": json.loads(json.dumps(asdict(longest))),
        "prompt_set": {"name": "bundled", "sha256": prompt_set_sha256(load_prompts()), "count": len(done)},
        "simulated_acceptance": s.acceptance_length if config else None,
        "is_simulated": is_simulated or s.target.startswith("dummy:"),
        "tokens_sha256": None if is_simulated else _tokens_sha256(done),
        "figures": loads.figures(outcome, is_speculative=config is not None),
        "definitions": loads.DEFINITIONS | {f"batching {about['batching']}": loads.BATCHING[about["batching"]]},
        "timeline": loads.timeline(outcome),
        "kv_use": loads.thinned(outcome.samples),
        "provenance": origin,
    }


def _tokens_sha256(generations: Sequence[Generation]) -> str:
    return hashlib.sha256(json.dumps([g.token_ids for g in generations]).encode()).hexdigest()


# ---- the summary ----------------------------------------------------------------------------------------------------


def summarize(records: Sequence[Mapping[str, Any]]) -> Record:
    """Point by point of the sweep what each method yields beside plain decoding in flight, and static batching beside
    that; and for every method the first point at which it loses, None if there is none. With closed arrivals it loses
    where its output throughput is smaller; at a given rate throughput is the rate's as long as the machine keeps up,
    and it loses where the median latency is longer."""
    points: list[Record] = []
    for place in dict.fromkeys(map(_place, records)):
        here = [r for r in records if _place(r) == place]
        in_flight = {r["method"]: r for r in here if r["batching"] == IN_FLIGHT}
        if PLAIN not in in_flight:
            continue  # the budget ended in the middle of this point
        static = next((r for r in here if r["batching"] == STATIC), None)
        points.append(
            {
                "concurrency": place[0],
                "rate": place[1],
                "methods": {name: _beside(r, in_flight[PLAIN]) for name, r in in_flight.items()},
                "static": static and _beside(static, in_flight[PLAIN]),
            }
        )
    names = dict.fromkeys(name for p in points for name in p["methods"] if name != PLAIN)
    return {
        "points": points,
        "stops_paying": {name: _first_loss(points, name) for name in names},
        "identical_text": _is_identical(records),
        "is_simulated": any(r["is_simulated"] for r in records),
    }


def _place(record: Mapping[str, Any]) -> tuple[int, float | None]:
    return record["concurrency"], record["rate"]


def _first_loss(points: Sequence[Record], name: str) -> float | None:
    for point in points:
        found = point["methods"].get(name)
        if found is not None and found["latency_gain" if point["rate"] else "speedup"] < 1:
            return point["rate"] or point["concurrency"]
    return None


def _beside(record: Mapping[str, Any], plain: Mapping[str, Any]) -> Record:
    found = record["figures"]
    names = [f"{name}_p{p}" for name in ("ttft_s", "tpot_ms", "latency_s") for p in loads.PERCENTILES]
    names += ["output_tok_s", "acceptance_length", "preemptions", "kv_use_max"]
    return {n: found[n] for n in names} | {
        "speedup": found["output_tok_s"] / plain["figures"]["output_tok_s"],
        "latency_gain": plain["figures"]["latency_s_p50"] / found["latency_s_p50"],
    }


def _is_identical(records: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether every method wrote the same tokens for the same requests; None where acceptance was forced."""
    if any(r["tokens_sha256"] is None for r in records):
        return None
    return len({(*_place(r), r["tokens_sha256"]) for r in records}) == len(set(map(_place, records)))


def describe(summary: Mapping[str, Any]) -> list[str]:
    """The summary in a few lines."""
    lines = []
    for point in summary["points"]:
        where = f"{point['rate']:g} requests/s" if point["rate"] else f"{point['concurrency']} at once"
        parts = [f"{name} {m['output_tok_s']:.1f} output tokens/s" for name, m in point["methods"].items()]
        key, what = ("latency_gain", " in median latency") if point["rate"] else ("speedup", "")
        parts += [f"{name} {m[key]:.2f}x plain{what}" for name, m in point["methods"].items() if name != PLAIN]
        if point["static"]:
            parts.append(f"in-flight batching {1 / point['static'][key]:.2f}x static{what}")
        lines.append(f"{where}: {', '.join(parts)}")
    for name, where in summary["stops_paying"].items():
        lines.append(f"{name} pays at every load" if where is None else f"{name} stops paying at {where:g}")
    if summary["identical_text"] is not None:
        lines.append("text: identical" if summary["identical_text"] else "text: differs between methods")
    return lines


def _in_words(f: Mapping[str, Any]) -> str:
    tpot = "none" if f["tpot_ms_p50"] is None else f"{f['tpot_ms_p50']:.1f} ms"
    return (
        f"{f['output_tok_s']:.1f} output tokens/s, TTFT p50 {f['ttft_s_p50']:.3f} s p99 {f['ttft_s_p99']:.3f} s, "
        f"TPOT p50 {tpot}, {f['preemptions']} preemptions"
    )
