"""The cost model beside every recorded measurement: where the records lie, one figure, one table.

Predictions come from `bench.evidence`; nothing is measured here.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..bench import evidence
from ..bench.evidence import Point
from ..bench.hardware_model import Ceilings
from ..errors import OptionError
from ..results import read_records
from . import plots
from .recorded import RECORDED, Recorder
from .tables import Table

CPU_BENCHES = ("03_drafting_methods", "07_benchmark_plots")
SOURCES = {"from_steps": "from measured step times", "from_hardware": "from bytes, flops and launches alone"}


def recorded_points(folder: str | Path = RECORDED) -> list[Point]:
    """Every point of `notebooks/recorded`: a GPU's forced and real runs, the sweep and the benches of a CPU."""
    folder = Path(folder)
    on_gpu = recorded_ceilings(folder)
    found: list[Point] = []
    for file in sorted((folder / "h200").glob("*b-*b.jsonl")):
        found += evidence.forced_points(read_records(file), on_gpu)
    beside = [r for r in read_records(folder / "h200" / "compare.jsonl") if r.get("backend") == "torch"]
    found += evidence.forced_points(read_records(folder / "h200" / "70b-1b.jsonl"), on_gpu, beside)
    found += evidence.embedded_gpu_points(read_records(folder / "h200" / "embedded.jsonl"), on_gpu)
    found += evidence.methods_gpu_points(read_records(folder / "h200" / "methods.jsonl"), on_gpu)
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


def plot_predictions(points: Sequence[Point]) -> go.Figure:
    """Measured against predicted speed-up, one panel for each of the two predictions; the band is 12% wide either way.
    Filled marks are GPU runs, hollow ones a CPU's."""
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=list(SOURCES.values()), shared_yaxes=True, horizontal_spacing=0.05
    )
    ends = [0.8 * min(p.measured for p in points), 1.15 * max(p.measured for p in points)]
    for column, source in enumerate(SOURCES, start=1):
        for factor, dash in ((1.0, "solid"), (1.12, "dot"), (0.88, "dot")):
            line = {"color": "#777777", "dash": dash, "width": 1.5}
            ys = [end * factor for end in ends]
            figure.add_scatter(
                x=ends, y=ys, mode="lines", line=line, hoverinfo="skip", showlegend=False, row=1, col=column
            )
        for name, mine, marker in _groups(points):
            known = [(p, x) for p in mine if (x := getattr(p, source)) is not None]
            figure.add_scatter(
                x=[x for _, x in known],
                y=[p.measured for p, _ in known],
                text=[html.escape(f"{p.label} ({p.machine})") for p, _ in known],
                customdata=[100 * (p.error(source) or 0.0) for p, _ in known],
                hovertemplate="%{text}<br>predicted %{x:.2f}×, measured %{y:.2f}×: %{customdata:+.1f}%<extra></extra>",
                mode="markers",
                marker=marker,
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                row=1,
                col=column,
            )
    plots._layout(figure, _title(points), [], y="measured speed-up (×), logarithmic", height=560)
    figure.update_xaxes(title_text="predicted speed-up (×), logarithmic")
    figure.update_layout(showlegend=True, margin_t=150)
    ticks = {"type": "log", "tickvals": [0.5, 0.7, 1, 1.5, 2, 3, 4], "range": [math.log10(end) for end in ends]}
    figure.update_xaxes(**ticks)
    return figure.update_yaxes(**ticks)


def _title(points: Sequence[Point]) -> str:
    try:
        steps, alone = (evidence.errors(points, source) for source in SOURCES)
    except OptionError:
        return "Nothing to compare with the cost model"
    return (
        f"All {steps.count} recorded speed-ups are predicted from measured steps to within {steps.median:.1%} (median) "
        f"and {steps.worst:.0%} (worst), {alone.count} of them from the hardware alone to {alone.median:.1%} and "
        f"{alone.worst:.0%}"
    )


def _groups(points: Sequence[Point]) -> Iterator[tuple[str, list[Point], dict[str, Any]]]:
    """Marks by method and machine."""
    for method, is_gpu in dict.fromkeys((p.method, p.machine == "H200") for p in points):
        style = plots.method_style(method)
        mine = [p for p in points if (p.method, p.machine == "H200") == (method, is_gpu)]
        symbol = style.symbol if is_gpu else f"{style.symbol}-open"
        yield f"{style.label}, {'H200' if is_gpu else 'CPU'}", mine, {"symbol": symbol, "size": 9, "color": style.color}


def predictions_table(points: Sequence[Point]) -> Table:
    """A row for every session and method: how many points, and how far off both predictions are, in per cent."""
    rows = []
    for session, method in dict.fromkeys((p.session, p.method) for p in points):
        mine = [p for p in points if (p.session, p.method) == (session, method)]
        row: dict[str, Any] = {
            "session": session,
            "machine": mine[0].machine,
            "method": plots.method_style(method).label,
            "K": ", ".join(str(k) for k in sorted({p.max_draft_len for p in mine})),
            "acceptance": "forced" if mine[0].is_forced else "real",
            "points": len(mine),
        }
        for source, words in (("from_steps", "steps"), ("from_hardware", "hardware")):
            off = [100 * abs(error) for p in mine if (error := p.error(source)) is not None]
            row[f"{words}: median, %"] = statistics.median(off) if off else None
            row[f"{words}: worst, %"] = max(off) if off else None
        rows.append(row | {"host's turn": "from other categories' rounds" if mine[0].has_host_turn else ""})
    return Table(rows, digits=1)
