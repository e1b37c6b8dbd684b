"""The whole-step kernel made ready for one model, and its launches: `WholeSteps` for `model.StreamModel`.

A launch is a memset of the counters its barriers use and the kernel itself, both on torch's current stream, so both
are captured by a graph. What never changes (weights, tables, cache, buffers) stands in the parameters from the
beginning; a launch sets what it is called with. Tensors whose address was given to a graph have to stay where they
are: those of the model and of `buffers` live as long as this object, the others are the caller's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from ...errors import OptionError
from ..gpu_model import GpuModel
from .budget import MOST_STEPS, ROW_BUCKETS, SHARED_BYTES, THREADS, Formats, Memory, bucket, defines, memory
from .choice import STREAM_ROWS
from .compile import cubin_for, cubins_for
from .launch import GO_ON, Driver, Kernel, LaunchShape
from .model import WholeSteps
from .params import Params, declaration
from .plan import Plan, Unfit, plan
from .weights import PackedWeights, pack_weights

TROUBLE_WORDS = 4  # error, phase, block, barrier


class Launchable(Protocol):
    """`launch.Kernel`."""

    shape: LaunchShape

    def launch(self, params: ctypes.Structure, stream: int) -> None: ...


class LaunchedSteps:
    """kernels: row bucket -> the kernel for that many rows at most. params: its structure, a ctypes class; constants:
    what its fields have in every launch. zeroed: tensors that are zero at the beginning of a launch. words: the words
    of an error -> half a sentence. report: see `WholeSteps`.

    Fields that a launch sets: sequences, rows (of each, in the first step), steps; tokens, table, table_stride,
    lengths, slots; mask and depths (0 for a chain of tokens); choices, damage, damage_rows (rows that share an entry
    of it); logits (0 if nobody wants them); ids (0 for none), vocab_limit (ids from here on are never chosen).
    """

    def __init__(
        self,
        kernels: Mapping[int, Launchable],
        params: type[ctypes.Structure],
        constants: Mapping[str, int | float | torch.Tensor],
        *,
        head_rows: int,
        trouble: torch.Tensor,
        zeroed: Sequence[torch.Tensor],
        words: Callable[[Sequence[int]], str],
        report: dict[str, Any],
    ) -> None:
        self.kernels, self.head_rows, self.trouble, self.explain = dict(kernels), head_rows, trouble, words
        self.report, self._zeroed, self._params = report, tuple(zeroed), params
        self.weights: PackedWeights | None = None  # kept for its memory, whose addresses are in `constants`
        self.clock: torch.Tensor | None = None  # where launches put their phase clock, see `clock.timed`
        self._constants, self._known = dict(constants), {name for name, *_ in params._fields_}  # type: ignore[misc]
        self._drafts = torch.zeros(STREAM_ROWS * 2 * STREAM_ROWS, dtype=torch.int32, device=trouble.device)
        self._no_damage = torch.zeros(1, dtype=torch.int32, device=trouble.device)
        if unknown := sorted(set(constants) - self._known):
            raise TypeError(f"{params.__name__} has no field {unknown[0]!r}")

    @property
    def layers(self) -> int:
        return int(self._constants["layers"])

    @property
    def blocks(self) -> int:
        return max(kernel.shape.grid for kernel in self.kernels.values())

    def step(
        self,
        tokens: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        rows: int,
        *,
        choices: torch.Tensor,
        damage: torch.Tensor,
        logits: torch.Tensor | None,
        tree: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        count = lengths.shape[0] * rows
        tokens = tokens.to(torch.int32).contiguous()  # a column of a round's tokens, or a caller's int64
        mask, depths = (None, None) if tree is None else tree
        if mask is not None and mask.shape[1] != rows:
            raise OptionError(f"a tree's mask has {mask.shape[1]} columns", f"{rows}, its rows", GO_ON)
        self._launch(
            count, sequences=lengths.shape[0], rows=rows, steps=1, is_chain=0, tokens=tokens, table=table,
            table_stride=table.stride(0), lengths=lengths, slots=slots, mask=mask, depths=depths, choices=choices,
            damage=damage, damage_rows=count // damage.shape[0], logits=logits, ids=None, vocab_limit=self.head_rows,
        )  # fmt: skip

    def chain(
        self,
        pair: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        ids: torch.Tensor | None,
        vocab_size: int,
    ) -> None:
        batch, k = out.shape
        if k > MOST_STEPS:
            raise OptionError(f"a draft has {k} tokens", f"at most {MOST_STEPS} by the whole-step kernel", GO_ON)
        drafts = self._drafts[: k * batch].view(k, batch)
        limit = self.head_rows if ids is not None else min(vocab_size, self.head_rows)
        self._launch(
            2 * batch, sequences=batch, rows=2, steps=k, is_chain=1, tokens=pair, table=table,
            table_stride=table.stride(0), lengths=lengths, slots=slots, mask=None, depths=None, choices=drafts,
            damage=self._no_damage, damage_rows=2 * batch, logits=None, ids=ids, vocab_limit=limit,
        )  # fmt: skip
        out.copy_(drafts.t())

    def _launch(self, count: int, **given: int | torch.Tensor | None) -> None:
        bucket = next((rows for rows in sorted(self.kernels) if rows >= count), None)
        if bucket is None:
            raise OptionError(f"a launch has {count} rows", f"at most {max(self.kernels)}", GO_ON)
        params = self._params()
        for name, value in {**self._constants, **given, "clock": self.clock}.items():
            setattr(params, name, _plain(name, value))
        for tensor in self._zeroed:
            tensor.zero_()
        stream = torch.cuda.current_stream().cuda_stream if self.trouble.is_cuda else 0
        self.kernels[bucket].launch(params, stream)


def _plain(name: str, value: int | float | torch.Tensor | None) -> int | float:
    """A field's value: the address of a tensor, which has to be dense unless its stride is told too; 0 for None."""
    if value is None:
        return 0
    if not isinstance(value, torch.Tensor):
        return value
    is_dense = value.is_contiguous() or (name == "table" and value.stride(-1) == 1)
    if not is_dense or (name in _INT32 and value.dtype != torch.int32):
        raise TypeError(f"{name} is {value.dtype} of strides {value.stride()}; the kernel reads dense int32")
    return value.data_ptr()


_INT32 = frozenset({"tokens", "table", "lengths", "slots", "depths", "choices", "damage"})


def processor_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def assemble_steps(
    model: GpuModel,
    plan: Plan,
    kernels: Mapping[int, Launchable],
    *,
    counters: int,
    scratch_bytes: int,
    in_place: bool,
    report: dict[str, Any],
) -> LaunchedSteps:
    """Pack the weights of `model` and lay the kernel's buffers out. kernels: by row bucket. counters: uint32 words of
    its barriers. scratch_bytes: of activations and partial sums, for the most rows."""
    device, head_rows = model.device, model.head.data.shape[0]
    packed = pack_weights(model, plan, in_place=in_place)
    barriers = torch.zeros(counters, dtype=torch.int32, device=device)
    trouble = torch.zeros(TROUBLE_WORDS, dtype=torch.int32, device=device)
    constants: dict[str, int | float | torch.Tensor] = {
        "layers": len(model.layers),
        "window": model.config.sliding_window or 0,
        "pages": model.pages,
        "eps": model.config.rms_norm_eps,
        "counters": barriers,
        "scratch": torch.zeros(scratch_bytes, dtype=torch.uint8, device=device),
        "trouble": trouble,
        **packed.fields,
    }
    steps = LaunchedSteps(
        kernels, Params, constants, head_rows=head_rows, trouble=trouble, zeroed=[barriers], words=trouble_words,
        report=report,
    )  # fmt: skip
    steps.weights = packed
    return steps


def trouble_words(trouble: Sequence[int]) -> str:
    """The error word, phase, block and barrier that a launch left when it gave up."""
    code, phase, block, barrier = trouble[:TROUBLE_WORDS]
    return f"in phase {phase}, block {block} waited in vain at barrier {barrier} (error {code})"


@dataclass(frozen=True)
class Fit:
    """How the kernel serves a model. macros: by row bucket."""

    plan: Plan
    memory: Memory
    macros: dict[int, dict[str, int | str]]


def plan_for(model: GpuModel, blocks: int | None = None) -> Fit:
    """How the kernel is to divide the model among the GPU's processors, or among `blocks`. Raises `WorkbookError` where
    it cannot."""
    layer, head, config = model.layers[0], model.head.data, model.config
    if layer.is_fp8 and layer.qkv_in is None:
        raise OptionError("the activations find their FP8 scales row by row", "calibrated scales", GO_ON)
    each = config.head_dim // 8
    if layer.q_norm is not None and (each & (each - 1) or each > 32):
        needed = "a power of two up to 256 where queries and keys have norms"
        raise Unfit(f"the model has heads of {config.head_dim}", needed, GO_ON)
    made = plan(
        config, blocks or processor_count(model.device), weight_bytes=layer.qkv.data.element_size(),
        head_bytes=head.element_size(), head_rows=head.shape[0],
    )  # fmt: skip
    formats = Formats(
        weights=layer.is_fp8,
        head=model.head.scale is not None,
        cache=model.cache.element_size() == 1,
        qk_norm=layer.q_norm is not None,
    )
    room = memory(made, config, model.max_positions)
    macros = {rows: defines(made, config, formats, bucket(made, config, formats, rows), room) for rows in ROW_BUCKETS}
    return Fit(made, room, macros)


def kernel_source() -> str:
    """The whole text that is compiled: machine, parameters, kernel."""
    machine, step = (Path(__file__).with_name(name).read_text("utf-8") for name in ("machine.cuh", "step.cu"))
    return "\n".join([machine, declaration(), step])


def open_steps(
    model: GpuModel, *, folder: Path | None, store: Path | None, in_place: bool, say: Callable[[str], None]
) -> WholeSteps:
    """Plan, compile, pack and load. folder: where cubins may lie, store: where to put them. in_place: the weights'
    natural order is not needed any more. Raises `WorkbookError` where the kernel does not fit model or GPU."""
    fit, source = plan_for(model), kernel_source()
    cubins = cubins_for(source, fit.macros, folder=folder, store=store, say=say)
    driver, processors = Driver(), processor_count(model.device)
    shape = LaunchShape(fit.plan.blocks, THREADS, SHARED_BYTES)

    def again(rows: int) -> bytes:
        return cubin_for(source, fit.macros[rows], folder=folder, is_fresh=True, say=say).code

    kernels = {
        rows: Kernel.open(driver, cubin.code, partial(again, rows), "step", shape, processors)
        for rows, cubin in cubins.items()
    }
    return assemble_steps(
        model, fit.plan, kernels, counters=fit.memory.counters, scratch_bytes=fit.memory.scratch_bytes,
        in_place=in_place, report={"kernels": [cubin.report for cubin in cubins.values()], "blocks": fit.plan.blocks},
    )  # fmt: skip
