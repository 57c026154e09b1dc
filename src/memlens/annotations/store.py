"""People's labels, verdicts and notes: one append-only table of events in annotations.sqlite.

Events are never changed or deleted; what holds now is read from them. A write that returns is on disk, and several
processes may write at once.

    task      kind     subject  content
    labels    sample   ""       {"memories": ["L0N3"], "top": 25, "seed": 0}: the memories to label
    labels    label    memory   {"patterns": [...]}: one person's patterns of one memory; none is an answer, too
    labels    finish   ""       {}: the person sees the others' labels from now on and may change nothing
    verdicts  verdict  example  {"verdict": "related", ...}: one person's judgement of a change of the last layer
    notes     note     memory   {"star": true, "name": "", "note": "", "lists": []}: what anybody keeps of a memory
    each      undo     as above {"undoes": key}: takes the person's last answer on the subject back

The last answer that was not taken back counts. Until somebody has finished, others' labels do not exist for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from memlens.annotations.answers import (
    ANSWERS,
    CHOICES,
    UNREADABLE,
    Answer,
    Label,
    LabelledPattern,
    Note,
    Sample,
    Verdict,
    check_note,
)
from memlens.errors import SettingError, UnknownName
from memlens.index.format import ANNOTATIONS
from memlens.index.history import LABELS, NOTES, VERDICTS, Event, History, damaged
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.pattern.words import GROUNDED, KINDS

_LONGEST_NAME = 200  # characters of a person's name


class Annotations:
    """The history of one index, verified. Use as a context manager, or close()."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.path = index.folder / ANNOTATIONS
        self._triggers: dict[MemoryId, int] = {}  # an index with annotations keeps its triggers
        self._history = History(self.path)
        try:
            self._history.events()  # a file that cannot be read is refused at once
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Annotations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._history.close()

    @contextmanager
    def _writing(self) -> Iterator[Callable[[Event], None]]:
        """One transaction on the annotations of the scan that was opened, under its lock against `scan --fresh`."""
        self.index.reload()  # before a file is made
        with self._history.writing() as append:
            self.index.reload()
            yield append
            self.index.reload()  # files copied over the index ask for no lock

    def set_sample(self, sample: Sample) -> None:
        """Begin a study; refused once somebody has labelled, since their work would not fit any more."""
        for memory in sample.memories:
            self.index.check(memory)
        with self._writing() as append:
            if any(event.kind == "label" for event in self._history.events()):
                raise SettingError(f"{self.path} holds labels of its sample; move the file away to begin another study")
            append(_event(LABELS, "sample", "", content=sample.content))

    def save(self, *answers: Answer) -> None:
        """Save all answers or none; each replaces its person's earlier answer on the subject."""
        for answer in answers:
            check_annotator(answer.annotator)
            self.check(answer)
        with self._writing() as append:
            for answer in answers:
                if answer.task == LABELS:
                    self._refuse_finished(answer.annotator)
                append(_event(answer.task, answer.kind, answer.annotator, answer.subject, answer.content))

    def change_note(self, memory: MemoryId, annotator: str, parts: Mapping[str, Any]) -> Note:
        """Change parts of what holds of a memory, whoever wrote it; what others change at the same time stays."""
        check_annotator(annotator)
        memory = self.index.check(memory)
        with self._writing() as append:
            note = replace(self.notes().get(memory, Note("", memory)), annotator=annotator, **parts)
            self.check(note)
            append(_event(NOTES, note.kind, annotator, note.subject, note.content))
        return note

    def undo(self, task: str, annotator: str, subject: str) -> Answer | None:
        """Take the last answer back; the one that counts now comes back, None for none."""
        with self._writing() as append:
            if task != VERDICTS:
                subject = str(self.index.check(subject))
            if task == LABELS:
                self._refuse_finished(annotator)
            answers = self._standing(task, annotator, subject).get(subject, [])
            if not answers:
                what = f"verdict on example {subject}" if task == VERDICTS else f"{ANSWERS[task].kind} of {subject}"
                raise SettingError(f"{annotator} has no {what} to take back")
            append(_event(task, "undo", annotator, subject, {"undoes": answers[-1]["key"]}))
            return self._answer(task, answers[-2]) if len(answers) > 1 else None

    def finish(self, annotator: str) -> None:
        """Close one person's labels: every memory of the sample has one."""
        check_annotator(annotator)
        with self._writing() as append:
            self._refuse_finished(annotator)
            done = {label.memory for label in self.labels_of(annotator)}
            sample = self.sample()
            missing = [str(memory) for memory in (sample.memories if sample else ()) if memory not in done]
            if missing or not done:
                what = f"{len(missing)} memories of the sample, {missing[0]} first" if missing else "every memory"
                raise SettingError(f"{annotator} has still to label {what}; a memory without a pattern is saved empty")
            append(_event(LABELS, "finish", annotator))

    def append_events(self, events: Sequence[Mapping[str, Any]]) -> int:
        """Take over events of another copy of the history, each with its task; the number of those that are new."""
        with self._writing() as append:
            before = len(self._history.events())
            for event in events:
                append(Event(**{**event, "content": json.dumps(event["content"], sort_keys=True)}))
            after = self._history.events()
            _check_rules(after)
            return len(after) - before

    def history(self, task: str | None = None) -> list[dict[str, Any]]:
        """Every event of a task in order, as export writes it; without one, all events, each with its task."""
        events = self._history.events()
        if task is None:
            return [{**event.as_dict(), "task": event.task} for event in events]
        return [event.as_dict() for event in events if event.task == task]

    def sample(self) -> Sample | None:
        """The memories to label; None before `annotate sample`."""
        samples = [event for event in self._history.events() if event.kind == "sample"]
        if not samples:
            return None
        with self._readable(samples[-1].key):
            return Sample.read(samples[-1].as_dict()["content"])

    def annotators(self, task: str = LABELS, finished: bool | None = None) -> list[str]:
        """Everybody who has ever answered; of labels only those who have (True) or have not (False) finished."""
        events = [event for event in self._history.events() if event.task == task]
        everyone = {event.annotator for event in events if event.kind == ANSWERS[task].kind}
        if finished is None:
            return sorted(everyone)
        done = {event.annotator for event in events if event.kind == "finish"}
        return sorted(everyone & done if finished else everyone - done)

    def labels(self, viewer: str | None = None) -> list[Label]:
        """Current labels. A viewer who has not finished sees only their own; without one, all finished people's."""
        finished = self.annotators(finished=True)
        if viewer is not None and viewer not in finished:
            return self.labels_of(viewer)
        return [label for annotator in finished for label in self.labels_of(annotator)]

    def labels_of(self, annotator: str) -> list[Label]:
        """One person's labels, for that person or for safe keeping; whoever looks at people's work uses labels()."""
        labels = [self._answer(LABELS, events[-1]) for events in self._standing(LABELS, annotator).values()]
        return sorted((label for label in labels if isinstance(label, Label)), key=lambda label: label.memory)

    def verdicts(self, annotator: str | None = None) -> list[Verdict]:
        """Current verdicts, of everybody or of one person, ordered by person, then by the example's name."""
        people = self.annotators(VERDICTS) if annotator is None else [annotator]
        standing = [sorted(self._standing(VERDICTS, person).items()) for person in people]
        answers = [self._answer(VERDICTS, events[-1]) for by_name in standing for _, events in by_name]
        return [verdict for verdict in answers if isinstance(verdict, Verdict)]

    def notes(self) -> dict[MemoryId, Note]:
        """The current note of each memory: the last that anybody wrote and did not take back."""
        events = [event.as_dict() for event in self._history.events() if event.task == NOTES]
        undone = {str(event["content"].get("undoes")) for event in events if event["kind"] == "undo"}
        by_memory: dict[MemoryId, Note] = {}
        for event in events:
            if event["kind"] == "note" and event["key"] not in undone:
                note = self._answer(NOTES, event)
                assert isinstance(note, Note)
                by_memory[note.memory] = note
        return {memory: by_memory[memory] for memory in sorted(by_memory) if not by_memory[memory].is_empty}

    def check(self, answer: Answer) -> None:
        """Refuse an unknown verdict, an invalid pattern, or a memory that the index does not have."""
        if isinstance(answer, Verdict):
            if answer.verdict not in CHOICES:
                raise SettingError(f"'{answer.verdict}' is not a verdict; choose {' or '.join(CHOICES)}")
            return
        memory = self.index.check(answer.memory)
        if isinstance(answer, Note):
            check_note(answer)
            return
        sample, shown = self.sample(), self._count_triggers(memory)
        for pattern in answer.patterns:
            _check_pattern(memory, pattern, min(shown, sample.top) if sample else shown)

    def _standing(self, task: str, annotator: str, subject: str | None = None) -> dict[str, list[dict[str, Any]]]:
        """One person's answers that were not taken back, by subject, in order."""
        of_person = [e for e in self._history.events() if (e.task, e.annotator) == (task, annotator) and e.subject]
        events = [event.as_dict() for event in of_person if subject in (None, event.subject)]
        undone = {str(event["content"].get("undoes")) for event in events if event["kind"] == "undo"}
        by_subject: dict[str, list[dict[str, Any]]] = {}
        for event in events:
            if event["kind"] != "undo" and event["key"] not in undone:
                by_subject.setdefault(event["subject"], []).append(event)
        return by_subject

    def _answer(self, task: str, event: Mapping[str, Any]) -> Answer:
        with self._readable(event["key"]):
            return ANSWERS[task].read(event)

    @contextmanager
    def _readable(self, key: str) -> Iterator[None]:
        """Turn an error about the content of an event into one line; an event without a hash may hold anything."""
        try:
            yield
        except UNREADABLE as error:
            raise damaged(self.path, f"the event {key!r:.40} has no readable content") from error

    def _refuse_finished(self, annotator: str) -> None:
        if any(event.kind == "finish" and event.annotator == annotator for event in self._history.events()):
            raise SettingError(f"{annotator} has finished and may see the others' labels; nothing can be changed now")

    def _count_triggers(self, memory: MemoryId) -> int:
        if memory not in self._triggers:
            query = "SELECT count(*) AS n FROM {triggers} WHERE layer = $1 AND memory = $2 AND \"end\" = 'top'"
            self._triggers[memory] = self.index.sql(query, [memory.layer, memory.memory])[0]["n"]
        return self._triggers[memory]


def has_annotations(index: Index) -> bool:
    return (index.folder / ANNOTATIONS).is_file()


def history_mark(index: Index, task: str) -> str | None:
    """A checksum that changes with every event of a task; None where there is none yet. Writes nothing."""
    history = History(index.folder / ANNOTATIONS)
    try:
        keys = [event.key for event in history.events() if event.task == task]
    finally:
        history.close()
    return hashlib.sha256("\n".join(keys).encode()).hexdigest() if keys else None


def check_annotator(annotator: str) -> None:
    if not annotator.strip() or not annotator.isprintable() or len(annotator) > _LONGEST_NAME:
        shown, most = repr(annotator[:40]), _LONGEST_NAME
        raise UnknownName(f"{shown} cannot be an annotator's name; use letters, digits or signs, at most {most}")


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


def read_notes(index: Index) -> dict[MemoryId, Note]:
    """The current note of each memory that anybody keeps; creates no file where there is none."""
    if not has_annotations(index):
        return {}
    with Annotations(index) as annotations:
        return annotations.notes()


def _check_rules(events: Sequence[Event]) -> None:
    """Raise where events of another copy break what set_sample and finish promise."""
    labels = [number for number, event in enumerate(events) if event.kind == "label"]
    parts = (events[: labels[0]] if labels else events), events
    samples = [[event.content for event in part if event.kind == "sample"][-1:] for part in parts]
    if samples[0] != samples[1]:
        raise SettingError("the events are of another sample than the labels here; nothing of them was taken over")
    finished: set[str] = set()
    for event in events:
        if event.kind == "finish":
            finished.add(event.annotator)
        elif event.task == LABELS and event.annotator in finished and event.kind in ("label", "undo"):
            name = event.annotator
            raise SettingError(f"{name} has finished, and the events change what they said; nothing was taken over")


def _event(task: str, kind: str, annotator: str, subject: str = "", content: Any = None) -> Event:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return Event(uuid4().hex, time, task, kind, annotator, subject, json.dumps(content or {}, sort_keys=True))
