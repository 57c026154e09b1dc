"""An index without a model, and a copy of it to exchange files with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from people import make_index

from memlens.index.reader import Index


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return make_index(tmp_path / "index")


@pytest.fixture
def copy(index: Index, tmp_path: Path) -> Index:
    return Index(shutil.copytree(index.folder, tmp_path / "copy"))
