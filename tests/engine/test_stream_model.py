"""The model around the whole-step kernel, with a stand-in for the kernel: rounds, drafts, prompts and refusals.

Products in float64 (`Exact`) make the stand-in's sums independent of the number of rows, as the kernel's own are.
"""

from __future__ import annotations

import pytest
import torch
from gpu_engines import TEXT, Exact, outputs
from gpu_models import engine, gpu_model
from stream_stand_ins import streamed

from tutorial_lib.config import LookaheadDecodingConfig, NGramDecodingConfig, SamplingParams
from tutorial_lib.drafters.lookahead import LookaheadDrafter
from tutorial_lib.engine.drafting import ModelDrafting, NGramDrafting, OpenTree
from tutorial_lib.engine.gpu_model import PAGE, Taps
from tutorial_lib.engine.graph import RoundProgram
from tutorial_lib.engine.stream.launch import StreamError
from tutorial_lib.errors import OptionError

TARGET, DRAFT = "dummy:tiny-llama?seed=5", "dummy:tiny-llama?seed=4&layers=1"
PROMPTS = [[(7 * i + j) % 320 for i in range(n)] for j, n in enumerate((3, 40, 1, 70, 2))]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=3)


def texts(target, params=GREEDY, **options):
    with Exact():
        made = engine(target, TEXT, **options)
        return made, outputs(made.generate(PROMPTS, [params] * len(PROMPTS)))


@pytest.mark.parametrize("keeps_reader", [True, False], ids=["two copies", "packed in place"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_plain_decoding_is_that_of_the_other_path(params, keeps_reader):
    _, expected = texts(gpu_model(TARGET), params)
    target = streamed(gpu_model(TARGET), keeps_reader=keeps_reader)
    assert texts(target, params)[1] == expected
    assert max(target.steps.rows) <= 16
    assert (16 in target.steps.rows) is not keeps_reader, "prompts are read by the kernel only without another reader"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_model_drafts_greedily_in_one_launch_and_sampled_in_many(params):
    _, expected = texts(gpu_model(TARGET), params, draft=gpu_model(DRAFT), k=4)
    draft = streamed(gpu_model(DRAFT))
    assert texts(streamed(gpu_model(TARGET)), params, draft=draft, k=4)[1] == expected
    assert set(draft.steps.chains) == ({4} if params.is_greedy else set())
    assert bool(draft.steps.rows) is not params.is_greedy


def test_a_shortlist_is_mapped_between_the_steps_of_a_draft():
    ids = torch.arange(0, 320, 2).repeat_interleave(2)  # output row i of the drafter is an even id
    _, expected = texts(gpu_model(TARGET), draft=gpu_model(DRAFT), head_ids=ids, k=3)
    assert texts(streamed(gpu_model(TARGET)), draft=streamed(gpu_model(DRAFT)), head_ids=ids, k=3)[1] == expected


def test_either_of_the_two_models_may_be_run_by_the_kernel():
    _, expected = texts(gpu_model(TARGET), draft=gpu_model(DRAFT), k=3)
    assert texts(streamed(gpu_model(TARGET)), draft=gpu_model(DRAFT), k=3)[1] == expected
    assert texts(gpu_model(TARGET), draft=streamed(gpu_model(DRAFT)), k=3)[1] == expected


def test_look_up_and_trees_from_the_host_are_verified_by_it():
    def made(target, **options):
        with Exact():
            return outputs(engine(target, TEXT, **options).generate(PROMPTS[:2], [GREEDY] * 2))

    ngram = NGramDecodingConfig(max_draft_len=5)
    expected = made(gpu_model(TARGET), drafting=NGramDrafting(ngram, 320, (), "cpu"), k=5)
    assert made(streamed(gpu_model(TARGET)), drafting=NGramDrafting(ngram, 320, (), "cpu"), k=5) == expected

    config = LookaheadDecodingConfig(max_window_size=2, max_ngram_size=3, max_verification_set_size=2)
    drafter = LookaheadDrafter(config, ())
    tree = OpenTree(drafter.max_tokens, drafter.max_depth, "cpu")
    assert drafter.max_tokens < 16
    options = {"host_tree": tree, "k": drafter.max_tokens}
    assert made(streamed(gpu_model(TARGET)), host=LookaheadDrafter(config, ()), **options) == made(
        gpu_model(TARGET), host=LookaheadDrafter(config, ()), **options
    )


def test_more_requests_than_rows_are_served_in_parts():
    target = streamed(gpu_model(TARGET))
    made, _ = texts(target, draft=gpu_model(DRAFT), k=7)
    assert made._most_together(7) == 2
    assert max(target.steps.rows) == 16


def test_what_does_not_fit_is_refused_by_name():
    target = streamed(gpu_model(TARGET))
    with pytest.raises(OptionError, match="max_draft_len is 16.*at most 15.*stream"):
        engine(target, TEXT, draft=gpu_model(DRAFT), k=16)
    state = engine(target, TEXT, draft=gpu_model(DRAFT), k=8).state
    with pytest.raises(OptionError, match="18 rows.*at most 16"):
        RoundProgram(target, None, state, batch=2, max_draft_len=8)
    with pytest.raises(OptionError, match="leaves layers of the target out.*triton"):
        target.without_layers([0])
    ids, zero = torch.zeros(17, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(OptionError, match="17 rows.*at most 16"):
        target.step(ids, torch.zeros(1, 4, dtype=torch.int32), zero, zero, 17)
    taps = Taps((0,), torch.zeros(1, 64, dtype=torch.bfloat16), zero)
    with pytest.raises(OptionError, match="hidden states.*triton"):
        target.step(ids[:1], torch.zeros(1, 4, dtype=torch.int32), zero, zero, 1, taps=taps)


@pytest.mark.parametrize("who", ["target", "drafter"])
def test_a_kernel_that_gives_up_is_an_error_that_names_the_place_and_the_way_on(who):
    fails = {"target": (2, None), "drafter": (None, 2)}[who]
    models = [streamed(gpu_model(name), fails_at=at) for name, at in zip((TARGET, DRAFT), fails, strict=True)]
    with pytest.raises(StreamError, match="gave up: phase 3, block 2, barrier 7.*kernel='triton'"):
        texts(models[0], draft=models[1], k=3)
    assert texts(gpu_model(TARGET), draft=gpu_model(DRAFT), k=3)[1], "the process goes on with the other path"


def test_a_kernel_that_gives_up_in_a_prompt_is_heard_of_with_its_first_token():
    target = streamed(gpu_model(TARGET), keeps_reader=False, fails_at=0)
    with pytest.raises(StreamError, match="gave up"):
        texts(target, SamplingParams(max_tokens=1))


def test_cache_and_weights_are_shared_with_the_reader():
    model = gpu_model(TARGET)
    target = streamed(model)
    assert target.cache is model.cache and target.reader is model
    assert (target.prompt_rows, streamed(model, keeps_reader=False).prompt_rows) == (64, 16)
    assert target.pages == model.pages and target.max_positions % PAGE == 0


def test_rounds_can_be_timed():
    with Exact():
        made = engine(streamed(gpu_model(TARGET)), TEXT, drafting=ModelDrafting(streamed(gpu_model(DRAFT))), k=4)
        assert set(made.time_steps([1, 5, 16], context=20, repeats=1)) == {1, 5, 16}
        assert made.time_draft(4, context=20, repeats=1) > 0
