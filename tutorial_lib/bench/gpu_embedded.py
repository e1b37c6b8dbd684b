"""The embedded pair on a GPU: real acceptance, beside `transformers`.

One interleaved session of our own methods as in `measure.bench`, with the drafter at several K: the fastest one stands
for it. Then that one and plain decoding in turns with `transformers`, over fewer prompts, since it takes some 40 ms a
token. What FP8 costs and gains is an experiment of its own, see `gpu_formats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import DecodingBaseConfig, DraftTargetDecodingConfig, NGramDecodingConfig, SamplingParams
from . import gpu_parts
from .gpu_run import Run, free_gpu_memory
from .measure import Calibration, Session, compare
from .prompts import load_prompts, select
from .summary import PLAIN, RIVAL_KEYS, TRANSFORMERS, describe, summarize

PROMPTS_PER_CATEGORY = 2
RIVAL_STRIDE, RIVAL_REPEATS = 4, 2  # `transformers` answers one prompt of every fourth category
ROUNDS = 8  # of a breakdown


def run_embedded(run: Run, folder: Path) -> None:
    cards = gpu_parts.card(run)
    target, drafter = (gpu_parts.build(run, folder, role, run.experiment.dtype, 20) for role in ("target", "drafter"))
    llms: dict[str, Any] = {}
    try:
        _load_own(run, llms, target, drafter)
        plain, pair = llms.get(PLAIN), llms.get(f"draft_target K={run.experiment.max_draft_len}")
        run.part("step times", 3, lambda: gpu_parts.time_steps(run, plain, cards["target"]), plain)
        run.part("draft steps", 2, lambda: gpu_parts.time_drafts(run, pair, cards["drafter"]), pair)
        session = run.part("runs", 50, lambda: _session(run, llms), plain)
        ids = list(session.requests[0].prompt_ids) if session else None
        for what, llm in (("plain", plain), ("draft_target", pair)):
            _closer_look(run, what, llm, ids)
        _load_rivals(run, llms)
        run.part("runs beside transformers", 70, lambda: _rival_session(run, llms), session, llms.get(TRANSFORMERS))
    finally:
        for llm in llms.values():
            llm.close()
        free_gpu_memory()
    gpu_parts.first_token(run, target, drafter)


def _closer_look(run: Run, what: str, llm: Any, ids: list[int] | None) -> None:
    """Time by kernel of a round (plain: a step), and energy."""
    run.part(f"breakdown, {what}", 3, lambda: gpu_parts.breakdown(run, llm, what, ids or [], ROUNDS), llm, ids)
    run.part(f"energy, {what}", 3, lambda: gpu_parts.energy(run, llm, what, ids or []), llm, ids)


# ---- the session ----------------------------------------------------------------------------------------------------


def _load_own(run: Run, llms: dict[str, Any], target: Path | None, drafter: Path | None) -> None:
    """Every method into `llms`, each a part of its own: one that cannot be loaded is missing from the comparison."""
    configs: dict[str, DecodingBaseConfig | None] = {PLAIN: None}
    for k in run.experiment.all_draft_lens:
        configs[f"draft_target K={k}"] = DraftTargetDecodingConfig(max_draft_len=k, speculative_model_dir=str(drafter))
        configs[f"ngram K={k}"] = NGramDecodingConfig(max_draft_len=k)
    for name, config in configs.items():
        needs = [target, drafter] if name.startswith("draft_target") else [target]
        _load(run, llms, name, config, needs, "load_s" if name == PLAIN else "", str(target))


def _load_rivals(run: Run, llms: dict[str, Any]) -> None:
    """`transformers`, plain and assisted by the same drafter, or by look-up where that drafter cannot be had."""
    e = run.experiment
    pair = DraftTargetDecodingConfig(max_draft_len=e.max_draft_len, speculative_model_dir=e.drafter)
    ngram = NGramDecodingConfig(max_draft_len=e.max_draft_len)
    options = {"backend": "transformers", "dtype": e.dtype}
    _load(run, llms, TRANSFORMERS, None, [], "", e.target, **options)
    _load(run, llms, f"{TRANSFORMERS} draft_target", pair, [], "", e.target, **options)
    if f"{TRANSFORMERS} draft_target" not in llms:
        _load(run, llms, f"{TRANSFORMERS} ngram", ngram, [], "", e.target, **options)


def _load(
    run: Run,
    llms: dict[str, Any],
    name: str,
    config: DecodingBaseConfig | None,
    needs: list[Path | None],
    key: str,
    model: str,
    **options: Any,
) -> None:
    def work() -> Any:
        return gpu_parts.load(run, key, short_ids, model, speculative_config=config, **options)

    llm = run.part(f"load of {name}", 4, work, *needs)
    if llm is not None:
        llms[name] = llm


def short_ids(llm: Any) -> list[int]:
    return list(llm.tokenizer("Why is the sky blue?")["input_ids"])


def _session(run: Run, llms: Mapping[str, Any]) -> Session:
    """Our own methods over the same prompts in turns; records, and the summary that a bench has."""
    e, params = run.experiment, SamplingParams(max_tokens=run.experiment.output_tokens)
    speculative = [name for name in llms if name != PLAIN]
    calibration = Calibration(llms[PLAIN], {name: llms[name] for name in speculative}, params)
    session = compare(
        llms, select(load_prompts(), PROMPTS_PER_CATEGORY), params, methods={name: _method_of(name) for name in llms},
        experiment=e.name, profile=run.profile, command=run.command, after_repeat=calibration.run, say=run.say,
    )  # fmt: skip
    for record in session.records.values():
        run.add_run(record)
    if speculative:
        _summarize(run, session, speculative, calibration)
    return session


def _rival_session(run: Run, llms: Mapping[str, Any]) -> Session:
    """`transformers` in turns with our plain decoding and our best method, over a few prompts."""
    e, best = run.experiment, run.summary["method"]
    chosen = {name: llm for name, llm in llms.items() if name in (PLAIN, best) or name.startswith(TRANSFORMERS)}
    prompts = select(load_prompts(), 1)[::RIVAL_STRIDE]
    session = compare(
        chosen, prompts, SamplingParams(max_tokens=e.output_tokens), repeats=RIVAL_REPEATS,
        methods={name: _method_of(name) for name in chosen}, experiment=f"{e.name}, beside transformers",
        profile=run.profile, command=run.command, say=run.say,
    )  # fmt: skip
    for record in session.records.values():
        run.add_run(record)
    unknown = {"speedup": None, "round_ms": None, "by_category": dict.fromkeys(session.records[PLAIN]["by_category"])}
    found = summarize(session.records, session.generations, [best], {best: unknown})
    run.summary |= {key: found[key] for key in RIVAL_KEYS}
    run.summary["notes"] += [note for note in found["notes"] if note not in run.summary["notes"]]
    tok_s = {name: record["figures"]["output_tok_s"] for name, record in session.records.items()}
    run.summary["beside_transformers_tok_s"] = tok_s
    assisted = next((name for name in tok_s if name.startswith(f"{TRANSFORMERS} ")), None)
    if assisted is not None:
        run.summary["speculative_vs_transformers_assisted"] = tok_s[best] / tok_s[assisted]
    run.say("output tokens/s over the same prompts: " + ", ".join(f"{name} {x:.1f}" for name, x in tok_s.items()))
    return session


def _method_of(name: str) -> str:
    """ "transformers ngram" and "ngram K=4" are both method "ngram"; `transformers` alone is "plain"."""
    words = name.removeprefix(TRANSFORMERS).split()
    return words[0] if words else PLAIN


def _summarize(run: Run, session: Session, speculative: list[str], calibration: Calibration) -> None:
    records = session.records
    by_speed = sorted(speculative, key=lambda name: -records[name]["figures"]["output_tok_s"])
    best = next((name for name in by_speed if name.startswith("draft_target")), by_speed[0])
    ordered = [best, *(name for name in by_speed if name != best)]
    predictions = {name: calibration.predict(name, records) for name in ordered}
    found = summarize(records, session.generations, ordered, predictions)
    for line in describe(found):
        run.say(line)
    figures, k = records[best]["figures"], records[best]["max_draft_len"]
    round_ms = gpu_parts.median_round_ms([g for repeat in session.generations[best] for g in repeat.values()])
    run.summary |= found | {
        "notes": run.summary["notes"] + found["notes"],
        "max_draft_len": k,
        "round_ms": round_ms,
        "overhead_ms": gpu_parts.overhead_ms(run, k, round_ms),
        **gpu_parts.in_round(figures),
        "plain_decode_tok_s": records[PLAIN]["figures"]["decode_tok_s"],
        "speculative_decode_tok_s": figures["decode_tok_s"],
        "calibration": calibration.medians(),
    }
