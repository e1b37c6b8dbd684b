"""Records as files hold them: one a line, or whole documents with their runs and summary. Reading only.

A file of another kind is no error here: it is passed over, with the reason. What belongs together stays together: the
records of one file are one experiment or several, by their own names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NOT_JSON, OptionError, WorkbookError
from ..results import read_records

LARGEST_MB = 64
Record = dict[str, Any]


@dataclass(frozen=True)
class RecordFile:
    """name: of the file, below the folder that was searched. why_not: why it holds nothing to show, "" if it does."""

    name: str
    records: tuple[Record, ...] = ()
    why_not: str = ""


def find(place: str | Path) -> list[RecordFile]:
    """Every .json and .jsonl file in a folder and below it, by name; or the one file. `OptionError` without any."""
    place = Path(place).expanduser()
    if place.is_file():
        return [_read(place, place.name)]
    if not place.is_dir():
        raise OptionError(f"{place} is not there", "a folder or a file of records", "correct the path")
    paths = [path for path in sorted(place.rglob("*")) if path.suffix in (".json", ".jsonl") and path.is_file()]
    shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(place).parts)]
    if not shown:
        raise OptionError(f"{place} holds no .json or .jsonl file", "records", "run workbook bench --json FILE first")
    return [_read(path, path.relative_to(place).as_posix()) for path in shown]


def records_of(place: str | Path) -> list[Record]:
    """All records below `place`. `OptionError` where there is none."""
    files = find(place)
    records = [record for file in files for record in file.records]
    if not records:
        raise OptionError(f"no record in {place} ({files[0].name}: {files[0].why_not})", "at least one", "another file")
    return records


def _read(path: Path, name: str) -> RecordFile:
    if path.stat().st_size > LARGEST_MB * 1e6:
        return RecordFile(name, why_not=f"it is larger than {LARGEST_MB} MB")
    try:
        lines = read_records(path) if path.suffix == ".jsonl" else [json.loads(path.read_text("utf-8"))]
    except (WorkbookError, OSError, *NOT_JSON) as error:
        return RecordFile(name, why_not=f"it cannot be read: {' '.join(str(error).split())[:200]}")
    records = [record for line in lines for record in flattened(line)]
    return RecordFile(name, tuple(records)) if records else RecordFile(name, why_not="it holds no record")


def flattened(document: Any) -> list[Record]:
    """A document as its records: its runs, whatever stands beside them, and last its summary, as in a .jsonl file."""
    if not isinstance(document, Mapping):
        return []
    runs = document.get("runs")
    if not isinstance(runs, list):
        return [dict(document)] if isinstance(document.get("kind"), str) else []
    others = document.get("records")
    found = [dict(r) for r in [*runs, *(others if isinstance(others, list) else [])] if isinstance(r, Mapping)]
    found = [record for record in found if isinstance(record.get("kind"), str)]
    rest = {key: value for key, value in document.items() if key not in ("runs", "records")}
    rest.setdefault("summary", {})
    rest.setdefault("experiment", found[0].get("experiment", "") if found else "")
    rest["kind"] = "summary" if rest.get("kind") in (None, "comparison") else rest["kind"]
    if "provenance" not in rest and found and "provenance" in found[0]:
        rest["provenance"] = found[0]["provenance"]
    return [*found, rest]


def family(record: Mapping[str, Any]) -> str:
    """The experiment of a record without what tells its runs apart: "70b-1b, acceptance length 5" is of 70b-1b."""
    return str(record.get("experiment") or record["kind"]).split(",")[0]
