"""The records that every part shares: MemoryId, Prefix, Trigger, EncodedText.

Layers, memories, ranks and positions count from 0. The paper counts layers and memories from 1, so its k^5_895 is
`L4N894` here. A position counts a sentence's own tokens; a BOS token in front of them is not counted.
"""

import re
from dataclasses import dataclass
from html import escape
from typing import Any

from memlens.errors import UnknownName

_NAME = re.compile(r"[Ll]([0-9]{1,9})[NnDd]([0-9]{1,9})")


@dataclass(frozen=True, order=True)
class MemoryId:
    """One memory of one layer, written `L3N512` (`L3D512` is read as the same)."""

    layer: int
    memory: int

    @classmethod
    def parse(cls, name: str) -> "MemoryId":
        match = _NAME.fullmatch(name.strip())
        if not match:
            raise UnknownName(f"'{name}' is not a memory's name; write layer and memory like L3N512, both from 0")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"L{self.layer}N{self.memory}"

    def to_json(self) -> str:
        """In JSON a memory is its name."""
        return str(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        """The same in answers of the workbench, where FastAPI writes records."""
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(cls, serialization=core_schema.to_string_ser_schema())


@dataclass(frozen=True, order=True)
class Prefix:
    """The first `position + 1` tokens of a sentence."""

    sentence: int
    position: int


@dataclass(frozen=True)
class EncodedText:
    """A text's tokens; ends[i] is the character offset in the text where token i ends, never decreasing."""

    ids: list[int]
    ends: list[int]


@dataclass(frozen=True)
class Trigger:
    """A prefix that drives a memory to an end of its range, with the text around it."""

    rank: int
    coefficient: float
    prefix: Prefix
    before: str
    token: str
    after: str
    next_token: int | None
    next_text: str | None

    @property
    def text(self) -> str:
        """The prefix as text, its last token included."""
        return self.before + self.token


_MARK = "background:#ffe08a;color:#000;border-radius:2px"
_CELL = "text-align:right;white-space:pre-wrap"


class TriggerList(list[Trigger]):
    """Triggers, best first; in everything but its look in a notebook a plain list."""

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{trigger.rank}</td><td>{trigger.coefficient:.4g}</td>"
            f'<td style="{_CELL}">{escape(trigger.before)}<span style="{_MARK}">{escape(trigger.token)}</span></td>'
            f'<td style="text-align:left;white-space:pre-wrap;opacity:.6">{escape(trigger.after[:40])}</td></tr>'
            for trigger in self
        )
        head = "<tr><th>rank</th><th>coefficient</th><th>prefix</th><th>what follows</th></tr>"
        return f"<table>{head}{rows}</table>"
