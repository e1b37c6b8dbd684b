"""Compile a checkpoint into an engine directory for a CPU or a GPU of this machine, and load one.

Building packs the weights (`model.pack`), quantizes them where asked, times the matrix kernels and stores the winner
for each shape and row count (the tactic table). Loading reads, checks and packs; it decides nothing. What is special
to a GPU lives in `gpu_build.py`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file

from ..config import Fp8Config
from ..engine_dir import FORMAT_VERSION, EngineInfo, create
from ..errors import OptionError
from ..models import Checkpoint, cache_dir, load_tokenizer
from .linear import choose_kernels, make_int8_linear, make_linear, quantize_int8
from .model import Model, ModelConfig, pack
from .stream.choice import check_kernel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}  # CPU form -> activations
GPU_DTYPES = ("bfloat16", "fp8")
LINEARS = ("qkv", "o", "gate_up", "down")
DEFAULT_MAX_SEQ_LEN = 2048
RING_ROOM = 128  # new rows that the ring of a windowed model has room for: a piece of a prompt, or a draft
WEIGHTS = "model.safetensors"

Say = Callable[[str], None]
ModelT = TypeVar("ModelT", bound=Model)


def choose_device(device: str) -> str:
    """ "cpu" or "cuda" for "auto", "cpu" or "cuda": auto takes a GPU of compute capability 8.0 or newer.

    Raises `OptionError` for a GPU that is not there or too old.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise OptionError(f"device is {device!r}", "'auto', 'cpu' or 'cuda'", "choose one of these")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise OptionError("device 'cuda' was asked for and this torch sees no GPU", "an NVIDIA GPU", "use device='cpu'")
    capability = torch.cuda.get_device_capability()
    if capability >= (8, 0):
        return "cuda"
    if device == "auto":
        return "cpu"
    raise OptionError(
        f"the GPU has compute capability {capability[0]}.{capability[1]}", "8.0 or newer", "use device='cpu'"
    )


def machine_arch(device: str = "cpu") -> str:
    """What an engine for `device` is built for: "cpu-x86_64", "sm_90"."""
    if device == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    return f"cpu-{platform.machine()}"


def choose_dtype(dtype: str, device: str) -> str:
    """The weights' form: "auto" is float32 on a CPU and bfloat16 on a GPU. Raises `OptionError` for one it has not."""
    if dtype == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    known = GPU_DTYPES if device == "cuda" else tuple(DTYPES)
    if dtype not in known:
        raise OptionError(
            f"dtype is {dtype!r}", f"auto, {', '.join(known)} on a {device} device", "choose one of these"
        )
    if dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        raise OptionError(
            "dtype is 'fp8' and this GPU has no FP8 units", "compute capability 8.9", "use dtype='bfloat16'"
        )
    return dtype


def build_engine(
    checkpoint: Checkpoint,
    output_dir: str | Path | None = None,
    *,
    dtype: str = "auto",
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    max_draft_len: int = 16,
    device: str = "auto",
    fp8: Fp8Config | None = None,
    kernel: str = "auto",
    overwrite: bool = False,
    say: Say = print,
) -> EngineInfo:
    """Build `output_dir` (default: a folder of the cache named by everything that matters, reused if it is there).

    dtype: on a CPU "float32" (exact; what "auto" means there), "bfloat16", or "int8" (weight-only, products
    in bfloat16); on a GPU "bfloat16" ("auto") or "fp8" (weights and activations, as `fp8` says). kernel, on a GPU:
    "triton" prepares that path alone; "auto" also the whole-step kernel where it fits the model, and times both;
    "stream" insists on it. max_seq_len: prompt and output together, None for the smaller of 2048 and the model's own
    limit. Raises `OptionError` for a limit that
    the model does not have, `EngineDirError` for an output directory that cannot be used.
    """
    device = choose_device(device)
    check_kernel(kernel, device)
    dtype, arch = choose_dtype(dtype, device), machine_arch(device)
    config = ModelConfig.from_hf(checkpoint.config)
    limits = {
        "max_batch_size": _at_least("max_batch_size", max_batch_size, 1),
        "max_seq_len": _sequence_limit(max_seq_len, config),
        "max_draft_len": _at_least("max_draft_len", max_draft_len, 0),
    }
    if max_draft_len > (most := max(RING_ROOM, limits["max_seq_len"]) - 1):  # caches and trees are made as large
        raise OptionError(f"max_draft_len is {max_draft_len}", f"at most {most}, so that a draft fits into a text")
    if fp8 is not None and dtype != "fp8":
        raise OptionError(f"FP8 options were given and dtype is {dtype!r}", "dtype 'fp8'", "add --dtype fp8")
    made_how = asdict(fp8 or Fp8Config()) if dtype == "fp8" else None
    wanted: dict[str, Any] = {"checkpoint_fingerprint": checkpoint.fingerprint(), "dtype": dtype, "fp8": made_how}
    wanted |= {"limits": limits, "arch": arch}
    if device == "cuda":
        wanted["kernel"] = kernel
    if output_dir is None:
        output_dir = cache_dir() / "engines" / _cache_name(checkpoint.name, wanted)

    def write(staging: Path) -> dict[str, Any]:
        say(f"building {checkpoint.name} for {arch}, {dtype}")
        if device == "cuda":
            from .gpu_build import write_engine

            made = write_engine(staging, checkpoint, config, dtype, fp8 or Fp8Config(), kernel, say)
        else:
            made = _write(staging, checkpoint, config, dtype, say)
        load_tokenizer(checkpoint).save_pretrained(staging)
        return _manifest(checkpoint, dtype, arch, limits, made_how, wanted.get("kernel"), made)

    return create(output_dir, write, overwrite=overwrite, wanted=wanted, say=say)


def _at_least(name: str, value: int, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise OptionError(f"{name} is {value!r}", f"a whole number >= {minimum}", f"correct {name}")
    return value


def _sequence_limit(asked: int | None, config: ModelConfig) -> int:
    own = config.max_position_embeddings
    if asked is None:
        return min(DEFAULT_MAX_SEQ_LEN, own)
    if _at_least("max_seq_len", asked, 2) > own:
        raise OptionError(f"max_seq_len is {asked}", f"at most {own}, the model's own context", "ask for less")
    return asked


def _cache_name(name: str, wanted: Mapping[str, Any]) -> str:
    key = json.dumps([wanted, FORMAT_VERSION, torch.__version__, torch.get_num_threads()])
    slug = "".join(c if c.isalnum() else "-" for c in name).strip("-")[-40:]
    return f"{slug}-{wanted['dtype']}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


# ------------------------------------------------------------------------------------------------------------- build


class Laps:
    """Seconds of each step of a build."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = round(now - self._last, 3), now


def _write(staging: Path, checkpoint: Checkpoint, config: ModelConfig, dtype: str, say: Say) -> dict[str, Any]:
    lap = Laps()
    with torch.inference_mode():
        head_ids = checkpoint.draft_vocab()
        packed = pack(checkpoint.tensors(dtype=DTYPES[dtype]), config, head_ids)
        if dtype == "int8":
            packed = _quantize(packed, config)
        if head_ids is not None:
            packed["head_ids"] = head_ids
        lap("pack")
        tactics = {} if dtype == "int8" else _tactics(packed, config)
        lap("time kernels")
        save_file({name: t.contiguous() for name, t in packed.items()}, staging / WEIGHTS)
        lap("write")
    for name, tactic in tactics.items():
        say(f"  {name}: {', '.join(sorted(set(tactic['kernel_by_rows'].values())))}")
    return {"tactics": tactics, "steps": lap.seconds}


def _manifest(
    checkpoint: Checkpoint,
    dtype: str,
    arch: str,
    limits: Mapping[str, int],
    fp8: Mapping[str, Any] | None,
    kernel: str | None,
    made: Mapping[str, Any],
) -> dict[str, Any]:
    steps = made["steps"]
    return {
        "backend": "torch",
        "checkpoint": checkpoint.name,
        "checkpoint_fingerprint": checkpoint.fingerprint(),
        "model_config": dict(checkpoint.config),
        "dtype": dtype,
        "fp8": fp8,
        "arch": arch,
        **({} if kernel is None else {"kernel": kernel}),
        "limits": dict(limits),
        "eos_token_ids": sorted(checkpoint.eos_token_ids()),
        "tactics": made["tactics"],
        "build": {
            "seconds": round(sum(steps.values()), 3),
            "steps": steps,
            "command": _command(checkpoint.name, dtype, arch, limits, fp8, kernel),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            **{name: value for name, value in made.items() if name not in ("tactics", "steps")},
        },
    }


def _command(
    name: str, dtype: str, arch: str, limits: Mapping[str, int], fp8: Mapping[str, Any] | None, kernel: str | None
) -> str:
    given: dict[str, Any] = {**limits, **{key: value for key, value in (fp8 or {}).items() if key != "quantize_head"}}
    if kernel not in (None, "auto"):
        given["kernel"] = kernel
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in given.items())
    options += " --fp8-head" if fp8 and fp8["quantize_head"] else ""
    return f"workbook build {name} --device {'cpu' if arch.startswith('cpu') else 'cuda'} --dtype {dtype} {options}"


def _tactics(packed: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, Any]:
    """kind of product -> `choose_kernels`; all layers of one kind have one shape and are timed together."""
    groups = {kind: [packed[f"{i}.{kind}"] for i in range(config.num_layers)] for kind in LINEARS}
    groups["head"] = [packed.get("head", packed["embed"])]
    return {kind: {"shape": list(weights[0].shape), **choose_kernels(weights)} for kind, weights in groups.items()}


def _quantize(packed: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    names = [f"{i}.{kind}" for i in range(config.num_layers) for kind in LINEARS] + ["head"]
    out = dict(packed)
    for name in names:
        out[name], out[f"{name}.scale"] = quantize_int8(packed[name] if name in packed else packed["embed"])
    return out


# -------------------------------------------------------------------------------------------------------------- load


def load_model(info: EngineInfo) -> tuple[Model, torch.Tensor | None]:
    """The packed model of an engine directory, and the ids of its output rows where it drafts over a shortlist."""
    config = ModelConfig.from_hf(info.model_config)
    packed = load_file(info.path / WEIGHTS)
    return make_model(info, config, packed, Model), packed.get("head_ids")


def make_model(
    info: EngineInfo, config: ModelConfig, packed: Mapping[str, torch.Tensor], make: Callable[..., ModelT]
) -> ModelT:
    """`make` (`Model`, or what takes its arguments) with the products and limits of an engine directory."""
    names = [f"{i}.{kind}" for i in range(config.num_layers) for kind in LINEARS] + ["head"]
    return make(
        config,
        {name: _linear(name, packed, info) for name in names},
        {name: t for name, t in packed.items() if name == "norm" or name.endswith("_norm")},
        packed["embed"],
        max_slots=info.max_batch_size,
        max_seq_len=info.max_seq_len,
        ring_room=max(RING_ROOM, info.max_draft_len + 1),
    )


def _linear(name: str, packed: Mapping[str, torch.Tensor], info: EngineInfo) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = packed["embed" if name == "head" and "head" not in packed else name], packed.get(f"{name}.bias")
    if info.dtype == "int8":
        return make_int8_linear(weight, packed[f"{name}.scale"], bias)
    return make_linear(weight, bias, info.tactics[name.split(".")[-1]]["kernel_by_rows"])
