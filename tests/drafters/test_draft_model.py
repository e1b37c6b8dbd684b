"""The draft model's own cache and distributions, seen from outside: what it proposes, alone and in the engine."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from stand_ins import PROMPTS, TableModel, greedy, model_of, p_value, run, tiny_model, tiny_tensors

from tutorial_lib.config import SamplingParams
from tutorial_lib.drafters import draft_model
from tutorial_lib.drafters.base import Outcome, SlotState
from tutorial_lib.drafters.draft_model import DraftModelDrafter
from tutorial_lib.engine.model import PREFILL_CHUNK, Segment
from tutorial_lib.engine.sampling import Purpose, draw, probabilities, uniform
from tutorial_lib.shapes import dummy_config

NAME = "dummy:tiny-llama?seed=5"  # what the fixture `target` is


@pytest.fixture(scope="module")
def twin():
    return tiny_model(NAME)


def state(ids, budget=4, slot=0, **params) -> SlotState:
    return SlotState(slot, list(ids), budget, SamplingParams(**params), params.get("seed", 0))


def rounds(generation) -> list[tuple[int, int, int]]:
    return [(len(r.drafted), r.accepted, len(r.emitted)) for r in generation.rounds]


# ---- drafting with the target itself --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_self_drafts_are_all_accepted(k, options, target, twin, pieces):
    """After a round with every draft accepted the cache lacks the last draft; a hole there shows as a rejection."""
    done = run(
        target, pieces, PROMPTS, drafter=DraftModelDrafter(twin, 320), k=k, max_tokens=1 + 8 * (k + 1), **options
    )
    for generation in done:
        assert rounds(generation) == [(k, k, k + 1)] * 8


def test_after_a_time_without_drafts_acceptance_is_as_before(target, twin):
    """The text grows while the budget is 0; the drafter catches up on all of it."""
    text = greedy(target, PROMPTS[1], 60)
    drafter = DraftModelDrafter(twin, 320)
    drafter.reset(0, text[:2])
    for length, budget in ((3, 4), (6, 0), (9, 0), (25, 0), (26, 4), (31, 4), (31, 2)):
        (draft,) = drafter.propose([state(text[:length], budget)])
        drafter.observe([Outcome(0)])
        assert list(draft.tokens) == text[length : length + budget]


def test_rejected_drafts_leave_no_trace(target, twin):
    """Texts that leave the proposal at every place, even one that comes back to an earlier proposal later."""
    drafter = DraftModelDrafter(twin, 320)
    for accepted in range(5):
        ids = [3, 9]
        drafter.reset(0, ids)
        ids = greedy(target, ids, 1)
        for turn in range(4):
            (draft,) = drafter.propose([state(ids)])
            assert list(draft.tokens) == greedy(target, ids, 4)[len(ids) :]
            bonus = greedy(target, ids + list(draft.tokens), 1)[-1] if accepted == 4 else 100 + 7 * turn + accepted
            ids = ids + list(draft.tokens)[:accepted] + [bonus]
            twin.cache[:, 0, :, len(ids) - 1 :] = math.nan  # nothing there is text
    twin.cache.zero_()


def test_a_text_that_goes_elsewhere_while_nothing_is_drafted(target, twin):
    """What was proposed before is stale in the middle of the text, not only at its end."""
    drafter = DraftModelDrafter(twin, 320)
    ids = greedy(target, PROMPTS[1], 3)
    drafter.reset(0, PROMPTS[1])
    (draft,) = drafter.propose([state(ids, 6)])
    for other in range(3):  # leaves the proposal after as many tokens
        elsewhere = ids + list(draft.tokens[:other]) + [300, 301, 302, 303, 304, 305]
        (found,) = drafter.propose([state(elsewhere)])
        assert list(found.tokens) == greedy(target, elsewhere, 4)[len(elsewhere) :]
        drafter.reset(0, PROMPTS[1])
        (draft,) = drafter.propose([state(ids, 6)])


def test_a_slot_forgets_its_last_request(target, twin):
    """A short text, then a longer prompt in the same slot, then a shorter one again."""
    drafter = DraftModelDrafter(twin, 320)
    for prompt in (PROMPTS[1], PROMPTS[2], PROMPTS[0]):
        text = greedy(target, prompt, 10)
        drafter.reset(0, prompt)
        (draft,) = drafter.propose([state(text[: len(prompt) + 1])])
        assert list(draft.tokens) == text[len(prompt) + 1 :][:4]


def test_slots_with_different_budgets_draft_together(target, twin):
    drafter = DraftModelDrafter(twin, 320)
    texts = [greedy(target, p, 20) for p in PROMPTS]
    for slot, prompt in enumerate(PROMPTS):
        drafter.reset(slot, prompt)
    for lengths, budgets in (((3, 5, 51), (4, 0, 2)), ((4, 9, 55), (1, 6, 3)), ((4, 10, 55), (0, 0, 0))):
        states = [state(t[:n], b, slot) for slot, (t, n, b) in enumerate(zip(texts, lengths, budgets, strict=True))]
        drafts = drafter.propose(states)
        expected = [tuple(t[n : n + b]) for t, n, b in zip(texts, lengths, budgets, strict=True)]
        assert [d.tokens for d in drafts] == expected
        assert all(d.probs is None for d in drafts)


def test_a_prompt_of_several_chunks(target):
    prompt = torch.randint(0, 320, (PREFILL_CHUNK + 9,), generator=torch.Generator().manual_seed(3)).tolist()
    wide = {"max_seq_len": PREFILL_CHUNK + 40, "max_slots": 1}
    drafter = DraftModelDrafter(tiny_model(NAME, **wide), 320)
    text = greedy(tiny_model(NAME, **wide), prompt, 6)
    drafter.reset(0, prompt)
    (draft,) = drafter.propose([state(text[: len(prompt) + 1])])
    assert list(draft.tokens) == text[len(prompt) + 1 :][:4]


# ---- a shorter context ----------------------------------------------------------------------------------------------


def test_beyond_its_own_context_it_does_not_draft(target, pieces, caplog):
    """Target of 256 positions, drafter of 64, a prompt of 50 and 100 more."""
    drafter = DraftModelDrafter(tiny_model(NAME, max_seq_len=64), 320)
    with caplog.at_level(logging.WARNING):
        done = run(target, pieces, [PROMPTS[2], PROMPTS[2]], drafter=drafter, k=4, max_tokens=100)
    expected = greedy(target, PROMPTS[2], 100)
    for generation in done:
        assert generation.token_ids == expected[50:]
        length, beyond = 51, []
        for r in generation.rounds:
            assert r.accepted == len(r.drafted)
            assert len(r.drafted) <= max(0, 65 - length)  # the last draft token is never fed
            beyond += [len(r.drafted)] if length > 64 else []
            length += len(r.emitted)
        assert len(beyond) > 80 and set(beyond) == {0}
        assert sum(len(r.drafted) for r in generation.rounds) >= 11
    assert [r.message for r in caplog.records] == ["the drafter's context ends at 64 tokens: no drafts beyond it"]


@pytest.mark.parametrize("length", [63, 64, 65, 120])
def test_a_prompt_as_long_as_its_context(length, target, pieces):
    drafter = DraftModelDrafter(tiny_model(NAME, max_seq_len=64), 320)
    prompt = torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    (done,) = run(target, pieces, [prompt], drafter=drafter, k=4, max_tokens=8)
    assert done.token_ids == greedy(target, prompt, 8)[length:]
    assert sum(len(r.drafted) for r in done.rounds) == (1 if length == 63 else 0)


# ---- distributions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"repetition_penalty": 1.5}], ids=str)
def test_a_sampled_draft_comes_with_the_distribution_it_was_drawn_from(options, other):
    drafter = DraftModelDrafter(other, 320)
    ids = [3, 9, 27, 3]
    drafter.reset(0, ids[:-1])
    (draft,) = drafter.propose([state(ids, 5, temperature=0.8, seed=11, **options)])
    assert draft.probs.shape == (5, 320) and draft.probs.dtype == torch.float32
    for i, token in enumerate(draft.tokens):
        text = ids + list(draft.tokens[:i])
        logits = other.logits(other.forward(text, [Segment(1, 0, len(text))]))[-1].clone()
        if "repetition_penalty" in options:
            seen = sorted(set(text))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
        expected = probabilities(logits, SamplingParams(temperature=0.8, **options))
        torch.testing.assert_close(draft.probs[i], expected, rtol=1e-3, atol=1e-5)
        assert draw(draft.probs[i], uniform(11, len(text), Purpose.DRAFT)) == token


def test_ids_beyond_the_targets_vocabulary_have_no_probability(other):
    drafter = DraftModelDrafter(other, 100)
    drafter.reset(0, [3])
    (draft,) = drafter.propose([state([3, 9], 6, temperature=5.0, seed=2)])
    assert draft.probs.shape == (6, 100) and max(draft.tokens) < 100
    assert draft.probs.sum(-1).tolist() == pytest.approx([1.0] * 6, abs=1e-5)


# ---- a shortlist ----------------------------------------------------------------------------------------------------

SHORTLIST = torch.tensor(sorted({*range(0, 320, 7), 5, 13, 311}))


@pytest.fixture(scope="module")
def short():
    """The target's own weights with an output head of 49 of its 320 ids."""
    return model_of(tiny_tensors(NAME), dummy_config(NAME)[0], head_ids=SHORTLIST)


def test_a_shortlist_drafts_the_best_of_its_ids(target, short):
    drafter = DraftModelDrafter(short, 320, SHORTLIST)
    ids = [3, 9, 60]
    drafter.reset(0, ids[:-1])
    (draft,) = drafter.propose([state(ids, 5)])
    text = list(ids)
    for token in draft.tokens:
        logits = target.logits(target.forward(text, [Segment(0, 0, len(text))]))[-1]
        assert token == SHORTLIST[logits[SHORTLIST].argmax()]
        text.append(token)
    assert len(draft.tokens) == 5


def test_a_shortlist_gives_probability_to_its_ids_only(short):
    drafter = DraftModelDrafter(short, 320, SHORTLIST)
    drafter.reset(0, [3])
    (draft,) = drafter.propose([state([3, 9], 6, temperature=1.0, seed=2)])
    outside = torch.ones(320, dtype=torch.bool)
    outside[SHORTLIST] = False
    assert draft.probs[:, outside].sum() == 0 and draft.probs[:, SHORTLIST].min() > 0
    assert draft.probs.sum(-1).tolist() == pytest.approx([1.0] * 6, abs=1e-5)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_shortlist_changes_no_text(k, target, short, pieces):
    done = run(target, pieces, PROMPTS, drafter=DraftModelDrafter(short, 320, SHORTLIST), k=k, max_tokens=40)
    for generation, prompt in zip(done, PROMPTS, strict=True):
        assert generation.token_ids == greedy(target, prompt, 40)[len(prompt) :]
    accepted = {t for g in done for r in g.rounds for t in r.drafted[: r.accepted]}
    assert accepted and accepted <= set(SHORTLIST.tolist())


# ---- adaptive draft length ------------------------------------------------------------------------------------------


def top_probabilities(model, ids: list[int], count: int) -> list[float]:
    """The model's highest probability at each of `count` greedy steps behind `ids`, every step from scratch."""
    text = greedy(model, ids, count)
    logits = model.logits(model.forward(text, [Segment(1, 0, len(text))]))
    return torch.softmax(logits, -1).max(-1).values[len(ids) - 1 : -1].tolist()


def cut(tops: list[float], threshold: float) -> int:
    """How many tokens are drafted: up to the first unsure one, which is still drafted."""
    return next((i + 1 for i, top in enumerate(tops) if top < threshold), len(tops))


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_drafts_end_with_the_first_unsure_token(quantile, other):
    tops = [top_probabilities(other, list(p), 8) for p in PROMPTS]
    ordered, middle = sorted(x for row in tops for x in row), int(quantile * 24)
    threshold = sum(ordered[middle - 1 : middle + 1]) / 2  # between two of them: none is equal to it but for rounding
    drafter = DraftModelDrafter(other, 320, confidence_threshold=threshold)
    for slot, prompt in enumerate(PROMPTS):
        drafter.reset(slot, prompt[:-1] or prompt)
    for _ in range(2):  # the second time behind a proposal that was cut
        drafts = drafter.propose([state(p, 8, slot) for slot, p in enumerate(PROMPTS)])
        assert [len(d.tokens) for d in drafts] == [cut(row, threshold) for row in tops]
        assert [list(d.tokens) for d in drafts] == [
            greedy(other, p, len(d.tokens))[len(p) :] for p, d in zip(PROMPTS, drafts, strict=True)
        ]


def test_without_a_threshold_confidence_costs_nothing(other, monkeypatch):
    monkeypatch.setattr(draft_model, "_top_probability", None)
    drafter = DraftModelDrafter(other, 320)
    drafter.reset(0, [3])
    assert len(drafter.propose([state([3, 9], 6)])[0].tokens) == 6


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("batch", [1, 5])
def test_an_adaptive_draft_changes_no_text_and_no_later_call(k, batch, target, other, pieces):
    prompts = [*PROMPTS, [5, 6] * 12, [8] * 9][:batch]
    threshold = sorted(top_probabilities(other, list(PROMPTS[1]), 8))[4]
    drafter = DraftModelDrafter(other, 320, confidence_threshold=threshold)
    calls = [run(target, pieces, prompts, drafter=drafter, k=k, max_tokens=20) for _ in range(2)]
    for prompt, generation in zip(prompts, calls[0], strict=True):
        assert generation.token_ids == greedy(target, prompt, 20)[len(prompt) :]
    assert [rounds(g) for g in calls[0]] == [rounds(g) for g in calls[1]]
    lengths = {len(r.drafted) for g in calls[0] for r in g.rounds[:-8]}
    assert 1 in lengths and (k == 1 or len(lengths) > 1)


def test_sampled_text_is_distributed_as_plain_where_drafts_end_early(pieces):
    p = torch.tensor([[0.0, 1.0, 0.4], [0.8, 0.0, 0.5], [1.0, 0.2, 0.0]])
    q = torch.tensor([[3.0, 0.0, 0.0], [0.2, 0.0, 0.1], [0.0, 0.0, 2.0]])  # sure behind 0 and 2, unsure behind 1
    drafter = DraftModelDrafter(TableModel(q), 3, confidence_threshold=0.5)
    draws = 3000
    params = [SamplingParams(max_tokens=4, temperature=0.9, seed=s, ignore_eos=True) for s in range(draws)]
    done = run(TableModel(p), pieces, [[0]] * draws, params, drafter=drafter, k=3)
    assert {len(g.rounds[0].drafted) for g in done if g.rounds[0].drafted} == {1, 2}
    step = torch.softmax(p.double() / 0.9, -1)
    expected = step[0]
    for position in range(1, 4):
        expected = expected @ step
        counts = torch.bincount(torch.tensor([g.token_ids[position] for g in done]), minlength=3)
        assert p_value(counts, expected) > 1e-3
