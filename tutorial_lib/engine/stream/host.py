"""The whole-step kernel at build and at load: what a build prepares and measures, and how a loaded model gets it.

A build compiles the kernel for the model, times a step of it against a step of the Triton kernels on the same weights,
and leaves the machine code and the times in the engine directory; weights are stored in their natural order, which
both paths load. Packing them into the order of the stream is a permutation at the memory's speed, done at load: beside
the natural ones where the GPU has room for both, else in their place.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...config import DecodingBaseConfig
from ...errors import WorkbookError
from ..gpu_model import PAGE, GpuModel, Ops, captured, compile_steps, seconds_of
from ..model import ModelConfig
from .choice import STREAM_ROWS, choose, found_at_build, obstacle, too_many
from .model import StreamModel, WholeSteps
from .steps import open_steps, plan_for

if TYPE_CHECKING:
    from ...engine_dir import EngineInfo

FOLDER = "stream"  # of an engine directory: its cubins
MEASURED_ROWS = (1, 8, STREAM_ROWS)
MEASURED_CONTEXT = 600
SPARE_BYTES = 4 << 30  # what graphs, scratch and logits may still take when weights are kept in both orders
STEPS_PER_GRAPH = 4

Say = Callable[[str], None]


# ------------------------------------------------------------------------------------------------------------- at build


def prepare(
    staging: Path,
    config: ModelConfig,
    packed: Mapping[str, torch.Tensor],
    tactics: Mapping[str, Any],
    kernel: str,
    say: Say,
) -> dict[str, Any]:
    """Compile the kernel into `staging`, time it against Triton's; what engine.json keeps, see `found_at_build`.

    packed: tensors on the device, which may be rewritten in place. Raises why the kernel does not fit if `kernel` is
    "stream"; for "auto" that is told and kept.
    """
    against = obstacle(None, 1, capability=torch.cuda.get_device_capability())
    if against is None:
        try:
            return _prepare(staging, config, packed, tactics, say)
        except WorkbookError as unfit:
            against = unfit
    if kernel == "stream":
        raise against
    say(f"  whole-step kernel: {against}")
    return found_at_build(unfit=against)


def _prepare(
    staging: Path, config: ModelConfig, packed: Mapping[str, torch.Tensor], tactics: Mapping[str, Any], say: Say
) -> dict[str, Any]:
    from ..gpu_build import assemble

    positions = -(-(MEASURED_CONTEXT + STREAM_ROWS) // PAGE) * PAGE
    with torch.inference_mode():
        pages = positions // PAGE + 1
        model = assemble(
            config, packed, dict(tactics), pages=pages, max_positions=positions, ops=Ops.make(), max_sequences=1
        )
        plan_for(model)  # refuses before anything is timed
        compile_steps([(model, MEASURED_ROWS)])
        triton = step_ms(model, MEASURED_ROWS)
        stream = to_stream(model, store=staging / FOLDER, keeps_reader=False, say=say)
        ours = step_ms(stream, MEASURED_ROWS)
    ms = {rows: {"triton": triton[rows], "stream": ours[rows]} for rows in MEASURED_ROWS}
    shown = ", ".join(f"{rows}: {each['stream']:.3f} and {each['triton']:.3f}" for rows, each in ms.items())
    say(f"  step, ms by rows, whole-step kernel and Triton's: {shown}")
    return found_at_build(ms, kernels=stream.steps.report["kernels"])


def step_ms(model: GpuModel, rows: Sequence[int], *, context: int = MEASURED_CONTEXT) -> dict[int, float]:
    """Median milliseconds of a step with its argmax, behind `context` positions that hold whatever the cache holds,
    out of a graph of several."""
    device = model.device
    table = torch.arange(model.pages - 1, dtype=torch.int32, device=device)[None]
    length, slot = (torch.full((1,), n, dtype=torch.int32, device=device) for n in (context, 0))
    tokens = torch.arange(max(rows), dtype=torch.int32, device=device)
    best, damage = torch.zeros_like(tokens), torch.zeros_like(slot)

    def steps(n: int) -> None:
        for _ in range(STEPS_PER_GRAPH):
            model.choose(tokens[:n], table, length, slot, n, best[:n], damage=damage, needs_logits=False)

    found = {}
    for n in rows:
        graph = captured(partial(steps, n))
        found[n] = 1e3 * statistics.median(seconds_of(graph, 7)) / STEPS_PER_GRAPH
        heed(model)
    return found


# -------------------------------------------------------------------------------------------------------------- at load


class Loader:
    """Loads the models of one engine and decides for each what runs it. kernel: as asked for. round_rows: of one
    request. together: requests that may run at once. chosen: "target" and "drafter" -> {"kernel", "why"}, and of the
    whole-step kernel how it was compiled."""

    def __init__(
        self,
        kernel: str,
        config: DecodingBaseConfig | None,
        round_rows: int,
        kernels_off: Sequence[str],
        say: Say,
        *,
        together: int = 1,
    ) -> None:
        self.kernel, self.round_rows, self.together, self.say = kernel, round_rows, together, say
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
        self.against = obstacle(config, round_rows, capability=capability, kernels_off=kernels_off)
        self.chosen: dict[str, dict[str, Any]] = {}

    def load(
        self, info: EngineInfo, role: str, load: Callable[[], tuple[GpuModel, torch.Tensor | None]]
    ) -> tuple[GpuModel, torch.Tensor | None]:
        """What `load()` gives, the model run by the kernel that `choose` says. Raises why not if that was asked for."""
        measured = info.manifest["build"].get("stream")
        rows = self.round_rows if role == "target" else 1
        against = self.against
        if against is None and self.kernel == "auto":
            against = too_many(self.together, rows if role == "target" else 2)  # a draft begins with two tokens
        choice = choose(self.kernel, against, measured, rows)
        model, head_ids = load()
        report: dict[str, Any] = {}
        if choice.is_stream:
            streamed = to_stream(model, folder=info.path / FOLDER, say=self.say)
            report, model = {**streamed.steps.report, "prompt_rows": streamed.prompt_rows}, streamed
            if streamed.reader is None:
                self.say(f"weights of the {role} fit once only: {_cost_of_prompts(measured)}")
        self.chosen[role] = {"kernel": choice.kernel, "why": choice.why, **report}
        if self.kernel != "triton":
            self.say(f"kernel of the {role}: {choice.kernel}, {choice.why}")
        return model, head_ids


def _cost_of_prompts(measured: Mapping[str, Any] | None) -> str:
    """What it means for prompts that the whole-step kernel reads them too."""
    said = f"prompts are read {STREAM_ROWS} rows a step"
    ms = (measured or {}).get("ms", {}).get(str(STREAM_ROWS))
    if ms is None:
        return said
    seconds = 1e-3 * ms["stream"] * -(-1000 // STREAM_ROWS)
    return f"{said}, {seconds:.2f} s for 1,000 tokens"


def to_stream(
    model: GpuModel,
    *,
    folder: Path | None = None,
    store: Path | None = None,
    keeps_reader: bool | None = None,
    say: Say = lambda line: None,
) -> StreamModel:
    """`model` with its steps run by the whole-step kernel. folder: where its cubins may lie; store: where to put them.
    keeps_reader: keep the weights in their natural order too; None: if the GPU has room for both.

    Raises `WorkbookError` where the kernel does not fit the model or the GPU; the model is then as it was.
    """
    if keeps_reader is None:
        keeps_reader = has_room_for_both(model)
    steps: WholeSteps = open_steps(model, folder=folder, store=store, in_place=not keeps_reader, say=say)
    return StreamModel.of(model, steps, keeps_reader=keeps_reader)


def weight_bytes(model: GpuModel) -> int:
    """Of all products, the head included: what is packed."""
    weights = [w for layer in model.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)] + [model.head]
    return sum(weight.data.numel() * weight.data.element_size() for weight in weights)


def has_room_for_both(model: GpuModel) -> bool:
    """Whether the products fit the GPU's free memory a second time."""
    if model.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(model.device)
    held = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return weight_bytes(model) + SPARE_BYTES <= free + held


def heed(model: GpuModel) -> None:
    """Wait for the GPU and raise what its steps say went wrong."""
    if model.trouble is not None:
        model.check(model.trouble.tolist())
