"""In-flight batching: whoever comes and goes, each request's text is the one it has alone."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import tracemalloc

import pytest
from stand_ins import greedy, serve, tiny_model
from tiny_heads import TARGET as DEEP
from tiny_heads import eagle_tensors, specforge

from tutorial_lib.api import LLM
from tutorial_lib.backends.torch_drafters import refuse_unsupported
from tutorial_lib.backends.trtllm import calls
from tutorial_lib.backends.trtllm.support import refuse_own_options
from tutorial_lib.config import (
    EagleDecodingConfig,
    KvCacheConfig,
    LayerSkipDecodingConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
)
from tutorial_lib.drafters.draft_model import DraftModelDrafter
from tutorial_lib.drafters.eagle import open_eagle
from tutorial_lib.drafters.layer_skip import LayerSkipDrafter
from tutorial_lib.drafters.lookahead import LookaheadDrafter
from tutorial_lib.drafters.ngram import NGramDrafter
from tutorial_lib.drafters.suffix import SuffixDrafter
from tutorial_lib.engine import scheduler
from tutorial_lib.engine.engine import Engine, Request
from tutorial_lib.errors import OptionError

KV = {
    "plain": None,
    "reuse": KvCacheConfig(enable_block_reuse=True, tokens_per_block=16),
    "scarce": KvCacheConfig(max_tokens=16 * 15, tokens_per_block=16),
    "scarce reuse": KvCacheConfig(enable_block_reuse=True, max_tokens=16 * 15, tokens_per_block=16),
}
DRAFTERS = ("none", "draft model", "ngram", "suffix", "lookahead", "layer skip", "eagle chain", "eagle tree")
END = 318  # an id that texts are made to meet by chance


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return specforge(tmp_path_factory.mktemp("head") / "eagle", eagle_tensors())


@pytest.fixture
def engine_of(head, pieces):
    def make(method: str, kv: KvCacheConfig | None = None, k: int = 4, schedule=None, slots: int = 5) -> Engine:
        target = tiny_model(DEEP, max_slots=slots)
        small = {"max_slots": slots}
        drafter = {
            "none": lambda: None,
            "draft model": lambda: DraftModelDrafter(tiny_model("dummy:tiny-llama?seed=4&layers=1", **small), 320),
            "ngram": lambda: NGramDrafter(NGramDecodingConfig(max_matching_ngram_size=2), ()),
            "suffix": lambda: SuffixDrafter(SADecodingConfig(), ()),
            "lookahead": lambda: LookaheadDrafter(LookaheadDecodingConfig(), ()),
            "layer skip": lambda: LayerSkipDrafter(LayerSkipDecodingConfig(), target),
            "eagle chain": lambda: open_eagle(EagleDecodingConfig(speculative_model="x"), target, head),
            "eagle tree": lambda: open_eagle(
                EagleDecodingConfig(speculative_model="x", use_dynamic_tree=True), target, head
            ),
        }[method]()
        return Engine(
            target,
            pieces,
            (),
            drafter=drafter,
            max_draft_len=k if drafter else 0,
            draft_len_schedule=schedule,
            kv_cache_config=kv,
        )

    return make


def mixed_requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 200 tokens, half of them with a common beginning; all kinds of sampling and stopping."""
    rng = random.Random(seed)
    system = [rng.randrange(320) for _ in range(50)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(320) for _ in range(rng.choice([1, 2, 7, 30, 150] if i % 2 else [1, 5, 17, 33, 60]))]
        options: dict = {"max_tokens": rng.choice([1, 2, 9, 25, 40])}
        options |= rng.choice([{}, {"temperature": 0.9, "seed": i}, {"temperature": 1.2, "top_k": 9, "seed": i}])
        options |= rng.choice([{}, {"stop_token_ids": list(range(0, 320, 16))}, {"stop": [" w1", " w22"]}])
        options |= rng.choice([{}, {}, {"repetition_penalty": 1.2}])
        requests.append((prompt if i % 2 else system + prompt, SamplingParams(**options)))
    return requests


MIXES = [(method, kv) for method in DRAFTERS for kv in ("plain", "scarce reuse")]
MIXES += [(method, "reuse") for method in ("draft model", "eagle chain", "suffix")]


@pytest.mark.parametrize(("method", "kv"), MIXES)
def test_twenty_requests_in_a_mix_are_as_each_is_alone(method, kv, engine_of):
    """Arrivals, lengths, samplers and stops mixed, on every drafter and form of the cache. Where the cache is scarce
    requests give their blocks up in mid-text; a sampled one then draws with other drafts, so there it is greedy."""
    requests = mixed_requests(len(method), 20)
    if "scarce" in kv:
        greedy_only = lambda p: SamplingParams(max_tokens=p.max_tokens, stop_token_ids=p.stop_token_ids, stop=p.stop)  # noqa: E731
        requests = [(prompt[:150], greedy_only(params)) for prompt, params in requests]
    alone = engine_of(method)
    expected = [alone.generate([prompt], [params])[0] for prompt, params in requests]
    rng = random.Random(1)
    arrivals = sorted(rng.randrange(40) for _ in requests)
    engine = engine_of(method, KV[kv])
    found = serve(engine, requests, arrivals)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert (mine.text, mine.finish_reason, mine.stop_reason) == (
            theirs.text, theirs.finish_reason, theirs.stop_reason,
        )  # fmt: skip
        if method.startswith("eagle") and "scarce" not in kv:
            assert [(r.drafted, r.accepted) for r in mine.rounds] == [(r.drafted, r.accepted) for r in theirs.rounds]
    assert engine.cache.pool.held == 0 and sorted(engine.scheduler.free) == list(range(5))


def test_requests_join_and_leave_between_rounds(engine_of):
    """A short request that comes late is done long before an early long one, and its slot goes to the next in line."""
    engine = engine_of("none", slots=2)
    long, first, second = engine.open([[1, 2], [3], [4]], [SamplingParams(max_tokens=n) for n in (40, 3, 3)])
    engine.step()
    assert [r.prompt_ids for r in engine.scheduler.running] == [[1, 2], [3]]
    for _ in range(8):
        engine.step()
    assert first._request.finish_reason and second._request.finish_reason and not long._request.finish_reason
    assert engine.scheduler.running == [long._request] and len(long._request.rounds) == 8
    assert second._request.ttft_s > first._request.ttft_s


def test_a_long_prompt_is_read_in_pieces_while_others_go_on(engine_of, monkeypatch):
    monkeypatch.setattr(scheduler, "PIECE", 32)
    monkeypatch.setattr("tutorial_lib.engine.engine.PIECE", 32)
    engine = engine_of("draft model")
    running, late = engine.open([[5]], [SamplingParams(max_tokens=40)])[0], None
    engine.step()
    (late,) = engine.open([list(range(200))], [SamplingParams(max_tokens=5)])
    before = len(running._request.token_ids)
    read = []
    while not late._request.output_ids:
        engine.step()
        read.append(late._request.computed)
    assert read == [32, 64, 96, 128, 160, 192, 200]
    assert len(running._request.token_ids) >= before + 7  # a round for each piece


def test_blocks_run_out_and_the_latest_waits(engine_of):
    """Four requests of 15 blocks at most together: the latest give theirs up, none is lost, the first never waits."""
    engine = engine_of("none", KV["scarce"])
    requests = [([i] * 30, SamplingParams(max_tokens=60)) for i in range(4)]
    lost: list[int] = []
    preempt = engine.scheduler.preempt
    engine.scheduler.preempt = lambda r: (lost.append(r.prompt_ids[0]), preempt(r))[1]
    found = serve(engine, requests, [0] * 4)
    assert lost and 0 not in lost
    expected = [greedy(tiny_model(DEEP), prompt, 60)[30:] for prompt, _ in requests]
    assert [g.token_ids for g in found] == expected
    assert all(sum(len(r.emitted) for r in g.rounds) == 59 for g in found)


def test_cancelled_requests_leave_at_once(engine_of):
    engine = engine_of("draft model", slots=2)
    params = SamplingParams(max_tokens=50)
    streams = engine.open([[1], list(range(200)), [3], [4]], [params] * 4)
    for _ in range(3):
        engine.step()
    for stream in streams[:3]:
        stream.close()
    assert [r.prompt_ids for r in engine.scheduler.waiting] == [[4]] and not engine.scheduler.running
    assert list(streams[0]) == [] and engine.cache.pool.held == 0
    items = [g for g in streams[3] if g is not None]
    assert items[-1].token_ids == greedy(tiny_model(DEEP), [4], 50)[1:]
    streams[3].close()  # finished: nothing to take back
    assert items[-1].finish_reason == "length" and engine.scheduler.is_idle


def test_an_error_in_one_turn_spoils_no_other_request(engine_of, pieces):
    """A round fails in the middle; those who did not ask for it are read anew and come out right."""
    engine, alone = engine_of("eagle chain"), engine_of("eagle chain")
    params = SamplingParams(max_tokens=30)
    (stream,) = engine.open([[7, 8, 9]], [params])
    for _ in range(4):
        engine.step()
    observe, armed = engine.drafter.observe, [True]

    def broken(outcomes):
        if armed.pop() if armed else False:
            raise RuntimeError("stop")
        observe(outcomes)

    engine.drafter.observe = broken
    with pytest.raises(RuntimeError):
        engine.generate([[1, 2]], [params])
    assert engine.generate([[1, 2]], [params])[0].token_ids == alone.generate([[1, 2]], [params])[0].token_ids
    last = [g for g in stream if g is not None][-1]
    (expected,) = alone.generate([[7, 8, 9]], [params])
    assert last.token_ids == expected.token_ids and len(last.rounds) == len(expected.rounds)


def test_nothing_is_left_after_a_thousand_requests(engine_of):
    """Finished, stopped early, cancelled while waiting, reading or running, refused: all blocks and slots come back,
    and what is kept does not grow: neither blocks with known content nor bytes nor requests."""
    engine, rng, live = engine_of("draft model", KV["scarce reuse"]), random.Random(3), []
    kinds = mixed_requests(7, 40)
    sizes, kept_bytes = [], []

    def drained() -> int:
        live.clear()  # dropped without a word
        while not engine.scheduler.is_idle:
            engine.step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    for i in range(1000):
        prompt, params = kinds[rng.randrange(40)]
        if rng.random() < 0.1:
            with pytest.raises(ValueError, match="tokens"):
                engine.open([prompt + [1] * 300], [params])
            continue
        live += engine.open([prompt[:60]], [SamplingParams(max_tokens=rng.randrange(1, 12))])
        if rng.random() < 0.3:
            live.pop(rng.randrange(len(live))).close()
        if rng.random() < 0.1:
            del live[: len(live) // 2]  # dropped without a word
        engine.step()
        live = [s for s in live if not s._request.is_over]
        if i % 250 == 249:
            sizes.append(engine.cache.pool.findable)
            if i == 499:
                tracemalloc.start()
            kept_bytes.append(drained())
    tracemalloc.stop()
    assert kept_bytes[3] - kept_bytes[2] < 20_000  # of 250 requests: they take some kB each while they run
    assert not [o for o in gc.get_objects() if type(o) is Request]
    pool = engine.cache.pool
    assert pool.held == 0 and sorted(engine.scheduler.free) == list(range(5))
    assert max(sizes) <= len(pool.blocks) and len(engine.drafter._cached) <= 5
    pool.forget_all()
    assert pool.available == len(pool.blocks) and not pool._by_key and not pool._behind
    assert all(block.refs == 0 for block in pool.blocks)


# ---- the draft length by load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in DRAFTERS if m != "none"])
def test_the_schedule_sets_k_by_active_requests(method, engine_of):
    """Down to 0 and up again: text as ever, and after the stretch at 0 as much accepted as before it."""
    engine = engine_of(method, schedule={1: 4, 2: 2, 4: 0})
    params = [SamplingParams(max_tokens=n) for n in (60, 30, 20, 20)]
    prompts = [[1, 2, 3] * 5, [4, 5] * 4, [6], [7, 8, 9] * 3]
    found = engine.generate(prompts, params)
    for generation, prompt, each in zip(found, prompts, params, strict=True):
        assert generation.token_ids == greedy(tiny_model(DEEP), prompt, each.max_tokens)[len(prompt) :]
    depths = [r.depth for r in found[0].rounds]
    assert depths[0] == 0 and max(depths) <= 4
    alone = engine_of(method).generate(prompts[:1], params[:1])[0]
    if method not in ("lookahead",):  # its window stands still meanwhile
        ours, at = {}, 1
        for r in found[0].rounds:
            ours[at] = r
            at += len(r.emitted)
        at = 1
        for r in alone.rounds:  # rounds that begin at the same token with the same K are the same
            if at in ours and len(ours[at].drafted) == len(r.drafted):
                assert ours[at].accepted == r.accepted
            at += len(r.emitted)


def test_a_draft_model_recovers_after_a_stretch_at_zero(pieces):
    """It drafts with the target's own weights: all is accepted, unless holes in its cache make it another model."""
    target = tiny_model("dummy:tiny-llama?seed=5")
    drafter = DraftModelDrafter(tiny_model("dummy:tiny-llama?seed=5"), 320)
    engine = Engine(target, pieces, (), drafter=drafter, max_draft_len=4, draft_len_schedule={1: 4, 2: 0})
    long, short = engine.generate([[1, 2], [3]], [SamplingParams(max_tokens=n) for n in (60, 20)])
    assert [len(r.drafted) for r in short.rounds] == [0] * 19
    counts = [(len(r.drafted), r.accepted) for r in long.rounds]
    assert counts[:19] == [(0, 0)] * 19 and counts[19:27] == [(4, 4)] * 8


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({2: 4}, ["entry 1"]),
        ({1: 3}, ["entry 1", "4"]),
        ({1: 4, 2: 5}, ["no larger"]),
        ({1: 4, 0: 2}, [">= 1"]),
        ({1: 4, 2: -1}, [">= 0"]),
        ([4, 2], ["mapping"]),
    ],
)
def test_schedules_that_tensorrt_llm_would_refuse(schedule, words):
    with pytest.raises(OptionError) as caught:
        NGramDecodingConfig(max_draft_len=4, draft_len_schedule=schedule)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_schedule_is_kept_sorted():
    assert list(NGramDecodingConfig(draft_len_schedule={8: 0, 1: 4, 4: 2}).draft_len_schedule.items()) == [
        (1, 4), (4, 2), (8, 0),
    ]  # fmt: skip


def test_the_schedule_reaches_those_who_know_it_and_the_others_refuse_it():
    config = NGramDecodingConfig(max_draft_len=4, draft_len_schedule={8: 0, 1: 4})
    new, old = calls.Version(1, 2, "1.2.1"), calls.Version(1, 1, "1.1.0")
    refuse_own_options(config, new, "pytorch")
    call = calls.drafting_config(new, config)
    assert call["kwargs"]["draft_len_schedule"] == {1: 4, 8: 0} and calls.reasons(call)["draft_len_schedule"]
    for refuse in (
        lambda: refuse_own_options(config, old, "pytorch"),
        lambda: refuse_own_options(config, new, "engine"),
    ):
        with pytest.raises(OptionError, match="draft_len_schedule"):
            refuse()
    refuse_unsupported(config, "cpu")
    refuse_unsupported(config, "cuda")


# ---- several readers of one engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        with LLM("dummy:tiny-llama?seed=5", max_seq_len=256, max_batch_size=4) as opened:
            yield opened


def widths(llm) -> list[int]:
    """How many requests each round from now on serves."""
    seen, engine = [], llm._backend.engine
    rounds = type(engine)._round
    engine._round = lambda active: (seen.append(len(active)), rounds(engine, active))[1]
    return seen


def test_streams_in_an_event_loop_run_in_one_batch(llm):
    prompts = [[i, i + 1] for i in range(6)]
    params = SamplingParams(max_tokens=30)
    expected = [llm.generate(p, params).token_ids for p in prompts]
    seen = widths(llm)

    async def read(prompt):
        return [g async for g in llm.generate_async(prompt, params, streaming=True)][-1].token_ids

    async def cell():
        batch = asyncio.to_thread(llm.generate, prompts[:2], params)
        return await asyncio.gather(batch, *(read(p) for p in prompts))

    (first, second), *streamed = asyncio.run(cell())
    assert [first.token_ids, second.token_ids] == expected[:2] and streamed == expected
    assert max(seen) == 4 and sum(seen) / len(seen) > 2  # four slots, eight requests


def test_streams_are_in_line_from_the_call_on(llm):
    seen = widths(llm)
    streams = [llm.generate_async([i], SamplingParams(max_tokens=12)) for i in range(4)]
    assert len(streams[0].result().token_ids) == 12
    assert seen == [4] * 11
    done = len(seen)
    assert all(len(s.result().token_ids) == 12 for s in streams) and len(seen) == done


def test_an_aborted_stream_makes_room(llm):
    engine = llm._backend.engine
    streams = [llm.generate_async([i], SamplingParams(max_tokens=200), streaming=True) for i in range(6)]
    next(iter(streams[0]))  # left after one item, which ends it too
    for stream in streams[1:]:
        stream.abort()
        stream.abort()
    with pytest.raises(OptionError, match="before its end"):
        streams[1].result()
    assert engine.cache.pool.held == 0 and engine.scheduler.is_idle


def test_threads_that_come_and_go(llm):
    """Readers in threads, each with its own way of leaving; nothing deadlocks, every text is right."""
    params = SamplingParams(max_tokens=20)
    expected = {i: llm.generate([i], params).token_ids for i in range(8)}
    wrong: list[int] = []

    def reader(number: int) -> None:
        for turn in range(6):
            i = (number + turn) % 8
            stream = llm.generate_async([i], params, streaming=True)
            for count, item in enumerate(stream):
                if item.token_ids != expected[i][: len(item.token_ids)]:
                    wrong.append(i)
                if turn % 3 == 1 and count == 3:
                    break

    threads = [threading.Thread(target=reader, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    llm.generate([1], SamplingParams(max_tokens=1))  # takes out what was left in the middle of a turn
    assert llm._backend.engine.scheduler.is_idle and llm._backend.engine.cache.pool.held == 0
