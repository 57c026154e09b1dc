"""The Python of the documentation runs, in the order of the page, with a tiny model in the place of gpt2."""

import ast
import shutil
from pathlib import Path
from typing import Any

import pytest
from docs_pages import ROOT, blocks

from memlens.testing import save_tiny


@pytest.fixture
def newcomer(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model called gpt2 whose memory L5N94 the texts beside it fire."""
    save_tiny(tmp_path / "gpt2", "gpt2", n_layer=6, n_inner=900, seed=1)
    shutil.copytree(tiny_text.parent, tmp_path / "my-texts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_the_python_of_a_page_runs(page: str, newcomer: Path) -> None:
    code = [block.code for block in blocks((ROOT / page).read_text(encoding="utf-8")) if block.language == "python"]
    assert code
    names: dict[str, Any] = {}
    for part in code:
        exec(compile(part, page, "exec"), names)
        last = ast.parse(part).body[-1]
        if isinstance(last, ast.Expr):  # what a notebook would show
            assert eval(ast.unparse(last), names) is not None
    assert (newcomer / "gpt2-index" / "manifest.json").is_file()
