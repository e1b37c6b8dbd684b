"""The one form in which notebooks are kept: nbformat 4.5, no outputs, no metadata but tags and the kernel's name.

`make format` (or `python tests/notebooks/canonical.py --write`) rewrites notebooks into it; without `--write` it names
those that differ and exits with 1. JupyterLab adds counts, outputs and metadata at every save, which this takes out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def canonical(text: str) -> str:
    """`text` of a notebook in the form in which it is kept."""
    notebook = nbformat.reads(text, as_version=4)
    notebook = NotebookNode(
        cells=[_cell(cell, index) for index, cell in enumerate(notebook.cells)],
        metadata=_METADATA,
        nbformat=4,
        nbformat_minor=5,
    )
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def _cell(cell: NotebookNode, index: int) -> NotebookNode:
    tags = cell.metadata.get("tags")
    kept = NotebookNode(
        cell_type=cell.cell_type,
        id=cell.get("id") or f"cell-{index:02d}",
        metadata={"tags": list(tags)} if tags else {},
        source=cell.source.strip("\n"),
    )
    if cell.cell_type == "code":
        kept.update(outputs=[], execution_count=None)
    return kept


def main() -> int:
    changed = []
    for path in sorted(NOTEBOOKS.rglob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        if ".ipynb_checkpoints" not in path.parts and canonical(text) != text:
            changed.append(path)
            if "--write" in sys.argv[1:]:
                path.write_text(canonical(text), encoding="utf-8")
    for path in changed:
        print(path.relative_to(NOTEBOOKS.parent), "rewritten" if "--write" in sys.argv[1:] else "is not canonical")
    return 1 if changed and "--write" not in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
