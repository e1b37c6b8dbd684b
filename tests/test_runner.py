"""The batch runner on tiny notebooks: what ran, what failed and why, what is left on disk and in the process table."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tutorial_lib import runner
from tutorial_lib.errors import OptionError

PARAMETERS = """\
profile: str = "cpu"  # how much to run
num_prompts: int = 4  # prompts per category (a = b)
temperature: float = 0.0  # 0 is greedy
use_cache: bool = True  # reuse blocks
draft_lens: list[int] = [1, 2]  # K values
label: str = ""  # shown in the title
limits: dict = {}  # free form
seed: int | None = None  # None draws anew"""


def write_notebook(folder: Path, name: str, *cells: str, parameters: str = PARAMETERS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    first = new_code_cell(parameters, metadata={"tags": ["parameters"]})
    body = [new_markdown_cell(c[3:]) if c.startswith("md:") else new_code_cell(c) for c in cells]
    kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = new_notebook(cells=[first, *body], metadata={"kernelspec": kernelspec})
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def run(paths: list[Path], out: Path, **options: object) -> runner.RunSummary:
    said: list[str] = []
    options.setdefault("timeout_s", 60)
    summary = runner.run_notebooks(paths, out_dir=out, say=said.append, **options)  # type: ignore[arg-type]
    assert summary.table() in said
    return summary


def outputs_of(path: Path) -> str:
    notebook = nbformat.read(path, as_version=4)
    return "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# --- parameters ---------------------------------------------------------------------------------------------------


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    return write_notebook(tmp_path / "notebooks", "01_tiny", "print(num_prompts)")


def test_declared_parameters_keep_a_line_with_a_second_equals_sign(notebook: Path) -> None:
    found = runner.declared_parameters(notebook)
    assert list(found) == [line.split(":")[0] for line in PARAMETERS.splitlines()]
    assert found["num_prompts"] == runner.Parameter("num_prompts", "int", 4, "prompts per category (a = b)")
    assert found["seed"].type == "int | None"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("num_prompts", "7", 7),
        ("num_prompts", np.int64(7), 7),
        ("temperature", 1, 1.0),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", "nan", float("nan")),
        ("use_cache", "false", False),
        ("use_cache", np.bool_(True), True),
        ("draft_lens", (1, 3), [1, 3]),
        ("draft_lens", "[1, 3]", [1, 3]),
        ("draft_lens", np.array([1, 3]), [1, 3]),
        ("label", "7", "7"),
        ("label", Path("/tmp/a b"), "/tmp/a b"),
        ("limits", {"a": (1, None)}, {"a": [1, None]}),
        ("seed", None, None),
        ("seed", "none", None),
        ("seed", "3", 3),
    ],
)
def test_values_are_converted_to_the_declared_type(notebook: Path, name: str, given: object, expected: object) -> None:
    value = runner.check_parameters([notebook], "cpu", {name: given})[notebook][name]
    assert type(value) is type(expected)
    assert value == expected or (value != value and expected != expected)  # nan


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("num_prompts", "four"),
        ("num_prompts", 4.0),
        ("num_prompts", True),
        ("num_prompts", None),
        ("use_cache", 1),
        ("draft_lens", [1, "x"]),
        ("draft_lens", 3),
        ("label", 7),
        ("limits", {1: 2}),
        ("temperature", "__import__('os')"),
    ],
)
def test_values_of_another_type_are_refused_with_name_and_type(notebook: Path, name: str, given: object) -> None:
    with pytest.raises(OptionError, match=rf"{name} of 01_tiny .*needed: .*{name}"):
        runner.check_parameters([notebook], "cpu", {name: given})


def test_a_misspelt_parameter_starts_nothing_and_lists_the_known_ones(notebook: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown parameter 'num_prompt' .*draft_lens.*num_prompts"):
        run([notebook], tmp_path / "out", parameters={"num_prompt": 4})
    assert not (tmp_path / "out").exists()


def test_a_parameter_goes_to_the_notebooks_that_declare_it_and_says_so(notebook: Path, tmp_path: Path) -> None:
    other = write_notebook(tmp_path, "02_other", parameters='profile: str = "cpu"  # size')
    said: list[str] = []
    values = runner.check_parameters([notebook, other], "replay", {"num_prompts": 2}, said.append)
    assert values == {notebook: {"profile": "replay", "num_prompts": 2}, other: {"profile": "replay"}}
    assert said == ["parameter num_prompts goes to 01_tiny; the others do not declare it"]


def test_parse_parameters() -> None:
    assert runner.parse_parameters(["a=1", "label=x=y"]) == {"a": "1", "label": "x=y"}
    for bad in (["a"], ["1a=2"], ["for=1"], ["a=1", "a=2"]):
        with pytest.raises(OptionError):
            runner.parse_parameters(bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"profile": "huge"}, "profile 'huge' is unknown"), ({"timeout_s": 0}, "timeout_s"), ({"timeout_s": -3}, "above")],
)
def test_bad_options_are_refused_first(notebook: Path, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        run([notebook], tmp_path / "out", **options)
    with pytest.raises(OptionError, match="holds the notebooks themselves"):
        run([notebook], notebook.parent)


@pytest.mark.parametrize(
    "text",
    ["", "\0", "[]", "null", "[" * 100_000, '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": 5}'],
    ids=["empty", "nul", "list", "null", "deep", "cells"],
)
def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.ipynb").write_text(text)
    with pytest.raises(OptionError, match="x.ipynb is no notebook") as caught:
        runner.run_notebooks([tmp_path / "x.ipynb"], out_dir=tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused(notebook: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match="cannot be made"):
            runner.run_notebooks([notebook], out_dir=out)


def test_names_may_be_paths_stems_or_numbers(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_notebook(tmp_path / "notebooks", "00_first")
    monkeypatch.setattr(runner, "notebooks_dir", lambda: tmp_path / "notebooks")
    assert [p.stem for p in runner.find_notebooks()] == ["00_first", "01_tiny"]
    assert [p.stem for p in runner.find_notebooks(["01", "00_first.ipynb"])] == ["01_tiny", "00_first"]
    assert runner.find_notebooks([notebook]) == [notebook]
    for bad in (["1"], ["missing"], ["00", "00_first"]):
        with pytest.raises(OptionError):
            runner.find_notebooks(bad)


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_failures_are_told_apart_and_stop_no_other_notebook(tmp_path: Path) -> None:
    folder, pids = tmp_path / "notebooks", tmp_path / "pids"
    note = f"import os, subprocess\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')"
    child = "child = subprocess.Popen(['sleep', '600'])\n" + f"open({str(pids)!r}, 'a').write(f'{{child.pid}} ')"
    cells = {
        "0_ok": [note, "print('sum', num_prompts + 1)"],
        "1_killed": [note, child, "print('before')", "os.kill(os.getpid(), 9)", "print('after')"],
        "2_error": [note, "raise ValueError('no such <b>thing</b>')", "print('after')"],
        "3_hangs": [note, child, "import time", "time.sleep(600)"],
        "4_exits": ["import sys", "sys.exit()", "print('after')"],
        "5_ok": [note, "print('last')"],
    }
    paths = [write_notebook(folder, name, *sources) for name, sources in cells.items()]
    before = [path.read_bytes() for path in paths]
    summary = run(paths, tmp_path / "out", parameters={"num_prompts": 2}, timeout_s=10)

    assert [row.status for row in summary.rows] == ["ok", "failed", "failed", "failed", "failed", "ok"]
    reasons = [row.reason for row in summary.rows]
    assert reasons[1] == "kernel died at In [6]"
    assert reasons[2] == "ValueError: no such <b>thing</b> (at In [4])"
    assert reasons[3] == "time box of 10 s used up at In [6]"
    assert reasons[4].startswith("stopped early: cells after In [4] did")
    assert summary.rows[1].seconds < 60 and summary.rows[3].seconds < 30
    assert (summary.ok, summary.exit_code) == (False, 1)

    assert outputs_of(tmp_path / "out" / "0_ok.ipynb") == "sum 3\n"
    assert outputs_of(tmp_path / "out" / "1_killed.ipynb") == "before\n"  # the partial notebook is kept
    assert [path.read_bytes() for path in paths] == before
    recorded = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["status"] for row in recorded["rows"]] == [row.status for row in summary.rows]
    page = summary.report.read_text() if summary.report else ""
    assert "kernel died" in page and "no such &lt;b&gt;thing" in page

    time.sleep(0.2)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 7
    assert not [pid for pid in started if is_running(pid)]


def test_paths_with_braces_and_spaces_and_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a {b} c"
    path = write_notebook(folder, "0_{x}", "print(open('beside.txt').read())")
    (folder / "beside.txt").write_text("found")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    summary = run([path], Path("out {y}"))
    assert summary.ok, summary.table()
    assert outputs_of(elsewhere / "out {y}" / "0_{x}.ipynb") == "found\n"
    assert Path.cwd() == elsewhere


def test_every_kind_of_value_reaches_the_cell(tmp_path: Path) -> None:
    path = write_notebook(tmp_path / "n", "0", "print([num_prompts, temperature, draft_lens, label, limits, seed])")
    given = {
        "num_prompts": np.int32(3),
        "temperature": "inf",
        "draft_lens": (2, 4),
        "label": 'a "quoted" \\ ü\n{brace}',
        "limits": {"k": [True, None, 1.5]},
        "seed": None,
    }
    assert run([path], tmp_path / "out", parameters=given).ok
    expected = [3, float("inf"), [2, 4], given["label"], given["limits"], None]
    assert outputs_of(tmp_path / "out" / "0.ipynb") == f"{expected}\n"


def test_ctrl_c_stops_the_kernel_and_keeps_what_had_finished(tmp_path: Path) -> None:
    folder, pids = tmp_path / "notebooks", tmp_path / "pids"
    note = f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')"
    paths = [
        write_notebook(folder, "0_done", "print('done')"),
        write_notebook(folder, "1_long", note, "time.sleep(600)"),
        write_notebook(folder, "2_never", "print('never')"),
    ]
    code = (
        "import sys; from tutorial_lib.runner import run_notebooks\n"
        "sys.exit(run_notebooks(sys.argv[2:], out_dir=sys.argv[1], timeout_s=100).exit_code)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out"), *map(str, paths)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not pids.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, said + complaints
    assert re.search(r"0_done +ok", said) and re.search(r"1_long +interrupted", said)
    assert re.search(r"2_never +not run", said) and "what had finished is kept" in said
    assert "Traceback" not in complaints and "WARNING" not in complaints
    assert (tmp_path / "out" / "report.html").exists()
    time.sleep(0.2)
    assert not is_running(int(pids.read_text()))


# --- the report ---------------------------------------------------------------------------------------------------


def test_report_shows_figures_formulas_and_tables_and_asks_no_network(tmp_path: Path) -> None:
    path = write_notebook(
        tmp_path / "n",
        "0_rich",
        r"md:# Title" + "\n\nInline $\\frac{a}{b} < 1$ costs \\$5.\n\n$$\\sum_{i=0}^{K} \\alpha^i$$",
        "import plotly.graph_objects as go, plotly.io as pio\npio.renderers.default = 'plotly_mimetype'",
        "go.Figure(go.Bar(x=['mark_one'], y=[1]))",
        "pio.renderers.default = 'notebook'\ngo.Figure(go.Bar(x=['mark_two'], y=[2]))",
        "from IPython.display import HTML, display\n"
        'display(HTML(\'<script src="https://example.org/x.js"></script><img src="http://example.org/a.png">\'))\n'
        'display(HTML(\'<link rel="stylesheet" href="//example.org/s.css"><p>kept</p>\'))',
        "import ipywidgets; ipywidgets.IntSlider()",
        "HTML('<table><tr><th>column_mark</th></tr></table>')",
    )
    summary = run([path], tmp_path / "out")
    assert summary.ok, summary.table()
    page = (tmp_path / "out" / "report.html").read_text()
    for text in ("mark_one", "mark_two", "column_mark", "<p>kept</p>", "An interactive control", "<mfrac>"):
        assert text in page, text
    assert re.search("<m(underover|subsup)", page)
    assert "\\frac" not in page and "IntSlider(" not in page and "IntSliderModel" not in page
    assert page.count("plotly.js v") == 1
    body = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""<(script|link|img|iframe)[^>]*(src|href)=["']?(https?:|//)""", page)
    assert "@import" not in body and "url(http" not in body
    assert "default-src 'none'" in page


def test_report_of_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no executed notebooks"):
        runner.write_report(tmp_path)


def test_report_without_a_summary_takes_what_is_there(tmp_path: Path) -> None:
    write_notebook(tmp_path, "0_alone", "md:just *text*")
    assert "just <em>text</em>" in runner.write_report(os.fspath(tmp_path)).read_text()
