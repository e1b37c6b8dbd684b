"""The coloured trace: right verdicts, nothing from a model can become markup, readable without colour."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from tutorial_lib.results import Generation, Round
from tutorial_lib.show import trace

WORDS = {1: "The", 2: " cat", 3: " sat", 4: " on", 5: "\n", 6: "<script>alert(1)</script>", 7: " mat", 8: "</s>"}


class Words:
    """A tokenizer of whole words, except 90 to 93, the four bytes of one emoji."""

    def decode(self, ids):
        out, pending = "", b""
        for i in ids:
            if 90 <= i <= 93:
                pending += "🙂".encode()[i - 90 : i - 89]
            else:
                out += WORDS.get(i, f" w{i}")
        return out + pending.decode("utf-8", errors="replace")


def round_(drafted=(), accepted=0, emitted=(1,), draft_s=0.003, verify_s=0.04):
    return Round(tuple(drafted), accepted, tuple(emitted), draft_s, verify_s, 0.0)


def generation(*rounds, first=(1,), **changes):
    ids = [*first, *(i for r in rounds for i in r.emitted)]
    return Generation([0], ids, Words().decode(ids), "length", list(rounds), **changes)


class Tokens(HTMLParser):
    """Collects (kind, visible text) of every token span outside the legend; fails on tags the trace never writes."""

    def __init__(self, page):
        super().__init__()
        self.tokens, self.tags, self._stack = [], set(), []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        kind = re.search(r"sd-tok sd-(\w+)", dict(attributes).get("class") or "")
        is_token = kind and "data-id" in dict(attributes)
        if tag not in ("br", "wbr"):
            self._stack.append(kind[1] if is_token else self._stack[-1] if self._stack else None)
        if is_token:
            self.tokens.append([kind[1], ""])

    def handle_endtag(self, tag):
        self._stack.pop()

    def handle_data(self, data):
        if self._stack and self._stack[-1]:
            self.tokens[-1][1] += data


def tokens(page):
    return [tuple(token) for token in Tokens(page).tokens]


def test_accepted_then_rejected_then_bonus():
    page = trace.trace_html(generation(round_([2, 3, 7, 7], 2, [2, 3, 4])), Words())
    assert tokens(page) == [
        ("plain", "The"),
        ("accepted", "·cat"),
        ("accepted", "·sat"),
        ("rejected", "·mat"),
        ("rejected", "·mat"),
        ("bonus", "·on"),
    ]


def test_a_round_without_drafts_is_plain():
    page = trace.trace_html(generation(round_([], 0, [2]), round_([], 0, [3])), Words())
    assert [kind for kind, _ in tokens(page)] == ["plain"] * 3
    assert "bonus:" not in re.sub(r"<style>.*?</style>", "", page, flags=re.S)


def test_a_stop_inside_the_accepted_run_shows_what_was_cut_off():
    page = trace.trace_html(generation(round_([2, 8, 3, 4], 3, [2, 8])), Words())
    assert [kind for kind, _ in tokens(page)] == ["plain", "accepted", "accepted", "cut", "rejected"]


def test_all_emitted_text_is_there_once_and_in_order():
    g = generation(round_([2, 7], 1, [2, 3]), round_([4, 4], 2, [4, 4, 7]), round_([], 0, [5]))
    kept = "".join(
        text for kind, text in tokens(trace.trace_html(g, Words())) if kind in ("plain", "accepted", "bonus")
    )
    assert kept.replace("·", " ").replace("⏎", "\n") == g.text


def test_model_text_is_inert():
    WORDS[60] = "\" onmouseover='x' <img src=y onerror=z>&amp;"
    g = generation(round_([6, 60], 1, [6, 60]), round_([60, 6], 0, [7]), first=(6,))
    for page in (trace.trace_html(g, Words()), trace.round_html(g, Words(), 1), trace.round_html(g, Words(), 2)):
        parsed = Tokens(page)
        assert parsed.tags <= {"style", "div", "span", "br", "wbr", "b", "table", "tr", "th", "td"}
        assert "<script" not in page and "<img" not in page
        assert any("<script>alert(1)</script>" in text for _, text in parsed.tokens)


def test_white_space_and_control_characters_can_be_seen():
    assert "·" in trace.visible(" ") and "⏎" in trace.visible("\n") and "<br>" in trace.visible("\n")
    assert "⇥" in trace.visible("\t") and "∅" in trace.visible("")
    assert "U+202E" in trace.visible("\u202e") and "U+001B" in trace.visible("\x1b")


def test_a_character_of_several_tokens_appears_whole_at_the_last_one():
    page = trace.trace_html(generation(round_([90, 91], 2, [90, 91, 92]), round_([93], 1, [93, 2])), Words())
    assert [text for _, text in tokens(page)] == ["The", "▯", "▯", "▯", "🙂", "·cat"]
    rejected = trace.trace_html(generation(round_([90], 0, [2])), Words())
    assert ("rejected", "▯") in tokens(rejected)


def test_kinds_differ_without_colour():
    css = trace._CSS
    rules = {kind: re.search(rf"\.sd-{kind}\{{([^}}]*)", css) for kind in ("accepted", "bonus", "rejected", "cut")}
    marks = {
        kind: frozenset(re.findall(r"(underline|line-through|bold|solid|dashed|dotted|double)", rule[1]))
        for kind, rule in rules.items()
    }
    assert len(set(marks.values())) == len(marks), marks
    assert "line-through" in marks["rejected"]


def test_each_round_tells_its_counts_and_milliseconds():
    page = trace.trace_html(generation(round_([2, 3], 1, [2, 4], draft_s=0.0031, verify_s=0.0402)), Words())
    assert 'title="round 1: 2 drafted, 1 accepted, 2 emitted; draft 3.1 ms, verify 40.2 ms"' in page
    assert "3 tokens in 1 round (2.00 per round" in page and "2 drafted, 1 accepted (50%)" in page


def test_text_of_a_simulated_run_is_never_shown():
    page = trace.trace_html(generation(round_([2, 3], 1, [2, 4]), is_simulated=True), Words())
    assert tokens(page) == [("plain", "▪"), ("accepted", "▪"), ("rejected", "▪"), ("bonus", "▪")]


def test_one_round_under_the_lens():
    g = generation(round_([2, 7], 1, [2, 3]), round_([4, 4], 0, [7]))
    page = trace.round_html(g, Words(), 2)
    assert "round 2: 2 drafted, 0 accepted, 1 emitted" in page and "(2 rounds in all)" in page
    before = [text for kind, text in tokens(page)][:3]
    assert before == ["The", "·cat", "·sat"]  # what round 1 rejected is not part of the text
    assert "round 1:" in trace.round_html(g, Words(), -5) and "round 2:" in trace.round_html(g, Words(), 99)
    assert "no rounds" in trace.round_html(generation(), Words(), 1)


# ---- trees ----------------------------------------------------------------------------------------------------------

# cat, on are taken; sat, The, <script> fall beside them; mat and w50 stand behind fallen ones.
#   text ─ cat(0) ─ sat(2) ── mat(4)
#       │       └── on(3) ── <script>(6)
#       └ The(1) ── w50(5)
BRANCHES = Round((2, 1, 3, 4, 7, 50, 6), 2, (2, 4, 7), 0.003, 0.04, 0.0, (-1, -1, 0, 0, 2, 1, 3), (0, 3))


def test_a_tree_shows_the_branch_that_was_taken_and_what_fell_beside_it():
    page = trace.trace_html(generation(BRANCHES), Words())
    assert tokens(page) == [
        ("plain", "The"),
        ("accepted", "·cat"),
        ("accepted", "·on"),
        ("rejected", "The"),
        ("rejected", "·sat"),
        ("rejected", "<script>alert(1)</script>"),
        ("bonus", "·mat"),
    ]
    assert ">+2</span>" in page and "<script" not in page
    assert "round 1: 7 drafted on 3 branches, 2 accepted, 3 emitted" in page


def test_the_lens_shows_every_branch_of_a_tree_in_its_place():
    page = trace.round_html(generation(BRANCHES), Words(), 1)
    lines = re.findall(r"<tr><td>(\d)</td><td style=\"padding-left:([\d.]+)em\">(.*?)</td><td>(\w+)", page)
    assert [(at, tokens(cell)[0][1], kind) for at, _, cell, kind in lines] == [
        ("1", "·cat", "accepted"),
        ("2", "·sat", "rejected"),
        ("3", "·mat", "unreached"),
        ("2", "·on", "accepted"),
        ("3", "<script>alert(1)</script>", "rejected"),
        ("1", "The", "rejected"),
        ("2", "·w50", "unreached"),
        ("3", "·mat", "bonus"),
    ]
    assert all(float(indent) == 1.5 * int(at) for at, indent, *_ in lines)
    assert "<script" not in page
    after = trace.round_html(generation(BRANCHES, round_([3], 0, [5])), Words(), 2)
    assert [text for kind, text in tokens(after)][:4] == ["The", "·cat", "·on", "·mat"]  # fallen branches are no text


def test_a_stop_on_the_branch_that_was_taken():
    ended = Round((2, 8, 3), 2, (2,), 0.003, 0.04, 0.0, (-1, 0, 0), (0, 1))
    page = trace.trace_html(generation(ended), Words())
    assert [kind for kind, _ in tokens(page)] == ["plain", "accepted", "cut", "rejected"]


def test_a_chain_written_as_a_tree_reads_as_the_chain():
    chain, tree = round_([2, 3, 7, 4], 1, [2, 4]), round_([2, 3, 7, 4], 1, [2, 4])
    tree = Round(**{**vars(tree), "parents": (-1, 0, 1, 2), "path": (0,)})
    shown = [tokens(trace.trace_html(generation(r), Words())) for r in (chain, tree)]
    assert shown[0][:3] == shown[1][:3] and shown[0][-1] == shown[1][-1]
