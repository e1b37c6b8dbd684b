"""Every kernel against its plain-torch reference on the GPU itself, in the shapes that are run.

Tolerances (relative norm): bf16 products are summed in float32, 1e-3 leaves room for the order; FP8 tensor cores keep
fewer bits of a sum, 5e-3. A result that is rounded to bf16 may be off by its last bit (4e-3), one rounded to FP8 may
fall to the other side of a step (3e-2).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import CASES, Case, check_attention
from gpu_models import relative

from tutorial_lib.engine import reference
from tutorial_lib.engine.reference import FP8

pytestmark = pytest.mark.gpu

SUM = {"bf16": 1e-3, "fp8": 5e-3}
LAST_BIT = {"bf16": 4e-3, "fp8": 3e-2}
PRODUCTS = {  # features, depth
    "70B qkv": (10240, 8192),
    "70B down": (8192, 28672),
    "8B o": (4096, 4096),
    "1B qkv": (3072, 2048),
    "135M qkv": (960, 576),
    "135M down": (576, 1536),
}
MLPS = {"70B": (28672, 8192), "1B": (8192, 2048), "135M": (1536, 576)}
ROWS = (1, 5, 16, 40, 64)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) + 0.5


def operands(rows: int, n: int, k: int, form: str):
    x, weight = randn(rows, k), randn(n, k, seed=1)
    if form == "bf16":
        return x.bfloat16(), None, weight.bfloat16(), None
    return x.to(FP8), rand(64, seed=2), weight.to(FP8), rand(n, seed=3)


def tactics(form: str):
    from tutorial_lib.engine.kernels import Tactic

    depth = 128 if form == "fp8" else 64
    return [Tactic(64, depth, 1, 3, 4), Tactic(64, depth, 4, 4, 4), Tactic(128, depth, 2, 3, 4)]


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(PRODUCTS))
def test_linear(shape, form, pdl):
    from tutorial_lib.engine import kernels

    for tactic in tactics(form):
        for rows in ROWS:
            args = operands(rows, *PRODUCTS[shape], form)
            parts = kernels.linear(*args, tactic, pdl)
            assert parts.shape[0] == tactic.split_k
            assert relative(parts.sum(0), reference.linear(*args)[0]) < SUM[form], (tactic, rows)


@pytest.mark.parametrize("shape", list(PRODUCTS))
def test_a_row_of_a_product_does_not_depend_on_how_many_rows_there_are(shape, form):
    """Bit for bit: on this rests that verification gives the logits of plain decoding."""
    from tutorial_lib.engine import kernels

    for tactic in tactics(form):
        x, x_scale, weight, w_scale = operands(16, *PRODUCTS[shape], form)
        whole = kernels.linear(x, x_scale, weight, w_scale, tactic)
        for rows in (1, 2, 5, 11):
            assert torch.equal(kernels.linear(x[:rows], x_scale, weight, w_scale, tactic), whole[:, :rows]), rows


@pytest.mark.parametrize("shape", list(MLPS))
def test_gate_up(shape, form, pdl):
    from tutorial_lib.engine import kernels

    inner, depth = MLPS[shape]
    tactic = tactics(form)[0]
    for rows in ROWS:
        args = operands(rows, 2 * inner, depth, form)
        got, expected = kernels.gate_up(*args, None, tactic, pdl), reference.gate_up(*args, None)
        assert relative(got, expected) < max(LAST_BIT["bf16"], 2 * SUM[form]), rows
        if form == "fp8":
            scale = (expected.float().abs().max() / 448 / 4).reshape(())  # the largest saturate
            quantized = kernels.gate_up(*args, scale, tactic, pdl)
            assert relative(quantized, reference.gate_up(*args, scale)) < LAST_BIT["fp8"], rows
            assert quantized.float().abs().max() == 448


# ---- norm and quantize ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [576, 2048, 8192])
def test_add_norm(width, form, pdl):
    from tutorial_lib.engine import kernels

    weight = rand(width, seed=4).bfloat16()
    scales = [None, torch.tensor(0.01, device="cuda")] if form == "fp8" else [None]
    for rows in ROWS:
        for splits in (0, 1, 4):
            for scale in scales:
                residual = randn(rows, width).bfloat16()
                parts = randn(splits, rows, width, seed=5) if splits else None
                ours, theirs = residual.clone(), residual.clone()
                got = kernels.add_norm(ours, parts, weight, 1e-5, scale, form == "fp8", pdl)
                expected = reference.add_norm(theirs, parts, weight, 1e-5, scale, form == "fp8")
                assert relative(ours, theirs) < 1e-3 and torch.equal(ours, residual) == (splits == 0)
                assert relative(got[0], expected[0]) < LAST_BIT[form]
                if form == "fp8":
                    torch.testing.assert_close(got[1], expected[1], rtol=1e-2, atol=0)


def test_quantize_rows(pdl):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no FP8 units")
    from tutorial_lib.engine import kernels

    for width in (576, 8192, 28672):
        x = (randn(16, width) * torch.logspace(-4, 4, 16, device="cuda")[:, None]).bfloat16()
        got, scales = kernels.quantize_rows(x, pdl)
        expected, expected_scales = reference.quantize_rows(x)
        torch.testing.assert_close(scales, expected_scales)
        assert relative(got, expected) < 1e-2 and (got.float().abs().amax(1) == 448).all()


# ---- attention ------------------------------------------------------------------------------------------------------

SHAPES = {
    "70B": Case(heads=64, kv_heads=8, dim=128, lengths=(600,), max_positions=768),
    "8B": Case(heads=32, kv_heads=8, dim=128, lengths=(600,), max_positions=768),
    "1B": Case(heads=32, kv_heads=8, dim=64, lengths=(600, 5, 64), max_positions=768),
    "135M": Case(heads=9, kv_heads=3, dim=64, lengths=(63, 300, 126, 0), max_positions=768),
}


@pytest.mark.parametrize("rows", [1, 11])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_attention_in_the_shapes_of_real_models(shape, rows, form, pdl):
    from tutorial_lib.engine import kernels

    case = replace(SHAPES[shape], rows=rows, is_fp8=form == "fp8", is_quantized=form == "fp8")
    check_attention(case, kernels, "cuda", tolerance=1e-2, alike=alike, pdl=pdl)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not case.is_fp8])
def test_attention_of_every_kind(name, pdl):
    from tutorial_lib.engine import kernels

    case = replace(CASES[name], is_quantized=False)
    check_attention(case, kernels, "cuda", tolerance=1e-2, alike=alike, pdl=pdl)


def test_attention_without_dependent_launches():
    from tutorial_lib.engine import kernels

    check_attention(replace(SHAPES["135M"], rows=5), kernels, "cuda", tolerance=1e-2, alike=alike)


def alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return relative(ours, theirs) < LAST_BIT["fp8"]


# ---- argmax, clock --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [49152, 128256])
def test_argmax_of_rows_that_lie_apart(vocab, pdl):
    from tutorial_lib.engine import kernels

    logits = randn(22, vocab)
    logits[3, [5, vocab - 1]] = 100.0  # the first of equals
    out = torch.full((11, 4), -1, device="cuda", dtype=torch.int32)
    kernels.argmax(logits[1::2], out[:, 2], pdl)
    assert out[1, 2] == 5
    assert out[:, 2].tolist() == logits[1::2].argmax(-1).tolist() and (out[:, [0, 1, 3]] == -1).all()
    kernels.argmax(torch.full_like(logits, torch.nan)[:11], out[:, 2], pdl)
    assert ((out[:, 2] >= 0) & (out[:, 2] < vocab)).all()  # the next step looks its embedding up


@pytest.mark.parametrize("vocab", [8192, 128256])
def test_top_tokens(vocab, pdl):
    """Of 3 sequences with 2 nodes each, up to 10 ranks; ids of a shortlist; the first of equals."""
    from tutorial_lib.engine import kernels

    logits = randn(6, vocab).view(3, 2, vocab)
    logits[1, 1, [5, 70, vocab - 1]] = 100.0
    source = torch.tensor([12, -1, *range(10), 11, 10], device="cuda", dtype=torch.int32)
    shortlist = torch.arange(vocab, device="cuda") * 2 + 1
    for ids in (None, shortlist):
        found = []
        for made, launch in ((kernels, {"pdl": pdl}), (reference, {})):
            tokens = torch.full((3, 16), -1, device="cuda", dtype=torch.int32)
            scores = torch.zeros(3, 14, device="cuda")
            made.top_tokens(logits, tokens[:, 1:15], source, 10, ids=ids, scores=scores, **launch)
            found.append((tokens, scores))
        assert torch.equal(found[0][0], found[1][0])
        torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)
    assert found[0][0][1, [14, 13, 1]].tolist() == [11, 141, 2 * vocab - 1] and (found[0][0][:, 2] == -1).all()


def test_the_clock_runs_in_nanoseconds():
    from tutorial_lib.engine import kernels

    stamps = torch.zeros(2, device="cuda", dtype=torch.long)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    kernels.stamp(stamps[:1])
    torch.cuda._sleep(20_000_000)  # cycles: some milliseconds
    kernels.stamp(stamps[1:])
    end.record()
    end.synchronize()
    assert float(stamps[1] - stamps[0]) * 1e-6 == pytest.approx(begin.elapsed_time(end), rel=0.2)
