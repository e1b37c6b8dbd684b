"""A small experiment on a real GPU, from card to summary, and the meters it rests on."""

from __future__ import annotations

import pytest
import torch

from tutorial_lib.bench import gpu
from tutorial_lib.bench.gpu_meter import Nvml
from tutorial_lib.results import read_records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no GPU"),
]
NEEDS_FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no FP8 units"
)
SMALL = gpu.Experiment(
    "small", "dummy:llama-3.1-8b?layers=2", "dummy:llama-3.2-1b?layers=1", max_draft_len=4, draft_lens=(2,),
    acceptance_lengths=(3.0,), rows=(1, 5), context=96, prompt_tokens=128, output_tokens=64,
)  # fmt: skip


def test_the_read_ceiling_is_a_rate_that_a_gpu_can_have():
    from tutorial_lib.bench.read_kernel import TILE, TILES, read_ceiling, read_sums

    x = torch.randn(5 * TILE * TILES, device="cuda")
    torch.testing.assert_close(read_sums(x), x.view(5, -1).sum(1), atol=5e-2, rtol=1e-3)
    found = read_ceiling(1 << 30, passes=5)
    assert 0.1 < found["median_tb_s"] <= found["tb_s"] < 20 and found["bytes"] > 0.9e9


def test_the_driver_is_asked_without_harm():
    nvml = Nvml()
    values = [*nvml.now().values(), *nvml.limits().values(), nvml.energy_j()]
    assert all(value is None or value >= 0 for value in values)
    assert nvml.problem is not None or nvml.now()["sm_clock_mhz"] > 0


@NEEDS_FP8
def test_a_small_experiment_runs_from_card_to_summary(tmp_path):
    file, said = tmp_path / "small.jsonl", []
    document = gpu.run_experiment(SMALL, json_file=str(file), say=said.append)
    assert [part for part in document["parts"] if part["status"] != "done"] == [], said
    summary, records = document["summary"], read_records(file)
    assert records[0]["kind"] == "card" and records[-1]["kind"] == "summary"
    assert 0 < summary["step_ms"]["1"] <= summary["step_ms"]["5"] * 1.2
    assert 0 < summary["pct_of_ceiling"] < 130  # two layers of an 8B model fit partly into the L2 cache
    assert summary["round_ms"] > summary["draft_ms"]["4"] > 0
    assert summary["speculative_tok_s"]["3.0"] > 0 and summary["plain_tok_s"] > 0
    for run in document["runs"]:
        assert run["is_simulated"] and run["tokens_sha256"] is None and run["device"] == "cuda"
    plain, one_round = (r for r in document["records"] if r["kind"] == "breakdown")
    assert {"linear", "gate_up", "attention", "add_norm"} <= {kind["kind"] for kind in plain["kinds"]}
    assert plain["rounds"] == 8 and one_round["rounds"] == 4
    assert plain["us_per_round"] == pytest.approx(1e3 * summary["plain_round_ms"], rel=0.5)
    forced = document["runs"][1]["figures"]
    assert forced["acceptance_length"] == pytest.approx(3.0, abs=0.15)


@NEEDS_FP8
def test_a_spent_budget_leaves_a_record_that_says_so(tmp_path):
    file = tmp_path / "small.json"
    document = gpu.run_experiment(SMALL, json_file=str(file), budget_s=2, say=lambda line: None)
    skipped = [part for part in document["parts"] if part["status"] == "skipped"]
    assert skipped and document["runs"] == [] and read_records(file)[0]["summary"]["experiment"] == "small"
