"""A sliding window's cache as a ring: the same as a cache that keeps everything and looks at the window only."""

from __future__ import annotations

import math

import pytest
import torch
from stand_ins import Around, Trees, adversary, greedy, oracle, pattern, tiny_model

from tutorial_lib.config import KvCacheConfig, LayerSkipDecodingConfig, SamplingParams
from tutorial_lib.drafters.draft_model import DraftModelDrafter
from tutorial_lib.drafters.layer_skip import LayerSkipDrafter
from tutorial_lib.engine.engine import Engine
from tutorial_lib.engine.model import Segment

NAME, WINDOW, ROOM = "dummy:tiny-mistral?seed=2", 32, 9
PROMPTS = ([7], list(range(40, 70)), [(5 * i * i + 1) % 320 for i in range(120)])
LENGTH = 90


@pytest.fixture(scope="module")
def texts():
    """Greedy texts of a model whose cache is no ring, up to nearly seven times round."""
    whole = tiny_model(NAME)
    return [greedy(whole, p, LENGTH + 20) for p in PROMPTS]


def ring() -> object:
    model = tiny_model(NAME, ring_room=ROOM)
    assert model.is_ring and model.cache.shape[3] == model.cache_rows == WINDOW + ROOM - 1 and model.max_rows == ROOM
    return model


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_hidden_states_are_those_of_the_whole_cache(rows):
    ids = [(3 * i * i + 1) % 320 for i in range(180)]
    whole, round_ = tiny_model(NAME), ring()
    for start in range(0, 180, rows):
        piece = ids[start : start + rows]
        segment = Segment(1, start, len(piece))
        torch.testing.assert_close(
            round_.forward(piece, [segment]), whole.forward(piece, [segment]), rtol=1e-4, atol=1e-5
        )


METHODS = {"none": None, "oracle": oracle, "adversary": adversary, "pattern": pattern}


@pytest.mark.parametrize("method", [*METHODS, "trees", "wide trees", "draft model", "layer skip"])
def test_text_is_that_of_windowed_plain_decoding(method, texts, pieces):
    model = ring()
    if method in METHODS:
        drafter = METHODS[method](texts) if METHODS[method] else None
    elif "trees" in method:
        width = 6 if "wide" in method else 2  # wider than the room: cut at their ends
        drafter = Trees(texts, lambda number, budget: number % (budget + 1), width=width)
    elif method == "draft model":
        drafter = DraftModelDrafter(tiny_model("dummy:tiny-mistral?seed=9&layers=1", ring_room=ROOM), 320)
    else:
        drafter = LayerSkipDrafter(LayerSkipDecodingConfig(skip_layers=[1]), model)
        assert drafter.model.cache.shape[3] == model.cache_rows
    engine = Engine(model, pieces, (), drafter=drafter, max_draft_len=4 if drafter else 0)
    params = [SamplingParams(max_tokens=n) for n in (LENGTH, LENGTH - 20, LENGTH)]
    done = engine.generate(PROMPTS, params)
    for generation, prompt, text in zip(done, PROMPTS, texts, strict=True):
        assert generation.token_ids == text[len(prompt) :][: len(generation.token_ids)]
    assert [len(g.token_ids) for g in done] == [LENGTH, LENGTH - 20, LENGTH]


def test_rows_out_of_sight_change_nothing(texts, pieces):
    """Before every round each row that holds no position of the window, or only a rejected one, is overwritten; before
    a request begins the whole cache holds NaN."""
    model = ring()

    def poison(states):
        for state in states:
            known = len(state.token_ids) - 1
            seen = {p % model.cache_rows for p in range(max(0, known - WINDOW + 1), known)}
            model.cache[:, state.slot, :, [r for r in range(model.cache_rows) if r not in seen]] = 99.0

    model.cache.fill_(math.nan)
    engine = Engine(model, pieces, (), drafter=Around(pattern(texts), poison), max_draft_len=4)
    done = engine.generate(PROMPTS, [SamplingParams(max_tokens=LENGTH)] * 3)
    assert [g.token_ids for g in done] == [t[len(p) :][:LENGTH] for p, t in zip(PROMPTS, texts, strict=True)]


def test_a_drafter_that_skipped_more_than_the_room_catches_up(texts, pieces):
    twin = tiny_model(NAME, ring_room=ROOM)
    engine = Engine(
        ring(), pieces, (), drafter=DraftModelDrafter(twin, 320), max_draft_len=4, draft_len_schedule={1: 4, 2: 0}
    )
    long, _ = engine.generate([PROMPTS[0], [3]], [SamplingParams(max_tokens=n) for n in (LENGTH, 40)])
    assert long.token_ids == texts[0][1:][:LENGTH]
    counts = [(len(r.drafted), r.accepted) for r in long.rounds]
    assert counts[:39] == [(0, 0)] * 39 and counts[39:46] == [(4, 4)] * 7


def test_the_budget_counts_the_ring(pieces):
    engine = Engine(ring(), pieces, (), kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=48))
    assert len(engine.cache.pool.blocks) == 3 and engine.cache.blocks_for(256) == 3  # 40 rows are three blocks
    assert len(engine.generate([[1]], [SamplingParams(max_tokens=200)])[0].token_ids) == 200


def test_no_ring_without_need():
    assert not tiny_model(NAME, ring_room=ROOM, max_seq_len=40).is_ring
    assert not tiny_model("dummy:tiny-llama", ring_room=ROOM).is_ring
    assert not tiny_model(NAME).is_ring
