"""Training a drafter: the corpus is the target's own text, the loss is right, what is shipped loads as it was saved."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_corpus import TINY, in_transformers, small_corpus, talkative_target

from tutorial_lib.bench.prompts import Prompt, load_prompts
from tutorial_lib.drafters import corpus as corpus_module
from tutorial_lib.drafters import distill, training
from tutorial_lib.drafters.corpus import (
    ANSWER,
    FORCED,
    USER,
    Corpus,
    CorpusSettings,
    Template,
    choose_shortlist,
    coverage,
    first_choices,
    generate_corpus,
    greedy_texts,
)
from tutorial_lib.drafters.openers import PLAIN, STARTS, draw_opener, tables
from tutorial_lib.drafters.training import Text, TrainingSettings, acceptance_length, walk_rounds
from tutorial_lib.embedded import SHIPPED_DRAFT, complete_draft
from tutorial_lib.errors import OptionError
from tutorial_lib.models import load_tokenizer


@pytest.fixture(scope="module")
def target():
    return talkative_target()


@pytest.fixture(scope="module")
def reference(target):
    return in_transformers(target)


@pytest.fixture(scope="module")
def corpus(target):
    return small_corpus(target)


@torch.inference_mode()
def alone(model, prompt, count, stops):
    """Greedy by recomputing everything, one text at a time."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


# ------------------------------------------------------------------------------------------------- acceptance by hand


@pytest.mark.parametrize(
    "match, k, rounds",
    [
        ([1, 0, 1, 1], 4, [(4, 1, 2), (2, 2, 2)]),  # what matches after the first mismatch does not count
        ([1, 1, 0, 1, 1, 1], 4, [(4, 2, 3), (3, 3, 3)]),
        ([0, 0, 0], 4, [(3, 0, 1), (2, 0, 1), (1, 0, 1)]),
        ([1] * 10, 4, [(4, 4, 5), (4, 4, 5)]),
        ([1] * 11, 4, [(4, 4, 5), (4, 4, 5), (1, 1, 1)]),  # the last round emits what is left
        ([1, 1, 0, 0, 1, 0], 2, [(2, 2, 3), (2, 0, 1), (2, 1, 2)]),
        ([], 4, []),
    ],
)
def test_rounds_walk_over_a_known_text(match, k, rounds):
    match = [bool(m) for m in match]
    assert walk_rounds(match, k) == rounds
    expected = sum(r[2] for r in rounds) / len(rounds) if rounds else math.nan
    assert acceptance_length(match, k) == pytest.approx(expected, nan_ok=True)


def test_evaluation_counts_per_round_by_category_and_position(target, monkeypatch):
    draft = training.new_draft_model(target, torch.arange(320), [0])
    texts = [Text("a", [1], [1] * 5), Text("b", [1], [1] * 4), Text("a", [1], [1])]
    found = {"a": [True, False, True, True], "b": [False, True, True]}
    monkeypatch.setattr(training, "matches", lambda d, t: [found["a"], found["b"], []])
    result = training.evaluate(draft, texts, 2)
    # a: (2,1,2) (2,2,2); b: (2,0,1) (2,2,2)
    assert result["by_category"] == {"a": 2.0, "b": 1.5}
    assert result["acceptance_length"] == 1.75
    assert result["acceptance_by_position"] == [0.75, 0.5]
    assert result["agreement"] == pytest.approx(5 / 7, abs=1e-4)
    assert result["output_tokens"] == 10


def test_matches_are_what_a_drafter_decoding_alone_would_propose(target):
    draft = training.new_draft_model(target, torch.tensor([3, 5, 9, 40, 77, 200, 301]), [0, 3])
    generator = torch.Generator().manual_seed(0)
    texts = [
        Text("x", *(torch.randint(256, (n,), generator=generator).tolist() for n in sizes))
        for sizes in [(3, 9), (17, 4), (1, 1), (8, 30)]
    ]
    for text in texts:  # make some of the drafter's own choices true
        for i in range(1, len(text.output_ids), 2):
            seen = torch.tensor([text.prompt_ids + text.output_ids[:i]])
            text.output_ids[i] = int(draft.first_choices(draft(seen))[0, -1])
    expected = [
        [
            int(draft.first_choices(draft(torch.tensor([t.prompt_ids + t.output_ids[:i]])))[0, -1]) == t.output_ids[i]
            for i in range(1, len(t.output_ids))
        ]
        for t in texts
    ]
    assert training.matches(draft, texts, tokens_per_pass=40) == expected
    assert sum(map(sum, expected)) >= 20


# ------------------------------------------------------------------------------------------------------- lock step


def test_rows_in_lock_step_decode_as_each_alone(target, reference):
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(256, (n,), generator=generator).tolist() for n in (1, 2, 23, 7, 7, 40)]
    stops = target.eos_token_ids()
    together = greedy_texts(target, prompts, max_tokens=20)
    assert together == [alone(reference, p, 20, stops) for p in prompts]
    assert min(map(len, together)) < 20 and max(map(len, together)) == 20


def test_corpus_keeps_what_the_target_would_say(corpus, reference):
    """Also proves that a row which begins its next document sees nothing of the last one."""
    lengths = corpus.offsets.diff()
    assert lengths.min() < 40 and lengths.max() == 80 and corpus.documents == 80
    greedy_answers = 0
    for document in range(corpus.documents):
        places = slice(int(corpus.offsets[document]), int(corpus.offsets[document + 1]))
        tokens, kinds = corpus.tokens[places].long(), corpus.kinds[places]
        with torch.inference_mode():
            truth = reference(tokens[None]).logits[0].log_softmax(-1)
        recorded = (kinds[1:] != FORCED).nonzero()[:, 0]
        ids, logprobs = corpus.top_ids[places][recorded].long(), corpus.top_logprobs[places][recorded].float()
        torch.testing.assert_close(truth[recorded].gather(1, ids), logprobs, atol=5e-3, rtol=2e-3)
        assert torch.equal(truth[recorded].topk(1).indices[:, 0], ids[:, 0])
        if corpus.temperatures[document] == 0:
            said = (kinds[1:] == ANSWER).nonzero()[:, 0]
            assert torch.equal(corpus.top_ids[places][said, 0].long(), tokens[1:][said])
            greedy_answers += len(said)
    assert greedy_answers > 200


def test_corpus_follows_the_chat_template(corpus, target):
    template = Template.of(load_tokenizer(target))
    stops = {*target.eos_token_ids(), template.to_answer[0]}
    chats = follow_ups = 0
    for document in range(corpus.documents):
        places = slice(int(corpus.offsets[document]), int(corpus.offsets[document + 1]))
        tokens, kinds = corpus.tokens[places].tolist(), corpus.kinds[places].tolist()
        if tokens[: len(template.head)] != template.head:
            continue
        chats += 1
        at = 0
        for kind, group in itertools.groupby(kinds):
            n = len(list(group))
            piece, at = tokens[at : at + n], at + n
            if kind == USER and at < len(tokens):
                assert piece[-1] == template.to_answer[0]
                assert tokens[at : at + len(template.to_answer) - 1] == template.to_answer[1:][: len(tokens) - at]
            if kind == ANSWER:
                assert not stops & set(piece[:-1])
                if at < len(tokens):
                    assert piece[-1] in stops
                    assert tokens[at : at + len(template.to_user)] == template.to_user[: len(tokens) - at]
                    follow_ups += 1
    assert chats > 50 and follow_ups > 5


def test_same_seed_same_corpus_and_files_round_trip(target, tmp_path):
    settings = CorpusSettings(rows=4, length=64)

    def write(seed):
        return generate_corpus(target, settings, documents=6, seed=seed, say=lambda line: None)

    first = write(5)
    first.save(tmp_path / "corpus.safetensors")
    again = Corpus.load(tmp_path / "corpus.safetensors")
    assert torch.equal(first.tokens, write(5).tokens) and torch.equal(first.top_logprobs, again.top_logprobs)
    assert not torch.equal(first.tokens[:200], write(6).tokens[:200])


def test_time_limit_keeps_what_is_written(target, monkeypatch):
    settings = CorpusSettings(rows=30, length=96, complete_share=0.0, plain_share=0.0)
    moments = iter([0.0, 0.5, 0.5, 1.5, 1.5])  # the clock is read before and after every 16 tokens per row
    monkeypatch.setattr(corpus_module.time, "monotonic", lambda: next(moments))
    found = generate_corpus(target, settings, seconds=1.0, seed=0, say=lambda line: None)
    assert found.documents == 30 and set(found.offsets.diff().tolist()) == {17}
    with pytest.raises(OptionError, match="exactly one"):
        generate_corpus(target, settings, seconds=1, documents=1)


def test_openers_may_be_short_and_of_one_kind(target):
    """The demonstration on a CPU: answers begin soon, so a busy machine has some too when the time is up."""
    settings, _, options = training.recipe(["draft"], "cpu", 60.0)
    assert options["draft"]["seconds"] == 30.0 and settings.is_distinct
    writer = corpus_module._Writer(target, dataclasses.replace(settings, rows=1), None, "cpu", torch.float32, 0)
    openers = list(iter(writer._opener, None))  # until none is left
    assert {(o.category, o.is_complete, o.is_chat) for o in openers} == {(c, True, True) for c in settings.categories}
    assert max(len(o.text) for o in openers) <= settings.max_opener < 200
    assert len({o.source for o in openers}) == len(openers) > 60
    assert writer._draw(3) == []
    writer.settings = dataclasses.replace(settings, max_opener=1)
    writer.taken.clear()
    with pytest.raises(OptionError, match="at most 1 characters.*raise max_opener"):
        writer._opener()


def test_a_request_that_is_too_long_is_cut_before_the_template_goes_on(target):
    settings = CorpusSettings(rows=1, length=400, complete_share=1.0, plain_share=0.0)
    writer = corpus_module._Writer(target, settings, None, "cpu", torch.float32, 0)
    begun = [beginning.ids for beginning in writer._draw(40)]
    assert all(ids[-len(writer.template.to_answer) :] == writer.template.to_answer for ids in begun)
    assert max(map(len, begun)) == 200 > min(map(len, begun))


def test_a_corpus_of_distinct_openers_ends_with_them(target):
    settings = CorpusSettings(rows=8, length=80, complete_share=1.0, plain_share=1.0, is_distinct=True)
    found = generate_corpus(target, settings, documents=100, say=lambda line: None)
    assert found.documents == len(PLAIN)


class Steps:
    """A clock for steps that take `seconds[number of threads]`."""

    def __init__(self, seconds):
        self.seconds, self.now = seconds, 0.0

    def __call__(self):
        self.now += self.seconds[torch.get_num_threads()]
        return self.now


@pytest.mark.parametrize(("one", "all_of_them", "kept"), [(0.1, 3.0, 1), (0.2, 0.1, 4), (0.1, 0.12, 1)])
def test_a_loop_keeps_the_number_of_threads_that_is_faster(one, all_of_them, kept):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with corpus_module.Threads(is_tried=True, clock=Steps({1: one, 4: all_of_them})) as threads:
            used = []
            for _ in range(12):
                threads.before_step()
                used.append(torch.get_num_threads())
        assert set(used[6:]) == {kept} and torch.get_num_threads() == 4
        assert used.count(4) <= 1 or all_of_them < 1.5 * one  # one bad step is enough
        with corpus_module.Threads(is_tried=False) as threads:
            threads.before_step()
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_largest_equals_topk():
    logits = torch.randn(7, 64 * 80)
    values, ids = corpus_module._largest(logits, 64)
    expected = logits.topk(64)
    assert torch.equal(values, expected.values) and torch.equal(ids, expected.indices)


def test_draws_follow_temperature_and_top_p():
    values = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(60_000, 1)
    temperature = torch.full((60_000,), 0.5)
    temperature[:100] = 0
    generator = torch.Generator().manual_seed(0)
    drawn = corpus_module._draw(values, temperature, 0.95, generator)
    assert (drawn[:100] == 0).all()
    p = F.softmax(torch.tensor([4.0, 2.0, 0.0, -2.0]), 0)  # 0.865 0.117 0.016 0.002: two reach 0.95
    counts = torch.bincount(drawn[100:], minlength=4) / (60_000 - 100)
    torch.testing.assert_close(counts, torch.stack([p[0], p[1], p[2] * 0, p[3] * 0]) / (p[0] + p[1]), atol=6e-3, rtol=0)


# ---------------------------------------------------------------------------------------------------------- openers


CATEGORIES = {*STARTS} - {"open"}
SLOT = re.compile(r"\{(\w+)\}")


def test_openers_are_filled_varied_and_not_the_bundled_prompts():
    rng = random.Random(0)
    drawn = [draw_opener(rng, complete_share=0.6) for _ in range(4000)]
    assert not any(SLOT.search(o.text) for o in drawn)
    assert {o.category for o in drawn} == {*STARTS, "plain"}
    complete = [o for o in drawn if o.is_complete and o.is_chat]
    assert {o.category for o in complete} == CATEGORIES
    assert len({o.text for o in complete}) > 0.75 * len(complete)
    words = [len(o.text.split()) for o in complete]
    assert 40 < sum(words) / len(words) < 110 and max(words) < 260
    bundled = [turn.lower() for prompt in load_prompts() for turn in prompt.turns]
    table = tables()
    written = [text for texts in table.requests.values() for text in texts]
    written += [text for given in table.given.values() for entry in given for text in (entry["text"], *entry["asks"])]
    for text in (*written, *PLAIN, *(o.text for o in drawn)):
        text = text.lower().strip()
        if len(text) > 40:
            assert not any(text in turn or (len(turn) > 20 and turn in text) for turn in bundled), text


def test_every_category_has_enough_openers_and_every_slot_a_filler():
    table = tables()
    assert set(table.categories) == CATEGORIES
    for category in CATEGORIES:
        given = table.given.get(category, [])
        combined = len(given) * len(table.instructions.get(category, []))
        assert combined >= 200 or len(set(table.requests[category])) >= 45, category
        if given:
            assert len({entry["text"] for entry in given}) == len(given) >= 20
            assert all(70 <= len(entry["text"].split()) <= 190 for entry in given)
            assert all("{text}" in instruction for instruction in table.instructions[category])
            assert all(entry["asks"] for entry in given) or "{ask}" not in "".join(table.instructions[category])
    texts = [*PLAIN, *(text for pool in (STARTS, table.requests) for texts in pool.values() for text in texts)]
    texts += [text for words in table.fillers.values() for text in words]
    texts += [text for given in table.given.values() for entry in given for text in (entry["text"], *entry["asks"])]
    assert {slot.lower() for text in texts for slot in SLOT.findall(text)} <= {*table.fillers}
    for name in ("name", "surname", "place", "topic", "thing", "task", "person", "job", "animal", "food"):
        assert len(set(table.fillers[name])) >= 60, name


# --------------------------------------------------------------------------------------------------------- training


def test_shortlist_is_what_the_target_ranks_first_most_often():
    kinds = torch.tensor([FORCED, ANSWER, ANSWER, USER, ANSWER, ANSWER], dtype=torch.uint8)
    first = torch.tensor([7, 7, 4, 2, 9, 0], dtype=torch.int32)  # for the token after; the last one has none
    part = Corpus(
        tokens=torch.zeros(6, dtype=torch.int32),
        kinds=kinds,
        top_ids=first[:, None].repeat(1, 16),
        top_logprobs=torch.zeros(6, 16, dtype=torch.float16),
        offsets=torch.tensor([0, 6]),
        temperatures=torch.zeros(1),
    )
    assert choose_shortlist(part, 12, 2, always=[11]).tolist() == [7, 11]
    counts = first_choices(part, 12)
    assert counts.tolist() == [0, 0, 1, 0, 0, 0, 0, 2, 0, 1, 0, 0]
    assert coverage(counts, torch.tensor([7, 11])) == 0.5


def test_loss_and_its_gradient_equal_plain_cross_entropy():
    torch.manual_seed(0)
    hidden, head = torch.randn(9000, 12, requires_grad=True), torch.randn(50, 12)
    labels = torch.stack([torch.randperm(50)[:16] for _ in range(9000)])
    probs = torch.rand(9000, 16).softmax(-1)
    dense = torch.zeros(9000, 50).scatter_add_(1, labels, probs)
    expected = F.cross_entropy(hidden @ head.T, dense)
    (wanted,) = torch.autograd.grad(3 * expected, hidden)
    found, first = distill.shortlist_loss(hidden, head, labels, probs)
    (gradient,) = torch.autograd.grad(3 * found / 9000, hidden)
    torch.testing.assert_close(found / 9000, expected)
    torch.testing.assert_close(gradient, wanted, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(first, (hidden @ head.T).softmax(-1).gather(1, labels[:, :1])[:, 0].detach())
    # weighted rows
    weights = torch.rand(9000)
    expected = (F.cross_entropy(hidden @ head.T, dense, reduction="none") * weights).sum()
    (wanted,) = torch.autograd.grad(expected, hidden)
    found, _ = distill.shortlist_loss(hidden, head, labels, probs, weights)
    (gradient,) = torch.autograd.grad(found, hidden)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-4)


def test_batches_pair_every_position_with_the_targets_next_choices(corpus):
    settings = TrainingSettings(init_layers=(0,), steps=1, tokens_per_step=512, user_share=1.0, hard_share=0.25)
    shortlist = choose_shortlist(corpus, 320, 200)
    examples = distill.Examples(corpus, shortlist, 320, 10, settings)
    seen = 0
    for batch in itertools.islice(examples.batches(), len(examples.groups)):
        tokens, where, probs = batch.tokens, batch.where, batch.probs
        assert tokens.numel() <= 512 or len(tokens) == 1
        torch.testing.assert_close(probs.sum(-1), torch.ones(len(where)))
        rows, at = where // tokens.shape[1], where % tokens.shape[1]
        assert (at + 1 < tokens.shape[1]).all() and (probs[:, 0] >= 0.25).all()
        seen += len(where)
        del rows
    first = corpus.top_ids[:-1, 0][corpus.kinds[1:] != FORCED].long()
    in_list = torch.isin(first, shortlist).float().mean().item()
    trainable = int((corpus.kinds != FORCED).sum()) * in_list
    assert 0.75 * trainable < seen <= trainable
    trained_on = torch.cat([documents for documents, _ in examples.groups]).tolist()
    assert sorted(trained_on + examples.held_out) == list(range(corpus.documents))


def test_draft_model_is_a_llama(target, reference):
    """All four layers of the target as a draft model give the target's own logits."""
    draft = training.new_draft_model(target, torch.arange(320), range(4))
    ids = torch.randint(256, (2, 30))
    with torch.inference_mode():
        torch.testing.assert_close(F.linear(draft(ids), draft.head), reference(ids).logits, atol=2e-4, rtol=1e-3)
    assert training.spread_layers(4, 30) == [0, 10, 19, 29] and training.spread_layers(1, 30) == [0]


@pytest.fixture(scope="module", params=["muon", "adamw"])
def trained(request, target, corpus):
    settings = TrainingSettings(
        init_layers=(0, 3), shortlist_size=256, steps=40, tokens_per_step=512, optimizer=request.param, held_out=12
    )
    return training.train_draft_model(target, corpus, settings, say=lambda line: None)


def test_training_lowers_the_loss_and_raises_acceptance(trained):
    losses = [point["loss"] for point in trained.curve if point["loss"] is not None]
    assert trained.steps == 40 and losses[-1] < 0.8 * losses[0]
    assert trained.curve[-1]["agreement"] > trained.curve[0]["agreement"] + 0.05
    assert [point["step"] for point in trained.curve][-1] == 40
    assert trained.curve[-1]["acceptance_length"] > trained.curve[0]["acceptance_length"]


def test_a_corpus_without_answers_is_refused(target, corpus):
    silent = dataclasses.replace(corpus, kinds=corpus.kinds.clamp(max=USER))
    with pytest.raises(OptionError, match="no answer yet.*more time"):
        training.train_draft_model(target, silent, TrainingSettings(init_layers=(0,), steps=1))


def test_embeddings_and_head_stay_the_targets(trained, target):
    tensors = target.tensors("cpu", torch.float32)
    assert torch.equal(trained.draft.embed, tensors["model.embed_tokens.weight"])
    assert torch.equal(trained.draft.head, tensors["lm_head.weight"][trained.draft.shortlist])


def test_what_is_shipped_loads_as_it_was_measured(trained, target, corpus, tmp_path):
    from transformers import AutoModelForCausalLM

    texts = {"held out": training.held_out_texts(corpus, trained.held_out)}
    card = training.make_and_export(
        target, corpus, CorpusSettings(), 1.0, trained, texts, ["python", "x"], tmp_path / "d", say=lambda line: None
    )
    loaded = training.load_draft(tmp_path / "d", target)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, dict(trained.draft.named_parameters())[name], atol=1e-6, rtol=0)
    assert training.evaluate(loaded, texts["held out"]) == card["evaluation"]["held out"]
    # the way the package completes it, read by transformers
    folder = tmp_path / "target"
    folder.mkdir()
    save_file(
        {k: v.clone() for k, v in target.tensors("cpu", torch.float32).items()}, str(folder / "model.safetensors")
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    (tmp_path / "whole").mkdir()
    complete_draft(tmp_path / "d", folder, tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    ids = torch.randint(256, (1, 20))
    with torch.inference_mode():
        logits = model(ids).logits[0][:, loaded.shortlist]
        torch.testing.assert_close(logits, F.linear(loaded(ids)[0], loaded.head), atol=2e-4, rtol=1e-3)
    stored = json.loads((tmp_path / "d" / "card.json").read_text())
    assert stored["weights_bytes"] == (tmp_path / "d" / "model.safetensors").stat().st_size
    assert "acceptance length **" in (tmp_path / "d" / "CARD.md").read_text()


def test_int8_keeps_every_weight_within_half_a_step():
    weight = torch.randn(5, 40)
    weight[2] = 0
    rounded, scale = distill.to_int8(weight)
    assert rounded.dtype == torch.int8 and scale.shape == (5,)
    assert ((rounded * scale[:, None] - weight).abs() <= scale[:, None] / 2 + 1e-7).all()


def test_two_turn_prompts_are_answered_in_turn(target):
    prompts = [Prompt("1", "chat", ("hello", "and then")), Prompt("2", "code", ("sort",))]
    texts = training.bundled_texts(target, prompts, max_tokens=5)
    assert [t.category for t in texts] == ["chat", "code", "chat"]
    tokenizer = load_tokenizer(target)
    assert tokenizer.decode(texts[0].output_ids, skip_special_tokens=True) in tokenizer.decode(texts[2].prompt_ids)
    assert all(1 <= len(t.output_ids) <= 5 for t in texts)


# ------------------------------------------------------------------------------------------- command line and package


def test_command_line_trains_and_refuses(tmp_path):
    def run(*options):
        command = [sys.executable, "-m", "tutorial_lib.drafters.training", "--target", TINY, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run("--minutes", "0.15", "--out", str(tmp_path / "draft"), "--shortlist", "128")
    assert done.returncode == 0, done.stderr
    assert "held-out answers" in done.stdout and (tmp_path / "draft" / "CARD.md").is_file()
    card = json.loads((tmp_path / "draft" / "card.json").read_text())
    assert card["shortlist"]["size"] == 128 and str(tmp_path) not in json.dumps(card)
    refused = run("--minutes", "0", "--out", str(tmp_path / "x"))
    assert refused.returncode == 2 and refused.stderr.startswith("error: minutes is 0") and not refused.stdout
    on, out = ("--go-on-from", str(tmp_path / "draft")), str(tmp_path / "more")
    done = run("--minutes", "0.15", "--out", out, "--shortlist", "160", *on)
    assert done.returncode == 0, done.stderr
    more = json.loads((tmp_path / "more" / "card.json").read_text())
    assert more["before"]["steps"] == card["training"]["steps"] and more["shortlist"]["size"] == 160
    assert more["training"]["curve"][0]["agreement"] > card["training"]["curve"][0]["agreement"]  # not from the start
    assert (
        str(tmp_path) not in json.dumps(more)
        and "started from an earlier run (" in (tmp_path / "more" / "CARD.md").read_text()
    )
    refused = run("--minutes", "1", "--kind", "medusa", "--out", str(tmp_path / "x"), *on)
    assert refused.returncode == 2 and "holds draft, and what is trained is medusa" in refused.stderr
    refused = run("--minutes", "1", "--out", str(tmp_path / "x"), "--go-on-from", str(tmp_path))
    assert refused.returncode == 2 and "holds no card.json" in refused.stderr


def test_shipped_drafter_is_small_complete_and_good_enough():
    card = json.loads((SHIPPED_DRAFT / "card.json").read_text())
    tensors = load_file(str(SHIPPED_DRAFT / "model.safetensors"))
    config = json.loads((SHIPPED_DRAFT / "config.json").read_text())
    assert sum(path.stat().st_size for path in SHIPPED_DRAFT.iterdir()) <= 15_000_000
    assert not any("embed_tokens" in name or "lm_head" in name for name in tensors)
    assert len([n for n in tensors if n.endswith("q_proj.weight")]) == config["num_hidden_layers"] == card["layers"]
    vocab = tensors["draft_vocab"]
    assert vocab.dtype == torch.int32 and (vocab.diff() > 0).all() and len(vocab) == card["shortlist"]["size"]
    assert card["target_model"] == "SmolLM2-135M-Instruct" and card["license"] == "Apache-2.0"
    measured = card["evaluation"]["bundled prompts"]
    assert measured["max_draft_len"] == 4 and measured["acceptance_length"] >= 2.2
    assert abs(measured["acceptance_length"] - card["before_int8"]["bundled prompts"]) < 0.03


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "x"}, "device is 'x'"),
        ({"layers": -1}, "layers is -1"),
        ({"shortlist": -5}, "shortlist is -5"),
        ({"intermediate": -1}, "intermediate is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"out": Path(__file__)}, "is not a folder"),
    ],
    ids=str,
)
def test_options_are_checked_before_the_corpus_takes_its_time(tmp_path, monkeypatch, options, words):
    monkeypatch.setattr(training, "resolve", None)  # nothing is opened
    with pytest.raises(OptionError, match=words):
        training.main(**{"out": tmp_path / "x", **options})
