"""Make docs/tutorial.ipynb of docs/tutorial.md, executed: the text, the code, and what it printed and drew.

    python site/notebook.py

The tests hold it to the page: same text, same code, every cell executed without an error.
"""

import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "docs" / "tutorial.ipynb"
LONGEST_S = 600

PYTHON = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def cells_of(page: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell: `markdown` or `code`. The last one shows the result."""
    parts = PYTHON.split(page)
    cells = [("code" if place % 2 else "markdown", part.strip()) for place, part in enumerate(parts)]
    last_code = max(place for place, (kind, _) in enumerate(cells) if kind == "code")
    cells.insert(last_code + 1, ("code", "result"))
    return [(kind, source) for kind, source in cells if source]


def executed(page: str, directory: Path) -> nbformat.NotebookNode:
    """The notebook of a page, run in `directory`."""
    make = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    cells = [make[kind](source, id=f"cell-{number}") for number, (kind, source) in enumerate(cells_of(page))]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(directory)}}
    NotebookClient(notebook, timeout=LONGEST_S, record_timing=False, resources=resources).execute()
    return notebook


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        notebook = executed(PAGE.read_text(), Path(directory))
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
