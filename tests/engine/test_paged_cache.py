"""Pages of the GPU path, run as plain torch on a CPU: found again by their content, with the drafter's keys in them,
copied where texts part, and going round behind a sliding window."""

from __future__ import annotations

import pytest
from gpu_engines import KV, LONGEST, SHALLOW, SLOTS, TEXT, Exact, engine_for, make_heads, model, outputs
from gpu_models import Pages, engine, random_ids
from stand_ins import serve

from tutorial_lib.config import SamplingParams
from tutorial_lib.engine.gpu_engine import GpuEngine
from tutorial_lib.errors import OptionError

LONG = random_ids(200, seed=9)


@pytest.fixture(autouse=True)
def exact():
    with Exact():
        yield


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return make_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture
def engine_of(heads):
    """engine_of(method, kv, schedule): see `engine_for`."""
    return lambda method, *arguments, **options: engine_for(method, heads, *arguments, **options)


@pytest.mark.parametrize("method", ["none", "self-draft", "eagle"])
@pytest.mark.parametrize("shared", [0, 10, 64, 65, 150, 200])
def test_a_reused_beginning_gives_the_same_text(shared, method, engine_of, monkeypatch):
    """Every kind of place where two texts can part; at 200 the prompt is the same one. Only the rest is computed, and
    what is drafted is what a cold cache lets draft."""
    warm, cold = engine_of(method, KV["reuse"]), engine_of(method)
    prompt, params = LONG[:shared] + [(t + 1) % 320 for t in LONG[shared:]], [SamplingParams(max_tokens=20)]
    warm.generate([LONG], params)
    rows: list[int] = []
    for name in ("prefill", "last_step"):
        kept = getattr(warm.target, name)
        counted = lambda ids, *a, kept=kept, **o: (rows.append(len(ids)), kept(ids, *a, **o))[1]  # noqa: E731
        monkeypatch.setattr(warm.target, name, counted)
    (found,), (expected,) = warm.generate([prompt], params), cold.generate([prompt], params)
    assert found.token_ids == expected.token_ids
    assert [(r.drafted, r.accepted) for r in found.rounds] == [(r.drafted, r.accepted) for r in expected.rounds]
    ahead = method == "eagle"  # its key of a position hangs on the token after it
    known = min(max(0, shared - ahead), 192)
    assert found.cached_tokens == known and sum(rows) == 200 - known
    assert warm.cache.pool.held == 0


@pytest.mark.parametrize("method", ["none", "self-draft", "eagle"])
def test_a_conversation_goes_on_where_it_ended(method, engine_of):
    """The answer of the first turn is in the cache too, but nothing that was not read before it ended: texts that end
    with a page, one token before it and a few behind."""
    warm, cold, params = engine_of(method, KV["reuse"]), engine_of(method), [SamplingParams(max_tokens=12)]
    for number, length in enumerate((127, 128, 129, 136)):
        prompt = [number, *LONG[:100]]
        (first,) = warm.generate([prompt], [SamplingParams(max_tokens=length - 101)])
        turn = prompt + first.token_ids + [3, 1, 4]
        (found,), (expected,) = warm.generate([turn], params), cold.generate([turn], params)
        assert found.cached_tokens == (128 if length == 136 else 64)
        assert found.token_ids == expected.token_ids
        assert [(r.drafted, r.accepted) for r in found.rounds] == [(r.drafted, r.accepted) for r in expected.rounds]


@pytest.mark.parametrize("method", ["draft model", "eagle"])
def test_copies_are_private(method, engine_of):
    """Requests at once on one beginning, each writing behind it, and others on what the first left."""
    warm, cold, params = engine_of(method, KV["reuse"]), engine_of(method), SamplingParams(max_tokens=24)
    prompts = [LONG[:140], [*LONG[:140], 9], [*LONG[:131], 8, 8, 8], LONG[:140], LONG[:70]]
    expected = [cold.generate([p], [params])[0].token_ids for p in prompts]
    for _ in range(2):
        assert outputs(warm.generate(prompts, [params] * 5)) == expected
    assert warm.cache.pool.held == 0


def test_an_fp8_cache_is_reused_and_given_up_as_any_other(engine_of):
    def made(kv):
        return GpuEngine(
            model(SHALLOW, weights="fp8 calibrated", cache="fp8"), TEXT, (), max_slots=SLOTS, max_seq_len=LONGEST,
            kv_cache_config=kv,
        )  # fmt: skip

    requests = [(LONG[: 70 + i], SamplingParams(max_tokens=60)) for i in (0, 3, 0, 9, 60)]
    cold, warm = made(None), made(KV["scarce reuse"])
    expected = [cold.generate([p], [q])[0].token_ids for p, q in requests]
    found = serve(warm, requests, [0, 9, 9, 9, 9])
    assert outputs(found) == expected and sum(g.preemptions for g in found) > 0
    assert [g.cached_tokens >= 64 for g in found] == [False, True, True, True, True]


# ---- a sliding window -----------------------------------------------------------------------------------------------

MISTRAL = "dummy:tiny-mistral?seed=2"  # looks back 32 tokens


@pytest.mark.parametrize("method", ["none", "draft model", "one that sees all"])
def test_pages_of_a_sliding_window_go_round(method):
    """Two pages for however long a text, as long as the drafter looks no further back; the text is that of a cache that
    keeps everything."""
    whole, prompts = Pages(model(MISTRAL)), [[7], LONG[:120], LONG]
    drafter = {"none": None, "draft model": model("dummy:tiny-mistral?seed=9&layers=1")}
    draft = drafter.get(method, model("dummy:tiny-llama?seed=4&layers=1"))
    made = engine(model(MISTRAL), TEXT, draft=draft, k=4 if draft else 0, max_slots=3, max_seq_len=LONGEST)
    assert made.cache.blocks_for(LONGEST) == (6 if method == "one that sees all" else 2)
    done = made.generate(prompts, [SamplingParams(max_tokens=100)] * 3)
    for prompt, generation in zip(prompts, done, strict=True):
        text = [*prompt, *generation.token_ids]
        choices = whole.all_logits(text[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        assert choices == generation.token_ids
    with pytest.raises(OptionError, match="sliding window"):
        engine(model(MISTRAL), TEXT, kv_cache_config=KV["reuse"])
