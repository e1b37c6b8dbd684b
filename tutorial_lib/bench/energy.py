"""Joules and money per token: what the machine's own energy counters say of a run, and an hourly rate on top.

On an NVIDIA GPU the driver's total-energy counter (NVML, the GPUs alone), on a processor RAPL's counters of its
packages (all that ran on them). Counters move in steps, so calls too short for them are not counted. Where nothing
can be read the result is None and says why; nothing is estimated from a datasheet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import OptionError

POWERCAP = Path("/sys/class/powercap")
DEFINITIONS = {
    "energy_j_per_output_token": "Joules by the machine's own energy counter over the timed calls / their output "
    "tokens, prefill included; `source` says whose counter.",
    "mean_power_w": "The same joules / the seconds of those calls.",
    "price_per_million_output_tokens": "Price of an hour / output tokens in an hour at the output throughput x 1e6, "
    "for a machine that is busy all the time: idle hours are not in it.",
}


class Meter(Protocol):
    """A counter of joules. problem: why it cannot be read, None if it can. shortest_s: of a call that it resolves."""

    source: str
    problem: str | None
    shortest_s: float

    def joules(self) -> float | None: ...


class NvmlMeter:
    """The first `gpus` GPUs, by the driver's counter, which moves some ten times a second."""

    shortest_s = 1.0

    def __init__(self, gpus: int = 1) -> None:
        from .gpu_meter import Nvml

        self._gpus = [Nvml(index) for index in range(gpus)]
        self.source = f"NVML, {'the GPU' if gpus == 1 else f'{gpus} GPUs'} alone"
        self.problem = next((gpu.problem for gpu in self._gpus if gpu.problem), None)
        if self.problem is None and self.joules() is None:
            self.problem = "NVML: this GPU has no energy counter"

    def joules(self) -> float | None:
        read = [gpu.energy_j() for gpu in self._gpus]
        return None if any(value is None for value in read) else sum(value for value in read if value is not None)


class RaplMeter:
    """All processor packages, by the counters that Linux shows under /sys/class/powercap; they move every ms."""

    shortest_s = 0.05

    def __init__(self, folder: Path = POWERCAP) -> None:
        self.source = "RAPL, all processor packages, whatever ran on them"
        self.problem: str | None = None
        self._packages = [zone for zone in sorted(folder.glob("*-rapl:*")) if _is_package(zone)]
        self._last: dict[Path, int] = {}
        self._sum = 0.0
        if not self._packages:
            self.problem = f"RAPL: there is no processor package under {folder}"
            return
        try:
            self._ranges = {zone: int((zone / "max_energy_range_uj").read_text()) for zone in self._packages}
            self._last = {zone: int((zone / "energy_uj").read_text()) for zone in self._packages}
        except (OSError, ValueError) as error:
            why = "only root may read it" if isinstance(error, PermissionError) else str(error)
            self.problem = f"RAPL: {why}"

    def joules(self) -> float | None:
        """Since this meter was made. A counter that ran over its range went on from 0."""
        if self.problem is not None:
            return None
        for zone, before in self._last.items():
            try:
                now = int((zone / "energy_uj").read_text())
            except (OSError, ValueError):
                return None
            self._sum += 1e-6 * (now - before if now >= before else now - before + self._ranges[zone])
            self._last[zone] = now
        return self._sum


def _is_package(zone: Path) -> bool:
    """Packages, not the cores and memory inside them, which they count already."""
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return False


class NoMeter:
    """Says why there is none."""

    source, shortest_s = "", 0.0

    def __init__(self, problem: str) -> None:
        self.problem: str | None = problem

    def joules(self) -> None:
        return None


def meter_for(info: Mapping[str, Any]) -> Meter:
    """The counter of the machine part that an `LLM` with this `info` runs on."""
    device = str(info.get("device", ""))
    if device.startswith("cuda") or "NVIDIA" in device:
        return NvmlMeter(int(info.get("tensor_parallel_size") or 1))
    if device == "cpu":
        return RaplMeter()
    return NoMeter(f"device {device!r} has no counter known here")


@dataclass
class Metered:
    """The timed calls of one `LLM`: (joules or None, seconds, output tokens) each."""

    meter: Meter
    calls: list[tuple[float | None, float, int]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """For a run's record: joules per output token and watts, or None with the reason."""
        known = [(j, s, n) for j, s, n in self.calls if j is not None and s >= self.meter.shortest_s]
        joules, seconds, tokens = (sum(column) for column in zip(*known, strict=True)) if known else (0, 0, 0)
        why = None
        if self.meter.problem is not None:
            why = self.meter.problem
        elif not known:
            why = f"every timed call is shorter than {self.meter.shortest_s:g} s, which the counter does not resolve"
        elif not joules > 0 or not tokens:
            why = "the counter did not move"
        return {
            "energy_j_per_output_token": None if why else joules / tokens,
            "mean_power_w": None if why else joules / seconds,
            "source": self.meter.source or None,
            "why_not_available": why,
        }


# ---- money ----------------------------------------------------------------------------------------------------------


def check_price(price_per_hour: float | None) -> None:
    if price_per_hour is not None and not (math.isfinite(price_per_hour) and price_per_hour > 0):
        raise OptionError(f"the price of an hour is {price_per_hour:g}", "a finite number above 0", "correct it")


def price_per_million(price_per_hour: float, output_tok_s: float) -> float:
    """In the currency of the hourly price. 3.60 an hour at 100 tokens/s: 10.00."""
    check_price(price_per_hour)
    return price_per_hour / 3600 / output_tok_s * 1e6


def price_record(price_per_hour: float | None, output_tok_s: float | None) -> dict[str, Any] | None:
    """For a run's record; None where no price was given."""
    if price_per_hour is None:
        return None
    value = price_per_million(price_per_hour, output_tok_s) if output_tok_s else None
    return {"price_per_hour": price_per_hour, "price_per_million_output_tokens": value}


# ---- words ----------------------------------------------------------------------------------------------------------


def energy_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """`energy` of a run's record. Records of the GPU experiments have the GPU's joules beside their figures; a record
    without either says so."""
    if run.get("energy"):
        return dict(run["energy"])
    joules = run.get("energy_j_per_token")
    return {
        "energy_j_per_output_token": joules,
        "mean_power_w": run.get("mean_power_w"),
        "source": None if joules is None else "NVML, the GPU alone",
        "why_not_available": None if joules is not None else "this record holds none",
    }


def describe(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for the energy of all runs, and one for their price where there is one."""
    found = {name: energy_of(record) for name, record in records.items()}
    known = {name: e for name, e in found.items() if e["energy_j_per_output_token"] is not None}
    lines = []
    if known:
        parts = [f"{name} {e['energy_j_per_output_token']:.3g} J" for name, e in known.items()]
        lines.append(f"energy per output token: {', '.join(parts)} ({_one_of(known.values(), 'source')})")
    missing = {name: e for name, e in found.items() if name not in known}
    if missing:
        whose = "" if len(missing) == len(found) else f" of {', '.join(missing)}"
        lines.append(f"energy{whose}: not available ({_one_of(missing.values(), 'why_not_available')})")
    prices = {name: record["price"] for name, record in records.items() if record.get("price")}
    priced = [
        f"{name} {price['price_per_million_output_tokens']:.2f}"
        for name, price in prices.items()
        if price["price_per_million_output_tokens"] is not None
    ]
    if priced:
        hourly = next(iter(prices.values()))["price_per_hour"]
        lines.append(f"price of a million output tokens at {hourly:g} an hour: {', '.join(priced)}")
    return lines


def _one_of(found: Any, key: str) -> str:
    return "; ".join(dict.fromkeys(str(entry[key]) for entry in found))


def cost_rows(
    runs: Sequence[Mapping[str, Any]], labels: Sequence[str], price_per_hour: float | None
) -> list[dict[str, Any]]:
    """A row for every run, for a table: throughput, joules and watts, price; with the reason where there is none."""
    check_price(price_per_hour)
    rows = []
    for run, label in zip(runs, labels, strict=True):
        energy, throughput = energy_of(run), run["figures"]["output_tok_s"]
        joules = energy["energy_j_per_output_token"]
        price = None if price_per_hour is None or not throughput else price_per_million(price_per_hour, throughput)
        rows.append(
            {
                "run": label,
                "output tokens / s": throughput,
                "J per output token": "not available" if joules is None else joules,
                "mean power, W": energy["mean_power_w"],
                "price of a million output tokens": price,
                "counter": energy["source"] if joules is not None else energy["why_not_available"],
            }
        )
    return rows
