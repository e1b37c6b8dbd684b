"""Prompt files: the bundled set, a user's file with its errors, hashes, selection and chat rendering."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tutorial_lib.bench.prompts import Prompt, load_prompts, prompt_set_sha256, render, select
from tutorial_lib.errors import OptionError, PromptError

CATEGORIES = {
    "chat", "summarization", "translation", "question_answering", "mathematics", "code", "extraction", "writing",
}  # fmt: skip


class WordTokenizer:
    """Whitespace words to ids, BOS = 1, written by the template, by the tokenizer, or by nobody."""

    bos_token_id = 1

    def __init__(self, template: str | None = None, adds_bos: bool = False) -> None:
        self.chat_template, self.adds_bos, self.words = template, adds_bos, {"<s>": 1}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [self.words.setdefault(word, len(self.words) + 1) for word in text.split()]
        return {"input_ids": [1, *ids] if add_special_tokens and self.adds_bos else ids}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt) -> str:
        assert not tokenize and add_generation_prompt
        return f"{self.chat_template} " + " ".join(f"[{m['role']}] {m['content']}" for m in messages) + " [assistant]"

    def text(self, ids: list[int]) -> str:
        names = {i: word for word, i in self.words.items()}
        return " ".join(names[i] for i in ids)


def test_bundled_prompts_cover_every_category():
    prompts = load_prompts()
    counts = Counter(p.category for p in prompts)
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 7 and len(prompts) >= 56
    assert all(len(p.turns) == (2 if p.category == "chat" else 1) for p in prompts)
    assert len({p.turns for p in prompts}) == len(prompts)
    assert max(len(turn.split()) for p in prompts for turn in p.turns) <= 260


def test_bundled_hash_is_recorded():
    """Figures recorded with another set must not pass for this one: change the hash when the prompts change."""
    assert prompt_set_sha256(load_prompts()) == BUNDLED_SHA256


def test_hash_depends_on_content_and_not_on_order():
    prompts = load_prompts()
    digest = prompt_set_sha256(prompts)
    assert prompt_set_sha256(prompts[::-1]) == digest
    changed = [*prompts[:-1], Prompt(prompts[-1].question_id, prompts[-1].category, ("other",))]
    assert prompt_set_sha256(changed) != digest
    assert prompt_set_sha256(prompts[:-1]) != digest


def test_users_file_in_spec_bench_form(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [
        {"question_id": 81, "category": "roleplay", "turns": ["Hi", "Bye"], "reference": ["x"]},
        {"question_id": "b", "category": "qa", "turns": ["Wörter\u2028 stay"]},
    ]
    path.write_text("\ufeff" + "\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n", encoding="utf-8")
    assert load_prompts(path) == [
        Prompt("81", "roleplay", ("Hi", "Bye")),
        Prompt("b", "qa", ("Wörter\u2028 stay",)),
    ]


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "not JSON"),
        ("[1]", "found list"),
        ('{"question_id": 2, "turns": ["x"]}', "category missing"),
        ('{"question_id": true, "category": "c", "turns": ["x"]}', "question_id is True"),
        ('{"question_id": 2, "category": "", "turns": ["x"]}', "category is ''"),
        ('{"question_id": 2, "category": "c", "turns": "x"}', "turns is 'x'"),
        ('{"question_id": 2, "category": "c", "turns": []}', "turns is []"),
        ('{"question_id": 2, "category": "c", "turns": ["x", "  "]}', "turns holds '  '"),
        ('{"question_id": 1, "category": "c", "turns": ["x"]}', "was used in line 1"),
        ('{"question_id": 2, "category": "c", "turns": ["\\ud800"]}', "half a character"),
        ('{"question_id": 2, "category": "\\udc80", "turns": ["x"]}', "half a character"),
        ('{"question_id": ' + "9" * 5000 + "}", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_errors_name_the_line(tmp_path, line, said):
    path = tmp_path / "own.jsonl"
    path.write_text('{"question_id": 1, "category": "c", "turns": ["x"]}\n\n' + line + "\n")
    with pytest.raises(PromptError, match="own.jsonl line 3") as caught:
        load_prompts(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_unreadable_and_empty_files(tmp_path):
    with pytest.raises(PromptError, match="cannot be read"):
        load_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(PromptError, match="holds no prompt"):
        load_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="not UTF-8"):
        load_prompts(tmp_path / "bytes.jsonl")


def test_select_takes_the_first_of_each_category():
    prompts = [Prompt(str(i), "ab"[i % 2], ("t",)) for i in range(5)]
    assert [p.question_id for p in select(prompts, 2)] == ["0", "1", "2", "3"]
    assert len(select(prompts, 9)) == 5
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(OptionError):
            select(prompts, wrong)


@pytest.mark.parametrize(
    "template, adds_bos, expected",
    [("<s>", True, 1), ("<s>", False, 1), ("<s> <s>", True, 1), ("", True, 1), ("", False, 0)],
)
def test_render_gives_exactly_one_bos_where_the_model_wants_one(template, adds_bos, expected):
    tokenizer = WordTokenizer(template or " ", adds_bos)
    ids = render(Prompt("1", "c", ("hello there",)), tokenizer)
    assert ids.count(1) == expected
    assert tokenizer.text(ids).removeprefix("<s> ") == "[user] hello there [assistant]"


def test_render_second_turn_holds_the_answer():
    tokenizer = WordTokenizer("<s>")
    prompt = Prompt("1", "chat", ("one", "two"))
    assert tokenizer.text(render(prompt, tokenizer, ["yes"])) == "<s> [user] one [assistant] yes [user] two [assistant]"
    with pytest.raises(PromptError, match="2 turns and 2 answers"):
        render(prompt, tokenizer, ["yes", "no"])


def test_render_without_template_is_plain_text_with_the_tokenizers_own_bos():
    tokenizer = WordTokenizer(None, adds_bos=True)
    ids = render(Prompt("1", "chat", ("one", "two")), tokenizer, ["yes"])
    assert tokenizer.text(ids) == "<s> one yes two"


BUNDLED_SHA256 = "9278a969931e037912055238aaa9e57ef62d6be488cba9a1e008be9f2261abb7"
