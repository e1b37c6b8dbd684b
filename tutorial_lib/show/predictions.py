"""The cost model beside every recorded measurement: where the records lie, one figure, one table.

Predictions come from `bench.evidence`; nothing is measured here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..bench import evidence
from ..bench.evidence import Point
from ..bench.hardware_model import Ceilings
from ..results import read_records
from .recorded import RECORDED, Recorder

CPU_BENCHES = ("03_drafting_methods", "07_benchmark_plots")


def recorded_points(folder: str | Path = RECORDED) -> list[Point]:
    """Every point of `notebooks/recorded`: a GPU's forced and real runs, the sweep and the benches of a CPU."""
    folder = Path(folder)
    on_gpu = recorded_ceilings(folder)
    found: list[Point] = []
    for file in sorted((folder / "h200").glob("*b-*b.jsonl")):
        found += evidence.forced_points(read_records(file), on_gpu)
    found += evidence.embedded_gpu_points(read_records(folder / "h200" / "embedded.jsonl"), on_gpu)
    for file in sorted(folder.glob("*/ceilings.jsonl")):
        on_cpu = evidence.cpu_ceilings(read_records(file)[-1])
        values = Recorder("02_speculative_runs", is_replay=True, folder=folder)
        found += evidence.sweep_points(values("sweep", list), values("parts", dict), on_cpu)
        for name in CPU_BENCHES:
            document: dict[str, Any] = Recorder(name, is_replay=True, folder=folder)("bench", dict)
            found += evidence.bench_points(document, on_cpu, f"notebook {name[:2]}")
    return found


def recorded_ceilings(folder: str | Path = RECORDED) -> Ceilings:
    """What the H200 of the records reaches."""
    large, small = (read_records(Path(folder) / "h200" / f"{name}.jsonl") for name in ("70b-1b", "embedded"))
    return evidence.gpu_ceilings(large, small)
