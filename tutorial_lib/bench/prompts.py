"""Prompts: the bundled set, a user's own file, and how a prompt becomes token ids.

The file form is Spec-Bench's: one JSON object per line with `question_id`, `category` and `turns` (a list of user
turns); further keys are ignored. The bundled prompts were written for this project. A prompt set is named in every
record by the SHA-256 of its canonical JSON, so two runs can be seen to have used the same one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import NOT_JSON, OptionError, PromptError

BUNDLED = Path(__file__).parent.parent / "data" / "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One question: its user turns are asked one after another, each with the earlier answers before it."""

    question_id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(path: str | Path | None = None) -> list[Prompt]:
    """The prompts of a Spec-Bench file, in file order; the bundled set without `path`.

    Raises `PromptError` with the file's name and the line number for anything that is not such a file.
    """
    path = BUNDLED if path is None else Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise PromptError(f"prompt file {path} cannot be read ({error.strerror})", "a JSON-lines file") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"prompt file {path} is not UTF-8 text (byte {error.start})", "a JSON-lines file") from error
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path.name} line {number}")
        if prompt.question_id in line_of:
            raise PromptError(
                f"{path.name} line {number}: question_id {prompt.question_id!r} was used in line "
                f"{line_of[prompt.question_id]}",
                "a different one for every prompt",
            )
        line_of[prompt.question_id] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptError(f"prompt file {path.name} holds no prompt", "one JSON object per line")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not JSON ({error.msg}, column {error.colno})", "one JSON object") from error
    except NOT_JSON as error:
        raise PromptError(f"{where}: not JSON ({error})", "one JSON object") from error
    if not isinstance(entry, dict):
        raise PromptError(f"{where}: found {type(entry).__name__}", "one JSON object")
    missing = [key for key in ("question_id", "category", "turns") if key not in entry]
    if missing:
        raise PromptError(f"{where}: {', '.join(missing)} missing", "question_id, category and turns")
    question_id, category, turns = entry["question_id"], entry["category"], entry["turns"]
    if isinstance(question_id, bool) or not isinstance(question_id, (str, int)) or not str(question_id).strip():
        raise PromptError(f"{where}: question_id is {question_id!r}", "a non-empty string or a whole number")
    if not isinstance(category, str) or not category.strip():
        raise PromptError(f"{where}: category is {category!r}", "a non-empty string")
    if not isinstance(turns, list) or not turns:
        raise PromptError(f"{where}: turns is {turns!r}", "a list with at least one user turn")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise PromptError(f"{where}: turns holds {turn!r}", "non-empty strings only")
    for text in (str(question_id), category, *turns):
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise PromptError(f"{where}: {text!r} holds half a character"[:300], "valid Unicode text", "mend the line")
    return Prompt(str(question_id), category, tuple(turns))


def prompt_set_sha256(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over the canonical JSON of a set: sorted by question_id, keys sorted, no spaces, UTF-8."""
    entries = [asdict(p) for p in sorted(prompts, key=lambda p: p.question_id)]
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def select(prompts: Sequence[Prompt], per_category: int) -> list[Prompt]:
    """The first `per_category` prompts of every category, in their order; all of a category that has fewer."""
    if isinstance(per_category, bool) or not isinstance(per_category, int) or per_category < 1:
        raise OptionError(f"prompts per category is {per_category!r}", "a whole number >= 1")
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if taken[prompt.category] <= per_category:
            chosen.append(prompt)
    return chosen


def render(prompt: Prompt, tokenizer: Any, answers: Sequence[str] = ()) -> list[int]:
    """Token ids of turn `len(answers)`, earlier turns and their answers before it.

    With a chat template its text is tokenized without the tokenizer's own special tokens, so there is exactly one BOS
    where the model wants one. A tokenizer without a template (a base model, `dummy:`) gets the plain turns, blank
    lines between them, and its own special tokens.
    """
    if len(answers) >= len(prompt.turns):
        raise PromptError(
            f"prompt {prompt.question_id} has {len(prompt.turns)} turns and {len(answers)} answers were given",
            "fewer answers than turns",
        )
    if not getattr(tokenizer, "chat_template", None):
        parts = [text for pair in zip(prompt.turns, answers, strict=False) for text in pair]
        return list(tokenizer("\n\n".join([*parts, prompt.turns[len(answers)]]))["input_ids"])
    messages = []
    for turn, answer in zip(prompt.turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": prompt.turns[len(answers)]})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return _with_one_bos(list(tokenizer(text, add_special_tokens=False)["input_ids"]), tokenizer)


def _with_one_bos(ids: list[int], tokenizer: Any) -> list[int]:
    """Exactly one leading BOS if the template writes one or the tokenizer adds one by itself; none otherwise."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return ids
    start = 0
    while start < len(ids) and ids[start] == bos:
        start += 1
    adds_bos = list(tokenizer("a")["input_ids"])[:1] == [bos]
    return [bos, *ids[start:]] if start or adds_bos else ids
