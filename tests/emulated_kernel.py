"""The whole-step kernel on a CPU: `stream/step.cu` compiled by g++ over an emulated machine, `emulated_machine.h`.
Launches take the very parameters of a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir

import pytest

from tutorial_lib.engine.gpu_model import GpuModel
from tutorial_lib.engine.stream import steps
from tutorial_lib.engine.stream.launch import LaunchShape
from tutorial_lib.engine.stream.model import StreamModel
from tutorial_lib.engine.stream.params import declaration

MACHINE = Path(__file__).parent / "engine" / "emulated_machine.h"
KERNEL = Path(steps.__file__).with_name("step.cu")
STUCK, COPIES_LEFT = -1, -2


def compiled(macros: Mapping[str, int | str]) -> ctypes.CDLL:
    """The kernel with these macros as a library; the same one is built once."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernel for its emulator")
    text = "\n".join([declaration(), f'#include "{MACHINE}"', KERNEL.read_text("utf-8")])
    options = [f"-D{name}={value}" for name, value in macros.items()]
    key = hashlib.sha256("\0".join([text, MACHINE.read_text("utf-8"), *options]).encode()).hexdigest()[:24]
    folder = Path(gettempdir(), f"emulated-kernels-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    library = folder / f"{key}.so"
    if not library.is_file():
        source, made = folder / f"{key}-{os.getpid()}.cc", folder / f"{key}-{os.getpid()}.so"
        source.write_text(text, "utf-8")
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", *options]
        done = subprocess.run([*command, "-o", str(made), str(source)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        source.unlink()
        os.replace(made, library)
    return ctypes.CDLL(str(library))


class EmulatedKernel:
    """A `Launchable`. seed: of the order in which threads go on; changes from launch to launch."""

    def __init__(self, macros: Mapping[str, int | str], blocks: int, seed: int = 0) -> None:
        self.shape, self.seed, self.launches = LaunchShape(blocks, 640, 0), seed, 0
        self._run = compiled(macros).run_step
        self._run.restype = ctypes.c_longlong

    def launch(self, params: ctypes.Structure, stream: int) -> None:
        self.launches += 1
        turns = self._run(ctypes.byref(params), self.shape.grid, ctypes.c_uint32(self.seed + self.launches))
        assert turns not in (STUCK, COPIES_LEFT), turns


def emulated(model: GpuModel, blocks: int, *, rows: tuple[int, ...] = (16,), seed: int = 0, **macros) -> StreamModel:
    """`model` with its steps run by the emulated kernel, of these row buckets. macros: to change some."""
    fit = steps.plan_for(model, blocks)
    kernels = {r: EmulatedKernel({**fit.macros[r], **macros}, fit.plan.blocks, seed) for r in rows}
    made = steps.assemble_steps(
        model, fit.plan, kernels, counters=fit.memory.counters, scratch_bytes=fit.memory.scratch_bytes, in_place=False,
        report={"kernels": []},
    )  # fmt: skip
    return StreamModel.of(model, made, keeps_reader=True)
