"""The annotation log: annotations.jsonl in the index folder, one event per line.

    {"checksum": "9f86d081884c7d65", "key": "…", "time": "2026-11-18T15:32:18Z", "task": "labels", "kind": "label",
     "annotator": "ann", "subject": "L0N3", "content": {"patterns": []}}          (on one line)

1. Events are only appended. A writer holds a lock file, writes all its lines at once and syncs them. If writing fails,
   the file is truncated to its previous size.
2. The checksum is the first 16 hexadecimal digits of the SHA-256 of the rest of the line. A line with a wrong checksum
   is damaged. It is skipped, and its line number is reported. All other lines count. An event that occurs twice counts
   once (its key is unique), so logs can be merged with ordinary tools.
3. A process that is killed while it appends leaves an unfinished last line. Readers ignore such a line, because another
   process may still be writing it. The next writer starts a new line.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from memlens.errors import FilesError, IndexFolderError, SettingError
from memlens.files import FileStamp, file_stamp, replacing, sync_folder

_START = b'{"checksum": "'  # start of a line; it cannot occur inside an event, because JSON escapes quotes in texts
_DIGITS = 16
_LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Event:
    """One action of one annotator. Task, kind, subject and content are described in records.py."""

    key: str
    time: str
    task: str
    kind: str
    annotator: str
    subject: str
    content: dict[str, Any]

    def to_line(self) -> bytes:
        """Return the event as a line of the log. Raises SettingError if the event is not valid UTF-8."""
        try:
            rest = b'", ' + json.dumps(vars(self), ensure_ascii=False)[1:].encode()
        except UnicodeEncodeError as error:
            raise SettingError(f"the {self.kind} on {self.subject!a} contains text that is not valid UTF-8") from error
        return _START + _compute_checksum(rest) + rest + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Event | None":
        """Return the event in a line (given without its line break), or None if the line is damaged."""
        end = len(_START) + _DIGITS
        if not line.startswith(_START) or _compute_checksum(line[end:]) != line[len(_START) : end]:
            return None
        try:
            return msgspec.json.decode(b"{" + line[end:].removeprefix(b'", '), type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None


def _compute_checksum(rest: bytes) -> bytes:
    return hashlib.sha256(rest).hexdigest()[:_DIGITS].encode()


@dataclass(frozen=True)
class Recovery:
    """The result of AnnotationLog.recover. `damaged_file` is None if no line was damaged."""

    events: int
    damaged_lines: tuple[int, ...]
    damaged_file: Path | None


class AnnotationLog:
    """The events of one log file. Reading creates no file and needs no lock. The object is thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reading = Lock()
        self._stamp: FileStamp | None = None  # stamp of the file at the last read
        self._content: tuple[dict[str, Event], list[int]] = ({}, [])

    def read(self) -> tuple[dict[str, Event], list[int]]:
        """Return {key: event} in the order of the log, and the line numbers of damaged lines.

        The file is read only if it has changed since the last call. Otherwise, the last result is returned again.
        """
        with self._reading:
            try:
                stamp = file_stamp(self.path)
                if stamp != self._stamp:
                    self._content, self._stamp = self._read_file(), stamp
            except OSError as error:
                raise FilesError(f"cannot read {self.path}: {error.strerror or error}") from error
            return self._content

    def _read_file(self) -> tuple[dict[str, Event], list[int]]:
        events: dict[str, Event] = {}
        damaged: list[int] = []
        if self.path.is_file():  # skip a pipe, because reading it might never end
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    line_events, is_damaged = _parse_line(line)
                    for event in line_events:
                        events.setdefault(event.key, event)
                    if is_damaged and line.endswith(b"\n"):
                        damaged.append(number)
        return events, damaged

    @contextmanager
    def appending(self) -> Iterator[list[Event]]:
        """Hold the lock and yield an empty list. If the block ends without an error, append the events in the list.

        Raises:
            FilesError: The file or its folder cannot be written. Nothing was saved.
        """
        with self._hold_lock():
            events: list[Event] = []
            yield events
            lines = [event.to_line() for event in events]
            if lines:
                with self._explain_errors():
                    self._append(b"".join(lines))

    def recover(self) -> Recovery:
        """Keep a copy of a damaged log and rewrite the log without its damaged lines.

        Raises:
            IndexFolderError: There is no log, or all its lines are damaged. Nothing was changed.
        """
        if not self.path.is_file():
            raise IndexFolderError(f"{self.path.parent} has no {self.path.name}; there are no annotations to recover")
        with self._hold_lock(), self._explain_errors():
            lines: list[bytes] = []
            damaged: list[int] = []
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    events, is_damaged = _parse_line(line)
                    if is_damaged:
                        damaged.append(number)
                        lines += [event.to_line() for event in events]
                    else:
                        # keep the line verbatim, because a newer version of memlens may have written it
                        lines.append(line.rstrip(b"\r\n") + b"\n")
            if not damaged:
                return Recovery(len(lines), (), None)
            if not lines:
                raise IndexFolderError(f"{self.path} has no undamaged line, so it was left as it is; restore a backup")
            copy = self._copy_damaged_file()
            with replacing(self.path) as beside:
                beside.write_bytes(b"".join(lines))
            return Recovery(len(lines), tuple(damaged), copy)

    def _append(self, content: bytes) -> None:
        with self.path.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the last line is unfinished
                    content = b"\n" + content
            try:
                remaining = memoryview(content)
                while remaining:
                    remaining = remaining[file.write(remaining) or 0 :]
                os.fsync(file.fileno())
                if not size:
                    sync_folder(self.path.parent)
            except BaseException:
                with suppress(OSError):
                    file.truncate(size)
                    if not size:
                        self.path.unlink()
                raise

    def _copy_damaged_file(self) -> Path:
        number = 1
        while (copy := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        with self.path.open("rb") as source, copy.open("xb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
        return copy

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        lock = FileLock(f"{self.path}.lock", poll_interval=0.005)
        with self._explain_errors():
            try:
                lock.acquire(timeout=_LOCK_SECONDS)
            except Timeout as error:
                raise FilesError(f"{self.path} is locked by another process; try again later") from error
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FilesError(f"cannot write {self.path}: {error.strerror or error}; nothing was saved") from error


def _parse_line(line: bytes) -> tuple[Sequence[Event], bool]:
    """Return the readable events in a line, and whether the line is damaged."""
    line = line.rstrip(b"\r\n")
    event = Event.from_line(line)
    if event is not None or not line:
        return [event] if event else [], False
    # a damaged or missing line break joins two lines, but the events in these lines may be undamaged
    parts = (_START + part for part in line.split(_START)[1:])
    events = (Event.from_line(part[: part.rfind(b"}") + 1]) for part in parts)
    return [event for event in events if event], True
