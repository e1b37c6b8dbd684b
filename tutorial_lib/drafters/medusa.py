"""Medusa: small heads on the target's last hidden state, one for each of the next positions (Cai et al. 2024, arXiv
2401.10774).

Head h reads the normed hidden state from which the target chose its latest token, and guesses the token h + 1 places
behind that one. The heads know nothing of each other's guesses, so the tree is fixed: path (0, 2) is the first head's
best token and behind it the second head's third best. All of it costs one product, whatever the depth.

`acceptance.best_tree` chooses a tree from measured ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..config import MedusaDecodingConfig
from ..engine.model import Model
from ..errors import OptionError
from ..models import Checkpoint
from .base import ROOT, Draft, Outcome, SlotState
from .checkpoints import Linear, MedusaHeads, output_head, read_medusa

Path = tuple[int, ...]


def open_medusa(config: MedusaDecodingConfig, target: Model, checkpoint: Checkpoint) -> MedusaDrafter:
    """The drafter that `config` asks for, with the heads in `checkpoint`. Raises `ModelError` if they do not fit the
    target, `OptionError` if the configuration asks for more heads or ranks than there are.

    The tree is the configuration's, else the checkpoint's, else a chain of every head's best token, which is how
    engines without trees run such heads.
    """
    heads = read_medusa(checkpoint, target.config)
    return MedusaDrafter(heads, target, choose_tree(config, heads, target.config.vocab_size, checkpoint.name))


def choose_tree(config: MedusaDecodingConfig, heads: MedusaHeads, vocab_size: int, name: str) -> tuple[Path, ...]:
    """The paths that `config` and the heads called `name` come to; see `open_medusa`."""
    used = heads.num_heads if config.num_medusa_heads is None else config.num_medusa_heads
    if used > heads.num_heads:
        raise OptionError(f"num_medusa_heads is {used}", f"at most {heads.num_heads}, as {name} has")
    if config.medusa_choices is not None:
        choices = tuple(tuple(path) for path in config.medusa_choices)
        if max(map(len, choices)) > used:
            raise OptionError(
                f"medusa_choices is {max(map(len, choices))} deep",
                f"at most {used}, one head for each depth",
                "shorten the paths, or take a checkpoint with more heads",
            )
    else:
        own = heads.choices or tuple((0,) * depth for depth in range(1, used + 1))
        choices = tuple(path for path in own if len(path) <= used)
    size = vocab_size if heads.draft_ids is None else len(heads.draft_ids)
    if (highest := max(map(max, choices))) >= size:
        raise OptionError(f"medusa_choices holds rank {highest}", f"ranks below {size}, the heads' vocabulary")
    return choices


class MedusaDrafter:
    """heads: as read from a checkpoint; target: whose output matrix they share. choices: the tree, parents first."""

    def __init__(self, heads: MedusaHeads, target: Model, choices: Sequence[Path]) -> None:
        self.feature_layers = (target.config.num_layers + 1,)
        self.choices = tuple(choices)
        depth = max(map(len, self.choices))
        place = {(): ROOT} | {path: index for index, path in enumerate(self.choices)}
        self.parents = tuple(place[path[:-1]] for path in self.choices)
        self.ranks = [max((p[-1] for p in self.choices if len(p) == d), default=0) + 1 for d in range(1, depth + 1)]
        self.blocks = [(weight[:depth], bias[:depth, None, :]) for weight, bias in heads.blocks]
        shared = heads.outputs[0] if len(heads.outputs) == 1 else None
        self.outputs: list[Linear] = [output.linear() for output in heads.outputs[:depth]]
        self.shared = output_head(shared, heads.draft_ids, target, is_int8=heads.is_int8)
        self.has_own_outputs = len(heads.outputs) > 1
        self.draft_ids = heads.draft_ids
        self._hidden: dict[int, torch.Tensor] = {}  # slot -> [H], the state that the text's last token came from

    def reset(self, slot: int, prompt_ids: Sequence[int], features: torch.Tensor | None = None) -> None:
        self._hidden[slot] = _last(features)

    @torch.inference_mode()
    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        """The tree, cut to each budget. The guesses are certain choices, not draws, whatever the temperature."""
        drafting = [state for state in states if state.budget > 0]
        if not drafting:
            return [Draft()] * len(states)
        best = self._best(torch.stack([self._hidden[state.slot] for state in drafting]).float())
        rows = iter(range(len(drafting)))
        return [self._draft(best, next(rows), state.budget) if state.budget > 0 else Draft() for state in states]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the state that the bonus token came from."""
        for outcome in outcomes:
            self._hidden[outcome.slot] = _last(outcome.features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [heads used, rows, V_d] of the target's normed hidden states [rows, H]."""
        x = hidden.expand(len(self.ranks), *hidden.shape)
        for weight, bias in self.blocks:
            x = x + F.silu(torch.baddbmm(bias, x, weight.transpose(1, 2)))
        if self.has_own_outputs:
            return torch.stack([output(own).float() for output, own in zip(self.outputs, x, strict=True)])
        return self.shared(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def _best(self, hidden: torch.Tensor) -> list[list[list[int]]]:
        """Head -> row -> target ids of its best tokens, as many as the tree has ranks there."""
        found = []
        for scores, count in zip(self.logits(hidden), self.ranks, strict=True):
            best = scores.topk(count).indices
            found.append((best if self.draft_ids is None else self.draft_ids[best]).tolist())
        return found

    def _draft(self, best: Sequence[Sequence[Sequence[int]]], row: int, budget: int) -> Draft:
        kept = sum(len(path) <= budget for path in self.choices)  # they are ordered by length
        tokens = tuple(best[len(path) - 1][row][path[-1]] for path in self.choices[:kept])
        return Draft(tokens, self.parents[:kept])


def _last(features: torch.Tensor | None) -> torch.Tensor:
    if features is None:
        raise RuntimeError("Medusa heads read the target's hidden states and were given none")
    return features[-1].clone()
