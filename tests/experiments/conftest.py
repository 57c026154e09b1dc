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
    folder = shutil.copytree(scanned[0], tmp_path_factory.mktemp("valued") / "index")
    compute_values(memlens.open_index(folder), scanned[1])
    return folder, scanned[1]


@pytest.fixture
def fresh(valued: tuple[Path, MemoryModel], tmp_path: Path) -> tuple[memlens.Index, MemoryModel]:
    """A copy of the index for one test, and its model."""
    return memlens.open_index(shutil.copytree(valued[0], tmp_path / "index")), valued[1]
