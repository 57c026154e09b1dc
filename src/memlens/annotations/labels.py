"""People's labels of patterns, as events of the history of an index (see history).

    sample    which memories are to be labelled, and how many triggers of each are shown
    label     one person's patterns of one memory (none is an answer, too); the last one counts
    undo      takes that person's last label of a memory back; the one before counts again
    finish    from here on the person sees the others' labels, and may change nothing

Until somebody has finished, the labels of others do not exist for them. Knows events; agreement is computed elsewhere.

People's verdicts on changes of the last layer, as events of the history of an index (see history).

    verdict   one person says that a change leads to a related or to a distant word; the last one counts
    undo      takes that person's last verdict on an example back; the one before counts again

An example is a prefix and the two words; its name is made from them, so that a verdict stays true whatever sample the
example is drawn into again. Knows events; which examples there are is the experiment's business.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memlens.annotations.store import EVENTS, VERDICTS, History, check_annotator, standing
from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId

KINDS = ("shallow", "semantic")
GROUNDED = 3  # prefixes that a pattern needs, as in the paper
_MOST_SHOWN = 1 << 30  # without a sample every trigger may be ticked
_LAST = (1 << 63) - 1  # above every id
_AFTER_FINISHING = """
SELECT annotator FROM events JOIN (SELECT annotator, min(id) AS finish FROM events WHERE kind = 'finish' GROUP BY 1)
USING (annotator) WHERE kind IN ('label', 'undo') AND id > finish LIMIT 1
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


class Annotations(History):
    """The labels of one index. Use as a context manager, or close()."""

    table = EVENTS

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._triggers: dict[MemoryId, int] = {}  # an index with annotations keeps its triggers

    # What is written

    def set_sample(self, sample: Sample) -> None:
        """Begin a study; refused once somebody has labelled, since their work would not fit any more."""
        memories = [str(self.index.check(memory)) for memory in sample.memories]
        content = {"memories": memories, "top": sample.top, "seed": sample.seed}
        with self._writing() as database:
            if database.execute("SELECT 1 FROM events WHERE kind = 'label' LIMIT 1").fetchone():
                raise SettingError(f"{self.path} holds labels of its sample; move the file away to begin another study")
            self._append(database, "sample", "", {}, content)

    def save(self, annotator: str, memory: str | MemoryId, patterns: Sequence[LabelledPattern]) -> None:
        """One person's patterns of one memory; takes the place of what they said before."""
        self.save_all([(annotator, self.index.check(memory), patterns)])

    def save_all(self, labels: Sequence[tuple[str, MemoryId, Sequence[LabelledPattern]]]) -> int:
        """Several labels, all or none; how many there were."""
        for annotator, memory, patterns in labels:
            check_annotator(annotator)
            self.check(memory, patterns)
        with self._writing() as database:
            for annotator, memory, patterns in labels:
                self._refuse_finished(database, annotator)
                content = {"patterns": [asdict(pattern) for pattern in patterns]}
                self._append(database, "label", annotator, asdict(memory), content)
        return len(labels)

    def undo(self, annotator: str, memory: str | MemoryId) -> Label | None:
        """Take the last label back; the one that counts now comes back, None for none."""
        name = self.index.check(memory)
        with self._writing() as database:
            self._refuse_finished(database, annotator)
            said = standing(self._events(annotator, name))
            if not said:
                raise SettingError(f"{annotator} has no label of {name} to take back")
            self._append(database, "undo", annotator, asdict(name), {"undoes": said[-1]["key"]})
            return _label(said[-2]) if len(said) > 1 else None

    def finish(self, annotator: str) -> None:
        """Say that all memories of the sample are done."""
        check_annotator(annotator)
        with self._writing() as database:
            self._refuse_finished(database, annotator)
            done = {label.memory for label in self.labels_of(annotator)}
            sample = self.sample()
            missing = [str(memory) for memory in (sample.memories if sample else ()) if memory not in done]
            if missing or not done:
                what = f"{len(missing)} memories of the sample, {missing[0]} first" if missing else "every memory"
                raise SettingError(f"{annotator} has still to label {what}; a memory without a pattern is saved empty")
            self._append(database, "finish", annotator, {}, {})

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

    # Parts

    def _check_history(self, database: sqlite3.Connection) -> None:
        """What set_sample and finish promise holds for events that come from elsewhere, too."""
        samples = "SELECT content FROM events WHERE kind = 'sample' AND id < ? ORDER BY id DESC LIMIT 1"
        (first,) = database.execute("SELECT min(id) FROM events WHERE kind = 'label'").fetchone()
        if first and database.execute(samples, (first,)).fetchone() != database.execute(samples, (_LAST,)).fetchone():
            raise SettingError("the events are of another sample than the labels here; nothing of them was taken over")
        late = database.execute(_AFTER_FINISHING).fetchone()
        if late:
            raise SettingError(f"{late[0]} has finished, and the events change what they said; nothing was taken over")

    def labels_of(self, annotator: str) -> list[Label]:
        """One person's labels, for that person or for safe keeping; whoever looks at people's work uses labels()."""
        by_memory: dict[MemoryId, list[dict[str, Any]]] = {}
        for event in self._events(annotator):
            by_memory.setdefault(MemoryId(event["layer"], event["memory"]), []).append(event)
        said = [standing(events) for _, events in sorted(by_memory.items())]
        return [_label(events[-1]) for events in said if events]

    def _events(self, annotator: str, memory: MemoryId | None = None) -> list[dict[str, Any]]:
        """Labels and undos of one person, in order."""
        query = "SELECT * FROM events WHERE annotator = ? AND kind IN ('label', 'undo')"
        parameters: tuple[Any, ...] = (annotator,)
        if memory is not None:
            query, parameters = query + " AND layer = ? AND memory = ?", (annotator, memory.layer, memory.memory)
        return self._decoded(query + " ORDER BY id", parameters)

    def check(self, memory: MemoryId, patterns: Sequence[LabelledPattern]) -> None:
        """Refuse patterns that are none, or a memory that is not there."""
        self.index.check(memory)
        sample = self.sample()
        shown = min(self._count_triggers(memory), sample.top if sample else _MOST_SHOWN)
        for pattern in patterns:
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

    def _count_triggers(self, memory: MemoryId) -> int:
        if memory not in self._triggers:
            query = "SELECT count(*) AS n FROM {triggers} WHERE layer = $1 AND memory = $2 AND \"end\" = 'top'"
            self._triggers[memory] = self.index.sql(query, [memory.layer, memory.memory])[0]["n"]
        return self._triggers[memory]

    def _refuse_finished(self, database: sqlite3.Connection, annotator: str) -> None:
        query = "SELECT 1 FROM events WHERE kind = 'finish' AND annotator = ?"
        if database.execute(query, (annotator,)).fetchone():
            raise SettingError(f"{annotator} has finished and may see the others' labels; nothing can be changed now")


def _label(event: dict[str, Any]) -> Label:
    patterns = tuple(
        LabelledPattern(pattern["description"], pattern["kind"], tuple(pattern["prefixes"]))
        for pattern in event["content"]["patterns"]
    )
    return Label(event["annotator"], MemoryId(event["layer"], event["memory"]), patterns)


RELATED, DISTANT = "related", "distant"
CHOICES = (RELATED, DISTANT)


@dataclass(frozen=True)
class Example:
    """A prediction that the last layer turned into another."""

    layer: int
    text: str  # the prefix
    residual: int  # token before
    residual_text: str
    output: int  # token after
    output_text: str

    @property
    def name(self) -> str:
        told = json.dumps([self.layer, self.text, self.residual, self.output])
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Example:
        """From whatever has these columns; a KeyError, TypeError or ValueError where one is missing or of no use."""
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
    """What one person says about one example."""

    annotator: str
    example: Example
    verdict: str


class Verdicts(History):
    """The verdicts of one index. Use as a context manager, or close()."""

    table = VERDICTS

    def save(self, annotator: str, example: Example, verdict: str) -> None:
        """One person's verdict on one example; takes the place of what they said before."""
        self.save_all([Verdict(annotator, example, verdict)])

    def save_all(self, verdicts: Sequence[Verdict]) -> int:
        """Several verdicts, all or none; how many there were."""
        for one in verdicts:
            check_annotator(one.annotator)
            check_verdict(one.verdict)
        with self._writing() as database:
            for one in verdicts:
                content = {"verdict": one.verdict, **asdict(one.example)}
                self._append(database, "verdict", one.annotator, {"example": one.example.name}, content)
        return len(verdicts)

    def undo(self, annotator: str, example: str) -> Verdict | None:
        """Take the last verdict back; the one that counts now comes back, None for none."""
        with self._writing() as database:
            said = standing(self._events(annotator, example))
            if not said:
                raise SettingError(f"{annotator} has no verdict on example {example} to take back")
            self._append(database, "undo", annotator, {"example": example}, {"undoes": said[-1]["key"]})
            return _verdict(said[-2]) if len(said) > 1 else None

    def annotators(self) -> list[str]:
        """Who has ever judged anything."""
        return sorted({row["annotator"] for row in self._read("SELECT annotator FROM verdicts")})

    def verdicts(self, annotator: str | None = None) -> list[Verdict]:
        """What holds now, of everybody or of one person: by person, then by example's name."""
        people = self.annotators() if annotator is None else [annotator]
        return [verdict for person in people for verdict in self._verdicts_of(person)]

    def _verdicts_of(self, annotator: str) -> list[Verdict]:
        by_example: dict[str, list[dict[str, Any]]] = {}
        for event in self._events(annotator):
            by_example.setdefault(event["example"], []).append(event)
        said = [standing(events) for _, events in sorted(by_example.items())]
        return [_verdict(events[-1]) for events in said if events]

    def _events(self, annotator: str, example: str | None = None) -> list[dict[str, Any]]:
        where, parameters = ("", (annotator,)) if example is None else (" AND example = ?", (annotator, example))
        return self._decoded(f"SELECT * FROM verdicts WHERE annotator = ?{where} ORDER BY id", parameters)


def check_verdict(verdict: str) -> None:
    if verdict not in CHOICES:
        raise SettingError(f"'{verdict}' is not a verdict; choose {' or '.join(CHOICES)}")


def _verdict(event: Mapping[str, Any]) -> Verdict:
    return Verdict(event["annotator"], Example.of(event["content"]), event["content"]["verdict"])
