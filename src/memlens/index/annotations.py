"""People's labels: annotations.sqlite, the one file of an index that a person's work goes into.

Nothing in it is ever changed or deleted: every save, undo and finish is an event at the end of a history, and what
holds now is read from the history. A call that returns has its event on disk; several processes may write at once.

    sample    which memories are to be labelled, and how many triggers of each are shown
    label     one person's patterns of one memory (none is an answer, too); the last one counts
    undo      takes that person's last label of a memory back; the one before counts again
    finish    from here on the person sees the others' labels, and may change nothing

Until somebody has finished, the labels of others do not exist for them. Knows events; agreement is computed elsewhere.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.index.layout import ANNOTATIONS
from memlens.index.reader import Index
from memlens.memory import MemoryId

KINDS = ("shallow", "semantic")
GROUNDED = 3  # prefixes that a pattern needs, as in the paper
_MOST_SHOWN = 1 << 30  # without a sample every trigger may be ticked
_WAIT_SECONDS = 60.0

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
"""


@dataclass(frozen=True)
class LabelledPattern:
    """A pattern that a person sees: what it is, of which class, and in which prefixes (trigger ranks)."""

    description: str
    kind: str
    prefixes: tuple[int, ...]


@dataclass(frozen=True)
class Label:
    """What one person says about one memory."""

    annotator: str
    memory: MemoryId
    patterns: tuple[LabelledPattern, ...]


@dataclass(frozen=True)
class Sample:
    """Which memories a study is about."""

    memories: tuple[MemoryId, ...]
    top: int
    seed: int


class Annotations:
    """The history of one index. Use as a context manager, or close()."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.path = index.folder / ANNOTATIONS
        self._triggers: dict[MemoryId, int] = {}  # an index with annotations keeps its triggers
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

    def __enter__(self) -> Annotations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    # What is written

    def set_sample(self, sample: Sample) -> None:
        """Begin a study; refused once somebody has labelled, since their work would not fit any more."""
        memories = [str(self.index.check(memory)) for memory in sample.memories]
        content = {"memories": memories, "top": sample.top, "seed": sample.seed}
        with self._writing() as database:
            if database.execute("SELECT 1 FROM events WHERE kind = 'label' LIMIT 1").fetchone():
                raise SettingError(f"{self.path} holds labels of its sample; move the file away to begin another study")
            self._append(database, "sample", "", None, content)

    def save(self, annotator: str, memory: str | MemoryId, patterns: Sequence[LabelledPattern]) -> None:
        """One person's patterns of one memory; takes the place of what they said before."""
        self.save_all([(annotator, self.index.check(memory), patterns)])

    def save_all(self, labels: Sequence[tuple[str, MemoryId, Sequence[LabelledPattern]]]) -> int:
        """Several labels, all or none; how many there were."""
        for annotator, memory, patterns in labels:
            _check_annotator(annotator)
            self.check(memory, patterns)
        with self._writing() as database:
            for annotator, memory, patterns in labels:
                self._refuse_finished(database, annotator)
                content = {"patterns": [asdict(pattern) for pattern in patterns]}
                self._append(database, "label", annotator, memory, content)
        return len(labels)

    def undo(self, annotator: str, memory: str | MemoryId) -> Label | None:
        """Take the last label back; the one that counts now comes back, None for none."""
        name = self.index.check(memory)
        with self._writing() as database:
            self._refuse_finished(database, annotator)
            standing = _standing(self._events(annotator, name))
            if not standing:
                raise SettingError(f"{annotator} has no label of {name} to take back")
            self._append(database, "undo", annotator, name, {"undoes": standing[-1]["key"]})
            return _label(standing[-2]) if len(standing) > 1 else None

    def finish(self, annotator: str) -> None:
        """Say that all memories of the sample are done."""
        _check_annotator(annotator)
        with self._writing() as database:
            self._refuse_finished(database, annotator)
            done = {label.memory for label in self.labels_of(annotator)}
            sample = self.sample()
            missing = [str(memory) for memory in (sample.memories if sample else ()) if memory not in done]
            if missing or not done:
                what = f"{len(missing)} memories of the sample, {missing[0]} first" if missing else "every memory"
                raise SettingError(f"{annotator} has still to label {what}; a memory without a pattern is saved empty")
            self._append(database, "finish", annotator, None, {})

    def append_events(self, events: Sequence[dict[str, Any]]) -> int:
        """Take over events of another copy of the history, those that are here already left out; how many were new."""
        with self._writing() as database:
            before = database.total_changes
            for event in events:
                columns = (event["key"], event["time"], event["kind"], event["annotator"], event["layer"],
                           event["memory"], json.dumps(event["content"], sort_keys=True))  # fmt: skip
                database.execute(
                    "INSERT OR IGNORE INTO events (key, time, kind, annotator, layer, memory, content) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    columns,
                )
            return database.total_changes - before

    # What is read

    def sample(self) -> Sample | None:
        """The memories to label; None before `annotate sample`."""
        rows = self._read("SELECT content FROM events WHERE kind = 'sample' ORDER BY id DESC LIMIT 1")
        if not rows:
            return None
        content = json.loads(rows[0]["content"])
        return Sample(tuple(map(MemoryId.parse, content["memories"])), content["top"], content["seed"])

    def annotators(self, finished: bool | None = None) -> list[str]:
        """Who has labelled anything; only those who have (True) or have not (False) finished."""
        everyone = {row["annotator"] for row in self._read("SELECT annotator FROM events WHERE kind = 'label'")}
        done = {row["annotator"] for row in self._read("SELECT annotator FROM events WHERE kind = 'finish'")}
        chosen = everyone if finished is None else everyone & done if finished else everyone - done
        return sorted(chosen)

    def labels(self, viewer: str | None = None) -> list[Label]:
        """What holds now. A viewer who has not finished sees only their own; without one, those of the finished."""
        finished = self.annotators(finished=True)
        if viewer is not None and viewer not in finished:
            return self.labels_of(viewer)
        return [label for annotator in finished for label in self.labels_of(annotator)]

    def history(self) -> list[dict[str, Any]]:
        """Every event in order, content decoded: what export writes and append_events takes."""
        rows = self._read("SELECT * FROM events ORDER BY id")
        return [{**dict(row), "content": json.loads(row["content"])} for row in rows]

    # Parts

    def labels_of(self, annotator: str) -> list[Label]:
        """One person's labels, for that person or for safe keeping; whoever looks at people's work uses labels()."""
        by_memory: dict[MemoryId, list[dict[str, Any]]] = {}
        for event in self._events(annotator):
            by_memory.setdefault(MemoryId(event["layer"], event["memory"]), []).append(event)
        standing = {memory: _standing(events) for memory, events in sorted(by_memory.items())}
        return [_label(events[-1]) for events in standing.values() if events]

    def _events(self, annotator: str, memory: MemoryId | None = None) -> list[dict[str, Any]]:
        """Labels and undos of one person, in order."""
        query = "SELECT * FROM events WHERE annotator = ? AND kind IN ('label', 'undo')"
        parameters: tuple[Any, ...] = (annotator,)
        if memory is not None:
            query, parameters = query + " AND layer = ? AND memory = ?", (annotator, memory.layer, memory.memory)
        rows = self._read(query + " ORDER BY id", parameters)
        return [{**dict(row), "content": json.loads(row["content"])} for row in rows]

    def check(self, memory: MemoryId, patterns: Sequence[LabelledPattern]) -> None:
        """Refuse patterns that are none, or a memory that is not there."""
        self.index.check(memory)
        sample = self.sample()
        shown = min(self._count_triggers(memory), sample.top if sample else _MOST_SHOWN)
        for pattern in patterns:
            if not pattern.description.strip():
                raise SettingError(f"a pattern of {memory} has no description; say in a few words what recurs")
            if pattern.kind not in KINDS:
                raise SettingError(f"'{pattern.kind}' is not a class of pattern; choose {' or '.join(KINDS)}")
            if len(set(pattern.prefixes)) < GROUNDED:
                raise SettingError(f'"{pattern.description}" of {memory} has fewer than {GROUNDED} prefixes; tick more')
            if not all(0 <= rank < shown for rank in pattern.prefixes):
                raise SettingError(f'"{pattern.description}": {memory} has only the trigger ranks 0 to {shown - 1}')

    def _count_triggers(self, memory: MemoryId) -> int:
        if memory not in self._triggers:
            query = "SELECT count(*) AS n FROM {triggers} WHERE layer = $1 AND memory = $2 AND \"end\" = 'top'"
            self._triggers[memory] = self.index.sql(query, [memory.layer, memory.memory])[0]["n"]
        return self._triggers[memory]

    def _refuse_finished(self, database: sqlite3.Connection, annotator: str) -> None:
        query = "SELECT 1 FROM events WHERE kind = 'finish' AND annotator = ?"
        if database.execute(query, (annotator,)).fetchone():
            raise SettingError(f"{annotator} has finished and may see the others' labels; nothing can be changed now")

    def _append(
        self, database: sqlite3.Connection, kind: str, annotator: str, memory: MemoryId | None, content: dict[str, Any]
    ) -> None:
        place = (memory.layer, memory.memory) if memory else (None, None)
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        row = (uuid4().hex, time, kind, annotator, *place, json.dumps(content, sort_keys=True))
        columns = "(key, time, kind, annotator, layer, memory, content)"
        database.execute(f"INSERT INTO events {columns} VALUES (?, ?, ?, ?, ?, ?, ?)", row)

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

    def _read(self, query: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        cursor = self._database.cursor()
        cursor.row_factory = sqlite3.Row
        return cursor.execute(query, tuple(parameters)).fetchall()


def has_annotations(index: Index) -> bool:
    return (index.folder / ANNOTATIONS).is_file()


def _statements() -> Iterator[str]:
    """The schema statement by statement; executescript would end the transaction."""
    statement = ""
    for line in _SCHEMA.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _standing(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Labels that were not taken back."""
    undone = {event["content"]["undoes"] for event in events if event["kind"] == "undo"}
    return [event for event in events if event["kind"] == "label" and event["key"] not in undone]


def _label(event: dict[str, Any]) -> Label:
    patterns = tuple(
        LabelledPattern(pattern["description"], pattern["kind"], tuple(pattern["prefixes"]))
        for pattern in event["content"]["patterns"]
    )
    return Label(event["annotator"], MemoryId(event["layer"], event["memory"]), patterns)


def _check_annotator(annotator: str) -> None:
    if not annotator.strip() or not annotator.isprintable():
        raise UnknownName(f"'{annotator}' cannot be an annotator's name; use letters, digits or signs")
