"""Requests of all kinds at once on the GPU path, run as plain torch on a CPU: each is as it is alone."""

from __future__ import annotations

import random

import pytest
from gpu_engines import KV, Exact, engine_for, make_heads, mixed_requests, nothing_is_held
from stand_ins import serve

from tutorial_lib.config import SamplingParams


@pytest.fixture(autouse=True)
def exact():
    with Exact():
        yield


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return make_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture
def engine_of(heads):
    """engine_of(method, kv, schedule): see `engine_for`."""
    return lambda method, *arguments, **options: engine_for(method, heads, *arguments, **options)


MIXES = [(method, "plain") for method in ("none", "draft model", "ngram", "suffix", "eagle")]
MIXES += [(method, "reuse") for method in ("self-draft", "eagle")]
MIXES += [(method, "scarce reuse") for method in ("none", "draft model", "eagle")]


@pytest.mark.parametrize(("method", "kv"), MIXES)
def test_twenty_requests_in_a_mix_are_as_each_is_alone(method, kv, engine_of):
    """Arrivals, lengths, samplers and stops mixed. Where pages are scarce a few requests that all begin alike outgrow
    them and give theirs up in mid-text; one that samples then draws with other drafts, so there all are greedy."""
    requests = mixed_requests(len(method), 20)
    if "scarce" in kv:
        params = SamplingParams(max_tokens=36)
        requests = [((2 * prompt)[: 95 + 3 * i], params) for i, (prompt, _) in enumerate(requests[:14:2])]
    alone = engine_of(method)
    expected = [alone.generate([prompt], [params])[0] for prompt, params in requests]
    rng = random.Random(1)
    engine = engine_of(method, KV[kv])
    found = serve(engine, requests, sorted(rng.randrange(4 if "scarce" in kv else 40) for _ in requests))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert (mine.text, mine.finish_reason, mine.stop_reason) == (
            theirs.text, theirs.finish_reason, theirs.stop_reason,
        )  # fmt: skip
        if kv == "plain" or (kv == "reuse" and method == "self-draft"):
            assert [(r.drafted, r.accepted) for r in mine.rounds] == [(r.drafted, r.accepted) for r in theirs.rounds]
    if "reuse" in kv:
        assert sum(g.cached_tokens >= 64 for g in found) > 3
    if "scarce" in kv:
        assert sum(g.preemptions for g in found) > 0
    assert nothing_is_held(engine)
