"""From a configuration to a drafter: every method through `LLM`, and what a device cannot run refused by name."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import tutorial_lib
from tutorial_lib.api import LLM
from tutorial_lib.backends import torch_backend, torch_drafters
from tutorial_lib.config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    LayerSkipDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
)
from tutorial_lib.drafters.ngram import NGramDrafter
from tutorial_lib.errors import ModelError, OptionError

TARGET = "dummy:tiny-llama?seed=5&layers=4"
PROMPTS = [[7], [3, 9], [8] * 9, [5, 6] * 12, list(range(40, 90))]
LOOKAHEAD = LookaheadDecodingConfig(max_window_size=3, max_ngram_size=3, max_verification_set_size=2)
METHODS = {
    "ngram": NGramDecodingConfig(),
    "sa": SADecodingConfig(enable_global_pool=True),
    "lookahead": LOOKAHEAD,
    "layer_skip": LayerSkipDecodingConfig(skip_layers=[1]),
    "unsure": DraftTargetDecodingConfig(
        speculative_model_dir="dummy:tiny-llama?seed=4&layers=1", confidence_threshold=0.02, max_draft_len=6
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Plain greedy texts; engines of the module go to one cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        with LLM(TARGET, max_seq_len=128, device="cpu") as llm:
            yield llm.generate(PROMPTS, SamplingParams(max_tokens=30))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_text_of_plain_decoding(name, texts):
    with LLM(TARGET, speculative_config=METHODS[name], max_seq_len=128, device="cpu") as llm:
        for _ in range(2):
            done = llm.generate(PROMPTS, SamplingParams(max_tokens=30))
            assert [g.token_ids for g in done] == [g.token_ids for g in texts]
        assert sum(r.accepted for g in done for r in g.rounds) > 0
        assert llm.info["max_draft_len"] == METHODS[name].max_draft_len
        if name == "unsure":
            assert llm.info["drafter"].startswith("dummy:") and {1} < {len(r.drafted) for g in done for r in g.rounds}
        else:
            assert llm.info["drafter"] == METHODS[name].decoding_type.lower()


def test_lookahead_reaches_to_the_far_end_of_its_window(texts):
    with LLM(TARGET, speculative_config=LOOKAHEAD, max_seq_len=128, device="cpu") as llm:
        done = llm.generate(PROMPTS[1], SamplingParams(max_tokens=30))
    assert max(r.depth for r in done.rounds) == 3  # W + N - 3


@pytest.mark.parametrize(
    ("config", "module", "function"),
    [
        (MedusaDecodingConfig(speculative_model_dir="some/heads"), "medusa", "open_medusa"),
        (EagleDecodingConfig(speculative_model="some/heads"), "eagle", "open_eagle"),
    ],
    ids=["medusa", "eagle"],
)
def test_heads_are_opened_by_their_module(config, module, function, texts, monkeypatch):
    """What the functions get, and that what they return drafts."""
    opened = []

    def open_heads(config, target, checkpoint):
        opened.append((config, target.config.num_layers, checkpoint.name))
        return NGramDrafter(NGramDecodingConfig(), [])

    monkeypatch.setitem(sys.modules, f"tutorial_lib.drafters.{module}", SimpleNamespace(**{function: open_heads}))
    monkeypatch.setattr(torch_drafters, "resolve", lambda name, say: SimpleNamespace(name=name))
    with LLM(TARGET, speculative_config=config, max_seq_len=128, device="cpu") as llm:
        assert opened == [(config, 4, "some/heads")] and llm.info["drafter"] == "some/heads"
        done = llm.generate(PROMPTS, SamplingParams(max_tokens=30))
        assert any(r.drafted for g in done for r in g.rounds)


# ---- refusals -------------------------------------------------------------------------------------------------------


class Unheard(DecodingBaseConfig):
    decoding_type = "Unheard"


def test_a_method_that_the_backend_lacks_is_refused():
    with pytest.raises(OptionError, match="does not run Unheard.*LookaheadDecodingConfig.*choose one"):
        torch_drafters.refuse_unsupported(Unheard(), "cpu")


def test_a_threshold_is_refused_on_a_gpu_before_any_work(monkeypatch):
    monkeypatch.setattr(torch_backend, "choose_device", lambda device: "cuda")
    config = DraftTargetDecodingConfig(speculative_model_dir="x", confidence_threshold=0.5)
    with pytest.raises(OptionError) as error:
        LLM("nowhere", speculative_config=config)
    message = str(error.value)
    words = ("on a GPU cannot honour DraftTargetDecodingConfig(confidence_threshold=…)", "save no time", "device='cpu'")
    assert all(word in message for word in words) and "\n" not in message
    torch_drafters.refuse_unsupported(config, "cpu")
    torch_drafters.refuse_unsupported(DraftTargetDecodingConfig(speculative_model_dir="x"), "cuda")


def test_a_round_on_a_gpu_has_room_for_what_a_method_drafts():
    def rows(config):
        return torch_drafters.gpu_draft_rows(config, None, SimpleNamespace(vocab_size=320))

    tree = {"speculative_model_dir": "x", "use_dynamic_tree": True, "max_draft_len": 5}
    assert rows(DraftTargetDecodingConfig(speculative_model_dir="x", max_draft_len=6)) == 6
    assert rows(EagleDecodingConfig(speculative_model_dir="x", eagle_choices=[[0], [1], [0, 0]])) == 3
    assert rows(EagleDecodingConfig(**tree, dynamic_tree_max_topK=3, max_total_draft_tokens=10)) == 12
    assert rows(LookaheadDecodingConfig()) == 15 and rows(LOOKAHEAD) == 9
    with pytest.raises(OptionError, match="65 tokens.*63.*W, N or G"):
        rows(LookaheadDecodingConfig(max_window_size=15, max_ngram_size=4, max_verification_set_size=7))


@pytest.mark.parametrize(
    "config", [MedusaDecodingConfig(speculative_model_dir="nowhere"), EagleDecodingConfig(speculative_model="nowhere")]
)
def test_heads_that_are_not_there(config, texts):
    with pytest.raises(ModelError, match="nowhere"):
        LLM(TARGET, speculative_config=config, max_seq_len=128, device="cpu")


@pytest.mark.parametrize(
    ("content", "needed"),
    [
        ({"medusa_num_heads": 2}, "use MedusaDecodingConfig"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "use EagleDecodingConfig"),
    ],
)
def test_heads_given_as_a_draft_model(content, needed, texts, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = DraftTargetDecodingConfig(speculative_model_dir=tmp_path)
    with pytest.raises(OptionError, match=needed):
        LLM(TARGET, speculative_config=config, max_seq_len=128, device="cpu")


def test_every_configuration_is_a_name_of_the_package():
    for kind in torch_drafters.RUNS:
        assert getattr(tutorial_lib, kind.__name__) is kind
