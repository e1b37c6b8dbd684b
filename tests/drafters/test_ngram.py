"""Prompt lookup: what is found, where it is cut, and that nothing found means nothing proposed."""

from __future__ import annotations

import random

import pytest

from tutorial_lib.config import NGramDecodingConfig, SamplingParams
from tutorial_lib.drafters.base import Outcome, SlotState
from tutorial_lib.drafters.ngram import NGramDrafter
from tutorial_lib.errors import OptionError

TEXT = [1, 2, 3, 4, 5, 1, 2, 3, 9, 9, 1, 2, 3]


def drafter_of(size: int = 3, *, is_use_oldest: bool = False, stop_ids=()) -> NGramDrafter:
    return NGramDrafter(NGramDecodingConfig(max_matching_ngram_size=size, is_use_oldest=is_use_oldest), stop_ids)


def test_an_index_that_would_outgrow_the_memory_is_refused():
    drafter_of(64)
    with pytest.raises(OptionError, match="max_matching_ngram_size is 65; needed: at most 64.*SADecodingConfig"):
        drafter_of(65)


def propose(drafter: NGramDrafter, ids: list[int], budget: int = 4, slot: int = 0) -> tuple[int, ...]:
    (draft,) = drafter.propose([SlotState(slot, ids, budget, SamplingParams(), 0)])
    assert draft.probs is None and draft.parents is None  # the proposal is certain: q is one-hot
    return draft.tokens


def lookup(ids: list[int], sizes: int, budget: int, is_use_oldest: bool, stop_ids=()) -> list[int]:
    """The same by search: longest n-gram, first or last earlier place, on into the proposal itself."""
    for n in range(min(sizes, len(ids)), 0, -1):
        places = [i for i in range(n, len(ids)) if ids[i - n : i] == ids[-n:]]
        if places:
            found = list(ids)
            for at in range(budget):
                token = found[(places[0] if is_use_oldest else places[-1]) + at]
                if token in stop_ids:
                    break
                found.append(token)
            return found[len(ids) :]
    return []


def after(drafter: NGramDrafter, ids: list[int], **options) -> tuple[int, ...]:
    drafter.reset(0, ids)
    return propose(drafter, ids, **options)


def test_the_latest_place_or_the_oldest():
    assert after(drafter_of(), TEXT) == (9, 9, 1, 2)
    assert after(drafter_of(is_use_oldest=True), TEXT) == (4, 5, 1, 2)


def test_the_longest_ngram_wins_over_the_latest():
    ids = [1, 2, 7, 7, 2, 8, 8, 1, 2]
    assert after(drafter_of(2), ids, budget=2) == (7, 7)
    assert after(drafter_of(1), ids, budget=2) == (8, 8)


def test_a_loop_is_drafted_at_full_length():
    assert after(drafter_of(), [5, 6, 5, 6], budget=7) == (5, 6, 5, 6, 5, 6, 5)
    assert after(drafter_of(), [8, 8], budget=3) == (8, 8, 8)


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("ids", [[4], [4, 5], list(range(30))], ids=["one", "two", "all different"])
def test_nothing_found_is_nothing_proposed(ids, size):
    assert after(drafter_of(size), ids) == ()


@pytest.mark.parametrize("budget", [0, 1, 2, 20])
def test_the_budget_is_kept(budget):
    assert len(after(drafter_of(), TEXT, budget=budget)) == budget


def test_stop_ids_are_never_drafted():
    ids = [1, 2, 99, 3, 1, 2]  # a chat history with an end token in it
    assert after(drafter_of(1, stop_ids=[99]), ids) == ()
    assert after(drafter_of(1, stop_ids=[3]), ids) == (99,)
    assert after(drafter_of(1), ids) == (99, 3, 1, 2)


def test_slots_do_not_see_each_other_and_reset_forgets():
    drafter = drafter_of()
    drafter.reset(0, [1, 2, 3, 1])
    drafter.reset(1, [1, 7, 8, 1])
    states = [SlotState(1, [1, 7, 8, 1], 2, SamplingParams(), 0), SlotState(0, [1, 2, 3, 1], 2, SamplingParams(), 0)]
    assert [d.tokens for d in drafter.propose(states)] == [(7, 8), (2, 3)]
    drafter.reset(0, [9, 1])
    assert propose(drafter, [9, 1]) == ()


@pytest.mark.parametrize("is_use_oldest", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_growing_text_is_searched_as_a_whole(size, is_use_oldest):
    """Tokens arrive several at a time, as rounds emit them; each lookup equals a search of the text from scratch."""
    generator = random.Random(size)
    for _ in range(20):
        ids = [generator.randrange(4) for _ in range(generator.randint(1, 12))]
        drafter = drafter_of(size, is_use_oldest=is_use_oldest, stop_ids=[3])
        drafter.reset(2, ids)
        while len(ids) < 60:
            budget = generator.randint(0, 6)
            expected = lookup(ids, size, budget, is_use_oldest, [3])
            assert list(propose(drafter, ids, budget, slot=2)) == expected
            drafter.observe([Outcome(2, tuple(range(generator.randint(0, len(expected)))))])
            ids = ids + [generator.randrange(4) for _ in range(generator.randint(1, 5))]
