"""Joules and prices: what counters say, what they cannot resolve, and money on top."""

from __future__ import annotations

import os

import pytest
from test_measure import PARAMS, PROMPTS, Clock, FakeLLM

from tutorial_lib.bench import energy
from tutorial_lib.bench.energy import Metered, NoMeter, RaplMeter, meter_for
from tutorial_lib.bench.measure import compare
from tutorial_lib.errors import OptionError
from tutorial_lib.show.costs import costs_table


class Counter:
    """Joules as `watts` make them of a clock's seconds, read in steps of `step` joules."""

    source, problem, shortest_s = "a test's counter", None, 0.1

    def __init__(self, clock, watts, step=0.0):
        self.clock, self.watts, self.step = clock, watts, step

    def joules(self):
        value = self.watts * self.clock()
        return value // self.step * self.step if self.step else value


def package(folder, name, energy_uj, zone="intel-rapl:0"):
    place = folder / zone
    place.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", 1_000_000)):
        (place / file).write_text(f"{value}\n")
    return place


def test_joules_per_token_are_those_of_the_method_that_ran():
    """Methods take turns: what one draws must not be charged to the other."""
    clock = Clock()
    llms = {"plain": FakeLLM(clock), "draft_target": FakeLLM(clock, "draft_target", 4)}
    watts = {"plain": 100.0, "draft_target": 150.0}

    def meter(info):
        return Counter(clock, watts["draft_target" if info["max_draft_len"] else "plain"])

    session = compare(llms, PROMPTS, PARAMS, repeats=2, clock=clock, meter_for=meter, price_per_hour=3.6)
    for name, record in session.records.items():
        found, seconds = record["energy"], sum(f["wall_s"] for f in record["repeat_figures"])
        tokens = 2 * record["figures"]["output_tokens"]
        assert found["energy_j_per_output_token"] == pytest.approx(watts[name] * seconds / tokens)
        assert found["mean_power_w"] == pytest.approx(watts[name]) and found["why_not_available"] is None
        price = record["price"]["price_per_million_output_tokens"]
        assert price == pytest.approx(3.6 / 3600 / record["figures"]["output_tok_s"] * 1e6)
        assert set(energy.DEFINITIONS) <= set(record["definitions"])
    lines = energy.describe(session.records)
    assert "energy per output token: plain" in lines[0] and "at 3.6 an hour" in lines[1]


def test_calls_that_a_counter_cannot_resolve_are_not_counted():
    metered = Metered(Counter(lambda: 0.0, 1.0), [(0.0, 0.05, 10), (5.0, 0.09, 10)])
    found = metered.record()
    assert found["energy_j_per_output_token"] is None and "shorter than 0.1 s" in found["why_not_available"]
    metered.calls.append((30.0, 0.5, 20))
    assert metered.record()["energy_j_per_output_token"] == 1.5 and metered.record()["mean_power_w"] == 60
    still = Metered(Counter(lambda: 0.0, 1.0), [(0.0, 1.0, 10)]).record()
    assert still["energy_j_per_output_token"] is None and "did not move" in still["why_not_available"]


def test_packages_are_summed_parts_inside_them_are_not_and_a_counter_that_wraps_goes_on(tmp_path):
    one = package(tmp_path, "package-0", 900_000)
    two = package(tmp_path, "package-1", 100, "intel-rapl:1")
    core = package(tmp_path, "core", 0, "intel-rapl:0:0")
    meter = RaplMeter(tmp_path)
    before = meter.joules()
    (one / "energy_uj").write_text("100000")  # over its range of a million, and on
    (two / "energy_uj").write_text("500100")
    (core / "energy_uj").write_text("700000")
    assert meter.problem is None and meter.joules() - before == pytest.approx(0.2 + 0.5)
    (two / "energy_uj").unlink()
    assert meter.joules() is None


def test_what_cannot_be_read_says_why(tmp_path, monkeypatch):
    assert "no processor package" in RaplMeter(tmp_path).problem
    closed = package(tmp_path, "package-0", 5) / "energy_uj"
    closed.chmod(0)
    meter = RaplMeter(tmp_path)
    if os.geteuid():  # root reads everything
        assert "only root may read it" in meter.problem and meter.joules() is None
    found = Metered(NoMeter("no counter here"), [(None, 9.0, 10)]).record()
    assert found["energy_j_per_output_token"] is None and found["why_not_available"] == "no counter here"
    assert meter_for({"device": "stand-in"}).problem and isinstance(meter_for({"device": "cpu"}), RaplMeter)
    clock = Clock()
    record = compare({"plain": FakeLLM(clock)}, PROMPTS, PARAMS, clock=clock).records["plain"]
    assert record["price"] is None and {"source", "why_not_available"} <= record["energy"].keys()


def test_the_table_takes_old_and_new_records_and_a_price_that_the_reader_sets():
    clock = Clock()
    run = compare({"plain": FakeLLM(clock)}, PROMPTS, PARAMS, clock=clock).records["plain"]
    old = {k: v for k, v in run.items() if k not in ("energy", "price")}
    on_gpu = old | {"energy_j_per_token": 2.5, "mean_power_w": 560.0, "max_draft_len": 3, "method": "ngram"}
    table = costs_table([old, on_gpu], price_per_hour=3.6)
    first, second = table.rows
    assert first["J per output token"] == "not available" and first["counter"] == "this record holds none"
    assert second["J per output token"] == 2.5 and "NVML" in second["counter"]
    assert first["price of a million output tokens"] == pytest.approx(1000 / run["figures"]["output_tok_s"])
    assert not any(name.startswith("price") for name in costs_table([old]).columns)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(OptionError, match="price of an hour"):
            costs_table([old], wrong)
