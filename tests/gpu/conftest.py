"""Everything here needs an NVIDIA GPU: `make gpu-test`, or `pytest -m gpu tests/gpu`. Without one each test says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "this torch sees no NVIDIA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def pytest_collection_modifyitems(items):
    if reason := why_not():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["bf16", "fp8"])
def form(request):
    """The number format of weights (and of the cache): FP8 needs compute capability 8.9."""
    if request.param == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no FP8 units")
    return request.param


@pytest.fixture
def pdl() -> bool:
    """Programmatic dependent launch where the GPU has it: from compute capability 9.0 on."""
    return torch.cuda.get_device_capability() >= (9, 0)
