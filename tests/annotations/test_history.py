"""annotations.sqlite: what changed is noticed, a full or read-only disk is no damage, recover saves what is whole."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from people import COMMA, DAY, NEWS, PRESS, label

import memlens
from index_by_hand import write_index
from memlens.annotations.answers import LabelledPattern, Sample, Verdict
from memlens.annotations.files import backup_text, import_text, restore_text
from memlens.annotations.recover import recover
from memlens.annotations.store import Annotations, history_mark
from memlens.cli import main
from memlens.errors import IndexFolderError, MemlensError, SettingError
from memlens.index import history
from memlens.index.format import SCAN_TABLES
from memlens.index.history import LABELS, VERDICTS, Event, History
from memlens.index.reader import Index
from memlens.index.staging import replace_tables
from memlens.memory import MemoryId

BEFORE = Path(__file__).parent / "before"
LONG = LabelledPattern("a description over several pages of the file " * 300, "semantic", (0, 1, 2))
FORBIDDEN_ADVICE = ("damaged", "move", "--fresh", "recover")


@pytest.fixture
def labelled(index: Index) -> Index:
    with Annotations(index) as notes:
        notes.set_sample(Sample((MemoryId(0, 0), MemoryId(1, 0)), 25, 0))
        notes.save(label("ann", "L0N0", PRESS), label("ann", "L1N0", LONG), label("bob", "L0N0", NEWS))
        notes.save(Verdict("ann", DAY, "related"), Verdict("zoe", COMMA, "distant"))
        notes.undo(VERDICTS, "zoe", COMMA.name)
        notes.finish("ann")
    return index


def everything(index: Index) -> list[dict[str, Any]]:
    with Annotations(index) as notes:
        return notes.history()


def file_of(index: Index) -> Path:
    return index.folder / "annotations.sqlite"


def change(index: Index, *statements: str) -> None:
    """Write past memlens, and past what guards the table."""
    database = sqlite3.connect(file_of(index))
    for trigger in ("update", "delete"):
        database.execute(f"DROP TRIGGER never_{trigger}_history")
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


CHANGES = {
    "UPDATE history SET annotator = 'eve' WHERE place = 3": "event 3",
    "UPDATE history SET content = replace(content, 'press', 'dress') WHERE place = 2": "event 2",
    "UPDATE history SET time = '1999' WHERE place = 8": "event 8",
    "UPDATE history SET hash = 7 WHERE place = 8": "event 8",
    "UPDATE history SET key = x'ff' WHERE place = 1": "event 1",
    "DELETE FROM history WHERE place = 4": "event 4",
    "DELETE FROM history WHERE place = 8": "ends with event 7",
    "DELETE FROM history": "ends with event 0",
    "DELETE FROM head": "last event",
    "DROP TABLE head": "last event",
    "DROP TABLE history": "last event",
}


@pytest.mark.parametrize(("statement", "words"), CHANGES.items())
def test_any_change_of_the_history_is_refused_with_its_event_and_the_way_out(
    labelled: Index, statement: str, words: str
) -> None:
    change(labelled, statement)
    reads: Sequence[Callable[[], Any]] = (lambda: everything(labelled), lambda: history_mark(labelled, LABELS))
    for read in reads:
        with pytest.raises(IndexFolderError, match=rf"{words}.*annotate {labelled.folder} recover`$") as refused:
            read()
        assert "\n" not in str(refused.value)
    found = memlens.check(labelled.folder)
    assert [finding.file for finding in found.damaged] == ["annotations.sqlite"]


def test_an_event_that_was_changed_behind_an_open_history_is_never_given(labelled: Index) -> None:
    with Annotations(labelled) as notes:
        before = notes.history()
        change(labelled, "UPDATE history SET annotator = 'eve' WHERE place = 3")
        assert notes.history() == before


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of the events that are hashed from here on, to be written or verified."""
    places: list[int] = []
    hash_at = Event.hash_at

    def counting(event: Event, place: int, previous: str) -> str:
        places.append(place)
        return hash_at(event, place, previous)

    monkeypatch.setattr(Event, "hash_at", counting)
    return places


def test_a_process_verifies_again_only_what_it_has_not_verified_of_this_very_file(
    labelled: Index, hashed: list[int]
) -> None:
    for number in range(9, 30):
        del hashed[:]
        with Annotations(labelled) as notes:  # as every request of the workbench does
            notes.save(label("bob", "L1N0"))
        assert hashed == [number, number]  # written and read back
    del hashed[:]
    assert len(everything(labelled)) == 29 and hashed == []
    assert memlens.check(labelled.folder).is_whole and hashed == [*range(1, 30)]  # a check takes nothing for granted
    del hashed[:]
    file_of(labelled).touch()
    assert len(everything(labelled)) == 29 and hashed == [*range(1, 30)]


def test_a_change_right_after_a_label_was_saved_is_noticed_however_short_the_time(labelled: Index) -> None:
    for place in range(1, 9):
        with Annotations(labelled) as notes:
            notes.save(label("bob", "L1N0"))
        whole = file_of(labelled).read_bytes()
        change(labelled, f"UPDATE history SET time = replace(time, '2', '3') WHERE place = {place}")
        with pytest.raises(IndexFolderError, match=f"event {place} is not as it was written"):
            everything(labelled)
        with pytest.raises(IndexFolderError, match=f"event {place} is not"), Annotations(labelled) as notes:
            notes.save(label("bob", "L1N0"))
        file_of(labelled).write_bytes(whole)  # the same file with the same length
    assert len(everything(labelled)) == 16


def test_what_another_process_adds_is_verified_and_kept_in_order(labelled: Index, hashed: list[int]) -> None:
    everything(labelled)
    asked = ["annotate", str(labelled.folder), "label", "--annotator", "zoe", "--memory", "L0N0"]
    subprocess.run([sys.executable, "-m", "memlens", *asked], check=True, capture_output=True)
    del hashed[:]
    assert [event["annotator"] for event in everything(labelled)][-1] == "zoe" and hashed == [*range(1, 10)]
    with Annotations(labelled) as notes:
        notes.save(label("bob", "L1N0"))
    assert [event["annotator"] for event in everything(labelled)][-2:] == ["zoe", "bob"]


def test_files_of_an_older_memlens_are_read_without_a_change_and_hashed_with_the_first_write(index: Index) -> None:
    shutil.copy(BEFORE / "annotations.sqlite", index.folder)
    content, before = file_of(index).read_bytes(), everything(index)
    assert len(before) == 12 and file_of(index).read_bytes() == content
    with Annotations(index) as notes:
        notes.save(label("eve", "L0N0"))
    assert everything(index)[:-1] == before
    change(index, "UPDATE history SET annotator = 'eve' WHERE place = 3")
    with pytest.raises(IndexFolderError, match="event 3"):
        everything(index)


def test_labels_without_hashes_are_told_and_recover_protects_them(
    index: Index, run: Callable[..., tuple[int, str, str]]
) -> None:
    shutil.copy(BEFORE / "annotations.sqlite", index.folder)
    before = everything(index)
    code, out, _ = run("check", index.folder, "--json")
    (finding,) = [one for one in json.loads(out)["files"] if one["file"] == "annotations.sqlite"]
    assert code == 0 and finding["state"] == "whole"
    assert finding["detail"].startswith("12 events, 12 of them without checksums; run `memlens annotate ")
    assert run("annotate", index.folder, "recover")[1] == (
        "annotations.sqlite is whole: 12 events; 12 of them have checksums now\n"
    )
    assert everything(index) == before
    assert json.loads(run("check", index.folder, "--json")[1])["files"][-1]["detail"] == "12 events"
    change(index, "UPDATE history SET annotator = 'eve' WHERE place = 3")
    with pytest.raises(IndexFolderError, match="event 3"):
        everything(index)


@pytest.mark.parametrize(
    "options",
    [
        ("undo", "--annotator", "ann", "--memory", "L0N0"),
        ("finish", "--annotator", "ann"),
        ("sample", "--per-layer", "0"),
        ("label", "--annotator", "ann", "--memory", "L9N0"),
        ("import", "--file", "nowhere.json"),
    ],
)
def test_what_is_refused_before_anybody_has_labelled_leaves_no_file(
    index: Index, refused: Callable[..., str], options: tuple[str, ...]
) -> None:
    assert refused("annotate", index.folder, *options)
    assert not list(index.folder.glob("annotations.sqlite*"))


def test_labels_of_a_scan_never_get_into_another_one(index: Index, tmp_path: Path) -> None:
    other = write_index(tmp_path / "other", ["the press was free"], {(0, 0): [(0, 1)]})
    with Annotations(index) as notes, Annotations(index) as early:
        early.save(label("bob", "L0N0"))
        file_of(index).unlink()
        shutil.copy(other.folder / "manifest.json", index.folder)
        with pytest.raises(IndexFolderError, match="was replaced or removed since it was opened"):
            notes.save(label("ann", "L1N0"))
    assert not file_of(index).exists()


def test_a_file_that_took_the_place_of_an_open_one_gets_the_label(labelled: Index) -> None:
    with Annotations(labelled) as notes:
        content = file_of(labelled).read_bytes()
        file_of(labelled).unlink()
        file_of(labelled).write_bytes(content)  # as recover and restore do
        notes.save(label("bob", "L1N0"))
    assert everything(labelled)[-1]["annotator"] == "bob"


def test_a_scan_does_not_replace_an_index_while_somebody_labels_it(labelled: Index) -> None:
    events = labelled.folder / "annotations.sqlite"
    with History(events).writing():
        content = events.read_bytes()
        events.unlink()  # even if the file is not there yet
        with pytest.raises(IndexFolderError, match="somebody labels memories"):
            replace_tables(labelled.folder, SCAN_TABLES)
        events.write_bytes(content)
    assert Index(labelled.folder).manifest


def test_a_history_without_hashes_gets_them(labelled: Index) -> None:
    before = everything(labelled)
    columns = "key TEXT, time TEXT, task TEXT, kind TEXT, annotator TEXT, subject TEXT, content TEXT"
    names = columns.replace(" TEXT", "")
    change(
        labelled,
        f"CREATE TABLE old (id INTEGER PRIMARY KEY AUTOINCREMENT, {columns})",
        f"INSERT INTO old ({names}) SELECT {names} FROM history ORDER BY place",
        "DROP TABLE history",
        "DROP TABLE head",
        "ALTER TABLE old RENAME TO history",
    )
    marks = [history_mark(labelled, task) for task in (LABELS, VERDICTS)]
    assert everything(labelled) == before
    with Annotations(labelled) as notes:
        notes.save(label("bob", "L1N0"))
        assert notes.history()[:-1] == before
    assert history_mark(labelled, VERDICTS) == marks[1]
    assert memlens.check(labelled.folder).is_whole


def connecting(*pragmas: str) -> Callable[[Path], sqlite3.Connection]:
    """SQLite itself, told that the disk is as it is said."""
    connect = history.connect

    def told(path: Path) -> sqlite3.Connection:
        database = connect(path)
        for pragma in pragmas:
            database.execute(f"PRAGMA {pragma}")
        return database

    return told


LONG_LABEL = ("label", "--annotator", "bob", "--memory", "L1N0", "--pattern", f"semantic:0,1,2:{LONG.description}")
READ_ONLY, FULL = ("query_only = 1", "is read-only"), ("max_page_count = 1", "the disk is full")


@pytest.mark.parametrize(
    ("disk", "verb"),
    [
        (READ_ONLY, LONG_LABEL),
        (READ_ONLY, ("undo", "--annotator", "bob", "--memory", "L0N0")),
        (READ_ONLY, ("verdicts", "undo", "--annotator", "ann", "--example", DAY.name)),
        (FULL, LONG_LABEL),
    ],
)
def test_a_full_or_read_only_disk_is_told_apart_from_damage(
    labelled: Index,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    disk: tuple[str, str],
    verb: tuple[str, ...],
) -> None:
    before = everything(labelled)
    with monkeypatch.context() as patch:
        patch.setattr(history, "connect", connecting(disk[0]))
        assert main(["annotate", str(labelled.folder), *verb]) == 2
        error = capsys.readouterr().err
        assert disk[1] in error and not any(advice in error for advice in FORBIDDEN_ADVICE)
        assert len(error.strip().splitlines()) == 1
        assert everything(labelled) == before
        assert main(["annotate", str(labelled.folder), "status"]) == 0
        assert memlens.check(labelled.folder).is_whole
    assert main(["annotate", str(labelled.folder), *verb]) == 0
    assert everything(labelled)[:-1] == before


def test_a_lock_or_a_missing_permission_is_told_apart_from_damage(
    labelled: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(labelled)
    monkeypatch.setattr(history, "_WAIT_SECONDS", 0.05)
    other = sqlite3.connect(file_of(labelled), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert main(["check", str(labelled.folder)]) == 2
    out, error = capsys.readouterr()
    assert "another process" in error and "unreadable" in out
    assert not any(advice in out + error for advice in FORBIDDEN_ADVICE)
    for verb in ("status", "export", "recover"):
        assert main(["annotate", str(labelled.folder), verb]) == 2
        assert "another process is writing" in capsys.readouterr().err
    other.close()
    with pytest.raises(sqlite3.OperationalError) as closed:
        sqlite3.connect(labelled.folder / "nowhere" / "a.sqlite")
    assert "permissions" in str(history.explain(file_of(labelled), closed.value))
    assert everything(labelled) == before


def test_recover_keeps_all_but_the_damaged_event_and_never_overwrites_a_file(labelled: Index) -> None:
    before = everything(labelled)
    content = file_of(labelled).read_bytes()
    assert recover(file_of(labelled)).damaged is None and file_of(labelled).read_bytes() == content
    change(labelled, "UPDATE history SET annotator = 'eve' WHERE place = 4")
    content = file_of(labelled).read_bytes()
    done = recover(file_of(labelled))
    assert done.kept == 7 and [(lost.event, "by eve" in lost.about) for lost in done.lost] == [(4, True)]
    assert everything(labelled) == before[:3] + before[4:]
    assert done.damaged == file_of(labelled).with_name("annotations.sqlite.damaged-1")
    assert done.damaged.read_bytes() == content
    change(labelled, "DELETE FROM history WHERE place = 7")
    done = recover(file_of(labelled))
    assert [lost.event for lost in done.lost] == [7] and everything(labelled) == before[:3] + before[4:7]
    assert done.damaged == file_of(labelled).with_name("annotations.sqlite.damaged-2")
    assert memlens.check(labelled.folder).is_whole


def test_recover_needs_neither_header_nor_schema(labelled: Index, capsys: pytest.CaptureFixture[str]) -> None:
    before, whole = everything(labelled), file_of(labelled).read_bytes()
    file_of(labelled).write_bytes(bytes(4096) + whole[4096:])
    assert main(["annotate", str(labelled.folder), "recover", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["kept"], done["lost"]) == (8, []) and done["damaged"].endswith("annotations.sqlite.damaged-1")
    assert everything(labelled) == before
    assert main(["annotate", str(labelled.folder), "recover"]) == 0
    assert "nothing was done" in capsys.readouterr().out


def test_a_header_that_forbids_writing_is_mended(labelled: Index) -> None:
    before, content = everything(labelled), bytearray(file_of(labelled).read_bytes())
    content[18] = 65  # to SQLite, a file of a future version that it may only read
    file_of(labelled).write_bytes(content)
    with Annotations(labelled) as notes, pytest.raises(MemlensError):
        notes.save(label("bob", "L1N0"))
    assert [finding.file for finding in memlens.check(labelled.folder).damaged] == ["annotations.sqlite"]
    assert recover(file_of(labelled)).kept == len(before) and everything(labelled) == before
    with Annotations(labelled) as notes:
        notes.save(label("bob", "L1N0"))


WHILE_ANOTHER_READS = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], timeout=0)
try:
    database.execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as error:
    print(error)
"""


def test_a_look_at_the_labels_does_not_undo_the_lock_of_who_writes(labelled: Index) -> None:
    with closing(history.History(file_of(labelled))) as writer, writer.writing():
        with Annotations(labelled) as reader:  # of another thread, say
            assert reader.labels_of("bob") and history_mark(labelled, LABELS)
        command = [sys.executable, "-c", WHILE_ANOTHER_READS, str(file_of(labelled))]
        assert "locked" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_no_changed_byte_of_the_schema_is_more_than_a_line(labelled: Index) -> None:
    before, whole = everything(labelled), file_of(labelled).read_bytes()
    first = whole.index(b"CREATE TABLE")
    for place in range(first - 60, 4096, 3):
        content = bytearray(whole)
        content[place] ^= 0x80  # SQLite quotes it in its message, which is no UTF-8 then
        file_of(labelled).write_bytes(content)
        try:
            assert everything(labelled) == before
        except IndexFolderError as error:
            assert "\n" not in str(error)
    file_of(labelled).write_bytes(whole.replace(b"never_update_history BEFORE", b"never_update_history \xd2EFORE"))
    assert recover(file_of(labelled)).kept == len(before) and everything(labelled) == before


def test_recover_leaves_a_file_without_events_as_it_is(index: Index) -> None:
    with pytest.raises(IndexFolderError, match=r"no annotations\.sqlite"):
        recover(file_of(index))
    file_of(index).write_bytes(b"not a database, but long enough to be looked at" * 40)
    with pytest.raises(IndexFolderError, match="left as it is"):
        recover(file_of(index))
    assert [path.name for path in index.folder.glob("annotations*")] == ["annotations.sqlite"]


def test_recover_reads_what_is_left_of_an_older_file(index: Index) -> None:
    shutil.copy(BEFORE / "annotations.sqlite", index.folder)
    before = everything(index)
    database = sqlite3.connect(file_of(index))
    database.execute("DROP TRIGGER never_change")
    database.execute("UPDATE events SET content = '{' WHERE id = 3")
    database.commit()
    database.close()
    for read in (lambda: everything(index), lambda: history_mark(index, LABELS)):
        with pytest.raises(IndexFolderError, match="event 3 of the table events"):
            read()
    done = recover(file_of(index))
    assert done.kept == 11 and [lost.event for lost in done.lost] == [3]
    assert everything(index) == before[:2] + before[3:]


def test_nonsense_without_a_hash_is_one_line(index: Index) -> None:
    shutil.copy(BEFORE / "annotations.sqlite", index.folder)
    database = sqlite3.connect(file_of(index))
    for trigger in ("never_change", "never_change_verdicts"):
        database.execute(f"DROP TRIGGER {trigger}")
    database.execute("UPDATE events SET content = '{\"memories\": 3}' WHERE kind = 'sample'")
    database.execute("UPDATE events SET content = '{\"patterns\": [1]}' WHERE kind = 'label'")
    database.execute("UPDATE verdicts SET content = '{}'")
    database.commit()
    database.close()
    with Annotations(index) as notes:
        reads = (notes.sample, lambda: notes.labels_of("ann"), lambda: notes.labels_of("bob"), notes.verdicts)
        for read in reads:
            with pytest.raises(MemlensError, match=r"no readable content.*recover`$"):
                read()  # type: ignore[operator]


def test_a_backup_holds_everything_and_restore_brings_it_back(
    labelled: Index, copy: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "backup.json", Index(shutil.copytree(labelled.folder, tmp_path / "other"))
    file_of(other).unlink()
    assert main(["annotate", str(labelled.folder), "backup", str(file)]) == 0
    assert main(["annotate", str(other.folder), "restore", str(file)]) == 0
    assert "8 new events" in capsys.readouterr().err
    assert everything(other) == everything(labelled)
    assert [history_mark(other, t) for t in (LABELS, VERDICTS)] == [
        history_mark(labelled, t) for t in (LABELS, VERDICTS)
    ]
    with Annotations(other) as notes:
        assert restore_text(notes, backup_text(notes)) == 0
        with pytest.raises(SettingError, match="restore"):
            import_text(notes, LABELS, file.read_text(), "json")
        spoiled = json.loads(file.read_text())
        spoiled["events"][5]["task"] = "praise"
        with pytest.raises(SettingError, match="event 5"):
            restore_text(notes, json.dumps(spoiled))
    assert main(["annotate", str(labelled.folder), "backup"]) == 2


def test_an_export_replaces_nothing_but_an_export(
    labelled: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, extra in (("a.json", ()), ("a.csv", ()), ("v.csv", ("verdicts",))):
        for _ in range(2):
            given = [*extra, "export", "--file", str(tmp_path / name)]
            assert main(["annotate", str(labelled.folder), *given]) == 0
    mine = tmp_path / "mine.json"
    mine.write_text('{"my": "work"}')
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "a.json")
    for target in (mine, link, labelled.folder / "new.json", file_of(labelled), tmp_path):
        for verb in (("export", "--file"), ("verdicts", "export", "--file"), ("backup",)):
            assert main(["annotate", str(labelled.folder), *verb, str(target)]) == 2
    assert mine.read_text() == '{"my": "work"}' and link.is_symlink()
    assert main(["annotate", str(labelled.folder), "export", "--file", str(mine), "--force"]) == 0
    assert "memlens_annotations" in mine.read_text()
    capsys.readouterr()
