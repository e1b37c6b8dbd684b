"""FP8 for keys and values: rounding by half a step, saturation beyond the range, scales by layer, the effect."""

from __future__ import annotations

import pytest
import torch
from stand_ins import tiny_model

from tutorial_lib.engine.kv_fp8 import calibrated, effect, errors, round_trip
from tutorial_lib.engine.model import prefill
from tutorial_lib.engine.quantize import MARGIN
from tutorial_lib.errors import ModelError

HALF_STEP = 2.0**-4  # e4m3 has three bits behind the leading one
TEXT = [(7 * i * i + 3) % 320 for i in range(100)]


def some_cache() -> torch.Tensor:
    """Three layers of two KV heads; layers and keys of very different size."""
    x = torch.randn(3, 4, 50, 16, generator=torch.Generator().manual_seed(0))
    x[:, :2] *= 30
    return x * torch.tensor([0.01, 1.0, 1000.0])[:, None, None, None]


def test_every_number_is_off_by_half_a_step_at_most_whatever_the_size_of_its_layer():
    cache = some_cache()
    scales = calibrated(cache)
    back = round_trip(cache, scales)
    for layer in range(3):
        for part, scale in zip((slice(0, 2), slice(2, 4)), scales[layer], strict=True):
            x, y = cache[layer, part], back[layer, part]
            assert scale == pytest.approx(float(x.abs().max()) * MARGIN / 448)
            assert ((y - x).abs() <= HALF_STEP * x.abs().clamp_min(2.0**-6 * scale) * 1.001).all()
    assert torch.equal(round_trip(back, scales), back)  # what FP8 can hold it keeps
    assert (back != cache).float().mean() > 0.9


def test_what_is_beyond_the_range_saturates_and_is_counted():
    """An outlier ten times larger than anything in the calibration: no NaN, no infinity, its sign kept."""
    cache = some_cache()
    scales, outlier = calibrated(cache), cache.clone()
    outlier[1, 3, 7, 2] = -10 * cache[1, 2:].abs().max()
    back = round_trip(outlier, scales)
    assert back.isfinite().all() and float(back[1, 3, 7, 2]) == pytest.approx(-448 * scales[1][1])
    found = errors(outlier, scales)
    assert [row["values_saturated"] for row in found] == [0, pytest.approx(1 / (2 * 50 * 16)), 0]
    assert all(row["keys_saturated"] == 0 for row in found)
    assert found[1]["values"] > 0.3 > 0.05 > found[1]["keys"]


def test_one_scale_for_all_layers_would_lose_the_small_ones():
    cache = some_cache()
    own = errors(cache, calibrated(cache))
    assert max(row[name] for row in own for name in ("keys", "values")) < 0.03
    largest = dict.fromkeys(range(3), calibrated(cache)[2])
    assert errors(cache, largest)[0]["keys"] > 0.3  # many of them round to zero


def test_missing_scales_are_named_all_at_once():
    scales = calibrated(some_cache())
    with pytest.raises(ModelError, match="layers 0, 2 have no scales"):
        round_trip(some_cache(), {1: scales[1]})


def test_the_effect_on_choices_is_that_of_the_rounded_cache_alone():
    model = tiny_model("dummy:tiny-llama?seed=5")
    prefill(model, TEXT[:80], 0)
    scales = calibrated(model.cache[:, 0, :, :80])
    found = effect(model, TEXT, 80, scales)
    assert found["positions"] == 20 and 0 < found["largest_change"] < 1 and 15 <= found["same_choice"] <= 20
    assert effect(model, TEXT, 80) == found  # calibrated on the same text
    fine = dict.fromkeys(scales, (1e-9, 1e-9))
    assert effect(model, TEXT, 80, fine)["largest_change"] > found["largest_change"]  # everything saturates
    assert effect(model, TEXT, 1, scales)["positions"] == 99
