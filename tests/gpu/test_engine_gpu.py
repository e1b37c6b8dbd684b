"""The engine on a GPU: graphs change nothing, verification gives the logits of plain decoding, memory comes back.

Models have true shapes and few layers of random weights. Where two ways of computing differ in rounding (kernels and
plain torch, bf16 and float32), greedy texts may part at a near-tie: `same_text` then asks for the gap.
"""

from __future__ import annotations

import gc
import json
import random
from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from gpu_models import (
    PLAIN,
    Pages,
    assert_rows_keep_each_others_bits,
    engine,
    gpu_model,
    packed_dummy,
    random_ids,
    relative,
)
from stand_ins import Pieces

from tutorial_lib.config import (
    DraftTargetDecodingConfig,
    Fp8Config,
    KvCacheConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
    SimulatedAcceptance,
)
from tutorial_lib.drafters.checkpoints import Eagle3Head, Matrix, MedusaHeads
from tutorial_lib.drafters.lookahead import LookaheadDrafter
from tutorial_lib.drafters.ngram import NGramDrafter
from tutorial_lib.engine import gpu_engine, graph, head_drafting
from tutorial_lib.engine import gpu_model as gpu_model_module
from tutorial_lib.engine.drafting import OpenTree
from tutorial_lib.engine.gpu_build import assemble, plain_tactics, random_packed
from tutorial_lib.engine.gpu_model import KERNELS, PAGE, Ops
from tutorial_lib.engine.head_drafting import (
    EagleDrafting,
    EagleGrowingDrafting,
    EagleTreeDrafting,
    Growth,
    MedusaDrafting,
)
from tutorial_lib.engine.model import ModelConfig, pack
from tutorial_lib.engine.reference import FP8
from tutorial_lib.shapes import dummy_config, random_tensors

pytestmark = pytest.mark.gpu

SHAPES = {
    "70B": "dummy:llama-3.3-70b?layers=2",
    "8B": "dummy:llama-3.1-8b?layers=2",
    "1B": "dummy:llama-3.2-1b?layers=2",
    "135M": "dummy:llama-3.2-1b?layers=4&hidden=576&heads=9&kv_heads=3&intermediate=1536&vocab=49152",
}
SLOTS, MAX_SEQ_LEN, MAX_K = 4, 700, 15
TEXT = Pieces(dict.fromkeys(range(200_000), b" x"))
CHOICES = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]
GAP = {False: 0.05, True: 0.25}  # is FP8 -> of the logits' spread: what roundings on the way may turn round


def true_shape(name: str, form: str, *, ops: Ops | None = None):
    """A `GpuModel` of `SHAPES[name]`, random weights: FP8 with an FP8 cache, or bf16."""
    config, seed = dummy_config(SHAPES[name])
    shape = ModelConfig.from_hf(config)
    if form == "fp8":
        packed = random_packed(shape, "cuda", seed=seed)
    else:
        packed = pack(random_tensors(config, seed, "cuda", torch.bfloat16), shape, is_interleaved=False)
    blocks = -(-graph.position_limit(MAX_SEQ_LEN, MAX_K) // PAGE)
    return assemble(
        shape, packed, plain_tactics(), pages=SLOTS * blocks + 1, max_positions=blocks * PAGE, ops=ops or Ops.make(),
        max_sequences=SLOTS, kv_dtype=FP8 if form == "fp8" else torch.bfloat16,
    )  # fmt: skip


def decode(target, prompts, max_tokens: int = 48, params: SamplingParams | None = None, **options):
    made = engine(target, TEXT, max_slots=SLOTS, max_seq_len=MAX_SEQ_LEN, **options)
    params = params or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return made.generate(prompts, [params] * len(prompts))


def ids(generations) -> list[list[int]]:
    return [g.token_ids for g in generations]


def same_text(model, prompt, ours, theirs) -> bool:
    """Equal, or parted at two tokens whose logits `model` finds nearly the same."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is None:
        return True
    logits = Pages(model).all_logits([*prompt, *ours[:at]])[-1]
    gap = float((logits[ours[at]] - logits[theirs[at]]).abs() / logits.std())
    return gap < GAP[model.layers[0].is_fp8]


PROMPTS = [random_ids(300, 49_000), [7], random_ids(65, 49_000, seed=1)]


# ---- a token's logits do not depend on the company it is in ---------------------------------------------------------


@pytest.mark.parametrize("name", list(SHAPES))
def test_verification_gives_the_very_logits_of_plain_decoding(name, form):
    model = true_shape(name, form)
    pages, text, single = assert_rows_keep_each_others_bits(model, SLOTS)
    for _ in range(50):  # dependent launches overlap: what is read too early would differ from time to time
        assert torch.equal(pages.logits(text[300:311], 300), single[:11])
    assert not model.scratch.counter.any()


# ---- kernels against plain torch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SHAPES))
def test_logits_equal_those_of_plain_torch(name, form):
    model = true_shape(name, form)
    text = random_ids(150, model.config.vocab_size)
    ours = Pages(model).all_logits(text, [64, 1, 11, 64, 10])
    model.ops = PLAIN
    assert relative(ours, Pages(model).all_logits(text, [64, 1, 11, 64, 10])) < (0.1 if form == "fp8" else 0.02)


@pytest.mark.parametrize(
    "name", ["dummy:tiny-llama?seed=5", "dummy:tiny-qwen2", "dummy:tiny-qwen3", "dummy:tiny-mistral"]
)
def test_every_family_against_the_cpu(name, form):
    """Same weights: kernels on the GPU, plain torch on the CPU. With heads of 16 and 32, biases, norms, a window."""
    options = {"weights": "fp8 calibrated"} if form == "fp8" else {}
    if form == "fp8" and "qwen3" in name:  # heads of 32: with fewer, kernels refuse an FP8 cache
        options["cache"] = "fp8"
    text = random_ids(100)
    ours = Pages(gpu_model(name, device="cuda", ops=Ops.make(), tactics=plain_tactics(), **options)).all_logits(text)
    theirs = Pages(gpu_model(name, **options)).all_logits(text)
    assert relative(ours.cpu(), theirs) < (0.15 if form == "fp8" else 0.02)


@pytest.mark.parametrize("off", [*KERNELS, "all"])
def test_each_kernel_switched_off_gives_the_same_text(off, form):
    plain = ids(decode(true_shape("1B", form), PROMPTS))
    model = true_shape("1B", form, ops=Ops.make(off=[off]))
    for prompt, ours, theirs in zip(PROMPTS, ids(decode(model, PROMPTS)), plain, strict=True):
        assert same_text(model, prompt, ours, theirs)


def test_without_dependent_launches_the_text_is_the_same(form):
    with_them, without = (decode(true_shape("1B", form, ops=Ops.make(pdl=pdl)), PROMPTS) for pdl in (None, False))
    assert ids(with_them) == ids(without)


# ---- graphs and rounds ----------------------------------------------------------------------------------------------


HEADS = ("eagle", "eagle tree", "eagle dynamic", "medusa")


def random_heads(method: str, target):
    """(drafting, tokens it drafts) with random heads in the target's shape: one of `HEADS`."""
    shape, generator = target.config, torch.Generator().manual_seed(3)
    width, inner, ids = shape.hidden_size, 2 * shape.hidden_size, torch.arange(0, shape.vocab_size, 7)

    def matrix(rows: int, columns: int) -> Matrix:
        return Matrix(torch.randn(rows, columns, generator=generator) * 2 / columns**0.5)

    if method == "medusa":
        blocks = ((torch.randn(4, width, width, generator=generator) * 2 / width**0.5, torch.zeros(4, width)),)
        heads = MedusaHeads(4, blocks, (), ids, None, False)
        return MedusaDrafting(heads, target, CHOICES), len(CHOICES)
    one = torch.ones(width)
    attended = shape.num_heads * shape.head_dim
    head = Eagle3Head(
        replace(shape, num_layers=1, intermediate_size=inner), (0, 1, shape.num_layers), False,
        matrix(width, 3 * width), matrix(shape.qkv_rows, 2 * width), matrix(width, attended), matrix(2 * inner, width),
        matrix(width, inner),
        one, one, one, one, None, None, ids,
    )  # fmt: skip
    if method == "eagle dynamic":
        return EagleGrowingDrafting(head, target, Growth(3, 4, 10), max_sequences=SLOTS), 10
    if method == "eagle tree":
        return EagleTreeDrafting(head, target, CHOICES, max_sequences=SLOTS), len(CHOICES)
    return EagleDrafting(head, target, max_sequences=SLOTS), 5


def lookahead() -> dict:
    drafter = LookaheadDrafter(LookaheadDecodingConfig(), ())
    return {"host": drafter, "host_tree": OpenTree(drafter.max_tokens, drafter.max_depth, "cuda")}


def with_heads(method: str, target, prompts, params):
    drafting, k = random_heads(method, target)
    made = gpu_engine.GpuEngine(
        target, TEXT, (), max_slots=SLOTS, max_seq_len=MAX_SEQ_LEN, drafting=drafting, max_draft_len=k
    )
    return [made.generate(batch, [params] * len(batch)) for batch in prompts]


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("name", ["135M", "8B"])
def test_heads_draft_as_plain_torch_does_and_change_no_text(name, method):
    """Greedy and sampled, alone and in an uneven batch; drafts of the first rounds against the same without kernels."""
    target = true_shape(name, "bf16")
    for sampling in ({}, {"temperature": 0.8, "seed": 5}):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
        plain = ids(decode(target, PROMPTS[:1], params=params))
        (alone, batch, again) = with_heads(method, target, (PROMPTS[:1], PROMPTS, PROMPTS[:1]), params)
        assert ids(alone) == ids(again)
        if method == "eagle":
            assert ids(alone) == plain
        for done in (alone, batch):  # a branch's keys lie elsewhere than a chain's: sums may round differently
            assert sampling or same_text(target, PROMPTS[0], done[0].token_ids, plain[0])
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    (ours,) = with_heads(method, true_shape(name, "bf16"), (PROMPTS,), params)
    (theirs,) = with_heads(method, true_shape(name, "bf16", ops=PLAIN), (PROMPTS,), params)
    same = count = 0
    for left, right in zip(ours, theirs, strict=True):
        for mine, other in zip(left.rounds[:2], right.rounds[:2], strict=False):
            own, its = (Counter(zip(r.drafted, r.depths, strict=True)) for r in (mine, other))
            same, count = same + (own & its).total(), count + own.total()
            assert own.total() == its.total()
    # with random weights some logits are all but equal; what a tree grows below such a choice differs with it
    assert same > (0.7 if method == "eagle dynamic" else 0.8) * count > 10


@pytest.mark.parametrize("method", HEADS)
def test_graphs_and_eager_rounds_of_heads_give_the_same_ids(method, monkeypatch):
    """Batches of 1, 3 (in a bucket of 4) and 2 on one engine, with drafts that are accepted now and then: the target
    repeats itself. Rounds too, so the same was drafted and accepted."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    def rounds():
        done = with_heads(method, true_shape("135M", "bf16"), (PROMPTS[:1], PROMPTS, PROMPTS[1:]), params)
        return [[(r.drafted, r.parents, r.path, r.emitted) for r in g.rounds] for batch in done for g in batch]

    captured = rounds()
    for module in (graph, gpu_model_module, head_drafting):
        monkeypatch.setattr(module, "captured", lambda run: SimpleNamespace(replay=run))
    assert rounds() == captured


@pytest.mark.parametrize("method", ["plain", "self-draft", "ngram", "lookahead"])
def test_graphs_and_eager_rounds_give_the_same_ids(method, form, monkeypatch):
    """Batches of 1, 3 (in a bucket of 4) and 2, on one engine: programs are captured, then used again."""

    def options():
        if method == "self-draft":
            return {"draft": true_shape("1B", form), "k": 5}
        if method == "lookahead":
            return lookahead()
        return {"host": NGramDrafter(NGramDecodingConfig(max_draft_len=5), ()), "k": 5} if method == "ngram" else {}

    def texts():
        made = engine(true_shape("1B", form), TEXT, max_slots=SLOTS, max_seq_len=MAX_SEQ_LEN, **options())
        batches = (PROMPTS[:1], PROMPTS, PROMPTS[1:], PROMPTS)
        return [ids(made.generate(b, [SamplingParams(max_tokens=30, ignore_eos=True)] * len(b))) for b in batches]

    captured = texts()
    assert captured[1] == captured[3]
    for module in (graph, gpu_model_module):
        monkeypatch.setattr(module, "captured", lambda run: SimpleNamespace(replay=run))
    assert texts() == captured


@pytest.mark.parametrize("k", [4, 15])
@pytest.mark.parametrize("name", ["70B", "8B", "135M"])
def test_greedy_speculation_is_plain_decoding(name, k, form):
    target = true_shape(name, form)
    plain = decode(target, PROMPTS[:1])
    own = decode(target, PROMPTS[:1], draft=true_shape(name, form), k=k)
    assert ids(own) == ids(plain)
    assert all(r.accepted == len(r.drafted) == k for r in own[0].rounds)  # a drafter that is the target
    assert all(r.draft_s > 0 and r.verify_s > 0 for r in own[0].rounds)
    ngram = decode(target, PROMPTS[:1], host=NGramDrafter(NGramDecodingConfig(max_draft_len=k), ()), k=k)
    assert ids(ngram) == ids(plain)


@pytest.mark.parametrize("name", ["8B", "135M"])
def test_trees_from_the_host_change_no_text(name, form):
    """Lookahead, alone and in an uneven batch, greedy and sampled. A branch's keys lie elsewhere than a chain's, and
    batches have other row counts: greedy texts may part at a near-tie."""
    target = true_shape(name, form)
    plain = decode(target, PROMPTS)
    made = engine(target, TEXT, max_slots=SLOTS, max_seq_len=MAX_SEQ_LEN, **lookahead())
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    for prompts in (PROMPTS[:1], PROMPTS):
        for prompt, ours, theirs in zip(prompts, made.generate(prompts, [params] * len(prompts)), plain, strict=False):
            assert same_text(target, prompt, ours.token_ids, theirs.token_ids)
            assert any(r.parents and len(r.drafted) > r.depth for r in ours.rounds)
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
    sampled = made.generate(PROMPTS, [params] * 3)
    assert ids(sampled) == ids(made.generate(PROMPTS, [params] * 3))


@pytest.mark.parametrize("draft_form", ["bf16", "fp8"])
def test_another_model_as_drafter_in_an_uneven_batch(draft_form, form):
    """Number formats of their own; a batch of three beside each prompt alone. Its batches have other row counts than
    plain decoding has, so texts may part at a near-tie."""
    if draft_form == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no FP8 units")
    target, draft = true_shape("8B", form), true_shape("1B", draft_form)
    plain = ids(decode(target, PROMPTS))
    for prompts in (PROMPTS, *([p] for p in PROMPTS)):
        for prompt, ours in zip(prompts, ids(decode(target, prompts, draft=draft, k=7)), strict=True):
            assert same_text(target, prompt, ours, plain[PROMPTS.index(prompt)])


def test_a_seed_decides_the_text_alone_and_in_a_batch():
    target, draft = true_shape("135M", "bf16"), true_shape("135M", "bf16")
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5)
    batch = decode(target, PROMPTS, params=params, draft=draft, k=4)
    assert ids(decode(target, PROMPTS, params=params, draft=draft, k=4)) == ids(batch)
    for prompt, together in zip(PROMPTS, batch, strict=True):
        assert ids(decode(target, [prompt], params=params, draft=draft, k=4)) == [together.token_ids]
        assert all(r.accepted == len(r.drafted) for r in together.rounds)  # q equals p


def test_two_streams_and_timing_side_by_side():
    """Rounds in flight for one stream while another one runs, and while a step is timed."""
    target, draft = true_shape("135M", "bf16"), true_shape("135M", "bf16")
    expected = ids(decode(target, PROMPTS[:2], draft=draft, k=3))
    made = engine(target, TEXT, draft=draft, k=3, max_slots=SLOTS, max_seq_len=MAX_SEQ_LEN)
    assert min(made.time_steps([1, 11], context=300, repeats=3).values()) > 0
    streams = [made.stream(p, SamplingParams(max_tokens=48, ignore_eos=True)) for p in PROMPTS[:2]]
    for _ in range(3):
        for stream in streams:
            next(stream)
    assert min(made.time_steps([1, 11], context=300, repeats=3).values()) > 0
    assert made.time_draft(3, context=300, repeats=3) > 0
    assert [list(s)[-1].token_ids for s in streams] == expected


# ---- in-flight batching ---------------------------------------------------------------------------------------------


def drafting_of(method: str, target, form: str) -> dict:
    """Options of `engine` that make it draft so."""
    if method == "self-draft":
        return {"draft": true_shape("135M", form), "k": 4}
    return {"drafting": random_heads("eagle", target)[0], "k": 4} if method == "eagle" else {}


def serve(made, requests, every: int = 2) -> list:
    """The generations of (prompt, max_tokens), one more put in line every so many turns."""
    streams = []
    for prompt, count in requests:
        streams += made.open([prompt], [SamplingParams(max_tokens=count, ignore_eos=True)])
        for _ in range(every):
            made.step()
    while not made.scheduler.is_idle:
        made.step()
    assert made.cache.pool.held == 0 and len(made.scheduler.free) == made.max_slots
    return [stream.generation() for stream in streams]


MIX = [
    (random_ids(n, 49_000, seed=n), 20 + 7 * (i % 5)) for i, n in enumerate((1, 2, 64, 65, 300, 130, 63, 7, 200, 90))
]


@pytest.mark.parametrize("method", ["none", "self-draft", "eagle"])
def test_requests_that_come_and_go_have_their_own_text(method, form):
    """Arrivals and ends mixed, K by load down to 0 and up again, on graphs of every bucket; pages are scarce."""
    if method == "eagle" and form == "fp8":
        pytest.skip("its outputs are those of the target's bf16 head")
    target = true_shape("135M", form)
    options = drafting_of(method, target, form)
    schedule = {1: 4, 2: 2, 4: 0} if options else None
    made = engine(
        target, TEXT, max_slots=SLOTS, max_seq_len=MAX_SEQ_LEN, draft_len_schedule=schedule,
        kv_cache_config=KvCacheConfig(max_tokens=12 * PAGE), **options,
    )  # fmt: skip
    found = serve(made, MIX)
    alone = [decode(true_shape("135M", form), [prompt], count)[0] for prompt, count in MIX]
    for (prompt, _), ours, theirs in zip(MIX, found, alone, strict=True):
        assert len(ours.token_ids) == len(theirs.token_ids)
        assert same_text(target, prompt, ours.token_ids, theirs.token_ids)
    if options:
        assert {0, 2, 4} <= {len(r.drafted) for g in found for r in g.rounds}
    if method == "self-draft":  # whatever was decoded without it, it has read before it drafts again
        rounds = [r for g in found for r in g.rounds]
        assert sum(r.accepted for r in rounds) > 0.97 * sum(len(r.drafted) for r in rounds)


@pytest.mark.parametrize("method", ["none", "self-draft", "eagle"])
def test_a_shared_beginning_is_read_once(method, form, monkeypatch):
    """Its pages hold the drafter's keys too: drafts are accepted as by a cold cache. The text parts in mid-page."""
    if method == "eagle" and form == "fp8":
        pytest.skip("its outputs are those of the target's bf16 head")
    target = true_shape("135M", form)
    options = drafting_of(method, target, form)
    limits = {"max_slots": SLOTS, "max_seq_len": MAX_SEQ_LEN}
    made = engine(target, TEXT, kv_cache_config=KvCacheConfig(enable_block_reuse=True), **limits, **options)
    rows, run = [], gpu_model_module.FixedStep.run

    def counted(step, ids, at):
        rows.append(len(ids) if step.model is target else 0)
        run(step, ids, at)

    monkeypatch.setattr(gpu_model_module.FixedStep, "run", counted)
    prompts = [random_ids(300, 49_000), [*random_ids(280, 49_000), *random_ids(20, 49_000, seed=1)]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first, second, again = (made.generate([p], [params])[0] for p in (*prompts, prompts[0]))
    assert sum(rows) == 300 + 20 + (method == "eagle") + 300 - again.cached_tokens and first.cached_tokens == 0
    expected = 280 - (method == "eagle")
    assert second.cached_tokens == min(expected, 256 + 63) and again.cached_tokens >= 256
    cold_target = true_shape("135M", form)
    cold = engine(cold_target, TEXT, **limits, **drafting_of(method, cold_target, form))
    for prompt, ours in zip((*prompts, prompts[0]), (first, second, again), strict=True):
        (theirs,) = cold.generate([prompt], [params])
        assert same_text(cold_target, prompt, ours.token_ids, theirs.token_ids)
        if ours.token_ids == theirs.token_ids:
            accepted = [sum(r.accepted for r in g.rounds) for g in (ours, theirs)]
            assert abs(accepted[0] - accepted[1]) <= 0.1 * accepted[1] + 1


def test_sixty_four_requests_in_one_round():
    """K = 0 at 64 rows, K = 3 in several programs a turn, and back to a single request."""
    shape = {"device": "cuda", "ops": Ops.make(), "tactics": plain_tactics(), "slots": 64}
    target, draft = (gpu_model("dummy:tiny-llama?seed=5", **shape) for _ in range(2))
    prompts = [random_ids(3 + i % 9, seed=i) for i in range(64)]
    params = [SamplingParams(max_tokens=12 + 2 * (i == 0) * 20, ignore_eos=True) for i in range(64)]
    alone = engine(target, TEXT, max_slots=1)
    expected = [alone.generate([p], [q])[0].token_ids for p, q in zip(prompts, params, strict=True)]
    for schedule in (None, {1: 3, 2: 0}):
        made = engine(target, TEXT, draft=draft, k=3, max_slots=64, draft_len_schedule=schedule)
        found = made.generate(prompts, params)
        assert all(same_text(target, p, g.token_ids, e) for p, g, e in zip(prompts, found, expected, strict=True))
        assert [len(r.drafted) for r in found[0].rounds][-3:] == [3] * 3
        assert made.cache.pool.held == 0


def test_pages_of_a_sliding_window_go_round(form):
    name = "dummy:tiny-mistral?seed=2"  # looks back 32 tokens: two pages, however long the text
    options = {"device": "cuda", "ops": Ops.make(), "tactics": plain_tactics(), "max_seq_len": 330}
    if form == "fp8":
        options["weights"] = "fp8"
    target, whole = gpu_model(name, **options), gpu_model(name, **options)
    made = engine(target, TEXT, draft=gpu_model(name, **options), k=4, max_seq_len=330)
    assert made.cache.blocks_for(330) == 2
    prompts = [[7], random_ids(120), random_ids(200)]
    for prompt, done in zip(prompts, made.generate(prompts, [SamplingParams(max_tokens=100)] * 3), strict=True):
        text = [*prompt, *done.token_ids]
        choices = Pages(whole).all_logits(text[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        assert same_text(whole, prompt, done.token_ids, choices)


def test_pages_and_slots_come_back():
    """Ended, stopped, cancelled at any time, dropped without a word."""
    shape = {"device": "cuda", "ops": Ops.make(), "tactics": plain_tactics()}
    made = engine(
        gpu_model("dummy:tiny-llama?seed=5", **shape), TEXT, draft=gpu_model("dummy:tiny-llama?seed=4", **shape), k=2,
        draft_len_schedule={1: 2, 4: 0}, kv_cache_config=KvCacheConfig(enable_block_reuse=True, max_tokens=6 * PAGE),
    )  # fmt: skip
    generator, live = random.Random(0), []
    for i in range(300):
        kind = generator.choice([{}, {"temperature": 0.9}, {"stop_token_ids": list(range(0, 320, 9))}])
        prompt = random_ids(generator.choice((1, 5, 70, 100)), seed=i % 7)
        live += made.open([prompt], [SamplingParams(max_tokens=generator.randint(1, 9), **kind)])
        if generator.random() < 0.3:
            live.pop(generator.randrange(len(live))).close()
        if generator.random() < 0.1:
            del live[: len(live) // 2]
        made.step()
    while not made.scheduler.is_idle:
        made.step()
    assert made.cache.pool.held == 0 and sorted(made.scheduler.free) == list(range(5))


def test_forced_acceptance():
    target, draft = true_shape("1B", "bf16"), true_shape("1B", "bf16")
    forced = SimulatedAcceptance(acceptance_length=2.5)
    (done,) = decode(target, PROMPTS[:1], 101, draft=draft, k=4, simulated_acceptance=forced)
    lengths = [len(r.emitted) for r in done.rounds[:-1]]
    assert done.is_simulated and abs(sum(lengths) - 2.5 * len(lengths)) <= 1


# ---- from a checkpoint to text, and back to an empty GPU ------------------------------------------------------------

SMALL = "dummy:llama-3.2-1b?layers=2&hidden=512&vocab=2000"


def test_build_load_generate(form, cache):
    """The whole way, tuned kernels and all; the second load builds nothing. The drafter is the target itself."""
    from tutorial_lib import LLM

    said: list[str] = []
    options = {"dtype": {"bf16": "bfloat16", "fp8": "fp8"}[form], "max_batch_size": 2, "say": said.append}
    options["kv_cache_config"] = KvCacheConfig(dtype="fp8") if form == "fp8" else None
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(SMALL, **options) as llm:
        plain = llm.generate([[1, 2, 3], [9] * 70], params)
        assert llm.info["device"] == "cuda" and llm.info["tactics"]["qkv"].keys() >= {"1", "16", "64"}
    assert any("building" in line for line in said)
    said.clear()
    config = DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir=SMALL)
    with LLM(SMALL, speculative_config=config, **options) as llm:
        own = llm.generate([[1, 2, 3], [9] * 70], params)
        assert not any("building" in line for line in said)
    assert ids(own) == ids(plain)
    assert all(r.accepted == 4 for g in own for r in g.rounds)
    with LLM(SMALL, kernels_off=["attention", "linear"], **options) as llm:
        assert len(llm.generate([1, 2, 3], params).token_ids) == 40


@pytest.mark.parametrize("fp8", [Fp8Config(activation_scales="dynamic"), Fp8Config(quantize_head=True)])
def test_every_form_of_fp8_builds_and_speculates_as_it_decodes(fp8, cache, tmp_path):
    from tutorial_lib import LLM, build

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no FP8 units")
    path = build(SMALL, tmp_path / "engine", dtype="fp8", fp8=fp8, max_batch_size=2, say=lambda line: None)
    assert json.loads((path / "engine.json").read_text())["fp8"] == asdict(fp8)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(str(path)) as llm:
        plain, model = llm.generate([[1, 2, 3], [9] * 70], params), llm._backend.engine.target
        assert (model.head.scale is not None) is fp8.quantize_head
        assert (model.layers[0].down_in is None) is (fp8.activation_scales == "dynamic")
    with LLM(str(path), speculative_config=NGramDecodingConfig(max_draft_len=4)) as llm:
        assert ids(llm.generate([[1, 2, 3], [9] * 70], params)) == ids(plain)


def test_closing_frees_the_memory(cache):
    """Load, generate, close, five times in one process: what is held afterwards is what was held before."""
    from tutorial_lib import LLM

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # the build times cuBLAS, whose workspaces belong to the process
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    config = DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir=SMALL)
    before, after, inside = held(), [], 0
    for _ in range(5):
        llm = LLM(SMALL, dtype="bfloat16", speculative_config=config)
        llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=12))
        inside = torch.cuda.memory_allocated()
        llm.close()  # the closed object itself may live on, as a notebook's variable does
        after.append(held())
    used = inside - before
    assert used > 20 * 2**20
    assert all(now - before < 0.05 * used for now in after), (before, after, inside)


def test_the_embedded_pair():
    """Real weights: speculation in bf16 gives the plain text, and logits follow those of the float32 engine."""
    from tutorial_lib import LLM
    from tutorial_lib.embedded import TARGET_FOLDER, cache_dir

    if not list((cache_dir() / "models").glob(f"{TARGET_FOLDER}-*/model.safetensors")):
        pytest.skip("embedded:target is not in the cache: run `workbook fetch` first")
    params = SamplingParams(max_tokens=64)
    prompts = ["Explain why the sky is blue.", "List three colours.", "def fibonacci(n):"]
    with LLM("embedded:target", max_batch_size=4) as llm:
        plain = llm.generate(prompts, params)
        target, tokens = llm._backend.engine.target, llm.tokenizer(prompts[0]).input_ids
        ours = Pages(target).all_logits(tokens).cpu()
    config = DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir="embedded:draft")
    for method in (config, NGramDecodingConfig(max_draft_len=4)):
        with LLM("embedded:target", max_batch_size=4, speculative_config=method) as llm:
            for prompt, expected in zip(prompts, plain, strict=True):
                done, target = llm.generate(prompt, params), llm._backend.engine.target
                both = zip(done.token_ids, expected.token_ids, strict=False)
                at = next((i for i, (a, b) in enumerate(both) if a != b), None)
                shared = len(expected.token_ids) if at is None else at + 1
                start = llm.tokenizer(prompt).input_ids
                assert same_text(target, start, done.token_ids[:shared], expected.token_ids[:shared])
            if method is config:
                rounds = [r for p in prompts for r in llm.generate(p, params).rounds]
                assert sum(r.accepted for r in rounds) / len(rounds) > 0.5
    with LLM("embedded:target", device="cpu", max_batch_size=1) as llm:
        from tutorial_lib.engine.model import Segment

        model = llm._backend.engine.target
        theirs = model.logits(model.forward(tokens, [Segment(0, 0, len(tokens))]))
    assert relative(ours, theirs) < 0.05


def test_a_prefill_of_many_steps_equals_single_steps():
    config, packed = packed_dummy("dummy:tiny-llama?seed=5", "cuda")
    options = {"pages": 12, "max_positions": 640, "ops": Ops.make()}
    model = assemble(config, packed, plain_tactics(), **options)
    text = random_ids(500)
    expected = Pages(model).all_logits(text, [1] * 500)[-1:]
    pages = Pages(model)
    model.prefill(text[:-1], pages.table, 0)
    assert relative(pages.logits(text[-1:], 499), expected) < 0.02
