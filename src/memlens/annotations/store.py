"""People's labels and verdicts: one append-only table of events in annotations.sqlite.

Events are never changed or deleted; what holds now is read from them. A write that returns is on disk, and several
processes may write at once.

    task      kind     subject  content
    labels    sample   ""       {"memories": ["L0N3"], "top": 25, "seed": 0}: the memories to label
    labels    label    memory   {"patterns": [...]}: one person's patterns of one memory; none is an answer, too
    labels    finish   ""       {}: the person sees the others' labels from now on and may change nothing
    verdicts  verdict  example  {"verdict": "related", ...}: one person's judgement of a change of the last layer
    either    undo     as above {"undoes": key}: takes the person's last answer on the subject back

The last answer that was not taken back counts. Until somebody has finished, others' labels do not exist for them.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.index.layout import ANNOTATIONS
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.pattern.words import GROUNDED, KINDS

LABELS, VERDICTS = "labels", "verdicts"  # tasks
EVENT_KINDS = {LABELS: ("sample", "label", "undo", "finish"), VERDICTS: ("verdict", "undo")}
CHOICES = ("related", "distant")  # verdicts
# A task's table in files of memlens before both had one. Experiments note the history under this name still, so that
# tables made then count as up to date.
OLD_TABLES = {LABELS: "events", VERDICTS: "verdicts"}
_OLD_SUBJECTS = {LABELS: "coalesce('L' || layer || 'N' || memory, '')", VERDICTS: "example"}
_WAIT_SECONDS = 60.0
_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS history (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        key TEXT NOT NULL UNIQUE,
        time TEXT NOT NULL,
        task TEXT NOT NULL CHECK (task IN ('labels', 'verdicts')),
        kind TEXT NOT NULL CHECK (kind IN ('sample', 'label', 'verdict', 'undo', 'finish')),
        annotator TEXT NOT NULL,
        subject TEXT NOT NULL,
        content TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS history_by_person ON history (task, annotator, subject)",
    *(
        f"CREATE TRIGGER IF NOT EXISTS never_{change}_history BEFORE {change} ON history "
        "BEGIN SELECT RAISE(ABORT, 'the history is append-only'); END"
        for change in ("update", "delete")
    ),
)
_LATEST_SAMPLE = "SELECT content FROM history WHERE kind = 'sample' AND id < ? ORDER BY id DESC LIMIT 1"
_END = (1 << 63) - 1  # above every id
_AFTER_FINISHING = """
SELECT annotator FROM history JOIN (SELECT annotator, min(id) AS finish FROM history WHERE kind = 'finish' GROUP BY 1)
USING (annotator) WHERE task = 'labels' AND kind IN ('label', 'undo') AND id > finish LIMIT 1
"""

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class LabelledPattern:
    """A pattern that a person sees: its description, its class, and the prefixes that have it (trigger ranks)."""

    description: str
    kind: str
    prefixes: tuple[int, ...]

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> LabelledPattern:
        ranks = tuple(require_type(rank, int) for rank in require_type(content["prefixes"], list))
        return cls(require_type(content["description"], str), require_type(content["kind"], str), ranks)


@dataclass(frozen=True)
class Label:
    """One person's patterns of one memory."""

    task: ClassVar[str] = LABELS
    kind: ClassVar[str] = "label"
    annotator: str
    memory: MemoryId
    patterns: tuple[LabelledPattern, ...]

    @property
    def subject(self) -> str:
        return str(self.memory)

    @property
    def content(self) -> dict[str, Any]:
        return {"patterns": [asdict(pattern) for pattern in self.patterns]}

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> Label:
        """A KeyError or TypeError where the content is not a label's."""
        patterns = require_type(event["content"]["patterns"], list)
        return cls(event["annotator"], MemoryId.parse(event["subject"]), tuple(map(LabelledPattern.read, patterns)))


@dataclass(frozen=True)
class LastLayerChange:
    """A prediction that the last layer turned into another; its name is the same in every sample that holds it."""

    layer: int
    text: str  # the prefix
    residual: int  # token before
    residual_text: str
    output: int  # token after
    output_text: str

    @property
    def name(self) -> str:
        identity = json.dumps([self.layer, self.text, self.residual, self.output])
        return hashlib.sha256(identity.encode()).hexdigest()[:12]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> LastLayerChange:
        """From a row with these columns; a KeyError, TypeError, ValueError or OverflowError where one is unusable."""
        return cls(
            int(row["layer"]),
            str(row["text"] or ""),
            int(row["residual"]),
            str(row["residual_text"]),
            int(row["output"]),
            str(row["output_text"]),
        )


@dataclass(frozen=True)
class Verdict:
    """One person's judgement of one change."""

    task: ClassVar[str] = VERDICTS
    kind: ClassVar[str] = "verdict"
    annotator: str
    example: LastLayerChange
    verdict: str

    @property
    def subject(self) -> str:
        return self.example.name

    @property
    def content(self) -> dict[str, Any]:
        return {"verdict": self.verdict, **asdict(self.example)}

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> Verdict:
        """A KeyError, TypeError, ValueError or OverflowError where the content is not a verdict's on the subject."""
        change = LastLayerChange.of(event["content"])
        if change.name != event["subject"]:
            raise ValueError("the prefix and words are not those of the subject")
        return cls(event["annotator"], change, str(event["content"]["verdict"]))


@dataclass(frozen=True)
class Sample:
    """The memories of a study, and how many triggers of each are shown."""

    memories: tuple[MemoryId, ...]
    top: int
    seed: int

    @property
    def content(self) -> dict[str, Any]:
        return {"memories": [str(memory) for memory in self.memories], "top": self.top, "seed": self.seed}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Sample:
        """From an event; a KeyError or TypeError where the content is not a sample's."""
        memories = tuple(MemoryId.parse(require_type(name, str)) for name in require_type(content["memories"], list))
        return cls(memories, require_type(content["top"], int), require_type(content["seed"], int))


ANSWERS: dict[str, type[Label] | type[Verdict]] = {LABELS: Label, VERDICTS: Verdict}


class Annotations:
    """The history of one index. Use as a context manager, or close()."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.path = index.folder / ANNOTATIONS
        self._triggers: dict[MemoryId, int] = {}  # an index with annotations keeps its triggers
        with _readable_errors(self.path):
            self._database = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            with self._writing() as database:  # two processes may make the file at the same moment
                for statement in _SCHEMA:
                    database.execute(statement)
                _copy_old_tables(database)

    def __enter__(self) -> Annotations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def set_sample(self, sample: Sample) -> None:
        """Begin a study; refused once somebody has labelled, since their work would not fit any more."""
        for memory in sample.memories:
            self.index.check(memory)
        with self._writing() as database:
            if database.execute("SELECT 1 FROM history WHERE kind = 'label' LIMIT 1").fetchone():
                raise SettingError(f"{self.path} holds labels of its sample; move the file away to begin another study")
            _append(database, LABELS, "sample", "", content=sample.content)

    def save(self, *answers: Label | Verdict) -> None:
        """All of them or none; each takes the place of what its person said on the subject before."""
        for answer in answers:
            check_annotator(answer.annotator)
            self.check(answer)
        with self._writing() as database:
            for answer in answers:
                if answer.task == LABELS:
                    _refuse_finished(database, answer.annotator)
                _append(database, answer.task, answer.kind, answer.annotator, answer.subject, answer.content)

    def undo(self, task: str, annotator: str, subject: str) -> Label | Verdict | None:
        """Take the last answer back; the one that counts now comes back, None for none."""
        with self._writing() as database:
            if task == LABELS:
                subject = str(self.index.check(subject))
                _refuse_finished(database, annotator)
            answers = self._standing(task, annotator, subject).get(subject, [])
            if not answers:
                what = f"label of {subject}" if task == LABELS else f"verdict on example {subject}"
                raise SettingError(f"{annotator} has no {what} to take back")
            _append(database, task, "undo", annotator, subject, {"undoes": answers[-1]["key"]})
            return ANSWERS[task].read(answers[-2]) if len(answers) > 1 else None

    def finish(self, annotator: str) -> None:
        """Close one person's labels: every memory of the sample has one."""
        check_annotator(annotator)
        with self._writing() as database:
            _refuse_finished(database, annotator)
            done = {label.memory for label in self.labels_of(annotator)}
            sample = self.sample()
            missing = [str(memory) for memory in (sample.memories if sample else ()) if memory not in done]
            if missing or not done:
                what = f"{len(missing)} memories of the sample, {missing[0]} first" if missing else "every memory"
                raise SettingError(f"{annotator} has still to label {what}; a memory without a pattern is saved empty")
            _append(database, LABELS, "finish", annotator)

    def append_events(self, task: str, events: Sequence[Mapping[str, Any]]) -> int:
        """Take over events of another copy of the history; the number of those that were not here yet."""
        with self._writing() as database:
            before = database.total_changes
            for event in events:
                _insert(database, "INSERT OR IGNORE", {**event, "task": task})
            added = database.total_changes - before
            _check_rules(database)
            return added

    def history(self, task: str) -> list[dict[str, Any]]:
        """Every event of a task in order, as export writes it and append_events takes it."""
        return self._events("task = ?", task)

    def sample(self) -> Sample | None:
        """The memories to label; None before `annotate sample`."""
        row = self._database.execute(_LATEST_SAMPLE, (_END,)).fetchone()
        return Sample.read(json.loads(row[0])) if row else None

    def annotators(self, task: str = LABELS, finished: bool | None = None) -> list[str]:
        """Everybody who has ever answered; of labels only those who have (True) or have not (False) finished."""
        query = "SELECT DISTINCT annotator FROM history WHERE task = ? AND kind = ?"
        everyone = {name for (name,) in self._database.execute(query, (task, ANSWERS[task].kind))}
        if finished is None:
            return sorted(everyone)
        done = {name for (name,) in self._database.execute(query, (task, "finish"))}
        return sorted(everyone & done if finished else everyone - done)

    def labels(self, viewer: str | None = None) -> list[Label]:
        """What holds now. A viewer who has not finished sees only their own; without one, those of the finished."""
        finished = self.annotators(finished=True)
        if viewer is not None and viewer not in finished:
            return self.labels_of(viewer)
        return [label for annotator in finished for label in self.labels_of(annotator)]

    def labels_of(self, annotator: str) -> list[Label]:
        """One person's labels, for that person or for safe keeping; whoever looks at people's work uses labels()."""
        labels = (Label.read(events[-1]) for events in self._standing(LABELS, annotator).values())
        return sorted(labels, key=lambda label: label.memory)

    def verdicts(self, annotator: str | None = None) -> list[Verdict]:
        """What holds now, of everybody or of one person: by person, then by the example's name."""
        people = self.annotators(VERDICTS) if annotator is None else [annotator]
        standing = [sorted(self._standing(VERDICTS, person).items()) for person in people]
        return [Verdict.read(events[-1]) for by_name in standing for _, events in by_name]

    def check(self, answer: Label | Verdict) -> None:
        """Refuse a verdict that is none, patterns that are none, or a memory that is not there."""
        if isinstance(answer, Verdict):
            if answer.verdict not in CHOICES:
                raise SettingError(f"'{answer.verdict}' is not a verdict; choose {' or '.join(CHOICES)}")
            return
        memory = self.index.check(answer.memory)
        sample, shown = self.sample(), self._count_triggers(memory)
        for pattern in answer.patterns:
            _check_pattern(memory, pattern, min(shown, sample.top) if sample else shown)

    def _events(self, where: str, *parameters: str) -> list[dict[str, Any]]:
        names = ("key", "time", "kind", "annotator", "subject", "content")
        rows = self._database.execute(f"SELECT {', '.join(names)} FROM history WHERE {where} ORDER BY id", parameters)
        return [{**dict(zip(names, row, strict=True)), "content": json.loads(row[-1])} for row in rows]

    def _standing(self, task: str, annotator: str, subject: str | None = None) -> dict[str, list[dict[str, Any]]]:
        """By subject, one person's answers that were not taken back, in order."""
        where, parameters = "task = ? AND annotator = ? AND subject <> ''", [task, annotator]
        if subject is not None:
            where, parameters = where + " AND subject = ?", [*parameters, subject]
        events = self._events(where, *parameters)
        undone = {event["content"]["undoes"] for event in events if event["kind"] == "undo"}
        found: dict[str, list[dict[str, Any]]] = {}
        for event in events:
            if event["kind"] != "undo" and event["key"] not in undone:
                found.setdefault(event["subject"], []).append(event)
        return found

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

    def _count_triggers(self, memory: MemoryId) -> int:
        if memory not in self._triggers:
            query = "SELECT count(*) AS n FROM {triggers} WHERE layer = $1 AND memory = $2 AND \"end\" = 'top'"
            self._triggers[memory] = self.index.sql(query, [memory.layer, memory.memory])[0]["n"]
        return self._triggers[memory]


def has_annotations(index: Index) -> bool:
    return (index.folder / ANNOTATIONS).is_file()


def history_mark(index: Index, task: str) -> str | None:
    """A checksum that changes with every event of a task; None where there is none yet. Writes nothing."""
    path = index.folder / ANNOTATIONS
    if not path.is_file():
        return None
    address = path.absolute().as_uri() + "?mode=ro"
    keys: dict[str, None] = {}
    with _readable_errors(path), closing(sqlite3.connect(address, uri=True, timeout=_WAIT_SECONDS)) as database:
        for table, where in (("history", f"WHERE task = '{task}'"), (OLD_TABLES[task], "")):
            if _has_table(database, table):
                keys |= dict.fromkeys(
                    key for (key,) in database.execute(f"SELECT key FROM {table} {where} ORDER BY id")
                )
    return hashlib.sha256("\n".join(keys).encode()).hexdigest() if keys else None


@contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise IndexFolderError(f"cannot open {path}: {error}; restore it from a copy or move it away") from error


def check_annotator(annotator: str) -> None:
    if not annotator.strip() or not annotator.isprintable():
        raise UnknownName(f"{annotator!r} cannot be an annotator's name; use letters, digits or signs")


def require_type(value: Any, kind: type[_Value]) -> _Value:
    if type(value) is not kind:  # True is an int, but no rank
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _check_pattern(memory: MemoryId, pattern: LabelledPattern, shown: int) -> None:
    if not pattern.description.strip():
        raise SettingError(f"a pattern of {memory} has no description; say in a few words what recurs")
    if any("\ud800" <= character <= "\udfff" for character in pattern.description):
        raise SettingError(f"the description {pattern.description!a} of {memory} is not UTF-8 text")
    if pattern.kind not in KINDS:
        raise SettingError(f"'{pattern.kind}' is not a class of pattern; choose {' or '.join(KINDS)}")
    if len(set(pattern.prefixes)) < GROUNDED:
        raise SettingError(f'"{pattern.description}" of {memory} has fewer than {GROUNDED} prefixes; tick more')
    if not all(0 <= rank < shown for rank in pattern.prefixes):
        raise SettingError(f'"{pattern.description}": {memory} has only the trigger ranks 0 to {shown - 1}')


def _refuse_finished(database: sqlite3.Connection, annotator: str) -> None:
    if database.execute("SELECT 1 FROM history WHERE kind = 'finish' AND annotator = ?", (annotator,)).fetchone():
        raise SettingError(f"{annotator} has finished and may see the others' labels; nothing can be changed now")


def _check_rules(database: sqlite3.Connection) -> None:
    """Raise where events of another copy break what set_sample and finish promise."""
    (first,) = database.execute("SELECT min(id) FROM history WHERE kind = 'label'").fetchone()
    samples = [database.execute(_LATEST_SAMPLE, (place,)).fetchone() for place in (first or _END, _END)]
    if samples[0] != samples[1]:
        raise SettingError("the events are of another sample than the labels here; nothing of them was taken over")
    late = database.execute(_AFTER_FINISHING).fetchone()
    if late:
        raise SettingError(f"{late[0]} has finished, and the events change what they said; nothing was taken over")


def _append(
    database: sqlite3.Connection, task: str, kind: str, annotator: str, subject: str = "", content: Any = None
) -> None:
    event = {"task": task, "kind": kind, "annotator": annotator, "subject": subject, "content": content or {}}
    event |= {"key": uuid4().hex, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
    _insert(database, "INSERT", event)


def _insert(database: sqlite3.Connection, verb: str, event: Mapping[str, Any]) -> None:
    row = {**event, "content": json.dumps(event["content"], sort_keys=True)}
    marks = ", ".join("?" * len(row))
    database.execute(f"{verb} INTO history ({', '.join(row)}) VALUES ({marks})", list(row.values()))


def _copy_old_tables(database: sqlite3.Connection) -> None:
    """Take over what the two tables of an older memlens hold; they stay as they are, and one may still write there."""
    for task, table in OLD_TABLES.items():
        if _has_table(database, table):
            database.execute(
                "INSERT OR IGNORE INTO history (key, time, task, kind, annotator, subject, content) "
                f"SELECT key, time, '{task}', kind, annotator, {_OLD_SUBJECTS[task]}, content FROM {table} ORDER BY id"
            )


def _has_table(database: sqlite3.Connection, name: str) -> bool:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return database.execute(query, (name,)).fetchone() is not None
