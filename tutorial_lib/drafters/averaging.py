"""The mean of finished drafters: no training, sometimes a better drafter than each; the card tells whether.

Runs that go on from one another end near each other, each a little off in its own direction, because each saw its own
text. In between there may be a point that errs less than both ("model soup": Wortsman et al. 2022, arXiv 2203.05482).
It can work only where the runs are of one family: same kind, same shapes, same target.

The shortlist may be wider than that of any of the runs: the rows of a drafter's head belong to the target, so a longer
list needs no training. It costs reading its rows at every draft step.

The target writes a little new text first, half to choose a tree on, half to measure the runs and their mean on:
`python -m tutorial_lib.drafters.averaging --folder RUN_1 --folder RUN_2 --shortlist 24576 --out DIR`. In a training,
`--average` (see `training.py`) takes the mean with the run gone on from if held-out answers are the better for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..errors import OptionError
from ..models import Checkpoint, resolve
from ..results import provenance
from .acceptance import Text, bundled_texts, held_out_texts
from .card import card_text
from .corpus import CorpusSettings, Say, coverage, first_choices, generate_corpus, widened
from .distill import mean_weights, round_weights, write_json, write_student
from .train_heads import load_heads
from .training import load_draft, made, read_card, run_command, whole_head

# documents of distinct openers, short enough for two cores: complete requests are answered, half of them without turns
WRITING = CorpusSettings(rows=64, length=384, greedy_share=1.0, complete_share=0.5, is_distinct=True)


def mean_of(folders: Sequence[str | Path], target: Checkpoint, size: int | None = None) -> tuple[Any, dict[str, Any]]:
    """The mean of the drafters in `folders`, the latest last, and what a card says of where its shortlist is from.

    size: ids of the shortlist, at least as many as the last run's, whose ids come first, then those that only others
    have, then the rest in the order of their number. Errors: fewer than two folders, and those that do not fit.
    """
    if len(folders) < 2:
        raise OptionError(f"{len(folders)} folders are given", "two or more to take the mean of", "repeat --folder")
    students = [_load(folder, target) for folder in folders]
    student = students[-1]
    for folder, other in zip(folders, students, strict=True):
        if _family(other) != _family(student):
            raise OptionError(
                f"{Path(folder).name!r} and {Path(folders[-1]).name!r} differ in kind or shapes",
                "runs of one family, which share layers, sizes and the hidden states that they read",
            )
    student.load_state_dict(mean_weights([other.state_dict() for other in students]))
    own, vocab_size = student.shortlist, target.config["vocab_size"]
    size = len(own) if size is None else size
    if not len(own) <= size <= vocab_size:
        raise OptionError(
            f"a shortlist of {size:,} is asked for", f"{len(own):,}, as the last run has it, to {vocab_size:,}"
        )
    every = torch.cat([other.shortlist for other in students]).unique()
    others = every[~torch.isin(every, own)][: size - len(own)]
    shortlist = widened(torch.cat([own, others]), size, vocab_size)
    if student.kind == "draft":
        student.cover(shortlist, whole_head(target, target.tensors("cpu", torch.float32)))
    else:
        student.cover(shortlist, student.see.model.head)
    found = {"size": size, "of": vocab_size, "of_last_run": len(own), "of_other_runs": len(others)}
    return student, {**found, "by_number": size - len(own) - len(others)}


def _load(folder: str | Path, target: Checkpoint) -> Any:
    """The student in a folder, if it was trained for `target`."""
    card = read_card(folder)
    if card["target_fingerprint"] != target.fingerprint():
        raise OptionError(
            f"{Path(folder).name!r} was trained for {card['target']}, with other weights than {target.name} has",
            "drafters of one target",
            "name theirs with --target",
        )
    return load_draft(folder, target) if card["kind"] == "draft" else load_heads(folder, target)


def _family(student: Any) -> tuple[Any, ...]:
    """What must be alike for a mean to mean anything."""
    shapes = {name: tuple(weight.shape) for name, weight in student.state_dict().items()}
    return student.kind, shapes, student.see.layers if student.kind == "eagle3" else ()


def export_mean(
    folders: Sequence[str | Path],
    target: Checkpoint,
    out: Path,
    *,
    size: int | None = None,
    documents: int = 64,
    seed: int = 0,
    bundled: Sequence[Text] = (),
    note: str = "",
    command: Sequence[str] = (),
    say: Say = print,
) -> dict[str, Any]:
    """`mean_of`, measured, rounded, measured again and written to `out` with its card, which is returned.

    documents: of text that the target writes now. bundled: its answers to the bundled prompts, to measure on (none:
    they are left out). note: what the card should say of how the runs, the mean and the shortlist were chosen.
    """
    student, shortlist = mean_of(folders, target, size)
    corpus = generate_corpus(target, WRITING, documents=documents, seed=seed, say=say)
    places = range(corpus.documents)
    texts = {"bundled prompts": list(bundled), "held-out answers": held_out_texts(corpus, places[1::2])}
    texts = {name: found for name, found in texts.items() if found}
    if hasattr(student, "choose_tree"):
        student.choose_tree(held_out_texts(corpus, places[::2]))
    exact = {name: student.evaluate(found) for name, found in texts.items()}
    round_weights(student)
    stored = {name: student.evaluate(found) for name, found in texts.items()}
    for name, found in stored.items():
        say(f"mean, {name}: {json.dumps(found)} (before rounding to int8: {exact[name]['acceptance_length']})")
    # of the runs, again on the new text, with the shortlists that they have
    runs = []
    for folder in folders:
        card = read_card(folder)
        held_out = _load(folder, target).evaluate(texts["held-out answers"])["acceptance_length"]
        own = {"measured_on": next(iter(card["evaluation"])), "seed": card["training"]["settings"]["seed"]}
        runs.append({**made(card), **own, "held_out": held_out})
        say(f"run of {runs[-1]['steps']:,} steps, held-out answers: {held_out}")
    card = _mean_card(read_card(folders[-1]), student, stored, runs, provenance(command, seed))
    counts = first_choices(corpus, target.config["vocab_size"])
    card["shortlist"] |= {**shortlist, "coverage": round(coverage(counts, student.shortlist), 4)}
    card["new_text"] = {**corpus.summary(), "seed": seed, "settings": asdict(WRITING)}
    card["before_int8"] = {name: found["acceptance_length"] for name, found in exact.items()}
    card["note"] = note
    card["weights_bytes"] = write_student(student, out)
    write_json(out / "card.json", card)
    (out / "CARD.md").write_text(card_text(card), encoding="utf-8")
    return card


def _mean_card(
    last: Mapping[str, Any],
    student: Any,
    evaluation: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """The card of the last run, which tells of data and training, with what is the mean's own put in its place."""
    kept = {name: value for name, value in last.items() if name not in ("comparisons", "comparisons_note", "average")}
    facts = {name: value for name, value in student.facts.items() if name.startswith("tree")}
    return {
        **kept,
        **facts,
        "mean_of": list(runs),
        "evaluation": dict(evaluation),
        "shortlist": dict(last["shortlist"]),
        "last_run": last["provenance"],
        "provenance": dict(origin),
    }


def main(
    folder: Annotated[list[Path], typer.Option(help="a finished drafter; two or more, the latest last")],
    out: Annotated[Path, typer.Option(help="folder for the mean and its card")],
    target: Annotated[str, typer.Option(help="the checkpoint that they draft for")] = "embedded:target",
    shortlist: Annotated[int, typer.Option(help="ids that it may propose; 0: as many as the last run's")] = 0,
    documents: Annotated[int, typer.Option(help="to write for the tree and for measuring; 4 at least")] = 64,
    prompts: Annotated[bool, typer.Option(help="measure on the bundled prompts too (minutes on a CPU)")] = False,
    note: Annotated[str, typer.Option(help="for the card: how runs and shortlist were chosen")] = "",
    seed: Annotated[int, typer.Option(help="of the new text")] = 0,
) -> None:
    """Take the mean of finished drafters, measure it, write it down."""
    if documents < 4:
        raise OptionError(f"documents is {documents}", "4 at least", "set --documents, for example to 64")
    if out.exists() and not out.is_dir():
        raise OptionError(f"{out.name} is not a folder", "one, or a name that is free", "choose another --out")
    checkpoint = resolve(target)
    mean_of(folder, checkpoint, shortlist or None)  # what does not fit is found before minutes of work
    words = [word for word in sys.argv[1:] if not note or word not in ("--note", note)]
    export_mean(
        folder,
        checkpoint,
        out,
        size=shortlist or None,
        documents=documents,
        seed=seed,
        bundled=bundled_texts(checkpoint) if prompts else (),
        note=note,
        command=["python", "-m", "tutorial_lib.drafters.averaging", *words],
        say=partial(print, flush=True),
    )


if __name__ == "__main__":
    run_command(main)
