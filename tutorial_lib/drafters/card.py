"""The card of a trained drafter: everything one would ask about the weights, as JSON and as a page to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..bench.prompts import load_prompts, prompt_set_sha256
from ..models import Checkpoint
from ..results import provenance
from .corpus import Corpus, CorpusSettings, choose_shortlist, coverage, first_choices
from .openers import PLAIN, REQUESTS, STARTS

if TYPE_CHECKING:
    from .training import Trained

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
    """What `training.export` writes as card.json. `evaluation`: figures by the name of the texts they were taken on."""
    vocab_size, settings = target.config["vocab_size"], trained.settings
    counts, shortlist = first_choices(corpus, vocab_size), trained.draft.shortlist
    by_size = {n: choose_shortlist(corpus, vocab_size, n) for n in SHORTLISTS if n < vocab_size}
    origin = provenance(command, settings.seed)
    gpus = [gpu["name"] for gpu in origin["hardware"]["gpus"]]
    return {
        "target": target.name,
        "target_model": "SmolLM2-135M-Instruct" if target.name == "embedded:target" else target.name,
        "target_fingerprint": target.fingerprint(),
        "layers": len(settings.init_layers),
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
            "openers": sum(len(texts) for pool in (STARTS, REQUESTS) for texts in pool.values()) + len(PLAIN),
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


def _head(card: Mapping[str, Any]) -> list[str]:
    shortlist = card["shortlist"]
    return [
        f"# Draft model for {card['target']}",
        "",
        f"A Llama of {card['layers']} layers that proposes tokens to {card['target_model']} in speculative decoding.",
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
    return [*lines, "| acceptance length | " + " | ".join(f"{value:.2f}" for value in by_k.values()) + " |"]


def _making(card: Mapping[str, Any]) -> list[str]:
    data, training, shortlist = card["data"], card["training"], card["shortlist"]
    settings = training["settings"]
    before = ", ".join(f"{name} {value:.3f}" for name, value in card["before_int8"].items())
    after = ", ".join(f"{name} {found['acceptance_length']:.3f}" for name, found in card["evaluation"].items())
    sizes = ", ".join(f"{size}: {share:.1%}" for size, share in shortlist["coverage_by_size"].items())
    layers, hard = ", ".join(map(str, settings["init_layers"])), settings["hard_share"]
    aim = "the target's first choice"
    if hard < 1:
        aim = f"a mixture of the target's first choice ({hard:.0%}) and its distribution over its 16 most likely tokens"
    return [
        "",
        "## How it was made",
        "",
        f"- Data: {data['tokens']:,} tokens in {data['documents']:,} documents, of which {data['answer_tokens']:,} are",
        f"  answers ({data['greedy_documents']:,} documents are answered greedily), written by the target itself",
        f"  from {data['openers']} beginnings (`drafters/openers.py`) in {data['seconds']:.0f} s. The bundled prompts",
        "  are not among them, and there is no text from anywhere else.",
        f"- Training: {training['steps']:,} steps of at most {settings['tokens_per_step']:,} tokens in",
        f"  {training['seconds']:.0f} s (about {training['passes']:.1f} passes), {settings['optimizer']}, learning",
        f"  rate {settings['learning_rate']:g}, started from layers {layers} of the target. Cross-entropy",
        f"  against {aim}.",
        "- Shortlist: the tokens that the target most often ranks first in answers; it covers",
        f"  {shortlist['coverage']:.1%} of them ({sizes}).",
        f"- Stored as int8 with one float32 scale per row: {card['weights_bytes']:,} bytes. Acceptance length before",
        f"  rounding: {before}; after: {after}.",
        f"- Machine: {card['machine']}. Seed: {settings['seed']}. Made by: `{card['provenance']['command']}`.",
    ]


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
