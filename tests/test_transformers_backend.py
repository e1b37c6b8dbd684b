"""The reference backend, against a greedy loop by hand and against itself with and without drafting.

Tiny random models only. A draft model that is the target itself is an oracle: everything it drafts must be accepted,
and blocks are as long as they get, so that ends in the middle of a block are met.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tutorial_lib.backends import transformers as backend_module
from tutorial_lib.backends.transformers import TransformersBackend
from tutorial_lib.config import (
    DraftTargetDecodingConfig,
    KvCacheConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from tutorial_lib.errors import ModelError, OptionError, PromptError
from tutorial_lib.models import load_tokenizer, resolve

TINY = "dummy:tiny-llama"
WEAK = "dummy:tiny-llama?layers=1&seed=5"
PROMPT = [256, *b"abcabcabcabc and 42"]


def draft(name: str, k: int) -> DraftTargetDecodingConfig:
    return DraftTargetDecodingConfig(speculative_model_dir=name, max_draft_len=k)


def ngram(k: int) -> NGramDecodingConfig:
    return NGramDecodingConfig(max_draft_len=k, max_matching_ngram_size=3, is_use_oldest=True)


METHODS = {"oracle": lambda k: draft(TINY, k), "weak": lambda k: draft(WEAK, k), "ngram": ngram}


@pytest.fixture(scope="module")
def plain():
    return TransformersBackend(TINY)


def one(backend: TransformersBackend, prompt=PROMPT, **params):
    return backend.generate([prompt], [SamplingParams(**{"ignore_eos": True, **params})])[0]


def check_rounds(generation, k: int) -> None:
    """Every token comes from the first pass or from one round; a round is a run of drafts and at most one more."""
    in_rounds = [token for round_ in generation.rounds for token in round_.emitted]
    first_pass = len(generation.token_ids) - len(in_rounds)
    assert 1 <= first_pass <= k + 1 and in_rounds == generation.token_ids[first_pass:]
    for round_ in generation.rounds:
        assert len(round_.drafted) <= k
        assert round_.emitted[: round_.accepted] == round_.drafted[: round_.accepted]
        assert round_.accepted <= len(round_.emitted) <= round_.accepted + 1
        assert round_.verify_s > 0 and round_.draft_s >= 0
    ends = [generation.ttft_s, *(round_.end_s for round_ in generation.rounds)]
    assert ends == sorted(ends) and ends[-1] == generation.latency_s


# --- greedy ---


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
def test_plain_greedy_is_the_argmax_of_full_passes(name):
    backend = TransformersBackend(f"dummy:{name}")
    prompt = list(range(50))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(20):
            ids = torch.cat([ids, backend._model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    generation = one(backend, prompt, max_tokens=20)
    assert generation.token_ids == ids[0, 50:].tolist()
    assert [r.emitted for r in generation.rounds] == [(t,) for t in generation.token_ids[1:]]
    assert all(not r.drafted and r.draft_s == 0 for r in generation.rounds)
    assert generation.finish_reason == "length" and generation.prompt_token_ids == prompt


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("method", METHODS)
def test_drafting_changes_nothing_in_the_text(plain, method, k):
    backend = TransformersBackend(TINY, speculative_config=METHODS[method](k))
    for prompt in ([300], PROMPT, list(range(50))):
        expected = one(plain, prompt, max_tokens=30)
        generation = one(backend, prompt, max_tokens=30)
        assert generation.token_ids == expected.token_ids and generation.text == expected.text
        assert generation.finish_reason == "length"
        check_rounds(generation, k)
        if method == "oracle":
            assert all(r.accepted == len(r.drafted) for r in generation.rounds)
            assert len(generation.rounds) == -(-30 // (k + 1)) - 1


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
def test_drafting_changes_nothing_on_other_architectures(name):
    """For Mistral the prompt is longer than its attention window of 32."""
    prompt = list(range(50))
    expected = one(TransformersBackend(f"dummy:{name}"), prompt, max_tokens=30)
    for config in (draft(f"dummy:{name}?layers=1&seed=5", 3), ngram(3)):
        generation = one(TransformersBackend(f"dummy:{name}", speculative_config=config), prompt, max_tokens=30)
        assert generation.token_ids == expected.token_ids
        check_rounds(generation, 3)


def test_ngram_drafts_what_followed_before():
    backend = TransformersBackend(TINY, speculative_config=ngram(3))
    generation = one(backend, max_tokens=40)
    drafted = [r.drafted for r in generation.rounds if r.drafted]
    text = [*PROMPT, *generation.token_ids]
    assert backend._generation_config(SamplingParams()).max_matching_ngram_size == 3
    assert drafted and all(any(text[i : i + len(d)] == list(d) for i in range(len(text))) for d in drafted)


@pytest.mark.parametrize("method", METHODS)
def test_exactly_max_tokens_come(plain, method):
    for k in (1, 3, 8):
        backend = TransformersBackend(TINY, speculative_config=METHODS[method](k))
        for count in range(1, 8):
            generation = one(backend, [1, 2, 3] * 5, max_tokens=count)
            assert len(generation.token_ids) == count and generation.finish_reason == "length"
            assert generation.token_ids == one(plain, [1, 2, 3] * 5, max_tokens=count).token_ids


@pytest.mark.parametrize("method", METHODS)
def test_repetition_penalty_counts_the_drafts_before(plain, method):
    params = {"max_tokens": 24, "repetition_penalty": 1.5}
    expected = one(plain, **params).token_ids
    assert expected != one(plain, max_tokens=24).token_ids
    assert one(TransformersBackend(TINY, speculative_config=METHODS[method](4)), **params).token_ids == expected


# --- where it ends ---


def spread_text(plain) -> list[int]:
    """Greedy tokens with few repeats, so that a token can be declared the end at many positions."""
    return one(plain, max_tokens=24, repetition_penalty=2.0).token_ids


@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_stop_token_ends_the_text_wherever_it_stands_in_a_block(plain, method):
    backend = plain if method is None else TransformersBackend(TINY, speculative_config=METHODS[method](4))
    whole = spread_text(plain)
    for j in range(0, 16, 2):
        stop = whole[j]
        expected = whole[: whole.index(stop) + 1]
        generation = one(backend, max_tokens=24, repetition_penalty=2.0, stop_token_ids=[stop])
        assert generation.token_ids == expected and generation.finish_reason == "stop"
        assert generation.stop_reason == stop
        assert generation.text == plain.tokenizer.decode(expected[:-1], skip_special_tokens=True)
        check_rounds(generation, 4)


def write_folder(folder: Path, generation_config: dict) -> str:
    dummy = resolve(TINY)
    folder.mkdir()
    save_file(dict(dummy.tensors()), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dummy.config))
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    load_tokenizer(dummy).save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize("method", [None, "oracle", "ngram"])
def test_every_listed_eos_ends_and_can_be_ignored(plain, method, tmp_path):
    whole = one(plain, max_tokens=24).token_ids
    second = whole[6]
    recommended = {"do_sample": True, "temperature": 3.0, "repetition_penalty": 5.0}
    folder = write_folder(tmp_path / "m", {"eos_token_id": [257, second], **recommended})
    backend = TransformersBackend(folder, speculative_config=METHODS[method](4) if method else None)
    assert backend.info["eos_token_ids"] == sorted({257, second})
    ended = backend.generate([PROMPT], [SamplingParams(max_tokens=24)])[0]
    assert ended.token_ids == whole[: whole.index(second) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    # What the checkpoint recommends is not what was asked for.
    assert one(backend, max_tokens=24).token_ids == whole


@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_stop_string_cuts_the_text_and_keeps_the_token_that_completes_it(plain, method):
    backend = plain if method is None else TransformersBackend(TINY, speculative_config=METHODS[method](7))
    ids = spread_text(plain)
    pieces = [plain.tokenizer.decode([t], skip_special_tokens=True) for t in ids]
    usable = [i for i, piece in enumerate(pieces) if len(piece) == 1 and piece.isascii() and piece in "".join(pieces)]
    assert len(usable) > 2
    for at in usable[:5]:
        stop = pieces[at]
        text = plain.tokenizer.decode(ids, skip_special_tokens=True)
        generation = one(backend, max_tokens=24, repetition_penalty=2.0, stop=["zzzz", stop])
        assert generation.finish_reason == "stop" and generation.stop_reason == stop
        assert generation.text == text[: text.index(stop)]
        assert generation.token_ids == ids[: pieces.index(stop) + 1]


# --- sampling ---


@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_seed_fixes_the_text_whoever_the_neighbours_are(plain, method):
    backend = plain if method is None else TransformersBackend(TINY, speculative_config=METHODS[method](3))
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=7, ignore_eos=True)
    other = SamplingParams(max_tokens=5, temperature=0.5, seed=8, ignore_eos=True)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    alone = backend.generate([PROMPT], [params])[0]
    assert torch.equal(torch.random.get_rng_state(), before)
    _, among = backend.generate([[1, 2], PROMPT], [other, params])
    assert among.token_ids == alone.token_ids
    assert one(backend, max_tokens=16, temperature=1.0, seed=9).token_ids != alone.token_ids
    assert (
        one(backend, max_tokens=16, temperature=1.0).token_ids != one(backend, max_tokens=16, temperature=1.0).token_ids
    )
    check_rounds(alone, 3)


@pytest.mark.parametrize("method", [None, "weak", "ngram"])
def test_filters_that_leave_one_token_give_the_greedy_text(plain, method):
    backend = plain if method is None else TransformersBackend(TINY, speculative_config=METHODS[method](3))
    greedy = one(plain, max_tokens=20).token_ids
    for only_one in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        assert one(backend, max_tokens=20, **{"temperature": 1.0, **only_one}).token_ids == greedy


def test_no_hidden_top_k_is_applied(plain):
    """transformers' own default keeps the 50 likeliest tokens; here all 320 stay possible."""
    hot = one(plain, max_tokens=400, temperature=50.0, seed=1).token_ids
    assert len(set(hot)) > 150


@pytest.mark.parametrize("method", [None, "oracle", "weak"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 1, "top_k": 5}, {"repetition_penalty": 1.5}])
def test_logprobs_are_those_of_the_raw_distribution(plain, method, sampling):
    backend = plain if method is None else TransformersBackend(TINY, speculative_config=METHODS[method](4))
    generation = one(backend, max_tokens=17, logprobs=2, **sampling)
    ids = torch.tensor([[*PROMPT, *generation.token_ids]])
    with torch.no_grad():
        exact = torch.log_softmax(plain._model(ids).logits[0, len(PROMPT) - 1 : -1], dim=-1)
    assert len(generation.logprobs) == 17
    for row, (token, entry) in enumerate(zip(generation.token_ids, generation.logprobs, strict=True)):
        assert set(entry) == {token, *torch.topk(exact[row], 2).indices.tolist()}
        assert all(value == pytest.approx(float(exact[row, t]), abs=1e-4) for t, value in entry.items())


# --- several requests, streaming, closing ---


def test_requests_keep_their_order_and_wait_for_each_other(plain):
    prompts = [[1, 2, 3], PROMPT, [9]]
    together = plain.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 9, 6)])
    assert [len(g.token_ids) for g in together] == [4, 9, 6]
    assert [g.prompt_token_ids for g in together] == prompts
    assert together[1].token_ids == one(plain, max_tokens=9).token_ids
    assert together[0].latency_s < together[1].ttft_s < together[1].latency_s < together[2].ttft_s


@pytest.mark.parametrize("method", [None, "oracle", "ngram"])
def test_stream_grows_to_the_whole(plain, method):
    backend = plain if method is None else TransformersBackend(TINY, speculative_config=METHODS[method](4))
    params = SamplingParams(max_tokens=25, ignore_eos=True, logprobs=0)
    steps = list(backend.stream(PROMPT, params))
    whole = backend.generate([PROMPT], [params])[0]
    assert len(steps) == len(whole.rounds) + 1
    for earlier, later in zip(steps, steps[1:], strict=False):
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        assert len(later.token_ids) > len(earlier.token_ids) and later.text.startswith(earlier.text)
        assert not earlier.finish_reason
    assert (steps[-1].token_ids, steps[-1].text) == (whole.token_ids, whole.text)
    assert steps[-1].finish_reason == "length" and steps[-1].logprobs == whole.logprobs


def test_an_abandoned_stream_ends_and_the_backend_works_on(plain):
    passes: list[int] = []
    counter = plain._model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    stream = plain.stream(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True))
    next(stream)
    stream.close()
    counter.remove()
    assert 1 <= len(passes) < 1500
    assert not plain._model._forward_pre_hooks and not plain._one_at_a_time.locked()
    assert len(one(plain, max_tokens=3).token_ids) == 3


def test_an_error_in_the_stream_reaches_the_reader(plain, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("from inside")

    monkeypatch.setattr(plain._model, "generate", fail)
    with pytest.raises(RuntimeError, match="from inside"):
        list(plain.stream(PROMPT, SamplingParams()))
    assert not plain._model._forward_pre_hooks


def test_close_frees_and_says_so():
    backend = TransformersBackend(TINY)
    backend.close()
    backend.close()
    with pytest.raises(OptionError, match="closed"):
        one(backend)


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": LookaheadDecodingConfig()}, "LookaheadDecodingConfig"),
        ({"speculative_config": NGramDecodingConfig(is_use_oldest=False)}, "is_use_oldest"),
        (
            {"speculative_config": DraftTargetDecodingConfig(speculative_model_dir=TINY, confidence_threshold=0.5)},
            "confidence_threshold",
        ),
        ({"kv_cache_config": KvCacheConfig(dtype="fp8")}, "KvCacheConfig.dtype="),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"device": "tpu9"}, "device is 'tpu9'"),
        ({"device": "meta"}, "not on this machine"),
        ({"max_seq_len": 4096}, "max_seq_len is 4096.*2048, the model's context"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"speculative_config": draft("dummy:tiny-llama?vocab=384", 2)}, "320 .target. and 384 .drafter."),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options, message):
    with pytest.raises(OptionError, match=message):
        TransformersBackend(TINY, **options)


def test_a_drafter_of_another_family_is_refused():
    with pytest.raises(ModelError, match="id 256 is '<.begin.>' in the target's"):
        TransformersBackend(TINY, speculative_config=draft("dummy:tiny-qwen2", 2))


def test_an_engine_directory_is_refused(tmp_path):
    (tmp_path / "engine.json").write_text("{}")
    with pytest.raises(ModelError, match="engine directory"):
        TransformersBackend(tmp_path)


def test_prompts_that_do_not_fit_are_refused_before_any_work():
    backend = TransformersBackend(TINY, max_seq_len=20)
    good = SamplingParams(max_tokens=4)
    for prompt, message in [
        ([], "prompt 2 of 2 is empty"),
        ([1] * 17, "17 tokens and max_tokens asks for 4 more.*20, max_seq_len"),
        ([1] * 20, "20 tokens.*fewer than 20, max_seq_len"),
        ([1, 320], "id 320.*0 to 319"),
    ]:
        with pytest.raises(PromptError, match=message):
            backend.generate([[1], prompt], [good, good])
    assert len(backend.generate([[1] * 16], [good])[0].token_ids) == 4


def test_the_drafters_context_limits_too():
    config = draft("dummy:tiny-llama?context=16", 2)
    backend = TransformersBackend(TINY, speculative_config=config)
    assert any("drafter's context is 16" in note for note in backend.info["notes"])
    with pytest.raises(PromptError, match="16, the drafter's context length"):
        backend.generate([[1] * 10], [SamplingParams(max_tokens=7)])


def test_warnings_of_the_library_are_off_only_while_it_runs(plain, monkeypatch):
    logging = backend_module.transformers.utils.logging
    before, during = logging.get_verbosity(), []
    monkeypatch.setattr(plain._model, "generate", lambda *_, **__: during.append(logging.get_verbosity()))
    one(plain)
    assert before < logging.ERROR and during == [logging.ERROR] and logging.get_verbosity() == before


def test_info_says_what_runs():
    info = TransformersBackend(TINY, speculative_config=draft(WEAK, 3), dtype="bfloat16").info
    assert (info["backend"], info["target"], info["drafter"]) == ("transformers", TINY, WEAK)
    assert (info["dtype"], info["drafter_dtype"], info["device"]) == ("bfloat16", "bfloat16", "cpu")
    assert info["max_draft_len"] == 3 and info["limits"]["max_seq_len"] == 2048 and info["load_s"] > 0
    assert TransformersBackend(TINY, speculative_config=ngram(2)).info["drafter"] == "ngram"
    assert backend_module._leading_run((1, 2, 3), (1, 2, 9)) == 2
