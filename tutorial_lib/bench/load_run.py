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
from ..drafter_options import DrafterOptions
from ..errors import OptionError, PromptError, WorkbookError
from ..models import load_tokenizer, resolve
from ..results import Generation, provenance, without_folders
from . import load as loads
from .load import CLOSED, IN_FLIGHT, POISSON, STATIC, Load, Outcome, Record
from .methods import METHODS, options_of
from .prompts import load_prompts, prompt_set_sha256, render
from .remote import RemoteLLM
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
    smallest concurrency at which static batching is run too (alone it would be the same); None: nowhere. backends:
    "torch" and, behind it, engines that get the same loads once it is closed, each alone in a process of its own.
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
    backends: tuple[str, ...] = ("torch",)


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
    if s.backends[:1] != ("torch",) or set(s.backends) - {"torch", "vllm"} or len(set(s.backends)) < len(s.backends):
        raise OptionError(f"backends are {', '.join(s.backends) or 'none'}", "torch, or torch and vllm, each once")
    if len(s.backends) > 1 and (s.draft_len_schedule is not None or s.kv_tokens is not None):
        raise OptionError("a draft_len_schedule or kv_tokens for several backends", "neither: only torch takes them")
    if s.draft_len_schedule is not None and s.methods == (PLAIN,):
        raise OptionError("a draft_len_schedule without a drafting method", "one that drafts")
    for name in s.methods:
        _config(name, s)  # refuses options that do not go together


# ---- what is asked --------------------------------------------------------------------------------------------------


def loads_of(s: Settings, tokenizer: Any) -> list[tuple[float | None, Load]]:
    """Rate and load of every point of the sweep. The first requests are the same at every concurrency."""
    most = max(s.concurrency)
    jobs = _jobs(s, tokenizer, max(2, s.requests_per_client * most))
    if s.arrival == POISSON:
        return [(r, Load(jobs, most, loads.poisson_times(r, len(jobs), s.seed))) for r in s.rates]
    return [(None, Load(jobs[: max(2, s.requests_per_client * c)], c)) for c in s.concurrency]


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
    keep: Callable[[Record], None] = lambda so_far: None,
) -> Record:
    """Every load on every method in turns: {"experiment", "profile", "runs", "parts", "summary"}. Each run carries the
    definitions of its figures.

    budget_s: runs that would end later, judged by the run of the same kind before, are left out and named in "parts".
    keep: gets what there is after every run, so that what is cut off keeps it. Raises `OptionError` before
    anything is loaded.
    """
    profile = profile_named(profile) if isinstance(profile, str) else profile
    s = settings or settings_for(profile)
    if budget_s is not None and not budget_s > 0:
        raise OptionError(f"the budget is {budget_s:g} s", "seconds above 0")
    began, origin = time.perf_counter(), provenance(command, s.seed)
    records: list[Record] = []
    parts: list[Record] = []
    lasted: dict[tuple[str, ...], float] = {}
    warm: set[tuple[str, str, int]] = set()

    def run(llm: Any, backend: str, name: str, batching: str, rate: float | None, load: Load) -> None:
        label = _label(backend, name)
        label += f", {batching}, " + (f"{rate:g} requests/s" if rate else f"{load.concurrency} at once")
        kind = (backend, name, batching)
        used = time.perf_counter() - began
        if budget_s is not None and records and used + 1.3 * lasted.get(kind, 0.0) > budget_s:
            parts.append({"part": label, "status": "skipped", "seconds": None})
            say(f"{label}: left out, {max(0.0, budget_s - used):.0f} s of {budget_s:g} s are left")
            return
        _warm_up(llm, (backend, name), load, warm)
        outcome = _serve(llm, load, batching)
        about = {"method": name, "batching": batching, "concurrency": load.concurrency, "rate": rate}
        records.append(_record(llm, about, outcome, s, profile, origin))
        lasted[kind] = time.perf_counter() - began - used
        parts.append({"part": label, "status": "done", "seconds": round(lasted[kind], 3)})
        say(f"{label}: {_in_words(records[-1]['figures'])}")
        keep(_document(profile, records, parts))

    points: list[tuple[float | None, Load]] = []
    for backend, names in _groups(s):
        with ExitStack() as stack:
            try:
                llms = {name: _open(backend, name, s, profile, make_llm, stack, say) for name in names}
            except WorkbookError as error:
                if backend == s.backends[0]:
                    raise
                why = without_folders(str(error))
                say(f"not run: {backend}: {why}")
                named = f"{backend} {', '.join(names)}"
                parts.append({"part": named, "status": "not run", "seconds": None, "why": why})
                continue
            points = points or loads_of(s, llms[names[0]].tokenizer)
            for rate, load in points:
                for name, batching in _runs(backend, names, s, load.concurrency):
                    run(llms[name], backend, name, batching, rate, load)
    document = _document(profile, records, parts)
    for line in describe(document["summary"]):
        say(line)
    return document


def _document(profile: Profile, records: Sequence[Record], parts: Sequence[Record]) -> Record:
    return {
        "experiment": EXPERIMENT,
        "profile": profile.name,
        "runs": list(records),
        "parts": list(parts),
        "summary": summarize(records),
    }


def _groups(s: Settings) -> list[tuple[str, tuple[str, ...]]]:
    """What is open at a time: of ours all methods, in turns; others want a GPU's memory for themselves."""
    others = [(backend, (name,)) for backend in s.backends[1:] for name in s.methods]
    return [(s.backends[0], s.methods), *others]


def _runs(backend: str, names: Sequence[str], s: Settings, concurrency: int) -> Iterable[tuple[str, str]]:
    for name in names:
        yield name, IN_FLIGHT
        is_wide = s.static_from is not None and concurrency >= s.static_from
        if name == PLAIN and is_wide and backend == s.backends[0]:
            yield name, STATIC


def _label(backend: str, method: str) -> str:
    return method if backend == "torch" else f"{backend} {method}"


def _serve(llm: Any, load: Load, batching: str) -> Outcome:
    return llm.serve(load) if isinstance(llm, RemoteLLM) else loads.serve(llm.engine, load, batching=batching)


def _open(
    backend: str,
    name: str,
    s: Settings,
    profile: Profile,
    make_llm: Callable[..., Any] | None,
    stack: ExitStack,
    say: Say,
) -> Any:
    from ..api import LLM

    say(f"loading {_label(backend, name)}")
    config, sizes = _config(name, s), {}
    if max(s.concurrency) > BUILT_SLOTS:
        sizes["max_batch_size"] = max(s.concurrency)
    longest = (s.input_len or BUNDLED_LONGEST) + 2 * s.output_len
    if longest > BUILT_LEN or profile.device == "cuda":
        sizes["max_seq_len"] = -(-longest // 256) * 256
    if backend != s.backends[0]:
        llm: Any = _open_remote(backend, name, s, sizes)
        stack.callback(llm.close)
        return llm
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


def _open_remote(backend: str, name: str, s: Settings, sizes: Mapping[str, int]) -> RemoteLLM:
    """Told what the torch engine decides for itself: limits, and a drafter by its name on the command line."""
    drafter = None
    if name != PLAIN:
        if name not in ("draft_target", "ngram"):
            raise OptionError(f"method {name!r} on {backend}", "draft_target or ngram")
        drafter = DrafterOptions(s.drafter if name == "draft_target" else "ngram", s.max_draft_len)
    tokenizer = load_tokenizer(resolve(s.target, say=lambda line: None))
    limits = {"max_batch_size": max(s.concurrency), "max_seq_len": BUILT_LEN, **sizes}
    forced = s.acceptance_length if drafter is not None else None
    return RemoteLLM(
        s.target,
        backend=backend,
        tokenizer=tokenizer,
        drafter=drafter,
        acceptance_length=forced,
        dtype=s.dtype,
        **limits,
    )


def _config(name: str, s: Settings) -> DecodingBaseConfig | None:
    if name == PLAIN:
        return None
    config = METHODS[name].make(s.max_draft_len, s.drafter)
    return config if s.draft_len_schedule is None else replace(config, draft_len_schedule=s.draft_len_schedule)


def _warm_up(llm: Any, engine: tuple[str, str], load: Load, done: set[tuple[str, str, int]]) -> None:
    """On a GPU the answers that the first clients will get, whole: every batch bucket is a graph of its own, and with
    short ones the first would have left before the last prompt is read, so that the widest came in the timed run. On a
    CPU a few rounds at the first concurrency."""
    if (*engine, load.concurrency) in done:
        return
    jobs = [load.jobs[i % len(load.jobs)] for i in range(load.concurrency)]
    lengths = [count for _, count in jobs]
    if not str(llm.info.get("device", "")).startswith("cuda"):
        if any(known[:2] == engine for known in done):
            return
        lengths = [3 * (llm.info.get("max_draft_len", 0) + 1)] * len(jobs)
    if isinstance(llm, RemoteLLM):
        llm.serve(Load(tuple((ids, count) for (ids, _), count in zip(jobs, lengths, strict=True)), load.concurrency))
    else:
        llm.generate([list(ids) for ids, _ in jobs], [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
    done.add((*engine, load.concurrency))


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
    and it loses where the median latency is longer. "peers": other engines at that point, each beside its own plain
    decoding, and our throughput over theirs with the same method."""
    points: list[Record] = []
    for place in dict.fromkeys(map(_place, records)):
        all_here = [r for r in records if _place(r) == place]
        here = [r for r in all_here if r["backend"] == records[0]["backend"]]
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
                "peers": _peers([r for r in all_here if r["backend"] != records[0]["backend"]], in_flight),
            }
        )
    names = dict.fromkeys(name for p in points for name in p["methods"] if name != PLAIN)
    return {
        "points": points,
        "stops_paying": {name: _first_loss(points, name) for name in names},
        "identical_text": _is_identical([r for r in records if r["backend"] == records[0]["backend"]]),
        "is_simulated": any(r["is_simulated"] for r in records),
    }


def _peers(records: Sequence[Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]]) -> Record:
    found: Record = {}
    for r in records:
        own = next((p for p in records if p["backend"] == r["backend"] and p["method"] == PLAIN), None)
        same = ours.get(r["method"])
        beside = _beside(r, own or r) if own else _beside(r, r) | {"speedup": None, "latency_gain": None}
        ahead = None if same is None else same["figures"]["output_tok_s"] / r["figures"]["output_tok_s"]
        found.setdefault(r["backend"], {})[r["method"]] = beside | {"ours_over_theirs": ahead}
    return found


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
        for backend, methods in point["peers"].items():
            for name, m in methods.items():
                ahead = "" if m["ours_over_theirs"] is None else f" (ours {m['ours_over_theirs']:.2f}x)"
                parts.append(f"{backend} {name} {m['output_tok_s']:.1f}{ahead}")
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
