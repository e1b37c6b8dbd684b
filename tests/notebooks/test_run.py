"""Every notebook as the batch runner executes it, in the default profile, within its time box.

Each is executed once per session and looked at from several sides. What a cell tagged `nbval-check-output` shows must
come out again in a second run of the notebook: it is compared by nbval, since a stripped notebook holds nothing to
compare with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from canonical import NOTEBOOKS

from tutorial_lib import runner
from tutorial_lib.errors import OptionError

LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))
TIME_BOX_S = 600  # minutes of slack for a busy machine; a lesson takes one to three
# Less work than a reader's run, so that the suite stays within its time; every cell runs all the same.
SMALLER = {
    "02_speculative_runs": {"max_tokens": 32, "draws": 5000, "repeats": 1},
    "03_drafting_methods": {"max_tokens": 12, "bench_tokens": 8, "bench_categories": ["extraction"]},
    "04_train_a_drafter": {"corpus_seconds": 30.0, "train_seconds": 30.0, "max_tokens": 24},  # it still must learn
    "06_scaling_out": {"max_tokens": 12},
    "05_batching_and_kv_cache": {"concurrency": [1, 2], "output_len": 6, "shared_tokens": 128},
    "07_benchmark_plots": {"max_tokens": 12, "repeats": 2},
}
PLOTLY = "application/vnd.plotly.v1+json"

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)


@pytest.fixture(scope="session")
def executed(tmp_path_factory: pytest.TempPathFactory):
    """Execute a lesson on first use: the row of the summary, the executed notebook, the folder they are in."""
    out, done = tmp_path_factory.mktemp("executed"), {}

    def execute(lesson: Path) -> tuple[runner.NotebookRun, nbformat.NotebookNode, Path]:
        if lesson not in done:
            folder = out / lesson.stem
            sizes = SMALLER.get(lesson.stem, {})
            summary = runner.run_notebooks([lesson], parameters=sizes, out_dir=folder, timeout_s=TIME_BOX_S)
            done[lesson] = (summary.rows[0], nbformat.read(folder / lesson.name, as_version=4), folder)
        return done[lesson]

    return execute


@pytest.mark.timeout(TIME_BOX_S + 120)
@each_lesson
def test_runs_within_its_time_box_without_an_error(executed, lesson: Path) -> None:
    row, notebook, _ = executed(lesson)
    assert row.status == "ok", row.reason
    errors = [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert not errors
    complaints = "".join(
        o.text for cell in notebook.cells for o in cell.get("outputs", []) if o.get("name") == "stderr"
    )
    assert "Traceback" not in complaints and "Warning" not in complaints, complaints


@pytest.mark.timeout(TIME_BOX_S + 120)
@each_lesson
def test_promised_figures_are_visible_offline(executed, lesson: Path) -> None:
    _, notebook, folder = executed(lesson)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    promised = [cell for cell in code if "plot_" in cell.source]
    figures = [o.data[PLOTLY] for cell in code for o in cell.outputs if PLOTLY in o.get("data", {})]
    if promised:
        assert figures, "calls plot_* and shows no figure"
    for figure in figures:
        assert figure["data"], "a figure without data"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count('data-for="') >= len(figures)  # what plotly.js draws when the page is opened
    assert page.count("plotly.js v") == (1 if figures else 0)
    for widget in ("IntSlider(", "Loading widget", "FigureWidget(", "interactive(children"):
        assert widget not in page


@each_lesson
def test_a_misspelt_parameter_is_refused_before_the_start(lesson: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown parameter 'num_promts'"):
        runner.run_notebooks([lesson], parameters={"num_promts": 1}, out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def is_checked(lesson: Path) -> bool:
    cells = nbformat.read(lesson, as_version=4).cells
    return any("nbval-check-output" in cell.metadata.get("tags", []) for cell in cells)


@pytest.mark.timeout(2 * TIME_BOX_S + 120)
@pytest.mark.parametrize("lesson", [p for p in LESSONS if is_checked(p)], ids=lambda path: path.stem)
def test_deterministic_cells_come_out_again(executed, lesson: Path) -> None:
    row, _, folder = executed(lesson)
    assert row.status == "ok", row.reason
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--nbval-lax", "--nbval-current-env"]
    command += [f"--nbval-cell-timeout={TIME_BOX_S}", f"--rootdir={folder}", "-c", os.devnull, lesson.name]
    environment = {**os.environ, "SPECDEC_WORKBOOK_BATCH": "1"}
    again = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * TIME_BOX_S)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-1000:]
