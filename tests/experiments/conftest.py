"""Experiments read an index with values."""

import shutil
from pathlib import Path

import pytest

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.vocab.table import compute_values


@pytest.fixture(scope="session")
def valued(scanned: tuple[Path, MemoryModel], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MemoryModel]:
    """An index folder with values, to be copied and not changed, and its model."""
    folder = tmp_path_factory.mktemp("valued") / "index"
    shutil.copytree(scanned[0], folder)
    compute_values(memlens.open_index(folder), scanned[1])
    return folder, scanned[1]


@pytest.fixture
def fresh(valued: tuple[Path, MemoryModel], tmp_path: Path) -> tuple[memlens.Index, MemoryModel]:
    """A copy of the index for one test, and its model."""
    folder, model = valued
    shutil.copytree(folder, tmp_path / "index")
    return memlens.open_index(tmp_path / "index"), model
