"""Run the notebook from top to bottom and store its output, so that it can be read without running it.

    python docs/make_notebook.py

Needs the test dependencies (`pip install -e '.[dev]'`). Warnings are left out because they depend on the machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "first_hour.ipynb"


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # contains times
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
