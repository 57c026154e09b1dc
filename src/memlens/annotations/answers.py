"""People's answers as records: labels of patterns, verdicts on changes of the last layer, notes on memories.

Each is one event of the history (annotations/store.py), which `content` writes and `read` checks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

from memlens.errors import SettingError, UnknownName
from memlens.index.history import LABELS, NOTES, VERDICTS
from memlens.memory import MemoryId

_Value = TypeVar("_Value")
CHOICES = ("related", "distant")  # verdicts
UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, UnknownName)  # raised by read() of an answer


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
        """Read a row with these columns; a KeyError, TypeError, ValueError or OverflowError where one is unusable."""
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
        """Read the content of an event; a KeyError or TypeError where it is not a sample's."""
        memories = tuple(MemoryId.parse(require_type(name, str)) for name in require_type(content["memories"], list))
        return cls(memories, require_type(content["top"], int), require_type(content["seed"], int))


@dataclass(frozen=True)
class Note:
    """A memory that somebody keeps: a star, a name, a note, and the lists that it is in. All empty removes it."""

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
    def read(cls, event: Mapping[str, Any]) -> Note:
        """A KeyError or TypeError where the content is not a note's."""
        content = event["content"]
        lists = tuple(require_type(name, str) for name in require_type(content["lists"], list))
        name, note = (require_type(content[part], str) for part in ("name", "note"))
        star = require_type(content["star"], bool)
        return cls(event["annotator"], MemoryId.parse(event["subject"]), star, name, note, lists)


def check_note(note: Note) -> None:
    texts = (("name", note.name, 200), ("note", note.note, 10_000), *(("list", name, 100) for name in note.lists))
    for what, text, most in texts:
        if len(text) > most:
            raise SettingError(f"the {what} of {note.memory} has {len(text):,} characters; write at most {most:,}")
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise SettingError(f"the {what} {text!a} of {note.memory} is not UTF-8 text")
    if not all(name.strip() for name in note.lists):
        raise SettingError(f"a list that {note.memory} is in has no name; give it one")


Answer = Label | Verdict | Note
ANSWERS: dict[str, type[Label] | type[Verdict] | type[Note]] = {LABELS: Label, VERDICTS: Verdict, NOTES: Note}


def require_type(value: Any, kind: type[_Value]) -> _Value:
    if type(value) is not kind:  # True is an int, but no rank
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
