"""The engine directory: all or nothing, one builder at a time, and a one-line refusal for whatever is not right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tutorial_lib import engine_dir
from tutorial_lib.engine_dir import FORMAT_VERSION, MANIFEST, _seal, create, is_engine_dir, open_engine, require
from tutorial_lib.errors import EngineDirError

REPO = Path(__file__).parents[1]
COMMAND = "workbook build embedded:target --dtype float32 --max-batch-size 8 --max-seq-len 2048 --max-draft-len 4"


def fields(**changes):
    return {
        "backend": "torch",
        "checkpoint": "embedded:target",
        "checkpoint_fingerprint": "f00d",
        "model_config": {"hidden_size": 8},
        "dtype": "float32",
        "arch": "cpu-x86_64",
        "limits": {"max_batch_size": 8, "max_seq_len": 2048, "max_draft_len": 4},
        "eos_token_ids": [2],
        "tactics": {},
        "build": {"seconds": 0.1, "command": COMMAND, "torch": "2.9", "steps": {}},
    } | changes


def writer(content: bytes = b"weights", **changes):
    def write(staging: Path):
        (staging / "weights.bin").write_bytes(content)
        (staging / "sub").mkdir()
        (staging / "sub" / "tokenizer.json").write_bytes(b"{}")
        return fields(**changes)

    return write


@pytest.fixture
def built(tmp_path):
    return create(tmp_path / "engine", writer())


def open_here(path, **changes):
    return open_engine(path, **({"backend": "torch", "arch": "cpu-x86_64"} | changes))


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(EngineDirError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def left_in(folder: Path) -> set[str]:
    """Everything in `folder` but lock files."""
    return {entry.name for entry in folder.iterdir() if not entry.name.endswith(".lock")}


def edit_manifest(path: Path, is_sealed=True, **changes) -> None:
    """Change the manifest, by default as a build of another version would have written it."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest.update(changes)
    if is_sealed:
        manifest["sha256"] = _seal(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


# ---- what a good build leaves ---------------------------------------------------------------------------------------


def test_round_trip(tmp_path, built):
    assert left_in(tmp_path) == {"engine"}
    info = open_here(tmp_path / "engine")
    assert info.manifest == built.manifest
    assert info.manifest["format"] == FORMAT_VERSION
    assert set(info.manifest["files"]) == {"weights.bin", "sub/tokenizer.json"}
    assert info.manifest["files"]["weights.bin"]["bytes"] == 7
    assert (info.max_draft_len, info.max_seq_len, info.max_batch_size) == (4, 2048, 8)
    assert info.eos_token_ids == {2} and info.total_bytes == 9


def test_stores_no_absolute_path(tmp_path):
    model = tmp_path / "someones-home" / "model"
    create(
        tmp_path / "engine",
        writer(
            checkpoint=str(model),
            model_config={"_name_or_path": str(model), "nested": [{"p": model}]},
            build={"command": f"workbook build {model} --out {tmp_path}/engine"},
        ),
    )
    text = (tmp_path / "engine" / MANIFEST).read_text()
    assert str(tmp_path) not in text and "someones-home" not in text
    assert json.loads(text)["checkpoint"] == "model"
    assert json.loads(text)["build"]["command"] == "workbook build model --out engine"


def test_can_be_moved_and_the_rebuild_line_follows(tmp_path, built):
    moved = tmp_path / "else where"
    built.path.rename(moved)
    assert open_here(moved).rebuild_line == f"{COMMAND} --out '{moved}' --overwrite"


def test_relative_path_and_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine").mkdir()
    assert create("engine", writer()).path == tmp_path / "engine"
    assert open_here("engine").dtype == "float32"


# ---- all or nothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failing_write_leaves_nothing(tmp_path, failure):
    def write(staging):
        (staging / "half").write_bytes(b"x" * 1000)
        raise failure("stop")

    with pytest.raises(failure):
        create(tmp_path / "engine", write)
    assert left_in(tmp_path) == set()
    create(tmp_path / "engine", writer())  # and the lock is free again


def test_a_failing_overwrite_keeps_the_old_one(tmp_path, built):
    def write(staging):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create(built.path, write, overwrite=True)
    assert left_in(tmp_path) == {"engine"}
    open_here(built.path)


def test_an_interrupted_swap_puts_the_old_one_back(tmp_path, built, monkeypatch):
    real = Path.rename

    def rename(self, target):
        if ".building-" in self.name:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        create(built.path, writer(b"new"), overwrite=True)
    monkeypatch.undo()
    assert left_in(tmp_path) == {"engine"}
    assert (open_here(built.path).path / "weights.bin").read_bytes() == b"weights"


def test_a_full_disk_is_one_line(tmp_path):
    def write(staging):
        raise OSError(28, "No space left on device")

    assert "No space left on device" in refusal(create, tmp_path / "engine", write)
    assert left_in(tmp_path) == set()


def test_an_output_below_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    refusal(create, tmp_path / "file" / "engine", writer())


KILLED_BUILD = """
import os, sys, time
from tutorial_lib.engine_dir import create
def write(staging):
    (staging / "half").write_bytes(b"x")
    print("writing", flush=True)
    time.sleep(60)
create(sys.argv[1], write)
"""


def test_a_killed_build_is_cleaned_up_by_the_next(tmp_path):
    build = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED_BUILD), str(tmp_path / "engine")],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert build.stdout.readline() == "writing\n"
        build.send_signal(signal.SIGKILL)
    finally:
        build.kill()
        build.wait()
        build.stdout.close()
    assert len(left_in(tmp_path)) == 1 and not (tmp_path / "engine").exists()
    create(tmp_path / "engine", writer())
    assert left_in(tmp_path) == {"engine"}


def test_a_directory_set_aside_by_a_killed_overwrite_comes_back(tmp_path, built):
    built.path.rename(tmp_path / ".engine.old-0123abcd")
    info = create(built.path, writer(b"new"), wanted=fields(), overwrite=False)
    assert (info.path / "weights.bin").read_bytes() == b"weights"
    assert left_in(tmp_path) == {"engine"}


def test_clean_up_leaves_neighbours_alone(tmp_path):
    for name in ("engine2", ".engine.building-notours", ".engine2.building-0123abcd"):
        (tmp_path / name).mkdir()
    create(tmp_path / "engine", writer())
    assert left_in(tmp_path) == {"engine", "engine2", ".engine.building-notours", ".engine2.building-0123abcd"}


@pytest.mark.parametrize("missing", ["backend", "limits", "build"])
def test_a_backend_that_forgets_a_field_is_our_bug(tmp_path, missing):
    def write(staging):
        (staging / "w").write_bytes(b"1")
        return {name: value for name, value in fields().items() if name != missing}

    with pytest.raises(ValueError, match=missing) as caught:
        create(tmp_path / "engine", write)
    assert not isinstance(caught.value, EngineDirError)
    assert left_in(tmp_path) == set()


def test_a_link_is_no_content(tmp_path):
    def write(staging):
        (staging / "w").symlink_to("/etc/hostname")
        return fields()

    with pytest.raises(ValueError, match="plain file"):
        create(tmp_path / "engine", write)


# ---- something is there already -------------------------------------------------------------------------------------


def test_an_existing_engine_is_refused_or_reused_or_replaced(built):
    before = built.manifest
    assert "exists already" in refusal(create, built.path, writer(b"new"))
    assert create(built.path, writer(b"new"), wanted=fields()).manifest == before
    message = refusal(create, built.path, writer(b"new"), wanted=fields(dtype="int8"))
    assert "'float32'" in message and "'int8'" in message and "--overwrite" in message
    create(built.path, writer(b"newer"), overwrite=True)
    assert (open_here(built.path).path / "weights.bin").read_bytes() == b"newer"
    assert left_in(built.path.parent) == {"engine"}


def test_a_damaged_engine_is_not_reused(built):
    (built.path / "weights.bin").write_bytes(b"w")
    assert "1 bytes" in refusal(create, built.path, writer(), wanted=fields())


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_engine_is_never_replaced(tmp_path, overwrite):
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.txt").write_text("words")
    assert "not an engine directory" in refusal(create, precious, writer(), overwrite=overwrite)
    (tmp_path / "file").write_text("words")
    assert "not a directory" in refusal(create, tmp_path / "file", writer(), overwrite=overwrite)
    assert (precious / "chapter1.txt").read_text() == "words"


def test_an_engine_with_a_foreign_file_is_not_replaced(built):
    (built.path / "notes.txt").write_text("words")
    assert "notes.txt" in refusal(create, built.path, writer(), overwrite=True)
    assert (built.path / "notes.txt").exists()


def test_two_builders_at_once_build_once(tmp_path):
    builds, results, said = [], [], []
    inside = threading.Event()
    waiting = threading.Event()

    def write(staging):
        builds.append(1)
        inside.set()
        assert waiting.wait(10)
        return writer()(staging)

    def say(line):
        said.append(line)
        waiting.set()

    def builder():
        results.append(create(tmp_path / "engine", write, wanted=fields(), say=say))

    threads = [threading.Thread(target=builder) for _ in range(2)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert len(builds) == 1 and len(results) == 2
    assert results[0].manifest == results[1].manifest
    assert "waiting" in said[0]


def test_the_lock_holds_across_processes(tmp_path):
    build = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED_BUILD), str(tmp_path / "engine")],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )
    said = []

    def say(line):
        said.append(line)
        os.kill(build.pid, signal.SIGKILL)  # the other builder dies while we wait: its lock goes with it

    try:
        assert build.stdout.readline() == "writing\n"
        create(tmp_path / "engine", writer(), say=say)
    finally:
        build.kill()
        build.wait()
        build.stdout.close()
    assert said and left_in(tmp_path) == {"engine"}


# ---- opening --------------------------------------------------------------------------------------------------------


def test_nothing_there_a_file_a_half_built_one(tmp_path):
    assert "does not exist" in refusal(open_here, tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(open_here, tmp_path / "file")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "weights.bin").write_bytes(b"1")
    assert f"workbook build CHECKPOINT --out {tmp_path}/half" in refusal(open_here, tmp_path / "half")


def test_folders_of_others_are_named_for_what_they_are(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"version": "0.10.0", "build_config": {"max_draft_len": 4, "speculative_decoding_mode": "lookahead"}}
        )
    )
    message = refusal(open_here, tmp_path)
    assert "TensorRT-LLM" in message and "0.10.0" in message and "max_draft_len 4" in message and "lookahead" in message
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "checkpoint" in refusal(open_here, tmp_path)


@pytest.mark.parametrize("content", [b"", b'{"format": 1, "back', b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_truncated_manifest(built, content):
    (built.path / MANIFEST).write_bytes(content)
    assert "remove" in refusal(open_here, built.path)
    refusal(create, built.path, writer(), overwrite=True)


def test_a_full_disk_is_told_as_the_library_says_it(tmp_path):
    def write(staging):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    assert "No space left on device; needed: a folder with room" in refusal(create, tmp_path / "e", write)
    assert left_in(tmp_path) == set()
    with pytest.raises(RuntimeError, match="os error 5"):  # a disk that fails is nobody's mistake
        create(tmp_path / "e", lambda staging: (_ for _ in ()).throw(RuntimeError("I/O error (os error 5)")))


def test_names_that_lead_nowhere_are_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for call in (open_here, lambda path: create(path, writer())):
        assert "is not UTF-8" in refusal(call, tmp_path / "c\udc80")
        assert "loop" in refusal(call, tmp_path / "loop" / "e")


def test_a_manifest_that_a_build_did_not_write_is_not_loaded(built):
    """A valid file with other values would load, and decode other text."""
    before = (built.path / MANIFEST).read_text()
    other_rope = {"model_config": built.model_config | {"rope_theta": 1e5}}
    for changes in ({"eos_token_ids": []}, other_rope, {"sha256": None}, {"more": 1}):
        edit_manifest(built.path, is_sealed=False, **changes)
        message = refusal(open_here, built.path)
        assert "is not as the build wrote it" in message and f"{COMMAND} --out {built.path} --overwrite" in message
        refusal(create, built.path, writer(), wanted={"dtype": built.dtype})
        (built.path / MANIFEST).write_text(before)
    open_here(built.path)


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0, None, "1", "0.10.0"])
def test_another_format_is_seen_first(built, version):
    edit_manifest(built.path, format=version, backend=7, files="moved", arch="sm_90")  # the rest may look different
    message = refusal(open_here, built.path)
    assert f"format {version!r}" in message and f"format {FORMAT_VERSION}" in message
    assert f"{COMMAND} --out {built.path} --overwrite" in message and "sm_90" in message


def test_an_older_format_can_be_overwritten(built):
    edit_manifest(built.path, format=0)
    create(built.path, writer(), overwrite=True)
    open_here(built.path)


def test_foreign_backend_and_architecture(built):
    message = refusal(open_here, built.path, backend="tensorrt_llm")
    assert "'torch'" in message and "'tensorrt_llm'" in message
    message = refusal(open_here, built.path, arch="sm_90")
    assert "cpu-x86_64" in message and "sm_90" in message and f"--out {built.path} --overwrite" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": {"max_batch_size": 8, "max_seq_len": 2048}},
        {"limits": {"max_batch_size": 8, "max_seq_len": 2048, "max_draft_len": "4"}},
        {"limits": {"max_batch_size": 0, "max_seq_len": 2048, "max_draft_len": 4}},
        {"eos_token_ids": "2"},
        {"eos_token_ids": [None]},
        {"files": {}},
        {"files": {"weights.bin": None}},
        {"files": {"weights.bin": {"bytes": 7}}},
        {"backend": None},
        {"build": {}},
    ],
)
def test_a_manifest_that_was_edited(built, changes):
    edit_manifest(built.path, **changes)
    refusal(open_here, built.path)


def test_missing_shortened_and_changed_files(built):
    weights = built.path / "weights.bin"
    weights.write_bytes(b"weightz")
    message = refusal(open_here, built.path)
    assert "weights.bin" in message and "SHA-256" in message and built.rebuild_line in message
    open_here(built.path, check_hashes=False)  # same size: only the hash can tell
    weights.write_bytes(b"weigh")
    for check_hashes in (True, False):
        message = refusal(open_here, built.path, check_hashes=check_hashes)
        assert "5 bytes" in message and "7 bytes" in message
    weights.unlink()
    assert "missing" in refusal(open_here, built.path, check_hashes=False)


@pytest.mark.parametrize(
    "name", ["../outside.bin", "/etc/hostname", "sub/../../outside.bin", "..\\outside.bin", "", "."]
)
def test_file_names_do_not_escape(tmp_path, built, name):
    (tmp_path / "outside.bin").write_bytes(b"1")
    edit_manifest(built.path, files={name: {"bytes": 1, "sha256": "0"}})
    message = refusal(open_here, built.path, check_hashes=False)
    assert "outside the directory" in message


def test_a_link_out_of_the_directory_is_refused(tmp_path, built):
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"weights")
    (built.path / "weights.bin").unlink()
    (built.path / "weights.bin").symlink_to(outside)
    assert "plain file" in refusal(open_here, built.path)


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_limits_are_compared_before_a_run(built):
    require(built)
    require(built, max_draft_len=4, max_seq_len=2048, max_batch_size=8)
    message = refusal(require, built, max_draft_len=8, max_batch_size=2)
    assert "built for max_draft_len 4" in message and "needed: max_draft_len 8" in message
    assert "--max-batch-size 8 " in message  # the rebuild line keeps what was enough
    assert f"--max-draft-len 8 --out {built.path} --overwrite" in message


def test_a_plain_engine_refuses_any_draft(tmp_path):
    limits = {"max_batch_size": 8, "max_seq_len": 2048, "max_draft_len": 0}
    info = create(tmp_path / "plain", writer(limits=limits, build={"command": "workbook build dummy:tiny"}))
    message = refusal(require, info, max_draft_len=1)
    assert "max_draft_len 0" in message and f"workbook build dummy:tiny --max-draft-len 1 --out {info.path}" in message


def test_is_engine_dir(tmp_path, built):
    assert is_engine_dir(built.path) and not is_engine_dir(tmp_path) and not is_engine_dir(tmp_path / "none")


def test_version_is_a_string():
    assert isinstance(engine_dir.workbook_version(), str)
