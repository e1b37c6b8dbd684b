"""What the engine's tests put in the place of real parts: small models, scripted drafters, a readable tokenizer.

A tiny random drafter is right so rarely that faults inside a block stay hidden, so drafters here replay the target's
own greedy text: the oracle is always right, the adversary never, the pattern drafter for k mod (K + 1) tokens in its
k-th round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tutorial_lib.config import SamplingParams
from tutorial_lib.drafters.base import ROOT, Draft, Outcome, SlotState
from tutorial_lib.engine.engine import Engine
from tutorial_lib.engine.linear import make_linear
from tutorial_lib.engine.model import Model, ModelConfig, Segment, pack
from tutorial_lib.shapes import dummy_config, random_tensors

PROMPTS = ([7], [3, 9], list(range(40, 90)))  # 1, 2 and 50 tokens


# ---- models ---------------------------------------------------------------------------------------------------------


def tiny_tensors(name: str) -> dict[str, torch.Tensor]:
    """Weights of the `dummy:` model `name` in float32, with attention made stronger.

    In a dummy as it is, the next token mostly hangs on the last one alone: five wrong tokens in the middle of the text
    change it in a quarter of all cases. With these weights they do in nine of ten, so a wrong cache row shows.
    """
    config, seed = dummy_config(name)
    factors = {"o_proj": 8.0, "q_proj": 2.0, "k_proj": 2.0}
    tensors = random_tensors(config, seed, "cpu", torch.float32).items()
    return {n: t * next((f for part, f in factors.items() if part in n), 1.0) for n, t in tensors}


def tiny_model(name: str, **limits: int) -> Model:
    """The `dummy:` model `name` with the weights of `tiny_tensors`, without building an engine directory."""
    return model_of(tiny_tensors(name), dummy_config(name)[0], **limits)


def model_of(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping,
    *,
    max_slots: int = 5,
    max_seq_len: int = 256,
    head_ids: torch.Tensor | None = None,
    ring_room: int | None = None,
) -> Model:
    """Hugging Face tensors as a `Model` with plain matrix products."""
    shape = ModelConfig.from_hf(config)
    packed = pack(tensors, shape, head_ids)
    names = [f"{i}.{kind}" for i in range(shape.num_layers) for kind in ("qkv", "o", "gate_up", "down")] + ["head"]
    plain = {"1": "plain"}
    return Model(
        shape,
        {n: make_linear(packed.get(n, packed["embed"]), packed.get(f"{n}.bias"), plain) for n in names},
        {n: t for n, t in packed.items() if n.endswith("norm")},
        packed["embed"],
        max_slots=max_slots,
        max_seq_len=max_seq_len,
        ring_room=ring_room,
    )


class TableModel:
    """A target or drafter whose next-token logits depend on the last token only: `table` [V, V]."""

    def __init__(self, table: torch.Tensor, *, max_slots: int = 4, max_seq_len: int = 100_000) -> None:
        self.table, self.max_slots, self.max_seq_len = table, max_slots, max_seq_len
        self.max_rows = self.cache_rows = max_seq_len
        self.config = ModelConfig.from_hf({**dummy_config("dummy:tiny-llama")[0], "vocab_size": table.shape[0]})

    features = None

    def forward(self, token_ids: Sequence[int], segments: Sequence[Segment], *, feature_layers=()) -> torch.Tensor:
        return torch.tensor(token_ids)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden]


# ---- drafters -------------------------------------------------------------------------------------------------------


class Replay:
    """Drafts the known greedy text of every prompt, `right(round, budget)` tokens of it and then wrong ones."""

    feature_layers = ()

    def __init__(self, texts: Iterable[Sequence[int]], right: Callable[[int, int], int], vocab_size: int = 320) -> None:
        self.texts, self.right, self.vocab_size = [list(t) for t in texts], right, vocab_size
        self.rounds: dict[int, int] = {}
        self.observed: list[Outcome] = []

    def reset(self, slot: int, prompt_ids: Sequence[int], features=None) -> None:
        self.rounds[slot] = 0

    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        return [self._draft(s) for s in states]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.observed += outcomes

    def _draft(self, state: SlotState) -> Draft:
        ids, budget = state.token_ids, state.budget
        text = next(t for t in self.texts if t[: len(ids)] == ids)
        truth = text[len(ids) : len(ids) + budget]
        assert len(truth) == budget, "the known text is too short for this test"
        right = self.right(self.rounds[state.slot], budget)
        self.rounds[state.slot] += 1
        return Draft(tuple(t if i < right else (t + 1) % self.vocab_size for i, t in enumerate(truth)))


class Trees(Replay):
    """Drafts random trees: one branch follows the known text for `right(round, budget)` tokens, up to `width` wrong
    candidates stand beside each of its tokens, and more or less of them have branches of their own. The order of the
    tokens is random too, parents first. `mixed`: some rounds draft a chain or nothing instead."""

    def __init__(self, *arguments, width: int = 3, mixed: bool = False, feature_layers: tuple[int, ...] = ()) -> None:
        super().__init__(*arguments)
        self.width, self.mixed, self.feature_layers, self.random = width, mixed, feature_layers, random.Random(0)

    def _draft(self, state: SlotState) -> Draft:
        number, chain = self.rounds[state.slot], super()._draft(state)
        kind = (number + state.slot) % 4 if self.mixed else 0
        if kind in (1, 2) or not chain.tokens:
            return chain if kind != 2 else Draft()
        text = next(t for t in self.texts if t[: len(state.token_ids)] == state.token_ids)
        right, start = self.right(number, state.budget), len(state.token_ids)
        nodes: list[tuple[int, int, int]] = []  # (parent, token, depth)
        for depth, token in enumerate(text[start : start + right]):
            nodes.append((depth - 1, token, depth + 1))
        for parent, depth in [(i, i + 1) for i in range(-1, right) if i + 1 < state.budget]:
            wrong = self.random.randint(1 if right == 0 else 0, self.width)
            offsets = self.random.sample(range(1, self.vocab_size), wrong)
            nodes += [(parent, (text[start + depth] + o) % self.vocab_size, depth + 1) for o in offsets]
        for i in range(right, len(nodes)):  # branches behind wrong tokens; the text's own tokens are bait there
            at = i
            while nodes[at][2] < state.budget and self.random.random() < 0.5:
                token = self.random.choice([text[start + nodes[at][2]], self.random.randrange(self.vocab_size)])
                nodes.append((at, token, nodes[at][2] + 1))
                at = len(nodes) - 1
        return shuffled([(parent, token) for parent, token, _ in nodes], self.random)


def shuffled(nodes: Sequence[tuple[int, int]], generator: random.Random) -> Draft:
    """The tree of (parent, token) with its tokens in a random order that puts parents first."""
    place: dict[int, int] = {ROOT: ROOT}
    while len(place) <= len(nodes):
        ready = [i for i, (parent, _) in enumerate(nodes) if i not in place and parent in place]
        place[generator.choice(ready)] = len(place) - 1
    order = sorted((i for i in place if i != ROOT), key=place.__getitem__)
    return Draft(tuple(nodes[i][1] for i in order), tuple(place[nodes[i][0]] for i in order))


class AsTree:
    """A drafter of chains that spells out the parents of every token."""

    def __init__(self, inner) -> None:
        self.inner, self.reset, self.observe = inner, inner.reset, inner.observe
        self.feature_layers = inner.feature_layers

    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        return [Draft(d.tokens, d.tree, d.probs) for d in self.inner.propose(states)]


def oracle(texts: Iterable[Sequence[int]]) -> Replay:
    return Replay(texts, lambda _, budget: budget)


def adversary(texts: Iterable[Sequence[int]]) -> Replay:
    return Replay(texts, lambda _, budget: 0)


def pattern(texts: Iterable[Sequence[int]]) -> Replay:
    return Replay(texts, lambda number, budget: number % (budget + 1))


class Around:
    """A drafter that does what `inner` does and calls `before(states)` at the start of every round."""

    def __init__(self, inner, before: Callable[[Sequence[SlotState]], None]) -> None:
        self.inner, self.before = inner, before
        self.reset, self.observe, self.feature_layers = inner.reset, inner.observe, inner.feature_layers

    def propose(self, states: Sequence[SlotState]) -> list[Draft]:
        self.before(states)
        return self.inner.propose(states)


# ---- text -----------------------------------------------------------------------------------------------------------


class Pieces:
    """A tokenizer that only decodes: id -> bytes, joined and read as UTF-8. Ids of `special` decode to nothing."""

    def __init__(self, table: Mapping[int, bytes], special: Iterable[int] = ()) -> None:
        self.table, self.special = table, frozenset(special)

    @classmethod
    def for_vocabulary(cls, size: int) -> Pieces:
        """Words, and in every tenth id a Chinese character or emoji, whole or cut in two between neighbours."""
        table = {i: f" w{i}".encode() for i in range(size)}
        for i in range(0, size - 1, 10):
            whole = chr(0x1F600 + i % 80).encode() if i % 20 else chr(0x4E00 + i).encode()
            table[i], table[i + 1] = (whole[:2], whole[2:]) if i % 30 else (whole, whole)
        return cls(table)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: object) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special)]
        return b"".join(self.table[i] for i in kept).decode("utf-8", errors="replace")


# ---- statistics -----------------------------------------------------------------------------------------------------


def p_value(counts, expected) -> float:
    """Chi-square goodness of fit of `counts` to the distribution `expected`; 0 if an impossible outcome was counted."""
    counts, expected = torch.as_tensor(counts, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    if counts[expected == 0].sum() > 0:
        return 0.0
    counts, expected = counts[expected > 0], expected[expected > 0] / expected.sum()
    if len(counts) == 1:
        return 1.0
    wanted = counts.sum() * expected
    assert wanted.min() >= 5, "too few draws for a chi-square test"
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0), statistic.float() / 2))


# ---- reference ------------------------------------------------------------------------------------------------------


def greedy(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    """prompt + `count` greedy tokens, one forward each and nothing else: what every method must reproduce."""
    ids = list(prompt)
    hidden = model.forward(ids, [Segment(0, 0, len(ids))])
    for _ in range(count):
        ids.append(int(model.logits(hidden[-1:]).argmax()))
        hidden = model.forward(ids[-1:], [Segment(0, len(ids) - 1, 1)])
    return ids


def compare_with_a_fresh_prefill(model: Model, fresh: Model, state: SlotState) -> int:
    """The cache of a request's slot against that of `fresh`, which reads the text anew; returns how many positions."""
    known = len(state.token_ids) - 1
    fresh.forward(state.token_ids[:known], [Segment(0, 0, known)])
    ours, theirs = model.cache[:, state.slot, :, :known], fresh.cache[:, 0, :, :known]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    return known


def run(model, tokenizer, prompts, params=None, *, eos=(), drafter=None, k=0, **options):
    """One `Engine.generate` call on a fresh engine; `options` make the params where none are given."""
    params = params or SamplingParams(**options)
    each = params if isinstance(params, list) else [params] * len(prompts)
    return Engine(model, tokenizer, eos, drafter=drafter, max_draft_len=k).generate(prompts, each)


def serve(engine: Engine, requests, arrivals) -> list:
    """Put every request in line at its turn; their generations."""
    opened = {}
    for turn in range(10_000):
        for i, (prompt, params) in enumerate(requests):
            if arrivals[i] == turn:
                (opened[i],) = engine._requests([prompt], [params])
                engine.submit([opened[i]])
        if len(opened) == len(requests) and engine.scheduler.is_idle:
            return [opened[i].generation() for i in range(len(requests))]
        engine.step()
    raise AssertionError("the engine does not come to an end")
