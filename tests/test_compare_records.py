"""What changed between two sets of records: verdicts against the repeats, settings that forbid one, words and JSON."""

from __future__ import annotations

import copy
import json

import pytest

from tutorial_lib import cli
from tutorial_lib.bench.compare_records import BEYOND, SAME, UNKNOWN, WITHIN, compare_records, describe
from tutorial_lib.errors import OptionError
from tutorial_lib.results import write_records


def run(method="plain", speeds=(10.0, 10.2, 10.4), **changes):
    middle = sorted(speeds)[len(speeds) // 2]
    record = {
        "kind": "run", "experiment": "bench", "method": method, "backend": "torch", "target": "t", "drafter": None,
        "dtype": "float32", "device": "cpu", "max_draft_len": 0 if method == "plain" else 4, "batch_size": 1,
        "sampling": {"max_tokens": 64}, "prompt_set": {"name": "bundled", "count": 8, "sha256": "a" * 64},
        "figures": {"output_tok_s": middle, "tpot_ms": 1e3 / middle, "acceptance_length": None, "ttft_s": 0.5},
        "repeat_figures": [{"output_tok_s": s, "tpot_ms": 1e3 / s, "ttft_s": 0.5, "is_warm": False} for s in speeds],
        "tokens_sha256": "f" * 64, "is_simulated": False,
        "provenance": {
            "hardware": {"cpu": "EPYC", "cores": 2, "threads": 2, "gpus": []}, "versions": {"torch": "2.13"},
            "git_revision": "abc",
        },
    }  # fmt: skip
    record = copy.deepcopy(record)
    for path, value in changes.items():
        place = record
        *outer, last = path.split("__")
        for name in outer:
            place = place[name]
        place[last] = value
    return record


def verdicts(before, after):
    (pair,) = compare_records([before], [after])["pairs"]
    return {f["figure"]: f["verdict"] for f in pair["figures"]}, pair


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [
        ((11.0, 11.2, 11.4), BEYOND),  # apart, and further than the runs spread
        ((9.0, 9.2, 9.4), BEYOND),
        ((10.3, 10.5, 10.7), WITHIN),  # the repeats lie among each other
        ((10.41, 10.5, 10.55), WITHIN),  # apart, but the medians differ by less than a run's own range
        ((11.0,), UNKNOWN),
        ((10.0, 10.2, 10.4), SAME),
    ],
)
def test_a_change_is_judged_by_what_the_repeats_differ_by(speeds, verdict):
    found, pair = verdicts(run(), run(speeds=speeds))
    assert found["output_tok_s"] == verdict and found["ttft_s"] == SAME
    (throughput,) = [f for f in pair["figures"] if f["figure"] == "output_tok_s"]
    if verdict == BEYOND:
        assert throughput["is_better"] == (throughput["after"] > throughput["before"])
        (tpot,) = [f for f in pair["figures"] if f["figure"] == "tpot_ms"]
        assert tpot["is_better"] == throughput["is_better"] and tpot["change"] * throughput["change"] < 0


def test_warm_repeats_count_for_nothing():
    warm = run(speeds=(11.0, 11.2, 11.4))
    for repeat in warm["repeat_figures"][1:]:
        repeat["is_warm"] = True
    assert verdicts(run(), warm)[0]["output_tok_s"] == UNKNOWN


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"provenance__hardware__cpu": "Xeon"}, "machine"),
        ({"provenance__hardware__threads": 1}, "threads"),
        ({"prompt_set__sha256": "b" * 64}, "prompts"),
        ({"sampling__max_tokens": 128}, "sampling max_tokens"),
        ({"dtype": "bfloat16"}, "number format"),
        ({"is_simulated": True}, "kind of run"),
    ],
)
def test_other_machines_and_settings_are_said_and_get_no_verdict(changes, what):
    found, pair = verdicts(run(), run(speeds=(20.0, 20.1, 20.2), **changes))
    assert set(found.values()) == {None} and [d["what"] for d in pair["other_settings"]] == [what]
    assert pair["same_tokens"] is None
    lines = "\n".join(describe(compare_records([run()], [run(speeds=(20.0, 20.1), **changes)])))
    assert f"no verdict, {what} differs" in lines and "beyond" not in lines


def test_other_software_is_named_and_judged_all_the_same_and_runs_without_a_partner_are_listed():
    newer = run(speeds=(12.0, 12.1, 12.2), provenance__git_revision="def", provenance__versions={"torch": "2.14"})
    newer["tokens_sha256"] = "0" * 64
    comparison = compare_records([run(), run("ngram")], [newer, run("draft_target")])
    assert json.loads(json.dumps(comparison)) == comparison
    lines = describe(comparison)
    assert lines[0] == "bench, torch plain" and "git revision abc -> def, torch 2.13 -> 2.14" in lines[1]
    assert "output throughput: 10.2 -> 12.1 tokens/s (+18.6%), beyond noise: better" in lines[2]
    assert lines[-3] == "  text: other tokens"
    assert lines[-2:] == ["only before: bench, torch ngram, K = 4", "only after: bench, torch draft_target, K = 4"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": None}, "method None"),
        ({"batch_size": "2"}, "batch_size '2'"),
        ({"sampling": 5}, "sampling 5"),
        ({"repeat_figures": {"a": 1}}, "repeat_figures"),
        ({"repeat_figures": ["x"]}, "repeat_figures that are none"),
        ({"provenance": "me"}, "provenance 'me'"),
        ({"provenance__hardware": [1]}, "hardware [1]"),
        ({"provenance__hardware__gpus": ["H200"]}, "gpus ['H200']"),
        ({"provenance__versions": "1"}, "versions '1'"),
        ({"prompt_set": ["x"]}, "prompt_set ['x']"),
    ],
    ids=str,
)
def test_a_run_that_no_workbook_wrote_is_refused(changes, words):
    for before, after in ((run(), run(**changes)), (run(**changes), run())):
        with pytest.raises(OptionError) as caught:
            compare_records([before], [after])
        assert f"a run of bench has {words}" in str(caught.value)


def test_what_is_no_number_is_no_figure():
    """Python reads NaN and 1e999 in JSON; the document that is written may hold neither."""
    broken = run(figures__output_tok_s=float("nan"), figures__ttft_s=float("inf"))
    (pair,) = compare_records([run()], [broken])["pairs"]
    assert [figure["figure"] for figure in pair["figures"]] == ["tpot_ms"]


def test_the_command_reads_files_and_folders(tmp_path, capsys):
    write_records(tmp_path / "a.jsonl", [run(), {"kind": "summary", "summary": {}}])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "b.json").write_text(json.dumps({"runs": [run(speeds=(12.0, 12.1, 12.2))], "summary": {}}))
    file = tmp_path / "out.json"
    assert cli._run(["compare-records", str(tmp_path / "a.jsonl"), str(tmp_path / "b"), "--json", str(file)]) == 0
    assert "beyond noise: better" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["pairs"][0]["figures"][0]["verdict"] == BEYOND and document["rule"]
    (tmp_path / "none.json").write_text("{}")
    for wrong in ("none.json", "not there"):
        assert cli._run(["compare-records", str(tmp_path / "a.jsonl"), str(tmp_path / wrong)]) == 2
