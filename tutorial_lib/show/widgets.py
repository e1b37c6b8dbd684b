"""Controls around pure views: `view(**values) -> HTML string`, on data that is already computed.

A view never starts long work. In a batch (`progress.is_watched()` is False) two or three fixed views are shown
instead, and beside every live control the same fixed views stand folded away, so nothing is only in a widget.
Running the cell again replaces its control: the old one is closed, and a change of a slider makes one call.
"""

from __future__ import annotations

import html
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..bench import cost_model
from ..results import Generation
from .progress import in_kernel, is_watched
from .trace import Decoder, round_html

View = Callable[..., str]
_open_controls: dict[str, Any] = {}


def show(name: str, view: View, controls: Mapping[str, Sequence[Any]], fixed: Sequence[Mapping[str, Any]]) -> None:
    """Display `view` under one slider per entry of `controls` (name -> the values it may take).

    fixed: the values of the static copies; the first are where the sliders start. name: identifies the control, so
    that showing it again closes the one before.
    """
    from IPython.display import HTML, display

    copies = static_html(view, fixed)
    if not is_live():
        display(HTML(copies))
        return
    display(_control(name, view, controls, fixed[0]))
    display(HTML(f"<details><summary>static copy</summary>{copies}</details>"))


def is_live() -> bool:
    """True where a control can work: somebody watches, in a kernel, and ipywidgets is installed."""
    if not (is_watched() and in_kernel()):
        return False
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        return False
    return True


def static_html(view: View, fixed: Sequence[Mapping[str, Any]]) -> str:
    """The fixed views one below the other, each under the values it was made with."""
    parts = []
    for values in fixed:
        line = ", ".join(f"{key.replace('_', ' ')} = {value}" for key, value in values.items())
        parts.append(f'<p style="margin:.8em 0 .2em"><b>{html.escape(line)}</b></p>{view(**values)}')
    return "".join(parts)


def _control(name: str, view: View, controls: Mapping[str, Sequence[Any]], start: Mapping[str, Any]) -> Any:
    import ipywidgets

    if name in _open_controls:
        before = _open_controls.pop(name)
        for widget in (*before.children, before):
            widget.close()
    sliders = {
        key: ipywidgets.SelectionSlider(
            options=list(values),
            value=start[key],
            description=key.replace("_", " "),
            continuous_update=False,
            style={"description_width": "initial"},
            layout={"width": "32em"},
        )
        for key, values in controls.items()
    }
    output = ipywidgets.HTML()

    def refresh(_change: object = None) -> None:
        try:
            output.value = view(**{key: slider.value for key, slider in sliders.items()})
        except Exception:  # noqa: BLE001 - shown in place: an error in a callback would otherwise vanish
            output.value = f"<pre>{html.escape(traceback.format_exc())}</pre>"

    for slider in sliders.values():
        slider.observe(refresh, names="value")
    refresh()
    box = ipywidgets.VBox([*sliders.values(), output])
    _open_controls[name] = box
    return box


# --- the two views of notebooks 02 and 07 -------------------------------------------------------------------------


def round_stepper(generation: Generation, tokenizer: Decoder, *, name: str = "rounds") -> None:
    """Step through the rounds of one generation."""
    count = max(1, len(generation.rounds))
    fixed = [{"round": k} for k in sorted({1, (count + 1) // 2, count})]
    show(name, lambda round: round_html(generation, tokenizer, round), {"round": range(1, count + 1)}, fixed)


def speedup_view(alpha: float, K: int, draft_cost: float, verify_cost: float) -> str:
    """What the cost model says, for every draft length up to 10: tokens per round, cost of a round, speed-up.

    alpha: probability that a draft token is accepted. K: `max_draft_len`. draft_cost: one draft step in plain target
    steps. verify_cost: one verification of K + 1 positions, likewise.
    """
    choices = cost_model.draft_length_choices(
        alpha,
        draft_s=lambda k: k * draft_cost,
        verify_s=lambda rows: 1.0 if rows == 1 else verify_cost,
        max_draft_len=max(10, K),
    )
    mine, best = choices[K], max(choices, key=lambda choice: choice.speedup)
    needed = cost_model.break_even_alpha(1.0, mine.round_s, K)
    verdict = "no alpha makes this K pay" if needed is None else f"it pays from alpha = {needed:.2f} on"
    longest = max(choice.speedup for choice in choices)
    names = ("K", "tokens per round", "cost of a round (plain steps)", "speed-up")
    head = "".join(f'<th style="{CELL};text-align:left">{name}</th>' for name in names)
    rows = "".join(speedup_row(choice, choice is mine, longest) for choice in choices[1:])
    return (
        f'<div style="{BOX}"><p><b>{mine.acceptance_length:.2f} tokens per round / {mine.round_s:.2f} plain steps per '
        f"round = {mine.speedup:.2f}× plain decoding</b>; {verdict}. Best K here: {best.max_draft_len or 'none'}"
        f"{f' ({best.speedup:.2f}×)' if best.max_draft_len else ''}.</p>"
        f'<table style="{TABLE}"><tr>{head}</tr>{rows}</table></div>'
    )


BOX = "background:#fff;color:#222;border:1px solid #ccc;border-radius:4px;padding:.3em 1em;max-width:60em"
TABLE = "border-collapse:collapse;font-size:13px;color:#222"
CELL = "border:1px solid #ccc;padding:.1em .8em;background:#fff;color:#222"


def speedup_row(
    choice: cost_model.DraftLengthChoice, is_chosen: bool, longest: float, scale: float = 1.0, unit: str = ""
) -> str:
    """One line of the table; the bar is solid above 1.0× and hollow below. A round's cost is shown times `scale`."""
    width = round(12 * choice.speedup / longest, 2)
    fill = "#0072B2" if choice.speedup > 1 else "#fff"
    bar = f'<span style="display:inline-block;height:.8em;width:{width}em;background:{fill};border:1px solid #0072B2">'
    weight = "font-weight:bold" if is_chosen else "font-weight:normal"
    cells = (
        f"{choice.max_draft_len}{' ←' if is_chosen else ''}",
        f"{choice.acceptance_length:.2f}",
        f"{scale * choice.round_s:.2f}{unit}",
        f"{bar}</span> {choice.speedup:.2f}×",
    )
    return f'<tr style="{weight}">' + "".join(f'<td style="{CELL};text-align:left">{c}</td>' for c in cells) + "</tr>"


def speedup_calculator(
    *, alpha: float = 0.7, max_draft_len: int = 4, draft_cost: float = 0.1, verify_cost: float = 1.0, name="calculator"
) -> None:
    """The cost model under four sliders, starting from the given (for example the measured) values."""
    start = {
        "alpha": min(1.0, max(0.0, round(alpha, 2))),
        "K": min(10, max(1, max_draft_len)),
        "draft_cost": min(1.0, max(0.0, round(draft_cost, 2))),
        "verify_cost": min(3.0, max(1.0, round(verify_cost, 2))),
    }
    controls = {
        "alpha": [i / 100 for i in range(101)],
        "K": range(1, 11),
        "draft_cost": [i / 100 for i in range(101)],
        "verify_cost": [1 + i / 100 for i in range(201)],
    }
    fixed = [start, {**start, "alpha": 0.4}, {**start, "draft_cost": 0.5}]
    show(name, speedup_view, controls, fixed)
