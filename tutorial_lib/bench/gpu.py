"""Experiments on one GPU: what a step, a draft and a round cost, and what speculation makes of it.

An experiment is data. Shapes too large to fetch run with random weights and forced acceptance (`gpu_forced`): their
times are real, their text means nothing and is dropped, and every record says `is_simulated`. The embedded pair runs
with real acceptance, next to `transformers` (`gpu_embedded`), and in two number formats (`gpu_formats`). Step times
come from graphs replayed on their own, round times from the engine's own rounds, so that the one can be held against
the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import OptionError
from .gpu_run import Record, Run, Say, Tools


@dataclass(frozen=True)
class Experiment:
    """A target and a drafter, and what to do with them.

    draft_lens: K swept beside `max_draft_len`. acceptance_lengths: forced where weights are random. rows, context:
    of the timed steps. prompt_tokens, output_tokens: of every run with random weights, whose context is on average
    prompt_tokens + output_tokens / 2; with real weights the prompts are the bundled ones and output_tokens a limit.
    """

    name: str
    target: str
    drafter: str
    dtype: str = "fp8"
    max_draft_len: int = 10
    draft_lens: tuple[int, ...] = (7, 5, 3)
    acceptance_lengths: tuple[float, ...] = (5.0, 4.0, 2.44)
    rows: tuple[int, ...] = (1, 4, 8, 11, 16)
    context: int = 600
    prompt_tokens: int = 128
    output_tokens: int = 944
    is_about_formats: bool = False

    @property
    def is_simulated(self) -> bool:
        return self.target.startswith("dummy:")

    @property
    def all_draft_lens(self) -> tuple[int, ...]:
        return tuple(sorted({self.max_draft_len, *self.draft_lens}))


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment("70b-1b", "dummy:llama-3.3-70b", "dummy:llama-3.2-1b"),
        Experiment("70b-3b", "dummy:llama-3.1-70b", "dummy:llama-3.2-3b"),
        Experiment("70b-8b", "dummy:llama-3.1-70b", "dummy:llama-3.1-8b"),
        Experiment("8b-1b", "dummy:llama-3.1-8b", "dummy:llama-3.2-1b"),
        Experiment("embedded", "embedded:target", "embedded:draft", "bfloat16", 3, (2, 4, 5), (), output_tokens=128),
        Experiment(
            "number-formats",
            "embedded:target",
            "embedded:draft",
            "bfloat16",
            3,
            (),
            (),
            output_tokens=128,
            is_about_formats=True,
        ),
    )
}


def experiment_named(name: str) -> Experiment:
    """The experiment called `name`; `OptionError` listing the known ones otherwise."""
    if name not in EXPERIMENTS:
        raise OptionError(f"experiment {name!r} is unknown", f"one of {', '.join(EXPERIMENTS)}", "choose one of these")
    return EXPERIMENTS[name]


def run_experiment(
    experiment: Experiment | str,
    *,
    json_file: str | None = None,
    budget_s: float | None = None,
    profile: str = "h200",
    command: str = "",
    kernel: str = "auto",
    say: Say = print,
    tools: Tools | None = None,
) -> Record:
    """Run it and return {"experiment", "profile", "runs", "records", "parts", "summary", "definitions"}.

    json_file: rewritten after every part, as one JSON document, or if its name ends in .jsonl as one record a line,
    the summary last. budget_s: parts that would end later are left out. kernel: what is to run the models, as `LLM`
    takes it; one that is asked for by name is part of the experiment's. Raises `OptionError` where there is no GPU.
    """
    if isinstance(experiment, str):
        experiment = experiment_named(experiment)
    if tools is None:
        from ..engine.build import choose_device

        choose_device("cuda")
        tools = Tools.of_this_machine()
    from .gpu_embedded import run_embedded
    from .gpu_forced import run_forced
    from .gpu_formats import run_formats

    of_real_weights = run_formats if experiment.is_about_formats else run_embedded
    if kernel != "auto":
        experiment = replace(experiment, name=f"{experiment.name}, kernel {kernel}")
    run = Run(experiment, tools, say, json_file, budget_s, profile, command, kernel)
    with TemporaryDirectory() as folder:
        (run_forced if experiment.is_simulated else of_real_weights)(run, Path(folder))
    run.write()
    return run.document()
