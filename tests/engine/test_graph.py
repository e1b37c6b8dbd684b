"""Rounds of fixed operations over fixed buffers, and the loop around them, on a CPU (so without graphs).

Everything that a captured round must get right shows here: lengths that advance on the device, rows beyond the batch,
results read one round late, drafts that do not depend on how the round before ended.
"""

from __future__ import annotations

import math
import random
import time
from itertools import pairwise

import pytest
import torch
from gpu_models import PLAIN, Pages, TableModel, engine, gpu_model, packed_dummy, random_ids, run
from stand_ins import PROMPTS, Around, Pieces, Replay, adversary, oracle, p_value, pattern

from tutorial_lib.config import NGramDecodingConfig, SamplingParams, SimulatedAcceptance
from tutorial_lib.drafters.base import Draft
from tutorial_lib.drafters.ngram import NGramDrafter
from tutorial_lib.engine.drafting import ModelDrafting
from tutorial_lib.engine.gpu_build import assemble
from tutorial_lib.engine.gpu_model import MAX_STEP_ROWS, PAGE
from tutorial_lib.engine.graph import DeviceState, RoundProgram, forced_schedule, position_limit
from tutorial_lib.engine.sampling import probabilities
from tutorial_lib.errors import OptionError, PromptError

TARGET = "dummy:tiny-llama?seed=11&layers=1"  # its greedy texts hardly repeat
LENGTH = 30
REPLAYED = {"oracle": oracle, "adversary": adversary, "pattern": pattern}
METHODS = (*REPLAYED, "draft model", "self-draft", "ngram")


@pytest.fixture(scope="module")
def model():
    return gpu_model(TARGET)


@pytest.fixture(scope="module")
def twin():
    return gpu_model(TARGET)


@pytest.fixture(scope="module")
def small():
    """Another model of the same vocabulary: a bad drafter."""
    return gpu_model("dummy:tiny-llama?seed=4&layers=1")


@pytest.fixture(scope="module")
def texts(model):
    """Prompt + greedy text of every prompt: one token after the other from the bare model."""
    return [list(p) + greedy(model, p, LENGTH + 20) for p in PROMPTS]


@pytest.fixture
def drafting(texts, twin, small):
    """drafting(method): the options that make an engine draft so."""

    def make(method: str, known=None) -> dict:
        if method in REPLAYED:
            return {"host": REPLAYED[method](known or texts)}
        if method == "ngram":
            return {"host": NGramDrafter(NGramDecodingConfig(max_draft_len=1, max_matching_ngram_size=2), ())}
        return {"draft": {"draft model": small, "self-draft": twin}[method]}

    return make


def greedy(model, prompt, count: int) -> list[int]:
    """Greedy tokens after `prompt`, by steps of one row over a block table of its own: no engine, no rounds."""
    pages, ids = Pages(model, range(-(-(len(prompt) + count) // PAGE))), list(prompt)
    if len(prompt) > 1:
        model.prefill(ids[:-1], pages.table, 0)
    while len(ids) < len(prompt) + count:
        ids.append(int(pages.logits(ids[-1:], len(ids) - 1).argmax()))
    return ids[len(prompt) :]


def outputs(generations) -> list[list[int]]:
    return [g.token_ids for g in generations]


def counts(generations) -> list[list[tuple[int, int]]]:
    return [[(len(r.drafted), r.accepted) for r in g.rounds] for g in generations]


def check_rounds(generation) -> None:
    """Rounds and tokens tell the same story: the first token is prefill's, the rest come from rounds."""
    assert [t for r in generation.rounds for t in r.emitted] == generation.token_ids[1:]
    for r in generation.rounds:
        assert 1 <= len(r.emitted) <= r.accepted + 1 and r.accepted <= len(r.drafted)
        kept = min(r.accepted, len(r.emitted))
        assert r.drafted[:kept] == r.emitted[:kept]
        assert r.draft_s >= 0 and r.verify_s > 0
    ends = [generation.ttft_s, *(r.end_s for r in generation.rounds)]
    assert all(a <= b for a, b in pairwise(ends)) and ends[-1] == generation.latency_s


# ---- greedy speculation is greedy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_that_of_plain_decoding(method, k, model, texts, pieces, drafting):
    """Prompts of 1, 2 and 50 tokens as one batch whose rows accept differently and end at different times."""
    lengths = (LENGTH, LENGTH - 7, LENGTH - 15)
    params = [SamplingParams(max_tokens=n) for n in lengths]
    done = run(model, pieces, PROMPTS, params, k=k, **drafting(method))
    for generation, prompt, text, length in zip(done, PROMPTS, texts, lengths, strict=True):
        assert generation.token_ids == text[len(prompt) :][:length]
        assert generation.finish_reason == "length" and generation.text == pieces.decode(generation.token_ids)
        check_rounds(generation)
        if method == "self-draft":
            assert [(len(r.drafted), r.accepted) for r in generation.rounds] == [(k, k)] * math.ceil(
                (length - 1) / (k + 1)
            )
        elif method == "oracle":
            assert all(r.accepted == len(r.drafted) for r in generation.rounds)
        elif method == "adversary":
            assert len(generation.rounds) == length - 1
        elif method == "pattern":
            assert [r.accepted for r in generation.rounds] == [
                i % (len(r.drafted) + 1) for i, r in enumerate(generation.rounds)
            ]


def test_plain_decoding_is_a_round_of_one_row(model, texts, pieces):
    done = run(model, pieces, PROMPTS, greedy={"max_tokens": LENGTH})
    assert outputs(done) == [t[len(p) :][:LENGTH] for p, t in zip(PROMPTS, texts, strict=True)]
    assert counts(done) == [[(0, 0)] * (LENGTH - 1)] * 3
    for generation in done:
        check_rounds(generation)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("dummy:tiny-qwen2", ("fp8", "bf16")),
        ("dummy:tiny-qwen3", ("bf16", "bf16")),
        ("dummy:tiny-mistral", ("bf16", "bf16")),
        ("dummy:tiny-mistral", ("fp8 calibrated", "fp8")),
    ],
    ids=str,
)
def test_every_family_and_number_format_drafts_for_itself(name, form, pieces):
    """Acceptance exactly 1, or the drafter's cache has holes; Mistral's window of 32 is passed on the way."""
    target, draft = (gpu_model(name, weights=form[0], cache=form[1]) for _ in range(2))
    plain = run(target, pieces, PROMPTS, greedy={"max_tokens": 30})
    done = run(target, pieces, PROMPTS, draft=draft, k=4, greedy={"max_tokens": 30})
    assert outputs(done) == outputs(plain)
    assert counts(done) == [[(4, 4)] * 6] * 3


@pytest.mark.parametrize(
    ("form", "draft_form"),
    [
        (("bf16", "fp8"), ("bf16", "bf16")),
        (("fp8", "bf16"), ("fp8 calibrated", "fp8")),
        (("fp8 calibrated", "fp8"), ("bf16", "bf16")),
    ],
    ids=str,
)
def test_target_and_drafter_have_number_formats_of_their_own(form, draft_form, pieces):
    target, draft = (gpu_model(weights=w, cache=c) for w, c in (form, draft_form))
    plain = run(target, pieces, PROMPTS, greedy={"max_tokens": 30})
    done = run(target, pieces, PROMPTS, draft=draft, k=3, greedy={"max_tokens": 30})
    assert outputs(done) == outputs(plain)
    assert sum(r.accepted for g in done for r in g.rounds) > 30  # nearly the same model


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_row_of_a_batch_is_as_it_is_alone(size, model, texts, pieces):
    """Batches of 3 and 5 lie between the buckets; each row accepts in its own way."""
    prompts = [list(p) for p in (PROMPTS[2], PROMPTS[0], PROMPTS[1], PROMPTS[2][:17], [8])][:size]
    known = [p + greedy(model, p, LENGTH + 20) for p in prompts]
    ways = [lambda n, b: b, lambda n, b: 0, lambda n, b: b * (n % 2), lambda n, b: n % (b + 1), lambda n, b: 1]

    class Each(Replay):
        def _draft(self, state):
            at = next(i for i, t in enumerate(self.texts) if t[: len(state.token_ids)] == state.token_ids)
            self.right = ways[at]
            return super()._draft(state)

    params = [SamplingParams(max_tokens=LENGTH - 4 * i) for i in range(size)]
    together = run(model, pieces, prompts, params, host=Each(known, ways[0]), k=4)
    for i, prompt in enumerate(prompts):
        alone = run(model, pieces, [prompt], params[i], host=Replay([known[i]], ways[i]), k=4)
        assert outputs(alone) == [together[i].token_ids] == [known[i][len(prompt) :][: params[i].max_tokens]]
        assert counts(alone) == counts([together[i]])


# ---- the round itself -----------------------------------------------------------------------------------------------


def test_rows_beyond_the_batch_touch_no_slot_and_no_page_but_the_scratch_ones(model, twin):
    """Three slots in a bucket of four, a fourth slot idle: every page that is not theirs stays NaN."""
    blocks = -(-position_limit(60, 3) // PAGE)
    state = DeviceState.make(5, blocks, model.pages - 1, "cpu")
    for slot in (0, 1, 3):
        state.table[slot] = torch.arange(slot * blocks, (slot + 1) * blocks)
        state.length[slot], state.last[slot] = 30 + slot, torch.tensor([slot, slot + 1])
        for m in (model, twin):
            m.prefill(random_ids(30 + slot - 1, seed=slot), state.table, slot)
    own = [int(p) for slot in (0, 1, 3) for p in state.table[slot]]
    foreign = [p for p in range(model.pages - 1) if p not in own]
    for m in (model, twin):
        for cache in m.cache:
            cache[[*foreign, model.pages - 1]] = math.nan
    before = [t.clone() for t in (state.length, state.last)]
    program = RoundProgram(model, ModelDrafting(twin), state, batch=4, max_draft_len=3)
    program.choose([3, 0, 1])
    program.launch()
    assert program.slots.tolist() == [3, 0, 1, 5]
    accepted = program.out[:3, 0].tolist()
    for row, slot in enumerate((3, 0, 1)):
        assert state.length[slot] == before[0][slot] + accepted[row] + 1
        assert state.last[slot, 1] == program.out[row, 1]
    assert (state.length[[2, 4, 5]] == before[0][[2, 4, 5]]).all() and (state.last[[2, 4]] == before[1][[2, 4]]).all()
    for m in (model, twin):
        for cache in m.cache:
            assert torch.isnan(cache[foreign]).all() and torch.isfinite(cache[own]).all()
            cache.zero_()


@pytest.mark.parametrize("method", ["adversary", "pattern", "draft model", "self-draft"])
def test_stale_cache_rows_change_nothing(method, model, small, twin, texts, pieces, drafting, monkeypatch):
    """Before every round all positions that hold no text are made NaN in every cache, the scratch page as well."""
    options = drafting(method)
    models = [model] + ([options["draft"]] if "draft" in options else [])
    addresses = [cache.data_ptr() for m in models for cache in m.cache]
    launch = RoundProgram.launch

    def poisoned(program):
        kept = torch.zeros(model.pages, PAGE, dtype=torch.bool)
        state = program.state
        for slot in program.slots.unique().tolist():
            if slot < state.length.shape[0] - 1:
                at = torch.arange(int(state.length[slot]) - 1)  # the last token has not been seen yet
                kept[state.table[slot, at // PAGE].long(), at % PAGE] = True
        for m in models:
            for cache in m.cache:
                cache.masked_fill_(~kept[:, None, None, :, None], math.nan)
        launch(program)

    monkeypatch.setattr(RoundProgram, "launch", poisoned)
    done = run(model, pieces, PROMPTS, k=4, greedy={"max_tokens": LENGTH}, **options)
    monkeypatch.undo()
    assert outputs(done) == [t[len(p) :][:LENGTH] for p, t in zip(PROMPTS, texts, strict=True)]
    assert [cache.data_ptr() for m in models for cache in m.cache] == addresses
    for m in models:
        for cache in m.cache:
            cache.zero_()
    assert counts(done) == counts(run(model, pieces, PROMPTS, k=4, greedy={"max_tokens": LENGTH}, **drafting(method)))


def test_one_program_serves_each_bucket_and_kind(model, pieces, twin):
    made = engine(model, pieces, draft=twin, k=2)
    assert [made.program(n).batch for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 5]  # 5 slots: no bucket of 8
    assert made.program(3) is made.program(4) and made.program(3) is not made.program(3, is_sampled=True)


def test_more_rows_than_a_step_holds_wait_or_are_refused(pieces):
    """K = 20: three requests are 63 rows, the fourth waits though a slot is free; K = 64 fits nobody."""
    target, draft = (gpu_model(slots=5, max_seq_len=100, draft_len=20) for _ in range(2))
    prompts = [[i + 1, 3, 5] for i in range(5)]
    plain = run(target, pieces, prompts, greedy={"max_tokens": 25}, max_seq_len=100)
    done = run(target, pieces, prompts, draft=draft, k=20, greedy={"max_tokens": 25}, max_seq_len=100)
    assert outputs(done) == outputs(plain)
    assert all(r.accepted == 20 for g in done for r in g.rounds)
    with pytest.raises(OptionError, match="at most 63"):
        engine(target, pieces, draft=draft, k=MAX_STEP_ROWS)
    with pytest.raises(OptionError, match="84 rows"):
        RoundProgram(target, ModelDrafting(draft), DeviceState.make(4, 2, 0, "cpu"), batch=4, max_draft_len=20)


@pytest.mark.parametrize("sizes", [(300, 340), (340, 300)], ids=["drafter larger", "target larger"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_padded_vocabularies(sizes, temperature):
    """One tokenizer, heads padded to different sizes: no index is out of range, and greedy text is the target's."""
    target, draft = (gpu_model(f"dummy:tiny-llama?seed={i + 5}&vocab={v}") for i, v in enumerate(sizes))
    wide, prompts = Pieces.for_vocabulary(340), [[1], list(range(sizes[0] - 40, sizes[0])), [2, 3]]
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=1)
    done = run(target, wide, prompts, params, draft=draft, k=4)
    if not temperature:
        assert outputs(done) == outputs(run(target, wide, prompts, params))
    drafted = [t for g in done for r in g.rounds for t in r.drafted]
    assert drafted and max(drafted) < min(sizes)
    assert max(t for g in done for t in g.token_ids) < sizes[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_shortlist_head_drafts_ids_of_the_target(temperature, model, pieces):
    """The target's own weights with a head of half the rows: drafts are right wherever the target's token is listed."""
    head_ids = torch.arange(0, 320, 2)
    config, packed = packed_dummy(TARGET)
    packed["head"] = packed["head"][head_ids].contiguous()
    draft = assemble(config, packed, {}, pages=model.pages, max_positions=model.max_positions, ops=PLAIN)
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=2)
    done = run(model, pieces, PROMPTS, params, draft=draft, head_ids=head_ids, k=3)
    drafted = {t for g in done for r in g.rounds for t in r.drafted}
    assert drafted <= set(head_ids.tolist()) and len(drafted) > 10
    if not temperature:
        assert outputs(done) == outputs(run(model, pieces, PROMPTS, params))
        for generation in done:
            for r in generation.rounds[:-1]:
                wanted = r.emitted[-1]
                assert r.accepted == 3 or wanted % 2 == 1  # stopped by a token that is not on the list


# ---- the end of a request, inside a block, read a round late --------------------------------------------------------


@pytest.mark.parametrize(("kind", "k"), [("eos", 1), ("eos", 4), ("stop id", 8)])
def test_an_end_token_at_every_place_of_a_block(kind, k, model, twin, texts, pieces):
    """Run greedy first, then declare the id first seen at position j to be the end."""
    prompt, text = PROMPTS[1], texts[1][2:]
    for j in range(11):
        end = text[j]
        if end in text[:j]:
            continue
        params = SamplingParams(max_tokens=LENGTH, stop_token_ids=[end] if kind == "stop id" else None)
        for options in ({"draft": twin}, {"host": pattern(texts)}):
            (done,) = run(model, pieces, [prompt], params, eos=[end] if kind == "eos" else [], k=k, **options)
            assert done.token_ids == text[: j + 1]
            assert (done.finish_reason, done.stop_reason) == ("stop", end if kind == "stop id" else None)
            assert done.text == pieces.decode(text[:j])  # the end token itself is not text
            check_rounds(done)


def test_ignored_ends_end_nothing(model, twin, texts, pieces):
    text = texts[1][2:]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (done,) = run(model, pieces, [PROMPTS[1]], params, eos=text[2:6], draft=twin, k=4)
    assert done.token_ids == text[:20] and done.finish_reason == "length"


@pytest.mark.parametrize("k", [1, 4])
def test_a_stop_string_at_every_place_of_a_block(k, model, twin, texts, pieces):
    text, found = texts[0][1:], 0
    for j in range(1, 14):
        stop = pieces.decode(text[j - 1 : j + 1])[2:-1]
        length = next((n for n in range(1, LENGTH) if stop in pieces.decode(text[:n])), None)
        if not stop or length is None or "\ufffd" in stop:
            continue  # half a character
        found += 1
        params = SamplingParams(max_tokens=LENGTH, stop=["#never#", stop])
        for options in ({}, {"draft": twin, "k": k}):
            (done,) = run(model, pieces, [PROMPTS[0]], params, **options)
            whole = pieces.decode(text[:length])
            assert done.token_ids == text[:length] and done.text == whole[: whole.index(stop)]
            assert (done.finish_reason, done.stop_reason) == ("stop", stop)
            check_rounds(done)
    assert found > 6


@pytest.mark.parametrize("method", ["oracle", "ngram", "self-draft"])
def test_exactly_max_tokens(method, model, pieces, drafting):
    """A repetitive prompt, for n-gram lookup; every limit that a block can overrun."""
    prompt = [1, 2, 3] * 4
    text = prompt + greedy(model, prompt, 40)
    for limit in (1, 2, 3, 4, 8, 10):
        for k in (1, 3, 8):
            (done,) = run(model, pieces, [prompt], k=k, greedy={"max_tokens": limit}, **drafting(method, [text]))
            assert done.token_ids == text[12 : 12 + limit] and done.finish_reason == "length"
            check_rounds(done)


@pytest.mark.parametrize("k", [0, 1, 8, 30])
def test_the_last_position_of_the_context_can_be_filled(k, pieces):
    """A prompt of 58 in a context of 64: rounds may run past the end, their pages are there."""
    target, draft = (gpu_model(slots=2, max_seq_len=64, draft_len=k) for _ in range(2))
    prompt = ([5, 6, 7] * 20)[:58]
    (done,) = run(
        target, pieces, [prompt], draft=draft if k else None, k=k, max_slots=2, max_seq_len=64, greedy={"max_tokens": 6}
    )
    assert done.token_ids == greedy(target, prompt, 6)


def test_a_row_that_ends_early_emits_nothing_more_and_the_others_go_on(model, twin, texts, pieces):
    ends = [texts[0][1 + 9], 319, texts[2][50 + 4]]
    params = [SamplingParams(max_tokens=LENGTH, stop_token_ids=[e]) for e in ends]
    done = run(model, pieces, PROMPTS, params, draft=twin, k=4)
    for generation, prompt, text, end in zip(done, PROMPTS, texts, ends, strict=True):
        plain = text[len(prompt) :][:LENGTH]
        assert generation.token_ids == (plain[: plain.index(end) + 1] if end in plain else plain)


# ---- streams and state between calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["plain", "self-draft", "pattern"])
def test_a_stream_grows_to_the_result(method, model, texts, pieces, drafting):
    options = {} if method == "plain" else {"k": 4, **drafting(method)}
    made, params = engine(model, pieces, **options), SamplingParams(max_tokens=LENGTH)
    items = list(made.stream(PROMPTS[2], params))
    assert items[-1].token_ids == texts[2][50:][:LENGTH] and items[-1].finish_reason == "length"
    for item, later in pairwise(items):
        assert later.token_ids[: len(item.token_ids)] == item.token_ids and later.text.startswith(item.text)
    assert items[0].token_ids == texts[2][50:51]
    (whole,) = made.generate([PROMPTS[2]], [params])
    assert whole.token_ids == items[-1].token_ids and counts([whole]) == counts(items[-1:])


@pytest.mark.parametrize("method", ["plain", "self-draft", "oracle"])
def test_streams_side_by_side(method, model, texts, pieces, drafting):
    """Two streams read in turn with rounds in flight, and a batch in between, all on one engine."""
    options = {} if method == "plain" else {"k": 3, **drafting(method)}
    made, params = engine(model, pieces, **options), SamplingParams(max_tokens=LENGTH)
    streams = [made.stream(p, params) for p in PROMPTS[:2]]
    heads = [[next(s).token_ids for s in streams] for _ in range(4)]
    between = made.generate([PROMPTS[2], PROMPTS[0]], [params] * 2)
    assert outputs(between) == [texts[2][50:][:LENGTH], texts[0][1:][:LENGTH]]
    assert heads[-1][0] == texts[0][1 : 1 + len(heads[-1][0])]
    for stream, prompt, text in zip(streams, PROMPTS, texts, strict=False):
        assert list(stream)[-1].token_ids == text[len(prompt) :][:LENGTH]


@pytest.mark.parametrize("method", METHODS)
def test_calls_do_not_remember_each_other(method, model, pieces, drafting):
    made, params = engine(model, pieces, k=4, **drafting(method)), [SamplingParams(max_tokens=20)]
    a, b, *again = (made.generate([PROMPTS[i]], params) for i in (1, 2, 1, 1))
    assert outputs(b) != outputs(a)
    for later in again:
        assert outputs(later) == outputs(a) and counts(later) == counts(a)


def test_slots_and_pages_are_all_free_after_200_requests(model, small, pieces):
    """Batches, streams read to the end or dropped half-way, refused prompts, interrupted rounds."""
    made, rng = engine(model, pieces, draft=small, k=3), random.Random(0)
    free, served = sorted(made._free), 0
    launch, armed = RoundProgram.launch, [0]

    def fuse(program):
        armed[0] -= 1
        if armed[0] == 0:
            raise KeyboardInterrupt
        launch(program)

    def request():
        ids = [rng.randrange(320) for _ in range(rng.choice((1, 2, 5, 70)))]
        kind = rng.choice(({}, {"temperature": 0.9}, {"stop": "w1"}, {"stop_token_ids": list(range(0, 320, 9))}))
        return ids, SamplingParams(max_tokens=rng.randint(1, 9), **kind)

    RoundProgram.launch = fuse
    try:
        while served < 200:
            action = rng.choice(("batch", "batch", "stream", "dropped", "refused", "interrupted"))
            if action == "refused":
                with pytest.raises(PromptError):
                    made.generate([[1], [999]], [SamplingParams()] * 2)
            elif action in ("batch", "interrupted"):
                prompts, params = zip(*(request() for _ in range(rng.randint(1, 9))), strict=True)
                armed[0] = rng.randint(1, 3) if action == "interrupted" else 0
                try:
                    made.generate(prompts, params)
                except KeyboardInterrupt:
                    assert action == "interrupted"
                armed[0], served = 0, served + len(prompts)
            else:
                stream = made.stream(*request())
                for _ in range(rng.randint(0, 2) if action == "dropped" else 99):
                    next(stream, None)
                stream.close()
                served += 1
            assert sorted(made._free) == free and made.cache.pool.available == model.pages - 1, action
    finally:
        RoundProgram.launch = launch


def test_more_prompts_than_slots_keep_their_order(model, pieces, small):
    prompts = [[i + 1, 2 * i + 1, 3] for i in range(12)]
    params = [SamplingParams(max_tokens=5 + 3 * (i % 4)) for i in range(12)]
    expected = [greedy(model, p, q.max_tokens) for p, q in zip(prompts, params, strict=True)]
    assert outputs(run(model, pieces, prompts, params, max_slots=2)) == expected
    assert outputs(run(model, pieces, prompts, params, draft=small, k=3)) == expected


# ---- sampling -------------------------------------------------------------------------------------------------------


def sampled(**options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.8, "seed": 42, **options})


@pytest.mark.parametrize("method", ["plain", "draft model", "ngram"])
def test_a_seed_decides_the_text_whatever_surrounds_it(method, model, texts, pieces, drafting):
    options = {} if method == "plain" else {"k": 3, **drafting(method)}
    made = engine(model, pieces, **options)
    alone = made.generate([PROMPTS[1]], [sampled()])
    assert outputs(made.generate([PROMPTS[1]], [sampled()])) == outputs(alone)
    neighbours = [sampled(seed=1), sampled(), sampled(seed=None), SamplingParams(max_tokens=9)]
    batch = made.generate([PROMPTS[2], PROMPTS[1], PROMPTS[1], PROMPTS[0]], neighbours)
    assert batch[1].token_ids == alone[0].token_ids and counts([batch[1]]) == counts(alone)
    assert batch[3].token_ids == texts[0][1:10]  # a greedy neighbour stays greedy
    assert outputs(made.generate([PROMPTS[1]], [sampled(seed=43)])) != outputs(alone)
    assert len({tuple(made.generate([PROMPTS[1]], [sampled(seed=None)])[0].token_ids) for _ in range(6)}) > 1
    assert outputs(made.generate([PROMPTS[0]], [SamplingParams(max_tokens=9)])) == [texts[0][1:10]]


def test_a_drafter_that_agrees_in_distribution_is_always_accepted(model, twin, pieces):
    done = run(model, pieces, PROMPTS, sampled(top_p=0.9), draft=twin, k=4)
    assert all(drafted == accepted for g in counts(done) for drafted, accepted in g)


class Fixed:
    """Drafts the same tokens always; q is one-hot."""

    feature_layers = ()

    def reset(self, slot, prompt_ids, features=None) -> None: ...

    def observe(self, outcomes) -> None: ...

    def propose(self, states):
        return [Draft((1, 2, 1)[: s.budget]) for s in states]


@pytest.mark.parametrize("method", ["plain", "draft model", "one-hot"])
def test_the_text_has_the_targets_distribution(method):
    """End to end, seeds one after the other: a target and a drafter whose next token depends on the last one."""
    options, generator = {"temperature": 0.8, "top_k": 3}, torch.Generator().manual_seed(4)
    target, draft = (TableModel(1.2 * torch.randn(4, 4, generator=generator)) for _ in range(2))
    proposer = {"plain": {}, "draft model": {"draft": draft, "k": 3}, "one-hot": {"host": Fixed(), "k": 3}}[method]
    params = [SamplingParams(max_tokens=150, seed=i, **options) for i in range(32)]
    tokenizer = Pieces(dict.fromkeys(range(4), b"x"))
    done = run(target, tokenizer, [[0]] * 32, params, max_slots=32, **proposer)
    table = torch.zeros(4, 4)
    for generation in done:
        for previous, token in pairwise([0, *generation.token_ids]):
            table[previous, token] += 1
    assert table.sum() == 32 * 150
    for previous in range(4):
        assert p_value(table[previous], probabilities(target.table[previous], params[0])) > 0.001, previous


# ---- forced acceptance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [1.0, 1.25, 2.44, 3.0, 4.99, 5.0])
def test_the_schedule_has_the_mean_asked_for_and_the_least_variance(mean):
    schedule = forced_schedule(SimulatedAcceptance(acceptance_length=mean), 4)
    assert 1 + sum(schedule) / len(schedule) == pytest.approx(mean, abs=0.005)
    assert set(schedule) <= {math.floor(mean - 1), math.ceil(mean - 1)}
    for window in (schedule[:10], schedule[37:57]):  # spread evenly: every stretch has about the mean
        assert abs(sum(window) - len(window) * (mean - 1)) < 1 + 1e-6


def test_shares_by_position_come_out_as_asked_and_evenly():
    rates = (0.8, 0.55, 0.55, 0.1)
    schedule = forced_schedule(SimulatedAcceptance(acceptance_by_position=rates), 6)
    assert SimulatedAcceptance(acceptance_by_position=rates).acceptance_length == pytest.approx(3.0)
    for depth, rate in enumerate(rates, start=1):
        assert sum(n >= depth for n in schedule) == 1000 * rate
        for window in (schedule[:50], schedule[321:371]):
            assert sum(n >= depth for n in window) == pytest.approx(50 * rate, abs=3)
    with pytest.raises(OptionError, match="has 4 shares.*at most 3"):
        forced_schedule(SimulatedAcceptance(acceptance_by_position=rates), 3)
    for wrong in ({}, {"acceptance_length": 2.0, "acceptance_by_position": [0.5]}):
        with pytest.raises(OptionError, match="both or neither"):
            SimulatedAcceptance(**wrong)
    for wrong in ([], [0.5, 0.6], [1.2], [0.5, -0.1], [float("nan")]):
        with pytest.raises(OptionError, match="never rise"):
            SimulatedAcceptance(acceptance_by_position=wrong)


@pytest.mark.parametrize("mean", [5.5, 1.2])
def test_a_mean_out_of_reach_is_refused(mean, model, twin, pieces):
    k = 4 if mean > 5 else 0
    with pytest.raises(OptionError, match=f"acceptance_length is {mean:g}.*from 1 to {k + 1} with"):
        engine(
            model,
            pieces,
            draft=twin if k else None,
            k=k,
            simulated_acceptance=SimulatedAcceptance(acceptance_length=mean),
        )


@pytest.mark.parametrize("method", ["draft model", "ngram"])
@pytest.mark.parametrize("mean", [1.0, 2.44, 5.0])
def test_forced_acceptance_is_what_was_asked_for_and_is_said_everywhere(mean, method, model, pieces, drafting):
    """Two requests at once; what a host drafter proposes, or does not, changes no count."""
    forced = SimulatedAcceptance(acceptance_length=mean)
    made = engine(model, pieces, k=4, simulated_acceptance=forced, **drafting(method))
    params = SamplingParams(max_tokens=61, ignore_eos=True)
    done = made.generate(PROMPTS[:2], [params] * 2)
    for generation in done:
        assert generation.is_simulated and len(generation.token_ids) == 61
        full = [len(r.emitted) for r in generation.rounds[:-1]]
        assert abs(sum(full) - mean * len(full)) <= 1
        assert all(len(r.emitted) == r.accepted + 1 for r in generation.rounds[:-1])
    items = list(made.stream(PROMPTS[0], SamplingParams(max_tokens=9)))
    assert len(items) > 2 and all(item.is_simulated for item in items)
    assert not run(model, pieces, [PROMPTS[0]])[0].is_simulated


# ---- refusals, timing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "value"), [("logprobs", 0), ("repetition_penalty", 1.2)])
def test_what_rounds_cannot_do_is_refused_before_any_work(option, value, model, pieces):
    made = engine(model, pieces)
    with pytest.raises(OptionError, match=option):
        made.generate([[1], [2]], [SamplingParams(), SamplingParams(**{option: value})])
    with pytest.raises(OptionError, match=option):
        made.stream([1], SamplingParams(**{option: value}))
    assert made.generate([[1]], [SamplingParams(repetition_penalty=1.0, max_tokens=2)])[0].token_ids


def test_nan_logits_are_reported(pieces):
    model = gpu_model()
    model.norm = model.norm * math.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        run(model, pieces, [PROMPTS[0]])


def test_steps_can_be_timed_before_the_first_request_and_while_a_stream_is_open(texts, pieces, small):
    """Timing uses free pages and a table of its own: neither an open stream nor a later prefill may notice."""
    target = gpu_model(TARGET)
    made, params = engine(target, pieces, draft=small, k=4), SamplingParams(max_tokens=LENGTH)
    assert set(made.time_steps([1, 5], context=100, repeats=1)) == {1, 5}
    stream = made.stream(PROMPTS[2], params)
    next(stream)
    assert min(made.time_steps([1, 5], context=100, repeats=1).values()) > 0
    assert made.time_draft(4, context=100, repeats=1) > 0
    assert list(stream)[-1].token_ids == texts[2][50:][:LENGTH]
    assert outputs(made.generate([PROMPTS[2]], [params])) == [texts[2][50:][:LENGTH]]


def test_timing_needs_room(model, pieces, drafting):
    made = engine(model, pieces, k=4, **drafting("ngram"))
    assert made.time_draft(4, context=100, repeats=2) > 0  # a drafter on the host is timed as one
    with pytest.raises(OptionError, match="200"):
        made.time_steps([1, 5], context=198)
    streams = [made.stream(PROMPTS[0], SamplingParams(max_tokens=9)) for _ in range(5)]
    for stream in streams:
        next(stream)
    with pytest.raises(OptionError, match="stream"):
        made.time_steps([1], context=50)
    assert engine(model, pieces).time_draft(4, context=10) == 0.0


def test_a_drafter_on_the_host_has_its_time_counted(model, texts, pieces):
    slow = Around(oracle(texts), lambda states: time.sleep(0.02))
    (done,) = run(model, pieces, [PROMPTS[0]], host=slow, k=3, greedy={"max_tokens": 9})
    assert all(r.draft_s > 0.02 for r in done.rounds)


@pytest.mark.parametrize("k", [0, 3])
def test_damaged_logits_inside_a_round_raise_and_the_engine_goes_on(k):
    """Token 3 leads to NaN two rounds on; a look-up drafter runs beside. Slots and pages come back."""
    table = torch.full((8, 8), -5.0)
    for token, following in ((1, 2), (2, 3), (4, 5), (5, 4)):
        table[token, following] = 5.0
    table[3] = math.nan
    host = NGramDrafter(NGramDecodingConfig(max_draft_len=k), ()) if k else None
    made = engine(TableModel(table), Pieces.for_vocabulary(8), host=host, k=k)
    before = (sorted(made._free), made.cache.pool.available)
    params = SamplingParams(max_tokens=12)
    for prompts in ([[4], [1]], [[1]]):
        with pytest.raises(FloatingPointError, match="NaN or infinity"):
            made.generate(prompts, [params] * len(prompts))
        assert (sorted(made._free), made.cache.pool.available) == before
    assert made.generate([[4]], [params])[0].token_ids == [5, 4] * 6
