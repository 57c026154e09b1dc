"""The notebook runs from top to bottom, on a tiny model in the place of the bundled one."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from docs_pages import ROOT
from nbclient import NotebookClient

pytestmark = pytest.mark.sweep

NOTEBOOK = ROOT / "notebooks" / "first_hour.ipynb"


@pytest.fixture(scope="module")
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_kept_with_what_it_shows_and_asks_for_what_comes_with_memlens(notebook: Any) -> None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell is not parameters(notebook)]
    assert cells and all(cell.outputs for cell in cells), "python docs/make_notebook.py"
    shown = json.dumps([cell.outputs for cell in cells])
    assert not re.search(r"site-packages|/tmp/|cdn\.|Traceback", shown), "shows the machine that it ran on"
    assert "image/svg+xml" in shown and len(shown) < 500_000
    assert all(f'{name} = "bundled"' in parameters(notebook).source for name in ("MODEL", "CORPUS"))


def test_the_notebook_runs(notebook: Any, tiny_gpt2: Path, tiny_text: Path, tmp_path: Path) -> None:
    changed = deepcopy(notebook)
    parameters(changed).source = f"MODEL, CORPUS, INDEX = {str(tiny_gpt2)!r}, {str(tiny_text)!r}, 'index'"
    NotebookClient(changed, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs for cell in changed.cells if cell.cell_type == "code"][1:]
    assert all(outputs for outputs in shown), "a cell that shows nothing"
    assert (tmp_path / "index" / "report.html").is_file()


def parameters(notebook: Any) -> Any:
    """The one cell that a reader changes."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    return cell
