"""Pages that are made, or that list what is there, are up to date."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from docs_pages import ROOT, blocks

import memlens


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tree() -> list[str]:
    """The lines of the README's tree."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [block for block in blocks(readme) if block.code.startswith("src/memlens/")]
    return block.code.splitlines()


def test_the_api_page_is_what_the_docstrings_say() -> None:
    made = load_script(ROOT / "docs" / "make_api.py").page()
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == made, "docs/api.md is not up to date; run python docs/make_api.py"


def test_the_api_page_has_every_public_name() -> None:
    named = set(re.findall(r"^### `memlens\.(\w+)`$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert named == set(memlens.__all__)


def test_every_public_function_says_what_it_does() -> None:
    undocumented = [name for name in memlens.__all__ if not (getattr(memlens, name).__doc__ or "").strip()]
    assert not undocumented


def test_the_readmes_tree_lists_every_folder_of_the_package_with_a_line() -> None:
    package = ROOT / "src" / "memlens"
    folders = {f"{path.name}/" for path in package.iterdir() if path.is_dir() and not path.name.startswith("__")}
    said = {line.split()[0]: line.split()[1:] for line in tree()[1:] if line.startswith("  ")}
    assert folders <= said.keys(), folders - said.keys()
    assert all(said.values()), "a folder without a line"


def test_everything_in_the_readmes_tree_is_there() -> None:
    for line in tree()[1:]:
        name = line.split()[0]
        assert (ROOT / "src" / "memlens" / name if line.startswith("  ") else ROOT / name).exists(), name
