"""Values are made anew in every test, so each has an index of its own."""

import shutil
from pathlib import Path

import pytest

import memlens
from memlens.models.memory_model import MemoryModel


@pytest.fixture
def fresh(scanned: tuple[Path, MemoryModel], tmp_path: Path) -> tuple[memlens.Index, MemoryModel]:
    """A copy of the scanned index for one test, and its model."""
    return memlens.open_index(shutil.copytree(scanned[0], tmp_path / "index")), scanned[1]
