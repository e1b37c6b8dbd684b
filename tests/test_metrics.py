"""Metric arithmetic on hand-made rounds. The worked numbers come from problem reports of other projects."""

from __future__ import annotations

import pytest

from tutorial_lib.bench import metrics
from tutorial_lib.bench.metrics import DEFINITIONS, figures, leading_run
from tutorial_lib.results import Generation, Round


def make_round(accepted: int, drafted: int, *, cut: int = 0, draft_s=0.0, verify_s=0.0, end_s=0.0) -> Round:
    return Round(tuple(range(drafted)), accepted, tuple(range(accepted + 1 - cut)), draft_s, verify_s, end_s)


def answer(rounds=(), *, tokens: int | None = None, ttft_s=0.0, latency_s=1.0, prompt=3) -> Generation:
    count = 1 + sum(len(r.emitted) for r in rounds) if tokens is None else tokens
    return Generation([0] * prompt, list(range(count)), "", "length", list(rounds), ttft_s, latency_s)


def test_every_figure_is_defined_and_every_definition_is_a_figure():
    assert set(figures([answer([make_round(1, 2)])])) == set(DEFINITIONS)
    assert all(sentence.endswith(".") for sentence in DEFINITIONS.values())


@pytest.mark.parametrize("mask, accepted", [([1, 0, 1, 1], 1), ([1, 0, 1], 1), ([1, 1, 1], 3), ([0, 1], 0), ([], 0)])
def test_only_the_leading_run_is_accepted(mask, accepted):
    assert leading_run(mask) == accepted


def test_batch_of_masks_counts_a_bonus_per_row():
    """Masks 101 and 111: drafted 6, accepted 1 + 3, emitted 2 + 4, rate 4/6."""
    rows = [answer([make_round(leading_run(mask), len(mask))]) for mask in ([1, 0, 1], [1, 1, 1])]
    found = figures(rows, batch_size=2)
    assert (found["drafted"], found["accepted"]) == (6, 4)
    assert sum(len(r.emitted) for g in rows for r in g.rounds) == 6
    assert found["acceptance_rate"] == pytest.approx(4 / 6)
    assert found["acceptance_length"] == 3.0


def test_time_per_output_token_is_not_time_per_round():
    """TTFT 50 ms, then ten rounds of 9 ms with three tokens each: 31 tokens in 140 ms."""
    rounds = [make_round(2, 4, draft_s=0.002, verify_s=0.006, end_s=0.05 + 0.009 * (i + 1)) for i in range(10)]
    found = figures([answer(rounds, ttft_s=0.050, latency_s=0.140)])
    assert found["output_tokens"] == 31
    assert found["tpot_ms"] == pytest.approx(3.0)
    assert found["round_ms"] == pytest.approx(9.0)
    assert found["decode_tok_s"] == pytest.approx(1000 / 3)
    assert found["output_tok_s"] == pytest.approx(31 / 0.140)
    assert found["draft_ms_per_round"] == pytest.approx(2.0)
    assert found["verify_ms_per_round"] == pytest.approx(6.0)
    assert found["overhead_ms_per_round"] == pytest.approx(1.0)


def test_published_tpot_and_throughput_agree():
    found = figures([answer(tokens=1001, ttft_s=0.1, latency_s=0.1 + 3.42121)])
    assert found["tpot_ms"] == pytest.approx(3.42, abs=0.005)
    assert found["decode_tok_s"] == pytest.approx(292.29, abs=0.01)


def test_output_and_decode_throughput_are_two_figures():
    """710 tokens in, 190 out, 4409.816 ms end to end of which 3751.546 ms decoding."""
    run = answer(tokens=190, prompt=710, ttft_s=4.409816 - 3.751546, latency_s=4.409816)
    found = figures([run], is_speculative=False)
    assert found["output_tok_s"] == pytest.approx(43.09, abs=0.005)
    assert found["decode_tok_s"] == pytest.approx(50.38, abs=0.005)
    assert found["output_tokens"] == 190


def test_rate_stays_below_one_and_length_includes_the_bonus():
    """Ten rounds of K = 4 that accept 20 of 40."""
    rounds = [make_round(a, 4) for a in (4, 0, 2, 1, 4, 3, 0, 0, 4, 2)]
    found = figures([answer(rounds)])
    assert found["acceptance_rate"] == 0.5
    assert found["acceptance_length"] == 3.0
    assert found["acceptance_length"] - 1 == pytest.approx(found["accepted"] / found["rounds"])
    assert found["output_tokens"] == 1 + 30 and found["cut_tokens"] == 0
    assert found["acceptance_by_position"] == [0.7, 0.6, 0.4, 0.3]
    assert found["conditional_acceptance_by_position"] == [7 / 10, 6 / 7, 4 / 6, 3 / 4]
    assert found["accepted_histogram"] == [3, 1, 2, 1, 3]
    assert found["mean_draft_len"] == 4.0


def test_tail_cut_by_a_stop_counts_as_accepted_but_not_as_emitted():
    """All four drafts right, but the request stops at the second: 2 of 5 verified tokens are delivered."""
    found = figures([answer([make_round(4, 4), make_round(4, 4, cut=3)])])
    assert found["output_tokens"] == 1 + 5 + 2
    assert found["acceptance_length"] == 3.5
    assert (found["accepted"], found["cut_tokens"], found["acceptance_rate"]) == (8, 3, 1.0)
    assert found["accepted"] + found["rounds"] - found["cut_tokens"] == found["output_tokens"] - 1


def test_pooled_and_request_mean_are_both_named():
    """A: ten rounds of five tokens; B: two rounds of one. Neither is the 1.0 of the last round."""
    runs = [answer([make_round(4, 4)] * 10), answer([make_round(0, 4)] * 2)]
    found = figures(runs)
    assert found["acceptance_length"] == pytest.approx(52 / 12)
    assert found["acceptance_length_request_mean"] == 3.0


def test_drafts_of_uneven_length():
    """Position k is judged only by the rounds that drafted a k-th token; an empty draft is a round of one token."""
    found = figures([answer([make_round(0, 0), make_round(1, 1), make_round(1, 3), make_round(3, 3)])])
    assert found["acceptance_by_position"] == [1.0, 0.5, 0.5]
    assert found["conditional_acceptance_by_position"] == [1.0, 0.5, 1.0]
    assert found["accepted_histogram"] == [1, 2, 0, 1]
    assert found["drafted"] == 7 and found["mean_draft_len"] == 7 / 4
    assert found["acceptance_length"] == (1 + 2 + 2 + 4) / 4


def test_drafter_that_never_drafts_has_no_rate():
    found = figures([answer([make_round(0, 0)] * 3)])
    assert found["drafted"] == 0 and found["acceptance_rate"] is None
    assert found["acceptance_length"] == 1.0 and found["acceptance_by_position"] == []
    unreached = figures([answer([make_round(0, 2)] * 3)])
    assert unreached["conditional_acceptance_by_position"] == [0.0, None]


def test_plain_run_has_times_but_no_acceptance():
    rounds = [Round((), 0, (1,), 0.0, 0.020, 0.05 + 0.025 * (i + 1)) for i in range(4)]
    found = figures([answer(rounds, ttft_s=0.05, latency_s=0.15)], is_speculative=False)
    assert found["round_ms"] == found["tpot_ms"] == pytest.approx(25.0)
    assert found["verify_ms_per_round"] == pytest.approx(20.0)
    assert found["overhead_ms_per_round"] == pytest.approx(5.0)
    for name in ("acceptance_length", "acceptance_rate", "drafted", "accepted", "mean_draft_len", "draft_ms_per_round"):
        assert found[name] is None


def test_backend_without_rounds_and_one_token_answers():
    found = figures([answer(tokens=1, latency_s=0.5, ttft_s=0.5)])
    assert found["tpot_ms"] is None and found["decode_tok_s"] is None
    assert found["rounds"] is None and found["round_ms"] is None and found["acceptance_length"] is None
    assert found["output_tok_s"] == 2.0
    assert metrics.figures([])["output_tok_s"] is None


def test_sums_over_prompts_are_ratios_of_sums():
    """Ten tokens in 1 s and ten in 3 s: 20 / 4, not the mean of 10 and 3.3."""
    found = figures([answer(tokens=10, latency_s=1.0), answer(tokens=10, latency_s=3.0)])
    assert found["output_tok_s"] == 5.0 and found["latency_s"] == 2.0


def test_batch_is_timed_from_its_start_to_its_last_token():
    runs = [answer(tokens=11, ttft_s=0.1, latency_s=1.1), answer(tokens=21, ttft_s=0.2, latency_s=2.1)] * 2
    found = figures(runs, batch_size=2)
    assert found["output_tok_s"] == pytest.approx(64 / 4.2)
    assert found["decode_tok_s"] == pytest.approx(60 / 4.0)
    assert found["tpot_ms"] == pytest.approx(1e3 * 2 * (1.0 + 1.9) / 60)


def make_tree(parents: tuple[int, ...], path: tuple[int, ...], *, cut: int = 0) -> Round:
    emitted = tuple(range(len(path) + 1 - cut))
    return Round(tuple(range(len(parents))), len(path), emitted, 0.0, 0.0, 0.0, parents, path)


def test_positions_of_a_tree_are_depths():
    """Seven tokens, three deep: (0, 1, 2) follow the text, 3 and 4 follow 0, 5 follows 1, 6 follows 3."""
    wide = (-1, -1, -1, 0, 0, 1, 3)
    rounds = [make_tree(wide, (0, 4)), make_tree(wide, (1, 5)), make_tree(wide, ()), make_tree((-1, -1), (1,))]
    assert rounds[0].depths == (1, 1, 1, 2, 2, 2, 3) and rounds[3].depth == 1
    found = figures([answer([*rounds, make_round(1, 2)])])
    assert found["acceptance_by_position"] == [4 / 5, 2 / 4, 0.0]
    assert found["conditional_acceptance_by_position"] == [4 / 5, 2 / 3, 0.0]
    assert found["accepted_histogram"] == [1, 2, 2, 0]
    assert (found["drafted"], found["accepted"], found["cut_tokens"]) == (25, 6, 0)
    assert found["acceptance_rate"] == 6 / 25 and found["acceptance_length"] == 11 / 5


def test_a_chain_written_as_a_tree_has_the_figures_of_the_chain():
    chains = [make_round(2, 4), make_round(0, 3), make_round(3, 3, cut=2)]
    trees = [make_tree((-1, 0, 1, 2), (0, 1)), make_tree((-1, 0, 1), ()), make_tree((-1, 0, 1), (0, 1, 2), cut=2)]
    assert figures([answer(trees)]) == figures([answer(chains)])
