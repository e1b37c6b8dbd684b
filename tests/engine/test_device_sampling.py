"""Sampling and acceptance on the device: the same rules as `sampling.py` and `verify.py`, and the same distribution.

Given the same random numbers both implementations must decide alike; that is checked case by case. What the numbers
themselves are worth is checked by chi-square on tables. Seeds are fixed, so a test that passes passes always.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from stand_ins import p_value

from tutorial_lib.config import SamplingParams
from tutorial_lib.engine import sampling, verify
from tutorial_lib.engine.device_sampling import (
    SlotParams,
    accept_greedy,
    accept_sampled,
    draw,
    probabilities,
    uniform,
)
from tutorial_lib.engine.sampling import Purpose

P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.2, 0.5, 0.3])
DRAWS = 200_000


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slot_params(params: list[SamplingParams]) -> SlotParams:
    """As the engine fills them in when a request is admitted."""
    made = SlotParams.make(len(params), "cpu")
    for i, p in enumerate(params):
        made.temperature[i], made.top_k[i] = p.temperature or 1.0, p.top_k or 0
        made.top_p[i] = 1.0 if p.top_p is None else p.top_p
    return made


def counts(tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    return torch.bincount(tokens.reshape(-1), minlength=vocab)


# ---- distributions --------------------------------------------------------------------------------------------------

GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p)
    for t, k, p in itertools.product((0.3, 1.0, 1.7), (None, 0, 1, 7, 500), (None, 1.0, 0.9, 0.4, 1e-6))
]


def test_probabilities_are_those_of_the_host_for_rows_of_different_params():
    logits = noise(len(GRID), 400)
    got = probabilities(logits, slot_params(GRID))
    for row, own, params in zip(got, logits, GRID, strict=True):
        expected = sampling.probabilities(own, params)
        assert torch.equal(row > 0, expected > 0), params
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-8, msg=str(params))


def test_ties_are_kept_or_cut_as_on_the_host():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0])
    for params in (SamplingParams(temperature=1.0, top_k=k, top_p=p) for k in (1, 2, 3, 4) for p in (None, 0.5)):
        got = probabilities(logits[None], slot_params([params]))[0]
        torch.testing.assert_close(got, sampling.probabilities(logits, params))


def test_a_temperature_that_float32_cannot_divide_by_is_greedy():
    cold = slot_params([SamplingParams(temperature=2e-38)])
    assert probabilities(torch.tensor([[2.0, 15.0, 1.0]]), cold).tolist() == [[0.0, 1.0, 0.0]]


def test_top_p_zero_is_greedy_even_between_equals():
    params = SlotParams.make(2, "cpu")
    params.top_p[:] = 0.0
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [0.1, 0.2, 0.3, 0.4]])
    assert probabilities(logits, params).tolist() == [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]


def test_no_filter_drops_no_token_of_a_large_vocabulary():
    """The rounded sum of 50000 probabilities may reach 1 before the last of them."""
    logits = noise(4, 50_000, seed=1) / 3
    got = probabilities(logits, SlotParams.make(4, "cpu"))
    assert (got > 0).all()
    torch.testing.assert_close(got, logits.softmax(-1), rtol=1e-4, atol=0)


# ---- random numbers -------------------------------------------------------------------------------------------------


def test_a_number_depends_on_seed_position_and_purpose_and_nothing_else():
    seeds, positions = torch.tensor([0, 1, 2, 3, 42, 2**62 - 1]), torch.arange(300)
    table = torch.stack([uniform(seeds[:, None], positions, purpose) for purpose in Purpose])
    assert table.min() >= 0 and table.max() < 1
    assert len(table.unique()) > 0.999 * table.numel()  # 24 bits: a few of 5400 may meet
    for p, s, i in ((0, 1, 7), (2, 5, 299), (1, 0, 0)):
        assert uniform(seeds[s], positions[i], Purpose(p)) == table[p, s, i]


def test_numbers_are_uniform():
    for purpose in Purpose:
        by_position = uniform(torch.tensor(7), torch.arange(DRAWS), purpose)
        by_seed = uniform(torch.arange(DRAWS), torch.tensor(7), purpose)
        for u in (by_position, by_seed):
            assert p_value(torch.histc(u, 64, 0, 1), torch.full((64,), 1 / 64)) > 0.01
            assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < 0.01


def test_neighbouring_seeds_positions_and_purposes_are_unrelated():
    """Requests are often seeded 0, 1, 2, …: none may reuse a number that another one drew for another purpose."""
    seeds = torch.arange(400)
    streams = torch.stack([uniform(seeds[:, None], torch.arange(20), purpose) for purpose in Purpose])
    assert len(streams.unique()) > 0.999 * streams.numel()
    for shift in (1, 2, 3):
        for a, b in itertools.product(Purpose, Purpose):
            pair = torch.stack([streams[a, shift:].reshape(-1), streams[b, :-shift].reshape(-1)])
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.05, (shift, a, b)


# ---- the draw -------------------------------------------------------------------------------------------------------


def test_a_draw_inverts_the_cumulative_distribution():
    row = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0])
    u = torch.tensor([0.0, 0.1, 0.4999, 0.5, 0.7, 0.7501, 0.9, 1 - 2**-24])
    assert draw(row.expand(8, 6), u).tolist() == [1, 1, 1, 3, 3, 4, 4, 4]
    assert draw(row.expand(8, 6) * 0.3, u).tolist() == [1, 1, 1, 3, 3, 4, 4, 4]  # needs no exact sum


def test_a_draw_equals_the_hosts_and_never_takes_an_impossible_token():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(2000, 30, generator=generator) * (torch.rand(2000, 30, generator=generator) < 0.3)
    probs[torch.arange(2000), torch.randint(30, (2000,), generator=generator)] = 0.5
    for u in (torch.rand(2000, generator=generator), torch.zeros(2000), torch.full((2000,), 1 - 2**-24)):
        tokens = draw(probs, u)
        assert (probs.gather(1, tokens[:, None]) > 0).all()
        assert tokens.tolist() == [sampling.draw(row, float(x)) for row, x in zip(probs, u, strict=True)]


# ---- acceptance, case by case, against verify.py --------------------------------------------------------------------


def test_greedy_acceptance_is_that_of_the_host():
    generator = torch.Generator().manual_seed(1)
    for k in (0, 1, 2, 5):
        drafted = torch.randint(0, 3, (300, k), generator=generator)
        choices = torch.randint(0, 3, (300, k + 1), generator=generator)
        choices[:150, :k] = drafted[:150]  # whole blocks, too
        lengths = torch.randint(0, k + 1, (300,), generator=generator)
        got = accept_greedy(drafted, choices, lengths).tolist()
        for accepted, d, c, n in zip(got, drafted.tolist(), choices.tolist(), lengths.tolist(), strict=True):
            assert accepted == verify.accept_greedy(d[:n], c).accepted


@pytest.mark.parametrize("kind", ["soft", "one-hot"])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_sampled_acceptance_is_that_of_the_host(kind, k):
    """Rows of their own seed, position and number of drafts; with impossible tokens, and with q equal to p."""
    rows, vocab, generator = 400, 6, torch.Generator().manual_seed(k)

    def distributions(*shape: int) -> torch.Tensor:
        raw = torch.rand(*shape, vocab, generator=generator) * (torch.rand(*shape, vocab, generator=generator) < 0.7)
        raw[..., 2] += 0.01  # never all impossible
        return raw / raw.sum(-1, keepdim=True)

    p, q = distributions(rows, k + 1), distributions(rows, k)
    q[:100] = p[:100, :k]
    seed, position = torch.arange(rows), torch.randint(0, 5000, (rows,), generator=generator)
    drafted = torch.zeros(rows, k, dtype=torch.int32)
    for i in range(k):
        drafted[:, i] = draw(q[:, i], uniform(seed, position + i, Purpose.DRAFT))
    lengths = torch.randint(0, k + 1, (rows,), generator=generator) if kind == "one-hot" else torch.full((rows,), k)
    accepted, token = accept_sampled(drafted, None if kind == "one-hot" else q, p, lengths, seed, position)
    for row in range(rows):
        n = int(lengths[row])

        def number(i: int, purpose: Purpose, row: int = row) -> float:
            return float(uniform(seed[row], position[row] + i, purpose))

        soft = None if kind == "one-hot" else q[row, :n]
        expected = verify.accept_sampled(drafted[row, :n].tolist(), soft, list(p[row, : n + 1]), number)
        assert (int(accepted[row]), int(token[row])) == (expected.accepted, expected.emitted[-1]), row
    if k:
        assert 0 < float(accepted.float().mean()) < k
    if k and kind == "soft":
        assert (accepted[:100] == k).all()


# ---- distribution ---------------------------------------------------------------------------------------------------


def one_round(p: torch.Tensor, q: torch.Tensor | None, rounds: int, drafted=None, start: int = 0):
    """`rounds` requests seeded one after the other. p [K + 1, V], q [K, V] or None with `drafted` [K]."""
    k = p.shape[0] - 1
    seed, position = torch.arange(start, start + rounds), torch.full((rounds,), 17)
    if q is None:
        tokens = torch.tensor(drafted).expand(rounds, k)
    else:
        tokens = torch.stack(
            [draw(q[i].expand(rounds, -1), uniform(seed, position + i, Purpose.DRAFT)) for i in range(k)], 1
        )
        q = q.expand(rounds, *q.shape)
    accepted, token = accept_sampled(tokens, q, p.expand(rounds, *p.shape), torch.full((rounds,), k), seed, position)
    return tokens, accepted, token


def test_chain_of_three():
    """Different p and q at each position; every position, and every way to get a token, has its own distribution."""
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
    q = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.2, 0.2, 0.3, 0.3], [0.4, 0.2, 0.2, 0.2]])
    drafts, accepted, token = one_round(p, q, DRAWS)
    reached = 1.0
    for i in range(4):
        here = accepted >= i
        kept, final = drafts[accepted > i, i] if i < 3 else token[:0], token[accepted == i]
        assert p_value(counts(torch.cat([kept, final]), 4), p[i]) > 0.01, i
        assert float(here.float().mean()) == pytest.approx(reached, abs=0.004)
        if i < 3:
            overlap = torch.minimum(p[i], q[i])
            assert p_value(counts(kept, 4), overlap) > 0.01
            assert p_value(counts(final, 4), verify.residual(p[i], q[i])) > 0.01
            reached *= float(overlap.sum())
    assert p_value(counts(token[accepted == 3], 4), p[3]) > 0.01


@pytest.mark.parametrize("kind", ["soft", "one-hot"])
def test_the_table_of_one_draft(kind):
    """p = [.5, .3, .2]. Soft q = [.2, .5, .3]: 0.7 accepted, the residual is id 0. One-hot q on id 1: 0.3 accepted,
    residual [.714, 0, .286]. Drawing the replacement from p would give [.35, .39, .26]."""
    one_hot = kind == "one-hot"
    drafts, accepted, token = one_round(torch.stack([P, P]), None if one_hot else Q[None], DRAWS, drafted=[1])
    assert float(accepted.float().mean()) == pytest.approx(0.3 if one_hot else 0.7, abs=0.004)
    assert p_value(counts(torch.where(accepted > 0, drafts[:, 0], token), 3), P) > 0.01
    rejected = [0.5 / 0.7, 0.0, 0.2 / 0.7] if one_hot else [1.0, 0.0, 0.0]
    assert p_value(counts(token[accepted == 0], 3), rejected) > 0.01
    assert p_value(counts(token[accepted == 1], 3), P) > 0.01


def test_tokens_of_neighbouring_seeds_are_independent():
    """Pairs (token of seed s, token of seed s + 1) have the product distribution."""
    drafts, accepted, token = one_round(torch.stack([P, P]), Q[None], DRAWS)
    first = torch.where(accepted > 0, drafts[:, 0], token)
    assert p_value(counts(first[::2] * 3 + first[1::2], 9), torch.outer(P, P).flatten()) > 0.01


def test_no_draft_draws_from_the_target():
    _, accepted, token = one_round(P[None], None, DRAWS, drafted=[])
    assert accepted.sum() == 0 and p_value(counts(token, 3), P) > 0.01
