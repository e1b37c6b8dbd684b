"""The whole-step kernel's own source, run on a CPU by an emulated machine, against the same model in plain torch."""

from __future__ import annotations

import pytest
import torch
from emulated_kernel import EmulatedKernel, emulated
from gpu_engines import TEXT, outputs
from gpu_models import Pages, engine, gpu_model, random_ids, relative

from tutorial_lib.config import SamplingParams
from tutorial_lib.engine.drafting import DeviceTree
from tutorial_lib.engine.gpu_model import PAGE, Weight
from tutorial_lib.engine.reference import FP8_MAX, to_fp8
from tutorial_lib.engine.stream import steps
from tutorial_lib.engine.stream.clock import timed
from tutorial_lib.engine.stream.launch import LaunchShape, StreamError
from tutorial_lib.show.timeline import timeline_table

PROMPT = 70  # tokens: more than a page
TINY = "dummy:tiny-llama?seed=5"
WIDE = "dummy:tiny-llama?hidden=512&heads=8&kv_heads=1&head_dim=128&intermediate=1024&layers=1"

# name, weights, cache, blocks: groups of 16 and of 64, even and uneven shares, blocks without any
MODELS = {
    "llama": (TINY, "bf16", "bf16", 5),
    "llama fp8": (TINY, "fp8 calibrated", "fp8", 3),
    "qwen2": ("dummy:tiny-qwen2", "bf16", "fp8", 2),
    "qwen3": ("dummy:tiny-qwen3", "fp8 calibrated", "bf16", 6),
    "mistral": ("dummy:tiny-mistral", "bf16", "bf16", 3),
    "wide": (WIDE, "fp8 calibrated", "bf16", 2),
}


def pair(which: str, *, has_fp8_head: bool = False, **options):
    name, weights, cache, blocks = MODELS[which]
    plain = gpu_model(name, weights=weights, cache=cache)
    own = gpu_model(name, weights=weights, cache=cache)
    if has_fp8_head:
        scale = own.head.data.float().abs().amax(1) / FP8_MAX
        plain.head = own.head = Weight(to_fp8(own.head.data, scale[:, None]), scale)
    return plain, emulated(own, blocks, **options)


def prompted(models, text):
    """Pages of each model, which hold the first `PROMPT` tokens."""
    pages = [Pages(model, [3, 1, 4, 0, 2]) for model in models]
    models[0].prefill(text[:PROMPT], pages[0].table, 0)
    for model in models[1:]:
        model.cache.copy_(models[0].cache)
    return pages


def places(model, pages, positions):
    """bool [pages, 2, kv_heads, PAGE]: which of a layer's cache hold the positions of a text."""
    found = torch.zeros(model.cache.shape[1:5], dtype=torch.bool)
    for position in positions:
        found[pages.table[0, position // PAGE], :, :, position % PAGE] = True
    return found


@pytest.mark.parametrize(
    ("which", "has_fp8_head"), [*((which, False) for which in MODELS), ("llama", True), ("llama fp8", True)]
)
def test_a_step_is_that_of_plain_torch(which, has_fp8_head):
    """Logits and what it leaves in the cache; 1 row, and as many as one launch holds."""
    plain, own = pair(which, has_fp8_head=has_fp8_head, rows=(2, 16))
    text = random_ids(PROMPT + 16)
    theirs, ours = prompted([plain, own], text)
    before = plain.cache.clone()
    for rows in (1, 16):
        for model in (plain, own):
            model.cache.copy_(before)
        expected, found = (pages.logits(text[PROMPT : PROMPT + rows], PROMPT) for pages in (theirs, ours))
        assert relative(found, expected) < 0.03
        assert relative(own.cache.float(), plain.cache.float()) < 0.02
        rest = ~places(own, ours, range(PROMPT, PROMPT + rows))
        assert torch.equal(own.cache.float()[:, rest], before.float()[:, rest]), "nothing else is rewritten"
        own.check(own.trouble.tolist())


@pytest.mark.parametrize("which", ["llama", "llama fp8", "qwen3", "wide"])
def test_a_row_has_the_same_bits_whatever_kernel_and_rows_are_beside_it(which):
    own = pair(which, rows=(2, 4, 16))[1]
    text = random_ids(PROMPT + 16)
    pages = prompted([own], text)[0]
    before = own.cache.clone()
    every = pages.logits(text[PROMPT:], PROMPT).clone()
    after = own.cache.clone()
    own.cache.copy_(before)
    for row, rows in ((0, 1), (1, 2), (3, 4)):
        some = pages.logits(text[PROMPT + row : PROMPT + row + rows], PROMPT + row)
        assert torch.equal(some, every[row : row + rows]), (row, rows)
    written = places(own, pages, range(PROMPT, PROMPT + 7))
    assert torch.equal(own.cache.float()[:, written], after.float()[:, written])


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_a_long_text_whose_pages_a_lane_merges_several_of(cache):
    """20 pages: each of the 8 lanes that merge a head's pages has two or three of them."""
    options = {"cache": cache, "slots": 1, "max_seq_len": 1300}
    plain, own = gpu_model(TINY, **options), emulated(gpu_model(TINY, **options), 5)
    text = random_ids(1260)
    theirs, ours = Pages(plain), Pages(own)
    theirs.all_logits(text[:1255])
    own.cache.copy_(plain.cache)
    expected, found = (pages.logits(text[1255:], 1255) for pages in (theirs, ours))
    assert relative(found, expected) < 0.01


def test_more_pages_than_a_block_looks_up_at_once():
    text = random_ids(190)
    found = []
    for known in (16, 1):
        own = pair("llama", rows=(16,), KNOWN_UNITS=known)[1]
        pages = Pages(own, [3, 1, 4, 0, 2])
        own.prefill(text[:185], pages.table, 0)
        found.append(pages.logits(text[185:], 185).clone())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "macros", [{}, {"SHAPE_QKV_STREAMED": 1, "SHAPE_GATE_UP_STREAMED": 1, "SHAPE_HEAD_STREAMED": 1}]
)
def test_threads_may_go_on_in_any_order_and_inputs_may_come_either_way(macros):
    text, found = random_ids(PROMPT + 5), []
    for seed in range(3):
        own = pair("llama", rows=(16,), seed=100 * seed, STAGES=3, SLOT_BYTES=20480 + 16384, **macros)[1]
        pages = prompted([own], text)[0]
        found.append(pages.logits(text[PROMPT:], PROMPT).clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    plain = gpu_model(TINY)
    assert relative(found[0], prompted([plain], text)[0].logits(text[PROMPT:], PROMPT)) < 0.01


@pytest.mark.parametrize("which", ["llama", "mistral", "llama fp8"])
def test_a_tree_and_its_branches_alone(which):
    plain, own = pair(which)
    text = random_ids(PROMPT + 7)
    theirs, ours = prompted([plain, own], text)
    before = plain.cache.clone()
    rows = DeviceTree([-1, 0, 0, 1, 1, 2, 5], "cpu").over(1)
    tree = (rows.mask, rows.depths)
    found = ours.logits(text[PROMPT:], PROMPT, tree=tree).clone()
    assert relative(found, theirs.logits(text[PROMPT:], PROMPT, tree=tree)) < 0.03
    for branch in ([0, 1, 3], [0, 2, 5, 6]):
        own.cache.copy_(before)
        alone = ours.logits([text[PROMPT + row] for row in branch], PROMPT)
        assert relative(found[branch], alone) < 0.03


@pytest.mark.parametrize("has_ids", [False, True])
def test_a_draft_in_one_launch_is_the_draft_of_many(has_ids):
    own = pair("llama", rows=(2, 4, 16))[1]
    text, lengths = random_ids(40), (70, 12)
    pages = Pages(own, range(6), sequences=2)
    for slot, length in enumerate(lengths):
        own.prefill(random_ids(length, seed=slot), pages.table, slot)
    ids = torch.arange(319, -1, -1) if has_ids else None
    before = own.cache.clone()
    starts, slots = (torch.tensor(values, dtype=torch.int32) for values in (lengths, (0, 1)))
    damage, words = torch.zeros(1, dtype=torch.int32), torch.tensor(text[:4], dtype=torch.int32)
    limit = 320 if has_ids else 200
    expected, tokens = [], words
    for i in range(5):
        rows = 2 if i == 0 else 1
        logits = own.choose(
            tokens, pages.table, starts if i == 0 else starts + 1 + i, slots, rows,
            torch.zeros(2 * rows, dtype=torch.int32), damage=damage,
        )  # fmt: skip
        best = logits[rows - 1 :: rows, :limit].argmax(-1)
        tokens = (best if ids is None else ids[best]).int()
        expected.append(tokens)
    own.cache.copy_(before)
    out = torch.full((2, 6), -1, dtype=torch.int32)
    own.draft_chain(words.view(2, 2), pages.table, starts, slots, out[:, 1:], ids=ids, vocab_size=limit)
    assert out[:, 1:].t().tolist() == [each.tolist() for each in expected] and (out[:, 0] == -1).all()
    own.check(own.trouble.tolist())


def test_text_of_an_engine_is_that_of_the_other_path():
    """Several requests, a draft model, everything by the emulated kernel; bf16, so a near tie may part texts."""
    prompts = [random_ids(n, seed=n) for n in (3, 40, 66)]
    params = [SamplingParams(max_tokens=6, ignore_eos=True)] * 3
    target, draft = gpu_model(TINY), gpu_model("dummy:tiny-llama?seed=4&layers=1")
    plain = outputs(engine(target, TEXT).generate(prompts, params))
    own = emulated(gpu_model(TINY), 4)
    alone = outputs(engine(own, TEXT).generate(prompts, params))
    with_drafts = outputs(engine(own, TEXT, draft=emulated(draft, 3, rows=(4, 16)), k=3).generate(prompts, params))
    assert alone == with_drafts
    assert sum(a == b for a, b in zip(alone, plain, strict=True)) >= 2


def test_what_the_memory_held_before_does_not_matter():
    plain, own = pair("llama", rows=(16,))
    text = random_ids(PROMPT + 5)
    theirs, ours = prompted([plain, own], text)
    start = own.cache.clone()
    expected = ours.logits(text[PROMPT:], PROMPT).clone()
    scratch = own.steps._constants["scratch"]
    for fill in (0x7F, 0xFF):
        own.cache.copy_(start)
        own.cache.view(torch.uint8)[:, ~places(own, ours, range(PROMPT))] = fill
        scratch.fill_(fill)
        assert torch.equal(ours.logits(text[PROMPT:], PROMPT), expected)


def test_logits_that_are_no_numbers_are_told_and_equal_ones_choose_the_first():
    own = pair("llama", rows=(16,))[1]
    text = random_ids(PROMPT + 4)
    pages = prompted([own], text)[0]
    damage, best = torch.zeros(2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    tokens = torch.tensor(text[PROMPT:], dtype=torch.int32)
    start, slot = torch.tensor([PROMPT, PROMPT], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    head = own.steps.weights.matrices[-1][0]
    kept = head.clone()
    head.zero_()
    own.choose(tokens, pages.table, start, slot, 2, best, damage=damage, needs_logits=False)
    assert best.tolist() == [0, 0, 0, 0] and not damage.any()
    head.copy_(kept)
    own.embed[tokens[3].long()] = float("nan")
    own.choose(tokens, pages.table, start, slot, 2, best, damage=damage, needs_logits=False)
    assert damage.tolist() == [0, 1]


def test_a_block_that_never_comes_ends_the_launch_and_later_ones_return_at_once():
    own = pair("llama", rows=(16,))[1]
    kernel = own.steps.kernels[16]
    assert isinstance(kernel, EmulatedKernel)
    kernel.shape = LaunchShape(kernel.shape.grid - 1, 640, 0)
    text = random_ids(PROMPT + 2)
    pages = prompted([own], text)[0]
    pages.logits(text[PROMPT:], PROMPT)
    with pytest.raises(StreamError, match="gave up: in phase .*block .*barrier"):
        own.check(own.trouble.tolist())
    held = own.cache.clone()
    pages.logits(text[PROMPT:], PROMPT)
    assert torch.equal(held, own.cache), "a launch after trouble does nothing"


def test_source_and_machine_are_one_text_with_the_parameters_between():
    source = steps.kernel_source()
    assert source.index("mbarrier.init") < source.index("struct Params") < source.index("KERNEL step(")


def test_the_phase_clock_tells_of_every_phase_in_order():
    own = pair("llama", rows=(16,))[1]
    text = random_ids(PROMPT + 2)
    pages = prompted([own], text)[0]
    record = timed(own.steps, lambda: pages.logits(text[PROMPT:], PROMPT))
    spans = record["spans"]
    assert len(spans) == 7 * len(own.layers) + 1 and spans[-1]["phase"] == "head"
    assert all(span["waits_us"] <= span["starts_us"] <= span["ends_us"] for span in spans)
    assert [row["times"] for row in timeline_table(record).rows] == [4, 2, 2, 2, 2, 2, 1]
    assert own.steps.clock is None
