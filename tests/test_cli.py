"""The command line: what it passes on, what it prints, and one line with exit code 2 for every mistake."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tutorial_lib import api, cli, config, doctor, models, runner
from tutorial_lib.config import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    Fp8Config,
    LayerSkipDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
)
from tutorial_lib.errors import EngineDirError, ModelError, PromptError
from tutorial_lib.results import Generation, Round

REPO = Path(__file__).parents[1]


class FakeLLM:
    """Stands for `api.LLM`: remembers what it was asked, streams `texts`, each the text so far."""

    texts = ["Hel", "Hello", "Hello\nworld"]
    error: BaseException | None = None
    made: list[FakeLLM] = []

    def __init__(self, model, **options):
        if FakeLLM.error is not None:
            raise FakeLLM.error
        self.model, self.options, self.is_closed = model, options, False
        self.info, self.metrics_url = {"backend": "torch", "target": model}, "http://127.0.0.1:1/metrics"
        self.tokenizer = FakeTokenizer()
        options["say"]("building \x1b[31mit")
        FakeLLM.made.append(self)

    def generate_async(self, inputs, params, streaming=False):
        self.inputs, self.params = inputs, params
        assert streaming
        for text in FakeLLM.texts:
            yield Generation([1, 2], [3] * 5, text, "length", ROUNDS, ttft_s=0.05, latency_s=0.25)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.is_closed = True


class FakeTokenizer:
    chat_template = "{{ user }}"
    bos_token_id = None

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"<user>{messages[0]['content']}<assistant>"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(char) for char in text]}


ROUNDS = [Round((7, 7), 1, (7, 8), 0.01, 0.08, 0.15), Round((7, 7), 1, (7, 8), 0.01, 0.08, 0.25)]
PROMPT = ["generate", "--prompt", "Say hello"]


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "error", None)
    FakeLLM.made.clear()
    return FakeLLM


@pytest.fixture
def workbook(capsys):
    """Run one command; returns (exit code, stdout, stderr)."""

    def call(*words):
        code = cli._run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def refuses(workbook):
    """Run one command that must be refused: exit code 2, nothing on stdout, one line; returns the line."""

    def call(*words):
        code, out, err = workbook(*words)
        lines = [line for line in err.splitlines() if not line.startswith("building ")]
        assert code == 2 and out == "", (code, out, err)
        assert len(lines) == 1 and lines[0].startswith("error: "), err
        return lines[0]

    return call


# ---- generate -------------------------------------------------------------------------------------------------------


def test_generate_prints_the_text_and_a_summary_last(workbook):
    code, out, err = workbook(*PROMPT, "--drafter", "ngram")
    assert code == 0
    assert out.splitlines() == [
        "Hello",
        "world",
        "summary: 5 output tokens | output throughput 20.0 tokens/s | acceptance length 2.00 | TTFT 0.050 s | "
        "ended by its limit",
    ]
    assert err == "building \\x1b[31mit\n"
    assert FakeLLM.made[0].is_closed


def test_generate_passes_every_option_on(workbook):
    workbook(
        *[*PROMPT, "--target", "here/target", "--drafter", "here/draft", "--max-draft-len", 3, "--max-tokens", 9],
        *["--temperature", 0.5, "--top-p", 0.9, "--top-k", 7, "--seed", 11, "--backend", "transformers"],
        *["--dtype", "bfloat16"],
    )
    (llm,) = FakeLLM.made
    assert llm.model == "here/target"
    speculative = llm.options["speculative_config"]
    assert speculative == DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir="here/draft")
    assert llm.options["backend"] == "transformers" and llm.options["dtype"] == "bfloat16"
    assert llm.params == config.SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, seed=11)


def test_generate_defaults(workbook):
    _, out, _ = workbook(*PROMPT)
    (llm,) = FakeLLM.made
    assert llm.model == "embedded:target" and llm.options["speculative_config"] is None
    assert llm.params == config.SamplingParams(max_tokens=64)
    assert "acceptance length: none, no drafts" in out


def test_generate_ngram(workbook):
    workbook(*PROMPT, "--drafter", "ngram")
    assert FakeLLM.made[0].options["speculative_config"] == NGramDecodingConfig(max_draft_len=4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ngram", "--ngram-size", 2], NGramDecodingConfig(max_matching_ngram_size=2)),
        (["suffix"], SADecodingConfig()),
        (["suffix", "--ngram-size", 5, "--max-draft-len", 9],
         SADecodingConfig(max_draft_len=9, max_matching_ngram_size=5)),
        (["lookahead"], LookaheadDecodingConfig()),
        (["lookahead", "--lookahead", "7,5,3"],
         LookaheadDecodingConfig(max_window_size=7, max_ngram_size=5, max_verification_set_size=3)),
        (["lookahead", "--lookahead", "1,1,0"],
         LookaheadDecodingConfig(max_window_size=1, max_ngram_size=1, max_verification_set_size=0)),
        (["layer-skip"], LayerSkipDecodingConfig()),
        (["layer-skip", "--skip-layers", "3,5", "--confidence-threshold", 0.4],
         LayerSkipDecodingConfig(skip_layers=[3, 5], confidence_threshold=0.4)),
        (["medusa"], MedusaDecodingConfig(speculative_model_dir="embedded:medusa")),
        (["embedded:medusa", "--tree", "0/1/0.0"],
         MedusaDecodingConfig(speculative_model_dir="embedded:medusa", medusa_choices=[[0], [1], [0, 0]])),
        (["eagle3", "--confidence-threshold", 0.2],
         EagleDecodingConfig(speculative_model_dir="embedded:eagle3", confidence_threshold=0.2)),
        (["embedded:eagle3", "--tree", "dynamic:4,16", "--max-draft-len", 6],
         EagleDecodingConfig(speculative_model_dir="embedded:eagle3", max_draft_len=6, use_dynamic_tree=True,
                             dynamic_tree_max_topK=4, max_total_draft_tokens=16)),
        (["eagle3", "--tree", "0/0.0/1"],
         EagleDecodingConfig(speculative_model_dir="embedded:eagle3", eagle_choices=[[0], [0, 0], [1]])),
        (["embedded:draft", "--confidence-threshold", 0.3],
         DraftTargetDecodingConfig(speculative_model_dir="embedded:draft", confidence_threshold=0.3)),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)  # fmt: skip
def test_drafters_by_name(workbook, words, expected):
    workbook(*PROMPT, "--drafter", *words)
    assert FakeLLM.made[0].options["speculative_config"] == expected


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ({"medusa_num_heads": 3}, MedusaDecodingConfig),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, EagleDecodingConfig),
        ({"architectures": ["LlamaForCausalLM"]}, DraftTargetDecodingConfig),
        ([], DraftTargetDecodingConfig),
        (None, DraftTargetDecodingConfig),
    ],
)
def test_a_folder_says_which_method_it_is_for(workbook, tmp_path, content, kind):
    if content is not None:
        (tmp_path / "config.json").write_text(json.dumps(content))
    workbook(*PROMPT, "--drafter", tmp_path)
    assert FakeLLM.made[0].options["speculative_config"] == kind(speculative_model_dir=str(tmp_path))


def test_chat_template_unless_raw(workbook):
    workbook(*PROMPT)
    assert "".join(map(chr, FakeLLM.made[0].inputs)) == "<user>Say hello<assistant>"
    workbook(*PROMPT, "--raw")
    assert FakeLLM.made[1].inputs == "Say hello"


def test_text_comes_as_it_is_made(monkeypatch):
    writes = []

    class Out:
        def write(self, text):
            writes.append(text)

        def flush(self):
            writes.append("|")

    generations = [Generation([1], [2], text, "length") for text in ("a", "a", "abc")]
    assert cli.stream_text(iter(generations), Out()) is generations[-1]
    assert "".join(writes) == "a||bc|\n"


def test_model_text_cannot_steer_the_terminal(workbook, monkeypatch):
    monkeypatch.setattr(FakeLLM, "texts", ["\x1b]0;title\x07red\x1b[31m \r\x9b2J \u202egnp.exe\tok\nä🙂\u200d"])
    _, out, _ = workbook(*PROMPT)
    assert out.startswith("\\x1b]0;title\\x07red\\x1b[31m \\r\\x9b2J \\u202egnp.exe\tok\nä🙂\u200d\n")
    assert not any(ord(char) < 32 and char not in "\n\t" for char in out)


@pytest.mark.parametrize("text", ["", "plain", "a\tb\nc", "ünï 漢字 🙂"])
def test_printable_leaves_text_alone(text):
    assert cli.printable(text) == text
    assert cli.printable("\ud800\x7f") == "\\ud800\\x7f"


def test_json_file(workbook, tmp_path):
    target = tmp_path / "out.json"
    target.write_text("old")
    code, out, _ = workbook(*PROMPT, "--drafter", "ngram", "--seed", 3, "--json", target)
    document = json.loads(target.read_text())
    assert code == 0 and out.startswith("Hello\nworld\nsummary:")
    assert document["prompt"] == "Say hello" and document["text"] == "Hello\nworld"
    assert document["figures"]["acceptance_length"] == 2.0 and "acceptance_length" in document["definitions"]
    assert document["rounds"][0]["drafted"] == [7, 7] and document["provenance"]["seed"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_json_to_stdout_is_one_document(workbook):
    code, out, err = workbook(*PROMPT, "--json", "-")
    assert code == 0 and json.loads(out)["text"] == "Hello\nworld"
    assert "Hello\nworld\nsummary:" in err


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_draft_len", [0, -1])
@pytest.mark.parametrize("drafter", [[], ["--drafter", "ngram"], ["--drafter", "embedded:draft"]])
def test_k_below_one(refuses, max_draft_len, drafter):
    assert f"max_draft_len is {max_draft_len}" in refuses(*PROMPT, *drafter, "--max-draft-len", max_draft_len)
    assert FakeLLM.made == []  # before a model is loaded


@pytest.mark.parametrize("prompt", ["", "  \n", "\udcff"])
def test_prompt_that_is_none(refuses, prompt):
    assert "prompt is" in refuses("generate", "--prompt", prompt)
    assert FakeLLM.made == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--max-tokens", "many"], "'--max-tokens'"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0"], "top_p is 0"),
        (["--top-k", "-1"], "top_k is -1"),
        (["--seed", "-3"], "seed is -3"),
        (["--drafter", ""], "--drafter is empty"),
        (["--tree", "0"], "--tree has no effect without --drafter"),
        (
            ["--drafter", "ngram", "--confidence-threshold", "0.5"],
            "--confidence-threshold has no effect with --drafter",
        ),
        (["--drafter", "suffix", "--lookahead", "4,3,4"], "--lookahead has no effect with --drafter suffix"),
        (["--drafter", "lookahead", "--max-draft-len", "3"], "--max-draft-len has no effect with --drafter lookahead"),
        (["--drafter", "lookahead", "--lookahead", "4,3"], "three whole numbers W,N,G"),
        (["--drafter", "lookahead", "--lookahead", "4,x,3"], "--lookahead holds '4,x,3'"),
        (["--drafter", "lookahead", "--lookahead", "4,1,3"], "max_ngram_size is 1"),
        (["--drafter", "layer-skip", "--skip-layers", "2,-1"], "skip_layers entry is -1"),
        (["--drafter", "layer-skip", "--confidence-threshold", "1.5"], "confidence_threshold is 1.5"),
        (["--drafter", "medusa", "--tree", "dynamic:4,16"], "--tree holds 'dynamic:4,16'"),
        (["--drafter", "medusa", "--tree", "0/0.0.1"], "medusa_choices holds [0, 0, 1]"),
        (["--drafter", "eagle3", "--tree", "dynamic:4"], "dynamic:TOPK,TOTAL"),
        (["--drafter", "suffix", "--ngram-size", "0"], "max_matching_ngram_size is 0"),
        (["--json", "missing/out.json"], "there is no folder missing"),
        (["--json", "/dev/null"], "is not a file"),
        (["--json", "."], "is not a file"),
        (["--no-such-option", "1"], "--no-such-option"),
        (["stray"], "stray"),
    ],
)
def test_options_are_checked_before_a_model_is_loaded(refuses, options, words):
    assert words in refuses(*PROMPT, *options)
    assert FakeLLM.made == []


@pytest.mark.parametrize(
    "words",
    [["genrate"], ["generate"], ["build"], ["report"], ["--what"], ["run", "-p"], ["bench", "--repeats", "x"]],
)
def test_wrong_command_lines(refuses, words):
    assert "--help" in refuses(*words)


@pytest.mark.parametrize(
    "error",
    [
        ModelError("model 'nowhere' is not a folder", "a folder", "check the spelling"),
        EngineDirError("engine directory x was built for max_draft_len 4", "max_draft_len 8", "rebuild"),
        PromptError("prompt has 5000 tokens", "fewer than 2048, the engine's max_seq_len", "shorten it"),
        ModelError("token id 7 is 'a' in the target\nand 'b' in the drafter"),
        ModelError("folder \x1b[31mred"),
    ],
)
def test_errors_of_the_package_are_one_line(refuses, monkeypatch, error):
    monkeypatch.setattr(FakeLLM, "error", error)
    line = refuses(*PROMPT)
    assert line == f"error: {error}".replace("\x1b", "\\x1b")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/full/x"), ["/full/x: No space left", "free space"]),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 5000), ["aaa: File name too long", "a shorter name"]),
        (PermissionError(errno.EACCES, "Permission denied", "/theirs"), ["/theirs: Permission denied", "may read"]),
        (FloatingPointError("the target's logits hold NaN"), ["logits hold NaN", "fetch the model again"]),
    ],
    ids=str,
)
def test_what_the_machine_refuses_is_one_line(refuses, monkeypatch, error, words):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("tutorial_lib.api.LLM", fail)
    message = refuses("generate", "--prompt", "x")
    assert all(word in message for word in words) and len(message) < 400, message


def test_names_too_long_for_the_file_system_are_refused(refuses):
    name = "a" * 5000
    for words in (["plan", name], ["compare-records", name, name], ["fetch", name], ["build", name]):
        assert "File name too long" in refuses(*words)


def test_a_defect_keeps_its_traceback(workbook, monkeypatch):
    monkeypatch.setattr(FakeLLM, "error", ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        workbook(*PROMPT)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), typer.Abort()])
def test_ctrl_c(workbook, monkeypatch, interruption):
    monkeypatch.setattr(FakeLLM, "error", interruption)
    code, out, err = workbook(*PROMPT)
    assert code == 130 and "interrupted" in err and "Traceback" not in err


def test_unknown_model_for_real(refuses, monkeypatch, tmp_path):
    monkeypatch.undo()  # the real LLM
    monkeypatch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path))
    assert "no-such-model" in refuses(*PROMPT, "--target", "no-such-model")
    assert "'nobody' is unknown" in refuses(*PROMPT, "--target", "dummy:nobody")
    assert "backend is 'abacus'" in refuses(*PROMPT, "--backend", "abacus")
    assert "no-such-model" in refuses("build", "no-such-model", "--out", tmp_path / "engine")
    assert "no-such-model" in refuses("fetch", "no-such-model")
    assert not (tmp_path / "engine").exists()


# ---- doctor, fetch, build -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "expected"), [("OK", 0), ("WARN", 0), ("FAIL", 1)])
def test_doctor(workbook, monkeypatch, status, expected):
    monkeypatch.setattr(doctor, "diagnose", lambda: [doctor.Finding("disk", status, "0.1 GB", "free some")])
    code, out, err = workbook("doctor")
    assert code == expected and status in out and "-> free some" in out and err == ""
    assert out.splitlines()[-1].startswith("`make run` can")


def test_fetch(workbook, monkeypatch, tmp_path):
    asked = []

    def resolve(name, *, say):
        say("fetching 92.9 MB")
        asked.append(name)
        return models.Checkpoint(name, None if name.startswith("dummy:") else tmp_path, {})

    monkeypatch.setattr(models, "resolve", resolve)
    code, out, err = workbook("fetch")
    assert (code, out, err) == (0, f"embedded:target is ready in {tmp_path}\n", "fetching 92.9 MB\n")
    workbook("fetch", "embedded:draft", "dummy:llama-3.2-1b")
    assert asked == ["embedded:target", "embedded:draft", "dummy:llama-3.2-1b"]


def test_build(workbook, monkeypatch, tmp_path):
    calls = []

    def build(checkpoint, output_dir, **options):
        calls.append((checkpoint, output_dir, options))
        manifest = {"dtype": "int8", "arch": "cpu-x86_64", "files": {"w": {"bytes": 2_000_000}}}
        (tmp_path / "engine.json").write_text(json.dumps(manifest | {"build": {"seconds": 1.5}}))
        return tmp_path

    monkeypatch.setattr(api, "build", build)
    code, out, _ = workbook("build", "embedded:target")
    assert (code, out) == (0, f"{tmp_path} (int8, cpu-x86_64, 2.0 MB, built in 1.5 s)\n")
    workbook(
        *["build", "dummy:x", "--out", tmp_path / "e", "--dtype", "int8", "--device", "cpu", "--max-batch-size", 2],
        *["--max-seq-len", 128, "--max-draft-len", 4, "--overwrite"],
    )
    workbook("build", "dummy:x", "--dtype", "fp8", "--activation-scales", "dynamic", "--fp8-head", "--calib-size", 8)
    fp8 = Fp8Config(activation_scales="dynamic", quantize_head=True, calib_size=8)
    assert calls.pop()[2]["fp8"] == fp8
    for _, _, options in calls:
        options.pop("say")
    defaults = {"backend": "torch", "dtype": "auto", "device": "auto", "max_batch_size": 8, "max_seq_len": None}
    defaults |= {"max_draft_len": 16, "fp8": None, "kernel": "auto", "overwrite": False}
    asked = {"backend": "torch", "dtype": "int8", "device": "cpu", "max_batch_size": 2, "max_seq_len": 128}
    asked |= {"max_draft_len": 4, "fp8": None, "kernel": "auto", "overwrite": True}
    assert calls == [("embedded:target", None, defaults), ("dummy:x", tmp_path / "e", asked)]


# ---- bench, run, report ---------------------------------------------------------------------------------------------


@pytest.fixture
def fake_bench(monkeypatch):
    """Stands for bench.measure; returns the calls it got."""
    calls = []

    class Measure:
        @staticmethod
        def bench(profile, *, command, say, **options):
            say("plain 20.5 output tokens/s")
            calls.append((profile, command, options))
            return {"runs": [{"kind": "run"}], "summary": {"plain_tok_s": 20.5}}

    import tutorial_lib.bench

    monkeypatch.setitem(sys.modules, "tutorial_lib.bench.measure", Measure)
    monkeypatch.setattr(tutorial_lib.bench, "measure", Measure, raising=False)
    return calls


def test_bench(workbook, fake_bench, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/workbook", "bench", "--profile", "cpu"])
    code, out, err = workbook("bench", "--profile", "cpu", "--json", tmp_path / "out.json")
    assert fake_bench == [(config.PROFILES["cpu"], "workbook bench --profile cpu", {})]
    assert (code, out, err) == (0, "plain 20.5 output tokens/s\n", "")
    assert json.loads((tmp_path / "out.json").read_text())["runs"] == [{"kind": "run"}]


def test_bench_options(workbook, fake_bench, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"question_id": 1, "category": "chat", "turns": ["Hi"]}\n')
    code, out, err = workbook(
        *["bench", "--prompts", own, "--repeats", 5, "--max-draft-len", 2, "--methods", "plain, ngram", "--json", "-"]
    )
    ((profile, _, options),) = fake_bench
    assert code == 0 and json.loads(out)["summary"] == {"plain_tok_s": 20.5} and "plain 20.5" in err
    assert profile.max_draft_len == 2 and config.PROFILES["cpu"].max_draft_len == 4
    assert options["repeats"] == 5 and options["methods"] == ["plain", "ngram"]
    assert options["prompts"][0].turns == ("Hi",) and options["prompt_set"] == "own"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--profile", "cray"], "profile 'cray' is unknown"),
        (["--repeats", 0], "--repeats is 0"),
        (["--max-draft-len", 0], "--max-draft-len is 0"),
        (["--max-draft-len", -1], "--max-draft-len is -1"),
        (["--json", "missing/out.json"], "there is no folder"),
        (["--prompts", "missing.jsonl"], "missing.jsonl cannot be read"),
    ],
)
def test_bench_is_checked_before_it_starts(refuses, fake_bench, options, words):
    assert words in refuses("bench", *options)
    assert fake_bench == []


@pytest.fixture
def fake_methods(monkeypatch):
    """Stands for bench.methods.bench_methods; returns the calls it got."""
    from tutorial_lib.bench import methods

    calls = []

    def bench_methods(profile, *, command, say, **options):
        say("ngram: 1.20x")
        calls.append((profile.name, options))
        run = {"kind": "run", "provenance": {}}
        return {"experiment": "methods", "profile": profile.name, "runs": [run], "summary": {"methods": []}}

    monkeypatch.setattr(methods, "bench_methods", bench_methods)
    return calls


@pytest.mark.parametrize("profile", ["cpu", "h200"])
def test_bench_of_all_methods_ends_with_a_json_line(workbook, fake_methods, tmp_path, profile):
    file = tmp_path / "out.json"
    code, out, _ = workbook("bench", "--profile", profile, "--experiment", "methods", "--json", file)
    assert code == 0 and fake_methods == [(profile, {})]
    lines = out.splitlines()
    assert lines[0] == "ngram: 1.20x" and json.loads(lines[-1])["summary"] == {"methods": []}
    assert json.loads(file.read_text())["runs"][0]["kind"] == "run"


def test_bench_of_all_methods_takes_the_options_of_a_bench(workbook, fake_methods, refuses):
    chosen = ["--methods", "ngram,suffix", "--repeats", 1, "--max-draft-len", 3]
    code, out, err = workbook("bench", "--experiment", "methods", *chosen, "--json", "-")
    assert code == 0 and json.loads(out)["experiment"] == "methods" and "1.20x" in err
    assert fake_methods == [("cpu", {"methods": ["ngram", "suffix"], "repeats": 1, "max_draft_len": 3})]
    assert "--budget-s has no effect" in refuses("bench", "--experiment", "methods", "--budget-s", 60)
    assert "--max-draft-len is 0" in refuses("bench", "--experiment", "methods", "--max-draft-len", 0)
    assert "no experiments but methods" in refuses("bench", "--experiment", "70b-1b")


def test_bench_takes_another_number_format_where_an_experiment_has_none_of_its_own(workbook, refuses, monkeypatch):
    from tutorial_lib.bench import measure

    formats = []

    def bench(profile, **options):
        formats.append((profile.dtype, sorted(options)))
        return {"summary": {}}

    monkeypatch.setattr(measure, "bench", bench)
    assert workbook("bench", "--dtype", "bfloat16")[0] == workbook("bench")[0] == 0
    assert formats == [("bfloat16", ["command", "say"]), ("float32", ["command", "say"])]
    for experiment in (["load"], ["70b-1b", "--profile", "h200"]):
        assert "--dtype has no effect" in refuses("bench", "--dtype", "bfloat16", "--experiment", *experiment)


def test_generate_answers_prometheus_only_if_asked(workbook):
    workbook(*PROMPT)
    code, _, err = workbook(*PROMPT, "--metrics-port", 0)
    silent, asked = FakeLLM.made
    assert code == 0 and "metrics: http://127.0.0.1:1/metrics" in err
    assert "metrics_port" not in silent.options and asked.options["metrics_port"] == 0


def test_bench_takes_a_kernel_where_there_is_a_choice_of_kernels(workbook, refuses, monkeypatch):
    from tutorial_lib.bench import gpu, measure

    asked = []
    monkeypatch.setattr(measure, "bench", lambda profile, **_: asked.append(profile.kernel) or {"summary": {}})
    monkeypatch.setattr(
        gpu,
        "run_experiment",
        lambda experiment, *, kernel, **_: (
            asked.append(kernel) or {"runs": [1], "experiment": 1, "profile": 1, "parts": 1, "summary": 1}
        ),
    )
    assert workbook("bench", "--profile", "h200", "--kernel", "triton")[0] == 0
    assert workbook("bench", "--profile", "h200", "--experiment", "70b-1b", "--kernel", "stream")[0] == 0
    assert workbook("bench", "--profile", "h200")[0] == 0
    assert asked == ["triton", "stream", "auto"]
    for profile in ("cpu", "tensorrt_llm", "replay"):
        assert "--kernel has no effect" in refuses("bench", "--profile", profile, "--kernel", "stream")
    assert "kernel is 'cuda'" in refuses("bench", "--profile", "h200", "--kernel", "cuda")


def test_bench_under_load_passes_its_options_on_and_refuses_them_elsewhere(workbook, refuses, monkeypatch, tmp_path):
    from tutorial_lib.bench import load_run

    calls = []

    def bench_load(profile, settings, *, budget_s, command, say, keep=None):
        say("plain, in flight")
        calls.append((profile.name, settings, budget_s))
        return {"experiment": "load", "profile": profile.name, "runs": [{"provenance": {}}], "summary": {"points": []}}

    monkeypatch.setattr(load_run, "bench_load", bench_load)
    load, file = ["bench", "--experiment", "load"], tmp_path / "out.json"
    code, out, _ = workbook(*load, "--concurrency", "1,2, 4", "--json", file, "--budget-s", 60)
    assert code == 0 and json.loads(out.splitlines()[-1]) == {
        "experiment": "load", "profile": "cpu", "summary": {"points": []},
    }  # fmt: skip
    assert json.loads(file.read_text())["runs"] == [{"provenance": {}}]
    pair = ["--target", "dummy:llama-3.1-8b", "--drafter", "dummy:llama-3.2-1b", "--acceptance-length", 3]
    poisson = ["--arrival", "poisson", "--rate", "0.5,2", "--draft-len-schedule", "1:5,4:0", "--kv-tokens", 4096]
    code, _, err = workbook(*load, "--profile", "h200", *pair, *poisson, "--json", "-")
    assert code == 0 and "plain, in flight" in err
    (on, first, budget), (_, second, _) = calls
    assert (on, first.concurrency, first.target, budget) == ("cpu", (1, 2, 4), "embedded:target", 60)
    assert (second.arrival, second.rates, second.concurrency) == ("poisson", (0.5, 2.0), (8,))
    assert (second.target, second.drafter, second.acceptance_length) == ("dummy:llama-3.1-8b", "dummy:llama-3.2-1b", 3)
    assert (second.max_draft_len, second.draft_len_schedule, second.kv_tokens) == (5, {1: 5, 4: 0}, 4096)
    code, _, _ = workbook(*load, "--backends", "torch, vllm")
    assert code == 0 and calls[-1][1].backends == ("torch", "vllm") and first.backends == ("torch",)
    assert "backends are vllm; needed: torch" in refuses(*load, "--backends", "vllm")
    assert "--concurrency is '1;2'" in refuses(*load, "--concurrency", "1;2")
    assert "--draft-len-schedule is '1'" in refuses(*load, "--draft-len-schedule", "1")
    assert "is '1:4,1:2'; needed: every number" in refuses(*load, "--draft-len-schedule", "1:4,1:2")
    assert "--prompts has no effect" in refuses(*load, "--prompts", "x.jsonl")
    for other in (["bench"], ["bench", "--experiment", "methods"], TRTLLM):
        assert "--arrival has no effect without --experiment load" in refuses(*other, "--arrival", "closed")


def test_schedule_prints_k_by_load(workbook, refuses, monkeypatch, tmp_path):
    from tutorial_lib.bench import schedule

    times = {(b, k): max(1.0, b * (k + 1) / 16) + 0.05 * k for b in (1, 8, 16) for k in range(5)}
    asked = []

    def measured(llm, *, say, **options):
        asked.append((llm.model, llm.options["speculative_config"], llm.options["max_batch_size"], options))
        return schedule.choose(times, 0.7 if options["acceptance"] is None else options["acceptance"])

    monkeypatch.setattr(schedule, "measured", measured)
    code, out, _ = workbook("schedule", "--batches", "1,8,16", "--json", tmp_path / "k.json")
    assert code == 0 and out.splitlines() == [
        "1 at once: K = 4, 2.31x plain decoding (prefill left out)",
        "8 at once: K = 1, 1.62x plain decoding (prefill left out)",
        "16 at once: K = 0, 1.00x plain decoding (prefill left out)",
        "max_draft_len=4, draft_len_schedule={1: 4, 8: 1, 16: 0}",
    ]
    document = json.loads((tmp_path / "k.json").read_text())
    assert document["draft_len_schedule"] == {"1": 4, "8": 1, "16": 0} and len(document["choices"]) == 15
    (model, drafting, slots, options) = asked[0]
    assert (model, slots, drafting.max_draft_len) == ("embedded:target", 16, 4)
    assert options == {"batches": (1, 8, 16), "acceptance": None, "context": 128}
    code, out, _ = workbook("schedule", "--acceptance", 0, "--drafter", "ngram", "--batches", "1,16")
    assert code == 0 and out.splitlines()[-1] == "drafting pays at no load here: decode plainly"
    for wrong in (["--batches", "2,4"], ["--batches", "x"], ["--acceptance", 2], ["--context", 0], ["--drafter", " "]):
        assert wrong[0] in refuses("schedule", *wrong)
    assert len(asked) == 2


def test_run(workbook, monkeypatch, tmp_path):
    calls = []

    def run_notebooks(names, **options):
        options.pop("say")("running \x1b")
        calls.append((names, options))
        rows = [runner.NotebookRun("00_setup", "ok", 1.0)] if names is None else [runner.NotebookRun("02", "failed")]
        return runner.RunSummary(Path("."), rows)

    monkeypatch.setattr(runner, "run_notebooks", run_notebooks)
    assert workbook("run") == (0, "running \\x1b\n", "")
    assert workbook("run", "02", "a.ipynb", "-p", "k=4", "-p", "s=a=b", "--out", tmp_path, "--timeout", 60)[0] == 1
    assert calls == [
        (None, {"profile": "cpu", "parameters": {}, "out_dir": Path("runs/cpu"), "timeout_s": 900.0}),
        (
            ["02", "a.ipynb"],
            {"profile": "cpu", "parameters": {"k": "4", "s": "a=b"}, "out_dir": tmp_path, "timeout_s": 60.0},
        ),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-p", "numprompts=4"], "unknown parameter 'numprompts'"),
        (["-p", "num_prompts"], "'num_prompts'"),
        (["-p", "num_prompts=four"], "'four'"),
        (["--profile", "cray"], "profile 'cray' is unknown"),
        (["--timeout", "0"], "timeout_s is 0"),
    ],
)
def test_run_is_checked_before_it_starts(refuses, tmp_path, options, words):
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("num_prompts: int = 4")])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, tmp_path / "book.ipynb")
    assert words in refuses("run", tmp_path / "book.ipynb", "--out", tmp_path / "runs", *options)
    assert not (tmp_path / "runs").exists()


def test_report(workbook, refuses, monkeypatch, tmp_path):
    assert "not a folder" in refuses("report", tmp_path / "missing")
    assert "no executed notebooks" in refuses("report", tmp_path)
    monkeypatch.setattr(runner, "write_report", lambda folder: Path(folder) / "report.html")
    assert workbook("report", tmp_path) == (0, f"report: {tmp_path / 'report.html'}\n", "")


# ---- the process ----------------------------------------------------------------------------------------------------


def call_process(*words, **options):
    command = [sys.executable, "-m", "tutorial_lib.cli", *words]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, **options)


def test_process_without_a_command_shows_help():
    done = call_process()
    assert done.returncode == 2 and "Usage: workbook" in done.stdout and done.stderr == ""
    assert all(name in done.stdout for name in ("doctor", "fetch", "build", "generate", "bench", "run", "report"))


def test_process_mistake_is_quick_and_loads_no_torch():
    code = "import sys; sys.modules['torch'] = None; from tutorial_lib.cli import main; main()"
    words = [sys.executable, "-c", code, "generate", "--prompt", "x", "--max-draft-len", "0"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr
        == "error: max_draft_len is 0; needed: a whole number >= 1; do this: set max_draft_len to at least 1\n"
    )


def test_process_survives_a_closed_pipe():
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "tutorial_lib.cli", "--help"]
        done = subprocess.run(command, cwd=REPO, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception" not in done.stderr


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from tutorial_lib import models
from tutorial_lib.cli import main

def resolve(name, say):
    print("started", flush=True)
    time.sleep(60)

models.resolve = resolve
main(["fetch"])
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_process_tells_that_stdout_is_full():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tutorial_lib.cli", "plan", "llama-3.1-8b"],
            cwd=REPO, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: writing: No space left on device; needed: free space on that disk\n"


BUILD = """
import signal, sys, time
from tutorial_lib import api, engine_dir
from tutorial_lib.cli import main

def write(staging):
    print("building", flush=True)
    time.sleep(60)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup have it ignored
api.build = lambda checkpoint, out, **options: engine_dir.create(sys.argv[1], write)
main(["build", "dummy:tiny-llama"])
"""


def test_process_in_a_folder_that_is_gone(tmp_path):
    code = "import os, sys; os.rmdir(os.getcwd()); from tutorial_lib.cli import main; main(['plan', 'llama-3.1-8b'])"
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "gone", env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: the folder that this was started in is gone")


def test_process_ends_with_130_on_ctrl_c():
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == "\ninterrupted\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_process_that_is_told_to_end_leaves_nothing_half_built(tmp_path, name):
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(tmp_path / "engine")], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "building\n"
        assert [entry.name for entry in tmp_path.glob(".engine.building-*")]
        process.send_signal(getattr(signal, name))
        process.communicate(timeout=30)
    assert process.returncode == 128 + getattr(signal, name)
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.endswith(".lock")] == []


# ---- the posts' experiments on TensorRT-LLM -------------------------------------------------------------------------

TRTLLM = ["bench", "--profile", "tensorrt_llm", "--experiment", "llama-3.3-70b"]


@pytest.mark.parametrize("version", ["0.15.0", "1.2.1"])
def test_a_dry_run_prints_and_stores_the_whole_plan(workbook, tmp_path, version):
    file = tmp_path / "plan.json"
    code, out, _ = workbook(*TRTLLM, "--tensorrt-llm-version", version, "--dry-run", "--json", file)
    plan = json.loads(file.read_text())
    assert code == 0 and f"[1/{len(plan['steps'])}]" in out and "nothing was run" in out
    assert plan["tensorrt_llm_version"] == version
    assert all(step.get("argv") or step.get("call") for step in plan["steps"])
    assert "…" not in file.read_text()


def test_a_real_run_without_the_library_is_one_line_with_the_remedy(workbook):
    code, out, err = workbook(*TRTLLM)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "not installed" in err and "pypi.nvidia.com" in err and "--dry-run" in err


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--dry-run"],
        ["bench", "--flow", "engine"],
        [*TRTLLM, "--methods", "plain"],
        [*TRTLLM, "--dry-run", "--repeats", "2"],
        [*TRTLLM, "--dry-run", "--method", "telepathy", "--tensorrt-llm-version", "1.2.1"],
        [*TRTLLM, "--dry-run", "--flow", "sideways", "--tensorrt-llm-version", "1.2.1"],
        ["bench", "--profile", "tensorrt_llm", "--experiment", "llama-9", "--dry-run"],
    ],
)
def test_what_means_nothing_there_is_refused(workbook, words):
    code, out, err = workbook(*words)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
