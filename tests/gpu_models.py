"""Small `GpuModel`s and engines around them, for the tests of the GPU path on a CPU and on a GPU.

On a CPU every part runs as plain torch (`engine.reference`); the same fixed buffers, paged cache and rounds as on a
GPU, only without graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from tutorial_lib.config import SamplingParams
from tutorial_lib.engine.drafting import ModelDrafting
from tutorial_lib.engine.gpu_build import assemble, quantized
from tutorial_lib.engine.gpu_engine import GpuEngine
from tutorial_lib.engine.gpu_model import PAGE, GpuModel, Ops
from tutorial_lib.engine.graph import position_limit
from tutorial_lib.engine.model import ModelConfig, pack
from tutorial_lib.engine.quantize import calibrate
from tutorial_lib.engine.reference import FP8
from tutorial_lib.shapes import dummy_config, random_tensors

PLAIN = Ops.make(off=("all",), pdl=False)


def packed_dummy(name: str, device="cpu") -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Config and packed bf16 tensors of the `dummy:` model `name`: the same numbers on every device."""
    config, seed = dummy_config(name)
    shape = ModelConfig.from_hf(config)
    packed = pack(random_tensors(config, seed, "cpu", torch.bfloat16), shape, is_interleaved=False)
    return shape, {key: t.to(device) for key, t in packed.items()}


def gpu_model(
    name: str = "dummy:tiny-llama?seed=5",
    *,
    weights: str = "bf16",
    cache: str = "bf16",
    texts: Sequence[Sequence[int]] = ((),),
    slots: int = 5,
    max_seq_len: int = 200,
    draft_len: int = 8,
    ops: Ops = PLAIN,
    tactics: Mapping | None = None,
    device="cpu",
) -> GpuModel:
    """weights: "bf16", "fp8" (activations scaled row by row) or "fp8 calibrated" (on `texts`); cache: "bf16" or "fp8"
    (calibrated too). Room for `slots` requests of `max_seq_len` tokens with up to `draft_len` drafts."""
    config, packed = packed_dummy(name, device)
    if "calibrated" in weights or cache == "fp8":
        texts = texts if texts[0] else [random_ids(64, config.vocab_size, seed) for seed in range(4)]
        plain = assemble(config, packed, {}, pages=1, max_positions=512, ops=PLAIN)
        scales = calibrate(plain, texts)
        if cache == "fp8":
            packed |= {f"{i}.kv_scale": torch.tensor([s["k"], s["v"]], device=device) for i, s in enumerate(scales)}
    if weights != "bf16":
        packed = quantized(packed, config, scales if "calibrated" in weights else None, is_head=False)
    blocks = -(-position_limit(max_seq_len, draft_len) // PAGE)
    return assemble(
        config, packed, dict(tactics or {}), pages=slots * blocks + 1, max_positions=blocks * PAGE, ops=ops,
        max_sequences=slots, kv_dtype=FP8 if cache == "fp8" else torch.bfloat16,
    )  # fmt: skip


def engine(
    target: GpuModel, tokenizer, *, draft=None, head_ids=None, host=None, k: int = 0, eos: Iterable[int] = (), **options
):
    """A `GpuEngine` with the limits that `gpu_model` makes room for by default."""
    options = {"max_slots": 5, "max_seq_len": 200, **options}
    if draft is not None:
        options["drafting"] = ModelDrafting(draft, head_ids)
    return GpuEngine(target, tokenizer, eos, host_drafter=host, max_draft_len=k, **options)


def run(target: GpuModel, tokenizer, prompts, params=None, *, greedy: Mapping | None = None, **options):
    """One `generate` on a fresh engine; `greedy` makes the params where none are given."""
    params = params or SamplingParams(**(greedy or {}))
    each = params if isinstance(params, list) else [params] * len(prompts)
    return engine(target, tokenizer, **options).generate(prompts, each)


class Pages:
    """A block table for one or more sequences, and the steps and logits one gets by it."""

    def __init__(self, model: GpuModel, order: Sequence[int] | None = None, sequences: int = 1) -> None:
        self.model = model
        order = list(range(model.pages - 1)) if order is None else list(order)
        blocks = min(model.max_positions // PAGE, len(order) // sequences)
        ids = torch.tensor(order[: blocks * sequences], dtype=torch.int32, device=model.device)
        self.table = ids.view(sequences, blocks).contiguous()

    def logits(self, ids: Sequence[int], start: int, *, slot: int = 0, tree=None) -> torch.Tensor:
        """float32 [len(ids), V]: one step of all `ids` behind `start` tokens of `slot`."""
        device = self.model.device
        return self.model.step(
            torch.tensor(list(ids), device=device),
            self.table,
            torch.tensor([start], dtype=torch.int32, device=device),
            torch.tensor([slot], dtype=torch.int32, device=device),
            len(ids),
            tree,
        )

    def all_logits(self, ids: Sequence[int], sizes: Sequence[int] = (), *, slot: int = 0) -> torch.Tensor:
        """float32 [len(ids), V]: steps of the given sizes one after the other, by default of up to 64 rows."""
        sizes = sizes or [min(64, len(ids) - at) for at in range(0, len(ids), 64)]
        out, start = [], 0
        for size in sizes:
            out.append(self.logits(ids[start : start + size], start, slot=slot).clone())
            start += size
        return torch.cat(out)


def random_ids(count: int, vocab: int = 320, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over the norm of `theirs`."""
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


class TableModel:
    """Stands in for a `GpuModel`: next-token logits depend on the last token only, `table` [V, V]."""

    def __init__(self, table: torch.Tensor, *, slots: int = 32, max_seq_len: int = 200, draft_len: int = 8) -> None:
        self.table, self.ops, self.device = table, PLAIN, table.device
        self.config = ModelConfig.from_hf({**dummy_config("dummy:tiny-llama")[0], "vocab_size": table.shape[0]})
        self.pages = slots * -(-position_limit(max_seq_len, draft_len) // PAGE) + 1

    kernel, trouble, round_rows, prompt_rows = "table", None, GpuModel.round_rows, GpuModel.prompt_rows
    choose, draft_chain, check = GpuModel.choose, GpuModel.draft_chain, GpuModel.check

    def prefill(self, ids, table, slot, feature_layers=(), take=None, start=0) -> None: ...

    def last_step(self, ids, table, slot, feature_layers=(), take=None, *, start: int):
        return self.table[[ids[-1]]], self.table[:0]

    def step(self, tokens, table, lengths, slots, rows: int, tree=None, taps=None) -> torch.Tensor:
        return self.table[tokens.long()]


def assert_rows_keep_each_others_bits(model: GpuModel, slots: int) -> tuple[Pages, list[int], torch.Tensor]:
    """Logits bit for bit, for blocks of 2, 5, 11 and 16 rows behind 300 tokens, and for `slots` sequences of 4 rows at
    once. Returns the pages, the text, and the logits of its last 16 tokens, one at a time."""
    pages, text, device = Pages(model, sequences=slots), random_ids(316, model.config.vocab_size), model.device
    for slot in range(slots):
        model.prefill(text[:300], pages.table, slot)
    single = torch.cat([pages.logits([token], 300 + i).clone() for i, token in enumerate(text[300:])])
    assert torch.isfinite(single).all() and len(set(single.argmax(-1).tolist())) > 8
    for rows in (2, 5, 11, 16):
        block = pages.logits(text[300 : 300 + rows], 300)
        assert torch.equal(block, single[:rows]), (rows, relative(block, single[:rows]))
    together = model.step(
        torch.tensor(text[300:304] * slots, device=device),
        pages.table,
        torch.full((slots,), 300, dtype=torch.int32, device=device),
        torch.arange(slots, dtype=torch.int32, device=device),
        4,
    ).view(slots, 4, -1)
    for block in together:
        assert torch.equal(block, single[:4]), relative(block, single[:4])
    return pages, text, single
