"""From CUDA source to machine code (a cubin) and a report of what it takes of the GPU. No GPU is needed for it.

The compiler is NVRTC, called through ctypes: torch's own CUDA wheels bring it. Where it is missing, `nvcc` serves if it
is on the path. What ptxas says on the way is read and kept: a kernel that spills registers, or whose tensor core
instructions ptxas had to put one behind the other, gives right results at a fraction of the speed, and nothing but
that log tells. `problems` says in words what a report has against it.

A cubin is known by its key, a hash of all that went into it. `cubin_for` looks for that key in the engine directory,
then in the user's cache, and compiles only if neither has it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from ...errors import BackendUnavailable
from ...models import cache_dir

ARCH = "sm_90a"  # wgmma exists on Hopper only, and only under this name
# Which products and sums a compiler would fuse into one rounding differs from kernel to kernel, and a row's result must
# not depend on the kernel that its launch happens to take: none are.
NO_FUSING = "--fmad=false"
HARMLESS_STACK_BYTES = 32  # of a thread: of 640 threads that much stays in what shared memory leaves of the L1 cache
Defines = Mapping[str, int | str]
Say = Callable[[str], None]

_NVRTC_NAMES = {13: "libnvrtc.so.13", 12: "libnvrtc.so.12"}
_NVRTC_FOLDERS = {13: "cu13/lib", 12: "cuda_nvrtc/lib"}  # below site-packages/nvidia


@dataclass(frozen=True)
class Cubin:
    """code: what the driver loads. report: plain data, see `read_log`, with compiler, arch, seconds and key."""

    code: bytes
    report: dict[str, Any]


class CompileError(RuntimeError):
    """Source that the compiler refuses: a defect of ours, told with the compiler's own words."""


class Compiler(Protocol):
    """name: with its version. compile: the cubin, None if the source is refused, and the compiler's whole log."""

    name: str

    def compile(self, source: str, defines: Defines, arch: str) -> tuple[bytes | None, str]: ...


# -------------------------------------------------------------------------------------------------------- the compilers


class Nvrtc:
    """NVIDIA's runtime compiler, a shared library. Raises OSError where it cannot be loaded."""

    def __init__(self, library: str) -> None:
        self._lib = ctypes.CDLL(library)
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.name = f"nvrtc {major.value}.{minor.value}"

    def compile(self, source: str, defines: Defines, arch: str) -> tuple[bytes | None, str]:
        lib, program = self._lib, ctypes.c_void_p()
        self._check(lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"step.cu", 0, None, None))
        try:
            options = [
                f"--gpu-architecture={arch}",
                "--std=c++17",
                NO_FUSING,
                "--ptxas-options=-v",
                *_as_options(defines),
            ]
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            is_refused = lib.nvrtcCompileProgram(program, len(options), array) != 0
            log = self._read(program, lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog).rstrip(b"\0").decode()
            return (None if is_refused else self._read(program, lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN)), log
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, size_of: Any, copy: Any) -> bytes:
        size = ctypes.c_size_t()
        self._check(size_of(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(copy(program, buffer))
        return buffer.raw

    def _check(self, result: int) -> None:
        if result != 0:
            raise CompileError(f"NVRTC: {self._lib.nvrtcGetErrorString(result).decode()}")


class Nvcc:
    """The compiler of a CUDA toolkit, a program."""

    def __init__(self, program: str) -> None:
        self._program = program
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"release ([\d.]+)", said)
        self.name = f"nvcc {found[1] if found else 'of unknown version'}"

    def compile(self, source: str, defines: Defines, arch: str) -> tuple[bytes | None, str]:
        with TemporaryDirectory() as folder:
            file, made = Path(folder, "step.cu"), Path(folder, "step.cubin")
            file.write_text(source, "utf-8")
            options = ["-cubin", f"-arch={arch}", "-std=c++17", NO_FUSING, "-Xptxas", "-v", *_as_options(defines)]
            command = [self._program, *options, "-o", str(made), str(file)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            log = (done.stdout + done.stderr).replace(f"{folder}/", "")
            return (made.read_bytes() if done.returncode == 0 else None), log


def _as_options(defines: Defines) -> list[str]:
    return [f"-D{name}={value}" for name, value in sorted(defines.items())]


def find_compiler() -> Compiler:
    """NVRTC of the CUDA release that torch was built with, else another, else nvcc. Raises `BackendUnavailable`."""
    for library in _nvrtc_libraries():
        try:
            return Nvrtc(library)
        except OSError:
            continue
    if program := shutil.which("nvcc"):
        return Nvcc(program)
    raise BackendUnavailable(
        "there is no CUDA compiler for the whole-step kernel",
        "NVRTC, which torch's CUDA wheels bring, or nvcc on the path",
        "pip install nvidia-cuda-nvrtc, or go on with kernel='triton'",
    )


def _nvrtc_libraries() -> list[str]:
    """Where to look, the best first. A cubin of a newer release than the driver's is refused by the driver, so the
    release of torch, which the driver serves already, comes first."""
    import torch

    own = int((torch.version.cuda or "0").split(".")[0])
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    releases = sorted(_NVRTC_NAMES, key=lambda release: (release != own, -release))
    inside = [root / _NVRTC_FOLDERS[r] / _NVRTC_NAMES[r] for r in releases for root in roots]
    return [*(str(path) for path in inside if path.exists()), *(_NVRTC_NAMES[r] for r in releases)]


# ----------------------------------------------------------------------------------------------------------- the report


def compile_cubin(source: str, defines: Defines, *, arch: str = ARCH, compiler: Compiler | None = None) -> Cubin:
    """Compile `source` with these macros. Raises `CompileError` with the log, `BackendUnavailable`."""
    compiler, start = compiler or find_compiler(), time.perf_counter()
    code, log = compiler.compile(source, defines, arch)
    if code is None:
        raise CompileError(f"{compiler.name} refuses the whole-step kernel:\n{log.strip()}")
    report = {
        "compiler": compiler.name,
        "arch": arch,
        "seconds": round(time.perf_counter() - start, 3),
        "bytes": len(code),
        "key": cubin_key(source, defines, arch),
        **read_log(log),
    }
    return Cubin(code, report)


def read_log(log: str) -> dict[str, Any]:
    """What ptxas says: {"kernels": name -> {"registers", "stack_bytes", "spill_bytes", "shared_bytes" (static only)},
    "serialized": its remarks on wgmma instructions that it did not let overlap}."""
    kernels: dict[str, dict[str, int]] = {}
    pieces = re.split(r"Compiling entry function '(\w+)'", log)
    for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        used, shared = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes smem", text)
        kernels[name] = {
            "registers": int(used[1]) if used else 0,
            "stack_bytes": int(stack[1]) if stack else 0,
            "spill_bytes": int(stack[2]) + int(stack[3]) if stack else 0,
            "shared_bytes": int(shared[1]) if shared else 0,
        }
    remarks = [" ".join(line.split()) for line in log.splitlines() if re.search(r"\bC75\d\d\b|serializ", line)]
    return {"kernels": kernels, "serialized": sorted(set(remarks))}


def problems(report: Mapping[str, Any], *, registers: int | None = None) -> list[str]:
    """What would make the kernel slow, or keep it from starting with more than `registers` each; a sentence apiece."""
    found = [] if report["kernels"] else ["the compiler's log names no kernel"]
    for name, used in report["kernels"].items():
        if used["spill_bytes"] and used["stack_bytes"] > HARMLESS_STACK_BYTES:
            found.append(f"{name} spills registers: {used['spill_bytes']} bytes of loads and stores")
        if registers is not None and used["registers"] > registers:
            found.append(f"{name} takes {used['registers']} registers, and {registers} are there for every thread")
    return [*found, *(f"tensor core instructions are serialized: {remark}" for remark in report["serialized"])]


# ----------------------------------------------------------------------------------------------------------- keeping it


def cubin_key(source: str, defines: Defines, arch: str = ARCH) -> str:
    """SHA-256 of all that decides what a cubin does; the compiler's version is not part of it."""
    return hashlib.sha256(json.dumps([source, sorted(defines.items()), arch]).encode()).hexdigest()


def cubin_for(
    source: str,
    defines: Defines,
    *,
    folder: Path | None = None,
    what: str = "the whole-step kernel",
    is_fresh: bool = False,
    compiler: Compiler | None = None,
    say: Say = lambda line: None,
) -> Cubin:
    """The cubin from `folder` or the user's cache; compiled, which is said, and put into the cache if neither has it.
    is_fresh: compile anyway, where the driver refused what was found. Raises as `compile_cubin` does."""
    key, cache = cubin_key(source, defines), cache_dir() / "cubins"
    for place in () if is_fresh else (folder, cache):
        if place is not None and (known := read_cubin(place, key)) is not None:
            return known
    if folder is not None:
        why = "the stored one does not run here" if is_fresh else "the engine directory has none that fits"
        say(f"compiling {what} again: {why}")
    made = compile_cubin(source, defines, compiler=compiler)
    write_cubin(cache, made)
    return made


def cubins_for(
    source: str,
    wanted: Mapping[int, Defines],
    *,
    folder: Path | None = None,
    store: Path | None = None,
    compiler: Compiler | None = None,
    say: Say = lambda line: None,
) -> dict[int, Cubin]:
    """`cubin_for` the macros of every row bucket, several at a time. store: a folder that gets a copy of each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def get(rows: int) -> Cubin:
        what = f"the whole-step kernel of {rows} rows"
        return cubin_for(source, wanted[rows], folder=folder, what=what, compiler=compiler, say=say)

    with ThreadPoolExecutor(min(cores, len(wanted)) or 1) as pool:
        found = dict(zip(wanted, pool.map(get, wanted), strict=True))
    if store is not None:
        for cubin in found.values():
            write_cubin(store, cubin)
    return found


def write_cubin(folder: Path, cubin: Cubin) -> None:
    """Two files, `KEY.cubin` and its report `KEY.json`, each whole or not at all, the report last."""
    folder.mkdir(parents=True, exist_ok=True)
    key = cubin.report["key"][:16]
    digest = hashlib.sha256(cubin.code).hexdigest()
    report = json.dumps({**cubin.report, "sha256": digest}, indent=1).encode()
    for name, data in ((f"{key}.cubin", cubin.code), (f"{key}.json", report)):
        staging = folder / f".{name}.{secrets.token_hex(4)}"
        staging.write_bytes(data)
        os.replace(staging, folder / name)


def read_cubin(folder: Path, key: str) -> Cubin | None:
    """The cubin of this key, or None if it is not there, is of another key or was damaged."""
    try:
        report = json.loads((folder / f"{key[:16]}.json").read_text("utf-8"))
        code = (folder / f"{key[:16]}.cubin").read_bytes()
        if report.get("key") != key or report.pop("sha256") != hashlib.sha256(code).hexdigest():
            return None
    except (OSError, ValueError, KeyError):
        return None
    return Cubin(code, report)
