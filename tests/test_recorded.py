"""What a notebook recorded comes back as it was, with its origin; runs stay readable as plain records."""

from __future__ import annotations

import json

import pytest

from tutorial_lib.errors import OptionError
from tutorial_lib.results import Generation, Round, read_records
from tutorial_lib.show.recorded import Recorder, TokenTexts, machine_name, machine_words
from tutorial_lib.show.trace import trace_html


class Letters:
    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


ROUNDS = [Round((1, 2), 1, (1, 3), 0.01, 0.02, 0.05, (-1, -1), (0,))]
GENERATION = Generation([7], [0, 1, 3], "abd", "length", ROUNDS, ttft_s=0.1, latency_s=0.2)
RUN = {"kind": "run", "method": "plain", "figures": {"output_tok_s": 3.0}, "by_category": {}, "provenance": {}}
VALUES = {
    "generation": GENERATION,
    "both": {"plain": [GENERATION], "seconds": 0.5},
    "times": {1: 0.1, 5: 0.2},
    "bench": {"runs": [RUN, {**RUN, "method": "ngram"}], "summary": {"identical_text": True, "kind": "draft_target"}},
}


def must_not_run():
    raise AssertionError("a replay ran the cell")


@pytest.fixture
def replay(tmp_path):
    recorder = Recorder("02_demo", write_to=tmp_path)
    for name, value in VALUES.items():
        assert recorder(name, lambda value=value: value) is value
    recorder("tokenizer", Letters)
    return Recorder("02_demo", is_replay=True, folder=tmp_path)


@pytest.mark.parametrize("name", ["generation", "both", "times"])
def test_values_come_back_as_they_were(replay, name):
    assert replay(name, must_not_run) == VALUES[name]


def test_runs_of_several_cells_are_kept_apart(tmp_path):
    recorder = Recorder("02_demo", write_to=tmp_path)
    for name in ("first", "second"):
        recorder(name, lambda name=name: [{**RUN, "method": name}])
    replay = Recorder("02_demo", is_replay=True, folder=tmp_path)
    assert [replay(name, must_not_run)[0]["method"] for name in ("first", "second")] == ["first", "second"]


def test_runs_are_lines_of_their_own_and_find_their_way_back(replay, tmp_path):
    back = replay("bench", must_not_run)
    assert [run["method"] for run in back["runs"]] == ["plain", "ngram"]
    assert back["summary"] == VALUES["bench"]["summary"]
    (path,) = tmp_path.glob("*/02_demo.jsonl")
    runs = [record for record in read_records(path) if record["kind"] == "run"]
    assert [run["figures"] for run in runs] == [RUN["figures"]] * 2


def test_the_tokenizer_knows_what_the_trace_needs(replay):
    texts = replay("tokenizer", must_not_run)
    assert isinstance(texts, TokenTexts)
    assert trace_html(GENERATION, texts) == trace_html(GENERATION, Letters())
    assert texts.decode([99]) == "⟨99⟩"


def test_every_line_tells_where_it_is_from_and_nothing_private(replay, tmp_path):
    (path,) = tmp_path.glob("*/*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all("hardware" in line["provenance"] for line in lines if line["kind"] == "value")
    assert str(tmp_path) not in path.read_text()
    assert str(replay).startswith("replayed: recorded on 20")


def test_recording_again_replaces_the_file(tmp_path):
    for value in (1, 2):
        Recorder("02_demo", write_to=tmp_path)("x", lambda value=value: value)
    (path,) = tmp_path.glob("*/*.jsonl")
    assert len(read_records(path)) == 1
    assert Recorder("02_demo", is_replay=True, folder=tmp_path)("x", must_not_run) == 2


def test_the_newest_machine_is_replayed(tmp_path):
    for machine, day, value in (("a", "2025-01-02", 1), ("b", "2025-03-01", 2), ("c", "2024-12-31", 3)):
        origin = {"time_utc": f"{day}T00:00:00+00:00", "hardware": {"cpu": machine, "cores": 2}}
        line = {"kind": "value", "notebook": "n", "name": "x", "value": value, "provenance": origin}
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "n.jsonl").write_text(json.dumps(line) + "\n")
    recorder = Recorder("n", is_replay=True, folder=tmp_path)
    assert recorder("x", must_not_run) == 2
    assert str(recorder) == "replayed: recorded on 2025-03-01 on b, 2 cores"


def test_without_a_record_a_replay_says_what_to_do(tmp_path):
    with pytest.raises(OptionError, match="no record of notebook 02_demo.*profile cpu"):
        Recorder("02_demo", is_replay=True, folder=tmp_path)


def test_a_name_that_was_not_recorded_is_named(replay):
    with pytest.raises(OptionError, match="'other' is not in the record"):
        replay("other", must_not_run)


def test_usually_the_cell_just_runs_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Recorder("02_demo")("x", lambda: 5) == 5
    assert not list(tmp_path.iterdir())


def test_machines_in_words():
    gpus = [{"name": "NVIDIA H200"}] * 2
    assert machine_words({"cpu": "Xeon", "cores": 1, "gpus": gpus}) == "Xeon, 1 core"
    assert machine_words({"cpu": "Xeon", "cores": 2, "gpus": gpus}, "cuda") == "2 × NVIDIA H200"
    assert machine_words({}) == "a machine that was not recorded"


def test_machine_names_are_short_and_plain():
    assert machine_name({"cpu": "Intel(R) Xeon(R) Gold 6430", "cores": 2, "gpus": []}) == "intel-xeon-gold-6430-2-cores"
    assert machine_name({"cpu": "x", "cores": 16, "gpus": [{"name": "NVIDIA H200"}]}) == "1-nvidia-h200"
