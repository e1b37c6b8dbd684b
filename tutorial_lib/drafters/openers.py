"""How the target is set talking: beginnings of user turns from which it invents the training text itself.

`STARTS` are continued by the target (it samples the rest of the user's turn), `PLAIN` begin text without a chat
template. `data/openers.json` holds what is complete and answered at once: requests, and given texts that are drawn
independently of the instructions put around them. Braces are filled at random from its fillers. All of it was written
for this project, and none of it is taken from the bundled prompts, which only measure.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STARTS: dict[str, tuple[str, ...]] = {
    "open": ("",),
    "chat": (
        "Hi! I have a question about {topic}.",
        "I've been thinking about {topic} lately, and",
        "What is the best way to",
        "How do I",
        "Can you explain",
        "Why do people",
        "I need some advice. My {person}",
        "Should I",
        "Tell me about {topic}",
        "What should I know about",
        "I'm planning a trip to {place} and",
        "My {person} told me that",
    ),
    "summarization": (
        "Summarize the following text:\n\n{begin}",
        "Summarize this article about {topic} in {n} sentences.\n\n{begin}",
        "Give me a short summary of the passage below.\n\n{begin}",
        "Please condense this paragraph into one sentence: {begin}",
        "What are the main points of this text?\n\n{begin}",
        "Write a brief summary of this report on {topic}.\n\nReport: {begin}",
        "Shorten the text below to {n} bullet points.\n\nThe",
        "TL;DR of the following:\n\n{Topic}",
        "Here is a news story. Sum it up in a few lines.\n\n{begin}",
    ),
    "translation": (
        "Translate the following sentence into French:",
        "Translate into {language}: The",
        "Translate this text to {language}.\n\n{begin}",
        'How do you say this in {language}? "',
        'Translate from English to {language}: "I',
        "Please translate this message to my {person} into {language}:",
        "Give me the {language} translation of: We",
        "What does this {language} sentence mean in English?\n\n{begin}",
    ),
    "question_answering": (
        "Read the passage and answer the question.\n\nPassage: {begin}",
        "Answer the question using only the text below.\n\nText: {Topic}",
        "Context: {begin}",
        "Use the following information to answer: when and where did it happen?\n\n{begin}",
        "Based on this paragraph about {topic}, answer the question at the end.\n\n{begin}",
        "Here is a short text about {place}. Who is mentioned in it, and why?\n\n{begin}",
        "Passage: In {year},",
        "What is the capital of",
        "Who was",
        "When did",
    ),
    "mathematics": (
        "Solve this problem step by step:",
        "{Name} has {n} apples and",
        "A train leaves {place} at",
        "Calculate",
        "What is {n} times",
        "If a rectangle has a length of {n} cm and",
        "A farmer sells",
        "{Name} saves ${n} every week. How",
        "Find the value of x in",
        "A recipe needs {n} cups of flour for",
        "The price of a {thing} is",
        "How many",
    ),
    "code": (
        "Write a Python function that",
        "Write a Python function to {task}.",
        "Write a program in Python that",
        "Explain what this code does:\n\n```python\ndef",
        "Fix the bug in this Python code:\n\n```python\n",
        "Write a JavaScript function that",
        "Write an SQL query that",
        "How can I {task} in Python?",
        "Create a class in Python called",
        "Write a bash command that",
        "Here is my code:\n\n```python\nimport",
    ),
    "extraction": (
        "Extract all names and dates from this text:\n\n{begin}",
        "List the people, places and organizations mentioned in the following text.\n\n{begin}",
        "Extract the key facts from this email as a list.\n\nDear",
        "From the text below, extract the price, the product and the address.\n\n{begin}",
        "Turn this text into JSON with the fields name, age and city.\n\n{Name}",
        "Find every number in this paragraph and say what it stands for.\n\n{begin}",
        "Pull out the date, time and place of the event:\n\n{begin}",
        "Classify the sentiment of this review and list the words that show it.\n\nReview:",
        "Make a table of the items and prices in this order:\n\n{begin}",
    ),
    "writing": (
        "Write a short story about",
        "Write a poem about {topic} that",
        "Write an email to my {person} to",
        "Write an advertisement for a {thing} that",
        "Write a letter to",
        "Continue this story: {Name}",
        "Describe a",
        "Write a blog post about",
        "Give me ideas for",
        "Write a speech for",
        "Rewrite this paragraph in a more {tone} tone:\n\n{begin}",
    ),
}

PLAIN: tuple[str, ...] = (
    "{Topic} is",
    "Once upon a time, {name}",
    "The history of {topic}",
    "In {year}, the people of {place}",
    "# {Topic}\n\n",
    "def ",
    "The best way to {task} is",
    "Question: What is {topic}?\nAnswer:",
    "Dear {name},\n\n",
    "The",
)


GIVEN_SHARE = 0.85
"""How often a complete request of a category with given texts is built from one of them."""

WEIGHTS: dict[str, float] = {"open": 0.7, "chat": 1.4, "summarization": 1.3}
"""Share of a category among chat starts; 1 where it is not named."""

VARYING = ("n", "m", "days", "percent", "topic", "day", "job")
"""Slots that are drawn anew wherever they stand."""

_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Opener:
    """One beginning. is_complete: the user's turn ends with it. is_chat: False for text without a chat template.
    source: what it was made from, before its slots were filled."""

    category: str
    text: str
    is_complete: bool
    is_chat: bool
    source: str


@dataclass(frozen=True)
class Tables:
    """What `data/openers.json` holds. fillers: the words for a slot. requests: complete ones by category. given: texts
    by category, each {"text": ..., "asks": [questions about it, or none]}. instructions: by category, what is put
    around a given text; {text} and {ask} stand for the text and one of its questions."""

    fillers: dict[str, list[str]]
    requests: dict[str, list[str]]
    instructions: dict[str, list[str]]
    given: dict[str, list[dict]]

    @property
    def categories(self) -> list[str]:
        return sorted({*self.requests, *self.given})


@cache
def tables() -> Tables:
    path = Path(__file__).parents[1] / "data" / "openers.json"
    return Tables(**json.loads(path.read_text(encoding="utf-8")))


def count_openers() -> int:
    """Beginnings written by hand, before slots are filled and instructions combined with texts."""
    table = tables()
    pools = (STARTS, table.requests, table.instructions, table.given)
    return sum(len(texts) for pool in pools for texts in pool.values()) + len(PLAIN)


def draw_opener(
    rng: random.Random,
    *,
    complete_share: float = 0.25,
    plain_share: float = 0.06,
    categories: Sequence[str] = (),
) -> Opener:
    """A random beginning with its slots filled; categories: of chats, all of them where none is named."""
    roll = rng.random()
    if roll < plain_share:
        text = rng.choice(PLAIN)
        return Opener("plain", _fill(text, rng), True, False, text)
    is_complete = roll < plain_share + complete_share
    choices = categories or (tables().categories if is_complete else sorted(STARTS))
    category = rng.choices(choices, [WEIGHTS.get(name, 1.0) for name in choices])[0]
    text = _request(category, rng) if is_complete else rng.choice(STARTS[category])
    return Opener(category, _fill(text, rng).rstrip(" "), is_complete, True, text)


def _request(category: str, rng: random.Random) -> str:
    """A complete request of a category, its slots still open."""
    table = tables()
    requests = table.requests.get(category)
    if category not in table.given or (requests and rng.random() >= GIVEN_SHARE):
        return rng.choice(table.requests[category])
    given, instruction = rng.choice(table.given[category]), rng.choice(table.instructions[category])
    ask = rng.choice(given["asks"] or [""])
    return instruction.replace("{ask}", ask).replace("{text}", given["text"])


def _fill(text: str, rng: random.Random) -> str:
    """`text` with every slot filled; a slot is the same all through one text, but for numbers, topics, days, jobs."""
    fillers = tables().fillers
    words = {name: rng.choice(choices) for name, choices in fillers.items()}

    def value(slot: re.Match[str]) -> str:
        name = slot[1].lower()
        word = rng.choice(fillers[name]) if name in VARYING else words[name]
        word = _SLOT.sub(value, word)
        return word[0].upper() + word[1:] if slot[1][0].isupper() else word

    return _SLOT.sub(value, text)
