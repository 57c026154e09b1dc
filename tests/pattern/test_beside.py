"""Patterns found in a worker process: the same bytes, and no harm if the worker dies."""

import shutil
from pathlib import Path

import pytest

from index_by_hand import write_index
from memlens.errors import IndexFolderError
from memlens.index.reader import Index
from memlens.pattern.table import compute_patterns, find_patterns_beside
from memlens.progress import no_progress
from memlens.settings import PatternSettings

TEXTS = [f"On day {n} the free press was read by {n} people of the old harbour town." for n in range(60)]
SETTINGS = PatternSettings(background=1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_index(tmp_path / "index", TEXTS, {(0, 0): [(s, 5) for s in range(20)], (0, 1): []}).folder


def test_the_tables_have_the_bytes_of_this_process(folder: Path, tmp_path: Path) -> None:
    other = Index(shutil.copytree(folder, tmp_path / "other"))
    with find_patterns_beside(folder, SETTINGS) as wait_for_tables:
        tables, seconds = wait_for_tables(no_progress)
    assert seconds > 0
    tables.write(Index(folder))
    compute_patterns(other, SETTINGS)
    for name in ("patterns.parquet", "names.parquet"):
        assert (folder / name).read_bytes() == (other.folder / name).read_bytes()
    assert Index(folder).manifest.content["patterns"] == other.manifest.content["patterns"]


def test_an_error_is_raised_here(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(IndexFolderError), find_patterns_beside(folder, SETTINGS) as wait_for_tables:
        wait_for_tables(no_progress)
