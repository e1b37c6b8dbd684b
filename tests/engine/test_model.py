"""The decoder against `transformers`, and the promises its cache makes: chunks, ragged batches, stale rows."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from stand_ins import model_of, tiny_model

from tutorial_lib.engine.model import ModelConfig, Segment, inverse_frequencies, pack
from tutorial_lib.errors import ModelError
from tutorial_lib.shapes import dummy_config, random_tensors

SMALL = {
    "vocab_size": 101,  # padded to nothing round
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # short, so that 60 positions tell scaled from unscaled
}
CASES = {
    "llama untied": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama wide heads": ("Llama", {"head_dim": 16}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama all heads": ("Llama", {"num_key_value_heads": 6}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 1000.0}}),
    "llama other eps and theta": (
        "Llama",
        {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 windowed": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "qwen2 window switched off": ("Qwen2", {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0}),
    "qwen2 window above all layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral windowed": ("Mistral", {"sliding_window": 9}),
}


def reference(case: str):
    """The transformers model of a case, every parameter random (biases and norms too), and its config.json."""
    family, changes = CASES[case]
    torch.manual_seed(sum(case.encode()))
    # A copy: transformers writes into the rope parameters that it is given.
    changes = {k: dict(v) if isinstance(v, dict) else v for k, v in changes.items()}
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            matrix = parameter.dim() == 2
            parameter.copy_(torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5 if matrix else 0.3))
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
            if "embed_tokens" in name:
                parameter.mul_(5.0)
    return model, {**model.config.to_dict(), "architectures": [f"{family}ForCausalLM"]}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request):
    model, config = reference(request.param)
    return model, model_of(model.state_dict(), config)


def text_of(count: int, vocab: int = 101, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model, ids, *, slot=0, chunks=None) -> torch.Tensor:
    """Logits at every position of `ids`, prefilled in chunks of the given sizes (default: one)."""
    out, start = [], 0
    for size in chunks or [len(ids)]:
        hidden = model.forward(ids[start : start + size], [Segment(slot, start, size)])
        out.append(model.logits(hidden))
        start += size
    assert start == len(ids)
    return torch.cat(out)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# ---- against transformers -------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_logits_equal_transformers(pair):
    theirs, ours = pair
    ids = text_of(60)
    expected = theirs(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3  # else anything would be close
    close(logits_of(ours, ids), expected)


@torch.inference_mode()
def test_features_equal_transformers_hidden_states(pair):
    """Layer n is the residual stream after n layers; one more than the last is the normed state. (`transformers` lists
    the normed one in place of the last residual.)"""
    theirs, ours = pair
    ids, last = text_of(20), ours.config.num_layers
    expected = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hidden = ours.forward(ids, [Segment(0, 0, 20)], feature_layers=(last + 1, 0, 2, last))
    parts = ours.features.chunk(4, -1)
    for found, layer in zip(parts, (last, 0, 2), strict=False):
        close(found, expected[layer][0])
    assert torch.equal(parts[0], hidden)
    close(torch.nn.functional.rms_norm(parts[3], (48,), ours.norm, ours.config.rms_norm_eps), hidden)
    ours.forward(ids, [Segment(0, 0, 20)])
    assert ours.features is None


@torch.inference_mode()
def test_greedy_text_equals_transformers(pair):
    theirs, ours = pair
    ids = text_of(11, seed=1)
    expected = theirs.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, 11), do_sample=False, max_new_tokens=30, eos_token_id=None
    )[0]
    hidden = ours.forward(ids, [Segment(1, 0, 11)])
    for position in range(11, 41):
        ids.append(int(ours.logits(hidden[-1:]).argmax()))
        hidden = ours.forward(ids[-1:], [Segment(1, position, 1)])
    assert ids == expected.tolist()


def test_config_of_both_transformers_generations_reads_alike():
    new = {**dummy_config("dummy:tiny-llama")[0]}
    new.pop("rope_theta"), new.pop("rope_scaling")
    old = {**new, "rope_theta": 1000.0, "rope_scaling": LLAMA3}
    new["rope_parameters"] = {**LLAMA3, "rope_theta": 1000.0}
    assert torch.equal(inverse_frequencies(ModelConfig.from_hf(old)), inverse_frequencies(ModelConfig.from_hf(new)))
    older = {**old, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()}}
    assert torch.equal(inverse_frequencies(ModelConfig.from_hf(older)), inverse_frequencies(ModelConfig.from_hf(new)))


# ---- rope scaling, by the numbers of Llama 3.1 and 3.2 --------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "factor", "ratios"),
    [
        (128, 8.0, {0: 1.0, 28: 1.0, 29: 0.82817, 32: 0.37112, 34: 0.19021, 35: 0.125, 63: 0.125}),
        (64, 32.0, {0: 1.0, 14: 1.0, 15: 0.60557, 16: 0.30374, 17: 0.10345, 18: 0.03125, 31: 0.03125}),
    ],
)
def test_llama3_scaling_ratios(head_dim, factor, ratios):
    plain = {**dummy_config("dummy:tiny-llama")[0], "head_dim": head_dim, "rope_theta": 5e5}
    scaling = {**LLAMA3, "factor": factor, "original_max_position_embeddings": 8192}
    scaled = inverse_frequencies(ModelConfig.from_hf({**plain, "rope_scaling": scaling}))
    ratio = scaled / inverse_frequencies(ModelConfig.from_hf(plain))
    for index, expected in ratios.items():
        assert ratio[index].item() == pytest.approx(expected, abs=2e-5), index


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": []}, "LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(changes, named):
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf({**dummy_config("dummy:tiny-llama")[0], **changes})


def test_layers_with_and_without_window_are_refused():
    mixed = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    config = {**dummy_config("dummy:tiny-qwen2")[0], **mixed}
    with pytest.raises(ModelError, match="window"):
        ModelConfig.from_hf(config)
    written = {**config, "max_window_layers": 0, "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(ModelError, match="window"):
        ModelConfig.from_hf(written)


def test_an_untied_head_that_is_missing_is_named_and_not_tied():
    config, seed = dummy_config("dummy:tiny-llama")
    tensors = dict(random_tensors(config, seed, "cpu", None))
    del tensors["lm_head.weight"]
    with pytest.raises(ModelError, match="lm_head.weight"):
        pack(tensors, ModelConfig.from_hf(config))
    tied = ModelConfig.from_hf({**config, "tie_word_embeddings": True})
    assert "head" not in pack(tensors, tied)


# ---- the cache ------------------------------------------------------------------------------------------------------

SHAPES = ("dummy:tiny-llama", "dummy:tiny-mistral?window=9", "dummy:tiny-qwen3")


@pytest.fixture(scope="module", params=SHAPES)
def tiny(request):
    return tiny_model(request.param)


@pytest.mark.parametrize("chunks", [[1] * 60, [59, 1], [1, 59], [7, 3, 30, 20]], ids=["ones", "59+1", "1+59", "mixed"])
def test_prefill_in_chunks_equals_the_whole(tiny, chunks):
    ids = text_of(60, 320)
    close(logits_of(tiny, ids, slot=1, chunks=chunks), logits_of(tiny, ids, slot=2), 5e-5)


def test_a_long_prefill_uses_no_cached_mask(tiny):
    ids = text_of(150, 320)  # above the 64 rows that have a mask kept ready
    close(logits_of(tiny, ids, chunks=[100, 50]), logits_of(tiny, ids, slot=1, chunks=[50] * 3), 5e-5)


def test_ragged_batch_equals_one_by_one(tiny):
    texts = {0: text_of(40, 320, 1), 3: text_of(17, 320, 2), 1: text_of(3, 320, 3), 4: text_of(1, 320, 4)}
    alone = {slot: logits_of(tiny, ids, slot=slot) for slot, ids in texts.items()}
    tiny.cache.fill_(math.nan)
    starts = {0: 35, 3: 9, 1: 1, 4: 0}  # what each has in its cache when the rows go in together
    for slot, start in starts.items():
        if start:
            tiny.forward(texts[slot][:start], [Segment(slot, 0, start)])
    rows = [t for slot, start in starts.items() for t in texts[slot][start:]]
    segments = [Segment(slot, start, len(texts[slot]) - start) for slot, start in starts.items()]
    together = tiny.logits(tiny.forward(rows, segments))
    close(together, torch.cat([alone[slot][start:] for slot, start in starts.items()]), 5e-5)


def test_stale_rows_and_other_slots_are_never_read(tiny):
    ids = text_of(30, 320)
    expected = logits_of(tiny, ids, slot=2)
    logits_of(tiny, ids[:20] + text_of(10, 320, 9), slot=2)  # ten positions that are rejected
    address = tiny.cache.data_ptr()
    tiny.cache[:, 2, :, 20:] = math.nan
    tiny.cache[:, [0, 1, 3, 4]] = math.nan
    rest = tiny.logits(tiny.forward(ids[20:25], [Segment(2, 20, 5)]))
    for position in range(25, 30):
        rest = torch.cat([rest, tiny.logits(tiny.forward([ids[position]], [Segment(2, position, 1)]))])
    close(rest, expected[20:], 5e-5)
    assert tiny.cache.data_ptr() == address


def test_every_position_up_to_the_last_can_be_used():
    model = tiny_model("dummy:tiny-llama", max_seq_len=24, max_slots=1)
    ids = text_of(24, 320)
    wide = tiny_model("dummy:tiny-llama", max_seq_len=100, max_slots=1)
    close(logits_of(model, ids, chunks=[19, 5]), logits_of(wide, ids), 5e-5)


def test_bfloat16_follows_float32(tiny):
    config, seed = dummy_config("dummy:tiny-llama")
    ids = text_of(40, 320)
    exact = logits_of(model_of(random_tensors(config, seed, "cpu", torch.float32), config), ids)
    rounded = logits_of(model_of(random_tensors(config, seed, "cpu", torch.bfloat16), config), ids)
    assert rounded.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=-1).min() > 0.99


def test_a_shortlist_head_has_the_rows_asked_for():
    for name in ("dummy:tiny-llama", "dummy:tiny-qwen2"):  # untied and tied
        config, seed = dummy_config(name)
        head_ids = torch.tensor([3, 17, 200, 319])
        ids = text_of(9, 320)
        tensors = random_tensors(config, seed, "cpu", None)
        short = logits_of(model_of(tensors, config, head_ids=head_ids), ids)
        close(short, logits_of(model_of(tensors, config), ids)[:, head_ids], 5e-5)
