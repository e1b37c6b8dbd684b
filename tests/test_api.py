"""`LLM` and `build` as notebooks call them: text in and out, streams, event loops, refusals by name."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch

import tutorial_lib
from tutorial_lib import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    LayerSkipDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
)
from tutorial_lib.api import LLM, build
from tutorial_lib.config import DecodingBaseConfig
from tutorial_lib.errors import BackendUnavailable, EngineDirError, ModelError, OptionError, PromptError, WorkbookError

TARGET, DRAFTER = "dummy:tiny-llama?seed=5", "dummy:tiny-llama?layers=1&seed=4"
TEXT = "Ünïcode 漢字 😀"
GREEDY = SamplingParams(max_tokens=30)


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """One cache of engines for the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def plain(cached):
    with LLM(TARGET, max_seq_len=256, max_batch_size=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def speculative(cached):
    config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir=DRAFTER)
    with LLM(TARGET, max_seq_len=256, max_batch_size=3, speculative_config=config) as llm:
        yield llm


def refusal(error: type[WorkbookError], call, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- from checkpoint to text ----------------------------------------------------------------------------------------


def test_one_prompt_or_many_text_or_ids(plain, speculative):
    ids = plain.tokenizer(TEXT).input_ids
    one = plain.generate(TEXT, GREEDY)
    assert one.prompt_token_ids == ids and len(one.token_ids) == 30
    assert one.text == plain.tokenizer.decode(one.token_ids, skip_special_tokens=True)
    assert plain.generate(ids, GREEDY).token_ids == one.token_ids
    prompts = [TEXT, ids, "b", [1, 2, 3], "c" * 40]  # more than the slots
    params = [GREEDY, SamplingParams(max_tokens=7), None, GREEDY, GREEDY]
    many = plain.generate(prompts, params)
    assert [len(g.token_ids) for g in many] == [30, 7, 32, 30, 30]
    assert many[0].token_ids == one.token_ids and many[1].token_ids == one.token_ids[:7]
    assert plain.generate([TEXT], GREEDY)[0].token_ids == one.token_ids  # a list of one stays a list
    for llm in (plain, speculative):
        assert [g.token_ids for g in llm.generate(prompts, params)] == [g.token_ids for g in many]
        assert one.outputs[0].text == llm.generate(TEXT, GREEDY).outputs[0].text
    assert any(r.drafted for g in speculative.generate(prompts, params) for r in g.rounds)
    assert not any(r.drafted for g in many for r in g.rounds)


def test_exactly_one_bos(plain):
    """A prompt's own text gets one from the tokenizer; a rendered chat template begins with it already."""
    tokenizer = plain.tokenizer
    bos = tokenizer.bos_token_id
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith(tokenizer.bos_token)
    for prompt in ("hi", text):
        ids = plain.generate(prompt, SamplingParams(max_tokens=1)).prompt_token_ids
        assert ids[0] == bos and ids.count(bos) == 1
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert plain.generate(text, SamplingParams(max_tokens=1)).prompt_token_ids == list(rendered)


def test_ngram_speculation_gives_the_same_text(plain, cached):
    config = NGramDecodingConfig(max_draft_len=5, max_matching_ngram_size=2)
    with LLM(TARGET, max_seq_len=256, max_batch_size=3, speculative_config=config) as llm:
        assert (llm.info["drafter"], llm.info["max_draft_len"]) == ("ngram", 5)
        for prompt in ("abcabcabc", [7, 8, 9] * 9, [5]):
            assert llm.generate(prompt, GREEDY).token_ids == plain.generate(prompt, GREEDY).token_ids
        assert any(r.drafted for r in llm.generate([7, 8, 9] * 9, GREEDY).rounds)


def test_info_says_what_runs(speculative):
    info = speculative.info
    assert info["target"] == TARGET and info["drafter"] == DRAFTER
    assert (info["backend"], info["device"], info["dtype"], info["max_draft_len"]) == ("torch", "cpu", "float32", 3)
    assert info["limits"] == {"max_batch_size": 3, "max_seq_len": 256, "max_draft_len": 16}
    assert info["build_s"] > 0 and info["load_s"] > 0 and info["eos_token_ids"] == [257]


def test_steps_are_timed_apart(speculative, plain):
    times = speculative.time_steps([1, 4], context=16)
    assert set(times) == {1, 4} and min(times.values()) > 0
    assert speculative.time_draft(3, context=16) > 0 == plain.time_draft(3, context=16)


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_joins_to_the_text(speculative):
    whole = speculative.generate(TEXT, GREEDY)
    items = list(speculative.generate_async(TEXT, GREEDY, streaming=True))
    assert all(b.text.startswith(a.text) and len(b.token_ids) > len(a.token_ids) for a, b in pairwise(items))
    assert "".join(b.text[len(a.text) :] for a, b in pairwise(items)) == whole.text[len(items[0].text) :]
    assert items[-1].text == whole.text and items[-1].finish_reason == "length" and len(items) > 5
    (only,) = speculative.generate_async(TEXT, GREEDY)
    assert only.token_ids == whole.token_ids


def test_the_result_can_be_asked_for_at_any_time(plain):
    whole = plain.generate(TEXT, GREEDY)
    stream = plain.generate_async(TEXT, GREEDY, streaming=True)
    assert stream.result().token_ids == stream.result().token_ids == whole.token_ids
    stream = plain.generate_async(TEXT, GREEDY, streaming=True)
    assert len(list(stream)) == 30
    assert stream.result().token_ids == whole.token_ids
    assert list(stream) == []


def test_leaving_a_stream_gives_its_slot_back(plain):
    streams = []
    for _ in range(5):  # the engine has 3 slots
        streams.append(plain.generate_async(TEXT, GREEDY, streaming=True))
        for item in streams[-1]:
            if len(item.token_ids) == 4:
                break
    assert "before its end" in refusal(OptionError, streams[0].result)
    assert [len(g.token_ids) for g in plain.generate([TEXT] * 3, GREEDY)] == [30] * 3


def test_inside_a_running_event_loop(speculative):
    """A notebook's cells run inside one: plain calls work there, and streams can be awaited side by side."""
    prompts = [TEXT, "other", "third"]
    expected = [speculative.generate(p, GREEDY).token_ids for p in prompts]

    async def read(prompt):
        seen = [g async for g in speculative.generate_async(prompt, GREEDY, streaming=True)]
        return len(seen), seen[-1].token_ids

    async def cell():
        assert speculative.generate(TEXT, GREEDY).token_ids == expected[0]
        found = await asyncio.gather(*(read(p) for p in prompts))
        async for _ in speculative.generate_async(TEXT, GREEDY, streaming=True):
            break
        return found

    found = asyncio.run(cell())
    assert [ids for _, ids in found] == expected
    assert all(count > 3 for count, _ in found)
    assert [g.token_ids for g in speculative.generate(prompts, GREEDY)] == expected  # all three slots are free


def test_waiting_for_a_step_does_not_block_the_event_loop(plain, monkeypatch):
    """The engine waits for something that only another task of the loop can do."""
    gate, stream = threading.Event(), plain._backend.stream

    def gated(*args):
        assert gate.wait(20)
        yield from stream(*args)

    monkeypatch.setattr(plain._backend, "stream", gated)

    async def cell():
        async def read():
            return [g async for g in plain.generate_async("a", SamplingParams(max_tokens=3), streaming=True)]

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        gate.set()
        return await reading

    assert len(asyncio.run(cell())[-1].token_ids) == 3


def test_streams_in_threads_take_turns(plain, monkeypatch):
    """The engine is not made for two calls at a time."""
    inside, most, stream = [], [], plain._backend.stream

    def watched(*args):
        items = stream(*args)
        while True:
            inside.append(1)
            time.sleep(0.002)
            item = next(items, None)
            most.append(len(inside))
            inside.pop()
            if item is None:
                return
            yield item

    monkeypatch.setattr(plain._backend, "stream", watched)

    async def cell():
        async def read():
            return [g async for g in plain.generate_async("a", SamplingParams(max_tokens=5), streaming=True)]

        return await asyncio.gather(read(), read())

    assert [len(items) for items in asyncio.run(cell())] == [5, 5]
    assert len(most) == 12 and set(most) == {1}


# ---- closing --------------------------------------------------------------------------------------------------------


def test_closing_twice_is_fine_and_a_closed_one_says_so(cached):
    with LLM(TARGET, max_seq_len=256, max_batch_size=3) as llm:
        llm.generate("a", SamplingParams(max_tokens=1))
    llm.close()
    assert "closed" in refusal(OptionError, llm.generate, "a")
    assert "closed" in refusal(OptionError, llm.generate_async, "a")


def test_loading_five_times_does_not_pile_up(cached):
    """Closing frees weights and cache, though the `LLM` objects stay referenced as in a notebook."""
    import gc

    import torch

    def alive() -> int:
        gc.collect()
        return sum(t.numel() for t in gc.get_objects() if issubclass(type(t), torch.Tensor))

    kept, before = [], alive()
    for _ in range(5):
        kept.append(LLM(TARGET, max_seq_len=256, max_batch_size=3))
        kept[-1].generate("a", SamplingParams(max_tokens=4))
        kept[-1].close()
    assert alive() - before < 20_000  # one model has more than ten times that


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, ["prompt is empty"]),
        ([], {}, ["list of prompts is empty"]),
        (["a", ""], {}, ["prompt 2 of 2 is empty"]),
        ("x" * 300, {}, ["301 tokens", "256", "max_seq_len"]),
        ("x" * 249, {"max_tokens": 7}, ["250 tokens", "7 more", "256", "at most 6"]),
        ([1, 999], {}, ["999"]),
        ([1, -1], {}, ["id -1"]),
        (None, {}, ["None", "token ids"]),
        (5, {}, ["a prompt is 5"]),
        (b"text", {}, ["a prompt is b'text'"]),
        ({"prompt": "x"}, {}, ["a prompt is {'prompt': 'x'}"]),
        ([[1, 2.5]], {}, ["2.5", "whole numbers"]),
        ([["5"]], {}, ["'5'", "whole numbers"]),
        ([True, 2], {}, ["a prompt is True"]),
        ([1, "a"], {}, ["'a'", "whole numbers"]),
        (["a", 1], {}, ["a prompt is 1"]),
        ("a\ud800", {}, ["half a character", "Unicode"]),
    ],
    ids=repr,
)
def test_bad_prompts(plain, prompt, options, words):
    message = refusal(PromptError, plain.generate, prompt, SamplingParams(**{"max_tokens": 4, **options}))
    assert all(word in message for word in words), message
    if isinstance(prompt, str):
        assert refusal(PromptError, plain.generate_async, prompt, SamplingParams(**{"max_tokens": 4, **options}))


def test_params_that_do_not_match_the_prompts(plain):
    assert "2 sampling_params for 3 prompts" in refusal(OptionError, plain.generate, ["a", "b", "c"], [GREEDY, GREEDY])


def test_ids_come_in_any_list_or_array(plain):
    expected = plain.generate([1, 2, 3], GREEDY).token_ids
    for same in ((1, 2, 3), np.array([1, 2, 3]), list(np.array([1, 2, 3])), torch.tensor([1, 2, 3])):
        assert plain.generate(same, GREEDY).token_ids == expected
        assert plain.generate_async(same, GREEDY).result().token_ids == expected
    assert [g.token_ids for g in plain.generate(np.array([[1, 2, 3]] * 2), GREEDY)] == [expected] * 2


@pytest.mark.parametrize("given", ["x", {"max_tokens": 3}, ["x"], 0, {}], ids=repr)
def test_sampling_params_are_just_that(plain, given):
    assert "sampling_params is" in refusal(OptionError, plain.generate, ["a"], given)
    if not isinstance(given, list):
        assert "sampling_params is" in refusal(OptionError, plain.generate_async, "a", given)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (SamplingParams, {"temperature": 1e-320}, ["temperature", "0 (greedy)"]),  # 0 in float32: 0 / 0 is no number
        (SamplingParams, {"top_p": 1e-320}, ["top_p"]),
        (SamplingParams, {"seed": 2**64}, ["seed", str(2**64 - 1)]),  # the same numbers as seed 0
        (SamplingParams, {"stop": 5}, ["stop is 5", "strings"]),
        (SamplingParams, {"stop": [5]}, ["stop holds 5"]),
        (SamplingParams, {"stop_token_ids": 5}, ["stop_token_ids is 5"]),
        (SamplingParams, {"stop_token_ids": "12"}, ["stop_token_ids is '12'"]),
        (KvCacheConfig, {"enable_block_reuse": "no"}, ["enable_block_reuse is 'no'"]),
        (KvCacheConfig, {"max_attention_window": 5}, ["max_attention_window is 5"]),
        (KvCacheConfig, {"max_attention_window": [0]}, ["max_attention_window entry is 0"]),
        (NGramDecodingConfig, {"is_use_oldest": 5}, ["is_use_oldest is 5"]),
        (SADecodingConfig, {"enable_global_pool": "x"}, ["enable_global_pool is 'x'"]),
        (LookaheadDecodingConfig, {"max_ngram_size": None}, ["max_ngram_size is None"]),
        (LayerSkipDecodingConfig, {"skip_layers": 5}, ["skip_layers is 5"]),
        (MedusaDecodingConfig, {"medusa_choices": 5}, ["medusa_choices is 5"]),
        (MedusaDecodingConfig, {"medusa_choices": [5]}, ["a path in medusa_choices is 5"]),
        (EagleDecodingConfig, {"eagle_choices": [["a"]]}, ["rank in eagle_choices is 'a'"]),
        (DraftTargetDecodingConfig, {"speculative_model_dir": 5}, ["speculative_model_dir is 5"]),
        (DraftTargetDecodingConfig, {"speculative_model_dir": ""}, ["speculative_model_dir is ''"]),
    ],
    ids=str,
)
def test_options_of_a_wrong_kind_are_refused_when_made(make, options, words):
    message = refusal(OptionError, make, **options)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("option", ["min_tokens", "beam_width", "presence_penalty", "bad_words"])
def test_sampling_options_that_nothing_honours_do_not_exist(option):
    with pytest.raises(TypeError, match=option):
        SamplingParams(**{option: 1})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"backend": "onnx"}, OptionError, ["onnx", "torch"]),
        ({"backend": []}, OptionError, ["backend is []"]),
        ({"dtype": "fp4"}, OptionError, ["fp4", "int8"]),
        ({"device": "tpu"}, OptionError, ["tpu"]),
        ({"tensor_parallel_size": 3}, OptionError, ["tensor_parallel_size is 3", "1, 2"]),
        ({"max_seq_len": 4096}, OptionError, ["max_seq_len", "4096", "2048"]),
        ({"max_batch_size": 0}, OptionError, ["max_batch_size", "0"]),
        ({"kv_cache_config": KvCacheConfig(free_gpu_memory_fraction=0.5)}, OptionError, ["free_gpu_memory_fraction"]),
        ({"kv_cache_config": KvCacheConfig(tokens_per_block=8)}, OptionError, ["tokens_per_block", "16 to 64"]),
        ({"speculative_config": DecodingBaseConfig()}, OptionError, ["DecodingBaseConfig", "SADecodingConfig"]),
        ({"speculative_config": LayerSkipDecodingConfig(skip_layers=[2])}, OptionError, ["layers from 0 to 1"]),
        ({"speculative_config": MedusaDecodingConfig()}, OptionError, ["MedusaDecodingConfig", "embedded:medusa"]),
        ({"speculative_config": EagleDecodingConfig()}, OptionError, ["EagleDecodingConfig", "embedded:eagle3"]),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(cached, options, error, words):
    message = refusal(error, LLM, TARGET, **options)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("k", [0, -1])
def test_a_draft_length_below_one(k):
    with pytest.raises(OptionError, match=f"max_draft_len is {k}"):
        NGramDecodingConfig(max_draft_len=k)


@pytest.mark.parametrize("model", [5, None, b"x", []], ids=repr)
def test_a_model_that_is_no_name(model):
    assert f"model is {model!r}" in refusal(OptionError, LLM, model)


def test_unknown_models(cached):
    assert "tiny-llama" in refusal(ModelError, LLM, "dummy:huge-llama")
    assert "nowhere" in refusal(ModelError, LLM, "nowhere")
    config = DraftTargetDecodingConfig(speculative_model_dir="dummy:huge-llama")
    assert "huge-llama" in refusal(ModelError, LLM, TARGET, speculative_config=config)


def test_a_drafter_with_another_tokenizer(cached):
    """The byte tokenizers of these two differ in the id of the begin token."""
    config = DraftTargetDecodingConfig(speculative_model_dir="dummy:tiny-qwen3")
    message = refusal(ModelError, LLM, TARGET, speculative_config=config)
    assert re.search(r"id 256 is '<\|begin\|>' in the target's tokenizer and not used in the drafter's", message)


def test_an_engine_directory_is_built_once_and_too_small_for_more(cached, tmp_path):
    lines = []
    path = build(TARGET, tmp_path / "engine", max_draft_len=2, max_batch_size=2, max_seq_len=100, say=lines.append)
    assert path == tmp_path / "engine" and any(TARGET in line for line in lines)
    for needed, words in (
        ({"speculative_config": NGramDecodingConfig(max_draft_len=3)}, ["max_draft_len", "2", "3"]),
        ({"max_seq_len": 101}, ["max_seq_len", "100", "101"]),
        ({"max_batch_size": 3}, ["max_batch_size", "2", "3"]),
    ):
        message = refusal(EngineDirError, LLM, path, **needed)
        assert all(word in message for word in [*words, "workbook build"]), message
    with LLM(path, speculative_config=NGramDecodingConfig(max_draft_len=2)) as llm:
        assert llm.info["limits"] == {"max_batch_size": 2, "max_seq_len": 100, "max_draft_len": 2}
        assert len(llm.generate("a", GREEDY).token_ids) == 30
    assert "int8" in refusal(OptionError, LLM, path, dtype="int8")
    assert "transformers" in refusal(OptionError, build, TARGET, backend="transformers")
    assert "not installed" in refusal(BackendUnavailable, build, TARGET, backend="tensorrt_llm")


# ---- the package ----------------------------------------------------------------------------------------------------


def test_every_name_of_the_package_is_there():
    assert {name: getattr(tutorial_lib, name) for name in tutorial_lib.__all__}
    assert tutorial_lib.LLM is LLM
    with pytest.raises(AttributeError, match="Nothing"):
        tutorial_lib.Nothing  # noqa: B018


def test_importing_the_package_loads_no_heavy_library():
    heavy = "('torch', 'transformers', 'plotly')"
    code = f"import sys, tutorial_lib, tutorial_lib.config; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
