"""The vLLM backend: what it asks of vLLM (names as in the release it follows), what it makes of the answers."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tutorial_lib.backends import vllm as backend_module
from tutorial_lib.backends import vllm_calls as calls
from tutorial_lib.backends.vllm import UNKNOWN_TOKEN, VllmBackend
from tutorial_lib.bench import metrics
from tutorial_lib.config import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
    SimulatedAcceptance,
)
from tutorial_lib.errors import BackendUnavailable, ModelError, OptionError, PromptError
from tutorial_lib.models import resolve

STANDIN = Path(__file__).parent / "standin_vllm"
TARGET, DRAFTER = "dummy:tiny-llama?seed=1", "dummy:tiny-llama?seed=2&layers=1"
PROMPT = list(range(40, 70))
CONFIG = resolve(TARGET).config


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, imported afresh."""
    monkeypatch.syspath_prepend(str(STANDIN))
    import vllm

    yield vllm
    for name in [m for m in sys.modules if m.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def real_text(monkeypatch, vllm):
    """As if the stand-in were no stand-in and the weights no dummy's: text is read."""
    monkeypatch.setattr(vllm, "IS_STAND_IN", False)
    monkeypatch.setattr(backend_module, "_device_type", lambda: "cuda")
    made = backend_module.resolve

    def resolved(name, say=print):
        checkpoint = made(name, say=say)
        object.__setattr__(checkpoint, "is_dummy", False)
        return checkpoint

    monkeypatch.setattr(backend_module, "resolve", resolved)


def asked(vllm, name):
    return [kwargs for called, kwargs in vllm.CALLS if called == name]


def test_without_vllm_one_line_says_so():
    with pytest.raises(BackendUnavailable, match=r"^vLLM is not installed; do this: .*pip install vllm==0\.24\.0$"):
        VllmBackend(TARGET)


def test_an_import_that_fails_says_why(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendUnavailable, match="importing vLLM.*fails: libcudart.so.13"):
        VllmBackend(TARGET)


# ---- what vLLM is asked for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (None, None),
        (DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir=DRAFTER), {"method": "draft_model"}),
        (
            NGramDecodingConfig(max_draft_len=5, max_matching_ngram_size=4),
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 1},
        ),
    ],
)
def test_the_engine_is_asked_for_the_method_by_names_that_vllm_has(vllm, config, needed):
    backend = VllmBackend(TARGET, speculative_config=config, max_batch_size=2, max_seq_len=128, tensor_parallel_size=2)
    (made,) = asked(vllm, "EngineArgs")
    assert made["max_num_seqs"] == 2 and made["max_model_len"] == 128 and made["tensor_parallel_size"] == 2
    assert made["enable_prefix_caching"] is False and made["load_format"] == "dummy"  # repeats must prefill again
    assert made["generation_config"] == "vllm"  # a checkpoint's advice must not slip into requests
    speculative = made.get("speculative_config")
    assert (speculative is None) == (needed is None) and (needed is None or needed.items() <= speculative.items())
    if config and needed["method"] == "draft_model":
        assert speculative["model"] != made["model"] and "quantization" not in speculative
    backend.close()
    backend.close()
    assert len(asked(vllm, "shutdown")) == 1 and not Path(made["model"]).exists()


def test_an_eagle_head_is_handed_over_and_one_that_borrows_the_targets_output_is_refused(vllm, tmp_path):
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64, "vocab_size": 320}
    found = calls.speculative_config(EagleDecodingConfig(max_draft_len=2, speculative_model_dir="h"), "h", "auto")
    assert found == {"num_speculative_tokens": 2, "method": "eagle3", "model": "h"}
    calls.refuse_head("h", config)
    with pytest.raises(OptionError, match="cannot honour the head embedded:eagle3.*lm_head of its own"):
        VllmBackend(TARGET, speculative_config=EagleDecodingConfig(speculative_model_dir="embedded:eagle3"))


def test_float32_stays_float32_and_fp8_reaches_the_drafter_too():
    assert calls.weights_dtype({"dtype": "float32"}, "auto") == "float32"
    config = DraftTargetDecodingConfig(max_draft_len=10, speculative_model_dir="d")
    made = calls.engine_args(
        "m", config=CONFIG, speculative=config, drafter="d", drafter_config=CONFIG, dtype="fp8",
        kv=KvCacheConfig(dtype="fp8"), max_batch_size=1, max_seq_len=1000,
    )  # fmt: skip
    assert (made["quantization"], made["dtype"], made["kv_cache_dtype"]) == ("fp8", "bfloat16", "fp8")
    assert made["speculative_config"]["quantization"] == "fp8"
    per_token = 2 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    assert made["kv_cache_memory_bytes"] >= 2 * per_token * 1000  # target's and drafter's, a byte each


def test_random_weights_are_made_in_fp8_from_the_start(vllm):
    """A checkpoint in more bits would be held whole before it is quantized: 141 GB of a 70B."""
    for dtype, quantized in (("fp8", True), ("bfloat16", False)):
        backend = VllmBackend(TARGET, dtype=dtype)
        made = asked(vllm, "EngineArgs")[-1]
        config = json.loads((Path(made["model"]) / "config.json").read_text())
        assert ("quantization_config" in config) == quantized and config["hidden_size"] > 0
        backend.close()
        assert not Path(made["model"]).exists()


def test_forced_acceptance_is_vllms_own_and_needs_a_drafter(vllm):
    config = DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir=DRAFTER)
    backend = VllmBackend(
        TARGET, speculative_config=config, simulated_acceptance=SimulatedAcceptance(acceptance_length=3)
    )
    made = asked(vllm, "EngineArgs")[0]["speculative_config"]
    assert (made["rejection_sample_method"], made["synthetic_acceptance_length"]) == ("synthetic", 3)
    (generation,) = backend.generate([PROMPT], [SamplingParams(max_tokens=10)])
    assert generation.is_simulated and generation.text == ""
    assert metrics.figures([generation])["acceptance_length"] == 3
    for wrong in ({}, {"speculative_config": NGramDecodingConfig(max_draft_len=1)}):
        with pytest.raises(OptionError, match="without a drafter|at most max_draft_len"):
            VllmBackend(TARGET, simulated_acceptance=SimulatedAcceptance(acceptance_length=3), **wrong)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"speculative_config": LookaheadDecodingConfig()}, "LookaheadDecodingConfig"),
        ({"speculative_config": NGramDecodingConfig(is_use_oldest=False)}, "is_use_oldest"),
        ({"speculative_config": NGramDecodingConfig(draft_len_schedule={1: 4, 8: 0})}, "draft_len_schedule"),
        (
            {"speculative_config": EagleDecodingConfig(speculative_model_dir="x", eagle_choices=[[0]])},
            "eagle_choices",
        ),
        ({"kv_cache_config": KvCacheConfig(max_attention_window=[64])}, "max_attention_window"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_what_vllm_cannot_honour_is_refused_by_name_before_it_is_imported(options, named):
    with pytest.raises(OptionError, match=named):
        VllmBackend(TARGET, **options)


def test_pairs_that_vllm_cannot_run_and_arguments_of_another_release(vllm, monkeypatch):
    other = "dummy:tiny-llama?seed=2&vocab=300"
    with pytest.raises((OptionError, ModelError), match=r"[Vv]ocabular"):
        VllmBackend(TARGET, speculative_config=DraftTargetDecodingConfig(speculative_model_dir=other))
    monkeypatch.setattr(vllm, "__version__", "0.9.1")
    vllm.CONTRACT["fields"]["EngineArgs"].remove("kv_cache_memory_bytes")
    with pytest.raises(BackendUnavailable, match="vLLM 0.9.1 does not know.*kv_cache_memory_bytes.*0.24.0"):
        VllmBackend(TARGET, max_batch_size=1, max_seq_len=64)


# ---- what comes back ------------------------------------------------------------------------------------------------


def test_rounds_and_counts_are_the_engines_own(vllm):
    k = 4
    config = DraftTargetDecodingConfig(max_draft_len=k, speculative_model_dir=DRAFTER)
    backend = VllmBackend(TARGET, speculative_config=config)
    (g,) = backend.generate([PROMPT], [SamplingParams(max_tokens=20, ignore_eos=True)])
    accepted = [(3 * i + 1) % (k + 1) for i in range(1, 30)]
    assert [r.accepted for r in g.rounds] == accepted[: len(g.rounds)] and len(g.token_ids) == 20
    assert 1 + sum(len(r.emitted) for r in g.rounds) == 20
    assert all(len(r.drafted) == k and r.drafted[: min(r.accepted, len(r.emitted))] for r in g.rounds if r.accepted)
    assert all(r.drafted[r.accepted :] == (UNKNOWN_TOKEN,) * (k - r.accepted) for r in g.rounds)
    figures = metrics.figures([g])
    assert (
        figures["drafted"] == k * len(g.rounds) and figures["cut_tokens"] == sum(r.accepted + 1 for r in g.rounds) - 19
    )
    ends = [r.end_s for r in g.rounds]
    assert 0 < g.ttft_s < ends[0] and ends == sorted(ends) and g.latency_s == ends[-1]
    assert backend.info["device"] == "stand-in" and "nothing was computed" in backend.info["notes"][-1]


def test_look_ups_that_found_nothing_drafted_nothing_and_batches_of_them_have_no_figures(vllm):
    backend = VllmBackend(TARGET, speculative_config=NGramDecodingConfig(max_draft_len=2))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (alone,) = backend.generate([PROMPT], [params])
    assert [len(r.drafted) for r in alone.rounds][:3] == [2, 2, 0]
    together = backend.generate([PROMPT, PROMPT[:9]], [params, params])
    assert together[0].token_ids == alone.token_ids and not together[0].rounds
    assert metrics.figures(together, batch_size=2)["acceptance_length"] is None  # not available, rather than guessed


def test_a_batch_of_fixed_drafts_keeps_its_rounds_and_plain_decoding_drafts_nothing(vllm):
    config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir=DRAFTER)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    both = VllmBackend(TARGET, speculative_config=config).generate([PROMPT, PROMPT[5:]], [params, params])
    assert all(g.rounds and all(len(r.drafted) == 3 for r in g.rounds) for g in both)
    (plain,) = VllmBackend(TARGET).generate([PROMPT], [params])
    assert (
        plain.token_ids == both[0].token_ids and all(r.drafted == () for r in plain.rounds) and len(plain.rounds) == 8
    )


def test_sampling_and_ends_reach_vllm_as_ids(vllm, real_text):
    vllm.SETTINGS["stop_after"] = 5
    backend = VllmBackend(TARGET)
    eos = backend.info["eos_token_ids"]
    params = SamplingParams(
        max_tokens=20, temperature=0.7, top_k=5, top_p=0.9, seed=3, logprobs=2, repetition_penalty=1.1
    )
    (g,) = backend.generate([PROMPT], [params])
    (sent,) = asked(vllm, "SamplingParams")
    assert sent["ignore_eos"] is True and sent["stop_token_ids"] == eos and sent["detokenize"] is False
    wanted = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3, "logprobs": 2, "repetition_penalty": 1.1}
    assert wanted.items() <= sent.items()
    assert g.finish_reason == "stop" and g.stop_reason is None and len(g.token_ids) == len(g.logprobs) == 6
    (g,) = backend.generate([PROMPT], [SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[9])])
    assert asked(vllm, "SamplingParams")[1]["stop_token_ids"] == [9] and g.stop_reason == 9
    assert asked(vllm, "SamplingParams")[1]["temperature"] == 0.0  # vLLM's own default would sample


def test_a_stop_string_ends_a_request_in_mid_block(vllm, real_text):
    config = DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir=DRAFTER)
    backend = VllmBackend(TARGET, speculative_config=config)
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    (whole,) = backend.generate([PROMPT], [params])
    stop = whole.text[8:10]
    (g,) = backend.generate([PROMPT], [SamplingParams(max_tokens=25, ignore_eos=True, stop=stop)])
    assert g.text == whole.text[: whole.text.index(stop)] and g.finish_reason == "stop" and g.stop_reason == stop
    assert g.token_ids == whole.token_ids[: len(g.token_ids)] and len(g.token_ids) < 25
    assert asked(vllm, "abort_request")
    streamed = list(backend.stream(PROMPT, params))
    assert streamed[-1].text == whole.text and [len(s.token_ids) for s in streamed] == sorted(
        len(s.token_ids) for s in streamed
    )


def test_a_stream_left_early_ends_its_request_and_wrong_prompts_are_refused(vllm):
    backend = VllmBackend(TARGET, max_seq_len=64)
    stream = backend.stream(PROMPT, SamplingParams(max_tokens=20))
    next(stream)
    stream.close()
    del stream
    assert asked(vllm, "abort_request") and not backend._engine.running
    with pytest.raises(OptionError, match="device is 'cpu'"):
        VllmBackend(TARGET, device="cpu")
    for prompt, named in (([], "empty"), ([10**6], "holds id"), (PROMPT * 3, "at most 64")):
        with pytest.raises(PromptError, match=named):
            backend.generate([prompt], [SamplingParams()])


# ---- several machines -----------------------------------------------------------------------------------------------


def test_launch_lines_split_a_plain_model_over_machines_and_a_drafted_one_over_all_gpus(vllm):
    arguments = calls.engine_args("/models/m", config=CONFIG, max_seq_len=4096)
    lines = calls.ray_launch(arguments, nodes=2, gpus_per_node=8, head="10.0.0.1")
    assert [line for line in lines if line.startswith("ray")] == [
        "ray start --head --port=6379",
        "ray start --address=10.0.0.1:6379",
    ]
    words = shlex.split(lines[-1])
    words.remove("--no-enable-prefix-caching")
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["vllm", "serve", "/models/m"]
    assert options["--tensor-parallel-size"] == "8" and options["--pipeline-parallel-size"] == "2"
    assert options["--distributed-executor-backend"] == "ray" and options["--max-model-len"] == "4096"
    drafted = calls.engine_args("/m", config=CONFIG, speculative=NGramDecodingConfig(max_draft_len=3))
    words = shlex.split(calls.ray_launch(drafted, nodes=2, gpus_per_node=4)[-1])
    assert words[words.index("--tensor-parallel-size") + 1] == "8" and "--pipeline-parallel-size" not in words
    assert json.loads(words[words.index("--speculative-config") + 1])["method"] == "ngram"
    names = {word[2:].removeprefix("no-").replace("-", "_") for word in words if word.startswith("--")}
    assert names <= set(vllm.CONTRACT["fields"]["EngineArgs"])  # each flag is an engine argument's
    with pytest.raises(OptionError, match="nodes is 1"):
        calls.ray_launch(arguments, nodes=1, gpus_per_node=8)
