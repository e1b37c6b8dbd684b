"""What a token costs in joules and money, as a table: see `bench.energy`, which holds the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..bench import energy
from . import plots
from .tables import Table

Record = Mapping[str, Any]


def costs_table(runs: Sequence[Record], price_per_hour: float | None = None) -> Table:
    """A row for every run: joules per output token, watts, and with a price the cost of a million output tokens; where
    the machine tells no energy, the reason in its place."""
    labels = [plots.label_of(run, runs) for run in runs]
    rows = energy.cost_rows(runs, labels, price_per_hour)
    if price_per_hour is None:
        rows = [{name: value for name, value in row.items() if not name.startswith("price")} for row in rows]
    return Table(rows)
