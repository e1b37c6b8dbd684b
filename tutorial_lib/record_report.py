"""One HTML page of records: tables, figures and provenance of every experiment in a folder, readable offline.

The page has everything inside (plotly.js, the figures' data, its styles) and may fetch nothing. It follows the
reader's light or dark setting and fits a phone: titles are text above the figures, wide tables scroll by themselves.
Simulated runs are marked wherever they appear. Everything out of a record is escaped, model text above all.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from .bench import energy, peers, spec_bench
from .bench.record_files import RecordFile, family, find
from .errors import OptionError
from .offline_page import figure_html, html_page
from .show import gpu_records, plots
from .show.load import plot_load
from .show.recorded import machine_words
from .show.tables import Table

MOST_MB = 8.0
Record = Mapping[str, Any]
NOT_COMPARED = ("value",)  # what a notebook's cell keeps for its replay is no experiment
# Kinds of which every line has the same form; any other is shown as a list of its plain values.
COMPARABLE = ("backend", "target", "dtype", "device", "batch_size", "sampling", "prompt_set")


@dataclass
class Section:
    """One experiment of one file. tables: shown at once; details: folded up below the figures."""

    title: str
    file: str
    is_simulated: bool = False
    notes: list[str] = field(default_factory=list)
    tables: list[tuple[str, Table]] = field(default_factory=list)
    details: list[tuple[str, Table]] = field(default_factory=list)
    figures: list[go.Figure] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)


def write_record_report(place: str | Path, out: str | Path) -> Path:
    """Write the report of the records below `place` to `out`, whole or not at all, and return its path. `OptionError`
    where there are none, and where the page would be larger than `MOST_MB`."""
    files = find(place)
    sections = [section for file in files for section in sections_of(file)]
    if not sections:
        raise OptionError(
            f"no record in {place} ({files[0].name}: {files[0].why_not or 'nothing to show'})",
            "at least one",
            "another",
        )
    page = page_of(sections, files)
    size_mb = len(page.encode()) / 1e6
    if size_mb > MOST_MB:
        raise OptionError(f"the report would have {size_mb:.1f} MB", f"at most {MOST_MB:g}", "report fewer records")
    target = Path(out).expanduser()
    partial = target.with_name(target.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(target)
    return target


# ---- one experiment -------------------------------------------------------------------------------------------------


def sections_of(file: RecordFile) -> list[Section]:
    """The experiments of a file, in its order."""
    shown = [record for record in file.records if record["kind"] not in NOT_COMPARED]
    found = []
    for name in dict.fromkeys(family(record) for record in shown):
        found.append(_section(name, file.name, [record for record in shown if family(record) == name]))
    return found


def _section(name: str, file: str, records: Sequence[Record]) -> Section:
    section = Section(name, file, any(record.get("is_simulated") for record in records))
    section.details.append(("where this is from", provenance_table(records)))
    runs = [record for record in records if record["kind"] == "run"]
    for group in comparable(runs):
        _add_runs(section, group)
    for record in records:
        _add_other(section, record)
    loads = [record for record in records if record["kind"] == "load"]
    if loads:
        _add_loads(section, loads)
    _add_predictions(section, runs, records)
    return section


def provenance_table(records: Sequence[Record]) -> Table:
    """Machine, time, revision, command and software of the records that say it: one row for every origin."""
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        origin = record.get("provenance") or {}
        hardware = origin.get("hardware") or {}
        device = record.get("device") or ("cuda" if hardware.get("gpus") else "cpu")
        row = {
            "machine": machine_words(hardware, device),
            "measured": origin.get("time_utc"),
            "revision": str(origin.get("git_revision") or "not known")[:12],
            "command": origin.get("command") or None,
            "software": ", ".join(f"{name} {version}" for name, version in (origin.get("versions") or {}).items()),
        }
        rows[json.dumps([row["machine"], row["revision"], row["command"]])] = row
    return Table(rows.values())


def comparable(runs: Sequence[Record]) -> list[list[Record]]:
    """Runs that one figure may show together: of one target and machine, over the same prompts. Engines may differ."""
    groups: dict[str, list[Record]] = {}
    for run in runs:
        origin = (run.get("provenance") or {}).get("hardware") or {}
        key = [run.get(name) for name in COMPARABLE if name not in ("backend", "dtype")]
        groups.setdefault(json.dumps([key, origin.get("cpu"), origin.get("gpus")], sort_keys=True), []).append(run)
    return list(groups.values())


def _add_runs(section: Section, runs: Sequence[Record]) -> None:
    section.tables.append(("runs", runs_table(runs)))
    costs = energy.cost_rows(runs, [html.unescape(plots.label_of(r, runs)) for r in runs], None)
    if any(row["J per output token"] != "not available" for row in costs):
        kept = [{k: v for k, v in row.items() if not k.startswith("price")} for row in costs]
        section.details.append(("energy", Table(kept)))
    if len(runs) > 1:
        section.figures += figures_of(runs)


def runs_table(runs: Sequence[Record]) -> Table:
    rows = []
    for run in runs:
        figures = run["figures"]
        spread = [f["output_tok_s"] for f in run.get("repeat_figures") or [] if f.get("output_tok_s")]
        is_plain = run["method"] == "plain"
        forced = "forced" if run.get("is_simulated") else "real"
        rows.append(
            {
                "run": html.unescape(plots.label_of(run, runs)),
                "engine": run.get("backend"),
                "output tokens / s": figures.get("output_tok_s"),
                "lowest … highest repeat": f"{min(spread):.2f} … {max(spread):.2f}" if len(spread) > 1 else None,
                "speed-up": None if is_plain else plots.speedup(run, runs),
                "acceptance length": None if is_plain else figures.get("acceptance_length"),
                "acceptance": None if is_plain else forced,
                "TTFT, s": figures.get("ttft_s"),
                "TPOT, ms": figures.get("tpot_ms"),
                "price of 1e6 tokens": (run.get("price") or {}).get("price_per_million_output_tokens"),
            }
        )
    empty = [name for name in rows[0] if all(row[name] is None for row in rows)]
    if len({row["engine"] for row in rows}) == 1:
        empty.append("engine")
    return Table({k: v for k, v in row.items() if k not in empty} for row in rows)


def figures_of(runs: Sequence[Record]) -> list[go.Figure]:
    """The figures that these runs have data for."""
    drafted = [run for run in runs if run["method"] != "plain"]
    sped_up = [run for run in drafted if plots.speedup(run, runs) is not None]
    categories = {c for run in sped_up for c in run.get("by_category") or {}}
    lens = [(run["method"], run["max_draft_len"]) for run in drafted]
    is_sweep = len(set(lens)) == len(lens) and len(set(lens)) > len({method for method, _ in lens})
    few = len(runs) <= 5
    wanted: list[tuple[bool, Callable[[Sequence[Record]], go.Figure]]] = [
        (True, plots.plot_throughput),
        (bool(sped_up), plots.plot_speedup),
        (len(categories) > 1 and few, plots.plot_speedup_by_category),
        (len(categories) > 1 and not few, plots.plot_methods_by_category),
        (any(run["figures"].get("acceptance_by_position") for run in drafted), plots.plot_acceptance_by_position),
        (any(run["figures"].get("accepted_histogram") for run in drafted) and few, plots.plot_accepted_histogram),
        (any(plots.figure_of(run, "verify_ms_per_round") for run in runs), plots.plot_round_time),
        (any(plots.figure_of(run, "latency_s") for run in runs), plots.plot_latency),
        (is_sweep and bool(sped_up), plots.plot_draft_len_sweep),
        (len({run["method"] for run in drafted}) > 3, plots.plot_cost_and_acceptance),
    ]
    return [draw(runs) for is_wanted, draw in wanted if is_wanted]


def _add_loads(section: Section, loads: Sequence[Record]) -> None:
    rows = [
        {name: record.get(name) for name in ("backend", "method", "batching", "concurrency", "rate")}
        | {name: value for name, value in record["figures"].items() if isinstance(value, (int, float))}
        for record in loads
    ]
    section.tables.append(("under load", Table(rows)))
    section.figures.append(plot_load(loads))


def _add_predictions(section: Section, runs: Sequence[Record], records: Sequence[Record]) -> None:
    for record in records:
        summary = record.get("summary")
        if not runs or not isinstance(summary, Mapping) or not isinstance(summary.get("by_category"), Mapping):
            continue
        method = str(summary["method"]).partition(" K=")[0]
        points = [
            {"label": c, "method": method, "predicted": f["predicted_speedup"], "measured": f["speedup"]}
            for c, f in summary["by_category"].items()
            if f.get("predicted_speedup") is not None
        ]
        if points:
            section.figures.append(plots.plot_predicted_speedup(points, runs))


def _add_other(section: Section, record: Record) -> None:
    """Records that are no runs: each in the form that suits its kind."""
    kind = record["kind"]
    if kind in ("run", "load"):
        return
    if kind == "generation":
        section.texts.append((f"prompt: {record.get('prompt', '')}", _generated(record)))
        section.tables.append(("figures", _plain_values(record.get("figures") or {})))
    elif kind == "summary":
        _add_summary(section, record.get("summary") or {})
    elif kind == "steps" and record.get("step_ms"):
        times = {int(rows): 1e-3 * ms for rows, ms in record["step_ms"].items() if ms is not None}
        where = machine_words((record.get("provenance") or {}).get("hardware") or {}, "cuda")
        section.figures.append(plots.plot_step_times({str(record.get("model") or record.get("of")): times}, where))
    elif kind == "breakdown":
        section.details.append(
            (f"where the time goes: {record['of']}", gpu_records.breakdown_table([record], record["of"]))
        )
    else:
        section.details.append((_kind_words(record), _plain_values(record)))


def _generated(record: Record) -> str:
    return "(simulated: no text is shown)" if record.get("is_simulated") else str(record.get("text", ""))


def _add_summary(section: Section, summary: Mapping[str, Any]) -> None:
    if "entries" in summary:
        section.tables.append(("engines side by side", Table(peers.describe(summary))))
        if best := summary.get("best"):
            section.tables.append(
                ("each engine at its own best K", Table(peers.describe_best(best, summary["reference"])))
            )
    elif summary:
        section.details.append(("summary", _plain_values(summary)))
    if "spec_bench" in summary:
        section.notes += spec_bench.describe(summary["spec_bench"])
    section.notes += [str(note) for note in summary.get("notes") or []]


def _kind_words(record: Record) -> str:
    of = record.get("of") or record.get("model") or ""
    return f"{record['kind']}{', ' + str(of) if of else ''}"


def _plain_values(content: Mapping[str, Any]) -> Table:
    """Numbers and short words of a record, nested ones by their path; long lists, prose and provenance are left out."""
    left_out = (
        "provenance", "definitions", "kind", "notes", "figures", "differences", "spec_bench", "tactics", "products",
        "experiment", "profile",
    )  # fmt: skip
    rows = [{"what": path, "value": _short(value)} for path, value in _leaves(content, left_out) if _is_short(value)]
    return Table(rows[:60] or [{"what": "nothing", "value": "that a table could show"}])


def _leaves(content: Mapping[str, Any], left_out: Sequence[str], path: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in content.items():
        if key in left_out:
            continue
        here = f"{path} · {key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, left_out, here)
        elif not isinstance(value, list) or not any(isinstance(item, (list, Mapping)) for item in value):
            yield here.replace("_", " "), value


def _is_short(value: Any) -> bool:
    return value is not None and len(_short(value)) <= 200


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_short, value)) if isinstance(value, list) else str(value)


# ---- the page -------------------------------------------------------------------------------------------------------


def page_of(sections: Sequence[Section], files: Sequence[RecordFile]) -> str:
    """The whole page as text."""
    numbers = {id(section): f"e{number}" for number, section in enumerate(sections, start=1)}
    links = "".join(
        f'<li><a href="#{numbers[id(s)]}">{html.escape(s.title)}</a> <span class="note">{html.escape(s.file)}</span>'
        f"{_badge(s)}</li>"
        for s in sections
    )
    body = "\n".join(_section_html(section, numbers[id(section)]) for section in sections)
    skipped = [file for file in files if file.why_not]
    left = "".join(f"<li>{html.escape(f.name)}: {html.escape(f.why_not)}</li>" for f in skipped)
    left = f'<section><h2>Files without records</h2><ul class="note">{left}</ul></section>' if left else ""
    count = sum(len(section.figures) for section in sections)
    main = f"""<h1>Speculative decoding workbook: records</h1>
<p class="note">{len(sections)} experiments, {count} figures. Figures of different machines, models or prompts stand in
groups of their own and are not to be compared.</p>
<ul class="contents">{links}</ul>
{body}
{left}"""
    return html_page("Speculative decoding workbook: records", main, style=_STYLE, has_figures=count > 0)


def _badge(section: Section) -> str:
    return ' <b class="simulated">simulated</b>' if section.is_simulated else ""


def _section_html(section: Section, name: str) -> str:
    parts = [f'<section id="{name}"><h2>{html.escape(section.title)}{_badge(section)}</h2>']
    if section.is_simulated:
        parts.append(
            '<p class="simulated">Acceptance was forced or weights are random: times are real, text and acceptance are '
            "not.</p>"
        )
    parts += [f"<h3>{html.escape(heading)}</h3>{_table_html(table)}" for heading, table in section.tables]
    parts += [f"<h3>{html.escape(heading)}</h3><pre>{html.escape(text)}</pre>" for heading, text in section.texts]
    parts += [figure_html(json.loads(figure.to_json()), f"{name}f{i}") for i, figure in enumerate(section.figures)]
    parts += [
        f"<details><summary>{html.escape(heading)}</summary>{_table_html(table)}</details>"
        for heading, table in section.details
    ]
    if section.notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in section.notes)
        parts.append(f'<ul class="note">{items}</ul>')
    return "\n".join([*parts, "</section>"])


def _table_html(table: Table) -> str:
    return f'<div class="wide">{table._repr_html_()}</div>'


_STYLE = """
h3 { margin-bottom: .3rem; }
.simulated { color: var(--warn); }
b.simulated { font-size: .75em; border: 1px solid; border-radius: .4em; padding: .05em .45em; white-space: nowrap; }
.wide { overflow-x: auto; }
.wide table { font-size: .9em; }
.wide th, .wide td { border-color: var(--line) !important; }
.wide td:first-child { white-space: nowrap; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--link); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line); padding-left: .8rem; }
@media (max-width: 640px) {
  .wide th, .wide td { padding: .2em .5em !important; }
  .wide td:first-child { white-space: normal; }
}
"""
