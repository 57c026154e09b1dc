"""An index with values of each of four kinds of model: plain, gated, parallel and with a post-norm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.values import compute_values

FAMILIES = ("gpt2", "llama", "gpt_neox", "gemma2")
TEXT = """The river runs to the sea. The river runs to the hills. The press was free in the city of Paris.
Rain fell on the hills, and the rivers rose. Rain fell on the city. A
In 1990 a café opened near the river; it was the first of its kind, and the people of the city read the news.
The end of the war came in the spring, as the papers of the day had said it would. The river
"""


@pytest.fixture(scope="session", params=FAMILIES)
def valued(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MemoryModel]:
    """An index folder with values, to be copied and not changed, and its model."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer(adds_bos=family == "llama"))
    index = memlens.scan(model, folder / "text.txt", out=folder / "index", top=7)
    compute_values(index, model)
    return folder / "index", model


@pytest.fixture
def fresh(valued: tuple[Path, MemoryModel], tmp_path: Path) -> tuple[memlens.Index, MemoryModel]:
    """A copy of the index for one test, and its model."""
    folder, model = valued
    shutil.copytree(folder, tmp_path / "index")
    return memlens.open_index(tmp_path / "index"), model
