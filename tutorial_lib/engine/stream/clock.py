"""The whole-step kernel's own clock: when, within one launch, each phase of each layer waited, began and ended.

A record of the kind "phase_clock", which `show.timeline` draws. The clock costs a few stores per phase and is off
unless `timed` is asked for one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .steps import LaunchedSteps

STAMPS = 16  # of each layer, numbered as in step.cu; the head's stand behind the last layer's
_HEAD = (0, 1, 3)
_BEGIN, _BEGIN_NS, _END, _END_NS = 12, 13, 14, 15

# phase -> its stamps: waits, starts, ends
_PHASES = {
    "norm": ((0, 1, 2), (9, 10, 11)),
    "qkv": ((2, 2, 3),),
    "attention": ((4, 5, 7),),
    "o": ((7, 7, 8),),
    "gate_up": ((11, 11, 12),),
    "down": ((13, 13, 14),),
}


def timed(steps: LaunchedSteps, launch: Callable[[], None]) -> dict[str, Any]:
    """The phase clock of what `launch` starts on `steps`: its last step. Returns {"kind": "phase_clock", "spans":
    [...], "launch_us": of the first block}, see `show.timeline`."""
    blocks, layers = steps.blocks, steps.layers
    stamps = torch.zeros(blocks, layers + 1, STAMPS, dtype=torch.int64, device=steps.trouble.device)
    steps.clock = stamps
    try:
        launch()
        found = stamps.cpu().double()
    finally:
        steps.clock = None
    return {"kind": "phase_clock", **spans_of(found)}


def spans_of(stamps: torch.Tensor) -> dict[str, Any]:
    """stamps: float64 [blocks, layers + 1, STAMPS], cycles of each block's own processor."""
    ends = stamps[:, -1]
    cycles_per_us = 1e3 * float(((ends[:, _END] - ends[:, _BEGIN]) / (ends[:, _END_NS] - ends[:, _BEGIN_NS])).median())
    us = (stamps - ends[:, None, None, _BEGIN]) / cycles_per_us
    found = []
    for layer in range(stamps.shape[1] - 1):
        for phase, every in _PHASES.items():
            for places in every:
                found.append(_span(us[:, layer], phase, layer, places))
    found.append(_span(us[:, -1], "head", None, _HEAD))
    launch_us = float((ends[:, _END_NS] - ends[:, _BEGIN_NS]).median()) * 1e-3
    return {"spans": sorted(found, key=lambda span: span["waits_us"]), "launch_us": launch_us}


def _span(us: torch.Tensor, phase: str, layer: int | None, places: tuple[int, int, int]) -> dict[str, Any]:
    waits, starts, ends = (round(float(us[:, place].median()), 3) for place in places)
    return {"phase": phase, "layer": layer, "waits_us": waits, "starts_us": starts, "ends_us": ends}


def by_phase(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """phase -> how often it came, and how long it waited and worked in all: {"times", "waits_us", "works_us"}."""
    found: dict[str, dict[str, float]] = {}
    for span in record["spans"]:
        own = found.setdefault(span["phase"], {"times": 0, "waits_us": 0.0, "works_us": 0.0})
        own["times"] += 1
        own["waits_us"] += span["starts_us"] - span["waits_us"]
        own["works_us"] += span["ends_us"] - span["starts_us"]
    return found
