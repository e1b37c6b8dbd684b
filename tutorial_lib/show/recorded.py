"""What a notebook cell computed on another day: kept with its provenance, read back in profile `replay`.

A cell writes `plain = recorded("plain", run_plain)`. Usually that runs `run_plain()`; in a replay it returns what the
cell returned on the machine that recorded it, so that a notebook can be read without a model. Values are JSON lines
in `notebooks/recorded/<machine>/<notebook>.jsonl`; measured runs among them are lines of their own (kind "run").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import OptionError
from ..results import Generation, Round, provenance, read_records, write_record

T = TypeVar("T")
RECORDED = Path(__file__).resolve().parents[2] / "notebooks" / "recorded"


class TokenTexts(dict[int, str]):
    """A tokenizer's memory of some ids: enough to show a recorded generation."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.get(token_id, f"⟨{token_id}⟩") for token_id in token_ids)


class Recorder:
    """One notebook's values by name.

    is_replay: read instead of run. folder: where `recorded/` lies. write_to: a folder that gets this machine's values
    as `<write_to>/<machine>/<notebook>.jsonl`, replacing an earlier file; "" keeps none. A tokenizer is kept as the
    texts of the ids in the generations recorded before it.
    """

    def __init__(
        self, notebook: str, *, is_replay: bool = False, folder: str | Path = RECORDED, write_to: str | Path = ""
    ) -> None:
        self.notebook, self.is_replay = notebook, is_replay
        self._generations: list[Generation] = []
        self._lines: list[dict[str, Any]] = []
        self._runs_written = 0
        self._target: Path | None = None
        self._origin = provenance(f"notebook {notebook}", None)
        if is_replay:
            self._lines, self._origin = self._newest(Path(folder))
        elif write_to:
            self._target = Path(write_to).expanduser() / machine_name(self._origin["hardware"]) / f"{notebook}.jsonl"
            self._target.unlink(missing_ok=True)

    @property
    def machine(self) -> str:
        """The machine that computed the values, in words."""
        return machine_words(self._origin["hardware"])

    def __str__(self) -> str:
        if not self.is_replay:
            return f"computed now on {self.machine}"
        return f"replayed: recorded on {self._origin['time_utc'][:10]} on {self.machine}"

    def __call__(self, name: str, make: Callable[[], T]) -> T:
        """`make()`, or what it returned when `name` was recorded. Raises `OptionError` where that was never done."""
        if self.is_replay:
            return self._read(name)
        value = make()
        if self._target is not None:
            self._write(name, value)
        return value

    def _write(self, name: str, value: Any) -> None:
        assert self._target is not None
        runs: list[dict[str, Any]] = []
        line = {
            "kind": "value",
            "notebook": self.notebook,
            "name": name,
            "value": self._encode(value, runs),
            "provenance": self._origin,
        }
        for run in runs:
            write_record(self._target, run)
        write_record(self._target, line)

    def _encode(self, value: Any, runs: list[dict[str, Any]]) -> Any:
        if isinstance(value, Generation):
            self._generations.append(value)
            return {"kind": "generation", **value.to_dict()}
        if isinstance(value, Mapping) and value.get("kind") == "run":
            self._runs_written += 1
            runs.append({**value, "id": f"{self.notebook}/{self._runs_written}"})
            return {"kind": "run of this file", "id": runs[-1]["id"]}
        if isinstance(value, Mapping):
            return {"kind": "pairs", "pairs": [[k, self._encode(v, runs)] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            return [self._encode(item, runs) for item in value]
        if hasattr(value, "decode") and not isinstance(value, (str, bytes)):
            return {"kind": "tokenizer", "texts": self._texts(value)}
        return value

    def _texts(self, tokenizer: Any) -> list[list[Any]]:
        ids = {i for g in self._generations for i in (*g.token_ids, *(d for r in g.rounds for d in r.drafted))}
        return [[i, tokenizer.decode([i])] for i in sorted(ids)]

    def _newest(self, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        files = [read_records(path) for path in sorted(folder.glob(f"*/{self.notebook}.jsonl"))]
        origins: list[dict[str, Any]] = [
            next((line["provenance"] for line in lines if line["kind"] == "value"), {}) for lines in files
        ]
        dated = [(origin["time_utc"], i) for i, origin in enumerate(origins) if origin]
        if not dated:
            raise OptionError(
                f"there is no record of notebook {self.notebook}",
                "one for profile replay",
                "run it in profile cpu",
            )
        _, newest = max(dated)
        return files[newest], origins[newest]

    def _read(self, name: str) -> Any:
        for line in self._lines:
            if line.get("name") == name and line["kind"] == "value":
                return self._decode(line["value"])
        raise OptionError(
            f"{name!r} is not in the record of {self.notebook}", "a newer record", "run it in profile cpu"
        )

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind = value["kind"]
        if kind == "pairs":
            return {key: self._decode(item) for key, item in value["pairs"]}
        if kind == "tokenizer":
            return TokenTexts(value["texts"])
        if kind == "run of this file":
            return next(line for line in self._lines if line.get("id") == value["id"])
        fields = {key: item for key, item in value.items() if key != "kind"}
        of_ids = ("drafted", "emitted", "parents", "path")
        rounds = [Round(**{**r, **{n: tuple(r[n]) for n in of_ids if r.get(n) is not None}}) for r in fields["rounds"]]
        return Generation(**{**fields, "rounds": rounds})


def machine_words(hardware: Mapping[str, Any], device: str = "cpu") -> str:
    """A machine in words, as figures name it: its CPU and cores, or the GPUs where the work ran there."""
    gpus, cores = hardware.get("gpus"), hardware.get("cores")
    if device != "cpu" and gpus:
        return f"{len(gpus)} × {gpus[0]['name']}"
    words = str(hardware.get("cpu") or "a machine that was not recorded")
    return words + (f", {cores} core{'s' if cores > 1 else ''}" if cores else "")


def machine_name(hardware: Mapping[str, Any]) -> str:
    """A folder name for a machine: its GPUs, or its CPU and cores."""
    gpus = hardware.get("gpus") or []
    words = f"{len(gpus)} {gpus[0]['name']}" if gpus else f"{hardware['cpu']} {hardware['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", words.lower())).strip("-")
