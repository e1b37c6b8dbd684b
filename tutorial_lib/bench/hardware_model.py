"""What a step, a draft and a round cost on a machine, from bytes, flops, launches and three ceilings. Pure.

A pass over some rows takes the longer of reading its weights and multiplying them, then reads the KV cache, and pays
for every launch on top: what starts after something else cannot hide its own start (the roofline of Williams et al.
2009, with launches). Nothing of a speculative run goes in, so it answers for models, batches and GPUs that nobody has
at hand; `evidence.py` holds it against every run that was recorded. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OptionError
from ..plan import GPUS, Gpu, kv_bytes_per_token
from ..shapes import BYTES_PER_ELEMENT, tensor_shapes
from .cost_model import DraftLengthChoice, draft_length_choices, expected_tokens, expected_tokens_by_position, speedup

Acceptance = float | Sequence[float]  # one probability per draft token, or conditional rates by position
LAYER_LAUNCHES_GPU = 7  # qkv, o, gate-up, down, attention, two norms: what a breakdown of a recorded step counts
LAYER_LAUNCHES_CPU = 30  # operators that PyTorch runs in a layer of the float32 engine, counted by its profiler
LAUNCHES_BESIDE = 4  # last norm, head, argmax in two parts
MOST_REQUESTS = 1024


@dataclass(frozen=True)
class Ceilings:
    """What a machine reaches: bytes read and operations done per second, seconds that one launch adds. flops_per_s is
    that of the layers' number format. how: where the three come from."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    launch_s: float
    layer_launches: int = LAYER_LAUNCHES_GPU
    how: str = ""


@dataclass(frozen=True)
class ModelCost:
    """What one pass of a model reads and multiplies: weights in its layers and in its head, and their bytes."""

    layers: int
    layer_weights: float
    layer_bytes: float
    head_weights: float
    head_bytes: float
    kv_bytes_per_token: float

    @property
    def bytes_per_step(self) -> float:
        return self.layer_bytes + self.head_bytes


def model_cost(config: Mapping[str, Any], dtype: str = "bfloat16", head_rows: int | None = None) -> ModelCost:
    """From a configuration. fp8 and int8 keep the head in bfloat16; the cache is bfloat16 beside them. head_rows: of a
    head that scores a shortlist only."""
    small = {"fp8": 1}.get(dtype) or BYTES_PER_ELEMENT[dtype]
    wide = max(small, 2)
    shapes = tensor_shapes(dict(config))
    layers = sum(math.prod(s) for name, s in shapes.items() if ".layers." in name and len(s) == 2)
    head = (head_rows or config["vocab_size"]) * config["hidden_size"]
    kv = kv_bytes_per_token(config, "float32" if wide == 4 else "bfloat16")
    return ModelCost(config["num_hidden_layers"], layers, layers * small, head, head * wide, kv)


def eagle3_cost(config: Mapping[str, Any], dtype: str = "float32") -> ModelCost:
    """An EAGLE-3 head in one number format: one layer whose attention reads embedding and
    feature side by side, the fusion of three features, a shortlist as head."""
    width, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer = 2 * width * (queries + 2 * keys) + queries * width + 3 * width * config["intermediate_size"]
    return _in_one_format(dtype, 1, layer + 3 * width * width, config["draft_vocab_size"] * width, 2 * keys)


def medusa_cost(config: Mapping[str, Any], dtype: str = "float32") -> ModelCost:
    """All Medusa heads at once, in one format: their residual blocks, then the target's head over a shortlist."""
    width, heads = config["hidden_size"], config["medusa_num_heads"]
    blocks = heads * config["medusa_num_layers"] * width * width
    return _in_one_format(dtype, config["medusa_num_layers"], blocks, config["draft_vocab_size"] * width, 0)


def without_layers(model: ModelCost, count: int) -> ModelCost:
    """The model with `count` of its layers left out, as layer skipping drafts."""
    share = 1 - count / model.layers
    return replace(
        model,
        layers=model.layers - count,
        layer_weights=share * model.layer_weights,
        layer_bytes=share * model.layer_bytes,
        kv_bytes_per_token=share * model.kv_bytes_per_token,
    )


def _in_one_format(dtype: str, layers: int, layer_weights: int, head_weights: int, kv_numbers: int) -> ModelCost:
    size = BYTES_PER_ELEMENT[dtype]
    return ModelCost(layers, layer_weights, size * layer_weights, head_weights, size * head_weights, size * kv_numbers)


# ---- times -----------------------------------------------------------------------------------------------------------


def step_s(model: ModelCost, machine: Ceilings, rows: int = 1, *, batch: int = 1, context: int = 0) -> float:
    """One pass over `rows` positions of each of `batch` requests that hold `context` tokens."""
    computed = rows * batch
    layers = max(model.layer_bytes / machine.bytes_per_s, 2 * model.layer_weights * computed / machine.flops_per_s)
    head = max(model.head_bytes / machine.bytes_per_s, 2 * model.head_weights * computed / machine.flops_per_s)
    cache = batch * context * model.kv_bytes_per_token / machine.bytes_per_s
    return layers + head + cache + (machine.layer_launches * model.layers + LAUNCHES_BESIDE) * machine.launch_s


def chain(max_draft_len: int) -> tuple[int, ...]:
    """A chain of K tokens as `widths`: nodes by depth. A tree of 3 nodes with 2 below each is (3, 6)."""
    return (1,) * max_draft_len


def draft_s(
    drafter: ModelCost | None, machine: Ceilings, widths: Sequence[int], *, batch: int = 1, context: int = 0
) -> float:
    """One step of the drafter for every depth, over the nodes above it. None: a look-up, which costs nothing."""
    if drafter is None:
        return 0.0
    above = (1, *widths)[: len(widths)]
    return sum(step_s(drafter, machine, rows, batch=batch, context=context) for rows in above)


def round_s(
    target: ModelCost,
    drafter: ModelCost | None,
    machine: Ceilings,
    widths: Sequence[int],
    *,
    batch: int = 1,
    context: int = 0,
) -> float:
    """Drafting, and one pass of the target over every draft token and the one before them."""
    drafted = draft_s(drafter, machine, widths, batch=batch, context=context)
    return drafted + step_s(target, machine, 1 + sum(widths), batch=batch, context=context)


# ---- what they come to -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A target and its drafter (None: a look-up) on a machine, with so many requests of so many tokens."""

    target: ModelCost
    drafter: ModelCost | None
    machine: Ceilings
    batch: int = 1
    context: int = 0

    @property
    def plain_s(self) -> float:
        return step_s(self.target, self.machine, batch=self.batch, context=self.context)

    def round_s(self, widths: Sequence[int]) -> float:
        return round_s(
            self.target, self.drafter, self.machine, widths, batch=self.batch, context=self.context
        )  # fmt: skip

    def speedup(self, acceptance_length: float, widths: Sequence[int]) -> float:
        return speedup(self.plain_s, acceptance_length, self.round_s(widths))

    def choices(self, acceptance: Acceptance, max_draft_len: int) -> list[DraftLengthChoice]:
        """Every K from 0 (plain) on, for a chain."""
        where = {"batch": self.batch, "context": self.context}
        return draft_length_choices(
            acceptance,
            draft_s=lambda k: draft_s(self.drafter, self.machine, chain(k), **where),
            verify_s=lambda rows: step_s(self.target, self.machine, rows, **where),
            max_draft_len=max_draft_len,
        )

    def best(self, acceptance: Acceptance, max_draft_len: int) -> DraftLengthChoice:
        """The K that gains most; K = 0 where none gains."""
        return max(self.choices(acceptance, max_draft_len), key=lambda choice: choice.speedup)

    def batch_it_stops_at(self, acceptance: Acceptance, max_draft_len: int) -> int | None:
        """The smallest batch at which a round of K is not faster than plain decoding any more; None if up to 1,024
        requests there is none."""
        tokens = (
            expected_tokens(acceptance, max_draft_len)
            if isinstance(acceptance, (int, float))
            else expected_tokens_by_position(acceptance[:max_draft_len])
        )
        widths = chain(max_draft_len)
        batches = range(1, MOST_REQUESTS + 1)
        return next((n for n in batches if replace(self, batch=n).speedup(tokens, widths) <= 1), None)


# ---- other machines --------------------------------------------------------------------------------------------------


def on_another(gpu: Gpu | str, dtype: str, measured: Ceilings, sheet: Gpu | str = "H200") -> Ceilings:
    """Ceilings of a GPU that was not measured: its data sheet, times the share of the sheet that `measured` reached on
    the GPU `sheet`. A launch is taken to cost the same. dtype: of the layers; both sheets must have it."""
    there, here = (_named(which) for which in (gpu, sheet))
    share = measured.bytes_per_s / here.bytes_per_s
    busy = measured.flops_per_s / here.flops_per_s(dtype)
    return replace(
        measured,
        name=there.name,
        bytes_per_s=share * there.bytes_per_s,
        flops_per_s=busy * there.flops_per_s(dtype),
        how=f"{there.source}; {share:.0%} of its bandwidth and {busy:.0%} of its dense rate, as on the {here.name}",
    )


def _named(gpu: Gpu | str) -> Gpu:
    if isinstance(gpu, Gpu):
        return gpu
    if gpu not in GPUS:
        raise OptionError(f"the GPU is {gpu!r}", f"one of {', '.join(GPUS)}", "choose one of these")
    return GPUS[gpu]
