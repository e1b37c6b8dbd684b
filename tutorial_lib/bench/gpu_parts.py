"""The parts that every GPU experiment has: card, read ceiling, build, load, step times, breakdown, first token."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ..config import SamplingParams
from ..errors import OptionError
from ..results import Generation
from ..shapes import BYTES_PER_ELEMENT, head_dim, parameter_count, tensor_shapes
from . import cost_model
from .gpu_meter import by_kind
from .gpu_run import Record, Run, free_gpu_memory

CACHE_BYTES = 2  # of one number of the KV cache: bf16
EMBEDDED_SEQ_LEN = 2048
FIRST_TOKEN_LIMIT_S = 180.0


def model_card(checkpoint: Any, dtype: str) -> Record:
    """Sizes that follow from the shapes alone: parameters, bytes that one step reads, KV bytes of one token."""
    config, shapes = checkpoint.config, tensor_shapes(checkpoint.config)
    matrices = [shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]
    shortlist = checkpoint.draft_vocab()
    head_rows = config["vocab_size"] if shortlist is None else len(shortlist)
    layer_bytes = sum(map(math.prod, matrices)) * (1 if dtype == "fp8" else BYTES_PER_ELEMENT[dtype])
    head_bytes = head_rows * config["hidden_size"] * BYTES_PER_ELEMENT["bfloat16"]
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return {
        "model": checkpoint.name,
        "dtype": dtype,
        "head_dtype": "bfloat16",
        "parameters": parameter_count(config),
        "layer_bytes_per_step": layer_bytes,
        "head_bytes_per_step": head_bytes,
        "bytes_per_step": layer_bytes + head_bytes,
        "kv_bytes_per_token": 2 * config["num_hidden_layers"] * kv_heads * head_dim(config) * CACHE_BYTES,
    }


def card(run: Run) -> dict[str, Record | None]:
    """The static card, said before anything is measured; then the read ceiling, and the floors that follow from it.
    Returns the cards of "target" and "drafter"."""
    cards = {role: _static_card(run, role) for role in ("target", "drafter")}
    ceiling = run.part("read bandwidth", 3, run.tools.read_ceiling)
    rate = ceiling["tb_s"] if ceiling else None
    floors = {"step_ms": _floor_ms(cards["target"], rate), "draft_step_ms": _floor_ms(cards["drafter"], rate)}
    step, draft = floors["step_ms"], floors["draft_step_ms"]
    if step is not None and draft is not None:
        floors["round_ms"] = run.experiment.max_draft_len * draft + step
        run.say(f"read ceiling {rate:.2f} TB/s: no target step under {step:.3f} ms, no draft step under {draft:.3f} ms")
    run.summary |= {"read_ceiling_tb_s": rate, "floors": floors}
    gpu = run.nvml.limits() | run.nvml.now()
    run.add("card", **cards, read_ceiling=ceiling, floors=floors, context=run.experiment.context, gpu=gpu)
    run.write()
    return cards


def _static_card(run: Run, role: str) -> Record | None:
    name, dtype = getattr(run.experiment, role), run.experiment.dtype

    def make() -> Record:
        found = model_card(run.tools.resolve(name, say=run.say), dtype)
        run.say(
            f"{role} {name}: {found['parameters'] / 1e9:.2f} G parameters; a step reads "
            f"{found['layer_bytes_per_step'] / 1e9:.2f} GB of {dtype} layers and "
            f"{found['head_bytes_per_step'] / 1e9:.2f} GB of head; {found['kv_bytes_per_token']:,} bytes of KV a token"
        )
        return found

    return run.part(f"card of the {role}", 1, make)


def _floor_ms(model: Record | None, tb_s: float | None) -> float | None:
    return 1e3 * cost_model.step_floor_s(model["bytes_per_step"], tb_s * 1e12) if model and tb_s else None


def build(run: Run, folder: Path, role: str, dtype: str, seconds: float) -> Path | None:
    """Compile the target or the drafter into `folder`; its record says what the build took, chose and measured."""
    e = run.experiment
    name, draft_len = getattr(e, role), max(e.all_draft_lens)
    timed = e.context + max(*e.rows, draft_len + 1)
    length = max(e.prompt_tokens + e.output_tokens, timed) if e.is_simulated else EMBEDDED_SEQ_LEN

    def make() -> Path:
        start = run.elapsed_s
        path = run.tools.build(
            name, folder / f"{role}-{dtype}", dtype=dtype, device="cuda", max_batch_size=1, max_seq_len=length,
            max_draft_len=draft_len, kernel=run.kernel, say=run.say,
        )  # fmt: skip
        took = run.elapsed_s - start
        free_gpu_memory()
        facts = json.loads((path / "engine.json").read_text("utf-8"))
        run.add(
            "build", of=role, model=name, dtype=dtype, build_s=took, steps=facts["build"]["steps"],
            limits=facts["limits"], tactics=facts["tactics"], products=facts["build"].get("timings"),
            whole_step=facts["build"].get("stream"),
        )  # fmt: skip
        key = "build_s" if (role, dtype) == ("target", e.dtype) else f"build_{role}_{dtype}_s"
        run.summary[key] = took
        run.say(f"{key} {took:.1f}")
        return path

    return run.part(f"build of the {role}, {dtype}", seconds, make)


def load(run: Run, key: str, prompt_ids: Callable[[Any], list[int]], model: str, **options: Any) -> Any:
    """An `LLM` that has made one token; the seconds until then go into the summary as `key`, unless that is ""."""
    start = run.elapsed_s
    own = {} if "backend" in options else {"kernel": run.kernel}
    llm = run.tools.llm(model, device="cuda", **own, **options)
    try:
        llm.generate(prompt_ids(llm), SamplingParams(max_tokens=1))
    except BaseException:
        llm.close()
        raise
    run.summary.setdefault("kernels", {}).update(llm.info.get("kernels") or {})
    if key:
        run.summary[key] = run.elapsed_s - start
        run.say(f"{key} {run.summary[key]:.1f}: engine directory to first token")
    return llm


@contextmanager
def closing(llm: Any) -> Iterator[Any]:
    """Closes `llm`, if there is one, so that the next one finds its memory free."""
    try:
        yield llm
    finally:
        if llm is not None:
            llm.close()
        free_gpu_memory()


def time_steps(run: Run, llm: Any, model: Record | None) -> dict[int, float]:
    """Milliseconds of a target pass by rows, and what share of the read ceiling one row reaches."""
    e = run.experiment
    rows = sorted({1, *e.rows, *(k + 1 for k in e.all_draft_lens)})
    step_ms = {n: 1e3 * seconds for n, seconds in llm.time_steps(rows, e.context).items()}
    rates = _rates(run, model, step_ms[1])
    run.summary |= {"step_ms": step_ms, "step_ratio": {n: ms / step_ms[1] for n, ms in step_ms.items()}, **rates}
    run.add("steps", of="target", model=e.target, context=e.context, step_ms=step_ms, **rates)
    share = "" if rates["pct_of_ceiling"] is None else f"; one row at {rates['pct_of_ceiling']:.1f}% of the ceiling"
    run.say("step, ms by rows: " + ", ".join(f"{n}: {ms:.3f}" for n, ms in step_ms.items()) + share)
    return step_ms


def time_drafts(run: Run, llm: Any, model: Record | None) -> dict[int, float]:
    """Milliseconds of drafting K tokens, by K."""
    e = run.experiment
    draft_ms = {k: 1e3 * llm.time_draft(k, e.context) for k in e.all_draft_lens}
    step_ms = draft_ms[e.max_draft_len] / e.max_draft_len
    rates = _rates(run, model, step_ms)
    run.summary |= {"draft_ms": draft_ms, "draft_step_ms": step_ms, "draft_pct_of_ceiling": rates["pct_of_ceiling"]}
    run.add(
        "steps", of="drafter", model=e.drafter, context=e.context, draft_ms=draft_ms, draft_step_ms=step_ms, **rates
    )
    run.say(f"draft step {step_ms:.3f} ms; ms by K: " + ", ".join(f"{k}: {ms:.3f}" for k, ms in draft_ms.items()))
    return draft_ms


def _rates(run: Run, model: Record | None, step_ms: float) -> dict[str, float | None]:
    ceiling = run.summary.get("read_ceiling_tb_s")
    tb_s = model["bytes_per_step"] / step_ms / 1e9 if model else None
    return {"tb_s": tb_s, "pct_of_ceiling": 100 * tb_s / ceiling if tb_s and ceiling else None}


def median_round_ms(generations: Sequence[Generation]) -> float | None:
    """Median milliseconds between the ends of successive rounds."""
    gaps = [b.end_s - a.end_s for g in generations for a, b in zip(g.rounds, g.rounds[1:], strict=False)]
    return 1e3 * statistics.median(gaps) if gaps else None


def overhead_ms(run: Run, max_draft_len: int, round_ms: float | None) -> float | None:
    """What a round takes beside its draft steps and its verification, both timed apart from it."""
    draft_ms = run.summary.get("draft_ms", {}).get(max_draft_len)
    verify_ms = run.summary.get("step_ms", {}).get(max_draft_len + 1)
    return None if None in (round_ms, draft_ms, verify_ms) else round_ms - draft_ms - verify_ms  # type: ignore[operator]


def in_round(figures: Record) -> Record:
    """The parts of a round as measured inside it, under the names of the summary."""
    return {f"{part}_ms_in_round": figures[f"{part}_ms_per_round"] for part in ("draft", "verify", "overhead")}


def breakdown(run: Run, llm: Any, of: str, prompt_ids: Sequence[int], rounds: int) -> Record:
    """Time by kind of kernel in `rounds` rounds."""
    most = (llm.info.get("max_draft_len", 0) + 1) * (rounds + 8)
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    found = by_kind(run.tools.profile_rounds(llm, prompt_ids, params, rounds), rounds)
    run.add("breakdown", of=of, model=run.experiment.target, **found)
    kinds = [f"{kind['kind']} {kind['us_per_round'] / 1e3:.3f}" for kind in found["kinds"][:8]]
    run.say(f"{of}, ms by kernel: {', '.join(kinds)}; gaps {found['gap_us_per_round'] / 1e3:.3f}")
    return found


def energy(run: Run, llm: Any, name: str, prompt_ids: Sequence[int], seconds: float = 2.0) -> float | None:
    """Joules per output token of one answer over and over, for answers too short to be metered one by one."""
    params = SamplingParams(max_tokens=run.experiment.output_tokens, ignore_eos=True)
    llm.generate(list(prompt_ids), params)
    before, start, tokens = run.nvml.energy_j(), run.elapsed_s, 0
    while run.elapsed_s - start < seconds:
        tokens += len(llm.generate(list(prompt_ids), params).token_ids)
    after = run.nvml.energy_j()
    found = None if before is None or after is None else (after - before) / tokens
    run.summary.setdefault("energy_j_per_token", {})[name] = found
    run.add("energy", of=name, model=run.experiment.target, output_tokens=tokens, energy_j_per_token=found)
    if found is not None:
        run.say(f"{name}: {found:.3f} J per token")
    return found


def first_token(run: Run, target: Path | None, drafter: Path | None) -> None:
    """How long a new process takes to its first token, once this one has let go of the GPU's memory."""

    def measure() -> float:
        run.summary["start_s"] = run.tools.first_token_s(target, drafter, run.experiment.max_draft_len)
        run.say(f"start_s {run.summary['start_s']:.1f}: a new process to its first token")
        return run.summary["start_s"]

    run.part("first token of a new process", 25, measure, target)


def first_token_s(target: Path, drafter: Path | None, max_draft_len: int) -> float:
    """Seconds from starting `workbook generate` until it has told its one token. The text is dropped."""
    command = [sys.executable, "-m", "tutorial_lib.cli", "generate", "--target", str(target), "--raw"]
    command += ["--prompt", "Why is the sky blue?", "--max-tokens", "1", "--json", "-"]
    if drafter is not None:
        command += ["--drafter", str(drafter), "--max-draft-len", str(max_draft_len)]
    root = Path(__file__).parents[2]
    start = time.perf_counter()
    with (
        TemporaryFile("w+") as said,
        subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        timer = threading.Timer(FIRST_TOKEN_LIMIT_S, process.kill)
        timer.start()
        try:
            line = process.stdout.readline() if process.stdout else ""
            seconds = time.perf_counter() - start
            process.wait()
        finally:
            timer.cancel()
            process.kill()
        if process.returncode or not line.startswith("{"):
            said.seek(0)
            last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
            raise OptionError(f"workbook generate ended with {process.returncode} ({last[:200]})", "a first token")
    return seconds
