"""Engines of the GPU path for the tests of what is around its rounds, run as plain torch on a CPU: small targets, every
drafting method, and a way to put requests in line over time."""

from __future__ import annotations

import random
from pathlib import Path

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
from tutorial_lib.engine.head_drafting import MedusaDrafting, open_eagle_drafting, open_medusa_drafting

SLOTS, LONGEST = 6, 330
SHALLOW = "dummy:tiny-llama?seed=11&layers=1"  # its greedy texts hardly repeat
TEXT = Pieces.for_vocabulary(320)
KV = {
    "plain": None,
    "reuse": KvCacheConfig(enable_block_reuse=True),
    "scarce": KvCacheConfig(max_tokens=6 * PAGE),
    "scarce reuse": KvCacheConfig(enable_block_reuse=True, max_tokens=6 * PAGE),
}
CHOICES = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]


class Exact(TorchFunctionMode):
    """Products in float64: the order of a sum, which hangs on the number of rows, shows in no float32 result."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.matmul:
            return function(args[0].double(), args[1].double()).float()
        return function(*args, **(kwargs or {}))


def make_heads(folder: Path):
    """Checkpoints of EAGLE-3 and Medusa heads for `DEEP`."""
    return specforge(folder / "eagle", eagle_tensors()), medusa_own(folder / "medusa", medusa_tensors())


def model(name: str, **options) -> GpuModel:
    return gpu_model(name, slots=SLOTS, max_seq_len=LONGEST, **options)


def medusa(target: GpuModel, heads) -> MedusaDrafting:
    config = MedusaDecodingConfig(speculative_model="x", medusa_choices=CHOICES)
    return open_medusa_drafting(config, target, read_medusa(heads[1], target.config), "medusa")


def engine_for(
    method: str, heads, kv: KvCacheConfig | None = None, schedule=None, k: int = 4, slots: int = SLOTS
) -> GpuEngine:
    """An engine of `slots` slots on a target of its own, which drafts by `method`. heads: as from `make_heads`."""
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
            "medusa": lambda: medusa(target, heads),
        }["eagle" if "eagle" in method else method]()  # fmt: skip
    if schedule and options.get("drafting") is not None and options["drafting"].tree is not None:
        full = len(options["drafting"].tree.of_drafts)
        schedule = {size: full if n == k else 0 for size, n in schedule.items()}
    return GpuEngine(
        target, TEXT, (), max_draft_len=0 if method == "none" else k, draft_len_schedule=schedule, **options
    )


def mixed_requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 250 tokens, half of them with a common beginning of 70; all kinds of sampling and stopping."""
    rng = random.Random(seed)
    system = [rng.randrange(320) for _ in range(70)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(320) for _ in range(rng.choice([1, 2, 63, 64, 65, 150] if i % 2 else [1, 5, 58, 100]))]
        options: dict = {"max_tokens": rng.choice([1, 2, 9, 24])}
        options |= rng.choice([{}, {}, {"temperature": 0.9, "seed": i}, {"temperature": 1.2, "top_k": 9, "seed": i}])
        options |= rng.choice([{}, {"stop_token_ids": list(range(0, 320, 16))}, {"stop": [" w1", " w22"]}])
        requests.append((prompt if i % 2 else system + prompt, SamplingParams(**options)))
    return requests


def outputs(generations) -> list[list[int]]:
    return [g.token_ids for g in generations]


def nothing_is_held(engine: GpuEngine) -> bool:
    pool = engine.cache.pool
    return pool.held == 0 and sorted(engine.scheduler.free) == list(range(engine.max_slots))
