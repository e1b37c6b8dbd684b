"""Compiler, driver, cooperative launch, barrier and graph on a Hopper, with a kernel of ten lines: what the whole-step
kernel stands on."""

from __future__ import annotations

import pytest
import torch

from tutorial_lib.engine.stream import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="it is compiled for compute capability 9.0",
    ),
]


def test_all_blocks_meet_replay_give_up_and_are_refused_as_they_should():
    rows = list(check.launch_alone("launch"))
    assert len(rows) == 4 and [row for row in rows if not row.is_fine] == []
