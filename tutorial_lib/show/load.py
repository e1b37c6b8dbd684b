"""Figures of an engine under load: who waited and who ran, throughput and waiting against concurrency, K by load.

From the records of `bench.load_run` and a `bench.schedule.Schedule`; nothing is measured here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..bench.load import IN_FLIGHT, STATIC
from ..bench.schedule import Schedule
from ..bench.summary import PLAIN
from . import plots

Record = Mapping[str, Any]
# Waiting, reading and writing are not methods: the looks of parts of a time, as in `plots`, and white for waiting.
_PHASES = {
    "waiting for a place": ("#FFFFFF", "/"),
    "prompt being read": ("#BDBDBD", ""),
    "output being written": ("#56B4E9", ""),
}


def run_of(runs: Sequence[Record], method: str, concurrency: int, batching: str = IN_FLIGHT) -> Record:
    """The run of that method at that concurrency; `KeyError` that says what there is otherwise."""
    for run in runs:
        if (run["method"], run["concurrency"], run["batching"]) == (method, concurrency, batching):
            return run
    known = ", ".join(f"{r['method']} at {r['concurrency']} {r['batching']}" for r in runs)
    raise KeyError(f"no run of {method} at {concurrency} {batching}; there are {known}")


def plot_timeline(runs: Sequence[Record]) -> go.Figure:
    """Every request as a bar from its arrival to its end, one panel for each run, on one time axis."""
    names = [f"{html.escape(run['batching'])} batching" for run in runs]
    figure = make_subplots(rows=len(runs), cols=1, shared_xaxes=True, subplot_titles=names, vertical_spacing=0.12)
    for row, run in enumerate(runs, start=1):
        labels = [f"request {i}" for i in range(1, len(run["timeline"]) + 1)]
        for phase, (start, end) in zip(_PHASES, _bounds(run), strict=True):
            color, pattern = _PHASES[phase]
            figure.add_bar(
                y=labels,
                base=start,
                x=[b - a for a, b in zip(start, end, strict=True)],
                orientation="h",
                name=phase,
                legendgroup=phase,
                showlegend=row == 1,
                marker={
                    "color": color,
                    "line": {"color": "#222222", "width": 1},
                    "pattern": {"shape": pattern, "fgcolor": "#999999", "size": 6, "solidity": 0.2},
                },
                hovertemplate=f"%{{y}}<br>{phase}: %{{x:.3f}} s, from %{{base:.3f}} s<extra></extra>",
                row=row,
                col=1,
            )
    height = 150 + sum(60 + 22 * len(run["timeline"]) for run in runs)
    plots._layout(figure, _timeline_title(runs), runs, height=height)
    figure.update_layout(
        barmode="overlay", bargap=0.25, showlegend=True, legend_y=-85 / height, margin_t=170, margin_b=90
    )
    figure.update_yaxes(autorange="reversed", tickfont={"size": 11}, dtick=1)
    return figure.update_xaxes(title_text="seconds from the first arrival", row=len(runs), col=1)


def _bounds(run: Record) -> list[tuple[list[float], list[float]]]:
    rows = run["timeline"]
    stops = [[r[key] for r in rows] for key in ("arrival_s", "admitted_s", "first_token_s", "end_s")]
    stops[1] = [a if a is not None else b for a, b in zip(stops[1], stops[0], strict=True)]
    return list(zip(stops, stops[1:], strict=False))


def _timeline_title(runs: Sequence[Record]) -> str:
    by_batching = {run["batching"]: run["figures"] for run in runs}
    if not {IN_FLIGHT, STATIC} <= by_batching.keys():
        found = runs[0]["figures"]
        return (
            f"{found['requests']} requests in {found['seconds']:.1f} s; half of them have their first token after "
            f"{found['ttft_s_p50']:.2f} s"
        )
    ours, theirs = by_batching[IN_FLIGHT], by_batching[STATIC]
    gain, waits = ours["output_tok_s"] / theirs["output_tok_s"], (f["ttft_s"] for f in (ours, theirs))
    return (
        f"The same {ours['requests']} requests in flight: {gain:.2f}× the output throughput of static batches, first "
        "token after {:.2f} s instead of {:.2f} s on average".format(*waits)
    )


# ---- against concurrency --------------------------------------------------------------------------------------------

_PANELS = (
    ("output tokens / s", "output_tok_s", ""),
    ("TTFT (s)", "ttft_s_p50", "ttft_s_p99"),
    ("TPOT (ms)", "tpot_ms_p50", "tpot_ms_p99"),
    ("latency of a request (s)", "latency_s_p50", "latency_s_p99"),
)


def plot_load(runs: Sequence[Record]) -> go.Figure:
    """Throughput, and what requests wait, against concurrency (or rate): one line per engine and method, thin for
    engines beside ours; of waiting the median with a whisker up to the 99th percentile. Static batching
    is not among them."""
    shown = [run for run in runs if run["batching"] == IN_FLIGHT]
    where = "rate" if any(run["rate"] for run in shown) else "concurrency"
    figure = make_subplots(rows=2, cols=2, horizontal_spacing=0.14, vertical_spacing=0.16)
    for series in dict.fromkeys(map(_series, shown)):
        line = sorted((r for r in shown if _series(r) == series), key=lambda r: r[where])
        look = plots._line_look(line[0])
        if series[0] != _series(shown[0])[0]:
            look |= {"line": look["line"] | {"width": 1}}
        for place, (_, middle, top) in enumerate(_PANELS):
            values = plots.numbers(run["figures"][middle] for run in line)
            tops = plots.numbers(run["figures"][top] for run in line) if top else values
            above = [0.0 if v is None or t is None else t - v for v, t in zip(values, tops, strict=True)]
            whisker = {"type": "data", "symmetric": False, "array": above, "thickness": 1.2, "width": 4}
            figure.add_scatter(
                x=[run[where] for run in line],
                y=values,
                error_y=whisker if top else None,
                name=_series_name(series, shown),
                legendgroup=" ".join(series),
                showlegend=place == 0,
                hovertemplate=f"%{{x}}: %{{y:.3g}}<extra>{html.escape(middle)}</extra>",
                row=place // 2 + 1,
                col=place % 2 + 1,
                **look,
            )
    plots._layout(figure, _load_title(shown, where), shown, height=640)
    figure.update_layout(showlegend=True, legend_y=-0.13, margin_t=130)
    for place, (title, _, _) in enumerate(_PANELS):
        at = {"row": place // 2 + 1, "col": place % 2 + 1}
        figure.update_yaxes(title_text=title, rangemode="tozero", **at)
    ticks = sorted({run[where] for run in shown})
    axis = "requests per second" if where == "rate" else "clients, each with one request at a time"
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{t:g}" for t in ticks])
    return figure.update_xaxes(title_text=axis, row=2)


def _series(run: Record) -> tuple[str, str]:
    return run["backend"], run["method"]


def _series_name(series: tuple[str, str], runs: Sequence[Record]) -> str:
    backend, method = series
    label = plots.method_style(method).label
    return label if backend == _series(runs[0])[0] else f"{backend}: {label}"


def _load_title(runs: Sequence[Record], where: str) -> str:
    """What drafting gains of the first engine, and how its throughput stands against the others'."""
    ours = [run for run in runs if _series(run)[0] == _series(runs[0])[0]]
    theirs = {(*_series(run), run[where]): run["figures"]["output_tok_s"] for run in runs if run not in ours}
    return "; ".join([_gains(ours, where), *_against(ours, theirs, where)])


def _against(ours: Sequence[Record], theirs: Mapping[tuple[str, str, float], float], where: str) -> list[str]:
    found: dict[str, list[float]] = {}
    for run in ours:
        for (backend, method, at), tok_s in theirs.items():
            if (method, at) == (run["method"], run[where]):
                found.setdefault(backend, []).append(run["figures"]["output_tok_s"] / tok_s)
    return [f"{min(ratios):.2f} to {max(ratios):.2f}× {backend}'s throughput" for backend, ratios in found.items()]


def _gains(runs: Sequence[Record], where: str) -> str:
    plain = {run[where]: run["figures"] for run in runs if run["method"] == PLAIN}
    is_rate = where == "rate"  # throughput is the rate's own as long as the machine keeps up: latency tells
    gains: dict[str, list[tuple[float, float]]] = {}
    for run in sorted(runs, key=lambda r: r[where]):
        if run["method"] != PLAIN and run[where] in plain:
            mine, theirs = run["figures"], plain[run[where]]
            gain = mine["output_tok_s"] / theirs["output_tok_s"]
            if is_rate:
                gain = theirs["latency_s_p50"] / mine["latency_s_p50"]
            gains.setdefault(run["method"], []).append((run[where], gain))
    parts = []
    for method, found in gains.items():
        (low, first), (high, last) = found[0], found[-1]
        unit = "requests/s" if is_rate else "at once"
        parts.append(f"{plots.method_style(method).label} {first:.2f}× at {low:g}, {last:.2f}× at {high:g} {unit}")
    if parts:
        what = (
            "Answers come earlier than with plain decoding by" if is_rate else "Output throughput over plain decoding:"
        )
        return f"{what} {'; '.join(parts)}"
    best = max((found["output_tok_s"] for found in plain.values()), default=None)
    return "Nothing was run" if best is None else f"Plain decoding yields {best:.0f} output tokens / s at best"


# ---- where it stops paying ------------------------------------------------------------------------------------------

_DASHES = ("solid", "dash", "dot", "dashdot")


def plot_draft_len_by_load(schedule: Schedule, ridge: float, where: str) -> go.Figure:
    """Speed-up over plain decoding against running requests, one line for each K, the schedule's choice marked. Dotted:
    the batch at which the largest K fills `ridge` rows. where: the machine and models, and how they are known."""
    plain = {c.batch: c.output_tok_s for c in schedule.choices if c.max_draft_len == 0}
    lens = sorted({c.max_draft_len for c in schedule.choices} - {0})
    figure = go.Figure()
    for place, k in enumerate(lens):
        line = [c for c in schedule.choices if c.max_draft_len == k]
        shade = 190 - round(150 * place / max(1, len(lens) - 1))
        figure.add_scatter(
            x=[c.batch for c in line],
            y=[c.output_tok_s / plain[c.batch] for c in line],
            name=f"K = {k}",
            mode="lines",
            line={"color": f"rgb({shade // 3},{shade // 2 + 40},{shade})", "width": 2, "dash": _DASHES[place % 4]},
            hovertemplate="%{x} requests: %{y:.2f}×<extra>%{fullData.name}</extra>",
        )
    taken = [c for c in schedule.choices if c.max_draft_len == schedule.chosen(c.batch)]
    figure.add_scatter(
        x=[c.batch for c in taken],
        y=[c.output_tok_s / plain[c.batch] for c in taken],
        text=[f"{c.max_draft_len}" for c in taken],
        name="K that is chosen",
        mode="markers+text",
        textposition="top center",
        marker={"symbol": "circle-open", "size": 11, "color": "#222222", "line": {"width": 2}},
        hovertemplate="%{x} requests: K = %{text}, %{y:.2f}×<extra></extra>",
    )
    plots._line_at_one(figure)
    full = ridge / (lens[-1] + 1)
    figure.add_vline(x=full, line={"color": "#8A1C00", "width": 1.5, "dash": "dot"})
    note = f"{full:.0f} × (K + 1) = {ridge:.0f} rows"
    figure.add_annotation(
        x=math.log10(full), y=0.03, yref="paper", text=note, showarrow=False, xanchor="left", xshift=4
    )
    stops = next((c.batch for c in taken if c.max_draft_len == 0), None)
    first = taken[0]
    ends = "it pays at every load shown" if stops is None else f"with {stops} at once drafting pays no more"
    gain = first.output_tok_s / plain[first.batch]
    title = f"One request gains most from K = {first.max_draft_len}, {gain:.2f}×; {ends}"
    plots._layout(figure, title, [], x="requests running at once", y="speed-up of decode throughput (×)", height=460)
    batches = sorted(plain)
    figure.update_layout(title_subtitle_text=html.escape(where, quote=False), showlegend=True)
    top = max(c.output_tok_s / plain[c.batch] for c in schedule.choices)
    figure.update_yaxes(range=[0, 1.15 * top])
    return figure.update_xaxes(type="log", tickvals=batches, ticktext=[str(b) for b in batches])
