"""annotations.jsonl: a damaged byte costs one event, writers lose nothing, and only new lines are read again."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from filelock import FileLock
from people import DAY, NEWS, PRESS, label

import memlens
from memlens.annotations import log as log_module
from memlens.annotations.log import AnnotationLog, Event
from memlens.annotations.records import LABELS, Annotations, Sample, Verdict
from memlens.errors import FilesError, IndexFolderError
from memlens.index.reader import Index
from memlens.memory import MemoryId

Run = Callable[..., tuple[int, str, str]]


def make_event(key: str, annotator: str = "zoë", **content: Any) -> Event:
    return Event(key, "2026-11-18T15:32:18Z", LABELS, "label", annotator, "L0N0", content or {"patterns": []})


@pytest.fixture
def log(tmp_path: Path) -> AnnotationLog:
    """Three events."""
    log = AnnotationLog(tmp_path / "annotations.jsonl")
    with log.appending() as events:
        events += [make_event(key) for key in "abc"]
    return log


def keys(log: AnnotationLog) -> str:
    return "".join(log.read()[0])


def read_again(log: AnnotationLog) -> tuple[str, list[int]]:
    """Return the keys and the damaged lines as another process reads them."""
    events, damaged = AnnotationLog(log.path).read()
    return "".join(events), damaged


def test_a_line_is_readable_json_and_comes_back_as_the_same_event(log: AnnotationLog) -> None:
    event = make_event("key", "Zoë \u2028", text='a "quoted"\r\nline {"checksum": "', number=3)
    line = event.to_line()
    assert Event.from_line(line.rstrip(b"\n")) == event and line.count(b"\n") == 1 and "Zoë".encode() in line
    assert json.loads(line).keys() >= {"checksum", "key", "time", "content"}


def test_reading_creates_no_file(tmp_path: Path) -> None:
    assert AnnotationLog(tmp_path / "annotations.jsonl").read() == ({}, [])
    assert list(tmp_path.iterdir()) == []


def check_flip(log: AnnotationLog, place: int, bit: int) -> None:
    """Flip one bit: at most one event is lost, none changes, and the damage is reported."""
    content, expected = log.path.read_bytes(), AnnotationLog(log.path).read()[0]
    flipped = bytearray(content)
    flipped[place] ^= 1 << bit
    log.path.write_bytes(flipped)
    events, damaged = AnnotationLog(log.path).read()
    is_last_break = place == len(content) - 1  # then the last line is unfinished
    assert len(events) >= len(expected) - 1 and events.items() <= expected.items(), (place, bit)
    assert damaged or is_last_break or events == expected, (place, bit)
    with AnnotationLog(log.path).appending() as new:
        new.append(make_event("new"))
    assert AnnotationLog(log.path).read()[0].keys() == events.keys() | {"new"}, (place, bit)
    log.path.write_bytes(content)


def test_one_flipped_bit_costs_one_event_at_most(log: AnnotationLog) -> None:
    size = log.path.stat().st_size
    for place in {*range(0, size, 17), *(size // 3 * line + offset for line in (1, 2, 3) for offset in (-1, 0, 1))}:
        if place < size:
            check_flip(log, place, place % 8)


@pytest.mark.sweep
def test_a_flipped_bit_in_every_byte_costs_one_event_at_most(log: AnnotationLog) -> None:
    for place in range(log.path.stat().st_size):
        check_flip(log, place, place % 8)


@pytest.mark.parametrize(
    "line",
    [
        b"not JSON",
        b"{}",
        b"[1, 2]",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"checksum": "0123456789abcdef", "key": "x"}',
        make_event("x").to_line()[:-9],
        make_event("x").to_line()[20:-1],
    ],
)
def test_a_damaged_or_foreign_line_is_skipped_and_its_number_reported(log: AnnotationLog, line: bytes) -> None:
    first, second, third = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(first + second + line + b"\n" + third)
    assert read_again(log) == ("abc", [3])


def test_a_right_checksum_of_something_else_is_a_damaged_line(log: AnnotationLog) -> None:
    rest = b'", "key": 5}'
    line = b'{"checksum": "' + log_module._compute_checksum(rest) + rest
    log.path.write_bytes(line + b"\n" + log.path.read_bytes())
    assert read_again(log) == ("abc", [1])


def test_lines_that_were_joined_or_repeated_count_once(log: AnnotationLog) -> None:
    first, second, third = log.path.read_bytes().splitlines()
    log.path.write_bytes(first + second + b"\r\n\n" + third + b"\n" + first + b"\n")
    assert read_again(log) == ("abc", [1])


@pytest.mark.parametrize("kept", [1, 30, -2, -1])
def test_an_unfinished_last_line_does_not_swallow_the_next_event(log: AnnotationLog, kept: int) -> None:
    with log.path.open("ab") as file:
        file.write(make_event("torn").to_line()[:kept])
    is_complete = kept == -1  # but for the line break
    expected = ["a", "b", "c", "torn"] if is_complete else ["a", "b", "c"]
    assert list(AnnotationLog(log.path).read()[0]) == expected and AnnotationLog(log.path).read()[1] == []
    with log.appending() as events:
        events.append(make_event("next"))
    for reader in (log, AnnotationLog(log.path)):
        assert list(reader.read()[0]) == [*expected, "next"] and reader.read()[1] == ([] if is_complete else [4])


def test_an_unchanged_file_is_not_read_again(log: AnnotationLog) -> None:
    with AnnotationLog(log.path).appending() as events:  # as another process does
        events.append(make_event("d"))
    assert keys(log) == "abcd" and log.read()[0] is log.read()[0]


@pytest.mark.parametrize("change", ["replace", "truncate", "edit", "edit first", "remove"])
def test_a_file_that_was_changed_by_others_is_read_again(log: AnnotationLog, change: str) -> None:
    assert keys(log) == "abc"
    first, second, third = log.path.read_bytes().splitlines(keepends=True)
    new = make_event("n").to_line()
    contents = {
        "replace": new + second + third,
        "truncate": first,
        "edit": first + second + new,
        "edit first": make_event("o", text="longer").to_line() + second + third,
    }
    if change == "remove":
        log.path.unlink()
    elif change == "replace":
        log.path.with_name("new").write_bytes(contents[change])
        log.path.with_name("new").replace(log.path)
    else:
        log.path.write_bytes(contents[change])
    assert keys(log) == {"replace": "nbc", "truncate": "a", "edit": "abn", "edit first": "obc", "remove": ""}[change]


def test_results_that_a_caller_holds_do_not_change(log: AnnotationLog) -> None:
    events, _ = log.read()
    with log.appending() as new:
        new.append(make_event("d"))
    assert "".join(events) == "abc" and keys(log) == "abcd"


def test_nothing_is_written_if_the_block_raises(log: AnnotationLog) -> None:
    content = log.path.read_bytes()
    with pytest.raises(ZeroDivisionError), log.appending() as events:
        events.append(make_event("d"))
        raise ZeroDivisionError
    assert log.path.read_bytes() == content


def test_nothing_is_written_while_another_process_holds_the_lock(
    log: AnnotationLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_LOCK_SECONDS", 0)
    with FileLock(f"{log.path}.lock"), pytest.raises(FilesError, match="is locked by another process"), log.appending():
        pass


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_full_or_failing_disk_leaves_the_log_as_it_was(
    index: Index, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    notes = Annotations(index)
    for expected in ([], ["ann"]):
        with monkeypatch.context() as patch, pytest.raises(FilesError, match="No space left on device; nothing was"):
            patch.setattr(os, "fsync", fail) if step == "fsync" else patch.setattr(
                log_module, "memoryview", fail, False
            )
            notes.save(label("bob", "L1N0"))
        assert Annotations(index).list_annotators() == expected and notes.path.exists() == bool(expected)
        notes.save(label("ann", "L0N0"))


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_damage_is_reported_by_every_command(index: Index, run: Run) -> None:
    notes = Annotations(index)
    notes.save(label("ann", "L0N0", PRESS))
    with notes.path.open("ab") as file:
        file.write(b"not an event\n")
    notes.save(label("bob", "L0N0", NEWS))
    code, out, err = run("annotate", index.folder, "status", "--json")
    assert (code, len(json.loads(out))) == (0, 2) and "annotations.jsonl: line 2 is damaged" in err
    assert "line 2 is damaged" in run("collect", index.folder)[2]
    code, _, err = run("check", index.folder)
    assert code == 2 and "line 2 is damaged; keep all others with `memlens annotate" in err
    assert run("repair", index.folder)[0] == 2


def test_recover_keeps_all_but_the_damaged_lines_and_overwrites_nothing(log: AnnotationLog) -> None:
    assert log.recover().damaged_file is None
    for number in (1, 2):
        first, *others = log.path.read_bytes().splitlines(keepends=True)
        damaged = first[:50] + b"X" + first[51:] + b"".join(others)
        log.path.write_bytes(damaged)
        recovery = log.recover()
        assert recovery.damaged_lines == (1,) and recovery.events == 3 - number
        assert recovery.damaged_file == log.path.with_name(f"annotations.jsonl.damaged-{number}")
        assert recovery.damaged_file.read_bytes() == damaged
        assert log.path.read_bytes() == b"".join(others) and read_again(log) == ("abc"[number:], [])


def test_recover_leaves_a_file_without_events_as_it_is(index: Index, run: Run) -> None:
    path = index.folder / "annotations.jsonl"
    with pytest.raises(IndexFolderError, match=r"has no annotations\.jsonl"):
        AnnotationLog(path).recover()
    path.write_bytes(b"not an event\n")
    with pytest.raises(IndexFolderError, match="left as it is"):
        AnnotationLog(path).recover()
    assert path.read_bytes() == b"not an event\n" and not list(index.folder.glob("*damaged*"))


def test_the_command_recovers_and_says_what_it_did(index: Index, run: Run) -> None:
    notes = Annotations(index)
    notes.set_sample(Sample((MemoryId(0, 0),), 25, 0))
    notes.save(label("ann", "L0N0", PRESS), Verdict("ann", DAY, "related"))
    assert run("annotate", index.folder, "recover")[1].startswith("annotations.jsonl has 3 events and no damaged lines")
    notes.path.write_bytes(notes.path.read_bytes().replace(b"ends with", b"Ends with"))
    assert run("annotate", index.folder, "recover")[1] == (
        "2 events were kept; line 2 is damaged; the damaged file was renamed to annotations.jsonl.damaged-1\n"
    )
    assert memlens.check(index.folder).is_whole and notes.labels_of("ann") == []


def test_threads_that_share_a_log_lose_nothing(index: Index) -> None:
    notes = Annotations(index)
    names = [f"person {number}" for number in range(8)]
    threads = [Thread(target=lambda name=name: notes.save(label(name, "L0N0"))) for name in names]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert notes.list_annotators() == names


WRITER = """
import sys
from pathlib import Path
from memlens.annotations.log import AnnotationLog, Event

log, name = AnnotationLog(Path(sys.argv[1])), sys.argv[2]
for number in range(int(sys.argv[3])):
    with log.appending() as events:
        events.append(Event(f"{name}{number}", "", "labels", "label", name, "L0N0", {"text": "x" * 3000}))
    print(number, flush=True)
"""


def start_writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def written_by(log: AnnotationLog, name: str) -> list[str]:
    return [key.removeprefix(name) for key, event in log.read()[0].items() if event.annotator == name]


def test_processes_that_append_at_once_lose_nothing(log: AnnotationLog) -> None:
    writers = {name: start_writer(log.path, name, 100) for name in ("ann", "bob", "cyd")}
    for writer in writers.values():
        writer.communicate()
        assert writer.returncode == 0
    assert all(written_by(log, name) == [str(number) for number in range(100)] for name in writers)
    assert read_again(log)[1] == [] and log.read() == AnnotationLog(log.path).read()


@pytest.mark.parametrize(
    "confirmed_before", [3, *(pytest.param(number, marks=pytest.mark.sweep) for number in range(4, 24))]
)
def test_a_kill_loses_nothing_that_was_confirmed(log: AnnotationLog, confirmed_before: int) -> None:
    writer = start_writer(log.path, "ann", 1_000_000)
    assert writer.stdout is not None
    confirmed = [writer.stdout.readline().strip() for _ in range(confirmed_before)]
    writer.send_signal(signal.SIGKILL)
    confirmed += writer.stdout.read().split()
    writer.wait()
    with log.appending() as events:
        events.append(make_event("next"))
    written = written_by(log, "ann")
    assert written[: len(confirmed)] == confirmed and len(written) <= len(confirmed) + 1
    assert read_again(log)[0].startswith("abc") and keys(log).endswith("next")
