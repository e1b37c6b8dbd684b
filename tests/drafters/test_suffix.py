"""Suffix decoding against a search of the whole text for every token, with and without earlier outputs."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from stand_ins import PROMPTS, TableModel, greedy, p_value, run

from tutorial_lib.config import SADecodingConfig, SamplingParams
from tutorial_lib.drafters import suffix
from tutorial_lib.drafters.base import Outcome, SlotState
from tutorial_lib.drafters.suffix import START, SuffixAutomaton, SuffixDrafter
from tutorial_lib.errors import OptionError


def drafter_of(limit: int = -1, stop_ids=(), **options) -> SuffixDrafter:
    return SuffixDrafter(SADecodingConfig(max_matching_ngram_size=limit, **options), stop_ids)


def state(ids, budget=4, slot=0) -> SlotState:
    return SlotState(slot, list(ids), budget, SamplingParams(), 0)


def after(drafter: SuffixDrafter, ids: list[int], budget: int = 4) -> tuple[int, ...]:
    drafter.reset(0, ids[:1])
    (draft,) = drafter.propose([state(ids, budget)])
    assert draft.probs is None and draft.parents is None  # a chain of certain tokens: q is one-hot
    return draft.tokens


def lookup(ids: list[int], limit: int, budget: int, stop_ids=(), pool=()) -> list[int]:
    """The same by search: for every draft token the longest suffix that something followed in one of the texts, the
    most frequent of what followed, the latest of those. Earlier outputs are earlier than the text."""
    texts = [*pool, ids]
    drafted: list[int] = []
    while len(drafted) < budget:
        context = ids + drafted
        for n in range(len(context) if limit < 0 else min(limit, len(context)), 0, -1):
            seen = [t[i] for t in texts for i in range(n, len(t)) if t[i - n : i] == context[-n:]]
            if seen:
                break
        else:
            break
        count, latest = Counter(seen), {token: place for place, token in enumerate(seen)}
        token = max(count, key=lambda t: (count[t], latest[t]))
        if token in stop_ids:
            break
        drafted.append(token)
    return drafted


# ---- what is proposed -----------------------------------------------------------------------------------------------


def test_the_longest_match_wins_over_a_later_one():
    ids = [1, 2, 3, 4, 5, 9, 9, 2, 3, 4, 6, 8, 8, 1, 2, 3, 4]
    assert after(drafter_of(), ids, 2) == (5, 9)
    assert after(drafter_of(3), ids, 2) == (6, 8)  # (2, 3, 4) was followed by each once: the latest


def test_the_most_frequent_continuation_wins_over_the_latest():
    ids = [7, 1, 7, 1, 7, 2, 7]
    assert after(drafter_of(1), ids, 1) == (1,)
    assert after(drafter_of(), ids, 1) == (1,)
    assert after(drafter_of(), [7, 1, 7, 2, 7], 1) == (2,)  # as often: the latest


def test_a_loop_is_drafted_at_full_length():
    assert after(drafter_of(), [5, 6, 5, 6], 7) == (5, 6, 5, 6, 5, 6, 5)
    assert after(drafter_of(), [8, 8], 3) == (8, 8, 8)


@pytest.mark.parametrize("ids", [[4], [4, 5], list(range(30))], ids=["one", "two", "all different"])
def test_nothing_found_is_nothing_proposed(ids):
    assert after(drafter_of(), ids) == ()


def test_stop_ids_end_a_draft():
    ids = [1, 2, 3, 99, 4, 1, 2]
    assert after(drafter_of(stop_ids=[99]), ids) == (3,)
    assert after(drafter_of(stop_ids=[3]), ids) == ()
    assert after(drafter_of(), ids) == (3, 99, 4, 1)


@pytest.mark.parametrize("limit", [-1, 1, 2, 3, 7])
@pytest.mark.parametrize("letters", [2, 3, 6])
def test_a_growing_text_is_searched_as_a_whole(limit, letters):
    generator = random.Random(letters)
    for _ in range(6):
        ids = [generator.randrange(letters) for _ in range(generator.randint(1, 12))]
        drafter = drafter_of(limit, stop_ids=[5])
        drafter.reset(2, ids)
        while len(ids) < 70:
            budget = generator.randint(0, 8)
            expected = lookup(ids, limit, budget, [5])
            (draft,) = drafter.propose([state(ids, budget, slot=2)])
            assert list(draft.tokens) == expected
            drafter.observe([Outcome(2, tuple(range(generator.randint(0, len(expected)))))])
            ids = ids + [generator.randrange(letters) for _ in range(generator.randint(1, 5))]


# ---- a pool of earlier outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("limit", [-1, 2])
def test_earlier_outputs_are_searched_too(limit, size, monkeypatch):
    """Three slots whose requests end at different times, so that the pool changes in the middle of a text."""
    monkeypatch.setattr(suffix, "MIN_REBUILD", 40)
    generator = random.Random(limit)
    drafter = drafter_of(limit, enable_global_pool=True, global_pool_size=size)
    outputs: list[list[int]] = []
    texts: dict[int, list[int]] = {}
    prompts = dict.fromkeys(range(3), 0)
    found = 0
    for _ in range(60):
        slot = generator.randrange(3)
        if slot in texts:
            outputs.append(texts[slot][prompts[slot] :])
        pool = outputs if size is None else outputs[-size:]
        texts[slot], prompts[slot] = [generator.randrange(5) for _ in range(4)], 4
        drafter.reset(slot, texts[slot])
        for other, ids in texts.items():
            ids.append(generator.randrange(5))
            (draft,) = drafter.propose([state(ids, 3, other)])
            assert list(draft.tokens) == lookup(ids, limit, 3, pool=pool)
            found += list(draft.tokens) != lookup(ids, limit, 3)
            kept = draft.tokens[: generator.randint(0, len(draft.tokens))]
            drafter.observe([Outcome(other, tuple(range(len(kept))))])
            ids += kept
    assert found > 20  # the pool mattered


def test_accepted_tokens_of_the_last_round_are_pooled():
    drafter = drafter_of(enable_global_pool=True)
    drafter.reset(0, [1, 2, 3, 1])
    drafter.propose([state([1, 2, 3, 1, 2], 2)])
    drafter.observe([Outcome(0, (0, 1))])  # the request ends with 3, 1
    assert after(drafter, [9, 2], 4) == (3, 1)


def test_without_the_option_nothing_is_remembered():
    drafter = drafter_of()
    drafter.reset(0, [1])
    drafter.propose([state([1, 2, 3, 4, 5])])
    drafter.observe([Outcome(0)])
    assert after(drafter, [2, 3]) == ()


def test_a_pool_of_limited_size_stays_small(monkeypatch):
    monkeypatch.setattr(suffix, "MIN_REBUILD", 500)
    generator = random.Random(0)
    drafter = drafter_of(enable_global_pool=True, global_pool_size=4)
    for _ in range(120):
        ids = [generator.randrange(100) for _ in range(60)]
        drafter.reset(0, ids[:1])
        drafter.propose([state(ids)])
        assert len(drafter._pool.automaton.link) < 2 * (500 + 60) + 2
    assert len(drafter._pool._outputs) == 4


# ---- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letters", [1, 2, 50])
def test_states_and_counting_grow_with_the_text_only(letters, monkeypatch):
    """At most two states a token, and at most `MAX_WALK` counts even where every suffix has been there before."""
    monkeypatch.setattr(suffix, "MAX_WALK", 64)
    generator, automaton, last = random.Random(1), SuffixAutomaton(), START
    counted = 0

    class Counts(list):
        def __setitem__(self, index, value):
            nonlocal counted
            counted += 1
            super().__setitem__(index, value)

    automaton.count = Counts(automaton.count)
    for _ in range(3000):
        last = automaton.extend(last, generator.randrange(letters))
    assert len(automaton.link) <= 2 * 3000
    assert counted <= (64 + 1) * 3000 if letters == 1 else counted < 20 * 3000


# ---- in the engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_text_is_that_of_plain_decoding(k, batch, target, pieces):
    prompts = [*PROMPTS, [5, 6] * 12, [8] * 9][:batch]
    drafter = drafter_of(max_draft_len=k, enable_global_pool=True)
    for _ in range(2):  # the second time the pool holds every output
        done = run(target, pieces, prompts, drafter=drafter, k=k, max_tokens=24)
        for prompt, generation in zip(prompts, done, strict=True):
            assert generation.token_ids == greedy(target, prompt, 24)[len(prompt) :]
    assert sum(r.accepted for g in done for r in g.rounds) > 10 * batch


def test_calls_do_not_learn_from_each_other(target, pieces):
    drafter, seen = drafter_of(), []
    for prompts in ([PROMPTS[2], [8] * 9], [PROMPTS[0]], [PROMPTS[2], [8] * 9]):
        seen.append([g.rounds for g in run(target, pieces, prompts, drafter=drafter, k=4, max_tokens=20)])
    first, again = ([[(r.drafted, r.accepted) for r in rounds] for rounds in seen[i]] for i in (0, 2))
    assert first == again and any(drafted for rounds in first for drafted, _ in rounds)


def test_sampled_text_is_distributed_as_plain(pieces):
    """Counts of the second and third token over many seeds; the prompt makes look-ups propose something."""
    table = torch.tensor([[0.0, 1.0, 0.4], [0.8, 0.0, 0.5], [1.0, 0.2, 0.0]])
    model, draws = TableModel(table), 3000
    params = [SamplingParams(max_tokens=3, temperature=0.9, seed=s, ignore_eos=True) for s in range(draws)]
    done = run(model, pieces, [[0, 1, 0, 2, 0, 1]] * draws, params, drafter=drafter_of(), k=4)
    assert sum(r.accepted for g in done for r in g.rounds) > draws / 4
    p = torch.softmax(table.double() / 0.9, -1)
    second, third = p[1] @ p, p[1] @ p @ p
    for position, expected in ((1, second), (2, third)):
        counts = torch.bincount(torch.tensor([g.token_ids[position] for g in done]), minlength=3)
        assert p_value(counts, expected) > 1e-3


# ---- misuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_matching_ngram_size": 0}, "max_matching_ngram_size is 0"),
        ({"global_pool_size": 3}, "enable_global_pool is off"),
        ({"enable_global_pool": True, "global_pool_size": 0}, "global_pool_size is 0"),
        ({"max_draft_len": 0}, "max_draft_len is 0"),
    ],
)
def test_misuse(options, message):
    with pytest.raises(OptionError, match=message):
        SADecodingConfig(**options)
