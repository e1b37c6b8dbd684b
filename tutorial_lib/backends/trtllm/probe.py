"""Is TensorRT-LLM here, which release, and does it import? Asked in a process of its own with a time limit.

Importing it in this process could hang for ever in MPI (mpich, or an old mpi4py out of a conda channel) and would
start CUDA. The answer comes with what to do.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import dataclass
from importlib import metadata

from ...subprocesses import run_bounded

INSTALL = (
    "use NVIDIA's container (docker run --rm -it --ipc host --gpus all nvcr.io/nvidia/tensorrt-llm/release:1.2.1), or "
    "on Linux with an NVIDIA GPU and Python 3.12: apt-get install openmpi-bin libopenmpi-dev, then "
    "pip install tensorrt_llm==1.2.1 --extra-index-url https://pypi.nvidia.com (the public index has only a stub)"
)
REPAIR_MPI = (
    "take Open MPI and mpi4py >= 4 (apt-get install openmpi-bin libopenmpi-dev; in a conda environment: "
    "conda install -c conda-forge openmpi 'mpi4py>=4'), or use NVIDIA's container"
)
_MARK = "tensorrt_llm version: "
_CODE = (
    "import tensorrt_llm as t, os; "
    f"print({_MARK!r} + str(t.__version__) + (' stand-in' if getattr(t, 'IS_STAND_IN', False) else ''), flush=True); "
    "os._exit(0)"
)


def remedy_for(reason: str) -> str:
    """What to do about a failed import, from what it said: mend MPI, or install the library the supported way."""
    is_mpi = any(word in reason.lower() for word in ("mpi", "hang", "longer than", "did not end"))
    return REPAIR_MPI if is_mpi else INSTALL


@dataclass(frozen=True)
class ProbeResult:
    """version: what imports, None if nothing does. reason: why not. remedy: what to do. `installed`: the release that
    pip knows of, imported or not. is_stand_in: the tests' replacement, which computes nothing."""

    version: str | None
    reason: str = ""
    remedy: str = ""
    installed: str | None = None
    is_stand_in: bool = False
    seconds: float = 0.0

    @property
    def is_usable(self) -> bool:
        return self.version is not None

    def describe(self) -> str:
        """One line for the doctor."""
        if self.version is not None:
            return f"TensorRT-LLM {self.version}" + (" (a stand-in for tests)" if self.is_stand_in else "")
        return f"TensorRT-LLM is not usable: {self.reason}; do this: {self.remedy}"


def probe(timeout_s: float = 8.0) -> ProbeResult:
    """Whether `import tensorrt_llm` works with this Python; returns after at most about `timeout_s` seconds."""
    start = time.perf_counter()
    try:
        spec = importlib.util.find_spec("tensorrt_llm")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return ProbeResult(None, "it is not installed", INSTALL, seconds=time.perf_counter() - start)
    installed = _installed_version()
    done = run_bounded([sys.executable, "-c", _CODE], timeout_s)
    seconds = time.perf_counter() - start
    if done is None:
        which = f" (release {installed} is installed)" if installed else ""
        reason = f"importing it did not end within {timeout_s:g} s{which}: a slow disk, or MPI hangs"
        return ProbeResult(None, reason, remedy_for(reason), installed, seconds=seconds)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            version, _, mark = line.removeprefix(_MARK).partition(" ")
            return ProbeResult(version, "", "", installed, bool(mark), seconds)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = (
        "".join(c for c in lines[-1] if c.isprintable())[:200]
        if lines
        else f"it ended with exit code {done.returncode}"
    )
    return ProbeResult(None, f"importing it fails: {last}", remedy_for(last), installed, seconds=seconds)


def _installed_version() -> str | None:
    for name in ("tensorrt_llm", "tensorrt-llm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
