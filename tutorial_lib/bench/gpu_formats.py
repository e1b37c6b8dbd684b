"""What a number format costs and gains: the embedded pair in bf16 and in FP8, both against float32.

Each format runs plain and speculative over the same prompts, once: are the two texts the same, and how fast are they?
Then both models read the answers that bf16 gave, beside `transformers` in float32: error of the logits, perplexity,
and where two texts part, how near a tie it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..config import DecodingBaseConfig, DraftTargetDecodingConfig, NGramDecodingConfig, SamplingParams
from ..results import Generation
from . import gpu_parts, quality
from .gpu_embedded import PROMPTS_PER_CATEGORY, short_ids
from .gpu_run import Record, Run, free_gpu_memory
from .measure import Session, compare
from .prompts import load_prompts, select
from .summary import PLAIN, first_differences

REFERENCE_TEXTS = 12

Engines = Mapping[tuple[str, str], Path | None]  # (role, dtype) -> engine directory


def run_formats(run: Run, folder: Path) -> None:
    formats = (run.experiment.dtype, "fp8")
    gpu_parts.card(run)
    engines = {
        (role, form): gpu_parts.build(run, folder, role, form, 20) for form in formats for role in ("target", "drafter")
    }
    sessions = {
        form: run.part(f"runs in {form}", 20, partial(_session, run, engines, form), engines["target", form])
        for form in formats
    }
    run.part("number formats", 30, lambda: _number_formats(run, engines, sessions), sessions[run.experiment.dtype])


def _session(run: Run, engines: Engines, form: str) -> Session:
    e, target, drafter = run.experiment, engines["target", form], engines["drafter", form]
    configs: dict[str, DecodingBaseConfig | None] = {PLAIN: None}
    if drafter is not None:
        pair = DraftTargetDecodingConfig(max_draft_len=e.max_draft_len, speculative_model_dir=str(drafter))
        configs["draft_target"] = pair
    configs["ngram"] = NGramDecodingConfig(max_draft_len=e.max_draft_len)
    llms: dict[str, Any] = {}
    try:
        for name, config in configs.items():
            llms[name] = gpu_parts.load(run, "", short_ids, str(target), speculative_config=config)
        session = compare(
            llms, select(load_prompts(), PROMPTS_PER_CATEGORY), SamplingParams(max_tokens=e.output_tokens), repeats=1,
            experiment=e.name, profile=run.profile, command=run.command,
        )  # fmt: skip
    finally:
        for llm in llms.values():
            llm.close()
        free_gpu_memory()
    for record in session.records.values():
        run.add_run(record)
    tok_s = {name: record["figures"]["output_tok_s"] for name, record in session.records.items()}
    run.summary.setdefault("tok_s", {})[form] = tok_s
    run.say(f"{form}, output tokens/s: " + ", ".join(f"{name} {x:.1f}" for name, x in tok_s.items()))
    return session


def _number_formats(run: Run, engines: Engines, sessions: Mapping[str, Session | None]) -> Record:
    """Every format against float32 on the answers of the first."""
    e, session = run.experiment, sessions[run.experiment.dtype]
    assert session is not None
    answers: Mapping[str, Generation] = session.generations[PLAIN][0]
    prompts = {r.key: r.prompt_ids for r in session.requests}
    texts = [([*prompts[key], *g.token_ids], len(prompts[key])) for key, g in list(answers.items())[:REFERENCE_TEXTS]]
    reference = run.tools.reference(run.tools.resolve(e.target, say=run.say).folder)
    truth = [reference.text_logits(ids) for ids, _ in texts]
    logits: Record = {}
    apart: Record = {}
    for dtype, own in sessions.items():
        if (path := engines["target", dtype]) is None:
            continue
        model = run.tools.gpu_model(path)
        mine = [quality.text_logits(model, ids) for ids, _ in texts]
        logits[dtype] = quality.compare_logits(truth, mine, texts)
        if own is not None:
            by = {dtype: lambda ids, m=model: quality.text_logits(m, ids), "float32": reference.text_logits}
            apart[dtype] = quality.first_tokens_apart(
                _parted(own), {r.key: r.prompt_ids for r in own.requests}, *_token_ids(own), by
            )
        del model, mine
        free_gpu_memory()
    found = {"against": "transformers, float32", "texts": len(texts), "logits": logits, "texts_apart": apart}
    if (in_fp8 := sessions["fp8"]) is not None:
        found |= _fp8_against(answers, in_fp8.generations[PLAIN][0])
    run.summary["number_formats"] = found
    run.add("number_formats", model=e.target, **found)
    _say_number_formats(run, found)
    return found


def _parted(session: Session) -> list[Record]:
    """Where our own speculative texts of the first repeat leave the plain ones, by method."""
    return [
        {"method": name, **difference}
        for name, repeats in session.generations.items()
        if name != PLAIN
        for difference in first_differences(session.generations[PLAIN][:1], repeats[:1])
    ]


def _token_ids(session: Session) -> tuple[dict[str, list[int]], dict[str, dict[str, list[int]]]]:
    """Of the first repeat: the plain answers by request, and every method's."""
    by_method = {
        name: {key: g.token_ids for key, g in repeats[0].items()} for name, repeats in session.generations.items()
    }
    return by_method[PLAIN], by_method


def _fp8_against(answers: Mapping[str, Generation], in_fp8: Mapping[str, Generation]) -> Record:
    """Plain answers in fp8 beside those in bf16: how many differ, and from which token on. A later turn is left out,
    since it follows another answer."""
    shared = [key for key in answers if key in in_fp8 and answers[key].prompt_token_ids == in_fp8[key].prompt_token_ids]
    parted = first_differences([{key: answers[key] for key in shared}], [{key: in_fp8[key] for key in shared}])
    return {
        "fp8_answers": len(shared),
        "fp8_answers_that_differ": len(parted),
        "fp8_first_differing_token": sorted(entry["first_difference"] for entry in parted),
    }


def _say_number_formats(run: Run, found: Record) -> None:
    for dtype, error in found["logits"].items():
        run.say(
            f"{dtype} against float32: logit error {error['logit_error_relative']:.2%} of their spread, perplexity "
            f"{error['perplexity']:.4f} against {error['reference_perplexity']:.4f}, same first choice for "
            f"{error['argmax_agreement']:.2%} of {error['tokens']} tokens"
        )
    for dtype, entries in found["texts_apart"].items():
        gaps = [abs(entry[f"gap_{dtype}"]) for entry in entries if f"gap_{dtype}" in entry]
        widest = f", the widest gap between the two logits {max(gaps):.4f}" if gaps else ""
        run.say(f"{dtype}: {len(entries)} speculative answers part from the plain ones{widest}")
