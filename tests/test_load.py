"""Requests under load: who waits for whom, by a clock that is told what a turn takes; the experiment on a tiny pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tutorial_lib.bench import load_run
from tutorial_lib.bench.load import IN_FLIGHT, STATIC, Load, Outcome, Served, figures, poisson_times, serve, thinned
from tutorial_lib.bench.load_run import bench_load, settings_for
from tutorial_lib.config import PROFILES
from tutorial_lib.errors import OptionError, WorkbookError
from tutorial_lib.results import Generation, Round
from tutorial_lib.show.load import plot_load

STANDIN = Path(__file__).parent / "standin_vllm"
TINY, SMALL = "dummy:tiny-llama?seed=5", "dummy:tiny-llama?seed=5&layers=1"


class Machine:
    """An engine of a few slots and its clock: a turn takes 1 s and gives a token to each request that has a slot."""

    def __init__(self, slots: int = 8) -> None:
        self.now, self.slots = 100.0, slots
        self.line: list[SimpleNamespace] = []
        self.in_turn = (0, 0, 0.0)
        self.widths: list[int] = []

    def open(self, prompts, params):
        (own,) = params
        self.line.append(SimpleNamespace(left=own.max_tokens, start_s=self.now, is_over=False, waited=None, first=None))
        request = self.line[-1]
        request.generation = lambda: Generation(
            prompt_token_ids=list(prompts[0]), token_ids=[1] * own.max_tokens, text="", finish_reason="length",
            rounds=[Round((7, 7), 1, (1, 1), 0.0, 0.0, 0.0)], ttft_s=request.first, latency_s=request.last,
            queued_s=request.waited, preemptions=1,
        )  # fmt: skip
        return [request]

    def step(self):
        for request in self.line[: self.slots]:
            request.waited = self.now - request.start_s if request.waited is None else request.waited
        self.now += 1
        for request in self.line[: self.slots]:
            request.left -= 1
            request.last = self.now - request.start_s
            request.first = request.last if request.first is None else request.first
            request.is_over = request.left == 0
        self.widths.append(len(self.line[: self.slots]))
        self.in_turn = len(self.line[: self.slots]), len(self.line[self.slots :]), len(self.line) / 10
        self.line = [r for r in self.line if not r.is_over]

    def occupancy(self):
        return self.in_turn

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, load: Load, batching: str = IN_FLIGHT) -> Outcome:
        return serve(self, load, batching=batching, clock=lambda: self.now, sleep=self.sleep)


def jobs(*lengths: int):
    return tuple(((1, 2, 3), n) for n in lengths)


def times(outcome: Outcome) -> list[tuple[float, ...]]:
    return [(r.arrival_s, r.admitted_s, r.first_token_s, r.end_s) for r in outcome.requests]


def test_a_client_asks_again_when_it_was_answered():
    machine = Machine()
    found = times(machine.run(Load(jobs(4, 1, 2, 1), 2)))
    assert found == [(0, 0, 1, 4), (0, 0, 1, 1), (1, 1, 2, 3), (3, 3, 4, 4)]
    assert machine.widths == [2, 2, 2, 2]  # nobody stands still


def test_a_static_batch_waits_for_its_longest():
    machine = Machine()
    outcome = machine.run(Load(jobs(4, 1, 2, 1), 2), STATIC)
    # the second is answered after 1 s and asks again at once, but its question waits until the batch has ended
    assert times(outcome) == [(0, 0, 1, 4), (0, 0, 1, 1), (1, 4, 5, 6), (4, 4, 5, 5)]
    assert machine.widths == [2, 1, 1, 1, 2, 1]
    ours, theirs = (
        figures(Machine().run(Load(jobs(4, 1, 2, 1), 2), b), is_speculative=False) for b in (IN_FLIGHT, STATIC)
    )
    assert (ours["output_tok_s"], theirs["output_tok_s"]) == (8 / 4, 8 / 6) and theirs["ttft_s_p99"] > 3.8


def test_poisson_arrivals_do_not_wait_for_the_engine():
    """One that comes in mid-turn has waited since then, and one that comes late finds the engine asleep."""
    outcome = Machine().run(Load(jobs(2, 1, 1, 1), 2, at_s=(0.0, 0.25, 0.5, 9.5)))
    assert times(outcome) == [(0, 0, 1, 2), (0.25, 1, 2, 2), (0.5, 2, 3, 3), (9.5, 9.5, 10.5, 10.5)]
    assert [r.times()["ttft_s"] for r in outcome.requests] == [1, 1.75, 2.5, 1]
    assert [s[2] for s in outcome.samples] == [0, 1, 0, 0]  # the third waits outside: two at once


def test_poisson_times_have_their_rate_and_their_seed():
    gaps = np.diff(poisson_times(4.0, 4001, seed=1))
    assert abs(gaps.mean() - 0.25) < 4 * 0.25 / 4000**0.5 and abs(gaps.std() - 0.25) < 0.02
    assert poisson_times(4.0, 5, seed=1) == poisson_times(4.0, 5, seed=1) != poisson_times(4.0, 5, seed=2)


def test_figures_by_hand():
    def one(arrival, ttft, latency, tokens):
        done = Generation([1], [1] * tokens, "", "length", ttft_s=ttft, latency_s=latency, queued_s=0.5, preemptions=2)
        return Served(arrival, arrival + 1, done)

    outcome = Outcome([one(0, 1, 5, 5), one(2, 3, 3, 1)], [(1, 1, 0, 0.5), (2, 2, 1, 0.7)])
    found = figures(outcome, is_speculative=False)
    assert (found["seconds"], found["output_tok_s"], found["requests_per_s"]) == (6, 1.0, 2 / 6)
    assert (found["ttft_s"], found["ttft_s_p50"], found["ttft_s_p90"]) == (3, 3, pytest.approx(3.8))
    assert found["tpot_ms"] == found["tpot_ms_p99"] == 1000 and found["latency_s"] == 5  # the one-token answer has none
    assert (found["queued_s"], found["preemptions"], found["mean_running"]) == (1.5, 4, 1.5)
    assert found["kv_use_mean"] == pytest.approx(0.6) and found["kv_use_max"] == 0.7
    assert found["acceptance_length"] is None and found["drafted"] is None
    assert [row[0] for row in thinned([(t, 1, 0, 0.0) for t in range(1000)])][-1] == 999 and len(
        thinned([(0, 1, 0, 0)] * 1000)
    ) == 200


def test_the_engine_of_a_gpu_takes_the_same_load(pieces):
    """Its loop, run as plain torch here: whoever waits joins, and the tokens are those of requests one by one."""
    from gpu_models import gpu_model

    from tutorial_lib.engine.drafting import ModelDrafting
    from tutorial_lib.engine.gpu_engine import GpuEngine

    def make(k: int) -> GpuEngine:
        target, draft = (gpu_model(name, slots=3, max_seq_len=128) for name in (TINY, SMALL))
        drafting = ModelDrafting(draft) if k else None
        return GpuEngine(target, pieces, (), max_slots=3, max_seq_len=128, drafting=drafting, max_draft_len=k)

    asked = tuple((tuple(range(i, i + 20)), 3 + i) for i in range(6))
    alone = [serve(make(0), Load((job,), 1)).requests[0].done.token_ids for job in asked]
    for k in (0, 2):
        outcome = serve(make(k), Load(asked, 3))
        assert [r.done.token_ids for r in outcome.requests] == alone
        found = figures(outcome, is_speculative=bool(k))
        assert found["queued_s"] is not None and found["kv_use_max"] > 0 and max(s[1] for s in outcome.samples) == 3
    engine = make(2)
    assert all(engine.time_rounds(batch, k, 30) > 0 for batch in (1, 3) for k in (0, 1, 2))
    assert engine.scheduler.is_idle and engine.cache.pool.held == 0


# ---- the experiment -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """A closed load on two tiny models whose cache holds only part of what four clients ask for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        settings = settings_for(
            PROFILES["cpu"], target=TINY, drafter=SMALL, methods=("plain", "draft_target", "ngram"), concurrency=(1, 4),
            requests_per_client=3, input_len=20, output_len=30, kv_tokens=160,
        )  # fmt: skip
        yield bench_load("cpu", settings, say=lambda line: None)


def test_every_run_has_its_figures_and_its_requests(document):
    assert json.dumps(document, allow_nan=False)
    runs = [(r["method"], r["batching"], r["concurrency"]) for r in document["runs"]]
    assert runs == [
        ("plain", IN_FLIGHT, 1), ("draft_target", IN_FLIGHT, 1), ("ngram", IN_FLIGHT, 1), ("plain", IN_FLIGHT, 4),
        ("plain", STATIC, 4), ("draft_target", IN_FLIGHT, 4), ("ngram", IN_FLIGHT, 4),
    ]  # fmt: skip
    for run in document["runs"]:
        assert run["definitions"].keys() - run["figures"].keys() == {f"batching {run['batching']}"}
        assert run["figures"].keys() <= run["definitions"].keys()
        assert len(run["timeline"]) == 3 * run["concurrency"] == run["figures"]["requests"]
        for row in run["timeline"]:
            assert 0 <= row["arrival_s"] <= row["admitted_s"] < row["first_token_s"] <= row["end_s"]
            assert row["prompt_tokens"] == 20 and 15 <= row["output_tokens"] <= 45
        assert sum(row["output_tokens"] for row in run["timeline"]) == run["figures"]["output_tokens"]
        assert 0 < run["figures"]["kv_use_max"] <= 1 and max(row[1] for row in run["kv_use"]) <= run["concurrency"]
    drafted = next(r for r in document["runs"] if r["method"] == "draft_target")["figures"]
    assert drafted["acceptance_length"] > 1 and drafted["drafted"] >= drafted["accepted"] > 0


def test_another_engine_gets_the_same_requests_in_a_process_of_its_own(cache, monkeypatch, tmp_path):
    """vLLM's stand-in, plain and with lookup, one after the other; its figures beside ours at every point."""
    monkeypatch.setenv("PYTHONPATH", str(STANDIN))
    monkeypatch.syspath_prepend(str(STANDIN))
    given = {"target": TINY, "drafter": SMALL, "concurrency": (1, 3), "requests_per_client": 2, "input_len": 12}
    settings = settings_for(
        PROFILES["cpu"], **given, methods=("plain", "ngram"), output_len=9, static_from=9, backends=("torch", "vllm")
    )
    kept = []
    found = bench_load("cpu", settings, say=lambda line: None, keep=kept.append)
    assert [len(k["runs"]) for k in kept] == list(range(1, 9)) and kept[-1]["runs"] == found["runs"]
    runs = [(r["backend"], r["method"], r["concurrency"]) for r in found["runs"]]
    ours = [("torch", method, n) for n in (1, 3) for method in ("plain", "ngram")]
    assert runs == ours + [("vllm", method, n) for method in ("plain", "ngram") for n in (1, 3)]
    assert all(part["status"] == "done" for part in found["parts"])
    asked = {(r["concurrency"]): [row["output_tokens"] for row in r["timeline"]] for r in found["runs"][:4]}
    for run in found["runs"][4:]:
        assert [row["output_tokens"] for row in run["timeline"]] == asked[run["concurrency"]]
        assert max(row[1] for row in run["kv_use"]) == run["concurrency"] and run["figures"]["kv_use_max"] > 0
        assert all(0 <= row["arrival_s"] < row["first_token_s"] <= row["end_s"] for row in run["timeline"])
    for point in found["summary"]["points"]:
        assert set(point["methods"]) == {"plain", "ngram"} == set(point["peers"]["vllm"])
        for method, theirs in point["peers"]["vllm"].items():
            ahead = point["methods"][method]["output_tok_s"] / theirs["output_tok_s"]
            assert theirs["ours_over_theirs"] == pytest.approx(ahead)
        assert point["peers"]["vllm"]["plain"]["speedup"] == 1 and point["peers"]["vllm"]["ngram"]["speedup"] > 0
    figure = plot_load(found["runs"])
    names = [trace.name for trace in figure.data[::4]]
    assert names == ["plain decoding", "n-gram lookup", "vllm: plain decoding", "vllm: n-gram lookup"]
    assert "× vllm's throughput" in figure.layout.title.text.replace("<br>", " ")
    assert any("vllm plain" in line and "(ours" in line for line in load_run.describe(found["summary"]))
    missing = settings_for(PROFILES["cpu"], **given, methods=("plain",), output_len=4, backends=("torch", "vllm"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lone = bench_load("cpu", missing, say=lambda line: None)
    assert {r["backend"] for r in lone["runs"]} == {"torch"}
    assert lone["parts"][-1]["status"] == "not run" and "vLLM is not installed" in lone["parts"][-1]["why"]
    for wrong, why in (
        ({"backends": ("vllm",)}, "torch, or torch and vllm"),
        ({"backends": ("torch", "vllm"), "kv_tokens": 64}, "only torch takes them"),
    ):
        with pytest.raises(OptionError, match=why):
            settings_for(PROFILES["cpu"], **given, **wrong)


def test_the_same_requests_get_the_same_text_though_some_lost_their_slot(document):
    assert document["summary"]["identical_text"] is True
    assert all(run["figures"]["preemptions"] > 0 for run in document["runs"] if run["concurrency"] == 4)
    lengths = {tuple(row["output_tokens"] for row in r["timeline"]) for r in document["runs"] if r["concurrency"] == 4}
    assert len(lengths) == 1


def test_the_summary_compares_with_plain_decoding_in_flight(document):
    runs = {(r["method"], r["batching"], r["concurrency"]): r["figures"]["output_tok_s"] for r in document["runs"]}
    one, four = document["summary"]["points"]
    assert one["static"] is None and one["methods"]["plain"]["speedup"] == 1
    assert four["methods"]["ngram"]["speedup"] == runs["ngram", IN_FLIGHT, 4] / runs["plain", IN_FLIGHT, 4]
    assert four["static"]["speedup"] == runs["plain", STATIC, 4] / runs["plain", IN_FLIGHT, 4]
    changed = json.loads(json.dumps(document["runs"]))
    for run, rate in zip(changed, (10, 12, 9, 40, 30, 39, 41), strict=True):
        run["figures"]["output_tok_s"] = float(rate)
    changed[-1]["tokens_sha256"] = "another"
    found = load_run.summarize(changed)
    assert found["stops_paying"] == {"draft_target": 4, "ngram": 1} and found["identical_text"] is False
    lines = load_run.describe(found)
    assert "ngram stops paying at 1" in lines and "in-flight batching 1.33x static" in lines[1]
    for run in changed:
        run |= {"rate": 2.0}
    slower = next(r for r in changed if r["method"] == "ngram" and r["concurrency"] == 1)["figures"]
    slower["latency_s_p50"] = 2 * changed[0]["figures"]["latency_s_p50"]
    at_rate = load_run.summarize(changed[:3])
    assert (
        at_rate["stops_paying"]["ngram"] == 2.0
        and "ngram 0.50x plain in median latency" in load_run.describe(at_rate)[0]
    )
    for run in changed:
        run |= {"rate": None}
    assert load_run.summarize(changed[:4])["stops_paying"] == {"draft_target": None, "ngram": 1}  # cut by a budget


def test_a_budget_leaves_out_what_would_end_later(cache):
    settings = settings_for(PROFILES["cpu"], target=TINY, methods=("plain",), concurrency=(1, 2), output_len=4)
    said: list[str] = []
    document = bench_load("cpu", settings, budget_s=1e-3, say=said.append)
    assert [p["status"] for p in document["parts"]] == ["done", "skipped", "skipped"] and len(document["runs"]) == 1
    assert any("left out" in line for line in said)


WRONG: list[tuple[dict, str]] = [
    ({"arrival": "uniform"}, "'closed' or 'poisson'"),
    ({"rates": (1.0,)}, "rate with closed"),
    ({"arrival": "poisson", "concurrency": (1, 2)}, "2 concurrencies"),
    ({"arrival": "poisson", "rates": (0.0,)}, "above 0"),
    ({"concurrency": (0,)}, "concurrency is 0"),
    ({"concurrency": (2, 2)}, "each once"),
    ({"methods": ("plain", "magic")}, "'magic' is unknown"),
    ({"methods": ("ngram",)}, "plain and others"),
    ({"output_len": 0}, "output_len is 0"),
    ({"methods": ("plain",), "draft_len_schedule": {1: 4}}, "one that drafts"),
    ({"draft_len_schedule": {1: 4}, "max_draft_len": 3}, "entry 1 with max_draft_len"),
]


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_what_cannot_be_is_refused_before_anything_is_loaded(given, words):
    with pytest.raises(WorkbookError, match=words):
        settings_for(PROFILES["cpu"], **given)


def test_shapes_with_random_weights_are_run_as_others_publish_them():
    """The call is the one that an engine on a GPU gets; nothing is loaded here."""
    asked: list[tuple] = []
    warmed: list[tuple[int, int]] = []

    def make(model, **options):
        asked.append((model, options))
        return SimpleNamespace(
            close=lambda: None, tokenizer=lambda text: {"input_ids": list(text.encode())}, info=INFO,
            engine=Machine(64),
            generate=lambda prompts, params: warmed.append((len(prompts), params[0].max_tokens)),
        )  # fmt: skip

    pair = {"target": "dummy:llama-3.1-8b", "drafter": "dummy:llama-3.2-1b", "concurrency": (1, 16)}
    with pytest.MonkeyPatch.context() as patch:
        clocked: Callable = lambda engine, load, *, batching: engine.run(load, batching)  # noqa: E731
        patch.setattr(load_run.loads, "serve", clocked)
        document = bench_load("h200", settings_for(PROFILES["h200"], **pair), say=lambda line: None, make_llm=make)
    assert warmed == [(1, 128), (1, 128), (16, 128), (16, 128)]  # whole answers: with short ones 16 would never meet
    (target, plain), (_, drafted) = asked
    assert target == "dummy:llama-3.1-8b" and plain["speculative_config"] is plain["simulated_acceptance"] is None
    assert (
        drafted["speculative_config"].max_draft_len == 3 and drafted["simulated_acceptance"].acceptance_length == 2.44
    )
    for options in (plain, drafted):
        assert (options["dtype"], options["device"], options["max_batch_size"], options["max_seq_len"]) == (
            "fp8", "cuda", 16, 512,
        )  # fmt: skip
    run = document["runs"][-1]
    assert {(r["prompt_tokens"], r["output_tokens"]) for r in run["timeline"]} == {(128, 128)} and len(
        run["timeline"]
    ) == 64
    assert run["is_simulated"] and document["summary"]["is_simulated"] and document["summary"]["identical_text"] is None
    with pytest.raises(OptionError, match="does not run experiment load"):
        settings_for(PROFILES["tensorrt_llm"])


INFO = {"backend": "torch", "target": "t", "drafter": None, "dtype": "fp8", "device": "cuda", "is_simulated": True}
