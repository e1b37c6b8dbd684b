"""What a run yields: `Round`, `Generation`, and the record that keeps a measured run with its provenance.

Everything the notebooks show is computed from these. A round is one draft plus one verification; the first token
comes from prefill and belongs to no round. Nothing here measures or plots. Records are kept as JSON lines.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

from .errors import NOT_JSON, OptionError


@dataclass(frozen=True)
class Round:
    """One draft and one verification for one request.

    drafted: token ids proposed (may be empty: nothing was proposed). accepted: how many of them were accepted: of a
    chain a leading run, of a tree a branch from its root on. emitted: ids that entered the text in this round: the
    accepted ones and the bonus token, cut where the request stopped. draft_s, verify_s: seconds this round spent
    drafting and verifying (shared by all requests of the batch). end_s: seconds since the request's start when its
    tokens were known. parents, path: None for a chain; for a tree the index that every drafted token follows (-1: the
    text), and the indices of the accepted ones.
    """

    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    draft_s: float
    verify_s: float
    end_s: float
    parents: tuple[int, ...] | None = None
    path: tuple[int, ...] | None = None

    @property
    def depths(self) -> tuple[int, ...]:
        """For every drafted token its position in the draft, from 1: how many tokens it stands behind the text."""
        if self.parents is None:
            return tuple(range(1, len(self.drafted) + 1))
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return tuple(found)

    @property
    def depth(self) -> int:
        """Positions drafted: the length of a chain, of a tree that of its longest branch."""
        return max(self.depths, default=0)


@dataclass
class Generation:
    """One finished request: tokens, text, why it ended, its rounds and times. `len(token_ids)` counts output tokens,
    the stop token included. With plain decoding every round has an empty `drafted` and one emitted token.

    `outputs` returns `[self]` so that TensorRT-LLM's `result.outputs[0].text` reads the same here.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" (EOS, stop token, stop string) or "length"
    rounds: list[Round] = field(default_factory=list)
    ttft_s: float = 0.0  # request start to first token known
    latency_s: float = 0.0  # request start to last token known
    logprobs: list[dict[int, float]] | None = None  # one dict per emitted token: id -> raw log-probability
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it, None for EOS and length
    is_simulated: bool = False  # acceptance was forced: the text is meaningless and must not be shown
    cached_tokens: int = 0  # of the prompt: positions that came from the KV cache of earlier requests
    queued_s: float | None = None  # request start to its slot in the batch; None where a backend does not tell
    preemptions: int = 0  # how often it lost its slot again and was read anew

    @property
    def outputs(self) -> list[Generation]:
        return [self]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


LIBRARIES = ("torch", "transformers", "triton", "numpy", "tensorrt_llm", "vllm")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")


def provenance(command: str | Sequence[str], seed: int | None) -> dict[str, Any]:
    """Where a record comes from: time, hardware, versions, git revision, command, seed, operating system.

    Holds no host or user name and no directory: of a path in `command` only the last part is kept. `git_revision` is
    None where neither a checkout nor an archive that git made of it tells, and ends in `-dirty` where files of a
    checkout were changed.
    """
    return {
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": _hardware(),
        "versions": _versions(),
        "git_revision": _git_revision(),
        "command": without_folders(command),
        "seed": seed,
        "os": f"{platform.system()} {platform.machine()}",
    }


def without_folders(command: str | Sequence[str]) -> str:
    """`command` on one line, every path in it cut to its last part; `owner/model` names of a hub stay whole."""
    words = command.split() if isinstance(command, str) else [str(word) for word in command]
    return " ".join(_last_part(word) for word in words)


def _last_part(word: str) -> str:
    option, equals, value = word.rpartition("=")
    is_path = PurePath(value).is_absolute() or value.startswith(("~", "./", "../")) or value.count("/") > 1
    if not is_path and value.count("/") == 1:
        is_path = Path(value).exists()
    return option + equals + (PurePath(value).name or "/") if is_path else word


def _hardware() -> dict[str, Any]:
    model, features = _cpu_model_and_features()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch = sys.modules.get("torch")
    return {
        "cpu": model,
        "cpu_features": features,
        "cores": cores,
        "threads": torch.get_num_threads() if torch is not None else None,
        "memory_gib": round(pages / 2**30, 1) or None,
        "gpus": _gpus(),
    }


def _cpu_model_and_features() -> tuple[str, list[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine(), []
    rows = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in text.splitlines())]
    flags = next((set(value.split()) for key, value in rows if key in ("flags", "Features")), set())
    model = next((value for key, value in rows if key in ("model name", "Model") and value), platform.machine())
    return model, [name for name in CPU_FEATURES if name in flags]


def _gpus() -> list[dict[str, str]]:
    """Name, driver and memory of every NVIDIA GPU, as nvidia-smi tells them; none where it is not installed."""
    keys = ("name", "driver_version", "memory.total")
    out = _output_of("nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in (out or "").splitlines()]
    return [dict(zip(("name", "driver", "memory"), row, strict=True)) for row in rows if len(row) == len(keys)]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("specdec-workbook", *LIBRARIES):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_revision() -> str | None:
    here = Path(__file__)
    git = ("git", "-C", str(here.parent))
    if _output_of(*git, "ls-files", "--error-unmatch", here.name) is None:
        return _archived_revision(here.parents[1] / ".git_archival.txt")  # a repository around it is another project
    revision = _output_of(*git, "rev-parse", "HEAD")
    changed = _output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return revision.strip() + ("-dirty" if changed else "") if revision else None


def _archived_revision(path: Path) -> str | None:
    """The commit that `git archive` wrote into `path` (see .gitattributes)."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if re.fullmatch("[0-9a-f]{40,64}", text) else None


def _output_of(*command: str) -> str | None:
    """Standard output of `command`; None if it is not installed, fails, or takes over 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def write_record(path: str | Path, record: Mapping[str, Any], *, append: bool = True) -> None:
    """Add one JSON line to `path`, or replace the file by it with `append=False`; see `write_records`."""
    write_records(path, [record], append=append)


def write_records(path: str | Path, records: Sequence[Mapping[str, Any]], *, append: bool = True) -> None:
    """Add a JSON line for each record to `path` (made with its folder if missing), or replace the file by them.

    Atomic: a reader, or a run cut off half-way, sees the old file or the new one. Writers wait for each other. A
    record with a NaN or an infinity is refused (`ValueError`): null says "does not apply".
    """
    path = Path(path)
    lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _one_writer(path.parent):
        before = path.read_text(encoding="utf-8") if append and path.exists() else ""
        if before and not before.endswith("\n"):
            before += "\n"
        handle, staging = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            # Half a character, as in a file name that is no UTF-8, is written as JSON's escape of it: "\\udc80".
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(before + lines)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(staging, 0o644)
            os.replace(staging, path)
        except BaseException:
            Path(staging).unlink(missing_ok=True)
            raise


@contextmanager
def _one_writer(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder itself, so that no lock file is left beside the records."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, in order; `OptionError` with the line number for a line that is not one."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"records {path} cannot be read ({error})", "a JSON-lines file") from error
    records = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except NOT_JSON as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise OptionError(f"{path.name} line {number}: not JSON ({why})", "one record per line") from error
        if not isinstance(record, dict):
            raise OptionError(f"{path.name} line {number}: found {type(record).__name__}", "one JSON object per line")
        records.append(record)
    return records
