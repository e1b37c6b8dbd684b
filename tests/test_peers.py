"""Engines side by side: what ran, how fast against each other, where texts part; and an engine in its own process."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tutorial_lib import cli
from tutorial_lib.bench import peers
from tutorial_lib.bench.peers import Asked, compare_backends
from tutorial_lib.bench.prompts import Prompt
from tutorial_lib.bench.remote import RemoteLLM
from tutorial_lib.config import SamplingParams
from tutorial_lib.drafter_options import DrafterOptions
from tutorial_lib.errors import BackendUnavailable, OptionError
from tutorial_lib.models import load_tokenizer, resolve
from tutorial_lib.results import Generation, Round, read_records

STANDIN = Path(__file__).parent / "standin_vllm"
TARGET = "dummy:tiny-llama?seed=1"
PROMPTS = [Prompt("a", "easy", ("one two",)), Prompt("b", "hard", ("three four five",))]
DRAFTER = DrafterOptions("ngram", 3)


class Bytes:
    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": list(text.encode())}


@dataclass
class Engine:
    """Answers from the prompt alone, `step_s` a token by its own clock; `wrong` replaces one token of one prompt."""

    backend: str
    drafter: DrafterOptions | None
    step_s: float
    wrong: tuple[int, int] | None = None  # length of the prompt, index of the token
    tells_rounds: bool = True
    calls: int = 0
    is_closed: bool = False
    tokenizer: Bytes = field(default_factory=Bytes)

    @property
    def info(self):
        return {
            "backend": self.backend, "target": "t", "drafter": None, "dtype": "float32", "device": "cpu",
            "max_draft_len": 3 if self.drafter else 0,
        }  # fmt: skip

    def generate(self, inputs, params=None):
        if isinstance(inputs[0], int):
            return self.generate([inputs], params)[0]
        self.calls += 1
        return [self._answer(ids, params) for ids in inputs]

    def _answer(self, ids, params):
        tokens = [(sum(ids) + 7 * i) % 90 + 33 for i in range(params.max_tokens)]
        if self.wrong and self.wrong[0] == len(ids) and self.wrong[1] < len(tokens):
            tokens[self.wrong[1]] = 0
        step = self.step_s * (1 + 0.001 * self.calls)  # a machine that slows down
        drafted = (1, 2, 3) if self.drafter else ()
        rounds = [Round(drafted, 0, (t,), 0.0, step, step * (i + 2)) for i, t in enumerate(tokens[1:])]
        latency = step * len(tokens)
        return Generation(ids, tokens, "", "length", rounds if self.tells_rounds else [], step, latency)

    def close(self):
        self.is_closed = True


def run(backends, engines, asked=None, **options):
    """`engines`: (backend, has a drafter) -> an engine, or an error that it fails with."""

    def make(backend, asked, drafter, prompts):
        found = engines[backend, drafter is not None]
        if isinstance(found, Exception):
            raise found
        return found

    asked = asked or Asked("t", DRAFTER, "float32", "cpu", max_tokens=12)
    return compare_backends(backends, asked, prompts=PROMPTS, say=lambda line: None, make=make, repeats=2, **options)


def engine(backend, step_s, drafter=None, **more):
    return Engine(backend, drafter, step_s, **more)


def test_engines_are_compared_over_the_same_prompts_and_texts_token_by_token():
    engines = {
        ("transformers", False): engine("transformers", 0.02),
        ("transformers", True): engine("transformers", 0.01, DRAFTER, wrong=(15, 4)),
        ("torch", False): engine("torch", 0.01),
        ("torch", True): engine("torch", 0.005, DRAFTER, tells_rounds=False),
        ("vllm", False): BackendUnavailable("vLLM is not installed", "", "install it"),
    }
    document = run(["transformers", "torch", "vllm"], engines)
    summary = document["summary"]
    assert summary["reference"] == "torch" and summary["ran"] == ["transformers", "torch"]
    by = {(e["backend"], e["method"]): e for e in summary["entries"]}
    assert len(by) == 6 and len(document["runs"]) == 4
    assert by["torch", "ngram"]["speedup"] == pytest.approx(2, rel=0.01)
    assert by["transformers", "ngram"]["against_reference"] == pytest.approx(0.5, rel=0.01)
    assert by["transformers", "plain"]["against_reference"] == pytest.approx(0.5, rel=0.01)
    low, high = by["torch", "plain"]["output_tok_s_range"]
    assert low <= by["torch", "plain"]["output_tok_s"] <= high and low < high
    wrong = by["transformers", "ngram"]
    right = (sum(b"three four five") + 28) % 90 + 33
    assert wrong["same_text"] is False and (wrong["different_answers"], wrong["answers"]) == (1, 2)
    assert wrong["first_difference"] == {"request": "b/0", "token": 4, "reference": right, "found": 0}
    assert by["torch", "ngram"]["same_text"] is True and by["torch", "ngram"]["acceptance_length"] is None
    for method in ("plain", "ngram"):  # tried once, listed twice
        assert by["vllm", method]["status"] == "not run" and "not installed" in by["vllm", method]["why"]
    rows = {(row["backend"], row["method"]): row for row in peers.describe(summary)}
    assert rows["torch", "ngram"]["acceptance length"] == "not available"
    assert rows["torch", "plain"]["acceptance length"] == "–" and rows["torch", "plain"]["text"] == "the reference"
    assert "1 of 2 answers differ, first at token 4 of b/0" in rows["transformers", "ngram"]["text"]
    assert all(e.is_closed for e in engines.values() if isinstance(e, Engine))


def test_a_method_that_one_engine_refuses_leaves_its_plain_run_and_sampled_texts_are_not_compared():
    engines = {
        ("torch", False): engine("torch", 0.01),
        ("torch", True): engine("torch", 0.01, DRAFTER),
        ("transformers", False): engine("transformers", 0.01),
        ("transformers", True): OptionError("no such method", "another"),
    }
    asked = Asked("t", DRAFTER, "float32", "cpu", max_tokens=12, temperature=1.0)
    summary = run(["torch", "transformers"], engines, asked)["summary"]
    assert summary["ran"] == ["torch", "transformers"]
    assert [e["status"] for e in summary["entries"]] == ["ran", "ran", "ran", "not run"]
    assert {e["same_text"] for e in summary["entries"][:3]} == {None}
    assert all("sampled" in e["text_note"] for e in summary["entries"][:3])
    nothing = {key: BackendUnavailable("gone") for key in engines}
    with pytest.raises(OptionError, match="none of the backends runs here.*torch plain: gone"):
        run(["torch", "transformers"], nothing)
    for wrong in (["torch"], ["torch", "torch"], ["torch", "onnx"]):
        with pytest.raises(OptionError, match="at least two|unknown"):
            run(wrong, engines)


def test_engines_that_do_not_fit_together_run_one_after_another():
    open_at_once = []

    class Large(Engine):
        def generate(self, inputs, params=None):
            open_at_once.append(sum(not e.is_closed for e in made))
            return super().generate(inputs, params)

    made = []

    def make(backend, asked, drafter, prompts):
        made.append(Large(backend, drafter, 0.01))
        return made[-1]

    two_turns = [Prompt("a", "easy", ("one two", "and then"))]
    asked = Asked("t", DRAFTER, "float32", "cpu", max_tokens=6)
    document = compare_backends(
        ["torch", "vllm"], asked, prompts=two_turns, say=lambda line: None, make=make, repeats=2, one_at_a_time=True
    )
    assert len(made) == 4 and set(open_at_once) == {1} and all(e.is_closed for e in made)
    entries = document["summary"]["entries"]
    assert [e["status"] for e in entries] == ["ran"] * 4 and {e["same_text"] for e in entries} == {True}
    assert document["runs"][0]["figures"]["requests"] == 1  # later turns would need another engine's answers
    assert "not in turns" in document["summary"]["notes"][-1]


def test_each_engine_has_its_own_best_k_at_every_acceptance():
    """A round of K costs 10 ms and 1 (torch) or 4 (vllm) a draft token: what pays can be worked out by hand."""
    kept = []

    def make(backend, asked, drafter, prompts):
        k = drafter.k if drafter else 0
        assert asked.forced_length(drafter) == (None if not k else pytest.approx(sum(0.5**i for i in range(k + 1))))
        return Timed(backend, drafter, 0.010 + k * {"torch": 0.001, "vllm": 0.004}[backend])

    class Timed(Engine):
        @property
        def info(self):
            return super().info | {"max_draft_len": self.drafter.k if self.drafter else 0}

        def _answer(self, ids, params):
            steps = range(params.max_tokens)
            rounds = [Round((), 0, (1,), 0.0, self.step_s, self.step_s * (i + 2)) for i in steps[1:]]
            return Generation(ids, list(steps), "", "length", rounds, self.step_s, self.step_s * len(steps))

    asked = Asked("t", DRAFTER, "float32", "cpu", max_tokens=6, draft_lens=(2, 6), acceptance_probability=0.5)
    document = compare_backends(
        ["torch", "vllm"], asked, prompts=PROMPTS, say=lambda line: None, make=make, repeats=1, one_at_a_time=True,
        keep=kept.append,
    )  # fmt: skip
    names = [(e["backend"], e["method"]) for e in document["summary"]["entries"]]
    assert names == [(b, m) for b in ("torch", "vllm") for m in ("plain", "ngram K=2", "ngram K=6")]
    assert [len(found["runs"]) for found in kept] == [1, 2, 3, 4, 5, 6]
    best = {(row["alpha"], row["backend"]): row for row in document["summary"]["best"]}
    assert set(best) == {(a, b) for a in peers.PROBABILITIES for b in ("torch", "vllm")}

    def rate(alpha, k, each):
        return sum(alpha**i for i in range(k + 1)) / (0.010 + k * each)

    for (alpha, backend), row in best.items():
        each = {"torch": 0.001, "vllm": 0.004}[backend]
        k = max((0, 2, 3, 4, 5, 6), key=lambda n: rate(alpha, n, each))
        assert row["best_k"] == k and row["is_measured"] == (k in (0, 2, 6))
        assert row["decode_tok_s"] == pytest.approx(rate(alpha, k, each), rel=1e-6)
        assert row["speedup"] == pytest.approx(rate(alpha, k, each) / rate(alpha, 0, each))
    torch, vllm = best[0.8, "torch"], best[0.8, "vllm"]
    assert torch["against_reference"] is None
    assert vllm["against_reference"] == pytest.approx(vllm["decode_tok_s"] / torch["decode_tok_s"])
    assert best[0.6, "vllm"]["best_k"] == 2 and best[0.9, "torch"]["best_k"] == 6
    rows = peers.describe_best(document["summary"]["best"], "torch")
    assert rows[0]["round's time"] in ("measured", "between two measured K") and len(rows) == 8


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"draft_lens": (0, 2)}, "K is 0, 2.*from 1 on"),
        ({"draft_lens": (2, 2)}, "K is 2, 2.*each once"),
        ({"draft_lens": (2,), "drafter": None}, "a drafter"),
        ({"draft_lens": (2,), "acceptance_length": 2.0}, "one way to force acceptance"),
        ({"acceptance_probability": 0.5, "acceptance_length": 2.0}, "one way to force acceptance"),
        ({"acceptance_probability": 1.5}, "1.5.*0 to 1"),
    ],
)
def test_sweeps_that_cannot_be_are_refused(given, words):
    with pytest.raises(OptionError, match=words):
        peers.check_sweep(Asked(**({"target": "t", "drafter": DRAFTER} | given)))


def test_forced_acceptance_is_refused_by_name_where_an_engine_has_none():
    asked = Asked(TARGET, DRAFTER, "float32", "cpu", acceptance_length=2.0)
    with pytest.raises(OptionError, match="simulated_acceptance was given for backend 'transformers'"):
        peers.open_llm("transformers", asked, DRAFTER, PROMPTS)


def test_a_dry_run_prints_vllms_arguments_and_launch_lines_and_loads_nothing(tmp_path, capsys):
    file = tmp_path / "plan.json"
    words = ["compare", "--backends", "torch,vllm", "--target", "meta-llama/Llama-3.3-70B-Instruct", "--dry-run"]
    words += ["--drafter", "meta-llama/Llama-3.2-1B-Instruct", "--max-draft-len", "10", "--json", str(file)]
    assert cli._run([*words, "--tensor-parallel-size", "8", "--nodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "speculative_config = {'num_speculative_tokens': 10, 'method': 'draft_model'" in out
    assert "ray start --head" in out and "--tensor-parallel-size 16" in out
    plan = json.loads(file.read_text())
    assert plan["follows"] == "vllm 0.24.0" and plan["launch"][-1].startswith("vllm serve meta-llama/")
    for wrong in (["--nodes", "2"], ["--max-draft-len", "4"]):
        assert cli._run(["compare", "--backends", "torch,vllm", *wrong]) == 2
        assert f"{wrong[0]} has no effect" in capsys.readouterr().err
    assert cli._run(["compare", "--backends", "torch,transformers", "--dry-run"]) == 2


# ---- a process of its own -------------------------------------------------------------------------------------------


@pytest.fixture
def vllm_path(monkeypatch, cache):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STANDIN), os.environ.get("PYTHONPATH", "")]))


def test_the_command_runs_real_engines_and_one_in_a_child_and_says_what_did_not(vllm_path, tmp_path, capsys):
    prompts, file = tmp_path / "two.jsonl", tmp_path / "out.jsonl"
    lines = [{"question_id": p.question_id, "category": p.category, "turns": p.turns} for p in PROMPTS]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["compare", "--backends", "torch,vllm,transformers,tensorrt_llm", "--target", TARGET, "--drafter", "ngram"]
    words += ["--max-draft-len", "3", "--max-tokens", "8", "--repeats", "1"]
    code = cli._run([*words, "--prompts", str(prompts), "--json", str(file)])
    out = capsys.readouterr().out
    assert code == 0, out
    *runs, last = read_records(file)
    by = {(e["backend"], e["method"]): e for e in last["summary"]["entries"]}
    assert [r["backend"] for r in runs] == ["torch", "torch", "vllm", "vllm", "transformers", "transformers"]
    assert {r["prompt_set"]["sha256"] for r in runs} == {runs[0]["prompt_set"]["sha256"]}
    assert {r["max_draft_len"] for r in runs if r["method"] == "ngram"} == {3}
    for backend in ("torch", "transformers"):
        assert by[backend, "ngram"]["same_text"] is True
    assert by["vllm", "plain"]["same_text"] is None and last["summary"]["is_simulated"]  # a stand-in's words
    assert by["tensorrt_llm", "ngram"]["status"] == "not run" and "not installed" in by["tensorrt_llm", "ngram"]["why"]
    assert "not run" in out and "simulated" in out
    sweep = ["compare", "--backends", "torch,vllm", "--target", TARGET, "--drafter", "ngram", "--sweep", "1,3"]
    code = cli._run([*sweep, "--max-tokens", "8", "--repeats", "1", "--one-at-a-time", "--json", str(file)])
    out = capsys.readouterr().out
    assert code == 0 and "right per token" in out, out
    *runs, last = read_records(file)
    assert [r["max_draft_len"] for r in runs] == [0, 1, 3] * 2
    assert {row["backend"] for row in last["summary"]["best"]} == {"torch", "vllm"}
    assert cli._run([*sweep, "--max-draft-len", "2"]) == 2 and cli._run([*sweep[:-1], "x"]) == 2


def test_a_child_answers_as_the_backend_would_and_its_end_is_told(vllm_path):
    tokenizer = load_tokenizer(resolve(TARGET))
    llm = RemoteLLM(TARGET, backend="vllm", tokenizer=tokenizer, drafter=DRAFTER, max_batch_size=2)
    ids = list(range(40, 60))
    one, two = llm.generate([ids, ids[3:]], SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0))
    alone = llm.generate(ids, SamplingParams(max_tokens=6, ignore_eos=True))
    assert alone.token_ids == one.token_ids != two.token_ids and isinstance(alone.rounds[0], Round)
    assert list(one.logprobs[0]) == [one.token_ids[0]] and llm.info["max_draft_len"] == 3
    with pytest.raises(Exception, match="holds id"):
        llm.generate([10**6], SamplingParams())
    os.kill(llm._process.pid, 9)
    with pytest.raises(BackendUnavailable, match="the process of vllm ended"):
        llm.generate(ids)
    llm.close()
    with pytest.raises(OptionError, match="cannot honour dtype='int8'"):
        RemoteLLM(TARGET, backend="vllm", tokenizer=tokenizer, dtype="int8")
