"""Controls and progress: one call per change however often a cell ran, static views in a batch, errors in place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tutorial_lib.bench import cost_model
from tutorial_lib.results import Generation, Round
from tutorial_lib.show import progress, widgets

ipywidgets = pytest.importorskip("ipywidgets")


@pytest.fixture
def shown(monkeypatch):
    """What `display` was given."""
    found = []
    monkeypatch.setattr("IPython.display.display", lambda *objects, **_: found.extend(objects))
    return found


@pytest.fixture
def live(monkeypatch):
    monkeypatch.setattr(widgets, "is_live", lambda: True)
    widgets._open_controls.clear()


class Counting:
    def __init__(self):
        self.calls = []

    def __call__(self, k):
        self.calls.append(k)
        return f"<p>view of {k}</p>"


def sliders(box):
    return [child for child in box.children if isinstance(child, ipywidgets.SelectionSlider)]


def test_running_the_cell_three_times_still_makes_one_call_per_change(live, shown):
    view = Counting()
    for _ in range(3):
        widgets.show("demo", view, {"k": range(1, 6)}, [{"k": 1}, {"k": 5}])
    boxes = [item for item in shown if isinstance(item, ipywidgets.VBox)]
    view.calls.clear()
    sliders(boxes[-1])[0].value = 3
    assert view.calls == [3]
    assert boxes[-1].children[-1].value == "<p>view of 3</p>"
    assert len(widgets._open_controls) == 1


def test_controls_of_earlier_runs_are_closed(live, shown):
    for _ in range(2):
        widgets.show("demo", Counting(), {"k": range(1, 6)}, [{"k": 1}])
    first = next(item for item in shown if isinstance(item, ipywidgets.VBox))
    assert all(widget.comm is None for widget in (first, *first.children))


def test_beside_a_live_control_the_static_views_stand_folded(live, shown):
    widgets.show("demo", Counting(), {"k": range(1, 6)}, [{"k": 1}, {"k": 5}])
    static = shown[-1].data
    assert static.startswith("<details>") and "view of 1" in static and "view of 5" in static


def test_an_error_in_the_view_is_shown_in_place(live, shown):
    def view(k):
        if k == 2:
            raise ValueError("<b>no such round</b>")
        return "fine"

    widgets.show("demo", view, {"k": range(1, 4)}, [{"k": 1}])
    box = shown[0]
    sliders(box)[0].value = 2
    assert "ValueError" in box.children[-1].value and "<b>" not in box.children[-1].value
    sliders(box)[0].value = 3
    assert box.children[-1].value == "fine"


def test_in_a_batch_the_fixed_views_are_plain_html(monkeypatch, shown):
    monkeypatch.setenv(progress.BATCH_VARIABLE, "1")
    monkeypatch.setattr(widgets, "in_kernel", lambda: True)
    widgets.show("demo", Counting(), {"k": range(1, 6)}, [{"k": 1}, {"k": 3}, {"k": 5}])
    assert len(shown) == 1 and not isinstance(shown[0], ipywidgets.Widget)
    assert [f"view of {k}" in shown[0].data for k in (1, 3, 5)] == [True] * 3
    assert "k = 3" in shown[0].data


def test_the_stepper_shows_first_middle_and_last_round(monkeypatch, shown):
    class Letters:
        def decode(self, ids):
            return "".join(chr(96 + i) for i in ids)

    rounds = [Round((i, i), 1, (i, 26), 0.001, 0.01, 0.0) for i in range(1, 6)]
    g = Generation([1], [9, *(t for r in rounds for t in r.emitted)], "", "length", rounds)
    monkeypatch.setenv(progress.BATCH_VARIABLE, "1")
    widgets.round_stepper(g, Letters())
    assert [f"round {k}: 2 drafted" in shown[0].data for k in range(1, 6)] == [True, False, True, False, True]


def test_calculator_says_what_the_cost_model_says():
    page = widgets.speedup_view(0.44, 5, 0.11, 1.0)
    expected = cost_model.speedup_from_cost_ratio(0.44, 5, 0.11)
    assert f"{expected:.2f}× plain decoding" in page and f"{expected:.2f}" == "1.14"
    assert "6.00 tokens per round" in widgets.speedup_view(1.0, 5, 0.0, 1.0)
    losing = widgets.speedup_view(0.0, 4, 0.5, 2.0)
    assert "Best K here: none" in losing and "0.25×" in losing


def test_calculator_takes_measured_values_that_lie_off_its_sliders(live, shown):
    widgets.speedup_calculator(alpha=0.637, max_draft_len=16, draft_cost=1.7, verify_cost=0.93)
    values = [slider.value for slider in sliders(shown[0])]
    assert values == [0.64, 10, 1.0, 1.0]


def test_progress_is_one_line_in_a_batch(monkeypatch, capsys):
    monkeypatch.setenv(progress.BATCH_VARIABLE, "1")
    said = []
    assert list(progress.track(range(4), "prompts", say=said.append)) == [0, 1, 2, 3]
    assert len(said) == 1 and said[0].startswith("prompts: 4 in ")
    assert list(progress.track(iter("ab"), "prompts")) == ["a", "b"]
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("prompts: 2 in ") and err.count("\n") == 1


def test_progress_is_a_bar_while_a_person_watches(monkeypatch, capsys):
    monkeypatch.setenv(progress.BATCH_VARIABLE, "0")
    assert list(progress.track([1, 2], "prompts")) == [1, 2]
    assert "prompts:" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "watched"), [("1", False), ("true", False), ("0", True), ("", False)])
def test_who_watches_is_said_explicitly_or_seen_from_the_front_end(value, watched, monkeypatch):
    monkeypatch.setenv(progress.BATCH_VARIABLE, value)
    monkeypatch.setattr(progress, "in_kernel", lambda: False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert progress.is_watched() is watched


def test_importing_show_is_light():
    code = "import tutorial_lib.show, tutorial_lib.show.progress, tutorial_lib.show.trace, sys"
    code += "; print(sorted({'torch', 'plotly', 'ipywidgets', 'transformers', 'IPython'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
