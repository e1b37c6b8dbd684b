"""What the GPU says of itself while something runs: clocks, power and energy (NVML), and time by kind of kernel.

A reading that the driver or a missing library cannot give is None; `Nvml.problem` says why. Nothing here changes a
setting of the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import SamplingParams

CLOCK_STAMPS = 3  # kernels of that name in every round of the GPU engine, see `engine.graph`


class Nvml:
    """The driver's management library, for the GPU that torch calls `index`."""

    def __init__(self, index: int = 0) -> None:
        self.problem: str | None = None
        self._library: Any = None
        try:
            import pynvml
        except ImportError:
            self.problem = "nvidia-ml-py is not installed"
            return
        import torch

        try:
            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        except (pynvml.NVMLError, AttributeError, RuntimeError) as error:
            self.problem = f"NVML: {error}"
            return
        self._library = pynvml

    def limits(self) -> dict[str, float | None]:
        """The highest clocks and the power cap that are set."""
        return {
            "max_sm_clock_mhz": self._read("nvmlDeviceGetMaxClockInfo", 1, self._constant("NVML_CLOCK_SM")),
            "max_memory_clock_mhz": self._read("nvmlDeviceGetMaxClockInfo", 1, self._constant("NVML_CLOCK_MEM")),
            "power_cap_w": self._read("nvmlDeviceGetEnforcedPowerLimit", 1e-3),
        }

    def now(self) -> dict[str, float | None]:
        """Clocks, power and temperature at this moment."""
        return {
            "sm_clock_mhz": self._read("nvmlDeviceGetClockInfo", 1, self._constant("NVML_CLOCK_SM")),
            "memory_clock_mhz": self._read("nvmlDeviceGetClockInfo", 1, self._constant("NVML_CLOCK_MEM")),
            "power_w": self._read("nvmlDeviceGetPowerUsage", 1e-3),
            "temperature_c": self._read("nvmlDeviceGetTemperature", 1, self._constant("NVML_TEMPERATURE_GPU")),
        }

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", 1e-3)

    def _constant(self, name: str) -> Any:
        return getattr(self._library, name, None)

    def _read(self, function: str, scale: float, *arguments: Any) -> float | None:
        if self._library is None:
            return None
        try:
            return round(getattr(self._library, function)(self._gpu, *arguments) * scale, 3)
        except (self._library.NVMLError, AttributeError):
            return None


@dataclass
class Metered:
    """An `LLM` whose timed calls (those that ask for `output_tokens`) are metered; all else is passed on."""

    llm: Any
    nvml: Any
    output_tokens: int
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    @property
    def info(self) -> dict[str, Any]:
        return self.llm.info

    def generate(self, inputs: Any, sampling_params: SamplingParams | None = None) -> Any:
        before = self.nvml.energy_j()
        result = self.llm.generate(inputs, sampling_params)
        after, state = self.nvml.energy_j(), self.nvml.now()
        if sampling_params is not None and sampling_params.max_tokens == self.output_tokens:
            generations = result if isinstance(result, list) else [result]
            self.calls.append(
                {
                    "joules": None if before is None or after is None else after - before,
                    "tokens": sum(len(g.token_ids) for g in generations),
                    "seconds": max(g.latency_s for g in generations),
                    "after": state,
                }
            )
        return result

    def time_steps(self, rows: Sequence[int], context: int = 128) -> dict[int, float]:
        return self.llm.time_steps(rows, context)

    def time_draft(self, max_draft_len: int, context: int = 128) -> float:
        return self.llm.time_draft(max_draft_len, context)

    def close(self) -> None:
        self.llm.close()

    def energy(self, shortest_s: float = 1.0) -> dict[str, Any]:
        """Joules per output token and mean watts over the timed calls, prefill included, and the GPU's state after
        the last one. None for calls shorter than `shortest_s`: the counter moves in steps of some 0.1 s."""
        known = [c for c in self.calls if c["joules"] is not None and c["seconds"] >= shortest_s]
        joules, seconds = sum(c["joules"] for c in known), sum(c["seconds"] for c in known)
        return {
            "energy_j_per_token": joules / sum(c["tokens"] for c in known) if known else None,
            "mean_power_w": joules / seconds if known else None,
            "gpu_after": self.calls[-1]["after"] if self.calls else None,
        }


# ---- time by kernel -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelTime:
    """One kernel on the GPU's clock, microseconds."""

    name: str
    start_us: float
    end_us: float


def profile_rounds(llm: Any, prompt_ids: Sequence[int], params: SamplingParams, rounds: int) -> list[KernelTime]:
    """Every kernel of `rounds` rounds (plain steps, without a drafter), replayed from their graph as in any run."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    stream = iter(llm.generate_async(list(prompt_ids), params, streaming=True))
    try:
        for _ in range(4):  # prefill, then rounds until one is always in flight
            next(stream)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(rounds):
                next(stream)
            torch.cuda.synchronize()
    finally:
        stream.close()
    return [
        KernelTime(event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type.name == "CUDA"
    ]


def by_kind(kernels: Iterable[KernelTime], rounds: int) -> dict[str, Any]:
    """Where a round's time goes: {"rounds", "us_per_round", "gap_us_per_round", "kinds": [...]}, the longest first.

    Launches overlap, the next one waiting inside for the one before. So a kernel counts from the end of those before
    it, or its own start if that is later; what no kernel covers is a gap, and all of it adds up to the whole. The
    rounds are counted by their clock stamps where there are any.
    """
    ordered = sorted(kernels, key=lambda k: (k.end_us, k.start_us))
    stamps = sum(kind_of(k.name) == "stamp" for k in ordered)
    rounds = stamps // CLOCK_STAMPS if stamps >= CLOCK_STAMPS else rounds
    found: dict[str, list[float]] = {}
    gaps, last = 0.0, ordered[0].start_us if ordered else 0.0
    for kernel in ordered:
        gaps += max(0.0, kernel.start_us - last)
        found.setdefault(kind_of(kernel.name), []).append(max(0.0, kernel.end_us - max(last, kernel.start_us)))
        last = max(last, kernel.end_us)
    whole = sum(sum(times) for times in found.values()) + gaps
    kinds = [
        {
            "kind": kind,
            "launches_per_round": len(times) / rounds,
            "us_per_round": sum(times) / rounds,
            "share": sum(times) / whole if whole else None,
        }
        for kind, times in found.items()
    ]
    return {
        "rounds": rounds,
        "us_per_round": whole / rounds,
        "gap_us_per_round": gaps / rounds,
        "kinds": sorted(kinds, key=lambda kind: -kind["us_per_round"]),
    }


def kind_of(kernel: str) -> str:
    """ "_gate_up_kernel" -> "gate_up"; copies and fills by their kind; every other kernel is PyTorch's."""
    if own := re.match(r"_(\w+?)_kernel", kernel):
        return own[1]
    for word in ("memcpy", "memset"):
        if word in kernel.lower():
            return word
    return "torch"
