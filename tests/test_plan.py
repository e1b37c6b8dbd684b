"""What fits on a GPU: figures worked out by hand, and refusals that say what would fit."""

from __future__ import annotations

import json

import pytest

from tutorial_lib import cli
from tutorial_lib.errors import ModelError, OptionError
from tutorial_lib.plan import GPUS, check, config_of, make_plan

EIGHT, SEVENTY = config_of("llama-3.1-8b"), config_of("dummy:llama-3.3-70b")


def test_an_8b_model_by_hand():
    """8.03 billion parameters in two bytes; 32 layers x 2 x 8 heads x 128 x 2 bytes = 131,072 bytes a token."""
    plan = make_plan(EIGHT, "H200", batch=4, input_len=128, output_len=128)
    assert plan.weight_bytes == 8_030_261_248 * 2
    assert plan.kv_bytes_per_token == 131_072
    assert (plan.positions_per_request, plan.blocks_per_request) == (256, 8)
    assert plan.kv_bytes == 4 * 256 * 131_072
    assert plan.kv_room_bytes == int((141e9 - plan.weight_bytes) * 0.9)
    assert plan.most_requests == plan.kv_room_bytes // (256 * 131_072) and plan.is_fitting
    assert plan.ridge_rows == 206  # 989 Tflop/s over 4.8 TB/s, two operations for each two bytes
    assert plan.floor_step_ms == pytest.approx((plan.weight_bytes + plan.kv_bytes) / 4.8e9)


def test_forms_and_shares():
    whole, wide = make_plan(EIGHT, batch=8), make_plan(EIGHT, batch=8, gpus=2)
    assert wide.weight_bytes * 2 == whole.weight_bytes and wide.kv_bytes * 2 == whole.kv_bytes
    small = make_plan(EIGHT, dtype="fp8", kv_dtype="fp8")
    linears = 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)
    assert whole.weight_bytes - small.weight_bytes == linears  # embeddings and head stay as they are
    assert small.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert make_plan(EIGHT, dtype="fp8").kv_bytes_per_token == whole.kv_bytes_per_token  # the cache is asked for apart
    both = make_plan(SEVENTY, dtype="fp8", drafter=config_of("llama-3.2-1b"), max_draft_len=10)
    alone = make_plan(SEVENTY, dtype="fp8")
    assert both.kv_bytes_per_token - alone.kv_bytes_per_token == 16 * 2 * 8 * 64 * 2
    assert both.positions_per_request - alone.positions_per_request == 10
    assert both.most_requests < alone.most_requests
    assert make_plan(EIGHT, tokens_per_block=64, input_len=1, output_len=1).kv_bytes_per_request == 64 * 131_072
    window = make_plan(config_of("tiny-mistral"), input_len=500, output_len=500, max_draft_len=4)
    assert window.positions_per_request == 32 + 4


def test_what_fits_fits_and_one_more_does_not():
    plan = make_plan(SEVENTY, "H200", dtype="fp8", input_len=4096, output_len=1024)
    most = plan.most_requests
    check(make_plan(SEVENTY, "H200", dtype="fp8", input_len=4096, output_len=1024, batch=most))
    with pytest.raises(OptionError, match=f"holds {most} of them.*batch of {most}"):
        check(make_plan(SEVENTY, "H200", dtype="fp8", input_len=4096, output_len=1024, batch=most + 1))
    with pytest.raises(OptionError, match=r"weights take 141.1 GB.*more GPUs"):
        check(make_plan(SEVENTY, "H200"))
    check(make_plan(SEVENTY, "H200", gpus=2))


@pytest.mark.parametrize(
    ("gpu", "options", "words"),
    [
        ("H900", {}, ["H900", "H200"]),
        ("A100-80GB", {"dtype": "fp8"}, ["no FP8"]),
        ("H200", {"dtype": "fp4"}, ["fp4", "fp8"]),
        ("H200", {"batch": 0}, ["batch is 0"]),
        ("H200", {"input_len": 131_072}, ["131328", "131072"]),
        ("H200", {"free_gpu_memory_fraction": 0.0}, ["free_gpu_memory_fraction"]),
    ],
)
def test_options_that_cannot_be(gpu, options, words):
    with pytest.raises(OptionError) as caught:
        make_plan(EIGHT, gpu, **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_models_by_name_and_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(EIGHT))
    assert config_of(str(tmp_path)) == EIGHT
    (tmp_path / "engine.json").write_text(json.dumps({"model_config": SEVENTY}))
    assert config_of(str(tmp_path)) == SEVENTY
    (tmp_path / "engine.json").write_text("{")
    with pytest.raises(ModelError, match="engine.json"):
        config_of(str(tmp_path))
    with pytest.raises(ModelError, match=r"llama-3\.3-70b"):
        config_of("nobody/nothing")


def test_the_command(capsys, tmp_path):
    def run(*words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", *words])
        return ended.value.code

    file = tmp_path / "plan.json"
    assert run("llama-3.1-8b", "--gpu", "H200", "--batch", "64", "--json", str(file)) == 0
    assert "16.06 GB (bfloat16)" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert (document["kind"], document["batch"], document["is_fitting"]) == ("plan", 64, True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config_of("tiny-llama")))
    assert (
        run(str(tmp_path / "mine"), "--drafter", str(tmp_path / "mine"), "--input-len", "9", "--json", str(file)) == 0
    )
    assert str(tmp_path) not in file.read_text() and json.loads(file.read_text())["drafter"] == "mine"
    capsys.readouterr()
    assert run("llama-3.1-8b", "--kv-dtype", "x") == 2
    assert capsys.readouterr().err.startswith("error: kv_dtype is 'x'")
    assert run("llama-3.3-70b", "--gpu", "L4") == 2
    assert capsys.readouterr().err.startswith("error: the weights take 141.1 GB")


def test_data_sheets_are_consistent():
    for name, gpu in GPUS.items():
        assert gpu.name == name and 0.2 < gpu.bandwidth_tb_s < 10 and 20 <= gpu.memory_gb <= 200
        assert gpu.fp8_tflops is None or gpu.fp8_tflops == pytest.approx(2 * gpu.bf16_tflops, rel=0.02)
