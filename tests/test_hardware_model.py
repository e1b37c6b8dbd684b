"""Times from bytes, flops and launches: by hand, at both ends of the roofline, and against every recorded run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutorial_lib.bench import evidence
from tutorial_lib.bench import hardware_model as hm
from tutorial_lib.bench.ceilings import measure_cpu
from tutorial_lib.errors import OptionError
from tutorial_lib.plan import GPUS
from tutorial_lib.shapes import DUMMIES
from tutorial_lib.show.gpu_records import gpu_experiment
from tutorial_lib.show.predictions import recorded_ceilings, recorded_points

MACHINE = hm.Ceilings("test", bytes_per_s=1e12, flops_per_s=100e12, launch_s=1e-6)
MODEL = hm.ModelCost(
    layers=10, layer_weights=4e9, layer_bytes=4e9, head_weights=1e9, head_bytes=2e9, kv_bytes_per_token=1e5
)
SMALL = hm.ModelCost(2, 1e8, 1e8, 1e8, 2e8, 1e4)
SEVENTY, ONE = (hm.model_cost(DUMMIES[name], "fp8") for name in ("llama-3.3-70b", "llama-3.2-1b"))


def test_a_step_by_hand():
    """4 + 2 ms of weights, 74 launches, 1000 tokens of cache: 0.1 ms."""
    assert hm.step_s(MODEL, MACHINE, context=1000) == pytest.approx(6e-3 + 74e-6 + 0.1e-3)
    assert hm.step_s(MODEL, MACHINE, 40) == hm.step_s(MODEL, MACHINE)  # below the ridge rows are free
    wide = hm.step_s(MODEL, MACHINE, 100)  # 2 x 4e9 x 100 / 1e14 = 8 ms of layers; the head, two bytes wide, 2 ms
    assert wide == pytest.approx(8e-3 + 2e-3 + 74e-6)
    assert hm.step_s(MODEL, MACHINE, 10, batch=10) == wide  # requests are rows, too
    assert hm.step_s(MODEL, MACHINE, batch=10, context=1000) == pytest.approx(6e-3 + 74e-6 + 1e-3)


def test_a_round_of_a_chain_and_of_a_tree():
    one = hm.step_s(SMALL, MACHINE)
    assert hm.draft_s(SMALL, MACHINE, hm.chain(4)) == pytest.approx(4 * one)
    assert hm.round_s(MODEL, SMALL, MACHINE, hm.chain(4)) == pytest.approx(4 * one + hm.step_s(MODEL, MACHINE, 5))
    tree = (3, 60)  # two steps of the drafter over 1 and 3 nodes; the target sees 64 rows
    drafted = one + hm.step_s(SMALL, MACHINE, 3)
    assert hm.round_s(MODEL, SMALL, MACHINE, tree) == pytest.approx(drafted + hm.step_s(MODEL, MACHINE, 64))
    assert hm.draft_s(None, MACHINE, hm.chain(4)) == 0.0


def test_costs_of_models_are_those_of_the_recorded_cards():
    assert SEVENTY.layer_bytes == 68_451_041_280 and SEVENTY.bytes_per_step == 70_552_387_584
    assert ONE.bytes_per_step == 1_498_415_104 and SEVENTY.kv_bytes_per_token == 327_680
    assert hm.model_cost(evidence.SMOLLM2_135M).bytes_per_step == 268_959_744
    drafter = hm.model_cost(evidence._data_config("embedded_draft"), "bfloat16", evidence.SHORTLIST)
    assert drafter.bytes_per_step == 37_748_736 and drafter.kv_bytes_per_token == 3072


def test_best_k_break_even_and_the_batch_that_stops_paying():
    pair = hm.Pair(SEVENTY, ONE, recorded_ceilings(), context=600)
    assert pair.best(0.0, 10).max_draft_len == 0
    assert 3 < pair.best(0.8, 16).max_draft_len < pair.best(0.95, 16).max_draft_len
    assert pair.best(0.82, 16).speedup > pair.choices(0.82, 16)[3].speedup > 2
    stops = pair.batch_it_stops_at(0.8, 10)
    assert stops is not None and 20 < stops < 206
    tokens = pair.choices(0.8, 10)[10].acceptance_length
    assert replace(pair, batch=stops).speedup(tokens, hm.chain(10)) <= 1
    assert replace(pair, batch=stops - 1).speedup(tokens, hm.chain(10)) > 1
    assert pair.batch_it_stops_at([0.8] * 10, 10) == stops
    assert pair.batch_it_stops_at(0.8, 3) > stops  # fewer rows meet the ridge later
    lookup = replace(pair, drafter=None, batch=1)
    assert lookup.speedup(1.001, hm.chain(5)) > 1  # rows below the ridge and no drafter: any hit pays
    assert replace(pair, context=0).speedup(1.05, hm.chain(3)) < 1


def test_another_gpu_by_its_data_sheet():
    here = recorded_ceilings()
    assert hm.on_another("H200", "fp8", here).bytes_per_s == pytest.approx(here.bytes_per_s)
    there = hm.on_another("B200", "fp8", here)
    assert there.bytes_per_s / here.bytes_per_s == pytest.approx(8.0 / 4.8) and "B200 data sheet" in there.how
    assert there.launch_s == here.launch_s and there.flops_per_s == pytest.approx(4.5e15)
    a100 = hm.on_another("A100-80GB", "bfloat16", replace(here, flops_per_s=GPUS["H200"].flops_per_s("bfloat16")))
    assert hm.step_s(SEVENTY, a100) > 2 * hm.step_s(SEVENTY, here)
    for gpu, dtype, words in (("A100-80GB", "fp8", "no FP8 units"), ("GTX-1", "fp8", "one of"), ("L4", "int4", "fp8")):
        with pytest.raises(OptionError, match=words):
            hm.on_another(gpu, dtype, here)
    assert all(gpu.source for gpu in GPUS.values())


# ---- against what was recorded ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def points():
    return recorded_points()


def test_measured_step_times_predict_every_recorded_run(points):
    """The claim of notebook 07, of every point there is."""
    found = evidence.errors(points)
    assert found.count == len(points) > 200 and found.median <= 0.05 and found.worst <= 0.12, found
    whole = [p for p in points if p.category is None]
    assert {(p.session, p.max_draft_len) for p in whole} >= {
        ("70b-1b", 10), ("70b-1b", 3), ("8b-1b", 5), ("embedded", 2), ("notebook 02", 8), ("notebook 07", 4),
        ("notebook 03", 5), ("methods", 6), ("compare", 10),
    }  # fmt: skip
    with_host_turn = [p for p in points if p.has_host_turn]
    assert {(p.session, p.method) for p in with_host_turn} == {("methods", "suffix"), ("methods", "lookahead")}
    assert all(p.from_hardware is None for p in with_host_turn)
    forced = evidence.errors([p for p in points if p.is_forced])  # long runs, acceptance known: little noise to hide in
    assert forced.count >= 11 and forced.worst <= 0.025, forced


def test_hardware_alone_predicts_the_h200_and_roughly_the_cpu(points):
    """Wide trees it takes for free: their mask and their many rows cost what no ceiling says, 63 nodes the most."""
    on_gpu = [p for p in points if p.machine == "H200"]
    chains = [p for p in on_gpu if p.method in ("draft_target", "ngram", "eagle3", "layer_skip")]
    found = evidence.errors(chains, "from_hardware")
    assert found.count == len(chains) > 100 and found.median <= 0.05 and found.worst <= 0.12, found
    assert evidence.errors([p for p in on_gpu if "fixed63" not in p.method], "from_hardware").worst <= 0.3
    assert evidence.errors(on_gpu, "from_hardware").worst <= 0.35
    assert evidence.errors([p for p in points if p.machine != "H200"], "from_hardware").worst <= 0.3


def test_the_hosts_turn_of_a_category_comes_from_the_other_ones():
    """A category ten times as slow changes the predictions of all others and not its own."""
    records = gpu_experiment("methods")
    of = {r["method"]: r for r in records if r["kind"] == "run"}
    found = of["suffix"]["by_category"]
    slow = {
        **of["suffix"],
        "by_category": {**found, "chat": {**found["chat"], "round_ms": 10 * found["chat"]["round_ms"]}},
    }
    changed = [slow if r is of["suffix"] else r for r in records]
    before, after = (
        {
            p.category: p.from_steps
            for p in evidence.methods_gpu_points(some, recorded_ceilings())
            if p.method == "suffix"
        }
        for some in (records, changed)
    )
    assert after["chat"] == before["chat"]
    assert all(after[c] < 0.5 * before[c] for c in found if c != "chat")
    only = [{**r, "by_category": {"chat": r["by_category"]["chat"]}} if r["kind"] == "run" else r for r in records]
    point = next(p for p in evidence.methods_gpu_points(only, recorded_ceilings()) if p.method == "suffix")
    assert point.from_steps > before["chat"]  # nothing else to learn the turn from: none is added


def test_points_react_to_what_was_measured(points):
    """No time of the predicted run goes in: a run twice as fast is predicted the same, and is 50% off."""
    records = gpu_experiment("8b-1b")
    first = next(r for r in records if r["kind"] == "run" and r["method"] != "plain")
    faster = {**first, "figures": {**first["figures"], "output_tok_s": 2 * first["figures"]["output_tok_s"]}}
    changed = [faster if r is first else r for r in records]
    before, after = (evidence.forced_points(r, recorded_ceilings())[0] for r in (records, changed))
    assert before.is_forced and after.from_steps == before.from_steps and after.from_hardware == before.from_hardware
    assert after.measured == pytest.approx(2 * before.measured)
    assert after.error("from_steps") == pytest.approx((1 + before.error("from_steps")) / 2 - 1)
    with pytest.raises(OptionError):
        evidence.errors([replace(before, from_steps=None)])


def test_ceilings_of_this_cpu(monkeypatch):
    monkeypatch.setattr("tutorial_lib.bench.ceilings.READ_MATRIX", (256, 256))
    monkeypatch.setattr("tutorial_lib.bench.ceilings.SQUARE", 64)
    found = evidence.cpu_ceilings(measure_cpu(passes=2))
    assert 1e7 < found.bytes_per_s < 1e13 and 1e7 < found.flops_per_s < 1e14 and 1e-8 < found.launch_s < 1e-3
