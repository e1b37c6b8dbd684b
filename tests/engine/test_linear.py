"""Matrix kernels: each computes the right product or is left out with a reason, and the tactic table is obeyed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tutorial_lib.engine import linear
from tutorial_lib.engine.linear import (
    ROW_BUCKETS,
    choose_kernels,
    make_int8_linear,
    make_linear,
    quantize_int8,
    usable_kernels,
)
from tutorial_lib.errors import OptionError

DTYPES = (torch.float32, torch.bfloat16)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_every_usable_kernel_equals_the_plain_product(dtype, has_bias):
    usable = [name for name, problem in usable_kernels(dtype).items() if not problem]
    assert "plain" in usable
    weight = noise(56, 72, dtype=dtype)
    bias = noise(56, seed=1, dtype=dtype) if has_bias else None
    for name in usable:
        product = make_linear(weight, bias, {"1": name})
        for rows in (*ROW_BUCKETS, 7, 33, 100):
            x = noise(rows, 72, seed=rows, dtype=dtype)
            expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
            tolerance = 1e-4 if dtype == torch.float32 else 0.1
            got = product(x)
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance, msg=f"{name} {rows}")


def test_a_kernel_that_is_wrong_or_missing_is_left_out_with_the_reason(monkeypatch):
    def missing(weight, bias):
        raise AttributeError("no such operator\nand a second line")

    wrong = {"wrong": lambda weight, bias: lambda x: F.linear(x, weight) + 1.0, "missing": missing}
    monkeypatch.setattr(linear, "KERNELS", {"plain": linear.KERNELS["plain"], **wrong})
    found = usable_kernels(torch.float32)
    assert found["plain"] == "" and "wrong by" in found["wrong"] and found["missing"] == "no such operator"
    choice = choose_kernels([noise(16, 24), noise(16, 24, seed=1)], repeats=1)
    assert set(choice["kernel_by_rows"].values()) == {"plain"}
    assert set(choice["left_out"]) == {"wrong", "missing"}


def test_the_choice_covers_every_bucket_and_can_be_built():
    weights = [noise(16, 24), noise(16, 24, seed=1)]
    choice = choose_kernels(weights, repeats=1)
    assert set(choice["kernel_by_rows"]) == {str(rows) for rows in ROW_BUCKETS}
    for times in choice["ms_by_rows"].values():
        assert set(times) == {str(rows) for rows in ROW_BUCKETS} and min(times.values()) >= 0
    product = make_linear(weights[0], None, choice["kernel_by_rows"])
    for rows in range(1, 40):
        x = noise(rows, 24, seed=rows)
        torch.testing.assert_close(product(x), F.linear(x, weights[0]), rtol=1e-4, atol=1e-4)


def test_the_table_decides_by_row_count(monkeypatch):
    def labelled(label):
        return lambda weight, bias: lambda x: (label, x.shape[0])

    monkeypatch.setattr(linear, "KERNELS", {"a": labelled("a"), "b": labelled("b"), "c": labelled("c")})
    product = make_linear(noise(2, 2), None, {"1": "a", "4": "b", "8": "a", "32": "c"})
    chosen = {rows: product(torch.zeros(rows, 2)) for rows in (1, 2, 4, 5, 8, 9, 32, 33, 500)}
    assert [label for label, _ in chosen.values()] == ["a", "b", "b", "a", "a", "c", "c", "c", "c"]
    assert [rows for _, rows in chosen.values()] == list(chosen)  # all rows went through, none was padded


def test_an_unknown_kernel_in_the_table_is_refused():
    with pytest.raises(OptionError, match="telepathy"):
        make_linear(noise(2, 2), None, {"1": "plain", "4": "telepathy"})


def test_int8_rounds_to_the_nearest_of_255_steps_per_row():
    weight = noise(40, 64) * torch.logspace(-3, 2, 40)[:, None]
    quantized, scale = quantize_int8(weight)
    assert quantized.dtype == torch.int8 and quantized.min() >= -127
    assert torch.all(quantized.abs().amax(1) == 127)  # every row uses its whole range
    error = (quantized.float() * scale[:, None] - weight).abs()
    assert torch.all(error <= 0.5001 * scale[:, None])


def test_int8_of_a_row_of_zeros_is_zeros():
    quantized, scale = quantize_int8(torch.cat([torch.zeros(1, 8), torch.ones(1, 8)]))
    assert quantized[0].eq(0).all() and torch.isfinite(scale).all() and quantized[1].eq(127).all()


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_int8_product_equals_its_own_weights(has_bias):
    weight, bias = noise(48, 64), noise(48, seed=1).bfloat16() * 10 if has_bias else None
    quantized, scale = quantize_int8(weight)
    product = make_int8_linear(quantized, scale, bias)
    for rows in (1, 3, 5, 17):
        x = noise(rows, 64, seed=rows, dtype=torch.bfloat16)
        expected = x.float() @ (quantized.float() * scale[:, None]).t() + (0 if bias is None else bias.float())
        got = product(x)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.15)


def test_int8_products_of_weights_that_lie_anywhere_and_have_any_width():
    """In a process apart, because what this guards against ends it: vectors read from where none begins."""
    code = """
import itertools, torch
from tutorial_lib.engine.linear import make_int8_linear
for columns, offset in itertools.product((16, 24, 40, 72, 96), (0, 1, 8, 16)):
    codes = torch.randint(-127, 128, (48 * columns + offset,), dtype=torch.int8)
    weight, scale = codes[offset:].view(48, columns), torch.rand(48) / 127
    product = make_int8_linear(weight, scale, None)
    for rows in (1, 3, 4, 5, 17):
        numbers = torch.randn(rows * columns + offset).bfloat16()
        x = numbers[offset:].view(rows, columns)
        torch.testing.assert_close(product(x).float(), x.float() @ (weight * scale[:, None]).t(), rtol=0.02, atol=0.15)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
