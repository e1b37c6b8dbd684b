"""Records on disk and their provenance: appended whole or not at all, and free of names that are nobody's business."""

from __future__ import annotations

import getpass
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tutorial_lib import results
from tutorial_lib.errors import OptionError
from tutorial_lib.results import provenance, read_records, without_folders, write_record


def test_append_replace_and_read(tmp_path):
    path = tmp_path / "new" / "runs.jsonl"
    write_record(path, {"a": 1, "text": "é\u2028"})
    write_record(path, {"a": None})
    assert read_records(path) == [{"a": 1, "text": "é\u2028"}, {"a": None}]
    write_record(path, {"b": [1.5]}, append=False)
    assert read_records(path) == [{"b": [1.5]}]
    assert [p.name for p in path.parent.iterdir()] == ["runs.jsonl"]


def test_writers_do_not_lose_each_others_lines(tmp_path):
    path = tmp_path / "runs.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: write_record(path, {"i": i}), range(40)))
    assert sorted(r["i"] for r in read_records(path)) == list(range(40))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    write_record(path, {"a": 1})
    with pytest.raises(ValueError):
        write_record(path, {"a": float("nan")})
    with pytest.raises(TypeError):
        write_record(path, {"a": object()})

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(results.os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_record(path, {"a": 2})
    assert read_records(path) == [{"a": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["runs.jsonl"]


def test_half_a_character_is_written_as_its_escape(tmp_path):
    """A file name that is no UTF-8 reaches us so; a long measurement must not be lost over it."""
    record = {"command": "workbook bench --prompts \udc80.jsonl 漢"}
    write_record(tmp_path / "r.jsonl", record)
    write_record(tmp_path / "r.jsonl", record)
    assert read_records(tmp_path / "r.jsonl") == [record, record]


@pytest.mark.parametrize("line", ["[" * 100_000, '{"x": ' + "9" * 5000 + "}"], ids=["deep", "long number"])
def test_what_the_json_reader_gives_up_on_is_told_with_its_line(tmp_path, line):
    (tmp_path / "r.jsonl").write_text("{}\n" + line)
    with pytest.raises(OptionError, match="line 2: not JSON"):
        read_records(tmp_path / "r.jsonl")


def test_a_line_cut_off_elsewhere_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"a": 1}')
    write_record(path, {"a": 2})
    assert read_records(path) == [{"a": 1}, {"a": 2}]


def test_reading_names_the_line(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"a": 1}\n\n{"a":\n')
    with pytest.raises(OptionError, match="runs.jsonl line 3: not JSON"):
        read_records(path)
    path.write_text("3\n")
    with pytest.raises(OptionError, match="line 1: found int"):
        read_records(path)
    with pytest.raises(OptionError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")


def test_commands_keep_no_folder(tmp_path):
    folder = tmp_path / "o" / "w"
    folder.mkdir(parents=True)
    command = [
        "workbook",
        "bench",
        "--json",
        str(folder / "out.json"),
        f"--target={folder}",
        "~/x/y",
        "own/model",
        "a/b/c",
    ]
    assert without_folders(command) == "workbook bench --json out.json --target=w y own/model c"


def test_provenance_is_complete_and_private():
    found = provenance(f"workbook bench --json {Path.home()}/out.json", 7)
    assert set(found) == {"time_utc", "hardware", "versions", "git_revision", "command", "seed", "os"}
    assert found["seed"] == 7 and found["command"] == "workbook bench --json out.json"
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["cpu"]
    assert found["versions"]["python"] and found["time_utc"].endswith("+00:00")
    text = json.dumps(found)
    for private in (str(Path.home()) + "/", socket.gethostname(), getpass.getuser() + "@"):
        assert private not in text


def test_revision_says_when_files_were_changed(monkeypatch):
    answers = {"ls-files": "results.py\n", "rev-parse": "abc123\n", "status": ""}
    monkeypatch.setattr(results, "_output_of", lambda *command: answers[command[3]])
    assert results._git_revision() == "abc123"
    answers["status"] = " M tutorial_lib/results.py\n"
    assert results._git_revision() == "abc123-dirty"
    answers["ls-files"] = None
    assert results._git_revision() is None


def test_an_archive_of_a_commit_tells_its_revision(tmp_path, monkeypatch):
    file = tmp_path / ".git_archival.txt"
    assert results._archived_revision(file) is None
    file.write_text("$Format:%H$\n")  # a plain copy of the files
    assert results._archived_revision(file) is None
    file.write_text("25d830ccb5424802336e3f8d73da8af9409623a8\n")
    assert results._archived_revision(file) == "25d830ccb5424802336e3f8d73da8af9409623a8"
    monkeypatch.setattr(results, "_output_of", lambda *command: None)
    assert results._git_revision() == results._archived_revision(Path(results.__file__).parents[1] / file.name)
