"""annotations.sqlite as a file: events in the order in which they were added, each hashed onto the one before.

    place     1, 2, 3 and so on
    key ...   the event itself; its content is JSON
    previous  the hash of the event before, zeros for the first
    hash      sha256 over previous, place and the event

The table `head` notes the number of events and the last hash, so that a lost end shows as well. Whatever is read is
verified; a file that is not as it was written is refused, with the way to mend it. Trouble that is no damage (a full or
read-only disk, somebody else's lock) is told apart, since nobody should give up labels for it. Files of an older
memlens have no hashes: they are read as they are, `check` says so, and they get them with the first event that is added
or with `annotate INDEX recover`.

A server opens the file for every request. So that this does not take longer with every label, a process remembers what
it has verified together with the file's size, times and inode; what it remembers holds while these are the same under
SQLite's lock. After a write of its own the file's time is set to the nanosecond: whatever is written later, even within
the same tick of the disk's clock, changes it. `check` remembers nothing and reads everything.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from memlens.errors import FilesError, IndexFolderError, MemlensError
from memlens.files import FileStamp, file_stamp, holding

LABELS, VERDICTS, NOTES = "labels", "verdicts", "notes"  # tasks
EVENT_KINDS = {LABELS: ("sample", "label", "undo", "finish"), VERDICTS: ("verdict", "undo"), NOTES: ("note", "undo")}
# A task's table in files of memlens before both had one. Experiments note the history under this name still, so that
# tables made then count as up to date.
OLD_TABLES = {LABELS: "events", VERDICTS: "verdicts"}
FIELDS = ("key", "time", "task", "kind", "annotator", "subject", "content")  # of an event
COLUMNS = ("place", *FIELDS, "previous", "hash")
FIRST = "0" * 64  # what the first event is hashed onto
_HISTORY, _HEAD = "history", "head"
# What an event is in tables without hashes, which stay as they are: an older memlens may still write there.
UNHASHED = {
    _HISTORY: ", ".join(FIELDS),
    "events": f"key, time, '{LABELS}', kind, annotator, coalesce('L' || layer || 'N' || memory, ''), content",
    "verdicts": f"key, time, '{VERDICTS}', kind, annotator, example, content",
}
_SCHEMA = (
    f"""
    CREATE TABLE history (
        place INTEGER NOT NULL,
        {", ".join(f"{name} TEXT NOT NULL" for name in COLUMNS[1:])}
    )""",
    *(
        f"CREATE TRIGGER never_{change}_history BEFORE {change} ON history "
        "BEGIN SELECT RAISE(ABORT, 'the history is append-only'); END"
        for change in ("update", "delete")
    ),
    "CREATE TABLE head (events INTEGER NOT NULL, hash TEXT NOT NULL, labels INTEGER NOT NULL, "
    "verdicts INTEGER NOT NULL)",
    f"INSERT INTO head VALUES (0, '{FIRST}', 0, 0)",  # the last two: up to which id old tables were taken over
)
_WAIT_SECONDS = 60.0
_TROUBLE = {
    sqlite3.SQLITE_READONLY: "the file or its disk is read-only; make it writable and do the same again",
    sqlite3.SQLITE_FULL: "the disk is full; free some space and do the same again",
    sqlite3.SQLITE_BUSY: "another process is writing to it; wait for that and do the same again",
    sqlite3.SQLITE_LOCKED: "another process is writing to it; wait for that and do the same again",
    sqlite3.SQLITE_CANTOPEN: "the system does not let memlens open it; look at the permissions of file and folder",
    sqlite3.SQLITE_PERM: "the system does not permit it; look at the permissions of file and folder",
    sqlite3.SQLITE_AUTH: "the system does not permit it; look at the permissions of file and folder",
    sqlite3.SQLITE_IOERR: "the disk gives an error; look whether it is full or failing and do the same again",
    sqlite3.SQLITE_NOMEM: "there is not enough memory; close other programs and do the same again",
    sqlite3.SQLITE_NOLFS: "the file is larger than this system allows",
}


_CLOCK_TICK = 2_500_000_000  # nanoseconds: the times of files are exact to 2 seconds on the coarsest disks
_MOST_FILES = 4


@dataclass(frozen=True)
class Event:
    """Something that a person did."""

    key: str
    time: str
    task: str
    kind: str
    annotator: str
    subject: str
    content: str  # JSON, as it is stored

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in FIELDS)

    def hash_at(self, place: int, previous: str) -> str:
        return hashlib.sha256(json.dumps([previous, place, *self.fields]).encode()).hexdigest()

    def is_readable(self) -> bool:
        """Is it an event at all? For those that have no hash to tell."""
        try:
            "".join(self.fields).encode()  # texts, and of characters that can be written again
            return self.kind in EVENT_KINDS[self.task] and isinstance(json.loads(self.content), dict)
        except (KeyError, TypeError, ValueError, RecursionError):
            return False

    def as_dict(self) -> dict[str, Any]:
        """The event as an export writes it."""
        fields = dict(zip(FIELDS, self.fields, strict=True))
        del fields["task"]
        return {**fields, "content": json.loads(self.content)}


def damaged(path: Path, what: str) -> IndexFolderError:
    return IndexFolderError(f"{path} is damaged ({what}); run `memlens annotate {path.parent} recover`")


def explain(path: Path, error: sqlite3.Error) -> MemlensError:
    """One line about an error of SQLite; only what no full, locked or forbidden disk can cause counts as damage."""
    trouble = _TROUBLE.get(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF)
    if trouble is not None:
        return FilesError(f"cannot open or write {path}: {trouble}; its labels are as they were")
    return damaged(path, str(error).splitlines()[0][:100] if str(error) else "it cannot be read")


@dataclass(frozen=True)
class _VerifiedEvents:
    """The events of a file that had this stamp; nobody changes list and set."""

    stamp: FileStamp
    chain: list[Event]
    keys: set[str]
    last: str
    row: int
    are_pages_whole: bool  # SQLite has looked through the whole file


class _VerifiedFiles:
    """Events that this process has verified, by path, for the latest few files."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, _VerifiedEvents] = OrderedDict()
        self._lock = Lock()

    def find(self, path: Path, stamp: FileStamp | None) -> _VerifiedEvents | None:
        with self._lock:
            verified = self._files.get(str(path.absolute()))
        return verified if verified is not None and verified.stamp == stamp else None

    def note(self, path: Path, verified: _VerifiedEvents) -> None:
        with self._lock:
            self._files[str(path.absolute())] = verified
            self._files.move_to_end(str(path.absolute()))
            while len(self._files) > _MOST_FILES:
                self._files.popitem(last=False)


_VERIFIED = _VerifiedFiles()


class History:
    """The events of one file. Nothing is opened before it is needed, and no file is made before something is added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database: sqlite3.Connection | None = None
        self._number: int | None = None  # of the file that is open
        self._trusts_memory = True  # in what this process has verified before
        self._last: str = FIRST
        self._row: int = 0
        self._forget()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def events(self) -> list[Event]:
        """All events in order, verified."""
        with self._explaining():
            database = self._open(make=False)
            if database is None:
                return []
            if database.in_transaction:
                self._read(database)
            else:
                database.execute("BEGIN")  # the end that is noted and the rows are of one moment
                try:
                    self._read(database)
                    self._note_read()
                finally:
                    if database.in_transaction:
                        database.execute("ROLLBACK")
        return self._chain + self._unhashed

    def check_whole(self) -> tuple[int, int]:
        """Verify also what SQLite knows about the file beside the events; how many they are, how many without hash."""
        self._forget()
        self._trusts_memory = False
        count = len(self.events())
        with self._explaining():
            database = self._open(make=False)
            if database is not None:
                self._check_pages(database)
                if not set(_versions(self.path)) <= {1, 2}:
                    raise damaged(self.path, "its header is not SQLite's")
        return count, len(self._unhashed)

    def protect(self) -> None:
        """Give hashes to events that an older memlens wrote without."""
        with self.writing():
            pass

    @contextmanager
    def writing(self) -> Iterator[Callable[[Event], None]]:
        """One transaction with what adds an event to it: on disk when the block is left, gone if it raises."""
        alone = not self.path.exists()  # the first writer, until there is something to share
        with holding(self.path.parent, alone=alone) as held, self._explaining():
            if self._database is not None and _number_of(self.path) != self._number:
                self.close()  # what was opened is not the file of that name any more
                self._forget()
            try:
                with self._transaction() as append:
                    yield append
            except BaseException:
                if alone and held:
                    self.close()
                    if self.path.exists() and self.path.stat().st_size == 0:
                        self.path.unlink()  # refused: nobody else has begun to write to it
                raise

    @contextmanager
    def _transaction(self) -> Iterator[Callable[[Event], None]]:
        database = self._open(make=True)
        assert database is not None
        if not self._is_ready:
            self._make_ready(database)
        database.execute("BEGIN IMMEDIATE")
        try:
            self._read(database)
            self._take_over(database)
            before = len(self._chain), self._last, self._row
            yield lambda event: self._append(database, event)
            count, self._last, self._row = before
            self._keys.difference_update(event.key for event in self._chain[count:])
            del self._chain[count:]
            self._read(database)  # what is now in the file, not what was meant to be
            database.execute("COMMIT")
            self._note_written()
        except BaseException:
            self._forget()
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError):  # mistakes of memlens itself
            raise
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        except UnicodeDecodeError as error:  # SQLite quotes damaged bytes in a message, which Python cannot read
            raise damaged(self.path, "its schema is not as it was written") from error

    def _open(self, make: bool) -> sqlite3.Connection | None:
        if self._database is None and (make or self.path.is_file()):
            self._database = connect(self.path)
            self._number = _number_of(self.path)
            self._is_ready = False
        return self._database

    def _forget(self) -> None:
        self._chain: list[Event] = []
        self._keys: set[str] = set()
        self._last, self._row = FIRST, 0
        self._stamp: FileStamp | None = None  # of the file from which all of the chain was read and verified
        self._are_pages_whole = False
        self._unhashed: list[Event] = []
        self._old_ids = dict.fromkeys(OLD_TABLES.values(), 0)
        self._is_hashed = False
        self._is_ready = False

    def _make_ready(self, database: sqlite3.Connection) -> None:
        """Before the first write: no damage that writing would make worse, and no event in any other file than this."""
        known = _VERIFIED.find(self.path, self._now())
        if known is None or not known.are_pages_whole:
            self._check_pages(database)
        self._are_pages_whole = True
        database.execute("PRAGMA page_size = 4096")
        try:
            database.execute("PRAGMA journal_mode = DELETE")  # older files keep their last events in a file beside
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:  # somebody is reading: another time
                raise
        database.execute("PRAGMA synchronous = EXTRA")
        self._is_ready = True

    def _check_pages(self, database: sqlite3.Connection) -> None:
        (answer,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        if answer != "ok":
            raise damaged(self.path, str(answer).splitlines()[-1][:100])

    def _read(self, database: sqlite3.Connection) -> None:
        """Bring what is in memory up to the file, and verify all that is new."""
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        self._is_hashed = _HEAD in tables
        self._old_ids = dict.fromkeys(OLD_TABLES.values(), 0)
        if self._is_hashed:
            heads = database.execute("SELECT events, hash, labels, verdicts FROM head").fetchall()
            if len(heads) != 1 or _HISTORY not in tables:
                raise damaged(self.path, "the note of its last event is not there")
            self._old_ids = dict(zip(OLD_TABLES.values(), heads[0][2:], strict=True))
            self._read_chain(database, *heads[0][:2])
        elif any(name == "hash" for _, name, *_ in database.execute("PRAGMA table_info(history)")):
            raise damaged(self.path, "the note of its last event is not there")
        self._unhashed = []
        for table in UNHASHED:
            if table in tables and not (table == _HISTORY and self._is_hashed):
                self._read_unhashed(database, table)

    def _read_chain(self, database: sqlite3.Connection, count: Any, last: Any) -> None:
        self._recall(count, last)
        if (len(self._chain), self._last) == (count, last):
            return
        query = f"SELECT rowid, {', '.join(COLUMNS)} FROM history WHERE rowid > ? ORDER BY rowid"
        for row, place, *fields, previous, hash in database.execute(query, (self._row,)):
            event, expected = Event(*fields), len(self._chain) + 1
            right = (place, previous) == (expected, self._last) and all(isinstance(field, str) for field in fields)
            if not right or hash != event.hash_at(place, previous):
                raise damaged(self.path, f"event {expected} is not as it was written")
            self._chain.append(event)
            self._keys.add(event.key)
            self._last, self._row = hash, row
        if (len(self._chain), self._last) != (count, last):
            raise damaged(self.path, f"it ends with event {len(self._chain)}, and should with {count}")

    def _now(self) -> FileStamp | None:
        """The stamp of the file; None where it does not change with every commit."""
        return None if self.path.with_name(f"{self.path.name}-wal").exists() else file_stamp(self.path)

    def _recall(self, count: Any, last: Any) -> None:
        """Within a transaction, before the chain is read: take what was verified of this very file."""
        stamp = self._now()
        if stamp is None or stamp == self._stamp:
            return
        known = _VERIFIED.find(self.path, stamp) if self._trusts_memory else None
        if known is not None and (len(known.chain), known.last) == (count, last):
            self._chain, self._keys = known.chain.copy(), known.keys.copy()
            self._last, self._row, self._stamp = known.last, known.row, stamp
        else:  # what others wrote behind what is here is verified, but what is here is not read again
            self._stamp = None if self._chain else stamp

    def _note_read(self) -> None:
        """Remember what was read, unless the file is so new that a write after this need not change its times."""
        stamp = self._stamp
        if stamp is None or _VERIFIED.find(self.path, stamp) or time.time_ns() - max(stamp[1:3]) <= _CLOCK_TICK:
            return
        self._note(stamp)

    def _note_written(self) -> None:
        """Remember what was written, with a time of the file that no later write can give it."""
        if self._stamp is None:
            return
        exact = time.time_ns()
        with suppress(OSError):  # not everybody who may write to a file may set its times
            os.utime(self.path, ns=(exact, exact))
            stamp = self._now()
            if stamp is not None and stamp[1] == exact and stamp[-1] == self._number:
                self._stamp = stamp
                self._note(stamp)

    def _note(self, stamp: FileStamp) -> None:
        chain, keys = self._chain.copy(), self._keys.copy()
        _VERIFIED.note(self.path, _VerifiedEvents(stamp, chain, keys, self._last, self._row, self._are_pages_whole))

    def _read_unhashed(self, database: sqlite3.Connection, table: str) -> None:
        known = self._keys | {event.key for event in self._unhashed}
        query = f"SELECT id, {UNHASHED[table]} FROM {table} WHERE id > ? ORDER BY id"
        for number, *fields in database.execute(query, (self._old_ids.get(table, 0),)):
            event = Event(*fields)
            if not event.is_readable():
                raise damaged(self.path, f"event {number} of the table {table} is none")
            if event.key not in known:
                self._unhashed.append(event)
            if table in self._old_ids:
                self._old_ids[table] = number

    def _take_over(self, database: sqlite3.Connection) -> None:
        """Hash what an older memlens wrote."""
        if not self._is_hashed:
            database.execute("DROP TABLE IF EXISTS history")  # its events are in memory, and below they are written
            for statement in _SCHEMA:
                database.execute(statement)
        elif not self._unhashed:
            return
        for event in self._unhashed:
            self._append(database, event)
        database.execute("UPDATE head SET labels = ?, verdicts = ?", list(self._old_ids.values()))
        self._unhashed, self._is_hashed = [], True

    def _append(self, database: sqlite3.Connection, event: Event) -> None:
        """Add an event, unless it is there already."""
        if event.key in self._keys:
            return
        place = len(self._chain) + 1
        digest = event.hash_at(place, self._last)
        marks = ", ".join("?" * len(COLUMNS))
        row = (place, *event.fields, self._last, digest)
        self._row = database.execute(f"INSERT INTO history ({', '.join(COLUMNS)}) VALUES ({marks})", row).lastrowid or 0
        database.execute("UPDATE head SET events = ?, hash = ?", (place, digest))
        self._chain.append(event)
        self._keys.add(event.key)
        self._last = digest


def connect(path: Path) -> sqlite3.Connection:
    """The database of a file, which is made if it is not there. Bytes that are no text are kept as they are."""
    mode = "rwc"
    # Of an older memlens: SQLite would make a file beside it. Where one can write, the file itself is not opened here:
    # closing it again would undo the locks that SQLite holds for other threads.
    if path.is_file() and not os.access(path.parent, os.W_OK) and _versions(path) == b"\2\2":
        mode = "ro&immutable=1"
    address = f"{path.absolute().as_uri()}?mode={mode}"
    database = sqlite3.connect(address, uri=True, timeout=_WAIT_SECONDS, isolation_level=None)
    database.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    return database


def _number_of(path: Path) -> int | None:
    stamp = file_stamp(path)
    return None if stamp is None else stamp[-1]


def _versions(path: Path) -> bytes:
    """The two bytes of the header that say who may write and who may read; SQLite takes unknown ones for read-only."""
    try:
        with path.open("rb") as file:
            return file.read(20)[18:]
    except OSError as error:
        raise FilesError(f"cannot open {path}: {error.strerror or error}; look at its permissions") from error
