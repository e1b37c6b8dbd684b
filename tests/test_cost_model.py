"""The cost model against worked numbers and against a brute-force simulation."""

from __future__ import annotations

import random

import pytest

from tutorial_lib.bench import cost_model as cm
from tutorial_lib.errors import OptionError


def test_worked_values():
    assert cm.expected_tokens(0.8, 5) == pytest.approx(3.689, abs=5e-4)
    assert cm.expected_acceptance_rate(0.8, 5) == pytest.approx(0.538, abs=5e-4)
    assert cm.speedup_from_cost_ratio(0.44, 5, 0.11) == pytest.approx(1.14, abs=5e-3)


@pytest.mark.parametrize("k", [1, 4, 10])
def test_limits(k):
    assert cm.expected_tokens(1.0, k) == k + 1
    assert cm.expected_tokens(0.0, k) == 1.0
    assert cm.expected_tokens(1 - 1e-12, k) == pytest.approx(k + 1)
    assert cm.speedup_from_cost_ratio(0.0, k, 0.1) == pytest.approx(1 / (0.1 * k + 1))
    assert cm.speedup_from_cost_ratio(0.5, k, 0.0) == cm.expected_tokens(0.5, k)


@pytest.mark.parametrize("alpha, k", [(0.3, 2), (0.8, 5), (0.95, 8)])
def test_closed_form_and_simulation(alpha, k):
    assert cm.expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    draw, tokens, rounds = random.Random(5), 0, 20_000
    for _ in range(rounds):
        accepted = 0
        while accepted < k and draw.random() < alpha:
            accepted += 1
        tokens += accepted + 1
    assert tokens / rounds == pytest.approx(cm.expected_tokens(alpha, k), rel=0.02)


def test_positions_multiply():
    assert cm.expected_tokens_by_position([0.5, 0.5, 0.5]) == cm.expected_tokens(0.5, 3)
    assert cm.expected_tokens_by_position([0.7, 6 / 7, 4 / 6, 3 / 4]) == pytest.approx(3.0)
    assert cm.expected_tokens_by_position([]) == 1.0


def test_shares_are_checked():
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(OptionError):
            cm.expected_tokens(wrong, 3)
        with pytest.raises(OptionError):
            cm.expected_tokens_by_position([wrong])


def test_alpha_is_recovered():
    for alpha in (0.0, 0.37, 0.9, 1.0):
        length = cm.expected_tokens(alpha, 6)
        assert cm.alpha_from_acceptance_length(length, 6) == pytest.approx(alpha, abs=1e-9)
    with pytest.raises(OptionError, match="acceptance length"):
        cm.alpha_from_acceptance_length(7.5, 6)


def test_speedup_and_break_even():
    """A round of 60 ms with three tokens against steps of 30 ms: 1.5 times; two tokens break even."""
    assert cm.speedup(0.030, 3.0, 0.060) == pytest.approx(1.5)
    assert cm.break_even_acceptance_length(0.030, 0.060) == 2.0
    alpha = cm.break_even_alpha(0.030, 0.060, 4)
    assert cm.speedup(0.030, cm.expected_tokens(alpha, 4), 0.060) == pytest.approx(1.0)
    assert cm.break_even_alpha(0.030, 0.029, 4) == pytest.approx(0.0, abs=1e-9)
    assert cm.break_even_alpha(0.030, 0.160, 4) is None


def test_best_draft_length_weighs_rows_against_acceptance():
    """Steps of 40 ms for one row and 50 ms for more, drafting 3 ms per token."""
    times = {"draft_s": lambda k: 0.003 * k, "verify_s": lambda rows: 0.040 if rows == 1 else 0.050}
    choices = cm.draft_length_choices(0.7, max_draft_len=8, **times)
    best = cm.best_draft_len(0.7, max_draft_len=8, **times)
    by_hand = {k: 0.040 * cm.expected_tokens(0.7, k) / (0.050 + 0.003 * k) for k in range(1, 9)}
    assert [c.max_draft_len for c in choices] == list(range(9))
    assert {c.max_draft_len: c.speedup for c in choices[1:]} == pytest.approx(by_hand)
    assert best.max_draft_len == max(by_hand, key=by_hand.get)
    assert 1 < best.max_draft_len < 8 and best.speedup > 1
    assert cm.best_draft_len(0.1, max_draft_len=8, **times).max_draft_len == 0


def test_best_draft_length_takes_measured_rates_no_further_than_measured():
    times = {"draft_s": lambda k: 0.0, "verify_s": lambda rows: 0.040}
    best = cm.best_draft_len([0.9, 0.9, 0.0], max_draft_len=8, **times)
    assert best.max_draft_len == 2 and best.speedup == pytest.approx(1 + 0.9 + 0.81)
    assert len(cm.draft_length_choices([0.9, 0.9, 0.0], max_draft_len=8, **times)) == 4


def test_overhead_weighs_on_plain_steps_too():
    choice = cm.draft_length_choices(
        1.0, draft_s=lambda k: 0.01, verify_s=lambda rows: 0.04, max_draft_len=1, overhead_s=0.01
    )[1]
    assert choice.round_s == pytest.approx(0.06) and choice.speedup == pytest.approx(0.05 * 2 / 0.06)


def test_a_tree_by_hand_and_a_chain_as_a_tree():
    """Two first tokens, 0.6 and 0.3; below the first one two more: 1 + 0.6 + 0.3 + 0.6 x (0.5 + 0.2)."""
    assert cm.expected_tokens_of_tree((-1, -1, 0, 0), (0.6, 0.3, 0.5, 0.2)) == pytest.approx(2.32)
    rates = (0.8, 0.5, 0.9)
    assert cm.expected_tokens_of_tree((-1, 0, 1), rates) == pytest.approx(cm.expected_tokens_by_position(rates))
    for parents, wrong in (((-1, -1), (0.7, 0.4)), ((0,), (0.5,)), ((-1,), (1.5,))):
        with pytest.raises(OptionError):
            cm.expected_tokens_of_tree(parents, wrong)


def test_roofline():
    assert cm.step_floor_s(70.55e9, 4.60e12) == pytest.approx(15.3e-3, abs=0.05e-3)
    assert cm.step_floor_s(1e9, 1e9, kv_bytes=1e9) == 2.0
    for dtype, size in (("bfloat16", 2), ("fp8", 1)):
        ridge = cm.ridge_tokens(cm.H200.flops_per_s(dtype), cm.H200.bytes_per_s, size)
        assert ridge == pytest.approx(206, abs=0.5)
    assert cm.compute_bound_batch(10, 206) == pytest.approx(18.7, abs=0.05)


def category(requests, tokens, ttft_s, step_ms, overhead_ms):
    return {
        "requests": requests, "output_tokens": tokens, "ttft_s": ttft_s,
        "tpot_ms": step_ms + overhead_ms, "verify_ms_per_round": step_ms, "overhead_ms_per_round": overhead_ms,
    }  # fmt: skip


def test_prediction_by_hand():
    """Two categories, 101 tokens each: 0.1 s prefill (the drafter: a tenth of it), then 100 steps of 40 + 2 ms.
    A round: 40 x (10 + 50) / 40 + 2."""
    record = {"by_category": {"a": category(1, 101, 0.1, 40.0, 2.0), "b": category(1, 101, 0.1, 40.0, 2.0)}}
    parts = cm.Components(4, 0.040, 0.050, 0.010, 0.004, {"a": 4.0, "b": 1.0})
    found = cm.predict_speedup(record, parts)
    assert found["by_category"]["a"] == pytest.approx((0.1 + 4.2) / (0.11 + 25 * 0.062))
    assert found["by_category"]["b"] == pytest.approx((0.1 + 4.2) / (0.11 + 100 * 0.062))
    assert found["speedup"] == pytest.approx(2 * 4.3 / (0.11 + 25 * 0.062 + 0.11 + 100 * 0.062))
    assert found["round_ms"] == pytest.approx(62.0)
    slower = cm.Components(4, 0.080, 0.100, 0.020, 0.008, {"a": 4.0, "b": 1.0})
    assert cm.predict_speedup(record, slower)["speedup"] == pytest.approx(found["speedup"])


def test_prediction_reacts_to_every_component():
    record = {"by_category": {"a": category(2, 130, 0.2, 30.0, 1.0)}}
    base = cm.predict_speedup(record, cm.Components(4, 0.03, 0.04, 0.01, 0.003, {"a": 2.5}))["speedup"]
    assert cm.predict_speedup(record, cm.Components(4, 0.03, 0.06, 0.01, 0.003, {"a": 2.5}))["speedup"] < base * 0.9
    assert cm.predict_speedup(record, cm.Components(4, 0.03, 0.04, 0.03, 0.003, {"a": 2.5}))["speedup"] < base * 0.9
    assert cm.predict_speedup(record, cm.Components(4, 0.03, 0.04, 0.01, 0.003, {"a": 3.5}))["speedup"] > base * 1.1
    assert cm.predict_speedup(record, cm.Components(4, 0.05, 0.04, 0.01, 0.003, {"a": 2.5}))["speedup"] > base * 1.1


def test_prediction_without_rounds_and_without_acceptance():
    plain = {"requests": 1, "output_tokens": 11, "ttft_s": 0.0, "tpot_ms": 40.0}
    parts = cm.Components(4, 0.040, 0.050, 0.010, 0.004, {"a": 3.0})
    assert cm.predict_speedup({"by_category": {"a": plain}}, parts)["speedup"] == pytest.approx(2.0)
    nothing_to_read = cm.Components(4, 0.040, 0.050, 0.010, 0.0, {"a": 3.0})
    slow_start = {"a": plain | {"ttft_s": 9.0}}
    assert cm.predict_speedup({"by_category": slow_start}, nothing_to_read)["speedup"] == pytest.approx(9.4 / 9.2)
    with pytest.raises(OptionError, match="'b'"):
        cm.predict_speedup({"by_category": {"b": plain}}, parts)
