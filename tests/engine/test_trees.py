"""Trees in the engine: one pass over many branches is as good as one pass over each, and the text stays the target's.

A row of a tree is compared with a plain pass over its own branch, a compacted cache with a fresh prefill, and whole
generations with plain decoding, from random trees of known quality. Everything is float32 on a CPU.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from stand_ins import (
    PROMPTS,
    Around,
    AsTree,
    Pieces,
    TableModel,
    Trees,
    compare_with_a_fresh_prefill,
    greedy,
    p_value,
    run,
    shuffled,
    tiny_model,
)

from tutorial_lib.config import NGramDecodingConfig, SamplingParams
from tutorial_lib.drafters.base import Draft
from tutorial_lib.drafters.draft_model import DraftModelDrafter
from tutorial_lib.drafters.ngram import NGramDrafter
from tutorial_lib.engine.engine import Engine
from tutorial_lib.engine.model import PREFILL_CHUNK, Segment, prefill
from tutorial_lib.engine.sampling import Purpose, penalize_repetition, probabilities, uniform
from tutorial_lib.errors import OptionError

FAMILIES = ("dummy:tiny-llama", "dummy:tiny-qwen2", "dummy:tiny-qwen3", "dummy:tiny-mistral?window=9")
LENGTH = 30
QUALITY = {
    "oracle": lambda number, budget: budget,
    "adversary": lambda number, budget: 0,
    "pattern": lambda number, budget: number % (budget + 1),
}


@pytest.fixture(scope="module")
def texts(target):
    return [greedy(target, p, LENGTH + 20) for p in PROMPTS]


def random_tree(count: int, seed: int) -> Draft:
    generator = random.Random(seed)
    return shuffled([(generator.randrange(-1, i), generator.randrange(320)) for i in range(count)], generator)


def branch(draft: Draft, index: int) -> list[int]:
    """Indices from the root to token `index`."""
    return [] if index < 0 else [*branch(draft, draft.tree[index]), index]


def outputs(generations) -> list[list[int]]:
    return [g.token_ids for g in generations]


def rights(generation, quality: str, k: int) -> list[int]:
    """How many tokens of each round's draft were right."""
    left, found = generation.token_ids[1:], []
    for number, r in enumerate(generation.rounds):
        found.append(QUALITY[quality](number, min(k, len(left) - 1)))
        left = left[len(r.emitted) :]
    return found


def untimed(generations):
    return [[replace(r, draft_s=0.0, verify_s=0.0, end_s=0.0) for r in g.rounds] for g in generations]


# ---- one pass over a tree -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request):
    return tiny_model(request.param)


@pytest.mark.parametrize(("known", "count"), [(1, 1), (1, 12), (3, 7), (40, 12), (40, 63)])
def test_a_row_of_a_tree_is_the_end_of_its_branch(tiny, known, count):
    """Logits of every row, in one pass together with a chain and a single row of other slots."""
    text = random.Random(1).choices(range(320), k=known)
    draft = random_tree(count, seed=count)
    tiny.cache.fill_(math.nan)
    for slot in (0, 1, 2, 3):
        if known > 1:
            tiny.forward(text[:-1], [Segment(slot, 0, known - 1)])
    block, start = [text[-1], *draft.tokens], known - 1
    segments = [
        Segment(0, start, 2),
        Segment(1, start, len(block), draft.parents),
        Segment(2, start, 1, ()),
    ]
    logits = tiny.logits(tiny.forward([*block[:2], *block, block[0]], segments))[2:-1]
    for row in range(count + 1):
        ids = text + [draft.tokens[i] for i in branch(draft, row - 1)]
        expected = tiny.logits(tiny.forward(ids, [Segment(3, 0, len(ids))]))[-1]
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [5, 20])
def test_a_kept_branch_is_as_if_it_had_been_prefilled(tiny, count):
    text, draft = random.Random(2).choices(range(320), k=20), random_tree(count, seed=3)
    path = max((branch(draft, i) for i in range(count)), key=lambda p: (len(p), p))
    assert path != list(range(len(path)))
    tiny.cache.fill_(math.nan)
    tiny.forward(text[:-1], [Segment(1, 0, 19)])
    tiny.forward([text[-1], *draft.tokens], [Segment(1, 19, count + 1, draft.parents)])
    address, other = tiny.cache.data_ptr(), tiny.cache[:, [0, 2, 3, 4]].clone()
    tiny.keep(1, 19, [i + 1 for i in path])
    ids = text + [draft.tokens[i] for i in path]
    tiny.forward(ids, [Segment(4, 0, len(ids))])
    ours, fresh = tiny.cache[:, 1, :, : len(ids)], tiny.cache[:, 4, :, : len(ids)]
    torch.testing.assert_close(ours, fresh, rtol=1e-4, atol=2e-5)
    assert tiny.cache.data_ptr() == address and torch.isnan(other).all()
    tiny.cache[:, 1, :, len(ids) :] = math.nan
    more = [5, 6, 7]
    after = [tiny.logits(tiny.forward(more, [Segment(slot, len(ids), 3)])) for slot in (1, 4)]
    torch.testing.assert_close(*after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kinds", ["mixed", "trees"])
def test_greedy_text_of_every_family(tiny, kinds, pieces):
    known = [greedy(tiny, p, 30) for p in PROMPTS]
    drafter = Trees(known, QUALITY["pattern"], mixed=kinds == "mixed")
    done = run(tiny, pieces, PROMPTS, drafter=drafter, k=4, max_tokens=20)
    assert outputs(done) == [t[len(p) :][:20] for p, t in zip(PROMPTS, known, strict=True)]


# ---- greedy speculation is greedy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("k", [1, 2, 3, 6])
@pytest.mark.parametrize("quality", QUALITY)
def test_greedy_text_is_that_of_plain_decoding(quality, k, width, target, texts, pieces):
    lengths = (LENGTH, LENGTH - 7, LENGTH - 15)
    params = [SamplingParams(max_tokens=n) for n in lengths]
    drafter = Trees(texts, QUALITY[quality], width=width)
    done = run(target, pieces, PROMPTS, params, drafter=drafter, k=k)
    for generation, prompt, text, length in zip(done, PROMPTS, texts, lengths, strict=True):
        assert generation.token_ids == text[len(prompt) : len(prompt) + length]
        assert [t for r in generation.rounds for t in r.emitted] == generation.token_ids[1:]
        for r, right in zip(generation.rounds, rights(generation, quality, k), strict=True):
            assert r.depth <= k and r.accepted == right
            if r.parents is None:
                assert r.drafted == () and r.path is None
                continue
            assert r.accepted == len(r.path)
            assert tuple(r.drafted[i] for i in r.path) == r.emitted[:-1]
            assert [r.parents[i] for i in r.path] == [-1, *r.path][: len(r.path)]
    assert any(r.path and r.path != tuple(range(len(r.path))) for g in done for r in g.rounds) or quality == "adversary"


@pytest.mark.parametrize("mixed", [False, True])
def test_five_uneven_rows_are_as_they_are_alone(mixed, target, pieces):
    prompts = [list(p) for p in (PROMPTS[2], PROMPTS[0], PROMPTS[1], PROMPTS[2][:17], [8])]
    known = [greedy(target, p, LENGTH + 20) for p in prompts]
    params = [SamplingParams(max_tokens=LENGTH - 4 * i, logprobs=1) for i in range(5)]
    together = run(target, pieces, prompts, params, drafter=Trees(known, QUALITY["pattern"], mixed=mixed), k=4)
    for i, prompt in enumerate(prompts):
        drafter = Trees(known, QUALITY["pattern"], mixed=mixed)
        (alone,) = run(target, pieces, [prompt], params[i], drafter=drafter, k=4)
        assert together[i].token_ids == alone.token_ids == known[i][len(prompt) :][: params[i].max_tokens]
        accepted = [[r.accepted for r in g.rounds] for g in (alone, together[i])]
        assert accepted[0] == accepted[1] or mixed  # with chains and trees mixed, the slot decides which comes when
    kinds = {r.parents is None and len(r.drafted) for g in together for r in g.rounds}
    assert len(kinds) >= (3 if mixed else 1)


def test_the_cache_equals_that_of_a_fresh_prefill_and_stale_rows_change_nothing(target, texts, pieces):
    fresh, checked = tiny_model("dummy:tiny-llama?seed=5", max_slots=1), []

    def compare_and_poison(states):
        for state in states:
            known = compare_with_a_fresh_prefill(target, fresh, state)
            target.cache[:, state.slot, :, known:] = math.nan
            checked.append(known)
        target.cache[:, [s for s in range(target.max_slots) if s not in {x.slot for x in states}]] = math.nan

    drafter = Around(Trees(texts, QUALITY["pattern"]), compare_and_poison)
    done = run(target, pieces, PROMPTS, drafter=drafter, k=5, max_tokens=LENGTH)
    assert outputs(done) == [t[len(p) :][:LENGTH] for p, t in zip(PROMPTS, texts, strict=True)]
    assert len(checked) >= 12 and max(checked) > 65


# ---- a chain written as a tree --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"temperature": 0.9, "seed": 4},
        {"temperature": 0.9, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["draft model", "self-draft", "ngram"])
def test_a_chain_written_as_a_tree_gives_the_chains_result(method, options, target, other, pieces):
    def drafter():
        if method == "ngram":
            return NGramDrafter(NGramDecodingConfig(max_matching_ngram_size=1), ())
        return DraftModelDrafter(other if method == "draft model" else tiny_model("dummy:tiny-llama?seed=5"), 320)

    chain, tree = (
        run(target, pieces, PROMPTS, drafter=d, k=4, max_tokens=LENGTH, logprobs=2, **options)
        for d in (drafter(), AsTree(drafter()))
    )
    assert outputs(tree) == outputs(chain) and [g.text for g in tree] == [g.text for g in chain]
    for a, b in zip(chain, tree, strict=True):
        assert [r.path for r in b.rounds] == [tuple(range(r.accepted)) for r in a.rounds]
        assert [list(x) for x in a.logprobs] == [list(x) for x in b.logprobs]
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert list(x.values()) == pytest.approx(list(y.values()), abs=1e-4)
    plain_form = [[replace(r, parents=None, path=None) for r in rounds] for rounds in untimed(tree)]
    assert plain_form == [[replace(r, parents=None, path=None) for r in rounds] for rounds in untimed(chain)]


# ---- what a round does besides accepting ----------------------------------------------------------------------------


def test_a_penalty_counts_the_tokens_of_the_branch(target, pieces):
    prompt, ids = PROMPTS[2], list(PROMPTS[2])
    hidden = target.forward(ids, [Segment(0, 0, len(ids))])
    for _ in range(LENGTH + 10):
        ids.append(int(penalize_repetition(target.logits(hidden[-1:])[0], ids, 1.3).argmax()))
        hidden = target.forward(ids[-1:], [Segment(0, len(ids) - 1, 1)])
    assert ids[: 50 + LENGTH] != greedy(target, prompt, LENGTH)
    for quality in ("oracle", "pattern"):
        drafter = Trees([ids], QUALITY[quality])
        (done,) = run(target, pieces, [prompt], drafter=drafter, k=4, max_tokens=LENGTH, repetition_penalty=1.3)
        assert done.token_ids == ids[50 : 50 + LENGTH]
        assert [r.accepted for r in done.rounds] == rights(done, quality, 4)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_a_teacher_forced_pass(options, target, texts, pieces):
    drafter = Likeliest(4) if options else Trees(texts, QUALITY["pattern"])
    done = run(target, pieces, PROMPTS, drafter=drafter, k=3, max_tokens=LENGTH, logprobs=3, **options)
    assert any(r.path and r.path != tuple(range(len(r.path))) for g in done for r in g.rounds)
    for generation, prompt in zip(done, PROMPTS, strict=True):
        ids = prompt + generation.token_ids
        hidden = target.forward(ids, [Segment(0, 0, len(ids))])
        expected = torch.log_softmax(target.logits(hidden), -1)[len(prompt) - 1 : -1]
        assert len(generation.logprobs) == LENGTH
        for row, token, found in zip(expected, generation.token_ids, generation.logprobs, strict=True):
            assert token in found and all(abs(row[t].item() - value) < 1e-4 for t, value in found.items())


@pytest.mark.parametrize("k", [2, 5])
def test_an_end_token_at_every_place_of_a_branch(k, target, texts, pieces):
    text = texts[1][2:]
    for j in range(14):
        if text[j] in text[:j]:
            continue
        for quality in ("oracle", "pattern"):
            drafter = Trees(texts, QUALITY[quality])
            params = SamplingParams(max_tokens=LENGTH, logprobs=0, stop_token_ids=[text[j]])
            done, beside = run(target, pieces, [PROMPTS[1], PROMPTS[0]], params, drafter=drafter, k=k)
            assert done.token_ids == text[: j + 1] and done.stop_reason == text[j]
            assert [list(x) for x in done.logprobs] == [[t] for t in done.token_ids]
            plain = texts[0][1:][:LENGTH]
            end = plain.index(text[j]) + 1 if text[j] in plain else LENGTH
            assert beside.token_ids == plain[:end]


@pytest.mark.parametrize("limit", [1, 2, 5, 6])
def test_exactly_max_tokens(limit, target, texts, pieces):
    done = run(target, pieces, PROMPTS, drafter=Trees(texts, QUALITY["oracle"]), k=4, max_tokens=limit)
    assert outputs(done) == [t[len(p) :][:limit] for p, t in zip(PROMPTS, texts, strict=True)]
    assert all(r.accepted + 1 == len(r.emitted) for g in done for r in g.rounds)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_wide_trees_at_the_end_of_the_context_are_cut_to_the_rows_that_are_left(k, window, pieces):
    """A prompt of 54 in a context of 64, and trees of 40 tokens: no row behind the last, and the text is whole."""
    name = "dummy:tiny-llama?seed=5" if window is None else f"dummy:tiny-mistral?window={window}"
    model = tiny_model(name, max_seq_len=64)
    prompt = ([5, 6, 7] * 20)[:54]
    text = greedy(tiny_model(name, max_seq_len=80), prompt, 20)
    for quality in QUALITY:
        drafter = Trees([text], QUALITY[quality], width=9)
        proposed = []

        def propose(states, drafter=drafter, proposed=proposed, inner=drafter.propose):
            drafts = inner(states)
            proposed.append((64 - len(states[0].token_ids), drafts[0]))
            return drafts

        drafter.propose = propose
        (done,) = run(model, pieces, [prompt], drafter=drafter, k=k, max_tokens=10)
        assert done.token_ids == text[54:64]
        for r, outcome, (room, draft) in zip(done.rounds, drafter.observed, proposed, strict=True):
            assert r.drafted == draft.tokens[:room] and (r.parents or ()) == (draft.parents or ())[:room]
            assert len(outcome.choices) == len(r.drafted) + 1
        assert any(len(draft.tokens) > room for room, draft in proposed)


@pytest.mark.parametrize("parents", [(-1,), (-1, 1), (0, 0), (-2, 0), (-1, -1, 0)], ids=str)
def test_a_tree_that_is_none_is_refused(parents, target, pieces):
    drafter = Bush(2)
    drafter.propose = lambda states: [Draft((1, 2), parents)] * len(states)
    with pytest.raises(OptionError, match="parents"):
        run(target, pieces, [[1]], drafter=drafter, k=4, max_tokens=8)


# ---- hidden states --------------------------------------------------------------------------------------------------


class Notes(Trees):
    """Keeps what it is told of the target."""

    def reset(self, slot, prompt_ids, features=None):
        super().reset(slot, prompt_ids)
        self.seen = {**getattr(self, "seen", {}), slot: [features]}
        self.choices = {**getattr(self, "choices", {}), slot: []}
        assert features.shape[0] == len(prompt_ids)

    def observe(self, outcomes):
        for outcome in outcomes:
            assert outcome.features.shape[0] == len(outcome.path) + 1
            self.seen[outcome.slot].append(outcome.features)
            self.choices[outcome.slot].append(outcome.choices)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("layers", [(0, 1, 2), (3,), (2, 0)], ids=str)
def test_features_are_those_of_a_pass_over_the_whole_text(layers, mixed, target, texts, pieces):
    """Every text token but the last has exactly one row, whether it was prefilled, a bonus, or accepted in a tree."""
    drafter = Notes(texts, QUALITY["pattern"], 320, mixed=mixed, feature_layers=layers)
    done = run(target, pieces, PROMPTS, drafter=drafter, k=4, max_tokens=LENGTH)
    fresh = tiny_model("dummy:tiny-llama?seed=5", max_slots=1)
    slots = sorted(drafter.seen, key=lambda s: len(drafter.seen[s][0]))
    for generation, prompt, slot in zip(done, PROMPTS, slots, strict=True):
        ids = prompt + generation.token_ids
        fresh.forward(ids, [Segment(0, 0, len(ids))], feature_layers=layers)
        seen = torch.cat(drafter.seen[slot])
        assert seen.shape == (len(ids) - 1, len(layers) * 64)
        torch.testing.assert_close(seen, fresh.features[:-1], rtol=1e-4, atol=1e-4)
        for r, choices in zip(generation.rounds, drafter.choices[slot], strict=True):
            assert len(choices) == len(r.drafted) + 1
            assert [choices[row] for row in (0, *(i + 1 for i in r.path or range(r.accepted)))] == list(r.emitted)


@pytest.mark.parametrize("length", [3, PREFILL_CHUNK, PREFILL_CHUNK + 1, 2 * PREFILL_CHUNK + 5])
def test_features_of_a_prompt_of_several_chunks(length):
    model = tiny_model("dummy:tiny-llama?seed=5", max_slots=2, max_seq_len=length)
    prompt = torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    prefill(model, prompt, 1, (1, 3))
    chunked = model.features
    hidden = model.forward(prompt, [Segment(0, 0, length)], feature_layers=(1, 3))
    torch.testing.assert_close(chunked, model.features, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.features[:, 64:], hidden)
    prefill(model, prompt, 1)
    assert model.features is None


def test_a_layer_that_the_target_lacks_is_refused(target, texts, pieces):
    for layers in ((4,), (0, -1)):
        with pytest.raises(OptionError, match="layer"):
            Engine(target, pieces, (), drafter=Notes(texts, QUALITY["oracle"], 320, feature_layers=layers))


def test_drafting_can_be_timed_with_hidden_states(target, pieces):
    seen = []

    class Timed(Bush):
        feature_layers = (1, 2)

        def reset(self, slot, prompt_ids, features=None):
            seen.append((len(prompt_ids), features))

        def observe(self, outcomes):
            seen.extend((len(o.choices), o.features) for o in outcomes)

    engine = Engine(target, pieces, (), drafter=Timed(3), max_draft_len=2)
    assert engine.time_draft(2, context=20, repeats=2) > 0
    ids = torch.randint(0, 320, (23,), generator=torch.Generator().manual_seed(0)).tolist()
    target.forward(ids, [Segment(0, 0, 23)], feature_layers=(1, 2))
    assert [count for count, _ in seen] == [20, 13, 13, 13]  # three candidates, three behind each, and the root
    torch.testing.assert_close(torch.cat([f for _, f in seen]), target.features, rtol=1e-4, atol=1e-4)


# ---- sampling -------------------------------------------------------------------------------------------------------


class Bush:
    """A tree of `width` candidates and `width` behind each: certain ones, or drawn without replacement from `table`
    [V, V], row = the token before."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, width: int, table: torch.Tensor | None = None) -> None:
        self.width, self.table, self.draws = width, table, 0

    def reset(self, slot, prompt_ids, features=None) -> None: ...

    def observe(self, outcomes) -> None: ...

    def propose(self, states):
        return [self._draft(s) for s in states]

    def _draft(self, state):
        tokens, parents, probs, ends = [], [], [], [(-1, state.token_ids[-1])]
        for _ in range(min(2, state.budget)):
            for parent, token in list(ends):
                ends.remove((parent, token))
                picked, q = self._siblings(token, state)
                for candidate in picked:
                    ends.append((len(tokens), candidate))
                    tokens.append(candidate)
                    parents.append(parent)
                    probs.append(q)
        return Draft(tuple(tokens), tuple(parents), torch.stack(probs) if tokens and self.table is not None else None)

    def _siblings(self, token, state):
        if self.table is None:
            return [(token + 1 + 2 * i) % 5 for i in range(self.width)], None
        q = probabilities(self.table[token], state.params)
        self.draws += 1
        noise = torch.tensor([uniform(self.draws, i, Purpose.DRAFT) for i in range(len(q))]).clamp_min(1e-12)
        keys = torch.where(q > 0, -noise.log() / q, torch.inf)  # exponential clocks: the first ones to ring
        return keys.argsort()[: min(self.width, int((q > 0).sum()))].tolist(), q


class Likeliest(Bush):
    """One position: the target's own likeliest candidates, the best one last."""

    def _draft(self, state):
        ids, model = state.token_ids, tiny_model("dummy:tiny-llama?seed=5", max_slots=1)
        logits = model.logits(model.forward(ids, [Segment(0, 0, len(ids))]))[-1]
        return Draft(tuple(logits.topk(self.width).indices.flip(0).tolist()), (-1,) * self.width)


@pytest.mark.parametrize("method", ["without replacement", "certain"])
def test_the_text_has_the_targets_distribution(method):
    """End to end: a target and a drafter whose next token depends on the last one, trees two deep and two wide."""
    params = SamplingParams(max_tokens=600, temperature=0.8, top_k=4)
    generator = torch.Generator().manual_seed(8)
    target, draft = (TableModel(1.2 * torch.randn(5, 5, generator=generator)) for _ in range(2))
    bush = Bush(2, draft.table if method == "without replacement" else None)
    tokenizer = Pieces(dict.fromkeys(range(5), b"x"))
    each = [replace(params, seed=i) for i in range(4)]
    done = run(target, tokenizer, [[0]] * 4, each, drafter=bush, k=2)
    table = torch.zeros(5, 5)
    for generation in done:
        for previous, token in zip(generation.token_ids, generation.token_ids[1:], strict=False):
            table[previous, token] += 1
    for previous in range(5):
        assert p_value(table[previous], probabilities(target.table[previous], params)) > 0.01, previous
    assert {len(r.emitted) for g in done for r in g.rounds} == {1, 2, 3}
    assert any(r.path and r.path[0] == 1 for g in done for r in g.rounds)


def test_a_seed_decides_the_text_whatever_surrounds_it(target, pieces):
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=42)
    (alone,) = run(target, pieces, [PROMPTS[1]], params, drafter=Bush(4), k=2)
    others = [SamplingParams(max_tokens=20, temperature=0.8, seed=i) for i in range(2)]
    batch = run(
        target, pieces, [PROMPTS[2], PROMPTS[1], PROMPTS[0]], [others[0], params, others[1]], drafter=Bush(4), k=2
    )
    assert batch[1].token_ids == alone.token_ids and untimed([batch[1]]) == untimed([alone])
