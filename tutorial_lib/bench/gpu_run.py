"""How an experiment on a GPU is run: part by part, within a time budget, written as it goes.

A part that fails, or that no longer fits the budget, is noted and the rest goes on; what is known so far is written
after every part.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..results import provenance, write_records

if TYPE_CHECKING:
    from .gpu import Experiment

T = TypeVar("T")
Say = Callable[[str], None]
Record = dict[str, Any]

DEFINITIONS = {
    "step_ms": "One target pass by rows (head and argmax included), out of a CUDA graph of several: median, in ms.",
    "step_ratio": "step_ms by rows / step_ms of one row.",
    "draft_ms": "Drafting K tokens by K: one step over two rows, K - 1 over one, in one CUDA graph: median, in ms.",
    "draft_step_ms": "draft_ms / K at the experiment's K.",
    "round_ms": "Median wall time between the ends of successive rounds, drafting, verification and all, in ms.",
    "overhead_ms": "round_ms - (draft_ms of K + step_ms of K + 1 rows).",
    "draft_ms_in_round": "Mean time a round spent drafting, by the GPU's clock inside the round, in ms.",
    "verify_ms_in_round": "Mean time a round spent verifying and accepting, by the same clock, in ms.",
    "overhead_ms_in_round": "Mean round time, by the host's clock, less both.",
    "plain_tok_s": "Output throughput without a drafter: output tokens / latency, TTFT included, in tokens/s.",
    "plain_decode_tok_s": "Decode throughput without a drafter: (output tokens - 1) / (latency - TTFT), in tokens/s.",
    "speculative_tok_s": "Output throughput with the drafter; with forced acceptance by acceptance length.",
    "speculative_decode_tok_s": "Decode throughput with the drafter, likewise.",
    "by_draft_len": "Runs at other K, acceptance forced as if every draft token were accepted with the probability "
    "that gives the first acceptance length at the experiment's K.",
    "read_ceiling_tb_s": "Best of some passes of a kernel that only reads several GB, in 1e12 bytes/s.",
    "tb_s": "Weight bytes of a step (head included, KV cache not) / step_ms of one row, in 1e12 bytes/s.",
    "pct_of_ceiling": "100 x tb_s / read_ceiling_tb_s.",
    "draft_pct_of_ceiling": "The same of a draft step.",
    "floors": "Weight bytes / read_ceiling_tb_s, in ms; a round's floor is K draft steps and one verification.",
    "build_s": "Checkpoint to engine directory, kernels compiled and timed: wall time in s.",
    "load_s": "Target's engine directory to the first token, in the process that built it, in s.",
    "load_pair_s": "The same for target and drafter together.",
    "start_s": "A new process, from its start to the first token, with the kernels that were compiled before, in s.",
    "energy_j_per_token": "Joules by the GPU's own counter over a run / its output tokens, prefill included.",
}


@dataclass
class Tools:
    """What an experiment calls on the machine; tests put stand-ins here."""

    build: Callable[..., Path]
    llm: Callable[..., Any]
    resolve: Callable[..., Any]
    read_ceiling: Callable[[], Record]
    nvml: Callable[[], Any]
    profile_rounds: Callable[..., Any]
    first_token_s: Callable[..., float]
    gpu_model: Callable[[Path], Any]
    reference: Callable[[Path], Any]
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of_this_machine(cls) -> Tools:
        from ..api import LLM, build
        from ..models import resolve
        from . import gpu_meter, gpu_parts, quality
        from .read_kernel import read_ceiling

        return cls(
            build=build,
            llm=LLM,
            resolve=resolve,
            read_ceiling=read_ceiling,
            nvml=gpu_meter.Nvml,
            profile_rounds=gpu_meter.profile_rounds,
            first_token_s=gpu_parts.first_token_s,
            gpu_model=quality.gpu_model_of,
            reference=quality.Reference,
        )


@dataclass
class Run:
    """What one run has found so far, and where it is written."""

    experiment: Experiment
    tools: Tools
    say: Say
    json_file: str | None = None
    budget_s: float | None = None
    profile: str = "h200"
    command: str = ""
    kernel: str = "auto"
    summary: Record = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    parts: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self.tools.clock()
        self.provenance = provenance(self.command, None)
        self.nvml = self.tools.nvml()
        self.summary |= {"experiment": self.experiment.name, "is_simulated": self.experiment.is_simulated, "notes": []}
        if self.nvml.problem:
            self.summary["notes"].append(f"no clocks, power or energy: {self.nvml.problem}")
            self.say(f"note: {self.summary['notes'][0]}")

    @property
    def elapsed_s(self) -> float:
        return self.tools.clock() - self._began

    def part(self, name: str, seconds: float, work: Callable[[], T], *needs: object) -> T | None:
        """`work()`, expected to take about `seconds`; None where it failed, did not fit, or one of `needs` is None."""
        start, value, why = self.elapsed_s, None, None
        status = "skipped"
        if any(need is None for need in needs):
            why = "what it needs is missing"
        elif self.budget_s is not None and start + seconds > self.budget_s:
            left = max(0.0, self.budget_s - start)
            why = f"it takes about {seconds:.0f} s and {left:.0f} s of {self.budget_s:g} s are left"
        else:
            self.say(f"[{start:5.0f} s] {name}")
            status = "done"
            try:
                value = work()
            except Exception as error:  # noqa: BLE001 - one part must not lose the others; the record says why
                status, why = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if why is not None:
            self.say(f"[{self.elapsed_s:5.0f} s] {name}: {status}, {why}")
        if status == "failed":
            free_gpu_memory()
        took = None if status == "skipped" else round(self.elapsed_s - start, 3)
        self.parts.append({"part": name, "status": status, "seconds": took, "why": why})
        self.write()
        return value

    def add(self, kind: str, **fields: Any) -> None:
        """Keep a record; it is written with the part that made it."""
        head = {"kind": kind, "experiment": self.experiment.name, "profile": self.profile}
        self.records.append(finite({**head, **fields, "provenance": self.provenance}))

    def add_run(self, record: Record, **fields: Any) -> None:
        """Keep the record of a measured run, see `measure`."""
        self.records.append(finite({**record, **fields, "provenance": self.provenance}))

    def document(self) -> Record:
        return finite(
            {
                "experiment": self.experiment.name,
                "profile": self.profile,
                "runs": [r for r in self.records if r["kind"] == "run"],
                "records": [r for r in self.records if r["kind"] != "run"],
                "parts": self.parts,
                "definitions": DEFINITIONS,
                "summary": self.summary | {"seconds": round(self.elapsed_s, 1)},
            }
        )

    def write(self) -> None:
        """The whole of it, in place of what was written after the part before."""
        if self.json_file is None or self.json_file == "-":
            return
        document = self.document()
        if not self.json_file.endswith(".jsonl"):
            write_records(self.json_file, [document], append=False)
            return
        known = ("experiment", "profile", "parts", "definitions", "summary")
        last = {"kind": "summary", **{key: document[key] for key in known}, "provenance": self.provenance}
        write_records(self.json_file, [*self.records, finite(last)], append=False)


def finite(value: Any) -> Any:
    """`value` as JSON holds it: NaN and infinities are None, tuples lists, keys strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value


def free_gpu_memory() -> None:
    """Give back what nothing refers to any more; engines and their graphs refer to each other in circles."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
