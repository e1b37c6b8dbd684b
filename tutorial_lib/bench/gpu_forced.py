"""A pair with random weights: its times, plain and at forced acceptance lengths. Text and tokens are dropped.

First every acceptance length of the experiment at its K, then every other K at the acceptance length that the same
drafter would reach there, if it were right about each token with one probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import DraftTargetDecodingConfig, SamplingParams, SimulatedAcceptance
from . import cost_model, gpu_parts
from .gpu_meter import Metered
from .gpu_run import Record, Run
from .measure import compare
from .prompts import Prompt, load_prompts, render
from .summary import PLAIN

if TYPE_CHECKING:
    from .gpu import Experiment

CHEAP_S = 5.0  # a run this short is repeated, and the median of three is kept
GUESSED_STEP_MS, GUESSED_DRAFT_MS = 20.0, 1.0  # where none was timed


@dataclass(frozen=True)
class Setting:
    """One run: K, and the acceptance that is forced: a length, and the probability it follows from, if it does."""

    max_draft_len: int
    acceptance_length: float
    acceptance_probability: float | None = None

    @property
    def label(self) -> str:
        return f"K = {self.max_draft_len}, acceptance length {self.acceptance_length:.2f}"


PLAINLY = Setting(0, 1.0)


def settings_of(experiment: Experiment) -> list[Setting]:
    """The speculative runs of an experiment, the most wanted first."""
    k, lengths = experiment.max_draft_len, experiment.acceptance_lengths
    alpha = cost_model.alpha_from_acceptance_length(lengths[0], k)
    swept = [Setting(k, cost_model.expected_tokens(alpha, k), alpha) for k in experiment.draft_lens]
    return [Setting(k, length) for length in lengths] + swept


def run_forced(run: Run, folder: Path) -> None:
    dtype = run.experiment.dtype
    cards = gpu_parts.card(run)
    target = gpu_parts.build(run, folder, "target", dtype, 40)
    drafter = gpu_parts.build(run, folder, "drafter", dtype, 25)
    with gpu_parts.closing(run.part("load of the target", 15, lambda: _load(run, target), target)) as llm:
        run.part("step times", 8, lambda: gpu_parts.time_steps(run, llm, cards["target"]), llm)
        run.part("plain run", _seconds(run, PLAINLY), lambda: _measure(run, llm, PLAINLY), llm)
        run.part("breakdown of a plain step", 5, lambda: _breakdown(run, llm, "plain step", 8), llm)
    first, *others = settings_of(run.experiment)
    with gpu_parts.closing(_load_part(run, target, drafter, first, "load_pair_s")) as llm:
        run.part("draft steps", 4, lambda: gpu_parts.time_drafts(run, llm, cards["drafter"]), llm)
        run.part(f"run, {first.label}", _seconds(run, first), lambda: _measure(run, llm, first), llm)
        run.part("breakdown of a round", 5, lambda: _breakdown(run, llm, f"round, {first.label}", 4), llm)
    for setting in others:
        with gpu_parts.closing(_load_part(run, target, drafter, setting)) as llm:
            run.part(f"run, {setting.label}", _seconds(run, setting), lambda m=llm, s=setting: _measure(run, m, s), llm)  # type: ignore[misc]
    gpu_parts.first_token(run, target, drafter)


def _load_part(run: Run, target: Path | None, drafter: Path | None, setting: Setting, key: str = "") -> Any:
    config = DraftTargetDecodingConfig(max_draft_len=setting.max_draft_len, speculative_model_dir=str(drafter))
    forced = SimulatedAcceptance(acceptance_length=setting.acceptance_length)
    options = {"speculative_config": config, "simulated_acceptance": forced}
    return run.part(f"load, {setting.label}", 5, lambda: _load(run, target, key, **options), target, drafter)


def _load(run: Run, target: Path | None, key: str = "load_s", **options: Any) -> Any:
    return gpu_parts.load(run, key, lambda llm: _filler_ids(run, llm), str(target), **options)


def _seconds(run: Run, setting: Setting) -> float:
    """What the repeats of a run will take, warm-up included."""
    once = _once_s(run, setting)
    return 1.5 + once * _repeats(once)


def _once_s(run: Run, setting: Setting) -> float:
    k = setting.max_draft_len
    step_ms = run.summary.get("step_ms", {}).get(k + 1, GUESSED_STEP_MS)
    draft_ms = run.summary.get("draft_ms", {}).get(k, k * GUESSED_DRAFT_MS)
    return run.experiment.output_tokens / setting.acceptance_length * (step_ms + draft_ms) / 1e3


def _repeats(seconds: float) -> int:
    return 3 if seconds <= CHEAP_S else 1


def _measure(run: Run, llm: Any, setting: Setting) -> Record:
    """One measured setting: its record, and its lines of the summary."""
    e, is_plain = run.experiment, setting == PLAINLY
    method = PLAIN if is_plain else "draft_target"
    metered = Metered(llm, run.nvml, e.output_tokens)
    session = compare(
        {method: metered}, [filler_prompt(llm.tokenizer, e.prompt_tokens)],
        SamplingParams(max_tokens=e.output_tokens, ignore_eos=True), repeats=_repeats(_once_s(run, setting)),
        experiment=_experiment_label(e.name, setting), profile=run.profile, prompt_set="filler", command=run.command,
    )  # fmt: skip
    record = session.records[method]
    found = {
        "round_ms_median": gpu_parts.median_round_ms(
            [g for repeat in session.generations[method] for g in repeat.values()]
        ),
        **metered.energy(),
    }
    forced = {"acceptance_length": setting.acceptance_length, "acceptance_probability": setting.acceptance_probability}
    run.add_run(
        record, is_simulated=True, tokens_sha256=None, simulated_acceptance=None if is_plain else forced,
        prompt_tokens=len(session.requests[0].prompt_ids), **found,
    )  # fmt: skip
    (_keep_plain if is_plain else _keep_speculative)(run, setting, record["figures"], found)
    return record


def _experiment_label(name: str, setting: Setting) -> str:
    """Runs at forced acceptance lengths are experiments of their own: the results table keeps them apart by that."""
    if setting == PLAINLY:
        return name
    if setting.acceptance_probability is not None:
        return f"{name}, acceptance probability {setting.acceptance_probability:.2f}"
    return f"{name}, acceptance length {setting.acceptance_length:g}"


def _keep_plain(run: Run, setting: Setting, figures: Record, found: Record) -> None:
    run.summary |= {
        "plain_tok_s": figures["output_tok_s"],
        "plain_decode_tok_s": figures["decode_tok_s"],
        "plain_round_ms": found["round_ms_median"],
    }
    run.summary.setdefault("energy_j_per_token", {})["plain"] = found["energy_j_per_token"]
    run.say(f"plain: {_throughput(figures, found)}")


def _keep_speculative(run: Run, setting: Setting, figures: Record, found: Record) -> None:
    """By acceptance length at the experiment's K; by K at the first acceptance length and what follows from it."""
    e, known, k = run.experiment, run.summary, setting.max_draft_len
    round_ms, key = found["round_ms_median"], str(setting.acceptance_length)
    overhead_ms = gpu_parts.overhead_ms(run, k, round_ms)
    if setting.acceptance_probability is None:
        known.setdefault("speculative_tok_s", {})[key] = figures["output_tok_s"]
        known.setdefault("speculative_decode_tok_s", {})[key] = figures["decode_tok_s"]
        known.setdefault("energy_j_per_token", {})[key] = found["energy_j_per_token"]
        if known.get("plain_tok_s"):
            known.setdefault("speedup", {})[key] = figures["output_tok_s"] / known["plain_tok_s"]
        if "round_ms" not in known:
            known |= {"round_ms": round_ms, "overhead_ms": overhead_ms, **gpu_parts.in_round(figures)}
    if setting.acceptance_probability is not None or setting.acceptance_length == e.acceptance_lengths[0]:
        known.setdefault("by_draft_len", {})[k] = {
            "acceptance_length": figures["acceptance_length"],
            "round_ms": round_ms,
            "overhead_ms": overhead_ms,
            "output_tok_s": figures["output_tok_s"],
            "decode_tok_s": figures["decode_tok_s"],
        }
    beside = "" if overhead_ms is None else f", {overhead_ms:+.3f} ms beside its draft steps and verification"
    run.say(
        f"K = {k}, acceptance length {figures['acceptance_length']:.2f} (forced): round {round_ms or math.nan:.3f} ms"
        f"{beside}; {_throughput(figures, found)}"
    )


def _throughput(figures: Record, found: Record) -> str:
    energy = found["energy_j_per_token"]
    joules = "" if energy is None else f", {energy:.2f} J per token"
    return (
        f"output throughput {figures['output_tok_s']:.2f} tokens/s, decode throughput {figures['decode_tok_s']:.2f} "
        f"tokens/s{joules}"
    )


def _breakdown(run: Run, llm: Any, of: str, rounds: int) -> Record:
    return gpu_parts.breakdown(run, llm, of, _filler_ids(run, llm), rounds)


def _filler_ids(run: Run, llm: Any) -> list[int]:
    return render(filler_prompt(llm.tokenizer, run.experiment.prompt_tokens), llm.tokenizer)


def filler_prompt(tokenizer: Any, tokens: int) -> Prompt:
    """A prompt that is `tokens` long once rendered by a tokenizer with one token per byte: text for nobody to read."""
    text = " ".join(turn for prompt in load_prompts() for turn in prompt.turns).encode("ascii", "ignore").decode()
    around = len(render(Prompt("filler", "filler", ("a",)), tokenizer)) - 1
    return Prompt("filler", "filler", (text[: max(1, tokens - around)],))
