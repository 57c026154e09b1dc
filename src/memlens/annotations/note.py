"""Note: a memory that somebody keeps, with a star, a name, a note and the lists that it is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from memlens.errors import SettingError
from memlens.index.history import NOTES
from memlens.memory import MemoryId

_Value = TypeVar("_Value")


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


def require_type(value: Any, kind: type[_Value]) -> _Value:
    if type(value) is not kind:  # True is an int, but no rank
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
