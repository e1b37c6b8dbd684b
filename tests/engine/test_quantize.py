"""FP8: what is rounded, what saturates, and that calibrated scales cover what a forward really produces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_models import PLAIN, Pages, gpu_model, packed_dummy, random_ids, relative

from tutorial_lib.engine.gpu_build import assemble, candidates, plain_tactics, quantized, random_packed
from tutorial_lib.engine.model import ModelConfig
from tutorial_lib.engine.quantize import MARGIN, calibrate, quantize_fp8, random_fp8
from tutorial_lib.engine.reference import FP8, FP8_MAX, to_fp8
from tutorial_lib.errors import ModelError
from tutorial_lib.shapes import dummy_config

FAMILIES = ("dummy:tiny-llama?seed=5", "dummy:tiny-qwen2", "dummy:tiny-qwen3", "dummy:tiny-mistral")
TEXTS = [random_ids(64, seed=seed) for seed in range(4)]
HALF_STEP = 2.0**-4  # e4m3 has three bits behind the leading one: rounding is off by at most a sixteenth


def dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.float() * scale[:, None]


# ---- weights --------------------------------------------------------------------------------------------------------


def test_every_row_uses_the_whole_range_and_is_off_by_half_a_step_at_most():
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 40)[:, None]
    codes, scale = quantize_fp8(weight)
    assert codes.dtype == FP8 and scale.dtype == torch.float32 and scale.shape == (40,)
    assert (codes.float().abs().amax(1) == FP8_MAX).all()
    error = (dequantized(codes, scale) - weight).abs()
    smallest_normal = 2.0**-6 * scale[:, None]
    assert (error <= HALF_STEP * weight.abs().clamp_min(smallest_normal) * 1.001).all()


def test_a_scale_per_row_is_better_than_one_for_all_where_rows_differ():
    generator = torch.Generator().manual_seed(1)
    alike = torch.randn(64, 256, generator=generator)
    uneven = alike * torch.logspace(-6, 0, 64)[:, None]
    per_tensor, scale = quantize_fp8(uneven, is_per_channel=False)
    assert (scale == scale[0]).all() and float(scale[0]) == pytest.approx(float(uneven.abs().max()) / FP8_MAX)
    row_error = [
        relative(dequantized(*quantize_fp8(uneven, is_per_channel=kind))[0], uneven[0]) for kind in (True, False)
    ]
    assert row_error[0] < 0.03 and row_error[1] > 0.5  # the smallest row is all but lost in a scale for all
    even = [relative(dequantized(*quantize_fp8(alike, is_per_channel=kind)), alike) for kind in (True, False)]
    assert even[0] < 0.03 and even[1] < 0.03


def test_rows_of_zeros_and_huge_numbers_give_no_nan():
    weight = torch.zeros(3, 16)
    weight[1], weight[2] = 1e30, torch.finfo(torch.bfloat16).max
    codes, scale = quantize_fp8(weight)
    assert torch.isfinite(codes.float()).all() and torch.isfinite(scale).all() and (scale > 0).all()
    assert not codes[0].float().any()


def test_values_beyond_the_scale_saturate():
    x = torch.tensor([[1000.0, -1000.0, 447.0, 1e38, -1e38, 0.0]])
    assert to_fp8(x, torch.tensor(1.0)).float().tolist() == [[448.0, -448.0, 448.0, 448.0, -448.0, 0.0]]
    assert to_fp8(x, torch.tensor(0.5)).float()[0, :2].tolist() == [448.0, -448.0]


def test_only_products_are_quantized_and_the_head_only_if_asked():
    config, packed = packed_dummy("dummy:tiny-qwen2")
    for is_head in (False, True):
        out = quantized(packed, config, None, is_head=is_head)
        eights = {name for name, t in out.items() if t.dtype == FP8}
        products = {f"{i}.{kind}" for i in range(2) for kind in ("qkv", "o", "gate_up", "down")}
        assert eights == products | ({"head"} if is_head else set())  # tied: the embedding itself stays as it is
        assert all(out[name] is packed[name] for name in packed if name not in eights)
    assert not any(t.dtype == FP8 for t in packed.values())


def test_scales_are_calibrated_or_dynamic_per_row_or_per_tensor():
    config, packed = packed_dummy("dummy:tiny-llama")
    scales = [dict.fromkeys(("qkv_in", "o_in", "gate_up_in", "down_in", "k", "v"), 0.5)] * config.num_layers
    fixed, dynamic, coarse = (
        quantized(packed, config, scales, is_head=False, **how)
        for how in ({}, {"is_dynamic": True}, {"is_per_channel": False})
    )
    assert {name for name in fixed if name.endswith(".in")} == {
        f"{i}.{kind}.in" for i in range(config.num_layers) for kind in ("qkv", "o", "gate_up", "down")
    }
    assert not any(name.endswith(".in") for name in dynamic) and dynamic["0.kv_scale"].tolist() == [0.5, 0.5]
    assert len(coarse["0.qkv.scale"].unique()) == 1 < len(fixed["0.qkv.scale"].unique())


# ---- random weights -------------------------------------------------------------------------------------------------


def test_random_codes_are_never_nan_and_spread_over_all_others_below_two():
    codes = random_fp8(256, 1024, "cpu", torch.Generator().manual_seed(0))
    values = codes.float()
    assert torch.isfinite(values).all() and values.abs().max() < 2
    assert len(codes.view(torch.uint8).unique()) == 128
    assert float((values == 0).float().mean()) < 0.02  # timing must not run on zeros
    assert float(values.std()) == pytest.approx(0.6, abs=0.01) and abs(float(values.mean())) < 0.01


@pytest.mark.parametrize("is_head_fp8", [False, True])
def test_a_model_of_random_codes_computes_with_numbers_of_order_one(is_head_fp8):
    config = ModelConfig.from_hf(dummy_config("dummy:tiny-llama?hidden=128&layers=4")[0])
    packed = random_packed(config, "cpu", seed=1, is_head_fp8=is_head_fp8)
    again = random_packed(config, "cpu", seed=1, is_head_fp8=is_head_fp8)
    assert all(torch.equal(t.view(torch.uint8), again[n].view(torch.uint8)) for n, t in packed.items() if t.dim())
    model = assemble(config, packed, {}, pages=3, max_positions=128, ops=PLAIN, kv_dtype=FP8)
    logits = Pages(model).all_logits(random_ids(40))
    assert torch.isfinite(logits).all() and 0.3 < float(logits.std()) < 3
    assert len(set(logits.argmax(-1).tolist())) > 20


# ---- calibration ----------------------------------------------------------------------------------------------------


class Watch:
    """The reference operations, which also note the largest activation that each product of each layer is given, and
    the largest key and value."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self.ops = replace(PLAIN, linear=self.linear, gate_up=self.gate_up, attention=self.attention)

    def note(self, name: str, x: torch.Tensor) -> None:
        self.seen[name] = max(self.seen.get(name, 0.0), float(x.float().abs().max()))

    def linear(self, x, x_scale, weight, *rest):
        self.note(f"{weight.data_ptr()}", x)
        return PLAIN.linear(x, x_scale, weight, *rest)

    def gate_up(self, x, x_scale, weight, *rest):
        self.note(f"{weight.data_ptr()}", x)
        return PLAIN.gate_up(x, x_scale, weight, *rest)

    def attention(self, parts, layer, cache, *rest, **options):
        out = PLAIN.attention(parts, layer, cache, *rest, **options)
        self.note(f"k{cache.data_ptr()}", cache[:, 0])
        self.note(f"v{cache.data_ptr()}", cache[:, 1])
        return out


@pytest.mark.parametrize("name", [*FAMILIES[:3], "dummy:tiny-mistral?window=2"])
def test_calibrated_scales_are_the_largest_values_of_a_forward_with_a_margin(name):
    watch = Watch()
    model = gpu_model(name, ops=watch.ops)
    scales = calibrate(model, TEXTS)
    for text in TEXTS:
        Pages(model).all_logits(text)
    for layer, cache, found in zip(model.layers, model.cache, scales, strict=True):
        seen = {f"{kind}_in": watch.seen[f"{getattr(layer, kind).data.data_ptr()}"]
                for kind in ("qkv", "o", "gate_up", "down")}  # fmt: skip
        seen |= {kind: watch.seen[f"{kind}{cache.data_ptr()}"] for kind in "kv"}
        assert found.keys() == seen.keys()
        for kind, largest in seen.items():
            assert largest <= found[kind] * FP8_MAX  # nothing saturates
            assert found[kind] * FP8_MAX == pytest.approx(largest * MARGIN, rel=0.05), kind  # bf16 against float32


@pytest.mark.parametrize("weights", ["fp8", "fp8 calibrated"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fp8_logits_stay_near_those_of_bf16(name, weights):
    ids = random_ids(70, seed=9)  # not a calibration text
    exact = Pages(gpu_model(name)).all_logits(ids)
    rounded = Pages(gpu_model(name, weights=weights, texts=TEXTS)).all_logits(ids)
    assert relative(rounded, exact) < 0.16
    assert float((rounded.argmax(-1) == exact.argmax(-1)).float().mean()) > 0.7
    assert relative(rounded, exact) > 1e-3  # it was rounded


@pytest.mark.parametrize("name", FAMILIES)
def test_an_fp8_cache_costs_little_beside_fp8_weights(name):
    ids = random_ids(70, seed=9)
    exact = Pages(gpu_model(name)).all_logits(ids)
    rounded = Pages(gpu_model(name, cache="fp8", texts=TEXTS)).all_logits(ids)
    assert 1e-4 < relative(rounded, exact) < 0.09


def test_keys_beyond_their_scale_saturate_and_stay_numbers():
    """A text far from the calibration texts: amax 1000 times the scale's."""
    config, packed = packed_dummy("dummy:tiny-llama")
    packed |= {f"{i}.kv_scale": torch.tensor([1e-3, 1e-3]) / FP8_MAX for i in range(config.num_layers)}
    model = assemble(config, packed, {}, pages=3, max_positions=128, ops=PLAIN, kv_dtype=FP8)
    assert torch.isfinite(Pages(model).all_logits(random_ids(40))).all()
    assert max(float(cache.float().abs().max()) for cache in model.cache) == FP8_MAX


def test_an_fp8_cache_without_scales_is_refused_naming_the_layers():
    config, packed = packed_dummy("dummy:tiny-llama?layers=3")
    packed["1.kv_scale"] = torch.ones(2)
    with pytest.raises(ModelError, match=r"layers 0, 2 have no scales"):
        assemble(config, packed, {}, pages=3, max_positions=128, ops=PLAIN, kv_dtype=FP8)


# ---- tactics --------------------------------------------------------------------------------------------------------


def test_candidates_fit_shared_memory_and_never_split_what_cannot_be():
    for kind, n, k in (("qkv", 10240, 8192), ("gate_up", 57344, 8192), ("down", 8192, 28672), ("head", 128256, 2048)):
        for size in (1, 2):
            found = candidates(kind, n, k, size, processors=132)
            assert found, (kind, size)
            for tactic in found:
                rows = tactic["block_n"] * (2 if kind == "gate_up" else 1)
                assert (rows + 16) * tactic["block_k"] * size * tactic["stages"] <= 200_000
                assert tactic["split_k"] == 1 or kind not in ("gate_up", "head")
                assert size == 2 or tactic["block_n"] >= 64


def test_plain_tactics_cover_every_product_and_row_count():
    from tutorial_lib.engine.gpu_model import MAX_STEP_ROWS, Weight

    for table in plain_tactics().values():
        weight = Weight(torch.zeros(1), None, {int(rows): rows for rows in table})
        assert [weight.tactic(rows) for rows in (1, 2, 3, 11, 16, 17, MAX_STEP_ROWS)] == [
            "1", "2", "4", "16", "16", "32", "64",
        ]  # fmt: skip
