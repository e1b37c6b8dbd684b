"""What notebook 07 shows of the cost model: titles from data, every point drawn, sliders that change the answer."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tutorial_lib.bench import evidence
from tutorial_lib.plan import GPUS
from tutorial_lib.show import predictions, what_if, widgets

CEILINGS = predictions.recorded_ceilings()
START = {"GPU": "H200", "target": "llama-3.3-70b", "drafter": "llama-3.2-1b", "alpha": 0.82, "K": 5, "batch": 1}


@pytest.fixture(scope="module")
def points():
    return predictions.recorded_points()


def test_the_figure_draws_every_point_and_its_title_is_computed(points):
    figure = predictions.plot_predictions(points)
    for panel, source in (("x", "from_steps"), ("x2", "from_hardware")):
        marks = [trace for trace in figure.data if trace.mode == "markers" and trace.xaxis == panel]
        assert sum(len(trace.x) for trace in marks) == sum(getattr(p, source) is not None for p in points)
    found = evidence.errors(points)
    title = figure.layout.title.text.replace("<br>", " ")
    assert title.startswith(f"All {len(points)} recorded speed-ups") and f"{found.median:.1%}" in title
    alone = evidence.errors(points, "from_hardware")
    assert f"{alone.count} of them from the hardware alone to {alone.median:.1%}" in title and alone.count < len(points)
    worse = [replace(p, from_steps=2 * p.measured) for p in points]
    assert "100.0% (median)" in predictions.plot_predictions(worse).layout.title.text.replace("<br>", " ")
    nothing = [replace(p, from_steps=None, from_hardware=None) for p in points]
    assert "Nothing" in predictions.plot_predictions(nothing).layout.title.text


def test_the_table_counts_every_point_once_and_says_whose_rounds_told_the_hosts_turn(points):
    rows = predictions.predictions_table(points).rows
    assert sum(row["points"] for row in rows) == len(points)
    assert {row["acceptance"] for row in rows if row["session"] == "70b-1b"} == {"forced"}
    for row in rows:
        on_host = row["session"] == "methods" and row["method"] in ("suffix lookup", "lookahead")
        assert bool(row["host's turn"]) == on_host == (row["hardware: worst, %"] is None)
    worst = max(row["steps: worst, %"] for row in rows)
    assert worst == pytest.approx(100 * evidence.errors(points).worst)


def speedup_of(**changes) -> float:
    page = what_if.what_if_view(CEILINGS, **{**START, **changes})
    return float(re.search(r"<b>([\d.]+)× plain", page)[1])


def test_every_control_changes_the_answer_the_right_way():
    start = speedup_of()
    assert start == pytest.approx(173.66 / 55.78, rel=0.06)  # what was recorded of this pair, K and probability
    assert speedup_of(alpha=0.4) < start < speedup_of(alpha=0.96)
    assert speedup_of(target="llama-3.1-8b") < start < speedup_of(drafter=what_if.LOOKUP)
    assert speedup_of(batch=128) < start and speedup_of(K=1) < start
    assert speedup_of(GPU="L40S") > start  # slower memory, same launches
    page = what_if.what_if_view(CEILINGS, **{**START, "GPU": "A100-80GB"})
    assert "bfloat16" in page and "It does not fit" in page and "A100 data sheet" in page
    losing = what_if.what_if_view(CEILINGS, **{**START, "alpha": 0.0, "K": 16})
    assert "plain decoding is fastest" in losing


def test_in_a_batch_three_fixed_views_are_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(widgets, "is_live", lambda: False)
    monkeypatch.setattr("IPython.display.display", shown.append)
    what_if.what_if(CEILINGS, alpha=0.637, K=30)
    assert shown[0].data.count("plain decoding</b>") == 3 and "alpha = 0.64" in shown[0].data


def test_every_gpu_has_a_row_with_its_sheet():
    rows = what_if.accelerators_rows(CEILINGS)
    assert [row["GPU"] for row in rows] == list(GPUS) and all(row["data sheet"] for row in rows)
    by_name = {row["GPU"]: row for row in rows}
    assert by_name["L40S"]["speed-up"] > by_name["H200"]["speed-up"] > by_name["B200"]["speed-up"] > 1


def test_the_batch_figure_says_up_to_where_it_pays():
    figure = what_if.plot_batches(CEILINGS)
    pair, _ = what_if.pair_on(CEILINGS, "H200", "llama-3.3-70b", "llama-3.2-1b")
    stops = pair.batch_it_stops_at(0.8, 10)
    assert f"K = 10 up to a batch of {stops - 1}" in figure.layout.title.text.replace("<br>", " ")
    line = next(trace for trace in figure.data if trace.name == "K = 10")
    assert all((gain > 1) == (batch < stops) for batch, gain in zip(line.x, line.y, strict=True))
    assert line.y[0] == pytest.approx(pair.choices(0.8, 10)[10].speedup) and "predicted" in str(
        figure.layout.title.subtitle
    )
