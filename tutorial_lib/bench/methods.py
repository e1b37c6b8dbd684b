"""Every drafting method in one interleaved session: the same prompts, the same target, the same machine.

`METHODS` is the list: which options each method runs with, and why these; `WIDE_TREES` are run on a GPU too. What
cannot run here (a method that this device does not have, heads that were never trained) is left out, and the record
says so with the reason. Times, text and predictions come from `measure`, the figures from `metrics`; this module only
chooses, opens and gathers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    LayerSkipDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    Profile,
    SADecodingConfig,
    SamplingParams,
)
from ..config import profile as profile_named
from ..errors import OptionError, WorkbookError
from ..models import EMBEDDED_HEADS
from ..results import Generation, without_folders, write_records
from . import energy
from .measure import (
    Calibration,
    Clock,
    Measurable,
    Say,
    Session,
    check_rules,
    compare,
    describe_scores,
    options_of_rules,
    repeats_of,
    sampling,
    scores_of,
)
from .prompts import Prompt, load_prompts, render, select
from .summary import PLAIN, describe, first_differences, is_sampled, paired_speedups, summarize

EXPERIMENT = "methods"
DRAFT_LEN = 5  # K of every method that drafts a chain, and the depth of the EAGLE-3 tree
MakeLLM = Callable[[str, DecodingBaseConfig | None, Profile], Measurable]


@dataclass(frozen=True)
class Method:
    """One drafting method. make: its configuration for a K and a draft model. why: the reason for its options."""

    name: str
    make: Callable[[int, str], DecodingBaseConfig]
    why: str


METHODS = {
    method.name: method
    for method in (
        Method(
            "draft_target",
            lambda k, drafter: DraftTargetDecodingConfig(max_draft_len=k, speculative_model_dir=drafter),
            "the profile's draft model, K tokens always",
        ),
        Method("ngram", lambda k, _: NGramDecodingConfig(max_draft_len=k), "defaults: n-grams of up to three tokens"),
        Method("suffix", lambda k, _: SADecodingConfig(max_draft_len=k), "defaults: suffixes of any length, no pool"),
        Method("lookahead", lambda *_: LookaheadDecodingConfig(), "defaults: W = 4, N = 3, G = 4"),
        Method(
            "medusa",
            lambda k, _: MedusaDecodingConfig(max_draft_len=k, speculative_model_dir="embedded:medusa"),
            "the tree that its checkpoint carries, chosen from measured acceptance",
        ),
        Method(
            "eagle3",
            lambda k, _: EagleDecodingConfig(max_draft_len=k, speculative_model_dir="embedded:eagle3"),
            "a chain of K tokens",
        ),
        Method(
            "eagle3_tree",
            lambda k, _: EagleDecodingConfig(
                max_draft_len=k, speculative_model_dir="embedded:eagle3",
                use_dynamic_tree=True, dynamic_tree_max_topK=3, max_total_draft_tokens=10,
            ),
            "as deep as the chain, with the ten likeliest of its nodes",
        ),
        Method(
            "layer_skip",
            lambda k, _: LayerSkipDecodingConfig(max_draft_len=k, skip_layers=[3, 5]),
            "the two layers that this target misses least: with more of its 30 left out, as by default, hardly a "
            "token is accepted; with these two many are, but a draft token still costs 28 layers",
        ),
    )
}  # fmt: skip


def shipped_tree(nodes: int, heads: str = "embedded:eagle3") -> list[list[int]]:
    """The first `nodes` paths of the order that was chosen from measured ranks: every beginning of it is a tree."""
    card = json.loads((EMBEDDED_HEADS[heads] / "card.json").read_text(encoding="utf-8"))
    return card["tree"][:nodes]


def _fixed(nodes: int) -> Method:
    return Method(
        f"eagle3_fixed{nodes}",
        lambda *_: EagleDecodingConfig(speculative_model_dir="embedded:eagle3", eagle_choices=shipped_tree(nodes)),
        f"the {nodes} paths that most often were right on the training text",
    )


# For a GPU, to which 16 rows are as one and 64 not many more; a CPU computes row by row. With the token before it, a
# tree of 15, 31 or 63 nodes just fills the rows of one step.
WIDE_TREES = {
    method.name: method
    for method in (
        _fixed(15),
        _fixed(31),
        _fixed(63),
        Method(
            "eagle3_dynamic31",
            lambda k, _: EagleDecodingConfig(
                max_draft_len=k, speculative_model_dir="embedded:eagle3",
                use_dynamic_tree=True, dynamic_tree_max_topK=6, max_total_draft_tokens=31,
            ),
            "the 31 likeliest nodes of a beam of six: as many as a fixed tree's, chosen anew every round",
        ),
    )
}  # fmt: skip
ALL = METHODS | WIDE_TREES


def bench_methods(
    profile: Profile | str,
    *,
    methods: Sequence[str] | None = None,
    max_draft_len: int = DRAFT_LEN,
    prompts: Sequence[Prompt] | None = None,
    repeats: int | None = None,
    temperature: float = 0.0,
    rules: str | None = None,
    price_per_hour: float | None = None,
    prompt_set: str = "bundled",
    command: str = "",
    say: Say = print,
    make_llm: MakeLLM | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Plain decoding and every method in turns, on the profile's target, number format and device.

    methods: names from `ALL`, default `METHODS` and on a GPU all; plain always runs. prompts: all of these; without,
    the profile's number per category of the bundled ones. temperature, rules, price_per_hour: as in `measure.bench`.
    Returns {"experiment", "profile", "runs", "summary"}: the summary is that of `measure.bench`, with an entry for
    every method in "methods", and for every one left out its reason in "left_out". Raises `WorkbookError`s.
    """
    profile = profile_named(profile) if isinstance(profile, str) else profile
    chosen = _chosen(profile, methods)
    prompts = select(load_prompts(), profile.prompts_per_category) if prompts is None else list(prompts)
    check_rules(rules)
    energy.check_price(price_per_hour)
    params = sampling(profile.max_tokens, temperature)
    configs = {name: ALL[name].make(max_draft_len, profile.drafter) for name in chosen}
    with ExitStack() as stack:
        llms, left_out = _open(profile, configs, prompts[0], make_llm or _make_llm, stack, say)
        calibration = Calibration(llms[PLAIN], {n: llm for n, llm in llms.items() if n != PLAIN}, params)
        session = compare(
            llms, prompts, params, repeats=repeats_of(profile, repeats, rules), experiment=EXPERIMENT,
            profile=profile.name, prompt_set=prompt_set, command=command, after_repeat=calibration.run, say=say,
            clock=clock, price_per_hour=price_per_hour, **options_of_rules(rules),
        )  # fmt: skip
    for name, record in session.records.items():
        record["options"] = options_of(configs.get(name))
    summary = _summary(session, calibration)
    summary |= scores_of(session, [entry["name"] for entry in summary["methods"]], rules)
    own = (*describe_methods(summary), *describe_scores(summary), *energy.describe(session.records))
    for line in (*describe(summary), *own):
        say(line)
    summary |= {"left_out": left_out}
    summary["notes"] += [f"{entry['name']} left out: {entry['why']}" for entry in left_out]  # said when it happened
    runs = list(session.records.values())
    return {"experiment": EXPERIMENT, "profile": profile.name, "runs": runs, "summary": summary}


def _chosen(profile: Profile, methods: Sequence[str] | None) -> list[str]:
    if profile.is_replay or profile.backend != "torch":
        raise OptionError(
            f"profile {profile.name} does not run experiment {EXPERIMENT}",
            "one of the workbook's own engine",
            "choose profile cpu or h200",
        )
    by_default = ALL if profile.device == "cuda" else METHODS
    names = [name for name in (by_default if methods is None else methods) if name != PLAIN]
    if unknown := [name for name in names if name not in ALL]:
        raise OptionError(f"method {unknown[0]!r} is unknown", f"some of {', '.join(ALL)}", "choose of these")
    if not names or len(set(names)) < len(names):
        raise OptionError(
            f"methods are {', '.join(methods or ()) or 'none'}", "at least one drafting method, each once"
        )
    return names


# ---- opening ---------------------------------------------------------------------------------------------------------


def _open(
    profile: Profile,
    configs: Mapping[str, DecodingBaseConfig],
    first: Prompt,
    make_llm: MakeLLM,
    stack: ExitStack,
    say: Say,
) -> tuple[dict[str, Measurable], list[dict[str, str]]]:
    """Plain decoding and every method that answers, each tried on a few tokens; why the others do not."""
    say(f"loading {PLAIN}")
    llms = {PLAIN: make_llm(PLAIN, None, profile)}
    stack.callback(llms[PLAIN].close)
    ids, few = render(first, llms[PLAIN].tokenizer), SamplingParams(max_tokens=3, ignore_eos=True)
    left_out = []
    for name, config in configs.items():
        say(f"loading {name}")
        try:
            with ExitStack() as trial:
                llm = make_llm(name, config, profile)
                trial.callback(llm.close)
                llm.generate(list(ids), few)
                stack.push(trial.pop_all())
            llms[name] = llm
        except (
            WorkbookError,
            RuntimeError,
        ) as error:  # the latter are a GPU's: memory, a graph not captured
            why = without_folders(str(error))
            left_out.append({"name": name, "why": why})
            say(f"left out: {name}: {why}")
    if len(llms) == 1:
        raise OptionError(f"no drafting method runs here; {left_out[0]['name']}: {left_out[0]['why']}", "at least one")
    return llms, left_out


def _make_llm(name: str, config: DecodingBaseConfig | None, profile: Profile) -> Measurable:
    from ..api import LLM

    return LLM(
        profile.target,
        backend=profile.backend,
        speculative_config=config,
        dtype=profile.dtype,
        device=profile.device,
        kernel=profile.kernel,
    )


def options_of(config: DecodingBaseConfig | None) -> dict[str, Any]:
    """What a configuration asks for beyond its defaults, ready for JSON: `speculative_model` is left to the record."""
    if config is None:
        return {}
    found: dict[str, Any] = {"max_draft_len": config.max_draft_len}
    for f in fields(config):
        value = getattr(config, f.name)
        if not f.name.startswith(("speculative_model", "max_draft_len")) and value != f.default:
            found[f.name] = list(value) if isinstance(value, tuple) else value
    return {"class": type(config).__name__, **found}


def trace_methods(
    profile: Profile | str,
    prompt: Prompt,
    *,
    max_draft_len: int = DRAFT_LEN,
    say: Say = print,
    make_llm: MakeLLM | None = None,
) -> dict[str, dict[str, Any]]:
    """One answer to `prompt` by plain decoding and by every method, one model after the other: {"generations": by
    name, "left_out": the reason by name}. Times in them are those of a first call; `bench_methods` measures."""
    profile = profile_named(profile) if isinstance(profile, str) else profile
    _chosen(profile, None)
    params = SamplingParams(max_tokens=profile.max_tokens)
    configs: dict[str, DecodingBaseConfig | None] = {PLAIN: None}
    configs |= {name: method.make(max_draft_len, profile.drafter) for name, method in METHODS.items()}
    generations: dict[str, Generation] = {}
    left_out: dict[str, str] = {}
    for name, config in configs.items():
        try:
            with ExitStack() as stack:
                llm = (make_llm or _make_llm)(name, config, profile)
                stack.callback(llm.close)
                generations[name] = llm.generate(render(prompt, llm.tokenizer), params)
        except (WorkbookError, RuntimeError) as error:
            if name == PLAIN:
                raise
            left_out[name] = without_folders(str(error))
            say(f"left out: {name}: {left_out[name]}")
    return {"generations": generations, "left_out": left_out}


# ---- the summary -----------------------------------------------------------------------------------------------------


def _summary(session: Session, calibration: Calibration) -> dict[str, Any]:
    records, generations = session.records, session.generations
    names = [name for name in records if name != PLAIN]
    predictions = {name: calibration.predict(name, records) for name in names}
    summary = summarize(records, generations, names, predictions)
    summary["methods"] = [_entry(name, session, predictions[name]) for name in names]
    best = max(summary["methods"], key=lambda entry: entry["speedup"])
    summary |= {"best_method": best["name"], "best_speedup": best["speedup"]}
    summary["calibration"] = calibration.medians()
    if calibration.refusal:
        summary["notes"].append(f"no prediction: {calibration.refusal}")
    return summary


def _entry(name: str, session: Session, predicted: Mapping[str, Any]) -> dict[str, Any]:
    """What the table of methods holds of one: figures of its record, and its speed-up over the plain run."""
    plain, record = session.records[PLAIN], session.records[name]
    figures, differences = record["figures"], None
    if not record["is_simulated"] and not is_sampled(record):
        differences = len(first_differences(session.generations[PLAIN], session.generations[name]))
    speedup = figures["output_tok_s"] / plain["figures"]["output_tok_s"]
    same = ("acceptance_length", "acceptance_rate", "acceptance_by_position", "mean_draft_len", "output_tok_s")
    by_category = {
        category: {
            "acceptance_length": found["acceptance_length"],
            "mean_draft_len": found["mean_draft_len"],
            "speedup": found["output_tok_s"] / plain["by_category"][category]["output_tok_s"],
            "predicted_speedup": predicted["by_category"][category],
        }
        for category, found in record["by_category"].items()
    }
    return {
        "name": name,
        "options": record["options"],
        "why": ALL[name].why,
        **{key: figures[key] for key in same},
        "draft_ms": figures["draft_ms_per_round"],
        "verify_ms": figures["verify_ms_per_round"],
        "overhead_ms": figures["overhead_ms_per_round"],
        "speedup": speedup,
        "speedup_of_repeats": paired_speedups(plain, record),
        "predicted_speedup": predicted["speedup"],
        "prediction_error": predicted["speedup"] / speedup - 1 if predicted["speedup"] is not None else None,
        "identical_text": None if differences is None else differences == 0,
        "differences": differences,
        "by_category": by_category,
    }


def describe_methods(summary: Mapping[str, Any]) -> list[str]:
    """One line for every method, the fastest first."""
    lines = []
    for entry in sorted(summary["methods"], key=lambda e: -e["speedup"]):
        text = {True: "text identical", False: f"text differs in {entry['differences']} answers", None: "no text"}
        lines.append(
            f"{entry['name']}: {entry['speedup']:.2f}x, acceptance length {_short(entry['acceptance_length'])}, "
            f"{_short(entry['mean_draft_len'])} tokens drafted a round, draft {_short(entry['draft_ms'])} ms, verify "
            f"{_short(entry['verify_ms'])} ms, {text[entry['identical_text']]}"
        )
    return lines


def _short(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def write(document: Mapping[str, Any], file: str) -> None:
    """The document as one JSON object; if `file` ends in .jsonl, its runs a line each and the summary last."""
    if not file.endswith(".jsonl"):
        write_records(Path(file), [document], append=False)
        return
    last = {"kind": "summary", **{key: document[key] for key in ("experiment", "profile", "summary")}}
    last["provenance"] = document["runs"][0]["provenance"]
    write_records(Path(file), [*document["runs"], last], append=False)
