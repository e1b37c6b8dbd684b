"""Fill the README's results table from the records in notebooks/recorded, so that no figure stands there without one.

`make readme` writes it; tests/test_repository.py fails while README and records differ. A row is the latest record of
a configuration at its fastest K; the speed-up is against the fastest plain run on the same machine with the same
engine, target, number format and batch size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RECORDED = ROOT / "notebooks" / "recorded"
BEGIN, END = "<!-- results: begin (written by `make readme`) -->", "<!-- results: end -->"
NOTHING = "No run has been recorded yet: `notebooks/recorded/` is empty. Yours are in `runs/` after `make run`."
HEADER = (
    "| machine | target | method | number format | K | batch | output throughput, tokens/s | speed-up | "
    "acceptance length | record |\n|---|---|---|---|--:|--:|--:|--:|--:|---|"
)
_CONFIGURATION = (
    "experiment", "target", "backend", "dtype", "device", "batch_size", "sampling", "prompt_set", "method", "drafter",
)  # fmt: skip


NOT_HERE = ("number-formats",)  # runs that only serve another question


def read_records(folder: Path = RECORDED) -> dict[Path, list[dict[str, Any]]]:
    """The measured runs in every `<machine>/*.jsonl` below `folder`."""
    found = {}
    for path in sorted(folder.glob("*/*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        runs = [line for line in lines if line.get("kind") == "run" and line.get("experiment") not in NOT_HERE]
        if runs:
            found[path.relative_to(folder)] = runs
    return found


def results(records: dict[Path, list[dict[str, Any]]]) -> str:
    """The Markdown between the markers."""
    if not records:
        return NOTHING
    return "\n".join([HEADER, *(row for path, runs in records.items() for row in _rows(path, runs))])


def _rows(path: Path, runs: list[dict[str, Any]]) -> Iterable[str]:
    from tutorial_lib.show.plots import machine_of, method_style, speedup

    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: run["provenance"]["time_utc"]):
        if run["figures"]["output_tok_s"] is not None:
            latest[(*(str(run[key]) for key in _CONFIGURATION), run["max_draft_len"])] = run
    fastest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for key, run in latest.items():
        best = fastest.setdefault(key[:-1], run)
        if run["figures"]["output_tok_s"] > best["figures"]["output_tok_s"]:
            fastest[key[:-1]] = run
    for run in fastest.values():
        figures = run["figures"]
        gain = None if run["method"] == "plain" else speedup(run, list(fastest.values()))
        target = run["target"] + (" (random weights)" if run["target"].startswith("dummy:") else "")
        method = method_style(run["method"]).label + (", simulated acceptance" if run["is_simulated"] else "")
        cells = [
            machine_of([run]),
            target,
            method if run["backend"] == "torch" else f"{method} ({run['backend']})",
            run["dtype"],
            run["max_draft_len"] or "–",
            run["batch_size"],
            f"{figures['output_tok_s']:.1f}",
            "–" if gain is None else f"{gain:.2f}×",
            "–" if figures["acceptance_length"] is None else f"{figures['acceptance_length']:.2f}",
            f"[{path.parent.name}/{path.stem}](notebooks/recorded/{path.as_posix()})",
        ]
        yield "| " + " | ".join(str(cell) for cell in cells) + " |"


def filled(readme: str, table: str) -> str:
    """`readme` with `table` between the markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    new = filled(text, results(read_records()))
    if "--write" in sys.argv[1:]:
        README.write_text(new, encoding="utf-8")
        return 0
    return int(new != text)


if __name__ == "__main__":
    sys.exit(main())
