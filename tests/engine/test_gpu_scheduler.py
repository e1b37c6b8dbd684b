"""In-flight batching of the GPU path, run as plain torch on a CPU: whoever comes and goes, each request's text is the
one it has alone, and every page comes back."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_models import Pages, engine, gpu_model, random_ids
from stand_ins import Pieces
from tiny_heads import TARGET as DEEP
from tiny_heads import eagle_tensors, medusa_own, medusa_tensors, specforge
from torch.overrides import TorchFunctionMode

from tutorial_lib.config import (
    EagleDecodingConfig,
    KvCacheConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
)
from tutorial_lib.drafters.checkpoints import read_eagle3, read_medusa
from tutorial_lib.drafters.suffix import SuffixDrafter
from tutorial_lib.engine.drafting import ModelDrafting, NGramDrafting
from tutorial_lib.engine.gpu_engine import GpuEngine
from tutorial_lib.engine.gpu_model import PAGE, GpuModel
from tutorial_lib.engine.head_drafting import open_eagle_drafting, open_medusa_drafting
from tutorial_lib.errors import OptionError, PromptError

SLOTS, LONGEST = 6, 330
SHALLOW = "dummy:tiny-llama?seed=11&layers=1"  # its greedy texts hardly repeat
TEXT = Pieces.for_vocabulary(320)
KV = {
    "plain": None,
    "reuse": KvCacheConfig(enable_block_reuse=True),
    "scarce": KvCacheConfig(max_tokens=6 * PAGE),
    "scarce reuse": KvCacheConfig(enable_block_reuse=True, max_tokens=6 * PAGE),
}
DRAFTERS = ("none", "draft model", "self-draft", "ngram", "suffix", "eagle", "eagle tree", "medusa")
CHOICES = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]


class Exact(TorchFunctionMode):
    """Products in float64: the order of a sum, which hangs on the number of rows, shows in no float32 result."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.matmul:
            return function(args[0].double(), args[1].double()).float()
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def exact():
    with Exact():
        yield


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return specforge(folder / "eagle", eagle_tensors()), medusa_own(folder / "medusa", medusa_tensors())


def model(name: str, **options) -> GpuModel:
    return gpu_model(name, slots=SLOTS, max_seq_len=LONGEST, **options)


@pytest.fixture
def engine_of(heads):
    """engine_of(method, kv, schedule): an engine of `SLOTS` slots on a target of its own."""

    def make(method: str, kv: KvCacheConfig | None = None, schedule=None, k: int = 4, slots: int = SLOTS) -> GpuEngine:
        target = model(DEEP if "eagle" in method or method == "medusa" else SHALLOW)
        options: dict = {"max_slots": slots, "max_seq_len": LONGEST, "kv_cache_config": kv}
        if method == "suffix":
            options["host_drafter"] = SuffixDrafter(SADecodingConfig(), ())
        elif method != "none":
            eagle = {"eagle tree": {"eagle_choices": CHOICES}}.get(method, {"max_draft_len": k})
            options["drafting"] = {
                "draft model": lambda: ModelDrafting(model("dummy:tiny-llama?seed=4&layers=1")),
                "self-draft": lambda: ModelDrafting(model(SHALLOW)),
                "ngram": lambda: NGramDrafting(NGramDecodingConfig(max_matching_ngram_size=2), 320, (), "cpu"),
                "eagle": lambda: open_eagle_drafting(
                    EagleDecodingConfig(speculative_model="x", **eagle), target,
                    read_eagle3(heads[0], target.config), SLOTS,
                ),
                "medusa": lambda: open_medusa_drafting(
                    MedusaDecodingConfig(speculative_model="x", medusa_choices=CHOICES), target,
                    read_medusa(heads[1], target.config), "medusa",
                ),
            }["eagle" if "eagle" in method else method]()  # fmt: skip
        if schedule and options.get("drafting") is not None and options["drafting"].tree is not None:
            full = len(options["drafting"].tree.of_drafts)
            schedule = {size: full if n == k else 0 for size, n in schedule.items()}
        return GpuEngine(
            target, TEXT, (), max_draft_len=0 if method == "none" else k, draft_len_schedule=schedule, **options
        )

    return make


def mixed_requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 250 tokens, half of them with a common beginning of 70; all kinds of sampling and stopping."""
    rng = random.Random(seed)
    system = [rng.randrange(320) for _ in range(70)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(320) for _ in range(rng.choice([1, 2, 63, 64, 65, 150] if i % 2 else [1, 5, 58, 100]))]
        options: dict = {"max_tokens": rng.choice([1, 2, 9, 25, 40])}
        options |= rng.choice([{}, {}, {"temperature": 0.9, "seed": i}, {"temperature": 1.2, "top_k": 9, "seed": i}])
        options |= rng.choice([{}, {"stop_token_ids": list(range(0, 320, 16))}, {"stop": [" w1", " w22"]}])
        requests.append((prompt if i % 2 else system + prompt, SamplingParams(**options)))
    return requests


def longer(params: SamplingParams) -> SamplingParams:
    return SamplingParams(max_tokens=params.max_tokens + 40)


def serve(engine: GpuEngine, requests, arrivals) -> list:
    """Put every request in line at its turn; their generations."""
    opened = {}
    for turn in range(10_000):
        for i, (prompt, params) in enumerate(requests):
            if arrivals[i] == turn:
                (opened[i],) = engine._requests([prompt], [params])
                engine.submit([opened[i]])
        if len(opened) == len(requests) and engine.scheduler.is_idle:
            return [opened[i].generation() for i in range(len(requests))]
        engine.step()
    raise AssertionError("the engine does not come to an end")


def outputs(generations) -> list[list[int]]:
    return [g.token_ids for g in generations]


def nothing_is_held(engine: GpuEngine) -> bool:
    pool = engine.cache.pool
    return pool.held == 0 and sorted(engine.scheduler.free) == list(range(engine.max_slots))


MIXES = [(method, "plain") for method in DRAFTERS]
MIXES += [(method, "reuse") for method in ("self-draft", "eagle")]
MIXES += [(method, "scarce reuse") for method in ("none", "draft model", "suffix", "eagle tree")]


@pytest.mark.parametrize(("method", "kv"), MIXES)
def test_twenty_requests_in_a_mix_are_as_each_is_alone(method, kv, engine_of):
    """Arrivals, lengths, samplers and stops mixed. Where pages are scarce requests grow long and give theirs up in
    mid-text; one that samples then draws with other drafts, so there all are greedy."""
    requests = mixed_requests(len(method), 20)
    if "scarce" in kv:
        requests = [(prompt[:100], longer(params)) for prompt, params in requests[:12]]
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


# ---- joining, waiting, leaving --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("method", ["draft model", "eagle"])
def test_an_error_in_one_turn_spoils_no_other_request(method, engine_of, monkeypatch):
    """A launch fails with results on their way; those who did not ask for it are read anew and come out right."""
    engine, alone = engine_of(method), engine_of(method)
    params = SamplingParams(max_tokens=30)
    (stream,) = engine.open([[7, 8, 9]], [params])
    for _ in range(4):
        engine.step()
    launch, armed = engine._launch, [True]

    def broken(*arguments):
        if armed.pop() if armed else False:
            raise RuntimeError("stop")
        return launch(*arguments)

    monkeypatch.setattr(engine, "_launch", broken)
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


# ---- the draft length by load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in DRAFTERS if m != "none"])
def test_the_schedule_sets_k_by_active_requests(method, engine_of):
    """Down to 0 and up again: text as ever; rounds that begin at the same token with the same K are the same, however
    K came there."""
    engine = engine_of(method, schedule={1: 4, 2: 2, 4: 0})
    prompts, lengths = [[1, 2, 3] * 5, [4, 5] * 4, [6], [7, 8, 9] * 3], (60, 30, 14, 14)
    found = engine.generate(prompts, [SamplingParams(max_tokens=n) for n in lengths])
    plain = GpuEngine(engine.target, TEXT, (), max_slots=1, max_seq_len=LONGEST)
    for generation, prompt, length in zip(found, prompts, lengths, strict=True):
        assert outputs(plain.generate([prompt], [SamplingParams(max_tokens=length)])) == [generation.token_ids]
    counts = [len(r.drafted) for r in found[0].rounds]
    assert counts[0] == 0 < max(counts[19:])
    for k in {2, 4}:
        (alone,) = engine_of(method, k=k).generate(prompts[:1], [SamplingParams(max_tokens=60)])
        ours, theirs = by_start(found[0]), by_start(alone)
        shared = [at for at in ours.keys() & theirs.keys() if len(ours[at].drafted) == len(theirs[at].drafted)]
        assert all(ours[at].drafted == theirs[at].drafted for at in shared)


def by_start(generation) -> dict:
    """Rounds by how many tokens there were before them."""
    found, at = {}, 1
    for each in generation.rounds:
        found[at] = each
        at += len(each.emitted)
    return found


@pytest.mark.parametrize("kv", ["plain", "reuse"])
def test_a_draft_model_recovers_after_a_stretch_at_zero(kv, engine_of):
    """It drafts with the target's own weights: all is accepted, unless holes in its cache make it another model."""
    engine = engine_of("self-draft", KV[kv], schedule={1: 4, 2: 0})
    long, short = engine.generate([random_ids(70), [3]], [SamplingParams(max_tokens=n) for n in (60, 20)])
    assert [len(r.drafted) for r in short.rounds] == [0] * 19
    counts = [(len(r.drafted), r.accepted) for r in long.rounds]
    assert counts[:19] == [(0, 0)] * 19 and counts[20:27] == [(4, 4)] * 7


def test_a_schedule_for_a_part_of_a_tree_is_refused(engine_of, heads):
    target = model(DEEP)
    drafting = open_medusa_drafting(
        MedusaDecodingConfig(speculative_model="x", medusa_choices=CHOICES), target,
        read_medusa(heads[1], target.config), "medusa",
    )  # fmt: skip
    with pytest.raises(OptionError, match="asks for 2 of a tree's 5 tokens; needed: the whole tree, or 0"):
        GpuEngine(target, TEXT, (), max_slots=2, max_seq_len=99, drafting=drafting, draft_len_schedule={1: 5, 4: 2})


def test_more_rows_than_a_step_has_are_served_by_several_programs_a_turn(monkeypatch):
    """K = 15 for six requests are 96 rows: two programs of three requests, in every turn."""
    target, draft = (gpu_model(SHALLOW, slots=6, draft_len=15) for _ in range(2))
    made = engine(target, TEXT, draft=draft, k=15, max_slots=6)
    prompts, params = [random_ids(5 + i, seed=i) for i in range(6)], SamplingParams(max_tokens=50)
    launched, launch = [], made._launch
    monkeypatch.setattr(made, "_launch", lambda active, k: (launched.append(len(active)), launch(active, k))[1])
    found = made.generate(prompts, [params] * 6)
    assert launched[:8] == [3] * 8
    assert outputs(found) == [engine(target, TEXT).generate([p], [params])[0].token_ids for p in prompts]
    assert all((len(r.drafted), r.accepted) == (15, 15) for g in found for r in g.rounds)


# ---- pages found again ----------------------------------------------------------------------------------------------

LONG = random_ids(200, seed=9)


@pytest.mark.parametrize("method", ["none", "self-draft", "eagle"])
@pytest.mark.parametrize("shared", [0, 10, 64, 65, 150, 200])
def test_a_reused_beginning_gives_the_same_text(shared, method, engine_of, monkeypatch):
    """Every kind of place where two texts can part; at 200 the prompt is the same one. Only the rest is computed, and
    what is drafted is what a cold cache lets draft."""
    warm, cold = engine_of(method, KV["reuse"]), engine_of(method)
    prompt, params = LONG[:shared] + [(t + 1) % 320 for t in LONG[shared:]], [SamplingParams(max_tokens=20)]
    warm.generate([LONG], params)
    rows, prefill = [], warm.target.prefill
    monkeypatch.setattr(warm.target, "prefill", lambda ids, *a, **o: (rows.append(len(ids)), prefill(ids, *a, **o)))
    (found,), (expected,) = warm.generate([prompt], params), cold.generate([prompt], params)
    assert found.token_ids == expected.token_ids
    assert [(r.drafted, r.accepted) for r in found.rounds] == [(r.drafted, r.accepted) for r in expected.rounds]
    ahead = method == "eagle"  # its key of a position hangs on the token after it
    known = min(max(0, shared - ahead), 192)
    assert found.cached_tokens == known and sum(rows) == 199 - known
    assert warm.cache.pool.held == 0


def test_a_conversation_goes_on_where_it_ended(engine_of):
    """The answer of the first turn is in the cache too, whatever was drafted on the way."""
    warm, cold = engine_of("draft model", KV["reuse"]), engine_of("draft model")
    (first,) = warm.generate([LONG[:90]], [SamplingParams(max_tokens=60)])
    turn = LONG[:90] + first.token_ids + [3, 1, 4]
    (found,), (expected,) = (e.generate([turn], [SamplingParams(max_tokens=20)]) for e in (warm, cold))
    assert found.cached_tokens == 128 and found.token_ids == expected.token_ids


@pytest.mark.parametrize("method", ["draft model", "eagle"])
def test_copies_are_private(method, engine_of):
    """Requests at once on one beginning, each writing behind it, and others on what the first left."""
    warm, cold, params = engine_of(method, KV["reuse"]), engine_of(method), SamplingParams(max_tokens=24)
    prompts = [LONG[:140], [*LONG[:140], 9], [*LONG[:131], 8, 8, 8], LONG[:140], LONG[:70]]
    expected = [cold.generate([p], [params])[0].token_ids for p in prompts]
    for _ in range(3):
        assert outputs(warm.generate(prompts, [params] * 5)) == expected
    assert warm.cache.pool.held == 0


def test_an_fp8_cache_is_reused_and_given_up_as_any_other(engine_of):
    def made(kv):
        return GpuEngine(
            model(SHALLOW, weights="fp8 calibrated", cache="fp8"), TEXT, (), max_slots=SLOTS, max_seq_len=LONGEST,
            kv_cache_config=kv,
        )  # fmt: skip

    requests = [(LONG[: 70 + i], SamplingParams(max_tokens=60)) for i in (0, 3, 0, 9, 60)]
    cold, warm = made(None), made(KV["scarce reuse"])
    expected = [cold.generate([p], [q])[0].token_ids for p, q in requests]
    found = serve(warm, requests, [0, 9, 9, 9, 9])
    assert outputs(found) == expected and sum(g.preemptions for g in found) > 0
    assert [g.cached_tokens >= 64 for g in found] == [False, True, True, True, True]


# ---- a sliding window -----------------------------------------------------------------------------------------------

MISTRAL = "dummy:tiny-mistral?seed=2"  # looks back 32 tokens


@pytest.mark.parametrize("method", ["none", "draft model", "one that sees all"])
def test_pages_of_a_sliding_window_go_round(method):
    """Two pages for however long a text, as long as the drafter looks no further back; the text is that of a cache that
    keeps everything."""
    whole, prompts = Pages(model(MISTRAL)), [[7], LONG[:120], LONG]
    drafter = {"none": None, "draft model": model("dummy:tiny-mistral?seed=9&layers=1")}
    draft = drafter.get(method, model("dummy:tiny-llama?seed=4&layers=1"))
    made = engine(model(MISTRAL), TEXT, draft=draft, k=4 if draft else 0, max_slots=3, max_seq_len=LONGEST)
    assert made.cache.blocks_for(LONGEST) == (6 if method == "one that sees all" else 2)
    done = made.generate(prompts, [SamplingParams(max_tokens=100)] * 3)
    for prompt, generation in zip(prompts, done, strict=True):
        text = [*prompt, *generation.token_ids]
        choices = whole.all_logits(text[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        assert choices == generation.token_ids
    with pytest.raises(OptionError, match="sliding window"):
        engine(model(MISTRAL), TEXT, kv_cache_config=KV["reuse"])
