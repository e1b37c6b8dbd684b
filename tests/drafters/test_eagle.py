"""EAGLE-3 against a slow reference that knows no cache to go stale: what it drafts alone, in batches, in the engine."""

from __future__ import annotations

import pytest
import torch
from stand_ins import PROMPTS, greedy, p_value, run, tiny_model
from tiny_heads import LAYERS, SHORTLIST, TARGET, SlowEagle, V, eagle_tensors, features_of, specforge

from tutorial_lib.config import EagleDecodingConfig, SamplingParams
from tutorial_lib.drafters.base import ROOT, Outcome, SlotState
from tutorial_lib.drafters.eagle import _Tree, open_eagle
from tutorial_lib.engine.model import Segment
from tutorial_lib.engine.sampling import Purpose, draw, probabilities, uniform
from tutorial_lib.errors import OptionError

CHOICES = ([0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0])
SHAPES = {
    "chain": {"max_draft_len": 4},
    "fixed": {"eagle_choices": CHOICES},
    "dynamic": {"max_draft_len": 4, "use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8},
}


@pytest.fixture(scope="module")
def target():
    return tiny_model(TARGET)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return specforge(tmp_path_factory.mktemp("eagle"), eagle_tensors())


@pytest.fixture(scope="module")
def opened(target, checkpoint):
    def make(**options):
        return open_eagle(EagleDecodingConfig(speculative_model="tiny", **options), target, checkpoint)

    return make


@pytest.fixture
def slow(target):
    return SlowEagle(eagle_tensors(), target.embed)


def state(text, budget=4, slot=0, **params) -> SlotState:
    return SlotState(slot, list(text), budget, SamplingParams(**params), params.get("seed", 0))


def begin(drafter, target, text, slot=0):
    """Prefill `text` but for its last token, as the engine does."""
    drafter.reset(slot, text[:-1], features_of(target, text[:-1]))


def branches(draft) -> dict[int, list[int]]:
    """Every token's index -> the drafted tokens from the root to it."""
    paths: dict[int, list[int]] = {ROOT: []}
    for index, (token, parent) in enumerate(zip(draft.tokens, draft.tree, strict=True)):
        paths[index] = [*paths[parent], token]
    return paths


def children_of(draft) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, parent in enumerate(draft.tree):
        found.setdefault(parent, []).append(index)
    return found


# ---- what is drafted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_the_first_chain_comes_from_the_prompts_features(prompt, target, opened, slow):
    text = greedy(target, prompt, 1)
    drafter = opened(max_draft_len=4)
    begin(drafter, target, text)
    (draft,) = drafter.propose([state(text)])
    x = slow.read(features_of(target, text)[:-1], text)
    for i, token in enumerate(draft.tokens):
        assert token == SHORTLIST[slow.behind(x, draft.tokens[:i]).argmax()]
    assert len(draft.tokens) == 4 and draft.parents is None and draft.probs is None


def test_a_fixed_tree_takes_the_ranks_that_were_chosen(target, opened, slow):
    text = greedy(target, PROMPTS[2], 1)
    choices = [[0], [2], [0, 1], [2, 0], [2, 0, 3]]
    drafter = opened(eagle_choices=choices)
    begin(drafter, target, text)
    (draft,) = drafter.propose([state(text, 3)])
    x = slow.read(features_of(target, text)[:-1], text)
    paths = branches(draft)
    found = []
    for index, parent in enumerate(draft.tree):
        order = slow.behind(x, paths[parent]).argsort(descending=True)
        found.append(SHORTLIST[order].tolist().index(draft.tokens[index]))
    assert found == [c[-1] for c in choices] and draft.parents == (ROOT, ROOT, 0, 1, 3)


@pytest.mark.parametrize("total", [1, 8, 1000])
def test_a_dynamic_tree_holds_the_likeliest_nodes_of_the_beam(total, target, opened, slow):
    text, top = greedy(target, PROMPTS[2], 1), 3
    options = {"use_dynamic_tree": True, "dynamic_tree_max_topK": top, "max_total_draft_tokens": total}
    drafter = opened(max_draft_len=3, **options)
    begin(drafter, target, text)
    (draft,) = drafter.propose([state(text, 3)])

    x = slow.read(features_of(target, text)[:-1], text)
    beam, scores = [((), 0.0)], {}
    for _ in range(3):
        level = {}
        for path, score in beam:
            best = torch.log_softmax(slow.behind(x, path), -1).topk(top)
            level |= {
                (*path, int(SHORTLIST[i])): score + float(p) for p, i in zip(best.values, best.indices, strict=True)
            }
        beam = sorted(level.items(), key=lambda item: -item[1])[:top]
        scores |= level
    expected = sorted(scores, key=lambda path: -scores[path])[:total]
    paths = branches(draft)
    assert {tuple(path) for path in paths.values() if path} == set(expected)
    assert all(parent < index for index, parent in enumerate(draft.tree)) and draft.probs is None
    for siblings in children_of(draft).values():  # the likelier is offered first
        own = [scores[tuple(paths[i])] for i in siblings]
        assert own == sorted(own, reverse=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [0, 1, 2])
def test_a_small_budget_bounds_the_depth(shape, budget, target, opened):
    text = greedy(target, PROMPTS[1], 1)
    drafter = opened(**SHAPES[shape])
    begin(drafter, target, text)
    (draft,) = drafter.propose([state(text, budget)])
    assert max(draft.depths, default=0) == budget


def test_drafting_stops_behind_a_token_the_layer_is_not_sure_of(target, opened, slow):
    text = greedy(target, PROMPTS[2], 1)
    x = slow.read(features_of(target, text)[:-1], text)
    full = opened(max_draft_len=6)
    begin(full, target, text)
    (draft,) = full.propose([state(text, 6)])
    sure = [float(torch.softmax(slow.behind(x, draft.tokens[:i]), -1).max()) for i in range(6)]
    threshold = sorted(sure)[1] + 1e-4  # at least two tokens are below it
    unsure = next(i for i, p in enumerate(sure) if p < threshold)
    for options, length in (({"confidence_threshold": threshold}, unsure + 1), ({"confidence_threshold": 0.0}, 6)):
        drafter = opened(max_draft_len=6, **options)
        begin(drafter, target, text)
        (short,) = drafter.propose([state(text, 6)])
        assert short.tokens == draft.tokens[:length]


# ---- over rounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_after_every_round_the_cache_is_the_one_of_true_features(shape, target, opened, slow):
    """Rounds that accept none, some and all. The reference forgets everything each round and reads the text anew."""
    drafter = opened(**SHAPES[shape])
    slot, text = 3, greedy(target, PROMPTS[1], 1)
    begin(drafter, target, text, slot)
    for turn, wanted in enumerate((0, 2, 4, 1, 4, 3)):
        features = features_of(target, text)
        (draft,) = drafter.propose([state(text, slot=slot)])
        x = slow.read(features[:-1], text)
        cache = drafter.layer.cache[slot][:, : len(text) - 1]
        torch.testing.assert_close(cache[:2].transpose(0, 1), torch.stack(slow.keys), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(cache[2:].transpose(0, 1), torch.stack(slow.values), rtol=1e-3, atol=1e-4)
        for index, drafted in list(branches(draft).items())[1:] if shape == "chain" else ():
            assert drafted[-1] == SHORTLIST[slow.behind(x, drafted[:-1]).argmax()], index
        # Any path may have been accepted, and any token may follow it: here the last branch, and arbitrary ids.
        path: list[int] = []
        while len(path) < wanted and (below := children_of(draft).get(path[-1] if path else ROOT)):
            path.append(below[-1])
        text = [*text, *(draft.tokens[i] for i in path), 100 + 7 * turn]
        seen = features_of(target, text)[-len(path) - 2 : -1]
        drafter.observe([Outcome(slot, tuple(path), (), seen)])
    drafter.layer.cache.fill_(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "sampled"])
def test_slots_drafting_together_draft_as_each_does_alone(shape, options, target, opened):
    texts = [greedy(target, p, n) for p, n in zip((*PROMPTS, [5, 6, 7]), (1, 4, 2, 9), strict=True)]
    budgets = (4, 0, 2, 3)
    together = opened(**SHAPES[shape])
    for slot, text in enumerate(texts):
        begin(together, target, text, slot)
    states = [state(t, b, slot, **options) for slot, (t, b) in enumerate(zip(texts, budgets, strict=True))]
    for draft, own in zip(together.propose(states), states, strict=True):
        alone = opened(**SHAPES[shape])
        begin(alone, target, own.token_ids, own.slot)
        (expected,) = alone.propose([own])
        assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
        assert (draft.probs is None) == (expected.probs is None)
        if draft.probs is not None:
            torch.testing.assert_close(draft.probs, expected.probs, rtol=1e-3, atol=1e-6)


def test_a_long_prompt_is_read_in_parts(target, checkpoint, slow, monkeypatch):
    monkeypatch.setattr("tutorial_lib.drafters.eagle.PREFILL_CHUNK", 16)
    drafter = open_eagle(EagleDecodingConfig(speculative_model="tiny"), target, checkpoint)
    text = greedy(target, PROMPTS[2], 1)
    begin(drafter, target, text)
    slow.read(features_of(target, text)[:-1], text)
    (draft,) = drafter.propose([state(text, 1)])
    cache = drafter.layer.cache[0][:2, : len(text) - 1].transpose(0, 1)
    torch.testing.assert_close(cache, torch.stack(slow.keys), rtol=1e-3, atol=1e-4)


def test_a_head_that_norms_before_the_residual(target, tmp_path):
    drafter = open_eagle(
        EagleDecodingConfig(speculative_model="tiny"),
        target,
        specforge(tmp_path, eagle_tensors(), norm_before_residual=True),
    )
    slow = SlowEagle(eagle_tensors(), target.embed, is_residual_normed=True)
    text = greedy(target, PROMPTS[1], 1)
    begin(drafter, target, text)
    (draft,) = drafter.propose([state(text)])
    x = slow.read(features_of(target, text)[:-1], text)
    assert list(draft.tokens) == [
        int(SHORTLIST[slow.behind(x, draft.tokens[:i]).argmax()]) for i in range(len(draft.tokens))
    ]


# ---- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"top_k": 7, "top_p": 0.8}, {"repetition_penalty": 1.5}])
def test_a_sampled_chain_comes_with_the_distributions_it_was_drawn_from(options, target, opened, slow):
    text = greedy(target, PROMPTS[1], 1)
    drafter = opened(max_draft_len=4)
    begin(drafter, target, text)
    (draft,) = drafter.propose([state(text, temperature=0.8, seed=11, **options)])
    x = slow.read(features_of(target, text)[:-1], text)
    assert draft.probs.shape == (4, V)
    for i, token in enumerate(draft.tokens):
        logits = torch.full((V,), -torch.inf)
        logits[SHORTLIST] = slow.behind(x, draft.tokens[:i])
        if "repetition_penalty" in options:
            seen = sorted({*text, *draft.tokens[:i]} & set(SHORTLIST.tolist()))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
        q = probabilities(logits, SamplingParams(temperature=0.8, **options))
        torch.testing.assert_close(draft.probs[i], q, rtol=1e-3, atol=1e-5)
        assert token == draw(q, uniform(11, len(text) + i, Purpose.DRAFT))


def test_sampled_siblings_are_drawn_without_replacement(target, opened):
    """The second of two siblings: q without the first, by chi-square over the pairs of the four likeliest tokens."""
    text = greedy(target, PROMPTS[1], 1)
    drafter = opened(eagle_choices=[[0], [1]])
    begin(drafter, target, text)
    x = drafter._catch_up([(0, text)])
    q = probabilities(drafter.layer.logits(x)[0], SamplingParams(temperature=1.0, top_k=4))
    ids = q.nonzero().flatten().tolist()
    pairs = [(a, b) for a in ids for b in ids if a != b]
    counts = dict.fromkeys(pairs, 0)
    for seed in range(2500):
        begin_state = state(text, temperature=1.0, top_k=4, seed=seed)
        (draft,) = _again(drafter, x, begin_state)
        rows = [SHORTLIST.tolist().index(token) for token in draft.tokens]
        counts[tuple(rows)] += 1
        assert draft.probs.shape == (2, V) and torch.equal(draft.probs[0], draft.probs[1])
    expected = [float(q[a] * q[b] / (1 - q[a])) for a, b in pairs]
    assert p_value(list(counts.values()), expected) > 1e-3


def _again(drafter, x, own):
    """`propose` without feeding the text again: only the draws differ."""
    tree = _Tree(own, len(own.token_ids) - 1)
    drafter._grow({0: tree}, {0: [ROOT]}, x)
    return [drafter._draft(tree)]


def test_fewer_siblings_where_fewer_tokens_have_any_probability(target, opened):
    text = greedy(target, PROMPTS[1], 1)
    drafter = opened(eagle_choices=[[0], [1], [2], [2, 0]])
    begin(drafter, target, text)
    (draft,) = drafter.propose([state(text, temperature=1.0, top_k=2, seed=3)])
    assert draft.parents == (ROOT, ROOT) and len(set(draft.tokens)) == 2


# ---- in the engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompts", [PROMPTS[1:2], (*PROMPTS, [5, 6, 7], [200] * 9)], ids=["one", "five"])
def test_greedy_text_is_that_of_the_target(shape, prompts, target, opened, pieces):
    k = max(map(len, CHOICES)) if shape == "fixed" else 4
    done = run(target, pieces, prompts, drafter=opened(**SHAPES[shape]), k=k, max_tokens=40)
    for generation, prompt in zip(done, prompts, strict=True):
        assert generation.token_ids == greedy(target, prompt, 40)[len(prompt) :]
        assert max(map(len, (r.drafted for r in generation.rounds))) == {"chain": 4, "fixed": 9, "dynamic": 8}[shape]


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"temperature": 0.9, "seed": 3}])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_of_sampling_reaches_its_end(shape, options, target, opened, pieces):
    done = run(target, pieces, PROMPTS, drafter=opened(**SHAPES[shape]), k=4, max_tokens=20, **options)
    assert [len(g.token_ids) for g in done] == [20] * 3


def test_a_head_as_good_as_the_target_is_accepted(target, opened, pieces, monkeypatch):
    """A scripted output makes the layer say what the target will: only a wrong place in the text would be rejected."""
    text = greedy(target, PROMPTS[1], 41)
    drafter = opened(max_draft_len=4)

    def right(x: torch.Tensor) -> torch.Tensor:
        # Row 0 after the text, one row a step: the place follows from how far this proposal has come.
        spot = drafter.place + drafter.step
        drafter.step += 1
        wanted = torch.full((1, len(SHORTLIST)), 0.0)
        nearest = SHORTLIST.tolist().index(text[spot]) if text[spot] in SHORTLIST else 0
        wanted[0, nearest] = 9.0
        return wanted

    original = drafter.propose

    def propose(states):
        drafter.place, drafter.step = len(states[0].token_ids), 0
        return original(states)

    monkeypatch.setattr(drafter.layer, "logits", right)
    monkeypatch.setattr(drafter, "propose", propose)
    (generation,) = run(target, pieces, PROMPTS[1:2], drafter=drafter, k=4, max_tokens=36)
    assert generation.token_ids == text[2:38]
    listed = set(SHORTLIST.tolist())
    position = 3
    for r in generation.rounds:
        expected = 0
        while expected < len(r.drafted) and text[position + expected] in listed:
            expected += 1
        assert r.accepted == expected
        position += r.accepted + 1
    assert sum(r.accepted for r in generation.rounds) > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_text_is_distributed_as_the_targets(shape, tmp_path, pieces):
    """Chi-square over three tokens, the first from prefill; the head knows what follows one of them, in wrong
    proportions."""
    target, params = tiny_model("dummy:tiny-llama?seed=5"), {"temperature": 1.0, "top_k": 2}
    expected, texts = {}, [((), 1.0)]
    while texts:
        text, before = texts.pop()
        ids = [*PROMPTS[1], *text]
        hidden = target.forward(ids, [Segment(0, 0, len(ids))])
        p = probabilities(target.logits(hidden)[-1], SamplingParams(**params))
        for token in p.nonzero().flatten().tolist():
            longer = ((*text, token), before * float(p[token]))
            texts += [longer] if len(text) < 2 else []
            expected |= {} if len(text) < 2 else dict([longer])
    known = sorted({token for text in expected for token in text})
    ids = torch.tensor(sorted({*range(0, V, 4), *known}))
    own = {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = specforge(tmp_path, eagle_tensors(ids=ids), **own)
    drafter = open_eagle(EagleDecodingConfig(speculative_model="tiny", **SHAPES[shape]), target, head)
    scores = torch.full((len(ids),), -9.0)
    following = sorted({text[1] for text in expected if text[0] == max(expected, key=expected.get)[0]})
    scores[torch.searchsorted(ids, torch.tensor(following))] = torch.tensor([1.5, 0.5])
    drafter.layer.logits = lambda x: scores.expand(len(x), -1)
    count = 800
    each = [SamplingParams(max_tokens=3, seed=seed, **params) for seed in range(count)]
    done = run(target, pieces, [PROMPTS[1]] * count, each, drafter=drafter, k=2)
    counts = dict.fromkeys(expected, 0)
    for generation in done:
        counts[tuple(generation.token_ids)] += 1
    assert sum(r.accepted for g in done for r in g.rounds) > count / 20
    assert p_value(list(counts.values()), list(expected.values())) > 1e-3


# ---- configuration --------------------------------------------------------------------------------------------------


def test_what_the_head_has_not_is_refused(opened):
    with pytest.raises(OptionError, match="num_eagle_layers is 2"):
        opened(num_eagle_layers=2)
    with pytest.raises(OptionError, match=f"rank {len(SHORTLIST)}; needed: ranks below {len(SHORTLIST)}"):
        opened(eagle_choices=[[0], [len(SHORTLIST)]])


def test_it_asks_for_the_layers_it_was_trained_on(opened):
    assert opened().feature_layers == LAYERS
