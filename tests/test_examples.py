"""The examples in the docstrings of the public functions run."""

import doctest
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import memlens
from memlens import api, settings, text
from memlens.index import reader
from memlens.index.reader import Index


@pytest.mark.parametrize("module", [api, settings, text, reader], ids=lambda module: module.__name__)
def test_the_examples_of_a_module_run(
    module: ModuleType, tiny_gpt2_index: Index, tiny_gpt2: Path, tiny_text: Path, tmp_path: Path
) -> None:
    names = {
        "memlens": memlens,
        "model": tiny_gpt2,
        "text": tiny_text,
        "folder": tmp_path / "new",
        "index": memlens.open_index(shutil.copytree(tiny_gpt2_index.folder, tmp_path / "index")),
    }
    results = doctest.testmod(module, extraglobs=names)
    assert results.attempted and not results.failed
