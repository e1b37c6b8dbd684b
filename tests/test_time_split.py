"""Where a round's time goes: parts add up, words name the part that costs most, and say what would turn a loss."""

from __future__ import annotations

import pytest

from tutorial_lib.bench import metrics
from tutorial_lib.bench.time_split import explain, split_of, split_rows
from tutorial_lib.errors import OptionError
from tutorial_lib.results import Generation, Round
from tutorial_lib.show.gpu_records import gpu_experiment


def run(draft_ms, verify_ms, host_ms, length, *, k=4, first_ms=None, method="draft_target"):
    figures = {
        "round_ms": (draft_ms or 0.0) + verify_ms + host_ms, "draft_ms_per_round": draft_ms,
        "verify_ms_per_round": verify_ms, "overhead_ms_per_round": host_ms, "acceptance_length": length,
        "mean_draft_len": float(k), "requests": 2, "rounds": 20, "first_round_overhead_ms": first_ms,
    }  # fmt: skip
    return {"method": method, "max_draft_len": k, "figures": figures}


PLAIN = run(None, 40.0, 0.0, None, method="plain")


def test_the_drafters_reading_of_the_prompt_is_told_from_the_host():
    """Two first rounds took 40 ms each beside drafting and verifying: 4 ms for each of 20 rounds, of 5 left over."""
    split = split_of(run(10.0, 42.0, 5.0, 2.5, first_ms=40.0))
    assert split.prompt == pytest.approx(4.0) and split.host == pytest.approx(1.0)
    assert sum(split.parts().values()) == pytest.approx(split.round)
    assert split_of(run(10.0, 42.0, 5.0, 2.5)).prompt is None and split_of(PLAIN).prompt is None


def test_a_first_round_is_measured_from_the_first_token():
    rounds = [Round((1, 2), 1, (1, 9), 0.010, 0.040, 0.230), Round((3, 4), 0, (5,), 0.010, 0.040, 0.281)]
    generation = Generation([1], [8, 1, 9, 5], "", "length", rounds, ttft_s=0.1, latency_s=0.281)
    figures = metrics.figures([generation])
    assert figures["first_round_overhead_ms"] == pytest.approx(80.0)
    assert figures["overhead_ms_per_round"] == pytest.approx(40.5)
    assert metrics.figures([Generation([1], [8], "", "length")])["first_round_overhead_ms"] is None


def test_a_gpus_kernels_tell_accepting_and_gaps_apart():
    records = gpu_experiment("8b-1b")
    forced = next(r for r in records if r["kind"] == "run" and r["method"] != "plain")
    breakdown = next(r for r in records if r["kind"] == "breakdown" and r["of"].startswith("round"))
    split, whole = split_of(forced, breakdown), split_of(forced)
    assert 0 < split.accept < 0.05 and 0 < split.gaps < 0.1 and split.draft < whole.draft
    for found in (split, whole):  # medians of parts need not add up to the last digit
        assert sum(found.parts().values()) == pytest.approx(split.round, rel=1e-4)
    (row,) = split_rows({"forced": forced}, {"forced": breakdown})
    assert row["accepting"] == split.accept and row["the drafter's reading of the prompt"] is None


def test_words_for_a_loss_by_drafting_and_for_one_by_verifying():
    by_draft = explain(run(80.0, 44.0, 0.0, 2.0), PLAIN)
    assert "loses: a round yields 2.00 tokens and takes 3.10 plain steps" in by_draft and "0.65× plain" in by_draft
    assert "Most of what it adds is drafting: with drafting for nothing it would be 1.82×" in by_draft
    assert "3.10 tokens a round to break even." in by_draft and "no drafter" not in by_draft
    by_verify = explain(run(4.0, 100.0, 0.0, 1.5), PLAIN)
    assert "Most of what it adds is verifying" in by_verify and "no drafter, however fast, would help" in by_verify
    hopeless = explain(run(300.0, 40.0, 0.0, 3.0), PLAIN)
    assert "more than the 5 that a round can yield" in hopeless


def test_words_for_a_gain_and_for_a_run_without_rounds():
    gain = explain(run(4.0, 42.0, 0.5, 2.5), PLAIN)
    assert "pays:" in gain and "break even" not in gain
    assert "next to nothing" in explain(run(0.1, 40.0, 0.1, 1.3), PLAIN)
    unknown = run(None, 40.0, 0.0, None)
    unknown["figures"] |= {"round_ms": None}
    with pytest.raises(OptionError, match="no rounds"):
        split_of(unknown)
    assert split_rows({"a": unknown, "b": PLAIN})[0]["run"] == "b"
