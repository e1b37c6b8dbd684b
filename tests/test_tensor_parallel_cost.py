"""Costs of tensor parallelism against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from tutorial_lib.bench import tensor_parallel_cost as cost
from tutorial_lib.errors import OptionError


def test_a_step_of_405b_on_four_ranks():
    """126 layers, width 16384, bf16: 252 sums of 32 KiB per row. At 10 µs and 100 GB/s: 252 x 10.33 µs + 10 µs."""
    traffic = cost.step_traffic(126, 16384, rows=1)
    assert (traffic.sums, traffic.sum_bytes, traffic.choice_bytes) == (252, 32768, 8)
    link = cost.Link(10e-6, 100e9)
    assert cost.communication_s(traffic, link) == pytest.approx(252 * 10.32768e-6 + 10e-6, rel=1e-4)
    eleven = cost.communication_s(cost.step_traffic(126, 16384, rows=11), link)
    assert eleven == pytest.approx(252 * 13.60448e-6 + 10e-6, rel=1e-4)  # not eleven times as much


def test_a_ring_of_four_sends_three_quarters_twice():
    link = cost.ring_link(4, 2e-6, 400e9)
    assert link.latency_s == pytest.approx(12e-6)
    assert link.seconds(4e6) - link.latency_s == pytest.approx(2 * 3 / 4 * 4e6 / 400e9)
    assert cost.ring_link(1, 2e-6, 400e9).seconds(1e9) == 0


def test_a_fit_finds_the_link_that_made_the_times():
    link = cost.Link(20e-6, 3e9)
    fitted = cost.fit_link({size: link.seconds(size) for size in (2304, 11520, 147456)})
    assert (fitted.latency_s, fitted.bytes_per_s) == pytest.approx((20e-6, 3e9))
    flat = cost.fit_link({1000: 2e-3, 2000: 1e-3})
    assert flat.bytes_per_s == math.inf and 1e-3 < flat.latency_s < 1.5e-3  # the shorter time weighs more
    steep = cost.fit_link({1000: 1e-6, 2000: 3e-6})
    assert steep.latency_s == 0 and 1000e6 / 1.5 < steep.bytes_per_s < 1000e6
    for samples in ({}, {1000: 1e-6}, {1000: 0.0, 2000: 1.0}):
        with pytest.raises(OptionError, match="two sizes or more"):
            cost.fit_link(samples)


def test_ranks_share_the_work_and_add_the_waiting():
    assert cost.parallel_step_s(80e-3, 4, 5e-3) == pytest.approx(25e-3)
    assert cost.efficiency(80e-3, 4, 25e-3) == pytest.approx(0.8)
    assert cost.parallel_step_s(80e-3, 3, 5e-3, processors=2) == pytest.approx(45e-3)
    assert cost.parallel_step_s(80e-3, 2, 5e-3, processors=8) == pytest.approx(45e-3)
