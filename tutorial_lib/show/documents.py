"""What a target wrote for training, as a page: who wrote which part. Text of a model is untrusted and escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import groupby

from ..drafters.corpus import ANSWER, FORCED, USER, Corpus
from .methods import Html
from .trace import Decoder

Piece = Sequence[str]  # (who wrote it, the text)
WRITERS = {FORCED: "given", USER: "user", ANSWER: "answer"}
_LOOKS = {
    "given": ("#F2F2F2", "given: template and opener"),
    "user": ("#D6E9F8", "the target as user"),
    "answer": ("#FFF3C4", "the target as assistant"),
}


def pieces(corpus: Corpus, document: int, tokenizer: Decoder) -> list[tuple[str, str]]:
    """A document in parts by who wrote them."""
    places = slice(int(corpus.offsets[document]), int(corpus.offsets[document + 1]))
    written = zip(corpus.kinds[places].tolist(), corpus.tokens[places].tolist(), strict=True)
    parts = groupby(written, key=lambda item: item[0])
    return [(WRITERS[kind], tokenizer.decode([token for _, token in part])) for kind, part in parts]


def documents_html(documents: Sequence[Sequence[Piece]]) -> Html:
    """Documents as `pieces` gives them, below each other, with a legend of the writers that occur."""
    seen = [writer for writer in _LOOKS if any(part[0] == writer for parts in documents for part in parts)]
    style = "padding:.1em .25em;border-radius:3px;background:"
    legend = " ".join(f'<span style="{style}{_LOOKS[name][0]}">{_LOOKS[name][1]}</span>' for name in seen)
    box = "border:1px solid #ddd;padding:.6em;margin:.5em 0;white-space:pre-wrap;overflow-wrap:anywhere"
    shown = "".join(
        f'<div style="{box}">'
        + "".join(f'<span style="background:{_LOOKS[name][0]}">{html.escape(text)}</span>' for name, text in parts)
        + "</div>"
        for parts in documents
    )
    return Html(f'<div style="color:#222"><div style="font-size:90%">{legend}</div>{shown}</div>')
