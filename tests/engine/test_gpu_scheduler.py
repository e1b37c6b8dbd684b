"""In-flight batching of the GPU path, run as plain torch on a CPU: whoever comes and goes, each request's text is the
one it has alone, and every page comes back."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_models import gpu_model
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

SLOTS, LONGEST = 6, 330
TEXT = Pieces.for_vocabulary(320)
KV = {
    "plain": None,
    "reuse": KvCacheConfig(enable_block_reuse=True),
    "scarce": KvCacheConfig(max_tokens=7 * PAGE),
    "scarce reuse": KvCacheConfig(enable_block_reuse=True, max_tokens=7 * PAGE),
}
DRAFTERS = ("none", "draft model", "self-draft", "ngram", "suffix", "eagle", "eagle tree", "medusa")
CHOICES = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]


class Exact(TorchFunctionMode):
    """Products in float64: the order of a sum, which hangs on the number of rows, shows in no float32 result."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__matmul__:
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


def model(name: str = DEEP, **options) -> GpuModel:
    return gpu_model(name, slots=SLOTS, max_seq_len=LONGEST, **options)


@pytest.fixture
def engine_of(heads):
    """engine_of(method, kv, schedule): an engine of `SLOTS` slots on a target of its own."""

    def make(method: str, kv: KvCacheConfig | None = None, schedule=None, k: int = 4, slots: int = SLOTS) -> GpuEngine:
        target = model()
        options: dict = {"max_slots": slots, "max_seq_len": LONGEST, "kv_cache_config": kv}
        if method == "suffix":
            options["host_drafter"] = SuffixDrafter(SADecodingConfig(), ())
        elif method != "none":
            eagle = {"eagle tree": {"eagle_choices": CHOICES}}.get(method, {"max_draft_len": k})
            options["drafting"] = {
                "draft model": lambda: ModelDrafting(model("dummy:tiny-llama?seed=4&layers=1")),
                "self-draft": lambda: ModelDrafting(model()),
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


def greedy_only(params: SamplingParams) -> SamplingParams:
    return SamplingParams(max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids, stop=params.stop)


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


MIXES = [(method, kv) for method in DRAFTERS for kv in ("plain", "scarce reuse")]
MIXES += [(method, "reuse") for method in ("self-draft", "eagle")]


@pytest.mark.parametrize(("method", "kv"), MIXES)
def test_twenty_requests_in_a_mix_are_as_each_is_alone(method, kv, engine_of):
    """Arrivals, lengths, samplers and stops mixed. Where pages are scarce requests give theirs up in mid-text; one that
    samples then draws with other drafts, so there it is greedy."""
    requests = mixed_requests(len(method), 20)
    if "scarce" in kv:
        requests = [(prompt[:150], greedy_only(params)) for prompt, params in requests]
    alone = engine_of(method)
    expected = [alone.generate([prompt], [params])[0] for prompt, params in requests]
    rng = random.Random(1)
    engine = engine_of(method, KV[kv])
    found = serve(engine, requests, sorted(rng.randrange(40) for _ in requests))
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
