"""One small checkpoint and the index that one process makes of it, for all tests of scaling."""

from pathlib import Path

import pytest
from scale_helpers import OPTIONS, TEXTS

import memlens
from memlens.testing import save_tiny


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("small"), "llama")


@pytest.fixture(scope="session")
def alone(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by one process; only read it."""
    return memlens.scan(small_checkpoint, TEXTS, out=tmp_path_factory.mktemp("alone"), workers=1, **OPTIONS).folder
