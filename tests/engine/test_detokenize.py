"""Text while it grows: no broken characters, stop strings wherever they begin, nothing shown that is taken back."""

from __future__ import annotations

import random

import pytest
from stand_ins import Pieces

from tutorial_lib.engine.detokenize import Detokenizer
from tutorial_lib.models import load_tokenizer, resolve

SMILE, CHINESE = "😀".encode(), "漢字".encode()


def feed(pieces: list[bytes], stops=(), special=()) -> tuple[Detokenizer, list[str]]:
    """Push one token per piece until a stop; the shown text after each."""
    detokenizer = Detokenizer(Pieces(dict(enumerate(pieces)), special), stops)
    shown = []
    for token in range(len(pieces)):
        is_stopped = detokenizer.push(token)
        shown.append(detokenizer.streamable)
        if is_stopped:
            break
    return detokenizer, shown


def is_growing(shown: list[str]) -> bool:
    return all(later.startswith(earlier) for earlier, later in zip(shown, shown[1:], strict=False))


# ---- characters -----------------------------------------------------------------------------------------------------


def test_half_characters_are_held_back():
    detokenizer, shown = feed([b"a", SMILE[:1], SMILE[1:3], SMILE[3:], CHINESE[:4], CHINESE[4:], b"!"])
    assert shown == ["a", "a", "a", "a😀", "a😀漢", "a😀漢字", "a😀漢字!"]
    assert detokenizer.finish() == "a😀漢字!"


def test_a_character_left_incomplete_at_the_end_is_marked_once():
    detokenizer, shown = feed([b"a", SMILE[:2]])
    assert shown == ["a", "a"]
    assert detokenizer.finish() == detokenizer.finish() == "a\ufffd"


def test_broken_bytes_followed_by_text_do_not_hold_it_back():
    _, shown = feed([b"a", SMILE[:2], b"b", b"\xff", b"c"])
    assert shown[2] == "a\ufffdb" and shown[4] == "a\ufffdb\ufffdc"


def test_special_tokens_have_no_text():
    detokenizer, shown = feed([b"a", b"<end>", b"b"], special=[1])
    assert shown == ["a", "a", "ab"] and detokenizer.finish() == "ab"


def test_a_tokenizer_that_drops_the_first_space_keeps_the_others():
    """As Llama 2's does: the space in front of a word is the text's own unless the word comes first."""

    class DropsFirstSpace(Pieces):
        def decode(self, ids, **options):
            return super().decode(ids, **options).removeprefix(" ")

    detokenizer = Detokenizer(DropsFirstSpace({0: b" a", 1: b" b", 2: b" c", 3: SMILE[:2], 4: SMILE[2:]}))
    for token in (0, 1, 3, 4, 2, 2):
        detokenizer.push(token)
    assert detokenizer.finish() == "a b😀 c c"


@pytest.mark.parametrize("seed", range(6))
def test_any_cut_gives_the_text_of_all_tokens(seed):
    """Random bytes, valid and not, cut anywhere: pieces join to the plain decode and nothing shown is taken back."""
    generator = random.Random(seed)
    parts = ["é", "😀", "漢", "word ", "<", "\n", "👩‍👩‍👧", "\ufffd"]
    raw = "".join(generator.choice(parts) for _ in range(60)).encode()
    if seed % 2:
        raw = bytes(b if generator.random() > 0.05 else generator.randrange(256) for b in raw)
    pieces = []
    while raw:
        size = generator.randint(1, 5)
        pieces.append(raw[:size])
        raw = raw[size:]
    detokenizer, shown = feed(pieces)
    assert is_growing([*shown, detokenizer.finish()])
    assert detokenizer.text == b"".join(pieces).decode(errors="replace")


def test_with_a_real_tokenizer_and_whatever_ids_come():
    tokenizer = load_tokenizer(resolve("dummy:tiny-llama", say=lambda line: None))
    for text in ("naïve 漢字 👩‍👩‍👧 done", "a  b\t\n c 's n't , . !"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        detokenizer, shown = Detokenizer(tokenizer), []
        for token in ids:
            detokenizer.push(token)
            shown.append(detokenizer.streamable)
        assert shown[-1] == detokenizer.finish() == text
        assert is_growing(shown) and not any("\ufffd" in s for s in shown)


def test_text_is_not_tidied_up():
    """Llama 3's tokenizer asks for "it 's ." to be read as "it's."; piece by piece that takes back what was shown.
    transformers 4 obeys, transformers 5 only where it is told to twice."""
    tokenizer = load_tokenizer(resolve("dummy:tiny-llama", say=lambda line: None))
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    text = "it 's here , do n't ."
    detokenizer = Detokenizer(tokenizer)
    for token in tokenizer(text, add_special_tokens=False).input_ids:
        detokenizer.push(token)
    assert detokenizer.finish() == text


# ---- stop strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop", "pushed"),
    [
        (["ab", "cd", "ef"], ["cd"], "ab", "cd", 2),
        (["ab", "cd", "ef"], ["bc"], "a", "bc", 2),  # across two tokens
        (["a", "b", "c", "d"], ["bcd"], "a", "bcd", 4),  # across three
        (["abcdef", "x"], ["cd"], "ab", "cd", 1),  # inside one
        (["ab", "cd"], ["ab"], "", "ab", 1),  # at the very start
        (["x", "aab", "c"], ["aabc", "ab"], "xa", "ab", 2),
        (["ab", "cd"], ["dc", "cd", "bc"], "a", "bc", 2),  # the one that begins first
        (["aa", "ab"], ["aab"], "a", "aab", 2),  # the second a begins it, not the first
        (["ab", "ab"], ["abc", "x"], "abab", None, 2),
    ],
)
def test_the_token_that_completes_a_stop_string(pieces, stops, text, stop, pushed):
    detokenizer, shown = feed([p.encode() for p in pieces], stops)
    assert (detokenizer.finish(), detokenizer.stopped_by, len(shown)) == (text, stop, pushed)


def test_what_might_become_a_stop_string_is_not_shown():
    _, shown = feed([b"a", b"<", b"/", b"x", b"<", b"/s", b">", b"b"], ["</s>"])
    assert shown == ["a", "a", "a", "a</x", "a</x", "a</x", "a</x"]


def test_held_text_is_released_at_the_end():
    detokenizer, shown = feed([b"a", b"</"], ["</s>"])
    assert shown[-1] == "a" and detokenizer.finish() == "a</"


def test_a_stop_string_of_split_characters():
    detokenizer, shown = feed([b"a", SMILE[:2], SMILE[2:] + b"b", b"c"], ["😀"])
    assert detokenizer.finish() == "a" and len(shown) == 3


def test_a_stop_string_before_half_a_character_stops_at_that_token():
    detokenizer, shown = feed([b"a", b"END" + SMILE[:2], SMILE[2:], b"c"], ["END"])
    assert detokenizer.finish() == "a" and detokenizer.stopped_by == "END" and len(shown) == 2


@pytest.mark.parametrize("seed", range(6))
def test_streams_with_stop_strings_never_show_a_part_of_one(seed):
    generator = random.Random(seed)
    alphabet = ["a", "b", "ab", "ba", "é"]
    pieces = [generator.choice(alphabet).encode() for _ in range(200)]
    stops = ["".join(generator.choice("ab") for _ in range(n)) for n in (6, 9)]
    detokenizer, shown = feed(pieces, stops)
    whole = b"".join(pieces).decode()
    at = min((whole.find(s) for s in stops if s in whole), default=len(whole))
    assert detokenizer.finish() == whole[:at]
    assert is_growing([*shown, detokenizer.text])
    count = len(shown)
    before = b"".join(pieces[: count - 1]).decode()
    assert not any(s in before for s in stops)  # it stopped at the first token that completes one
