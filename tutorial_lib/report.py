"""One HTML page of all executed notebooks that needs no network: figures, formulas and styles are inside.

nbconvert renders the cells. What it would fetch from a CDN is replaced: plotly.js is embedded once for all figures,
formulas become MathML, which browsers draw themselves, and a content security policy forbids every outside request,
so that a forgotten one cannot go unnoticed. Knows nothing of how notebooks were run. `html_page` is the frame of the
report of records too (`record_report`).
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import OptionError

if TYPE_CHECKING:
    from nbformat import NotebookNode

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
_PLOTLY_MIME = "application/vnd.plotly.v1+json"
_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
_ERROR_MARKER = "papermill-error-cell-tag"  # papermill's own notices; the page has its banner
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; media-src data:"
)


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
            body = notebook_body(nbformat.read(path, as_version=4))
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


def notebook_body(notebook: NotebookNode) -> str:
    """The cells as an HTML fragment without any reference to the outside."""
    notebook.cells = [cell for cell in notebook.cells if _ERROR_MARKER not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "data" in output:
                output["data"] = _static(output["data"])
    notebook.metadata.pop("widgets", None)
    body, _ = _exporter().from_notebook_node(notebook)
    return _without_outside(body)


def _static(data: dict[str, Any]) -> dict[str, Any]:
    """A display bundle in forms that need neither a kernel nor a front end."""
    data = dict(data)
    figure, widget = data.pop(_PLOTLY_MIME, None), data.pop(_WIDGET_MIME, None)
    if figure is not None and "text/html" not in data:
        from plotly.io import to_html

        spec = json.loads(figure) if isinstance(figure, str) else dict(figure)
        options = {"include_plotlyjs": False, "full_html": False, "validate": False, "default_height": 450}
        data["text/html"] = to_html(spec, config=spec.pop("config", None), **options)
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
        is_plotlyjs = tag.name == "script" and len(tag.string or "") > 500_000
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

    highlight = HtmlFormatter(style="default").get_style_defs(".highlight")
    rows = "\n".join(_table_row(row) for row in summary["rows"])
    parameters = ", ".join(f"{name} = {value}" for name, value in summary["parameters"].items())
    about = [f"profile {summary['profile']}" if summary["profile"] else "", parameters, summary["time_utc"]]
    main = f"""<h1>Speculative decoding workbook: executed notebooks</h1>
<p class="note">{html.escape(" · ".join(part for part in about if part))}</p>
<table>
<thead><tr><th>notebook</th><th>status</th><th class="number">seconds</th><th>reason</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
{sections}"""
    title = "Speculative decoding workbook: report"
    return html_page(title, main, style=f"{highlight}\n{_STYLE}", has_figures="Plotly." in sections)


def html_page(title: str, main: str, *, style: str, has_figures: bool) -> str:
    """A whole page around `main`, plotly.js inside where there are figures; it may fetch nothing at all."""
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
{style}
</style>
<script>window.PlotlyConfig = {{MathJaxConfig: "local"}};</script>
{plotlyjs}
</head>
<body>
<main>
{main}
</main>
</body>
</html>
"""


def _table_row(row: dict[str, Any]) -> str:
    name, status, reason = (html.escape(str(row[key])) for key in ("notebook", "status", "reason"))
    mark = "bad" if row["status"] in ("failed", "interrupted", "not run") else "good"
    return (
        f'<tr><td><a href="#{name}">{name}</a></td><td class="{mark}">{status}</td>'
        f'<td class="number">{row["seconds"]:.1f}</td><td>{reason}</td></tr>'
    )


_STYLE = """
body { margin: 0; background: #f4f4f2; color: #222; font: 16px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 2rem 4rem; background: #fff; }
section { border-top: 4px solid #0072b2; margin-top: 3rem; padding-top: .5rem; }
h1, h2, h3 { line-height: 1.25; }
a { color: #0059a0; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .93em; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
.number, table.dataframe td { text-align: right; }
.good { color: #00704f; } .bad { color: #a8330a; font-weight: 600; } .note { color: #555; }
pre { overflow-x: auto; margin: 0; font: 13.5px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .92em; }
.code_cell { margin: .9rem 0; }
.input_area .highlight { background: #f7f7f7; border-left: 3px solid #bbb; padding: .6rem .8rem; }
.output_area { padding: .4rem .8rem; overflow-x: auto; }
.output_text pre { white-space: pre-wrap; }
.output_stderr { background: #fff4ec; }
.output_error { background: #fdeeee; }
.rendered_html img { max-width: 100%; }
math[display="block"] { margin: .8rem 0; font-size: 1.1em; }
.ansi-red-fg, .ansi-red-intense-fg { color: #a8330a; } .ansi-green-fg, .ansi-green-intense-fg { color: #00704f; }
.ansi-cyan-fg, .ansi-cyan-intense-fg, .ansi-blue-fg { color: #0059a0; } .ansi-yellow-fg { color: #7a5200; }
.ansi-bold { font-weight: 600; }
@media print { main { max-width: none; } section { break-before: page; } }
"""
