"""A `Generation` as coloured text, token by token: which were drafted, accepted, rejected, and which came for free.

Static HTML without scripts, so that it survives batch runs and exports. Model text is untrusted: every token is
escaped and control characters are spelled out. Kinds differ by underline, border and strike-through, not by colour
alone. Of a tree the branch that was taken is text, the candidates that fell beside it are struck out, and what stood
behind those is only counted; the lens shows every branch. Nothing here knows a model; a tokenizer is anything with
`decode(ids)`.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..results import Generation, Round


class Decoder(Protocol):
    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True)
class TracedToken:
    """One token as the trace shows it. kind: a key of `KINDS`. index: its place in the draft, None if not drafted."""

    token_id: int
    text: str
    kind: str
    index: int | None = None


KINDS = {
    "plain": "plain: one token from one target step",
    "accepted": "accepted: drafted, and the target agreed",
    "rejected": "rejected: drafted, not in the text",
    "unreached": "unreached: drafted behind a rejected candidate of a tree",
    "bonus": "bonus: the target's own token, free with every verification",
    "cut": "cut: accepted, but the answer had already ended",
}
TEXT_KINDS = ("plain", "accepted", "bonus")

_CSS = """<style>
.sd-trace{background:#fff;color:#222;border:1px solid #ccc;border-radius:4px;padding:.7em 1em;max-width:60em;
 font:14px/2.1 ui-monospace,'DejaVu Sans Mono',monospace;overflow-wrap:anywhere}
.sd-trace .sd-tok{white-space:pre-wrap;unicode-bidi:isolate;padding:.1em 1px;margin:0 1px;border-radius:3px}
.sd-trace .sd-accepted{background:#d6e9f8;border-bottom:3px solid #0072b2}
.sd-trace .sd-bonus{background:#fff3c4;border:2px solid #b27a00;font-weight:bold}
.sd-trace .sd-rejected{background:#f6f6f6;color:#7a2e00;text-decoration:line-through;border-bottom:2px dashed #d55e00}
.sd-trace .sd-cut{color:#555;text-decoration:line-through;border-bottom:2px dotted #555}
.sd-trace .sd-unreached{color:#555;border:1px dotted #555}
.sd-trace .sd-ws{color:#888;font-weight:normal}
.sd-trace .sd-round{border-left:2px solid #bbb;padding-left:2px;margin-left:2px}
.sd-trace .sd-no{color:#666;font-size:10px;vertical-align:super;margin-right:1px}
.sd-trace .sd-current{outline:2px solid #222;outline-offset:2px}
.sd-trace .sd-legend,.sd-trace .sd-sum{font-family:system-ui,'DejaVu Sans',sans-serif;font-size:12px;line-height:1.9}
.sd-trace .sd-legend span.sd-key{margin-right:1.4em;white-space:nowrap}
.sd-trace table{border-collapse:collapse;font-size:13px;line-height:1.6;color:#222;background:#fff}
.sd-trace th,.sd-trace td{border:1px solid #ccc;padding:.15em .7em;text-align:left;background:#fff;color:#222}
</style>"""


def trace_html(generation: Generation, tokenizer: Decoder) -> str:
    """The whole generation as one block of static HTML with its legend; a round's counts and times are its tooltip."""
    rounds = list(_traced_rounds(generation, tokenizer))
    first = [_token_html(token) for token in _prefill_tokens(generation, tokenizer)]
    body = "".join(first) + "".join(
        _round_html(number, round_, tokens) for number, (round_, tokens) in enumerate(rounds, start=1)
    )
    kinds = {token.kind for _, tokens in rounds for token in tokens} | {"plain"}
    summary = f'<div class="sd-sum">{html.escape(summary_line(generation))}</div>'
    return f'{_CSS}<div class="sd-trace">{_legend(kinds)}<div>{body}</div>{summary}</div>'


def round_html(generation: Generation, tokenizer: Decoder, k: int) -> str:
    """Round `k` (1-based) under the lens: the text before it, its draft token by token with the verdict, its times."""
    rounds = list(_traced_rounds(generation, tokenizer))
    if not rounds:
        return f'{_CSS}<div class="sd-trace">This generation has no rounds: prefill gave its only token.</div>'
    k = min(max(k, 1), len(rounds))
    before = "".join(_token_html(token) for token in _prefill_tokens(generation, tokenizer))
    for _, tokens in rounds[: k - 1]:
        before += "".join(_token_html(t) for t in tokens if t.kind in TEXT_KINDS)
    round_, tokens = rounds[k - 1]
    lines = enumerate(tokens, start=1) if round_.parents is None else _tree_lines(round_, tokens)
    rows = "".join(
        f'<tr><td>{at}</td><td style="padding-left:{0.7 if round_.parents is None else 1.5 * at:.1f}em">'
        f"{_token_html(token)}</td><td>{html.escape(KINDS[token.kind])}</td></tr>"
        for at, token in lines
    )
    table = f"<table><tr><th>position</th><th>token</th><th>verdict</th></tr>{rows}</table>"
    head = f'<div class="sd-sum"><b>{html.escape(round_line(k, round_))}</b> ({len(rounds)} rounds in all)</div>'
    here = f'<span class="sd-current">{_tokens_html(tokens)}</span>'
    return f'{_CSS}<div class="sd-trace">{head}<div>{before}{here}</div>{table}</div>'


def round_line(number: int, round_: Round) -> str:
    """One round in words: its counts and its times."""
    drafted = f"{len(round_.drafted)} drafted"
    if round_.parents:
        ends = len(round_.parents) - len({parent for parent in round_.parents if parent >= 0})
        drafted += f" on {ends} branch{'es' if ends != 1 else ''}"
    return (
        f"round {number}: {drafted}, {round_.accepted} accepted, {len(round_.emitted)} emitted; "
        f"draft {round_.draft_s * 1e3:.1f} ms, verify {round_.verify_s * 1e3:.1f} ms"
    )


def summary_line(generation: Generation) -> str:
    """The whole generation in words."""
    rounds = generation.rounds
    drafted, accepted = sum(len(r.drafted) for r in rounds), sum(r.accepted for r in rounds)
    line = f"{len(generation.token_ids)} tokens in {len(rounds)} round{'s' if len(rounds) != 1 else ''}"
    if rounds:
        line += (
            f" ({sum(len(r.emitted) for r in rounds) / len(rounds):.2f} per round, the first token came from prefill)"
        )
    if drafted:
        line += f"; {drafted} drafted, {accepted} accepted ({accepted / drafted:.0%})"
    return f"{line}; ended by {generation.finish_reason}"


def _traced_rounds(generation: Generation, tokenizer: Decoder) -> Iterator[tuple[Round, list[TracedToken]]]:
    """Each round with its tokens in the order accepted, rejected, unreached, bonus."""
    reader = _Reader(tokenizer, is_hidden=generation.is_simulated)
    for token_id in _prefill_ids(generation):
        reader.read(token_id)
    for round_ in generation.rounds:
        path = tuple(range(round_.accepted)) if round_.path is None else round_.path
        kept = min(round_.accepted, len(round_.emitted))
        fallen = [i for i in range(len(round_.drafted)) if i not in path]
        reached = [i for i in fallen if round_.parents is None or round_.parents[i] in (-1, *path)]
        texts = [(token_id, reader.read(token_id)) for token_id in round_.emitted]
        last = "bonus" if round_.drafted else "plain"

        def unread(indices: Sequence[int], kind: str, drafted: tuple[int, ...] = round_.drafted) -> list[TracedToken]:
            return [TracedToken(drafted[i], reader.peek(drafted[i]), kind, i) for i in indices]

        tokens = [TracedToken(id_, text, "accepted", i) for (id_, text), i in zip(texts[:kept], path, strict=False)]
        tokens += unread(path[kept:], "cut") + unread(reached, "rejected")
        tokens += unread([i for i in fallen if i not in reached], "unreached")
        tokens += [TracedToken(token_id, text, last) for token_id, text in texts[kept:]]
        yield round_, tokens


def _tree_lines(round_: Round, tokens: Sequence[TracedToken]) -> Iterator[tuple[int, TracedToken]]:
    """(position, token) of every drafted token, each followed by its own branches; then the target's own token."""
    drafted = {token.index: token for token in tokens if token.index is not None}
    waiting = [i for i, parent in reversed(list(enumerate(round_.parents or ()))) if parent < 0]
    while waiting:
        index = waiting.pop()
        yield round_.depths[index], drafted[index]
        waiting += [i for i, parent in reversed(list(enumerate(round_.parents or ()))) if parent == index]
    yield from ((len(round_.emitted), token) for token in tokens if token.index is None)


def _prefill_ids(generation: Generation) -> list[int]:
    """The ids that belong to no round: the first token, which prefill yields."""
    in_rounds = sum(len(r.emitted) for r in generation.rounds)
    return generation.token_ids[: max(0, len(generation.token_ids) - in_rounds)]


def _prefill_tokens(generation: Generation, tokenizer: Decoder) -> list[TracedToken]:
    reader = _Reader(tokenizer, is_hidden=generation.is_simulated)
    return [TracedToken(token_id, reader.read(token_id), "plain") for token_id in _prefill_ids(generation)]


class _Reader:
    """Turns ids into text one by one. A character spread over several tokens shows up whole at its last token and
    as ▯ before. Text of a simulated run is meaningless and is never shown: each of its tokens is ▪."""

    def __init__(self, tokenizer: Decoder, *, is_hidden: bool) -> None:
        self._tokenizer, self._is_hidden = tokenizer, is_hidden
        self._pending: list[int] = []

    def read(self, token_id: int) -> str:
        if self._is_hidden:
            return "▪"
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._pending)
        if text.endswith("\ufffd") and len(self._pending) < 4:
            return "▯"
        self._pending = []
        return text

    def peek(self, token_id: int) -> str:
        if token_id < 0:  # a backend that does not say which tokens it rejected
            return "?"
        return "▪" if self._is_hidden else self._tokenizer.decode([token_id])


def _round_html(number: int, round_: Round, tokens: Sequence[TracedToken]) -> str:
    title = html.escape(round_line(number, round_))
    inner = _tokens_html(tokens)
    return f'<span class="sd-round" title="{title}"><span class="sd-no">{number}</span>{inner}</span>'


def _tokens_html(tokens: Sequence[TracedToken]) -> str:
    """Tokens in a line of text: of those that were never reached only the number."""
    unreached = sum(token.kind == "unreached" for token in tokens)
    count = f'<span class="sd-tok sd-unreached" title="{KINDS["unreached"]}">+{unreached}</span>' if unreached else ""
    shown = [_token_html(token) for token in tokens if token.kind != "unreached"]
    place = len(shown) - sum(token.index is None for token in tokens)  # before the target's own token
    return "".join([*shown[:place], count, *shown[place:]])


def _token_html(token: TracedToken) -> str:
    shown = visible(token.text)
    may_break = "<wbr>" if token.text.startswith(" ") else ""  # a line may break before a word, not behind its space
    inner, line_end = (shown.removesuffix("<br>"), "<br>") if shown.endswith("<br>") else (shown, "")
    return f'{may_break}<span class="sd-tok sd-{token.kind}" data-id="{int(token.token_id)}">{inner}</span>{line_end}'


def visible(text: str) -> str:
    """Escaped text in which spaces, line ends and control characters can be seen."""
    parts = []
    for char in text:
        if char == " ":
            parts.append('<span class="sd-ws">·</span>')
        elif char == "\n":
            parts.append('<span class="sd-ws">⏎</span><br>')
        elif char == "\t":
            parts.append('<span class="sd-ws">⇥</span>')
        elif char == "\ufffd":
            parts.append("▯")
        elif unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
            parts.append(f'<span class="sd-ws">⟨U+{ord(char):04X}⟩</span>')
        else:
            parts.append(html.escape(char))
    return "".join(parts) or '<span class="sd-ws">∅</span>'


def _legend(kinds: set[str]) -> str:
    keys = (
        f'<span class="sd-key"><span class="sd-tok sd-{kind}">{html.escape(name)}</span> {html.escape(meaning)}</span> '
        for kind, (name, _, meaning) in ((k, v.partition(": ")) for k, v in KINDS.items())
        if kind in kinds
    )
    note = '<span class="sd-key"><span class="sd-no">7</span> round number (hover: counts and times)</span>'
    return f'<div class="sd-legend">{"".join(keys)}{note}</div>'
