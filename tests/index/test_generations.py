"""An index that is replaced or removed while a process uses it gives the right answer or a one-line error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memlens
from memlens.cli import main
from memlens.corpus import store
from memlens.corpus.encoding import encode_corpus
from memlens.errors import CorpusError, IndexFolderError
from memlens.index.reader import Index


@pytest.fixture
def other(tiny_gpt2: Path, tmp_path: Path) -> Path:
    """Return a complete index of another text."""
    (tmp_path / "other.txt").write_text("Snow fell on the roads. The roads were closed, and the trains were late.\n")
    return memlens.scan(tiny_gpt2, tmp_path / "other.txt", out=tmp_path / "other", top=7, threads=1).folder


def put_in_place_of(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


STAGES: dict[str, Callable[[Index], Any]] = {
    "values": lambda index: memlens.values(index, threads=1),
    "patterns": memlens.patterns,
    "experiment": lambda index: memlens.experiment(index, ["refinement"], threads=1),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_never_writes_into_an_index_that_was_replaced(
    tiny_gpt2_index: Index, other: Path, copy_of: Callable[..., Index], stage: str
) -> None:
    index = copy_of(tiny_gpt2_index)
    put_in_place_of(index.folder, other)
    before = {path.name for path in index.folder.iterdir()}
    with pytest.raises(IndexFolderError, match="run the command again"):
        STAGES[stage](index)
    left = {path.name for path in index.folder.iterdir() if path.is_file() and path.stat().st_size}
    assert left <= before and memlens.check(index.folder).is_whole


@pytest.mark.parametrize(
    "look",
    [
        lambda index: index.triggers("L0N1"),
        lambda index: index["L0N1"],
        lambda index: index.table("memories"),
        lambda index: index.sql("SELECT count(*) FROM {corpus}"),
    ],
)
@pytest.mark.parametrize("has_read", [False, True])
def test_an_open_index_does_not_mix_two_scans(
    tiny_gpt2_index: Index, other: Path, copy_of: Callable[..., Index], look: Callable[[Index], Any], has_read: bool
) -> None:
    index = copy_of(tiny_gpt2_index)
    if has_read:
        index.triggers("L1N2")
        look(index)
    put_in_place_of(index.folder, other)
    with pytest.raises(IndexFolderError, match="was replaced or removed since it was opened"):
        look(index)


def test_an_open_index_that_was_replaced_says_so_every_time(
    tiny_gpt2_index: Index, other: Path, copy_of: Callable[..., Index]
) -> None:
    index = copy_of(tiny_gpt2_index)
    put_in_place_of(index.folder, other)
    for _ in range(3):
        with pytest.raises(IndexFolderError, match="was replaced or removed"):
            index.has("values")


@pytest.mark.parametrize("look", [lambda index: index.table("memories"), lambda index: index.sql("FROM {memories}")])
def test_a_file_replaced_between_its_check_and_its_opening_is_not_read(
    tiny_gpt2_index: Index,
    other: Path,
    copy_of: Callable[..., Index],
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[[Index], Any],
) -> None:
    index = copy_of(tiny_gpt2_index)
    checked_path = index.path

    def path(table: str) -> Path:
        checked = checked_path(table)
        (other / f"{table}.parquet").rename(checked)
        return checked

    monkeypatch.setattr(index, "path", path)
    with pytest.raises(IndexFolderError, match="was replaced while it was opened; run the command again"):
        look(index)


def test_an_index_that_is_gone_is_one_line(tiny_gpt2_index: Index, copy_of: Callable[..., Index]) -> None:
    index = copy_of(tiny_gpt2_index)
    shutil.rmtree(index.folder)
    with pytest.raises(IndexFolderError, match="was replaced or removed"):
        index.triggers("L0N1")


def test_a_table_made_again_by_another_process_is_read(tiny_gpt2_values: Index, copy_of: Callable[..., Index]) -> None:
    index = copy_of(tiny_gpt2_values)
    nine = index.table("values").column("tokens")[0]
    memlens.values(index.folder, top=3, threads=1)
    assert index.table("values").column("tokens")[0].as_py() == nine.as_py()[:3]


@pytest.mark.parametrize(
    "verb", [["show", "INDEX", "L0N1"], ["report", "INDEX"], ["search", "INDEX", "the", "--in", "values"]]
)
def test_a_listed_table_that_is_missing_is_damage(
    tiny_gpt2_values: Index, copy_of: Callable[..., Index], capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    index = copy_of(tiny_gpt2_values)
    (index.folder / "values.parquet").unlink()
    assert main([str(index.folder) if part == "INDEX" else part for part in verb]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"memlens: {index.folder / 'values.parquet'} is missing; make it again with `memlens repair")


@pytest.mark.parametrize("change", ["append", "truncate", "replace", "remove"])
def test_a_corpus_that_changes_while_it_is_read_is_refused(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    text = tmp_path / "text.txt"
    sentence = "The river runs to the sea, and the rain falls on the hills of number {}.\n"
    text.write_text("".join(sentence.format(number) for number in range(4000)))
    done = []

    def encode(*arguments: Any, **options: Any) -> Iterator[Any]:
        for chunk in encode_corpus(*arguments, **options):
            if not done:
                disturb()
            done.append(chunk)
            yield chunk

    def disturb() -> None:
        if change == "append":
            with text.open("a") as handle:
                handle.write("One more sentence.\n")
        elif change == "truncate":
            with text.open("r+") as handle:
                handle.truncate(1000)
        elif change == "replace":
            (tmp_path / "new.txt").write_text("Another text.\n")
            (tmp_path / "new.txt").replace(text)
        else:
            text.unlink()

    monkeypatch.setattr(store, "encode_corpus", encode)
    with pytest.raises(CorpusError, match=r"changed while it was being read|does not exist"):
        memlens.scan(tiny_gpt2, text, out=tmp_path / "index", top=3, threads=1, max_tokens=3000)
    assert done and not (tmp_path / "index" / "manifest.json").exists()


FORKED = """
import gc, os, sys
from memlens.index.reader import Index
held = [Index(sys.argv[1])]
count = held[0].sql("SELECT count(*) AS n FROM {triggers}")
child = os.fork()
if child == 0:
    assert held[0].sql("SELECT count(*) AS n FROM {triggers}") == count
    held.clear()
    gc.collect()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_reads_an_open_index_and_drops_it(tiny_gpt2_index: Index) -> None:
    """Data loaders fork. The child has none of the database's threads, and hangs or crashes if it waits for them."""
    subprocess.run([sys.executable, "-c", FORKED, tiny_gpt2_index.folder], check=True, timeout=300)
