"""Heads that draft on the device, from hidden states that the target leaves behind: EAGLE-3 and Medusa.

What they compute and why stands in `drafters/eagle.py` and `drafters/medusa.py`; here it is a fixed sequence of
launches inside a round's graph. Their matrices are small, so every launch costs more than its bytes: the tile of a
product follows from its shape and is not tuned. Drafts are certain choices at any temperature (see
`RoundProgram.sampled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..config import EagleDecodingConfig, MedusaDecodingConfig
from ..drafters.checkpoints import Eagle3Head, Matrix, MedusaHeads
from ..drafters.medusa import choose_tree
from ..errors import OptionError
from .drafting import DeviceTree, Take
from .gpu_model import MAX_STEP_ROWS, PAGE, GpuModel, Weight, captured, rotary_tables

if TYPE_CHECKING:
    from .graph import RoundProgram


def small_weight(matrix: torch.Tensor, *, is_split: bool = True) -> Weight:
    """A bf16 matrix [n, k] with a tile that suits few rows: narrow, and split along K where K is long enough."""
    n, k = matrix.shape
    if matrix.device.type != "cuda":
        return Weight(matrix, None)
    from .kernels import Tactic

    split = max(s for s in (1, 2, 4) if s == 1 or (is_split and k // s >= 128 and n * k < 64_000_000))
    return Weight(matrix, None, {MAX_STEP_ROWS: Tactic(64, 64, split, 4, 4)})


# -------------------------------------------------------------------------------------------------------------- EAGLE-3


class EagleDrafting:
    """A chain by one EAGLE-3 layer. head: as read from a checkpoint; target: whose embeddings and head rows it shares.

    A round's first step makes pairs of the rows that the target has just verified, all K + 1 of them: those behind the
    last accepted one are made of guesses, stand where later pairs will, and nothing looks at them. Every later step
    goes on from the layer's own output.
    """

    tree: DeviceTree | None = None

    def __init__(self, head: Eagle3Head, target: GpuModel, *, max_sequences: int) -> None:
        device, shape, ops = target.device, head.shape, target.ops
        self.target, self.feature_layers, self.shape = target, head.feature_layers, shape
        self.vocab_size, self.eps = target.config.vocab_size, shape.rms_norm_eps
        self.is_residual_normed = head.is_residual_normed
        self.draft_ids = None if head.draft_ids is None else head.draft_ids.to(device)

        def weight(matrix: Matrix, *, is_split: bool = True) -> Weight:
            return small_weight(matrix.dense().to(device, torch.bfloat16), is_split=is_split)

        def vector(x: torch.Tensor) -> torch.Tensor:
            return x.to(device, torch.bfloat16)

        self.fc, self.qkv, self.o, self.down = map(weight, (head.fc, head.qkv, head.o, head.down))
        self.gate_up = weight(head.gate_up, is_split=False)
        self.input_norm, self.hidden_norm = vector(head.input_norm), vector(head.hidden_norm)
        self.post_norm, self.norm = vector(head.post_norm), vector(head.norm)
        self.embed = target.embed if head.embed is None else vector(head.embed)
        self.output = _output(head.lm_head, self.draft_ids, target)
        cos, sin = rotary_tables(shape, target.max_positions, device)
        self._layer = SimpleNamespace(
            config=shape, cos=cos, sin=sin, qkv_bias=None, q_norm=None, k_norm=None, kv_scale=None
        )
        pages = (target.pages, 2, shape.num_kv_heads, PAGE, shape.head_dim)
        self.cache = torch.zeros(pages, dtype=torch.bfloat16, device=device)
        self._scratch: Any = None
        if "kernels" in ops.attention.__module__:
            from .kernels import AttentionScratch

            limit = (max_sequences, MAX_STEP_ROWS, shape, target.max_positions, device)
            self._scratch = AttentionScratch.for_steps(*limit)
        self._prefill = _PairStep(self)

    def take(self, prompt_ids: Sequence[int], table: torch.Tensor, slot: int) -> Take:
        """Pairs of a prompt, 64 at a time, as the target's features of it come."""
        self._prefill.table[0, : table.shape[1]] = table[slot]

        def take(start: int, features: torch.Tensor) -> None:
            self._prefill.run(prompt_ids[start + 1 : start + 1 + MAX_STEP_ROWS], start, features)

        return take

    def begin(self, prompt_ids: Sequence[int], table: torch.Tensor, slot: int) -> None: ...

    def draft(self, round: RoundProgram) -> None:
        state, ops, rows = round.state, self.target.ops, round.k + 1
        row, length = state.row[round.slots], state.length[round.slots]
        steps = torch.arange(rows, device=row.device)
        first = length - 2 - row  # the pair of the row that was verified first
        words = state.text[round.slots].gather(1, (first[:, None] + 1 + steps).long())
        assert round.taps is not None
        features = state.features.index_select(0, round.taps.rows)
        x, h = self.pairs(features, words.view(-1), state.table, first, round.slots32, rows)
        last = torch.arange(0, round.batch * rows, rows, device=row.device) + row
        x, h = x.index_select(0, last), h.index_select(0, last)
        for i in range(round.k):
            if i > 0:
                x, h = self.step(round.tokens[:, i], x, None, state.table, round.starts[i], round.slots32, 1)
            logits = ops.linear(h, None, self.output.data, None, self.output.tactic(h.shape[0]), ops.pdl)[0]
            ops.argmax(logits, round.tokens[:, i + 1], ops.pdl, ids=self.draft_ids)

    def pairs(self, features, words, table, lengths, slots, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`step` over true features [rows in all, F * H]."""
        ops = self.target.ops
        parts = ops.linear(features, None, self.fc.data, None, self.fc.tactic(features.shape[0]), ops.pdl)
        g = torch.zeros(features.shape[0], self.shape.hidden_size, dtype=torch.bfloat16, device=features.device)
        return self.step(words, g, parts, table, lengths, slots, rows)

    def step(self, words, g, parts, table, lengths, slots, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer over pairs (g + sum of `parts`, the word after): its output, which is the next g, and its norm."""
        ops, width = self.target.ops, self.shape.hidden_size
        both = torch.empty(g.shape[0], 2 * width, dtype=torch.bfloat16, device=g.device)
        ops.embed_norm(words, self.embed, self.input_norm, self.eps, None, False, ops.pdl, out=both[:, :width])
        ops.add_norm(g, parts, self.hidden_norm, self.eps, None, False, ops.pdl, out=both[:, width:])
        x = both[:, width:].clone() if self.is_residual_normed else g
        parts = self._product(self.qkv, both)
        h = ops.attention(
            parts, self._layer, self.cache, table, lengths, slots, rows, self.target.max_positions, self._scratch, None,
            pdl=ops.pdl,
        )  # fmt: skip
        parts = self._product(self.o, h)
        h, _ = ops.add_norm(x, parts, self.post_norm, self.eps, None, False, ops.pdl)
        h = ops.gate_up(h, None, self.gate_up.data, None, None, self.gate_up.tactic(h.shape[0]), ops.pdl)
        h, _ = ops.add_norm(x, self._product(self.down, h), self.norm, self.eps, None, False, ops.pdl)
        return x, h

    def _product(self, weight: Weight, x: torch.Tensor) -> torch.Tensor:
        return self.target.ops.linear(x, None, weight.data, None, weight.tactic(x.shape[0]), self.target.ops.pdl)


class _PairStep:
    """64 pairs of one prompt over fixed buffers; a graph on a GPU. Pairs behind the prompt's end write positions that
    later ones write again."""

    def __init__(self, drafting: EagleDrafting) -> None:
        target, rows = drafting.target, MAX_STEP_ROWS
        device, width = target.device, len(drafting.feature_layers) * target.config.hidden_size

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.drafting, self.words, self.length, self.slot = drafting, ints(rows), ints(1), ints(1)
        self.table = ints(1, -(-target.max_positions // PAGE)).fill_(target.pages - 1)
        self.features = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
        self._graph: Any = None

    @torch.inference_mode()
    def run(self, words: Sequence[int], start: int, features: torch.Tensor) -> None:
        if self._graph is None and self.table.is_cuda:
            keep = self.table.clone()
            self.table.fill_(self.drafting.target.pages - 1)
            self._graph = captured(self._step)
            self.table.copy_(keep)
        padded = list(words) + [words[-1]] * (MAX_STEP_ROWS - len(words))
        self.words.copy_(torch.tensor(padded))
        self.length.fill_(start)
        self.features.copy_(features)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def _step(self) -> None:
        self.drafting.pairs(self.features, self.words, self.table, self.length, self.slot, MAX_STEP_ROWS)


# --------------------------------------------------------------------------------------------------------------- Medusa


class MedusaDrafting:
    """A fixed tree by Medusa heads, all of them in one product over the target's output matrix."""

    def __init__(self, heads: MedusaHeads, target: GpuModel, choices: Sequence[tuple[int, ...]]) -> None:
        device = target.device
        self.vocab_size = target.config.vocab_size
        self.feature_layers: tuple[int, ...] = (target.config.num_layers + 1,)
        self.target, depth = target, max(map(len, choices))
        place = {(): 0} | {path: row for row, path in enumerate(choices, start=1)}
        self.tree: DeviceTree | None = DeviceTree((-1, *(place[path[:-1]] for path in choices)), device)
        self.head_of = torch.tensor([len(path) - 1 for path in choices], device=device)
        self.rank_of = torch.tensor([path[-1] for path in choices], device=device)
        self.ranks = max(path[-1] for path in choices) + 1
        self.blocks = [
            (w[:depth].to(device, torch.bfloat16).transpose(1, 2), b[:depth, None].to(device, torch.bfloat16))
            for w, b in heads.blocks
        ]
        self.draft_ids = None if heads.draft_ids is None else heads.draft_ids.to(device)
        own = heads.outputs[:depth] if len(heads.outputs) > 1 else heads.outputs
        self.outputs = [_output(matrix, self.draft_ids, target) for matrix in own or (None,)]
        self.depth = depth

    def take(self, prompt_ids: Sequence[int], table: torch.Tensor, slot: int) -> None:
        return None

    def begin(self, prompt_ids: Sequence[int], table: torch.Tensor, slot: int) -> None: ...

    def draft(self, round: RoundProgram) -> None:
        rows = round.slots * (round.k + 1) + round.state.row[round.slots]
        x = round.state.features.index_select(0, rows).expand(self.depth, -1, -1)
        for weight, bias in self.blocks:
            x = x + F.silu(torch.baddbmm(bias, x, weight))
        best = self._logits(x.contiguous()).topk(self.ranks, dim=-1).indices  # [heads, B, ranks]
        chosen = best[self.head_of, :, self.rank_of].t()
        round.drafts.copy_(chosen if self.draft_ids is None else self.draft_ids[chosen])

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [heads, B, V_d]."""
        ops = self.target.ops

        def product(output: Weight, h: torch.Tensor) -> torch.Tensor:
            return ops.linear(h, None, output.data, None, output.tactic(h.shape[0]), ops.pdl)[0]

        if len(self.outputs) > 1:
            return torch.stack([product(output, own) for output, own in zip(self.outputs, x, strict=True)])
        heads, batch, width = x.shape
        return product(self.outputs[0], x.view(heads * batch, width)).view(heads, batch, -1)


def _output(own: Matrix | None, draft_ids: torch.Tensor | None, target: GpuModel) -> Weight:
    """The head's own output matrix, or the rows of the target's that it means."""
    device = target.device
    if own is not None:
        return small_weight(own.dense().to(device, torch.bfloat16), is_split=False)
    if target.head.scale is not None:
        raise OptionError("the head shares the target's output matrix, and that is FP8 here", "a bf16 one")
    return target.head if draft_ids is None else small_weight(target.head.data[draft_ids], is_split=False)


# ------------------------------------------------------------------------------------------------------------ opening


def open_eagle_drafting(
    config: EagleDecodingConfig, target: GpuModel, head: Eagle3Head, max_sequences: int
) -> EagleDrafting:
    """A chain of `config.max_draft_len`; the backend refuses trees before. Raises `OptionError` for several layers."""
    if config.num_eagle_layers not in (None, 1):
        raise OptionError(f"num_eagle_layers is {config.num_eagle_layers}", "1: an EAGLE-3 head has one layer")
    return EagleDrafting(head, target, max_sequences=max_sequences)


def open_medusa_drafting(
    config: MedusaDecodingConfig, target: GpuModel, heads: MedusaHeads, name: str
) -> MedusaDrafting:
    """As `drafters.medusa.open_medusa`; a tree has at most 63 tokens here."""
    choices = choose_tree(config, heads, target.config.vocab_size, name)
    if len(choices) >= MAX_STEP_ROWS:
        raise OptionError(f"the tree has {len(choices)} tokens", f"at most {MAX_STEP_ROWS - 1} on a GPU")
    return MedusaDrafting(heads, target, choices)
