"""Medusa heads against their formula, one head and one row at a time; the tree that is chosen from measurements."""

from __future__ import annotations

import pytest
import torch
from stand_ins import PROMPTS, greedy, run, tiny_model
from tiny_heads import (
    MEDUSA_HEADS,
    SHORTLIST,
    TARGET,
    as_int8,
    features_of,
    medusa_own,
    medusa_project,
    medusa_tensors,
    slow_medusa,
)

from tutorial_lib.config import MedusaDecodingConfig, SamplingParams
from tutorial_lib.drafters.base import ROOT, Outcome, SlotState
from tutorial_lib.drafters.medusa import open_medusa
from tutorial_lib.errors import OptionError

CHOICES = ([0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 2])
NORMED = (8,)  # the target has seven layers


@pytest.fixture(scope="module")
def target():
    return tiny_model(TARGET)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    tensors = medusa_tensors() | {"draft_vocab": SHORTLIST.int()}
    return medusa_own(tmp_path_factory.mktemp("medusa"), tensors, draft_vocab_size=len(SHORTLIST))


def opened(target, checkpoint, **options):
    return open_medusa(MedusaDecodingConfig(speculative_model="tiny", **options), target, checkpoint)


def state(text, budget=3, slot=0, **params) -> SlotState:
    return SlotState(slot, list(text), budget, SamplingParams(**params), 0)


def ranked(target, hidden, head, *, tensors=None, output=None, ids=SHORTLIST):
    """Target ids in the order in which `head` likes them."""
    x = slow_medusa(tensors or medusa_tensors(), hidden, head)
    logits = output @ x if output is not None else target.logits(x[None])[0][ids]
    return ids[logits.argsort(descending=True)].tolist()


def test_the_tree_holds_every_heads_best_tokens_behind_the_prompt(target, heads):
    text = greedy(target, PROMPTS[2], 1)
    drafter = opened(target, heads, medusa_choices=CHOICES)
    features = features_of(target, text[:-1], NORMED)
    drafter.reset(0, text[:-1], features)
    (draft,) = drafter.propose([state(text)])
    best = [ranked(target, features[-1], head) for head in range(MEDUSA_HEADS)]
    paths = sorted(map(tuple, CHOICES), key=lambda path: (len(path), path))
    assert list(draft.tokens) == [best[len(path) - 1][path[-1]] for path in paths]
    assert draft.parents == tuple(ROOT if len(p) == 1 else paths.index(p[:-1]) for p in paths)
    assert draft.probs is None and drafter.feature_layers == NORMED


def test_the_heads_go_on_from_the_last_accepted_token(target, heads):
    text = greedy(target, PROMPTS[1], 1)
    drafter = opened(target, heads, medusa_choices=CHOICES)
    drafter.reset(2, text[:-1], features_of(target, text[:-1], NORMED))
    for accepted in (0, 2, 1, 3):
        drafter.propose([state(text, slot=2)])
        text = greedy(target, text, accepted + 1)
        features = features_of(target, text[:-1], NORMED)
        drafter.observe([Outcome(2, tuple(range(accepted)), (), features[-accepted - 1 :])])
        (draft,) = drafter.propose([state(text, slot=2)])
        assert draft.tokens[0] == ranked(target, features[-1], 0)[0]


def test_heads_with_output_matrices_of_their_own(target, tmp_path):
    """The Medusa project's form over the whole vocabulary; without a tree it drafts the heads' best tokens."""
    tensors = medusa_tensors(outputs=3)
    drafter = opened(target, medusa_project(tmp_path, tensors))
    features = features_of(target, PROMPTS[2], NORMED)
    drafter.reset(0, PROMPTS[2], features)
    (draft,) = drafter.propose([state([*PROMPTS[2], 5])])
    every = torch.arange(320)
    expected = [
        ranked(target, features[-1], h, tensors=tensors, output=tensors[f"{h}.2.weight"], ids=every)[0]
        for h in range(3)
    ]
    assert list(draft.tokens) == expected and draft.tree == (ROOT, 0, 1)


def test_int8_heads_like_the_same_tokens(target, heads, tmp_path):
    tensors = as_int8(medusa_tensors()) | {"draft_vocab": SHORTLIST.int()}
    stored = medusa_own(tmp_path, tensors, draft_vocab_size=len(SHORTLIST))
    hidden = features_of(target, PROMPTS[2], NORMED)[-4:]
    logits = [opened(target, c, medusa_choices=CHOICES).logits(hidden) for c in (heads, stored)]
    assert logits[0].shape == (3, 4, len(SHORTLIST))
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].abs().max()


def test_slots_draft_together_each_to_its_budget(target, heads):
    drafter = opened(target, heads, medusa_choices=CHOICES)
    texts = [greedy(target, p, 1) for p in PROMPTS]
    for slot, text in enumerate(texts):
        drafter.reset(slot, text[:-1], features_of(target, text[:-1], NORMED))
    drafts = drafter.propose([state(t, b, slot) for slot, (t, b) in enumerate(zip(texts, (2, 0, 3), strict=True))])
    assert [len(d.tokens) for d in drafts] == [6, 0, 8]
    for slot, budget in ((0, 2), (2, 3)):
        assert drafter.propose([state(texts[slot], budget, slot)]) == [drafts[slot]]


@pytest.mark.parametrize("choices", [None, CHOICES, [[0], [0, 0]], [[i] for i in range(9)]])
@pytest.mark.parametrize("prompts", [PROMPTS[1:2], (*PROMPTS, [5, 6, 7], [200] * 9)], ids=["one", "five"])
def test_greedy_text_is_that_of_the_target(choices, prompts, target, heads, pieces):
    drafter = opened(target, heads, medusa_choices=choices)
    done = run(target, pieces, prompts, drafter=drafter, k=3, max_tokens=40)
    for generation, prompt in zip(done, prompts, strict=True):
        assert generation.token_ids == greedy(target, prompt, 40)[len(prompt) :]


@pytest.mark.parametrize("options", [{"temperature": 0.9, "seed": 3}, {"repetition_penalty": 1.3}])
def test_every_way_of_sampling_reaches_its_end(options, target, heads, pieces):
    done = run(target, pieces, PROMPTS, drafter=opened(target, heads), k=3, max_tokens=20, **options)
    assert [len(g.token_ids) for g in done] == [20] * 3


def test_the_checkpoints_tree_is_the_default_and_heads_may_be_left_out(target, heads):
    assert opened(target, heads).choices == ((0,), (1,), (0, 0), (0, 0, 0))
    assert opened(target, heads, num_medusa_heads=2).choices == ((0,), (1,), (0, 0))
    assert opened(target, heads, medusa_choices=[[3]]).choices == ((3,),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_medusa_heads": 4}, "num_medusa_heads is 4; needed: at most 3"),
        ({"medusa_choices": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "4 deep; needed: at most 3"),
        ({"medusa_choices": [[0], [0, 0]], "num_medusa_heads": 1}, "2 deep; needed: at most 1"),
        ({"medusa_choices": [[len(SHORTLIST)]]}, f"ranks below {len(SHORTLIST)}"),
    ],
)
def test_more_than_the_heads_have_is_refused(options, message, target, heads):
    with pytest.raises(OptionError, match=message):
        opened(target, heads, **options)
