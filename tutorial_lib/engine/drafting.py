"""What proposes on the device, inside a round's graph: no branch on data, nothing read back.

The counterpart of `drafters/` (which runs on the host, between rounds) for `graph.RoundProgram`. A `Drafting` fills
the round's `tokens` behind their first column and, where it sampled, returns the distributions it drew from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from ..config import NGramDecodingConfig
from .device_sampling import draw, probabilities, uniform
from .gpu_model import GpuModel
from .sampling import Purpose

if TYPE_CHECKING:
    from .graph import DeviceState, RoundProgram

Take = Callable[[int, torch.Tensor], None]  # (first position, features [64, F * H])


class TreeRows(NamedTuple):
    """The trees of a round's sequences. parents: int32 [batch, rows]. mask, depths: what attention takes, int8
    [batch * rows, rows] and int32 [batch * rows]."""

    parents: torch.Tensor
    mask: torch.Tensor
    depths: torch.Tensor


class DeviceTree:
    """A fixed tree over a round's rows, row 0 the text's last token. parents: the row of each row's parent, -1 for row
    0. `of_drafts`: the same parents as `Round.parents` counts them."""

    def __init__(self, parents: Sequence[int], device) -> None:
        rows = len(parents)
        mask, depths = torch.zeros(rows, rows, dtype=torch.int8), [0] * rows
        for row, parent in enumerate(parents):
            if row:
                depths[row] = depths[parent] + 1
                mask[row] = mask[parent]
            mask[row, row] = 1
        self.depth, self.tokens, self.reach = max(depths), rows - 1, rows - 1
        self.of_drafts: tuple[int, ...] | None = tuple(parent - 1 for parent in parents[1:])
        self._parents = torch.tensor(list(parents), dtype=torch.int32, device=device)
        self._depths = torch.tensor(depths, dtype=torch.int32, device=device)
        self._mask = mask.to(device)

    def over(self, batch: int) -> TreeRows:
        """The same tree for every sequence of a batch."""
        return TreeRows(self._parents.repeat(batch, 1), self._mask.repeat(batch, 1), self._depths.repeat(batch))


class OpenTree:
    """Trees that every round forms anew, of at most `tokens` drafts and `depth` deep. reach: how many positions behind
    the text are written on the way. `of_drafts` is None: a round's report has the parents."""

    def __init__(self, tokens: int, depth: int, device, *, reach: int = 0) -> None:
        self.tokens, self.depth, self.reach, self.device = tokens, depth, max(tokens, reach), device
        self.of_drafts: tuple[int, ...] | None = None

    def over(self, batch: int) -> TreeRows:
        """Room for the trees of a batch; no row has a draft yet."""
        rows = self.tokens + 1

        def ints(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=self.device)

        return TreeRows(ints(batch, rows, fill=-2), ints(batch * rows, rows, dtype=torch.int8), ints(batch * rows))


Tree = DeviceTree | OpenTree


class Drafting(Protocol):
    """vocab_size: ids from here on mean nothing to it and are read as id 0 (a guess costs speed only). tree: None for
    a chain. feature_layers: hidden states it wants of the target, as in `drafters.base`; they lie in
    `round.state.features`. caches: [layers, pages, ...] each, read through the table of the target's; windows: how far
    back each of them is looked at, None for all of it. ahead: how many tokens behind a position its keys depend on.
    is_following: rounds without drafts leave nothing to catch up."""

    vocab_size: int
    tree: Tree | None
    feature_layers: tuple[int, ...]
    ahead: int
    is_following: bool

    @property
    def caches(self) -> Sequence[torch.Tensor]: ...

    @property
    def windows(self) -> Sequence[int | None]: ...

    def take(self, prompt_ids: Sequence[int], table: torch.Tensor, slot: int) -> Take | None:
        """What to do with each prefill step's features of a prompt; None if nothing."""

    def begin(self, ids: Sequence[int], table: torch.Tensor, slot: int, start: int) -> None:
        """A piece of a text that begins in `slot`: positions `start` and following, all but the text's last two."""

    def draft(self, round: RoundProgram) -> torch.Tensor | None:
        """K tokens per sequence into `round.tokens[:, 1:]`; returns q float32 [B, K, V] if they were sampled."""

    def follow(self, round: RoundProgram) -> None:
        """What a round without drafts does, so that later ones can draft."""

    def catch_up(self, state: DeviceState, slot: int, text: Sequence[int], drafted: int, k: int) -> None:
        """The next round of `slot` has K = k and the one before had another, or its prompt was not read. `text` is all
        there is by now; of it `drafted` positions are right in the drafter's cache."""


class Unbound:
    """What drafters without a cache of their own have in common."""

    caches: Sequence[torch.Tensor] = ()
    windows: Sequence[int | None] = ()
    ahead = 0
    is_following = True

    def take(self, prompt_ids: Sequence[int], table: torch.Tensor, slot: int) -> Take | None:
        return None

    def begin(self, ids: Sequence[int], table: torch.Tensor, slot: int, start: int) -> None: ...

    def follow(self, round: RoundProgram) -> None: ...

    def catch_up(self, state: DeviceState, slot: int, text: Sequence[int], drafted: int, k: int) -> None: ...


class ModelDrafting:
    """A smaller model drafts a chain. head_ids: int64 [V_d], the target ids of its output rows, or None if row i is
    id i.

    The first step feeds each sequence's last two tokens. The one before last is new to the drafter only if everything
    was accepted in the round before; otherwise its keys are written again as they are. So no round needs to know how
    the one before ended. Rounds without drafts pass it by: what they wrote it reads when it is to draft again.
    """

    ahead = 0
    is_following = False

    tree: Tree | None = None
    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: GpuModel, head_ids: torch.Tensor | None = None) -> None:
        self.model, self.head_ids, self.vocab_size = model, head_ids, model.config.vocab_size

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        return [self.model.cache]

    @property
    def windows(self) -> Sequence[int | None]:
        return [self.model.config.sliding_window]

    def take(self, prompt_ids: Sequence[int], table: torch.Tensor, slot: int) -> None:
        return None

    def begin(self, ids: Sequence[int], table: torch.Tensor, slot: int, start: int) -> None:
        self.model.prefill([t if t < self.vocab_size else 0 for t in ids], table, slot, start=start)

    def follow(self, round: RoundProgram) -> None: ...

    def catch_up(self, state: DeviceState, slot: int, text: Sequence[int], drafted: int, k: int) -> None:
        if k and drafted < len(text) - 2:
            self.begin(text[drafted:-1], state.table, slot, drafted)

    def draft(self, round: RoundProgram) -> torch.Tensor | None:
        state, known = round.state, round.target.config.vocab_size
        if not round.is_sampled and self.model.draft_chain(
            round.pair, state.table, round.starts[0], round.slots32, round.drafts, ids=self.head_ids, vocab_size=known
        ):
            return None
        tokens, q = round.pair.view(-1), []
        for i in range(round.k):
            rows = 2 if i == 0 else 1
            start = round.starts[0 if i == 0 else i + 1]
            logits = self.model.step(tokens, state.table, start, round.slots32, rows)[rows - 1 :: rows]
            if self.head_ids is None:
                logits = logits[:, :known]
            if round.is_sampled:
                probs, tokens = self._sample(round, logits, i)
                q.append(probs)
            else:
                tokens = round.tokens[:, i + 1]
                round.target.ops.argmax(logits, tokens, round.target.ops.pdl, ids=self.head_ids)
        return torch.stack(q, 1) if q else None

    def _sample(self, round: RoundProgram, logits: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(the distribution over the target's ids, the tokens drawn)."""
        params = round.params
        probs = probabilities(logits, params)
        position = round.starts[0].long() + 2 + i
        token = draw(probs, uniform(params.seed, position, Purpose.DRAFT))
        if self.head_ids is not None:
            token = self.head_ids[token]
        round.tokens[:, i + 1] = token.int()
        return self._over_target_vocabulary(probs, round.target.config.vocab_size), round.tokens[:, i + 1]

    def _over_target_vocabulary(self, probs: torch.Tensor, size: int) -> torch.Tensor:
        if self.head_ids is not None:
            full = torch.zeros(probs.shape[0], size, device=probs.device)
            return full.index_copy_(1, self.head_ids, probs)
        return F.pad(probs, (0, size - probs.shape[-1])) if probs.shape[-1] < size else probs


class NGramDrafting(Unbound):
    """Prompt lookup as `drafters.ngram` does it, over the round's own record of the text."""

    tree: Tree | None = None
    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: NGramDecodingConfig, vocab_size: int, stop_ids: Iterable[int], device) -> None:
        self.config, self.vocab_size = config, vocab_size
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int32, device=device)

    def draft(self, round: RoundProgram) -> None:
        state, ops = round.state, round.target.ops
        ops.match_ngram(
            round.slots, state.length, state.text, round.tokens, round.drafted_len, self.stop_ids,
            self.config.max_matching_ngram_size, self.config.is_use_oldest, ops.pdl,
        )  # fmt: skip
        if round.is_forced:
            round.drafted_len.fill_(round.k)
