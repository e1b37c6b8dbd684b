"""Pages and pictures of the drafting methods: every method has one, trees are drawn as they were verified, what is
missing says why, and model text stays text."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from test_measure import PROMPTS, Clock, FakeLLM
from test_plots import record

from tutorial_lib.bench.methods import METHODS, trace_methods
from tutorial_lib.config import PROFILES
from tutorial_lib.drafters.corpus import Corpus
from tutorial_lib.errors import ModelError, OptionError
from tutorial_lib.results import Generation, Round
from tutorial_lib.show import plots
from tutorial_lib.show.documents import documents_html, pieces
from tutorial_lib.show.methods import Pages, telling_round
from tutorial_lib.show.pictures import (
    PICTURES,
    mask_picture,
    method_picture,
    training_time_test_picture,
    tree_picture,
)

TREE = Round((10, 11, 12, 13), 2, (10, 13, 9), 0.01, 0.02, 0.1, (-1, -1, 0, 0), (0, 3))


class Words(dict):
    def decode(self, ids):
        return "".join(self.get(i, f"w{i}") for i in ids)


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_every_method_of_the_bench_has_a_picture_and_a_look_of_its_own():
    assert set(PICTURES) == set(METHODS) <= set(plots.METHODS)
    with pytest.raises(OptionError, match="no picture of 'hydra'"):
        method_picture("hydra")


@pytest.mark.parametrize("method", PICTURES)
def test_pictures_are_whole_have_a_text_and_load_nothing(method):
    svg = method_picture(method)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and len(root.get("aria-label")) > 40
    assert plots.METHODS[method].color in svg
    assert not re.search(r"<script|href=|url\(h|<image", svg)
    width, height = map(float, root.get("viewBox").split()[2:])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(rect.get("x")) and float(rect.get("x")) + float(rect.get("width")) <= width
        assert 0 <= float(rect.get("y")) and float(rect.get("y")) + float(rect.get("height")) <= height


def test_training_time_test_reads_own_states_after_the_first_step():
    root = ElementTree.fromstring(training_time_test_picture())
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "f(the)" in words and "g1(cat)" in words and "g2(sat)" in words and "g1(the)" not in words[:12]
    width, height = map(float, root.get("viewBox").split()[2:])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(rect.get("x")) + float(rect.get("width")) <= width and float(rect.get("y")) + 30 <= height


def test_documents_of_a_corpus_show_who_wrote_and_are_escaped():
    tokens, kinds = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 0, 2, 2, 2], dtype=torch.uint8)
    top = torch.zeros(5, 16)
    corpus = Corpus(tokens, kinds, top, top, torch.tensor([0, 3, 5]), torch.zeros(2))
    words = Words({1: "<b>", 2: "say", 3: "<script>", 4: "a", 5: "b"})
    found = [pieces(corpus, document, words) for document in (0, 1)]
    assert found == [[("given", "<b>say"), ("answer", "<script>")], [("answer", "ab")]]
    shown = documents_html(found)
    assert "<script>" not in shown and "&lt;script&gt;" in shown and "target as user" not in shown


def test_a_real_tree_shows_the_accepted_branch_and_keeps_siblings_apart():
    svg = tree_picture(TREE, Words(), "medusa")
    boxes = ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}rect")[1:]
    assert [box.get("stroke-dasharray") is None for box in boxes] == [True, False, False, True]
    places = [(box.get("x"), box.get("y")) for box in boxes]
    assert len(set(places)) == 4 and places[0][0] == places[1][0] != places[2][0] == places[3][0]
    assert "4 tokens, 2 deep, of which 2 were accepted" in svg


def test_a_mask_row_holds_the_node_its_ancestors_and_the_root():
    table = mask_picture(TREE, Words())
    rows = re.findall(r"<tr><th[^>]*>(\w+)</th><td[^>]*>(\+\d)</td>(.*?)</tr>", table)
    seen = {name: [cell != "" for cell in re.findall(r"<td[^>]*>(●?)</td>", cells)] for name, _, cells in rows}
    assert [depth for _, depth, _ in rows] == ["+0", "+1", "+1", "+2", "+2"]
    assert seen["last"] == [True, False, False, False, False]
    assert seen["w11"] == [True, False, True, False, False]
    assert seen["w13"] == [True, True, False, False, True]


def test_a_chain_is_drawn_as_a_tree_without_branches():
    chain = Round((1, 2, 3), 1, (1, 5), 0, 0, 0)
    boxes = ElementTree.fromstring(tree_picture(chain, Words(), "ngram")).iter("{http://www.w3.org/2000/svg}rect")
    assert len({box.get("y") for box in list(boxes)[1:]}) == 1
    assert mask_picture(chain, Words()).count("●") == 1 + 2 + 3 + 4


def test_model_text_cannot_inject_markup():
    evil = Words({10: "<script>x</script>", 11: "<img src=x>"})
    for drawn in (tree_picture(TREE, evil, "medusa"), mask_picture(TREE, evil)):
        assert "<script" not in drawn and "<img" not in drawn


# ---- pages -----------------------------------------------------------------------------------------------------------


def pages() -> Pages:
    generation = Generation([1], [7, 10, 13, 9], "", "length", [TREE])
    entry = {
        "name": "lookahead", "options": {"class": "LookaheadDecodingConfig", "max_draft_len": 2}, "why": "defaults",
        "mean_draft_len": 4.0, "draft_ms": 0.05, "verify_ms": 80.0, "acceptance_length": 1.5, "speedup": 1.1,
        "predicted_speedup": None, "identical_text": False, "differences": 3,
    }  # fmt: skip
    left_out = [{"name": "medusa", "why": "no <heads> here"}]
    runs = [record(), record("lookahead", k=2, tok_s=22.0)]
    document = {"runs": runs, "summary": {"methods": [entry], "left_out": left_out}}
    return Pages(document, {"generations": {"plain": generation, "lookahead": generation}, "left_out": {}}, Words())


def test_a_page_has_options_costs_trace_and_acceptance():
    page = pages()
    text = repr(page.costs("lookahead"))
    assert "LookaheadDecodingConfig(max_draft_len=2)" in text and "80.00" in text and "1.10" in text
    assert 'class="sd-trace"' in page.trace("lookahead")
    assert page.acceptance("lookahead").data


def test_a_method_that_is_missing_says_why_on_its_page():
    page = pages()
    assert "Medusa heads not run here" in page.costs("medusa") and "no &lt;heads&gt; here" in page.costs("medusa")
    assert "stands above" in page.trace("medusa") and "stands above" in page.acceptance("medusa")
    assert "not asked for" in page.costs("suffix")


def test_the_table_ends_with_plain_decoding_and_what_is_missing():
    rows = pages().table().rows
    assert [row["method"] for row in rows] == ["lookahead", "plain decoding", "Medusa heads"]
    assert rows[0]["same text"] == "3 answers differ" and rows[2]["same text"] == "not run here"


def test_the_round_worth_looking_at_branches_and_accepts_most():
    chain, fewer = replace(TREE, parents=None, path=None, accepted=4), replace(TREE, accepted=1, path=(0,))
    straight = replace(TREE, parents=(-1, 0, 1, 2), accepted=4, path=(0, 1, 2, 3))
    assert telling_round([fewer, chain, straight, TREE]) is TREE
    assert telling_round([chain, straight]) is None
    assert pages().tree_round() == ("lookahead", TREE)


# ---- traces ----------------------------------------------------------------------------------------------------------


def test_traces_open_one_model_at_a_time_and_keep_the_reason_of_each_that_is_missing():
    made, said = [], []

    def make_llm(name, config, profile):
        assert all(llm.is_closed for llm in made), "two models at once"
        if name.startswith("eagle3"):
            raise ModelError("no such head in /home/someone/heads")
        made.append(FakeLLM(Clock(), name, config.max_draft_len if config else 0))
        return made[-1]

    traced = trace_methods(replace(PROFILES["cpu"], max_tokens=9), PROMPTS[0], say=said.append, make_llm=make_llm)
    assert list(traced["generations"]) == ["plain", *(name for name in METHODS if not name.startswith("eagle3"))]
    assert traced["left_out"]["eagle3"] == "no such head in heads" and len(said) == 2
    assert {len(g.token_ids) for g in traced["generations"].values()} == {9} and made[-1].is_closed


def test_a_trace_without_its_target_is_an_error():
    def make_llm(name, config, profile):
        raise ModelError("no target")

    with pytest.raises(ModelError, match="no target"):
        trace_methods("cpu", PROMPTS[0], make_llm=make_llm)
