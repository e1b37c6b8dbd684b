"""One HTML page of all executed notebooks that needs no network: figures, formulas and styles are inside.

nbconvert renders the cells. What it would fetch from a CDN is replaced: figures become those of `offline_page`, the
frame that the report of records (`record_report`) has too, and formulas become MathML, which browsers draw themselves.
Knows nothing of how notebooks were run.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import OptionError
from .offline_page import figure_html, html_page

if TYPE_CHECKING:
    from nbformat import NotebookNode

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
_PLOTLY_MIME = "application/vnd.plotly.v1+json"
_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
_ERROR_MARKER = "papermill-error-cell-tag"  # papermill's own notices; the page has its banner


def write_report(out_dir: str | Path) -> Path:
    """Write `out_dir/report.html` from the executed notebooks there and return its path.

    Order and states come from `summary.json`; without one every notebook in the folder is taken, by name. Raises
    `OptionError` where there is nothing to report.
    """
    import nbformat

    out = Path(out_dir).expanduser().resolve()
    summary = _read_summary(out)
    if not summary["rows"]:
        raise OptionError(f"no executed notebooks in {out}", "a folder that `workbook run` wrote", "correct the folder")
    sections = []
    for row in summary["rows"]:
        path = out / f"{row['notebook']}.ipynb"
        if path.is_file() and row["status"] != "not run":
            body = notebook_body(nbformat.read(path, as_version=4), row["notebook"])
            sections.append(f'<section id="{html.escape(row["notebook"])}">{_banner(row)}{body}</section>')
    page = _page(summary, "\n".join(sections))
    target = out / REPORT_FILE
    partial = target.with_suffix(".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(target)
    return target


def _read_summary(out: Path) -> dict[str, Any]:
    try:
        return json.loads((out / SUMMARY_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        rows = [
            {"notebook": path.stem, "status": "unknown", "seconds": 0.0, "reason": ""}
            for path in sorted(out.glob("*.ipynb"))
        ]
        return {"profile": "", "parameters": {}, "time_utc": "", "rows": rows}


# --- one notebook -------------------------------------------------------------------------------------------------


def notebook_body(notebook: NotebookNode, name: str) -> str:
    """The cells as an HTML fragment without any reference to the outside. name: the notebook's, for its figures'."""
    notebook.cells = [cell for cell in notebook.cells if _ERROR_MARKER not in cell.metadata.get("tags", [])]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    for number, output in enumerate(outputs):
        output["data"] = _static(output["data"], f"{name}-{number}")
    notebook.metadata.pop("widgets", None)
    body, _ = _exporter().from_notebook_node(notebook)
    return _without_outside(body)


def _static(data: dict[str, Any], name: str) -> dict[str, Any]:
    """A display bundle in forms that need neither a kernel nor a front end; a figure in it is called `name`."""
    data = dict(data)
    figure, widget = data.pop(_PLOTLY_MIME, None), data.pop(_WIDGET_MIME, None)
    if figure is not None:
        data = {"text/html": figure_html(json.loads(figure) if isinstance(figure, str) else figure, name)}
    if widget is not None and "text/html" not in data:
        data = {"text/html": '<p class="note">An interactive control: open the notebook in JupyterLab to use it.</p>'}
    return data


def _exporter() -> Any:
    from nbconvert.exporters import HTMLExporter
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
    from traitlets.config import Config

    class MathmlRenderer(IPythonRenderer):
        """Formulas as MathML instead of TeX left for a script to find."""

        def block_math(self, body: str) -> str:
            return _mathml(body, "block")

        def inline_math(self, body: str) -> str:
            return _mathml(body, "inline")

        def latex_environment(self, name: str, body: str) -> str:
            return _mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", "block")

    class OfflineExporter(HTMLExporter):
        def default_filters(self):  # type: ignore[no-untyped-def]
            yield from super().default_filters()
            yield "markdown2html", _markdown

    def _markdown(source: str) -> str:
        return MarkdownWithMath(renderer=MathmlRenderer(escape=False, exclude_anchor_links=True)).render(source)

    settings = Config()
    settings.CSSHTMLHeaderPreprocessor.enabled = False
    return OfflineExporter(
        template_name="basic", config=settings, exclude_input_prompt=True, exclude_output_prompt=True
    )


def _mathml(tex: str, display: str) -> str:
    from latex2mathml.converter import convert

    return convert(tex.strip(), display=display)


def _without_outside(body: str) -> str:
    """Drop what would be fetched: scripts, styles, frames and pictures from elsewhere, and further copies of plotly.js
    (the page has its own). Links a reader may click stay."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(body, "html.parser")
    for tag in soup.find_all(["script", "link", "img", "iframe", "source", "video", "audio", "object", "embed"]):
        address = str(tag.get("src") or tag.get("href") or tag.get("data") or "")
        is_plotlyjs = tag.name == "script" and not tag.get("data-for") and len(tag.string or "") > 500_000
        if is_plotlyjs:
            tag.decompose()
        elif address.startswith(("http:", "https:", "//")):
            note = soup.new_tag("a", href=address)
            note.string = f"[left out, as it is not part of this page: {address}]"
            tag.replace_with(note)
    return str(soup)


# --- the page -----------------------------------------------------------------------------------------------------


def _banner(row: dict[str, Any]) -> str:
    if row["status"] in ("ok", "unknown"):
        return ""
    reason = f": {row['reason']}" if row["reason"] else ""
    return f'<p class="bad">{html.escape(row["status"] + reason)}. Shown as far as it came.</p>'


def _page(summary: dict[str, Any], sections: str) -> str:
    from pygments.formatters import HtmlFormatter

    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", "github-dark"))
    highlight = f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}"
    rows = "\n".join(_table_row(row) for row in summary["rows"])
    parameters = ", ".join(f"{name} = {value}" for name, value in summary["parameters"].items())
    about = [f"profile {summary['profile']}" if summary["profile"] else "", parameters, summary["time_utc"]]
    main = f"""<h1>Speculative decoding workbook: executed notebooks</h1>
<p class="note">{html.escape(" · ".join(part for part in about if part))}</p>
<table class="contents">
<thead><tr><th>notebook</th><th>status</th><th class="number">seconds</th><th>reason</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
{sections}"""
    title = "Speculative decoding workbook: report"
    return html_page(
        title, main, style=f"{highlight}\n{_STYLE}", has_figures="Plotly." in sections or "data-for=" in sections
    )


def _table_row(row: dict[str, Any]) -> str:
    name, status, reason = (html.escape(str(row[key])) for key in ("notebook", "status", "reason"))
    mark = "bad" if row["status"] in ("failed", "interrupted", "not run") else "good"
    return (
        f'<tr><td><a href="#{name}">{name}</a></td><td class="{mark}">{status}</td>'
        f'<td class="number">{row["seconds"]:.1f}</td><td>{reason}</td></tr>'
    )


_STYLE = """
table { border-collapse: collapse; margin: .8rem 0; font-size: .93em; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
.number, table.dataframe td { text-align: right; }
.good { color: var(--good); } .bad { color: var(--warn); font-weight: 600; }
pre { overflow-x: auto; margin: 0; font: 13.5px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .92em;
  overflow-wrap: anywhere; }
.code_cell { margin: .9rem 0; }
.input_area .highlight { background: var(--code); border-left: 3px solid var(--line); padding: .6rem .8rem; }
.output_area { padding: .4rem .8rem; overflow-x: auto; }
.output_html table:not([class]) :is(th, td) { border-color: var(--line) !important; }
.output_text pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.output_stderr, .output_error { border-left: 3px solid var(--warn); }
.rendered_html { overflow-x: auto; overflow-wrap: break-word; }
.rendered_html img { max-width: 100%; }
math[display="block"] { margin: .8rem 0; font-size: 1.1em; }
.ansi-red-fg, .ansi-red-intense-fg { color: var(--warn); }
.ansi-green-fg, .ansi-green-intense-fg { color: var(--good); }
.ansi-cyan-fg, .ansi-cyan-intense-fg, .ansi-blue-fg { color: var(--link); } .ansi-yellow-fg { color: var(--warn); }
.ansi-bold { font-weight: 600; }
@media (max-width: 640px) { .output_area { padding: .4rem 0; } table.contents { display: block; overflow-x: auto; } }
"""
