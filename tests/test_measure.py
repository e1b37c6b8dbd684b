"""Measuring, on a machine whose clock and speed we control: fairness, medians, warm-up, identity, prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from tutorial_lib.bench.measure import bench, compare, measure, warm_repeats
from tutorial_lib.bench.metrics import DEFINITIONS
from tutorial_lib.bench.prompts import Prompt, prompt_set_sha256
from tutorial_lib.bench.summary import first_differences
from tutorial_lib.config import PROFILES, SamplingParams
from tutorial_lib.errors import OptionError, PromptError
from tutorial_lib.results import Generation, Round, read_records, write_record

RECORD_KEYS = {
    "kind", "experiment", "method", "backend", "target", "drafter", "dtype", "device", "profile", "max_draft_len",
    "batch_size", "sampling", "prompt_set", "repeats", "figures", "by_category", "repeat_figures", "build_s", "load_s",
    "warmup_s", "tokens_sha256", "is_simulated", "definitions", "provenance",
}  # fmt: skip
SUMMARY_KEYS = {
    "plain_tok_s", "speculative_tok_s", "speedup", "acceptance_length", "identical_text", "transformers_plain_tok_s",
    "predicted_speedup", "by_category", "pays_less",
}  # fmt: skip
PROMPTS = [
    Prompt("a1", "easy", ("one two three",)),
    Prompt("b1", "hard", ("word " * 30,)),
    Prompt("c1", "talk", ("first turn", "second turn")),
    Prompt("d1", "other", ("four five six",)),
]
PARAMS = SamplingParams(max_tokens=40)


class Clock:
    """Seconds that pass only when a fake engine works; `speed(now)` stretches them."""

    def __init__(self, speed: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now, self.speed = 0.0, speed

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds * self.speed(self.now)


class Tokenizer:
    """Bytes as ids, no chat template."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True):
        return {"input_ids": list(text.encode())}


@dataclass
class FakeLLM:
    """Decodes token `i` as a function of the prompt; accepts per round what `accepts` says; costs what it is told."""

    clock: Clock
    name: str = "plain"
    max_draft_len: int = 0
    plain_step_s: float = 0.040
    verify_s: float = 0.050
    draft_s: float = 0.010
    overhead_s: float = 0.001
    accepts: Callable[[int, int, int], int] = lambda length, call, number: 2
    drafts: Callable[[int], bool] = lambda number: True
    compile_s: float = 0.0
    calibrated_verify_s: float | None = None
    wrong_from: int | None = None
    is_simulated: bool = False
    unaccounted_s: float = 0.0
    max_seq_len: int = 2048
    log: list[tuple[str, str]] = field(default_factory=list)
    calls: list[tuple[list[list[int]], SamplingParams]] = field(default_factory=list)
    seen: set = field(default_factory=set)
    is_closed: bool = False
    tokenizer: Tokenizer = field(default_factory=Tokenizer)

    @property
    def info(self):
        return {
            "backend": "torch", "target": "/home/someone/models/tiny", "drafter": None if self.name == "plain" else "d",
            "dtype": "float32", "device": "cpu", "max_draft_len": self.max_draft_len, "build_s": 7.0, "load_s": 0.5,
            "limits": {"max_seq_len": self.max_seq_len},
        }  # fmt: skip

    def generate(self, inputs, sampling_params=None):
        if isinstance(inputs[0], int):
            return self.generate([inputs], sampling_params)[0]
        self.calls.append((inputs, sampling_params))
        self.log.append((self.name, bytes(inputs[0]).decode().strip()))
        shape = (len(inputs), len(inputs[0]).bit_length(), self.max_draft_len)
        if shape not in self.seen:
            self.seen.add(shape)
            self.clock.work(self.compile_s)
        self.clock.work(self.unaccounted_s)
        start = self.clock()
        answers = [self._answer(ids, sampling_params, start) for ids in inputs]
        return answers

    def _answer(self, ids: list[int], params: SamplingParams, start: float) -> Generation:
        call = sum(ids == seen for inputs, _ in self.calls for seen in inputs)
        tokens = [(sum(ids) + 7 * i) % 90 + 33 for i in range(params.max_tokens)]
        if self.wrong_from is not None and self.wrong_from < len(tokens):
            tokens[self.wrong_from] = 0
        self.clock.work(0.001 * len(ids))
        ttft, rounds, done = self.clock() - start, [], 1
        while done < params.max_tokens:
            budget = min(self.max_draft_len, params.max_tokens - done - 1) if self.drafts(len(rounds)) else 0
            accepted = min(self.accepts(len(ids), call, len(rounds)), budget) if self.max_draft_len else 0
            began = self.clock()
            self.clock.work(self.draft_s if budget else 0)
            drafted = self.clock()
            self.clock.work(self.verify_s if budget else self.plain_step_s)
            verified = self.clock()
            self.clock.work(self.overhead_s)
            emitted = tuple(tokens[done : done + accepted + 1])
            rounds.append(
                Round((0,) * budget, accepted, emitted, drafted - began, verified - drafted, self.clock() - start)
            )
            done += len(emitted)
        text = bytes(tokens).decode()
        return Generation(
            ids, tokens, text, "length", rounds, ttft, self.clock() - start, is_simulated=self.is_simulated
        )

    def time_steps(self, rows, context=128):
        times = {}
        for count in rows:
            before = self.clock()
            verify = self.calibrated_verify_s or self.verify_s
            self.clock.work(self.plain_step_s if count == 1 else verify)
            times[count] = self.clock() - before
        return times

    def time_draft(self, max_draft_len, context=128):
        before = self.clock()
        self.clock.work(self.draft_s * max_draft_len / self.max_draft_len)
        return self.clock() - before

    def close(self):
        self.is_closed = True


def a_pair(clock: Clock, **options):
    log: list[tuple[str, str]] = []
    return {
        "plain": FakeLLM(clock, "plain", log=log),
        "draft_target": FakeLLM(clock, "draft_target", 4, log=log, **options),
    }


def true_speedup(records) -> float:
    return records["draft_target"]["figures"]["output_tok_s"] / records["plain"]["figures"]["output_tok_s"]


# --- records ------------------------------------------------------------------------------------------------------


def test_record_holds_what_was_agreed(tmp_path):
    clock = Clock()
    llm = FakeLLM(clock, "draft_target", 4)
    record = measure(llm, PROMPTS, PARAMS, method="draft_target", experiment="e", profile="cpu", clock=clock)
    assert RECORD_KEYS <= set(record) and set(record["figures"]) == set(DEFINITIONS)
    assert set(record["by_category"]) == {"easy", "hard", "talk", "other"}
    assert record["prompt_set"] == {
        "name": "bundled", "sha256": prompt_set_sha256(PROMPTS), "count": 4, "template": "none",
    }  # fmt: skip
    assert record["repeats"] == len(record["repeat_figures"]) == 3
    assert record["sampling"]["max_tokens"] == 40 and record["max_draft_len"] == 4
    assert record["figures"]["requests"] == 5 and record["figures"]["output_tokens"] == 200
    assert record["build_s"] == 7.0 and record["load_s"] == 0.5 and record["warmup_s"] > 0
    assert record["notes"] == [] and record["is_simulated"] is False
    path = tmp_path / "r.jsonl"
    write_record(path, record)
    assert read_records(path) == [json.loads(json.dumps(record))]
    assert "someone" not in path.read_text() and record["target"] == "tiny"


def test_records_keep_no_text_and_simulated_runs_not_even_its_hash():
    clock = Clock()
    record = measure(FakeLLM(clock), PROMPTS, PARAMS, method="plain", clock=clock)
    text = json.dumps(record)
    assert "one two three" not in text and "second turn" not in text and len(record["tokens_sha256"]) == 64
    simulated = FakeLLM(clock, "draft_target", 4, is_simulated=True)
    record = measure(simulated, PROMPTS, PARAMS, method="draft_target", clock=clock)
    assert record["is_simulated"] is True and record["tokens_sha256"] is None


def test_token_hash_tells_texts_apart():
    clock = Clock()
    runs = [
        measure(FakeLLM(clock, wrong_from=wrong), PROMPTS, PARAMS, method="plain", clock=clock)
        for wrong in (None, None, 39)
    ]
    assert runs[0]["tokens_sha256"] == runs[1]["tokens_sha256"] != runs[2]["tokens_sha256"]


def test_plain_run_has_no_acceptance_and_no_draft_length():
    clock = Clock()
    record = measure(FakeLLM(clock), PROMPTS, PARAMS, method="plain", clock=clock)
    assert record["figures"]["acceptance_length"] is None and record["max_draft_len"] == 0
    assert record["figures"]["verify_ms_per_round"] == pytest.approx(40.0)
    assert record["figures"]["overhead_ms_per_round"] == pytest.approx(1.0)


def test_bad_counts_and_no_prompts():
    clock = Clock()
    for wrong in ({"repeats": 0}, {"batch_size": 0}, {"repeats": True}):
        with pytest.raises(OptionError):
            measure(FakeLLM(clock), PROMPTS, PARAMS, method="plain", clock=clock, **wrong)
    with pytest.raises(PromptError):
        measure(FakeLLM(clock), [], PARAMS, method="plain", clock=clock)


# --- fairness -----------------------------------------------------------------------------------------------------


def test_methods_take_turns_and_the_first_one_changes():
    clock = Clock()
    llms = a_pair(clock)
    compare(llms, PROMPTS[:2], PARAMS, repeats=2, clock=clock)
    a, b = "one two three", PROMPTS[1].turns[0].strip()
    assert llms["plain"].log[-8:] == [
        ("plain", a), ("draft_target", a), ("plain", b), ("draft_target", b),
        ("draft_target", a), ("plain", a), ("draft_target", b), ("plain", b),
    ]  # fmt: skip


def test_a_machine_that_slows_down_favours_no_method():
    """It loses more than half its speed within the session: one method after the other would be far off."""
    steady = true_speedup(compare(a_pair(steady_clock := Clock()), PROMPTS, PARAMS, clock=steady_clock).records)
    clock = Clock(lambda now: 1 + now / steady_clock.now)
    assert true_speedup(compare(a_pair(clock), PROMPTS, PARAMS, clock=clock).records) == pytest.approx(steady, rel=0.05)
    clock = Clock(lambda now: 1 + now / steady_clock.now)
    apart = {n: measure(llm, PROMPTS, PARAMS, method=n, clock=clock) for n, llm in a_pair(clock).items()}
    assert abs(true_speedup(apart) / steady - 1) > 0.15


def test_one_stalled_repeat_does_not_move_the_median():
    steady = measure(FakeLLM(clock := Clock()), PROMPTS, PARAMS, method="plain", clock=clock)
    stalled = Clock(lambda now: 5.0 if 0.4 < now / clock.now < 0.6 else 1.0)
    record = measure(FakeLLM(stalled), PROMPTS, PARAMS, method="plain", clock=stalled)
    assert record["figures"]["output_tok_s"] == pytest.approx(steady["figures"]["output_tok_s"])
    slowest = min(f["output_tok_s"] for f in record["repeat_figures"])
    assert slowest < 0.7 * record["figures"]["output_tok_s"]


def test_warm_up_covers_every_timed_shape():
    clock = Clock()
    llm = FakeLLM(clock, "draft_target", 4, compile_s=9.0)
    record = measure(llm, PROMPTS, PARAMS, method="draft_target", batch_size=1, clock=clock)
    first, *later = [f["output_tok_s"] for f in record["repeat_figures"]]
    assert all(first == pytest.approx(x) for x in later)
    assert all(f["wall_s"] == pytest.approx(record["repeat_figures"][1]["wall_s"]) for f in record["repeat_figures"])
    assert record["warmup_s"] >= 2 * 9.0
    warmups = [params for _, params in llm.calls if params.ignore_eos]
    assert warmups and all(p.max_tokens >= 3 * (4 + 1) + 1 for p in warmups)
    assert any(inputs[0] == inputs[0][: len(inputs[0]) // 2] * 2 for inputs, p in llm.calls if p.ignore_eos)


def test_warm_up_stays_within_the_context():
    """A prompt that fits with its answer, but not twice."""

    def lengths(max_seq_len: int, is_warm_up: bool) -> list[int]:
        llm = FakeLLM(Clock(), "draft_target", 4, max_seq_len=max_seq_len)
        measure(llm, PROMPTS[1:2], PARAMS, method="draft_target", batch_size=1, clock=llm.clock)
        return [len(ids) + p.max_tokens for inputs, p in llm.calls if p.ignore_eos == is_warm_up for ids in inputs]

    longest = max(lengths(2048, is_warm_up=False))
    assert max(lengths(2048, is_warm_up=True)) > longest >= max(lengths(longest, is_warm_up=True))


def test_warm_up_ignores_stops_but_the_timed_run_does_not():
    clock = Clock()
    llm = FakeLLM(clock)
    params = replace(PARAMS, stop="x", stop_token_ids=[3])
    measure(llm, PROMPTS[:1], params, method="plain", clock=clock)
    assert [(p.stop, p.ignore_eos) for _, p in llm.calls] == [(None, True)] * 2 + [("x", False)] * 3


def test_later_turns_hold_the_same_answer_for_every_method():
    clock = Clock()
    llms = a_pair(clock, wrong_from=5)
    session = compare(llms, PROMPTS[2:3], PARAMS, clock=clock)
    assert [r.turn for r in session.requests] == [0, 1]
    second = bytes(session.requests[1].prompt_ids).decode()
    answer = session.generations["plain"][0]["c1/0"].text
    assert second == f"first turn\n\n{answer}\n\nsecond turn"
    for llm in llms.values():
        asked = {bytes(inputs[0]).decode() for inputs, params in llm.calls if not params.ignore_eos}
        assert asked == {"first turn", second}


def test_drafter_that_remembers_earlier_repeats_is_left_out():
    """From the second repeat on everything is accepted: such repeats must not lift the figures."""
    clock = Clock()
    forgets = measure(FakeLLM(clock, "n", 4), PROMPTS[:2], PARAMS, method="ngram", clock=clock)
    warmups = 1  # calls with the same prompt before the first repeat
    remembers = FakeLLM(clock, "n", 4, accepts=lambda length, call, number: 2 if call <= warmups + 1 else 4)
    record = measure(remembers, PROMPTS[:2], PARAMS, method="ngram", clock=clock)
    for name in ("output_tok_s", "acceptance_length", "rounds", "accepted"):
        assert record["figures"][name] == pytest.approx(forgets["figures"][name])
        for category, figures in record["by_category"].items():
            assert figures[name] == pytest.approx(forgets["by_category"][category][name])
    assert [f["is_warm"] for f in record["repeat_figures"]] == [False, True, True]
    assert record["repeat_figures"][1]["acceptance_length"] > record["figures"]["acceptance_length"]
    assert "repeats 2, 3 were warm" in record["notes"][0] and forgets["notes"] == []


def test_unseeded_sampling_may_differ_between_repeats():
    clock = Clock()
    varying = FakeLLM(clock, "n", 4, accepts=lambda length, call, number: call % 3)
    record = measure(varying, PROMPTS[:2], replace(PARAMS, temperature=0.8), method="ngram", clock=clock)
    assert not any(f["is_warm"] for f in record["repeat_figures"]) and record["notes"] == []
    counts = sorted(f["accepted"] for f in record["repeat_figures"])
    assert counts[0] < counts[2] and record["figures"]["accepted"] == counts[1]


def test_warm_repeats_are_found_by_their_rounds():
    def run(accepted):
        return {"q": Generation([1], [1] * 6, "", "length", [Round((1, 2), accepted, (1,) * (accepted + 1), 0, 0, 0)])}

    assert warm_repeats([run(1), run(1), run(2)]) == [2]
    assert warm_repeats([run(1)]) == []


def test_time_that_the_engine_does_not_account_for_is_noted():
    clock = Clock()
    record = measure(FakeLLM(clock, unaccounted_s=1.0), PROMPTS, PARAMS, method="plain", clock=clock)
    assert any("of the time its calls took" in note for note in record["notes"])


def test_batches():
    """Two at a time: one call for two prompts, throughput over the batch's time, none by category."""
    clock = Clock()
    llm = FakeLLM(clock)
    record = measure(llm, PROMPTS, PARAMS, method="plain", batch_size=2, clock=clock)
    timed = [inputs for inputs, params in llm.calls if not params.ignore_eos and len(inputs) > 1]
    assert [len(inputs) for inputs in timed] == [2, 2] * 3
    assert {len(inputs) for inputs, params in llm.calls if params.ignore_eos} == {2}
    assert record["batch_size"] == 2 and record["figures"]["requests"] == 5
    longest = 200 / sum(f["wall_s"] for f in record["repeat_figures"][:1])
    assert record["figures"]["output_tok_s"] == pytest.approx(longest)
    assert {f["output_tok_s"] for f in record["by_category"].values()} == {None}


# --- identity -----------------------------------------------------------------------------------------------------


def test_first_difference_is_found_in_any_repeat():
    def run(tokens):
        return {"q/0": Generation([1], tokens, "", "length")}

    same = [run([1, 2, 3])] * 2
    assert first_differences(same, same) == []
    assert first_differences(same, [run([1, 2, 3]), run([1, 9, 3])]) == [
        {"request": "q/0", "repeat": 2, "first_difference": 1}
    ]
    assert first_differences(same, [run([1, 2])])[0]["first_difference"] == 2
    assert first_differences([run([1]), run([2])], [])[0]["repeat"] == 2


# --- bench --------------------------------------------------------------------------------------------------------


def a_bench(clock=None, said=None, methods=("plain", "draft_target", "ngram"), prompts=PROMPTS, **options):
    """`bench` on fakes; `options` go to the draft-model engine. Returns its result and the engines."""
    clock = clock or Clock()
    made = {
        "plain": FakeLLM(clock, "plain"),
        "draft_target": FakeLLM(clock, "draft_target", 4, **options),
        "ngram": FakeLLM(clock, "ngram", 4, draft_s=0.0, accepts=lambda *_: 1, drafts=lambda number: number % 3 == 0),
        "transformers": FakeLLM(clock, "plain", plain_step_s=0.055),
    }
    profile = replace(PROFILES["cpu"], max_tokens=40)
    say = (lambda line: None) if said is None else said.append
    result = bench(
        profile, prompts=prompts, methods=methods, say=say, make_llm=lambda name, _: made[name], clock=clock
    )  # fmt: skip
    return result, made


def test_bench_summary_follows_from_its_runs():
    said = []
    result, made = a_bench(said=said)
    summary, runs = (
        result["summary"],
        {(r["method"], r["provenance"]["seed"], i): r for i, r in enumerate(result["runs"])},
    )
    plain, draft, ngram, rival = runs.values()
    assert SUMMARY_KEYS <= set(summary) and json.dumps(result, allow_nan=False)
    assert [r["method"] for r in (plain, draft, ngram, rival)] == ["plain", "draft_target", "ngram", "plain"]
    assert summary["plain_tok_s"] == plain["figures"]["output_tok_s"]
    assert summary["speculative_tok_s"] == draft["figures"]["output_tok_s"]
    assert summary["speedup"] == summary["speculative_tok_s"] / summary["plain_tok_s"]
    assert summary["acceptance_length"] == draft["figures"]["acceptance_length"]
    assert summary["identical_text"] is True and summary["differences"] == []
    assert summary["by_method"]["ngram"]["speedup"] < summary["speedup"]
    assert len(summary["speedup_of_repeats"]) == 3
    assert set(summary["by_category"]) == {"easy", "hard", "talk", "other"}
    assert all(llm.is_closed for llm in made.values())
    assert any("identical in every prompt and repeat" in line for line in said)


def test_rival_is_compared_over_the_prompts_that_both_answered():
    result, _ = a_bench()
    summary, rival = result["summary"], result["runs"][-1]
    assert summary["transformers_categories"] == ["easy", "talk"] == sorted(rival["by_category"])
    assert rival["prompt_set"]["count"] == 2 and rival["prompt_set"]["sha256"] == prompt_set_sha256(PROMPTS[::2])
    assert summary["transformers_plain_tok_s"] == rival["figures"]["output_tok_s"]
    plain = result["runs"][0]["by_category"]
    tokens = sum(plain[c]["output_tokens"] for c in ("easy", "talk"))
    seconds = sum(plain[c]["requests"] * plain[c]["latency_s"] for c in ("easy", "talk"))
    assert summary["plain_tok_s_same_prompts"] == pytest.approx(tokens / seconds)
    assert summary["plain_vs_transformers"] == pytest.approx(56 / 41, rel=0.02)
    assert summary["identical_to_transformers"] is True


@pytest.mark.parametrize("accepts", [lambda n, c, r: 0, lambda n, c, r: 2, lambda n, c, r: (n + r) % 5])
def test_prediction_meets_an_engine_that_keeps_its_promises(accepts):
    summary = a_bench(accepts=accepts)[0]["summary"]
    assert (
        summary["prediction_error"] == pytest.approx(summary["predicted_speedup"] / summary["speedup"] - 1)
        and abs(summary["prediction_error"]) < 0.03
    )
    assert summary["by_method"]["ngram"]["predicted_speedup"] == pytest.approx(
        summary["by_method"]["ngram"]["speedup"], rel=0.03
    )
    for found in summary["by_category"].values():
        assert found["predicted_speedup"] == pytest.approx(found["speedup"], rel=0.05)


def test_prediction_misses_where_the_timed_rounds_cost_more_than_the_calibrated_ones():
    """The prediction must not have seen the run: rounds that secretly take 30 ms longer make it wrong."""
    summary = a_bench(verify_s=0.080, calibrated_verify_s=0.050)[0]["summary"]
    assert summary["prediction_error"] > 0.2


def test_prediction_survives_a_machine_that_drifts():
    whole = Clock()
    a_bench(whole)
    summary = a_bench(Clock(lambda now: 1 + now / whole.now))[0]["summary"]
    assert abs(summary["prediction_error"]) < 0.06


def test_a_wrong_token_is_reported_with_its_place():
    said = []
    summary = a_bench(said=said, wrong_from=17)[0]["summary"]
    assert summary["identical_text"] is False
    assert {d["method"] for d in summary["differences"]} == {"draft_target"}
    assert {d["first_difference"] for d in summary["differences"]} == {17}
    assert len(summary["differences"]) == 5 * 3
    assert any("text: differs in 15 answers, first at token 17 of a1/0" in line for line in said)


def test_forced_acceptance_is_compared_with_no_text():
    said = []
    result, _ = a_bench(said=said, methods=("plain", "draft_target"), is_simulated=True, wrong_from=3)
    assert result["summary"]["identical_text"] is None and result["summary"]["differences"] == []
    assert "text: not compared, acceptance was forced" in said
    clock = Clock()
    llms = a_pair(clock, is_simulated=True)
    session = compare(llms, PROMPTS[:1], PARAMS, clock=clock)
    texts = {name: {g.text for repeat in runs for g in repeat.values()} for name, runs in session.generations.items()}
    assert texts["draft_target"] == {""} and texts["plain"] != {""}


def test_where_it_pays_less_and_why():
    """The long prompt is accepted worse and its prefill weighs more; speed-ups below one are shown as they are."""
    said = []
    summary = a_bench(said=said, accepts=lambda length, call, number: 0 if length > 100 else 4)[0]["summary"]
    worst = summary["pays_less"][0]
    assert worst["category"] == "hard" and worst["speedup"] < 1
    assert "acceptance length 1.00 against" in worst["why"] and "prefill" in worst["why"]
    assert any(line.startswith("pays less: hard 0.") for line in said)
    assert "easy" not in [e["category"] for e in summary["pays_less"]]


def test_backend_that_cannot_time_its_steps_gets_no_prediction():
    class Opaque(FakeLLM):
        def time_steps(self, rows, context=128):
            raise OptionError("backend 'x' cannot time its steps apart")

        def _answer(self, ids, params, start):
            return replace(super()._answer(ids, params, start), rounds=[])

    said, clock, made = [], Clock(), []

    def make(name, _):
        made.append(name)
        return Opaque(clock, name, 0 if name == "plain" else 4)

    profile = replace(PROFILES["cpu"], backend="vllm")
    methods = ("plain", "draft_target")
    result = bench(profile, prompts=PROMPTS, methods=methods, say=said.append, make_llm=make, clock=clock)
    summary = result["summary"]
    assert made == ["plain", "draft_target"] and json.dumps(result, allow_nan=False)
    for name in ("predicted_speedup", "prediction_error", "acceptance_length", "transformers_plain_tok_s"):
        assert summary[name] is None
    assert summary["speedup"] > 1 and SUMMARY_KEYS <= set(summary)
    assert "note: no prediction: backend 'x' cannot time its steps apart" in said


def test_engines_are_closed_when_a_run_fails():
    made = []

    class Broken(FakeLLM):
        def generate(self, inputs, sampling_params=None):
            raise PromptError("too long")

    def make(name, _):
        made.append((Broken if name == "draft_target" else FakeLLM)(Clock(), name))
        return made[-1]

    with pytest.raises(PromptError):
        bench("cpu", prompts=PROMPTS, say=lambda line: None, make_llm=make)
    assert len(made) == 4 and all(llm.is_closed for llm in made)


@pytest.mark.parametrize("methods", [("draft_target",), ("plain",), (), ("plain", "ngram", "ngram")])
def test_methods_are_checked(methods):
    with pytest.raises(OptionError, match="methods are"):
        bench("cpu", methods=methods, say=lambda line: None, make_llm=lambda *_: pytest.fail("loaded"))


def test_profiles_are_checked():
    with pytest.raises(OptionError, match="replay measures nothing"):
        bench("replay", say=lambda line: None)
    with pytest.raises(OptionError, match="unknown"):
        bench("nope", say=lambda line: None)
