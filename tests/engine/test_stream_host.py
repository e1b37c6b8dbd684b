"""The whole-step kernel at build and at load, on a pretended Hopper: what is prepared, measured, chosen and told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gpu_models import PLAIN, gpu_model, packed_dummy
from stream_stand_ins import PlainSteps

from tutorial_lib.config import DraftTargetDecodingConfig, EagleDecodingConfig
from tutorial_lib.engine.gpu_model import GpuModel, Ops
from tutorial_lib.engine.stream import host
from tutorial_lib.engine.stream.choice import found_at_build
from tutorial_lib.engine.stream.launch import StreamError
from tutorial_lib.engine.stream.model import StreamModel
from tutorial_lib.errors import OptionError

NAME = "dummy:tiny-llama?seed=5"
UNFIT = OptionError("the model has heads of 80", "64 or 128")
FASTER = found_at_build({1: {"stream": 1.0, "triton": 2.0}})


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of capability 9.0, on which a stand-in serves as the kernel; returns what it was opened with."""
    opened = []

    def open_steps(model, **options):
        opened.append(options)
        steps = PlainSteps(model)
        steps.report = {"kernels": [{"compiler": "nvrtc 13.0"}]}
        return steps

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(host, "open_steps", open_steps)
    monkeypatch.setattr(host, "plan_for", lambda model: None)
    monkeypatch.setattr(Ops, "make", lambda **_: PLAIN)
    monkeypatch.setattr(host, "captured", lambda run: run)
    monkeypatch.setattr(host, "seconds_of", lambda run, repeats: [run() or 0.008] * repeats)
    return opened


def info(tmp_path, **stream):
    return SimpleNamespace(path=tmp_path, manifest={"build": {"stream": stream} if stream else {}})


def load():
    return gpu_model(NAME), None


def refuse(monkeypatch, error=UNFIT):
    def open_steps(model, **options):
        raise error

    monkeypatch.setattr(host, "open_steps", open_steps)


def test_a_build_times_both_and_keeps_times_and_reports(hopper, tmp_path):
    config, packed = packed_dummy(NAME)
    said = []
    found = host.prepare(tmp_path, config, packed, {}, "auto", said.append)
    assert found["ms"] == {rows: {"triton": 2.0, "stream": 2.0} for rows in ("1", "8", "16")}
    assert found["kernels"] == [{"compiler": "nvrtc 13.0"}]
    assert hopper == [{"folder": None, "store": tmp_path / "stream", "in_place": True, "say": said.append}]
    assert "1: 2.000 and 2.000" in said[-1]


def test_a_build_keeps_why_it_does_not_fit_and_refuses_only_if_it_was_asked_for(hopper, monkeypatch, tmp_path):
    refuse(monkeypatch)
    config, packed = packed_dummy(NAME)
    said = []
    assert host.prepare(tmp_path, config, packed, {}, "auto", said.append) == {
        "unfit": "the model has heads of 80, needed: 64 or 128"
    }
    assert len(said) == 1 and "heads of 80" in said[0]
    with pytest.raises(OptionError, match="heads of 80"):
        host.prepare(tmp_path, config, packed, {}, "stream", said.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert "8.9" in host.prepare(tmp_path, config, packed, {}, "auto", said.append)["unfit"]


def test_a_model_that_does_not_fit_is_refused_before_anything_is_timed(hopper, monkeypatch, tmp_path):
    def plan_for(model):
        raise UNFIT

    monkeypatch.setattr(host, "plan_for", plan_for)
    monkeypatch.setattr(host, "captured", lambda run: pytest.fail("timed"))
    assert "heads of 80" in host.prepare(tmp_path, *packed_dummy(NAME), {}, "auto", lambda line: None)["unfit"]


def test_a_kernel_that_gives_up_while_it_is_timed_does_not_fit(hopper, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "open_steps", lambda model, **_: PlainSteps(model, fails_at=0))
    config, packed = packed_dummy(NAME)
    assert "gave up: phase 3" in host.prepare(tmp_path, config, packed, {}, "auto", lambda line: None)["unfit"]


def test_what_a_defect_of_ours_raises_is_not_hidden_as_unfit(hopper, monkeypatch, tmp_path):
    refuse(monkeypatch, RuntimeError("cuLaunchKernelEx failed"))
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx"):
        host.prepare(tmp_path, *packed_dummy(NAME), {}, "auto", lambda line: None)


def test_target_and_drafter_are_each_chosen_for_and_told(hopper, tmp_path):
    said = []
    loader = host.Loader(
        "auto", DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir="x"), 5, (), said.append
    )
    target, _ = loader.load(info(tmp_path, **FASTER), "target", load)
    drafter, _ = loader.load(info(tmp_path, unfit="the model has heads of 80"), "drafter", load)
    assert isinstance(target, StreamModel) and type(drafter) is GpuModel
    assert loader.chosen["target"]["kernel"] == "stream" and loader.chosen["target"]["kernels"]
    assert loader.chosen["drafter"] == {"kernel": "triton", "why": "the model has heads of 80"}
    assert [line.split(",")[0] for line in said] == ["kernel of the target: stream", "kernel of the drafter: triton"]
    assert hopper[0]["folder"] == tmp_path / "stream"


def test_where_weights_fit_once_only_one_hears_what_prompts_cost(hopper, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "has_room_for_both", lambda model: False)
    said = []
    loader = host.Loader("stream", None, 1, (), said.append)
    measured = found_at_build({16: {"stream": 18.3, "triton": 20.0}})
    model, _ = loader.load(info(tmp_path, **measured), "target", load)
    assert model.reader is None and hopper[0]["in_place"] and loader.chosen["target"]["prompt_rows"] == 16
    assert said[0] == "weights of the target fit once only: prompts are read 16 rows a step, 1.15 s for 1,000 tokens"
    loader.load(info(tmp_path), "drafter", load)
    assert said[2] == "weights of the drafter fit once only: prompts are read 16 rows a step"


def test_asked_for_by_name_nothing_is_switched_silently(hopper, tmp_path):
    eagle = EagleDecodingConfig(speculative_model="x", max_draft_len=4)
    loads = []

    def counted():
        loads.append(1)
        return load()

    for config, rows, off, words in (
        (eagle, 5, (), "hidden states"),
        (None, 17, (), "17 rows"),
        (None, 1, ("attention",), "attention"),
    ):
        with pytest.raises(OptionError, match=words):
            host.Loader("stream", config, rows, off, print).load(info(tmp_path, **FASTER), "target", counted)
    assert loads == [], "refused before anything is loaded"
    said = []
    model, _ = host.Loader("triton", None, 1, (), said.append).load(info(tmp_path, **FASTER), "target", load)
    assert type(model) is GpuModel and said == []
    assert isinstance(host.Loader("stream", None, 1, (), print).load(info(tmp_path), "target", load)[0], StreamModel)


def test_a_kernel_that_does_not_load_after_all_is_an_error_and_no_switch(hopper, monkeypatch, tmp_path):
    refuse(monkeypatch, StreamError("132 processors hold 0 blocks each", "all of its 128 blocks at once"))
    with pytest.raises(StreamError, match="0 blocks"):
        host.Loader("auto", None, 1, (), print).load(info(tmp_path, **FASTER), "target", load)


def test_weights_are_kept_twice_where_there_is_room(monkeypatch):
    model = gpu_model(NAME)
    layer = model.layers[0]
    each = sum(w.data.numel() for w in (layer.qkv, layer.o, layer.gate_up, layer.down)) * 2
    assert host.weight_bytes(model) == each * len(model.layers) + model.head.data.numel() * 2
    assert host.has_room_for_both(model), "without a GPU there is nothing to run out of"
    fake = SimpleNamespace(device=torch.device("cuda"), layers=model.layers, head=model.head)
    need = host.weight_bytes(model) + host.SPARE_BYTES
    for free, held, used, expected in ((need, 0, 0, True), (need - 1, 0, 0, False), (need - 100, 300, 200, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2 * need))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, held=held: held)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device, used=used: used)
        assert host.has_room_for_both(fake) is expected


# ---- through the whole of a build and a load ------------------------------------------------------------------------


def test_a_gpu_build_stores_natural_weights_before_they_are_packed_in_place(hopper, monkeypatch, tmp_path):
    from safetensors.torch import load_file

    from tutorial_lib.config import Fp8Config
    from tutorial_lib.engine import gpu_build

    config, packed = packed_dummy(NAME)
    natural = {name: tensor.clone() for name, tensor in packed.items()}

    def open_steps(model, *, store, in_place, **_):
        assert in_place and store == tmp_path / "stream"
        model.layers[0].qkv.data.zero_()
        steps = PlainSteps(model)
        steps.report = {"kernels": []}
        return steps

    monkeypatch.setattr(host, "open_steps", open_steps)
    monkeypatch.setattr(gpu_build, "_packed_weights", lambda *_: (packed, None))
    monkeypatch.setattr(gpu_build, "tune", lambda model, say: ({}, {"qkv": {}}))
    checkpoint = SimpleNamespace(is_dummy=False, draft_vocab=lambda: None)
    made = gpu_build.write_engine(tmp_path, checkpoint, config, "bfloat16", Fp8Config(), "auto", lambda line: None)
    assert set(made["stream"]["ms"]) == {"1", "8", "16"} and "whole-step kernel" in made["steps"]
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in natural.items())
    made = gpu_build.write_engine(tmp_path, checkpoint, config, "bfloat16", Fp8Config(), "triton", lambda line: None)
    assert "stream" not in made


def test_an_engine_tells_of_both_of_its_models_what_runs_them(hopper, monkeypatch, tmp_path, pieces):
    from tutorial_lib.backends import torch_backend
    from tutorial_lib.config import SamplingParams
    from tutorial_lib.engine import gpu_build
    from tutorial_lib.shapes import dummy_config

    def described(stream):
        return SimpleNamespace(
            path=tmp_path, manifest={"build": {"stream": stream}}, model_config=dummy_config(NAME)[0], checkpoint=NAME,
            dtype="bfloat16", max_seq_len=200, max_batch_size=3, eos_token_ids=frozenset(),
        )  # fmt: skip

    monkeypatch.setattr(gpu_build, "load_gpu_model", lambda info, **_: (gpu_model(NAME), None))
    config = DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir="x")
    pair = described(FASTER), described(found_at_build(unfit=UNFIT))
    engine, kernels = torch_backend._assemble_gpu(*pair, None, config, pieces, None, None, "auto", (), print)
    assert (kernels["target"]["kernel"], kernels["drafter"]["kernel"]) == ("stream", "triton")
    assert isinstance(engine.target, StreamModel) and type(engine.drafting.model) is GpuModel
    done = engine.generate([[1, 2, 3]], [SamplingParams(max_tokens=8, ignore_eos=True)])[0]
    assert len(done.token_ids) == 8 and max(engine.target.steps.rows) == 5
    with pytest.raises(OptionError, match="heads of 80"):
        torch_backend._assemble_gpu(*pair, None, config, pieces, None, None, "stream", (), print)


def test_auto_leaves_requests_that_do_not_fit_one_launch_to_the_other_path(hopper, tmp_path):
    """17 rows at once would take turns; by name they may."""
    config = DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir="x")
    said = []
    for together, target, drafter in ((3, "stream", "stream"), (4, "triton", "stream"), (9, "triton", "triton")):
        loader = host.Loader("auto", config, 5, (), said.append, together=together)
        for role in ("target", "drafter"):
            loader.load(info(tmp_path, **FASTER), role, load)
        assert [loader.chosen[role]["kernel"] for role in ("target", "drafter")] == [target, drafter], together
    assert "up to 9 requests of 5 rows each may run at once, and the whole-step kernel needs at most 16" in said[-2]
    by_name = host.Loader("stream", config, 5, (), said.append, together=9)
    assert by_name.load(info(tmp_path), "target", load)[0].kernel == "stream"
