"""Measuring: several methods over the same prompts in one session, each figure a median over repeats.

The rules: every method is warmed up with the very shapes that are timed; methods take turns prompt by prompt (A B A B),
so a machine that drifts favours none; a drafter that remembers an earlier repeat is found out by its acceptance and
those repeats are left out; load, build and warm-up times are kept apart. `measure` times one `LLM`, `compare` several,
`bench` a whole profile and predicts its speed-up from step times that were taken apart from the predicted run.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from ..config import DraftTargetDecodingConfig, NGramDecodingConfig, Profile, SamplingParams
from ..config import profile as profile_named
from ..errors import OptionError, PromptError
from ..results import Generation, provenance, without_folders
from . import energy, metrics, spec_bench
from .cost_model import Components, predict_speedup
from .prompts import Prompt, load_prompts, prompt_set_sha256, render, select
from .summary import PLAIN, TRANSFORMERS, describe, summarize

Clock = Callable[[], float]
Say = Callable[[str], None]
Answers = Mapping[str, Mapping[str, Generation]]  # by name of the `LLM` and key of the request
# A rival engine is timed on every second category: it is the slowest, and is compared over those categories only.
RIVAL_STRIDE = 2


class Measurable(Protocol):
    """What is needed of an `LLM`: see `tutorial_lib.LLM`."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def info(self) -> dict[str, Any]: ...
    def generate(self, inputs: Any, sampling_params: Any = None) -> Any: ...
    def time_steps(self, rows: Sequence[int], context: int = ...) -> dict[int, float]: ...
    def time_draft(self, max_draft_len: int, context: int = ...) -> float: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Request:
    """One turn of one prompt as token ids. `key` names it in every comparison."""

    question_id: str
    category: str
    turn: int
    prompt_ids: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.question_id}/{self.turn}"


@dataclass
class Session:
    """What `compare` ran: records by name, generations by name, repeat and request (`Request.key`), and likewise the
    wall seconds of the call that a request was in."""

    records: dict[str, dict[str, Any]]
    generations: dict[str, list[dict[str, Generation]]]
    requests: list[Request]
    walls: dict[str, list[dict[str, float]]] = field(default_factory=dict)


def measure(
    llm: Measurable,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    method: str,
    repeats: int = 3,
    batch_size: int = 1,
    experiment: str = "measure",
    profile: str = "",
    prompt_set: str = "bundled",
    command: str = "",
    say: Say = lambda line: None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """One `LLM` over `prompts`, `batch_size` at a time, `repeats` times: a record with the medians.

    method: "plain", "draft_target", "ngram", ...: a plain run has no acceptance figures. Raises `OptionError` and
    `PromptError` for bad input.
    """
    session = compare(
        {method: llm}, prompts, params, repeats=repeats, batch_size=batch_size, experiment=experiment,
        profile=profile, prompt_set=prompt_set, command=command, say=say, clock=clock,
    )  # fmt: skip
    return session.records[method]


def compare(
    llms: Mapping[str, Measurable],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    methods: Mapping[str, str] | None = None,
    only_categories: Mapping[str, Sequence[str]] | None = None,
    repeats: int = 3,
    batch_size: int = 1,
    experiment: str = "compare",
    profile: str = "",
    prompt_set: str = "bundled",
    command: str = "",
    after_repeat: Callable[[Sequence[Request], Answers], None] = lambda requests, answers: None,
    first_answers: int = 0,
    price_per_hour: float | None = None,
    meter_for: Callable[[Mapping[str, Any]], energy.Meter] = energy.meter_for,
    say: Say = lambda line: None,
    clock: Clock = time.perf_counter,
) -> Session:
    """Several `LLM`s over the same prompts, taking turns batch by batch; who begins changes with every repeat.

    methods: the method of a name where it is not the name itself. only_categories: names that answer only the
    prompts of some categories. Later turns of a prompt hold the answer that the first `LLM` gave before timing, so
    every method and repeat decodes after the same tokens. after_repeat is called between repeats, untimed, with the
    requests and what each `LLM` answered in the repeat before. first_answers: how often the first prompt is answered
    in full before the clock starts, beside the warm-up. price_per_hour: of the machine, for a price per token.
    """
    _check_counts(prompts, repeats, batch_size)
    energy.check_price(price_per_hour)
    methods = {name: (methods or {}).get(name, name) for name in llms}
    requests = expand(prompts, next(iter(llms.values())), params)
    batches = {name: _batched([r for r in requests if _takes(r, name, only_categories)], batch_size) for name in llms}
    warmup_s = {}
    for name, llm in llms.items():
        say(f"warming up {name}")
        warmup_s[name] = warm_up(llm, [r for batch in batches[name] for r in batch], params, batch_size, clock)
        for request in [r for r in requests if r.question_id == requests[0].question_id] * first_answers:
            llm.generate(list(request.prompt_ids), params)
    timed: dict[str, list[_Repeat]] = {name: [] for name in llms}
    metered = {name: energy.Metered(meter_for(llm.info)) for name, llm in llms.items()}
    for repeat in range(repeats):
        say(f"repeat {repeat + 1} of {repeats}")
        for name, result in _one_repeat(llms, batches, params, repeat, metered, clock).items():
            timed[name].append(result)
        after_repeat(requests, {name: runs[-1].generations for name, runs in timed.items()})
    shared = {
        "experiment": experiment, "profile": profile, "batch_size": batch_size, "params": params,
        "prompt_set": prompt_set, "provenance": provenance(command, params.seed), "price_per_hour": price_per_hour,
    }  # fmt: skip
    records = {}
    for name, llm in llms.items():
        answered = {r.question_id for batch in batches[name] for r in batch}
        mine = [p for p in prompts if p.question_id in answered]
        own = [r for batch in batches[name] for r in batch]
        records[name] = _record(llm, methods[name], mine, own, timed[name], warmup_s[name], shared)
        records[name]["energy"] = metered[name].record()
    generations = {name: [t.generations for t in runs] for name, runs in timed.items()}
    return Session(records, generations, requests, {name: [t.walls for t in runs] for name, runs in timed.items()})


# --- before the clock ---------------------------------------------------------------------------------------------


def expand(prompts: Sequence[Prompt], llm: Measurable, params: SamplingParams) -> list[Request]:
    """Every turn of every prompt as a request. Turns that others follow are answered once by `llm`."""
    requests = []
    for prompt in prompts:
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            ids = tuple(render(prompt, llm.tokenizer, answers))
            requests.append(Request(prompt.question_id, prompt.category, turn, ids))
            if turn + 1 < len(prompt.turns):
                answers.append(llm.generate(list(ids), params).text)
    return requests


def warm_up(
    llm: Measurable, requests: Sequence[Request], params: SamplingParams, batch_size: int, clock: Clock
) -> float:
    """Run what will be timed, at least three rounds of it at the same K and batch size, for a prompt of every length
    class (powers of two), and for one that is written twice, so that a look-up drafter drafts for certain. Returns the
    seconds it took."""
    rounds_params = replace(
        params,
        max_tokens=3 * (llm.info.get("max_draft_len", 0) + 1) + 1,
        ignore_eos=True,
        stop=None,
        stop_token_ids=None,
    )
    classes: dict[int, Request] = {}
    for request in requests:
        classes.setdefault(len(request.prompt_ids).bit_length(), request)
    shortest = min(classes.values(), key=lambda request: len(request.prompt_ids))
    limit = (llm.info.get("limits") or {}).get("max_seq_len") or sys.maxsize
    room = max(1, limit - rounds_params.max_tokens)
    start = clock()
    for ids in (*(request.prompt_ids for request in classes.values()), shortest.prompt_ids * 2):
        llm.generate([list(ids)[:room]] * batch_size, rounds_params)
    _sync(llm)
    return clock() - start


def _check_counts(prompts: Sequence[Prompt], repeats: int, batch_size: int) -> None:
    if not prompts:
        raise PromptError("the list of prompts is empty", "at least one prompt")
    for name, value in (("repeats", repeats), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} is {value!r}", "a whole number >= 1")


def _takes(request: Request, name: str, only_categories: Mapping[str, Sequence[str]] | None) -> bool:
    return name not in (only_categories or {}) or request.category in (only_categories or {})[name]


def _batched(requests: Sequence[Request], batch_size: int) -> list[Sequence[Request]]:
    return [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]


# --- under the clock ----------------------------------------------------------------------------------------------


@dataclass
class _Repeat:
    """One pass over the requests: generations by request key in order, and the wall time around the calls, in all and
    by request."""

    generations: dict[str, Generation]
    wall_s: float = 0.0
    walls: dict[str, float] = field(default_factory=dict)


def _one_repeat(
    llms: Mapping[str, Measurable],
    batches: Mapping[str, list[Sequence[Request]]],
    params: SamplingParams,
    repeat: int,
    metered: Mapping[str, energy.Metered],
    clock: Clock,
) -> dict[str, _Repeat]:
    """Every batch by every method before the next batch begins, as far as the method takes it."""
    names = list(llms)
    order = names[repeat % len(names) :] + names[: repeat % len(names)]
    place = {r.key: i for i, r in enumerate(r for batch in max(batches.values(), key=len) for r in batch)}
    schedule = sorted(
        ((place[batch[0].key], turn, name, batch) for turn, name in enumerate(order) for batch in batches[name]),
        key=lambda entry: entry[:2],
    )
    done = {name: _Repeat({}) for name in names}
    for _, _, name, batch in schedule:
        llm, meter = llms[name], metered[name].meter
        _sync(llm)
        before = meter.joules()
        start = clock()
        generations = llm.generate([list(r.prompt_ids) for r in batch], params)
        _sync(llm)
        wall_s = clock() - start
        after = meter.joules()
        joules = None if before is None or after is None else after - before
        metered[name].calls.append((joules, wall_s, sum(len(g.token_ids) for g in generations)))
        done[name].wall_s += wall_s
        done[name].walls |= {r.key: wall_s for r in batch}
        done[name].generations |= {r.key: _without_false_text(g) for r, g in zip(batch, generations, strict=True)}
    return done


def _without_false_text(generation: Generation) -> Generation:
    return replace(generation, text="") if generation.is_simulated else generation


def _sync(llm: Measurable) -> None:
    """Wait for the GPU, so that neither earlier work nor unfinished work distorts the clock."""
    if str(llm.info.get("device", "")).startswith("cuda"):
        sys.modules["torch"].cuda.synchronize()


# --- after the clock ----------------------------------------------------------------------------------------------


def _record(
    llm: Measurable,
    method: str,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    timed: Sequence[_Repeat],
    warmup_s: float,
    shared: Mapping[str, Any],
) -> dict[str, Any]:
    """The record of one method: medians over its cold repeats, all repeats beside them."""
    info, batch_size = llm.info, shared["batch_size"]
    is_speculative = method != PLAIN
    params: SamplingParams = shared["params"]
    warm = warm_repeats([t.generations for t in timed]) if params.is_greedy or params.seed is not None else []
    per_repeat = [
        metrics.figures(list(t.generations.values()), batch_size=batch_size, is_speculative=is_speculative)
        | {"wall_s": t.wall_s, "is_warm": index in warm}
        for index, t in enumerate(timed)
    ]
    cold = [t for index, t in enumerate(timed) if index not in warm]
    figures = _median_figures([f for f in per_repeat if not f["is_warm"]])
    is_simulated = any(g.is_simulated for g in timed[0].generations.values())
    return {
        "kind": "run",
        "experiment": shared["experiment"],
        "method": method,
        "backend": info["backend"],
        "target": without_folders([info["target"]]),
        "drafter": without_folders([info["drafter"]]) if info.get("drafter") else None,
        "dtype": info["dtype"],
        "device": info["device"],
        **({"kernels": info["kernels"]} if info.get("kernels") else {}),
        "profile": shared["profile"],
        "max_draft_len": info.get("max_draft_len", 0) if is_speculative else 0,
        "batch_size": batch_size,
        "sampling": json.loads(json.dumps(asdict(params))),
        "prompt_set": {
            "name": shared["prompt_set"],
            "sha256": prompt_set_sha256(prompts),
            "count": len(prompts),
            "template": "chat" if getattr(llm.tokenizer, "chat_template", None) else "none",
        },
        "repeats": len(timed),
        "figures": {k: v for k, v in figures.items() if k in metrics.DEFINITIONS},
        "by_category": _by_category(requests, cold, batch_size, is_speculative),
        "repeat_figures": per_repeat,
        "build_s": info.get("build_s"),
        "load_s": info.get("load_s"),
        "warmup_s": warmup_s,
        "tokens_sha256": None if is_simulated else _tokens_sha256(timed[0].generations),
        "is_simulated": is_simulated,
        "price": energy.price_record(shared["price_per_hour"], figures["output_tok_s"]),
        "definitions": metrics.DEFINITIONS | energy.DEFINITIONS,
        "notes": _notes(per_repeat, figures, warm),
        "provenance": shared["provenance"],
    }


def warm_repeats(repeats: Sequence[Mapping[str, Generation]]) -> list[int]:
    """Repeats whose rounds differ from the first one's, although the same was asked: the drafter still knew something
    of an earlier repeat, and figures from there would flatter it."""

    def rounds_of(repeat: Mapping[str, Generation]) -> list[list[tuple[int, int, int]]]:
        return [[(len(r.drafted), r.accepted, len(r.emitted)) for r in g.rounds] for g in repeat.values()]

    return [i for i, repeat in enumerate(repeats) if rounds_of(repeat) != rounds_of(repeats[0])]


def _by_category(
    requests: Sequence[Request], timed: Sequence[_Repeat], batch_size: int, is_speculative: bool
) -> dict[str, dict[str, Any]]:
    """Figures of every category; throughputs only where a batch holds one request, since batches mix categories."""
    found = {}
    for category in dict.fromkeys(r.category for r in requests):
        keys = [r.key for r in requests if r.category == category]
        runs = [[t.generations[key] for key in keys] for t in timed]
        figures = _median_figures([metrics.figures(g, is_speculative=is_speculative) for g in runs])
        if batch_size > 1:
            figures |= {"output_tok_s": None, "decode_tok_s": None}
        found[category] = figures
    return found


def _median_figures(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figure by figure the median over repeats; what is equal in all of them stays as it is."""
    return {name: _median([r[name] for r in repeats]) for name in repeats[0]}


def _median(values: Sequence[Any]) -> Any:
    if all(value == values[0] for value in values):
        return values[0]
    if isinstance(values[0], list):
        shortest = min(len(value) for value in values)
        return [_median([value[i] for value in values]) for i in range(shortest)]
    known = [value for value in values if value is not None]
    return statistics.median(known)


def _tokens_sha256(generations: Mapping[str, Generation]) -> str:
    tokens = [[key, g.token_ids] for key, g in sorted(generations.items())]
    return hashlib.sha256(json.dumps(tokens, separators=(",", ":")).encode()).hexdigest()


def _notes(per_repeat: Sequence[Mapping[str, Any]], figures: Mapping[str, Any], warm: Sequence[int]) -> list[str]:
    notes = []
    if warm:
        which = ", ".join(str(i + 1) for i in warm)
        notes.append(f"repeats {which} were warm (other rounds than in repeat 1) and are left out of the figures")
    typical = figures["output_tok_s"]
    if typical and per_repeat[0]["output_tok_s"] < 0.9 * typical:
        slower = 1 - per_repeat[0]["output_tok_s"] / typical
        notes.append(f"the first repeat was {slower:.0%} slower than the median")
    own_s = [f["output_tokens"] / f["output_tok_s"] for f in per_repeat if f["output_tok_s"]]
    wall_s = [f["wall_s"] for f in per_repeat if f["output_tok_s"]]
    if own_s and sum(own_s) < 0.95 * sum(wall_s):
        notes.append(f"the engine's own latencies cover {sum(own_s) / sum(wall_s):.0%} of the time its calls took")
    return notes


# --- a whole profile ----------------------------------------------------------------------------------------------


def bench(
    profile: Profile | str,
    *,
    prompts: Sequence[Prompt] | None = None,
    repeats: int | None = None,
    methods: Sequence[str] = (PLAIN, "draft_target", "ngram"),
    temperature: float = 0.0,
    rules: str | None = None,
    price_per_hour: float | None = None,
    prompt_set: str = "bundled",
    command: str = "",
    say: Say = print,
    make_llm: Callable[[str, Profile], Measurable] | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Plain decoding, every method and (beside our own engine) plain `transformers` in one interleaved session.

    prompts: all of these; without, the profile's number per category of the bundled ones. temperature: above 0 texts
    are sampled and not compared. rules "spec-bench": scored as that benchmark does as well (`spec_bench`), three runs,
    without `transformers`. Returns {"runs": records,
    "summary": {...}}; `summary["speedup"]` is that of the first speculative method over the best plain run of the same
    engine, and `predicted_speedup` what the cost model makes of step times measured between the repeats. make_llm
    stands in for `LLM` in tests. A figure that a backend cannot give (its steps cannot be timed apart) is None, and a
    note says why. Raises `WorkbookError`s.
    """
    profile = profile_named(profile) if isinstance(profile, str) else profile
    speculative = [m for m in methods if m != PLAIN]
    if profile.is_replay:
        raise OptionError(f"profile {profile.name} measures nothing", "one that runs models", "choose profile cpu")
    if PLAIN not in methods or not speculative or len(set(methods)) < len(methods):
        raise OptionError(f"methods are {', '.join(methods) or 'none'}", "plain and at least one other, each once")
    prompts = select(load_prompts(), profile.prompts_per_category) if prompts is None else list(prompts)
    categories = list(dict.fromkeys(p.category for p in prompts))
    check_rules(rules)
    energy.check_price(price_per_hour)
    rival = {TRANSFORMERS: categories[::RIVAL_STRIDE]} if profile.backend == "torch" and rules is None else {}
    params = sampling(profile.max_tokens, temperature)
    with ExitStack() as stack:
        llms: dict[str, Measurable] = {}
        for name in (PLAIN, *speculative, *rival):
            say(f"loading {name}")
            llms[name] = (make_llm or _make_llm)(name, profile)
            stack.callback(llms[name].close)
        calibration = Calibration(llms[PLAIN], {name: llms[name] for name in speculative}, params)
        session = compare(
            llms, prompts, params, methods={TRANSFORMERS: PLAIN}, only_categories=rival,
            repeats=repeats_of(profile, repeats, rules), experiment="bench", profile=profile.name,
            prompt_set=prompt_set, command=command, after_repeat=calibration.run, say=say, clock=clock,
            price_per_hour=price_per_hour, **options_of_rules(rules),
        )  # fmt: skip
    predictions = {name: calibration.predict(name, session.records) for name in speculative}
    summary = summarize(session.records, session.generations, speculative, predictions)
    summary["calibration"] = calibration.medians()
    if calibration.refusal:
        summary["notes"].append(f"no prediction: {calibration.refusal}")
    summary |= scores_of(session, speculative, rules)
    for line in (*describe(summary), *describe_scores(summary), *energy.describe(session.records)):
        say(line)
    return {"runs": list(session.records.values()), "summary": summary}


# ---- by whose rules --------------------------------------------------------------------------------------------------


def sampling(max_tokens: int, temperature: float) -> SamplingParams:
    """Greedy, or sampled with a seed, so that repeats draw the same and a warm one can be told."""
    if not temperature:
        return SamplingParams(max_tokens=max_tokens, temperature=temperature or None)
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)


def check_rules(rules: str | None) -> None:
    if rules not in (None, spec_bench.NAME):
        raise OptionError(f"rules are {rules!r}", spec_bench.NAME, "or leave them out")


def repeats_of(profile: Profile, repeats: int | None, rules: str | None) -> int:
    if repeats is not None:
        return repeats
    return profile.repeats if rules is None else spec_bench.RUNS


def options_of_rules(rules: str | None) -> dict[str, Any]:
    """Further options of `compare`."""
    return {} if rules is None else {"first_answers": spec_bench.WARM_UPS}


def scores_of(session: Session, methods: Sequence[str], rules: str | None) -> dict[str, Any]:
    """What the rules say of a session, for its summary; nothing without rules."""
    if rules is None:
        return {}
    categories = {request.key: request.category for request in session.requests}
    return {"spec_bench": spec_bench.score(categories, session.walls, session.generations, PLAIN, methods)}


def describe_scores(summary: Mapping[str, Any]) -> list[str]:
    return spec_bench.describe(summary["spec_bench"]) if "spec_bench" in summary else []


def _make_llm(name: str, profile: Profile) -> Measurable:
    from ..api import LLM

    config: DraftTargetDecodingConfig | NGramDecodingConfig | None = None
    if name == "draft_target":
        config = DraftTargetDecodingConfig(max_draft_len=profile.max_draft_len, speculative_model_dir=profile.drafter)
    elif name == "ngram":
        config = NGramDecodingConfig(max_draft_len=profile.max_draft_len)
    elif name not in (PLAIN, TRANSFORMERS):
        raise OptionError(f"method {name!r} is unknown", "plain, draft_target or ngram")
    backend = TRANSFORMERS if name == TRANSFORMERS else profile.backend
    kernel = "auto" if backend == TRANSFORMERS else profile.kernel
    return LLM(
        profile.target, backend=backend, speculative_config=config, dtype=profile.dtype, device=profile.device,
        kernel=kernel,
    )  # fmt: skip


class Calibration:
    """Step and draft times, taken between the repeats by calls of their own, never from a timed speculative run.
    `refusal` says why a backend gives none."""

    def __init__(self, plain: Measurable, speculative: Mapping[str, Measurable], params: SamplingParams) -> None:
        self.plain, self.speculative, self.params = plain, speculative, params
        self.shapes: dict[str, RoundShapes] = {}
        self.samples: list[dict[str, dict[str, float]]] = []
        self.refusal: str | None = None

    def run(self, requests: Sequence[Request], answers: Answers) -> None:
        """Time every component once, after as much context as the requests have on average half-way. From the answers
        comes only what rounds were made of: how many rows they verified, how deep they drafted."""
        for name in () if self.shapes else self.speculative:
            self.shapes[name] = RoundShapes.of(answers[name].values())
        if self.refusal is None:
            try:
                self.samples.append(self._sample(requests))
            except OptionError as error:
                self.refusal = str(error)

    def _sample(self, requests: Sequence[Request]) -> dict[str, dict[str, float]]:
        context = round(statistics.mean(len(r.prompt_ids) for r in requests) + self.params.max_tokens / 2)
        sample = {PLAIN: {"step_s": self.plain.time_steps([1], context)[1]}}
        for name, llm in self.speculative.items():
            k, shapes = llm.info["max_draft_len"], self.shapes[name]
            steps = llm.time_steps(shapes.rows_to_time(k), context)
            drafts = {0: 0.0} | {depth: llm.time_draft(depth, context) for depth in sorted({1, k})}
            sample[name] = {
                "step_s": steps[1],
                "verify_step_s": _mean_time(shapes.rows or {k + 1: 1}, steps),
                "draft_s": _mean_time(shapes.depths or {k: 1}, drafts),
                "draft_step_s": drafts[1],
            }
        return sample

    def medians(self) -> dict[str, dict[str, float]]:
        """Seconds by method and component, medians over what was taken: a step over one row, a round's verification
        and its drafting (means over the kinds of rounds there were), and drafting one token deep."""
        return {
            name: {part: statistics.median(s[name][part] for s in self.samples) for part in parts}
            for name, parts in (self.samples[0].items() if self.samples else ())
        }

    def predict(self, name: str, records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What the cost model expects of method `name`. From its record come only acceptance lengths, no times. None
        throughout where nothing was timed."""
        if self.refusal is not None or records[name]["figures"]["acceptance_length"] is None:
            return {"speedup": None, "round_ms": None, "by_category": dict.fromkeys(records[PLAIN]["by_category"])}
        times, record = self.medians(), records[name]
        own = times[name]
        parts = Components(
            max_draft_len=record["max_draft_len"],
            plain_step_s=times[PLAIN]["step_s"],
            verify_step_s=own["verify_step_s"],
            draft_s=own["draft_s"],
            draft_step_s=own["draft_step_s"],
            acceptance_length={c: found["acceptance_length"] or 1.0 for c, found in record["by_category"].items()},
        )
        return predict_speedup(records[PLAIN], parts)


@dataclass(frozen=True)
class RoundShapes:
    """How many rounds verified so many rows (every draft token of a tree, and one), and how many drafted so deep."""

    rows: Mapping[int, int]
    depths: Mapping[int, int]

    @classmethod
    def of(cls, generations: Iterable[Generation]) -> RoundShapes:
        rounds = [r for g in generations for r in g.rounds]
        return cls(Counter(len(r.drafted) + 1 for r in rounds), Counter(r.depth for r in rounds))

    def rows_to_time(self, max_draft_len: int) -> list[int]:
        """One row, the commonest number of rows and the largest: what lies between is interpolated."""
        found = self.rows or {max_draft_len + 1: 1}
        return sorted({1, max(found, key=lambda n: (found[n], n)), max(found)})


def _mean_time(counts: Mapping[int, int], times: Mapping[int, float]) -> float:
    """Seconds by size, weighted by how often each size occurred."""
    return sum(count * between(times, size) for size, count in counts.items()) / sum(counts.values())


def between(times: Mapping[int, float], size: int) -> float:
    """Seconds at `size`: straight lines between the sizes that were timed, and the largest one's time beyond it."""
    low, high = max(n for n in times if n <= size), min((n for n in times if n >= size), default=max(times))
    return times[low] if high <= low else times[low] + (size - low) / (high - low) * (times[high] - times[low])
