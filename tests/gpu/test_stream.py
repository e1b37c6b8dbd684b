"""The whole-step kernel on a Hopper: the text of the Triton path, the same bits for 1 row and 16, and what it does
where it cannot go on.

The two paths round in other places, so greedy texts may part where two tokens are nearly as likely: `same_text` asks
the Triton path for the gap. Within this path everything is equal bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from gpu_models import Pages, assert_rows_keep_each_others_bits, engine, random_ids, relative
from test_engine_gpu import MAX_SEQ_LEN, SHAPES, SLOTS, TEXT, ids, same_text, true_shape

from tutorial_lib import LLM
from tutorial_lib.bench.prompts import load_prompts, render, select
from tutorial_lib.config import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from tutorial_lib.engine.drafting import DeviceTree
from tutorial_lib.engine.gpu_model import PAGE, captured
from tutorial_lib.engine.stream import steps
from tutorial_lib.engine.stream.compile import problems
from tutorial_lib.engine.stream.host import to_stream
from tutorial_lib.engine.stream.launch import LaunchShape, StreamError
from tutorial_lib.errors import OptionError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the whole-step kernel is for compute capability 9.0",
    ),
]

PAIR = {"target": "embedded:target", "drafter": "embedded:draft"}
GREEDY = SamplingParams(max_tokens=64)
SAMPLED = SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, seed=7)
CONFIGS = {
    "plain": lambda: None,
    "draft model": lambda: DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir=PAIR["drafter"]),
    "n-gram": lambda: NGramDecodingConfig(max_draft_len=7),
}


@pytest.fixture(scope="module")
def streamed():
    """`true_shape` run by the whole-step kernel; each is made once."""
    made = {}

    def get(name: str, form: str, **options):
        key = (name, form, *options.items())
        if key not in made:
            made[key] = to_stream(true_shape(name, form), **options)
        return made[key]

    yield get
    made.clear()


# ---- the embedded pair ----------------------------------------------------------------------------------------------


def answers(kernel: str, method: str, params: SamplingParams) -> list[list[int]]:
    with LLM(PAIR["target"], device="cuda", kernel=kernel, speculative_config=CONFIGS[method]()) as llm:
        assert llm.info["kernels"]["target"]["kernel"] == kernel
        prompts = [render(prompt, llm.tokenizer) for prompt in select(load_prompts(), 1)]
        return ids(llm.generate(prompts, params))


@pytest.fixture(scope="module")
def plain_texts():
    """kernel, sampled or not -> the texts of plain decoding."""
    return {
        (kernel, params.is_greedy): answers(kernel, "plain", params)
        for kernel in ("stream", "triton")
        for params in (GREEDY, SAMPLED)
    }


def test_greedy_texts_are_those_of_the_other_path_or_part_at_a_near_tie(plain_texts):
    ours, theirs = plain_texts["stream", True], plain_texts["triton", True]
    parted = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    with LLM(PAIR["target"], device="cuda", kernel="triton") as llm:
        prompts = [render(prompt, llm.tokenizer) for prompt in select(load_prompts(), 1)]
        for i in parted:
            common = min(len(ours[i]), len(theirs[i]))
            assert same_text(llm.engine.target, prompts[i], ours[i][:common], theirs[i][:common]), prompts[i]
    assert len(parted) <= len(ours) // 4, f"{len(parted)} of {len(ours)} texts part"


@pytest.mark.parametrize("method", ["draft model", "n-gram"])
def test_speculative_text_is_plain_text_exactly(plain_texts, method):
    assert answers("stream", method, GREEDY) == plain_texts["stream", True]


def test_sampled_drafts_by_look_up_leave_the_very_text_of_plain_sampling(plain_texts):
    assert answers("stream", "n-gram", SAMPLED) == plain_texts["stream", False]


def test_sampled_drafts_of_a_model_are_accepted_as_often_as_on_the_other_path():
    lengths = {}
    for kernel in ("stream", "triton"):
        with LLM(PAIR["target"], device="cuda", kernel=kernel, speculative_config=CONFIGS["draft model"]()) as llm:
            prompts = [render(prompt, llm.tokenizer) for prompt in select(load_prompts(), 1)]
            done = llm.generate(prompts, SAMPLED)
            lengths[kernel] = sum(len(g.token_ids) for g in done) / sum(len(g.rounds) for g in done)
    assert lengths["stream"] == pytest.approx(lengths["triton"], rel=0.15)


def test_auto_says_what_it_took_and_why():
    said = []
    with LLM(PAIR["target"], device="cuda", max_batch_size=1, say=said.append) as llm:
        chosen = llm.info["kernels"]["target"]
    assert chosen["kernel"] in ("stream", "triton") and "at the build a step of 1 row took" in chosen["why"]
    assert any(line.startswith("kernel of the target: ") for line in said)


# ---- bit for bit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SHAPES))
def test_one_row_and_sixteen_have_the_same_bits(streamed, name, form):
    model = streamed(name, form)
    assert_rows_keep_each_others_bits(model, SLOTS)
    model.check(model.trouble.tolist())


@pytest.mark.parametrize("name", list(SHAPES))
def test_logits_are_near_those_of_the_other_path(streamed, name, form):
    model, text = streamed(name, form), random_ids(90, 320)
    theirs = Pages(true_shape(name, form)).all_logits(text, [64, 16, 10])
    pages = Pages(model)
    model.prefill(text[:64], pages.table, 0)
    ours = torch.cat([pages.logits(text[64:80], 64), pages.logits(text[80:], 80)])
    assert relative(ours, theirs[64:]) < (0.1 if form == "fp8" else 0.02)


def test_a_prompt_read_by_the_kernel_itself(streamed):
    model, text = to_stream(true_shape("1B", "fp8"), keeps_reader=False), random_ids(90, 320)
    other = streamed("1B", "fp8")
    found = []
    for each in (model, other):
        pages = Pages(each)
        each.prefill(text[:80], pages.table, 0)
        found.append(pages.logits(text[80:], 80).clone())
    assert model.prompt_rows == 16 and relative(*found) < 0.1


def test_a_tree_and_its_branches_alone(streamed):
    model, text = streamed("135M", "bf16"), random_ids(107, 320)
    pages, tree = Pages(model), DeviceTree([-1, 0, 0, 1, 1, 2, 5], "cuda").over(1)
    model.prefill(text[:100], pages.table, 0)
    rows = pages.logits(text[100:], 100, tree=(tree.mask, tree.depths)).clone()
    for branch in ([0, 1, 3], [0, 1, 4], [0, 2, 5, 6]):
        alone = pages.logits([text[100 + row] for row in branch], 100)
        assert relative(rows[branch], alone) < 0.02  # its keys lie in other places, so sums have another order


def test_a_draft_in_one_launch_is_the_draft_of_many(streamed):
    model, text = streamed("1B", "fp8"), random_ids(70, 320)
    pages = Pages(model)
    model.prefill(text[:68], pages.table, 0)

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    by_step, tokens = [], text[68:]
    for i in range(10):
        by_step.append(int(pages.logits(tokens, 68 if i == 0 else 69 + i)[-1].argmax()))
        tokens = by_step[-1:]
    out = torch.zeros(1, 11, dtype=torch.int32, device="cuda")
    for _ in range(3):
        model.draft_chain(ints(*text[68:]).view(1, 2), pages.table, ints(68), ints(0), out[:, 1:], vocab_size=128256)
        assert out[0, 1:].tolist() == by_step


# ---- safe -----------------------------------------------------------------------------------------------------------


def test_the_machine_code_neither_spills_nor_serializes(streamed):
    for name, form in (("70B", "fp8"), ("1B", "fp8"), ("135M", "bf16")):
        for report in streamed(name, form).steps.report["kernels"]:
            assert problems(report) == [], (name, report)


def test_graphs_replay_with_the_same_result(streamed):
    model, text = streamed("1B", "fp8"), random_ids(75, 320)
    pages = Pages(model)
    model.prefill(text[:64], pages.table, 0)
    tokens = torch.tensor(text[64:], dtype=torch.int32, device="cuda")
    length, slot, damage = (torch.tensor([n], dtype=torch.int32, device="cuda") for n in (64, 0, 0))
    best = torch.zeros(11, dtype=torch.int32, device="cuda")
    expected = pages.logits(text[64:], 64).argmax(-1).tolist()
    graph = captured(
        lambda: model.choose(tokens, pages.table, length, slot, 11, best, damage=damage, needs_logits=False)
    )
    for _ in range(200):
        best.fill_(-1)
        graph.replay()
    assert best.tolist() == expected and not damage.any() and not model.trouble.any()


def test_a_thousand_rounds_over_poisoned_memory(streamed):
    """What a step does not write it must not read: freed memory is full of NaN, pages behind the text too."""
    target, draft = (to_stream(true_shape(name, "bf16")) for name in ("135M", "135M"))
    prompt, params = random_ids(40, 49_000), SamplingParams(max_tokens=500, ignore_eos=True)
    expected = None
    for _ in range(4):
        poison = torch.full((1 << 28,), float("nan"), device="cuda")
        del poison
        for model in (target, draft):
            model.cache.fill_(float("nan"))
        made = engine(target, TEXT, draft=draft, k=1, max_slots=SLOTS, max_seq_len=MAX_SEQ_LEN)
        done = made.generate([prompt], [params])[0]
        assert len(done.rounds) >= 249
        expected = expected or done.token_ids
        assert done.token_ids == expected


def test_a_block_that_never_comes_is_an_error_in_time_and_the_other_path_goes_on():
    """A grid that waits for more blocks than were launched ends by its spin limit, and says where it waited."""
    model = to_stream(true_shape("1B", "fp8"))
    least = min(model.steps.kernels)
    shape = model.steps.kernels[least].shape
    model.steps.kernels[least].shape = LaunchShape(shape.grid - 1, shape.block, shape.shared_bytes)
    with pytest.raises(StreamError, match="gave up: .*kernel='triton'"):
        engine(model, TEXT, max_slots=SLOTS, max_seq_len=MAX_SEQ_LEN).generate([[1, 2, 3]], [GREEDY])
    done = engine(true_shape("1B", "fp8"), TEXT, max_slots=SLOTS, max_seq_len=MAX_SEQ_LEN).generate(
        [[1, 2, 3]], [GREEDY]
    )
    assert len(done[0].token_ids) > 0


def test_blocks_that_do_not_fit_the_gpu_are_refused_before_a_launch(monkeypatch):
    about = torch.cuda.get_device_properties(0)
    monkeypatch.setattr(steps, "processor_count", lambda device: about.multi_processor_count // 2)
    with pytest.raises((StreamError, OptionError), match="processors|blocks"):
        to_stream(true_shape("70B", "fp8"))


def test_what_the_kernel_has_no_part_for_is_refused_by_name_and_auto_says_so():
    eagle = EagleDecodingConfig(speculative_model="embedded:eagle3", max_draft_len=4)
    with pytest.raises(OptionError, match="hidden states.*--kernel triton"):
        LLM(PAIR["target"], device="cuda", kernel="stream", speculative_config=eagle)
    said = []
    with LLM(PAIR["target"], device="cuda", speculative_config=eagle, say=said.append) as llm:
        assert llm.info["kernels"]["target"]["kernel"] == "triton"
    assert any("kernel of the target: triton, the drafter reads hidden states" in line for line in said)


def test_pages_of_a_text_are_those_of_its_table(streamed):
    """A text in pages in any order, next to others, gives the same logits."""
    model, text = streamed("1B", "fp8"), random_ids(PAGE * 3 + 5, 320)
    orders = ([0, 1, 2, 3], [9, 2, 7, 4])
    found = []
    for order in orders:
        pages = Pages(model, order)
        model.prefill(text[:-5], pages.table, 0)
        found.append(pages.logits(text[-5:], PAGE * 3).clone())
    assert torch.equal(*found)
