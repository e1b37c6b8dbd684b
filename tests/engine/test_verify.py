"""The acceptance rule gives the target's own distribution: worked numbers, and chi-square on tables.

`accept_sampled` takes its random numbers from outside, so here they come from one seeded generator in bulk. Every
threshold is a p-value; the seeds are fixed, so a test that passes passes always.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from stand_ins import p_value

from tutorial_lib.config import SamplingParams
from tutorial_lib.engine.sampling import Purpose, probabilities
from tutorial_lib.engine.verify import Verdict, accept_greedy, accept_sampled, residual

P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.2, 0.5, 0.3])


def simulate(p_rows: torch.Tensor, q_rows: torch.Tensor | None, rounds: int, seed: int = 0, drafted=None):
    """Run `rounds` independent rounds. p_rows [K + 1, V], q_rows [K, V]; drafted [K] where q is one-hot.

    Returns the emitted tokens by position and by how they came about: counts[kind][position, token], kind "any",
    "accepted", "residual" or "bonus"; and the verdicts.
    """
    length, vocab = p_rows.shape[0] - 1, p_rows.shape[1]
    generator = np.random.default_rng(seed)
    if q_rows is None:
        tokens = [list(drafted)] * rounds
    else:
        steps = np.cumsum(q_rows.double().numpy(), axis=1)
        picks = [np.searchsorted(row / row[-1], generator.random(rounds), side="right") for row in steps]
        tokens = np.stack(picks, axis=1).tolist()
    numbers = generator.random((rounds, 3, length + 1)).tolist()
    counts = {kind: np.zeros((length + 1, vocab), dtype=np.int64) for kind in ("any", "accepted", "residual", "bonus")}
    verdicts, rows = [], list(p_rows)
    for draft, row in zip(tokens, numbers, strict=True):
        verdict = accept_sampled(draft, q_rows, rows, lambda i, purpose, row=row: row[purpose][i])
        verdicts.append(verdict)
        for position, token in enumerate(verdict.emitted):
            counts["any"][position, token] += 1
            kind = "accepted" if position < verdict.accepted else "bonus" if verdict.accepted == length else "residual"
            counts[kind][position, token] += 1
    return counts, verdicts


def test_the_p_value_is_one_that_can_fail():
    assert p_value([50_000, 30_000, 20_000], P) == pytest.approx(1.0)
    assert p_value([50_500, 29_500, 20_000], P) == pytest.approx(0.0013, abs=3e-4)  # chi-square 13.3 at 2 degrees
    assert p_value([40_000, 60_000, 0], P) < 1e-6
    assert p_value([10, 1, 10], [0.5, 0.0, 0.5]) == 0.0


# ---- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafted", "argmax", "accepted", "emitted"),
    [
        ([], [5], 0, (5,)),
        ([5], [5, 6], 1, (5, 6)),
        ([4], [5, 6], 0, (5,)),
        ([1, 2, 3], [1, 2, 3, 4], 3, (1, 2, 3, 4)),
        ([1, 9, 3], [1, 2, 3, 4], 1, (1, 2)),  # a match after the first miss counts for nothing
        ([9, 2, 3], [1, 2, 3, 4], 0, (1,)),
        ([1, 2, 9], [1, 2, 3, 4], 2, (1, 2, 3)),
    ],
)
def test_greedy_keeps_the_leading_run(drafted, argmax, accepted, emitted):
    assert accept_greedy(drafted, argmax) == Verdict(accepted, emitted)


def test_greedy_is_rejection_sampling_with_one_hot_distributions():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        argmax = torch.randint(0, 3, (5,), generator=generator).tolist()
        drafted = torch.randint(0, 3, (4,), generator=generator).tolist()
        logits = torch.nn.functional.one_hot(torch.tensor(argmax), 3).float()
        p = [probabilities(row, SamplingParams()) for row in logits]
        numbers = torch.rand(3, 5, generator=generator)
        number = lambda i, purpose, n=numbers: float(n[purpose, i])  # noqa: E731
        one_hot = torch.nn.functional.one_hot(torch.tensor(drafted), 3).float()
        expected = accept_greedy(drafted, argmax)
        assert accept_sampled(drafted, None, p, number) == expected
        assert accept_sampled(drafted, one_hot, p, number) == expected


# ---- residual -------------------------------------------------------------------------------------------------------


def test_residual_numbers():
    assert residual(P, Q).tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert residual(P, 1).tolist() == pytest.approx([0.5 / 0.7, 0.0, 0.2 / 0.7])
    assert residual(Q, P).tolist() == pytest.approx([0.0, 2 / 3, 1 / 3])
    assert P.tolist() == pytest.approx([0.5, 0.3, 0.2])


def test_residual_of_equal_distributions_is_the_distribution():
    assert torch.equal(residual(P, P), P)
    certain = torch.tensor([0.0, 1.0, 0.0])
    assert torch.equal(residual(certain, 1), certain)


# ---- acceptance, case by case ---------------------------------------------------------------------------------------


def numbers_of(accept: float, token: float):
    return lambda i, purpose: {Purpose.ACCEPT: accept, Purpose.TOKEN: token}[purpose]


def test_the_threshold_is_p_over_q():
    for accept, stays in ((0.0, True), (0.599, True), (0.601, False), (0.999, False)):
        verdict = accept_sampled([1], Q[None], [P, P], numbers_of(accept, 0.0))  # p/q = 0.3 / 0.5
        assert verdict == (Verdict(1, (1, 0)) if stays else Verdict(0, (0,)))
    assert accept_sampled([0], Q[None], [P, P], numbers_of(1 - 2**-53, 0.0)).accepted == 1  # p > q: always
    impossible = torch.tensor([0.5, 0.0, 0.5])
    assert accept_sampled([1], Q[None], [impossible, P], numbers_of(0.0, 0.9)) == Verdict(0, (2,))


def test_the_bonus_comes_from_the_row_after_the_last_draft():
    rows = [torch.tensor(row) for row in ([1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0])]
    assert accept_sampled([0, 1], None, rows, numbers_of(0.5, 0.5)) == Verdict(2, (0, 1, 2))
    assert accept_sampled([], None, rows[:1], numbers_of(0.5, 0.5)) == Verdict(0, (0,))


# ---- distribution ---------------------------------------------------------------------------------------------------


def test_chain_of_three_200k_draws():
    """Different p and q at each position; every position and every way to get a token has its own distribution."""
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
    q = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.2, 0.2, 0.3, 0.3], [0.4, 0.2, 0.2, 0.2]])
    counts, verdicts = simulate(p, q, 75_000)
    assert counts["any"].sum() >= 200_000
    overlap = torch.minimum(p[:3], q)
    reached = 1.0
    for position in range(4):
        assert p_value(counts["any"][position], p[position]) > 0.01, position
        if position < 3:
            assert p_value(counts["accepted"][position], overlap[position]) > 0.01
            assert p_value(counts["residual"][position], residual(p[position], q[position])) > 0.01
            rate = float(overlap[position].sum())
            here = sum(v.accepted >= position for v in verdicts)
            stayed = sum(v.accepted > position for v in verdicts)
            assert stayed / here == pytest.approx(rate, abs=0.005)
            reached *= rate
    assert p_value(counts["bonus"][3], p[3]) > 0.01
    assert counts["bonus"].sum() / len(verdicts) == pytest.approx(reached, abs=0.006)


@pytest.mark.parametrize("kind", ["soft", "one-hot"])
def test_the_table_of_one_draft(kind):
    """p = [.5, .3, .2]. Soft q = [.2, .5, .3]: 0.7 accepted; a drafter that takes its argmax and calls it q would give
    [.4, .6, 0], a replacement from p itself [.35, .39, .26]. One-hot q on id 1: 0.3 accepted."""
    one_hot = kind == "one-hot"
    counts, verdicts = simulate(torch.stack([P, P]), None if one_hot else Q[None], 15_000, seed=3, drafted=[1])
    assert p_value(counts["any"][0], P) > 0.01
    rejected = [0.5 / 0.7, 0.0, 0.2 / 0.7] if one_hot else [1.0, 0.0, 0.0]
    assert p_value(counts["residual"][0], rejected) > 0.01
    assert np.mean([v.accepted for v in verdicts]) == pytest.approx(0.3 if one_hot else 0.7, abs=0.01)
    assert p_value(counts["bonus"][1], P) > 0.01


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.455, 0.276, 0.167, 0.102]),
        ({"temperature": 0.5}, [0.644, 0.237, 0.087, 0.032]),
        ({"temperature": 1.0, "top_p": 0.8}, [0.507, 0.307, 0.186, 0.0]),
    ],
    ids=str,
)
def test_temperature_and_filters_shape_accepted_residual_and_bonus(options, expected):
    params = SamplingParams(**options)
    p = probabilities(torch.tensor([2.0, 1.5, 1.0, 0.5]), params)
    assert p.tolist() == pytest.approx(expected, abs=6e-4)
    q = probabilities(torch.tensor([1.0, 2.0, 0.5, 1.5]), params)
    counts, _ = simulate(p.expand(4, 4), q.expand(3, 4), 6_000, seed=5)
    for position in range(3):
        assert p_value(counts["any"][position], p) > 0.01
        assert p_value(counts["accepted"][position], torch.minimum(p, q)) > 0.01
    assert p_value(counts["residual"].sum(0), residual(p, q)) > 0.01
    assert p_value(counts["bonus"].sum(0), p) > 0.01


def test_positions_of_a_chain_do_not_depend_on_each_other():
    """Given that the first draft stays, the second token is distributed as if nothing had come before."""
    counts: Counter = Counter()
    _, verdicts = simulate(P.expand(3, 3), Q.expand(2, 3), 15_000, seed=7)
    for verdict in verdicts:
        if verdict.accepted >= 1:
            counts[verdict.emitted[:2]] += 1
    overlap = torch.minimum(P, Q)
    expected = torch.outer(overlap, P).flatten()
    assert p_value([counts[(i, j)] for i in range(3) for j in range(3)], expected) > 0.01
