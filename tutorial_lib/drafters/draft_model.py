"""Draft-target speculation: a smaller model decodes K tokens, one after the other.

It keeps its own KV cache and follows the text by comparison: whatever its cache holds beyond the text it is now given
was rejected and is overwritten. After a round in which every draft was accepted it has not yet seen its own last
token; the comparison finds that too, and the next round feeds two tokens instead of one.

A drafter may draft over a shortlist of the vocabulary (`head_ids`): the output head is most of a small model's work.
It may also stop early: behind a token that it was not sure of, further ones are seldom right (`confidence_threshold`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..config import SamplingParams
from ..engine.model import Model, Segment, prefill
from ..engine.sampling import Purpose, draw, penalize_repetition, probabilities, uniform
from .base import Draft, Outcome, SlotState

log = logging.getLogger(__name__)


class DraftModelDrafter:
    """model: the drafter. vocab_size: the target's, which proposals are expressed in. head_ids: [V_d] target ids of
    the drafter's output rows, or None if row i is id i. confidence_threshold: a request's proposal ends with the first
    token at which the drafter's highest probability (before temperature and filters) is lower; None: never. It looks
    at the distribution and not at the token drawn, so a sampled token's q stays what it was drawn from."""

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        head_ids: torch.Tensor | None = None,
        *,
        confidence_threshold: float | None = None,
    ) -> None:
        self.model, self.vocab_size, self.head_ids = model, vocab_size, head_ids
        self._threshold = confidence_threshold
        self._ids = None if head_ids is None else head_ids.tolist()
        self._cached: dict[int, list[int]] = {}  # slot -> the ids whose keys and values the cache holds
        self._known: dict[int, int] = {}  # slot -> how many of them are certainly text
        self._has_noted_limit = False

    feature_layers: tuple[int, ...] = ()

    def reset(self, slot: int, prompt_ids: Sequence[int], features: torch.Tensor | None = None) -> None:
        """Prefill the drafter with the prompt, as far as its own context reaches."""
        prompt = list(prompt_ids[: self.model.max_seq_len])
        prefill(self.model, self._readable(prompt), slot)
        self._cached[slot], self._known[slot] = prompt, len(prompt)

    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        tokens: list[list[int]] = [[] for _ in states]
        probs: list[list[torch.Tensor]] = [[] for _ in states]
        budgets = [self._budget(s) for s in states]
        feed = {i: self._catch_up(s) for i, s in enumerate(states) if budgets[i] > 0}
        while feed:
            for i, logits in zip(feed, self._step(states, feed), strict=True):
                token, q = self._choose(states[i], tokens[i], logits)
                tokens[i].append(token)
                if q is not None:
                    probs[i].append(q)
                if self._threshold is not None and _top_probability(logits) < self._threshold:
                    budgets[i] = 0
            feed = {i: tokens[i][-1:] for i in feed if len(tokens[i]) < budgets[i]}
        return [Draft(tuple(t), probs=torch.stack(q) if q else None) for t, q in zip(tokens, probs, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to do: the next `propose` compares its cache with the text."""

    def _budget(self, state: SlotState) -> int:
        """Draft tokens that still fit the drafter's own context (the last one is never fed)."""
        room = self.model.max_seq_len - len(state.token_ids) + 1
        if room < state.budget and not self._has_noted_limit:
            self._has_noted_limit = True
            log.warning("the drafter's context ends at %d tokens: no drafts beyond it", self.model.max_seq_len)
        return max(0, min(state.budget, room))

    def _catch_up(self, state: SlotState) -> list[int]:
        """Drop from the cache what is not text; return the text that it lacks (at least the last token)."""
        cached, ids = self._cached[state.slot], state.token_ids
        same = min(self._known[state.slot], len(ids) - 1)
        while same < min(len(cached), len(ids) - 1) and cached[same] == ids[same]:
            same += 1
        del cached[same:]
        self._known[state.slot] = len(ids)
        return ids[same:]

    def _step(self, states: Sequence[SlotState], feed: dict[int, list[int]]) -> torch.Tensor:
        """Feed every slot its tokens; logits after each slot's last one, float32 [slots, V_d]."""
        rows, segments, last = [], [], []
        for i, ids in feed.items():
            cached = self._cached[states[i].slot]
            while len(ids) > self.model.max_rows:  # after a stretch without drafts, where the cache is a ring
                piece, ids = ids[: self.model.max_rows], ids[self.model.max_rows :]
                self.model.forward(self._readable(piece), [Segment(states[i].slot, len(cached), len(piece))])
                cached.extend(piece)
            segments.append(Segment(states[i].slot, len(cached), len(ids)))
            cached.extend(ids)
            rows += ids
            last.append(len(rows) - 1)
        hidden = self.model.forward(self._readable(rows), segments)
        return self.model.logits(hidden[last] if len(rows) > len(last) else hidden)

    def _readable(self, ids: list[int]) -> list[int]:
        """Ids that only the target's vocabulary has (padding, later specials) are read as id 0: a guess costs speed."""
        size = self.model.config.vocab_size
        return [token if token < size else 0 for token in ids]

    def _choose(self, state: SlotState, drafted: list[int], logits: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        """One draft token and, if it was sampled, the distribution over the target's vocabulary that it came from."""
        params: SamplingParams = state.params
        penalty = params.repetition_penalty or 1.0
        if params.is_greedy and penalty == 1.0:
            best = int(logits[: self.vocab_size].argmax() if self._ids is None else logits.argmax())
            return (best if self._ids is None else self._ids[best]), None
        logits = self._over_target_vocabulary(logits)
        if penalty != 1.0:
            logits = penalize_repetition(logits, state.token_ids + drafted, penalty)
        if params.is_greedy:
            return int(logits.argmax()), None
        q = probabilities(logits, params)
        return draw(q, uniform(state.seed, len(state.token_ids) + len(drafted), Purpose.DRAFT)), q

    def _over_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [V of the target]; ids that the drafter cannot propose get -inf."""
        full = torch.full((self.vocab_size,), -torch.inf, device=logits.device)
        if self.head_ids is not None:
            full[self.head_ids] = logits
        else:
            common = min(self.vocab_size, logits.shape[-1])
            full[:common] = logits[:common]
        return full


def _top_probability(logits: torch.Tensor) -> float:
    return float((logits.max() - logits.logsumexp(-1)).exp())
