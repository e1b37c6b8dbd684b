"""How the target is set talking: beginnings of user turns from which it invents the training text itself.

`STARTS` are continued by the target (it samples the rest of the user's turn), `REQUESTS` are complete and are answered
at once, `PLAIN` begin text without a chat template. Braces are filled at random from `FILLERS`. All of it was written
for this project, and none of it is taken from the bundled prompts, which only measure.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

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

REQUESTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "What can you tell me about {topic}?",
        "Explain {topic} to a {person} in simple words.",
        "What are {n} good reasons to learn about {topic}?",
        "Give me {n} tips on {topic} for a beginner in {place}.",
        "What is the difference between {topic} and {topic}?",
        "How can I tell my {person} that I do not care about {topic}?",
        "What are the pros and cons of {topic}?",
        "I want to surprise my {person} with something about {topic}. Any ideas?",
        "I just bought a {thing} in {place}. How do I take care of it?",
    ),
    "translation": (
        "Translate into {language}: My {person} bought a {thing} in {place}.",
        "Translate into {language}: I would like to talk about {topic} with {name}.",
        'How would you say "{name} does not like {topic}" in {language}?',
        "Translate to {language}: In {year}, {name} moved to {place} because of {topic}.",
    ),
    "question_answering": (
        "{Name} was born in {place} in {year} and later became known for work on {topic}. Together with a {person}, "
        "{name} opened a small museum there. Where was {name} born?",
        "The {thing} was first shown in {place} in {year}. It was designed by {name}, who had studied {topic} for {n} "
        "years. Who designed the {thing}, and when was it shown?",
        "In {year} the town of {place} counted {n} thousand people. Most of them lived from {topic}. After the new "
        "road was built, {name} opened a shop for a {thing}. What did people live from?",
    ),
    "mathematics": (
        "{Name} buys {n} packs of a {thing} for ${n} each and pays with a $100 bill. How much change is left?",
        "A bus travels {n} km in {n} minutes. What is its average speed in km/h?",
        "What is {n} percent of {year}?",
        "{Name} reads {n} pages a day. How many pages are read in {n} weeks?",
        "Solve for x: {n}x + {n} = {year}. Show your work.",
        "There are {n} red and {n} blue balls in a bag. What is the probability of drawing a red one?",
    ),
    "code": (
        "Write a Python function to {task} and explain how it works.",
        "Write a Python script to {task}. Add comments and an example.",
        "Show me {n} ways to {task} in Python.",
        "Write a unit test for a function that should {task}.",
        "What is the time complexity of a program to {task}? Explain with code.",
    ),
    "extraction": (
        "Extract the name, the year and the place from this sentence: In {year}, {name} sold a {thing} in {place}.",
        "List all nouns in this sentence: My {person} talked about {topic} while we repaired the {thing} in {place}.",
        "Return the facts as JSON: {Name} ({n} years old, from {place}) ordered {n} units of the {thing} for ${n}.",
    ),
    "writing": (
        "Write a short story about {topic} and a {person} from {place}.",
        "Write a {tone} poem about {topic}.",
        "Write a {tone} email to my {person} about a {thing}.",
        "Write a {tone} paragraph about {topic} in {place}.",
        "Describe {place} in the year {year} in a {tone} tone.",
        "Write a product description for a {thing}. Keep it {tone}.",
        "Write a dialogue between {name} and a {person} about {topic}.",
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


def _list(text: str) -> tuple[str, ...]:
    """The entries of a list written with semicolons over several lines."""
    return tuple(" ".join(entry.split()) for entry in text.split(";"))


FILLERS: dict[str, tuple[str, ...]] = {
    "topic": _list(
        """
        gardening; the water cycle; black holes; jazz music; bread baking; the stock market; chess openings;
        bee keeping; volcanoes; sleep; the Roman Empire; electric cars; coffee; public transport;
        photosynthesis; football; recycling; mindfulness; the French Revolution; whales; solar power;
        vaccines; knitting; machine learning; mountain climbing; ancient Egypt; budgeting; the immune system;
        photography; glaciers; sign language; plate tectonics; opera; cats; bridges; the Olympic Games; remote
        work; climate change; pottery; inflation; dinosaurs; tea; sailing; democracy; school uniforms; rivers;
        running a marathon; space travel; dreams; honey; cryptography; public libraries; cycling; birds of
        prey; the periodic table; folk tales; video games; wool; the Silk Road; soil; time management;
        windmills; robots; friendship; earthquakes; street art; mushrooms; the heart; lighthouses; board
        games; rice farming; radio; dental health; the moon; wildfires; typography; migration; horses;
        nutrition; ballet; probability; coral reefs; stage fright; the printing press; noise pollution;
        deserts; trains; perfume; online shopping; kites; rain forests; double-entry bookkeeping; the Vikings;
        allergies; animation; fermentation; homework; insects; satellites; puppets; market towns; the violin;
        antibiotics; traffic lights; snow; parenting; paper; magnetism; surfing; tax returns; wolves; computer
        networks; gravity; fashion; elections; maps; the brain; cheese; origami; steam engines
        """
    ),
    "task": _list(
        """
        reverse a string; find the largest number in a list; count the words in a text file; sort a list of
        names; check whether a number is prime; merge two dictionaries; remove duplicates from a list; read a
        CSV file; compute the Fibonacci sequence; convert Celsius to Fahrenheit; download a web page; parse a
        date; draw a bar chart; calculate the factorial of a number; find the most common letter; validate an
        email address; flatten a nested list; generate a random password; compute the average of a column;
        rename many files; find the longest word in a sentence; implement a stack; binary search a sorted
        list; sum the digits of a number; transpose a matrix; group items by key; count vowels; replace spaces
        with underscores; measure elapsed time; write a list to a JSON file; find the second smallest value;
        check two strings for being anagrams; convert a number to binary; split a list into chunks; compute
        compound interest; simulate a dice roll; find all files of a type in a folder; compute the greatest
        common divisor; rotate a list; print a triangle of stars; traverse a binary tree; filter even numbers;
        capitalize every word; find missing numbers in a range
        """
    ),
    "begin": _list(
        """
        The; The; The; A; In; Last week,; On; When; Every; After; Many; At the age of; It was; This; {Name};
        {Topic}; According to; Since {year},; My {person}; Our; For; There; Two; We
        """
    ),
    "person": _list(
        """
        neighbor; boss; sister; grandfather; teacher; roommate; customer; doctor; landlord; coach; colleague;
        best friend; cousin; child; student; librarian; plumber; pilot; nurse; baker
        """
    ),
    "place": _list(
        """
        Lisbon; Kyoto; Chicago; Nairobi; Oslo; Mumbai; Vienna; Lima; Toronto; Cairo; Sydney; Prague; Havana;
        Seoul; Dublin; Marrakesh; Naples; Boston; Hamburg; a small village
        """
    ),
    "name": _list(
        """
        Maria; James; Aisha; Chen; Olga; Pedro; Fatima; Lars; Priya; Tom; Yuki; Emma; Kwame; Sofia; Ivan;
        Leila; Hugo; Grace; Mateo; Nora
        """
    ),
    "thing": _list(
        """
        bicycle; lamp; watch; sofa; kettle; backpack; telescope; guitar; phone; tent; mirror; keyboard;
        raincoat; camera; notebook; toaster; drill; printer; scarf; blender
        """
    ),
    "language": _list(
        """
        French; French; Spanish; Spanish; German; German; Italian; Portuguese; Dutch; English
        """
    ),
    "tone": _list(
        """
        formal; funny; friendly; serious; persuasive; calm; poetic; simple; dramatic; polite
        """
    ),
    "n": tuple("2 3 3 4 5 5 6 7 8 9 10 12 14 15 18 20 24 25 30 36 40 45 50 60".split()),
    "year": tuple(str(year) for year in range(1790, 2024, 7)),
}

WEIGHTS: dict[str, float] = {"open": 0.7, "chat": 1.4, "summarization": 1.3}
"""Share of a category among chat starts; 1 where it is not named."""

_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Opener:
    """One beginning. is_complete: the user's turn ends with it. is_chat: False for text without a chat template."""

    category: str
    text: str
    is_complete: bool
    is_chat: bool


def draw_opener(rng: random.Random, *, complete_share: float = 0.25, plain_share: float = 0.06) -> Opener:
    """A random beginning with its slots filled."""
    roll = rng.random()
    if roll < plain_share:
        return Opener("plain", _fill(rng.choice(PLAIN), rng), True, False)
    pool = REQUESTS if roll < plain_share + complete_share else STARTS
    categories = sorted(pool)
    category = rng.choices(categories, [WEIGHTS.get(name, 1.0) for name in categories])[0]
    return Opener(category, _fill(rng.choice(pool[category]), rng).rstrip(" "), pool is REQUESTS, True)


def _fill(text: str, rng: random.Random) -> str:
    """`text` with every slot filled; a name, a thing or a place is the same all through one text."""
    words = {name: rng.choice(choices) for name, choices in FILLERS.items()}

    def value(slot: re.Match[str]) -> str:
        name = slot[1].lower()
        word = rng.choice(FILLERS[name]) if name in ("n", "topic") else words[name]
        word = _SLOT.sub(value, word)
        return word[0].upper() + word[1:] if slot[1][0].isupper() else word

    return _SLOT.sub(value, text)
