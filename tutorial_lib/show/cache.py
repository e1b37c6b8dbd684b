"""Pictures of the KV cache: who holds which block, what reuse saves, what FP8 costs, how a ring goes round.

From `bench.reuse`, `engine.kv_fp8` and the shape of a ring; nothing is measured here.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from ..results import Generation
from . import plots
from .methods import Html

Block = Mapping[str, Any]  # of `bench.reuse.block_map`
SHARED, KNOWN, EMPTY = "#FFF3C4", "#EFEFEF", "#FFFFFF"
_HOLDERS = ("#9CCBE8", "#F5C06B", "#8FD3BC", "#E3B1CD", "#C9B78A", "#B4B4E0", "#E8A58C", "#C8E08C")
COLUMNS = 16


def memory_map(moments: Mapping[str, Sequence[Block]]) -> Html:
    """One grid of blocks for each moment, with what they hold in words."""
    parts = [_grid(title, blocks) for title, blocks in moments.items()]
    legend = (
        ("A", _HOLDERS[0], "held by request A"),
        ("AB", SHARED, "held by A and B: computed once"),
        ("·", KNOWN, "held by nobody, content kept for whoever asks for it"),
        ("", EMPTY, "empty"),
    )
    words = "".join(f"<span>{_cell(text, color)} {what}</span>" for text, color, what in legend)
    row = "display:flex;flex-wrap:wrap;gap:.3em 1.2em;font-size:90%;margin-top:.4em"
    return Html(f'<div style="color:#222">{"".join(parts)}<div style="{row}">{words}</div></div>')


def _grid(title: str, blocks: Sequence[Block]) -> str:
    cells = "".join(_cell(*_look(block)) for block in blocks)
    held, known = sum(bool(b["holders"]) for b in blocks), sum(b["is_known"] and not b["holders"] for b in blocks)
    shared = sum(len(b["holders"]) > 1 for b in blocks)
    words = f"{len(blocks)} blocks: {held} held ({shared} by several), {known} kept, {len(blocks) - held - known} empty"
    style = f"display:grid;grid-template-columns:repeat({COLUMNS},2.2em);gap:2px;margin:.2em 0 .8em"
    label = html.escape(f"{title}: {words}", quote=True)
    grid = f'<div role="img" aria-label="{label}" style="{style}">{cells}</div>'
    return f"<div><b>{html.escape(title)}</b>, {words}{grid}</div>"


def _look(block: Block) -> tuple[str, str]:
    holders = block["holders"]
    if not holders:
        return ("·", KNOWN) if block["is_known"] else ("", EMPTY)
    if len(holders) > 1:
        return holders if len(holders) < 4 else f"{len(holders)}×", SHARED
    return holders, _HOLDERS[(ord(holders) - ord("A")) % len(_HOLDERS)]


def _cell(text: str, color: str) -> str:
    style = (
        f"display:inline-block;width:2.2em;height:1.5em;line-height:1.5em;text-align:center;font-size:80%;"
        f"background:{color};border:1px solid #bbb;border-radius:3px"
    )
    return f'<span style="{style}">{html.escape(text)}</span>'


def plot_reuse(generations: Sequence[Generation], machine: str) -> go.Figure:
    """Time to first token of requests in their order, with what of their prompts came from the cache."""
    names = [f"request {n}" for n in range(1, len(generations) + 1)]
    figure = go.Figure()
    shares = [g.cached_tokens / len(g.prompt_token_ids) for g in generations]
    figure.add_bar(
        x=names,
        y=[g.ttft_s for g in generations],
        text=[
            f"{g.ttft_s:.2f} s<br>{share:.0%} of the prompt known" for g, share in zip(generations, shares, strict=True)
        ],
        textposition="outside",
        cliponaxis=False,
        marker={"color": "#56B4E9", "line": {"color": "#222222", "width": 1}},
        hovertemplate="%{x}: %{y:.3f} s<extra></extra>",
    )
    first, *others = generations
    best = min(others, key=lambda g: g.ttft_s)
    title = (
        f"With {best.cached_tokens} of {len(best.prompt_token_ids)} prompt tokens in the cache the first token comes "
        f"after {best.ttft_s:.2f} s instead of {first.ttft_s:.2f} s: {best.ttft_s / first.ttft_s:.2f}× the wait"
    )
    plots._layout(figure, title, [], y="time to first token (s)", height=420)
    top = 1.25 * max(g.ttft_s for g in generations)
    return figure.update_layout(
        title_subtitle_text=f"measured on {html.escape(machine, quote=False)}", showlegend=False, yaxis_range=[0, top]
    )


def plot_fp8_errors(errors: Sequence[Mapping[str, Any]], effect: Mapping[str, Any]) -> go.Figure:
    """Relative error of keys and values by layer (`engine.kv_fp8.errors`), and in the title what it changes
    (`engine.kv_fp8.effect`)."""
    figure = go.Figure()
    looks = {"keys": ("#0072B2", "square", "dash"), "values": ("#D55E00", "circle", "solid")}
    for name, (color, symbol, dash) in looks.items():
        figure.add_scatter(
            x=[row["layer"] for row in errors],
            y=[row[name] for row in errors],
            name=name,
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 7, "color": color},
            hovertemplate="layer %{x}: %{y:.2%}<extra>%{fullData.name}</extra>",
        )
    worst = max(row[name] for row in errors for name in looks)
    title = (
        f"FP8 changes keys and values by at most {worst:.1%} of their size in any layer; of {effect['positions']} next "
        f"tokens {effect['same_choice']} stay the same"
    )
    plots._layout(figure, title, [], x="layer", y="||rounded − exact|| / ||exact||", height=420)
    figure.update_layout(showlegend=True)
    return figure.update_yaxes(rangemode="tozero", tickformat=".1%")


def plot_ring(rows: int, window: int, length: int) -> go.Figure:
    """Which position lies in which row of a ring of `rows` rows while a text grows to `length` (position p in row
    p modulo `rows`); the window of the newest token is marked dark."""
    lengths = sorted({*range(max(1, rows // 4), length + 1, max(1, rows // 4)), length})
    held = [[_newest(row, text, rows) for row in range(rows)] for text in lengths]
    shade = [
        [None if p is None else 2 if p >= n - window else 1 for p in line]
        for line, n in zip(held, lengths, strict=True)
    ]
    figure = go.Figure()
    figure.add_heatmap(
        z=shade,
        x=list(range(rows)),
        y=[f"{n}" for n in lengths],
        customdata=held,
        zmin=1,
        zmax=2,
        colorscale=[[0, "#CFE4F3"], [1, "#0072B2"]],
        showscale=False,
        xgap=1,
        ygap=3,
        hovertemplate="%{y} tokens: row %{x} holds position %{customdata}<extra></extra>",
    )
    title = (
        f"{rows} rows hold what a token of a text of {length} can see: the last {window} positions, and room to draft"
    )
    plots._layout(figure, title, [], x="row of the cache", y="tokens in the text", height=380)
    note = "dark: in the window of the newest token; pale: out of sight, written over next; white: never written"
    return figure.update_layout(title_subtitle_text=note)


def _newest(row: int, length: int, rows: int) -> int | None:
    """The latest position below `length` that went to `row`."""
    newest = length - 1 - (length - 1 - row) % rows
    return newest if newest >= 0 else None
