"""The engine directory: what `build()` leaves on disk and `load()` checks first, the same for every backend.

All or nothing: files are written into a temporary sibling under a lock, hashed, described by `engine.json` (written
last), and the sibling is renamed. Whoever opens a directory learns in one line what was found, what was needed and
how to rebuild it, before any native code sees it. What the files hold is the backend's business.

A directory can be moved and given away: it stores no absolute path, and its rebuild line gets `--out` when shown.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout

from .errors import EngineDirError, WorkbookError

FORMAT_VERSION = 2
MANIFEST = "engine.json"
LIMITS = ("max_batch_size", "max_seq_len", "max_draft_len")
_FIELDS: dict[str, type] = {
    "backend": str,
    "checkpoint": str,
    "checkpoint_fingerprint": str,
    "model_config": dict,
    "dtype": str,
    "arch": str,
    "limits": dict,
    "eos_token_ids": list,
    "tactics": dict,
    "build": dict,
}
_OWN_FIELDS = ("format", "workbook_version", "files", "sha256")
_USER_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG),
}


@dataclass(frozen=True)
class EngineInfo:
    """An engine directory that is complete. `manifest` is `engine.json`; the properties are its fields."""

    path: Path
    manifest: dict[str, Any]

    @property
    def backend(self) -> str:
        return self.manifest["backend"]

    @property
    def checkpoint(self) -> str:
        return self.manifest["checkpoint"]

    @property
    def fingerprint(self) -> str:
        return self.manifest["checkpoint_fingerprint"]

    @property
    def model_config(self) -> dict[str, Any]:
        return self.manifest["model_config"]

    @property
    def dtype(self) -> str:
        return self.manifest["dtype"]

    @property
    def arch(self) -> str:
        return self.manifest["arch"]

    @property
    def max_batch_size(self) -> int:
        return self.manifest["limits"]["max_batch_size"]

    @property
    def max_seq_len(self) -> int:
        return self.manifest["limits"]["max_seq_len"]

    @property
    def max_draft_len(self) -> int:
        return self.manifest["limits"]["max_draft_len"]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.manifest["eos_token_ids"])

    @property
    def tactics(self) -> dict[str, Any]:
        return self.manifest["tactics"]

    @property
    def total_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.manifest["files"].values())

    @property
    def rebuild_line(self) -> str:
        return _rebuild_line(self.manifest, self.path)


def create(
    path: str | Path,
    write: Callable[[Path], dict[str, Any]],
    *,
    overwrite: bool = False,
    wanted: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
) -> EngineInfo:
    """Build the engine directory `path`, all or nothing.

    `write(staging)` writes the files and returns the manifest's fields (all of `engine.json` but `format`,
    `workbook_version`, `files` and `sha256`); strings that are absolute paths are cut to their last part. One builder
    works at a time; another waits. A finished directory whose manifest has every field of `wanted` is returned as it
    is; any other is refused, unless `overwrite`, which replaces an engine directory and nothing else. Raises
    `EngineDirError`.
    """
    path = Path(path).expanduser()
    with _plain_os_errors(path):
        path = _resolved(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, say):
            _clean_up_dead_builds(path)
            if _exists(path):
                finished = _finished(path, wanted) if not overwrite else None
                if finished is not None:
                    return finished
                _check_replaceable(path)
            return _build(path, write)


def open_engine(path: str | Path, *, backend: str, arch: str, check_hashes: bool = True) -> EngineInfo:
    """The complete engine directory at `path`, built by `backend` for `arch` in our format; else `EngineDirError`.

    Format, backend and architecture are compared before any file is read; with `check_hashes` every byte is then
    read once, without it only names and sizes are checked.
    """
    path = Path(path).expanduser()
    with _plain_os_errors(path):
        path = _resolved(path)
        manifest = _read_manifest(path)
        info = EngineInfo(path, manifest)
        if info.backend != backend:
            raise EngineDirError(
                f"engine directory {path} was built for backend {info.backend!r}",
                f"backend {backend!r}",
                f"run it with backend {info.backend!r}, or build its checkpoint {info.checkpoint} with {backend!r}",
            )
        if info.arch != arch:
            raise EngineDirError(
                f"engine directory {path} was built for {info.arch}",
                f"{arch}, what this machine has",
                f"rebuild here: {info.rebuild_line}",
            )
        for name, entry in manifest["files"].items():
            _check_file(info, name, entry, check_hashes)
        return info


def require(
    info: EngineInfo,
    *,
    max_draft_len: int | None = None,
    max_seq_len: int | None = None,
    max_batch_size: int | None = None,
) -> None:
    """`EngineDirError`, with both numbers and the rebuild line, if a run needs more than the engine was built for."""
    needed = {"max_draft_len": max_draft_len, "max_seq_len": max_seq_len, "max_batch_size": max_batch_size}
    limits = info.manifest["limits"]
    short = {name: value for name, value in needed.items() if value is not None and value > limits[name]}
    if short:
        raise EngineDirError(
            f"engine directory {info.path} was built for {_list_limits({name: limits[name] for name in short})}",
            _list_limits(short),
            f"ask for less, or rebuild: {_rebuild_line(info.manifest, info.path, short)}",
        )


def is_engine_dir(path: str | Path) -> bool:
    """Whether `path` claims to be an engine directory (it has an `engine.json`), sound or not."""
    return (Path(path).expanduser() / MANIFEST).is_file()


# ---- building -------------------------------------------------------------------------------------------------------


def _build(path: Path, write: Callable[[Path], dict[str, Any]]) -> EngineInfo:
    staging = _sibling(path, "building")
    staging.mkdir()
    try:
        fields = write(staging)
        text = json.dumps(_make_manifest(staging, fields), indent=1, allow_nan=False) + "\n"
        _write_synced(staging / MANIFEST, text)
        for folder in {staging, *(file.parent for file in staging.rglob("*"))}:
            _sync(folder)
        _swap_in(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return EngineInfo(path, json.loads(text))


def _make_manifest(staging: Path, fields: dict[str, Any]) -> dict[str, Any]:
    clash = [name for name in _OWN_FIELDS if name in fields]
    if clash:
        raise ValueError(f"write() returned {clash[0]!r}, which create() fills in itself")
    manifest = {"format": FORMAT_VERSION, "workbook_version": workbook_version(), **_without_paths(fields)}
    manifest["files"] = {name: _describe(staging / name) for name in _written_files(staging)}
    problem = _malformed(manifest)
    if problem:
        raise ValueError(f"write() left an engine without {problem}")
    return manifest | {"sha256": _seal(manifest)}


def _seal(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of everything that `engine.json` says but this: it holds what decides about the text (rotary base, EOS
    ids, kernels), so one damaged digit must be seen as a damaged weight is."""
    as_read = json.loads(json.dumps(manifest))  # the names of a table by rows are texts in a file
    said = {name: value for name, value in as_read.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _written_files(staging: Path) -> list[str]:
    names = []
    for file in sorted(staging.rglob("*")):
        if file.is_symlink() or not (file.is_dir() or file.is_file()):
            raise ValueError(f"write() left {file.name}, which is not a plain file")
        if file.is_file():
            names.append(file.relative_to(staging).as_posix())
    return names


def _describe(file: Path) -> dict[str, Any]:
    _sync(file)
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _without_paths(value: Any) -> Any:
    """`value` with every string, or word of a command, that is an absolute path cut to its last part."""
    if isinstance(value, Mapping):
        return {
            key: _portable_command(item) if key == "command" and isinstance(item, str) else _without_paths(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_paths(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith("/") and "/" in value[1:]):
        return Path(value).name
    return value


def _portable_command(command: str) -> str:
    return shlex.join(Path(word).name if word.startswith("/") else word for word in shlex.split(command))


def _swap_in(staging: Path, path: Path) -> None:
    """Rename `staging` to `path`; what stood there is set aside first, put back on failure, removed on success."""
    aside = _sibling(path, "old")
    try:
        if path.exists() and any(path.iterdir()):
            path.rename(aside)
        staging.rename(path)
    except BaseException:
        if aside.exists() and not path.exists():
            aside.rename(path)
        raise
    _sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


# ---- what is there already ------------------------------------------------------------------------------------------


def _finished(path: Path, wanted: Mapping[str, Any] | None) -> EngineInfo | None:
    """The directory at `path` if it is what is wanted, None if nothing was built there yet; refuses any other."""
    if path.is_dir() and not any(path.iterdir()):
        return None
    replace = "choose another output, or say --overwrite (overwrite=True)"
    if wanted is None or not is_engine_dir(path):
        _check_replaceable(path)
        raise EngineDirError(f"{path} exists already", "a path that does not exist yet", replace)
    info = EngineInfo(path, _read_manifest(path))
    for field, value in _without_paths(wanted).items():
        if info.manifest.get(field) != value:
            shown = f"{info.manifest.get(field)!r}"[:120], f"{value!r}"[:120]
            raise EngineDirError(f"{path} exists already and has {field} {shown[0]}", f"{field} {shown[1]}", replace)
    for name, entry in info.manifest["files"].items():
        _check_file(info, name, entry, check_hash=False)
    return info


def _check_replaceable(path: Path) -> None:
    """Refuse to touch anything that a build of ours did not write."""
    by_hand = "choose another output, or remove it yourself first"
    if not path.is_dir():
        raise EngineDirError(f"{path} is not a directory", "an engine directory, or a path that is free", by_hand)
    if not any(path.iterdir()):
        return
    if not is_engine_dir(path):
        raise EngineDirError(f"{path} is not an engine directory (no {MANIFEST})", "one, or a free path", by_hand)
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        ours = {MANIFEST, *manifest["files"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise EngineDirError(f"{path} has an unreadable {MANIFEST}", "a sound one, or a free path", by_hand) from None
    foreign = [name for name in (f.relative_to(path).as_posix() for f in _leaves(path)) if name not in ours]
    if foreign:
        raise EngineDirError(f"{path} holds {foreign[0]}, which no build wrote", "an engine directory only", by_hand)


def _leaves(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir())


def _clean_up_dead_builds(path: Path) -> None:
    """Under the lock: what a killed build left beside `path`. A replaced directory that was not replaced comes back."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(building|old)-[0-9a-f]{{8}}")
    for entry in list(path.parent.iterdir()):
        match = pattern.fullmatch(entry.name)
        if match is None or entry.is_symlink():
            continue
        if match[1] == "old" and not _exists(path):
            entry.rename(path)
        else:
            shutil.rmtree(entry, ignore_errors=True)


# ---- reading --------------------------------------------------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise EngineDirError(f"engine directory {path} {found}", "a directory made by build()", _fresh_line(path))
    if not is_engine_dir(path):
        raise EngineDirError(f"{path} has no {MANIFEST}{_what_else(path)}", "a finished engine", _fresh_line(path))
    by_hand = f"remove {path} and build it again: {_fresh_line(path)}"
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise EngineDirError(f"{MANIFEST} in {path} is damaged ({error})", "a whole file", by_hand) from None
    if not isinstance(manifest, dict):
        raise EngineDirError(f"{MANIFEST} in {path} holds no object", "an engine's description", by_hand)
    if manifest.get("format") != FORMAT_VERSION:
        made_by = manifest.get("workbook_version", "unknown")
        made_for = manifest.get("arch", "unknown")
        raise EngineDirError(
            f"engine directory {path} has format {manifest.get('format')!r} (workbook {made_by}, for {made_for})",
            f"format {FORMAT_VERSION} (workbook {workbook_version()})",
            f"rebuild: {_rebuild_line(manifest, path)}",
        )
    if manifest.get("sha256") != _seal(manifest):
        rebuild = f"rebuild: {_rebuild_line(manifest, path)}"
        raise EngineDirError(f"{MANIFEST} in {path} is not as the build wrote it", "an unchanged one", rebuild)
    problem = _malformed(manifest)
    if problem:
        raise EngineDirError(f"{MANIFEST} in {path} lacks {problem}", "an unchanged one", by_hand)
    return manifest


def _malformed(manifest: Mapping[str, Any]) -> str:
    """What is wrong with the fields of a manifest, or ''."""
    for name, kind in _FIELDS.items():
        if not isinstance(manifest.get(name), kind):
            return f"{name!r} ({kind.__name__})"
    for name, least in zip(LIMITS, (1, 1, 0), strict=True):
        value = manifest["limits"].get(name)
        if type(value) is not int or value < least:
            return f"limits.{name} (a whole number >= {least})"
    if not all(type(token) is int for token in manifest["eos_token_ids"]):
        return "'eos_token_ids' (whole numbers)"
    if not isinstance(manifest["build"].get("command"), str):
        return "build.command (the line that rebuilds it)"
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        return "'files' (at least one)"
    for name, entry in files.items():
        if (
            not isinstance(entry, dict)
            or type(entry.get("bytes")) is not int
            or not isinstance(entry.get("sha256"), str)
        ):
            return f"size and hash of {name!r}"
    return ""


def _check_file(info: EngineInfo, name: str, entry: Mapping[str, Any], check_hash: bool) -> None:
    def refuse(found: str, needed: str) -> EngineDirError:
        return EngineDirError(f"engine directory {info.path}: {found}", needed, f"rebuild: {info.rebuild_line}")

    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or not pure.parts:
        raise refuse(f"{MANIFEST} lists {name!r}, outside the directory", "names inside it")
    file = info.path / name
    if not file.exists():
        raise refuse(f"{name} is missing", f"all {len(info.manifest['files'])} files")
    if not file.resolve().is_relative_to(info.path) or not file.is_file():
        raise refuse(f"{name} is no plain file inside the directory", "plain files")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise refuse(f"{name} has {size} bytes", f"{entry['bytes']} bytes")
    if check_hash and (digest := _sha256(file)) != entry["sha256"]:
        raise refuse(f"{name} has SHA-256 {digest[:12]}…", f"{entry['sha256'][:12]}…, as it was built")


# ---- words ----------------------------------------------------------------------------------------------------------


def workbook_version() -> str:
    try:
        return metadata.version("specdec-workbook")
    except metadata.PackageNotFoundError:
        return "unknown"


def _rebuild_line(manifest: Mapping[str, Any], path: Path, limits: Mapping[str, int] | None = None) -> str:
    """The recorded build command with `--out` as the directory lies now and, where given, larger limits."""
    build = manifest.get("build")
    command = build.get("command") if isinstance(build, Mapping) else None
    if not isinstance(command, str):
        return _fresh_line(path)
    try:
        words = shlex.split(command)
    except ValueError:
        return _fresh_line(path)
    options = {f"--{name.replace('_', '-')}": str(value) for name, value in (limits or {}).items()}
    for option, value in {**options, "--out": str(path)}.items():
        if option in words[:-1]:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    if "--overwrite" not in words:
        words.append("--overwrite")
    return shlex.join(words)


def _fresh_line(path: Path) -> str:
    return f"workbook build CHECKPOINT --out {shlex.quote(str(path))}"


def _what_else(path: Path) -> str:
    """What a directory without our manifest seems to be, from its config.json."""
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(config, dict):
        return ""
    build = config.get("build_config")
    if isinstance(build, dict):
        return (
            f"; it is a TensorRT-LLM engine, version {config.get('version', 'unknown')}, "
            f"max_draft_len {build.get('max_draft_len', 'unknown')}, "
            f"speculative mode {build.get('speculative_decoding_mode', 'none')}"
        )
    return "; it is a checkpoint, not yet an engine" if "model_type" in config else ""


def _list_limits(limits: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in limits.items())


# ---- the file system ------------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path, say: Callable[[str], None] | None) -> Iterator[None]:
    """The builders' lock beside `path`. The small lock file stays: removing it would let two builders hold it."""
    lock = FileLock(path.parent / f".{path.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if say is not None:
            say(f"another build of {path} is running; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _plain_os_errors(path: Path) -> Iterator[None]:
    """A full disk, missing permission and the like are the user's to solve: one line instead of a traceback."""
    try:
        yield
    except WorkbookError:
        raise
    except Exception as error:
        number = _errno_of(error)
        if number not in _USER_ERRNOS:
            raise
        raise EngineDirError(
            f"engine directory {path}: {os.strerror(number)}",
            "a folder with room that you may use",
            "free it or choose another",
        ) from error


def _errno_of(error: Exception) -> int:
    """What the operating system said; safetensors and tokenizers (Rust) say it only in words. 0: nothing."""
    if isinstance(error, OSError):
        return error.errno or 0
    said = re.search(r"\(os error (\d+)\)", str(error))
    return int(said[1]) if said else 0


def _resolved(path: Path) -> Path:
    """`path` without links. Libraries that write into it take only names in UTF-8; a loop of links leads nowhere."""
    try:
        str(path).encode()
        return path.resolve()
    except UnicodeEncodeError:
        raise EngineDirError(
            f"the name {str(path)!r} is not UTF-8", "a name that is", "choose another folder"
        ) from None
    except RuntimeError:
        raise EngineDirError(f"{path} is a link in a loop", "a folder", "choose another") from None


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _sibling(path: Path, role: str) -> Path:
    return path.parent / f".{path.name}.{role}-{secrets.token_hex(4)}"


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _write_synced(file: Path, text: str) -> None:
    file.write_text(text, "utf-8")
    _sync(file)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
