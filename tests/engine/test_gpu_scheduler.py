"""In-flight batching of the GPU path, run as plain torch on a CPU: who joins, waits and leaves when, how far the host
is ahead, and that every page comes back."""

from __future__ import annotations

import random

import pytest
from gpu_engines import (
    KV,
    LONGEST,
    SHALLOW,
    SLOTS,
    TEXT,
    Exact,
    engine_for,
    make_heads,
    mixed_requests,
    model,
    nothing_is_held,
    outputs,
)
from gpu_models import random_ids
from stand_ins import serve

from tutorial_lib.config import KvCacheConfig, SamplingParams
from tutorial_lib.engine.drafting import ModelDrafting
from tutorial_lib.engine.gpu_engine import GpuEngine
from tutorial_lib.engine.gpu_model import PAGE
from tutorial_lib.errors import PromptError


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


def test_requests_join_and_leave_between_rounds(engine_of):
    """A short request that comes late is done long before an early long one, and its slot goes to the next in line."""
    engine = engine_of("none", slots=2)
    long, first, second = engine.open([[1, 2], [3], [4]], [SamplingParams(max_tokens=n) for n in (40, 3, 3)])
    engine.step()
    assert [r.prompt_ids for r in engine.scheduler.running] == [[1, 2], [3]]
    for _ in range(9):
        engine.step()
    assert first._request.finish_reason and second._request.finish_reason and not long._request.finish_reason
    assert engine.scheduler.running == [long._request] and len(long._request.rounds) == 8
    assert second._request.ttft_s > first._request.ttft_s


def test_a_long_prompt_is_read_in_pieces_while_others_go_on(engine_of, monkeypatch):
    """Steps of 64 rows, one of them between two rounds, by which the others come no later."""
    monkeypatch.setattr("tutorial_lib.engine.engine.PIECE", PAGE)
    engine = engine_of("draft model")
    (running,) = engine.open([[5]], [SamplingParams(max_tokens=60)])
    for _ in range(2):
        engine.step()
    (late,) = engine.open([random_ids(200)], [SamplingParams(max_tokens=5)])
    before, read = len(running._request.token_ids), []
    while not late._request.output_ids:
        engine.step()
        read.append(late._request.computed)
    assert read == [64, 128, 192, 200, 200]  # its first token is read a turn after it was launched
    assert len(running._request.token_ids) >= before + 5


def test_the_host_is_one_round_ahead_and_no_more(engine_of, monkeypatch):
    """Alone or together, in the steady state: one launch, then the results of the launch before, and nothing else that
    touches the device."""
    engine, order = engine_of("draft model"), []
    streams = engine.open([[1, 2], [3]], [SamplingParams(max_tokens=60)] * 2)
    for _ in range(3):
        engine.step()
    for name, call in (("_launch", "launch"), ("_read_round", "read")):
        kept = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *a, kept=kept, call=call: (order.append(call), kept(*a))[1])
    for module in ("graph", "paged_cache", "gpu_engine", "gpu_model"):
        monkeypatch.setattr(f"tutorial_lib.engine.{module}.upload", lambda *_: order.append("upload"))
    for _ in range(4):
        engine.step()
    assert order == ["launch", "read"] * 4 and not any(s.is_over for s in streams)


def test_pages_run_out_and_the_latest_waits(engine_of):
    """The latest give theirs up, none is lost, the first never waits."""
    engine = engine_of("none", KV["scarce"])
    requests = [(random_ids(50, seed=i), SamplingParams(max_tokens=60)) for i in range(6)]
    found = serve(engine, requests, [0] * 6)
    assert found[0].preemptions == 0 and sum(g.preemptions for g in found) > 2
    alone = engine_of("none")
    assert outputs(found) == [alone.generate([p], [q])[0].token_ids for p, q in requests]
    assert all(sum(len(r.emitted) for r in g.rounds) == 59 for g in found)
    small = engine_of("none", KvCacheConfig(max_tokens=200))
    with pytest.raises(PromptError, match=r"190 tokens; needed: at most 189, the KV cache's room"):
        small.open([[1] * 150], [SamplingParams(max_tokens=40)])
    assert small.scheduler.is_idle
    assert len(small.generate([[1] * 150], [SamplingParams(max_tokens=39)])[0].token_ids) == 39


def test_cancelled_requests_leave_at_once(engine_of):
    engine = engine_of("draft model", slots=2)
    streams = engine.open([[1], random_ids(200), [3], [4]], [SamplingParams(max_tokens=50)] * 4)
    for _ in range(3):
        engine.step()
    for stream in streams[:3]:
        stream.close()
    assert [r.prompt_ids for r in engine.scheduler.waiting] == [[4]] and not engine.scheduler.running
    assert list(streams[0]) == [] and engine.cache.pool.held == 0
    items = [g for g in streams[3] if g is not None]
    assert items[-1].token_ids == engine_of("none").generate([[4]], [SamplingParams(max_tokens=50)])[0].token_ids
    assert items[-1].finish_reason == "length" and nothing_is_held(engine)


@pytest.mark.parametrize(("method", "where"), [("draft model", "_read_text"), ("eagle", "_launch")])
def test_an_error_in_one_turn_spoils_no_other_request(method, where, engine_of, monkeypatch):
    """A launch fails with results on their way, which nobody waits for any more; those who did not ask for it are read
    anew and come out right."""
    engine, alone = engine_of(method), engine_of(method)
    params = SamplingParams(max_tokens=30)
    (stream,) = engine.open([[7, 8, 9]], [params])
    for _ in range(4):
        engine.step()
    call, armed = getattr(engine, where), [True]

    def broken(*arguments):
        if armed.pop() if armed else False:
            raise RuntimeError("stop")
        return call(*arguments)

    monkeypatch.setattr(engine, where, broken)
    with pytest.raises(RuntimeError):
        engine.generate([[1, 2]], [params])
    assert outputs(engine.generate([[1, 2]], [params])) == outputs(alone.generate([[1, 2]], [params]))
    assert [g for g in stream if g is not None][-1].token_ids == alone.generate([[7, 8, 9]], [params])[0].token_ids


def test_nothing_is_left_after_a_thousand_requests(heads):
    """Finished, stopped early, cancelled while waiting, reading or running, refused: all pages and slots come back, and
    what is kept does not grow."""
    drafting = ModelDrafting(model("dummy:tiny-llama?seed=4&layers=1"))
    engine = GpuEngine(
        model(SHALLOW), TEXT, (), max_slots=SLOTS, max_seq_len=LONGEST, drafting=drafting, max_draft_len=2,
        draft_len_schedule={1: 2, 4: 0}, kv_cache_config=KV["scarce reuse"],
    )  # fmt: skip
    rng, live, sizes = random.Random(3), [], []
    kinds = mixed_requests(7, 40)
    for i in range(1000):
        prompt, params = kinds[rng.randrange(40)]
        if rng.random() < 0.1:
            with pytest.raises(PromptError, match="tokens"):
                engine.open([prompt + [1] * LONGEST], [params])
            continue
        sampling = rng.choice([{}, {"temperature": 1.0}, {"stop_token_ids": list(range(0, 320, 9))}])
        live += engine.open([prompt[:100]], [SamplingParams(max_tokens=rng.randrange(1, 7), **sampling)])
        if rng.random() < 0.3:
            live.pop(rng.randrange(len(live))).close()
        if rng.random() < 0.1:
            del live[: len(live) // 2]  # dropped without a word
        if i % 3 == 2:
            engine.step()
        live = [s for s in live if not s.is_over]
        if i % 250 == 249:
            sizes.append(engine.cache.pool.findable)
    while not engine.scheduler.is_idle:
        engine.step()
    pool = engine.cache.pool
    assert nothing_is_held(engine) and max(sizes) <= len(pool.blocks) and len(engine._launched) <= 2
    pool.forget_all()
    assert pool.available == len(pool.blocks) and not pool._by_key and not pool._behind
    assert all(block.refs == 0 for block in pool.blocks)
