"""The whole-step kernel made ready for one model: planned, compiled, its weights packed, its buffers laid out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import OptionError
from ..gpu_model import GpuModel
from .launch import GO_ON
from .model import WholeSteps


def open_steps(
    model: GpuModel, *, folder: Path | None, store: Path | None, in_place: bool, say: Callable[[str], None]
) -> WholeSteps:
    """Plan, compile, pack and load. folder: where cubins may lie, store: where to put them. in_place: the weights'
    natural order is not needed any more. Raises `WorkbookError` where the kernel does not fit model or GPU."""
    raise OptionError("this version has no whole-step kernel", "one", GO_ON)
