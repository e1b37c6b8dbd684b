"""What FP8 makes of a KV cache: the same rounding that the GPU's cache does, applied to any cache to see its error.

Keys and values of a layer have one scale each, the largest magnitude of a calibration text times a margin, mapped to
448, the largest number of e4m3. What is larger saturates. Nothing here stores FP8: the engine on a CPU computes in
float32, so the error can be looked at apart from every other effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import ModelError
from .model import Model, Segment, prefill
from .quantize import MARGIN
from .reference import FP8_MAX, to_fp8

Scales = Mapping[int, tuple[float, float]]  # layer -> scale of its keys, of its values


def calibrated(cache: torch.Tensor) -> dict[int, tuple[float, float]]:
    """Scales that cover `cache` [layers, 2 * kv_heads, rows, head_dim] (keys, then values) with a margin."""
    keys, values = (part.float().abs().amax((1, 2, 3)) for part in cache.chunk(2, dim=1))
    each = zip(keys.tolist(), values.tolist(), strict=True)
    return {layer: tuple(max(x, 1e-6) * MARGIN / FP8_MAX for x in pair) for layer, pair in enumerate(each)}  # type: ignore[misc]


def round_trip(cache: torch.Tensor, scales: Scales) -> torch.Tensor:
    """What an FP8 cache gives back for `cache`, same shape and type. Raises `ModelError`, once, for every layer that
    `scales` lacks."""
    if missing := [layer for layer in range(cache.shape[0]) if layer not in scales]:
        named = ", ".join(map(str, missing))
        raise ModelError(f"layers {named} have no scales for an FP8 cache", "calibrated ones", "calibrate every layer")
    heads = cache.shape[1] // 2
    spread = torch.tensor([scales[layer] for layer in range(cache.shape[0])], device=cache.device)
    spread = spread.repeat_interleave(heads, dim=1)[:, :, None, None]
    return (to_fp8(cache, spread).float() * spread).to(cache.dtype)


def errors(cache: torch.Tensor, scales: Scales) -> list[dict[str, Any]]:
    """Layer by layer: the error of keys and values, as ||x' - x|| / ||x||, and the share of values beyond the range."""
    rounded = round_trip(cache, scales)
    rows = []
    for layer, (before, after) in enumerate(zip(cache.float(), rounded.float(), strict=True)):
        found: dict[str, Any] = {"layer": layer}
        halves = zip(("keys", "values"), before.chunk(2), after.chunk(2), scales[layer], strict=True)
        for name, x, y, scale in halves:
            found[name] = float((y - x).norm() / x.norm())
            found[f"{name}_saturated"] = float((x.abs() > scale * FP8_MAX).float().mean())
        rows.append(found)
    return rows


def effect(
    model: Model, ids: Sequence[int], split: int, scales: Scales | None = None, *, slot: int = 0
) -> dict[str, Any]:
    """What the rounding does to the choices after it: `ids` up to `split` are read, their cache is rounded, and the
    rest is read behind it. scales: None calibrates on that very text. Returns the largest change of a log-probability
    that was above -5, and in how many of the positions the likeliest token is the same."""
    logits = {}
    for is_rounded in (False, True):
        prefill(model, ids[:split], slot)
        if is_rounded:
            text = model.cache[:, slot, :, :split]
            model.cache[:, slot, :, :split] = round_trip(text, scales or calibrated(text))
        hidden = model.forward(list(ids[split:]), [Segment(slot, split, len(ids) - split)])
        logits[is_rounded] = torch.log_softmax(model.logits(hidden), -1)
    exact, rounded = logits[False], logits[True]
    likely = exact > -5
    same = exact.argmax(-1) == rounded.argmax(-1)
    return {
        "positions": len(ids) - split,
        "same_choice": int(same.sum()),
        "largest_change": float((exact - rounded)[likely].abs().max()),
    }
