"""Where the time of one launch of the whole-step kernel goes: its phase clock as a picture and a table.

A record of the kind "phase_clock" says for every phase of every layer, in microseconds from the launch, when a block
began to wait for its inputs, when it had them and when it was done: `spans`, dicts of "phase", "layer" (None outside
of the layers), "waits_us", "starts_us", "ends_us", each the median over the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from ..engine.stream.clock import by_phase
from ..errors import OptionError
from .tables import Table

Record = Mapping[str, Any]

# The phases in the order in which a token passes them; colours that no method has, each with its own hatching.
PHASES = {
    "embed": ("embedding", "#BDBDBD", "."),
    "norm": ("norms", "#F0E442", "/"),
    "qkv": ("queries, keys, values", "#56B4E9", ""),
    "attention": ("attention", "#B2DF8A", "x"),
    "o": ("output projection", "#A6CEE3", "-"),
    "gate_up": ("gate and up", "#3B7EA1", ""),
    "down": ("down", "#7FB3D5", "+"),
    "head": ("head and choice", "#CAB2D6", "|"),
}
WAITING = ("waiting for inputs", "#FFFFFF", "\\")


def plot_timeline(record: Record, layers: Sequence[int] = (0, 1)) -> go.Figure:
    """One line for each phase, time to the right: what waits is hollow, what works is filled. Only `layers` and what
    lies outside of layers between them. Raises `OptionError` where none of them is in the record."""
    shown = [span for span in record["spans"] if span["layer"] in layers]
    if not shown:
        known = sorted({span["layer"] for span in record["spans"] if span["layer"] is not None})
        raise OptionError(
            f"the phase clock has no layer {list(layers)}", f"of {known[0]} to {known[-1]}" if known else "any layer"
        )
    origin = min(span["waits_us"] for span in shown)
    figure = go.Figure()
    for phase in [name for name in PHASES if any(span["phase"] == name for span in shown)]:
        label, color, hatching = PHASES[phase]
        spans = [span for span in shown if span["phase"] == phase]
        for (name, fill, pattern), begin, end in (
            (WAITING, "waits_us", "starts_us"),
            ((label, color, hatching), "starts_us", "ends_us"),
        ):
            figure.add_bar(
                y=[label] * len(spans),
                base=[span[begin] - origin for span in spans],
                x=[span[end] - span[begin] for span in spans],
                orientation="h",
                name=name,
                showlegend=fill == WAITING[1] and not any(trace.name == name for trace in figure.data),
                marker={"color": fill, "line": {"color": "#222222", "width": 1}, "pattern": {"shape": pattern}},
                hovertext=[f"layer {span['layer']}: {span[end] - span[begin]:.1f} µs" for span in spans],
                hoverinfo="name+text",
            )
    share = waiting_share(shown)
    figure.update_layout(
        title=f"{share:.0%} of the time in these layers a block waits for its inputs",
        barmode="overlay",
        xaxis_title="time since the first of these layers began, µs",
        yaxis={"autorange": "reversed", "title": "phase"},
        height=420,
        plot_bgcolor="white",
        legend={"orientation": "h", "y": -0.25},
    )
    figure.update_xaxes(gridcolor="#E3E3E3")
    return figure


def waiting_share(spans: Sequence[Record]) -> float:
    """Time waited / time waited and worked, over all of `spans`; 0 for none."""
    waited = sum(span["starts_us"] - span["waits_us"] for span in spans)
    whole = sum(span["ends_us"] - span["waits_us"] for span in spans)
    return waited / whole if whole else 0.0


def timeline_table(record: Record) -> Table:
    """The whole launch by phase: how often, how long it waited and worked, and its share of the launch."""
    spans = record["spans"]
    whole = max(span["ends_us"] for span in spans) - min(span["waits_us"] for span in spans)
    found, rows = by_phase(record), []
    for phase, (label, _, _) in PHASES.items():
        if phase in found:
            own = found[phase]
            rows.append(
                {
                    "phase": label,
                    "times": own["times"],
                    "waits, µs": own["waits_us"],
                    "works, µs": own["works_us"],
                    "share of the launch, %": 100 * (own["waits_us"] + own["works_us"]) / whole,
                }
            )
    return Table(rows, digits=1)
