"""People's labels and verdicts: nothing is lost, nothing is changed, nobody sees what they should not."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from people import COMMA, DAY, NEWS, PRESS, answers, first_answer, label, second_answer

from memlens.annotations.answers import LabelledPattern, Sample, Verdict
from memlens.annotations.files import import_text
from memlens.annotations.store import Annotations, history_mark
from memlens.errors import IndexFolderError, MemlensError, SettingError, UnknownName
from memlens.index.history import LABELS, VERDICTS
from memlens.index.reader import Index
from memlens.memory import MemoryId

BEFORE = Path(__file__).parent / "before"  # made by memlens when labels and verdicts had a table each
both_tasks = pytest.mark.parametrize("task", [LABELS, VERDICTS])


@both_tasks
def test_the_last_answer_counts_and_undo_brings_back_the_one_before(index: Index, task: str) -> None:
    first, second = first_answer(task, "ann"), second_answer(task, "ann")
    with Annotations(index) as notes:
        notes.save(first)
        notes.save(second)
        assert answers(notes, task, "ann") == [second]
        assert notes.undo(task, "ann", first.subject) == first and answers(notes, task, "ann") == [first]
        assert notes.undo(task, "ann", first.subject) is None and answers(notes, task, "ann") == []
        with pytest.raises(SettingError, match=f"no {task[:-1]} o[fn] .*{first.subject}"):
            notes.undo(task, "ann", first.subject)
        assert [event["kind"] for event in notes.history(task)] == [first.kind, first.kind, "undo", "undo"]
        with pytest.raises(UnknownName):
            notes.save(first_answer(task, " "))
        assert len(notes.history(task)) == 4


@both_tasks
def test_the_history_cannot_be_changed_even_with_sql(index: Index, task: str) -> None:
    with Annotations(index) as notes:
        notes.save(first_answer(task, "ann"))
    database = sqlite3.connect(index.folder / "annotations.sqlite")
    for statement in ("DELETE FROM history", "UPDATE history SET annotator = 'bob'"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            database.execute(statement)
    database.close()


def test_nobody_sees_others_before_finishing_and_nobody_changes_after(index: Index) -> None:
    with Annotations(index) as notes:
        notes.set_sample(Sample((MemoryId(0, 0),), 25, 0))
        notes.save(label("ann", "L0N0", PRESS), label("bob", "L0N0", NEWS))
        assert {one.annotator for one in notes.labels("bob")} == {"bob"}
        assert notes.labels() == []
        notes.finish("ann")
        assert {one.annotator for one in notes.labels("bob")} == {"bob"}
        assert {one.annotator for one in notes.labels("ann")} == {"ann"}  # bob is not done
        notes.finish("bob")
        assert {one.annotator for one in notes.labels("ann")} == {"ann", "bob"}
        for change in (lambda: notes.save(label("ann", "L0N0")), lambda: notes.undo(LABELS, "ann", "L0N0")):
            with pytest.raises(SettingError, match="has finished"):
                change()
        notes.save(Verdict("ann", DAY, "related"))  # another task


def test_finishing_needs_every_memory_of_the_sample(index: Index) -> None:
    with Annotations(index) as notes:
        notes.set_sample(Sample((MemoryId(0, 0), MemoryId(1, 0)), 25, 0))
        notes.save(label("ann", "L0N0", PRESS))
        with pytest.raises(SettingError, match="L1N0"):
            notes.finish("ann")
        notes.save(label("ann", "L1N0"))
        notes.finish("ann")
        with pytest.raises(SettingError, match="holds labels"):
            notes.set_sample(Sample((MemoryId(0, 1),), 25, 1))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (label("ann", "L0N0", LabelledPattern(" ", "shallow", (0, 1, 2))), "no description"),
        (label("ann", "L0N0", LabelledPattern("x", "deep", (0, 1, 2))), "not a class"),
        (label("ann", "L0N0", LabelledPattern("x", "shallow", (0, 1, 1))), "fewer than 3"),
        (label("ann", "L0N0", LabelledPattern("x", "shallow", (0, 1, 8))), "ranks 0 to 7"),
        (label("ann", "L9N0", PRESS), "layer 9"),
        (Verdict("ann", DAY, "near"), "not a verdict"),
    ],
)
def test_an_answer_that_is_none_is_refused(index: Index, answer: Verdict, words: str) -> None:
    with Annotations(index) as notes:
        with pytest.raises(MemlensError, match=words):
            notes.save(first_answer(answer.task, "ann"), answer)
        assert notes.history(answer.task) == []


def test_a_damaged_file_is_refused_in_one_line(index: Index) -> None:
    (index.folder / "annotations.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 40)
    with pytest.raises(IndexFolderError, match=r"is damaged .* recover`$"):
        Annotations(index)


def test_a_file_of_an_older_memlens_is_taken_over_whole(index: Index) -> None:
    shutil.copy(BEFORE / "annotations.sqlite", index.folder)
    # as the older memlens computed them: what experiments noted then is up to date still
    marks = {
        LABELS: "c47291e9cf296126e5bbb2f93b6ab07ac9048e0831fa2466b978aabbbaff37dd",
        VERDICTS: "89c824f725ebd8452127f5f539416cae62bab543f5ac02b6cf9ea2c37dc2afd9",
    }
    assert {task: history_mark(index, task) for task in marks} == marks
    news = LabelledPattern("news", "semantic", (2, 3, 4, 5))
    press = LabelledPattern('ends with "press"', "shallow", (0, 1, 2))
    with Annotations(index) as notes:
        assert notes.sample() == Sample((MemoryId(0, 0), MemoryId(1, 0)), 8, 3)
        assert notes.labels() == [label("ann", "L0N0", press), label("ann", "L1N0")]
        assert notes.labels_of("bob") == [label("bob", "L0N0", news)]
        assert notes.annotators() == ["ann", "bob"] and notes.annotators(finished=False) == ["bob"]
        assert notes.verdicts() == [Verdict("ann", DAY, "related"), Verdict("ann", COMMA, "distant")]
        assert [len(notes.history(task)) for task in marks] == [7, 5]
    assert {task: history_mark(index, task) for task in marks} == marks
    database = sqlite3.connect(index.folder / "annotations.sqlite")
    database.execute(  # as the older memlens would, which knows its own tables only
        "INSERT INTO events (key, time, kind, annotator, layer, memory, content) "
        "VALUES ('late', '2026', 'label', 'eve', 1, 0, '{\"patterns\": []}')"
    )
    database.commit()
    database.close()
    assert history_mark(index, LABELS) != marks[LABELS] and history_mark(index, VERDICTS) == marks[VERDICTS]
    with Annotations(index) as notes:
        assert notes.labels_of("eve") == [label("eve", "L1N0")]
        assert [len(notes.history(task)) for task in marks] == [8, 5]
        notes.save(label("bob", "L1N0"))
        notes.finish("bob")


@pytest.mark.parametrize("format", ["json", "csv"])
def test_exports_of_an_older_memlens_are_imported(index: Index, copy: Index, format: str) -> None:
    shutil.copy(BEFORE / "annotations.sqlite", index.folder)
    corpus = index.manifest.sha256("corpus")
    with Annotations(index) as before, Annotations(copy) as notes:
        for task in (LABELS, VERDICTS):
            text = (BEFORE / f"{task}.{format}").read_bytes().decode()
            text = text.replace("534b37109315a1bda1f8563ed4880288cd39993107f1a3be2542d1e702e62590", corpus)
            counts = {("labels", "json"): 6, ("verdicts", "json"): 5}
            assert import_text(notes, task, text, format) == counts.get((task, format), 2)
        assert notes.labels_of("ann") == before.labels_of("ann") and notes.verdicts() == before.verdicts()
        assert notes.labels() == (before.labels() if format == "json" else [])  # CSV does not say who has finished


WRITER = """
import sys
from memlens.annotations.answers import Label, LabelledPattern
from memlens.annotations.store import Annotations
from memlens.index.reader import Index
from memlens.memory import MemoryId

folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Annotations(Index(folder)) as notes:
    for n in range(count):
        notes.save(Label(name, MemoryId(0, 0), (LabelledPattern(str(n), "shallow", (0, 1, 2)),)))
        print(n, flush=True)
"""


def start(index: Index, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(index.folder), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def saved(index: Index, name: str) -> list[str]:
    with Annotations(index) as notes:
        own = [event for event in notes.history(LABELS) if event["annotator"] == name]
    return [event["content"]["patterns"][0]["description"] for event in own]


def test_two_processes_write_hundreds_each_and_lose_none(index: Index) -> None:
    writers = {name: start(index, name, 200) for name in ("ann", "bob")}
    for writer in writers.values():
        writer.communicate()
        assert writer.returncode == 0
    for name in writers:
        assert saved(index, name) == [str(n) for n in range(200)]


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
