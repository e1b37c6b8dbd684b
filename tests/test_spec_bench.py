"""Spec-Bench's rules on hand-made runs, and that `bench` measures what they ask for."""

from __future__ import annotations

import statistics

import pytest
from test_measure import PROMPTS, Clock, FakeLLM

from tutorial_lib import cli
from tutorial_lib.bench import measure, methods, spec_bench
from tutorial_lib.bench.prompts import Prompt
from tutorial_lib.config import PROFILES
from tutorial_lib.errors import OptionError
from tutorial_lib.results import Generation, Round


def answer(tokens, accepted=()):
    rounds = [Round((0, 0), a, (1,) * (a + 1), 0.0, 0.1, 0.1) for a in accepted]
    return Generation([1], [1] * tokens, "", "length", rounds)


def test_every_question_weighs_the_same_and_the_speedup_is_a_ratio_of_means():
    categories = {"a/0": "writing", "a/1": "writing", "b/0": "qa"}
    plain = [{"a/0": 1.0, "a/1": 3.0, "b/0": 10.0}, {"a/0": 2.0, "a/1": 2.0, "b/0": 10.0}]
    fast = [{"a/0": 1.0, "a/1": 1.0, "b/0": 10.0}, {"a/0": 0.5, "a/1": 0.5, "b/0": 10.0}]
    texts = {"a/0": answer(30, (2, 0)), "a/1": answer(10, (1,)), "b/0": answer(200)}
    scores = spec_bench.score(
        categories, {"plain": plain, "m": fast}, {"plain": [texts] * 2, "m": [texts] * 2}, "plain", ["m"]
    )
    # question a: 40 tokens over both turns; b: 200 tokens. plain 10 and 20 tokens/s, m 20 and 20, then 40 and 20
    overall, found = scores["plain"]["overall"], scores["methods"]["m"]
    assert overall["tokens_per_second"] == pytest.approx(15) and overall["questions"] == 2
    assert found["overall"]["speedup_of_runs"] == pytest.approx([20 / 15, 30 / 15])
    assert found["overall"]["speedup"] == pytest.approx(statistics.mean([20 / 15, 2.0]))
    assert found["overall"]["speedup_std"] == pytest.approx(statistics.stdev([20 / 15, 2.0]))
    assert found["mt_bench"]["speedup"] == pytest.approx(3.0) and found["qa"]["speedup"] == pytest.approx(1.0)
    assert found["mean_accepted_tokens"] == pytest.approx(2.0)  # rounds of 3, 1 and 2 tokens, bonus included
    assert scores["definitions"] and scores["differences"] and scores["rules"] == "spec-bench"
    one = spec_bench.score(categories, {"plain": plain[:1]}, {"plain": [texts]}, "plain", [])
    assert one["plain"]["overall"]["tokens_per_second_std"] is None


@pytest.fixture
def session():
    """`bench` with engines that only count; returns (document, engines by name, lines)."""

    def run(make=measure.bench, names=("plain", "draft_target"), **options):
        clock, engines, lines = Clock(), {}, []

        def make_llm(name, *_):
            engines[name] = FakeLLM(clock, name, 0 if name in ("plain", "transformers") else 4)
            return engines[name]

        document = make(
            PROFILES["cpu"], prompts=PROMPTS, methods=names, make_llm=make_llm, clock=clock, say=lines.append, **options
        )
        return document, engines, lines

    return run


def test_three_warm_ups_three_runs_and_no_rival(session):
    document, engines, lines = session(rules="spec-bench")
    assert "transformers" not in engines
    for llm in engines.values():
        long = [i for i, (inputs, p) in enumerate(llm.calls) if p.max_tokens == PROFILES["cpu"].max_tokens]
        first = [i for i in long if llm.calls[i][0] == [list(PROMPTS[0].turns[0].encode())]]
        assert len(first) == 3 + 3, "three before the clock, one in each of three runs"
    scores = document["summary"]["spec_bench"]
    assert scores["runs"] == 3 and set(scores["methods"]) == {"draft_target"}
    assert set(scores["plain"]) == {"overall", "easy", "hard", "talk", "other"}
    assert scores["methods"]["draft_target"]["overall"]["speedup"] > 1
    assert any("by Spec-Bench's rules, 3 runs" in line for line in lines)
    assert document["runs"][0]["repeats"] == 3
    with pytest.raises(OptionError, match="rules are 'mine'"):
        session(rules="mine")


def test_sampled_texts_are_not_compared_and_draws_are_repeated(session):
    document, engines, lines = session(temperature=1.0)
    summary = document["summary"]
    assert summary["identical_text"] is None and summary["differences"] == []
    assert summary["identical_to_transformers"] is None and "text: not compared, texts are sampled" in lines
    sampling = document["runs"][0]["sampling"]
    assert sampling["temperature"] == 1.0 and sampling["seed"] is not None
    assert all(p.temperature == 1.0 for _, p in engines["plain"].calls)


def test_the_table_of_methods_is_scored_too(session):
    document, _, _ = session(methods.bench_methods, ("ngram",), rules="spec-bench", temperature=1.0)
    assert set(document["summary"]["spec_bench"]["methods"]) == {"ngram"}
    assert document["summary"]["methods"][0]["identical_text"] is None


def test_the_command_passes_the_workload_on(monkeypatch, tmp_path, capsys):
    file, seen = tmp_path / "questions.jsonl", {}
    file.write_text('{"question_id": 81, "category": "writing", "turns": ["one", "two"]}\n')

    def bench(profile, **options):
        seen.update(options, profile=profile)
        return {"runs": [], "summary": {}}

    monkeypatch.setattr(measure, "bench", bench)
    words = ["bench", "--prompts", str(file), "--rules", "spec-bench", "--temperature", "1", "--max-tokens", "1024"]
    assert cli._run([*words, "--price-per-hour", "3.5"]) == 0
    assert seen["profile"].max_tokens == 1024 and seen["temperature"] == 1.0 and seen["rules"] == "spec-bench"
    assert seen["prompts"] == [Prompt("81", "writing", ("one", "two"))] and seen["price_per_hour"] == 3.5
    for where in (["--experiment", "load"], ["--profile", "h200", "--experiment", "70b-1b"]):
        for option in (["--rules", "spec-bench"], ["--max-tokens", "128"], ["--price-per-hour", "1"]):
            assert cli._run(["bench", *where, *option]) == 2
            assert f"{option[0]} has no effect" in capsys.readouterr().err
