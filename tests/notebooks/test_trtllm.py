"""The lessons in profile `tensorrt_llm`, executed against the stand-in of the library in tests/standin.

Nothing is computed there. What is tested is the path: every call and command of a lesson is one that the recorded
release takes, what the library cannot give is said in a sentence, and every result is marked as a stand-in's.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from canonical import NOTEBOOKS
from safetensors.torch import save_file

from tutorial_lib import runner
from tutorial_lib.models import load_tokenizer, resolve

STANDIN = Path(__file__).parents[1] / "standin"
TIME_BOX_S = 120
OF_RECORDS_ONLY = ("evidence", "batches", "076e5fec")  # cells of notebook 07 that show no run of the stand-in
PLOTLY = "application/vnd.plotly.v1+json"
FEW = {
    "01_engine_compilation": {},
    "02_speculative_runs": {
        "max_tokens": 12, "draws": 2000, "draft_lens": [1, 2], "repeats": 1, "sweep_categories": ["code"],
    },
    "06_scaling_out": {},
    "07_benchmark_plots": {"max_tokens": 8, "repeats": 2},
}  # fmt: skip


def model_folder(folder: Path, name: str) -> str:
    """Configuration, tokenizer and random weights of a tiny Llama, as a download would leave them."""
    folder.mkdir(parents=True)
    checkpoint = resolve(name, say=lambda line: None)
    save_file(dict(checkpoint.tensors()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    load_tokenizer(checkpoint).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    """Execute a lesson once, with the stand-in and its command lines on the kernel's paths."""
    root, done = tmp_path_factory.mktemp("trtllm"), {}
    target = model_folder(root / "target", "dummy:tiny-llama?seed=1")
    drafter = model_folder(root / "drafter", "dummy:tiny-llama?seed=2&layers=1")

    def execute(lesson: str) -> tuple[runner.NotebookRun, nbformat.NotebookNode, str]:
        if lesson not in done:
            declared = runner.declared_parameters(NOTEBOOKS / f"{lesson}.ipynb")
            values = {"target": target, "drafter": drafter, **FEW[lesson]}
            summary = runner.run_notebooks(
                [lesson],
                profile="tensorrt_llm",
                parameters={name: value for name, value in values.items() if name in declared},
                out_dir=root / lesson,
                timeout_s=TIME_BOX_S,
            )
            notebook = nbformat.read(root / lesson / f"{lesson}.ipynb", as_version=4)
            done[lesson] = (summary.rows[0], notebook, shown(notebook))
        return done[lesson]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STANDIN))
        import standin_tools

        standin_tools.install(root / "bin")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(STANDIN), str(STANDIN.parents[1])]))
        patch.setenv("PATH", str(root / "bin") + os.pathsep + os.environ["PATH"])
        patch.setenv("SPECDEC_WORKBOOK_CACHE", str(root / "cache"))
        patch.setenv("STAND_IN_TENSORRT_LLM", "1.2.1")
        patch.setenv("STAND_IN_MODEL", target)
        yield execute
    for name in [m for m in sys.modules if m.split(".")[0] in ("tensorrt_llm", "standin_tools")]:
        del sys.modules[name]


def shown(notebook: nbformat.NotebookNode) -> str:
    """All that the cells put out, as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(o.get("text", "") or json.dumps(o.get("data", {}), ensure_ascii=False) for o in outputs)


@pytest.mark.timeout(TIME_BOX_S + 60)
@pytest.mark.parametrize("lesson", FEW)
def test_a_lesson_runs_against_the_stand_in_and_says_so(run, lesson: str) -> None:
    row, notebook, text = run(lesson)
    assert row.status == "ok", row.reason
    assert not [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert "TensorRT-LLM 1.2.1 (a stand-in for tests)" in text


@pytest.mark.timeout(TIME_BOX_S + 60)
def test_engines_of_the_stand_in_are_built_by_the_recorded_commands(run) -> None:
    _, _, text = run("01_engine_compilation")
    assert re.search(r"target: \S+, fp8, sm_90, built in", text) and "rank0.engine" in text
    assert "keeps them inside the engine file" in text and "does not time a pass over several rows" in text
    assert "max_draft_len" in text and "ENGINE" in text


@pytest.mark.timeout(TIME_BOX_S + 60)
def test_runs_of_the_stand_in_promise_no_prediction(run) -> None:
    _, _, text = run("02_speculative_runs")
    assert "nothing to time apart, and no prediction" in text
    assert "draft model: identical (12 tokens)" in text
    found = re.search(r"the run with the draft model: (\d+) tokens, (\d+) rounds", text)
    assert found and found[1] == "12"
    theirs = int(found[1]) / (int(found[2]) + 1)
    assert f"12 / ({found[2]} + 1) = {theirs:.2f}" in text


@pytest.mark.timeout(TIME_BOX_S + 60)
@pytest.mark.parametrize("lesson", ["02_speculative_runs", "07_benchmark_plots"])
def test_figures_of_the_stand_in_say_that_they_are_simulated(run, lesson: str) -> None:
    _, notebook, text = run(lesson)
    figures = [
        json.dumps(output.data[PLOTLY]["layout"])
        for cell in notebook.cells
        if cell.id not in OF_RECORDS_ONLY
        for output in cell.get("outputs", [])
        if PLOTLY in output.get("data", {}) and output.data[PLOTLY]["data"]
    ]
    assert figures and not [layout for layout in figures if "simulated by a stand-in" not in layout]
    if lesson.startswith("07"):
        assert "not compared: the text is simulated" in text and "cannot time its steps apart" in text
