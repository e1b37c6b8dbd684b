"""Tables of GPU records: the shipped ones can be shown, figures are those of the records, forced runs say so."""

from __future__ import annotations

import pytest

from tutorial_lib.errors import OptionError
from tutorial_lib.show.gpu_records import (
    RECORDED,
    breakdown_table,
    formats_table,
    gpu_experiment,
    load_table,
    machine_and_day,
    products_table,
    runs_table,
    steps_table,
)

NAMES = sorted(path.stem for path in (RECORDED / "h200").glob("*.jsonl"))


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_experiment_can_be_shown(name):
    records = gpu_experiment(name)
    assert "H200" in machine_and_day(records)
    kinds = {record["kind"] for record in records}
    tables = {
        "build": products_table, "steps": steps_table, "run": runs_table, "number_formats": formats_table,
        "load": load_table,
    }  # fmt: skip
    assert kinds & {"run", "load"}
    for table in (tables[kind](records) for kind in tables.keys() & kinds):
        assert table.rows and "<td" in table._repr_html_()
    runs = [r for r in records if r["kind"] == "run"]
    for row, run in zip(runs_table(records).rows, runs, strict=True):
        assert row["output throughput, tokens/s"] == run["figures"]["output_tok_s"]
        if run["method"] != "plain":
            assert row["acceptance"] == ("forced" if run["is_simulated"] else "real")
    if "steps" in kinds:
        assert steps_table(records).rows[0]["against one row"] == 1


def test_what_fp8_costs_stands_beside_bf16():
    bf16, fp8 = formats_table(gpu_experiment("number-formats")).rows
    assert (bf16["number format"], fp8["number format"]) == ("bfloat16", "fp8")
    assert bf16["logit error, % of their spread"] < fp8["logit error, % of their spread"]
    assert bf16["answers that differ"] is None and fp8["answers that differ"].endswith("of 16")
    assert fp8["plain, tokens/s"] > bf16["plain, tokens/s"] > 0


def test_a_load_stands_beside_another_engines():
    """Every measured run has its row, and both ratios are those of the runs; a run that is missing has no row."""
    records = gpu_experiment("load")
    loads = [r for r in records if r["kind"] == "load" and r["batching"] == "in flight"]
    tok_s = {(r["backend"], r["method"], r["concurrency"]): r["figures"]["output_tok_s"] for r in loads}
    rows = load_table(records).rows
    assert len(rows) == len(tok_s) == len(loads)
    for row in rows:
        engine, method, clients = row["engine"], row["method"], row["clients"]
        assert row["output throughput, tokens/s"] == tok_s[engine, method, clients]
        if method != "plain":
            assert row["speed-up"] == pytest.approx(tok_s[engine, method, clients] / tok_s[engine, "plain", clients])
        ahead = tok_s["torch", method, clients] / tok_s[engine, method, clients]
        assert row["torch over it"] == (None if engine == "torch" else pytest.approx(ahead))
    assert {row["engine"] for row in rows} == {"torch", "vllm"}


def test_a_breakdown_adds_up_to_the_whole():
    records = gpu_experiment("70b-1b")
    rows = breakdown_table(records, "round").rows
    assert rows[-1]["kernel"] == "gaps" and 99 < sum(row["share, %"] for row in rows) < 100.5
    with pytest.raises(OptionError, match="plain step"):
        breakdown_table(records, "sleep")


def test_a_missing_experiment_says_how_to_make_one(tmp_path):
    with pytest.raises(OptionError, match="no record of experiment '70b-1b'.*workbook bench"):
        gpu_experiment("70b-1b", tmp_path)
