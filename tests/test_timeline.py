"""The phase clock's picture and table, from a made-up record."""

from __future__ import annotations

import pytest

from tutorial_lib.errors import OptionError
from tutorial_lib.show.timeline import PHASES, plot_timeline, timeline_table, waiting_share


def made_up(layers: int = 3) -> dict:
    """Every phase of a layer waits 1 µs and works 3; the head works 8."""
    spans, now = [], 100.0
    for layer in range(layers):
        for phase in ("qkv", "attention", "o", "gate_up", "down"):
            span = {"phase": phase, "layer": layer, "waits_us": now, "starts_us": now + 1, "ends_us": now + 4}
            spans.append(span)
            now += 4
    spans.append({"phase": "head", "layer": None, "waits_us": now, "starts_us": now, "ends_us": now + 8})
    return {"kind": "phase_clock", "spans": spans}


def test_every_phase_of_the_layers_asked_for_has_its_bars_where_the_clock_says():
    figure = plot_timeline(made_up(), layers=[1])
    works = [bar for bar in figure.data if bar.marker.color != "#FFFFFF"]
    assert [bar.name for bar in works] == [PHASES[p][0] for p in ("qkv", "attention", "o", "gate_up", "down")]
    assert [bar.base[0] for bar in works] == [1, 5, 9, 13, 17] and all(bar.x == (3,) for bar in works)
    waits = [bar for bar in figure.data if bar.marker.color == "#FFFFFF"]
    assert [bar.base[0] for bar in waits] == [0, 4, 8, 12, 16] and all(bar.x == (1,) for bar in waits)
    assert sum(bar.showlegend for bar in figure.data) == 1
    assert figure.layout.title.text.startswith("25% of the time") and "µs" in figure.layout.xaxis.title.text


def test_two_layers_are_two_bars_of_a_phase():
    assert all(len(bar.x) == 2 for bar in plot_timeline(made_up()).data)


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(OptionError, match=r"no layer \[7\].*0 to 2"):
        plot_timeline(made_up(), layers=[7])


def test_the_table_adds_up_to_the_launch():
    rows = timeline_table(made_up()).rows
    assert [row["times"] for row in rows] == [3, 3, 3, 3, 3, 1]
    assert (rows[0]["waits, µs"], rows[0]["works, µs"]) == (3.0, 9.0)
    assert sum(row["share of the launch, %"] for row in rows) == pytest.approx(100.0)


def test_nothing_waits_in_nothing():
    assert waiting_share([]) == 0.0
