"""The records that every part shares: names of memories, experts and roles, Prefix, Trigger, EncodedText.

Layers, memories, ranks and positions count from 0. The paper counts layers and memories from 1, so its k^5_895 is
`L4N894` here. A position counts a sentence's own tokens; a BOS token in front of them is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import total_ordering
from html import escape
from typing import Any

from memlens.errors import UnknownName

_NAME = re.compile(r"[Ll]([0-9]{1,9})(?:([SsEe])([0-9]{1,9}))?[NnDd]([0-9]{1,9})")
_BEGINNING = re.compile(r"[Ll]([0-9]{1,9})(?:([SsEe])([0-9]{1,9}))?(?:[NnDd]([0-9]{0,9}))?")
_EXPERT = re.compile(r"[Ll]([0-9]{1,9})([SsEe])([0-9]{1,9})")
_LETTERS = {"dense": "", "shared": "S", "routed": "E"}
KINDS = tuple(_LETTERS)  # in the order in which a layer counts its memories
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_ORDER = {kind: place for place, kind in enumerate(_LETTERS)}
# What a memory may be for (role/rules.py), in the order in which one that has several is counted, and the columns of
# roles.parquet that decide it.
ROLE_NUMBERS: dict[str, tuple[str, ...]] = {
    "dead": (),
    "token": ("token_cover", "q_token"),
    "n-gram": ("pair_cover", "q_n_gram"),
    "positional": ("position", "q_position"),
    "entropy": ("norm", "weak", "q_weak"),
    "token-frequency": ("frequency", "q_frequency"),
    "prediction": ("kurtosis", "skew", "q_kurtosis"),
    "suppression": ("kurtosis", "skew", "q_kurtosis"),
    "partition": ("variance", "q_variance"),
    "enrichment": ("cos_in_out", "q_along"),
    "depletion": ("cos_in_out", "q_along"),
}
ROLES = tuple(ROLE_NUMBERS)


class _NamedRecord:
    """A record that is written as its name, in JSON and in answers of the workbench."""

    def to_json(self) -> str:
        return str(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        from pydantic_core import core_schema  # by which FastAPI writes records

        return core_schema.is_instance_schema(cls, serialization=core_schema.to_string_ser_schema())


@total_ordering
@dataclass(frozen=True)
class ExpertId(_NamedRecord):
    """A set of memories of one layer that are used together: `L3E5` an expert behind a router, `L3S0` a shared one."""

    layer: int
    kind: str = "dense"
    expert: int = 0

    @classmethod
    def find(cls, name: str) -> ExpertId | None:
        """The expert of this name; None where it is not an expert's name."""
        match = _EXPERT.fullmatch(name.strip())
        return cls(int(match[1]), _KINDS[match[2].upper()], int(match[3])) if match else None

    def __str__(self) -> str:
        letter = _LETTERS[self.kind]
        return f"L{self.layer}{letter}{self.expert}" if letter else f"L{self.layer}"

    @property
    def beginning(self) -> str:
        """The prefix that the names of its memories share: `L3N`, `L3E5N`."""
        return f"{self}N"

    @property
    def _place(self) -> tuple[int, int, int]:
        return self.layer, _ORDER[self.kind], self.expert

    def __lt__(self, other: ExpertId) -> bool:
        return self._place < other._place


@total_ordering
@dataclass(frozen=True)
class MemoryId(_NamedRecord):
    """The name of one memory: `L3N51` (or `L3D51`), `L3E5N20` of an expert, `L3S0N20` of a shared expert.

    `memory` counts within the expert. Tables and tensors count the memories of a layer through; MemoryNames has both.
    """

    layer: int
    memory: int
    kind: str = "dense"
    expert: int = 0

    @classmethod
    def parse(cls, name: str) -> MemoryId:
        match = _NAME.fullmatch(name.strip())
        if not match:
            raise UnknownName(
                f"'{name}' is not a memory's name; write layer and memory like L3N51, both from 0 "
                "(L3E5N20 for memory 20 of expert 5, L3S0N20 of a shared expert)"
            )
        if match[2] is None:
            return cls(int(match[1]), int(match[4]))
        return cls(int(match[1]), int(match[4]), _KINDS[match[2].upper()], int(match[3]))

    @property
    def owner(self) -> ExpertId:
        """The expert that it belongs to, or its layer's dense block."""
        return ExpertId(self.layer, self.kind, self.expert)

    def __str__(self) -> str:
        return f"{self.owner.beginning}{self.memory}"

    @property
    def _place(self) -> tuple[int, int, int, int]:
        return self.layer, _ORDER[self.kind], self.expert, self.memory

    def __lt__(self, other: MemoryId) -> bool:
        return self._place < other._place


def name_beginning(text: str) -> tuple[int, str] | None:
    """The layer, and how names begin, of the beginning of a name that was typed: L3, L3N51, L3E5, L3E5N2."""
    match = _BEGINNING.fullmatch(text.strip())
    if match is None:
        return None
    layer, owner = int(match[1]), f"{match[2].upper()}{int(match[3])}N" if match[2] else ""
    number = match[4]
    if number is None:
        return layer, f"L{layer}{owner}"
    return layer, f"L{layer}{owner or 'N'}{int(number) if number else ''}"


@dataclass(frozen=True)
class GroupShape:
    """Memories of a layer that follow one another: `count` experts of one kind with `size` memories each."""

    kind: str  # "dense", "shared" or "routed"
    count: int
    size: int


class MemoryNames:
    """The names of a model's memories, from and to their numbers: a layer counts dense, shared, routed ones through."""

    def __init__(self, layers: Mapping[int, Sequence[GroupShape]], of: str = "") -> None:
        self.layers = {layer: tuple(groups) for layer, groups in layers.items()}
        self._of = f" of {of}" if of else ""  # for messages

    def count(self, layer: int) -> int:
        """The memories of a layer, all kinds together."""
        return sum(group.count * group.size for group in self.layers[layer])

    def name(self, layer: int, number: int) -> MemoryId:
        """The memory that has this number in tables and tensors."""
        first, before = 0, dict.fromkeys(_LETTERS, 0)
        for group in self.layers[layer]:
            place = number - first
            if place < group.count * group.size:
                return MemoryId(layer, place % group.size, group.kind, before[group.kind] + place // group.size)
            first += group.count * group.size
            before[group.kind] += group.count
        raise UnknownName(f"layer {layer}{self._of} has no memory with the number {number}; it has {first} memories")

    def span(self, owner: ExpertId) -> range:
        """The numbers of an expert's memories, or of a layer's dense ones; refused where there is none."""
        first, before = 0, 0
        for group in self.layers[owner.layer]:
            if group.kind == owner.kind:
                place = owner.expert - before
                if 0 <= place < group.count:
                    start = first + place * group.size
                    return range(start, start + group.size)
                before += group.count
            first += group.count * group.size
        raise UnknownName(f"{owner} does not exist: layer {owner.layer}{self._of} has {self._what(owner.layer)}")

    def number(self, memory: MemoryId) -> int:
        """The memory's number in tables and tensors; refused where there is none."""
        try:
            span = self.span(memory.owner)
        except UnknownName:
            span = range(0)
        if not 0 <= memory.memory < len(span):
            where = f"layer {memory.layer}{self._of}"
            raise UnknownName(f"{memory} does not exist: {where} has {self._what(memory.layer)}")
        return span[memory.memory]

    def sql(self, layer: int, number: str) -> str:
        """The name of a memory of this layer as an SQL expression of its number."""
        cases, first, before = [], 0, dict.fromkeys(_LETTERS, 0)
        for group in self.layers[layer]:
            place = f"({number} - {first})"
            owner = f"{_LETTERS[group.kind]}' || ({place} // {group.size} + {before[group.kind]}) || 'N'"
            owner = "N'" if group.kind == "dense" else owner
            first += group.count * group.size
            before[group.kind] += group.count
            cases.append(f"WHEN {number} < {first} THEN 'L{layer}{owner} || ({place} % {group.size})")
        return f"CASE {' '.join(cases)} END"

    def _what(self, layer: int) -> str:
        """The memories of a layer in words."""
        parts, before = [], dict.fromkeys(_LETTERS, 0)
        for group in self.layers[layer]:
            first = ExpertId(layer, group.kind, before[group.kind])
            before[group.kind] += group.count
            last = ExpertId(layer, group.kind, before[group.kind] - 1)
            owners = f"{first} to {last} with " if group.count > 1 else f"{first} with "
            parts.append(f"{'' if group.kind == 'dense' else owners}memories 0 to {group.size - 1}")
        return " and ".join(parts) or "no memories"


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
