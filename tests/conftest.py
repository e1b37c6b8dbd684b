"""Shared by the engine's tests: one thread, tiny random models, a tokenizer of visible pieces.

Models are made once per session and never changed by a test: one that needs to damage its model builds its own with
`stand_ins.tiny_model`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tiny products only lose by more threads

import pytest


def pytest_collection_modifyitems(items):
    """Notebooks first: with a second process the rest is done beside them."""
    items.sort(key=lambda item: "notebooks" not in item.path.parts)


@pytest.fixture(scope="session")
def target():
    """A two-layer Llama whose greedy texts hardly repeat; 5 slots, 256 positions."""
    from stand_ins import tiny_model

    return tiny_model("dummy:tiny-llama?seed=5")


@pytest.fixture(scope="session")
def other():
    """A smaller model of the same vocabulary that shares no weight with `target`: a bad drafter."""
    from stand_ins import tiny_model

    return tiny_model("dummy:tiny-llama?seed=4&layers=1")


@pytest.fixture(scope="session")
def pieces():
    """A tokenizer with visible words, half characters and emoji, for ids of the tiny models."""
    from stand_ins import Pieces

    return Pieces.for_vocabulary(320)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder for engines."""
    monkeypatch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
