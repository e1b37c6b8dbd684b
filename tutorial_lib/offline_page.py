"""The frame of both reports: one HTML page that holds all it shows and may fetch nothing, and figures that fit it.

A page follows the reader's light or dark setting and fits a phone. plotly.js is inside, once; a content security policy
forbids every outside request, so that a forgotten one cannot go unnoticed. Knows neither notebooks nor records.
"""

from __future__ import annotations

import copy
import html
import json
import re
from collections.abc import Mapping
from typing import Any

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; media-src data:"
)


def html_page(title: str, main: str, *, style: str, has_figures: bool) -> str:
    """A whole page around `main`, plotly.js inside where there are figures; it may fetch nothing at all. style: CSS
    behind the frame's own, whose colours (`var(--ink)` and so on) follow the reader's setting."""
    from plotly.offline import get_plotlyjs

    plotlyjs = f"<script>{get_plotlyjs()}</script>" if has_figures else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{_STYLE}{style}
</style>
<script>window.PlotlyConfig = {{MathJaxConfig: "local"}};</script>
{plotlyjs}
</head>
<body>
<main>
{main}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def figure_html(spec: Mapping[str, Any], name: str) -> str:
    """A figure (plotly's JSON, read) in a page: title, the line below it and remarks below the axes as text, which
    wraps on a phone; the rest for plotly.js, in the margin they left. name: no other figure of the page has it."""
    spec = copy.deepcopy(dict(spec))
    layout = spec.get("layout") or {}
    heading = layout.pop("title", None) or {}
    heading = {"text": heading} if isinstance(heading, str) else heading
    title, subtitle = _words(heading.get("text"), " "), _words((heading.get("subtitle") or {}).get("text"), " · ")
    layout.pop("template", None)
    before = (layout.get("margin") or {}).get("t", 100)
    notes, remarks = layout.get("annotations", []), []
    if notes:
        remarks = [note for note in notes if note.get("yref") == "paper" and note.get("y", 0) < 0]
        layout["annotations"] = [note for note in notes if note not in remarks]
    has_headings = any(note.get("yref") == "paper" and note.get("y", 0) >= 1 for note in notes)
    after = 46 if has_headings else 16
    layout["margin"] = {**(layout.get("margin") or {}), "t": after}
    layout["height"] = max(300, layout.get("height", 420) - before + after + 40)
    if layout.get("legend"):
        layout["legend"]["y"] = -72 / (layout["height"] - after - layout["margin"].get("b", 60))
    for axis in (value for name, value in layout.items() if name[1:].startswith("axis") and "title" in value):
        axis["title"]["font"] = {"size": 12}
    whole = {"data": spec.get("data") or [], "layout": layout}
    _break_labels(whole)
    data = json.dumps(whole, separators=(",", ":")).replace("</", "<\\/")
    said = "".join(f'<p class="note">{html.escape(_words(note.get("text"), " "))}</p>' for note in remarks)
    return (
        f'<figure><figcaption><b>{html.escape(title)}</b><span class="note">{html.escape(subtitle)}</span></figcaption>'
        f'<div class="plot" id="{name}" role="img" aria-label="{html.escape(title)}"></div>'
        f'<script type="application/json" data-for="{name}">{data}</script>{said}</figure>'
    )


def _break_labels(spec: Mapping[str, Any]) -> None:
    """Long names of bars on lines of their own, so that they stay readable on a phone."""

    def broken(value: Any) -> Any:
        return value.replace(", ", "<br>") if isinstance(value, str) else value

    for trace in spec["data"]:
        for axis in ("x", "y") if trace.get("type") == "bar" else ():
            if isinstance(trace.get(axis), list):
                trace[axis] = [broken(value) for value in trace[axis]]
    for note in spec["layout"].get("annotations", []):
        note |= {axis: broken(note[axis]) for axis in ("x", "y") if axis in note}


def _words(text: str | None, at_breaks: str) -> str:
    """A figure's title as plain words: its line breaks and bold marks are for plotly alone."""
    return html.unescape(re.sub(r"</?b>", "", re.sub(r"<br ?/?>", at_breaks, text or "")))


_SCRIPT = """
const onDark = {"#222222": "#e6e6e6", "#E3E3E3": "#3d3d3d", "#555555": "#b5b5b5", "#8A1C00": "#ff9d85",
  "#777777": "#a0a0a0", "#595959": "#a8a8a8", "#332288": "#9a8cf0", "#882255": "#dd7aae", "#7A5C00": "#d0ab3a",
  "#0072B2": "#4aa8e0", "#000000": "#e6e6e6", "#AA4499": "#d27ac4", "#6B2C6B": "#b58ac0", "#44103A": "#a06f9c",
  "#B0395A": "#e8708f"};
function onDarkPage(text) {
  const faded = /^rgba\\((\\d+), (\\d+), (\\d+), ([0-9.]+)\\)$/.exec(text);
  if (!faded) return onDark[text] || text;
  const hex = "#" + faded.slice(1, 4).map(part => (+part).toString(16).padStart(2, "0").toUpperCase()).join("");
  return (onDark[hex] || hex) + Math.round(255 * faded[4]).toString(16).padStart(2, "0");
}
function swapped(value, key, parent) {
  if (typeof value === "string") return onDarkPage(value);
  if (Array.isArray(value)) return value.map(item => swapped(item, key, parent));
  if (value && typeof value === "object") {
    const isOnBar = key === "textfont" && parent.type === "bar" && parent.textposition === "inside";
    const {color} = parent && parent.marker || {};
    if (isOnBar && value.color === "#222222" && /^rgba/.test(color)) return {...value, color: "#e6e6e6"};
    if (isOnBar) return {...value, color: onDarkPage(String(color)) !== color ? "#111111" : value.color};
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, swapped(v, k, value)]));
  }
  return value;
}
function onPhone(data, layout) {
  layout.margin = {...layout.margin, l: 44, r: 48};
  layout.font = {...layout.font, size: 11};
  const bars = data.filter(t => t.type === "bar" && t.orientation !== "h" && Array.isArray(t.x));
  const count = bars.reduce((sum, t) => sum + t.x.length, 0);
  if (count >= 8) for (const trace of bars) {  // names stand upright below them
    delete trace.text;
    trace.x = trace.x.map(name => typeof name === "string" ? name.replace(/<br>/g, " ") : name);
  }
  if (count >= 8 && layout.legend) layout.legend.y *= 1.8;
  for (const trace of data) if (trace.mode === "markers+text") trace.mode = "markers";
  const entries = data.filter(t => t.showlegend !== false).length;
  if (layout.showlegend && entries > 6) layout.height += 18 * entries;
  stackPanels(layout);
}
function stackPanels(layout) {  // that stand beside each other, each with its heading
  const xs = Object.entries(layout).filter(([name, axis]) => /^xaxis/.test(name) && axis.domain)
    .map(([, axis]) => axis).sort((a, b) => a.domain[0] - b.domain[0]);
  const ys = xs.map(x => layout["yaxis" + (x.anchor || "y").slice(1)]);
  if (xs.length < 2 || xs[0].domain[1] > xs[1].domain[0] || ys.some(y => !y || y.domain[1] !== ys[0].domain[1])) return;
  const bottom = layout.margin.b || 60, each = Math.max(290, layout.height - layout.margin.t - bottom);
  const whole = each * xs.length;
  for (const note of layout.annotations || []) {
    const i = xs.findIndex(x => note.x >= x.domain[0] && note.x <= x.domain[1]);
    const isHeading = note.yref === "paper" && note.y >= 0.9 && i >= 0;
    const text = note.text.replace(/<br>/g, " ");
    if (isHeading) Object.assign(note, {text, x: 0, xanchor: "left", y: 1 - i / xs.length});
  }
  xs.forEach((x, i) => {
    x.domain = [0, 1];
    ys[i].domain = [1 - (i + 1) / xs.length + (i + 1 < xs.length ? 130 / whole : 0), 1 - i / xs.length];
    if (ys[i].matches) ys[i].showticklabels = true;
  });
  layout.height += whole - each;
  if (layout.legend) layout.legend.y = -72 / whole;
}
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function draw() {
  for (const source of document.querySelectorAll("script[data-for]")) {
    let {data, layout} = JSON.parse(source.textContent);
    if (dark.matches) { data = swapped(data, "", {}); layout = swapped(layout, "", {}); }
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    if (window.innerWidth < 640) onPhone(data, layout);
    Plotly.react(source.dataset.for, data, layout, {displayModeBar: false, responsive: true});
  }
}
if (window.Plotly) { draw(); dark.addEventListener("change", draw); }
"""

_STYLE = """
:root { color-scheme: light dark; --page: #f4f4f2; --sheet: #fff; --ink: #222; --soft: #555; --line: #ddd;
  --code: #f7f7f7; --link: #0059a0; --mark: #0072b2; --warn: #a8330a; --good: #00704f; }
@media (prefers-color-scheme: dark) {
  :root { --page: #111; --sheet: #1b1b1b; --ink: #e6e6e6; --soft: #b5b5b5; --line: #3d3d3d; --code: #262626;
    --link: #7cc0ff; --mark: #4aa8e0; --warn: #ff9d85; --good: #58c79f; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 2rem 4rem; background: var(--sheet); }
section { border-top: 4px solid var(--mark); margin-top: 3rem; padding-top: .5rem; }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
a { color: var(--link); }
.note { color: var(--soft); overflow-wrap: anywhere; }
figure { margin: 2rem 0; }
figcaption b { display: block; font-size: 1.06em; line-height: 1.35; }
figcaption .note { display: block; font-size: .82em; }
.plot { width: 100%; overflow: hidden; }
figure > p.note { margin: .2rem 0; font-size: .82em; }
th { white-space: normal !important; }
@media (max-width: 640px) { main { padding: 1rem .8rem 3rem; } table { font-size: .8em !important; } }
@media print { main { max-width: none; } section { break-before: page; } }
"""
