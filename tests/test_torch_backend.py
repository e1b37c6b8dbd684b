"""Building and loading engines: what is stored, that forms agree, that a pair fits, that a second start reuses."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from stand_ins import greedy, model_of

from tutorial_lib.api import LLM, build
from tutorial_lib.config import DraftTargetDecodingConfig, Fp8Config, SamplingParams
from tutorial_lib.engine.build import load_model, machine_arch
from tutorial_lib.engine.model import Segment
from tutorial_lib.engine_dir import open_engine
from tutorial_lib.errors import EngineDirError, ModelError, OptionError
from tutorial_lib.models import load_tokenizer, resolve
from tutorial_lib.shapes import dummy_config

NAME = "dummy:tiny-llama?seed=5"
SHAPES = (NAME, "dummy:tiny-qwen2", "dummy:tiny-qwen3", "dummy:tiny-mistral")
IDS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def silent(line: str) -> None: ...


def as_built(name):
    """The weights of a dummy without an engine directory."""
    checkpoint = resolve(name, say=silent)
    return model_of(checkpoint.tensors(), checkpoint.config)


def opened(name, path, **options):
    build(name, path, **{"max_seq_len": 64, "max_batch_size": 2, "say": silent, **options})
    return open_engine(path, backend="torch", arch=machine_arch())


def logits_of(model) -> torch.Tensor:
    return model.logits(model.forward(IDS, [Segment(0, 0, len(IDS))]))


def write_folder(folder, name, *, shortlist=None, **changes):
    """`name` as a Hugging Face folder of its own, with the byte tokenizer."""
    from safetensors.torch import save_file

    checkpoint = resolve(name, say=silent)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**checkpoint.config, **changes}))
    save_file({n: t.contiguous() for n, t in checkpoint.tensors().items()}, folder / "model.safetensors")
    load_tokenizer(checkpoint).save_pretrained(folder)
    if shortlist is not None:
        save_file({"draft_vocab": shortlist.to(torch.int32)}, folder / "draft_vocab.safetensors")
    return folder


# ---- forms of the weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_float32_is_the_checkpoint_exactly(name, tmp_path):
    model, head_ids = load_model(opened(name, tmp_path / "e"))
    assert head_ids is None and (model.max_slots, model.max_seq_len, model.dtype) == (2, 64, torch.float32)
    torch.testing.assert_close(logits_of(model), logits_of(as_built(name)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.999), ("int8", 0.995)])
@pytest.mark.parametrize("name", SHAPES)
def test_smaller_forms_are_near(name, dtype, least, tmp_path):
    info = opened(name, tmp_path / "e", dtype=dtype)
    assert info.dtype == dtype
    exact, near = logits_of(as_built(name)), logits_of(load_model(info)[0])
    assert torch.nn.functional.cosine_similarity(exact, near, dim=-1).min() > least
    assert not torch.equal(exact, near)


def test_int8_weights_take_a_quarter(tmp_path):
    name = "dummy:tiny-llama?hidden=256&vocab=512"
    whole, small = (opened(name, tmp_path / d, dtype=d) for d in ("float32", "int8"))
    config, _ = dummy_config(name)
    embedding = config["vocab_size"] * config["hidden_size"] * 4  # rows are looked up, not multiplied: left as it is
    weights = [i.manifest["files"]["model.safetensors"]["bytes"] - embedding for i in (whole, small)]
    assert weights[1] < 0.27 * weights[0]


# ---- what an engine directory holds ---------------------------------------------------------------------------------


def test_the_manifest_has_limits_tactics_and_the_command(tmp_path):
    info = opened(NAME, tmp_path / "e", max_draft_len=5)
    assert info.manifest["limits"] == {"max_batch_size": 2, "max_seq_len": 64, "max_draft_len": 5}
    assert set(info.tactics) == {"qkv", "o", "gate_up", "down", "head"}
    assert info.tactics["head"]["shape"] == [320, 64]
    assert info.eos_token_ids == {257} and info.checkpoint == NAME
    assert sum(info.manifest["build"]["steps"].values()) == pytest.approx(info.manifest["build"]["seconds"], abs=0.01)
    command = info.manifest["build"]["command"]
    assert NAME in command and "--max-seq-len 64" in command and "--max-draft-len 5" in command
    assert str(tmp_path) not in json.dumps(info.manifest)


def test_limits_that_no_machine_holds_are_refused(tmp_path):
    for size in (10**9, 2**70):
        with pytest.raises(OptionError, match=f"KV cache for max_batch_size {size} and max_seq_len 64 takes .* GB"):
            LLM(NAME, max_seq_len=64, max_batch_size=size)
    with pytest.raises(OptionError, match="max_draft_len is 1000000000; needed: at most 127"):
        opened(NAME, tmp_path / "e", max_draft_len=10**9)
    assert opened(NAME, tmp_path / "e", max_draft_len=127).max_draft_len == 127


def test_loading_obeys_the_tactic_table_and_times_nothing(tmp_path, monkeypatch):
    from tutorial_lib.engine import linear

    info = opened(NAME, tmp_path / "e")
    used = []
    recorded = {n: (lambda w, b, n=n, m=m: used.append(n) or m(w, b)) for n, m in linear.KERNELS.items()}
    monkeypatch.setattr(linear, "KERNELS", recorded)
    monkeypatch.setattr(linear.time, "perf_counter", None)  # nobody may look at a clock
    for table in info.tactics.values():
        table["kernel_by_rows"] = dict.fromkeys(table["kernel_by_rows"], "plain")
    load_model(info)
    assert set(used) == {"plain"}


def test_a_build_in_the_cache_is_reused_and_an_own_directory_is_not_overwritten(cache, tmp_path):
    options = {"max_seq_len": 64, "say": silent}
    first = build(NAME, **options)
    stamp = (first / "engine.json").stat().st_mtime_ns
    assert first.is_relative_to(cache)
    assert build(NAME, **options) == first and (first / "engine.json").stat().st_mtime_ns == stamp
    others = [build(NAME, **{**options, **o}) for o in ({"dtype": "bfloat16"}, {"max_seq_len": 32})]
    others.append(build("dummy:tiny-llama?seed=6", **options))
    assert len({first, *others}) == 4
    build(NAME, tmp_path / "own", **options)
    with pytest.raises(EngineDirError):
        build("dummy:tiny-llama?seed=6", tmp_path / "own", **options)
    build("dummy:tiny-llama?seed=6", tmp_path / "own", overwrite=True, **options)
    assert open_engine(tmp_path / "own", backend="torch", arch=machine_arch()).checkpoint == "dummy:tiny-llama?seed=6"


def test_a_folder_builds_like_any_checkpoint_and_is_built_anew_when_a_file_of_it_changes(cache, tmp_path):
    folder = write_folder(tmp_path / "model", NAME)
    text = greedy(as_built(NAME), [3, 9], 20)[2:]
    assert text[4] not in text[:4]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [319, text[4]]}))
    with LLM(folder, max_seq_len=64) as llm:
        done = llm.generate([3, 9], SamplingParams(max_tokens=20))
        assert done.token_ids == text[:5] and done.finish_reason == "stop"
        assert llm.generate([3, 9], SamplingParams(max_tokens=20, ignore_eos=True)).token_ids == text
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": text[4]}))
    with LLM(folder, max_seq_len=64) as llm:
        assert llm.info["eos_token_ids"] == [text[4]]
        assert llm.generate([3, 9], SamplingParams(max_tokens=20)).token_ids == text[:5]
    (folder / "chat_template.jinja").write_text("another template")
    with LLM(folder, max_seq_len=64) as llm:
        assert llm.tokenizer.chat_template == "another template"


# ---- pairs ----------------------------------------------------------------------------------------------------------


def pair(target, drafter, k=3, **options) -> LLM:
    config = DraftTargetDecodingConfig(max_draft_len=k, speculative_model_dir=drafter)
    return LLM(target, speculative_config=config, **{"max_seq_len": 128, "max_batch_size": 2, **options})


def test_a_shortlist_drafter_from_checkpoint_to_text(cache, tmp_path):
    shortlist = torch.arange(0, 320, 2)
    drafter = write_folder(tmp_path / "short", NAME, shortlist=shortlist)
    with pair(NAME, drafter) as llm:
        done = llm.generate([3, 9], SamplingParams(max_tokens=60))
    assert done.token_ids == greedy(as_built(NAME), [3, 9], 60)[2:]
    drafted = [t for r in done.rounds for t in r.drafted]
    assert drafted and all(t % 2 == 0 for t in drafted)
    accepted = sum(r.accepted for r in done.rounds)
    assert 0 < accepted < len(drafted)
    for r, before in zip(done.rounds, _texts(done), strict=True):  # the target itself drafts whatever is on its list
        if r.drafted and before % 2 == 0:
            assert r.accepted >= 1


def _texts(generation):
    """The token that the target chose first in every round."""
    return [r.emitted[0] for r in generation.rounds]


def test_a_drafter_with_a_shorter_context(cache, caplog):
    with caplog.at_level(logging.WARNING), pair(NAME, f"{NAME}&context=32") as llm:
        done = llm.generate([3, 9], SamplingParams(max_tokens=100))
    assert done.token_ids == greedy(as_built(NAME), [3, 9], 100)[2:]
    drafted = [len(r.drafted) for r in done.rounds]
    assert sum(drafted) > 20 and set(drafted[-60:]) == {0}
    assert sum("32 tokens" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("sizes", [(320, 340), (340, 320)], ids=["drafter padded", "target padded"])
def test_a_pair_with_padded_vocabularies(sizes, cache):
    target, drafter = (f"dummy:tiny-llama?seed={i + 5}&vocab={v}" for i, v in enumerate(sizes))
    with pair(target, drafter) as llm:
        for options in ({}, {"temperature": 1.2, "seed": 3}):
            done = llm.generate([sizes[0] - 1, 3, 9], SamplingParams(max_tokens=40, logprobs=1, **options))
            assert len(done.token_ids) == 40 and max(t for r in done.rounds for t in r.drafted) < min(sizes)


def test_engine_directories_as_a_pair(cache, tmp_path):
    limits = {"max_seq_len": 128, "say": silent}
    target = build(NAME, tmp_path / "target", max_batch_size=2, **limits)
    drafter = build(NAME, tmp_path / "drafter", max_batch_size=2, **limits)
    config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir=drafter)
    with LLM(target, speculative_config=config) as llm:
        done = llm.generate([3, 9], SamplingParams(max_tokens=41))
    assert [(len(r.drafted), r.accepted) for r in done.rounds] == [(3, 3)] * 10
    small = build(NAME, tmp_path / "small", max_batch_size=1, **limits)
    config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir=small)
    with pytest.raises(EngineDirError, match="max_batch_size"):
        LLM(target, speculative_config=config)
    other = build("dummy:tiny-qwen2", tmp_path / "other", max_batch_size=2, **limits)
    config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir=other)
    with pytest.raises(ModelError, match="id 256"):
        LLM(target, speculative_config=config)


def test_an_int8_target_with_an_exact_drafter(cache):
    with pair(NAME, NAME, dtype="int8") as llm:
        assert (llm.info["dtype"], llm.info["drafter_dtype"]) == ("int8", "float32")
        done = llm.generate([3, 9], SamplingParams(max_tokens=40))
    with LLM(NAME, max_seq_len=128, max_batch_size=2, dtype="int8") as llm:
        plain = llm.generate([3, 9], SamplingParams(max_tokens=40))
    assert len(done.token_ids) == len(plain.token_ids) == 40
    assert sum(r.accepted for r in done.rounds) > 10  # the same weights, nearly


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_engine_is_refused_before_it_is_loaded(damage, cache, tmp_path):
    path = build(NAME, tmp_path / "e", max_seq_len=64, say=silent)
    weights = path / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw if damage == "changed" else raw[:-5])
    with pytest.raises(EngineDirError, match="model.safetensors"):
        LLM(path)


def test_fp8_options_belong_to_fp8_on_a_gpu(tmp_path):
    with pytest.raises(OptionError, match="FP8 options were given and dtype is 'float32'"):
        build(NAME, tmp_path / "e", device="cpu", fp8=Fp8Config(quantize_head=True), say=silent)
    with pytest.raises(OptionError, match="activation_scales is 'static'; needed: 'calibrated' or 'dynamic'"):
        Fp8Config(activation_scales="static")
    assert not (tmp_path / "e").exists()
