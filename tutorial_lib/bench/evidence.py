"""The cost model against the stop-watch: every recorded run that somebody also timed the parts of, with its error.

Two predictions for each: from step times that were measured apart from the run, and from the hardware alone (bytes,
flops, launches; see `hardware_model`). Both take the plain run's time to first token, and of the run the number of its
tokens and its acceptance length, or the one that was forced; no time of the predicted requests goes in. A drafter on a
GPU's host is the one exception to "apart from the run", see `_other_rounds`. Every record that holds its parts is
predicted: none is left out. Reads records, measures nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..plan import GPUS
from ..shapes import DUMMIES
from .cost_model import Components, predict_speedup, round_s
from .hardware_model import (
    LAUNCHES_BESIDE,
    LAYER_LAUNCHES_CPU,
    Ceilings,
    ModelCost,
    chain,
    draft_s,
    eagle3_cost,
    medusa_cost,
    model_cost,
    step_s,
    without_layers,
)
from .measure import between
from .summary import PLAIN

Record = Mapping[str, Any]
DATA = Path(__file__).parents[1] / "data"
SHORTLIST = 8192  # tokens that the embedded draft model scores
EAGLE3_SHORTLIST = 16384  # and the EAGLE-3 head of these records; the one shipped since scores more
SMOLLM2_135M = {  # the embedded target's shape, so that its records can be read without its weights
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
LOOKUPS = ("ngram", "suffix", "lookahead")
TREE_WIDTH = 3
HOST_DRAFTERS = ("suffix", "lookahead")  # on a GPU these draft on the host, which waits for each round's tokens


@dataclass(frozen=True)
class Point:
    """One measured speed-up of output throughput beside its two predictions (None: not predicted). category None:
    over all prompts of the run. has_host_turn: what its rounds take beyond the parts that were timed apart comes from
    the run's rounds on other prompts."""

    machine: str
    session: str
    target: str
    method: str
    max_draft_len: int
    category: str | None
    acceptance_length: float
    is_forced: bool
    has_host_turn: bool
    measured: float
    from_steps: float | None
    from_hardware: float | None

    @property
    def label(self) -> str:
        where = "" if self.category is None else f", {self.category}"
        return f"{self.session}: {self.method} K={self.max_draft_len}{where}"

    def error(self, source: str) -> float | None:
        """Predicted / measured - 1; source: "from_steps" or "from_hardware"."""
        predicted = getattr(self, source)
        return None if predicted is None else predicted / self.measured - 1


@dataclass(frozen=True)
class Errors:
    """Of the points with a prediction: how many, median and largest of the absolute errors, and whose that one is."""

    count: int
    median: float
    worst: float
    worst_label: str


def errors(points: Iterable[Point], source: str = "from_steps") -> Errors:
    known = [(abs(error), p.label) for p in points if (error := p.error(source)) is not None]
    if not known:
        raise OptionError("no point has been predicted", "records with step times")
    worst = max(known)
    return Errors(len(known), statistics.median(error for error, _ in known), *worst)


# ---- ceilings --------------------------------------------------------------------------------------------------------


def gpu_ceilings(large: Sequence[Record], small: Sequence[Record], gpu: str = "H200") -> Ceilings:
    """From the records of a large and of the embedded experiment. Read rate: the best that the large one's reading
    kernel reached. Launch: what the small model's step takes beyond its bytes, by launch. Arithmetic: the data sheet's
    dense FP8 rate, since no recorded step has rows enough to meet that ceiling."""
    step = next(r for r in small if r["kind"] == "steps" and r["of"] == "target")
    rate = _first(large, "card")["read_ceiling"]["tb_s"] * 1e12
    bare = Ceilings(gpu, rate, GPUS[gpu].flops_per_s("fp8"), 0.0)
    model = model_cost(SMOLLM2_135M)
    launches = bare.layer_launches * model.layers + LAUNCHES_BESIDE
    beyond = step["step_ms"]["1"] / 1e3 - step_s(model, bare, context=step["context"])
    return replace(bare, launch_s=beyond / launches, how="read rate and launch from records, arithmetic from the sheet")


def cpu_ceilings(record: Record) -> Ceilings:
    """From what `ceilings.measure` wrote."""
    rates = (record["bytes_per_s"], record["flops_per_s"], record["launch_s"])
    return Ceilings(record["machine"], *rates, layer_launches=LAYER_LAUNCHES_CPU, how="measured")


# ---- from records to points ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shapes:
    """What the hardware model needs to know of a session: its models, its machine, the context of its requests."""

    target: ModelCost
    machine: Ceilings
    context: int
    draft_model: ModelCost

    def components(self, run: Record, acceptance: Mapping[str, float]) -> Components | None:
        """Step times from bytes, flops and launches; None for a method whose drafter is not described here, and for
        one whose rounds wait for the host, of which no ceiling of the GPU tells."""
        k, nodes = run["max_draft_len"], run["figures"]["mean_draft_len"]
        described = self._drafter(run, k)
        if described is None or _waits_for_host(run):
            return None
        drafter, widths = described
        return Components(
            max_draft_len=k,
            plain_step_s=step_s(self.target, self.machine, context=self.context),
            verify_step_s=step_s(self.target, self.machine, 1 + nodes, context=self.context),
            draft_s=draft_s(drafter, self.machine, widths, context=self.context),
            draft_step_s=draft_s(drafter, self.machine, widths[:1], context=self.context),
            acceptance_length=acceptance,
        )

    def _drafter(self, run: Record, k: int) -> tuple[ModelCost | None, tuple[int, ...]] | None:
        """The model that drafts, and its nodes by depth: of a tree a few at every depth, which read no more bytes."""
        method = run["method"]
        if method in LOOKUPS:
            return None, chain(k)
        if method == "draft_target":
            return self.draft_model, chain(k)
        if method.startswith("eagle3"):
            recorded = {**_data_config("embedded_eagle3"), "draft_vocab_size": EAGLE3_SHORTLIST}
            heads = eagle3_cost(recorded, run["dtype"])
            return heads, chain(k) if method == "eagle3" else (TREE_WIDTH,) * k
        if method == "medusa":
            return medusa_cost(_data_config("embedded_medusa"), run["dtype"]), chain(1)
        if method == "layer_skip" and (left_out := run.get("options", {}).get("skip_layers")):
            return without_layers(self.target, len(left_out)), chain(k)
        return None


def _points(
    session: str,
    plain: Record,
    run: Record,
    measured_parts: Components | None,
    shapes: Shapes,
    forced: float | None = None,
) -> Iterator[Point]:
    """The run as a whole, then its categories where there are several."""
    lengths = {c: forced or found["acceptance_length"] or 1.0 for c, found in run["by_category"].items()}
    of_steps = None
    if measured_parts is not None:
        turns = _other_rounds(plain, run, measured_parts) if _waits_for_host(run) else {}
        of_steps = replace(measured_parts, acceptance_length=lengths, host_turn_s=turns)
    of_hardware = shapes.components(run, lengths)
    as_long = {
        c: {**f, "output_tokens": run["by_category"][c]["output_tokens"]} for c, f in plain["by_category"].items()
    }
    predicted = [
        None if parts is None else predict_speedup({"by_category": as_long}, parts)["seconds_by_category"]
        for parts in (of_steps, of_hardware)
    ]
    for category in (None, *(run["by_category"] if len(run["by_category"]) > 1 else ())):
        own, base = (r["figures"] if category is None else r["by_category"][category] for r in (run, plain))
        values = [
            None
            if seconds is None
            else own["output_tokens"]
            / (sum(seconds.values()) if category is None else seconds[category])
            / base["output_tok_s"]
            for seconds in predicted
        ]
        yield Point(
            machine=shapes.machine.name,
            session=session,
            target=run["target"],
            method=run["method"],
            max_draft_len=run["max_draft_len"],
            category=category,
            acceptance_length=forced or own["acceptance_length"] or 1.0,
            is_forced=forced is not None,
            has_host_turn=_waits_for_host(run),
            measured=own["output_tok_s"] / base["output_tok_s"],
            from_steps=values[0],
            from_hardware=values[1],
        )


def _waits_for_host(run: Record) -> bool:
    return run["device"] != "cpu" and run["method"] in HOST_DRAFTERS


def _other_rounds(plain: Record, run: Record, parts: Components) -> dict[str, float]:
    """By category the mean seconds that rounds of the OTHER categories took beyond `parts`: reading the last round's
    tokens, drafting, writing the drafts to the device and starting the graph, while the GPU waits. It lies between two
    rounds and was in no part that was timed apart; other prompts tell it without any time of those that are predicted.
    Empty with fewer than two categories: then nothing is added."""
    rounds = {c: found["rounds"] for c, found in run["by_category"].items()}
    beyond_s = {
        c: found["rounds"] * (found["round_ms"] / 1e3 - round_s(plain["by_category"][c], parts))
        for c, found in run["by_category"].items()
    }
    others = {c: [o for o in rounds if o != c] for c in rounds}
    return {c: sum(beyond_s[o] for o in some) / sum(rounds[o] for o in some) for c, some in others.items() if some}


def forced_points(records: Sequence[Record], machine: Ceilings, others: Sequence[Record] = ()) -> list[Point]:
    """A GPU's runs of random weights: every K and every forced acceptance length. others: runs of the same two models
    in another session, plain first, which these records' step times predict as well."""
    steps, drafts = (next(r for r in records if r["kind"] == "steps" and r["of"] == of) for of in ("target", "drafter"))
    card = _first(records, "card")
    dtype = card["target"]["dtype"]
    target, drafter = (
        model_cost(DUMMIES[card[of]["model"].removeprefix("dummy:")], dtype) for of in ("target", "drafter")
    )
    shapes = Shapes(target, machine, steps["context"], drafter)
    row_s = {int(rows): ms / 1e3 for rows, ms in steps["step_ms"].items()}
    draft_s = {0: 0.0, 1: drafts["draft_step_ms"] / 1e3} | {int(k): ms / 1e3 for k, ms in drafts["draft_ms"].items()}
    runs = list(others) or [r for r in records if r["kind"] == "run"]
    session = others[0]["experiment"] if others else card["experiment"]
    found: list[Point] = []
    for run in runs[1:]:
        k = run["max_draft_len"]
        parts = Components(
            k,
            plain_step_s=row_s[1],
            verify_step_s=between(row_s, k + 1),
            draft_s=between(draft_s, k),
            draft_step_s=draft_s[1],
            acceptance_length={},
        )
        told = run.get("simulated_acceptance") or run["figures"]
        found += _points(session, runs[0], run, parts, shapes, told["acceptance_length"])
    return found


def embedded_gpu_points(records: Sequence[Record], machine: Ceilings) -> list[Point]:
    """The embedded pair's session on a GPU, in the number format whose steps were timed: method by K by category."""
    card, summary = _first(records, "card"), _first(records, "summary")["summary"]
    dtype, name = card["target"]["dtype"], card["experiment"]
    in_format = replace(machine, flops_per_s=GPUS["H200"].flops_per_s(dtype))
    shapes = _embedded_shapes(dtype, in_format, card["context"])
    runs = [r for r in records if r["kind"] == "run" and r["experiment"] == name and r["dtype"] == dtype]
    times = summary["calibration"]
    found: list[Point] = []
    for run in runs[1:]:
        parts = _calibrated(times, f"{run['method']} K={run['max_draft_len']}", run["max_draft_len"])
        found += _points(name, runs[0], run, parts, shapes)
    return found


def methods_gpu_points(records: Sequence[Record], machine: Ceilings) -> list[Point]:
    """Every drafting method of the embedded pair on a GPU, chains and trees."""
    runs = [r for r in records if r["kind"] == "run"]
    summary = _first(records, "summary")["summary"]
    in_format = replace(machine, flops_per_s=GPUS["H200"].flops_per_s(runs[0]["dtype"]))
    return bench_points({"runs": runs, "summary": summary}, in_format, "methods")


def bench_points(document: Mapping[str, Any], machine: Ceilings, session: str = "bench") -> list[Point]:
    """A bench of the embedded pair (`measure.bench`, `bench_methods`): the reader's own run, or a record."""
    runs = [r for r in document["runs"] if r["backend"] == "torch"]
    times = document["summary"].get("calibration") or {}
    shapes = _embedded_shapes(runs[0]["dtype"], machine, 0)
    found: list[Point] = []
    for run in (r for r in runs if r["method"] != PLAIN):
        parts = _calibrated(times, run["method"], run["max_draft_len"])
        found += _points(session, runs[0], run, parts, shapes)
    return found


def sweep_points(runs: Sequence[Record], parts: Mapping[str, Any], machine: Ceilings) -> list[Point]:
    """Notebook 02's sweep over K."""
    shapes = _embedded_shapes(runs[0]["dtype"], machine, 0)
    found: list[Point] = []
    for run in runs[1:]:
        k = run["max_draft_len"]
        own = (parts["verify_s"][1], parts["verify_s"][k + 1], parts["draft_s"][k], parts["draft_s"][1])
        found += _points("notebook 02", runs[0], run, Components(k, *own, acceptance_length={}), shapes)
    return found


# ---- small things ----------------------------------------------------------------------------------------------------


def _calibrated(times: Mapping[str, Mapping[str, float]], name: str, k: int) -> Components | None:
    if PLAIN not in times or name not in times:
        return None
    own = times[name]
    return Components(
        k, times[PLAIN]["step_s"], own["verify_step_s"], own["draft_s"], own["draft_step_s"], acceptance_length={}
    )


def _embedded_shapes(dtype: str, machine: Ceilings, context: int) -> Shapes:
    drafter = model_cost(_data_config("embedded_draft"), dtype, head_rows=SHORTLIST)
    return Shapes(model_cost(SMOLLM2_135M, dtype), machine, context, drafter)


def _data_config(name: str) -> dict[str, Any]:
    return json.loads((DATA / name / "config.json").read_text("utf-8"))


def _first(records: Sequence[Record], kind: str) -> Record:
    return next(r for r in records if r["kind"] == kind)
