"""Labels, verdicts and notes: the records, the events that store them, and the current state.

Annotations are events in the annotation log (log.py). Events are never changed or deleted. The current state is
computed by replaying them.

    task      kind     subject  content
    labels    sample   ""       {"memories": ["L0N3"], "top": 25, "seed": 0}: the memories to label
    labels    label    memory   {"patterns": [...]}: one annotator's patterns of one memory, possibly none
    labels    finish   ""       {}: the annotator can now see the labels of others but not change their own
    verdicts  verdict  example  {"verdict": "related", ...}: one annotator's verdict on a change by the last layer
    notes     note     memory   {"star": true, "name": "", "note": "", "lists": []}: replaces the memory's last note
    any       undo     as above {"undoes": key}: removes one of the annotator's own answers

For each subject, the last answer of an annotator counts, unless it was undone. Annotators who have not finished see
only their own labels. Events that this version cannot interpret stay in the log. They are reported but do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from uuid import uuid4

from memlens.annotations.log import AnnotationLog, Event
from memlens.errors import FilesError, IndexFolderError, SettingError, UnknownName
from memlens.index.format import ANNOTATIONS, Manifest
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.pattern.words import GROUNDED, KINDS

if TYPE_CHECKING:
    from memlens.index.check import Finding

_Value = TypeVar("_Value")
LABELS, VERDICTS, NOTES = "labels", "verdicts", "notes"  # tasks
EVENT_KINDS = {LABELS: ("sample", "label", "undo", "finish"), VERDICTS: ("verdict", "undo"), NOTES: ("note", "undo")}
CHOICES = ("related", "distant")  # verdicts
CONTENT_ERRORS = (KeyError, TypeError, ValueError, OverflowError, UnknownName)  # exceptions for unexpected content
_MAX_NAME = 200  # maximum length of an annotator's name


@dataclass(frozen=True)
class LabeledPattern:
    """A pattern described by an annotator, with its class and the ranks of the triggers that have it."""

    description: str
    kind: str
    prefixes: tuple[int, ...]

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> LabeledPattern:
        ranks = tuple(require_type(rank, int) for rank in require_type(content["prefixes"], list))
        return cls(require_type(content["description"], str), require_type(content["kind"], str), ranks)


@dataclass(frozen=True)
class Label:
    """One annotator's patterns for one memory."""

    task: ClassVar[str] = LABELS
    kind: ClassVar[str] = "label"
    annotator: str
    memory: MemoryId
    patterns: tuple[LabeledPattern, ...]

    @property
    def subject(self) -> str:
        return str(self.memory)

    @property
    def content(self) -> dict[str, Any]:
        return {"patterns": [{**asdict(pattern), "prefixes": list(pattern.prefixes)} for pattern in self.patterns]}

    @classmethod
    def read(cls, event: Event) -> Label:
        """Return the label in an event. Raises one of CONTENT_ERRORS if the event is not a label."""
        patterns = require_type(event.content["patterns"], list)
        return cls(event.annotator, MemoryId.parse(event.subject), tuple(map(LabeledPattern.read, patterns)))


@dataclass(frozen=True)
class LastLayerChange:
    """A prediction that the last layer changed. Its name is a hash of its content."""

    layer: int
    text: str  # text of the prefix
    residual: int  # token predicted before the last layer
    residual_text: str
    output: int  # token predicted after the last layer
    output_text: str

    @property
    def name(self) -> str:
        identity = json.dumps([self.layer, self.text, self.residual, self.output])
        return hashlib.sha256(identity.encode()).hexdigest()[:12]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> LastLayerChange:
        """Return the change that a table row describes.

        Raises one of CONTENT_ERRORS if a column is missing or invalid.
        """
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
    """One annotator's verdict on one change."""

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
    def read(cls, event: Event) -> Verdict:
        """Return the verdict of an event.

        Raises one of CONTENT_ERRORS if the event is not a verdict or its subject is wrong.
        """
        change = LastLayerChange.of(event.content)
        if change.name != event.subject:
            raise ValueError("the prefix and predictions belong to another example")
        return cls(event.annotator, change, str(event.content["verdict"]))


@dataclass(frozen=True)
class Note:
    """The star, name, note and lists of one memory. An empty note removes the memory from the collections."""

    task: ClassVar[str] = NOTES
    kind: ClassVar[str] = "note"
    annotator: str
    memory: MemoryId
    star: bool = False
    name: str = ""
    note: str = ""
    lists: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        return str(self.memory)

    @property
    def content(self) -> dict[str, Any]:
        return {"star": self.star, "name": self.name, "note": self.note, "lists": list(self.lists)}

    @property
    def is_empty(self) -> bool:
        return not (self.star or self.name or self.note or self.lists)

    @classmethod
    def read(cls, event: Event) -> Note:
        """Return the note in an event. Raises one of CONTENT_ERRORS if the event is not a note."""
        lists = tuple(require_type(name, str) for name in require_type(event.content["lists"], list))
        name, note = (require_type(event.content[part], str) for part in ("name", "note"))
        star = require_type(event.content["star"], bool)
        return cls(event.annotator, MemoryId.parse(event.subject), star, name, note, lists)


@dataclass(frozen=True)
class Sample:
    """The memories to label in a study, and the number of triggers that annotators see for each memory."""

    memories: tuple[MemoryId, ...]
    top: int
    seed: int

    @property
    def content(self) -> dict[str, Any]:
        return {"memories": [str(memory) for memory in self.memories], "top": self.top, "seed": self.seed}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Sample:
        """Return the sample in an event's content. Raises one of CONTENT_ERRORS if the content is not a sample."""
        memories = tuple(MemoryId.parse(require_type(name, str)) for name in require_type(content["memories"], list))
        return cls(memories, require_type(content["top"], int), require_type(content["seed"], int))


Answer = Label | Verdict | Note
ANSWERS: dict[str, type[Label] | type[Verdict] | type[Note]] = {LABELS: Label, VERDICTS: Verdict, NOTES: Note}


def require_type(value: Any, kind: type[_Value]) -> _Value:
    """Return the value, or raise TypeError unless its type is exactly `kind` (True is not an int)."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


class _State:
    """The current state of all annotations, computed from all events in order."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.sample: Sample | None = None
        self.finished: set[str] = set()
        self.annotators: dict[str, set[str]] = {
            task: set() for task in EVENT_KINDS
        }  # task -> annotators with an answer, even if the answer was undone
        # (task, annotator) -> subject -> (key, answer) pairs that were not undone, oldest first
        self.answers: dict[tuple[str, str], dict[str, list[tuple[str, Answer]]]] = {}
        self.notes: dict[MemoryId, Note] = {}  # last note on each memory by any annotator
        self.unknown: Counter[str] = Counter()  # events that this version cannot interpret
        undone = {
            (event.task, event.annotator, str(event.content.get("undoes"))) for event in events if event.kind == "undo"
        }
        for event in events:
            try:
                self._apply(event, is_undone=(event.task, event.annotator, event.key) in undone)
            except CONTENT_ERRORS:
                self.unknown[f"{event.task}/{event.kind}"] += 1

    def _apply(self, event: Event, is_undone: bool) -> None:
        if event.kind not in EVENT_KINDS[event.task]:
            raise ValueError("unknown kind of event")
        if event.kind == "sample":
            self.sample = Sample.read(event.content)
        elif event.kind == "finish":
            self.finished.add(event.annotator)
        elif event.kind != "undo":
            answer = ANSWERS[event.task].read(event)
            self.annotators[event.task].add(event.annotator)
            if is_undone:
                return
            by_subject = self.answers.setdefault((event.task, event.annotator), {})
            by_subject.setdefault(event.subject, []).append((event.key, answer))
            if isinstance(answer, Note):
                self.notes[answer.memory] = answer

    def current(self, task: str, annotator: str) -> list[Answer]:
        """Return an annotator's current answers, ordered by subject."""
        return [answers[-1][1] for _, answers in sorted(self.answers.get((task, annotator), {}).items())]


class Annotations:
    """The annotations of one index. Reading never creates the file. The object is thread-safe.

    Every call sees the events that other processes have appended.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.path = index.folder / ANNOTATIONS
        self._trigger_counts: dict[MemoryId, int] = {}
        self._log = AnnotationLog(self.path)
        self._replayed: tuple[dict[str, Event], _State] = ({}, _State([]))

    @property
    def _events(self) -> dict[str, Event]:
        return self._log.read()[0]

    @property
    def _state(self) -> _State:
        events = self._events
        if self._replayed[0] is not events:
            self._replayed = (events, _State([*events.values()]))
        return self._replayed[1]

    # Reading

    @property
    def sample(self) -> Sample | None:
        """The memories to label, or None if no sample was drawn."""
        return self._state.sample

    def list_annotators(self, task: str = LABELS, finished: bool | None = None) -> list[str]:
        """Return the annotators of a task: all, only finished annotators (True), or only unfinished ones (False)."""
        state = self._state
        everyone = state.annotators[task]
        if finished is None:
            return sorted(everyone)
        return sorted(everyone & state.finished if finished else everyone - state.finished)

    def labels(self, viewer: str | None = None) -> list[Label]:
        """Return the labels that a viewer may see.

        A viewer who has not finished sees only their own labels. A viewer who has finished (or None) sees the labels of
        all annotators who have finished.
        """
        finished = self.list_annotators(finished=True)
        if viewer is not None and viewer not in finished:
            return self.labels_of(viewer)
        return [label for annotator in finished for label in self.labels_of(annotator)]

    def labels_of(self, annotator: str) -> list[Label]:
        """Return one annotator's labels, finished or not. Use `labels` to show labels to others."""
        labels = (answer for answer in self._state.current(LABELS, annotator) if isinstance(answer, Label))
        return sorted(labels, key=lambda label: label.memory)

    def verdicts(self, annotator: str | None = None) -> list[Verdict]:
        """Return the current verdicts of one annotator, or of all annotators, ordered by annotator and example."""
        annotators = self.list_annotators(VERDICTS) if annotator is None else [annotator]
        answers = (answer for person in annotators for answer in self._state.current(VERDICTS, person))
        return [answer for answer in answers if isinstance(answer, Verdict)]

    def notes(self) -> dict[MemoryId, Note]:
        """Return the current note of each memory: the last note that was not undone, by any annotator."""
        notes = self._state.notes
        return {memory: notes[memory] for memory in sorted(notes) if not notes[memory].is_empty}

    def history(self, task: str | None = None) -> list[dict[str, Any]]:
        """Return the events of a task in order and in the export format.

        If `task` is None, the events of all tasks are returned, and each event has an entry "task".
        """
        events = [{**vars(event)} for event in self._events.values() if task in (None, event.task)]
        for event in events:
            event_task = event.pop("task")
            if task is None:
                event["task"] = event_task
        return events

    def mark(self, task: str) -> str | None:
        """Return a checksum that changes with every event of a task, or None if there are no events."""
        keys = [event.key for event in self._events.values() if event.task == task]
        return hashlib.sha256("\n".join(keys).encode()).hexdigest() if keys else None

    def list_problems(self) -> list[str]:
        """Return a sentence about damaged lines and a sentence about unknown events, each only if there are any."""
        damaged = self._log.read()[1]
        return [*describe_damage(damaged), *_describe_unknown(self._state)]

    # Writing

    @contextmanager
    def _appending(self) -> Iterator[list[Event]]:
        """Hold the log's lock, so that `scan --fresh` waits, and check that the index was not replaced."""
        self._check_index()  # check before a lock file is created
        with self._log.appending() as events:
            self._check_index()
            yield events
            self._check_index()  # check again: other programs may copy files over an index without the lock

    def _check_index(self) -> None:
        """Raise IndexFolderError if the folder no longer holds the scan that was opened."""
        if Manifest.read(self.index.folder).generation != self.index.manifest.generation:
            raise IndexFolderError(f"{self.index.folder} was replaced since it was opened; run the command again")

    def set_sample(self, sample: Sample) -> None:
        """Start a study. Raises SettingError if the current sample already has labels."""
        for memory in sample.memories:
            self.index.check(memory)
        with self._appending() as events:
            if self._state.annotators[LABELS]:
                raise SettingError(
                    f"{self.path} already contains labels; move the file to another folder to start a new study"
                )
            events.append(_new_event(LABELS, "sample", "", content=sample.content))

    def save(self, *answers: Answer) -> None:
        """Save all answers, or none of them if one is not valid.

        An answer replaces the annotator's earlier answer on the same subject.
        """
        for answer in answers:
            check_annotator(answer.annotator)
            self.check(answer)
        with self._appending() as events:
            for answer in answers:
                if isinstance(answer, Label):
                    self._refuse_finished(answer.annotator)
                    self._refuse_outside_sample(answer.memory)
                events.append(_new_event(answer.task, answer.kind, answer.annotator, answer.subject, answer.content))

    def change_note(self, memory: MemoryId, annotator: str, parts: Mapping[str, Any]) -> Note:
        """Change the given parts of a memory's note. Other parts are kept, even if another annotator wrote them."""
        check_annotator(annotator)
        memory = self.index.check(memory)
        with self._appending() as events:
            note = replace(self.notes().get(memory, Note("", memory)), annotator=annotator, **parts)
            self.check(note)
            events.append(_new_event(NOTES, note.kind, annotator, note.subject, note.content))
        return note

    def undo(self, task: str, annotator: str, subject: str) -> Answer | None:
        """Undo the annotator's last answer on a subject. Returns the earlier answer that counts again, if any."""
        with self._appending() as events:
            if task != VERDICTS:
                subject = str(self.index.check(subject))
            if task == LABELS:
                self._refuse_finished(annotator)
            answers = self._state.answers.get((task, annotator), {}).get(subject, [])
            if not answers:
                what = f"verdict on example {subject}" if task == VERDICTS else f"{ANSWERS[task].kind} of {subject}"
                raise SettingError(f"{annotator} has no {what} to undo")
            events.append(_new_event(task, "undo", annotator, subject, {"undoes": answers[-1][0]}))
            return answers[-2][1] if len(answers) > 1 else None

    def finish(self, annotator: str) -> None:
        """Mark an annotator as finished. Raises SettingError if a memory of the sample has no label."""
        check_annotator(annotator)
        with self._appending() as events:
            self._refuse_finished(annotator)
            labeled = {label.memory for label in self.labels_of(annotator)}
            missing = [memory for memory in (self.sample.memories if self.sample else ()) if memory not in labeled]
            if missing:
                raise SettingError(
                    f"{annotator} has not labeled {len(missing)} memories of the sample, for example {missing[0]}; "
                    "if a memory has no pattern, save a label without patterns"
                )
            if not labeled:
                raise SettingError(f"{annotator} has not labeled any memory")
            events.append(_new_event(LABELS, "finish", annotator))

    def append_events(self, imported: Sequence[Event]) -> int:
        """Append the events that are not in the log yet. Returns the number of appended events.

        Raises:
            SettingError: The events replace a sample that already has labels, or change labels of an annotator who has
                finished.
        """
        with self._appending() as events:
            existing = self._events
            new: dict[str, Event] = {}
            for event in imported:
                if event.key not in existing:
                    new.setdefault(event.key, event)
            events += new.values()
            _check_protocol([*existing.values(), *events])
            return len(events)

    def check(self, answer: Answer) -> None:
        """Raise SettingError or UnknownName if the verdict, the memory, a pattern or the note is not valid."""
        if isinstance(answer, Verdict):
            if answer.verdict not in CHOICES:
                raise SettingError(f"'{answer.verdict}' is not a verdict; choose {' or '.join(CHOICES)}")
            return
        memory = self.index.check(answer.memory)
        if isinstance(answer, Note):
            _check_note(answer)
            return
        if memory not in self._trigger_counts:
            query = "SELECT count(*) AS n FROM {triggers} WHERE layer = $1 AND memory = $2 AND \"end\" = 'top'"
            self._trigger_counts[memory] = self.index.sql(query, [memory.layer, memory.memory])[0]["n"]
        count = self._trigger_counts[memory]
        for pattern in answer.patterns:
            _check_pattern(memory, pattern, min(count, self.sample.top) if self.sample else count)

    def _refuse_finished(self, annotator: str) -> None:
        if annotator in self._state.finished:
            raise SettingError(f"{annotator} has finished, so their labels can no longer change")

    def _refuse_outside_sample(self, memory: MemoryId) -> None:
        if self.sample is not None and memory not in self.sample.memories:
            raise SettingError(
                f"{memory} is not one of the {len(self.sample.memories)} memories of the sample; label one of these"
            )


def check_annotations(folder: Path) -> Finding | None:
    """Return the finding of `memlens check` about the annotations, or None if the index has no annotations."""
    from memlens.index.check import DAMAGED, UNREADABLE, WHOLE, Finding

    path = folder / ANNOTATIONS
    if not path.exists():
        return None
    try:
        events, damaged = AnnotationLog(path).read()
    except FilesError as error:
        return Finding(ANNOTATIONS, UNREADABLE, str(error))
    if damaged:
        advice = f"keep all others with `memlens annotate {folder} recover`"
        return Finding(ANNOTATIONS, DAMAGED, f"{path}: {describe_damage(damaged)[0]}; {advice}")
    details = [f"{len(events):,} events", *_describe_unknown(_State([*events.values()]))]
    return Finding(ANNOTATIONS, WHOLE, "; ".join(details))


def describe_damage(lines: Sequence[int]) -> list[str]:
    """Return a list with one sentence about damaged lines of the log, or an empty list."""
    if not lines:
        return []
    numbers = ", ".join(map(str, lines[:5])) + (f" and {len(lines) - 5:,} more" if len(lines) > 5 else "")
    return [f"line {numbers} is damaged" if len(lines) == 1 else f"lines {numbers} are damaged"]


def _describe_unknown(state: _State) -> list[str]:
    kinds = ", ".join(f"{count:,} of kind {kind!r:.40}" for kind, count in sorted(state.unknown.items()))
    return [f"this version of memlens does not know some events: {kinds}"] if kinds else []


def check_annotator(annotator: str) -> None:
    """Raise UnknownName if the name is not valid for an annotator."""
    if not annotator.strip() or not annotator.isprintable() or len(annotator) > _MAX_NAME:
        raise UnknownName(
            f"{annotator[:40]!r} is not a valid annotator name; use at most {_MAX_NAME} printable characters"
        )


def _check_pattern(memory: MemoryId, pattern: LabeledPattern, triggers: int) -> None:
    if not pattern.description.strip():
        raise SettingError(f"a pattern of {memory} has no description; add one")
    if not _is_utf8(pattern.description):
        raise SettingError(f"the description {pattern.description!a} of {memory} is not UTF-8 text")
    if pattern.kind not in KINDS:
        raise SettingError(f"'{pattern.kind}' is not a class of pattern; choose {' or '.join(KINDS)}")
    if len(set(pattern.prefixes)) < GROUNDED:
        raise SettingError(f'"{pattern.description}" of {memory} has fewer than {GROUNDED} prefixes; add prefixes')
    if not all(0 <= rank < triggers for rank in pattern.prefixes):
        raise SettingError(f'"{pattern.description}": the trigger ranks of {memory} are 0 to {triggers - 1}')


def _check_note(note: Note) -> None:
    texts = (("name", note.name, 200), ("note", note.note, 10_000), *(("list", name, 100) for name in note.lists))
    for part, text, limit in texts:
        if len(text) > limit:
            raise SettingError(f"the {part} of {note.memory} has {len(text):,} characters; use at most {limit:,}")
        if not _is_utf8(text):
            raise SettingError(f"the {part} {text!a} of {note.memory} is not UTF-8 text")
    if not all(name.strip() for name in note.lists):
        raise SettingError(f"a list that contains {note.memory} has no name; name the list")


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _check_protocol(events: Sequence[Event]) -> None:
    """Raise SettingError if imported events break the rules of set_sample and finish."""
    labels = [number for number, event in enumerate(events) if event.kind == "label"]
    parts = (events[: labels[0]] if labels else events), events
    samples = [[event.content for event in part if event.kind == "sample"][-1:] for part in parts]
    if samples[0] != samples[1]:
        raise SettingError("the file and the index contain labels of different samples; nothing was imported")
    finished: set[str] = set()
    for event in events:
        if event.kind == "finish":
            finished.add(event.annotator)
        elif event.task == LABELS and event.annotator in finished and event.kind in ("label", "undo"):
            raise SettingError(f"the file changes labels of {event.annotator}, who has finished; nothing was imported")


def _new_event(
    task: str, kind: str, annotator: str, subject: str = "", content: Mapping[str, Any] | None = None
) -> Event:
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Event(uuid4().hex, time, task, kind, annotator, subject, dict(content or {}))
