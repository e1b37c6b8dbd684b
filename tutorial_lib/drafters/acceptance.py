"""How far drafts would be accepted, without decoding: speculation played over texts that the target wrote.

Greedy speculation gives the target's own greedy text whatever the drafter does, so that text can be known beforehand.
What remains to be found is, for every token of it, how many of the tokens that follow the drafter would have drafted
right there (a "lead"); a round then takes the lead, the bonus token, and goes on behind both. A tree of alternatives
needs one thing more: the rank that the drafter gives to each right token. The text's path is in the tree, or is not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..bench.prompts import Prompt, load_prompts, render
from ..models import Checkpoint, load_tokenizer
from .corpus import ANSWER, FORCED, Corpus, greedy_texts

LENGTHS = (1, 2, 3, 4, 5, 6, 8)  # values of K that an evaluation states
TREE_SIZES = (8, 16, 32, 63)  # and sizes of trees
RANKS = 10  # ranks that a tree may hold: what lies behind is never drafted

Path = tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A prompt and what the target greedily answers to it, EOS included."""

    category: str
    prompt_ids: list[int]
    output_ids: list[int]


# -------------------------------------------------------------------------------------------------------------- rounds


def walk(leads: Sequence[int], max_draft_len: int) -> list[tuple[int, int, int]]:
    """Greedy speculation played over a known text: (drafted, accepted, emitted) of every round.

    leads[i]: how many tokens the drafter would draft right after output token i, if it could draft without end. Output
    token 0 comes from prefill and belongs to no round, so n output tokens have n - 1 entries. The last round emits
    what is left.
    """
    rounds, at = [], 0
    while at < len(leads):
        drafted = min(max_draft_len, len(leads) - at)
        accepted = min(drafted, leads[at])
        emitted = min(accepted + 1, len(leads) - at)
        rounds.append((drafted, accepted, emitted))
        at += emitted
    return rounds


def runs(match: Sequence[bool]) -> list[int]:
    """The leads of a drafter that sees tokens only: match[i]: after output token i it proposes output token i + 1."""
    leads, run = [], 0
    for is_right in reversed(match):
        run = run + 1 if is_right else 0
        leads.append(run)
    return leads[::-1]


def walk_rounds(match: Sequence[bool], max_draft_len: int) -> list[tuple[int, int, int]]:
    """`walk` over the agreement of a drafter that sees tokens only."""
    return walk(runs(match), max_draft_len)


def acceptance_length(match: Sequence[bool], max_draft_len: int) -> float:
    """Mean tokens emitted per round, bonus token included; nan for a text of fewer than two tokens."""
    rounds = walk_rounds(match, max_draft_len)
    return sum(emitted for _, _, emitted in rounds) / len(rounds) if rounds else float("nan")


def summary(
    texts: Sequence[Text], leads: Sequence[Sequence[int]], max_draft_len: int, depth: int = 8
) -> dict[str, Any]:
    """Exact greedy acceptance: over all, by category and by draft position. depth: the most that is ever drafted.

    acceptance_length: tokens emitted / rounds over all texts. acceptance_by_position: of the rounds that drafted a
    j-th token, the share that accepted it. agreement: share of output tokens that would be drafted right after the one
    before.
    """
    hits, total = sum(lead > 0 for text in leads for lead in text), sum(map(len, leads))
    everything = _walk_all(leads, max_draft_len)
    by_category: dict[str, list[Sequence[int]]] = defaultdict(list)
    for text, found in zip(texts, leads, strict=True):
        by_category[text.category].append(found)
    return {
        "max_draft_len": max_draft_len,
        "texts": len(texts),
        "output_tokens": total + len(texts),
        "agreement": round(hits / max(1, total), 4),
        "acceptance_length": _per_round(everything),
        "acceptance_length_by_max_draft_len": {
            str(k): _per_round(_walk_all(leads, k)) for k in LENGTHS if k <= max(depth, max_draft_len)
        },
        "acceptance_by_position": [
            round(sum(a > j for d, a, _ in everything if d > j) / max(1, sum(d > j for d, _, _ in everything)), 4)
            for j in range(max_draft_len)
        ],
        "by_category": {name: _per_round(_walk_all(m, max_draft_len)) for name, m in sorted(by_category.items())},
    }


def _walk_all(leads: Sequence[Sequence[int]], max_draft_len: int) -> list[tuple[int, int, int]]:
    return [one for found in leads for one in walk(found, max_draft_len)]


def _per_round(rounds: Sequence[tuple[int, int, int]]) -> float:
    return round(sum(emitted for _, _, emitted in rounds) / max(1, len(rounds)), 4)


# --------------------------------------------------------------------------------------------------------------- trees

Ranks = list[list[list[int]]]  # per text, output token and draft step: the rank given to the token that does come


def chain_leads(ranks: Ranks) -> list[list[int]]:
    """Leads of the chain of first choices."""
    return [[next((j for j, rank in enumerate(path) if rank), len(path)) for path in text] for text in ranks]


def tree_leads(ranks: Ranks, tree: Collection[Path]) -> list[list[int]]:
    """Leads of a tree given as paths of ranks: the text is followed as long as its path lies in the tree."""
    paths = set(tree)

    def lead(path: Sequence[int]) -> int:
        return next((j for j in range(len(path)) if tuple(path[: j + 1]) not in paths), len(path))

    return [[lead(path) for path in text] for text in ranks]


def best_tree(ranks: Ranks, nodes: int = max(TREE_SIZES), top: int = RANKS) -> list[Path]:
    """The `nodes` paths of ranks that the target's text takes most often, most often first.

    No tree of this size catches more tokens on these texts, and every beginning of the list is again a tree: a path is
    taken no more often than the path it continues. (Cai et al. 2024 estimate the same from the accuracy of every head
    and rank, as if heads erred independently; counting whole paths needs no such assumption.)
    """
    taken: Counter[Path] = Counter()
    for text in ranks:
        for path in text:
            for end in range(1, len(path) + 1):
                if path[end - 1] >= top:
                    break
                taken[tuple(path[:end])] += 1
    ordered = sorted(taken.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    return [path for path, _ in ordered[:nodes]]


def tree_summary(ranks: Ranks, tree: Sequence[Path]) -> dict[str, float]:
    """Acceptance length by number of nodes of the trees that `tree` begins with."""
    sizes = [n for n in TREE_SIZES if n < len(tree)] + [len(tree)] if tree else []
    found = {}
    for size in sizes:
        part = tree[:size]
        found[str(size)] = _per_round(_walk_all(tree_leads(ranks, part), max(map(len, part))))
    return found


def rank_shares(ranks: Ranks, top: int = RANKS) -> list[list[float]]:
    """For every draft step the share of output tokens that it gave rank 0, 1, … `top` - 1 (whatever came before)."""
    steps = max((len(path) for text in ranks for path in text), default=0)
    shares = []
    for step in range(steps):
        # a step that reaches behind the end of the text has nothing to foresee
        judged = [path[step] for text in ranks for path in text[: max(0, len(text) - step)]]
        counts = Counter(judged)
        shares.append([round(counts[rank] / max(1, len(judged)), 4) for rank in range(top)])
    return shares


# --------------------------------------------------------------------------------------------------------------- texts


def held_out_texts(corpus: Corpus, documents: Sequence[int]) -> list[Text]:
    """The greedy answers in these documents, each with all that stands before it as its prompt."""
    texts = []
    for document in documents:
        if corpus.temperatures[document] > 0:
            continue
        places = slice(int(corpus.offsets[document]), int(corpus.offsets[document + 1]))
        tokens, kinds = corpus.tokens[places].tolist(), corpus.kinds[places].tolist()
        start = None
        for i, kind in enumerate([*kinds, FORCED]):
            if kind == ANSWER and start is None:
                start = i
            elif kind != ANSWER and start is not None:
                texts.append(Text("held out", tokens[:start], tokens[start:i]))
                start = None
    return texts


def bundled_texts(
    target: Checkpoint,
    prompts: Sequence[Prompt] | None = None,
    *,
    max_tokens: int = 128,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Text]:
    """The target's greedy answers to the bundled prompts; every turn of a chat is a text of its own."""
    prompts, tokenizer, texts = load_prompts() if prompts is None else prompts, load_tokenizer(target), []
    answers: list[list[str]] = [[] for _ in prompts]
    for turn in range(max(len(p.turns) for p in prompts)):
        open_ones = [i for i, p in enumerate(prompts) if len(p.turns) > turn]
        asked = [render(prompts[i], tokenizer, answers[i]) for i in open_ones]
        outputs = greedy_texts(target, asked, max_tokens=max_tokens, device=device, dtype=dtype)
        for i, prompt_ids, output_ids in zip(open_ones, asked, outputs, strict=True):
            texts.append(Text(prompts[i].category, prompt_ids, output_ids))
            answers[i].append(str(tokenizer.decode(output_ids, skip_special_tokens=True)))
    return texts
