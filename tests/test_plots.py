"""Figures from hand-made records: what the titles claim, what stays visible, and that a notebook shows them offline."""

from __future__ import annotations

import math
import re
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from tutorial_lib.show import plots

CATEGORIES = ("chat", "code", "translation")


def record(method="plain", *, k=0, tok_s=20.0, by_category=None, **changes):
    """One record of the measured kind; `changes` replace top-level fields, `figures={...}` single figures."""
    is_plain = method == "plain"
    figures = {
        "output_tok_s": tok_s,
        "ttft_s": 0.1,
        "latency_s": 64 / tok_s,
        "acceptance_length": None if is_plain else 2.5,
        "draft_ms_per_round": None if is_plain else 12.0,
        "verify_ms_per_round": 45.0 if is_plain else 55.0,
        "overhead_ms_per_round": 1.0,
        "round_ms": 46.0 if is_plain else 68.0,
        "acceptance_by_position": None if is_plain else [0.8, 0.5, 0.3, 0.1],
        "accepted_histogram": None if is_plain else [20, 30, 20, 20, 10],
    }
    figures.update(changes.pop("figures", {}))
    rates = by_category or dict.fromkeys(CATEGORIES, tok_s)
    run = {
        "kind": "run",
        "method": method,
        "backend": "torch",
        "target": "embedded:target",
        "drafter": None,
        "dtype": "float32",
        "device": "cpu",
        "max_draft_len": k,
        "batch_size": 1,
        "sampling": {"max_tokens": 64, "temperature": None},
        "prompt_set": {"name": "bundled", "sha256": "0" * 64, "count": 8},
        "figures": figures,
        "by_category": {c: {"output_tok_s": v} for c, v in rates.items()},
        "repeat_figures": [{"output_tok_s": tok_s * f} for f in (0.95, 1.0, 1.1)] if tok_s else [],
        "provenance": {"hardware": {"cpu": "Test CPU", "cores": 2, "gpus": []}},
    }
    return {**run, **changes}


def three_runs():
    slower = {"chat": 30.0, "code": 40.0, "translation": 18.0}
    return [
        record(),
        record("draft_target", k=4, tok_s=30.0, by_category=slower),
        record("ngram", k=4, tok_s=19.0),
    ]


def title(figure):
    return figure.layout.title.text


def shown_text(figure):
    return " ".join(str(note.text) for note in figure.layout.annotations)


ALL_PLOTS = [
    plots.plot_throughput,
    plots.plot_speedup,
    plots.plot_speedup_by_category,
    plots.plot_methods_by_category,
    plots.plot_cost_and_acceptance,
    plots.plot_acceptance_by_position,
    plots.plot_accepted_histogram,
    plots.plot_draft_len_sweep,
    plots.plot_round_time,
    plots.plot_latency,
]


@pytest.mark.parametrize("plot", ALL_PLOTS)
def test_every_figure_has_a_finding_axes_with_units_and_its_workload(plot):
    figure = plot(three_runs())
    assert len(title(figure)) > 20
    axes = f"{figure.layout.xaxis.title.text} {figure.layout.yaxis.title.text}"
    assert re.search(r"tokens / s|×|share|\(ms\)|\(s\)", axes), axes
    subtitle = figure.layout.title.subtitle.text
    assert "embedded:target" in subtitle and "Test CPU" in subtitle and "greedy" in subtitle


@pytest.mark.parametrize("plot", ALL_PLOTS)
def test_a_run_that_failed_is_a_gap_and_not_an_error(plot):
    failed = record("draft_target", k=4, figures={"latency_s": None, "output_tok_s": math.nan})
    failed["figures"].update(dict.fromkeys(("acceptance_length", "verify_ms_per_round"), math.nan))
    failed["by_category"] = {}
    assert len(title(plot([record(), failed]))) > 10


def test_throughput_title_names_the_fastest_and_its_factor():
    assert title(plots.plot_throughput(three_runs())) == ("Fastest is draft model: 30 output tokens / s, 1.50× plain")
    losing = [record(), record("ngram", k=4, tok_s=15.0)]
    assert "no drafter pays" in title(plots.plot_throughput(losing))


def test_speedup_is_against_the_fastest_plain_run_of_the_same_engine():
    runs = [
        record(tok_s=20.0),
        record(tok_s=25.0, experiment="packed weights"),
        record(tok_s=5.0, backend="transformers"),
        record("draft_target", k=4, tok_s=50.0),
    ]
    assert plots.speedup(runs[-1], runs) == pytest.approx(2.0)
    assert plots.speedup(record("ngram", backend="vllm"), runs) is None
    other_prompts = {"name": "mine", "sha256": "1" * 64, "count": 8}
    assert plots.speedup(record("ngram", prompt_set=other_prompts), runs) is None


def test_speedup_figures_draw_the_line_at_one_and_values_below_it():
    figure = plots.plot_speedup_by_category(three_runs())
    assert any(shape.y0 == shape.y1 == 1.0 for shape in figure.layout.shapes)
    draft = next(trace for trace in figure.data if trace.name == "draft model")
    assert dict(zip(draft.x, draft.y, strict=True))["translation"] == pytest.approx(0.9)
    assert draft.x[0] == "code"  # best first
    assert "2 of 6" in title(figure) and "0.90× (translation)" in title(figure)


def test_same_method_looks_the_same_in_every_figure():
    runs = three_runs()
    colors = set()
    for plot in (plots.plot_throughput, plots.plot_speedup, plots.plot_speedup_by_category):
        colors |= {t.marker.color for t in plot(runs).data if t.name == "draft model"}
    lines = [plots.plot_acceptance_by_position(runs), plots.plot_draft_len_sweep(runs)]
    for figure in lines:
        trace = next(t for t in figure.data if t.name.startswith("draft model"))
        colors.add(trace.line.color)
        assert (trace.line.dash, trace.marker.symbol) == ("dash", "square")
    assert colors == {plots.METHODS["draft_target"].color}
    styles = plots.METHODS.values()
    for feature in ("color", "symbol", "dash"):
        assert len({getattr(style, feature) for style in styles}) == len(styles), feature
    other = plots.method_style("eagle3_fixed16")
    assert (other.label, other.color) == ("EAGLE-3 tree, 16 fixed", plots.METHODS["eagle3_fixed15"].color)
    assert plots.method_style("eagle3_dynamic60").label == "EAGLE-3 tree, 60 dynamic"
    assert plots.method_style("magic").label == "magic"


def test_another_backend_is_told_apart_without_colour():
    figure = plots.plot_throughput([record(), record(backend="transformers", tok_s=10.0)])
    assert figure.data[0].marker.pattern.shape != figure.data[1].marker.pattern.shape
    assert [trace.x[0] for trace in figure.data] == ["plain decoding, torch", "plain decoding, transformers"]


@pytest.mark.parametrize("missing", [None, math.nan, np.float64("nan"), math.inf])
def test_stacked_bars_survive_a_missing_value(missing):
    """plotly.js drops or misplaces the whole stack when it meets NaN; a gap must be null and be said."""
    good = record("draft_target", k=4, figures={"draft_ms_per_round": 5.0, "verify_ms_per_round": 10.0})
    bad = record("ngram", k=4, figures={"draft_ms_per_round": 7.0, "verify_ms_per_round": missing})
    figure = plots.plot_round_time([good, bad])
    stacks = {trace.name: list(trace.x) for trace in figure.data}
    assert stacks["draft"] == [5.0, 7.0] and stacks["verify"] == [10.0, None]
    assert "no value: verify" in shown_text(figure)
    assert not re.search(r"NaN|Infinity", figure.to_json())
    assert figure.layout.barmode == "stack"


def test_zero_acceptance_stays_visible_on_a_log_axis():
    run = record("ngram", k=4, figures={"acceptance_by_position": [0.6, 0.3, 0.0, None]})
    figure = plots.plot_acceptance_by_position([run], log_y=True)
    assert figure.layout.yaxis.type == "log"
    drawn = figure.data[0].y
    assert all(value > 0 for value in drawn[:3]) and drawn[3] is None
    assert 10 ** figure.layout.yaxis.range[0] < drawn[2] < 0.3
    assert "0 %" in shown_text(figure) and "no value" in shown_text(figure)
    assert list(figure.data[0].customdata)[2] == 0.0  # the hover text tells the true value


def many_runs():
    """Plain, five methods, one of them missing its times."""
    lines = (("draft_target", 30.0, 40.0, 0.6), ("ngram", 24.0, 0.05, 0.3), ("eagle3", 36.0, 9.0, 0.7))
    runs = [
        record(
            method, k=5, tok_s=tok_s, by_category={"chat": tok_s, "code": 60.0 - tok_s},
            figures={"draft_ms_per_round": draft, "acceptance_by_position": [first, first / 2]},
        )
        for method, tok_s, draft, first in lines
    ]  # fmt: skip
    unknown = record("medusa", k=3, by_category={}, figures={"draft_ms_per_round": None, "output_tok_s": None})
    return [record(by_category={"chat": 20.0, "code": 20.0}), *runs, unknown]


def test_acceptance_of_many_methods_names_the_ends_of_the_first_position():
    figure = plots.plot_acceptance_by_position(many_runs()[:4] + [record("suffix", k=5)])
    shown = title(figure).replace("<br>", " ")
    assert shown == "The first draft token is accepted in 80% (suffix lookup) down to 30% (n-gram lookup) of the drafts"


def test_training_names_what_was_won_and_shows_both_panels():
    points = [
        {"step": 0, "seconds": 0.0, "loss": None, "agreement": 0.02, "acceptance_length": 1.03},
        {"step": 80, "seconds": 20.2, "loss": 1.1, "agreement": 0.37, "acceptance_length": 1.5},
    ]
    figure = plots.plot_training({"draft_target": points, "medusa": points}, "a <machine>")
    assert "draft model from 1.03 to 1.50 tokens a round in 20 s; Medusa heads" in title(figure).replace("<br>", " ")
    assert figure.layout.title.subtitle.text == "trained on a &lt;machine&gt;"
    losses, lengths = figure.data[:2]
    assert list(losses.y) == [None, 1.1] and list(lengths.y) == [1.03, 1.5] and lengths.line.color == "#0072B2"
    assert [trace.showlegend for trace in figure.data] == [False, True, False, True]
    assert title(plots.plot_training({}, "x")) == "Nothing was trained"


def test_methods_by_category_are_rows_with_the_fastest_on_top_and_the_same_columns():
    figure = plots.plot_methods_by_category(many_runs())
    assert [trace.name for trace in figure.data] == ["EAGLE-3 chain", "draft model", "n-gram lookup"]
    assert all(list(trace.x) == list(figure.data[0].x) for trace in figure.data)
    assert dict(zip(figure.data[2].x, figure.data[2].y, strict=True)) == pytest.approx({"chat": 1.2, "code": 1.8})
    shown = title(figure).replace("<br>", " ")
    assert shown == "Fastest over all prompts: EAGLE-3 chain, 1.80×. Categories won: EAGLE-3 chain 1, n-gram lookup 1"
    assert sum(shape.y0 == 1.0 for shape in figure.layout.shapes) == 3
    losing = [record(), record("ngram", k=5, tok_s=10.0)]
    assert "No method beats plain decoding" in title(plots.plot_methods_by_category(losing))


def test_cost_and_acceptance_marks_every_method_and_draws_the_break_even():
    figure = plots.plot_cost_and_acceptance(many_runs())
    marks = {trace.name: trace for trace in figure.data if trace.mode != "lines"}
    assert list(marks) == ["n-gram lookup, 1.20×", "EAGLE-3 chain, 1.80×", "draft model, 1.50×"]  # Medusa has no time
    assert marks["EAGLE-3 chain, 1.80×"].marker.symbol == "star"
    (curve,) = [trace for trace in figure.data if trace.name == "1×, cost model"]
    for draft, length in zip(curve.x, curve.y, strict=True):
        assert length == pytest.approx((draft + 56.0) / 46.0)  # verify + overhead of a round, over a plain step
    assert "cheapest: n-gram lookup" in title(figure).replace("<br>", " ")


def test_a_zero_cost_stays_on_the_logarithmic_axis():
    runs = [record(), record("ngram", k=5, figures={"draft_ms_per_round": 0.0}), record("draft_target", k=5)]
    drawn = [t for t in plots.plot_cost_and_acceptance(runs).data if t.mode != "lines"]
    assert all(t.x[0] > 0 for t in drawn) and 0.0 in [t.customdata[0] for t in drawn]


def test_acceptance_of_one_method_names_its_best_and_worst_category():
    run = record("ngram", k=4)
    run["by_category"] = {"chat": {"acceptance_length": 1.2}, "code": {"acceptance_length": 3.0}}
    figure = plots.plot_acceptance_of(run)
    assert title(figure) == "n-gram lookup: 2.50 tokens a round, from 3.00 (code) to 1.20 (chat)"
    assert list(figure.data[1].x) == ["code", "chat"] and list(figure.data[0].y) == [0.8, 0.5, 0.3, 0.1]
    assert "no acceptance was measured" in title(plots.plot_acceptance_of({**run, "by_category": {}}))


def test_histogram_shows_shares_and_the_acceptance_length():
    figure = plots.plot_accepted_histogram(three_runs())
    assert list(figure.data[0].y) == pytest.approx([0.2, 0.3, 0.2, 0.2, 0.1])
    assert "bonus included" in title(figure) and "draft model 2.50" in title(figure)


def test_sweep_names_the_best_k_and_draws_the_model_beside_it():
    runs = [record()] + [record("draft_target", k=k, tok_s=v) for k, v in ((2, 26.0), (4, 30.0), (8, 22.0))]
    figure = plots.plot_draft_len_sweep(runs, predicted={1: 1.1, 2: 1.25, 4: 1.52, 8: 1.15})
    assert title(figure) == "The draft model pays most at K = 4: 1.50×"
    assert [trace.name for trace in figure.data] == ["draft model, measured", "cost model"]
    runs[1:] = [record("draft_target", k=2, tok_s=10.0)]
    assert "does not pay" in title(plots.plot_draft_len_sweep(runs))


def test_step_times_are_one_line_per_engine_and_the_title_says_what_rows_cost():
    figure = plots.plot_step_times({"float32": {1: 0.030, 5: 0.036}, "int8": {1: 0.02, 5: None}}, "Test CPU")
    assert title(figure) == "What more rows cost: float32 1.20× (5 rows against 1)"
    assert list(figure.data[0].y) == pytest.approx([30, 36]) and list(figure.data[1].y)[1] is None
    assert figure.data[0].line.dash != figure.data[1].line.dash and "Test CPU" in figure.layout.title.subtitle.text


def test_latency_parts_add_up_to_the_latency():
    runs = three_runs()
    figure = plots.plot_latency(runs)
    for position, run in enumerate(runs):
        total = sum(trace.x[position] or 0 for trace in figure.data)
        assert total == pytest.approx(run["figures"]["latency_s"])


def test_prediction_title_counts_what_lies_within_ten_percent():
    points = [
        {"label": "chat", "method": "draft_target", "predicted": 1.5, "measured": 1.45},
        {"label": "code", "method": "draft_target", "predicted": 1.0, "measured": 1.5},
        {"label": "none", "method": "ngram", "predicted": None, "measured": 1.5},
    ]
    figure = plots.plot_predicted_speedup(points, three_runs())
    assert title(figure) == "The cost model is within 10 % in 1 of 2 cases (largest error 33%)"


def test_names_from_records_cannot_inject_markup():
    run = record("draft_target", k=4, target="<b onclick=x>evil</b>", by_category={"<img src=x>": 30.0})
    base = record(target="<b onclick=x>evil</b>", by_category={"<img src=x>": 20.0})
    text = plots.plot_speedup_by_category([base, run]).to_json()
    assert "<img" not in text and "<b onclick" not in text


def test_png_export_without_kaleido_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    said = []
    assert plots.save_png(plots.plot_speedup(three_runs()), tmp_path / "a.png", say=said.append) is None
    assert "kaleido" in said[0]


def test_png_export_that_hangs_is_given_up(tmp_path, monkeypatch):
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "executable", str(slow))
    said = []
    assert plots.save_png(plots.plot_speedup(three_runs()), tmp_path / "a.png", timeout_s=0.3, say=said.append) is None
    assert "did not finish" in said[0]


def test_figures_of_an_executed_notebook_need_no_network(tmp_path):
    """Executes two figures in a real kernel and exports HTML: plotly.js once, both figures, no address loaded."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    nbconvert = pytest.importorskip("nbconvert")
    setup = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_plots import three_runs\nfrom tutorial_lib.show import plots\nplots.set_renderer()"
    )
    sources = [setup, "plots.plot_throughput(three_runs())", "plots.plot_speedup(three_runs())"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    for cell in notebook.cells[1:]:
        bundle = cell.outputs[0]["data"]
        assert "application/vnd.plotly.v1+json" in bundle and "Plotly.newPlot" in bundle["text/html"]
        assert len(bundle["text/html"]) < 50_000
    scripts = [o for cell in notebook.cells for o in cell.outputs if 'id="workbook-plotlyjs"' in str(o)]
    assert len(scripts) == 1
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert page.count('id="workbook-plotlyjs"') == 1 and page.count("Plotly.newPlot(") >= 2
    outputs = "".join(str(o) for cell in notebook.cells[1:] for o in cell.outputs)
    assert not re.search(r"<script[^>]+src=|<link[^>]+href=", outputs)


def test_simulated_runs_say_so_under_the_title():
    def subtitle(**changes):
        return plots.plot_throughput([record(**changes)]).layout.title.subtitle.text

    assert "simulated" not in subtitle()
    assert "simulated acceptance</b>, times measured on" in subtitle(is_simulated=True)
    assert "stand-in of the library: nothing was computed" in subtitle(is_simulated=True, device="stand-in")
    assert "measured on" not in subtitle(is_simulated=True, device="stand-in")
