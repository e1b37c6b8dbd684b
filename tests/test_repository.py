"""What the repository promises outside its code: dependencies, environments, licence, README, what a wheel holds."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import readme_results
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tutorial_lib"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [Requirement(text) for text in [*PROJECT["dependencies"], *(x for extra in EXTRAS.values() for x in extra)]]
# What TensorRT-LLM 1.2.1 brings along (its own release notes): our lower bounds must let it in.
BESIDE_TENSORRT_LLM = {"torch": "2.9.1", "transformers": "4.57.3", "numpy": "1.26.4"}
# Import names that differ from the distribution's, and distributions used without an import.
DISTRIBUTION_OF = {"IPython": "ipython", "bs4": "beautifulsoup4", "pynvml": "nvidia-ml-py"}
NEVER_IMPORTED = {"ipykernel", "jupyterlab", "jinja2"}  # the kernel, the front end, chat templates in transformers
OPTIONAL = {"tensorrt_llm", "vllm", "triton", "mpi4py", "kaleido"}  # come with the GPU stack or are not needed


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def environment(name: str) -> tuple[list[str], list[str]]:
    """The conda part and the pip part of an environment file."""
    dependencies = yaml.safe_load((ROOT / name).read_text())["dependencies"]
    pip = next(entry["pip"] for entry in dependencies if isinstance(entry, dict))
    return [entry for entry in dependencies if isinstance(entry, str)], pip


# --- dependencies -------------------------------------------------------------------------------------------------


def test_direct_dependencies_have_lower_bounds_and_nothing_else() -> None:
    for requirement in DIRECT:
        assert [clause.operator for clause in requirement.specifier] == [">="], requirement
    assert len({r.name for r in DIRECT}) == len(DIRECT)


def test_constraints_pin_every_direct_dependency_within_its_bounds() -> None:
    pinned = pins()
    for requirement in DIRECT:
        if requirement in map(Requirement, [*EXTRAS["gpu"], *EXTRAS["kernels"]]):
            continue  # comes with the machine: the one is not part of what CI installs, the other with CUDA PyTorch
        pin = pinned[canonicalize_name(requirement.name)]
        (clause,) = pin.specifier
        assert clause.operator == "==" and requirement.specifier.contains(clause.version), (pin, requirement)
    assert str(pinned["torch"].specifier) == "==2.13.0"


def test_bounds_admit_what_tensorrt_llm_needs() -> None:
    for name, version in BESIDE_TENSORRT_LLM.items():
        assert next(r for r in DIRECT if r.name == name).specifier.contains(version), name


def imported_names() -> dict[str, set[str]]:
    """Top-level module -> files of the package, and notebooks, that import it."""
    found: dict[str, set[str]] = {}
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]:
        for node in ast.walk(ast.parse(source_of(path))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(path.relative_to(ROOT).as_posix())
    return {name: files for name, files in found.items() if name not in sys.stdlib_module_names}


def source_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return re.sub(r"^\s*[%!].*$", "pass", "\n".join("".join(cell["source"]) for cell in cells), flags=re.MULTILINE)


def test_every_import_is_declared_and_every_declared_package_is_imported() -> None:
    imported = {canonicalize_name(DISTRIBUTION_OF.get(name, name)): files for name, files in imported_names().items()}
    declared = {canonicalize_name(r.name) for r in DIRECT}
    tools = {canonicalize_name(Requirement(text).name) for text in EXTRAS["test"]}
    own = {canonicalize_name("tutorial_lib")} | {canonicalize_name(name) for name in OPTIONAL}
    undeclared = {name: files for name, files in imported.items() if name not in declared | own}
    assert not undeclared
    assert declared - tools - NEVER_IMPORTED - imported.keys() == set(), "declared, but nothing imports it"


def test_gpu_libraries_stay_in_their_backends() -> None:
    imported = imported_names()
    for library, home in (("tensorrt_llm", r"(tensorrt_llm|trtllm/)"), ("vllm", r"vllm")):
        strangers = [file for file in imported.get(library, ()) if not re.match("tutorial_lib/backends/" + home, file)]
        assert not strangers, library


def test_importing_the_package_is_light() -> None:
    code = "import sys, tutorial_lib, tutorial_lib.cli, tutorial_lib.runner; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "transformers", "plotly", "pandas", "papermill", "nbformat", "tensorrt_llm", "vllm"):
        assert f"'{heavy}'" not in loaded, heavy


# --- environments and make ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "extras"),
    [("environment.yml", "notebooks,test,metrics,gpu"), ("environment-cpu.yml", "notebooks,test,metrics")],
)
def test_environment_files_install_this_project_as_pyproject_describes_it(name: str, extras: str) -> None:
    conda, pip = environment(name)
    assert f"-e .[{extras}]" in pip and set(extras.split(",")) <= EXTRAS.keys()
    assert "python=3.12" in conda and "pip" in conda
    others = [Requirement(line) for line in pip if not line.startswith("-")]
    for requirement in others:  # what stands beside the project must not fight it
        own = next((r for r in DIRECT if canonicalize_name(r.name) == canonicalize_name(requirement.name)), None)
        (clause,) = requirement.specifier
        assert clause.operator == "=="
        assert own is None or own.specifier.contains(clause.version.split("+")[0]), requirement


def test_the_gpu_environment_gets_tensorrt_llm_from_nvidia() -> None:
    conda, pip = environment("environment.yml")
    assert "tensorrt_llm==1.2.1" in pip and "--extra-index-url https://pypi.nvidia.com" in pip
    assert {"openmpi", "mpi4py>=4"} <= set(conda)
    torch = next(Requirement(line) for line in pip if line.startswith("torch=="))
    assert torch.specifier.contains(BESIDE_TENSORRT_LLM["torch"] + "+cu130")


def test_ci_runs_lint_and_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines and lines[-2:] == ["make lint", "make test"]


def test_make_help_lists_every_target() -> None:
    listing = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("install", "run", "test", "gpu-test", "lint", "lab", "format", "readme", "clean"):
        assert re.search(rf"^  make {target} ", listing, re.MULTILINE), target


def test_make_lab_is_reachable_from_this_machine_only() -> None:
    command = subprocess.run(["make", "-n", "lab"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--ip=127.0.0.1" in command


def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "oldpython"
    old.write_text(
        "#!/bin/sh\n# Python 3.9 as far as the Makefile can see\n"
        f'exec {sys.executable} -c "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])" "$2"\n'
    )
    old.chmod(0o755)
    done = subprocess.run(["make", "install", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and not (tmp_path / ".venv").exists()
    assert "is Python 3.9; needed: 3.10 or newer" in done.stderr


# --- what is handed out -------------------------------------------------------------------------------------------


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_a_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "tutorial_lib", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("specdec_workbook-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files", "tutorial_lib"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "tutorial_lib/data/prompts.jsonl" in held
    assert not [name for name in tracked.splitlines() if (ROOT / name).exists() and name not in held]


# --- README -------------------------------------------------------------------------------------------------------


def test_readme_results_come_from_the_records() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == readme_results.filled(text, readme_results.results(readme_results.read_records())), "make readme"


def test_readme_tree_names_what_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.split("## What is where")[1].split("```text\n")[1].split("```")[0]
    named = [line.split("#")[0].split() for line in tree.splitlines()]
    paths = [word for words in named for word in words if "/" in word or "." in word]
    assert len(paths) > 15
    folder = ""
    for words, line in zip(named, tree.splitlines(), strict=True):
        for word in words:
            if not line.startswith(" "):
                folder = ""
            assert (ROOT / folder / word).exists(), f"README names {folder}{word}"
            if not line.startswith(" ") and word.endswith("/"):
                folder = word


def record(method: str, tok_s: float, draft_len: int = 0, **changes: object) -> dict:
    figures = {"output_tok_s": tok_s, "acceptance_length": None if method == "plain" else 2.5}
    return {
        "kind": "run", "experiment": "bench", "method": method, "backend": "torch", "target": "embedded:target",
        "drafter": None, "dtype": "float32", "device": "cpu", "batch_size": 1, "max_draft_len": draft_len,
        "is_simulated": False, "figures": figures, "sampling": {"temperature": None}, "prompt_set": {"sha256": "1"},
        "provenance": {"time_utc": "2026-01-01T00:00:00+00:00", "hardware": {"cpu": "A CPU", "cores": 2}},
    } | changes  # fmt: skip


def test_results_table_takes_the_latest_record_at_the_fastest_k() -> None:
    later = {"time_utc": "2026-01-02T00:00:00+00:00", "hardware": {"cpu": "A CPU", "cores": 2}}
    runs = [
        record("plain", 10.0),
        record("draft_target", 19.0, 4),
        record("draft_target", 15.0, 4, provenance=later),  # measured again: the earlier one no longer counts
        record("draft_target", 16.0, 2),
        record("plain", 5.0, target="dummy:llama-3.1-8b", is_simulated=True),
    ]
    table = readme_results.results({Path("laptop/bench.jsonl"): runs})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[4:9] for row in rows] == [
        ["–", "1", "10.0", "–", "–"],
        ["2", "1", "16.0", "1.60×", "2.50"],
        ["–", "1", "5.0", "–", "–"],
    ]
    assert rows[2][1] == "dummy:llama-3.1-8b (random weights)" and "simulated" in rows[2][2]
    assert rows[0][9] == "[laptop/bench](notebooks/recorded/laptop/bench.jsonl)"


def test_results_table_without_records_says_so() -> None:
    assert "No run has been recorded yet" in readme_results.results({})
    with pytest.raises(SystemExit):
        readme_results.filled("a README without markers", "")
