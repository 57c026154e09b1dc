"""The one file of an index that a person's work goes into: annotations.sqlite, events that are only ever added.

Nothing in it is ever changed or deleted: whatever a person says or takes back is an event at the end of a history, and
what holds now is read from the history. A write that returns is on disk; several processes may write at once.

    events     labels of patterns, see annotations
    verdicts   verdicts on changes of the last layer, see verdicts

Knows events, not what they mean.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import uuid4

from memlens.errors import IndexFolderError, UnknownName
from memlens.index.layout import ANNOTATIONS
from memlens.index.reader import Index

EVENTS, VERDICTS = "events", "verdicts"  # tables
_WAIT_SECONDS = 60.0

_Own = TypeVar("_Own", bound="History")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    time TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('sample', 'label', 'undo', 'finish')),
    annotator TEXT NOT NULL,
    layer INTEGER,
    memory INTEGER,
    content TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_by_person ON events (annotator, layer, memory);
CREATE TRIGGER IF NOT EXISTS never_change BEFORE UPDATE ON events
BEGIN SELECT RAISE(ABORT, 'the history is append-only'); END;
CREATE TRIGGER IF NOT EXISTS never_delete BEFORE DELETE ON events
BEGIN SELECT RAISE(ABORT, 'the history is append-only'); END;
CREATE TABLE IF NOT EXISTS verdicts (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    time TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('verdict', 'undo')),
    annotator TEXT NOT NULL,
    example TEXT NOT NULL,
    content TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS verdicts_by_person ON verdicts (annotator, example);
CREATE TRIGGER IF NOT EXISTS never_change_verdicts BEFORE UPDATE ON verdicts
BEGIN SELECT RAISE(ABORT, 'the history is append-only'); END;
CREATE TRIGGER IF NOT EXISTS never_delete_verdicts BEFORE DELETE ON verdicts
BEGIN SELECT RAISE(ABORT, 'the history is append-only'); END;
"""


class History:
    """The events of one table. Use as a context manager, or close()."""

    table = EVENTS

    def __init__(self, index: Index) -> None:
        self.index = index
        self.path = index.folder / ANNOTATIONS
        try:
            self._database = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            with self._writing() as database:  # two processes may make the file at the same moment
                for statement in _statements():
                    database.execute(statement)
        except sqlite3.Error as error:
            raise IndexFolderError(
                f"cannot open {self.path}: {error}; restore it from a copy or move it away"
            ) from error

    def __enter__(self: _Own) -> _Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def history(self) -> list[dict[str, Any]]:
        """Every event in order, content decoded: what export writes and append_events takes."""
        return self._decoded(f"SELECT * FROM {self.table} ORDER BY id")

    def append_events(self, events: Sequence[Mapping[str, Any]]) -> int:
        """Take over events of another copy of the history, those that are here already left out; how many were new."""
        with self._writing() as database:
            before = database.total_changes
            for event in events:
                columns = {name: value for name, value in event.items() if name != "id"}
                self._insert(database, "INSERT OR IGNORE", columns)
            new = database.total_changes - before
            self._check_history(database)
            return new

    def _check_history(self, database: sqlite3.Connection) -> None:
        """Refuse what events of another copy have made of the history, by raising: then none is taken over."""

    def _append(
        self, database: sqlite3.Connection, kind: str, annotator: str, place: Mapping[str, Any], content: Any
    ) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        own = {"key": uuid4().hex, "time": time, "kind": kind, "annotator": annotator, "content": content}
        self._insert(database, "INSERT", {**own, **place})

    def _insert(self, database: sqlite3.Connection, how: str, event: Mapping[str, Any]) -> None:
        """Only columns that the table has: an event of a file may carry more."""
        known = [row[1] for row in database.execute(f"PRAGMA table_info({self.table})")]
        columns = [name for name in known if name in event]
        row = [json.dumps(event[name], sort_keys=True) if name == "content" else event[name] for name in columns]
        marks = ", ".join("?" * len(columns))
        database.execute(f"{how} INTO {self.table} ({', '.join(columns)}) VALUES ({marks})", row)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: on disk when the block is left, gone without a trace if it raises."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise IndexFolderError(f"cannot write {self.path}: {error}; nothing of this change was kept") from error

    def _decoded(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        return [{**dict(row), "content": json.loads(row["content"])} for row in self._read(query, parameters)]

    def _read(self, query: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        cursor = self._database.cursor()
        cursor.row_factory = sqlite3.Row
        return cursor.execute(query, tuple(parameters)).fetchall()


def has_annotations(index: Index) -> bool:
    return (index.folder / ANNOTATIONS).is_file()


def history_mark(index: Index, table: str) -> str | None:
    """A checksum that changes with every event of a table; None where there is none yet. Writes nothing."""
    path = index.folder / ANNOTATIONS
    if not path.is_file():
        return None
    try:
        address = path.absolute().as_uri() + "?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=_WAIT_SECONDS)) as database:
            known = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
            if not database.execute(known, (table,)).fetchone():
                return None
            keys = [key for (key,) in database.execute(f"SELECT key FROM {table} ORDER BY id")]
    except sqlite3.Error as error:
        raise IndexFolderError(f"cannot open {path}: {error}; restore it from a copy or move it away") from error
    return hashlib.sha256("\n".join(keys).encode()).hexdigest() if keys else None


def standing(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was said and not taken back, in order."""
    undone = {event["content"]["undoes"] for event in events if event["kind"] == "undo"}
    return [event for event in events if event["kind"] != "undo" and event["key"] not in undone]


def check_annotator(annotator: str) -> None:
    if not annotator.strip() or not annotator.isprintable():
        raise UnknownName(f"{annotator!r} cannot be an annotator's name; use letters, digits or signs")


def _statements() -> Iterator[str]:
    """The schema statement by statement; executescript would end the transaction."""
    statement = ""
    for line in _SCHEMA.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
