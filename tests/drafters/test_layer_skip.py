"""The target with layers left out as its own drafter: the view, its cache, its texts, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from stand_ins import PROMPTS, greedy, model_of, run, tiny_model, tiny_tensors

from tutorial_lib.config import LayerSkipDecodingConfig, SamplingParams
from tutorial_lib.drafters.base import SlotState
from tutorial_lib.drafters.draft_model import DraftModelDrafter
from tutorial_lib.drafters.layer_skip import LayerSkipDrafter, layers_to_skip, without_layers
from tutorial_lib.engine.model import Segment
from tutorial_lib.errors import OptionError
from tutorial_lib.shapes import dummy_config

NAME = "dummy:tiny-llama?seed=5&layers=4"
SKIPPED = (1, 2)


@pytest.fixture(scope="module")
def deep():
    """Four layers, so that two can be left out."""
    return tiny_model(NAME)


@pytest.fixture(scope="module")
def shallow():
    """The same written as a model of its own: layers 0 and 3 of the four."""
    tensors = tiny_tensors(NAME)
    for part in [name for name in tensors if ".layers.3." in name]:
        tensors[part.replace(".layers.3.", ".layers.1.")] = tensors[part]
    return model_of(tensors, {**dummy_config(NAME)[0], "num_hidden_layers": 2})


def config_of(*layers: int, **options) -> LayerSkipDecodingConfig:
    return LayerSkipDecodingConfig(skip_layers=layers or None, **options)


def rounds(generations) -> list:
    return [[(r.drafted, r.accepted) for r in g.rounds] for g in generations]


def test_the_view_computes_as_a_model_of_the_layers_left(deep, shallow):
    ids = PROMPTS[2]
    view = without_layers(deep, SKIPPED)
    found = view.forward(ids, [Segment(1, 0, len(ids))])
    torch.testing.assert_close(found, shallow.forward(ids, [Segment(1, 0, len(ids))]), rtol=1e-5, atol=1e-5)


def test_weights_are_shared_and_the_cache_is_not(deep):
    before = deep.cache.clone()
    view = without_layers(deep, SKIPPED)
    view.forward([3, 9], [Segment(0, 0, 2)])
    # an unwritten cache may hold anything, NaN too, which equals nothing
    assert torch.equal(deep.cache.nan_to_num(), before.nan_to_num())
    assert deep.config.num_layers == len(deep.layers) == 4
    assert view.embed is deep.embed and view.layers == [deep.layers[0], deep.layers[3]]
    assert view.cache.shape == (2, *deep.cache.shape[1:])


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_text_is_that_of_plain_decoding(k, batch, deep, shallow, pieces):
    """And the drafts are those of a draft model with the same layers."""
    prompts = [*PROMPTS, [5, 6] * 12, [8] * 9][:batch]
    done = run(deep, pieces, prompts, drafter=LayerSkipDrafter(config_of(*SKIPPED), deep), k=k, max_tokens=20)
    for prompt, generation in zip(prompts, done, strict=True):
        assert generation.token_ids == greedy(deep, prompt, 20)[len(prompt) :]
    other = run(deep, pieces, prompts, drafter=DraftModelDrafter(shallow, 320), k=k, max_tokens=20)
    assert rounds(done) == rounds(other)
    assert batch == 1 or 0 < sum(r.accepted for g in done for r in g.rounds)


def test_a_layer_that_changes_nothing_can_be_skipped(pieces):
    """With the outputs of layer 1 at zero the part is the whole: everything is accepted."""
    tensors = tiny_tensors(NAME)
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{part}.weight"] = torch.zeros_like(tensors[f"model.layers.1.{part}.weight"])
    model = model_of(tensors, dummy_config(NAME)[0])
    done = run(model, pieces, PROMPTS, drafter=LayerSkipDrafter(config_of(1), model), k=3, max_tokens=21)
    assert all((len(r.drafted), r.accepted) == (3, 3) for g in done for r in g.rounds)


def test_calls_do_not_learn_from_each_other(deep, pieces):
    drafter = LayerSkipDrafter(config_of(*SKIPPED, confidence_threshold=0.5), deep)
    seen = [
        rounds(run(deep, pieces, prompts, drafter=drafter, k=4, max_tokens=16))
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS)
    ]
    assert seen[0] == seen[2]


def test_the_threshold_is_the_drafters(deep):
    lengths = []
    for threshold in (None, 0.0, 1.0):
        drafter = LayerSkipDrafter(config_of(*SKIPPED, confidence_threshold=threshold), deep)
        drafter.reset(0, PROMPTS[1])
        (draft,) = drafter.propose([SlotState(0, [*PROMPTS[1], 4], 5, SamplingParams(), 0)])
        lengths.append(len(draft.tokens))
    assert lengths == [5, 5, 1]


@pytest.mark.parametrize(
    ("layers", "expected"), [(30, tuple(range(2, 28, 2))), (6, (2,)), (5, (2,)), (8, (2, 4))], ids=str
)
def test_by_default_every_second_layer_between_the_first_and_last_two(layers, expected):
    assert layers_to_skip(config_of(), layers) == expected


@pytest.mark.parametrize(
    ("skipped", "layers", "message"),
    [
        ((4,), 4, "skip_layers holds 4; needed: layers from 0 to 3"),
        ((0, 1, 2, 3), 4, "leaves out all of the target's 4 layers"),
        ((), 4, "leaves out none of the target's 4 layers"),
    ],
)
def test_misuse(skipped, layers, message):
    with pytest.raises(OptionError) as error:
        layers_to_skip(config_of(*skipped), layers)
    assert message in str(error.value) and "skip_layers" in error.value.remedy


def test_negative_layers_are_refused():
    with pytest.raises(OptionError, match="skip_layers entry is -1"):
        config_of(-1)
