"""The card of a trained drafter: everything one would ask about the weights, as JSON and as a page to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..bench.prompts import load_prompts, prompt_set_sha256
from ..models import Checkpoint
from ..results import provenance
from .corpus import Corpus, CorpusSettings, choose_shortlist, coverage, first_choices
from .openers import count_openers

if TYPE_CHECKING:
    from .distill import Trained

SHORTLISTS = (4096, 8192, 12288, 16384)  # sizes whose coverage a card states


def make_card(
    target: Checkpoint,
    corpus: Corpus,
    corpus_settings: CorpusSettings,
    corpus_seconds: float,
    trained: Trained,
    evaluation: Mapping[str, Mapping[str, Any]],
    command: str | Sequence[str],
) -> dict[str, Any]:
    """What is written as card.json. `evaluation`: figures by the name of the texts they were taken on."""
    vocab_size, settings, student = target.config["vocab_size"], trained.settings, trained.draft
    counts, shortlist = first_choices(corpus, vocab_size), student.shortlist
    by_size = {n: choose_shortlist(corpus, vocab_size, n) for n in SHORTLISTS if n < vocab_size}
    origin = provenance(command, settings.seed)
    gpus = [gpu["name"] for gpu in origin["hardware"]["gpus"]]
    return {
        "kind": student.kind,
        "target": target.name,
        "target_model": "SmolLM2-135M-Instruct" if target.name == "embedded:target" else target.name,
        "target_fingerprint": target.fingerprint(),
        **student.facts,
        "license": "Apache-2.0",
        "evaluation": dict(evaluation),
        "bundled_prompts_sha256": prompt_set_sha256(load_prompts()),
        "shortlist": {
            "size": len(shortlist),
            "of": vocab_size,
            "coverage": round(coverage(counts, shortlist), 4),
            "coverage_by_size": {str(n): round(coverage(counts, ids), 4) for n, ids in by_size.items()},
        },
        "data": {
            **corpus.summary(),
            "seconds": round(corpus_seconds, 1),
            "openers": count_openers(),
            "settings": asdict(corpus_settings),
        },
        "training": {
            "steps": trained.steps,
            "seconds": round(trained.seconds, 1),
            "passes": round(trained.steps * settings.tokens_per_step / max(1, len(corpus.tokens)), 2),
            "settings": asdict(settings),
            "curve": trained.curve,
        },
        "machine": ", ".join(gpus) or origin["hardware"]["cpu"],
        "provenance": origin,
    }


def card_text(card: Mapping[str, Any]) -> str:
    """The card as a page (Markdown)."""
    return "\n".join([*_head(card), *_figures(card), *_making(card), *_curve(card), *_comparisons(card)]) + "\n"


_ABOUT = {
    "draft": (
        "Draft model",
        "A Llama of {layers} layers that proposes tokens to {target_model} in speculative decoding.",
    ),
    "medusa": (
        "Medusa heads",
        "{heads} heads of {blocks} residual blocks that propose the tokens behind the next one to {target_model}, all "
        "from its last hidden state (Cai et al. 2024, arXiv 2401.10774).",
    ),
    "eagle3": (
        "EAGLE-3 head",
        "One layer on three hidden states of {target_model} that proposes tokens to it in speculative decoding "
        "(Li et al. 2025, arXiv 2503.01840).",
    ),
}


def _head(card: Mapping[str, Any]) -> list[str]:
    shortlist, (title, about) = card["shortlist"], _ABOUT[card["kind"]]
    return [
        f"# {title} for {card['target']}",
        "",
        about.format(**card),
        "It shares the target's embeddings and output head, which are not stored here; its head covers",
        f"{shortlist['size']:,} of the target's {shortlist['of']:,} tokens. Alone it is of no use.",
        f"License: {card['license']}, as the target.",
    ]


def _figures(card: Mapping[str, Any]) -> list[str]:
    lines = ["", "## What it reaches", ""]
    lines += ["Greedy. Acceptance length: tokens emitted per round, bonus token included, over all rounds.", ""]
    for name, found in card["evaluation"].items():
        positions = ", ".join(f"{share:.2f}" for share in found["acceptance_by_position"])
        lines += [
            f"- {name} ({found['texts']} texts, {found['output_tokens']:,} output tokens): acceptance length"
            f" **{found['acceptance_length']:.2f}** at K = {found['max_draft_len']}; accepted by position {positions};",
            f"  agreement with the target per token {found['agreement']:.3f}.",
        ]
    name, main = next(iter(card["evaluation"].items()))
    lines += ["", f"| {name}, category | acceptance length at K = {main['max_draft_len']} |", "|---|---|"]
    lines += [f"| {category.replace('_', ' ')} | {value:.2f} |" for category, value in main["by_category"].items()]
    by_k = main["acceptance_length_by_max_draft_len"]
    lines += ["", "| K | " + " | ".join(by_k) + " |", "|---|" + "---|" * len(by_k)]
    lines += ["| acceptance length | " + " | ".join(f"{value:.2f}" for value in by_k.values()) + " |"]
    return lines + _trees(card) + _ranks(main)


def _trees(card: Mapping[str, Any]) -> list[str]:
    rows = {
        name: found["acceptance_length_by_tree_nodes"]
        for name, found in card["evaluation"].items()
        if "acceptance_length_by_tree_nodes" in found
    }
    if not rows:
        return []
    sizes = list(next(iter(rows.values())))
    where = "text written for it" if "new_text" in card else "the training text"
    lines = ["", f"Fixed trees, chosen on {card['tree_texts']} answers of {where}:", ""]
    lines += ["| nodes | " + " | ".join(sizes) + " |", "|---|" + "---|" * len(sizes)]
    return lines + [
        f"| {name} | " + " | ".join(f"{found[n]:.2f}" for n in sizes) + " |" for name, found in rows.items()
    ]


def _ranks(found: Mapping[str, Any]) -> list[str]:
    if "rank_shares" not in found:
        return []
    lines = ["", "How often the right token is the first, second, third choice, whatever was drafted before:", ""]
    lines += ["| draft position | first | second | third |", "|---|---|---|---|"]
    for place, shares in enumerate(found["rank_shares"], 1):
        lines.append(f"| {place} | " + " | ".join(f"{share:.3f}" for share in shares[:3]) + " |")
    return lines


def _making(card: Mapping[str, Any]) -> list[str]:
    data, training = card["data"], card["training"]
    settings = training["settings"]
    before = ", ".join(f"{name} {value:.3f}" for name, value in card["before_int8"].items())
    after = ", ".join(f"{name} {found['acceptance_length']:.3f}" for name, found in card["evaluation"].items())
    hard = settings["hard_share"]
    aim = "the target's first choice"
    if hard < 1:
        aim = f"a mixture of the target's first choice ({hard:.0%}) and its distribution over its 16 most likely tokens"
    return [
        "",
        "## How it was made",
        "",
        *_mean(card),
        f"- Data: {data['tokens']:,} tokens in {data['documents']:,} documents, of which {data['answer_tokens']:,} are",
        f"  answers ({data['greedy_documents']:,} documents are answered greedily), written by the target itself",
        f"  from {data['openers']} beginnings (`drafters/openers.py`) in {data['seconds']:.0f} s. The bundled prompts",
        "  are not among them, and there is no text from anywhere else.",
        f"- Training: {training['steps']:,} steps of at most {settings['tokens_per_step']:,} tokens in",
        f"  {training['seconds']:.0f} s (about {training['passes']:.1f} passes), {settings['optimizer']}, learning",
        f"  rate {settings['learning_rate']:g}, {_start(card)}. Cross-entropy",
        f"  against {aim}.",
        *_average(card),
        *_shortlist(card),
        f"- Stored as int8 with one float32 scale per row: {card['weights_bytes']:,} bytes. Acceptance length before",
        f"  rounding: {before}; after: {after}.",
        f"- Machine: {card['machine']}. Seed: {settings['seed']}. Made by: `{card['provenance']['command']}`.",
    ]


def _mean(card: Mapping[str, Any]) -> list[str]:
    """Of a mean of finished runs: which, and how far each comes on the same text."""
    if "mean_of" not in card:
        return []
    new = card["new_text"]
    lines = [
        f"- The weights are the mean of those of {len(card['mean_of'])} finished runs (`drafters/averaging.py`);",
        "  nothing was trained after that. Acceptance length of each, with its own shortlist:",
    ]
    for run in card["mean_of"]:
        lines += [
            f"  - seed {run['seed']}, {run['steps']:,} steps in {run['seconds']:.0f} s:"
            f" {run['acceptance_length']:.3f} on its {run['measured_on']}, {run['held_out']:.3f} on the held-out"
            " answers of this card.",
        ]
    lines += [
        f"- New text: {new['tokens']:,} tokens in {new['documents']:,} documents (seed {new['seed']}), half of them",
        "  for the choice of trees, half for the held-out answers above; they begin as those of the training do.",
    ]
    if card.get("note"):
        lines += [f"- {card['note']}"]
    return [*lines, "- Data, training and curve below are those of the last run."]


def _average(card: Mapping[str, Any]) -> list[str]:
    """Of a training that tried the mean with the run it went on from."""
    if not (found := card.get("average")):
        return []
    kept = "the mean" if found["kept"] == "mean" else "the trained weights"
    return [
        "- Also tried: the mean of the weights gone on from and those trained. Acceptance length on held-out answers,",
        f"  by which one was kept: trained {found['trained']:.3f}, mean {found['mean']:.3f}; kept: {kept}.",
    ]


def _shortlist(card: Mapping[str, Any]) -> list[str]:
    shortlist = card["shortlist"]
    sizes = ", ".join(f"{size}: {share:.1%}" for size, share in shortlist["coverage_by_size"].items())
    if "mean_of" in card:
        return [
            f"- Shortlist: the {shortlist['of_last_run']:,} ids of the last run (the tokens that the target most often",
            f"  ranked first in its text; {sizes}), {shortlist['of_other_runs']:,} more of the other runs, and",
            f"  {shortlist['by_number']:,} in the order of their number. It covers {shortlist['coverage']:.1%} of the"
            " target's first choices in the new text.",
        ]
    trained = card["training"]["settings"]["shortlist_size"]
    wider = (
        f" Trained with {trained:,}; the others in the order of their number." if shortlist["size"] > trained else ""
    )
    return [
        "- Shortlist: the tokens that the target most often ranks first in answers; it covers",
        f"  {shortlist['coverage']:.1%} of them ({sizes}).{wider}",
    ]


def _start(card: Mapping[str, Any]) -> str:
    if card["kind"] == "medusa":
        return "started as copies of the target's own head"
    if before := card.get("before"):
        which = "a mean whose last run is an earlier one" if "mean_of" in before else "an earlier run"
        start = (
            f"{which} ({before['steps']:,} steps in {before['seconds']:.0f} s on other text, acceptance length"
            f" {before['acceptance_length']:.2f} then)"
        )
    elif card["kind"] == "eagle3":
        start = f"layer {card['init_layer']} of the target"
    else:
        start = f"layers {', '.join(map(str, card['training']['settings']['init_layers']))} of the target"
    return f"started from {start}" + (f", unrolled over {card['depth']} steps" if card["kind"] == "eagle3" else "")


def _curve(card: Mapping[str, Any]) -> list[str]:
    lines = ["", "| step | seconds | training loss | held-out agreement | held-out acceptance length |"]
    lines += ["|---|---|---|---|---|"]
    for point in card["training"]["curve"]:
        loss = "" if point["loss"] is None else f"{point['loss']:.3f}"
        lines += [
            f"| {point['step']} | {point['seconds']:.0f} | {loss} | {point['agreement']:.3f} | "
            f"{point['acceptance_length']:.2f} |"
        ]
    return lines


def _comparisons(card: Mapping[str, Any]) -> list[str]:
    """Runs that were compared before the shipped one, where a card lists them."""
    if not card.get("comparisons"):
        return []
    lines = ["", "## What was compared", "", card["comparisons_note"], ""]
    lines += ["| run | seconds | steps | held out | bundled prompts |", "|---|---|---|---|---|"]
    return lines + [
        f"| {run['name']} | {run['seconds']:.0f} | {run['steps']} | {run['held_out']:.2f} | {run['bundled']:.2f} |"
        for run in card["comparisons"]
    ]
