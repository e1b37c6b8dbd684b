"""The TensorRT-LLM backend against the stand-in in tests/standin: probing, steps, engines, runs, results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import save_file

from tutorial_lib import engine_dir
from tutorial_lib.backends import tensorrt_llm as backend_module
from tutorial_lib.backends.tensorrt_llm import TensorRTLLMBackend
from tutorial_lib.backends.trtllm import calls, dataset, outputs, steps
from tutorial_lib.backends.trtllm.outputs import UNKNOWN_TOKEN, Arrival, EngineCall
from tutorial_lib.backends.trtllm.plan import plan
from tutorial_lib.backends.trtllm.probe import probe
from tutorial_lib.bench import metrics
from tutorial_lib.config import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    LayerSkipDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
    SimulatedAcceptance,
)
from tutorial_lib.errors import BackendUnavailable, EngineDirError, OptionError, PromptError
from tutorial_lib.models import load_tokenizer, resolve

STANDIN = Path(__file__).parent / "standin"
TARGET = "dummy:tiny-llama?seed=1"
DRAFTER = "dummy:tiny-llama?seed=2&layers=1"
PROMPT = list(range(40, 70))
PROBED: dict = {}  # release -> what a real probe of the stand-in found, asked once


def quiet(line):
    """Swallows progress."""


@pytest.fixture
def standin(monkeypatch, tmp_path):
    """The stand-in on the path of this process and of every process it starts; a function sets its release."""
    monkeypatch.syspath_prepend(str(STANDIN))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STANDIN), str(STANDIN.parents[1])]))
    monkeypatch.setenv("STAND_IN_MODEL", str(model_folder(tmp_path / "hub")))

    def play(version="1.2.1"):
        monkeypatch.setenv("STAND_IN_TENSORRT_LLM", version)
        forget()
        if version not in PROBED:
            PROBED[version] = probe(60)
        monkeypatch.setattr(backend_module, "probe", lambda limit_s: PROBED[version])
        programs = tmp_path / "bin"
        if not programs.exists():
            import standin_tools

            standin_tools.install(programs)
            monkeypatch.setenv("PATH", str(programs) + os.pathsep + os.environ["PATH"])
        import tensorrt_llm

        return tensorrt_llm

    yield play
    forget()


def forget():
    backend_module._need_library.cache_clear()
    for name in [m for m in sys.modules if m.split(".")[0] in ("tensorrt_llm", "standin_tools")]:
        del sys.modules[name]


def model_folder(folder: Path) -> Path:
    """A Hub download: configuration, tokenizer and random weights of a tiny Llama."""
    folder.mkdir()
    checkpoint = resolve(TARGET, say=quiet)
    save_file(dict(checkpoint.tensors()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    load_tokenizer(checkpoint).save_pretrained(folder)
    return folder


# ---- probing --------------------------------------------------------------------------------------------------------


def test_without_the_library_the_remedy_is_there_at_once():
    found = probe()
    assert not found.is_usable and found.reason == "it is not installed" and found.seconds < 2
    assert "nvcr.io/nvidia/tensorrt-llm" in found.remedy and "libopenmpi-dev" in found.remedy
    assert "--extra-index-url" in found.remedy
    with pytest.raises(BackendUnavailable, match="not installed.*do this: use NVIDIA's container"):
        backend_module._need_library.cache_clear()
        TensorRTLLMBackend(TARGET)


def fake_library(folder: Path, source: str, monkeypatch) -> None:
    (folder / "tensorrt_llm").mkdir(parents=True)
    (folder / "tensorrt_llm" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_an_import_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch):
    mark = tmp_path / "child"
    source = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2); open({str(mark)!r}, 'w')"])
time.sleep(60)
"""
    fake_library(tmp_path / "site", source, monkeypatch)
    start = time.perf_counter()
    found = probe(1.0)
    assert time.perf_counter() - start < 5 and not found.is_usable
    assert "did not end within 1 s" in found.reason and "MPI hangs" in found.reason and "mpi4py>=4" in found.remedy
    time.sleep(2)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("source", "reason", "remedy"),
    [
        ("raise ImportError('libmpi.so.40: cannot open shared object file')", "libmpi.so.40", "openmpi"),
        ("raise RuntimeError('install from the other index')", "install from the other index", "--extra-index-url"),
        ("import os; os._exit(3)", "exit code 3", "container"),
    ],
)
def test_an_import_that_fails_says_why(tmp_path, monkeypatch, source, reason, remedy):
    fake_library(tmp_path, source, monkeypatch)
    found = probe()
    assert not found.is_usable and reason in found.describe() and remedy in found.remedy


def test_importing_the_workbook_imports_no_library(standin):
    code = (
        "import sys, tutorial_lib.backends.tensorrt_llm, tutorial_lib.backends.trtllm.plan;"
        "sys.exit('tensorrt_llm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_one_module_imports_the_library():
    root = Path(backend_module.__file__).parents[1]
    pattern = re.compile(r"^\s*(import tensorrt_llm|from tensorrt_llm)\b", re.MULTILINE)
    assert [file.name for file in root.rglob("*.py") if pattern.search(file.read_text())] == []
    dynamic = [file.name for file in root.rglob("*.py") if "import_module(module)" in file.read_text()]
    assert dynamic == ["tensorrt_llm.py"]


# ---- the LLM classes ------------------------------------------------------------------------------------------------

CONFIGS = {
    "plain": None,
    "draft_target": DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir=DRAFTER),
    "ngram": NGramDecodingConfig(max_draft_len=3),
    "eagle3": EagleDecodingConfig(max_draft_len=2, speculative_model_dir="head"),
    "lookahead": LookaheadDecodingConfig(),
    "medusa": MedusaDecodingConfig(speculative_model_dir="heads", num_medusa_heads=3),
}


@pytest.mark.parametrize("method", CONFIGS)
def test_a_run_comes_back_as_generations(standin, method):
    library = standin()
    llm = TensorRTLLMBackend(TARGET, speculative_config=CONFIGS[method], max_seq_len=256)
    assert llm.info["method"] == method and llm.info["is_stand_in"] and llm.info["device"] == "stand-in"
    assert llm.info["flow"] == ("engine_api" if method in ("lookahead", "medusa") else "pytorch")
    assert any("stand-in" in note for note in llm.info["notes"])
    found = llm.generate([PROMPT, PROMPT[:3], PROMPT], [SamplingParams(max_tokens=n) for n in (20, 1, 7)])
    assert [len(g.token_ids) for g in found] == [20, 1, 7] and found[0].token_ids[:7] == found[2].token_ids
    for generation in found:
        assert generation.is_simulated and generation.text == "" and generation.finish_reason == "length"
        assert len(generation.token_ids) == 1 + sum(len(r.emitted) for r in generation.rounds)
        assert 0 < generation.ttft_s <= generation.latency_s
        assert all(r.accepted <= len(r.drafted) <= llm.info["max_draft_len"] for r in generation.rounds)
    first = found[0]
    assert first.decoding_iter == len(first.rounds) and first.acceptance_length == 20 / (len(first.rounds) + 1)
    assert metrics.acceptance_length([first]) == 19 / len(first.rounds)
    made = library.CALLS[0]["class"]
    assert made in ("KvCacheConfig", "BuildConfig")
    llm.close()
    llm.close()
    with pytest.raises(OptionError, match="closed"):
        llm.generate([PROMPT], [SamplingParams()])


def test_the_text_is_the_same_with_and_without_a_drafter(standin):
    standin()
    texts = []
    for config in (None, CONFIGS["draft_target"], CONFIGS["ngram"]):
        llm = TensorRTLLMBackend(TARGET, speculative_config=config)
        texts.append(llm.generate([PROMPT], [SamplingParams(max_tokens=30)])[0].token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_what_a_dry_run_prints_is_what_a_run_does(standin):
    library = standin()
    config = CONFIGS["draft_target"]
    cache = KvCacheConfig(dtype="fp8", enable_block_reuse=True, free_gpu_memory_fraction=0.5)
    TensorRTLLMBackend(TARGET, speculative_config=config, kv_cache_config=cache, max_seq_len=99, max_batch_size=2)
    made = next(call for call in library.CALLS if call["class"] == "LLM")["kwargs"]
    planned = calls.pytorch_llm(
        calls.Version(1, 2, "1.2.1"), made["model"], speculative=config, kv_cache=cache, max_batch_size=2,
        max_seq_len=99, is_dummy=True, is_drafter_dummy=True,
    )  # fmt: skip
    folder = made["speculative_config"]["kwargs"]["speculative_model_dir"]
    planned["kwargs"]["speculative_config"]["kwargs"]["speculative_model_dir"] = folder

    def without_imports(value):
        if isinstance(value, dict):
            return {k: without_imports(v) for k, v in value.items() if k != "import"}
        return value

    assert without_imports(planned)["kwargs"] == made


def test_streaming_grows_round_by_round(standin):
    standin()
    llm = TensorRTLLMBackend(TARGET, speculative_config=CONFIGS["draft_target"])
    seen = list(llm.stream(PROMPT, SamplingParams(max_tokens=12)))
    counts = [len(g.token_ids) for g in seen]
    assert counts == sorted(set(counts)) and counts[0] == 1 and counts[-1] == 12 and len(counts) < 12
    assert seen[-1].token_ids == llm.generate([PROMPT], [SamplingParams(max_tokens=12)])[0].token_ids


def test_eos_and_stop_tokens(standin, monkeypatch):
    standin()
    llm = TensorRTLLMBackend(TARGET)
    eos = llm.info["eos_token_ids"][0]
    monkeypatch.setenv("STAND_IN_STOP_AFTER", "5")
    (ended,) = llm.generate([PROMPT], [SamplingParams(max_tokens=20)])
    assert ended.finish_reason == "stop" and ended.token_ids[-1] == eos and len(ended.token_ids) == 6
    assert ended.stop_reason is None  # EOS is no stop token of the request
    (ended,) = llm.generate([PROMPT], [SamplingParams(max_tokens=20, stop_token_ids=[1], ignore_eos=True)])
    assert ended.stop_reason == 1 and ended.finish_reason == "stop"


def test_log_probabilities_of_a_plain_run(standin):
    standin()
    (found,) = TensorRTLLMBackend(TARGET).generate([PROMPT], [SamplingParams(max_tokens=4, logprobs=1)])
    assert len(found.logprobs) == 4 and set(found.logprobs[0]) == {found.token_ids[0]}


@pytest.mark.parametrize(
    ("method", "params", "option"),
    [
        ("draft_target", SamplingParams(logprobs=1), "logprobs"),
        ("plain", SamplingParams(repetition_penalty=1.3), "repetition_penalty"),
        ("eagle3", SamplingParams(temperature=0.7), "temperature"),
        ("plain", SamplingParams(stop="x"), "stop"),
    ],
)
def test_options_it_cannot_honour_are_refused_by_name(standin, method, params, option):
    standin()
    llm = TensorRTLLMBackend(TARGET, speculative_config=CONFIGS[method])
    with pytest.raises(OptionError, match=option):
        llm.generate([PROMPT], [params])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "device is 'cpu'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"flow": "engine_api", "speculative_config": CONFIGS["draft_target"]}, "cannot run.*draft_target"),
        ({"flow": "pytorch", "speculative_config": CONFIGS["medusa"]}, "what 1.2.1 can"),
        ({"speculative_config": SADecodingConfig()}, "1.3 on.*what 1.2.1 can"),
        ({"speculative_config": LayerSkipDecodingConfig()}, "LayerSkipDecodingConfig has no counterpart"),
        (
            {"speculative_config": DraftTargetDecodingConfig(speculative_model_dir=DRAFTER, confidence_threshold=0.5)},
            r"DraftTargetDecodingConfig\(confidence_threshold=…\)",
        ),
        ({"simulated_acceptance": SimulatedAcceptance(acceptance_length=3)}, "without a drafter"),
        (
            {
                "simulated_acceptance": SimulatedAcceptance(acceptance_length=2.5),
                "speculative_config": CONFIGS["ngram"],
            },
            "a whole number",
        ),
        (
            {"simulated_acceptance": SimulatedAcceptance(acceptance_length=1), "speculative_config": CONFIGS["ngram"]},
            "a whole number",
        ),
        (
            {"simulated_acceptance": SimulatedAcceptance(acceptance_length=9), "speculative_config": CONFIGS["ngram"]},
            "at most .* 4",
        ),
    ],
)
def test_impossible_options(standin, options, message):
    standin()
    with pytest.raises(OptionError, match=message):
        TensorRTLLMBackend(TARGET, **options)


def test_prompts_that_do_not_fit(standin):
    standin()
    llm = TensorRTLLMBackend(TARGET, max_seq_len=40)
    with pytest.raises(PromptError, match=r"30 tokens and 11 new ones.*at most 40 together \(max_seq_len\)"):
        llm.generate([PROMPT], [SamplingParams(max_tokens=11)])
    with pytest.raises(PromptError, match="empty"):
        llm.generate([[]], [SamplingParams()])


def test_forced_acceptance(standin, monkeypatch):
    standin()
    llm = TensorRTLLMBackend(
        TARGET,
        speculative_config=CONFIGS["draft_target"],
        simulated_acceptance=SimulatedAcceptance(acceptance_length=4),
    )
    assert os.environ[calls.FORCE_VARIABLE] == "3"
    (found,) = llm.generate([PROMPT], [SamplingParams(max_tokens=21)])
    assert found.is_simulated and {r.accepted for r in found.rounds} == {3} and len(found.rounds) == 5
    llm.close()
    assert calls.FORCE_VARIABLE not in os.environ
    monkeypatch.setenv(calls.FORCE_VARIABLE, "2")  # set by the user: results are marked all the same
    assert backend_module._forced(SimpleNamespace(forced=None)) == 2


def test_forced_acceptance_needs_1_2(standin):
    standin("1.1.0")
    with pytest.raises(OptionError, match="1.2 or newer"):
        TensorRTLLMBackend(
            TARGET, speculative_config=CONFIGS["ngram"], simulated_acceptance=SimulatedAcceptance(acceptance_length=2)
        )


def test_newer_releases_have_the_pytorch_flow_only(standin):
    standin("1.3.0rc13")
    llm = TensorRTLLMBackend(TARGET, speculative_config=CONFIGS["eagle3"])
    assert llm.info["flow"] == "pytorch"
    with pytest.raises(OptionError, match="cannot run lookahead"):
        TensorRTLLMBackend(TARGET, speculative_config=CONFIGS["lookahead"])


def test_old_releases_ask_for_an_engine(standin):
    standin("0.15.0")
    with pytest.raises(EngineDirError, match="is a checkpoint.*an engine directory.*--experiment"):
        TensorRTLLMBackend(TARGET)
    with pytest.raises(OptionError, match="EAGLE-1/2|cannot run"):
        TensorRTLLMBackend(TARGET, flow="pytorch", speculative_config=CONFIGS["eagle3"])


def test_a_quantized_folder_is_taken_as_it_is(standin, tmp_path):
    standin()
    folder = Path(os.environ["STAND_IN_MODEL"])
    quantization = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    llm = TensorRTLLMBackend(str(folder))
    assert llm.info["dtype"] == "fp8" and llm.info["eos_token_ids"] == [2, 3]


def test_the_stand_in_refuses_what_is_not_recorded(standin):
    library = standin()
    with pytest.raises(ValueError, match="no argument 'max_seq_length'"):
        library.LLM(model="m", max_seq_length=9)
    with pytest.raises(ValueError, match="no argument 'prompt'"):
        library.LLM(model="m").generate_async([1], library.SamplingParams(), prompt=3)
    with pytest.raises(AttributeError):
        library.llm_args  # noqa: B018 - not recorded
    recorded = json.loads((Path(backend_module.__file__).parents[1] / "data" / "trtllm_contract.json").read_text())
    output = library.LLM(model="m").generate_async([1, 2], library.SamplingParams(max_tokens=2)).result()
    shown = {name for name in vars(output) if not name.startswith("_")}
    assert shown == set(recorded["results"]["RequestOutput"])
    assert set(vars(output.outputs[0])) | {"length"} == set(recorded["results"]["CompletionOutput"])


# ---- results, without a library -------------------------------------------------------------------------------------


def arrivals(*pairs):
    return [Arrival(*pair) for pair in pairs]


def test_rounds_as_they_arrived():
    rounds = outputs.rounds_of([1, 2, 3, 4, 5, 6], arrivals((0.1, 1), (0.2, 4), (0.4, 6)), 2, 4)
    assert [r.emitted for r in rounds] == [(2, 3, 4), (5, 6)]
    assert rounds[0].drafted == (2, 3, UNKNOWN_TOKEN, UNKNOWN_TOKEN) and rounds[0].accepted == 2
    assert rounds[1].verify_s == pytest.approx(0.2) and rounds[1].end_s == 0.4


@pytest.mark.parametrize(
    ("seen", "iterations", "longest", "sizes"),
    [
        (((0.1, 1), (0.5, 11)), 4, 4, [2, 3, 2, 3]),  # merged: dealt out over the iterations that were counted
        (((0.1, 5), (0.5, 11)), 4, 4, [2, 3, 2, 3]),  # the first token came together with a round
        (((0.1, 1), (0.5, 8), (0.6, 11)), None, 2, [1] * 10),  # more than a round can emit, and nobody counted
        (((0.1, 1), (0.2, 2), (0.3, 3)), None, 0, [1, 1]),
    ],
)
def test_rounds_that_were_merged_on_their_way(seen, iterations, longest, sizes):
    ids = list(range(100, 100 + seen[-1][1]))
    rounds = outputs.rounds_of(ids, arrivals(*seen), iterations, longest)
    assert [len(r.emitted) for r in rounds] == sizes
    assert [token for r in rounds for token in r.emitted] == ids[1:]
    assert [r.end_s for r in rounds] == sorted(r.end_s for r in rounds) and rounds[-1].end_s == pytest.approx(
        seen[-1][0]
    )


def test_acceptance_length_as_trtllm_bench_counts_it():
    assert outputs.acceptance_length(10, 1) == 5.0 and outputs.acceptance_length(300, 199) == 1.5


class Letters:
    def decode(self, ids, **options):
        return "".join(chr(97 + token % 26) for token in ids)


def draft_calls():
    """Round 1: 3 drafted, 2 right. Round 2: 3 drafted, all right; the last two tokens come after the end."""
    return [
        EngineCall(True, 10.0, 10.1, (), (1, 2, 9)),
        EngineCall(False, 10.1, 10.3, (1, 2, 9), (1, 2, 3)),
        EngineCall(True, 10.3, 10.4, (), (4, 5, 6)),
        EngineCall(False, 10.4, 10.7, (4, 5, 6), (4, 5, 6, 7)),
    ]


def from_calls(found, params, eos=(), **options):
    return outputs.from_engine_calls(
        [0], found, params, max_draft_len=3, eos_token_ids=frozenset(eos), tokenizer=Letters(),
        **{"has_outside_drafts": True, **options},
    )  # fmt: skip


def test_the_calls_of_a_draft_run():
    found = from_calls(draft_calls(), SamplingParams(max_tokens=20))
    assert found.token_ids == [1, 2, 3, 4, 5, 6, 7] and found.text == "bcdefgh" and found.finish_reason == "length"
    assert [(r.drafted, r.accepted) for r in found.rounds] == [((1, 2, 9), 2), ((4, 5, 6), 3)]
    assert found.rounds[0].draft_s == pytest.approx(0.1) and found.rounds[0].verify_s == pytest.approx(0.2)
    assert found.ttft_s == pytest.approx(0.3) and found.latency_s == pytest.approx(0.7)


def test_every_eos_ends_and_limits_hold_inside_a_round():
    found = from_calls(draft_calls(), SamplingParams(max_tokens=20), eos=(99, 5, 0))
    assert found.token_ids == [1, 2, 3, 4, 5] and found.finish_reason == "stop"
    assert [r.emitted for r in found.rounds] == [(1, 2, 3), (4, 5)]
    found = from_calls(draft_calls(), SamplingParams(max_tokens=3))
    assert found.token_ids == [1, 2, 3] and [r.emitted for r in found.rounds] == [(1, 2, 3)]
    assert from_calls(draft_calls(), SamplingParams(max_tokens=20, ignore_eos=True), eos=(5,)).token_ids[-1] == 7


def test_a_look_up_that_found_nothing_drafted_nothing():
    nothing = [EngineCall(False, 0.0, 0.1, (2,), (7,)), EngineCall(False, 0.1, 0.2, (8, 9), (8, 1))]
    found = from_calls(nothing, SamplingParams(), placeholder=2)
    assert [r.drafted for r in found.rounds] == [(), (8, 9)] and metrics.acceptance_rate([found]) == 0.5


def test_a_plain_engine_run_has_one_round_per_token():
    call = EngineCall(False, 1.0, 1.4, (), (5, 6, 7), tuple(arrivals((0.2, 1), (0.3, 2), (0.4, 3))))
    found = outputs.from_engine_calls(
        [0], [call], SamplingParams(max_tokens=3), max_draft_len=0, eos_token_ids=frozenset(), tokenizer=Letters(),
        has_outside_drafts=False,
    )  # fmt: skip
    assert found.ttft_s == 0.2 and [r.emitted for r in found.rounds] == [(6,), (7,)]


# ---- steps ----------------------------------------------------------------------------------------------------------


def shell_step(name, kind, script, produces, **more):
    step = {"name": name, "kind": kind, "about": "a test", "argv": ["sh", "-c", script, *produces], "why": {}}
    return step | {"env": {}, "produces": produces, "needs": {}, "is_optional": False} | more


@pytest.fixture
def small_plan(tmp_path, monkeypatch):
    """Three steps of shell in a plan: a download, what is made of it, and what is made of that."""
    monkeypatch.setattr(steps.contract, "OTHER_TOOLS", ("sh",))
    fetched, first, second = "{models_dir}/model", "{work_dir}/first", "{work_dir}/second"
    made = {
        "tensorrt_llm_version": "0.15.0",
        "tensor_parallel_size": 1,
        "steps": [
            shell_step("fetch", "fetch", 'mkdir -p "$0"; echo x > "$0/weights"; echo fetched', [fetched]),
            shell_step("first", "quantize", 'mkdir "$0" && echo x > "$0/a" && test -z "$FAIL" && echo done', [first]),
            shell_step("second", "quantize", f'mkdir "$0" && cp {first}/a "$0/"', [second]),
            shell_step("server", "serve", "sleep 100", []),
        ],
    }
    made["steps"][1]["argv"].append(fetched)
    made["steps"][2]["argv"].append(first)
    said = []

    def run(**options):
        said.clear()
        results = steps.run_steps(made, steps.default_values(tmp_path / "work"), say=said.append, **options)
        return {result["name"]: result["was_run"] for result in results}

    return SimpleNamespace(plan=made, run=run, said=said, folder=tmp_path / "work")


def test_steps_run_in_order_with_their_logs(small_plan):
    assert small_plan.run() == {"fetch": True, "first": True, "second": True}  # the server is left to the user
    assert (small_plan.folder / "second" / "a").exists()
    log = (small_plan.folder / "logs" / "first.log").read_text()
    assert log.startswith("\n$ sh -c") and log.endswith("done\n")
    note = json.loads((small_plan.folder / "steps" / "first.json").read_text())
    assert note["is_finished"] and note["argv"][-1] == "{models_dir}/model" and note["seconds"] >= 0


def test_a_finished_step_is_not_repeated(small_plan):
    small_plan.run()
    before = (small_plan.folder / "first" / "a").stat().st_mtime_ns
    assert small_plan.run() == {"fetch": False, "first": False, "second": False}
    assert (small_plan.folder / "first" / "a").stat().st_mtime_ns == before
    assert sum("finished before" in line for line in small_plan.said) == 3


def test_a_changed_step_and_what_reads_it_are_repeated(small_plan):
    small_plan.run()
    small_plan.plan["steps"][1]["env"]["SCALE"] = "2"
    assert small_plan.run() == {"fetch": False, "first": True, "second": True}
    assert sum("threw away" in line for line in small_plan.said) == 2


def test_a_step_whose_result_is_gone_is_repeated(small_plan):
    small_plan.run()
    (small_plan.folder / "second" / "a").unlink()
    (small_plan.folder / "second").rmdir()
    assert small_plan.run() == {"fetch": False, "first": False, "second": True}


def test_a_half_finished_step_is_thrown_away(small_plan, monkeypatch):
    monkeypatch.setenv("FAIL", "yes")
    with pytest.raises(steps.StepError, match="step first ended with code 1: it said nothing.*read .*first.log"):
        small_plan.run()
    assert (small_plan.folder / "first" / "a").exists()
    monkeypatch.delenv("FAIL")
    assert small_plan.run() == {"fetch": False, "first": True, "second": True}
    assert any("threw away the half-finished" in line for line in small_plan.said)


def test_nothing_of_others_is_removed(small_plan):
    mine = small_plan.folder / "first"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("important")
    with pytest.raises(OptionError, match="exists and step first did not make it"):
        small_plan.run()
    assert (mine / "thesis.txt").read_text() == "important"


def test_a_model_that_is_there_already_is_taken(small_plan):
    folder = small_plan.folder / "models" / "model"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("mine")
    assert small_plan.run()["fetch"] is False and (folder / "weights").read_text() == "mine"
    assert any("taken as it is" in line for line in small_plan.said)


def test_a_step_that_makes_nothing_is_no_success(small_plan):
    small_plan.plan["steps"][1]["argv"][2] = "true"
    with pytest.raises(steps.StepError, match="ended well but made no"):
        small_plan.run()


def test_a_step_that_is_interrupted_takes_its_children_along(small_plan, tmp_path, monkeypatch):
    mark = tmp_path / "late"
    small_plan.plan["steps"][1]["argv"][2] = f'mkdir "$0"; (sleep 1; echo > {mark}) & wait'

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        small_plan.run(kinds=("quantize",))
    time.sleep(1.5)
    assert not mark.exists()


def test_two_runs_in_one_folder(small_plan):
    small_plan.folder.mkdir()
    with steps._only_one(small_plan.folder), pytest.raises(OptionError, match="another process"):
        small_plan.run()


def test_a_missing_program_is_named(small_plan, monkeypatch):
    monkeypatch.setattr(steps.contract, "OTHER_TOOLS", ("no-such-program", "sh"))
    small_plan.plan["steps"][1]["argv"][0] = "no-such-program"
    with pytest.raises(steps.StepError, match="cannot start no-such-program"):
        small_plan.run()


def test_a_placeholder_without_value():
    with pytest.raises(OptionError, match=r"\{medusa_heads\} has no value.*folder of Medusa heads"):
        steps.fill(["--x", "{medusa_heads}"], {"work_dir": "w"})


def test_disk_and_memory_are_compared_beforehand(standin, tmp_path, monkeypatch):
    standin("0.15.0")
    made, values = plan("llama-3.3-70b", "0.15.0"), steps.default_values(tmp_path / "work")
    monkeypatch.setattr(steps.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 * 2**30))
    monkeypatch.setattr(steps, "_free_host_gib", lambda: 4.0)
    with pytest.raises(BackendUnavailable) as error:
        steps.run_steps(made, values, say=quiet)
    assert re.search(r"disk for \S+: needed 339\.\d GiB, available 100\.0 GiB", str(error.value)), str(error.value)
    assert not (tmp_path / "work" / "logs").exists()
    monkeypatch.setattr(steps.shutil, "disk_usage", lambda folder: SimpleNamespace(free=9000 * 2**30))
    monkeypatch.setenv("STAND_IN_GPUS", "NVIDIA H100 PCIe, 81559, 20000, 9.0")
    with pytest.raises(BackendUnavailable, match=r"each of 1 GPU\(s\): needed 71\.7 GiB, available 19\.5 GiB"):
        steps.run_steps(made, values, say=quiet)
    monkeypatch.setenv("STAND_IN_GPUS", "")
    with pytest.raises(BackendUnavailable, match="nvidia-smi shows no GPU"):
        steps.run_steps(made, values, say=quiet)
    monkeypatch.setenv("STAND_IN_GPUS", "NVIDIA A100, 143771, 143000, 8.0")
    with pytest.raises(BackendUnavailable, match=r"FP8: needed compute capability 8\.9, available 8\.0"):
        steps.run_steps(made, values, say=quiet)
    four = plan("llama-3.1-405b")
    monkeypatch.delenv("STAND_IN_GPUS")
    with pytest.raises(BackendUnavailable, match=r"each of 4 GPU\(s\).* on 1 GPU\(s\)"):
        steps.run_steps(four, values, say=quiet)


def test_flags_of_an_unrecorded_release_are_looked_up_in_its_help(standin, tmp_path, monkeypatch):
    standin("0.17.0")
    made = plan("llama-3.3-70b", "0.17.0")
    for step in made["steps"]:
        step["needs"] = {}
    assert any("nothing was recorded of 0.17.0" in note for note in made["notes"])
    monkeypatch.setenv("STAND_IN_HIDE_FLAG", "--gemm_plugin")
    with pytest.raises(OptionError, match="trtllm-build of the installed TensorRT-LLM does not know --gemm_plugin"):
        steps.run_steps(made, steps.default_values(tmp_path / "work"), say=quiet)


# ---- engines by run.py ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The posts' steps for 0.15 once, with needs that fit here: everything up to the engines. Tests only read it."""
    root = tmp_path_factory.mktemp("posts")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STANDIN))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(STANDIN), str(STANDIN.parents[1])]))
        patch.setenv("STAND_IN_MODEL", str(model_folder(root / "hub")))
        patch.setenv("STAND_IN_TENSORRT_LLM", "0.15.0")
        forget()
        import standin_tools

        standin_tools.install(root / "bin")
        patch.setenv("PATH", str(root / "bin") + os.pathsep + os.environ["PATH"])
        made = plan("llama-3.3-70b", "0.15.0")
        for step in made["steps"]:
            step["needs"] = dict.fromkeys(step["needs"], 0.001)
        values, said = steps.default_values(root / "work"), []
        results = steps.run_steps(made, values, kinds=("fetch", "quantize", "build"), say=said.append)
        again = steps.run_steps(made, values, kinds=("fetch", "quantize", "build"), say=quiet)
        patch.setenv("STAND_IN_FAIL", "trtllm-build")
        next(s for s in made["steps"] if s["name"] == "build-plain")["env"]["OTHER"] = "1"
        with pytest.raises(steps.StepError) as failure:
            steps.run_steps(made, values, kinds=("build",), say=quiet)
    forget()
    return SimpleNamespace(
        folder=root / "work", values=values, said=said, results=results, again=again, failure=str(failure.value)
    )


def test_the_posts_steps_from_download_to_engines(built):
    assert [r["name"] for r in built.results if r["was_run"]] == [
        *("fetch-examples", "fetch-target", "fetch-drafter", "quantize-target", "quantize-drafter"),
        *("build-drafter", "build-plain", "build-target"),
    ]
    assert not any(result["was_run"] for result in built.again)
    info = engine_dir.open_engine(built.folder / "target-engine", backend="tensorrt_llm", arch="sm_90")
    build = info.manifest["build"]
    assert info.max_draft_len == 10 and info.max_seq_len == 3072 and info.dtype == "fp8"
    assert build["speculative_decoding_mode"] == "draft_tokens_external" and build["tensorrt_llm"] == "0.15.0"
    assert build["steps"]["build-target"]["argv"][0] == "trtllm-build"
    assert "--calib_size" in build["steps"]["quantize-target"]["argv"]
    assert str(built.folder) not in json.dumps(info.manifest)
    log = (built.folder / "logs" / "quantize-target.log").read_text()
    assert "--qformat fp8" in log and "stand-in: wrote" in log
    assert any("disk for" in line and "needed" in line for line in built.said)


def test_a_build_that_fails_leaves_the_engine_that_was_there(built):
    assert "build-plain ended with code 1: stand-in: trtllm-build was told to fail" in built.failure
    engine_dir.open_engine(built.folder / "plain-engine", backend="tensorrt_llm", arch="sm_90")
    assert not list(built.folder.glob(".*building*"))


@pytest.fixture
def engines(standin, built, monkeypatch):
    standin("0.15.0")
    monkeypatch.setenv("TENSORRT_LLM_REPO", built.values["trtllm_repo"])
    return built.folder


def make_engine(folder: Path, mode: str, max_draft_len: int) -> Path:
    """An engine directory as the build step leaves it, without the steps before."""
    limits = {"max_batch_size": 1, "max_input_len": 96, "max_seq_len": 128, "max_draft_len": max_draft_len}

    def write(staging):
        (staging / "config.json").write_text(json.dumps({"build_config": limits}))
        checkpoint = resolve(TARGET, say=quiet)
        load_tokenizer(checkpoint).save_pretrained(staging / "tokenizer")
        return {
            "backend": "tensorrt_llm", "checkpoint": "a/b", "checkpoint_fingerprint": "f", "model_config": {},
            "dtype": "fp8", "arch": "sm_90", "eos_token_ids": [2], "tactics": {},
            "limits": {"max_batch_size": 1, "max_seq_len": 96, "max_draft_len": max_draft_len},
            "build": {
                "command": "workbook build a/b --backend tensorrt_llm", "tensorrt_llm": "0.15.0", "seconds": 1.0,
                "speculative_decoding_mode": mode, "tensor_parallel_size": 1, "max_tokens": 32, "steps": {},
            },
        }  # fmt: skip

    return engine_dir.create(folder, write).path


def pair(folder, draft_len=5):
    return {"speculative_config": DraftTargetDecodingConfig(
        max_draft_len=draft_len, speculative_model_dir=folder / "draft-engine"
    )}  # fmt: skip


def test_engines_run_with_and_without_the_drafter(engines):
    plain = TensorRTLLMBackend(engines / "plain-engine")
    drafted = TensorRTLLMBackend(engines / "target-engine", **pair(engines))
    assert plain.info["flow"] == drafted.info["flow"] == "engine" and plain.info["target"].endswith("70B-Instruct")
    params = [SamplingParams(max_tokens=40, ignore_eos=True), SamplingParams(max_tokens=3, ignore_eos=True)]
    try:
        expected, found = plain.generate([PROMPT, PROMPT[:4]], params), drafted.generate([PROMPT, PROMPT[:4]], params)
        assert [g.token_ids for g in expected] == [g.token_ids for g in found]
        assert [len(g.token_ids) for g in found] == [40, 3]
        assert 1.5 < metrics.acceptance_length(found) < 6 and metrics.acceptance_rate(found) < 1
        assert all(r.draft_s > 0 and r.verify_s > 0 for r in found[0].rounds)
        assert expected[0].ttft_s < expected[0].latency_s and len(expected[0].rounds) == 39
        assert found[0].is_simulated and found[0].text == ""
        log = (Path(drafted._flow._work.name) / "run.log").read_text()
        assert "Traceback" not in log
    finally:
        plain.close()
        drafted.close()


def test_the_worker_loads_its_engines_once(engines):
    drafted = TensorRTLLMBackend(engines / "target-engine", **pair(engines))
    worker = drafted._flow._running_worker()
    process = worker._process.pid
    for length in (3, 20, 7):
        drafted.generate([PROMPT[:length]], [SamplingParams(max_tokens=4)])
    assert drafted._flow._running_worker()._process.pid == process
    log = (Path(drafted._flow._work.name) / "run.log").read_text()
    assert re.findall(r"loaded (\S+)", log) == ["target-engine", "draft-engine"]
    drafted.close()
    assert worker._process.poll() is not None


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("target-engine", "pair 11", "built for max_draft_len 10; needed: max_draft_len 11"),
        ("plain-engine", "pair 4", "speculative mode 'none'; needed: 'draft_tokens_external' for draft_target"),
        ("target-engine", {}, "speculative mode 'draft_tokens_external'; needed: 'none' for plain"),
        ("target-engine", {"speculative_config": LookaheadDecodingConfig()}, "needed: 'lookahead_decoding'"),
        ("plain-engine", {"max_seq_len": 5000}, "max_seq_len 3072; needed: max_seq_len 5000"),
        ("plain-engine", {"tensor_parallel_size": 4}, "built for 1 GPU"),
    ],
)
def test_engines_that_do_not_fit_are_refused_with_numbers(engines, engine, options, message):
    if isinstance(options, str):
        options = pair(engines, int(options.split()[1]))
    with pytest.raises(EngineDirError, match=message):
        TensorRTLLMBackend(engines / engine, **options)


def test_an_engine_of_another_release_or_gpu_is_refused_before_it_is_loaded(engines, standin, monkeypatch):
    standin("0.14.0")
    with pytest.raises(EngineDirError, match=r"built by TensorRT-LLM 0\.15\.0; needed: 0\.14\.0.*rebuild"):
        TensorRTLLMBackend(engines / "plain-engine")
    standin("1.3.0")
    with pytest.raises(OptionError, match="this flow has it in 0.14 to 1.2"):
        TensorRTLLMBackend(engines / "plain-engine")
    standin("0.15.0")
    monkeypatch.setenv("STAND_IN_GPUS", "NVIDIA L40S, 46068, 46000, 8.9")
    with pytest.raises(EngineDirError, match="built for sm_90; needed: sm_89"):
        TensorRTLLMBackend(engines / "plain-engine")


@pytest.mark.parametrize(
    ("params", "option"),
    [
        (SamplingParams(stop="x"), "stop"),
        (SamplingParams(stop_token_ids=[4]), "stop_token_ids"),
        (SamplingParams(logprobs=0), "logprobs"),
        (SamplingParams(temperature=0.8), "temperature with draft_target"),
        (SamplingParams(repetition_penalty=1.2), "repetition_penalty"),
    ],
)
def test_what_run_py_cannot_do_is_refused(engines, params, option):
    drafted = TensorRTLLMBackend(engines / "target-engine", **pair(engines))
    with pytest.raises(OptionError, match=option):
        drafted.generate([PROMPT], [params])
    with pytest.raises(PromptError, match="at most 1024"):
        drafted.generate([PROMPT], [SamplingParams(max_tokens=1025)])
    with pytest.raises(PromptError, match="3072 together"):
        drafted.generate([PROMPT * 100], [SamplingParams(max_tokens=1024)])


@pytest.mark.parametrize("kv", [{"tokens_per_block": 64}])
def test_cache_options_that_were_fixed_at_build(engines, kv):
    with pytest.raises(OptionError, match="tokens_per_block"):
        TensorRTLLMBackend(engines / "plain-engine", kv_cache_config=KvCacheConfig(**kv))


def test_a_failing_run_py_is_reported(engines, tmp_path, monkeypatch):
    (tmp_path / "repo" / "examples").mkdir(parents=True)
    (tmp_path / "repo" / "examples" / "run.py").write_text("raise SystemExit('no CUDA here')")
    monkeypatch.setenv("TENSORRT_LLM_REPO", str(tmp_path / "repo"))
    plain = TensorRTLLMBackend(engines / "plain-engine")
    with pytest.raises(steps.StepError, match="run.py ended with code 1"):
        plain.generate([PROMPT], [SamplingParams(max_tokens=4)])
    plain.close()


OTHERS = {
    "ngram": (NGramDecodingConfig(max_draft_len=10), "draft_tokens_external", 10),
    "lookahead": (
        LookaheadDecodingConfig(max_window_size=7, max_ngram_size=7, max_verification_set_size=7),
        "lookahead_decoding",
        83,
    ),
    "medusa": (MedusaDecodingConfig(num_medusa_heads=4), "medusa", 63),
    "eagle": (EagleDecodingConfig(num_eagle_layers=4), "eagle", 63),
}


@pytest.mark.parametrize("method", OTHERS)
def test_the_other_methods_of_the_engine_flow(engines, tmp_path, method):
    config, mode, draft_len = OTHERS[method]
    engine = make_engine(tmp_path / "engine", mode, draft_len)
    llm = TensorRTLLMBackend(engine, speculative_config=config)
    try:
        (found,) = llm.generate([PROMPT], [SamplingParams(max_tokens=9, ignore_eos=True)])
        assert len(found.token_ids) == 9 and llm.info["method"] == method
        assert llm.info["engine_max_draft_len"] == draft_len
    finally:
        llm.close()
    small = make_engine(tmp_path / "small", mode, draft_len - 1)
    with pytest.raises(EngineDirError, match=f"max_draft_len {draft_len - 1}; needed: max_draft_len {draft_len}"):
        TensorRTLLMBackend(small, speculative_config=config)


# ---- prompts for the library's own tools ----------------------------------------------------------------------------


def test_the_dataset_of_trtllm_bench():
    new, old = dataset.bench_lines([[1, 2]], 9), dataset.bench_lines([[1, 2]], 9, is_old=True)
    assert json.loads(new[0]) == {"task_id": 0, "input_ids": [1, 2], "output_tokens": 9}
    assert json.loads(old[0]) == {"task_id": 0, "logits": [1, 2], "output_tokens": 9}


def test_the_dataset_as_a_command(tmp_path):
    folder = model_folder(tmp_path / "model")
    for name, lines in (("prompts.jsonl", 64), ("prompt.csv", 1)):
        dataset.main(["--tokenizer", str(folder), "--output", str(tmp_path / name)])
        assert len((tmp_path / name).read_text().splitlines()) == lines


# ---- experiments, from start to record ------------------------------------------------------------------------------


def own_experiment(tmp_path, version, drafter=True):
    """Two tiny checkpoints of one's own, in the form of the posts' experiments."""
    from tutorial_lib.backends.trtllm.experiment import describe
    from tutorial_lib.models import Checkpoint

    models = {name: model_folder(tmp_path / name) for name in ("target", "draft")}
    config = resolve(TARGET, say=quiet).config
    target, draft = (Checkpoint(f"me/{name}", folder, config) for name, folder in models.items())
    facts = describe(
        target, draft if drafter else None, tokenizer=load_tokenizer(target), version=version, max_draft_len=5,
        max_prompt_len=200, output_tokens=12,
    )  # fmt: skip
    return facts


def test_one_s_own_checkpoints_are_planned_like_the_posts(tmp_path):
    facts = own_experiment(tmp_path, "0.15.0")
    made = plan(facts)
    assert [s["name"] for s in made["steps"]][:3] == ["fetch-examples", "quantize-target", "quantize-drafter"]
    quantize = made["steps"][1]["argv"]
    assert quantize[quantize.index("--model_dir") + 1] == str(tmp_path / "target")
    assert facts["eos_token_ids"][0] == 2 or set(facts["eos_token_ids"]) == {2, 3}
    new = plan(facts, "1.2.1")
    assert [s["name"] for s in new["steps"]][:3] == ["fetch-modelopt", "quantize-target", "quantize-drafter"]


@pytest.mark.parametrize(("version", "flow"), [("0.15.0", "engine"), ("1.2.1", "pytorch")])
def test_an_experiment_from_start_to_record(standin, tmp_path, monkeypatch, version, flow):
    from tutorial_lib.backends.trtllm import experiment

    standin(version)
    monkeypatch.setattr(experiment, "probe", lambda limit_s: PROBED[version])
    monkeypatch.delenv("TENSORRT_LLM_REPO", raising=False)
    said = []
    prompts = experiment.load_prompts()[:2]
    document = experiment.run_experiment(
        own_experiment(tmp_path, version), work_dir=tmp_path / "work", prompts=prompts, repeats=2, say=said.append,
        fp8=flow == "engine",
    )  # fmt: skip
    monkeypatch.delenv("TENSORRT_LLM_REPO", raising=False)
    plain, drafted = document["runs"]
    assert (plain["method"], drafted["method"]) == ("plain", "draft_target")
    assert drafted["tensorrt_llm"]["flow"] == flow and drafted["backend"] == "tensorrt_llm"
    assert plain["is_simulated"] and drafted["is_simulated"] and drafted["device"] == "stand-in"
    assert drafted["figures"]["acceptance_length"] > 1 and plain["figures"]["acceptance_length"] is None
    assert plain["tokens_sha256"] is None and drafted["max_draft_len"] == 5
    summary = document["summary"]
    assert summary["identical_text"] is None and summary["predicted_speedup"] is None and summary["speedup"] > 0
    assert any("finished" in line or "done in" in line for line in said) or flow == "pytorch"
    assert str(tmp_path) not in json.dumps(document)


def test_an_experiment_of_a_release_that_is_not_installed(standin, monkeypatch):
    from tutorial_lib.backends.trtllm import experiment

    standin("1.2.1")
    monkeypatch.setattr(experiment, "probe", lambda limit_s: PROBED["1.2.1"])
    with pytest.raises(OptionError, match=r"0\.15\.0 was asked for and 1\.2\.1 is installed"):
        experiment.run_experiment("llama-3.3-70b", version="0.15.0", say=quiet)
    monkeypatch.setattr(experiment, "probe", probe)
    for name in ("PYTHONPATH",):
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "standin" not in p])
    with pytest.raises(BackendUnavailable, match="--dry-run shows what would run"):
        experiment.run_experiment("llama-3.3-70b", say=quiet)


@pytest.mark.parametrize(("draft_len", "mode"), [(6, "draft_tokens_external"), (0, "none")])
def test_building_an_engine_of_one_s_own(standin, tmp_path, monkeypatch, cache, draft_len, mode):
    from tutorial_lib.backends.trtllm import experiment

    standin("0.15.0")
    monkeypatch.setattr(experiment, "probe", lambda limit_s: PROBED["0.15.0"])
    folder, options = model_folder(tmp_path / "model"), {"max_seq_len": 100, "max_draft_len": draft_len, "say": quiet}
    path = experiment.build_engine(folder, tmp_path / "engine", **options)
    info = engine_dir.open_engine(path, backend="tensorrt_llm", arch="sm_90")
    assert info.manifest["build"]["speculative_decoding_mode"] == mode and info.max_seq_len == 100
    assert f"workbook build {folder.name} --backend tensorrt_llm" in info.rebuild_line
    assert TensorRTLLMBackend(path, speculative_config=NGramDecodingConfig(max_draft_len=6) if draft_len else None)
    with pytest.raises(EngineDirError, match="exists already"):
        experiment.build_engine(folder, tmp_path / "engine", **options)
    cached = experiment.build_engine(folder, **options)
    assert cached == experiment.build_engine(folder, **options) and cached.is_relative_to(cache)
    with pytest.raises(OptionError, match="dtype is 'int8'"):
        experiment.build_engine(folder, dtype="int8", say=quiet)
