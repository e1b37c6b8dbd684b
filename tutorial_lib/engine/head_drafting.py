"""Heads that draft on the device, from hidden states that the target leaves behind: EAGLE-3 and Medusa.

What they compute and why stands in `drafters/eagle.py` and `drafters/medusa.py`; here it is a fixed sequence of
launches inside a round's graph. Their matrices are small, so every launch costs more than its bytes: the tile of a
product follows from its shape and is not tuned. Drafts are certain choices at any temperature (see
`RoundProgram.sampled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..config import EagleDecodingConfig, MedusaDecodingConfig, check_choices
from ..drafters.checkpoints import Eagle3Head, Matrix, MedusaHeads
from ..drafters.eagle import check_ranks, dynamic_sizes
from ..drafters.medusa import choose_tree
from ..errors import OptionError
from .drafting import DeviceTree, OpenTree, Take, Tree, Unbound
from .gpu_model import MAX_STEP_ROWS, PAGE, GpuModel, Weight, captured, rotary_tables, upload
from .reference import Beam, Candidates, Tap

if TYPE_CHECKING:
    from .graph import DeviceState, RoundProgram


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

    A round's first step makes pairs of what the target has just accepted, as many as that can be: those behind the
    last accepted one are made of guesses, stand where later pairs will, and nothing looks at them. Every later step
    goes on from the layer's own output.

    Launches: 16 for the first step and 11 for every later one, and one more each where the head's vocabulary is above
    `ONE_ARGMAX`.
    """

    ahead = 1  # a pair has the token behind its position
    is_following = True
    tree: Tree | None = None

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

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        return [self.cache[None]]

    @property
    def windows(self) -> Sequence[int | None]:
        return [self.shape.sliding_window]

    def begin(self, ids: Sequence[int], table: torch.Tensor, slot: int, start: int) -> None: ...

    def follow(self, round: RoundProgram) -> None:
        self.first_step(round, 1)

    def catch_up(self, state: DeviceState, slot: int, text: Sequence[int], drafted: int, k: int) -> None:
        """A shorter round would not look at all that the last one accepted: make those pairs now, and leave the last
        of them for the round to begin with."""
        kept = [row for row in state.kept[slot].tolist() if row]
        rows = [0, *kept] if self.tree is not None else list(range(int(state.row[slot]) + 1))
        base, first = slot * state.feature_rows, len(text) - 1 - len(rows)
        if len(rows) > 1:
            at = torch.tensor([base + row for row in rows], device=state.features.device)
            self.take(text, state.table, slot)(first, state.features[at])
            state.features[base] = state.features[base + rows[-1]]
            state.row[slot], state.kept[slot] = 0, 0

    def draft(self, round: RoundProgram) -> None:
        ops = self.target.ops
        x, h, last = self.first_step(round, round.k + 1)
        x, h = x.index_select(0, last), h.index_select(0, last)
        for i in range(round.k):
            if i > 0:
                x, h = self.step(round.tokens[:, i], x, None, round.state.table, round.starts[i], round.slots32, 1)
            ops.argmax(self.logits(h), round.tokens[:, i + 1], ops.pdl, ids=self.draft_ids)

    def first_step(self, round: RoundProgram, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`rows` pairs of every sequence: their outputs, the norms of those, and which of them are the last true
        ones."""
        state, ops = round.state, self.target.ops
        kept = None if round.tree is None else state.kept
        first, last, words, features = ops.gather_pairs(
            round.slots, state.length, state.row, kept, state.text, state.features, state.feature_rows, rows, ops.pdl
        )
        x, h = self.pairs(features, words, state.table, first, round.slots32, rows)
        return x, h, last

    def pairs(self, features, words, table, lengths, slots, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`step` over true features [rows in all, F * H]."""
        ops = self.target.ops
        parts = ops.linear(features, None, self.fc.data, None, self.fc.tactic(features.shape[0]), ops.pdl)
        g = torch.zeros(features.shape[0], self.shape.hidden_size, dtype=torch.bfloat16, device=features.device)
        return self.step(words, g, parts, table, lengths, slots, rows)

    def step(
        self, words, g, parts, table, lengths, slots, rows: int, *, places=None, behind=None, tree=None,
        tap: Tap | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The layer over pairs (g + sum of `parts`, the word after): its output, which is the next g, and its norm.

        For nodes of a tree, whose rows are not those of `words` and `g`: places, behind int32 [rows in all], where in
        `words` each one's token and where in `g` its parent's output is. tree: as attention takes it.
        """
        ops, width = self.target.ops, self.shape.hidden_size
        norm = (self.eps, None, False, ops.pdl)
        count = g.shape[0] if behind is None else behind.shape[0]
        both = torch.empty(count, 2 * width, dtype=torch.bfloat16, device=g.device)
        ops.embed_norm(words, self.embed, self.input_norm, *norm, out=both[:, :width], places=places)
        if behind is None:
            ops.add_norm(g, parts, self.hidden_norm, *norm, out=both[:, width:])
        else:  # looking rows up is all the same to the kernel, whether they are embeddings or outputs
            g, *_ = ops.embed_norm(behind, g, self.hidden_norm, *norm, out=both[:, width:])
        x = both[:, width:].clone() if self.is_residual_normed else g
        parts = self._product(self.qkv, both)
        h = ops.attention(
            parts, self._layer, self.cache, table, lengths, slots, rows, self.target.max_positions, self._scratch, None,
            tree=tree, pdl=ops.pdl,
        )  # fmt: skip
        parts = self._product(self.o, h)
        h, _ = ops.add_norm(x, parts, self.post_norm, *norm)
        h = ops.gate_up(h, None, self.gate_up.data, None, None, self.gate_up.tactic(h.shape[0]), ops.pdl)
        h, _ = ops.add_norm(x, self._product(self.down, h), self.norm, *norm, tap=tap)
        return x, h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """float32 [rows, V_d]."""
        return self._product(self.output, h)[0]

    def _product(self, weight: Weight, x: torch.Tensor) -> torch.Tensor:
        return self.target.ops.linear(x, None, weight.data, None, weight.tactic(x.shape[0]), self.target.ops.pdl)


@dataclass(frozen=True)
class _Level:
    """One step of a fixed tree: its inner nodes of one depth, for a batch. start: how many inner nodes stand before
    them. places, behind, tree: see `EagleDrafting.step`; to: where their outputs are kept. source, ranks: which of
    their best tokens become drafts, see `kernels.top_tokens`."""

    start: int
    rows: int
    places: torch.Tensor
    behind: torch.Tensor
    to: torch.Tensor
    tree: tuple[torch.Tensor, torch.Tensor]
    source: torch.Tensor
    ranks: int


class EagleTreeDrafting(EagleDrafting):
    """A fixed tree: `choices` as `check_choices` orders them, by depth.

    The layer runs once for every depth, over the nodes of it that have children. Their keys are written behind the
    last true pair one after another, so a node's ancestors are some of what stands before it: a mask over all of that
    says which. The outputs lie in one matrix, the last true pairs' first and then every sequence's inner nodes.

    Launches: 17 for the first step and 12 for every further depth.
    """

    def __init__(
        self, head: Eagle3Head, target: GpuModel, choices: Sequence[tuple[int, ...]], *, max_sequences: int
    ) -> None:
        super().__init__(head, target, max_sequences=max_sequences)
        self.choices = tuple(choices)
        place = {(): 0} | {path: row for row, path in enumerate(self.choices, start=1)}
        self.tree = DeviceTree((-1, *(place[path[:-1]] for path in self.choices)), target.device)
        self._levels: dict[int, list[_Level]] = {}

    def draft(self, round: RoundProgram) -> None:
        assert self.tree is not None
        batch, ops, state = round.batch, self.target.ops, round.state
        levels = self._levels.get(batch) or self._levels.setdefault(batch, self._plan(batch))
        x, h, last = self.first_step(round, self.tree.depth + 1)
        outputs = torch.empty(sum(batch * level.rows for level in levels), x.shape[1], dtype=x.dtype, device=x.device)
        torch.index_select(x, 0, last, out=outputs[:batch])
        h = h.index_select(0, last)
        for depth, level in enumerate(levels):
            if depth > 0:
                _, h = self.step(
                    round.tokens.view(-1), outputs, None, state.table, round.starts[level.start], round.slots32,
                    level.rows, places=level.places, behind=level.behind, tree=level.tree,
                    tap=Tap(outputs, level.to),
                )  # fmt: skip
            logits = self.logits(h).view(batch, level.rows, -1)
            ops.top_tokens(logits, round.drafts, level.source, level.ranks, ops.pdl, ids=self.draft_ids)

    def _plan(self, batch: int) -> list[_Level]:
        """What every step takes, made once for a batch size."""
        device, rows = self.target.device, len(self.choices) + 1
        inner = [(), *(path for path in self.choices if any(other[:-1] == path for other in self.choices))]
        number = {path: i for i, path in enumerate(inner)}
        place = {(): 0} | {path: row for row, path in enumerate(self.choices, start=1)}
        per_sequence = len(inner) - 1

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        def output(sequence: int, path: tuple[int, ...]) -> int:
            return sequence if not path else batch + sequence * per_sequence + number[path] - 1

        levels = []
        for depth in range(len(inner[-1]) + 1):
            own = [path for path in inner if len(path) == depth]
            start, sequences = number[own[0]], range(batch)
            ranks = max(path[-1] for path in self.choices if len(path) == depth + 1) + 1
            source = [
                own.index(path[:-1]) * ranks + path[-1] if len(path) == depth + 1 else -1 for path in self.choices
            ]
            mask = torch.zeros(len(own), start - 1 + len(own) if depth else 1, dtype=torch.int8)
            for i, path in enumerate(own if depth else ()):
                mask[i, [number[path[:d]] - 1 for d in range(1, depth + 1)]] = 1
            levels.append(
                _Level(
                    start, len(own),
                    ints([b * rows + place[path] for b in sequences for path in own]),
                    ints([output(b, path[:-1]) for b in sequences for path in own]),
                    ints([output(b, path) for b in sequences for path in own]),
                    (mask.to(device).repeat(batch, 1), ints([depth - start] * (batch * len(own)))),
                    ints(source), ranks,
                )
            )  # fmt: skip
        return levels


@dataclass(frozen=True)
class Growth:
    """How a dynamic tree grows: `width` candidates behind every node that is run, at every depth the `width` likeliest
    paths run on, and of all `count` candidates the `tokens` likeliest drafted.

    A candidate that is not among the `total` likeliest of its depth cannot be drafted, nor what follows it: so a wider
    beam or a deeper tree than `total` would change nothing.
    """

    width: int
    depth: int
    tokens: int

    @classmethod
    def of(cls, config: EagleDecodingConfig, size: int) -> Growth:
        """size: output rows of the head. Raises `OptionError` for more than a step on a GPU holds."""
        top_k, total = dynamic_sizes(config, size)
        width, depth = min(top_k, total), min(config.max_draft_len, total)
        made = cls(width, depth, min(total, width + (depth - 1) * width**2))
        _refuse_wide(made.reach)
        return made

    @property
    def count(self) -> int:
        return self.width + (self.depth - 1) * self.width**2

    @property
    def run(self) -> int:
        """Nodes that the layer runs."""
        return (self.depth - 1) * self.width

    @property
    def reach(self) -> int:
        """Positions behind the text that are written, by the layer or in verification."""
        return max(self.tokens, self.run)


class EagleGrowingDrafting(EagleDrafting):
    """The dynamic tree as `drafters.eagle` grows it. Everything about it lies in fixed tensors on the device.

    Launches: 18 for the first step, 13 for every further depth, and 2 for the whole tree.
    """

    def __init__(self, head: Eagle3Head, target: GpuModel, growth: Growth, *, max_sequences: int) -> None:
        super().__init__(head, target, max_sequences=max_sequences)
        self.growth = growth
        self.tree = OpenTree(growth.tokens, growth.depth, target.device, reach=growth.reach)
        self._rooms: dict[int, _Room] = {}

    def draft(self, round: RoundProgram) -> None:
        batch, width, ops, state = round.batch, self.growth.width, self.target.ops, round.state
        room = self._rooms.get(batch) or self._rooms.setdefault(batch, self._room(batch))
        found, beam, nodes, first = room.found, None, 1, 0
        x, h, last = self.first_step(round, self.growth.depth + 1)
        outputs = torch.empty(batch * (1 + self.growth.run), x.shape[1], dtype=x.dtype, device=x.device)
        torch.index_select(x, 0, last, out=outputs[:batch])
        h = h.index_select(0, last)
        for depth, (rows, after) in enumerate(zip(room.rows, room.beams, strict=True)):
            if beam is not None:
                start = (depth - 1) * width
                _, h = self.step(
                    beam.words, outputs, None, state.table, round.starts[start + 1], round.slots32, width,
                    behind=beam.behind, tree=(beam.seen, room.depths[depth]), tap=Tap(outputs, rows),
                )  # fmt: skip
                nodes = width
            own = slice(first, first + nodes * width)
            logits = self.logits(h).view(batch, nodes, -1)
            fresh = torch.empty(batch, nodes * width, dtype=torch.float32, device=x.device)
            source = room.source[: nodes * width]
            ops.top_tokens(logits, found.tokens[:, own], source, width, ops.pdl, ids=self.draft_ids, scores=fresh)
            ops.grow_tree(found, first, fresh, rows, beam, after, width, ops.pdl)
            beam, first = after, own.stop
        assert round.rows is not None
        ops.prune_tree(found, round.tokens, round.rows.parents, ops.pdl)

    def _room(self, batch: int) -> _Room:
        """What growing takes, made once for a batch size."""
        width, inner, device = self.growth.width, range(self.growth.depth - 1), self.target.device

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        node = torch.arange(batch * width, device=device)
        rows = [batch + node // width * self.growth.run + depth * width + node % width for depth in inner]
        beams = [
            Beam(
                room(batch, width), room(batch, width, dtype=torch.float64),
                room(batch * width, (depth + 1) * width, dtype=torch.int8), room(batch * width), room(batch * width),
            )
            for depth in inner
        ]  # fmt: skip
        kinds = (torch.int32, torch.float64, torch.int32)
        return _Room(
            Candidates(*(room(batch, self.growth.count, dtype=kind) for kind in kinds)),
            [torch.arange(batch, dtype=torch.int32, device=device), *(r.int() for r in rows)],
            [*beams, None],
            [room(batch * width) + depth - (depth - 1) * width - 1 for depth in range(self.growth.depth)],
            torch.arange(width * width, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class _Room:
    """What `EagleGrowingDrafting` writes, for a batch. Of every depth that is run, the root's first: rows, where its
    outputs are kept; beams, the nodes run after it; depths, as attention takes them."""

    found: Candidates
    rows: list[torch.Tensor]
    beams: list[Beam | None]
    depths: list[torch.Tensor]
    source: torch.Tensor


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
        upload(self.words, padded)
        self.length.fill_(start)
        self.features[: len(features)].copy_(features)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def _step(self) -> None:
        self.drafting.pairs(self.features, self.words, self.table, self.length, self.slot, MAX_STEP_ROWS)


# --------------------------------------------------------------------------------------------------------------- Medusa


class MedusaDrafting(Unbound):
    """A fixed tree by Medusa heads, all of them in one product over the target's output matrix."""

    def __init__(self, heads: MedusaHeads, target: GpuModel, choices: Sequence[tuple[int, ...]]) -> None:
        device = target.device
        self.vocab_size = target.config.vocab_size
        self.feature_layers: tuple[int, ...] = (target.config.num_layers + 1,)
        self.target, depth = target, max(map(len, choices))
        place = {(): 0} | {path: row for row, path in enumerate(choices, start=1)}
        self.tree: Tree | None = DeviceTree((-1, *(place[path[:-1]] for path in choices)), device)
        self.ranks = max(path[-1] for path in choices) + 1
        source = [(len(path) - 1) * self.ranks + path[-1] for path in choices]
        self.source = torch.tensor(source, dtype=torch.int32, device=device)
        self.blocks = [
            (w[:depth].to(device, torch.bfloat16).transpose(1, 2), b[:depth, None].to(device, torch.bfloat16))
            for w, b in heads.blocks
        ]
        self.draft_ids = None if heads.draft_ids is None else heads.draft_ids.to(device)
        own = heads.outputs[:depth] if len(heads.outputs) > 1 else heads.outputs
        self.outputs = [_output(matrix, self.draft_ids, target) for matrix in own or (None,)]
        self.depth = depth

    def draft(self, round: RoundProgram) -> None:
        rows = round.slots * round.state.feature_rows + round.state.row[round.slots]
        x = round.state.features.index_select(0, rows).expand(self.depth, -1, -1)
        for weight, bias in self.blocks:
            x = x + F.silu(torch.baddbmm(bias, x, weight))
        logits, ops = self._logits(x.contiguous()).transpose(0, 1), self.target.ops
        ops.top_tokens(logits, round.drafts, self.source, self.ranks, ops.pdl, ids=self.draft_ids)

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
    """As `drafters.eagle.open_eagle`; a tree has at most 63 tokens here, and runs at most 63 nodes to grow."""
    if config.num_eagle_layers not in (None, 1):
        raise OptionError(f"num_eagle_layers is {config.num_eagle_layers}", "1: an EAGLE-3 head has one layer")
    size = target.config.vocab_size if head.draft_ids is None else len(head.draft_ids)
    if config.use_dynamic_tree:
        return EagleGrowingDrafting(head, target, Growth.of(config, size), max_sequences=max_sequences)
    if config.eagle_choices is None:
        return EagleDrafting(head, target, max_sequences=max_sequences)
    choices = check_choices("eagle_choices", config.eagle_choices)
    check_ranks(choices, size)
    _refuse_wide(len(choices))
    return EagleTreeDrafting(head, target, choices, max_sequences=max_sequences)


def open_medusa_drafting(
    config: MedusaDecodingConfig, target: GpuModel, heads: MedusaHeads, name: str
) -> MedusaDrafting:
    """As `drafters.medusa.open_medusa`; a tree has at most 63 tokens here."""
    choices = choose_tree(config, heads, target.config.vocab_size, name)
    _refuse_wide(len(choices))
    return MedusaDrafting(heads, target, choices)


def _refuse_wide(tokens: int) -> None:
    if tokens >= MAX_STEP_ROWS:
        raise OptionError(f"the tree takes {tokens} tokens", f"at most {MAX_STEP_ROWS - 1} on a GPU")
