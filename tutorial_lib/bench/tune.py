"""`workbook tune`: which drafter at which K gains most on this machine, for these prompts.

Every drafter runs once, at the largest K, in turns with plain decoding; that one run tells its acceptance at every
smaller K (`redraft`), and step times taken apart from it tell what those rounds would cost. The best few predictions
are then run beside plain decoding, and what was measured decides. Trees are candidates as they are: a smaller tree is
another tree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config import DecodingBaseConfig, Profile, SamplingParams
from ..drafter_options import MODEL, DrafterOptions, decoding_config, method_of
from ..errors import OptionError, PromptError, WorkbookError
from ..results import Generation, provenance, without_folders
from .measure import Clock, Measurable, Request, Say, Session, _make_llm, between, compare
from .prompts import Prompt, render
from .redraft import redraft, unknown_rate
from .summary import PLAIN, first_differences, paired_speedups

EXPERIMENT = "tune"
MOST_VERIFIED = 3
REPEATS = 3  # of the verification
LOOKUPS, TREES = ("ngram", "suffix"), ("medusa", "lookahead")
EAGLE_TREE = ("eagle3_tree", "dynamic:3,10", 5)  # a name for one more candidate: its tree, and how deep it is
ROW_STEPS = (1, 2, 3, 4, 5, 6, 7, 9, 13, 17)  # rows timed; straight lines between them
MakeLLM = Callable[[str, DecodingBaseConfig | None], Measurable]


@dataclass(frozen=True)
class Setting:
    """A drafter with its options. name: the drafter as it was asked for."""

    name: str
    options: DrafterOptions

    @property
    def method(self) -> str:
        """As figures and records name it."""
        if self.options.drafter is None:
            return PLAIN
        kind = {MODEL: "draft_target", "layer-skip": "layer_skip"}.get(found := method_of(self.options.drafter), found)
        return "eagle3_tree" if kind == "eagle3" and self.is_tree else kind

    @property
    def is_tree(self) -> bool:
        return self.options.tree is not None or method_of(self.options.drafter or "") in TREES

    @property
    def max_draft_len(self) -> int | None:
        return self.options.max_draft_len

    @property
    def label(self) -> str:
        return self.name if self.is_tree or not self.max_draft_len else f"{self.name} K={self.max_draft_len}"


@dataclass(frozen=True)
class Prediction:
    """What a setting should do. by_category: speed-up in output throughput; acceptance_length: over all prompts."""

    setting: Setting
    speedup: float
    by_category: Mapping[str, float]
    acceptance_length: float | None
    round_ms: float | None


def tune(
    profile: Profile,
    drafters: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    max_draft_len: int = 8,
    repeats: int = REPEATS,
    budget_s: float | None = None,
    is_exhaustive: bool = False,
    prompt_set: str = "bundled",
    command: str = "",
    say: Say = print,
    make_llm: MakeLLM | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Measure, predict every setting, verify the best: {"kind": "tune", "choice", "predictions", "verified",
    "does_not_pay", "margin", "left_out", "notes", "runs", ...}.

    drafters: as `--drafter` of `workbook generate` takes them; "draft" is the profile's draft model, "eagle3_tree" the
    EAGLE-3 head's tree. budget_s: settings to verify are left out first, then drafters from the last. is_exhaustive:
    run every setting, and say in "exhaustive" what the usual few would have missed. Raises `WorkbookError`s; nothing
    is written.
    """
    began = clock()
    if is_exhaustive and budget_s is not None:
        raise OptionError("an exhaustive search within a budget", "one of the two", "leave the budget out")
    asked = settings_asked(drafters, max_draft_len, profile)
    if not prompts:
        raise PromptError("the list of prompts is empty", "at least one prompt")
    params, make = SamplingParams(max_tokens=profile.max_tokens), make_llm or _maker(profile)
    notes: list[str] = []
    with ExitStack() as stack:
        say(f"loading {PLAIN}")
        plain = make(PLAIN, None)
        stack.callback(plain.close)
        asked, most_verified = _within_budget(asked, plain, prompts, params, repeats, budget_s, notes, say, clock)
        with ExitStack() as drafting:
            llms, left_out = _open(asked, plain, prompts[0], make, drafting, say)
            session = compare(
                {PLAIN: plain, **llms}, prompts, params, methods={s.name: s.method for s in asked}, repeats=1,
                experiment=EXPERIMENT, profile=profile.name, prompt_set=prompt_set, command=command, say=say,
                clock=clock,
            )  # fmt: skip
            observed = {s.name: Observed.of(s, llms[s.name], session, params) for s in asked if s.name in llms}
            plain_times = _times_of_rows(plain, _context(session.requests, params), max_draft_len + 1)
        predictions = predict(session, observed, plain_times)
        for line in describe_predictions(predictions):
            say(line)
        best = [p for p in predictions if p.setting.name != PLAIN][: None if is_exhaustive else most_verified]
        verified = _verify(best, plain, make, prompts, params, repeats, prompt_set, command, profile, say, clock)
    document = _document(predictions, verified, session, profile)
    if is_exhaustive:
        document["exhaustive"] = _missed(document["verified"], [p.setting.label for p in best[:MOST_VERIFIED]])
    document["left_out"], document["notes"] = left_out, document["notes"] + notes
    document |= {"seconds": clock() - began, "provenance": provenance(command, params.seed)}
    for line in describe(document):
        say(line)
    return document


# ---- what is asked, and what fits ------------------------------------------------------------------------------------


def settings_asked(drafters: Sequence[str], max_draft_len: int, profile: Profile) -> list[Setting]:
    """One setting for every drafter, at the largest K. Raises `OptionError` before anything is loaded."""
    if not drafters or len(set(drafters)) < len(drafters):
        raise OptionError(f"drafters are {', '.join(drafters) or 'none'}", "at least one, each once")
    if max_draft_len < 1:
        raise OptionError(f"max_draft_len is {max_draft_len}", "at least 1")
    found = []
    for name in drafters:
        if name == "draft" and not profile.drafter:
            raise OptionError("no draft model is known for this target", "its checkpoint", "name it in --drafters")
        drafter = profile.drafter if name == "draft" else name
        if name == EAGLE_TREE[0]:
            options = DrafterOptions("eagle3", EAGLE_TREE[2], tree=EAGLE_TREE[1])
        elif method_of(drafter) == "lookahead":
            options = DrafterOptions(drafter)
        else:
            options = DrafterOptions(drafter, max_draft_len)
        decoding_config(options)
        found.append(Setting(name, options))
    return found


def _within_budget(
    asked: list[Setting],
    plain: Measurable,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    repeats: int,
    budget_s: float | None,
    notes: list[str],
    say: Say,
    clock: Clock,
) -> tuple[list[Setting], int]:
    """The drafters and the number of settings to verify that `budget_s` allows, by the time of one plain answer."""
    if budget_s is None:
        return asked, MOST_VERIFIED
    begun = clock()
    plain.generate(render(prompts[0], plain.tokenizer), params)
    once_s = (clock() - begun) * sum(len(p.turns) for p in prompts)  # a pass over the prompts; no drafter doubles it
    drafters, verified = len(asked), MOST_VERIFIED

    def needed_s() -> float:
        return once_s * (1 + drafters) + (once_s * repeats * (1 + verified) if verified else 0.0)

    while needed_s() > budget_s and (verified or drafters > 1):
        if verified > 1 or drafters == 1:
            verified -= 1
        else:
            drafters -= 1
    if needed_s() > budget_s:
        raise OptionError(
            f"the budget is {budget_s:g} s", f"about {needed_s():.0f} s for one drafter and these prompts",
            "allow more, or take fewer prompts",
        )  # fmt: skip
    if drafters < len(asked):
        notes.append(f"not tried within {budget_s:g} s: {', '.join(s.name for s in asked[drafters:])}")
    if verified < MOST_VERIFIED:
        notes.append(f"{verified or 'no'} setting{'s' * (verified != 1)} verified within {budget_s:g} s")
    for note in notes:
        say(f"note: {note}")
    return asked[:drafters], verified


def _open(
    asked: Sequence[Setting], plain: Measurable, first: Prompt, make: MakeLLM, stack: ExitStack, say: Say
) -> tuple[dict[str, Measurable], list[dict[str, str]]]:
    """Every drafter that answers, each tried on a few tokens; why the others do not."""
    ids, few = render(first, plain.tokenizer), SamplingParams(max_tokens=3, ignore_eos=True)
    llms: dict[str, Measurable] = {}
    left_out: list[dict[str, str]] = []
    for setting in asked:
        say(f"loading {setting.label}")
        try:
            with ExitStack() as trial:
                llm = make(setting.name, decoding_config(setting.options))
                trial.callback(llm.close)
                llm.generate(list(ids), few)
                stack.push(trial.pop_all())
            llms[setting.name] = llm
        except (WorkbookError, RuntimeError) as error:  # the latter are a GPU's: memory, a graph not captured
            left_out.append({"name": setting.name, "why": without_folders(str(error))})
            say(f"left out: {setting.name}: {left_out[-1]['why']}")
    if not llms:
        raise OptionError(f"no drafter runs here; {left_out[0]['name']}: {left_out[0]['why']}", "at least one")
    return llms, left_out


def _maker(profile: Profile) -> MakeLLM:
    from ..api import LLM

    def make(_name: str, config: DecodingBaseConfig | None) -> Measurable:
        where: dict[str, Any] = {"backend": profile.backend, "dtype": profile.dtype, "device": profile.device}
        return LLM(profile.target, speculative_config=config, **where)

    return make


# ---- what one run tells ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Observed:
    """One drafter's run at the largest K, and its times: seconds of drafting by depth, of a pass by rows (trees)."""

    setting: Setting
    answers: Mapping[str, Generation]
    draft_s: Mapping[int, float]
    row_s: Mapping[int, float]

    @classmethod
    def of(cls, setting: Setting, llm: Measurable, session: Session, params: SamplingParams) -> Observed:
        answers, context = session.generations[setting.name][0], _context(session.requests, params)
        deepest = llm.info["max_draft_len"]
        drafts = {0: 0.0} | {depth: llm.time_draft(depth, context) for depth in sorted({1, deepest})}
        rows = {len(r.drafted) + 1 for g in answers.values() for r in g.rounds} if setting.is_tree else set()
        return cls(setting, answers, drafts, llm.time_steps(sorted({1, *rows}), context) if rows else {})

    def prefill_ratio(self, plain: Mapping[str, Generation]) -> float:
        """What a request waits before its rounds, in plain decoding's time to first token: the drafter reads the prompt
        as well, partly in the first round, beside drafting and verifying. A median, so that a hiccup counts once."""

        def waits_s(g: Generation) -> float:
            if not g.rounds:
                return g.ttft_s
            first = g.rounds[0]
            return g.ttft_s + max(0.0, first.end_s - g.ttft_s - first.draft_s - first.verify_s)

        return statistics.median(waits_s(g) / plain[key].ttft_s for key, g in self.answers.items())


def _context(requests: Sequence[Request], params: SamplingParams) -> int:
    return round(statistics.mean(len(r.prompt_ids) for r in requests) + params.max_tokens / 2)


def _times_of_rows(plain: Measurable, context: int, most: int) -> dict[int, float]:
    return plain.time_steps(sorted({most, *(n for n in ROW_STEPS if n < most)}), context)


def predict(session: Session, observed: Mapping[str, Observed], row_s: Mapping[int, float]) -> list[Prediction]:
    """Every setting that follows from what was observed, plain decoding among them, the fastest first.

    Times that were taken apart from the session are scaled by what a plain step took in it, so that drift of the
    machine between the two cancels.
    """
    plain = session.generations[PLAIN][0]
    step_s = statistics.median(r.verify_s for g in plain.values() for r in g.rounds)
    basis = Basis(plain, {r.key: r.category for r in session.requests}, step_s, row_s, step_s / row_s[1])
    found = [Prediction(Setting(PLAIN, DrafterOptions()), 1.0, dict.fromkeys(basis.plain_s, 1.0), None, 1e3 * step_s)]
    for seen in observed.values():
        largest = seen.setting.max_draft_len
        for k in (None,) if seen.setting.is_tree or largest is None else range(1, largest + 1):
            found.append(_prediction(seen, k, basis))
    return sorted(found, key=lambda p: -p.speedup)


@dataclass(frozen=True)
class Basis:
    """What all predictions of a session share: plain answers, the category of every request, a plain step's median
    seconds, a pass by rows as timed apart, and what to scale timed seconds by."""

    plain: Mapping[str, Generation]
    categories: Mapping[str, str]
    step_s: float
    row_s: Mapping[int, float]
    scale: float

    @property
    def plain_s(self) -> dict[str, float]:
        """By category: time to first token, and a median step for every further token."""
        return self.by_category({key: g.ttft_s + len(g.rounds) * self.step_s for key, g in self.plain.items()})

    def by_category(self, seconds: Mapping[str, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, value in seconds.items():
            found[self.categories[key]] = found.get(self.categories[key], 0.0) + value
        return found


def _prediction(seen: Observed, k: int | None, basis: Basis) -> Prediction:
    """k: None for a tree, which is predicted as it ran."""
    setting = (
        seen.setting if k is None else replace(seen.setting, options=replace(seen.setting.options, max_draft_len=k))
    )
    rate = unknown_rate(list(seen.answers.values()), seen.setting.max_draft_len or 0)
    row_s, prefill = basis.row_s if k is not None else seen.row_s, seen.prefill_ratio(basis.plain)
    seconds, emitted, rounds, in_rounds = {}, 0, 0, 0.0
    for key, g in seen.answers.items():
        ran = _rounds(seen, g, k, rate)
        own = sum(basis.scale * (between(seen.draft_s, depth) + between(row_s, rows)) for depth, rows, _ in ran)
        seconds[key] = prefill * basis.plain[key].ttft_s + own
        emitted, rounds, in_rounds = emitted + sum(n for *_, n in ran), rounds + len(ran), in_rounds + own
    plain_s, spent = basis.plain_s, basis.by_category(seconds)
    return Prediction(
        setting,
        sum(plain_s.values()) / sum(spent.values()),
        {category: plain_s[category] / s for category, s in spent.items()},
        emitted / rounds if rounds else None,
        1e3 * in_rounds / rounds if rounds else None,
    )


def _rounds(seen: Observed, g: Generation, k: int | None, rate: float) -> list[tuple[int, int, int]]:
    """Depth drafted, rows verified, tokens emitted, round by round: as it ran for a tree, replayed at K for a chain."""
    if k is None:
        return [(r.depth, len(r.drafted) + 1, len(r.emitted)) for r in g.rounds]
    asked, is_lookup = seen.setting.max_draft_len or k, seen.setting.method in LOOKUPS
    outcomes = redraft(g, k, asked=asked, is_lookup=is_lookup, unknown_right=rate)
    return [(o.depth, o.depth + 1, o.emitted) for o in outcomes]


# ---- what is verified ------------------------------------------------------------------------------------------------


def _verify(
    best: Sequence[Prediction],
    plain: Measurable,
    make: MakeLLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    repeats: int,
    prompt_set: str,
    command: str,
    profile: Profile,
    say: Say,
    clock: Clock,
) -> Session | None:
    """The best predictions beside plain decoding, in turns; None where the budget leaves no time for it."""
    if not best:
        return None
    with ExitStack() as stack:
        llms: dict[str, Measurable] = {PLAIN: plain}
        for prediction in best:
            say(f"loading {prediction.setting.label}")
            llms[prediction.setting.label] = make(prediction.setting.name, decoding_config(prediction.setting.options))
            stack.callback(llms[prediction.setting.label].close)
        methods = {p.setting.label: p.setting.method for p in best}
        return compare(
            llms, prompts, params, methods=methods, repeats=repeats, experiment=EXPERIMENT, profile=profile.name,
            prompt_set=prompt_set, command=command, say=say, clock=clock,
        )  # fmt: skip


def _document(
    predictions: Sequence[Prediction], verified: Session | None, session: Session, profile: Profile
) -> dict[str, Any]:
    rows = (
        []
        if verified is None
        else [
            _verified(p, verified)
            for p in predictions
            if p.setting.name != PLAIN and p.setting.label in verified.records
        ]
    )
    rows.sort(key=lambda row: -row["speedup"])
    document: dict[str, Any] = {
        "kind": "tune",
        "target": without_folders([profile.target]),
        "predictions": [_told(p) for p in predictions],
        "verified": rows,
        "runs": list((verified or session).records.values()),
        "notes": [],
    }
    candidates = rows + [_told(p) for p in predictions if not rows or p.setting.name == PLAIN]
    candidates.sort(key=lambda candidate: -candidate["speedup"])
    choice, others = candidates[0], candidates[1:]
    worse = {category: gain for category, gain in choice["by_category"].items() if gain < 1}
    return document | {
        "choice": choice,
        "is_verified": bool(rows),
        "margin": choice["speedup"] / others[0]["speedup"] - 1 if others else 0.0,
        "is_clear": bool(rows) and _is_clear(choice, others),
        "does_not_pay": dict(sorted(worse.items(), key=lambda item: item[1])),
    }


def _missed(rows: Sequence[Mapping[str, Any]], usual: Sequence[str]) -> dict[str, Any]:
    """The best of all measured settings, the best of the `usual` ones, and how far that stays behind (0: it is it)."""
    picked = next(row for row in rows if row["label"] in usual)
    return {
        "settings": len(rows),
        "best": rows[0]["label"],
        "best_speedup": rows[0]["speedup"],
        "picked": picked["label"],
        "picked_speedup": picked["speedup"],
        "short_by": 1 - picked["speedup"] / rows[0]["speedup"],
    }


def _is_clear(choice: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    """Was it ahead of every other in every repeat? One repeat cannot tell."""
    several = max(len(_repeats(candidate)) for candidate in (choice, *others)) > 1
    return several and min(_repeats(choice)) > max(max(_repeats(other)) for other in others)


def _repeats(candidate: Mapping[str, Any]) -> list[float]:
    return candidate.get("speedup_of_repeats") or [candidate["speedup"]]


def _told(p: Prediction) -> dict[str, Any]:
    options = {name: value for name, value in asdict(p.setting.options).items() if value is not None}
    return {
        "name": p.setting.name, "label": p.setting.label, "options": options, "speedup": p.speedup,
        "by_category": dict(p.by_category), "acceptance_length": p.acceptance_length, "round_ms": p.round_ms,
    }  # fmt: skip


def _verified(p: Prediction, session: Session) -> dict[str, Any]:
    """Its speed-up as measured, over all prompts and by category, beside the prediction; and whether its text is plain
    decoding's."""
    plain, record = session.records[PLAIN], session.records[p.setting.label]
    gain = record["figures"]["output_tok_s"] / plain["figures"]["output_tok_s"]
    by_category = {
        c: found["output_tok_s"] / plain["by_category"][c]["output_tok_s"] for c, found in record["by_category"].items()
    }
    differences = first_differences(session.generations[PLAIN], session.generations[p.setting.label])
    return _told(p) | {
        "speedup": gain,
        "speedup_of_repeats": paired_speedups(plain, record),
        "by_category": by_category,
        "predicted_speedup": p.speedup,
        "prediction_error": p.speedup / gain - 1,
        "acceptance_length": record["figures"]["acceptance_length"],
        "identical_text": None if record["is_simulated"] else not differences,
    }


# ---- in words --------------------------------------------------------------------------------------------------------


def describe_predictions(predictions: Sequence[Prediction], most: int = 8) -> list[str]:
    lines = ["predicted, the fastest first:"]
    for p in predictions[:most]:
        length = "" if p.acceptance_length is None else f", acceptance length {p.acceptance_length:.2f}"
        lines.append(f"  {p.setting.label}: {p.speedup:.2f}x{length}")
    return lines


def describe(document: Mapping[str, Any]) -> list[str]:
    """The choice, its margin, where it does not pay."""
    choice, lines = document["choice"], []
    for row in document["verified"]:
        text = {True: "text identical", False: "text differs", None: "no text"}[row["identical_text"]]
        lines.append(
            f"measured: {row['label']} {row['speedup']:.2f}x (predicted {row['predicted_speedup']:.2f}x, off by "
            f"{row['prediction_error']:+.1%}), {text}"
        )
    how = "measured" if document["is_verified"] else "predicted, not verified"
    noise = "beyond" if document["is_clear"] else "within"
    lines.append(
        f"choice: {choice['label']}, {choice['speedup']:.2f}x plain decoding ({how}), {document['margin']:.1%} ahead "
        "of the next" + (f", {noise} what repeats differ by" if document["is_verified"] else "")
    )
    if found := document.get("exhaustive"):
        lines.append(
            f"of all {found['settings']} settings run, {found['best']} is best ({found['best_speedup']:.2f}x); from "
            f"its {MOST_VERIFIED} best predictions tune takes {found['picked']} ({found['picked_speedup']:.2f}x), "
            f"{found['short_by']:.1%} behind"
        )
    worse = ", ".join(f"{category} {gain:.2f}x" for category, gain in document["does_not_pay"].items())
    lines.append(f"does not pay in: {worse}" if worse else "pays in every category")
    return lines + [f"note: {note}" for note in document["notes"]]


# ---- what others take of it ------------------------------------------------------------------------------------------


def bench_options(options: DrafterOptions, profile: Profile) -> dict[str, Any]:
    """`measure.bench`'s `methods` and `make_llm` for a setting that was read from a file."""
    setting = Setting("settings", options)
    if options.drafter is None:
        raise OptionError("the settings say that plain decoding is fastest", "a drafter to bench", "bench without them")
    make = _maker(profile)

    def make_llm(name: str, on: Profile) -> Measurable:
        if name == setting.method:
            return make(name, decoding_config(options))
        return _make_llm(name, on)

    return {"methods": (PLAIN, setting.method), "make_llm": make_llm}


def found_for_file(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a settings file says beside the options: how much it gains, by how much it leads, where, and when."""
    choice, origin = document["choice"], document["provenance"]
    return {
        "label": choice["label"], "speedup": choice["speedup"], "margin": document["margin"],
        "is_verified": document["is_verified"], "does_not_pay": document["does_not_pay"],
        "machine": machine_words(origin["hardware"], document["runs"][0]["device"]), "provenance": origin,
    }  # fmt: skip


def machine_words(hardware: Mapping[str, Any], device: str) -> str:
    gpus = hardware.get("gpus")
    return (
        f"{len(gpus)} x {gpus[0]['name']}"
        if device != "cpu" and gpus
        else f"{hardware['cpu']}, {hardware['cores']} cores"
    )
