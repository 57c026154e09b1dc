"""Recovery of a damaged annotations.sqlite: every event whose hash is right, found in the bytes of the file.

An event is looked for wherever the file has the shape of its row, without SQLite's help, so that a damaged header,
schema or page costs nothing but the events that lie in the damaged bytes themselves. Its hash says whether it is one.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlens.annotations.answers import ANSWERS, UNREADABLE, Sample
from memlens.errors import FilesError, IndexFolderError, MemlensError
from memlens.files import file_stamp, holding, sync_folder
from memlens.index.history import COLUMNS, EVENT_KINDS, FIRST, UNHASHED, Event, History, connect

_PAGE_BYTES = 4096
_TWO_HASHES = b"\x81\x0d\x81\x0d"  # the end of a row's header: two texts of 64 characters
_BESIDE = ("-journal", "-wal", "-shm")  # what SQLite keeps beside a file


@dataclass(frozen=True)
class LostEvent:
    """An event that cannot be read any more, as far as it is known."""

    event: int
    about: str  # in words, from what its damaged row says


@dataclass(frozen=True)
class Recovery:
    """The result of a recovery. An undamaged file is left as it is, but events without a hash are given one."""

    kept: int
    lost: tuple[LostEvent, ...]
    damaged: Path | None  # where the file is now
    protected: int = 0  # events of an older memlens that had no hash


@dataclass(frozen=True)
class _Row:
    """Ten values that lie in the file like an event's."""

    place: int
    event: Event
    previous: str
    hash: str


def recover(path: Path) -> Recovery:
    """Put a whole file in the place of a damaged one, which stays beside it under another name."""
    if not path.is_file():
        raise IndexFolderError(f"{path.parent} has no {path.name}; nobody has labelled anything there")
    try:
        with closing(History(path)) as history:
            count, unhashed = history.check_whole()
            if unhashed:
                history.protect()
            return Recovery(count, (), None, unhashed)
    except IndexFolderError:  # damaged; a file that is only locked or forbidden gives other errors, and stays
        stamp = file_stamp(path)
    try:
        content = path.read_bytes()
        events, lost = _right_events(content, _noted_end(path))
        if not events and not lost:
            events, lost = _unhashed_events(path)
        if not events:
            raise IndexFolderError(
                f"no event can be read from {path}; it was left as it is: restore a backup or a copy"
            )
        new = _write(path, events)
        with holding(path.parent, alone=True):
            if file_stamp(path) != stamp:
                raise FilesError(f"{path} was changed meanwhile; run the same command again")
            return Recovery(len(events), tuple(lost), _exchange(path, new))
    except OSError as error:
        raise FilesError(f"cannot recover {path}: {error.strerror or error}; it was left as it is") from error


def _right_events(content: bytes, noted: tuple[int, str]) -> tuple[list[Event], list[LostEvent]]:
    """The events whose hash is right and those that are not there; a hash also stands in the row after, and in head."""
    rows: dict[int, list[_Row]] = {}
    for row in _rows(content):
        rows.setdefault(row.place, []).append(row)
    by_place: dict[int, Event] = {}
    for place, same in rows.items():
        before = {FIRST} if place == 1 else {row.hash for row in rows.get(place - 1, [])}
        after = {row.previous for row in rows.get(place + 1, [])} | ({noted[1]} if place == noted[0] else set())
        for row in same:
            hashes = {row.event.hash_at(place, previous) for previous in before | {row.previous}}
            if hashes & (after | {row.hash}) and (place not in by_place or hashes & after):
                by_place[place] = row.event
    if not by_place:
        return [], []
    end = max(*by_place, noted[0]) if noted[0] <= max(by_place) + len(content) else max(by_place)
    lost = [LostEvent(place, _about(rows.get(place, []))) for place in range(1, end + 1) if place not in by_place]
    return [event for _, event in sorted(by_place.items())], lost


def _about(rows: Sequence[_Row]) -> str:
    if not rows:
        return "nothing of it is left"
    event = rows[0].event
    of = f" on {event.subject}" if event.subject else ""
    return f"a {event.kind}{of} by {event.annotator or 'nobody'} at {event.time}, as far as it can be read"


def _rows(content: bytes) -> Iterator[_Row]:
    """Yield everything that looks like a row of events, from the beginning of the file to its end."""
    size = int.from_bytes(content[16:18], "big")
    page = size if size in (512, 1024, 2048, 4096, 8192, 16384, 32768) else _PAGE_BYTES
    end = content.find(_TWO_HASHES)
    while end >= 0:
        after = end + len(_TWO_HASHES)
        for start in range(max(end - 40, 0), end):
            kinds = _kinds(content[start:after]) if content[start] == after - start else None
            if kinds is not None:
                values = _values(_payload(content, start, after - start + sum(map(_length, kinds)), page), kinds)
                yield _Row(int.from_bytes(values[0], "big"), Event(*map(_text, values[1:8])), *map(_text, values[8:]))
        end = content.find(_TWO_HASHES, end + 1)


def _kinds(header: bytes) -> list[int] | None:
    """The types of a row's values: a number, then texts; None where the bytes are no such header."""
    kinds, number = [], 0
    for byte in header[1:]:
        number = number << 7 | byte & 0x7F
        if byte < 0x80:
            kinds.append(number)
            number = 0
    numbers_and_texts = len(kinds) == len(COLUMNS) and (kinds[0] in range(1, 7) or kinds[0] == 9)
    return kinds if numbers_and_texts and all(kind >= 13 and kind % 2 for kind in kinds[1:]) else None


def _length(kind: int) -> int:
    """The bytes of a value; SQLite numbers the types of integers, and adds the length to the type of texts."""
    return (kind - 13) // 2 if kind >= 13 else {5: 6, 6: 8, 9: 0}.get(kind, kind)


def _payload(content: bytes, start: int, size: int, page: int) -> bytes:
    """A row that begins at a place in the file; the end of a long one lies on other pages, each naming the next."""
    most, least = page - 35, (page - 12) * 32 // 255 - 23
    fitting = least + (size - least) % (page - 4)
    here = size if size <= most else fitting if fitting <= most else least
    payload = bytearray(content[start : start + here])
    place = start + here
    while len(payload) < size:
        number = int.from_bytes(content[place : place + 4], "big")
        place = (number - 1) * page
        part = content[place + 4 : place + 4 + min(page - 4, size - len(payload))] if number else b""
        if not part:
            break
        payload += part
    return bytes(payload)


def _values(payload: bytes, kinds: Sequence[int]) -> list[bytes]:
    place, values = payload[0], []
    for kind in kinds:
        values.append(payload[place : place + _length(kind)] if kind != 9 else b"\1")
        place += _length(kind)
    return values


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _noted_end(path: Path) -> tuple[int, str]:
    """The number of events and the last hash, if SQLite can still read them."""
    try:
        with closing(connect(path)) as database:
            ((count, last),) = database.execute("SELECT events, hash FROM head")
        return (count, last) if isinstance(count, int) and isinstance(last, str) else (0, "")
    except (sqlite3.Error, ValueError, MemlensError):
        return 0, ""


def _unhashed_events(path: Path) -> tuple[list[Event], list[LostEvent]]:
    """Read a file of an older memlens by SQLite: the events that are valid, and those that are not."""
    by_key: dict[str, Event] = {}
    lost = []
    try:
        with closing(connect(path)) as database:
            tables = {table: _readable_rows(database, table) for table in UNHASHED}
    except (sqlite3.Error, MemlensError):
        return [], []
    for table, rows in tables.items():
        for number in range(1, max(rows, default=0) + 1):
            event = Event(*rows[number]) if number in rows else None
            if event is not None and _makes_sense(event):
                by_key.setdefault(event.key, event)
            elif event is None or event.key not in by_key:
                lost.append(LostEvent(number, f"a row of the table {table}"))
    return list(by_key.values()), lost


def _readable_rows(database: sqlite3.Connection, table: str) -> dict[int, Sequence[Any]]:
    """The rows by id that SQLite can still read of a table without hashes, from both ends up to the damage."""
    rows: dict[int, Sequence[Any]] = {}
    for order in ("ASC", "DESC"):
        try:
            for number, *fields in database.execute(f"SELECT id, {UNHASHED[table]} FROM {table} ORDER BY id {order}"):
                rows[number] = fields
        except (sqlite3.Error, UnicodeDecodeError):
            continue
    return dict(sorted(rows.items()))


def _makes_sense(event: Event) -> bool:
    if not event.is_readable() or event.kind not in EVENT_KINDS[event.task]:
        return False
    fields: dict[str, Any] = event.as_dict()
    try:
        if event.kind == "sample":
            Sample.read(fields["content"])
        elif event.kind == ANSWERS[event.task].kind:
            ANSWERS[event.task].read(fields)
    except UNREADABLE:
        return False
    return True


def _write(path: Path, events: Sequence[Event]) -> Path:
    new = path.with_name(path.name + ".part")
    for ending in ("", *_BESIDE):
        path.with_name(new.name + ending).unlink(missing_ok=True)
    with closing(History(new)) as history, history.writing() as append:
        for event in events:
            append(event)
    return new


def _exchange(path: Path, new: Path) -> Path:
    """Keep the damaged file under a name that nothing has, and put the new one in its place."""
    number = 1
    while any(path.parent.glob(f"{path.name}.damaged-{number}*")):
        number += 1
    copy = path.with_name(f"{path.name}.damaged-{number}")
    try:
        os.link(path, copy)
    except OSError:  # not every disk has second names
        with path.open("rb") as source, copy.open("xb") as target:
            shutil.copyfileobj(source, target)
            os.fsync(target.fileno())
    for ending in _BESIDE:  # SQLite would apply them to the new file
        beside = path.with_name(path.name + ending)
        if beside.exists():
            beside.rename(copy.with_name(copy.name + ending))
    new.replace(path)
    sync_folder(path.parent)
    return copy
