"""How notebooks are kept and built, read from their files alone: canonical bytes, parameters, head and foot, cells."""

from __future__ import annotations

import ast
import re
import tokenize
from io import StringIO
from pathlib import Path

import nbformat
import pytest
from canonical import NOTEBOOKS, canonical

from tutorial_lib import report, runner

ALL = sorted(p for p in NOTEBOOKS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
LESSONS = [path for path in ALL if path.parent == NOTEBOOKS]
LONGEST_CELL = 14  # lines of code; more belongs in tutorial_lib


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(NOTEBOOKS).with_suffix("")))


def cells_of(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_there_are_notebooks() -> None:
    assert [path.stem.split("_")[0] for path in LESSONS][:3] == ["00", "01", "02"]


@each(ALL)
def test_canonical_byte_for_byte(path: Path) -> None:
    text = path.read_bytes().decode("utf-8")
    assert text == canonical(text), "run `make format`"


def test_canonical_takes_out_what_jupyter_adds() -> None:
    noisy = nbformat.v4.new_notebook(metadata={"widgets": {"x": 1}, "papermill": {"y": 2}})
    noisy.cells = [
        nbformat.v4.new_code_cell(
            "1 + 1\n",
            execution_count=3,
            metadata={"tags": ["parameters"], "scrolled": True},
            outputs=[nbformat.v4.new_output("stream", text="2")],
        )
    ]
    text = canonical(nbformat.writes(noisy))
    assert not re.search("widgets|papermill|scrolled|stream", text)
    assert '"execution_count": null' in text and '"parameters"' in text and text.endswith("}\n")
    assert canonical(text) == text


@each(LESSONS)
def test_first_code_cell_holds_the_parameters_and_only_literals(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    first = next(cell for cell in cells if cell.cell_type == "code")
    assert tagged == [first]
    tree = ast.parse(first.source)
    for node in tree.body:
        assert isinstance(node, ast.AnnAssign) and node.value is not None, (
            f"not `name: type = literal`: line {node.lineno}"
        )
        assert ast.literal_eval(node.value) is not None, "use a sentinel: papermill does not understand None"
        assert node.lineno == node.end_lineno, "one line each"
    declared = runner.declared_parameters(path)
    assert len(declared) == len(tree.body) and "profile" in declared
    assert not [name for name, parameter in declared.items() if not parameter.help], "a comment for each"
    for parameter in declared.values():
        assert runner.convert(parameter.default, parameter, path.stem) == parameter.default


@each(LESSONS)
def test_head_and_foot(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    first_code = next(index for index, cell in enumerate(cells) if cell.cell_type == "code")
    head = "\n".join(cell.source for cell in cells[:first_code])
    assert re.match(r"# \S", head), "begins with its title"
    for word in ("question", "objectives", "minutes", "read", "run", "exercise", "hardware", "download"):
        assert re.search(rf"\b{word}", head, re.IGNORECASE), f"the head does not say: {word}"
    assert len(re.findall(r"^\s*(?:[-*]|\d+\.) ", head, re.MULTILINE)) >= 3, "three objectives"
    foot = "\n".join(cell.source for cell in cells[-2:] if cell.cell_type == "markdown")
    assert re.search("key points", foot, re.IGNORECASE) and re.search(r"try next|to try", foot, re.IGNORECASE)


@each(LESSONS)
def test_code_cells_are_short_and_do_nothing_forbidden(path: Path) -> None:
    for source in cells_of(path, "code"):
        assert code_lines(source) <= LONGEST_CELL, f"a cell of {code_lines(source)} lines:\n{source}"
        forbidden = re.search(r"sys\.exit|\bexit\(|\bquit\(|pip install|\binput\(|\.fit\(.*wandb|requests\.", source)
        assert not forbidden, forbidden


def code_lines(source: str) -> int:
    """Lines that hold code: blank lines and comments are free."""
    kinds = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    plain = re.sub(r"^[%!].*$", "pass", source, flags=re.MULTILINE)
    tokens = tokenize.generate_tokens(StringIO(plain + "\n").readline)
    return len({line for t in tokens if t.type not in kinds for line in range(t.start[0], t.end[0] + 1)})


@each(ALL)
def test_prose_reads_offline(path: Path) -> None:
    """Formulas become MathML and no picture is fetched: what the offline report can show."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    body = report.notebook_body(notebook, path.stem)
    assert "left out, as it is not part of this page" not in body
    prose = re.sub(r"<(code|pre)\b.*?</\1>|<annotation.*?</annotation>", "", body, flags=re.DOTALL)
    assert not re.search(r"\$[^$\n]*\\[a-z]+[^$\n]*\$", prose), "a formula that was not converted"
