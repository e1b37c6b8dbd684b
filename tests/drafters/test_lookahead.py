"""Lookahead decoding: the window against a reference that writes every guess's context out, and texts in the engine."""

from __future__ import annotations

import random

import pytest
import torch
from stand_ins import PROMPTS, TableModel, greedy, p_value, run, tiny_model

from tutorial_lib.config import LookaheadDecodingConfig, SamplingParams
from tutorial_lib.drafters.base import ROOT, Draft, Outcome, SlotState
from tutorial_lib.drafters.lookahead import LookaheadDrafter, NGramPool
from tutorial_lib.errors import OptionError

SIZES = [(4, 3, 4), (1, 2, 1), (1, 4, 2), (5, 2, 3), (3, 5, 1), (7, 4, 7)]  # W, N, G


def config_of(w: int, n: int, g: int) -> LookaheadDecodingConfig:
    return LookaheadDecodingConfig(max_window_size=w, max_ngram_size=n, max_verification_set_size=g)


def drafter_of(w: int, n: int, g: int, stop_ids=()) -> LookaheadDrafter:
    return LookaheadDrafter(config_of(w, n, g), stop_ids)


def state(ids, budget=30, slot=0) -> SlotState:
    return SlotState(slot, list(ids), budget, SamplingParams(), 0)


def branch(draft: Draft, node: int) -> tuple[int, ...]:
    tokens: list[int] = []
    while node != ROOT:
        tokens.insert(0, draft.tokens[node])
        node = draft.tree[node]
    return tuple(tokens)


def choice(text, branch=()) -> int:
    """A target whose next token hangs on the whole text, of few tokens so that n-grams come back."""
    return random.Random(str((*text[-6:], *branch))).randrange(6)


class Reference:
    """window[level, column] as in the paper's figure; n-grams as a plain list, the latest last."""

    def __init__(self, w: int, n: int, g: int, first: list[int]) -> None:
        self.w, self.n, self.g, self.levels = w, n, g, 1
        self.window = {(0, column): token for column, token in enumerate(first, start=1)}
        self.ngrams: list[tuple[int, ...]] = []

    def context(self, level: int, column: int) -> tuple[int, ...]:
        """What the guess at (level, column) sees behind the text: the oldest level up to its column, then up."""
        row = [self.window[0, c] for c in range(1, column + 1)]
        return (*row, *(self.window[above, column] for above in range(1, level + 1)))

    def branches(self, text: list[int]) -> set[tuple[int, ...]]:
        behind = [ngram[1:] for ngram in dict.fromkeys(reversed(self.ngrams)) if ngram[0] == text[-1]][: self.g]
        cells = [(level, column) for level in range(self.levels) for column in range(self.w)]
        found = {self.context(*cell) for cell in cells} | {g[:i] for g in behind for i in range(1, len(g) + 1)}
        return found - {()}

    def advance(self, text: list[int]) -> None:
        new = [choice(text, self.context(self.levels - 1, column)) for column in range(self.w)]
        self.window |= {(self.levels, column): token for column, token in enumerate(new)}
        if self.levels + 1 < self.n:
            self.levels += 1
            return
        self.window[0, 0] = text[-1]
        self.ngrams += [tuple(self.window[level, c] for level in range(self.n)) for c in range(self.w)]
        self.window = {(level - 1, c): token for (level, c), token in self.window.items() if level > 0}
        self.window.pop((0, 0), None)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_window_and_ngrams_are_those_of_the_reference(sizes):
    text = [3, 1, 4, 1, 5, 2, 0, 3, 3]
    drafter = drafter_of(*sizes)
    drafter.reset(0, text)
    first = list(drafter._slots[0].window[0])
    assert len(first) == sizes[0] - 1 and set(first) <= set(text)
    reference, n = Reference(*sizes, first), sizes[1]
    text = [*text, choice(text)]
    read = 0
    for _ in range(40):
        reference.ngrams += [tuple(text[i : i + n]) for i in range(max(0, read - n + 1), len(text) - n + 1)]
        read = len(text)
        (draft,) = drafter.propose([state(text)])
        nodes = [branch(draft, node) for node in range(len(draft.tokens))]
        assert set(nodes) == reference.branches(text) and len(set(nodes)) == len(nodes)
        assert all(parent < node for node, parent in enumerate(draft.tree)) and draft.probs is None
        assert max(draft.depths, default=0) <= drafter.max_depth
        choices = (choice(text), *(choice(text, found) for found in nodes))
        drafter.observe([Outcome(0, (), choices)])
        reference.advance(text)
        emitted = [choices[0]]
        while tuple(emitted) in nodes:
            emitted.append(choices[nodes.index(tuple(emitted)) + 1])
        text = text + emitted


def test_a_tree_of_the_known_size():
    """TensorRT-LLM's count: (N - 2) + (W - 1 + G) (N - 1) draft tokens once the window is full; equal ones are one."""
    w, n, g = 5, 4, 3
    drafter, text = drafter_of(w, n, g), list(range(100, 120))
    drafter.reset(0, text)
    for fresh in range(1000, 1400, 20):  # a target that never repeats itself
        text = [*text, text[0]]
        (draft,) = drafter.propose([state(text)])
        drafter.observe([Outcome(0, (), tuple(range(fresh * 100, fresh * 100 + len(draft.tokens) + 1)))])
    full = (n - 2) + (w - 1 + g) * (n - 1)
    assert full - g * (n - 1) < len(draft.tokens) <= full


@pytest.mark.parametrize("budget", range(0, 7))
def test_nothing_is_deeper_than_the_budget(budget):
    drafter, text = drafter_of(4, 3, 4), [1, 2, 1, 2, 1, 2, 3, 1]
    drafter.reset(0, text[:-1])
    (draft,) = drafter.propose([state(text, budget)])
    assert max(draft.depths, default=0) == min(budget, 3)
    drafter.observe([Outcome(0, (), tuple(range(len(draft.tokens) + 1)))])  # a window cut off does not advance
    assert len(drafter._slots[0].window) == (2 if budget >= 3 else 1)


def test_ngrams_end_at_stop_ids():
    drafter = drafter_of(1, 4, 4, stop_ids=[99])
    drafter.reset(0, [1, 2, 99, 3, 5, 1])
    (draft,) = drafter.propose([state([1, 2, 99, 3, 5, 1])])
    assert draft.tokens == (2,)


def test_the_pool_is_bounded_and_forgets_the_least_recently_used():
    pool = NGramPool(2, max_keys=3)
    for ngram in [(1, 10), (1, 11), (1, 10), (1, 12), (2, 20), (3, 30)]:
        pool.add(ngram)
    assert pool.behind(1) == [(12,), (10,)]  # 11 is the one not seen again; asking counts as use
    pool.add((4, 40))
    assert pool.behind(2) == [] and pool.behind(1) and pool.behind(3) and pool.behind(4)
    generator = random.Random(0)
    for _ in range(500):
        pool.add([generator.randrange(50) for _ in range(3)])
    assert len(list(pool)) <= 2 * 3


# ---- in the engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_text_is_that_of_plain_decoding(sizes, batch, target, pieces):
    prompts = [[8] * 9, *PROMPTS, [5, 6] * 12][:batch]
    drafter = drafter_of(*sizes)
    done = run(target, pieces, prompts, drafter=drafter, k=drafter.max_depth, max_tokens=24)
    for prompt, generation in zip(prompts, done, strict=True):
        assert generation.token_ids == greedy(target, prompt, 24)[len(prompt) :]
    assert sum(r.accepted for g in done for r in g.rounds) >= batch


def test_1_1_0_is_plain_decoding(target, pieces):
    drafter = drafter_of(1, 1, 0)
    (done,) = run(target, pieces, [PROMPTS[1]], drafter=drafter, k=1, max_tokens=20)
    assert done.token_ids == greedy(target, PROMPTS[1], 20)[2:]
    assert [len(r.drafted) for r in done.rounds] == [0] * 19


def test_text_that_repeats_is_accepted(pieces):
    """A target that walks in a circle of seven: after one turn whole n-grams are accepted."""
    table = torch.eye(7).roll(1, 1) * 10
    drafter = drafter_of(4, 4, 2)
    (done,) = run(TableModel(table), pieces, [[0]], drafter=drafter, k=drafter.max_depth, max_tokens=60)
    assert done.token_ids == [(i + 1) % 7 for i in range(60)]
    assert len(done.rounds) < 60 / 2.5


def test_calls_do_not_learn_from_each_other(target, pieces):
    drafter, seen = drafter_of(4, 3, 4), []
    for prompts in ([PROMPTS[2], [8] * 9], [PROMPTS[0]], [PROMPTS[2], [8] * 9], [[8] * 9, PROMPTS[2]]):
        done = run(target, pieces, prompts, drafter=drafter, k=drafter.max_depth, max_tokens=20)
        seen.append([[(r.drafted, r.accepted) for r in g.rounds] for g in done])
    assert seen[0] == seen[2] == seen[3][::-1]


def test_to_the_last_position_of_the_cache(pieces):
    """The tree has more rows than the cache has left; the window then rests, the text goes on to its end."""
    model = tiny_model("dummy:tiny-llama?seed=5", max_seq_len=64, max_slots=1)
    drafter = drafter_of(7, 5, 7)
    (done,) = run(model, pieces, [[8] * 9], drafter=drafter, k=drafter.max_depth, max_tokens=55)
    assert done.token_ids == greedy(model, [8] * 9, 55)[9:]
    assert any(len(r.drafted) > 20 for r in done.rounds)


def test_sampled_text_is_distributed_as_plain(pieces):
    """The prompt gives the pool two n-grams to offer as siblings."""
    table = torch.tensor([[0.0, 1.0, 0.4], [0.8, 0.0, 0.5], [1.0, 0.2, 0.0]])
    drafter, draws = drafter_of(2, 3, 3), 3000
    params = [SamplingParams(max_tokens=3, temperature=0.9, seed=s, ignore_eos=True) for s in range(draws)]
    prompts = [[0, 1, 0, 2, 1, 1, 2, 2, 0, 0, 1]] * draws
    done = run(TableModel(table), pieces, prompts, params, drafter=drafter, k=drafter.max_depth)
    assert sum(r.accepted for g in done for r in g.rounds) > draws / 4
    p = torch.softmax(table.double() / 0.9, -1)
    for position, expected in ((1, p[1] @ p), (2, p[1] @ p @ p)):
        counts = torch.bincount(torch.tensor([g.token_ids[position] for g in done]), minlength=3)
        assert p_value(counts, expected) > 1e-3


# ---- misuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 3, 4), "max_window_size is 0"),
        ((4, 0, 4), "max_ngram_size is 0"),
        ((4, 3, 0), "max_verification_set_size is 0"),
        ((4, 1, 4), "max_ngram_size is 1"),
        ((1, 1, 1), "max_ngram_size is 1"),
    ],
)
def test_misuse(sizes, message):
    with pytest.raises(OptionError, match=message):
        config_of(*sizes)
