"""What to run first on a GPU: `python -m tutorial_lib.engine.stream.check` says what is right, what is wrong and where,
and how fast it is, in one table.

Small models are checked against plain torch, buffer by buffer: the keys and values that a step leaves in the cache
show layer by layer how far it was right, then the logits, then the tokens. Then the shapes that matter are timed.
Every part runs in a process beside this one, since a kernel that fails takes its CUDA context with it: what is left
goes on in a new process, and what happened stands in the table.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from .choice import obstacle

MODULE = "tutorial_lib.engine.stream.check"
LOST = 3  # exit code of a process whose CUDA context is no more, after a part that has been told of
PART_LIMIT_S = 60.0  # without a sign of life
DEVICE = "cuda"
PROMPT = 70  # tokens before the step that is looked at: more than a page
TOLERANCE = 0.04  # of a relative difference; FP8 roundings that fall the other way make some percent


class Row(NamedTuple):
    """A line of the table. is_fine: None for a figure that is neither right nor wrong."""

    part: str
    what: str
    value: str
    is_fine: bool | None = None


# ------------------------------------------------------------------------------------------------------ right or wrong

# name -> (shape, FP8 weights, FP8 cache)
MODELS = {
    "135M bf16": (
        "dummy:llama-3.2-1b?layers=4&hidden=576&heads=9&kv_heads=3&intermediate=1536&vocab=49152",
        False,
        False,
    ),
    "1B fp8": ("dummy:llama-3.2-1b?layers=2", True, False),
    "70B fp8": ("dummy:llama-3.3-70b?layers=2", True, False),
    "70B fp8 cache": ("dummy:llama-3.3-70b?layers=2", True, True),
    "qwen2 bf16": ("dummy:tiny-qwen2?hidden=896&heads=14&kv_heads=2&head_dim=64&intermediate=4864", False, False),
    "qwen3 bf16": ("dummy:tiny-qwen3?hidden=1024&heads=16&kv_heads=8&head_dim=128&intermediate=3072", False, False),
    "mistral bf16": (
        "dummy:tiny-mistral?hidden=1024&heads=16&kv_heads=4&head_dim=64&intermediate=2048&window=48",
        False,
        False,
    ),
}


def make_model(
    name: str, is_fp8: bool, is_fp8_cache: bool = False, *, is_plain: bool = False, packed: Any = None
) -> tuple[Any, Any]:
    """(a `GpuModel` with random weights and room for 1,024 positions, its weights). is_plain: every part in plain
    torch. packed: another one's weights, to share them."""
    import torch

    from ...shapes import dummy_config, random_tensors
    from ..gpu_build import assemble, plain_tactics, random_packed
    from ..gpu_model import PAGE, Ops
    from ..model import ModelConfig, pack
    from ..reference import FP8

    raw, seed = dummy_config(name)
    config = ModelConfig.from_hf(raw)
    if packed is None and is_fp8:
        packed = random_packed(config, DEVICE, seed=seed)
    elif packed is None:
        packed = pack(random_tensors(raw, seed, DEVICE, torch.bfloat16), config, is_interleaved=False)
    ops = Ops.make(off=("all",), pdl=False) if is_plain else Ops.make()
    kv_dtype = FP8 if is_fp8_cache else torch.bfloat16
    model = assemble(
        config, packed, plain_tactics(), pages=1024 // PAGE + 1, max_positions=1024, ops=ops, kv_dtype=kv_dtype
    )
    return model, packed


def check_model(part: str) -> Iterable[Row]:
    """Steps of 1 to 16 rows behind `PROMPT` tokens, by plain torch and by the kernel, from the same cache."""
    import torch

    from .host import heed, to_stream

    name, is_fp8, is_fp8_cache = MODELS[part]
    plain, packed = make_model(name, is_fp8, is_fp8_cache, is_plain=True)
    triton, own = (make_model(name, is_fp8, is_fp8_cache, packed=packed)[0] for _ in range(2))
    start = time.perf_counter()
    stream = to_stream(own, keeps_reader=True)
    yield Row(part, "compiled, packed, loaded", f"{time.perf_counter() - start:.1f} s; {_compiled(stream)}")
    words = torch.randint(0, plain.config.vocab_size, (PROMPT + 16,), device=DEVICE, dtype=torch.int32)
    table = torch.arange(plain.pages - 1, dtype=torch.int32, device=DEVICE).flip(0)[None].contiguous()
    triton.prefill(words[:PROMPT].tolist(), table, 0)
    before = triton.cache.clone()
    first: Any = None
    for rows in (1, 2, 5, 11, 16):
        found, expected = (_step(model, before, words, table, rows) for model in (stream, plain))
        other = _step(triton, before, words, table, rows)
        heed(stream)
        where = _first_difference(found[1], expected[1], before, table, rows)
        yield Row(part, f"{rows} rows: cache", where or "as plain torch's", where is None)
        off, usual = relative(found[0], expected[0]), relative(other[0], expected[0])
        worst = int((found[0] - expected[0]).norm(dim=-1).argmax())
        values = (
            "" if off < TOLERANCE else f"; row {worst}: {_some(found[0][worst])}, torch {_some(expected[0][worst])}"
        )
        yield Row(part, f"{rows} rows: logits", f"{off:.2%} off (Triton's {usual:.2%}){values}", off < TOLERANCE)
        same = int((found[2] == found[0].argmax(-1)).sum())
        yield Row(part, f"{rows} rows: tokens", f"{same} of {rows} are the logits' argmax", same == rows)
        if first is None:
            first = found
        elif rows in (11, 16):
            equal = bool((found[0][0] == first[0][0]).all())
            apart = f"; {_some(found[0][0])}, alone {_some(first[0][0])}"
            yield Row(part, f"{rows} rows: row 0 alike", "bit for bit" if equal else "not" + apart, equal)
    yield from _check_tree(part, stream, plain, before, words, table)
    yield from _check_chain(part, stream, before, words, table)
    yield from _check_repeats(part, stream, before, words, table)


def _step(model: Any, before: Any, words: Any, table: Any, rows: int, tree: Any = None) -> tuple[Any, Any, Any]:
    """(logits, cache after it, tokens chosen) of `rows` rows behind the prompt."""
    import torch

    model.cache.copy_(before)
    length = torch.full((1,), PROMPT, dtype=torch.int32, device=DEVICE)
    slot, damage = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    best = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    logits = model.choose(
        words[PROMPT : PROMPT + rows].contiguous(), table, length, slot, rows, best, damage=damage, tree=tree
    )
    torch.cuda.synchronize()
    return logits.clone(), model.cache.clone(), best


def _first_difference(found: Any, expected: Any, before: Any, table: Any, rows: int) -> str | None:
    """Where the cache after a step first differs from what it should be, with values; None if nowhere."""
    import torch

    page, tolerance = found.shape[4], TOLERANCE * (2 if found.element_size() == 1 else 1)  # FP8 rounds once more
    at = [PROMPT + row for row in range(rows)]
    pages, offsets = table[0][[i // page for i in at]].long(), [i % page for i in at]
    for layer in range(found.shape[0]):
        for which, name in enumerate(("keys", "values")):
            ours, theirs = (c[layer, pages, which, :, offsets].float() for c in (found, expected))
            for row in range(rows):
                off = relative(ours[row], theirs[row])
                if not off < tolerance:
                    head = int((ours[row] - theirs[row]).norm(dim=-1).argmax())
                    values = f"{_some(ours[row, head])}, torch {_some(theirs[row, head])}"
                    return f"layer {layer} {name} row {row} head {head}: {off:.1%} off: {values}"
    rest, kept = (cache.clone().view(torch.uint8) for cache in (found, before))
    for cache in (rest, kept):
        cache[:, pages, :, :, offsets] = 0
    changed = (rest != kept).flatten(1).any(1).nonzero().flatten().tolist()
    return f"layers {changed} have other positions rewritten" if changed else None


def _check_tree(part: str, stream: Any, plain: Any, before: Any, words: Any, table: Any) -> Iterable[Row]:
    """Seven rows as a tree with two branches."""
    from ..drafting import DeviceTree

    rows = DeviceTree([-1, 0, 0, 1, 1, 2, 5], DEVICE).over(1)
    tree = (rows.mask, rows.depths)
    found, expected = (_step(model, before, words, table, 7, tree) for model in (stream, plain))
    off = relative(found[0], expected[0])
    yield Row(part, "a tree of 7 rows: logits", f"{off:.2%} off", off < TOLERANCE)


def _check_chain(part: str, stream: Any, before: Any, words: Any, table: Any, k: int = 6) -> Iterable[Row]:
    """A draft in one launch, and step by step."""
    import torch

    def ints(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    pair, slot, damage = words[PROMPT - 2 : PROMPT].view(1, 2).contiguous(), ints(0), ints(0)
    by_step, tokens, best = [], pair.view(-1), ints(0, 0)
    stream.cache.copy_(before)
    for i in range(k):
        rows = 2 if i == 0 else 1
        at = ints(PROMPT - 2 if i == 0 else PROMPT - 1 + i)
        stream.choose(tokens, table, at, slot, rows, best[:rows], damage=damage, needs_logits=False)
        by_step.append(int(best[rows - 1]))
        tokens = best[rows - 1 : rows].clone()
    stream.cache.copy_(before)
    out = torch.full((1, k + 1), -1, dtype=torch.int32, device=DEVICE)
    stream.draft_chain(pair, table, ints(PROMPT - 2), slot, out[:, 1:], vocab_size=stream.config.vocab_size)
    at_once = out[0, 1:].tolist()
    stream.check(stream.trouble.tolist())
    said = f"{k} steps in one launch" if at_once == by_step else f"at once {at_once}, by step {by_step}"
    yield Row(part, "a draft", said, at_once == by_step and int(out[0, 0]) == -1)


def _check_repeats(part: str, stream: Any, before: Any, words: Any, table: Any, times: int = 200) -> Iterable[Row]:
    """The same step again and again: every result the same."""
    first, others = _step(stream, before, words, table, 11), 0
    for _ in range(times):
        again = _step(stream, before, words, table, 11)
        others += not bool((again[0] == first[0]).all() and (again[2] == first[2]).all())
    yield Row(part, f"{times} times the same step", f"{others} with another result", others == 0)


def relative(ours: Any, theirs: Any) -> float:
    """Norm of the difference over the norm of `theirs`; infinite if anything is not finite."""
    ours, theirs = ours.double(), theirs.double()
    off = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))
    return off if off == off else float("inf")


def _some(values: Any, count: int = 4) -> str:
    return "[" + " ".join(f"{x:.4g}" for x in values.flatten()[:count].tolist()) + " ...]"


def _compiled(stream: Any) -> str:
    found = []
    for report in stream.steps.report.get("kernels", ()):
        for used in report["kernels"].values():
            found.append(f"{used['registers']} registers, {used['spill_bytes']} spilled")
    return ", ".join(sorted(set(found)))


# --------------------------------------------------------------------------------------------------------------- speed


def time_target(part: str) -> Iterable[Row]:
    """The 70B shape: steps of 1 to 16 rows by both kernels, and a round with the 1B drafter."""
    import torch

    from .host import step_ms, to_stream

    ceiling = _read_ceiling()
    yield Row(part, "read ceiling", f"{ceiling:.3f} TB/s")
    target, _ = make_model("dummy:llama-3.3-70b", True)
    size = _bytes_of(target)
    triton = step_ms(target, (1, 11))
    start = time.perf_counter()
    target = to_stream(target, keeps_reader=False)
    yield Row(part, "compiled, packed, loaded", f"{time.perf_counter() - start:.1f} s; {_compiled(target)}")
    free_memory()
    ours = step_ms(target, (1, 4, 8, 11, 16))
    for rows, ms in ours.items():
        rate = size / ms / 1e9
        beside = f", Triton's {triton[rows]:.3f}" if rows in triton else ""
        value = (
            f"{ms:.3f} ms, {rate:.2f} TB/s = {rate / ceiling:.1%} of the ceiling, {ms / ours[1]:.3f} x 1 row{beside}"
        )
        yield Row(part, f"70B step, {rows} rows", value, {1: 1e3 / ms >= 58.7, 11: ms / ours[1] <= 1.09}.get(rows))
    for rows in (1, 11):
        yield from _clock_rows(part, target, rows)
    drafter = to_stream(make_model("dummy:llama-3.2-1b", True)[0], keeps_reader=False)
    yield from _time_round(part, target, drafter)
    del target, drafter
    torch.cuda.synchronize()


def _clock_rows(part: str, model: Any, rows: int, context: int = 600) -> Iterable[Row]:
    """Where a step's time goes, by the kernel's own clock."""
    import torch

    from .clock import by_phase, timed

    def ints(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    table = torch.arange(model.pages - 1, dtype=torch.int32, device=DEVICE)[None]
    tokens, best, length, slot, damage = ints(*range(rows)), ints(*range(rows)), ints(context), ints(0), ints(0)

    def launch() -> None:
        model.choose(tokens, table, length, slot, rows, best, damage=damage, needs_logits=False)

    launch()
    record = timed(model.steps, launch)
    count = model.steps.layers
    for phase, own in by_phase(record).items():
        each = f"waits {own['waits_us'] / count:.2f}, works {own['works_us'] / count:.2f} us a layer"
        yield Row(part, f"clock, {rows} rows: {phase}", each)
    yield Row(part, f"clock, {rows} rows: launch", f"{record['launch_us']:.0f} us")


def time_drafter(part: str) -> Iterable[Row]:
    """The 1B shape: a lone step, and ten in one launch."""
    from .host import step_ms, to_stream

    drafter, _ = make_model("dummy:llama-3.2-1b", True)
    size = _bytes_of(drafter)
    triton = step_ms(drafter, (1,))[1]
    drafter = to_stream(drafter, keeps_reader=False)
    lone, each = step_ms(drafter, (1,))[1], chain_ms(drafter, 10) / 10
    yield Row(part, "1B step alone", f"{lone:.3f} ms, Triton's {triton:.3f}")
    yield Row(part, "1B step, 10 in a launch", f"{each:.3f} ms, {size / each / 1e9:.2f} TB/s", each <= 0.52)
    yield from _clock_rows(part, drafter, 1)


def time_embedded_shape(part: str) -> Iterable[Row]:
    """The shape of the embedded pair."""
    from .host import step_ms, to_stream

    name = "dummy:llama-3.2-1b?layers={}&hidden=576&heads=9&kv_heads=3&intermediate=1536&vocab=49152"
    target, drafter = (make_model(name.format(layers), False)[0] for layers in (30, 4))
    triton = step_ms(target, (1, 5))
    target, drafter = (to_stream(model, keeps_reader=True) for model in (target, drafter))
    for rows, ms in step_ms(target, (1, 5, 16)).items():
        beside = f", Triton's {triton[rows]:.3f}" if rows in triton else ""
        yield Row(part, f"135M step, {rows} rows", f"{ms:.3f} ms{beside}", ms < triton.get(rows, ms + 1))
    yield Row(part, "its draft of 4 in a launch", f"{chain_ms(drafter, 4):.3f} ms")
    yield from _clock_rows(part, target, 1)


def chain_ms(model: Any, k: int, context: int = 600) -> float:
    """Median milliseconds of a draft of `k` tokens in one launch."""
    import torch

    from ..gpu_model import captured, seconds_of
    from .host import heed

    def ints(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    table = torch.arange(model.pages - 1, dtype=torch.int32, device=DEVICE)[None]
    pair, length, slot, out = ints(1, 2).view(1, 2), ints(context), ints(0), ints(*range(k + 1)).view(1, k + 1)

    def draft() -> None:
        model.draft_chain(pair, table, length, slot, out[:, 1:], vocab_size=model.config.vocab_size)

    graph = captured(draft)
    found = statistics.median(seconds_of(graph, 9))
    heed(model)
    return 1e3 * found


def _time_round(part: str, target: Any, drafter: Any, k: int = 10, context: int = 600) -> Iterable[Row]:
    """A round as the engine runs it, one graph. Nothing is accepted of random weights, which costs the same."""
    from ..drafting import ModelDrafting
    from ..gpu_model import PAGE, seconds_of
    from ..graph import DeviceState, RoundProgram
    from .host import heed

    state = DeviceState.make(1, target.max_positions // PAGE, target.pages - 1, target.device)
    state.table[0] = state.table.new_tensor(range(target.pages - 1))
    program = RoundProgram(target, ModelDrafting(drafter), state, batch=1, max_draft_len=k)
    program.capture()
    program.aim([0])
    state.length[0] = context
    times = seconds_of(program._graph, 21)
    ms = 1e3 * statistics.median(times)
    for model in (target, drafter):
        heed(model)
    draft = (int(program.stamps[1]) - int(program.stamps[0])) * 1e-6
    value = f"{ms:.3f} ms, {draft:.3f} of it drafting: {5e3 / ms:.0f} tokens/s at acceptance length 5"
    yield Row(part, f"round, K = {k}", value, 5e3 / ms >= 208)


def _bytes_of(model: Any) -> int:
    from .host import weight_bytes

    return weight_bytes(model)


def _read_ceiling() -> float:
    from ...bench.read_kernel import read_ceiling

    return read_ceiling()["tb_s"]


def free_memory() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def card(part: str) -> Iterable[Row]:
    import torch

    from .compile import find_compiler

    about = torch.cuda.get_device_properties(0)
    yield Row(
        part, "GPU", f"{about.name}, {about.multi_processor_count} processors, {about.total_memory / 2**30:.0f} GiB"
    )
    yield Row(part, "torch, CUDA, compiler", f"{torch.__version__}, {torch.version.cuda}, {find_compiler().name}")


# All blocks meet at a barrier, or give up: word 0 counts who came, word 1 who waited in vain, word 2 who went on.
MEETING = """
struct Meeting { unsigned* words; unsigned blocks, most_spins; };
extern "C" __global__ void __launch_bounds__(BLOCK, 1) meeting(const __grid_constant__ Meeting p) {
  extern __shared__ unsigned room[];
  room[threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x) return;
  atomicAdd(p.words, 1u);
  unsigned spins = 0, seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p.words) : "memory");
  } while (seen < p.blocks && ++spins < p.most_spins);
  atomicAdd(p.words + (seen < p.blocks ? 1 : 2), room[BLOCK - 1] == BLOCK - 1 ? 1u : 1000u);
}
"""


class Meeting(ctypes.Structure):
    _fields_ = [("words", ctypes.c_void_p), ("blocks", ctypes.c_uint), ("most_spins", ctypes.c_uint)]


def launch_alone(part: str) -> Iterable[Row]:
    """Compiler, driver, cooperative launch and graph with a kernel of ten lines: what the large one stands on."""
    import torch

    from ..gpu_model import captured
    from .compile import compile_cubin
    from .launch import Driver, Kernel, LaunchShape, StreamError

    block, shape = 640, LaunchShape(128, 640, 220_000)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    made = compile_cubin(MEETING, {"BLOCK": block})
    kernel = Kernel(Driver(), made.code, "meeting", shape, processors)
    words = torch.zeros(3, dtype=torch.int32, device=DEVICE)

    def launch(expected: int) -> None:
        words.zero_()
        params = Meeting(words.data_ptr(), expected, 1 << 20)
        kernel.launch(params, torch.cuda.current_stream().cuda_stream)

    launch(shape.grid)
    came = words.tolist()
    yield Row(part, "all blocks meet", f"{came} ({made.report['seconds']} s to compile)", came == [128, 0, 128])
    graph = captured(lambda: launch(shape.grid))
    for _ in range(1000):
        graph.replay()
    came = words.tolist()
    yield Row(part, "1,000 replays of a graph", f"{came}", came == [128, 0, 128])
    launch(shape.grid + 1)
    came = words.tolist()
    yield Row(part, "one block too few: gives up", f"{came}", came == [128, 128, 0])
    try:
        Kernel(Driver(), made.code, "meeting", LaunchShape(processors + 1, block, shape.shared_bytes), processors)
        yield Row(part, "one block too many", "was not refused", False)
    except StreamError as refused:
        yield Row(part, "one block too many", str(refused.found), True)


# -------------------------------------------------------------------------------------------------------- part by part

PARTS: dict[str, Callable[[str], Iterable[Row]]] = {
    "card": card,
    "launch": launch_alone,
    **dict.fromkeys(MODELS, check_model),
    "time 1B": time_drafter,
    "time 135M": time_embedded_shape,
    "time 70B": time_target,
}


def run_here(parts: Sequence[str]) -> None:
    """Run parts in this process, a JSON line for every row, and one at the end of every part."""
    import torch

    for part in parts:
        start, why = time.perf_counter(), None
        try:
            with torch.inference_mode():
                for row in PARTS[part](part):
                    print(json.dumps(row), flush=True)
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - the table says what it was and where
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "tutorial_lib" in f.filename]
            where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            why = f"{type(error).__name__}{where}: {' '.join(str(error).split())}"[:600]
        print(json.dumps({"ended": part, "why": why, "seconds": time.perf_counter() - start}), flush=True)
        try:
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - the context is lost; the other process goes on in a new one
            os._exit(LOST)
        free_memory()


def run(parts: Sequence[str], show: Callable[[Row], None], limit_s: float = PART_LIMIT_S) -> list[Row]:
    """All parts in processes of their own, as few as possible; a part that ends its process or takes longer than
    `limit_s` is noted, and the rest goes on in another one."""
    found: list[Row] = []
    left = list(parts)

    def add(row: Row) -> None:
        found.append(row)
        show(row)

    while left:
        command = [sys.executable, "-m", MODULE, "--here", "--parts", ",".join(left)]
        with (
            TemporaryFile("w+") as said,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
        ):
            why = _listen(process, left, add, limit_s)
            process.kill()
            process.wait()
            said.seek(0)
            last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
        if why is not None and process.returncode != LOST:
            add(Row(left.pop(0), "the process", f"{why}: {last[:300]}", False))
    return found


def _listen(process: subprocess.Popen, left: list[str], add: Callable[[Row], None], limit_s: float) -> str | None:
    """Take rows as they come and parts off `left` as they end. Returns why no more came, None once all have ended."""
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + limit_s
    while left:
        try:
            line = lines.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            return f"took longer than {limit_s:.0f} s"
        if not line:
            return f"ended with {process.wait()}"
        if not line.startswith(("[", "{")):
            continue
        item = json.loads(line)
        if isinstance(item, list):
            add(Row(*item))
        elif item["ended"] == left[0]:
            deadline = time.monotonic() + limit_s
            is_fine = item["why"] is None
            add(Row(left.pop(0), "part", f"{item['seconds']:.1f} s" if is_fine else item["why"], is_fine))
    return None


def line_of(row: Row) -> str:
    mark = {True: "ok   ", False: "WRONG", None: "     "}[row.is_fine]
    return f"{mark} {row.part:<14} {row.what:<28} {row.value}"


def _capability() -> tuple[int, int]:
    """(0, 0) where torch sees no GPU."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the whole-step kernel on this GPU, then time it.")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    parts = [part.strip() for part in asked.parts.split(",")]
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}")
    if asked.here:
        run_here(parts)
        return 0
    if (against := obstacle(None, 1, capability=_capability())) is not None:
        parser.error(f"{against.found}; needed: {against.needed}")
    start = time.perf_counter()
    found = run(parts, lambda row: print(line_of(row), flush=True))
    wrong = sum(row.is_fine is False for row in found)
    print(f"{len(found)} rows, {wrong} wrong, {time.perf_counter() - start:.0f} s")
    if asked.json:
        Path(asked.json).write_text(json.dumps([row._asdict() for row in found], indent=1), "utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
