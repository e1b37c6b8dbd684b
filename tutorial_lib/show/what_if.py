"""What would happen: the hardware model under sliders for acceptance, K, batch, model sizes and GPU.

`what_if_view` is pure and takes milliseconds; `what_if` puts it under controls (`widgets.show`), with fixed copies for
a batch. Figures are predictions: step times from bytes, flops and launches at the ceilings that an H200 was recorded
to reach, carried over to other GPUs by their data sheets. No recorded step was bound by arithmetic, so that ceiling is
the sheet's dense rate, and a batch up to which speculation pays is an upper bound.
"""

from __future__ import annotations

import html
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from ..bench import cost_model
from ..bench.hardware_model import Ceilings, ModelCost, Pair, model_cost, on_another
from ..plan import GB, GPUS
from ..shapes import DUMMIES
from . import plots, widgets

LOOKUP = "a look-up"
TARGETS = ("llama-3.1-8b", "llama-3.3-70b", "llama-3.1-405b")
DRAFTERS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", LOOKUP)
MOST_K = 16


def what_if_view(
    ceilings: Ceilings,
    *,
    GPU: str,
    target: str,
    drafter: str,
    alpha: float,
    K: int,
    batch: int,
    context: int = 600,
) -> str:
    """Plain and speculative decoding of `target` as HTML: seconds, tokens, every K up to 16, and where it ends to pay.

    ceilings: of the H200 of the records. alpha: probability that a draft token is accepted. Weights are FP8 where the
    GPU multiplies it, bfloat16 elsewhere: the page says which.
    """
    pair, dtype = pair_on(ceilings, GPU, target, drafter, batch=batch, context=context)
    choices = pair.choices(alpha, max(MOST_K, K))
    mine, best = choices[K], max(choices, key=lambda choice: choice.speedup)
    needed = cost_model.break_even_alpha(pair.plain_s, mine.round_s, K)
    stops = pair.batch_it_stops_at(alpha, K)
    lines = [
        f"<b>{mine.speedup:.2f}× plain decoding</b> at K = {K}: a round takes {1e3 * mine.round_s:.2f} ms and yields "
        f"{mine.acceptance_length:.2f} tokens, a plain step {1e3 * pair.plain_s:.2f} ms. "
        f"{1 / pair.plain_s:.0f} → {mine.acceptance_length / mine.round_s:.0f} tokens/s for each of {batch} requests.",
        (
            f"Best K: {best.max_draft_len} ({best.speedup:.2f}×)."
            if best.max_draft_len
            else "Best K: none, plain decoding is fastest."
        )
        + (f" K = {K} pays from α = {needed:.2f} on" if needed is not None else f" No α makes K = {K} pay")
        + (
            f", and at α = {alpha:g} up to a batch of {stops - 1}."
            if stops
            else f", and at α = {alpha:g} at any batch."
        ),
        f"{html.escape(pair.machine.how)}; weights in {dtype}, {context} tokens of context. {_memory(pair, GPU)}",
    ]
    longest = max(choice.speedup for choice in choices)
    rows = "".join(widgets.speedup_row(choice, choice is mine, longest, 1e3, " ms") for choice in choices[1:])
    head = "".join(
        f'<th style="{widgets.CELL};text-align:left">{name}</th>'
        for name in ("K", "tokens per round", "time of a round", "speed-up")
    )
    said = "".join(f"<p>{line}</p>" for line in lines)
    return f'<div style="{widgets.BOX}">{said}<table style="{widgets.TABLE}"><tr>{head}</tr>{rows}</table></div>'


def pair_on(
    ceilings: Ceilings, gpu: str, target: str, drafter: str, *, batch: int = 1, context: int = 600
) -> tuple[Pair, str]:
    """The pair on that GPU, and the number format of its weights."""
    dtype = "fp8" if GPUS[gpu].fp8_tflops is not None else "bfloat16"
    measured = replace(ceilings, flops_per_s=GPUS["H200"].flops_per_s(dtype))
    costs: list[ModelCost | None] = [
        None if name == LOOKUP else model_cost(DUMMIES[name], dtype) for name in (target, drafter)
    ]
    assert costs[0] is not None
    return Pair(costs[0], costs[1], on_another(gpu, dtype, measured), batch, context), dtype


def _memory(pair: Pair, gpu: str) -> str:
    models = [model for model in (pair.target, pair.drafter) if model is not None]
    taken = sum(m.bytes_per_step + pair.batch * pair.context * m.kv_bytes_per_token for m in models) / GB
    has = GPUS[gpu].memory_gb
    if taken <= has:
        return f"It takes {taken:.0f} GB of {has:g}."
    return f"<b>It does not fit</b>: {taken:.0f} GB, and one {html.escape(gpu)} has {has:g}; the times assume it did."


def what_if(ceilings: Ceilings, *, alpha: float = 0.8, K: int = 5, name: str = "what if") -> None:
    """The view under its controls, starting from the posts' pair on an H200."""
    start = {
        "GPU": "H200", "target": "llama-3.3-70b", "drafter": "llama-3.2-1b",
        "alpha": min(0.98, max(0.0, round(50 * alpha) / 50)), "K": min(MOST_K, max(1, K)), "batch": 1,
    }  # fmt: skip
    controls = {
        "GPU": list(GPUS),
        "target": TARGETS,
        "drafter": DRAFTERS,
        "alpha": [i / 50 for i in range(50)],
        "K": range(1, MOST_K + 1),
        "batch": [2**i for i in range(9)],
    }
    fixed = [
        start,
        {**start, "target": "llama-3.1-8b"},
        {**start, "GPU": "L40S", "target": "llama-3.1-8b", "batch": 32},
    ]
    widgets.show(name, lambda **values: what_if_view(ceilings, **values), controls, fixed)


def accelerators_rows(
    ceilings: Ceilings, target: str = "llama-3.1-8b", drafter: str = "llama-3.2-1b", alpha: float = 0.8
) -> list[dict[str, Any]]:
    """A row for every GPU: what the pair would do there at batch 1, at its best K."""
    rows = []
    for gpu, sheet in GPUS.items():
        pair, dtype = pair_on(ceilings, gpu, target, drafter)
        best = pair.best(alpha, MOST_K)
        stops = pair.batch_it_stops_at(alpha, max(1, best.max_draft_len))
        rows.append(
            {
                "GPU": gpu,
                "weights": dtype,
                "plain step, ms": 1e3 * pair.plain_s,
                "best K": best.max_draft_len,
                "speed-up": best.speedup,
                "pays up to a batch of": None if stops is None else stops - 1,
                "data sheet": sheet.source,
            }
        )
    return rows


BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LENS = ((3, "circle", "dot", "#0072B2"), (5, "square", "dash", "#D55E00"), (10, "diamond", "solid", "#009E73"))


def plot_batches(
    ceilings: Ceilings,
    *,
    GPU: str = "H200",
    target: str = "llama-3.3-70b",
    drafter: str = "llama-3.2-1b",
    alpha: float = 0.8,
    context: int = 600,
) -> go.Figure:
    """Predicted speed-up against the batch, one line for every K: rows are free until arithmetic binds."""
    figure, found = go.Figure(), []
    pair, dtype = pair_on(ceilings, GPU, target, drafter, context=context)
    for k, symbol, dash, color in _LENS:
        gains = [replace(pair, batch=batch).choices(alpha, k)[k].speedup for batch in BATCHES]
        figure.add_scatter(
            x=BATCHES, y=gains, mode="lines+markers", name=f"K = {k}", line={"color": color, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 8, "color": color},
            hovertemplate="batch %{x}<br>%{y:.2f}× predicted<extra>%{fullData.name}</extra>",
        )  # fmt: skip
        stops = pair.batch_it_stops_at(alpha, k)
        found.append(f"K = {k} at any batch" if stops is None else f"K = {k} up to a batch of {stops - 1}")
    plots._line_at_one(figure)
    axes: dict[str, Any] = {"x": "requests at once, logarithmic", "y": "predicted speed-up of decoding (×)"}
    plots._layout(figure, "Predicted to pay: " + ", ".join(found), [], **axes)
    about = f"{target} with {drafter} on one {GPU}, {dtype}, α = {alpha:g}, {context} tokens of context each"
    figure.update_layout(title_subtitle_text=f"<b>predicted</b>, no measurement: {html.escape(about)}", showlegend=True)
    figure.update_xaxes(type="log", tickvals=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    return figure.update_yaxes(rangemode="tozero")
