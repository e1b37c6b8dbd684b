"""Distributions that tokens are drawn from, against numbers worked by hand and against `transformers`; the draw."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers

from tutorial_lib.config import SamplingParams
from tutorial_lib.engine.sampling import Purpose, draw, penalize_repetition, probabilities, uniform

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5])


def noise(size: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


# ---- distributions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.455, 0.276, 0.167, 0.102]),
        ({"temperature": 0.5}, [0.644, 0.237, 0.087, 0.032]),
        ({"temperature": 1.0, "top_p": 0.8}, [0.507, 0.307, 0.186, 0.0]),
        ({"temperature": 0.5, "top_p": 0.8}, [0.731, 0.269, 0.0, 0.0]),  # after the temperature, not before
        ({"temperature": 1.0, "top_p": 0.01}, [1.0, 0.0, 0.0, 0.0]),  # never none
        ({"temperature": 1.0, "top_k": 2}, [0.622, 0.378, 0.0, 0.0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5}, [1.0, 0.0, 0.0, 0.0]),  # top-p counts what top-k left
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, [0.455, 0.276, 0.167, 0.102]),
        ({"temperature": 1.0, "top_k": 99}, [0.455, 0.276, 0.167, 0.102]),
        ({}, [1.0, 0.0, 0.0, 0.0]),
        ({"temperature": 0.0, "top_k": 3}, [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_numbers_worked_by_hand(options, expected):
    before = LOGITS.clone()
    got = probabilities(LOGITS, SamplingParams(**options))
    assert got.tolist() == pytest.approx(expected, abs=6e-4)
    assert torch.equal(LOGITS, before)  # logprobs are taken from the same row afterwards


def test_a_temperature_that_float32_cannot_divide_by_is_greedy():
    assert probabilities(LOGITS * 10, SamplingParams(temperature=2e-38)).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_top_p_keeps_the_set_that_reaches_p_exactly():
    kept = probabilities(torch.tensor([0.5, 0.3, 0.2]).log(), SamplingParams(temperature=1.0, top_p=0.8))
    assert kept.tolist() == pytest.approx([0.625, 0.375, 0.0], abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, 50, 0.9), (1.6, None, 0.6), (0.3, 7, None)])
def test_filters_equal_transformers(temperature, top_k, top_p, seed):
    logits = noise(400, seed)
    theirs = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(temperature)])
    if top_k:
        theirs.append(transformers.TopKLogitsWarper(top_k))
    if top_p:
        theirs.append(transformers.TopPLogitsWarper(top_p))
    expected = theirs(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)
    got = probabilities(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_repetition_penalty_equals_transformers():
    logits, ids = noise(50, 1), [3, 7, 3, 49, 0, 12]
    before = logits.clone()
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    expected = processor(torch.tensor([ids]), logits[None].clone())[0]
    torch.testing.assert_close(penalize_repetition(logits, ids, 1.3), expected)
    assert torch.equal(logits, before)
    assert logits[ids].min() < 0 < logits[ids].max()  # both branches were needed


@pytest.mark.parametrize("penalty", [1e-320, 1e-38, 1e300])
def test_a_repetition_penalty_that_float32_cannot_divide_by_leaves_a_distribution(penalty):
    logits = penalize_repetition(LOGITS, [0, 1, 2], penalty)
    assert logits.isfinite().all()
    assert float(probabilities(logits, SamplingParams(temperature=1.0)).sum()) == pytest.approx(1.0)


def test_repetition_penalty_leaves_out_ids_of_a_larger_vocabulary():
    logits = noise(50, 2)
    assert torch.equal(penalize_repetition(logits, [3, 50, 99], 1.3), penalize_repetition(logits, [3], 1.3))
    assert torch.equal(penalize_repetition(logits, [99], 1.3), logits)


# ---- random numbers -------------------------------------------------------------------------------------------------


def test_a_random_number_depends_on_seed_position_and_purpose_and_nothing_else():
    keys = list(itertools.product((0, 1, 42, 2**63 - 1), range(40), Purpose))
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert all(0.0 <= u < 1.0 for u in numbers)
    assert [uniform(*key) for key in reversed(keys)] == numbers[::-1]


def test_random_numbers_are_uniform_and_streams_unrelated():
    table = torch.tensor([[uniform(5, i, purpose) for purpose in Purpose] for i in range(4000)], dtype=torch.float64)
    counts = torch.stack([torch.histc(column, 20, 0, 1) for column in table.T])
    chi_square = ((counts - 200) ** 2 / 200).sum(1)
    assert chi_square.max() < 45  # 19 degrees of freedom: p = 0.0007
    assert torch.corrcoef(table.T).fill_diagonal_(0).abs().max() < 0.06
    following = torch.stack([table[:-1, 0], table[1:, 0]])
    assert torch.corrcoef(following)[0, 1].abs() < 0.06


# ---- the draw -------------------------------------------------------------------------------------------------------


def test_a_draw_inverts_the_cumulative_distribution():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0])
    steps = [0.0, 0.1, 0.4999, 0.5, 0.7, 0.7501, 0.9, 1 - 2**-53]
    assert [draw(probs, u) for u in steps] == [1, 1, 1, 3, 3, 4, 4, 4]


def test_a_draw_needs_no_exact_sum_and_never_takes_an_impossible_token():
    probs = torch.tensor([0.0, 0.1, 0.2, 0.0])  # sums to 0.3
    assert [draw(probs, u) for u in (0.0, 0.33, 0.34, 1 - 2**-53)] == [1, 1, 2, 2]
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        row = torch.rand(30, generator=generator) * (torch.rand(30, generator=generator) < 0.3)
        row[int(torch.randint(30, (1,), generator=generator))] = 0.5
        for u in (0.0, float(torch.rand(1, generator=generator)), 1 - 2**-53):
            assert row[draw(row, u)] > 0


def test_one_hot_draws_its_token_for_every_number():
    probs = probabilities(LOGITS, SamplingParams())
    assert {draw(probs, u) for u in (0.0, 0.5, 1 - 2**-53)} == {0}
