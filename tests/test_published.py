"""The published tables agree with themselves and say how sure they are."""

from __future__ import annotations

import pytest

from tutorial_lib.bench.published import OTHERS, POSTS


def test_speedups_follow_from_throughputs():
    plain = {row.target: row.output_tok_s for row in POSTS if row.drafter is None}
    for row in POSTS:
        assert row.output_tok_s / plain[row.target] == pytest.approx(row.speedup, abs=0.012), row


def test_what_was_not_stated_says_so():
    derived = [row for row in POSTS if row.certainty == "derived"]
    assert [(row.output_tok_s, row.how) for row in derived] == [(33.4, "111.34 / 3.33")]
    assert 111.34 / 3.33 == pytest.approx(33.4, abs=0.05)
    assert {row.certainty for row in (*POSTS, *OTHERS)} <= {"stated", "derived", "second-hand"}
    assert all(row.how for row in POSTS if row.certainty != "stated")


def test_unverified_rows_are_absent():
    assert not [row for row in POSTS if "70B" in row.target and row.drafter not in (None, "Llama 3.2 1B")]


def test_every_row_has_a_source_and_something_to_say():
    for row in OTHERS:
        assert row.source and row.setting
        assert row.output_tok_s or row.speedup or row.bandwidth_share or row.note
