"""K by load on the GPU path, run as plain torch on a CPU: down to 0 and up again, and more rows than a step has."""

from __future__ import annotations

import pytest
from gpu_engines import DEEP, KV, LONGEST, SHALLOW, TEXT, Exact, engine_for, make_heads, medusa, model, outputs
from gpu_models import engine, gpu_model, random_ids

from tutorial_lib.config import SamplingParams
from tutorial_lib.engine.gpu_engine import GpuEngine
from tutorial_lib.errors import OptionError

DRAFTERS = ("none", "draft model", "self-draft", "ngram", "suffix", "eagle", "eagle tree", "medusa")


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


@pytest.mark.parametrize("method", [m for m in DRAFTERS if m != "none"])
def test_the_schedule_sets_k_by_active_requests(method, engine_of):
    """Down to 0 and up again: text as ever; rounds that begin at the same token with the same K are the same, however
    K came there."""
    engine = engine_of(method, schedule={1: 4, 2: 2, 4: 0})
    prompts, lengths = [[1, 2, 3] * 5, [4, 5] * 4, [6], [7, 8, 9] * 3], (44, 20, 8, 8)
    found = engine.generate(prompts, [SamplingParams(max_tokens=n) for n in lengths])
    plain = GpuEngine(engine.target, TEXT, (), max_slots=1, max_seq_len=LONGEST)
    for generation, prompt, length in zip(found, prompts, lengths, strict=True):
        assert outputs(plain.generate([prompt], [SamplingParams(max_tokens=length)])) == [generation.token_ids]
    counts = [len(r.drafted) for r in found[0].rounds]
    assert counts[0] == 0 < max(counts[7:])
    for k in {2, 4}:
        (alone,) = engine_of(method, k=k).generate(prompts[:1], [SamplingParams(max_tokens=44)])
        ours, theirs = by_start(found[0]), by_start(alone)
        shared = [at for at in ours.keys() & theirs.keys() if len(ours[at].drafted) == len(theirs[at].drafted)]
        assert all(ours[at].drafted == theirs[at].drafted for at in shared)


def by_start(generation) -> dict:
    """Rounds by how many tokens there were before them."""
    found, at = {}, 1
    for each in generation.rounds:
        found[at] = each
        at += len(each.emitted)
    return found


@pytest.mark.parametrize("kv", ["plain", "reuse"])
def test_a_draft_model_recovers_after_a_stretch_at_zero(kv, engine_of):
    """It drafts with the target's own weights: all is accepted, unless holes in its cache make it another model."""
    engine = engine_of("self-draft", KV[kv], schedule={1: 4, 2: 0})
    long, short = engine.generate([random_ids(70), [3]], [SamplingParams(max_tokens=n) for n in (60, 20)])
    assert [len(r.drafted) for r in short.rounds] == [0] * 19
    counts = [(len(r.drafted), r.accepted) for r in long.rounds]
    assert counts[:19] == [(0, 0)] * 19 and counts[20:27] == [(4, 4)] * 7


def test_a_schedule_for_a_part_of_a_tree_is_refused(engine_of, heads):
    target = model(DEEP)
    drafting = medusa(target, heads)
    with pytest.raises(OptionError, match="asks for 2 of a tree's 5 tokens; needed: the whole tree, or 0"):
        GpuEngine(target, TEXT, (), max_slots=2, max_seq_len=99, drafting=drafting, draft_len_schedule={1: 5, 4: 2})


def test_more_rows_than_a_step_has_are_served_by_several_programs_a_turn(monkeypatch):
    """K = 15 for six requests are 96 rows: two programs of three requests, in every turn."""
    target, draft = (gpu_model(SHALLOW, slots=6, draft_len=15) for _ in range(2))
    made = engine(target, TEXT, draft=draft, k=15, max_slots=6)
    prompts, params = [random_ids(5 + i, seed=i) for i in range(6)], SamplingParams(max_tokens=50)
    launched, launch = [], made._launch
    monkeypatch.setattr(made, "_launch", lambda active, k: (launched.append(len(active)), launch(active, k))[1])
    found = made.generate(prompts, [params] * 6)
    assert launched[:8] == [3] * 8
    assert outputs(found) == [engine(target, TEXT).generate([p], [params])[0].token_ids for p in prompts]
    assert all((len(r.drafted), r.accepted) == (15, 15) for g in found for r in g.rounds)
