"""Which of the two GPU paths runs a model: asked for by name, measured at the build, or the only one that can."""

from __future__ import annotations

import pytest

from tutorial_lib.config import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    LayerSkipDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
)
from tutorial_lib.engine.stream.choice import check_kernel, choose, found_at_build, obstacle
from tutorial_lib.errors import OptionError

HOPPER = (9, 0)
MS = found_at_build({1: {"stream": 16.3, "triton": 19.6}, 16: {"stream": 21.0, "triton": 20.5}})


def test_names():
    for kernel in ("auto", "stream", "triton"):
        check_kernel(kernel)
    check_kernel("auto", "cpu")
    with pytest.raises(OptionError, match="kernel is 'cuda'.*auto, stream, triton"):
        check_kernel("cuda")
    with pytest.raises(OptionError, match="kernel is 'triton' on a CPU"):
        check_kernel("triton", "cpu")


def test_auto_takes_the_faster_by_the_builds_measurement_and_says_the_times():
    plain = choose("auto", None, MS, 1)
    assert plain.is_stream and plain.why == (
        "at the build a step of 1 row took 16.300 ms by the whole-step kernel, 19.600 ms by Triton's"
    )
    assert choose("auto", None, MS, 11).kernel == "triton", "the smallest measured rows that hold 11 are 16"
    assert choose("auto", None, found_at_build({1: MS["ms"]["1"]}), 11).kernel == "stream", (
        "nothing larger was measured"
    )


def test_auto_without_a_measurement_or_with_an_obstacle_is_triton_and_says_why():
    assert choose("auto", None, None, 1).why == "the build did not measure the whole-step kernel"
    unfit = found_at_build(unfit=OptionError("the model has heads of 80", "64 or 128"))
    assert choose("auto", None, unfit, 1).why == "the model has heads of 80, needed: 64 or 128"
    against = obstacle(None, 17, capability=HOPPER)
    chosen = choose("auto", against, MS, 17)
    assert chosen.kernel == "triton" and "17 rows, and the whole-step kernel needs at most 16" in chosen.why


def test_asked_for_by_name_it_runs_unmeasured_or_is_an_error_with_the_reason():
    assert choose("stream", None, None, 1).is_stream
    assert choose("stream", None, MS, 16).is_stream, "slower, but asked for"
    with pytest.raises(OptionError, match="17 rows.*at most 16.*--kernel triton"):
        choose("stream", obstacle(None, 17, capability=HOPPER), MS, 17)
    with pytest.raises(OptionError, match="heads of 80, needed: 64 or 128.*--kernel triton"):
        choose("stream", None, found_at_build(unfit=OptionError("the model has heads of 80", "64 or 128")), 1)
    against = obstacle(None, 17, capability=(8, 0))
    assert choose("triton", against, MS, 1).kernel == "triton"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (EagleDecodingConfig(speculative_model="x", max_draft_len=4), "hidden states"),
        (MedusaDecodingConfig(speculative_model="x", max_draft_len=4), "hidden states"),
        (LayerSkipDecodingConfig(max_draft_len=4), "leaves layers"),
        (DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir="x"), None),
        (NGramDecodingConfig(max_draft_len=4), None),
        (None, None),
    ],
)
def test_methods(config, said):
    found = obstacle(config, 5, capability=HOPPER)
    assert (found is None) if said is None else (said in str(found) and "--kernel triton" in str(found))


def test_other_obstacles():
    assert "capability 10.0" in str(obstacle(None, 1, capability=(10, 0)))
    assert "'attention'" in str(obstacle(None, 1, capability=HOPPER, kernels_off=["attention"]))
    assert obstacle(None, 16, capability=HOPPER) is None


def test_what_a_build_keeps_is_plain_and_rounded():
    kept = found_at_build({1: {"stream": 1.23456, "triton": 2.0}}, kernels=[{"compiler": "nvrtc 13.0"}])
    assert kept == {"ms": {"1": {"stream": 1.2346, "triton": 2.0}}, "kernels": [{"compiler": "nvrtc 13.0"}]}
