"""From records to figures: pure functions, nothing is measured here.

Every function takes records (`bench.measure`) and returns a plotly `Figure` whose title states what these records
say. One method has one colour, marker and dash in every figure (Okabe and Ito's colour-blind safe palette, and
darker colours where it ends); a backend other than our own engine is hatched. A missing value is a gap that says so,
and a zero stays visible on a logarithmic axis. `set_renderer()` is the one place that decides how a notebook shows
figures.
"""

from __future__ import annotations

import html
import importlib.util
import math
import re
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.io._base_renderers import MimetypeRenderer
from plotly.subplots import make_subplots

from .recorded import machine_words

Record = Mapping[str, Any]


@dataclass(frozen=True)
class MethodStyle:
    """How one drafting method looks, everywhere."""

    label: str
    color: str
    symbol: str
    dash: str
    on_color: str = "white"  # text on a bar of this colour


METHODS: dict[str, MethodStyle] = {
    "plain": MethodStyle("plain decoding", "#595959", "circle", "solid"),
    "draft_target": MethodStyle("draft model", "#0072B2", "square", "dash"),
    "ngram": MethodStyle("n-gram lookup", "#E69F00", "diamond", "dot", "#222222"),
    "suffix": MethodStyle("suffix lookup", "#7A5C00", "pentagon", "2px,6px"),
    "lookahead": MethodStyle("lookahead", "#009E73", "triangle-up", "dashdot"),
    "medusa": MethodStyle("Medusa heads", "#CC79A7", "cross", "longdash", "#222222"),
    "eagle": MethodStyle("EAGLE head", "#A5673F", "x", "14px,4px"),
    "eagle3": MethodStyle("EAGLE-3 chain", "#D55E00", "star", "longdashdot"),
    "eagle3_tree": MethodStyle("EAGLE-3 tree", "#882255", "star-diamond", "10px,3px,2px,3px,2px,3px"),
    "eagle3_fixed15": MethodStyle("EAGLE-3 tree, 15 fixed", "#AA4499", "star-triangle-up", "8px,3px"),
    "eagle3_fixed31": MethodStyle("EAGLE-3 tree, 31 fixed", "#6B2C6B", "star-triangle-down", "8px,3px,2px,3px"),
    "eagle3_fixed63": MethodStyle("EAGLE-3 tree, 63 fixed", "#44103A", "star-square", "4px,4px"),
    "eagle3_dynamic31": MethodStyle("EAGLE-3 tree, 31 dynamic", "#B0395A", "hexagram", "12px,4px,4px,4px"),
    "layer_skip": MethodStyle("layer skipping", "#332288", "triangle-down", "5px,2px"),
}
_UNKNOWN_METHOD = MethodStyle("", "#000000", "hexagon", "solid")
_BACKEND_PATTERN = {"torch": "", "transformers": "/", "tensorrt_llm": "x", "vllm": "."}
# Parts of a time are not methods: their colours are used for nothing else, and each has its own hatching.
_PARTS = {
    "prefill": ("prefill (up to the first token)", "#FFFFFF", "."),
    "draft": ("draft", "#F0E442", "/"),
    "verify": ("verify", "#56B4E9", ""),
    "overhead": ("overhead", "#BDBDBD", "x"),
}
_INK, _GRID = "#222222", "#E3E3E3"
_MARK = "#8A1C00"


# --- how a notebook shows figures ---------------------------------------------------------------------------------


class _OfflineRenderer(MimetypeRenderer):
    """Each figure twice: as plotly's own type for JupyterLab, and as HTML that relies on the plotly.js which
    `set_renderer` put into the page. Unlike plotly's `notebook` renderer it asks no network for MathJax."""

    def to_mimebundle(self, fig_dict: dict[str, Any]) -> dict[str, Any]:
        config = {"displaylogo": False, "responsive": True}
        height = (fig_dict.get("layout") or {}).get("height") or 420
        body = pio.to_html(
            fig_dict,
            config=config,
            include_plotlyjs=False,
            full_html=False,
            default_height=height,
            validate=False,
        )
        title = ((fig_dict.get("layout") or {}).get("title") or {}).get("text") or "figure"
        title = html.unescape(title).replace("<br>", " ")
        labelled = f'<div role="img" aria-label="{html.escape(title)}">{body}</div>'
        bundle = pio.renderers["plotly_mimetype"].to_mimebundle({**fig_dict, "config": config})
        return {**bundle, "text/html": labelled, "text/plain": f"figure: {title}"}


def set_renderer() -> None:
    """Make figures of this notebook visible in JupyterLab and in HTML exports that are opened without a network.

    Puts plotly.js (4.8 MB) into the output of the calling cell, once; call it in one cell of a notebook, before the
    first figure. Outside a Jupyter kernel plotly's own choice stays.
    """
    from IPython.core.getipython import get_ipython
    from IPython.display import display
    from plotly.offline import get_plotlyjs

    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return
    pio.renderers["workbook"] = _OfflineRenderer()
    pio.renderers.default = "workbook"
    page_script = f'<script id="workbook-plotlyjs">{get_plotlyjs()}</script>'
    display({"text/html": page_script, "text/plain": "plotly.js embedded: figures work offline"}, raw=True)


def save_png(figure: go.Figure, path: str | Path, *, timeout_s: float = 60, say: Any = print) -> Path | None:
    """A static copy through kaleido, in a process of its own that is given up after `timeout_s`.

    Returns None, after one line that says why, where kaleido or the Chrome it drives is missing or does not answer.
    """
    path = Path(path)
    if importlib.util.find_spec("kaleido") is None:
        say(f"no {path.name}: static images need the package kaleido; the interactive figure is complete without it")
        return None
    code = "import sys, plotly.io as p; p.from_json(sys.stdin.read()).write_image(sys.argv[1], scale=2)"
    command = [sys.executable, "-c", code, str(path)]
    try:
        subprocess.run(command, input=figure.to_json(), text=True, timeout=timeout_s, check=True, capture_output=True)
    except subprocess.TimeoutExpired:
        say(f"no {path.name}: the export did not finish within {timeout_s:g} s")
    except subprocess.CalledProcessError as error:
        say(f"no {path.name}: {(error.stderr.strip().splitlines() or ['the export failed'])[-1]}")
    return path if path.exists() else None


# --- reading records ----------------------------------------------------------------------------------------------


def method_style(method: str) -> MethodStyle:
    """A tree of another size looks like the listed one of its kind that is nearest."""
    if (style := METHODS.get(method)) is not None:
        return style
    if found := re.fullmatch(r"(eagle3_(?:fixed|dynamic))(\d+)", method):
        sizes = {int(n.removeprefix(found[1])): n for n in METHODS if re.fullmatch(rf"{found[1]}\d+", n)}
        nearest = min(sizes, key=lambda nodes: abs(nodes - int(found[2])))
        like = METHODS[sizes[nearest]]
        return replace(like, label=like.label.replace(str(nearest), found[2]))
    return replace(_UNKNOWN_METHOD, label=method)


def number(value: Any) -> float | None:
    """A finite float, or None: what JSON null, NaN and infinity all become, so that plotly shows a gap."""
    if value is None or isinstance(value, (bool, str)):
        return None
    value = float(value)
    return value if math.isfinite(value) else None


def numbers(values: Iterable[Any]) -> list[float | None]:
    return [number(value) for value in values]


def figure_of(run: Record, name: str) -> float | None:
    return number(run["figures"].get(name))


def baseline_of(run: Record, runs: Sequence[Record]) -> Record | None:
    """The fastest plain run that `run` may be compared with: same engine, model, number format, device, batch size,
    sampling and prompts."""
    same = ("backend", "target", "dtype", "device", "batch_size", "sampling", "prompt_set")
    plain = [r for r in runs if r["method"] == "plain" and all(r[key] == run[key] for key in same)]
    timed = [r for r in plain if figure_of(r, "output_tok_s") is not None]
    return max(timed, key=lambda r: r["figures"]["output_tok_s"], default=None)


def speedup(run: Record, runs: Sequence[Record], category: str | None = None) -> float | None:
    """Output throughput over that of the baseline, over all prompts or in one category."""
    base = baseline_of(run, runs)
    if base is None:
        return None
    mine, theirs = (
        r["figures"] if category is None else (r.get("by_category") or {}).get(category) or {} for r in (run, base)
    )
    top, bottom = number(mine.get("output_tok_s")), number(theirs.get("output_tok_s"))
    return top / bottom if top is not None and bottom else None


def machine_of(runs: Sequence[Record]) -> str:
    """The machines the records were measured on, in words."""
    machines = [machine_words((run.get("provenance") or {}).get("hardware") or {}, run["device"]) for run in runs]
    return html.escape(" and ".join(dict.fromkeys(machines)), quote=False)


def label_of(run: Record, runs: Sequence[Record]) -> str:
    """The method's name, with K, forced acceptance, backend, number format or prompts only where they tell two of
    `runs` apart."""
    parts = [method_style(run["method"]).label]
    alike = [r for r in runs if r["method"] == run["method"]]
    if len({r["max_draft_len"] for r in alike}) > 1:
        parts.append(f"K = {run['max_draft_len']}")
    forced = [r["figures"].get("acceptance_length") for r in alike if r["max_draft_len"] == run["max_draft_len"]]
    if run.get("is_simulated") and len(set(forced)) > 1:
        parts.append(f"acceptance length {run['figures'].get('acceptance_length') or 0:.2f}")
    for key in ("backend", "dtype", "target", "batch_size"):
        if len({r[key] for r in runs}) > 1:
            parts.append(f"batch {run[key]}" if key == "batch_size" else str(run[key]))
    if len({r["prompt_set"]["sha256"] for r in runs}) > 1:
        parts.append(_counted(run["prompt_set"]["count"], "prompt"))
    return html.escape(", ".join(parts), quote=False)


def _workload(runs: Sequence[Record]) -> str:
    """The line under a title: what ran, on what."""
    first = runs[0]
    lens = sorted({r["max_draft_len"] for r in runs if r["method"] != "plain"})
    sampling = first.get("sampling") or {}
    temperature = sampling.get("temperature")
    parts = [
        str(first["target"]),
        "/".join(sorted({str(r["dtype"]) for r in runs})),
        f"batch {'/'.join(str(b) for b in sorted({r['batch_size'] for r in runs}))}",
        f"K = {', '.join(str(k) for k in lens)}" if lens else "",
        f"temperature {temperature:g}" if temperature else "greedy",
        " or ".join(_counted(n, "prompt") for n in dict.fromkeys(r["prompt_set"]["count"] for r in runs)),
        f"≤ {sampling['max_tokens']} tokens each" if sampling.get("max_tokens") else "",
    ]
    told = html.escape(" · ".join(p for p in parts if p), quote=False) + "<br>"
    if any(r["device"] == "stand-in" for r in runs):
        return told + "<b>simulated by a stand-in of the library: nothing was computed, no figure means anything</b>"
    simulated = "<b>simulated acceptance</b>, times " if any(r.get("is_simulated") for r in runs) else ""
    return told + simulated + "measured on " + machine_of(runs)


def _spread(run: Record, name: str) -> tuple[float, float]:
    """How far the lowest and the highest repeat lie from the reported figure."""
    value = figure_of(run, name)
    repeats = [x for x in numbers(r.get(name) for r in run.get("repeat_figures") or ()) if x is not None]
    if value is None or not repeats:
        return 0.0, 0.0
    return max(0.0, value - min(repeats)), max(0.0, max(repeats) - value)


# --- drawing helpers ----------------------------------------------------------------------------------------------


def _layout(figure: go.Figure, title: str, runs: Sequence[Record], *, x: str = "", y: str = "", height: int = 440):
    axis = {"gridcolor": _GRID, "linecolor": _INK, "zeroline": False, "automargin": True}
    subtitle = {"text": _workload(runs), "font": {"size": 12, "color": "#555555"}} if runs else None
    lines = textwrap.wrap(title, 88)
    figure.update_layout(
        title={
            "text": "<br>".join(lines),
            "subtitle": subtitle,
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "font": {"size": 17},
        },
        font={"family": "system-ui, 'DejaVu Sans', sans-serif", "size": 13, "color": _INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        height=height,
        margin={"l": 70, "r": 50, "t": 80 + 27 * len(lines), "b": 60},
        bargap=0.5 if len(runs) < 4 else 0.35,
        legend={"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0},
    )
    figure.update_xaxes(title_text=x or None, **axis)
    figure.update_yaxes(title_text=y or None, title_standoff=8, **axis)
    return figure


def _strength(run: Record, shown: Sequence[Record]) -> float:
    """Runs of one method have one colour, so where they stand in one legend the later ones are the stronger."""
    alike = [r for r in shown if (r["method"], r["backend"]) == (run["method"], run["backend"])]
    place = next((i for i, r in enumerate(alike) if r is run), len(alike) - 1)
    return 1.0 if len(alike) < 2 else 0.4 + 0.6 * place / (len(alike) - 1)


def _faded(color: str, strength: float) -> str:
    """A colour that lets the page through: unlike with a bar's opacity a legend shows it, and text on it stays."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return color if strength == 1 else f"rgba({red}, {green}, {blue}, {strength:.2f})"


def _bar_look(run: Record, shown: Sequence[Record] = ()) -> dict[str, Any]:
    style = method_style(run["method"])
    pattern = _BACKEND_PATTERN.get(run["backend"], "+")
    return {
        "color": _faded(style.color, _strength(run, shown)),
        "line": {"color": _INK, "width": 1},
        "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "white", "size": 7, "solidity": 0.35},
    }


def _bar_text(run: Record, values: Sequence[float | None], form: str, shown: Sequence[Record] = ()) -> dict[str, Any]:
    """Values written at the foot of the bars, where nothing crosses them."""
    color = method_style(run["method"]).on_color if _strength(run, shown) > 0.7 else _INK
    return {
        "text": [None if value is None else format(value, form) for value in values],
        "textposition": "inside",
        "insidetextanchor": "start",
        "textangle": 0,
        "textfont": {"size": 13, "color": color},
        "constraintext": "none",
    }


def _line_look(run: Record, shown: Sequence[Record] = ()) -> dict[str, Any]:
    style = method_style(run["method"])
    hollow = "" if run["backend"] == "torch" else "-open"
    return {
        "mode": "lines+markers",
        "opacity": _strength(run, shown),
        "line": {"color": style.color, "dash": style.dash, "width": 2.5},
        "marker": {"symbol": style.symbol + hollow, "size": 10, "color": style.color},
    }


def _mark_gaps(figure: go.Figure, labels: Sequence[str], values: Sequence[float | None], **where: Any) -> None:
    for label, value in zip(labels, values, strict=True):
        if value is None:
            note = {"x": label, "y": 0, "text": "no value", "showarrow": False, "yshift": 12, **where}
            figure.add_annotation(font={"color": _MARK, "size": 12}, **note)


def _line_at_one(figure: go.Figure) -> None:
    figure.add_hline(
        y=1.0,
        line={"color": _MARK, "width": 2, "dash": "dot"},
    )
    label = {"text": "1.0×<br>plain", "font": {"color": _MARK, "size": 12}, "showarrow": False}
    figure.add_annotation(x=1, xref="paper", xanchor="left", y=1.0, yanchor="middle", align="left", xshift=4, **label)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _words(name: str) -> str:
    return html.escape(name.replace("_", " "), quote=False)


def _speculative(runs: Sequence[Record]) -> list[Record]:
    return [run for run in runs if run["method"] != "plain"]


# --- how fast -----------------------------------------------------------------------------------------------------


def plot_throughput(runs: Sequence[Record]) -> go.Figure:
    """Output throughput of each run as a bar; the whisker spans the slowest and the fastest repeat."""
    labels = [label_of(run, runs) for run in runs]
    values = [figure_of(run, "output_tok_s") for run in runs]
    figure = go.Figure()
    for run, label, value in zip(runs, labels, values, strict=True):
        below, above = _spread(run, "output_tok_s")
        form = ".1f" if (value or 0) < 1000 else ".0f"
        figure.add_bar(
            x=[label],
            y=[value],
            name=label,
            marker=_bar_look(run),
            **_bar_text(run, [value], form),
            error_y={"type": "data", "symmetric": False, "array": [above], "arrayminus": [below], "color": _INK},
            hovertemplate="%{x}<br>%{y:.2f} output tokens / s<extra></extra>",
        )
    _mark_gaps(figure, labels, values)
    figure.update_layout(showlegend=False)
    return _layout(figure, _throughput_title(runs), runs, y="output throughput<br>(output tokens / s, TTFT included)")


def _throughput_title(runs: Sequence[Record]) -> str:
    timed = [run for run in runs if figure_of(run, "output_tok_s") is not None]
    if not timed:
        return "No run has a throughput yet"
    best = max(timed, key=lambda run: run["figures"]["output_tok_s"])
    rate = f"{best['figures']['output_tok_s']:.0f} output tokens / s"
    if best["method"] == "plain":
        return f"Fastest is {label_of(best, runs)}: {rate}, and no drafter pays"
    against = speedup(best, runs)
    return f"Fastest is {label_of(best, runs)}: {rate}" + (f", {against:.2f}× plain" if against is not None else "")


def plot_speedup(runs: Sequence[Record]) -> go.Figure:
    """Speed-up of each speculative run over the fastest plain run of the same engine, with the line at 1.0×."""
    shown = _speculative(runs)
    labels = [label_of(run, shown) for run in shown]
    values = [speedup(run, runs) for run in shown]
    figure = go.Figure()
    for run, label, value in zip(shown, labels, values, strict=True):
        look = {"marker": _bar_look(run), **_bar_text(run, [value], ".2f")}
        figure.add_bar(x=[label], y=[value], name=label, hovertemplate="%{x}<br>%{y:.3f}×<extra></extra>", **look)
    _mark_gaps(figure, labels, values)
    _line_at_one(figure)
    known = {label: value for label, value in zip(labels, values, strict=True) if value is not None}
    title = "No speed-up can be computed: the plain run is missing"
    if known:
        best = max(known, key=known.__getitem__)
        paying = sum(value > 1 for value in known.values())
        title = f"{paying} of {len(known)} speculative runs beat plain decoding; best is {best}, {known[best]:.2f}×"
    figure.update_layout(showlegend=False, yaxis_range=[0, 1.08 * max([1.1, *known.values()])])
    return _layout(figure, title, runs, y="speed-up of output throughput (×)")


def _add_category_bars(
    figure: go.Figure,
    run: Record,
    shown: Sequence[Record],
    categories: Sequence[str],
    speedups: Sequence[float | None],
    **where: int,
) -> None:
    figure.add_bar(
        x=[_words(c) for c in categories],
        y=speedups,
        name=label_of(run, shown),
        marker=_bar_look(run, shown),
        **_bar_text(run, speedups, ".2f", shown),
        hovertemplate="%{x}<br>%{y:.3f}×<extra>%{fullData.name}</extra>",
        **where,
    )


def plot_speedup_by_category(runs: Sequence[Record]) -> go.Figure:
    """The same speed-up within each prompt category, best first; it may well be below 1.0×."""
    shown = _speculative(runs)
    categories = sorted({c for run in shown for c in run.get("by_category") or {}})
    table = {id(run): {c: speedup(run, runs, c) for c in categories} for run in shown}
    first = table[id(shown[0])] if shown else {}
    categories.sort(key=lambda c: -(first.get(c) or 0))
    figure = go.Figure()
    for run in shown:
        values = [table[id(run)][c] for c in categories]
        _add_category_bars(figure, run, shown, categories, values)
    _line_at_one(figure)
    known = [(value, c, run) for run in shown for c, value in table[id(run)].items() if value is not None]
    title = "No speed-up by category: the plain run or the categories are missing"
    if known:
        top, bottom = max(known, key=lambda k: k[0]), min(known, key=lambda k: k[0])
        paying = sum(value > 1 for value, _, _ in known)
        title = (
            f"Speculation pays in {paying} of {len(known)} cases: from {top[0]:.2f}× ({_words(top[1])}) "
            f"down to {bottom[0]:.2f}× ({_words(bottom[1])})"
        )
    _layout(figure, title, runs, y="speed-up of output throughput (×)", x="prompt category")
    top_value = max([1.1, *(value for value, _, _ in known)])
    return figure.update_layout(showlegend=True, bargap=0.2, yaxis_range=[0, 1.08 * top_value])


# --- what is accepted ---------------------------------------------------------------------------------------------


def plot_acceptance_by_position(runs: Sequence[Record], *, log_y: bool = False) -> go.Figure:
    """Share of drafts accepted at each position of a round. On a log axis constant per-token acceptance would be a
    straight line; a zero is drawn on the floor of the axis and marked as 0."""
    shown = [run for run in _speculative(runs) if run["figures"].get("acceptance_by_position")]
    rates = {id(run): numbers(run["figures"]["acceptance_by_position"]) for run in shown}
    positive = [rate for values in rates.values() for rate in values if rate]
    floor = min(positive, default=0.1) / 3
    figure = go.Figure()
    for run in shown:
        values = rates[id(run)]
        positions = list(range(1, len(values) + 1))
        drawn = [floor if log_y and value == 0 else value for value in values]
        look = {**_line_look(run, shown), "name": label_of(run, shown), "customdata": values}
        hover = "position %{x}<br>accepted in %{customdata:.1%}<extra>%{fullData.name}</extra>"
        figure.add_scatter(x=positions, y=drawn, hovertemplate=hover, connectgaps=False, cliponaxis=False, **look)
        for position, value in zip(positions, values, strict=True):
            if value is None or (log_y and value == 0):
                text, at = ("no value", 0.0) if value is None else ("0 %", floor)
                at = math.log10(max(at, floor)) if log_y else at
                figure.add_annotation(x=position, y=at, text=text, showarrow=False, yshift=14, font={"size": 12})
    title = "No run has an acceptance by position"
    if shown:
        title = _acceptance_title([(label_of(run, shown), rates[id(run)]) for run in shown])
    height = 440 if len(shown) <= 3 else 540
    _layout(figure, title, runs, x="position in the draft", y="share of drafted tokens accepted", height=height)
    figure.update_xaxes(dtick=1)
    if log_y:
        figure.update_yaxes(type="log", range=[math.log10(floor) - 0.1, 0.05], tickformat=".0%", dtick="D2")
    else:
        figure.update_yaxes(range=[0, 1.05], tickformat=".0%")
    figure.update_layout(showlegend=True)
    return figure


def _acceptance_title(lines: Sequence[tuple[str, list[float | None]]]) -> str:
    """Both ends of every line, or of many lines the highest and the lowest at the first position."""
    if len(lines) <= 3:
        parts = [f"{label} {_percent(v[0])} → {_percent(v[-1])}" for label, v in lines]
        return "Acceptance at the first → the last draft position: " + "; ".join(parts)
    first = sorted((v[0], label) for label, v in lines if v[0] is not None)
    if not first:
        return "No run has an acceptance at its first position"
    (low, lowest), (high, highest) = first[0], first[-1]
    return f"The first draft token is accepted in {high:.0%} ({highest}) down to {low:.0%} ({lowest}) of the drafts"


def _percent(value: float | None) -> str:
    return "no value" if value is None else f"{value:.0%}"


def plot_accepted_histogram(runs: Sequence[Record]) -> go.Figure:
    """How many draft tokens a round accepted, as a share of all rounds."""
    shown = [run for run in _speculative(runs) if run["figures"].get("accepted_histogram")]
    figure = go.Figure()
    parts = []
    for run in shown:
        counts = [count or 0.0 for count in numbers(run["figures"]["accepted_histogram"])]
        total = sum(counts) or 1.0
        shares = [count / total for count in counts]
        label = label_of(run, shown)
        parts.append(f"{label} {figure_of(run, 'acceptance_length') or math.nan:.2f}")
        figure.add_bar(
            x=list(range(len(counts))),
            y=shares,
            name=label,
            marker=_bar_look(run, shown),
            customdata=counts,
            text=[f"{share:.0%}" for share in shares],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{x} accepted<br>%{y:.1%} of rounds (%{customdata:.0f})<extra>%{fullData.name}</extra>",
        )
    title = "Acceptance length (bonus included): " + "; ".join(parts) if parts else "No rounds"
    _layout(figure, title, runs, x="draft tokens accepted in a round", y="share of rounds")
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    figure.update_layout(showlegend=True, bargap=0.2)
    return figure


def plot_acceptance_of(run: Record) -> go.Figure:
    """One method on a page of its own: left how often each draft position was accepted, right what a round yields in
    every category; the line at 1 is a round that nothing was accepted in."""
    headings = ["accepted, by position in the draft", "tokens a round, by prompt category"]
    figure = make_subplots(rows=1, cols=2, subplot_titles=headings, column_widths=[0.4, 0.6], horizontal_spacing=0.12)
    rates = numbers(run["figures"].get("acceptance_by_position") or [])
    hover = "position %{x}<br>accepted in %{y:.1%}<extra></extra>"
    figure.add_scatter(
        x=list(range(1, len(rates) + 1)),
        y=rates,
        hovertemplate=hover,
        cliponaxis=False,
        row=1,
        col=1,
        **_line_look(run),
    )
    lengths = {c: number(found.get("acceptance_length")) for c, found in (run.get("by_category") or {}).items()}
    categories = sorted(lengths, key=lambda c: -(lengths[c] or 0.0))
    values = [lengths[c] for c in categories]
    figure.add_bar(
        x=[_words(c) for c in categories],
        y=values,
        marker=_bar_look(run),
        **_bar_text(run, values, ".2f"),
        hovertemplate="%{x}<br>%{y:.2f} tokens a round<extra></extra>",
        row=1,
        col=2,
    )
    figure.add_hline(y=1.0, line={"color": _MARK, "width": 2, "dash": "dot"}, row=1, col=2)
    label, length = label_of(run, [run]), figure_of(run, "acceptance_length")
    known = [(value, c) for c, value in lengths.items() if value is not None]
    title = f"{label}: no acceptance was measured"
    if length is not None and known:
        (high, most), (low, least) = max(known), min(known)
        title = f"{label}: {length:.2f} tokens a round, from {high:.2f} ({_words(most)}) to {low:.2f} ({_words(least)})"
    figure.update_layout(showlegend=False)
    _layout(figure, title, [run], height=400)
    figure.update_layout(margin_t=150, margin_b=40)
    figure.update_xaxes(dtick=1, row=1, col=1)
    figure.update_yaxes(range=[0, 1.05], tickformat=".0%", title_text="share of drafts accepted", row=1, col=1)
    figure.update_yaxes(title_text="acceptance length (tokens)", rangemode="tozero", row=1, col=2)
    return figure.update_annotations(font={"size": 13})


# --- how a drafter was trained --------------------------------------------------------------------------------------


def plot_training(curves: Mapping[str, Sequence[Mapping[str, Any]]], machine: str) -> go.Figure:
    """Training loss and held-out acceptance over the time of training. curves: method -> the points that a training
    (`Trained.curve`) or a card (`training.curve`) holds; a first point without a loss is the untrained drafter."""
    headings = ["training loss", "held-out acceptance length"]
    figure = make_subplots(rows=1, cols=2, subplot_titles=headings, horizontal_spacing=0.14)
    findings = []
    for method, points in curves.items():
        look = _line_look({"method": method, "backend": "torch"})
        label = method_style(method).label
        for column, name in ((1, "loss"), (2, "acceptance_length")):
            figure.add_scatter(
                x=[point["seconds"] for point in points],
                y=numbers(point[name] for point in points),
                name=label,
                legendgroup=method,
                showlegend=column == 2,
                customdata=[point["step"] for point in points],
                hovertemplate="step %{customdata}, %{x:.0f} s<br>%{y:.2f}<extra>%{fullData.name}</extra>",
                cliponaxis=False,
                row=1,
                col=column,
                **look,
            )
        known = [(n, p["seconds"]) for p in points if (n := number(p["acceptance_length"])) is not None]
        if len(known) > 1:
            (first, _), (last, seconds) = known[0], known[-1]
            findings.append(f"{label} from {first:.2f} to {last:.2f} tokens a round in {seconds:.0f} s")
    _layout(figure, "Training: " + "; ".join(findings) if findings else "Nothing was trained", [], height=420)
    figure.update_layout(title_subtitle_text=f"trained on {html.escape(machine, quote=False)}", margin_t=150)
    figure.update_layout(legend_y=-0.3)
    figure.update_xaxes(title_text="seconds of training", rangemode="tozero")
    figure.update_yaxes(title_text="cross-entropy (nats)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="tokens a round", row=1, col=2)
    figure.add_hline(y=1.0, line={"color": _MARK, "width": 2, "dash": "dot"}, row=1, col=2)
    return figure.update_annotations(font={"size": 13})


# --- many methods beside each other -------------------------------------------------------------------------------


def plot_methods_by_category(runs: Sequence[Record]) -> go.Figure:
    """Speed-up of every method in every prompt category: a row of bars for each method, the fastest on top, and the
    same category in one column, so that the eye compares along rows and down columns."""
    gains = [(run, gain) for run in _speculative(runs) if (gain := speedup(run, runs)) is not None]
    gains.sort(key=lambda pair: -pair[1])
    if not gains:
        return _layout(go.Figure(), "No speed-up can be computed: the plain run is missing", runs)
    shown = [run for run, _ in gains]
    table = [{c: speedup(run, runs, c) for c in run.get("by_category") or {}} for run in shown]
    known = {c: [v for row in table if (v := row.get(c)) is not None] for c in {c for row in table for c in row}}
    categories = sorted(known, key=lambda c: (-sum(known[c]) / max(1, len(known[c])), c))
    top = 1.12 * max([1.1, *(value for values in known.values() for value in values)])
    headings = [f"<b>{label_of(run, shown)}</b>, {gain:.2f}× over all prompts" for run, gain in gains]
    figure = make_subplots(
        rows=len(shown), cols=1, shared_xaxes=True, subplot_titles=headings, vertical_spacing=0.3 / len(shown)
    )
    for number, (run, row) in enumerate(zip(shown, table, strict=True), start=1):
        values = [row.get(c) for c in categories]
        _add_category_bars(figure, run, shown, categories, values, row=number, col=1)
        figure.add_hline(y=1.0, line={"color": _MARK, "width": 2, "dash": "dot"}, row=number, col=1)
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    figure.update_layout(showlegend=False)
    _layout(figure, _winners_title(gains, shown, table, categories), runs, height=190 + 105 * len(shown))
    unit = {"text": "speed-up (×)", "font": {"size": 11}}
    figure.update_yaxes(range=[0, top], tickvals=list(range(math.ceil(top))), title=unit)
    figure.update_layout(margin_t=figure.layout.margin.t + 30)
    figure.update_xaxes(title_text="prompt category; dotted: 1.0×, plain decoding", row=len(shown), col=1)
    return figure.update_layout(bargap=0.25)


def _winners_title(
    gains: Any, shown: Sequence[Record], table: Sequence[Mapping[str, Any]], categories: list[str]
) -> str:
    """Who is fastest over all, and in how many categories each method is."""
    best, gain = gains[0]
    if gain <= 1:
        return f"No method beats plain decoding over all prompts; nearest is {label_of(best, shown)}, {gain:.2f}×"
    won: dict[str, int] = {}
    for c in categories:
        value, label = max((row.get(c) or 0.0, label_of(run, shown)) for run, row in zip(shown, table, strict=True))
        won[label if value > 1 else "none"] = won.get(label if value > 1 else "none", 0) + 1
    counts = ", ".join(f"{label} {count}" for label, count in sorted(won.items(), key=lambda item: -item[1]))
    return f"Fastest over all prompts: {label_of(best, shown)}, {gain:.2f}×. Categories won: {counts}"


def plot_cost_and_acceptance(runs: Sequence[Record]) -> go.Figure:
    """What drafting costs in a round against what the round yields, one mark per method, its speed-up in the legend.
    The curves are where the cost model puts equal speed-ups, if verification takes the median of the times measured.
    """
    names = ("draft_ms_per_round", "acceptance_length", "verify_ms_per_round", "overhead_ms_per_round")
    points = []
    for run in _speculative(runs):
        draft, length, verify, overhead = (figure_of(run, name) for name in names)
        if draft is not None and length is not None:
            points.append((run, draft, length, (verify or 0.0) + (overhead or 0.0)))
    if not points:
        return _layout(go.Figure(), "No run has both a draft time and an acceptance length", runs)
    shown = [run for run, *_ in points]
    floor = min((draft for _, draft, *_ in points if draft > 0), default=0.01) / 2
    longest = max(length for _, _, length, _ in points)
    figure = go.Figure()
    _equal_speedups(figure, points, runs, floor, longest)
    for run, draft, length, _ in sorted(points, key=lambda point: point[1]):
        style, gain = method_style(run["method"]), speedup(run, runs)
        figure.add_scatter(
            x=[max(draft, floor)],
            y=[length],
            customdata=[draft],
            name=label_of(run, shown) + ("" if gain is None else f", {gain:.2f}×"),
            mode="markers",
            marker={"symbol": style.symbol, "size": 14, "color": style.color, "line": {"color": _INK, "width": 1}},
            cliponaxis=False,
            hovertemplate="%{customdata:.2f} ms of drafting<br>%{y:.2f} tokens a round<extra>%{fullData.name}</extra>",
        )
    cheap, dear = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[2])
    title = f"Most tokens a round: {label_of(dear[0], shown)}, {dear[2]:.2f} for {_ms(dear[1])} of drafting"
    if cheap[0] is not dear[0]:
        title += f"; cheapest: {label_of(cheap[0], shown)}, {cheap[2]:.2f} for {_ms(cheap[1])}"
    axes = {"x": "drafting in a round (ms), logarithmic", "y": "acceptance length<br>(tokens a round, bonus included)"}
    _layout(figure, title, runs, height=540, **axes)
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(range=[0.8, 1.12 * longest])
    return figure.update_layout(showlegend=True)


def _equal_speedups(figure: go.Figure, points: Sequence[Any], runs: Sequence[Record], floor: float, top: float) -> None:
    """The curves acceptance length = speed-up × (draft + verify + overhead) / plain step."""
    base = baseline_of(points[0][0], runs)
    step_ms = figure_of(base, "round_ms") if base else None
    if not step_ms:
        return
    rest = statistics.median(rest for *_, rest in points)
    last = 2 * max(draft for _, draft, *_ in points)
    drafts = [floor * (last / floor) ** (i / 60) for i in range(61)]
    for gain, dash in ((1.0, "dot"), (2.0, "dash")):
        lengths = [gain * (draft + rest) / step_ms for draft in drafts]
        kept = [(x, y) for x, y in zip(drafts, lengths, strict=True) if y <= 1.1 * top]
        if kept:
            line = {"color": _MARK, "dash": dash, "width": 1.5}
            xs, ys = zip(*kept, strict=True)
            figure.add_scatter(x=xs, y=ys, mode="lines", line=line, name=f"{gain:g}×, cost model", hoverinfo="skip")


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


# --- why it pays or not -------------------------------------------------------------------------------------------


def plot_draft_len_sweep(runs: Sequence[Record], predicted: Mapping[int, float] | None = None) -> go.Figure:
    """Measured speed-up against K, one line per method, and the cost model's curve (`predicted`: K -> speed-up)."""
    figure = go.Figure()
    best: tuple[float, int, str] | None = None
    for method in dict.fromkeys(run["method"] for run in _speculative(runs)):
        line = sorted((r for r in runs if r["method"] == method), key=lambda r: r["max_draft_len"])
        values = [speedup(run, runs) for run in line]
        label = method_style(method).label + ", measured"
        look = {**_line_look(line[0]), "name": label, "connectgaps": False}
        lens = [run["max_draft_len"] for run in line]
        figure.add_scatter(x=lens, y=values, hovertemplate="K = %{x}<br>%{y:.3f}×<extra></extra>", **look)
        for k, value in zip(lens, values, strict=True):
            if value is not None and (best is None or value > best[0]):
                best = (value, k, method_style(method).label)
    if predicted:
        lens = sorted(predicted)
        curve = {"mode": "lines", "line": {"color": _INK, "width": 2, "dash": "solid"}, "name": "cost model"}
        figure.add_scatter(x=lens, y=numbers(predicted[k] for k in lens), **curve)
    _line_at_one(figure)
    title = "No K has been measured"
    if best is not None:
        verdict = f"pays most at K = {best[1]}: {best[0]:.2f}×" if best[0] > 1 else "does not pay at any K measured"
        title = f"The {best[2]} {verdict}"
    figure.update_layout(showlegend=True)
    _layout(figure, title, runs, x="K, draft tokens per round", y="speed-up of output throughput (×)")
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(rangemode="tozero")
    return figure


def plot_step_times(times_s: Mapping[str, Mapping[int, float]], machine: str) -> go.Figure:
    """Time of one target pass against the rows it computes, one line per engine (`times_s`: name -> rows -> seconds).
    A flat line is what speculation lives on: checking K + 1 tokens for the price of one."""
    figure = go.Figure()
    findings = []
    for style, (name, times) in zip(METHODS.values(), times_s.items(), strict=False):
        rows = sorted(times)
        figure.add_scatter(
            x=rows,
            y=[None if (value := number(times[r])) is None else 1e3 * value for r in rows],
            name=html.escape(name, quote=False),
            mode="lines+markers",
            line={"color": _INK, "dash": style.dash, "width": 2},
            marker={"symbol": style.symbol, "size": 10, "color": _INK},
            hovertemplate="%{x} rows<br>%{y:.2f} ms<extra>%{fullData.name}</extra>",
        )
        first, last = number(times[rows[0]]), number(times[rows[-1]])
        if first and last:
            findings.append(f"{html.escape(name, quote=False)} {last / first:.2f}× ({rows[-1]} rows against {rows[0]})")
    title = "What more rows cost: " + "; ".join(findings) if findings else "No step was timed"
    _layout(figure, title, [], x="rows (token positions) in one pass of the target", y="time of the pass (ms)")
    figure.update_layout(title_subtitle_text=f"measured on {html.escape(machine, quote=False)}", showlegend=True)
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(rangemode="tozero")
    return figure


def plot_round_time(runs: Sequence[Record]) -> go.Figure:
    """Where the time of one round goes: draft, verify, overhead; a part that was not measured is left out, said so,
    and does not disturb the others."""
    labels = [label_of(run, runs) for run in runs]
    figure = go.Figure()
    for part in ("draft", "verify", "overhead"):
        values = [figure_of(run, f"{part}_ms_per_round") for run in runs]
        _stack(figure, part, labels, values, "ms")
    title = _time_title(runs)
    _say_missing(figure, runs, labels, ("draft", "verify", "overhead"))
    figure.update_layout(barmode="stack", showlegend=True, legend_traceorder="normal")
    _layout(figure, title, runs, x="time per round (ms)", height=240 + 60 * len(runs))
    figure.update_yaxes(autorange="reversed")
    return figure


def _stack(figure: go.Figure, part: str, labels: list[str], values: list[float | None], unit: str) -> None:
    name, color, pattern = _PARTS[part]
    figure.add_bar(
        x=values,
        y=labels,
        name=name,
        orientation="h",
        marker={
            "color": color,
            "line": {"color": _INK, "width": 1},
            "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "#777777", "size": 7, "solidity": 0.25},
        },
        text=[f"{value:.3g}" if value else None for value in values],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": _INK},
        hovertemplate=f"%{{y}}<br>{name}: %{{x:.3f}} {unit}<extra></extra>",
    )


def _say_missing(figure: go.Figure, runs: Sequence[Record], labels: Sequence[str], parts: Sequence[str]) -> None:
    """A speculative run lacks a part it should have, or a plain run its verification: write that on its bar."""
    for run, label in zip(runs, labels, strict=True):
        expected = parts if run["method"] != "plain" else [p for p in parts if p == "verify"]
        missing = [part for part in expected if figure_of(run, f"{part}_ms_per_round") is None]
        if missing:
            text = f"no value: {', '.join(missing)}"
            note = {"x": 1, "xref": "paper", "xanchor": "right", "y": label, "showarrow": False, "yshift": -24}
            figure.add_annotation(text=text, font={"color": _MARK, "size": 12}, **note)


def _time_title(runs: Sequence[Record]) -> str:
    """What the fastest speculative run that was split into parts pays in a round, in plain steps."""
    for run in sorted(_speculative(runs), key=lambda run: -(figure_of(run, "output_tok_s") or 0.0)):
        draft, verify = figure_of(run, "draft_ms_per_round"), figure_of(run, "verify_ms_per_round")
        base = baseline_of(run, runs)
        step = figure_of(base, "verify_ms_per_round") or figure_of(base, "round_ms") if base else None
        if draft is not None and verify and step:
            most = round(max(run["max_draft_len"], figure_of(run, "mean_draft_len") or 0))  # a tree has more tokens
            return (
                f"{label_of(run, runs)}: checking up to {_counted(most, 'draft token')} at once costs "
                f"{verify / step:.2f}× one plain step; drafting adds {draft / step:.2f}×"
            )
    return "Time per round, by what it is spent on"


def plot_latency(runs: Sequence[Record]) -> go.Figure:
    """Mean latency of a request, split into prefill and the rounds' draft, verify and overhead time."""
    labels = [label_of(run, runs) for run in runs]
    split: dict[str, list[float | None]] = {part: [] for part in _PARTS}
    for run in runs:
        ttft, latency = figure_of(run, "ttft_s"), figure_of(run, "latency_s")
        split["prefill"].append(ttft)
        per_round = {p: figure_of(run, f"{p}_ms_per_round") for p in ("draft", "verify", "overhead")}
        total = sum(value for value in per_round.values() if value)
        for part, value in per_round.items():
            if ttft is None or latency is None or value is None or not total > 0:
                split[part].append(None)
            else:
                split[part].append((latency - ttft) * value / total)
    figure = go.Figure()
    for part, values in split.items():
        _stack(figure, part, labels, values, "s")
    _say_missing(figure, runs, labels, ("draft", "verify", "overhead"))
    timed = [run for run in runs if figure_of(run, "latency_s") and figure_of(run, "ttft_s") is not None]
    title = "No run has a latency"
    if timed:
        best = min(timed, key=lambda run: run["figures"]["latency_s"])
        ttft, latency = best["figures"]["ttft_s"], best["figures"]["latency_s"]
        title = (
            f"Shortest wait: {label_of(best, runs)}, {latency:.2f} s per answer, "
            f"of which {ttft / latency:.0%} before the first token"
        )
    figure.update_layout(barmode="stack", showlegend=True, legend_traceorder="normal")
    _layout(figure, title, runs, x="latency of a request (s), mean over prompts", height=240 + 60 * len(runs))
    figure.update_yaxes(autorange="reversed")
    return figure


def plot_predicted_speedup(points: Sequence[Mapping[str, Any]], runs: Sequence[Record]) -> go.Figure:
    """The cost model against the stop-watch: one mark per point (`label`, `method`, `predicted`, `measured`), the
    diagonal where both agree, and a band of 10 % around it. `runs` are the records the points were computed from."""
    figure = go.Figure()
    known = [(x, y, p) for p in points if (x := number(p["predicted"])) is not None if (y := number(p["measured"]))]
    values = [value for x, y, _ in known for value in (x, y)] or [1.0]
    ends = [0.85 * min(values), 1.1 * max(values)]
    for factor, name, dash in ((1.0, "prediction = measurement", "solid"), (1.1, "± 10 %", "dot"), (0.9, "", "dot")):
        line = {"color": "#777777", "dash": dash, "width": 1.5}
        figure.add_scatter(
            x=ends, y=[end * factor for end in ends], mode="lines", line=line, name=name, showlegend=bool(name)
        )
    for method in dict.fromkeys(p["method"] for _, _, p in known):
        style = method_style(method)
        mine = sorted((x, y, _words(str(p["label"]))) for x, y, p in known if p["method"] == method)
        xs, ys, names = zip(*mine, strict=True)
        figure.add_scatter(
            x=xs,
            y=ys,
            text=names,
            name=style.label,
            mode="markers+text",
            textposition=[("top left", "bottom right")[i % 2] for i in range(len(mine))],
            textfont={"size": 11},
            marker={"symbol": style.symbol, "size": 11, "color": style.color},
            hovertemplate="%{text}<br>predicted %{x:.2f}×, measured %{y:.2f}×<extra></extra>",
        )
    title = "Nothing to compare with the cost model"
    if known:
        off = max(abs(x / y - 1) for x, y, _ in known)
        close = sum(abs(x / y - 1) <= 0.1 for x, y, _ in known)
        title = f"The cost model is within 10 % in {close} of {len(known)} cases (largest error {off:.0%})"
    figure.update_layout(showlegend=True)
    axes = {"x": "predicted speed-up (×)", "y": "measured speed-up (×)"}
    _layout(figure, title, runs, height=520, **axes)
    figure.update_xaxes(range=ends)
    figure.update_yaxes(range=ends)
    return figure
