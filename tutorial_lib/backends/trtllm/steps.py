"""Running a plan: one subprocess per step, its log kept, finished steps not repeated, half-finished ones thrown away.

Before the first step free disk and GPU memory are compared with what the steps need. A step is finished when its note
in `{work_dir}/steps` holds its own fingerprint (command, environment and the fingerprints of what it reads) and what
it makes is there. Engines go through `engine_dir.create`, so an engine directory is whole or absent and its
`engine.json` holds the commands that made it. Nothing outside the plan's own folders is ever removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ... import engine_dir
from ...errors import BackendUnavailable, OptionError, WorkbookError
from . import contract
from .plan import PLACEHOLDERS
from .support import parse_version

Say = Callable[[str], None]
PREPARING = ("fetch", "quantize", "build", "prepare")
GIB = 2**30
REPORT_EVERY_S = 60.0


class StepError(WorkbookError):
    """A step that did not work out: which, how it ended, its last words, and where its log is."""


@dataclass(frozen=True)
class Gpu:
    name: str
    total_gib: float
    free_gib: float
    capability: str  # "9.0"

    @property
    def arch(self) -> str:
        return f"sm_{self.capability.replace('.', '')}"


# ---- filling in placeholders ----------------------------------------------------------------------------------------


def default_values(work_dir: str | Path, models_dir: str | Path | None = None) -> dict[str, str]:
    """Where things go unless the caller says otherwise: everything under `work_dir`."""
    root = Path(work_dir).expanduser().resolve()
    container = Path("/app/tensorrt_llm")
    repo = container if (container / "examples" / "run.py").is_file() else root / "TensorRT-LLM"
    return {
        "work_dir": str(root),
        "models_dir": str(Path(models_dir).expanduser().resolve() if models_dir else root / "models"),
        "trtllm_repo": str(repo),
        "modelopt_repo": str(root / "TensorRT-Model-Optimizer"),
    }


def fill(value: Any, values: Mapping[str, str]) -> Any:
    """`value` with every placeholder in its strings replaced; `OptionError` for one that has no value."""
    if isinstance(value, str):
        for key, meaning in PLACEHOLDERS.items():
            mark = f"{{{key}}}"
            if mark not in value or key == "prompts":
                continue
            if key not in values:
                raise OptionError(f"{mark} has no value", meaning, f"give values={{{key!r}: …}}")
            value = value.replace(mark, values[key])
        return value
    if isinstance(value, Mapping):
        return {fill(key, values): fill(item, values) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [fill(item, values) for item in value]
    return value


# ---- what the machine has -------------------------------------------------------------------------------------------


def gpus() -> list[Gpu]:
    """The GPUs that `nvidia-smi` shows; none where it is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        name, total, free, capability = (part.strip() for part in line.rsplit(",", 3))
        found.append(Gpu(name, float(total) / 1024, float(free) / 1024, capability))
    return found


def preflight(plan: Mapping[str, Any], values: Mapping[str, str], steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """What `steps` need and what is there, one line each; `BackendUnavailable` with both numbers if anything is short.

    Steps that are finished already need nothing.
    """
    found = [*_disk_needs(values, steps), *_gpu_needs(plan["tensor_parallel_size"], steps)]
    short = [line for line, is_short in found if is_short]
    if short:
        raise BackendUnavailable(
            f"not enough for this plan: {'; '.join(short)}", "", "free some, or use another folder or machine"
        )
    return [line for line, _ in found]


def _disk_needs(values: Mapping[str, str], steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Folders on the same file system share its room."""
    by_device: dict[int, tuple[str, float]] = {}
    for step in steps:
        for key, placeholder in (("models_gib", "models_dir"), ("work_gib", "work_dir")):
            if key in step["needs"]:
                folder = values[placeholder]
                device = os.stat(_existing(Path(folder))).st_dev
                name, gib = by_device.get(device, (folder, 0.0))
                by_device[device] = (name, gib + step["needs"][key])
    for folder, needed in by_device.values():
        available = shutil.disk_usage(_existing(Path(folder))).free / GIB
        yield f"disk for {folder}: needed {needed:.1f} GiB, available {available:.1f} GiB", needed > available


def _gpu_needs(count: int, steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    each = max((step["needs"].get("gpu_gib", 0.0) for step in steps), default=0.0)
    together = max((step["needs"].get("all_gpus_gib", 0.0) for step in steps), default=0.0)
    if not each and not together:
        return
    here = gpus()
    if not here:
        yield f"GPU memory: needed {max(each, together):.1f} GiB, available none (nvidia-smi shows no GPU)", True
        return
    if each:
        free = min(gpu.free_gib for gpu in here[:count])
        is_short = each > free or len(here) < count
        line = (
            f"memory on each of {count} GPU(s): needed {each:.1f} GiB, available {free:.1f} GiB on {len(here)} GPU(s)"
        )
        yield line, is_short
    if together:
        available = sum(gpu.free_gib for gpu in here) + _free_host_gib()
        line = f"GPU and host memory to quantize: needed {together:.1f} GiB, available {available:.1f} GiB"
        yield line, together > available
    old = [gpu for gpu in here if float(gpu.capability) < 8.9]
    if old:
        yield f"FP8: needed compute capability 8.9, available {old[0].capability} ({old[0].name})", True


def _free_host_gib() -> float:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    except (ValueError, OSError):
        return 0.0


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


# ---- running --------------------------------------------------------------------------------------------------------


def run_steps(
    plan: Mapping[str, Any], values: Mapping[str, str], *, kinds: Sequence[str] = PREPARING, say: Say = print
) -> list[dict[str, Any]]:
    """Run the steps of `kinds` that are not finished, in order; returns a line of facts per step.

    Raises `BackendUnavailable` before the start if disk or GPU memory is short, `StepError` at the first step that
    fails, `OptionError` for a placeholder without value or if another process runs in the same folder.
    """
    values = {key: str(Path(value).expanduser().resolve()) for key, value in values.items()}
    work_dir = Path(fill("{work_dir}", values))
    work_dir.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in plan["steps"] if step["kind"] in kinds and "argv" in step and not step["is_optional"]]
    with _only_one(work_dir):
        jobs = _Jobs(plan, values, work_dir)
        todo = [step for step in chosen if not jobs.is_finished(step)]
        for line in preflight(plan, values, todo):
            say(line)
        if todo:
            _check_flags(plan, [fill(step["argv"], values) for step in todo])
        results = []
        for number, step in enumerate(chosen, start=1):
            results.append(jobs.run(step, f"[{number}/{len(chosen)}] {step['name']}", say))
    return results


class _Jobs:
    """Fingerprints, notes and logs of one plan in one folder."""

    def __init__(self, plan: Mapping[str, Any], values: Mapping[str, str], work_dir: Path) -> None:
        self.plan, self.values, self.work_dir = plan, values, work_dir
        self.steps = {step["name"]: step for step in plan["steps"]}

    def run(self, step: Mapping[str, Any], title: str, say: Say) -> dict[str, Any]:
        if self.is_finished(step):
            note = self._note(step)
            how = (
                f"finished before ({note['seconds']:.0f} s), not repeated"
                if note
                else "is there already, taken as it is"
            )
            say(f"{title}: {how}")
            return {"name": step["name"], **note, "was_run": False}
        self._throw_away_half(step, title, say)
        self._write_note(step, {"fingerprint": self.fingerprint(step), "is_finished": False})
        for path, text in fill(step.get("files", {}), self.values).items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, "utf-8")
        log = self.work_dir / "logs" / f"{step['name']}.log"
        say(f"{title}: {step['about']} (log: {log})")
        start = time.perf_counter()
        if step["kind"] == "build":
            self._build(step, log, say)
        else:
            argv, env = fill(step["argv"], self.values), fill(step["env"], self.values)
            run_logged(argv, log, env=env, name=step["name"], say=say)
        missing = [path for path in fill(step["produces"], self.values) if not Path(path).exists()]
        if missing:
            raise StepError(f"step {step['name']} ended well but made no {missing[0]}", "it", f"read {log}")
        note = {
            "name": step["name"],
            "fingerprint": self.fingerprint(step),
            "is_finished": True,
            "seconds": time.perf_counter() - start,
            "argv": step["argv"],
            "log": log.name,
        }
        self._write_note(step, note)
        say(f"{title}: done in {note['seconds']:.0f} s")
        return {**note, "was_run": True}

    def fingerprint(self, step: Mapping[str, Any]) -> str:
        """Of the command as it runs and, in turn, of every step whose result it names."""
        argv = fill(step["argv"], self.values)
        feeding = [
            self.fingerprint(other)
            for other in self.steps.values()
            if other["name"] != step["name"]
            and any(_names(word, path) for path in fill(other["produces"], self.values) for word in argv)
            and not set(other["produces"]) & set(step["produces"])
        ]
        what = [argv, fill(step["env"], self.values), step.get("files", {}), self.plan["tensorrt_llm_version"], feeding]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def is_finished(self, step: Mapping[str, Any]) -> bool:
        note = self._note(step)
        paths = [Path(path) for path in fill(step["produces"], self.values)]
        if step["kind"] == "fetch" and not note:
            return all(path.is_dir() and any(path.iterdir()) for path in paths)  # somebody else's: taken as it is
        if not note.get("is_finished") or note.get("fingerprint") != self.fingerprint(step):
            return False
        if step["kind"] == "build":
            return all(engine_dir.is_engine_dir(path) for path in paths)
        return all(path.exists() for path in paths)

    def _throw_away_half(self, step: Mapping[str, Any], title: str, say: Say) -> None:
        """What a step began and did not finish, or made from other inputs. Downloads go on where they stopped, engines
        are replaced by engine_dir; only what this plan wrote inside its own folder is removed."""
        is_download = step["kind"] == "fetch" and step["argv"][0] != "git"
        for name in fill(step["produces"], self.values):
            path = Path(name)
            if is_download or step["kind"] == "build" or not path.exists():
                continue
            if not self._note(step) or not path.is_relative_to(self.work_dir):
                raise OptionError(f"{path} exists and step {step['name']} did not make it", "a free path", "move it")
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            say(f"{title}: threw away the half-finished or outdated {path.name}")

    def _build(self, step: Mapping[str, Any], log: Path, say: Say) -> None:
        """`trtllm-build` into an engine directory of ours: whole or absent."""
        output = Path(fill(step["produces"][0], self.values))

        def write(staging: Path) -> dict[str, Any]:
            argv = [str(staging) if word == str(output) else word for word in fill(step["argv"], self.values)]
            seconds = run_logged(argv, log, env=fill(step["env"], self.values), name=step["name"], say=say)
            self._copy_tokenizer(step, staging / "tokenizer")
            return self._manifest(step, seconds)

        engine_dir.create(output, write, overwrite=engine_dir.is_engine_dir(output), say=say)

    def _model(self, step: Mapping[str, Any]) -> dict[str, Any]:
        return self.plan["facts"]["drafter" if "drafter" in step["name"] else "target"]

    def _copy_tokenizer(self, step: Mapping[str, Any], folder: Path) -> None:
        """An engine directory can be given away: it carries the tokenizer that its token ids belong to."""
        model = self._model(step)
        source = Path(model.get("folder") or Path(self.values["models_dir"]) / model["name"].split("/")[1])
        folder.mkdir()
        for pattern in ("tokenizer*", "special_tokens_map.json", "*.jinja", "generation_config.json"):
            for file in source.glob(pattern):
                shutil.copyfile(file, folder / file.name)

    def _manifest(self, step: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        facts = self.plan["facts"]
        settings = _settings(step["argv"])
        here = gpus()
        name = self._model(step)["name"]
        source = Path(fill(settings["--checkpoint_dir"], self.values))
        config = _read_json(source / "config.json")
        maker = next((s for s in self.steps.values() if settings["--checkpoint_dir"] in s["produces"]), None)
        steps = {s["name"]: {"argv": s["argv"]} for s in (maker, step) if s is not None}
        return {
            "backend": "tensorrt_llm",
            "checkpoint": name,
            "checkpoint_fingerprint": self.fingerprint(maker) if maker else "unknown",
            "model_config": config,
            "dtype": "fp8" if "--use_fp8_context_fmha" in settings else "float16",
            "arch": here[0].arch if here else "unknown",
            "limits": {
                "max_batch_size": int(settings["--max_batch_size"]),
                "max_seq_len": int(settings["--max_input_len"]),  # prompt and output; see commands.Limits
                "max_draft_len": int(settings.get("--max_draft_len", 0)),
            },
            "eos_token_ids": facts["eos_token_ids"],
            "tactics": {},
            "build": {
                "seconds": round(seconds, 1),
                "command": _rebuild_command(name, settings),
                "tensorrt_llm": self.plan["tensorrt_llm_version"],
                "speculative_decoding_mode": settings.get("--speculative_decoding_mode", "none"),
                "tensor_parallel_size": int(settings["--workers"]),
                "max_tokens": facts["max_tokens"],
                "steps": steps,
            },
        }

    def _note(self, step: Mapping[str, Any]) -> dict[str, Any]:
        return _read_json(self.work_dir / "steps" / f"{step['name']}.json")

    def _write_note(self, step: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        file = self.work_dir / "steps" / f"{step['name']}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(note, indent=1) + "\n", "utf-8")
        partial.replace(file)


def _rebuild_command(name: str, settings: Mapping[str, str]) -> str:
    """The workbook's own command for such an engine; `engine_dir` adds the folder."""
    words = ["workbook", "build", name, "--backend", "tensorrt_llm", "--max-batch-size", settings["--max_batch_size"]]
    words += ["--max-seq-len", settings["--max_input_len"], "--max-draft-len", settings.get("--max_draft_len", "0")]
    return shlex.join(words if "--use_fp8_context_fmha" in settings else [*words, "--dtype", "float16"])


def _names(word: str, path: str) -> bool:
    return word == path or word.startswith(path + "/")


def _settings(argv: Sequence[str]) -> dict[str, str]:
    """Flag -> the word after it."""
    return {flag: value for flag, value in zip(argv, [*argv[1:], ""], strict=True) if flag.startswith("--")}


def run_logged(argv: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None, name: str, say: Say) -> float:
    """Run `argv` to its end with its output in `log`; seconds. Every minute it says how long and the last line.

    `python3` is the Python that runs this. Raises `StepError`; Ctrl-C ends the process and all it started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable if word == "python3" else word for word in argv]
    start = time.perf_counter()
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"\n$ {shlex.join(argv)}\n")
        stream.flush()
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=child_env(env),
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise StepError(
                f"step {name}: cannot start {argv[0]} ({error.strerror})",
                f"{argv[0]} on the PATH",
                "workbook doctor says what is missing",
            ) from error
        try:
            code = _wait(process, name, log, start, say)
        finally:
            end_group(process)
    if code != 0:
        raise StepError(
            f"step {name} ended with code {code}: {_last_line(log)}", "code 0", f"read {log}, mend it and run again"
        )
    return time.perf_counter() - start


def _wait(process: subprocess.Popen[bytes], name: str, log: Path, start: float, say: Say) -> int:
    next_report = start + REPORT_EVERY_S
    while True:
        try:
            return process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            if time.perf_counter() >= next_report:
                next_report += REPORT_EVERY_S
                say(f"  {name}: {(time.perf_counter() - start) / 60:.0f} min, {_last_line(log)}")


def child_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a step: tools installed beside this Python are found, output is not held back."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", **(extra or {})}


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that was started in a session of its own, with all it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _check_flags(plan: Mapping[str, Any], commands: Sequence[Sequence[str]]) -> None:
    """Where the record was not read from this very release: every flag must be in the tool's own `--help`."""
    version = parse_version(plan["tensorrt_llm_version"])
    record = contract.record_for(version)
    if record.is_exact and version.release < (1, 0):
        return
    for argv in commands:
        tool, rest = contract.split_tool(argv)
        if tool in contract.OTHER_TOOLS:
            continue
        start = [word for word in argv[: len(argv) - len(rest)] if word not in contract.LAUNCHERS]
        known = _help_of([sys.executable if word == "python3" else word for word in start])
        unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
        if known and unknown:
            raise OptionError(
                f"{tool} of the installed TensorRT-LLM does not know {unknown[0]}",
                f"a release like {record.name}",
                f"compare `{tool} --help`; 0.14.0, 0.15.0 and 1.2.1 are recorded",
            )


def _help_of(command: Sequence[str]) -> str:
    """What `--help` prints, or '' where it cannot be asked (the tool comes with an earlier step, say)."""
    try:
        done = subprocess.run(
            [*command, "--help"], capture_output=True, text=True, env=child_env(), timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


@contextlib.contextmanager
def _only_one(work_dir: Path) -> Iterator[None]:
    lock = FileLock(work_dir / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OptionError(
            f"another process runs steps in {work_dir}", "one at a time", "wait for it, or choose another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text("utf-8", errors="replace")[-4000:].splitlines()
        said = [line.strip() for line in lines if line.strip() and not line.startswith("$ ")]
        if said:
            return "".join(char for char in said[-1] if char.isprintable())[:160]
    return "it said nothing"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
