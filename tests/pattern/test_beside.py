"""Patterns found in a process of their own: the bytes of this one, and no harm where the process is ended."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from index_by_hand import write_index
from memlens.errors import IndexFolderError
from memlens.index.reader import Index
from memlens.parallel import no_progress
from memlens.pattern.beside import finding_patterns
from memlens.pattern.table import compute_patterns
from memlens.settings import PatternSettings

TEXTS = [f"On day {n} the free press was read by {n} people of the old harbour town." for n in range(60)]
SETTINGS = PatternSettings(background=1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_index(tmp_path / "index", TEXTS, {(0, 0): [(s, 5) for s in range(20)], (0, 1): []}).folder


def test_the_tables_have_the_bytes_of_this_process_and_the_process_is_over(folder: Path, tmp_path: Path) -> None:
    other = Index(shutil.copytree(folder, tmp_path / "other"))
    with finding_patterns(folder, SETTINGS) as process:
        tables = process.wait(no_progress)
    assert tables is not None and process.seconds > 0 and process.worker.process.returncode is not None
    tables.write(Index(folder))
    compute_patterns(other, SETTINGS)
    for name in ("patterns.parquet", "names.parquet"):
        assert (folder / name).read_bytes() == (other.folder / name).read_bytes()
    assert Index(folder).manifest.content["patterns"] == other.manifest.content["patterns"]


def test_a_process_that_was_ended_gives_nothing_and_an_error_of_it_is_raised_here(folder: Path) -> None:
    with finding_patterns(folder, SETTINGS) as process:
        os.kill(process.worker.process.pid, signal.SIGKILL)
        assert process.wait(no_progress) is None
    (folder / "manifest.json").unlink()
    with pytest.raises(IndexFolderError), finding_patterns(folder, SETTINGS) as process:
        process.wait(no_progress)
