"""Speculative decoding as a workbook: build engines, run them with and without a drafter, measure, explain.

The names below are what notebooks import. They load on first use, so that `import tutorial_lib` costs nothing.
"""

from __future__ import annotations

from importlib import import_module

_HOMES = {
    "LLM": "api",
    "build": "api",
    "SamplingParams": "config",
    "KvCacheConfig": "config",
    "Fp8Config": "config",
    "DraftTargetDecodingConfig": "config",
    "NGramDecodingConfig": "config",
    "SADecodingConfig": "config",
    "LookaheadDecodingConfig": "config",
    "MedusaDecodingConfig": "config",
    "EagleDecodingConfig": "config",
    "LayerSkipDecodingConfig": "config",
    "Generation": "results",
    "Round": "results",
    "WorkbookError": "errors",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
