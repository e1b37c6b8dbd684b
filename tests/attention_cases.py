"""Attention launches of every kind, and the check that the kernel passes them: in the interpreter and on a GPU.

Checked are the output, what is appended to the paged cache, and that nothing else there is touched or read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import torch
from gpu_models import relative

from tutorial_lib.engine import reference
from tutorial_lib.engine.model import ModelConfig
from tutorial_lib.engine.reference import FP8, PAGE, to_fp8


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass
class Case:
    """An attention launch. lengths: tokens already cached, one entry for each sequence."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    lengths: tuple[int, ...] = (126,)
    rows: int = 1
    splits: int = 2
    window: int | None = None
    has_bias: bool = False
    has_norm: bool = False
    is_fp8: bool = False
    tree: tuple[tuple[int, ...], ...] | None = None  # the ancestors of every row
    before: int = 0  # how many of the tokens already cached are nodes too; then ancestors count from the first of them
    max_positions: int = 192
    is_quantized: bool = False
    config: ModelConfig = field(init=False)

    def __post_init__(self) -> None:
        self.config = ModelConfig(
            "LlamaForCausalLM", 100, self.heads * self.dim, 64, 2, self.heads, self.kv_heads, self.dim, 1e-3, 1e4, None,
            512, True, self.window,
        )  # fmt: skip


CASES = {
    "one row": Case(is_quantized=True),
    "one row of an empty cache": Case(lengths=(0,)),
    "page borders": Case(lengths=(63, 64, 62), rows=3),  # appends in two pages, in a new one, up to a border
    "two sequences, bias, norm": Case(heads=6, dim=64, lengths=(126, 150), rows=5, has_bias=True, has_norm=True),
    "9 heads over 3": Case(heads=9, kv_heads=3, dim=64, lengths=(70,), rows=4),
    "one key head": Case(heads=5, kv_heads=1, lengths=(40,), rows=2),
    "short heads": Case(dim=16, lengths=(70, 3), rows=2),
    "window": Case(heads=4, kv_heads=4, lengths=(130,), rows=3, window=100),
    "window of a tile that is all hidden": Case(lengths=(150,), rows=2, window=10),
    "several tiles a program": Case(heads=2, kv_heads=1, lengths=(270,), rows=2, max_positions=40 * 64),
    "40 rows in several lane blocks": Case(kv_heads=1, dim=16, lengths=(90,), rows=40, splits=1),
    "fp8 cache": Case(lengths=(126, 70), rows=4, is_fp8=True, is_quantized=True),
    "tree": Case(lengths=(126, 62), rows=5, tree=((), (0,), (0,), (0, 1), (0, 2))),
    "tree in a window": Case(lengths=(126,), rows=4, window=50, tree=((), (0,), (0,), (0, 1))),
    "nodes below cached ones": Case(lengths=(130, 65), rows=3, tree=((0,), (0, 2), (1, 3)), before=4),
}  # fmt: skip


def arguments(case: Case):
    """parts, layer, cache, table, lengths, slots; positions past the new rows, other pages and the last one are NaN."""
    config, dim, sequences = case.config, case.dim, len(case.lengths)
    blocks = -(-case.max_positions // PAGE)
    width = (case.heads + 2 * case.kv_heads) * dim
    angles = rand(case.max_positions, dim // 2, seed=1) * 6
    parts = rand(case.splits, sequences * case.rows, width, seed=2)
    cache = rand(sequences * blocks + 1, 2, case.kv_heads, PAGE, dim, seed=3)
    if case.is_fp8:  # numbers that FP8 holds exactly, so that the interpreter's rounding of it does not matter
        angles, parts, cache = angles * 0, (parts * 4).round().clamp(-8, 8) / 64, cache.to(FP8)
    else:
        cache = cache.bfloat16()
    generator = torch.Generator().manual_seed(4)
    table = torch.randperm(sequences * blocks, generator=generator).view(sequences, blocks).int()
    ones = 1 + rand(2, dim, seed=5) * 0.3
    layer = SimpleNamespace(
        config=config, cos=angles.cos(), sin=angles.sin(),
        qkv_bias=rand(width, seed=6).bfloat16() if case.has_bias else None,
        q_norm=ones[0].bfloat16() if case.has_norm else None, k_norm=ones[1].bfloat16() if case.has_norm else None,
        kv_scale=torch.tensor([1 / 16, 1 / 32]) if case.is_fp8 else None,
    )  # fmt: skip
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    slots = torch.arange(sequences, dtype=torch.int32).flip(0).contiguous()
    for slot, length in zip(slots.tolist(), () if case.is_fp8 else case.lengths, strict=False):
        page, at = divmod(length + case.rows, PAGE)
        cache[table[slot, page], :, :, at:] = torch.nan
        cache[table[slot, page + 1 :].long()] = torch.nan
    if not case.is_fp8:
        cache[-1] = torch.nan
    return parts, layer, cache, table, lengths, slots


def tree_of(case: Case):
    """(mask [sequences * rows, span], depth [sequences * rows]): every node sees its ancestors and itself."""
    if case.tree is None:
        return None
    mask = torch.zeros(case.rows, case.before + case.rows, dtype=torch.int8)
    for node, ancestors in enumerate(case.tree):
        mask[node, [*ancestors, case.before + node]] = 1
    depth = torch.tensor([len(ancestors) - case.before for ancestors in case.tree], dtype=torch.int32)
    return mask.repeat(len(case.lengths), 1), depth.repeat(len(case.lengths))


def check_attention(
    case: Case,
    kernels: ModuleType,
    device: str,
    *,
    tolerance: float,
    alike: Callable[[torch.Tensor, torch.Tensor], bool],
    pdl: bool = False,
) -> None:
    """tolerance: relative norm of the output's error. alike: are two FP8 tensors equal up to rounding?"""
    parts, layer, *tensors = arguments(case)
    parts, cache, table, lengths, slots = (x.to(device) for x in (parts, *tensors))
    layer = SimpleNamespace(
        **{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in vars(layer).items()}
    )
    tree = tree_of(case) and tuple(x.to(device) for x in tree_of(case))
    sequences, rows, limit = len(lengths), case.rows, case.max_positions
    scratch = kernels.AttentionScratch.for_steps(sequences, sequences * rows, case.config, limit, device)
    ours, theirs, launch = cache.clone(), cache.clone(), (table, lengths, slots, rows, limit)
    got = kernels.attention(parts, layer, ours, *launch, scratch, None, tree=tree, pdl=pdl)
    expected = reference.attention(parts, layer, theirs, *launch, None, None, tree=tree)
    assert got.dtype == torch.bfloat16 and relative(got, expected) < tolerance
    same = (ours.view(torch.uint8) == cache.view(torch.uint8)).view(*cache.shape[:4], -1).all(-1)
    changed = set(map(tuple, (~same).any(2).any(1).nonzero().tolist()))  # (page, position in it)
    places = [(slots[s].item(), case.lengths[s] + i) for s in range(sequences) for i in range(rows)]
    assert changed == {(table[slot, at // PAGE].item(), at % PAGE) for slot, at in places}
    for page, at in changed:
        exact = {"rtol": 0, "atol": 0} if case.is_fp8 else {"rtol": 2**-7, "atol": 1e-5}
        torch.testing.assert_close(ours[page, ..., at, :].float(), theirs[page, ..., at, :].float(), **exact)
    assert not scratch.counter.any()  # ready for the next launch
    if case.is_quantized:
        scale = (got.float().abs().max() / 448 * 0.7).reshape(())  # the largest saturate
        quantized = kernels.attention(parts, layer, cache.clone(), *launch, scratch, scale, tree=tree, pdl=pdl)
        assert quantized.dtype == FP8 and alike(quantized, to_fp8(got, scale))
