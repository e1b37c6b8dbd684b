"""Execute notebooks as a batch: parameters checked first, every wait bounded, one failure stopping no other.

papermill injects parameters and runs the cells; this module adds what it leaves open. A misspelt parameter or one of
the wrong type is refused before any kernel starts (papermill warns and runs on). A notebook has one time box for all
its cells (papermill waits for ever). A killed kernel is noticed within seconds and its process group is removed.
Executed copies go to `out_dir`, never over the source, and a summary with seconds per notebook beside them.
"""

from __future__ import annotations

import ast
import contextlib
import json
import keyword
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import config
from .errors import OptionError
from .report import SUMMARY_FILE, write_report
from .show.progress import BATCH_VARIABLE

START_TIMEOUT_S = 120
NOTEBOOK_TIMEOUT_S = 900.0

__all__ = ["NotebookRun", "Parameter", "RunSummary", "parse_parameters", "run_notebooks", "write_report"]


# --- what a run yields --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NotebookRun:
    """One row of the summary. `status` is "ok", "failed", "interrupted" or "not run"; `reason` says why not ok."""

    notebook: str
    status: str
    seconds: float = 0.0
    reason: str = ""


@dataclass
class RunSummary:
    """All rows of one call. `exit_code` is what a command should end with: 0, 1 after a failure, 130 after Ctrl-C."""

    out_dir: Path
    rows: list[NotebookRun] = field(default_factory=list)
    report: Path | None = None

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.status == "ok" for row in self.rows)

    @property
    def is_interrupted(self) -> bool:
        return any(row.status == "interrupted" for row in self.rows)

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 130 if self.is_interrupted else 1

    def table(self) -> str:
        width = max([len("notebook"), *(len(row.notebook) for row in self.rows)])
        lines = [f"{'notebook':<{width}}  {'status':<11}  {'seconds':>7}  reason"]
        for row in self.rows:
            lines.append(f"{row.notebook:<{width}}  {row.status:<11}  {row.seconds:>7.1f}  {row.reason}".rstrip())
        lines.append(f"{'total':<{width}}  {'':<11}  {sum(row.seconds for row in self.rows):>7.1f}")
        return "\n".join(lines)


# --- the whole run ------------------------------------------------------------------------------------------------


def run_notebooks(
    names: Sequence[str | Path] | None = None,
    *,
    profile: str = "cpu",
    parameters: Mapping[str, Any] | None = None,
    out_dir: str | Path = "runs/latest",
    timeout_s: float = NOTEBOOK_TIMEOUT_S,
    say: Callable[[str], None] = print,
) -> RunSummary:
    """Execute `names` (all of `notebooks/` when empty) one after the other and write `out_dir/report.html`.

    A name is a path, a file name, its stem or its leading number (`02`). `profile` goes to every notebook that
    declares it; each of `parameters` must be declared by at least one of the notebooks and goes to those that do, its
    value converted to the declared type (text is read as a Python literal where the type is not `str`). `timeout_s` is
    the time box of each notebook. A kernel's working directory is the folder of its notebook, wherever the caller is.
    Raises `OptionError` before anything starts; failures of notebooks are rows of the result.
    """
    config.profile(profile)
    if not timeout_s > 0:
        raise OptionError(f"timeout_s is {timeout_s}", "seconds above 0", "give each notebook a longer time box")
    notebooks = find_notebooks(names)
    out = Path(out_dir).expanduser().resolve()
    if any(notebook.parent == out for notebook in notebooks):
        raise OptionError(f"{out} holds the notebooks themselves", "another folder", "choose another --out")
    values = check_parameters(notebooks, profile, parameters or {}, say)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{out} cannot be made ({error.strerror})", "a folder", "choose another --out") from error
    say(f"{len(notebooks)} notebook(s), profile {profile}, at most {timeout_s:.0f} s each, into {out}")

    summary = RunSummary(out)
    with _terminate_as_interrupt():
        for notebook in notebooks:
            if summary.is_interrupted:
                summary.rows.append(NotebookRun(notebook.stem, "not run"))
                continue
            say(f"{notebook.stem}: running")
            row = _run_one(notebook, out / notebook.name, values[notebook], timeout_s)
            summary.rows.append(row)
            say(f"{row.notebook}: {row.status}{': ' + row.reason if row.reason else ''} ({row.seconds:.1f} s)")
            _write_summary(summary, profile, parameters or {})
        _write_summary(summary, profile, parameters or {})
        if summary.is_interrupted:
            say("interrupted: the kernel is stopped, what had finished is kept")
        summary.report = write_report(out)
    say(summary.table())
    say(f"report: {summary.report}")
    return summary


def _write_summary(summary: RunSummary, profile: str, parameters: Mapping[str, Any]) -> None:
    document = {
        "profile": profile,
        "parameters": {name: repr(value) for name, value in parameters.items()},
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rows": [asdict(row) for row in summary.rows],
    }
    target = summary.out_dir / SUMMARY_FILE
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(target)


# --- which notebooks ----------------------------------------------------------------------------------------------


def notebooks_dir() -> Path:
    """The course's `notebooks/`: of the source tree this package is installed from, else below the working folder."""
    candidates = [Path(__file__).resolve().parents[1] / "notebooks", Path.cwd() / "notebooks"]
    for folder in candidates:
        if any(folder.glob("*.ipynb")):
            return folder
    raise OptionError(
        f"no notebooks in {candidates[0]} or {candidates[1]}",
        "the repository's notebooks/",
        "run in a clone of the repository, or name notebook files",
    )


def find_notebooks(names: Sequence[str | Path] | None = None) -> list[Path]:
    """Absolute paths in the order asked for (the course's order when `names` is empty). Raises `OptionError`."""
    if not names:
        return sorted(notebooks_dir().glob("*.ipynb"))
    found: list[Path] = []
    for name in names:
        path = _find_notebook(str(name))
        if path.stem in (other.stem for other in found):
            raise OptionError(f"{path.stem} is named twice", "each notebook once", "drop one")
        found.append(path)
    return found


def _find_notebook(name: str) -> Path:
    as_path = Path(name).expanduser()
    if as_path.suffix == ".ipynb" and as_path.is_file():
        return as_path.resolve()
    known = sorted(notebooks_dir().glob("*.ipynb"))
    stem = name.removesuffix(".ipynb")
    matches = [path for path in known if path.stem == stem] or [
        path for path in known if path.stem.split("_")[0] == stem
    ]
    if len(matches) != 1:
        listing = ", ".join(path.stem for path in known)
        raise OptionError(f"no notebook {name!r}", f"a file, or one of {listing}", "correct the name")
    return matches[0]


# --- parameters: by name and type, before anything starts ---------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """One line of a notebook's `parameters` cell. `type` is its annotation, or that of its default value."""

    name: str
    type: str
    default: Any
    help: str = ""


class _Misfit(Exception):
    """A value that a declared type does not admit."""


def declared_parameters(notebook: Path) -> dict[str, Parameter]:
    """What the cell tagged `parameters` declares. Read with Python's own parser: papermill's inspection goes by lines
    and loses a parameter whose comment or string holds a second `=`."""
    import nbformat

    try:
        cells = nbformat.read(notebook, as_version=4).cells
        source = next((cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])), "")
    except Exception as error:  # nbformat checks little of what it reads, and has an error of its own for each of that
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise OptionError(f"{notebook.name} is no notebook ({why})", "a file that Jupyter wrote") from error
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise OptionError(f"the parameters cell of {notebook.name} does not parse: {error}") from error
    lines = source.splitlines()
    found: dict[str, Parameter] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not isinstance(target, ast.Name) or getattr(node, "value", None) is None:
            continue
        with contextlib.suppress(ValueError):  # not a literal: a derived value, which cannot be set from outside
            default = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            annotation = getattr(node, "annotation", None)
            kind = ast.unparse(annotation) if annotation else type(default).__name__
            comment = lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :].partition("#")[2].strip()
            found[target.id] = Parameter(target.id, kind, default, comment)
    return found


def parse_parameters(assignments: Iterable[str]) -> dict[str, str]:
    """`["num_prompts=4", "dtype=int8"]` as a mapping of text; the declared types are applied later."""
    values: dict[str, str] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier() or keyword.iskeyword(name):
            raise OptionError(f"parameter {text!r}", "name=value", "write for example -p num_prompts=4")
        if name in values:
            raise OptionError(f"parameter {name} is given twice", "each once", "drop one")
        values[name] = value
    return values


def check_parameters(
    notebooks: Sequence[Path],
    profile: str,
    parameters: Mapping[str, Any],
    say: Callable[[str], None] = lambda text: None,
) -> dict[Path, dict[str, Any]]:
    """The values each notebook gets, converted to its declared types. Raises `OptionError` for a name that no notebook
    declares and for a value that does not fit."""
    declared = {notebook: declared_parameters(notebook) for notebook in notebooks}
    known = sorted({name for parameters_of in declared.values() for name in parameters_of} - {"profile"})
    for name in parameters:
        if name == "profile" and parameters[name] != profile:
            raise OptionError(f"profile is {profile!r} and parameter profile {parameters[name]!r}", "one", "drop one")
        if name not in known and name != "profile":
            what = notebooks[0].stem if len(notebooks) == 1 else "the notebooks"
            listing = f"one of {', '.join(known)}" if known else f"none: {what} declares no parameters"
            raise OptionError(f"unknown parameter {name!r} for {what}", listing, "correct its spelling")
    values: dict[Path, dict[str, Any]] = {}
    for notebook, takes in declared.items():
        wanted = {"profile": profile, **parameters}
        values[notebook] = {
            name: convert(value, takes[name], notebook.stem) for name, value in wanted.items() if name in takes
        }
    for name in parameters:
        takers = [notebook.stem for notebook in notebooks if name in values[notebook]]
        if len(takers) < len(notebooks):
            say(f"parameter {name} goes to {', '.join(takers)}; the others do not declare it")
    return values


def convert(value: Any, parameter: Parameter, notebook: str) -> Any:
    """`value` as the declared type, in the forms that papermill can write into a cell: str, int, float, bool, None,
    list, dict with string keys. Tuples become lists, NumPy and torch values plain numbers, paths text."""
    try:
        declared = ast.parse(parameter.type, mode="eval").body
        return _fit(_plain(value), declared)
    except (_Misfit, SyntaxError):
        raise OptionError(
            f"parameter {parameter.name} of {notebook} is {value!r} ({type(value).__name__})",
            f"{parameter.type}, as in its default {parameter.default!r}",
            f"correct {parameter.name}",
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _Misfit
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # NumPy and torch scalars and arrays
        return value.tolist()
    return value


def _fit(value: Any, declared: ast.expr) -> Any:
    if isinstance(declared, ast.BinOp) and isinstance(declared.op, ast.BitOr):  # X | Y
        try:
            return _fit(value, declared.left)
        except _Misfit:
            return _fit(value, declared.right)
    if isinstance(declared, ast.Subscript):  # list[X], tuple[X, ...], dict[str, X]
        container = _fit(value, declared.value)
        arguments = declared.slice.elts if isinstance(declared.slice, ast.Tuple) else [declared.slice]
        if isinstance(container, dict):
            return {key: _fit(item, arguments[-1]) for key, item in container.items()}
        return [_fit(item, arguments[0]) for item in container]
    kind = declared.id if isinstance(declared, ast.Name) else "None" if _is_none(declared) else ""
    if isinstance(value, str) and kind != "str":
        value = _plain(_from_text(value))
    if kind in ("None", "NoneType") and value is None:
        return None
    if kind == "float" and type(value) in (int, float):
        return float(value)
    if type(value).__name__ == {"tuple": "list"}.get(kind, kind):
        return value
    raise _Misfit


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _from_text(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "nan": float("nan"), "inf": float("inf")}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        raise _Misfit from None


# --- one notebook -------------------------------------------------------------------------------------------------


def _run_one(notebook: Path, target: Path, values: dict[str, Any], timeout_s: float) -> NotebookRun:
    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    start = time.monotonic()
    groups: list[int] = []
    ran: list[int] = []  # indices of code cells: the last is the one that runs, or where it ended

    def seconds_left(cell: Any) -> int:  # nbclient asks at the start of each cell how long it may take
        return max(1, round(start + timeout_s - time.monotonic()))

    def cell_starts(cell: Any, cell_index: int) -> None:
        if cell.cell_type == "code" and cell.source.strip():
            ran.append(cell_index)

    status, reason = "failed", ""
    try:
        with _quiet_logs(), _batch_variable():
            executed = papermill.execute_notebook(
                nbformat.read(notebook, as_version=4),
                re.sub(r"([{}])", r"\1\1", str(target)),  # papermill expands single braces in a path
                parameters=values,
                progress_bar=False,
                start_timeout=START_TIMEOUT_S,
                cwd=notebook.parent,
                timeout_func=seconds_left,
                on_cell_start=cell_starts,
                iopub_timeout=60,
                shutdown_kernel="immediate",
                kernel_manager_class=_tracking_kernel_manager(groups),
            )
        skipped = [index for index, cell in enumerate(executed.cells) if _never_ran(cell)]
        if skipped:
            reason = f"stopped early: cells after {_place(ran)} did not run (sys.exit in a cell?)"
        else:
            status = "ok"
    except KeyboardInterrupt:
        status, reason = "interrupted", f"at {_place(ran)}"
    except PapermillExecutionError as error:
        reason = f"{error.ename}: {error.evalue} (at {_place(ran)})"
    except DeadKernelError:
        reason = f"kernel died at {_place(ran)}"
    except CellTimeoutError:
        reason = f"time box of {timeout_s:.0f} s used up at {_place(ran)}"
    except Exception as error:  # noqa: BLE001 - whatever else befalls one notebook, the others still run
        reason = f"did not run: {type(error).__name__}: {error}"
    finally:
        _remove_groups(groups)
    return NotebookRun(notebook.stem, status, round(time.monotonic() - start, 1), " ".join(reason.split())[:400])


def _place(ran: Sequence[int]) -> str:
    """The cell as its number in the executed copy, `In [3]`, where the injected parameters count too."""
    return f"In [{len(ran)}]" if ran else "the start"


def _never_ran(cell: Any) -> bool:
    return cell.cell_type == "code" and bool(cell.source.strip()) and cell.execution_count is None


def _tracking_kernel_manager(groups: list[int]) -> type:
    """A kernel manager that notes the process group of each kernel, so that nothing outlives it: a killed kernel is
    no longer there to stop what it started."""
    from jupyter_client import AsyncKernelManager

    class TrackingKernelManager(AsyncKernelManager):
        async def start_kernel(self, **kwargs: Any) -> None:  # type: ignore[override]
            if self.has_trait("transport_encryption"):  # jupyter_client 8.9 on; without it ipykernel 7 warns
                self.set_trait("transport_encryption", "auto")
            await super().start_kernel(**kwargs)
            pgid = getattr(self.provisioner, "pgid", None)
            if pgid and pgid != os.getpgid(0):
                groups.append(pgid)

    return TrackingKernelManager


def _remove_groups(groups: Iterable[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """papermill and nbclient log each failure to stderr too; the row of the summary says it once."""
    loggers = [logging.getLogger(name) for name in ("papermill", "traitlets")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _batch_variable() -> Iterator[None]:
    """Kernels inherit it: no bars and no live widgets where nobody watches."""
    before = os.environ.get(BATCH_VARIABLE)
    os.environ[BATCH_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BATCH_VARIABLE]
        else:
            os.environ[BATCH_VARIABLE] = before


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does, kernels included. Only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
