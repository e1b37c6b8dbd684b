"""K by load: chosen from times made by hand, timed on an engine, and what acceptance does after a stretch at K = 0."""

from __future__ import annotations

import pytest
from stand_ins import tiny_model

from tutorial_lib.api import LLM
from tutorial_lib.bench import schedule
from tutorial_lib.bench.schedule import choose, measured
from tutorial_lib.config import DraftTargetDecodingConfig, KvCacheConfig, NGramDecodingConfig, SamplingParams
from tutorial_lib.drafters.draft_model import DraftModelDrafter
from tutorial_lib.engine.engine import Engine
from tutorial_lib.errors import OptionError


def roofline(batches, longest=4, ridge=16, draft=0.05):
    """Rounds of a machine on which `ridge` rows cost as much as one, and each drafted token a twentieth of a step."""
    return {(b, k): max(1.0, b * (k + 1) / ridge) + draft * k for b in batches for k in range(longest + 1)}


def test_k_falls_to_zero_where_rows_are_no_longer_free():
    found = choose(roofline([1, 2, 4, 8, 16, 32]), 0.7)
    # at 4, K = 3 is the last that is free; at 8, K = 1 is; from 16 on every row costs and none is drafted
    assert found.draft_len_schedule == {1: 4, 4: 3, 8: 1, 16: 0}
    assert [found.chosen(n) for n in (1, 3, 4, 7, 8, 15, 16, 64)] == [4, 4, 3, 3, 1, 1, 0, 0]
    best = next(c for c in found.choices if (c.batch, c.max_draft_len) == (8, 1))
    assert best.acceptance_length == pytest.approx(1.7) and best.output_tok_s == pytest.approx(8 * 1.7 / 1.05)


def test_a_better_drafter_drafts_more_and_a_useless_one_nothing():
    times = roofline([1, 4, 8, 16])
    assert choose(times, [0.2, 0.1, 0.1, 0.1]).draft_len_schedule == {1: 1, 16: 0}
    assert choose(times, 0.0).draft_len_schedule == {1: 0}
    assert choose(times, 1.0).draft_len_schedule == {1: 4, 4: 3, 8: 1, 16: 0}
    with pytest.raises(OptionError, match="pays at no load"):
        choose(times, 0.0).apply(NGramDecodingConfig())


def test_a_draw_goes_to_the_shorter_draft_and_noise_never_lengthens_one():
    flat = {(1, 0): 1.0, (1, 1): 1.5, (1, 2): 1.74, (2, 0): 1.0, (2, 1): 1.4, (2, 2): 1.2}
    assert choose(flat, 0.5).draft_len_schedule == {1: 0}  # 1, 1.5 / 1.5, 1.75 / 1.74: nothing to be won
    slow = {**flat, (1, 1): 1.2, (2, 0): 9.0}  # K = 2 would be best at 2, but it is not at 1
    assert choose(slow, 0.5).draft_len_schedule == {1: 1}


@pytest.mark.parametrize(
    ("times", "acceptance", "words"),
    [
        ({}, 0.5, "1 among them"),
        ({(2, 0): 1.0}, 0.5, "1 among them"),
        ({(1, 0): 1.0, (2, 1): 1.0}, 0.5, "K = 0 too"),
        ({(1, 0): 1.0, (1, 1): 1.0}, [], "0 positions"),
        ({(1, 0): 1.0, (1, 1): 1.0}, 1.5, "1.5"),
    ],
)
def test_what_cannot_be_chosen_from(times, acceptance, words):
    with pytest.raises(OptionError, match=words):
        choose(times, acceptance)


def test_the_schedule_goes_into_a_configuration_as_it_is():
    config = choose(roofline([1, 4, 16]), 0.7).apply(
        DraftTargetDecodingConfig(speculative_model_dir="x", max_draft_len=9)
    )
    assert (config.max_draft_len, config.draft_len_schedule) == (4, {1: 4, 4: 3, 16: 0})
    assert config.speculative_model_dir == "x"


def test_acceptance_recovers_after_a_stretch_at_zero(pieces):
    """A chosen schedule in the engine: eight requests draft nothing, and the one that is left drafts as if alone."""
    chosen = choose(roofline([1, 2, 4, 8], ridge=8), 0.7)
    assert chosen.draft_len_schedule == {1: 4, 2: 3, 4: 1, 8: 0}
    target, twin = (tiny_model("dummy:tiny-llama?seed=5", max_slots=8) for _ in range(2))
    engine = Engine(
        target, pieces, (), drafter=DraftModelDrafter(twin, 320), max_draft_len=chosen.max_draft_len,
        draft_len_schedule=chosen.draft_len_schedule, kv_cache_config=KvCacheConfig(),
    )  # fmt: skip
    prompts = [[i, i + 1] for i in range(8)]
    done = engine.generate(prompts, [SamplingParams(max_tokens=60)] + [SamplingParams(max_tokens=20)] * 7)
    counts = [(len(r.drafted), r.accepted) for r in done[0].rounds]
    assert counts[:19] == [(0, 0)] * 19
    assert counts[19:26] == [(4, 4)] * 7 and all(g.rounds[-1].drafted == () for g in done[1:])


# ---- measured -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        config = DraftTargetDecodingConfig(max_draft_len=2, speculative_model_dir="dummy:tiny-llama?seed=5&layers=1")
        with LLM("dummy:tiny-llama?seed=5", speculative_config=config, max_batch_size=4, device="cpu") as opened:
            yield opened


def test_rounds_are_timed_at_their_batch_and_their_k(llm):
    """The engine that is timed is the one that serves afterwards: its schedule and its slots are as before."""
    engine, seen = llm.engine, []
    rounds = type(engine)._round
    engine._round = lambda active: (seen.append((len(active), engine._draft_len(len(active)))), rounds(engine, active))[
        1
    ]
    before = llm.generate([1, 2, 3]).token_ids
    seen.clear()
    assert llm.time_rounds(3, 1, context=40) > 0 and set(seen) == {(3, 1)} and len(seen) == 7
    seen.clear()
    assert llm.time_rounds(2, 0) > 0 and set(seen) == {(2, 0)}
    assert engine.scheduler.is_idle and engine.cache.pool.held == 0 and engine.draft_len_schedule == {1: 2}
    assert llm.generate([1, 2, 3]).token_ids == before
    for wrong in ((5, 1), (1, 3), (1, -1)):
        with pytest.raises(OptionError, match="to be timed"):
            llm.time_rounds(*wrong)


def test_measured_takes_times_and_acceptance_from_the_engine(llm, monkeypatch):
    times = {(b, k): 1.0 + 0.1 * k + (0.5 * k if b == 4 else 0) for b in (1, 4) for k in range(3)}
    asked = []
    monkeypatch.setattr(llm, "time_rounds", lambda b, k, context: (asked.append((b, k)), times[b, k])[1], raising=False)
    said: list[str] = []
    found = measured(llm, batches=(4, 1), acceptance=0.9, say=said.append)
    assert sorted(asked) == sorted(times) and found == choose(times, 0.9) and len(said) == 2
    rates = schedule._acceptance(llm, 2)
    assert len(rates) == 2 and all(0 <= rate <= 1 for rate in rates)
    assert measured(llm, batches=(1,), say=said.append).choices[1].acceptance_length == pytest.approx(1 + rates[0])
    with pytest.raises(OptionError, match="1 among them"):
        measured(llm, batches=(2,))


def test_without_a_drafter_there_is_nothing_to_choose(cache):
    with LLM("dummy:tiny-llama?seed=5", device="cpu") as plain, pytest.raises(OptionError, match="no drafter"):
        measured(plain)
