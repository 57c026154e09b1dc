"""People's labels: nothing is lost, nothing is changed, nobody sees what they should not."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from index_by_hand import write_index

from memlens.annotations.labels import Annotations, LabelledPattern, Sample
from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.index.reader import Index
from memlens.memory import MemoryId

TEXTS = [f"the press of day {n} was free" for n in range(8)]
PRESS = LabelledPattern('ends with "press"', "shallow", (0, 1, 2))
NEWS = LabelledPattern("news", "semantic", (2, 3, 4, 5))


@pytest.fixture
def index(tmp_path: Path) -> Index:
    places = [(s, 1) for s in range(8)]
    return write_index(tmp_path / "index", TEXTS, {(0, 0): places, (0, 1): places, (1, 0): places})


def test_the_last_label_counts_and_undo_brings_back_the_one_before(index: Index) -> None:
    with Annotations(index) as notes:
        notes.save("ann", "L0N0", [PRESS])
        notes.save("ann", "L0N0", [PRESS, NEWS])
        assert notes.labels("ann")[0].patterns == (PRESS, NEWS)
        before = notes.undo("ann", "L0N0")
        assert before is not None and before.patterns == (PRESS,) == notes.labels("ann")[0].patterns
        assert notes.undo("ann", "L0N0") is None and notes.labels("ann") == []
        with pytest.raises(SettingError, match="no label of L0N0"):
            notes.undo("ann", "L0N0")
        assert [event["kind"] for event in notes.history()] == ["label", "label", "undo", "undo"]


def test_the_history_cannot_be_changed_even_with_sql(index: Index) -> None:
    with Annotations(index) as notes:
        notes.save("ann", "L0N0", [PRESS])
    database = sqlite3.connect(index.folder / "annotations.sqlite")
    for statement in ("DELETE FROM events", "UPDATE events SET annotator = 'bob'"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            database.execute(statement)
    database.close()


def test_nobody_sees_others_before_finishing_and_nobody_changes_after(index: Index) -> None:
    with Annotations(index) as notes:
        notes.set_sample(Sample((MemoryId(0, 0),), 25, 0))
        notes.save("ann", "L0N0", [PRESS])
        notes.save("bob", "L0N0", [NEWS])
        assert {label.annotator for label in notes.labels("bob")} == {"bob"}
        assert notes.labels() == []
        notes.finish("ann")
        assert {label.annotator for label in notes.labels("bob")} == {"bob"}
        assert {label.annotator for label in notes.labels("ann")} == {"ann"}  # bob is not done
        notes.finish("bob")
        assert {label.annotator for label in notes.labels("ann")} == {"ann", "bob"}
        for change in (lambda: notes.save("ann", "L0N0", []), lambda: notes.undo("ann", "L0N0")):
            with pytest.raises(SettingError, match="has finished"):
                change()


def test_finishing_needs_every_memory_of_the_sample(index: Index) -> None:
    with Annotations(index) as notes:
        notes.set_sample(Sample((MemoryId(0, 0), MemoryId(1, 0)), 25, 0))
        notes.save("ann", "L0N0", [PRESS])
        with pytest.raises(SettingError, match="L1N0"):
            notes.finish("ann")
        notes.save("ann", "L1N0", [])
        notes.finish("ann")
        with pytest.raises(SettingError, match="holds labels"):
            notes.set_sample(Sample((MemoryId(0, 1),), 25, 1))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (LabelledPattern(" ", "shallow", (0, 1, 2)), "no description"),
        (LabelledPattern("x", "deep", (0, 1, 2)), "not a class"),
        (LabelledPattern("x", "shallow", (0, 1, 1)), "fewer than 3"),
        (LabelledPattern("x", "shallow", (0, 1, 8)), "ranks 0 to 7"),
    ],
)
def test_a_pattern_that_is_none_is_refused(index: Index, pattern: LabelledPattern, words: str) -> None:
    with Annotations(index) as notes:
        with pytest.raises(SettingError, match=words):
            notes.save("ann", "L0N0", [pattern])
        with pytest.raises(UnknownName):
            notes.save("ann", "L9N0", [PRESS])
        assert notes.history() == []


def test_a_damaged_file_is_refused_in_one_line(index: Index) -> None:
    (index.folder / "annotations.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 40)
    with pytest.raises(IndexFolderError, match="cannot open"):
        Annotations(index)


WRITER = """
import sys
from memlens.annotations.labels import Annotations, LabelledPattern
from memlens.index.reader import Index

folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Annotations(Index(folder)) as notes:
    for n in range(count):
        notes.save(name, "L0N0", [LabelledPattern(str(n), "shallow", (0, 1, 2))])
        print(n, flush=True)
"""


def start(index: Index, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(index.folder), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def saved(index: Index, name: str) -> list[str]:
    with Annotations(index) as notes:
        own = [event for event in notes.history() if event["annotator"] == name]
    return [event["content"]["patterns"][0]["description"] for event in own]


def test_two_processes_write_a_thousand_each_and_lose_none(index: Index) -> None:
    writers = {name: start(index, name, 1000) for name in ("ann", "bob")}
    for writer in writers.values():
        writer.communicate()
        assert writer.returncode == 0
    for name in writers:
        assert saved(index, name) == [str(n) for n in range(1000)]


def test_a_kill_in_the_middle_loses_nothing_that_was_confirmed(index: Index) -> None:
    writer = start(index, "ann", 100_000)
    assert writer.stdout is not None
    confirmed = [writer.stdout.readline().strip() for _ in range(57)]
    writer.send_signal(signal.SIGKILL)
    confirmed += writer.stdout.read().split()
    writer.wait()
    kept = saved(index, "ann")
    assert len(confirmed) <= len(kept) <= len(confirmed) + 1
    assert kept[: len(confirmed)] == confirmed == [str(n) for n in range(len(confirmed))]
