"""What lesson 06 shows of several GPUs: how a block is divided, as a drawing, and the runs that were recorded.

Pure: drawings and tables. A rank's share has one colour in the whole drawing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..results import Generation, read_records
from .pictures import GOLD, PALE, Drawing
from .recorded import RECORDED, machine_words
from .tables import Table

Record = Mapping[str, Any]
_SHARES = ("#CFE8F7", "#FBE3C0", "#D5EFE3", "#F3DCE9")


def block_picture(ranks: int = 3) -> str:
    """One block of a layer on `ranks` ranks: two matrices, the first cut by columns, the second by rows, and a sum."""
    d = Drawing("#222222")
    height, top = 58, 44
    middle = top + (ranks * height - 12) / 2
    for x, text in ((122, "first matrix"), (282, "its part of the middle"), (450, "second matrix"), (600, "a part")):
        d.words(x, 26, text, size=12)
    d.box(10, middle - 15, 78, "x, whole", height=30, fill=PALE)
    d.box(684, middle - 15, 66, "sum", height=30, fill=GOLD)
    for rank in range(ranks):
        y, fill = top + rank * height, _SHARES[rank % len(_SHARES)]
        center = y + 20
        d.arrow(88, middle, 120, center)
        for column in range(ranks):  # a slice of the columns
            d.box(
                122 + column * 34,
                y,
                32,
                height=40,
                fill=fill if column == rank else "#FFFFFF",
                dash=_dash(column, rank),
            )
        d.arrow(122 + ranks * 34, center, 300, center)
        d.words((422 + ranks * 34) / 2, center - 6, f"rank {rank}", size=11, anchor="middle")
        d.box(302, y + 5, 104, "activation", height=30, fill=fill)
        d.arrow(406, center, 450, center)
        for row in range(ranks):  # a slice of the rows
            own = 40 / ranks
            d.box(
                452, y + row * own, 104, height=own - 2, fill=fill if row == rank else "#FFFFFF", dash=_dash(row, rank)
            )
        d.arrow(556, center, 598, center)
        d.box(600, y + 5, 44, f"y{rank}", height=30, fill=fill)
        d.arrow(644, center, 682, middle)
    d.words(560, top + ranks * height + 12, "all-reduce: every rank gets y0 + y1 + …", size=12, anchor="middle")
    return d.svg(
        top + ranks * height + 24,
        f"A block on {ranks} ranks: each multiplies the whole input with its columns of the first matrix, applies the "
        "activation, multiplies with its rows of the second matrix, and the sum over the ranks is the block's result.",
    )


def _dash(index: int, rank: int) -> str:
    return "" if index == rank else "3 3"


def runs_on_several_gpus(folder: str | Path = RECORDED) -> list[Record]:
    """Recorded runs, of any backend, whose target was divided among GPUs."""
    records = [record for path in sorted(Path(folder).glob("*/*.jsonl")) for record in read_records(path)]
    return [
        r
        for r in records
        if r.get("kind") == "run" and r.get("device") == "cuda" and r.get("tensor_parallel_size", 1) > 1
    ]


def several_gpus_table(runs: Sequence[Record]) -> Table:
    """Each run beside the plain one of the same backend, target, experiment and number of GPUs."""

    def group(run: Record) -> tuple[Any, ...]:
        return run["experiment"], run["backend"], run["target"], run["dtype"], run["tensor_parallel_size"]

    plain = {group(run): run["figures"]["output_tok_s"] for run in runs if run["method"] == "plain"}
    rows = []
    for run in runs:
        figures, is_plain = run["figures"], run["method"] == "plain"
        base = plain.get(group(run))
        rows.append(
            {
                "machine": machine_words(run["provenance"]["hardware"], "cuda"),
                "GPUs used": run["tensor_parallel_size"],
                "target": run["target"],
                "backend": run["backend"],
                "method": run["method"],
                "K": None if is_plain else run["max_draft_len"],
                "acceptance length": None if is_plain else figures["acceptance_length"],
                "acceptance": "–" if is_plain else "forced" if run["is_simulated"] else "real",
                "output throughput, tokens/s": figures["output_tok_s"],
                "speed-up": None if is_plain or not base else figures["output_tok_s"] / base,
            }
        )
    return Table(rows)


def closeness(one: Generation, other: Generation) -> tuple[float, float]:
    """Of two runs of one text with `logprobs=2`: the largest difference between log-probabilities that both have, and
    the smallest between the two best tokens of a position. The first must be far below the second for equal texts."""
    pairs = list(zip(one.logprobs or [], other.logprobs or [], strict=False))
    noise = max((abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys()), default=0.0)
    gaps = [abs(first - second) for a, _ in pairs for first, second in [sorted(a.values(), reverse=True)[:2]]]
    return noise, min(gaps, default=0.0)
