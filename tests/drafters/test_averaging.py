"""The mean of finished drafters: weights in the middle, a wider shortlist of the right ids, and refusals."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tiny_corpus import small_corpus, talkative_target

from tutorial_lib.drafters import averaging, distill, training
from tutorial_lib.drafters.acceptance import held_out_texts
from tutorial_lib.drafters.corpus import CorpusSettings, widened
from tutorial_lib.drafters.distill import TrainingSettings, average_if_better
from tutorial_lib.drafters.train_heads import load_heads, train_heads
from tutorial_lib.errors import OptionError


@pytest.fixture(scope="module")
def target():
    return talkative_target()


@pytest.fixture(scope="module")
def corpus(target):
    return small_corpus(target)


def settings(**options):
    return TrainingSettings(
        **{"shortlist_size": 200, "steps": 12, "tokens_per_step": 512, "learning_rate": 1e-2, "held_out": 12} | options
    )


def quiet(line):
    pass


def export(target, corpus, trained, out):
    texts = {"held-out answers": held_out_texts(corpus, trained.held_out)}
    training.make_and_export(target, corpus, CorpusSettings(), 1.0, trained, texts, ["x"], out, say=quiet)
    return out


@pytest.fixture(scope="module")
def runs(target, corpus, tmp_path_factory):
    """Folders: two EAGLE-3 runs, the second on from the first with fewer ids; one of another size; two draft models."""
    home = tmp_path_factory.mktemp("runs")
    first = train_heads(["eagle3"], target, corpus, settings(), depth=3, say=quiet)["eagle3"]
    export(target, corpus, first, home / "first")
    options = {"depth": 3, "say": quiet, "go_on_from": home / "first"}
    second = train_heads(["eagle3"], target, corpus, settings(shortlist_size=150, seed=1), **options)["eagle3"]
    export(target, corpus, second, home / "second")
    wide = train_heads(["eagle3"], target, corpus, settings(steps=1), depth=3, intermediate_size=48, say=quiet)
    export(target, corpus, wide["eagle3"], home / "narrow")
    for seed, name in enumerate(("draft", "draft_2")):
        one = training.train_draft_model(target, corpus, settings(init_layers=(0,), steps=3, seed=seed), say=quiet)
        export(target, corpus, one, home / name)
    return home


def test_ids_are_added_in_the_order_of_their_number():
    assert widened(torch.tensor([2, 5, 9]), 6, 12).tolist() == [0, 1, 2, 3, 5, 9]
    assert widened(torch.tensor([2, 5]), 1, 12).tolist() == [2, 5] and len(widened(torch.tensor([3]), 99, 12)) == 12


def test_mean_lies_in_the_middle_and_its_shortlist_begins_with_the_last_runs(runs, target):
    first, second = (load_heads(runs / name, target) for name in ("first", "second"))
    own, other = set(second.shortlist.tolist()), set(first.shortlist.tolist())
    mean, found = averaging.mean_of([runs / "first", runs / "second"], target)
    for (name, weight), a, b in zip(mean.named_parameters(), first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(weight, (a + b) / 2, msg=name)
    assert set(mean.shortlist.tolist()) == own and found["of_other_runs"] == found["by_number"] == 0
    more = len(own | other) + 20
    mean, found = averaging.mean_of([runs / "first", runs / "second"], target, more)
    ids = mean.shortlist.tolist()
    outside = sorted(set(range(320)) - own - other)
    assert ids == sorted(ids) and set(ids) == own | other | set(outside[:20]) and found["by_number"] == 20
    assert found["of_other_runs"] == len(other - own) > 0
    torch.testing.assert_close(mean.head, mean.see.model.head[mean.shortlist])
    assert torch.equal(mean.rank[mean.shortlist], torch.arange(more)) and (mean.rank >= 0).sum() == more


@pytest.mark.parametrize("names", [("first", "second"), ("draft", "draft_2")], ids=str)
def test_what_is_written_loads_as_it_was_measured_and_tells_of_the_runs(runs, target, tmp_path, names, monkeypatch):
    monkeypatch.setattr(averaging, "WRITING", CorpusSettings(rows=8, length=80, greedy_share=1.0, max_answer=30))
    folders = [runs / name for name in names]
    options = {"size": 310, "documents": 24, "seed": 3, "note": "Chosen by a coin.", "command": ["python", "x"]}
    card = averaging.export_mean(folders, target, tmp_path / "mean", say=quiet, **options)
    loaded = averaging._load(tmp_path / "mean", target)
    mean, _ = averaging.mean_of(folders, target, 310)
    distill.round_weights(mean)
    for weight, wanted in zip(loaded.parameters(), mean.parameters(), strict=True):
        torch.testing.assert_close(weight, wanted, atol=1e-6, rtol=0)
    assert loaded.shortlist.tolist() == mean.shortlist.tolist() and len(loaded.shortlist) == 310
    texts = held_out_texts(
        training.generate_corpus(target, averaging.WRITING, documents=24, seed=3, say=quiet), range(1, 24, 2)
    )
    measured = card["evaluation"]["held-out answers"]
    assert loaded.evaluate(texts, measured["max_draft_len"])["acceptance_length"] == measured["acceptance_length"]
    steps = [json.loads((folder / "card.json").read_text())["training"]["steps"] for folder in folders]
    assert [run["steps"] for run in card["mean_of"]] == steps and all(run["held_out"] >= 1 for run in card["mean_of"])
    assert card["shortlist"]["size"] == 310 and card["provenance"]["command"] == "python x" and card["last_run"]
    page = (tmp_path / "mean" / "CARD.md").read_text()
    assert "mean of those of 2 finished runs" in page and "Chosen by a coin." in page and "{" not in page
    assert json.loads((tmp_path / "mean" / "card.json").read_text()) == json.loads(json.dumps(card))
    if card["kind"] == "eagle3":
        assert loaded.tree == mean.tree or loaded.tree == [tuple(path) for path in card["tree"]]


@pytest.mark.parametrize(
    ("names", "size", "words"),
    [
        (("first",), None, "1 folders are given"),
        (("first", "narrow"), None, "differ in kind or shapes"),
        (("first", "draft"), None, "differ in kind or shapes"),
        (("first", "second"), 10, "a shortlist of 10"),
        (("first", "second"), 321, "a shortlist of 321"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(runs, target, names, size, words):
    with pytest.raises(OptionError, match=words):
        averaging.mean_of([runs / name for name in names], target, size)


def test_another_target_is_refused(runs, target):
    from tutorial_lib.models import resolve

    other = resolve(str(target.name).replace("seed=3", "seed=4"))
    assert other.fingerprint() != target.fingerprint()
    with pytest.raises(OptionError, match="was trained for"):
        averaging.mean_of([runs / "first", runs / "second"], other)


@pytest.mark.parametrize("better", ["mean", "trained"])
def test_a_training_keeps_the_mean_only_where_held_out_answers_are_the_better_for_it(runs, target, corpus, better):
    before, student = (load_heads(runs / name, target) for name in ("first", "second"))
    own = {name: weight.clone() for name, weight in student.state_dict().items()}
    trained = distill.Trained(student, settings(is_averaged=True), held_out=[0, 1, 2])
    middle = distill.mean_weights([before.state_dict(), own])

    def evaluate(texts, max_draft_len=None):
        assert texts == held_out_texts(corpus, [0, 1, 2])
        is_mean = torch.equal(student.fc.weight, middle["fc.weight"])
        return {"acceptance_length": 2.0 if is_mean == (better == "mean") else 1.5}

    student.evaluate = evaluate
    average_if_better(trained, before, corpus, quiet)
    wanted = middle if better == "mean" else own
    for name, weight in student.state_dict().items():
        torch.testing.assert_close(weight, wanted[name], msg=name)
    assert student.facts["average"]["kept"] == better


def test_averaged_and_widened_trainings_say_so(runs, target, corpus, tmp_path):
    again = settings(is_averaged=True, export_shortlist=250, steps=4)
    with pytest.raises(OptionError, match="no earlier run"):
        train_heads(["eagle3"], target, corpus, again, say=quiet)
    with pytest.raises(OptionError, match="no earlier run"):
        training.train_draft_model(target, corpus, again, say=quiet)
    found = [
        train_heads(["eagle3"], target, corpus, again, depth=3, go_on_from=runs / "first", say=quiet)["eagle3"],
        training.train_draft_model(target, corpus, again, go_on_from=runs / "draft", say=quiet),
    ]
    for one in found:
        page = (export(target, corpus, one, tmp_path / one.draft.kind) / "CARD.md").read_text()
        assert "Also tried: the mean" in page and "Trained with 200" in page
        assert len(one.draft.shortlist) == len(one.draft.head) == 250
        average = one.draft.facts["average"]
        assert average[average["kept"]] == max(average["trained"], average["mean"])


def test_options_that_do_not_fit_the_earlier_run_are_refused(runs, target, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "resolve", lambda name: dataclasses.replace(target))
    monkeypatch.setattr(training, "generate_corpus", None)  # nothing is written
    for options, words in (
        ({"kind": ["eagle3"], "go_on_from": [runs / "narrow"], "intermediate": 64}, "--intermediate is 64.*with 48"),
        ({"kind": ["draft"], "go_on_from": [runs / "draft"], "layers": 3}, "--layers is 3.*with 1"),
        ({"kind": ["eagle3"], "average": True}, "--average for eagle3 without an earlier run"),
        ({"export_shortlist": -1}, "export-shortlist is -1"),
    ):
        with pytest.raises(OptionError, match=words):
            training.main(out=tmp_path / "x", **options)


def test_command_line_checks_before_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(averaging, "resolve", None)
    with pytest.raises(OptionError, match="documents is 3"):
        averaging.main(folder=[], out=tmp_path / "x", documents=3)
    with pytest.raises(OptionError, match="is not a folder"):
        (tmp_path / "file").write_text("")
        averaging.main(folder=[], out=tmp_path / "file")
