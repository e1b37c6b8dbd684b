"""The decode loop: speculation changes no text, blocks stop where tokens would, requests do not disturb each other.

Everything runs in float32 on a CPU, where speculation is exact: any difference is a defect.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from stand_ins import (
    PROMPTS,
    Around,
    Pieces,
    Replay,
    TableModel,
    adversary,
    compare_with_a_fresh_prefill,
    greedy,
    oracle,
    pattern,
    run,
    tiny_model,
)

from tutorial_lib.config import NGramDecodingConfig, SamplingParams
from tutorial_lib.drafters.base import Draft
from tutorial_lib.drafters.draft_model import DraftModelDrafter
from tutorial_lib.drafters.ngram import NGramDrafter
from tutorial_lib.engine.engine import Engine
from tutorial_lib.engine.model import PREFILL_CHUNK, Segment
from tutorial_lib.engine.sampling import penalize_repetition, probabilities
from tutorial_lib.errors import OptionError, PromptError

LENGTH = 40
REPLAYED = {"oracle": oracle, "adversary": adversary, "pattern": pattern}
METHODS = (*REPLAYED, "draft model", "self-draft", "ngram")


@pytest.fixture(scope="module")
def texts(target):
    """The greedy text of every prompt, long enough to draft from."""
    return [greedy(target, p, LENGTH + 20) for p in PROMPTS]


@pytest.fixture(scope="module")
def twin(target):
    """A second instance of the target, for drafting with itself."""
    return tiny_model("dummy:tiny-llama?seed=5")


@pytest.fixture(scope="module")
def drafter_of(texts, other, twin):
    """drafter_of(method): a fresh drafter, also for texts of the prompts that a test declares."""

    def make(method: str):
        if method in REPLAYED:
            return REPLAYED[method](texts)
        if method == "ngram":
            return NGramDrafter(NGramDecodingConfig(max_draft_len=1, max_matching_ngram_size=2), ())
        return DraftModelDrafter(other if method == "draft model" else twin, 320)

    return make


def outputs(generations) -> list[list[int]]:
    return [g.token_ids for g in generations]


def counts(generations) -> list[tuple[int, int]]:
    return [(len(r.drafted), r.accepted) for g in generations for r in g.rounds]


# ---- greedy speculation is greedy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_that_of_plain_decoding(method, k, target, texts, pieces, drafter_of):
    """Prompts of 1, 2 and 50 tokens as one batch whose rows accept differently and end at different times."""
    lengths = (LENGTH, LENGTH - 7, LENGTH - 15)
    params = [SamplingParams(max_tokens=n) for n in lengths]
    done = run(target, pieces, PROMPTS, params, drafter=drafter_of(method), k=k)
    for generation, prompt, text, length in zip(done, PROMPTS, texts, lengths, strict=True):
        expected = text[len(prompt) : len(prompt) + length]
        assert generation.token_ids == expected
        assert generation.finish_reason == "length" and generation.stop_reason is None
        assert generation.text == pieces.decode(expected)
        check_rounds(generation, k)
        drafted, accepted = (sum(n) for n in zip(*counts([generation]), strict=True))
        if method in ("oracle", "self-draft"):
            assert accepted == drafted > 0
            assert all(len(r.emitted) == k + 1 for r in generation.rounds[:-2])
        elif method == "adversary":
            assert accepted == 0 < drafted
        elif method == "pattern":
            assert [r.accepted for r in generation.rounds] == [
                i % (len(r.drafted) + 1) for i, r in enumerate(generation.rounds)
            ]


def check_rounds(generation, k: int) -> None:
    """Rounds and tokens tell the same story: the first token is prefill's, the rest come from rounds."""
    assert sum(len(r.emitted) for r in generation.rounds) == len(generation.token_ids) - 1
    assert [t for r in generation.rounds for t in r.emitted] == generation.token_ids[1:]
    emitted = 1
    for r in generation.rounds:
        assert len(r.drafted) <= min(k, len(generation.token_ids) - emitted - 1) or generation.finish_reason == "stop"
        assert r.drafted[: r.accepted] == r.emitted[: r.accepted] or len(r.emitted) <= r.accepted
        assert 1 <= len(r.emitted) <= r.accepted + 1
        emitted += len(r.emitted)
    ends = [generation.ttft_s, *(r.end_s for r in generation.rounds)]
    assert all(a <= b for a, b in pairwise(ends)) and ends[-1] == generation.latency_s
    assert all(r.draft_s >= 0 and r.verify_s > 0 for r in generation.rounds)


def test_the_first_round_is_neither_lost_nor_special(target, texts, pieces):
    """The adversary from a one-token prompt: the case that goes wrong when positions are not set back."""
    done = run(target, pieces, [[7]], drafter=adversary(texts), k=4, max_tokens=6)
    assert outputs(done) == [texts[0][1:7]]
    assert counts(done) == [(4, 0), (3, 0), (2, 0), (1, 0), (0, 0)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_row_of_a_batch_is_as_it_is_alone(size, target, texts, pieces):
    prompts = [list(p) for p in (PROMPTS[2], PROMPTS[0], PROMPTS[1], PROMPTS[2][:17], [8])][:size]
    known = [greedy(target, p, LENGTH + 20) for p in prompts]
    ways = [lambda n, b: b, lambda n, b: 0, lambda n, b: b * (n % 2), lambda n, b: n % (b + 1), lambda n, b: 1]

    class Each(Replay):
        def _draft(self, state):
            at = next(i for i, t in enumerate(self.texts) if t[: len(state.token_ids)] == state.token_ids)
            self.right = ways[at]
            return super()._draft(state)

    params = [SamplingParams(max_tokens=LENGTH - 4 * i) for i in range(size)]
    together = run(target, pieces, prompts, params, drafter=Each(known, ways[0]), k=4)
    for i, prompt in enumerate(prompts):
        drafter = Replay([known[i]], ways[i])
        alone = run(target, pieces, [prompt], params[i], drafter=drafter, k=4)
        assert outputs(alone) == [together[i].token_ids] == [known[i][len(prompt) :][: params[i].max_tokens]]
        assert counts(alone) == counts([together[i]])


def test_more_prompts_than_slots_keep_their_order(target, texts, pieces, drafter_of):
    prompts = [[i + 1, 2 * i + 1, 3] for i in range(12)]
    params = [SamplingParams(max_tokens=5 + 3 * (i % 4)) for i in range(12)]
    expected = [greedy(target, p, q.max_tokens)[3:] for p, q in zip(prompts, params, strict=True)]
    small = tiny_model("dummy:tiny-llama?seed=5", max_slots=2)
    assert outputs(run(small, pieces, prompts, params)) == expected
    assert outputs(run(small, pieces, prompts, params, drafter=drafter_of("draft model"), k=3)) == expected


@pytest.mark.parametrize("length", [PREFILL_CHUNK - 1, PREFILL_CHUNK, PREFILL_CHUNK + 1, 2 * PREFILL_CHUNK + 5])
def test_a_prompt_of_several_chunks(length, pieces):
    model = tiny_model("dummy:tiny-llama?seed=5", max_slots=1, max_seq_len=length + 12)
    prompt = torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    expected = greedy(model, prompt, 12)  # one forward over the whole prompt
    assert outputs(run(model, pieces, [prompt], max_tokens=12)) == [expected[length:]]
    self_draft = DraftModelDrafter(tiny_model("dummy:tiny-llama?seed=5", max_slots=1, max_seq_len=length + 12), 320)
    done = run(model, pieces, [prompt], drafter=self_draft, k=3, max_tokens=12)
    assert outputs(done) == [expected[length:]]
    assert counts(done) == [(3, 3), (3, 3), (2, 2)]


# ---- the cache after a rollback -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["adversary", "pattern", "draft model", "self-draft"])
def test_stale_cache_rows_change_nothing(method, target, texts, pieces, other, twin, drafter_of):
    """Before every round all rows that hold no text are made NaN, in the target and in the drafter."""
    drafter = drafter_of(method)
    models = [target] + [m for m in (other, twin) if getattr(drafter, "model", None) is m]
    addresses = [m.cache.data_ptr() for m in models]

    def poison(states):
        lengths = {s.slot: len(s.token_ids) - 1 for s in states}
        for model in models:
            for slot in range(model.max_slots):
                model.cache[:, slot, :, lengths.get(slot, 0) :] = math.nan

    done = run(target, pieces, PROMPTS, drafter=Around(drafter, poison), k=4, max_tokens=LENGTH)
    assert outputs(done) == [t[len(p) :][:LENGTH] for p, t in zip(PROMPTS, texts, strict=True)]
    assert [m.cache.data_ptr() for m in models] == addresses
    assert counts(done) == counts(run(target, pieces, PROMPTS, drafter=drafter_of(method), k=4, max_tokens=LENGTH))


@pytest.mark.parametrize("method", ["oracle", "adversary", "pattern"])
def test_the_cache_equals_that_of_a_fresh_prefill(method, target, texts, pieces, drafter_of):
    """After each round the cache holds prompt + emitted - 1 positions, as if they had been prefilled."""
    fresh = tiny_model("dummy:tiny-llama?seed=5", max_slots=1)
    checked = []

    def compare(states):
        for state in states:
            checked.append(compare_with_a_fresh_prefill(target, fresh, state))

    run(target, pieces, PROMPTS, drafter=Around(drafter_of(method), compare), k=5, max_tokens=25)
    assert len(checked) >= 12 and max(checked) > 65


# ---- the end of a request, inside a block ---------------------------------------------------------------------------

BLOCKS = (1, 2, 4, 8)


@pytest.mark.parametrize("k", BLOCKS)
@pytest.mark.parametrize("kind", ["eos", "stop id"])
def test_an_end_token_at_every_place_of_a_block(kind, k, target, texts, pieces):
    """Run greedy first, then declare the id first seen at position j to be the end."""
    prompt, text = PROMPTS[1], texts[1][2:]
    for j in range(21):
        end = text[j]
        if end in text[:j]:
            continue
        params = SamplingParams(max_tokens=LENGTH, logprobs=0, stop_token_ids=[end] if kind == "stop id" else None)
        eos = [end] if kind == "eos" else []
        for drafter in (oracle(texts), pattern(texts)):
            (done,) = run(target, pieces, [prompt], params, eos=eos, drafter=drafter, k=k)
            assert done.token_ids == text[: j + 1]
            assert (done.finish_reason, done.stop_reason) == ("stop", end if kind == "stop id" else None)
            assert done.text == pieces.decode(text[:j])  # the end token itself is not text
            assert len(done.logprobs) == j + 1
            check_rounds(done, k)


@pytest.mark.parametrize("which", [0, -1], ids=["a smaller id", "a larger id"])
def test_ends_at_any_of_several_eos_ids_and_ignores_them_when_asked(which, target, texts, pieces):
    text = texts[1][2:]
    other_id = [i for i in range(320) if i not in text][which]
    later = next(j for j in range(4, 20) if text[j] not in text[:j])
    assert text[3] not in text[:3] and (other_id < text[3]) == (which == 0)
    ids = [text[3], other_id]
    for options in ({}, {"drafter": oracle(texts), "k": 4}):
        (done,) = run(target, pieces, [PROMPTS[1]], eos=ids, max_tokens=20, **options)
        assert done.token_ids == text[:4] and done.finish_reason == "stop"
        (done,) = run(target, pieces, [PROMPTS[1]], eos=ids, max_tokens=20, ignore_eos=True, **options)
        assert done.token_ids == text[:20] and done.finish_reason == "length"
        params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[other_id, text[later]])
        (done,) = run(target, pieces, [PROMPTS[1]], params, eos=ids, **options)
        assert done.token_ids == text[: later + 1] and done.stop_reason == text[later]


def test_a_drafted_end_token_that_is_rejected_ends_nothing(target, texts, pieces):
    """The drafter believes in an EOS that the target does not choose."""
    wrong = (texts[1][4] + 1) % 320  # what the adversary drafts first
    assert wrong not in texts[1]
    (done,) = run(target, pieces, [PROMPTS[1]], eos=[wrong], drafter=adversary(texts), k=4, max_tokens=LENGTH)
    assert done.token_ids == texts[1][2:][:LENGTH]
    assert any(wrong in r.drafted for r in done.rounds)


def test_a_row_that_ends_early_emits_nothing_more(target, texts, pieces):
    ends = [texts[0][1 + 9], texts[2][50 + 4]]
    drafter = oracle(texts)
    params = [SamplingParams(max_tokens=LENGTH, stop_token_ids=[e]) for e in (ends[0], 319, ends[1])]
    done = run(target, pieces, PROMPTS, params, drafter=drafter, k=4)
    for generation, prompt, text, end in zip(done, PROMPTS, texts, (ends[0], None, ends[1]), strict=True):
        plain = text[len(prompt) :][:LENGTH]
        assert generation.token_ids == (plain[: plain.index(end) + 1] if end is not None else plain)


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("span", [1, 2, 3])
def test_a_stop_string_at_every_place_of_a_block(span, k, target, texts, pieces):
    """The string is made of the last characters of token j - span + 1 up to the first two of token j."""
    text = texts[0][1:]
    found = 0
    for j in range(span, 18):
        parts = [pieces.table[t].decode(errors="ignore") for t in text[j - span + 1 : j + 1]]
        stop = "".join(parts)[1:] if span == 1 else parts[0][-1:] + "".join(parts[1:-1]) + parts[-1][:2]
        if not stop:
            continue
        length = next((n for n in range(1, LENGTH) if stop in pieces.decode(text[:n])), None)
        if length is None:
            continue  # half a character in between
        found += 1
        whole = pieces.decode(text[:length])
        for drafter in (None, oracle(texts), pattern(texts)):
            (done,) = run(
                target,
                pieces,
                [PROMPTS[0]],
                drafter=drafter,
                k=k,
                max_tokens=LENGTH,
                stop=["#never#", stop],
                logprobs=1,
            )
            assert done.token_ids == text[:length], stop
            assert done.text == whole[: whole.index(stop)]
            assert (done.finish_reason, done.stop_reason) == ("stop", stop)
            assert len(done.logprobs) == length
            check_rounds(done, k)
    assert found > 8


@pytest.mark.parametrize("method", ["oracle", "pattern", "ngram", "self-draft"])
def test_exactly_max_tokens(method, target, pieces, drafter_of):
    """A repetitive prompt, for n-gram lookup; every limit that a block can overrun."""
    prompt = [1, 2, 3] * 4
    text = greedy(target, prompt, 40)
    for limit in range(1, 11):
        for k in (1, 2, 3, 5, 8):
            drafter = REPLAYED[method]([text]) if method in REPLAYED else drafter_of(method)
            (done,) = run(target, pieces, [prompt], drafter=drafter, k=k, max_tokens=limit)
            assert done.token_ids == text[12 : 12 + limit] and done.finish_reason == "length"
            check_rounds(done, k)


def test_the_last_token_allowed_may_be_the_stop(target, texts, pieces):
    text = texts[1][2:]
    for options in ({}, {"drafter": oracle(texts), "k": 3}):
        (done,) = run(target, pieces, [PROMPTS[1]], eos=[text[5]], max_tokens=6, **options)
        assert done.finish_reason == "stop" and done.token_ids == text[:6]


# ---- streaming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 8])
def test_a_stream_grows_to_the_result(k, target, texts):
    """Words, and characters that begin in one token and end in the next."""
    ids = texts[2][50:][:LENGTH]
    table = {i: f" w{i}".encode() for i in range(320)}
    once = [ids.count(t) == 1 for t in ids]
    for i in range(0, LENGTH - 1, 2):
        if once[i] and once[i + 1]:
            character = chr(0x1F600 + i).encode()
            table[ids[i]], table[ids[i + 1]] = character[:3], character[3:]
    tokenizer = Pieces(table)
    engine = Engine(target, tokenizer, (), drafter=pattern(texts) if k else None, max_draft_len=k)
    params = SamplingParams(max_tokens=LENGTH, logprobs=1, stop=["#never#"])
    (whole,) = engine.generate([PROMPTS[2]], [params])
    assert whole.token_ids == ids and whole.text == tokenizer.decode(ids)
    assert sum(ord(c) > 0xFFFF for c in whole.text) > 5 and "\ufffd" not in whole.text
    items = list(engine.stream(PROMPTS[2], params))
    assert len(items) == 1 + len(whole.rounds)
    for item, later in pairwise(items):
        assert later.text.startswith(item.text) and "\ufffd" not in item.text
        assert later.token_ids[: len(item.token_ids)] == item.token_ids and len(later.token_ids) > len(item.token_ids)
        assert len(item.logprobs) == len(item.token_ids)  # what was handed out does not change afterwards
        assert item.finish_reason == "" and len(item.rounds) == items.index(item)
    assert (items[-1].text, items[-1].token_ids) == (whole.text, whole.token_ids)
    assert items[-1].finish_reason == "length" and items[-1].logprobs == whole.logprobs


def test_a_stream_stops_at_a_stop_string_and_never_shows_it(target, texts, pieces):
    text = pieces.decode(texts[0][1:31])
    stop = text[30:36]
    engine = Engine(target, pieces, (), drafter=oracle(texts), max_draft_len=4)
    shown = [g.text for g in engine.stream(PROMPTS[0], SamplingParams(max_tokens=LENGTH, stop=stop))]
    assert shown[-1] == text[: text.index(stop)]
    assert all(shown[-1].startswith(s) for s in shown)


def test_streams_side_by_side(target, texts, pieces):
    """Two streams read in turn and a batch in between, all on one drafter."""
    engine = Engine(target, pieces, (), drafter=oracle(texts), max_draft_len=3)
    params = SamplingParams(max_tokens=LENGTH)
    streams = [engine.stream(p, params) for p in PROMPTS[:2]]
    heads = [[next(s).token_ids for s in streams] for _ in range(4)]
    (between,) = engine.generate([PROMPTS[2]], [params])
    assert between.token_ids == texts[2][50:][:LENGTH]
    assert heads[-1][0] == texts[0][1 : 1 + len(heads[-1][0])]
    for stream, prompt, text in zip(streams, PROMPTS, texts, strict=False):
        assert list(stream)[-1].token_ids == text[len(prompt) :][:LENGTH]


def test_streams_that_are_dropped_give_their_slots_back(target, texts, pieces):
    engine = Engine(target, pieces, (), drafter=oracle(texts), max_draft_len=3)
    params = SamplingParams(max_tokens=LENGTH)
    for _ in range(target.max_slots + 1):
        stream = engine.stream(PROMPTS[0], params)
        next(stream), next(stream)
        del stream
    done = engine.generate([PROMPTS[i % 3] for i in range(target.max_slots)], [params] * target.max_slots)
    assert [g.token_ids for g in done] == [
        texts[i % 3][len(PROMPTS[i % 3]) :][:LENGTH] for i in range(target.max_slots)
    ]


def test_streams_that_hold_all_slots_are_moved_on_by_whoever_reads(target, texts, pieces):
    """A batch that finds no free slot takes the open streams along until one ends."""
    engine = Engine(target, pieces, ())
    params = SamplingParams(max_tokens=LENGTH)
    streams = [engine.stream(PROMPTS[0], params) for _ in range(target.max_slots)]
    for stream in streams:
        next(stream)
    streams[0].close()
    assert outputs(engine.generate([PROMPTS[0]] * 2, [params] * 2)) == [texts[0][1:][:LENGTH]] * 2
    for stream in streams[1:]:
        assert list(stream)[-1].token_ids == texts[0][1:][:LENGTH]


def test_a_stream_refuses_a_bad_prompt_when_it_is_asked_for(target, pieces):
    with pytest.raises(PromptError):
        Engine(target, pieces, ()).stream([], SamplingParams())


# ---- state between calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_calls_do_not_remember_each_other(method, target, pieces, drafter_of):
    """A, B, A, and A again: the same text and the same acceptance each time."""
    engine = Engine(target, pieces, (), drafter=drafter_of(method), max_draft_len=4)
    params = [SamplingParams(max_tokens=LENGTH)]
    a, b, *again = (engine.generate([PROMPTS[i]], params) for i in (1, 2, 1, 1))
    assert outputs(b) != outputs(a)
    for later in again:
        assert outputs(later) == outputs(a) and counts(later) == counts(a)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["drafter", "prefill"])
def test_an_interrupt_leaves_the_engine_usable(where, error, target, texts, pieces):
    armed = [0]

    def fuse(*_):
        armed[0] -= 1
        if armed[0] == 0:
            raise error("stop")

    drafter = Around(oracle(texts), fuse if where == "drafter" else lambda states: None)
    if where == "prefill":
        inner = drafter.reset
        drafter.reset = lambda *arguments: (fuse(), inner(*arguments))
    engine = Engine(target, pieces, (), drafter=drafter, max_draft_len=2)
    params = [SamplingParams(max_tokens=LENGTH)] * 3
    expected = [t[len(p) :][:LENGTH] for p, t in zip(PROMPTS, texts, strict=True)]
    for _ in range(target.max_slots):  # often enough to run out of slots if one were lost
        armed[0] = 3
        with pytest.raises(error):
            engine.generate(PROMPTS, params)
    armed[0] = 0
    assert outputs(engine.generate(PROMPTS, params)) == expected
    streams = [engine.stream(PROMPTS[0], params[0]) for _ in range(target.max_slots)]
    assert [next(s).token_ids for s in streams] == [[texts[0][1]]] * target.max_slots


# ---- sampling -------------------------------------------------------------------------------------------------------


def sampled(**options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.8, "seed": 42, **options})


@pytest.mark.parametrize("method", ["plain", "draft model", "ngram", "self-draft"])
def test_a_seed_decides_the_text_whatever_surrounds_it(method, target, pieces, drafter_of):
    options = {} if method == "plain" else {"drafter": drafter_of(method), "k": 3}
    engine = Engine(target, pieces, (), drafter=options.get("drafter"), max_draft_len=options.get("k", 0))
    alone = engine.generate([PROMPTS[1]], [sampled()])
    assert outputs(engine.generate([PROMPTS[1]], [sampled()])) == outputs(alone)
    neighbours = [sampled(seed=1), sampled(), sampled(seed=None), SamplingParams(max_tokens=9)]
    batch = engine.generate([PROMPTS[2], PROMPTS[1], PROMPTS[1], PROMPTS[0]], neighbours)
    assert batch[1].token_ids == alone[0].token_ids and counts([batch[1]]) == counts(alone)
    fresh = run(tiny_model("dummy:tiny-llama?seed=5"), pieces, [PROMPTS[1]], sampled(), **options)
    assert outputs(fresh) == outputs(alone)
    assert outputs(engine.generate([PROMPTS[1]], [sampled(seed=43)])) != outputs(alone)
    assert len({tuple(engine.generate([PROMPTS[1]], [sampled(seed=None)])[0].token_ids) for _ in range(8)}) > 1


def test_zero_temperature_is_greedy(target, texts, pieces, drafter_of):
    for options in ({}, {"drafter": drafter_of("draft model"), "k": 3}):
        done = run(target, pieces, [PROMPTS[1]], sampled(temperature=0.0, top_k=5, top_p=0.5), **options)
        assert outputs(done) == [texts[1][2:26]]
        done = run(target, pieces, [PROMPTS[1]], sampled(top_k=1), **options)
        assert outputs(done) == [texts[1][2:26]]


def test_a_drafter_that_agrees_in_distribution_is_always_accepted(target, pieces, drafter_of):
    done = run(target, pieces, PROMPTS, sampled(top_p=0.9), drafter=drafter_of("self-draft"), k=4)
    assert all(drafted == accepted for drafted, accepted in counts(done))


def transitions(model, drafter, k: int, tokens: int, **options) -> torch.Tensor:
    """counts[previous, next] over sampled texts of a table model, beginning with the token after prefill's."""
    vocab = model.table.shape[0]
    table = torch.zeros(vocab, vocab)
    prompts, each = [[0]] * 4, [SamplingParams(max_tokens=tokens // 4, seed=i, **options) for i in range(4)]
    for generation in run(model, Pieces(dict.fromkeys(range(vocab), b"x")), prompts, each, drafter=drafter, k=k):
        for previous, token in pairwise(generation.token_ids):
            table[previous, token] += 1
    return table


class Fixed:
    """Drafts the same tokens always; q is one-hot."""

    feature_layers = ()

    def __init__(self, tokens) -> None:
        self.tokens = tokens

    def reset(self, slot, prompt_ids, features=None) -> None: ...

    def observe(self, outcomes) -> None: ...

    def propose(self, states):
        return [Draft(self.tokens[: s.budget]) for s in states]


@pytest.mark.parametrize("method", ["plain", "draft model", "one-hot"])
def test_the_text_has_the_targets_distribution(method):
    """End to end: real random numbers, a target and a drafter whose next token depends on the last one."""
    options = {"temperature": 0.8, "top_k": 3}
    generator = torch.Generator().manual_seed(4)
    target, drafter = (TableModel(1.2 * torch.randn(4, 4, generator=generator)) for _ in range(2))
    proposer = {"plain": None, "draft model": DraftModelDrafter(drafter, 4), "one-hot": Fixed((1, 2, 1))}[method]
    table = transitions(target, proposer, 3 if proposer else 0, 2400, **options)
    for previous in range(4):
        p = probabilities(target.table[previous], SamplingParams(**options)).double()
        seen = table[previous].double()
        assert seen[p == 0].sum() == 0
        wanted = seen.sum() * p[p > 0]
        assert len(wanted) == 3 and wanted.min() >= 5
        assert ((seen[p > 0] - wanted) ** 2 / wanted).sum() < 13.8, previous  # 2 degrees of freedom: p = 0.001
    assert table.sum() == 2400 - 4


def test_every_token_is_reachable_at_temperature_one():
    target = TableModel(torch.tensor([[2.0, 1.5, 1.0, 0.5]] * 4))
    drafter = DraftModelDrafter(TableModel(torch.tensor([[0.0, 0.0, 5.0, 0.0]] * 4)), 4)
    texts = [
        run(
            target,
            Pieces(dict.fromkeys(range(4), b"x")),
            [[0]],
            drafter=drafter,
            k=3,
            max_tokens=5,
            temperature=1.0,
            seed=s,
        )
        for s in range(60)
    ]
    for position in range(5):
        assert {t[0].token_ids[position] for t in texts} == {0, 1, 2, 3}


# ---- repetition penalty ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("method", ["oracle", "draft model", "self-draft", "ngram"])
def test_repetition_penalty_counts_drafts_before_it(method, k, target, pieces, drafter_of):
    prompt, ids = PROMPTS[2], list(PROMPTS[2])
    hidden = target.forward(ids, [Segment(0, 0, len(ids))])
    for _ in range(LENGTH + 10):
        ids.append(int(penalize_repetition(target.logits(hidden[-1:])[0], ids, 1.3).argmax()))
        hidden = target.forward(ids[-1:], [Segment(0, len(ids) - 1, 1)])
    assert ids[: 50 + LENGTH] != greedy(target, prompt, LENGTH)
    drafter = oracle([ids]) if method == "oracle" else drafter_of(method)
    done = run(target, pieces, [prompt], drafter=drafter, k=k, max_tokens=LENGTH, repetition_penalty=1.3)
    assert outputs(done) == [ids[50 : 50 + LENGTH]]
    if method in ("oracle", "self-draft"):
        assert all(drafted == accepted for drafted, accepted in counts(done))


def test_repetition_penalty_under_sampling_is_part_of_both_distributions(target, pieces, drafter_of):
    done = run(target, pieces, PROMPTS, sampled(repetition_penalty=1.5), drafter=drafter_of("self-draft"), k=4)
    assert all(drafted == accepted for drafted, accepted in counts(done))


# ---- logprobs -------------------------------------------------------------------------------------------------------


SAMPLED = {"temperature": 0.7, "seed": 3, "top_k": 20}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("plain", {}),
        ("oracle", {}),
        ("plain", SAMPLED),
        ("draft model", SAMPLED),
        ("draft model", {"repetition_penalty": 1.4}),
    ],
    ids=["plain", "oracle", "plain sampled", "draft model sampled", "draft model with penalty"],
)
def test_logprobs_are_those_of_a_teacher_forced_pass(method, options, target, pieces, drafter_of):
    """Raw: before penalty, temperature and filters, and one for every emitted token."""
    speculation = {} if method == "plain" else {"drafter": drafter_of(method), "k": 4}
    for generation, prompt in zip(
        run(target, pieces, PROMPTS, max_tokens=LENGTH, logprobs=3, **options, **speculation), PROMPTS, strict=True
    ):
        ids = prompt + generation.token_ids
        hidden = target.forward(ids, [Segment(0, 0, len(ids))])
        expected = torch.log_softmax(target.logits(hidden), -1)[len(prompt) - 1 : -1]
        assert len(generation.logprobs) == LENGTH
        for row, token, found in zip(expected, generation.token_ids, generation.logprobs, strict=True):
            assert set(found) == {token, *row.topk(3).indices.tolist()}
            assert all(abs(row[t].item() - value) < 1e-4 for t, value in found.items())


def test_logprobs_of_the_chosen_token_only_or_of_more_than_there_are(target, pieces):
    (done,) = run(target, pieces, [PROMPTS[0]], max_tokens=3, logprobs=0)
    assert [list(d) for d in done.logprobs] == [[t] for t in done.token_ids]
    (done,) = run(target, pieces, [PROMPTS[0]], max_tokens=3, logprobs=1000)
    assert [len(d) for d in done.logprobs] == [320] * 3
    (done,) = run(target, pieces, [PROMPTS[0]], max_tokens=3)
    assert done.logprobs is None


# ---- limits, vocabularies, damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ([], 4, ["empty"]),
        ([1] * 64, 1, ["64 tokens", "fewer than 64", "max_seq_len"]),
        ([1] * 60, 5, ["60 tokens", "5 more", "at most 64", "max_seq_len", "at most 4"]),
        ([1, 320, 2], 4, ["id 320", "0 to 319"]),
        ([-1], 4, ["id -1"]),
    ],
)
def test_prompts_that_do_not_fit_are_refused_before_any_work(prompt, max_tokens, words, pieces):
    engine = Engine(tiny_model("dummy:tiny-llama", max_seq_len=64), pieces, ())
    engine.target.forward = None  # any forward would now fail
    with pytest.raises(PromptError) as caught:
        engine.generate([[1, 2], prompt], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=max_tokens)])
    assert all(word in str(caught.value) for word in [*words, "prompt 2 of 2"]), caught.value


@pytest.mark.parametrize("k", [1, 8, 32])
@pytest.mark.parametrize("method", ["oracle", "ngram", "self-draft"])
def test_the_last_position_of_the_context_can_be_filled(method, k, pieces, twin, target):
    """A prompt of 58 in a context of 64: drafts are cut to what is left, and the text is whole."""
    model = tiny_model("dummy:tiny-llama?seed=5", max_seq_len=64)
    prompt = ([5, 6, 7] * 20)[:58]
    text = greedy(target, prompt, 64)
    drafter = {
        "oracle": oracle([text]),
        "ngram": NGramDrafter(NGramDecodingConfig(), ()),
        "self-draft": DraftModelDrafter(tiny_model("dummy:tiny-llama?seed=5", max_seq_len=64), 320),
    }[method]
    (done,) = run(model, pieces, [prompt], drafter=drafter, k=k, max_tokens=6)
    assert done.token_ids == text[58:64]
    check_rounds(done, k)


@pytest.mark.parametrize("sizes", [(300, 340), (340, 300)], ids=["drafter larger", "target larger"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 1}, {"repetition_penalty": 1.2}], ids=str)
def test_padded_vocabularies(sizes, options, pieces):
    """One tokenizer, heads padded to different sizes: no index is out of range, and greedy text is the target's."""
    target, drafter = (tiny_model(f"dummy:tiny-llama?seed={i + 5}&vocab={v}") for i, v in enumerate(sizes))
    wide = Pieces.for_vocabulary(340)
    prompts = [[1], list(range(sizes[0] - 40, sizes[0])), [2, 3]]  # with every id that only the larger one has
    proposer = DraftModelDrafter(drafter, sizes[0])
    done = run(target, wide, prompts, drafter=proposer, k=4, max_tokens=24, logprobs=2, **options)
    if "temperature" not in options:
        assert outputs(done) == outputs(run(target, wide, prompts, max_tokens=24, **options))
    drafted = [t for g in done for r in g.rounds for t in r.drafted]
    assert drafted and max(drafted) < min(sizes)
    assert max(t for g in done for t in g.token_ids) < sizes[0]


@pytest.mark.parametrize("method", ["plain", "oracle"])
def test_nan_logits_are_reported(method, texts, pieces):
    model = tiny_model("dummy:tiny-llama?seed=5")
    options = {} if method == "plain" else {"drafter": oracle(texts), "k": 4}
    model.norm = model.norm * math.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        run(model, pieces, [PROMPTS[0]], max_tokens=8, **options)
    with pytest.raises(FloatingPointError, match="NaN"):
        run(model, pieces, [PROMPTS[0]], max_tokens=8, temperature=1.0)


def test_nan_that_appears_on_the_way_is_reported(target, texts, pieces):
    model = tiny_model("dummy:tiny-llama?seed=5")

    def damage(states):
        if len(states[0].token_ids) > 10:
            model.cache[:, :, :, 3] = math.nan

    drafter = Around(oracle(texts), damage)
    with pytest.raises(FloatingPointError, match="NaN"):
        run(model, pieces, [PROMPTS[0]], drafter=drafter, k=4, max_tokens=LENGTH)


# ---- timing a step --------------------------------------------------------------------------------------------------


def test_steps_can_be_timed_while_a_stream_is_open(target, other, texts, pieces):
    drafter = DraftModelDrafter(other, 320)
    engine = Engine(target, pieces, (), drafter=drafter, max_draft_len=4)
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=LENGTH))
    next(stream)
    times = engine.time_steps([1, 5], context=100, repeats=2)
    assert set(times) == {1, 5} and min(times.values()) > 0
    assert engine.time_draft(4, context=100, repeats=2) > 0
    assert list(stream)[-1].token_ids == texts[0][1:][:LENGTH]


def test_drafting_is_timed_behind_a_verification_each_time(target, other, pieces, monkeypatch):
    """As in a round, where the target's weights have pushed the drafter's out of the caches."""
    engine, order = Engine(target, pieces, (), drafter=DraftModelDrafter(other, 320), max_draft_len=4), []
    forward, propose = target.forward, engine.drafter.propose
    monkeypatch.setattr(target, "forward", lambda ids, at, **o: (order.append(len(ids)), forward(ids, at, **o))[1])
    monkeypatch.setattr(engine.drafter, "propose", lambda states: (order.append("draft"), propose(states))[1])
    engine.time_draft(4, context=20, repeats=2)
    assert order == [5, "draft"] * 3


def test_timing_needs_room(target, other, pieces):
    engine = Engine(target, pieces, (), drafter=DraftModelDrafter(other, 320), max_draft_len=4)
    with pytest.raises(OptionError, match="256"):
        engine.time_steps([1, 5], context=252)
    with pytest.raises(OptionError, match="256"):
        engine.time_draft(4, context=250)
    assert Engine(target, pieces, ()).time_draft(4, context=10) == 0.0
