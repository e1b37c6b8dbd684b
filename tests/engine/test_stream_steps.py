"""Launches of the whole-step kernel: what stands in its parameters is all that it needs. The stand-in for the kernel
knows nothing else: it takes addresses and numbers from the structure and computes what they say in plain torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from gpu_engines import TEXT, Exact, outputs
from gpu_models import engine, gpu_model
from stream_stand_ins import PlainSteps

from tutorial_lib.config import LookaheadDecodingConfig, SamplingParams
from tutorial_lib.drafters.lookahead import LookaheadDrafter
from tutorial_lib.engine.drafting import OpenTree
from tutorial_lib.engine.gpu_model import GpuModel
from tutorial_lib.engine.stream import steps
from tutorial_lib.engine.stream.launch import LaunchShape
from tutorial_lib.engine.stream.model import StreamModel
from tutorial_lib.engine.stream.plan import plan
from tutorial_lib.engine.stream.steps import LaunchedSteps
from tutorial_lib.errors import OptionError, WorkbookError

POINTERS = ("cache", "tokens", "table", "lengths", "slots", "mask", "depths", "choices", "damage", "logits", "ids")
NUMBERS = ("sequences", "rows", "steps", "table_stride", "damage_rows", "vocab_limit", "blocks")
TARGET, DRAFT = "dummy:tiny-llama?seed=5", "dummy:tiny-llama?seed=4&layers=1"
PROMPTS = [[(7 * i + j) % 320 for i in range(n)] for j, n in enumerate((3, 40, 1, 70, 2))]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.9, seed=3)


class Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int) for name in NUMBERS),
    ]


def at(address: int | None, shape: tuple[int, ...], kind=ctypes.c_int32, dtype=torch.int32) -> torch.Tensor | None:
    """The tensor in memory there; it shares that memory."""
    if not address:
        return None
    count = int(torch.tensor(shape).prod())
    return torch.frombuffer((kind * count).from_address(address), dtype=dtype).view(shape)


class PlainKernel:
    """A launch as plain torch. Its counter has to be zero when it begins."""

    shape = LaunchShape(1, 1, 0)

    def __init__(self, model: GpuModel, counter: torch.Tensor) -> None:
        self.model, self.steps, self.counter, self.launches = model, PlainSteps(model), counter, 0

    def launch(self, p: Params, stream: int) -> None:
        assert p.cache == self.model.cache.data_ptr() and not self.counter.any()
        self.counter.fill_(7)
        self.launches += 1
        n, rows, width = p.sequences, p.rows, self.steps.head_rows
        table = at(p.table, (6, p.table_stride))
        lengths, slots = at(p.lengths, (n,)), at(p.slots, (n,))
        if p.steps > 1 or (not p.logits and rows == 2 and p.vocab_limit < width):
            self._chain(p, table, lengths, slots)
            return
        mask = at(p.mask, (n * rows, rows), ctypes.c_int8, torch.int8)
        tree = None if mask is None else (mask, at(p.depths, (n * rows,)))
        self.steps.step(
            at(p.tokens, (n * rows,)), table, lengths, slots, rows, choices=at(p.choices, (n * rows,)),
            damage=at(p.damage, (n * rows // p.damage_rows,)), tree=tree,
            logits=at(p.logits, (n * rows, width), ctypes.c_float, torch.float32),
        )  # fmt: skip

    def _chain(self, p: Params, table, lengths, slots) -> None:
        ids = at(p.ids, (self.steps.head_rows,), ctypes.c_int64, torch.int64)
        drafts = at(p.choices, (p.steps, p.sequences))
        pair = at(p.tokens, (p.sequences, 2))
        self.steps.chain(pair, table, lengths, slots, drafts.t(), ids=ids, vocab_size=p.vocab_limit)


def launched(model: GpuModel, **more) -> StreamModel:
    counter = torch.zeros(4, dtype=torch.int32)
    kernels = {rows: PlainKernel(model, counter) for rows in (1, 4, 16)}
    made = LaunchedSteps(
        kernels, Params, {"cache": model.cache, "blocks": 128, **more}, head_rows=model.head.data.shape[0],
        trouble=torch.zeros(4, dtype=torch.int32), zeroed=[counter], words=str, report={},
    )  # fmt: skip
    return StreamModel.of(model, made, keeps_reader=True)


def texts(target, params=GREEDY, **options):
    with Exact():
        return outputs(engine(target, TEXT, **options).generate(PROMPTS, [params] * len(PROMPTS)))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_the_parameters_say_gives_the_text_of_the_other_path(params):
    assert texts(launched(gpu_model(TARGET)), params) == texts(gpu_model(TARGET), params)
    draft = launched(gpu_model(DRAFT))
    pair = texts(launched(gpu_model(TARGET)), params, draft=draft, k=3)
    assert pair == texts(gpu_model(TARGET), params, draft=gpu_model(DRAFT), k=3)


def test_a_shortlist_and_a_tree_stand_in_the_parameters_too():
    ids = torch.arange(0, 320, 2).repeat_interleave(2)
    pair = texts(launched(gpu_model(TARGET)), draft=launched(gpu_model(DRAFT)), head_ids=ids, k=3)
    assert pair == texts(gpu_model(TARGET), draft=gpu_model(DRAFT), head_ids=ids, k=3)

    def by_lookahead(target):
        config = LookaheadDecodingConfig(max_window_size=2, max_ngram_size=3, max_verification_set_size=2)
        drafter = LookaheadDrafter(config, ())
        tree = OpenTree(drafter.max_tokens, drafter.max_depth, "cpu")
        return texts(target, host=drafter, host_tree=tree, k=drafter.max_tokens)

    assert by_lookahead(launched(gpu_model(TARGET))) == by_lookahead(gpu_model(TARGET))


def test_every_launch_takes_the_smallest_kernel_that_holds_its_rows():
    target = launched(gpu_model(TARGET))

    def counts():
        return {rows: kernel.launches for rows, kernel in target.steps.kernels.items()}

    engine(target, TEXT, draft=gpu_model(DRAFT), k=3).generate(PROMPTS[:1], [GREEDY])
    alone = counts()
    assert alone[1] == alone[16] == 0 < alone[4]
    texts(target, draft=gpu_model(DRAFT), k=3)
    assert counts()[16] > 0
    del target.steps.kernels[16]
    with pytest.raises(OptionError, match="rows.*at most 4.*triton"):
        texts(target, draft=gpu_model(DRAFT), k=3)


def test_a_field_that_is_not_there_and_a_tensor_that_cannot_be_read_are_defects():
    with pytest.raises(TypeError, match="no field 'weights'"):
        launched(gpu_model(TARGET), weights=torch.zeros(1))
    made = launched(gpu_model(TARGET)).steps
    ints = torch.zeros(4, dtype=torch.int32)
    given = {"choices": ints[:1], "damage": ints[:1], "logits": None, "tree": None}
    with pytest.raises(TypeError, match="lengths is torch.int64"):
        made.step(ints[:1], ints[None], ints.long()[:1], ints[:1], 1, **given)
    with pytest.raises(TypeError, match="slots is .* strides"):
        made.step(ints[:2], ints[None], ints[:2], ints[::2], 1, **given)
    wide = torch.zeros(2, 3, dtype=torch.int8), ints[:2]
    with pytest.raises(OptionError, match="mask has 3 columns"):
        made.step(ints[:2], ints[None], ints[:1], ints[:1], 2, **{**given, "tree": wide})


class Noting:
    """Keeps the structure of its last launch."""

    shape = LaunchShape(1, 1, 0)

    def launch(self, params: ctypes.Structure, stream: int) -> None:
        self.params = params


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_every_parameter_of_the_kernel_has_a_value(cache):
    """With a model that has all there is, every field but those of an optional input is set by some launch."""
    model = gpu_model("dummy:tiny-qwen3", weights="fp8 calibrated", cache=cache)
    made = plan(model.config, 6, weight_bytes=1, head_bytes=2, head_rows=model.head.data.shape[0])
    kernel = Noting()
    built = steps.assemble_steps(
        model, made, {16: kernel}, counters=64, scratch_bytes=1024, in_place=False, report={"kernels": []}
    )
    ints = torch.zeros(8, dtype=torch.int32)
    tree = torch.ones(3, 3, dtype=torch.int8), ints[:3]
    logits = torch.zeros(3, built.head_rows)
    built.step(ints[:3], ints[None], ints[:1], ints[:1], 3, choices=ints[:3], damage=ints[:1], logits=logits, tree=tree)
    unset = {name for name, *_ in type(kernel.params)._fields_ if not getattr(kernel.params, name)}
    absent = {"ids", "is_chain", "clock", "window", "qkv_bias", "head_scale"} | (
        {"kv_scale"} if cache == "bf16" else set()
    )
    assert unset == absent
    assert (kernel.params.layers, kernel.params.pages) == (len(model.layers), model.pages)
    assert kernel.params.eps == pytest.approx(model.config.rms_norm_eps)
    built.chain(ints[:2].view(1, 2), ints[None], ints[:1], ints[:1], ints[None, :4], ids=ints, vocab_size=9)
    assert (kernel.params.steps, kernel.params.rows, kernel.params.ids) == (4, 2, ints.data_ptr())
    assert "phase 3, block 2 waited in vain at barrier 7" in built.explain([1, 3, 2, 7])


@pytest.mark.parametrize(
    ("name", "weights", "words"),
    [
        ("dummy:tiny-llama?head_dim=24", "bf16", "heads of 24"),
        ("dummy:tiny-llama?intermediate=168", "bf16", "gate_up|down"),
        ("dummy:tiny-llama", "fp8", "row by row.*calibrated"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_with_its_own_numbers(monkeypatch, name, weights, words):
    monkeypatch.setattr(steps, "processor_count", lambda device: 8)
    with pytest.raises(WorkbookError, match=f"({words}).*kernel='triton'"):
        steps.plan_for(gpu_model(name, weights=weights))
