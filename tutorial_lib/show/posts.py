"""The posts' tables and figures in their form: target by draft model, output tokens/s, speed-up, as rows and as bars.

Three kinds of figures fill them and never share a bar, an axis or an unlabelled row: what the posts published; the
posts' shapes on this workbook's engine with random weights and forced acceptance; the reader's own run.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..bench.cost_model import alpha_from_acceptance_length
from ..bench.hardware_model import Ceilings
from ..bench.published import PostRow
from . import plots
from .plots import figure_of, label_of, machine_of, method_style, speedup
from .tables import Table
from .what_if import pair_on

Record = Mapping[str, Any]
CERTAINTY_MARK = {"stated": "", "derived": "*", "second-hand": "†"}
MARGIN_K = 2  # how far the model's curve is drawn beyond the largest K that ran


def posts_table(
    published: Sequence[PostRow], experiments: Mapping[str, Sequence[Record]], runs: Sequence[Record]
) -> Table:
    """Every bar as a row, with what kind of figure it is. experiments: records of a GPU's experiments by name."""
    rows = [
        {
            "target": row.target,
            "draft model": row.drafter or "none",
            "machine": row.gpus,
            "output tokens/s": row.output_tok_s,
            "speed-up": row.speedup,
            "what kind of figure": f"published: {row.certainty}{f' ({row.how})' if row.how else ''}",
            "source": row.source,
        }
        for row in published
    ]
    for name, records in experiments.items():
        plain, forced = _runs_of(records)
        for run in (plain, *forced):
            k, length = run["max_draft_len"], run["figures"]["acceptance_length"]
            about = f"this engine, random weights, acceptance length forced to {length or 1:.2f} at K = {k}"
            kind = "this engine, random weights, plain" if run is plain else about
            rows.append(_row(run, plain, kind, f"experiment {name}"))
    for run in runs:
        base = plots.baseline_of(run, runs)
        kind = "your run" if not run.get("is_simulated") else "your run, acceptance forced"
        rows.append(_row(run, base, kind, label_of(run, runs)))
    return Table(rows)


def _row(run: Record, plain: Record | None, kind: str, source: str) -> dict[str, Any]:
    own, base = figure_of(run, "output_tok_s"), figure_of(plain, "output_tok_s") if plain else None
    return {
        "target": run["target"],
        "draft model": run["drafter"] or ("none" if run["method"] == "plain" else method_style(run["method"]).label),
        "machine": html.unescape(machine_of([run])),
        "output tokens/s": own,
        "speed-up": own / base if own and base else None,
        "what kind of figure": kind,
        "source": source,
    }


def _runs_of(records: Sequence[Record]) -> tuple[Record, list[Record]]:
    """The plain run of an experiment, and those with forced acceptance."""
    runs = [r for r in records if r["kind"] == "run"]
    plain = next(r for r in runs if r["method"] == "plain")
    return plain, [r for r in runs if r["method"] != "plain" and r["is_simulated"]]


# ---- bars ------------------------------------------------------------------------------------------------------------


def plot_posts(published: Sequence[PostRow], records: Sequence[Record], runs: Sequence[Record]) -> go.Figure:
    """Three panels that share no axis: what the posts published (hollow), their shape on this engine with forced
    acceptance (hatched), the reader's own run."""
    plain, forced = _runs_of(records)
    forced = [r for r in forced if r["simulated_acceptance"]["acceptance_probability"] is None]  # not the sweep over K
    where = " and ".join(dict.fromkeys(row.gpus.split("x ")[-1] for row in published))
    headings = [
        f"published, {where}",
        f"forced acceptance,<br>{machine_of([plain])}",
        f"measured,<br>{machine_of(runs)}",
    ]
    figure = make_subplots(
        rows=1, cols=3, subplot_titles=headings, column_widths=[0.44, 0.3, 0.26], horizontal_spacing=0.08
    )
    for row in published:
        _published_bar(figure, row)
    for run in (plain, *forced):
        _forced_bar(figure, run, plain)
    for run in runs:
        _measured_bar(figure, run, runs)
    best = max((row.speedup for row in published), default=math.nan)
    top = max((r["figures"]["output_tok_s"] / plain["figures"]["output_tok_s"], r) for r in forced)
    gains = [
        (gain, method_style(run["method"]).label)
        for run in runs
        if run["method"] != "plain" and (gain := speedup(run, runs))
    ]
    ours = "nothing yet" if not gains else f"{max(gains)[0]:.2f}× with the {max(gains)[1]}"
    title = (
        f"Published up to {best:.2f}×; this engine on the 70B shape {top[0]:.2f}× where "
        f"{top[1]['figures']['acceptance_length']:.1f} tokens a round are forced; measured here, on other models: "
        f"{ours}"
    )
    plots._layout(figure, title, runs, height=560)
    tops = [
        [row.output_tok_s for row in published],
        [figure_of(run, "output_tok_s") or 0 for run in (plain, *forced)],
        [figure_of(run, "output_tok_s") or 0 for run in runs],
    ]
    for column, values in enumerate(tops, start=1):
        figure.update_yaxes(range=[0, 1.25 * max(values, default=1)], row=1, col=column)
    figure.update_yaxes(title_text="output throughput<br>(output tokens / s, TTFT included)", col=1)
    figure.update_layout(showlegend=False, margin_t=185, margin_b=120, bargap=0.25)
    note = (
        "bars: output tokens / s and speed-up over plain decoding of the same target. * derived, † second-hand.<br>"
        "Forced acceptance times the engine, not a drafter: the weights are random and the text means nothing."
    )
    at = {"x": 0, "y": -0.2, "xref": "paper", "yanchor": "top", "yref": "paper"}
    figure.add_annotation(text=note, showarrow=False, align="left", font={"size": 12}, **at)
    return figure


def _published_bar(figure: go.Figure, row: PostRow) -> None:
    style = method_style("plain" if row.drafter is None else "draft_target")
    name = html.escape(f"{row.target}|{'plain' if row.drafter is None else '+ ' + row.drafter}", quote=False)
    pattern = {"shape": "/", "fgcolor": style.color, "size": 8, "solidity": 0.15}
    figure.add_bar(
        x=[name.replace("Llama ", "").replace("|", "<br>") + CERTAINTY_MARK[row.certainty]],
        y=[row.output_tok_s],
        marker={"color": "white", "line": {"color": style.color, "width": 2}, "pattern": pattern},
        text=[f"{row.output_tok_s:.0f}<br>{row.speedup:.2f}×"],
        hovertext=[html.escape(f"{row.gpus}; {row.certainty}{'; ' + row.how if row.how else ''}; {row.source}")],
        hoverinfo="text",
        name="published",
        textposition="outside",
        cliponaxis=False,
        row=1,
        col=1,
    )


def _forced_bar(figure: go.Figure, run: Record, plain: Record) -> None:
    style, value = method_style(run["method"]), run["figures"]["output_tok_s"]
    name, gain = "plain", ""
    if run is not plain:
        name = f"K = {run['max_draft_len']}<br>{run['figures']['acceptance_length']:.2f} forced"
        gain = f"<br>{value / plain['figures']['output_tok_s']:.2f}×"
    pattern = {"shape": "\\", "fillmode": "overlay", "fgcolor": "white", "size": 7, "solidity": 0.35}
    figure.add_bar(
        x=[name],
        y=[value],
        marker={"color": style.color, "line": {"color": plots._INK, "width": 1}, "pattern": pattern},
        text=[f"{value:.0f}{gain}"],
        hoverinfo="x+y",
        name="forced",
        textposition="outside",
        cliponaxis=False,
        row=1,
        col=2,
    )


def _measured_bar(figure: go.Figure, run: Record, runs: Sequence[Record]) -> None:
    value, gain = figure_of(run, "output_tok_s"), speedup(run, runs)
    figure.add_bar(
        x=[label_of(run, runs).replace(" ", "<br>", 1)],
        y=[value],
        marker=plots._bar_look(run),
        text=["no value" if value is None else f"{value:.0f}" + (f"<br>{gain:.2f}×" if gain else "")],
        hoverinfo="x+y",
        name="measured",
        textposition="outside",
        cliponaxis=False,
        row=1,
        col=3,
    )


# ---- speed-up against K ----------------------------------------------------------------------------------------------

_LINES = (("circle", "solid", "#0072B2"), ("square", "dash", "#D55E00"), ("diamond", "dot", "#009E73"))


def plot_forced_sweep(experiments: Mapping[str, Sequence[Record]], ceilings: Ceilings) -> go.Figure:
    """Speed-up against K where every draft token is right with one probability: what was measured of each pair
    (marks), and what bytes, flops and launches alone predict of its decoding (lines)."""
    figure = go.Figure()
    best = []
    for (name, records), (symbol, dash, color) in zip(experiments.items(), _LINES, strict=False):
        plain, forced = _runs_of(records)
        swept, alpha = _same_alpha(forced)
        gains = {r["max_draft_len"]: r["figures"]["output_tok_s"] / plain["figures"]["output_tok_s"] for r in swept}
        lens = sorted(gains)
        look = {"symbol": symbol, "size": 11, "color": color}
        hover = f"{name}, K = %{{x}}<br>%{{y:.2f}}× measured<extra></extra>"
        figure.add_scatter(
            x=lens,
            y=[gains[k] for k in lens],
            mode="markers",
            marker=look,
            name=f"{name}, measured",
            hovertemplate=hover,
        )
        names = (plain["target"].removeprefix("dummy:"), swept[0]["drafter"].removeprefix("dummy:"))
        pair, _ = pair_on(ceilings, "H200", *names)
        choices = pair.choices(alpha, max(lens) + MARGIN_K)[1:]
        figure.add_scatter(
            x=[c.max_draft_len for c in choices],
            y=[c.speedup for c in choices],
            mode="lines",
            line={"color": color, "dash": dash, "width": 2},
            name=f"{name}, predicted from the hardware at α = {alpha:.2f}",
        )
        top = max(gains, key=lambda k: gains[k])
        best.append(f"{name} gains most at K = {top} ({gains[top]:.2f}× at α = {alpha:.2f})")
    plots._line_at_one(figure)
    first, _ = _runs_of(next(iter(experiments.values())))
    title = "Measured with forced acceptance: " + ", ".join(best)
    plots._layout(figure, title, [], x="K, draft tokens per round", y="speed-up of output throughput (×)")
    subtitle = f"<b>simulated acceptance</b>, random weights, batch 1, times measured on {machine_of([first])}"
    figure.update_layout(title_subtitle_text=subtitle, showlegend=True)
    figure.update_xaxes(dtick=1)
    return figure.update_yaxes(rangemode="tozero")


def _same_alpha(forced: Sequence[Record]) -> tuple[list[Record], float]:
    """The runs of one probability by K, and that probability: the swept ones, and the one they were derived from."""
    swept = [r for r in forced if r["simulated_acceptance"]["acceptance_probability"] is not None]
    alpha = swept[0]["simulated_acceptance"]["acceptance_probability"]
    for run in forced:
        length, k = run["simulated_acceptance"]["acceptance_length"], run["max_draft_len"]
        if run not in swept and abs(alpha_from_acceptance_length(length, k) - alpha) < 1e-6:
            swept = [run, *swept]
    return swept, alpha
