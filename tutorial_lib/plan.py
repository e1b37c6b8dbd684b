"""`workbook plan`: what a model, a batch and their lengths take of a GPU's memory, computed before anything is loaded.

Weights come from the table of tensors (`shapes.py`), the KV cache from layers x 2 x heads x head size x bytes for every
position, in whole blocks. Target and drafter share one budget, as they do in the engines. What is left of the memory
beside the weights goes to the cache up to `free_gpu_memory_fraction`, TensorRT-LLM's rule; the rest is for activations
and the libraries. Figures of GPUs are their makers' data sheets: a plan is a bound, and no measurement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import NOT_JSON, ModelError, OptionError
from .shapes import BYTES_PER_ELEMENT, DUMMIES, check_config, dummy_config, head_dim, tensor_shapes

GB = 1e9  # data sheets count decimal
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "fp8": "float8", "int8": "int8"}


@dataclass(frozen=True)
class Gpu:
    """memory_gb, bandwidth_tb_s, and dense tensor-core rates (no sparsity); fp8_tflops: None without FP8 units.
    source: the maker's paper that has them; one that prints rates with sparsity was halved."""

    name: str
    memory_gb: float
    bandwidth_tb_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    source: str = ""

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_tb_s * 1e12

    def flops_per_s(self, dtype: str) -> float:
        """Of products in bfloat16 or fp8. Raises `OptionError` where the GPU has no such units."""
        if dtype == "fp8" and self.fp8_tflops is None:
            raise OptionError(f"dtype is 'fp8' and {self.name} has no FP8 units", "bfloat16, or another GPU")
        rate = {"bfloat16": self.bf16_tflops, "fp8": self.fp8_tflops}.get(dtype)
        if rate is None:
            raise OptionError(f"dtype is {dtype!r}", "bfloat16 or fp8, whose rates a data sheet gives")
        return rate * 1e12


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40GB", 40, 1.555, 312, None, "NVIDIA A100 data sheet"),
        Gpu("A100-80GB", 80, 2.039, 312, None, "NVIDIA A100 data sheet, SXM"),
        Gpu("L4", 24, 0.3, 121, 242, "NVIDIA L4 data sheet"),
        Gpu("L40S", 48, 0.864, 362, 733, "NVIDIA L40S data sheet"),
        Gpu("RTX-4090", 24, 1.008, 165.2, 330.3, "NVIDIA Ada GPU architecture paper, FP32 sums"),
        Gpu("H100-PCIe", 80, 2.0, 756, 1513, "NVIDIA H100 data sheet, PCIe"),
        Gpu("H100", 80, 3.35, 989, 1979, "NVIDIA H100 data sheet, SXM"),
        Gpu("H200", 141, 4.8, 989, 1979, "NVIDIA H200 data sheet, SXM"),
        Gpu("B200", 180, 8.0, 2250, 4500, "NVIDIA HGX B200 data sheet, up to 8 TB/s"),
    )
}


@dataclass(frozen=True)
class Plan:
    """Bytes are for one GPU; weights and cache are cut into `gpus` equal parts. ridge_rows: rows of one pass from
    which on the multiplications, and no longer the reading of weights, take the time. floor_step_ms: reading the
    target's weights and the batch's cache once."""

    gpu: str
    gpus: int
    dtype: str
    kv_dtype: str
    memory_bytes: int
    weight_bytes: int
    drafter_weight_bytes: int
    kv_bytes_per_token: int
    positions_per_request: int
    blocks_per_request: int
    kv_bytes_per_request: int
    kv_bytes: int
    kv_room_bytes: int
    batch: int
    most_requests: int
    ridge_rows: int
    floor_step_ms: float

    @property
    def is_fitting(self) -> bool:
        return self.batch <= self.most_requests

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"is_fitting": self.is_fitting}


def make_plan(
    config: Mapping[str, Any],
    gpu: str = "H200",
    *,
    gpus: int = 1,
    batch: int = 1,
    input_len: int = 1024,
    output_len: int = 256,
    dtype: str = "bfloat16",
    kv_dtype: str = "auto",
    drafter: Mapping[str, Any] | None = None,
    drafter_dtype: str | None = None,
    max_draft_len: int = 0,
    tokens_per_block: int = 32,
    free_gpu_memory_fraction: float = 0.9,
) -> Plan:
    """What it takes, whether it fits or not (`check` refuses what does not). Raises `OptionError` for an option out of
    range and for a request longer than the model's context."""
    for name, value, least in (
        ("gpus", gpus, 1), ("batch", batch, 1), ("input_len", input_len, 1), ("output_len", output_len, 1),
        ("max_draft_len", max_draft_len, 0), ("tokens_per_block", tokens_per_block, 1),
    ):  # fmt: skip
        if value < least:
            raise OptionError(f"{name} is {value}", f"at least {least}")
    if not 0 < free_gpu_memory_fraction <= 1:
        raise OptionError(f"free_gpu_memory_fraction is {free_gpu_memory_fraction}", "above 0 and at most 1")
    sheet = _one_of("the GPU", gpu, GPUS)
    kv_dtype = dtype if kv_dtype == "auto" and dtype != "fp8" else "bfloat16" if kv_dtype == "auto" else kv_dtype
    for what, name in (("dtype", dtype), ("kv_dtype", kv_dtype), ("drafter_dtype", drafter_dtype or dtype)):
        _one_of(what, name, DTYPES)
        if name == "fp8" and sheet.fp8_tflops is None:
            raise OptionError(f"dtype is 'fp8' and {gpu} has no FP8 units", "bfloat16, or a GPU of Hopper or Ada")
    if (asked := input_len + output_len) > config.get("max_position_embeddings", math.inf):
        raise OptionError(
            f"input_len and output_len are {asked} tokens",
            f"at most {config['max_position_embeddings']}, the model's context",
            "ask for fewer",
        )
    kv_bytes = {"int8": "bfloat16"}.get(kv_dtype, kv_dtype)  # int8 is for weights: their cache is bf16
    per_token = sum(kv_bytes_per_token(c, kv_bytes) for c in (config, drafter) if c is not None)
    per_token = -(-per_token // gpus)
    window = config.get("sliding_window") if config["architectures"][0] == "MistralForCausalLM" else None
    positions = min(asked, window or asked) + max_draft_len
    blocks = -(-positions // tokens_per_block)
    per_request = blocks * tokens_per_block * per_token
    weights, of_drafter = _weight_bytes(config, dtype), _weight_bytes(drafter, drafter_dtype or dtype)
    weights, of_drafter = -(-weights // gpus), -(-of_drafter // gpus)
    memory = int(sheet.memory_gb * GB)
    room = max(0, int((memory - weights - of_drafter) * free_gpu_memory_fraction))
    is_fp8 = dtype == "fp8" and sheet.fp8_tflops is not None
    rate = (sheet.fp8_tflops if is_fp8 else sheet.bf16_tflops) or 0.0
    read = weights + batch * per_request
    return Plan(
        gpu=gpu,
        gpus=gpus,
        dtype=dtype,
        kv_dtype=kv_bytes,
        memory_bytes=memory,
        weight_bytes=weights,
        drafter_weight_bytes=of_drafter,
        kv_bytes_per_token=per_token,
        positions_per_request=positions,
        blocks_per_request=blocks,
        kv_bytes_per_request=per_request,
        kv_bytes=batch * per_request,
        kv_room_bytes=room,
        batch=batch,
        most_requests=room // per_request,
        ridge_rows=round(rate / sheet.bandwidth_tb_s / 2 * BYTES_PER_ELEMENT[DTYPES[dtype]]),
        floor_step_ms=read / (sheet.bandwidth_tb_s * 1e12) * 1e3,
    )


def check(plan: Plan) -> None:
    """`OptionError` that says what does not fit, and what would."""
    if plan.is_fitting:
        return
    weights = plan.weight_bytes + plan.drafter_weight_bytes
    where = plan.gpu if plan.gpus == 1 else f"each of {plan.gpus} {plan.gpu}"
    if plan.most_requests == 0:
        raise OptionError(
            f"the weights take {weights / GB:.1f} GB of {where}, one request {plan.kv_bytes_per_request / GB:.2f} GB",
            f"at most {plan.memory_bytes / GB:.0f} GB, {plan.kv_room_bytes / GB:.2f} GB of it free for the cache",
            "take more GPUs, a smaller dtype, or shorter requests",
        )
    raise OptionError(
        f"the KV cache of {plan.batch} requests takes {plan.kv_bytes / GB:.1f} GB of {where}",
        f"at most {plan.kv_room_bytes / GB:.1f} GB, which holds {plan.most_requests} of them",
        f"use a batch of {plan.most_requests}, fp8 for the cache, or more GPUs",
    )


def rows(plan: Plan) -> list[tuple[str, str]]:
    """The plan as lines of a table: what, how much."""
    each = "" if plan.gpus == 1 else " per GPU"
    return [
        (f"memory{each}", f"{plan.memory_bytes / GB:.1f} GB ({plan.gpus} x {plan.gpu})"),
        (f"target's weights{each}", f"{plan.weight_bytes / GB:.2f} GB ({plan.dtype})"),
        (f"drafter's weights{each}", f"{plan.drafter_weight_bytes / GB:.2f} GB"),
        (f"KV cache per token{each}", f"{plan.kv_bytes_per_token / 1e3:.1f} kB ({plan.kv_dtype})"),
        ("positions per request", f"{plan.positions_per_request}, in {plan.blocks_per_request} blocks"),
        (f"KV cache per request{each}", f"{plan.kv_bytes_per_request / GB:.3f} GB"),
        (f"KV cache of {plan.batch} requests{each}", f"{plan.kv_bytes / GB:.2f} GB"),
        (f"room for the cache{each}", f"{plan.kv_room_bytes / GB:.2f} GB"),
        ("requests that fit", str(plan.most_requests)),
        ("rows until arithmetic takes the time", str(plan.ridge_rows)),
        ("a step takes at least", f"{plan.floor_step_ms:.2f} ms (weights and cache read once)"),
    ]


def config_of(name: str) -> Mapping[str, Any]:
    """The configuration of `dummy:<shape>` (the prefix may be left out), a folder or an engine directory, or one of
    the embedded models. Nothing is downloaded for it but the embedded target. Raises `ModelError`."""
    short = name.removeprefix("dummy:")
    if short.split("?")[0] in DUMMIES:
        return dummy_config(f"dummy:{short}")[0]
    if name.startswith("embedded:"):
        from .models import resolve

        return resolve(name).config
    folder = Path(name).expanduser()
    for file, key in ((folder / "engine.json", "model_config"), (folder / "config.json", None)):
        if file.is_file():
            try:
                document = json.loads(file.read_text("utf-8"))
                config = document[key] if key else document
                check_config(name, config)
                return config
            except ModelError:
                raise
            except (OSError, KeyError, TypeError, AttributeError, *NOT_JSON) as error:
                raise ModelError(f"{file} cannot be read ({error})", "a model's configuration") from error
    raise ModelError(
        f"{name!r} is no model whose shape is known here",
        f"a folder with config.json, an engine directory, embedded:target, or one of {', '.join(DUMMIES)}",
        "fetch it first (workbook fetch), or plan with the shape of the same size",
    )


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """Of one position, in all layers."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return config["num_hidden_layers"] * 2 * heads * head_dim(dict(config)) * BYTES_PER_ELEMENT[DTYPES[dtype]]


def _weight_bytes(config: Mapping[str, Any] | None, dtype: str) -> int:
    """Quantized forms keep embeddings, output head and vectors in bfloat16; their scales are not counted."""
    if config is None:
        return 0
    total, small = 0, BYTES_PER_ELEMENT[DTYPES[dtype]]
    for name, shape in tensor_shapes(dict(config)).items():
        is_wide = small == 1 and (len(shape) == 1 or "embed_tokens" in name or "lm_head" in name)
        total += math.prod(shape) * (2 if is_wide else small)
    return total


def _one_of(what: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise OptionError(f"{what} is {name!r}", f"one of {', '.join(known)}", "choose one of these")
    return known[name]
