"""The posts' tables and figures: three kinds of figures, each labelled, no bar or axis shared, titles from data."""

from __future__ import annotations

import pytest
from test_plots import record, shown_text, three_runs, title

from tutorial_lib.bench.published import POSTS
from tutorial_lib.show import posts
from tutorial_lib.show.gpu_records import gpu_experiment
from tutorial_lib.show.predictions import recorded_ceilings

EXPERIMENTS = {name: gpu_experiment(name) for name in ("70b-1b", "8b-1b")}


def runs_of(name):
    return [r for r in EXPERIMENTS[name] if r["kind"] == "run"]


def told(figure) -> str:
    return title(figure).replace("<br>", " ")


def test_three_panels_share_no_axis_and_name_their_machines():
    figure = posts.plot_posts(POSTS, EXPERIMENTS["70b-1b"], three_runs())
    by_name = {name: [t for t in figure.data if t.name == name] for name in ("published", "forced", "measured")}
    runs = [r for r in runs_of("70b-1b") if not (r["simulated_acceptance"] or {}).get("acceptance_probability")]
    assert [len(bars) for bars in by_name.values()] == [len(POSTS), len(runs), 3]
    assert [{t.xaxis for t in bars} for bars in by_name.values()] == [{"x"}, {"x2"}, {"x3"}]
    assert figure.layout.yaxis2.matches is None is figure.layout.yaxis3.matches
    assert all(t.marker.color == "white" for t in by_name["published"])  # hollow, whatever the method
    assert all(t.marker.pattern.shape for t in by_name["published"] + by_name["forced"])
    assert [t.y[0] for t in by_name["forced"]] == [r["figures"]["output_tok_s"] for r in runs]
    text = shown_text(figure)
    assert "published, H200" in text and "measured,<br>Test CPU, 2 cores" in text
    assert "forced acceptance,<br>1 × NVIDIA H200" in text and "the text means nothing" in text
    assert "up to 3.61×" in told(figure) and "1.50× with the draft model" in told(figure)
    gain = runs[1]["figures"]["output_tok_s"] / runs[0]["figures"]["output_tok_s"]
    assert f"{gain:.2f}× where 5.0 tokens a round are forced" in told(figure)
    marks = "".join(t.x[0] for t in by_name["published"])
    assert marks.count("*") == 1 and marks.count("†") == 1  # the derived and the second-hand row


def test_every_row_of_the_table_says_what_kind_it_is():
    rows = posts.posts_table(POSTS, EXPERIMENTS, three_runs()).rows
    kinds = [row["what kind of figure"] for row in rows]
    forced = [kind for kind in kinds if kind.startswith("this engine, random weights, ")]
    assert len(kinds) == len(POSTS) + len(forced) + 3
    assert len(forced) == sum(len(runs_of(name)) for name in EXPERIMENTS)
    assert kinds.count("your run") == 3 and sum(kind.startswith("published: ") for kind in kinds) == len(POSTS)
    by_kind = {row["what kind of figure"]: row for row in rows}
    five = by_kind["this engine, random weights, acceptance length forced to 4.99 at K = 10"]
    assert five["speed-up"] > 1 and "H200" in five["machine"] and five["draft model"] == "dummy:llama-3.2-1b"
    alone = posts.posts_table((), {}, [record("draft_target", k=4, is_simulated=True)]).rows
    assert alone[0]["what kind of figure"] == "your run, acceptance forced" and alone[0]["speed-up"] is None


def test_the_sweep_shows_measured_marks_and_the_hardwares_curve():
    figure = posts.plot_forced_sweep(EXPERIMENTS, recorded_ceilings())
    assert "70b-1b gains most at K = 10 (3." in told(figure) and "8b-1b gains most at K = 5 (1." in told(figure)
    traces = {trace.name: trace for trace in figure.data}
    marks, curve = traces["70b-1b, measured"], traces["70b-1b, predicted from the hardware at α = 0.82"]
    assert list(marks.x) == [3, 5, 7, 10] and "simulated acceptance" in figure.layout.title.subtitle.text
    predicted = dict(zip(curve.x, curve.y, strict=True))
    for k, gain in zip(marks.x, marks.y, strict=True):
        assert predicted[k] == pytest.approx(gain, rel=0.06)
