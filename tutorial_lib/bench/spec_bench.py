"""Scores by Spec-Bench's own rules (Xia et al. 2024, arXiv 2401.07851; github.com/hemingkx/Spec-Bench). Pure.

Its rules: the first question is answered three times before anything counts; a call is timed whole, prefill included,
the device waited for on both sides; a question's speed is its new tokens / its seconds over all turns; tokens per
second are the mean of the questions' speeds, and the speed-up is the ratio of two such means; all of it three times,
with mean and sample standard deviation. So short answers weigh as much as long ones, unlike in `metrics`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..results import Generation

NAME = "spec-bench"
WARM_UPS, RUNS = 3, 3
# The eight categories of MT-bench count as one task there.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
DEFINITIONS = {
    "tokens_per_second": "Mean over questions of (new tokens of all turns / wall seconds of all turns, prefill "
    "included, the device synchronised on both sides), then mean over runs.",
    "speedup": "Ratio of the two means over questions, of every run; then mean over runs.",
    "std": "Sample standard deviation over the runs (n - 1); None for one run.",
    "mean_accepted_tokens": "Mean over all rounds of all runs of the tokens a round yields, bonus included, before the "
    "answer's end cuts any off.",
}
DIFFERENCES = (
    "methods take turns question by question instead of one after the other",
    "tokens of both are those generated; Spec-Bench counts the plain run's by tokenizing its text again",
    "later turns follow the plain run's answers, so that every method decodes after the same tokens",
)


def score(
    categories: Mapping[str, str],
    walls: Mapping[str, Sequence[Mapping[str, float]]],
    generations: Mapping[str, Sequence[Mapping[str, Generation]]],
    plain: str,
    methods: Sequence[str],
) -> dict[str, Any]:
    """categories: by request key ("question/turn"). walls, generations: by name, run and request key. Returns for every
    method its figures over all questions and by task, beside those of `plain`."""
    tasks = task_of(categories)
    names = ["overall", *dict.fromkeys(tasks.values())]
    found = {
        name: {
            task: _figures(
                [
                    _speeds(run_walls, run_answers, tasks, task)
                    for run_walls, run_answers in zip(walls[name], generations[name], strict=True)
                ]
            )
            for task in names
        }
        for name in (plain, *methods)
    }
    return {
        "rules": NAME,
        "runs": len(walls[plain]),
        "warm_ups": WARM_UPS,
        "definitions": DEFINITIONS,
        "differences": list(DIFFERENCES),
        "plain": {task: _without_runs(figures) for task, figures in found[plain].items()},
        "methods": {
            name: {
                "mean_accepted_tokens": _mean_accepted(generations[name]),
                **{task: _against(found[name][task], found[plain][task]) for task in names},
            }
            for name in methods
        },
    }


def task_of(categories: Mapping[str, str]) -> dict[str, str]:
    """The task of every question, by its id."""
    by_question = {key.rpartition("/")[0]: category for key, category in categories.items()}
    return {question: "mt_bench" if c in MT_BENCH else c for question, c in by_question.items()}


def _speeds(
    walls: Mapping[str, float], answers: Mapping[str, Generation], tasks: Mapping[str, str], task: str
) -> list[float]:
    """Tokens per second of every question of `task`, in one run."""
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for key, wall_s in walls.items():
        question = key.rpartition("/")[0]
        if task in ("overall", tasks[question]):
            tokens[question] = tokens.get(question, 0) + len(answers[key].token_ids)
            seconds[question] = seconds.get(question, 0.0) + wall_s
    return [tokens[question] / seconds[question] for question in tokens]


def _figures(runs: Sequence[Sequence[float]]) -> dict[str, Any]:
    means = [statistics.mean(speeds) for speeds in runs]
    return {
        "questions": len(runs[0]),
        "tokens_per_second": statistics.mean(means),
        "tokens_per_second_std": _std(means),
        "of_runs": means,
    }


def _without_runs(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name != "of_runs"}


def _against(own: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(own["of_runs"], plain["of_runs"], strict=True)]
    return {
        **_without_runs(own),
        "speedup": statistics.mean(ratios),
        "speedup_std": _std(ratios),
        "speedup_of_runs": ratios,
    }


def _std(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _mean_accepted(runs: Sequence[Mapping[str, Generation]]) -> float | None:
    lengths = [r.accepted + 1 for run in runs for generation in run.values() for r in generation.rounds]
    return statistics.mean(lengths) if lengths else None


def describe(scores: Mapping[str, Any]) -> list[str]:
    """The scores in a few lines."""
    lines = [f"by Spec-Bench's rules, {scores['runs']} runs:"]
    for name, found in scores["methods"].items():
        overall = found["overall"]
        accepted = found["mean_accepted_tokens"]
        tasks = ", ".join(
            f"{task} {figures['speedup']:.2f}x"
            for task, figures in found.items()
            if isinstance(figures, Mapping) and task != "overall"
        )
        lines.append(
            f"  {name}: {overall['speedup']:.2f}x{_plus_minus(overall['speedup_std'])}, "
            f"{overall['tokens_per_second']:.1f} tokens/s{_plus_minus(overall['tokens_per_second_std'])}, mean "
            f"accepted tokens {'not available' if accepted is None else f'{accepted:.2f}'} ({tasks})"
        )
    return lines


def _plus_minus(value: float | None) -> str:
    return "" if value is None else f" ± {value:.2f}"
