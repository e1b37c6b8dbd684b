"""What dividing a model among ranks saves and costs per step: bytes read, sums waited for, speed-up. Pure.

A step of L layers waits for 2 L sums over the ranks (after o and after down), each of rows x width numbers, and for
one exchange of the best token per row. A collective takes a latency, however little it carries, plus bytes over
bandwidth (the alpha-beta model; for a ring of N ranks see Thakur et al. 2005, "Optimization of collective
communication operations in MPICH"). Reading the weights shrinks with the ranks, the latencies do not: that is all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import OptionError

CHOICE_BYTES = 8  # a rank's best token of a row and its logit, four bytes each


@dataclass(frozen=True)
class Link:
    """One collective over a fixed number of ranks: `latency_s` + bytes / `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, message_bytes: float) -> float:
        return self.latency_s + message_bytes / self.bytes_per_s


def fit_link(seconds_by_bytes: Mapping[int, float]) -> Link:
    """The link that comes nearest to measured times, each weighed by its own size (least squares of relative errors).

    Bandwidth is infinite where larger messages took no longer, latency 0 where the line would begin below it.
    """
    if len(seconds_by_bytes) < 2 or min(seconds_by_bytes.values(), default=0) <= 0:
        raise OptionError(f"a link is to be fitted to {dict(seconds_by_bytes)}", "times above 0 of two sizes or more")
    points = [(size, s, 1 / s**2) for size, s in seconds_by_bytes.items()]
    total = sum(w for *_, w in points)
    mean_size = sum(size * w for size, _, w in points) / total
    mean_s = sum(s * w for _, s, w in points) / total
    spread = sum(w * (size - mean_size) ** 2 for size, _, w in points)
    slope = sum(w * (size - mean_size) * (s - mean_s) for size, s, w in points) / spread
    if slope <= 0:
        return Link(mean_s, math.inf)
    latency = mean_s - slope * mean_size
    if latency < 0:
        slope = sum(w * size * s for size, s, w in points) / sum(w * size**2 for size, _, w in points)
    return Link(max(0.0, latency), 1 / slope)


def ring_link(ranks: int, hop_s: float, bytes_per_s: float) -> Link:
    """A sum over a ring: 2 (N - 1) hops, each of 1/N of the message. `bytes_per_s`: one rank's, in one direction."""
    if ranks < 2:
        return Link(0.0, math.inf)
    hops = 2 * (ranks - 1)
    return Link(hops * hop_s, bytes_per_s * ranks / hops)


@dataclass(frozen=True)
class Traffic:
    """What one step exchanges: `sums` messages of `sum_bytes`, and one exchange of `choice_bytes` from each rank."""

    sums: int
    sum_bytes: int
    choice_bytes: int


def step_traffic(layers: int, width: int, rows: int, bytes_per_number: int = 2) -> Traffic:
    """Of a greedy step over `rows` rows: K + 1 of them in a round, 1 in plain decoding. As many sums either way."""
    return Traffic(2 * layers, rows * width * bytes_per_number, rows * CHOICE_BYTES)


def communication_s(traffic: Traffic, link: Link) -> float:
    """Seconds that a step waits for other ranks."""
    return traffic.sums * link.seconds(traffic.sum_bytes) + link.seconds(traffic.choice_bytes)


def parallel_step_s(alone_s: float, ranks: int, waiting_s: float, processors: int | None = None) -> float:
    """A step on `ranks` ranks from the step `alone_s` of one rank that has one processor: its share, and the waiting.

    processors: how many run at once where that is fewer than the ranks, as on a machine with two cores.
    """
    return alone_s / min(ranks, processors or ranks) + waiting_s


def efficiency(alone_s: float, ranks: int, together_s: float) -> float:
    """Speed-up over one rank / number of ranks; 1 would be a perfect division."""
    return alone_s / (ranks * together_s)
