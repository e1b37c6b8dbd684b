"""Lesson 06's drawing, its comparison of two runs, and its table of runs on several GPUs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from tutorial_lib.results import Generation
from tutorial_lib.show import scaling


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_has_its_own_slice_in_the_drawing(ranks):
    root = ET.fromstring(scaling.block_picture(ranks))
    boxes = [e for e in root.iter() if e.tag.endswith("rect")]
    dashed = [e for e in boxes if e.get("stroke-dasharray")]
    assert len(dashed) == ranks * 2 * (ranks - 1)  # what others hold of the two matrices
    colours = [e.get("fill") for e in boxes if e.get("fill") not in ("#FFFFFF", scaling.PALE, scaling.GOLD)]
    assert len(set(colours)) == ranks and all(colours.count(c) == 4 for c in colours)
    texts = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert [f"rank {i}" in texts for i in range(5)] == [i < ranks for i in range(5)]


def test_how_close_two_runs_are():
    one = Generation([1], [7, 8], "", "length", logprobs=[{7: -0.1, 9: -2.6}, {8: -0.5, 3: -0.9}])
    other = Generation([1], [7, 8], "", "length", logprobs=[{7: -0.101, 5: -2.7}, {8: -0.5, 3: -0.93}])
    noise, gap = scaling.closeness(one, other)
    assert (noise, gap) == (pytest.approx(0.03), pytest.approx(0.4))


def run(gpus, method="plain", device="cuda", **changes):
    figures = {"output_tok_s": 30.0 if method == "plain" else 90.0, "acceptance_length": 5.0}
    return {
        "kind": "run", "experiment": "405b", "method": method, "backend": "tensorrt_llm", "target": "405b",
        "dtype": "fp8", "device": device, "max_draft_len": 10, "figures": figures, "is_simulated": False,
        "tensor_parallel_size": gpus, "provenance": {"hardware": {"gpus": [{"name": "NVIDIA H200"}] * 4}}, **changes,
    }  # fmt: skip


def test_runs_on_several_gpus_are_found_and_compared_with_their_own_plain_run(tmp_path):
    assert scaling.runs_on_several_gpus(tmp_path) == []
    lines = [run(4), run(8, figures={"output_tok_s": 45.0}), run(4, "draft_target"), run(1), run(3, device="cpu")]
    (tmp_path / "h200-x4").mkdir()
    old = {k: v for k, v in run(1).items() if k != "tensor_parallel_size"}
    text = "\n".join(json.dumps(line) for line in (*lines, old, {"kind": "card"}))
    (tmp_path / "h200-x4" / "405b.jsonl").write_text(text + "\n")
    found = scaling.runs_on_several_gpus(tmp_path)
    assert [(r["tensor_parallel_size"], r["method"]) for r in found] == [
        (4, "plain"), (8, "plain"), (4, "draft_target"),
    ]  # fmt: skip
    rows = scaling.several_gpus_table(found).rows
    assert [(r["GPUs used"], r["K"], r["speed-up"]) for r in rows] == [(4, None, None), (8, None, None), (4, 10, 3.0)]
    assert rows[0]["machine"] == "4 × NVIDIA H200" and rows[2]["acceptance"] == "real"
