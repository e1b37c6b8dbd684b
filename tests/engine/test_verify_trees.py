"""The acceptance rule over trees: worked cases, and chi-square against probabilities enumerated in float64.

A table model says what follows a token, so the target's rows hang on what was drafted. 200 000 tokens and more are
drawn for each kind of tree; the seeds are fixed, so a test that passes passes always.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from stand_ins import p_value

from tutorial_lib.engine.sampling import Purpose
from tutorial_lib.engine.verify import Verdict, accept_greedy, accept_sampled

#  text ─ 0 ─ 3 ─ 5
#      │    └ 4
#      ├ 1 ─ 6
#      └ 2
PARENTS = (-1, -1, -1, 0, 0, 3, 1)


# ---- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argmax", "path", "emitted"),
    [
        ([20, 0, 0, 9, 0, 0, 0, 0], (2,), (20, 9)),  # the last of three siblings, with nothing behind it
        ([10, 8, 7, 0, 0, 0, 0, 0], (), (10,)),  # behind 1, but drafted nowhere directly behind the text
        ([5, 11, 0, 0, 13, 0, 17, 0], (0, 3, 5), (5, 11, 13, 17)),
        ([5, 12, 0, 0, 9, 18, 0, 0], (0, 4), (5, 12, 18)),
        ([7, 11, 14, 0, 0, 0, 0, 19], (1, 6), (7, 14, 19)),
        ([7, 11, 11, 0, 0, 0, 0, 0], (1,), (7, 11)),  # 11 stands behind 0, not behind 1
    ],
)
def test_greedy_walks_along_the_targets_choices(argmax, path, emitted):
    drafted = (5, 7, 20, 11, 12, 13, 14)
    assert accept_greedy(drafted, argmax, PARENTS) == Verdict(len(path), emitted, path)
    rows = torch.nn.functional.one_hot(torch.tensor(argmax), 21).float()
    numbers = np.random.default_rng(0).random((3, 4))
    sampled = accept_sampled(drafted, None, rows, lambda i, purpose: numbers[purpose, i], PARENTS)
    assert sampled == Verdict(len(path), emitted, path)


def test_chains_and_chains_written_as_trees_ask_for_the_same_numbers():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        q, p = torch.rand(4, 5, generator=generator), torch.rand(5, 5, generator=generator)
        q, p = q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
        drafted = torch.multinomial(q, 1, generator=generator)[:, 0].tolist()
        numbers, verdicts, asked = torch.rand(3, 5, generator=generator), [], []
        for parents in (None, (-1, 0, 1, 2)):
            seen = []

            def number(i, purpose, seen=seen, numbers=numbers):
                seen.append((i, purpose))
                return float(numbers[purpose, i])

            verdicts += [accept_sampled(drafted, x, p, number, parents) for x in (q, None)]
            asked.append(seen)
        assert verdicts[:2] == verdicts[2:] and asked[0] == asked[1]
        length = verdicts[1].accepted
        last = [(i, Purpose.ACCEPT) for i in range(min(length + 1, 4))] + [(length, Purpose.TOKEN)]
        assert asked[0][-len(last) :] == last


# ---- siblings, case by case -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("u", "kept"), [(0.0, 0), (0.19, 0), (0.21, 1), (0.49, 1), (0.51, 2), (0.59, 2), (0.61, None)])
def test_certain_siblings_share_one_number(u, kept):
    """p = [.2, .3, .1, .4], siblings 0, 1, 2 for certain: the thresholds are the sums .2, .5, .6."""
    p = torch.tensor([[0.2, 0.3, 0.1, 0.4]] * 4)
    verdict = accept_sampled([0, 1, 2], None, p, lambda i, purpose: u if purpose == Purpose.ACCEPT else 0.0, (-1,) * 3)
    assert verdict.path == (() if kept is None else (kept,))
    assert verdict.emitted[0] == (3 if kept is None else kept)


def test_drawn_siblings_by_hand():
    """p = [.5, .3, .2], q = [.2, .5, .3], drafted 1, 2. 1 stays below .3/.5 = .6; then p is left as [1, 0, 0], so 2 can
    never stay. Drafted 1, 0: 0 then has p = 1 against q = .2/.5 and always stays."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]] * 3), torch.tensor([[0.2, 0.5, 0.3]] * 2)
    for drafted, u, path, token in (
        ((1, 2), 0.59, (0,), 1),
        ((1, 2), 0.61, (), 0),
        ((1, 0), 0.61, (1,), 0),
        ((1, 0), 0.99999, (1,), 0),
    ):
        number = lambda i, purpose, u=u: u if purpose == Purpose.ACCEPT else 0.0  # noqa: E731
        verdict = accept_sampled(drafted, q, p, number, (-1, -1))
        assert (verdict.path, verdict.emitted[0]) == (path, token)


def test_a_candidate_that_q_cannot_yield_has_no_chance():
    """A drafter that fills up its siblings with ids of probability 0: the distribution stays the target's."""
    p, q = torch.tensor([[0.4, 0.6]] * 3), torch.tensor([[1.0, 0.0]] * 2)
    for u, emitted in ((0.39, 0), (0.41, 1)):
        number = lambda i, purpose, u=u: u if purpose == Purpose.ACCEPT else 0.0  # noqa: E731
        for drafted in ((0, 1), (1, 0)):
            verdict = accept_sampled(drafted, q, p, number, (-1, -1))
            assert verdict.emitted[0] == emitted and verdict.path == ((drafted.index(0),) if emitted == 0 else ())


def test_a_repeated_candidate_has_no_second_chance():
    p = torch.tensor([[0.5, 0.5]] * 3)
    verdict = accept_sampled([0, 0], None, p, lambda i, purpose: 0.6 if purpose == Purpose.ACCEPT else 0.0, (-1, -1))
    assert verdict == Verdict(0, (1,))


# ---- distribution ---------------------------------------------------------------------------------------------------

VOCAB, ROUNDS = 5, 68_000
# Row t: what follows token t; row VOCAB: what follows the text. The drafter's table is half right.
P, Q = np.random.default_rng(11).dirichlet(np.full(VOCAB, 0.8), size=(2, VOCAB + 1))
Q = 0.6 * P + 0.3 * Q + 0.1 / VOCAB
LIKELIEST = np.argsort(-P, axis=1)  # what a drafter without randomness proposes


def position_by_enumeration(p: np.ndarray, q: np.ndarray | None, drafts: list[tuple[float, tuple[int, ...]]]):
    """For one position: (accepted [siblings, V], residual [V]), joint probabilities of what is emitted and how."""
    accepted, rest = np.zeros((len(drafts[0][1]), VOCAB)), np.zeros(VOCAB)
    for weight, siblings in drafts:
        left, q_left = p.copy(), None if q is None else q.copy()
        for place, token in enumerate(siblings):
            own = np.eye(VOCAB)[token] if q_left is None else q_left / q_left.sum()
            stays = min(1.0, left[token] / own[token])
            accepted[place, token] += weight * stays
            weight *= 1 - stays
            left = np.maximum(left - own, 0.0)
            left = left / left.sum() if left.sum() > 0 else p
            if q_left is not None:
                q_left[token] = 0.0
        rest += weight * left
    return accepted, rest


def draws_without_replacement(q: np.ndarray, count: int) -> list[tuple[float, tuple[int, ...]]]:
    found = []
    for siblings in permutations(range(VOCAB), count):
        weight, left = 1.0, 1.0
        for token in siblings:
            weight, left = weight * q[token] / left, left - q[token]
        found.append((weight, siblings))
    return found


@torch.inference_mode()
def simulate(kind: str):
    """Rounds over the tree of PARENTS, whose candidates are drawn from Q without replacement or are the likeliest.

    Returns the indices of the siblings behind every node (-1: the text), and counts[node, its token][way, place, token]
    of what came next there; way 0 is accepted at a place among its siblings, 1 residual, 2 bonus.
    """
    generator = np.random.default_rng(5)
    drafted = np.zeros((ROUNDS, len(PARENTS)), dtype=np.int64)
    groups = {parent: [i for i, x in enumerate(PARENTS) if x == parent] for parent in PARENTS}
    before = lambda parent: np.full(ROUNDS, VOCAB) if parent < 0 else drafted[:, parent]  # noqa: E731
    for parent in sorted(groups):
        row, size = before(parent), len(groups[parent])
        if kind == "certain":
            drafted[:, groups[parent]] = LIKELIEST[row, :size]
        else:
            keys = np.log(Q[row]) + generator.gumbel(size=(ROUNDS, VOCAB))
            drafted[:, groups[parent]] = np.argsort(-keys, axis=1)[:, :size]
    p = torch.from_numpy(np.concatenate([P[np.full((ROUNDS, 1), VOCAB)], P[drafted]], axis=1)).float()
    q = torch.from_numpy(np.stack([Q[before(x)] for x in PARENTS], axis=1)).float()
    numbers, tokens = generator.random((ROUNDS, 3, 4)).tolist(), drafted.tolist()
    reached: dict[tuple[int, int], np.ndarray] = {}
    for r in range(ROUNDS):
        number = lambda i, purpose, own=numbers[r]: own[purpose][i]  # noqa: E731
        verdict = accept_sampled(tokens[r], None if kind == "certain" else q[r], p[r], number, PARENTS)
        node = -1
        for depth, token in enumerate(verdict.emitted):
            row = VOCAB if node < 0 else tokens[r][node]
            at = reached.setdefault((node, row), np.zeros((3, 3, VOCAB), dtype=np.int64))
            if depth < verdict.accepted:
                at[0, groups[node].index(verdict.path[depth]), token] += 1
                node = verdict.path[depth]
            else:
                at[1 if node in groups else 2, 0, token] += 1
    return groups, reached


@pytest.mark.parametrize("kind", ["without replacement", "certain"])
def test_every_position_and_every_way_to_a_token(kind):
    groups, reached = simulate(kind)
    assert sum(at.sum() for at in reached.values()) >= 200_000
    assert {node for node, _ in reached} == {-1, *range(len(PARENTS))}
    checks = []
    for (node, row), at in reached.items():
        assert p_value_of(at.sum((0, 1)), P[row]) > 1e-3, (node, row)  # whatever the way, the target's distribution
        if node not in groups:
            assert at[:2].sum() == 0
            continue
        siblings, q = len(groups[node]), None if kind == "certain" else Q[row]
        certain = [(1.0, tuple(LIKELIEST[row, :siblings]))]
        accepted, rest = position_by_enumeration(
            P[row], q, certain if q is None else draws_without_replacement(q, siblings)
        )
        assert accepted.sum() + rest.sum() == pytest.approx(1.0)
        assert accepted.sum(0) + rest == pytest.approx(P[row])  # the rule itself, in exact arithmetic
        ways = np.concatenate([at[0, :siblings].ravel(), at[1, 0]])
        checks.append(p_value_of(ways, np.concatenate([accepted.ravel(), rest])))
    assert len(checks) >= (10 if kind == "without replacement" else 4)
    assert min(checks) > 1e-3 and np.median(checks) > 0.1, sorted(checks)


def p_value_of(counts: np.ndarray, expected: np.ndarray) -> float:
    """`p_value` with outcomes too rare for a chi-square pooled into one."""
    expected = np.where(expected < 1e-12, 0.0, expected)
    assert counts[expected == 0].sum() == 0
    rare = expected / expected.sum() * counts.sum() < 6
    if expected[rare].sum() * counts.sum() < 6:
        counts, expected = np.where(rare, 0, counts), np.where(rare, 0.0, expected)
        rare = np.zeros_like(rare)
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return p_value(counts[expected > 0], expected[expected > 0]) if (expected > 0).sum() > 1 else 1.0
