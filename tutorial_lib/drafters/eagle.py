"""EAGLE-3: one draft layer that reads the target's hidden states (Li et al. 2025, arXiv 2503.01840).

The layer works on pairs. Pair i joins what the target thought at token i (its hidden states of three layers, fused by
`fc` into g) with the embedding of token i + 1, stands at position i, and predicts token i + 2. Drafting goes on from
its own output: g of a drafted token is the layer's output one step before. Those are guesses, and so are the keys and
values made of them; the next round computes the accepted ones again from the target's true features.

Three shapes: a chain, a fixed tree (ranks as in Medusa's choices), and a tree that grows where the layer is confident
(EAGLE-2, Li et al. 2024, arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..config import EagleDecodingConfig
from ..engine.model import PREFILL_CHUNK, Model, inverse_frequencies
from ..engine.sampling import Purpose, draw, penalize_repetition, probabilities, uniform
from ..errors import OptionError
from ..models import Checkpoint
from .base import ROOT, Draft, Outcome, SlotState
from .checkpoints import Eagle3Head, output_head, read_eagle3

DEFAULT_TOP_K = 4  # of a dynamic tree: candidates looked at behind each node, and nodes grown at each depth

Path = tuple[int, ...]


def open_eagle(config: EagleDecodingConfig, target: Model, checkpoint: Checkpoint) -> EagleDrafter:
    """The drafter that `config` asks for, with the head in `checkpoint`. Raises `ModelError` if the head does not fit
    the target, `OptionError` for what the configuration asks and the head has not."""
    if config.num_eagle_layers not in (None, 1):
        raise OptionError(f"num_eagle_layers is {config.num_eagle_layers}", "1: an EAGLE-3 head has one layer")
    return EagleDrafter(read_eagle3(checkpoint, target.config), target, config)


# ---------------------------------------------------------------------------------------------------------- the layer


@dataclass(frozen=True)
class Span:
    """Consecutive rows of a forward that belong to one slot. start: the cache row of the first. positions: one for
    each row. mask: bool [rows, start + rows], which cache rows each row sees; None: all of them."""

    slot: int
    start: int
    positions: Sequence[int]
    mask: torch.Tensor | None = None


class Eagle3Layer:
    """The draft layer in float32 with its KV cache: row i of a slot holds pair i, rows behind the text hold guesses."""

    def __init__(self, head: Eagle3Head, target: Model, *, cache_rows: int) -> None:
        shape = self.shape = head.shape
        self.head, self.is_residual_normed = head, head.is_residual_normed
        self.embed = target.embed if head.embed is None else head.embed
        self.fc, self.qkv, self.o = head.fc.linear(), head.qkv.linear(), head.o.linear()
        self.gate_up, self.down = head.gate_up.linear(), head.down.linear()
        is_int8 = head.qkv.scale is not None
        self.output = output_head(head.lm_head, head.draft_ids, target, is_int8=is_int8)
        self.cache = torch.zeros(target.max_slots, 2 * shape.num_kv_heads, cache_rows, shape.head_dim)
        angles = torch.outer(torch.arange(cache_rows, dtype=torch.float32), inverse_frequencies(shape))
        self.cos, self.sin = angles.cos()[:, None, :], angles.sin()[:, None, :]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """g [rows, H] of the target's hidden states [rows, F * H]."""
        return self.fc(features.float())

    def forward(self, token_ids: Sequence[int], g: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Run pairs (g [rows, H] of a token, the id of the token after it) and write their keys and values.

        Returns the layer's output [rows, H] before the final norm: the g of the step after.
        """
        head, shape, width = self.head, self.shape, (self.shape.hidden_size,)
        heads, kv_heads, eps = shape.num_heads, shape.num_kv_heads, shape.rms_norm_eps
        embedded = F.embedding(torch.tensor(token_ids), self.embed).float()
        normed = F.rms_norm(g, width, head.hidden_norm, eps)
        residual = normed if self.is_residual_normed else g
        qkv = self.qkv(torch.cat([F.rms_norm(embedded, width, head.input_norm, eps), normed], dim=-1))
        qkv = qkv.view(len(token_ids), heads + 2 * kv_heads, shape.head_dim)
        positions = torch.tensor([p for span in spans for p in span.positions])
        turned = _rotate(qkv[:, : heads + kv_heads], self.cos[positions], self.sin[positions])
        x = residual + self.o(self._attend(turned, qkv[:, heads + kv_heads :], spans))
        hidden = self.gate_up(F.rms_norm(x, width, head.post_norm, eps))
        inner = shape.intermediate_size
        return x + self.down(F.silu(hidden[:, :inner]) * hidden[:, inner:])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, V_d]."""
        return self.output(F.rms_norm(x, (self.shape.hidden_size,), self.head.norm, self.shape.rms_norm_eps))

    def _attend(self, turned: torch.Tensor, values: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Each slot over its own cache. turned: queries and keys [rows, heads + kv_heads, D]. -> [rows, heads * D]."""
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        group, out, row = heads // kv_heads, [], 0
        for span in spans:
            rows = len(span.positions)
            own, end = slice(row, row + rows), span.start + rows
            cache = self.cache[span.slot]
            cache[:kv_heads, span.start : end] = turned[own, heads:].transpose(0, 1)
            cache[kv_heads:, span.start : end] = values[own].transpose(0, 1)
            queries = turned[own, :heads].reshape(rows, kv_heads, group, dim).permute(1, 0, 2, 3)
            mixed = F.scaled_dot_product_attention(
                queries.reshape(1, kv_heads, rows * group, dim),
                cache[None, :kv_heads, :end],
                cache[None, kv_heads:, :end],
                attn_mask=None if span.mask is None else span.mask.repeat_interleave(group, 0),
            )
            out.append(mixed.view(kv_heads, rows, group, dim).permute(1, 0, 2, 3).reshape(rows, heads * dim))
            row += rows
        return torch.cat(out)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [rows, heads, D]; cos and sin are [rows, 1, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# -------------------------------------------------------------------------------------------------------- the drafter


@dataclass
class _Tree:
    """A proposal as it grows. paths: ranks from the root; scores: log-probability of the whole path; visible: the
    nodes' cache rows, behind `base`, that a node sees once it was fed, its own last."""

    state: SlotState
    base: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    visible: dict[int, list[int]] = field(default_factory=lambda: {ROOT: []})
    rows: int = 0

    def add(self, parent: int, token: int, rank: int, score: float = 0.0) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.paths.append((*self.path(parent), rank))
        self.scores.append(score)
        return len(self.tokens) - 1

    def path(self, node: int) -> Path:
        return () if node == ROOT else self.paths[node]

    def text(self, node: int) -> list[int]:
        """The drafted tokens from the root to `node`."""
        return [] if node == ROOT else [*self.text(self.parents[node]), self.tokens[node]]

    def span(self, nodes: Sequence[int]) -> Span:
        """Cache rows and mask for feeding `nodes`, whose parents were fed before."""
        start = self.base + self.rows
        for node in nodes:
            self.visible[node] = [*self.visible[self.parents[node]], self.rows]
            self.rows += 1
        positions = [self.base + len(self.paths[node]) - 1 for node in nodes]
        mask = torch.zeros(len(nodes), self.base + self.rows, dtype=torch.bool)
        mask[:, : self.base] = True
        for row, node in enumerate(nodes):
            mask[row, [self.base + seen for seen in self.visible[node]]] = True
        return Span(self.state.slot, start, positions, None if bool(mask.all()) else mask)


class EagleDrafter:
    """head: the EAGLE-3 layer; target: whose embeddings (and, for some heads, output rows) it shares."""

    def __init__(self, head: Eagle3Head, target: Model, config: EagleDecodingConfig) -> None:
        self.feature_layers = head.feature_layers
        self.vocab_size = target.config.vocab_size
        self.draft_ids = head.draft_ids
        self._ids = None if head.draft_ids is None else head.draft_ids.tolist()
        self._rows = None if self._ids is None else {token: row for row, token in enumerate(self._ids)}
        self.is_dynamic, self.threshold = config.use_dynamic_tree, config.confidence_threshold
        size = self.vocab_size if self._ids is None else len(self._ids)
        self.top_k, self.total = dynamic_sizes(config, size)
        chain = [(0,) * depth for depth in range(1, config.max_draft_len + 1)]
        self.is_chain = not self.is_dynamic and config.eagle_choices is None
        choices = [tuple(path) for path in config.eagle_choices] if config.eagle_choices else chain
        check_ranks(choices, size)
        self.plan = _plan(choices)
        fed = self.top_k * config.max_draft_len if self.is_dynamic else len(self.plan)
        self.layer = Eagle3Layer(head, target, cache_rows=target.max_seq_len + fed)
        self._pairs: dict[int, int] = {}  # slot -> how many pairs its cache holds, all made of true features
        self._pending: dict[int, torch.Tensor] = {}  # slot -> g [n, H] of the tokens behind them

    @torch.inference_mode()
    def reset(self, slot: int, prompt_ids: Sequence[int], features: torch.Tensor | None = None) -> None:
        """Pairs of the prompt; its last token waits for the one after it."""
        self._pairs[slot], self._pending[slot] = 0, self.layer.fuse(_need(features))
        self._catch_up([(slot, list(prompt_ids))])

    @torch.inference_mode()
    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep what the target thought of the tokens that stay."""
        for outcome in outcomes:
            g = self.layer.fuse(_need(outcome.features))
            self._pending[outcome.slot] = torch.cat([self._pending[outcome.slot], g])

    @torch.inference_mode()
    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        trees = {i: _Tree(state, len(state.token_ids) - 1) for i, state in enumerate(states) if state.budget > 0}
        if not trees:
            return [Draft()] * len(states)
        x = self._catch_up([(tree.state.slot, tree.state.token_ids) for tree in trees.values()])
        waiting = {i: [ROOT] for i in trees}
        while waiting:
            waiting = self._grow(trees, waiting, x)
            if waiting:
                x = self._feed(trees, waiting)
        return [self._draft(trees[i]) if i in trees else Draft() for i in range(len(states))]

    # ------------------------------------------------------------------------------------------------ feeding the layer

    def _catch_up(self, texts: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """Make pairs of all true features whose next token is known: [(slot, text)] -> last output of each, [n, H].

        Rows of a chunk at a time bound the mask. A text of one token has no pair yet; its output is zero.
        """
        last = torch.zeros(len(texts), self.layer.shape.hidden_size)
        while True:
            ids: list[int] = []
            parts, spans, owners = [], [], []
            for i, (slot, text) in enumerate(texts):
                start = self._pairs[slot]
                fresh = text[start + 1 : start + 1 + PREFILL_CHUNK]
                if not fresh:
                    continue
                end, pending = start + len(fresh), self._pending[slot]
                mask = torch.ones(len(fresh), end, dtype=torch.bool).tril(start) if len(fresh) > 1 else None
                ids += fresh
                parts.append(pending[: len(fresh)])
                spans.append(Span(slot, start, range(start, end), mask))
                owners.append(i)
                self._pairs[slot], self._pending[slot] = end, pending[len(fresh) :]
            if not spans:
                return last
            x = self.layer.forward(ids, torch.cat(parts), spans)
            ends = torch.tensor([len(span.positions) for span in spans]).cumsum(0) - 1
            last[owners] = x[ends]

    def _feed(self, trees: Mapping[int, _Tree], waiting: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Run the waiting nodes of every tree: each on its parent's output. Their outputs, in that order."""
        ids = [trees[i].tokens[node] for i, nodes in waiting.items() for node in nodes]
        g = [trees[i].outputs[trees[i].parents[node]] for i, nodes in waiting.items() for node in nodes]
        return self.layer.forward(ids, torch.stack(g), [trees[i].span(nodes) for i, nodes in waiting.items()])

    # -------------------------------------------------------------------------------------------------- growing a tree

    def _grow(
        self, trees: Mapping[int, _Tree], waiting: Mapping[int, Sequence[int]], x: torch.Tensor
    ) -> dict[int, list[int]]:
        """Put children behind the nodes that were just run (x: their outputs); the nodes to run next."""
        logits, row, following = self.layer.logits(x), 0, {}
        grow = self._grow_dynamic if self.is_dynamic else self._grow_planned
        for i, nodes in waiting.items():
            own = slice(row, row + len(nodes))
            trees[i].outputs.update(zip(nodes, x[own], strict=True))
            if following_nodes := grow(trees[i], nodes, logits[own]):
                following[i] = following_nodes
            row += len(nodes)
        return following

    def _grow_planned(self, tree: _Tree, nodes: Sequence[int], logits: torch.Tensor) -> list[int]:
        following = []
        for node, scores in zip(nodes, logits, strict=True):
            is_sure = self.threshold is None or _top_probability(scores) >= self.threshold
            for rank, token in self._choose(tree, node, self.plan[tree.path(node)], scores):
                child = tree.add(node, token, rank)
                if is_sure and tree.path(child) in self.plan and len(tree.path(child)) < tree.state.budget:
                    following.append(child)
        return following

    def _grow_dynamic(self, tree: _Tree, nodes: Sequence[int], logits: torch.Tensor) -> list[int]:
        """The `top_k` best behind every node; of all of them the `top_k` likeliest grow on.

        They are certain choices, not draws, whatever the temperature: verification takes them as such.
        """
        children = []
        for node, scores in zip(nodes, logits, strict=True):
            best = torch.log_softmax(self._penalized(tree, node, scores), dim=-1).topk(self.top_k)
            before = 0.0 if node == ROOT else tree.scores[node]
            for rank, (score, index) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                children.append(tree.add(node, self._target_id(index), rank, before + score))
        if len(tree.path(children[0])) >= tree.state.budget:
            return []
        return sorted(sorted(children, key=lambda child: -tree.scores[child])[: self.top_k])

    def _draft(self, tree: _Tree) -> Draft:
        kept = list(range(len(tree.tokens)))
        if self.is_dynamic:  # a child is never likelier than its parent, and comes later where it is as likely
            kept = sorted(sorted(kept, key=lambda node: -tree.scores[node])[: self.total])
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        return Draft(
            tuple(tree.tokens[node] for node in kept),
            None if self.is_chain else tuple(place[tree.parents[node]] for node in kept),
            torch.stack([tree.probs[node] for node in kept]) if tree.probs else None,
        )

    # ------------------------------------------------------------------------------------------------ choosing a token

    def _choose(self, tree: _Tree, node: int, ranks: Sequence[int], scores: torch.Tensor) -> list[tuple[int, int]]:
        """(rank, target id) of every child of `node`.

        Greedy: the tokens of those ranks. Sampled: as many draws without replacement, and for each the distribution
        that the first came from goes into `tree.probs`; fewer where fewer tokens have any probability.
        """
        state, scores = tree.state, self._penalized(tree, node, scores)
        if state.params.is_greedy:
            order = scores.topk(ranks[-1] + 1).indices.tolist()
            return [(rank, self._target_id(order[rank])) for rank in ranks]
        q = probabilities(scores, state.params)
        full = q if self.draft_ids is None else q.new_zeros(self.vocab_size).index_copy(0, self.draft_ids, q)
        position, left, chosen = len(state.token_ids) + len(tree.path(node)), q.clone(), []
        for turn, rank in enumerate(ranks):
            if float(left.sum()) <= 0:
                break
            # Siblings stand at one position and need a number each: they count on beyond any text's length.
            index = draw(left, uniform(state.seed, position + (turn << 32), Purpose.DRAFT))
            chosen.append((rank, self._target_id(index)))
            tree.probs.append(full)
            left[index] = 0.0
        return chosen

    def _penalized(self, tree: _Tree, node: int, scores: torch.Tensor) -> torch.Tensor:
        penalty = tree.state.params.repetition_penalty
        if penalty in (None, 1.0):
            return scores
        text = tree.state.token_ids + tree.text(node)
        seen = text if self._rows is None else [self._rows[token] for token in text if token in self._rows]
        return penalize_repetition(scores, seen, penalty)

    def _target_id(self, index: int) -> int:
        return index if self._ids is None else self._ids[index]


def dynamic_sizes(config: EagleDecodingConfig, size: int) -> tuple[int, int]:
    """(candidates behind a node, nodes drafted at most) of a dynamic tree by a head of `size` output rows."""
    top_k = min(config.dynamic_tree_max_topK or DEFAULT_TOP_K, size)
    return top_k, config.max_total_draft_tokens or top_k * config.max_draft_len


def check_ranks(choices: Sequence[Path], size: int) -> None:
    """`OptionError` for a rank that a head of `size` output rows has not."""
    if (highest := max(map(max, choices))) >= size:
        raise OptionError(f"eagle_choices holds rank {highest}", f"ranks below {size}, the head's vocabulary")


def _plan(choices: Sequence[Path]) -> dict[Path, list[int]]:
    """Path of a node -> ranks of its children, ascending."""
    plan: dict[Path, list[int]] = {}
    for path in choices:
        plan.setdefault(path[:-1], []).append(path[-1])
    return {path: sorted(ranks) for path, ranks in plan.items()}


def _top_probability(logits: torch.Tensor) -> float:
    """The layer's own confidence, before penalty, temperature and filters: it hangs on no token drawn."""
    return float((logits.max() - logits.logsumexp(-1)).exp())


def _need(features: torch.Tensor | None) -> torch.Tensor:
    if features is None:
        raise RuntimeError("EAGLE-3 drafts from the target's hidden states and was given none")
    return features
