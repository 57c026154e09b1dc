"""A small checkpoint, its index from a scan in one process, and helpers that repeat the scan in other ways."""

from pathlib import Path

import pytest
from scale_helpers import OPTIONS, TEXTS, Scans

import memlens
from memlens.testing import save_tiny


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("small"), "llama")


@pytest.fixture(scope="session")
def alone(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an index from a scan in one process. Tests must not change it."""
    return memlens.scan(small_checkpoint, TEXTS, out=tmp_path_factory.mktemp("alone"), workers=1, **OPTIONS).folder


@pytest.fixture(scope="session")
def scans(small_checkpoint: Path, alone: Path) -> Scans:
    return Scans(memlens.load(small_checkpoint, prove=False), alone)
