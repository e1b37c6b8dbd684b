"""Compile for a GPU: quantize, calibrate, and pick for every matrix the fastest way to read it.

The tactic table holds, for each kind of product and row bucket, the tile and split that were fastest here. Tile depth
and split along K are the same in every bucket of one product: they fix the order of summation, and with it the promise
that a row's result does not depend on how many rows there are. cuBLAS makes no such promise, so it is timed beside
them (what the promise costs stands in the engine directory) and never chosen. Loading an engine tunes nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import Fp8Config
from ..errors import ModelError, OptionError
from .gpu_model import (
    PAGE,
    GpuModel,
    Layer,
    Ops,
    Weight,
    capturing,
    no_garbage_collection,
    rotary_tables,
    seconds_of,
)
from .graph import position_limit
from .kv_cache import block_count
from .model import ModelConfig, pack
from .quantize import calibrate, quantize_fp8, random_fp8
from .reference import FP8

if TYPE_CHECKING:
    from ..engine_dir import EngineInfo
    from ..models import Checkpoint

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
PRODUCTS = ("qkv", "o", "gate_up", "down", "head")
PLAIN_TACTIC = {"block_n": 64, "block_k": 128, "split_k": 1, "stages": 3, "warps": 4}
TUNED_ROWS = (1, 16)  # a plain step and a verification; products are padded to 16 rows, so all smaller buckets share
MANY_ROWS = (32, 64)  # buckets that get their own width, stages and warps

Tactics = dict[str, dict[str, dict[str, int]]]  # product -> row bucket -> fields of `Tactic`


# ---------------------------------------------------------------------------------------------------------- assembling


def assemble(
    config: ModelConfig,
    packed: Mapping[str, torch.Tensor],
    tactics: Tactics,
    *,
    pages: int,
    max_positions: int,
    ops: Ops,
    max_sequences: int = 1,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> GpuModel:
    """A `GpuModel` from packed tensors on the device (`quantized` made them: `X`, `X.scale`, `X.in`, `L.kv_scale`).

    Raises `ModelError` for a bias that no kernel adds, and for an FP8 cache without scales.
    """
    if added := [name for name in packed if name.endswith(".bias") and not name.endswith(".qkv.bias")]:
        raise ModelError(f"the model has {added[0]}", "biases in q, k and v only on the GPU path", "use device='cpu'")
    if kv_dtype == FP8:
        if missing := [i for i in range(config.num_layers) if f"{i}.kv_scale" not in packed]:
            named = ", ".join(map(str, missing))
            raise ModelError(f"layers {named} have no scales for an FP8 cache", "calibrated ones", "build with fp8")
    device = packed["embed"].device
    cos, sin = rotary_tables(config, max_positions, device)
    made = _tactic_objects(tactics)

    def weight(name: str, kind: str) -> Weight:
        return Weight(packed.get(name, packed["embed"]), packed.get(f"{name}.scale"), made.get(kind, {}))

    layers = [
        Layer(
            config=config,
            cos=cos,
            sin=sin,
            input_norm=packed[f"{i}.input_norm"],
            post_norm=packed[f"{i}.post_norm"],
            qkv=weight(f"{i}.qkv", "qkv"),
            o=weight(f"{i}.o", "o"),
            gate_up=weight(f"{i}.gate_up", "gate_up"),
            down=weight(f"{i}.down", "down"),
            qkv_bias=packed.get(f"{i}.qkv.bias"),
            q_norm=packed.get(f"{i}.q_norm"),
            k_norm=packed.get(f"{i}.k_norm"),
            kv_scale=packed.get(f"{i}.kv_scale") if kv_dtype == FP8 else None,
            qkv_in=packed.get(f"{i}.qkv.in"),
            o_in=packed.get(f"{i}.o.in"),
            gate_up_in=packed.get(f"{i}.gate_up.in"),
            down_in=packed.get(f"{i}.down.in"),
        )
        for i in range(config.num_layers)
    ]
    return GpuModel(
        config, layers, packed["embed"], packed["norm"], weight("head", "head"),
        pages=pages, max_positions=max_positions, ops=ops, kv_dtype=kv_dtype, max_sequences=max_sequences,
    )  # fmt: skip


def _tactic_objects(tactics: Tactics) -> dict[str, dict[int, Any]]:
    if not tactics:
        return {}
    from .kernels import Tactic

    return {kind: {int(rows): Tactic(**t) for rows, t in table.items()} for kind, table in tactics.items()}


def plain_tactics() -> Tactics:
    """Untuned: works for every shape."""
    return {kind: {str(rows): dict(PLAIN_TACTIC) for rows in ROW_BUCKETS} for kind in PRODUCTS}


# ------------------------------------------------------------------------------------------------------------ weights


def quantized(
    packed: dict[str, torch.Tensor],
    config: ModelConfig,
    scales: Sequence[Mapping[str, float]] | None,
    *,
    is_head: bool,
    is_per_channel: bool = True,
    is_dynamic: bool = False,
) -> dict[str, torch.Tensor]:
    """bf16 packed tensors -> FP8 products with their scales; `scales` (from `calibrate`) become `L.kv_scale` and,
    unless activations find their own (`is_dynamic`), `L.X.in`. The output head stays bf16 unless `is_head`."""
    out = dict(packed)
    names = [f"{i}.{kind}" for i in range(config.num_layers) for kind in PRODUCTS[:-1]] + (["head"] if is_head else [])
    for name in names:
        weight = packed.get(name, packed["embed"])
        out[name], out[f"{name}.scale"] = quantize_fp8(weight, is_per_channel=is_per_channel)
    for i, layer in enumerate(scales or ()):
        device = packed["embed"].device
        for kind in () if is_dynamic else PRODUCTS[:-1]:
            out[f"{i}.{kind}.in"] = torch.tensor(layer[f"{kind}_in"], device=device)
        out[f"{i}.kv_scale"] = torch.tensor([layer["k"], layer["v"]], device=device)
    return out


def random_packed(
    config: ModelConfig, device, *, seed: int = 0, is_head_fp8: bool = False, is_dynamic: bool = False
) -> dict[str, torch.Tensor]:
    """Random FP8 weights in the true shapes, made on the device, scaled so that activations stay of order one. For
    timing only; no NaN code occurs. is_dynamic: as in `quantized`."""
    return dict(random_tensors(config, device, seed=seed, is_head_fp8=is_head_fp8, is_dynamic=is_dynamic))


def random_tensors(
    config: ModelConfig, device, *, seed: int = 0, is_head_fp8: bool = False, is_dynamic: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """`random_packed` tensor by tensor: who keeps a share of each never holds more than that and one whole tensor."""
    generator = torch.Generator(device=device).manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    attended = config.num_heads * config.head_dim
    shapes = {"qkv": (config.qkv_rows, hidden), "o": (hidden, attended)}
    shapes |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}

    def dense(rows: int) -> torch.Tensor:
        out = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
        return out.normal_(0, hidden**-0.5, generator=generator)

    def fp8(name: str, rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, random_fp8(rows, columns, device, generator)
        spread = 0.6 * columns**0.5  # these codes have a standard deviation of 0.6
        yield f"{name}.scale", torch.full((rows,), 1.0 / spread, device=device)

    yield "embed", dense(config.vocab_size) * hidden**0.5
    yield "norm", torch.ones(hidden, dtype=torch.bfloat16, device=device)
    if is_head_fp8:
        yield from fp8("head", config.vocab_size, hidden)
    else:
        yield "head", dense(config.vocab_size)
    for i in range(config.num_layers):
        for kind, (rows, columns) in shapes.items():
            yield from fp8(f"{i}.{kind}", rows, columns)
            if not is_dynamic:
                yield f"{i}.{kind}.in", torch.tensor(8.0 / 448.0, device=device)
        yield f"{i}.kv_scale", torch.tensor([8.0 / 448.0] * 2, device=device)
        for name in ("input_norm", "post_norm"):
            yield f"{i}.{name}", torch.ones(hidden, dtype=torch.bfloat16, device=device)


# ------------------------------------------------------------------------------------------------------------- tuning


def candidates(kind: str, n: int, k: int, item_bytes: int, processors: int) -> list[dict[str, int]]:
    """Tactics worth timing for a product [n, k]: those whose tiles fit shared memory and give every processor work.

    FP8 tiles have 64 features at least: below that Hopper's own FP8 instruction does not apply.
    """
    depths, widths = ((128, 256, 512), (64, 128)) if item_bytes == 1 else ((64, 128, 256), (16, 32, 64, 128))
    found = []
    for block_n, depth, split, stages in itertools.product(widths, depths, (1, 2, 4, 8), (3, 4, 6)):
        rows = 2 * block_n if kind == "gate_up" else block_n
        tile_bytes = (rows + 16) * depth * item_bytes
        programs = -(-n // (rows if kind == "gate_up" else block_n)) * split
        in_flight = tile_bytes * stages * max(1, min(programs / processors, 2))
        if split > 1 and (kind in ("gate_up", "head") or k // split < 2 * depth):
            continue
        is_small = n * k * item_bytes < 8e6  # too little for every processor: latency decides, try everything
        if tile_bytes * stages > 200_000 or (not is_small and (in_flight < 48_000 or programs < processors // 2)):
            continue
        if programs > 24 * processors and block_n < 64:
            continue
        found.append({"block_n": block_n, "block_k": depth, "split_k": split, "stages": stages, "warps": 4})
    return found


def tune(model: GpuModel, say: Callable[[str], None], *, limit: int = 14) -> tuple[Tactics, dict[str, Any]]:
    """Time the candidates on the model's own weights, all layers in turn, and pick. Returns (tactics, timings).

    timings: product -> rows -> {"us": microseconds per product, "tb_s": achieved read rate, "cublas_us": the same
    product by cuBLAS, without what our kernels fuse to it; None where it cannot}.
    """
    from .compile_ahead import compile_ahead

    processors = torch.cuda.get_device_properties(model.device).multi_processor_count
    tactics: Tactics = {}
    report: dict[str, Any] = {}
    wanted = {kind: _wanted(model, kind, processors, limit) for kind in PRODUCTS}
    say(f"  compiled {compile_ahead(lambda: _launch_all(model, wanted))} kernels to choose from")
    for kind in PRODUCTS:
        weights = _weights(model, kind)
        n, k = weights[0].data.shape
        size = weights[0].data.element_size()
        measured = [
            (sum(times.values()), tactic, times)
            for tactic in wanted[kind]
            if (times := _try(model, kind, weights, tactic, TUNED_ROWS)) is not None
        ]
        if not measured:
            raise OptionError(
                f"no tactic for {kind} {n}x{k} fits this GPU's shared memory", "one that does", "build for a CPU"
            )
        _, best, times = min(measured, key=lambda m: m[0])
        tactics[kind] = {str(rows): dict(best) for rows in ROW_BUCKETS}
        for rows in MANY_ROWS:
            alike = [t for t in wanted[kind] if (t["block_k"], t["split_k"]) == (best["block_k"], best["split_k"])]
            timed = [(own[rows], t) for t in alike if (own := _try(model, kind, weights, t, (rows,))) is not None]
            if timed:
                times[rows], chosen = min(timed, key=lambda m: m[0])
                tactics[kind][str(rows)] = dict(chosen)
        report[kind] = {
            str(rows): {
                "us": round(us, 2),
                "tb_s": round(n * k * size / us / 1e6, 3),
                "cublas_us": _cublas_us(model, weights, rows),
            }
            for rows, us in times.items()
        }
        say(f"  {kind} {n}x{k}: {best} {report[kind]}")
    return tactics, report


def _weights(model: GpuModel, kind: str) -> list[Weight]:
    return [model.head] if kind == "head" else [getattr(layer, kind) for layer in model.layers]


def _wanted(model: GpuModel, kind: str, processors: int, limit: int) -> list[dict[str, int]]:
    data = _weights(model, kind)[0].data
    n, k = data.shape
    return _spread(candidates(kind, n, k, data.element_size(), processors), limit) or [dict(PLAIN_TACTIC)]


def _launch_all(model: GpuModel, wanted: Mapping[str, Sequence[Mapping[str, int]]]) -> None:
    """Every launch that tuning will time, once."""
    for kind, tactics in wanted.items():
        for tactic, rows in itertools.product(tactics, (*TUNED_ROWS, *MANY_ROWS)):
            _fits(_product(model, kind, _weights(model, kind)[:1], tactic, rows))


def _spread(found: list[dict[str, int]], limit: int) -> list[dict[str, int]]:
    if len(found) <= limit:
        return found
    step = len(found) / limit
    return [found[int(i * step)] for i in range(limit)]


def _try(
    model: GpuModel, kind: str, weights: Sequence[Weight], tactic: Mapping[str, int], tuned: Sequence[int]
) -> dict[int, float] | None:
    """Microseconds per product at these row counts; None if the kernel does not fit this GPU."""
    times = {}
    for rows in tuned:
        run = _product(model, kind, weights, tactic, rows)
        if not _fits(run):
            return None
        times[rows] = graph_time_us(run, passes=max(1, 64 // len(weights))) / len(weights)
    return times


def _product(
    model: GpuModel, kind: str, weights: Sequence[Weight], tactic: Mapping[str, int], rows: int
) -> Callable[[], None]:
    """The product of `rows` rows with each of `weights`, ready to run."""
    from .kernels import Tactic, gate_up, linear

    made, out_scale = Tactic(**tactic), model.layers[0].down_in
    x, scale = _activation(weights[0], rows, model.device)

    def run() -> None:
        for weight in weights:
            if kind == "gate_up":
                gate_up(x, scale, weight.data, weight.scale, out_scale, made)
            else:
                linear(x, scale, weight.data, weight.scale, made)

    return run


def _cublas_us(model: GpuModel, weights: Sequence[Weight], rows: int) -> float | None:
    """Microseconds per product by the library, bf16 out; None where it does not take this shape or this GPU."""
    x, scale = _activation(weights[0], rows, model.device)

    def run() -> None:
        for weight in weights:
            if weight.scale is None or scale is None:
                torch.mm(x, weight.data.t())
            else:
                torch._scaled_mm(
                    x, weight.data.t(), scale_a=scale[:rows, None], scale_b=weight.scale[None, :],
                    out_dtype=torch.bfloat16,
                )  # fmt: skip

    try:
        run()
        us = graph_time_us(run, passes=max(1, 64 // len(weights))) / len(weights)
    except RuntimeError:
        return None
    return round(us, 2)


def _fits(run: Callable[[], None]) -> bool:
    """Run it; False if its tiles do not fit this GPU."""
    try:
        run()
    except Exception as problem:  # Triton reports an unfit tile by many types
        if "out of resource" not in str(problem).lower() and "OutOfResources" not in type(problem).__name__:
            raise
        return False
    return True


def _activation(weight: Weight, rows: int, device) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator(device=device).manual_seed(rows)
    x = torch.randn(rows, weight.data.shape[1], device=device, generator=generator)
    if weight.scale is None:
        return x.to(torch.bfloat16), None
    return x.to(FP8), torch.ones(max(rows, 64), device=device)


def graph_time_us(run: Callable[[], None], *, passes: int = 1, repeats: int = 5) -> float:
    """Median microseconds of `run`, which has run before, replayed as a CUDA graph (`passes` copies in one graph)."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(passes):
            run()
    graph.replay()
    return 1e6 * statistics.median(seconds_of(graph, repeats)) / passes


# ------------------------------------------------------------------------------------------------------ build and load


def write_engine(
    staging: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: str,
    fp8: Fp8Config,
    kernel: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The GPU part of `build_engine`: weights into `staging` (none for a dummy: they are made again at load), the
    whole-step kernel beside them, and what the manifest keeps: tactics, timings, calibration, seconds of each step."""
    from .build import WEIGHTS, Laps

    lap = Laps()
    packed, scales = _packed_weights(checkpoint, config, dtype, fp8, lap)
    with torch.inference_mode(), no_garbage_collection():
        model = assemble(config, packed, {}, pages=2, max_positions=PAGE, ops=Ops.make(), max_sequences=1)
        tactics, timings = tune(model, say)
    lap("time kernels")
    if not checkpoint.is_dummy:
        from safetensors.torch import save_file

        head_ids = checkpoint.draft_vocab()
        stored = packed if head_ids is None else {**packed, "head_ids": head_ids}
        save_file({name: t.cpu().contiguous() for name, t in stored.items()}, staging / WEIGHTS)
        lap("write")
    stream = {}
    if kernel != "triton":
        from .stream.host import prepare

        del model
        stream = {"stream": prepare(staging, config, packed, tactics, kernel, say)}
        lap("whole-step kernel")
    return {
        "tactics": tactics,
        **stream,
        "timings": timings,
        "calibration": {"texts": fp8.calib_size, "scales": scales} if scales else {},
        "is_dummy": checkpoint.is_dummy,
        "seed": getattr(checkpoint, "seed", 0),
        "steps": lap.seconds,
    }


def _packed_weights(
    checkpoint: Checkpoint, config: ModelConfig, dtype: str, fp8: Fp8Config, lap: Callable[[str], None]
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]] | None]:
    is_dynamic = fp8.activation_scales == "dynamic"
    with torch.inference_mode():
        if checkpoint.is_dummy and dtype == "fp8":
            packed = random_packed(
                config, "cuda", seed=checkpoint.seed, is_head_fp8=fp8.quantize_head, is_dynamic=is_dynamic
            )
            lap("make random weights")
            return packed, None
        tensors = checkpoint.tensors(device="cuda", dtype=torch.bfloat16)
        head_ids = checkpoint.draft_vocab()
        head_ids = None if head_ids is None else head_ids.to("cuda")
        packed = pack(tensors, config, head_ids, is_interleaved=False)
        lap("pack")
        if dtype != "fp8":
            return packed, None
        model = assemble(config, packed, {}, pages=2, max_positions=2048, ops=Ops.make(off=("all",), pdl=False))
        scales = calibrate(model, _calibration_ids(checkpoint, fp8.calib_size))
        is_per_channel = fp8.weight_scales == "per_channel"
        packed = quantized(
            packed, config, scales, is_head=fp8.quantize_head, is_per_channel=is_per_channel, is_dynamic=is_dynamic
        )
        lap("calibrate and quantize")
        return packed, scales


def _calibration_ids(checkpoint: Checkpoint, count: int) -> list[list[int]]:
    """Bundled prompts, their first turns; `OptionError` for more than there are."""
    from ..bench.prompts import load_prompts, render
    from ..models import load_tokenizer

    tokenizer, prompts = load_tokenizer(checkpoint), load_prompts()
    if count > len(prompts):
        raise OptionError(f"calib_size is {count}", f"at most {len(prompts)}, the bundled prompts", "ask for fewer")
    return [render(prompt, tokenizer)[:512] for prompt in prompts[:count]]


def page_count(target: EngineInfo, max_draft_len: int, ring: int | None, max_tokens: int | None) -> int:
    """Pages that an engine's caches share, the scratch page among them: for every slot at full length, or the `ring`
    positions it goes round in; at most for `max_tokens` in all. Raises `OptionError`."""
    positions = position_limit(target.max_seq_len, max_draft_len)
    blocks = -(-min(positions, ring or positions) // PAGE)
    return block_count(target.max_batch_size * blocks, max_tokens, PAGE) + 1


def load_gpu_model(
    info: EngineInfo,
    *,
    max_draft_len: int,
    pages: int | None = None,
    kv_dtype: torch.dtype = torch.bfloat16,
    ops: Ops | None = None,
) -> tuple[GpuModel, torch.Tensor | None]:
    """The model of a GPU engine directory with `pages` of cache (None: room for all it may serve), and a shortlist
    drafter's output ids."""
    from safetensors.torch import load_file

    from .build import WEIGHTS

    config, facts = ModelConfig.from_hf(info.model_config), info.manifest["build"]
    if facts["is_dummy"] and info.dtype == "fp8":
        made = info.manifest.get("fp8") or asdict(Fp8Config())
        packed = random_packed(
            config, "cuda", seed=facts["seed"], is_head_fp8=made["quantize_head"],
            is_dynamic=made["activation_scales"] == "dynamic",
        )  # fmt: skip
    elif facts["is_dummy"]:
        from ..models import resolve

        tensors = resolve(info.checkpoint, say=lambda line: None).tensors(device="cuda", dtype=torch.bfloat16)
        packed = pack(tensors, config, is_interleaved=False)
    else:
        packed = load_file(info.path / WEIGHTS, device="cuda")
    model = assemble(
        config,
        packed,
        info.tactics,
        pages=pages or page_count(info, max_draft_len, None, None),
        max_positions=-(-position_limit(info.max_seq_len, max_draft_len) // PAGE) * PAGE,
        ops=ops or Ops.make(),
        max_sequences=info.max_batch_size,
        kv_dtype=kv_dtype,
    )
    return model, packed.get("head_ids")
