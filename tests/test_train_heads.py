"""Training of heads: an unrolled step is what drafting computes, evaluation is what speculation would get accepted."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from stand_ins import model_of
from tiny_corpus import in_transformers, small_corpus, talkative_target

from tutorial_lib.config import EagleDecodingConfig, MedusaDecodingConfig, SamplingParams
from tutorial_lib.drafters import training
from tutorial_lib.drafters.acceptance import (
    Text,
    best_tree,
    chain_leads,
    held_out_texts,
    rank_shares,
    tree_leads,
    tree_summary,
    walk,
)
from tutorial_lib.drafters.base import SlotState
from tutorial_lib.drafters.card import card_text
from tutorial_lib.drafters.corpus import Corpus, CorpusSettings, greedy_texts
from tutorial_lib.drafters.distill import TrainingSettings
from tutorial_lib.drafters.eagle import open_eagle
from tutorial_lib.drafters.medusa import open_medusa
from tutorial_lib.drafters.train_heads import (
    UNSEEN,
    EagleHead,
    MedusaHeads,
    TargetStates,
    eagle_layers,
    load_heads,
    train_heads,
)
from tutorial_lib.errors import ModelError, OptionError
from tutorial_lib.models import EMBEDDED_HEADS, resolve

DATA = EMBEDDED_HEADS["embedded:eagle3"].parent


@pytest.fixture(scope="module")
def target():
    return talkative_target()


@pytest.fixture(scope="module")
def reference(target):
    return in_transformers(target)


@pytest.fixture(scope="module")
def corpus(target):
    return small_corpus(target)


def noisy(student, seed=0, size=0.05):
    """Weights that no initialisation makes easy."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += size * torch.randn_like(parameter)
    return student


@pytest.fixture(scope="module")
def eagle(target):
    shortlist = torch.tensor([*range(0, 320, 3)])
    head = EagleHead(TargetStates(target, eagle_layers(4), "cpu"), shortlist, depth=3)
    head.start_from(3, torch.randint(256, (4, 16)))
    return noisy(head)


@pytest.fixture(scope="module")
def medusa(target):
    shortlist = torch.tensor([*range(0, 320, 2)])
    return noisy(MedusaHeads(TargetStates(target, (5,), "cpu"), shortlist, heads=3, blocks=2))


# ---------------------------------------------------------------------------------------------------- hidden states


def test_states_are_numbered_as_in_transformers(target, reference):
    tokens = torch.randint(256, (2, 20))
    found = TargetStates(target, (0, 2, 3, 5), "cpu")(tokens)
    with torch.inference_mode():
        out = reference(tokens, output_hidden_states=True)
    # hidden_states of transformers: embeddings, after each layer; the last one is normed
    for state, n in zip(found, (0, 2, 3, 4), strict=True):
        torch.testing.assert_close(state, out.hidden_states[n], atol=2e-4, rtol=1e-3)


def test_states_of_a_group_are_kept_as_far_as_memory_goes(target):
    tokens = torch.randint(256, (2, 10))
    see = TargetStates(target, (1, 5), "cpu", keep_bytes=2 * 2 * 10 * 64 * 4)
    assert see(tokens, 7)[0] is see(tokens, 7)[0]
    assert see(tokens, 8)[0] is not see(tokens, 8)[0]


def test_layers_that_eagle_reads():
    assert eagle_layers(30) == (2, 15, 27) and eagle_layers(32) == (2, 16, 29) and eagle_layers(4) == (2, 3, 4)


def test_another_architecture_is_refused(target):
    with pytest.raises(ModelError, match="Qwen3ForCausalLM.*a Llama"):
        TargetStates(resolve("dummy:tiny-qwen3"), (1,), "cpu")


# -------------------------------------------------------------------------------------- what a step of a draft computes


def draft_one_by_one(head, ids, count):
    """EAGLE-3 drafting as the paper writes it, one pair after the other, no batches: ids is the text with its last
    token; returns the draft ids. All keys and values are made anew for every token."""
    see, layer = head.see, head.midlayer
    embed = see.model.embed
    states = see(torch.tensor([ids[:-1]]))
    pairs = [
        (F.linear(torch.cat([state[0, i] for state in states[:3]]) * head.scale, head.fc.weight), ids[i + 1])
        for i in range(len(ids) - 1)
    ]
    drafted = []
    for _ in range(count):
        inputs = [torch.cat([layer.input_layernorm(embed[t]), layer.hidden_norm(g)]) for g, t in pairs]
        last, g = len(pairs) - 1, pairs[-1][0]
        heads, kv_heads, d = layer.heads, layer.kv_heads, layer.head_dim

        def rotated(x, position, d=d):
            angles = position * head.inverse_frequencies
            a, b = x[..., : d // 2], x[..., d // 2 :]
            return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

        def project(name, x, d=d):
            return (layer.self_attn[name].weight @ x).view(-1, d)

        q = rotated(project("q_proj", inputs[last]), last)
        keys = torch.stack([rotated(project("k_proj", x), i) for i, x in enumerate(inputs)])
        values = torch.stack([project("v_proj", x) for x in inputs])
        out = []
        for h in range(heads):
            own = h // (heads // kv_heads)
            weights = (keys[:, own] @ q[h] / d**0.5).softmax(0)
            out.append(weights @ values[:, own])
        h = g + layer.self_attn["o_proj"].weight @ torch.cat(out)
        x = layer.post_attention_layernorm(h)
        mlp = layer.mlp
        x = h + mlp["down_proj"].weight @ (F.silu(mlp["gate_proj"].weight @ x) * (mlp["up_proj"].weight @ x))
        token = int(head.shortlist[(head.head @ head.norm(x)).argmax()])
        drafted.append(token)
        pairs.append((x, token))
    return drafted


@torch.inference_mode()
def test_unrolled_steps_are_the_draft_that_eagle_would_make(eagle):
    """At every place of texts that its own drafts agree with here and there."""
    generator, agreed = torch.Generator().manual_seed(1), 0
    for length in (3, 9, 14):
        ids = torch.randint(256, (length,), generator=generator).tolist()
        text = [*ids, *draft_one_by_one(eagle, ids, 3), 5]
        tokens = torch.tensor([text, text[::-1]])  # a second row, so that rows may not mix
        hidden = torch.stack(list(eagle.unroll(tokens, eagle.see(tokens), 3)))
        choices = eagle.shortlist[F.linear(hidden, eagle.head).argmax(-1)][:, 0]  # [step, base]
        for base in range(len(text) - 1):
            for step, drafted in enumerate(draft_one_by_one(eagle, text[: base + 2], 3)):
                assert drafted == choices[step, base], (base, step)
                if base + 2 + step >= len(text) or drafted != text[base + 2 + step]:
                    break  # a draft that has left the text went on from other tokens
                agreed += 1
    assert agreed >= 9


@torch.inference_mode()
def test_medusa_head_reads_the_state_behind_the_last_token_but_one(medusa, reference):
    tokens = torch.randint(256, (1, 12))
    state = reference(tokens, output_hidden_states=True).hidden_states[-1]
    for h, hidden in enumerate(medusa.unroll(tokens, medusa.see(tokens), 3)):
        x = state
        for block in medusa.medusa_heads[h]:
            x = x + F.silu(x @ block["linear"].weight.T + block["linear"].bias)
        torch.testing.assert_close(hidden, x, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_ranks_line_up_with_the_text(kind, request):
    """The rank of every right token, found one place at a time; texts of different lengths in one batch."""
    head = request.getfixturevalue(kind)
    generator = torch.Generator().manual_seed(2)
    texts = [
        Text("x", *(torch.randint(256, (n,), generator=generator).tolist() for n in sizes))
        for sizes in [(4, 7), (9, 3), (1, 1), (2, 12)]
    ]
    found = head.ranks(texts, 3, tokens_per_pass=40)
    seen = 0
    for text, ranks in zip(texts, found, strict=True):
        ids = text.prompt_ids + text.output_ids
        assert len(ranks) == len(text.output_ids) - 1
        for i, step in itertools.product(range(len(ranks)), range(3)):
            base = len(text.prompt_ids) + i - 1
            place = base + 2 + step
            if place >= len(ids) or ids[place] not in head.shortlist.tolist():
                assert ranks[i][step] == UNSEEN
                continue
            tokens = torch.tensor([ids])
            hidden = list(head.unroll(tokens, head.see(tokens), 3))[step][0, base]
            order = head.shortlist[(head.head @ hidden).argsort(descending=True)].tolist()
            assert order.index(ids[place]) == ranks[i][step]
            seen += 1
    assert seen >= 12


# ----------------------------------------------------------------------------------------------------- chains and trees


def test_leads_of_chains_and_trees():
    ranks = [[[0, 0, 1], [0, 2, 0], [1, 0, 0], [UNSEEN, 0, 0]]]
    assert chain_leads(ranks) == [[2, 1, 0, 0]]
    assert tree_leads(ranks, [(0,), (1,), (0, 0), (0, 2)]) == [[2, 2, 1, 0]]
    assert walk([2, 9, 9, 0, 1], 3) == [(3, 2, 3), (2, 0, 1), (1, 1, 1)]
    assert rank_shares([[[0, 1], [1, 0], [0, 5]]], top=2) == [[0.6667, 0.3333], [0.5, 0.5]]


def test_best_tree_catches_most_and_every_beginning_is_a_tree():
    generator = torch.Generator().manual_seed(0)
    ranks = [torch.randint(0, 3, (60, 3), generator=generator).square().tolist() for _ in range(4)]
    tree = best_tree(ranks, 12)
    for size in range(1, 13):
        part = set(tree[:size])
        assert all(path[:-1] in part for path in part if len(path) > 1)
    every = [(a,) for a in (0, 1, 4)]
    every += [(a, b) for a, b in itertools.product((0, 1, 4), repeat=2)]

    def caught(paths):
        return sum(sum(lead) for lead in tree_leads(ranks, paths))

    best = max(caught(paths) for paths in itertools.combinations(every, 4))
    assert caught(best_tree([[path[:2] for path in text] for text in ranks], 4)) == best
    found = tree_summary(ranks, tree)
    assert list(found) == ["8", "12"] and 1 < found["8"] <= found["12"]


# ------------------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def trained(target, corpus):
    settings = TrainingSettings(shortlist_size=256, steps=60, tokens_per_step=512, learning_rate=1e-2, held_out=12)
    return train_heads(
        ["eagle3", "medusa"], target, corpus, settings, depth=3, heads=3, blocks=2, say=lambda line: None
    )


def test_training_lowers_the_loss_and_raises_acceptance(trained):
    for kind, least in (("eagle3", 0.1), ("medusa", 0.02)):
        curve = trained[kind].curve
        losses = [point["loss"] for point in curve if point["loss"] is not None]
        assert losses[-1] < 0.8 * losses[0], kind
        assert curve[-1]["agreement"] > curve[0]["agreement"] + least, kind
        assert curve[-1]["acceptance_length"] > curve[0]["acceptance_length"], kind


def test_only_tokens_that_a_draft_can_reach_are_learned(target, corpus, medusa):
    """A step learns nothing where a step before could not be right, and less where it hardly would."""
    from tutorial_lib.drafters.distill import Batch

    tokens = torch.randint(256, (1, 16))
    where = torch.tensor([6, 7, 9])  # places before the tokens that are learned
    labels = torch.tensor([[3], [4], [5]])
    batch = Batch(tokens, where, labels, torch.ones(3, 1), states=medusa.see(tokens))
    hidden = [F.linear(h[0], medusa.head).log_softmax(-1) for h in medusa.unroll(tokens, batch.states, 3)]
    step_0 = -(hidden[0][5, 3] + hidden[0][6, 4] + hidden[0][8, 5])
    reached = hidden[0][5, 3].exp() ** medusa.reach_power  # base 5 goes on to place 7; base 6 ends, 8 has no next
    expected = (step_0 - reached * hidden[1][5, 4]) / 3
    torch.testing.assert_close(medusa.loss(batch), expected)


def test_what_is_exported_loads_as_it_was_measured(trained, target, corpus, tmp_path):
    for kind, one in trained.items():
        texts = {"held out": held_out_texts(corpus, one.held_out)}
        card = training.make_and_export(
            target, corpus, CorpusSettings(), 1.0, one, texts, ["python"], tmp_path / kind, say=lambda line: None
        )
        loaded = load_heads(tmp_path / kind, target)
        assert loaded.kind == kind
        for name, parameter in loaded.named_parameters():
            torch.testing.assert_close(parameter, dict(one.draft.named_parameters())[name], atol=1e-6, rtol=0)
        again = loaded.evaluate(texts["held out"], card["evaluation"]["held out"]["max_draft_len"])
        common = set(again) - {"rank_shares", "acceptance_length_by_max_draft_len"}
        assert {k: again[k] for k in common} == {k: card["evaluation"]["held out"][k] for k in common}
        page = (tmp_path / kind / "CARD.md").read_text()
        assert "Fixed trees" in page and "draft position" in page and "{" not in page
        stored = json.loads((tmp_path / kind / "card.json").read_text())
        assert stored["weights_bytes"] == (tmp_path / kind / "model.safetensors").stat().st_size
    tensors, config = load_file(str(tmp_path / "eagle3" / "model.safetensors")), trained["eagle3"].draft.config
    shortlist = trained["eagle3"].draft.shortlist
    assert torch.equal(tensors["d2t"] + torch.arange(len(shortlist)), shortlist)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], shortlist)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128) and tensors["fc.weight"].dtype == torch.int8
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert not any("lm_head" in name or "embed" in name for name in tensors)


def test_training_goes_on_from_an_exported_head(trained, target, corpus, tmp_path):
    head, texts = trained["eagle3"].draft, {"held out": held_out_texts(corpus, trained["eagle3"].held_out)}
    for kind, one in trained.items():
        training.make_and_export(
            target, corpus, CorpusSettings(), 1.0, one, texts, ["x"], tmp_path / kind, say=lambda line: None
        )
    again = TrainingSettings(shortlist_size=300, steps=1, tokens_per_step=512, learning_rate=0.0, held_out=12)
    options = {"depth": 3, "say": lambda line: None}
    folder = tmp_path / "eagle3"
    found = train_heads(["eagle3"], target, corpus, again, go_on_from=folder, **options)["eagle3"]
    tokens = torch.randint(256, (2, 12))
    with torch.inference_mode():  # nothing was learned: it is the head that was exported, for more tokens
        old, new = (list(one.unroll(tokens, one.see(tokens), 3)) for one in (head, found.draft))
    torch.testing.assert_close(new, old, atol=1e-4, rtol=1e-3)
    assert len(found.draft.shortlist) > len(head.shortlist) and found.draft.facts["before"]["steps"] == 60
    training.make_and_export(
        target, corpus, CorpusSettings(), 1.0, found, texts, ["x"], tmp_path / "more", say=lambda line: None
    )
    assert "started from an earlier run (60 steps in" in (tmp_path / "more" / "CARD.md").read_text()
    for kinds, where, why in (
        (["eagle3"], "medusa", "holds medusa"),
        (["medusa"], "eagle3", "training of medusa should go on from 'eagle3'"),
        (["eagle3"], "nowhere", "'nowhere'"),
    ):
        with pytest.raises(OptionError, match=why):
            train_heads(kinds, target, corpus, again, go_on_from=tmp_path / where, **options)


@torch.inference_mode()
def test_the_drafters_draft_what_was_trained(trained, target, corpus, tmp_path):
    """The exported heads, read and run by the drafters that the engine uses (int8 weights, products in bfloat16)."""
    model = model_of(dict(target.tensors("cpu", torch.float32)), target.config)
    opened = {
        "eagle3": lambda at: open_eagle(EagleDecodingConfig(speculative_model="x", max_draft_len=3), model, at),
        "medusa": lambda at: open_medusa(
            MedusaDecodingConfig(speculative_model="x", medusa_choices=[[0], [0, 0], [0, 0, 0]]), model, at
        ),
    }
    for kind, one in trained.items():
        training.make_and_export(
            target, corpus, CorpusSettings(), 1.0, one, {"x": []}, ["x"], tmp_path / kind, say=lambda line: None
        )
        drafter, head = opened[kind](resolve(tmp_path / kind)), one.draft
        assert drafter.feature_layers == (head.see.layers[:3] if kind == "eagle3" else (5,))
        ids, same, total = corpus.tokens[:40].tolist(), 0, 0
        states = TargetStates(target, drafter.feature_layers, "cpu")(torch.tensor([ids]))
        features = torch.cat([state[0] for state in states], dim=-1)
        for end in range(3, 39):
            drafter.reset(0, ids[:end], features[:end])
            (draft,) = drafter.propose([SlotState(0, ids[: end + 1], 3, SamplingParams(), 0)])
            text = torch.tensor([ids[: end + 1] + list(draft.tokens)])
            hidden = list(head.unroll(text, head.see(text), 3))
            choices = [int(head.shortlist[(head.head @ hidden[step][0, end - 1]).argmax()]) for step in range(3)]
            same, total = same + sum(a == b for a, b in zip(choices, draft.tokens, strict=True)), total + 3
        assert same > 0.95 * total, (kind, same, total)


def test_folding_the_scale_changes_nothing(target):
    head = EagleHead(TargetStates(target, (1, 2, 3), "cpu"), torch.arange(320))
    tokens = torch.randint(256, (2, 12))
    head.start_from(3, tokens)
    assert not torch.allclose(head.scale, torch.ones_like(head.scale))
    with torch.inference_mode():
        before = list(head.unroll(tokens, head.see(tokens), 2))
        head.fold()
        after = list(head.unroll(tokens, head.see(tokens), 2))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-3)


def test_evaluation_is_the_greedy_speculation_that_it_stands_for(trained, target):
    """EAGLE-3 chains of 3 drafted one by one over the target's own greedy text."""
    head = trained["eagle3"].draft
    prompts = [[1, 2, 3], [40, 5]]
    texts = [Text("x", p, o) for p, o in zip(prompts, greedy_texts(target, prompts, max_tokens=16), strict=True)]
    rounds = emitted = 0
    with torch.inference_mode():
        for text in texts:
            at = 0
            while at < len(text.output_ids) - 1:
                rest = text.output_ids[at + 1 :]
                drafted = draft_one_by_one(head, text.prompt_ids + text.output_ids[: at + 1], min(3, len(rest)))
                right = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafted, rest, strict=False)))
                step = min(len(right) + 1, len(rest))
                rounds, emitted, at = rounds + 1, emitted + step, at + step
    assert head.evaluate(texts, 3)["acceptance_length"] == round(emitted / rounds, 4)


def test_unknown_kinds_are_refused(target, corpus):
    with pytest.raises(OptionError, match="hydra.*'medusa', 'eagle3'"):
        train_heads(["hydra"], target, corpus, TrainingSettings(steps=1))
    assert isinstance(corpus, Corpus)


def test_shipped_heads_are_what_their_cards_say():
    """Weights, map and page of each; on the bundled prompts Medusa's widest tree gives 2 tokens per round, EAGLE-3's
    chain 3 and its tree more."""
    found = {}
    for kind, folder in (("medusa", EMBEDDED_HEADS["embedded:medusa"]), ("eagle3", EMBEDDED_HEADS["embedded:eagle3"])):
        card, config = (json.loads((folder / name).read_text()) for name in ("card.json", "config.json"))
        tensors = load_file(str(folder / "model.safetensors"))
        assert card["kind"] == kind and card["weights_bytes"] == (folder / "model.safetensors").stat().st_size
        assert (folder / "CARD.md").read_text() == card_text(card)
        ids = tensors["draft_vocab"] if kind == "medusa" else tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        assert (ids.diff() > 0).all() and len(ids) == config["draft_vocab_size"] == card["shortlist"]["size"]
        if kind == "eagle3":
            assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
        found[kind] = card["evaluation"]["bundled prompts"]
    eagle = found["eagle3"]
    assert found["medusa"]["acceptance_length_by_tree_nodes"]["63"] >= 2 and eagle["max_draft_len"] == 5
    assert 3 <= eagle["acceptance_length"] < eagle["acceptance_length_by_tree_nodes"]["16"]
    size = sum(path.stat().st_size for folder in DATA.glob("embedded_*") for path in folder.iterdir())
    assert size <= 30_000_000
