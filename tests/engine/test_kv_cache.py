"""Blocks: counted right, found again, forgotten oldest first; a text whose beginning is in the cache is as ever."""

from __future__ import annotations

import random

import pytest
from stand_ins import tiny_model

from tutorial_lib.config import KvCacheConfig, SamplingParams
from tutorial_lib.drafters.draft_model import DraftModelDrafter
from tutorial_lib.engine.engine import Engine
from tutorial_lib.engine.kv_cache import BlockPool, KvCache
from tutorial_lib.errors import OptionError, PromptError

SIZE = 16
REUSE = KvCacheConfig(enable_block_reuse=True, tokens_per_block=SIZE)
LONG = [(7 * i * i + 3) % 320 for i in range(100)]


def fill(pool: BlockPool, text: list[int]) -> list[int]:
    """Hold and enter all full blocks of `text`, as a request does that computed it."""
    found = pool.find(text)
    pool.hold(found.blocks)
    table, key = list(found.blocks), found.keys[-1] if found.keys else b""
    for start in range(
        len(table) * pool.tokens_per_block, len(text) - pool.tokens_per_block + 1, pool.tokens_per_block
    ):
        (number,) = pool.take(1)
        kept, key = pool.enter(number, key, text[start : start + pool.tokens_per_block])
        table.append(kept)
    return table


# ---- the pool -------------------------------------------------------------------------------------------------------


def test_a_text_is_found_up_to_the_token_where_it_differs():
    pool = BlockPool(10, 4)
    table = fill(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.find([1, 2, 3, 4, 5, 6, 7, 8, 9]).blocks == tuple(table)
    found = pool.find([1, 2, 3, 4, 5, 6, 0, 8])
    assert (found.blocks, found.partial, found.rows) == (tuple(table[:1]), table[1], 2)
    assert pool.find([5, 6, 7, 8]).blocks == () and pool.find([5, 6, 7, 8]).partial is None  # what is before counts
    other = fill(pool, [1, 2, 3, 4, 5, 6, 0, 0])
    assert other[0] == table[0] and other[1] != table[1] and pool.blocks[table[0]].refs == 2
    assert pool.find([1, 2, 3, 4, 5, 6, 0, 1]).rows == 3  # the sibling that agrees longest


def test_the_oldest_unheld_block_goes_first_and_a_held_one_never():
    pool = BlockPool(4, 2)
    old, new = fill(pool, [1, 1, 2, 2]), fill(pool, [3, 3, 4, 4])
    assert pool.take(1) is None and pool.held == 4
    pool.give_back(old)
    assert (pool.held, pool.available, pool.findable) == (2, 2, 4)
    assert pool.take(1) == [old[1]]  # the end of a text before its beginning
    assert pool.find([1, 1, 2, 2]).blocks == (old[0],)
    pool.give_back(new)
    pool.hold(pool.find([1, 1]).blocks)
    pool.give_back(pool.find([1, 1]).blocks)  # used just now: the others are older
    assert pool.take(2) == [new[1], new[0]]
    assert pool.find([1, 1]).blocks == (old[0],) and not pool.find([3, 3]).blocks
    assert pool.take(2) is None and pool.available == 1  # a refused wish changes nothing


def test_equal_blocks_of_two_requests_become_one():
    pool = BlockPool(4, 2)
    first, second = pool.take(1), pool.take(1)
    kept, key = pool.enter(first[0], b"", [1, 2])
    assert pool.enter(second[0], b"", [1, 2]) == (kept, key)
    assert pool.blocks[kept].refs == 2 and pool.held == 1
    pool.give_back([kept])
    pool.give_back([kept])
    assert pool.held == 0 and pool.findable == 1
    pool.forget_all()
    assert pool.findable == 0 and pool.available == 4 and not pool._behind


def test_the_pool_under_a_thousand_random_texts():
    """Whatever comes and goes: counts agree with who holds what, and content is never mixed up."""
    rng, pool, tables = random.Random(0), BlockPool(24, 4), []
    for _ in range(1000):
        if tables and rng.random() < 0.5:
            pool.give_back(tables.pop(rng.randrange(len(tables))))
        else:
            text = [rng.choice([1, 2]) for _ in range(rng.randrange(4, 24))]
            found = pool.find(text)
            pool.hold(found.blocks)
            if (fresh := pool.take(len(text) // 4 - len(found.blocks))) is None:
                pool.give_back(found.blocks)
                continue
            table, key = list(found.blocks), found.keys[-1] if found.keys else b""
            for i, number in enumerate(fresh, start=len(table)):
                kept, key = pool.enter(number, key, text[4 * i : 4 * i + 4])
                table.append(kept)
            tables.append(table)
            assert [t for n in table for t in pool.blocks[n].tokens] == text[: 4 * len(table)]
        held = [n for table in tables for n in table]
        assert all(block.refs == held.count(n) for n, block in enumerate(pool.blocks))
        assert pool.held == len(set(held))
    for table in tables:
        pool.give_back(table)
    pool.forget_all()
    assert pool.available == 24


# ---- reuse in the engine --------------------------------------------------------------------------------------------


@pytest.fixture
def engine(pieces):
    def make(drafter=None, k=0, kv=REUSE, **limits):
        model = tiny_model("dummy:tiny-llama?seed=5", **limits)
        proposer = drafter(model) if drafter else None
        return Engine(model, pieces, (), drafter=proposer, max_draft_len=k, kv_cache_config=kv)

    return make


def computed(engine: Engine) -> list[int]:
    """Rows of every forward of the target from now on."""
    rows, forward = [], engine.target.forward
    engine.target.forward = lambda ids, *a, **o: (rows.append(len(ids)), forward(ids, *a, **o))[1]
    return rows


@pytest.mark.parametrize("shared", [0, 5, 15, 16, 17, 63, 64, 90, 99, 100])
def test_a_reused_beginning_gives_the_same_text(shared, engine):
    """Every place of a block where two texts can part; at 100 the prompt is the same one."""
    warm, cold = engine(), engine(kv=None)
    prompt = LONG[:shared] + [(t + 1) % 320 for t in LONG[shared:]]
    params = [SamplingParams(max_tokens=20, logprobs=0)]
    warm.generate([LONG], params)
    rows = computed(warm)
    (found,), (expected,) = warm.generate([prompt], params), cold.generate([prompt], params)
    assert found.token_ids == expected.token_ids
    # of the first text's last block nothing is known if it never became full
    assert rows[0] == 100 - min(shared, 99) == 100 - found.cached_tokens and expected.cached_tokens == 0
    assert all(abs(a[t] - b[t]) < 1e-4 for a, b in zip(found.logprobs, expected.logprobs, strict=True) for t in a)
    assert warm.cache.pool.held == 0


def test_a_conversation_goes_on_where_it_ended(engine):
    """The answer of the first turn is in the cache too, whatever was drafted on the way."""
    warm = engine(lambda model: DraftModelDrafter(tiny_model("dummy:tiny-llama?seed=4&layers=1"), 320), 4)
    (first,) = warm.generate([LONG[:40]], [SamplingParams(max_tokens=40)])
    rows = computed(warm)
    turn = LONG[:40] + first.token_ids + [3, 1, 4]
    (found,) = warm.generate([turn], [SamplingParams(max_tokens=20)])
    assert rows[0] == 83 - 64  # 79 positions were in the cache: four full blocks of 16
    assert [found.token_ids] == [g.token_ids for g in engine(kv=None).generate([turn], [SamplingParams(max_tokens=20)])]


def test_copies_are_private(engine):
    """Two requests at once on one beginning, each writing behind it, and a third on what the first left."""
    warm, cold, params = engine(), engine(kv=None), SamplingParams(max_tokens=30)
    prompts = [LONG[:70], [*LONG[:70], 9], [*LONG[:66], 8, 8, 8], LONG[:70], LONG[:33]]
    expected = [g.token_ids for g in cold.generate(prompts, [params] * 5)]
    for _ in range(3):
        assert [g.token_ids for g in warm.generate(prompts, [params] * 5)] == expected


def test_a_small_cache_forgets_and_stays_right(engine, pieces):
    small = engine(kv=KvCacheConfig(enable_block_reuse=True, tokens_per_block=16, max_tokens=16 * 9))
    cold, params = engine(kv=None), SamplingParams(max_tokens=12)
    assert small.cache.max_tokens == 144
    for i in range(12):
        prompt = [i % 4, *LONG[: 40 + 7 * i]]
        assert small.generate([prompt], [params])[0].token_ids == cold.generate([prompt], [params])[0].token_ids
        assert small.cache.pool.findable <= 9 and small.cache.pool.held == 0
    with pytest.raises(PromptError, match=r"145 tokens.*at most 144.*max_tokens"):
        small.generate([[1] * 125], [SamplingParams(max_tokens=20)])


def test_what_cannot_be(pieces):
    with pytest.raises(OptionError, match="max_tokens is 5"):
        KvCache(tiny_model("dummy:tiny-llama"), max_tokens=5)
    with pytest.raises(OptionError, match="sliding window"):
        KvCache(tiny_model("dummy:tiny-mistral"), enable_block_reuse=True)
