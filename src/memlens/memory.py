"""Shared records: names of memories, experts and roles, Prefix, Trigger, EncodedText.

Layers, memories, ranks and positions count from 0. The paper counts layers and memories from 1, so the paper's
k^5_895 is `L4N894` in memlens. Positions count the tokens of a sentence without BOS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import total_ordering
from html import escape
from typing import Any

from memlens.errors import UnknownName
from memlens.text import tail, visible

_NAME = re.compile(r"[Ll]([0-9]{1,9})(?:([SsEe])([0-9]{1,9}))?[NnDd]([0-9]{1,9})")
_BEGINNING = re.compile(r"[Ll]([0-9]{1,9})(?:([SsEe])([0-9]{1,9}))?(?:[NnDd]([0-9]{0,9}))?")
_EXPERT = re.compile(r"[Ll]([0-9]{1,9})([SsEe])([0-9]{1,9})")
_LETTERS = {"dense": "", "shared": "S", "routed": "E"}
KINDS = tuple(_LETTERS)  # a layer numbers the memories of these kinds in this order
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_ORDER = {kind: place for place, kind in enumerate(_LETTERS)}
# Roles (see role/rules.py), each with the columns of roles.parquet that determine it. A memory with several roles is
# counted under the first of them in this order.
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
    """Base class of records that are serialized to JSON as their name."""

    def to_json(self) -> str:
        return str(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        from pydantic_core import core_schema  # FastAPI serializes records with pydantic

        return core_schema.is_instance_schema(cls, serialization=core_schema.to_string_ser_schema())


@total_ordering
@dataclass(frozen=True)
class ExpertId(_NamedRecord):
    """The name of one expert: `L3E5` for a routed expert, `L3S0` for a shared one. `L3` is the dense block."""

    layer: int
    kind: str = "dense"
    expert: int = 0

    @classmethod
    def find(cls, name: str) -> ExpertId | None:
        """Return the expert with this name, or None if this is not the name of an expert."""
        match = _EXPERT.fullmatch(name.strip())
        return cls(int(match[1]), _KINDS[match[2].upper()], int(match[3])) if match else None

    def __str__(self) -> str:
        letter = _LETTERS[self.kind]
        return f"L{self.layer}{letter}{self.expert}" if letter else f"L{self.layer}"

    @property
    def beginning(self) -> str:
        """Return the text with which the names of the expert's memories begin: `L3N`, `L3E5N`."""
        return f"{self}N"

    @property
    def _place(self) -> tuple[int, int, int]:
        return self.layer, _ORDER[self.kind], self.expert

    def __lt__(self, other: ExpertId) -> bool:
        return self._place < other._place


@total_ordering
@dataclass(frozen=True)
class MemoryId(_NamedRecord):
    """The name of one memory: `L3N51` (or `L3D51`), `L3E5N20` in a routed expert, `L3S0N20` in a shared expert.

    `memory` counts from 0 in each expert. In tables and tensors, the numbers run through all memories of the layer.
    MemoryNames converts between names and these numbers.

    Example:
        >>> memlens.MemoryId.parse("L3E5N20").expert
        5
        >>> str(memlens.MemoryId(3, 51))
        'L3N51'
    """

    layer: int
    memory: int
    kind: str = "dense"
    expert: int = 0

    @classmethod
    def parse(cls, name: str) -> MemoryId:
        """Return the memory with this name.

        Args:
            name: A name like "L3N51", "L3E5N20" or "L3S0N20". Case does not matter.

        Returns:
            The memory.

        Raises:
            UnknownName: The text is not the name of a memory.

        Example:
            >>> memlens.MemoryId.parse("L3N51").layer
            3
        """
        match = _NAME.fullmatch(name.strip())
        if not match:
            raise UnknownName(
                f"'{name}' is not the name of a memory; write the layer and the memory like L3N51, both counted from 0 "
                "(L3E5N20 for memory 20 of expert 5, L3S0N20 for memory 20 of shared expert 0)"
            )
        if match[2] is None:
            return cls(int(match[1]), int(match[4]))
        return cls(int(match[1]), int(match[4]), _KINDS[match[2].upper()], int(match[3]))

    @property
    def owner(self) -> ExpertId:
        """Return the expert that the memory belongs to, or the dense block of its layer."""
        return ExpertId(self.layer, self.kind, self.expert)

    def __str__(self) -> str:
        return f"{self.owner.beginning}{self.memory}"

    @property
    def _place(self) -> tuple[int, int, int, int]:
        return self.layer, _ORDER[self.kind], self.expert, self.memory

    def __lt__(self, other: MemoryId) -> bool:
        return self._place < other._place


def parse_beginning(text: str) -> tuple[int, str] | None:
    """Parse an incomplete name of a memory, such as L3, L3N5, L3E5 or L3E5N2.

    Returns the layer and the normalized name, or None if no name of a memory starts with this text.
    """
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
    """Consecutive memories of a layer: `count` experts of one kind with `size` memories each."""

    kind: str  # "dense", "shared" or "routed"
    count: int
    size: int


class MemoryNames:
    """Conversion between the names of memories and their numbers in tables and tensors.

    Within a layer, the memories of the dense block have the lowest numbers, then those of shared experts, then those of
    routed experts.
    """

    def __init__(self, layers: Mapping[int, Sequence[GroupShape]], of: str = "") -> None:
        self.layers = {layer: tuple(groups) for layer, groups in layers.items()}
        self._of = f" of {of}" if of else ""  # "" or the name of the model, for error messages

    def count(self, layer: int) -> int:
        """Return the number of memories of a layer."""
        return sum(group.count * group.size for group in self.layers[layer])

    def name(self, layer: int, number: int) -> MemoryId:
        """Return the name of the memory that has this number in tables and tensors."""
        for group, first, expert in self._groups(layer):
            place = number - first
            if place < group.count * group.size:
                return MemoryId(layer, place % group.size, group.kind, expert + place // group.size)
        raise UnknownName(
            f"layer {layer}{self._of} has no memory with the number {number}; it has {self.count(layer)} memories"
        )

    def span(self, owner: ExpertId) -> range:
        """Return the numbers of an expert's memories, or of a layer's dense memories.

        Raises:
            UnknownName: The model has no such expert.
        """
        for group, first, expert in self._groups(owner.layer):
            place = owner.expert - expert
            if group.kind == owner.kind and 0 <= place < group.count:
                return range(first + place * group.size, first + (place + 1) * group.size)
        raise UnknownName(f"{owner} does not exist: layer {owner.layer}{self._of} has {self._what(owner.layer)}")

    def number(self, memory: MemoryId) -> int:
        """Return the memory's number in tables and tensors. Raises UnknownName if it does not exist."""
        try:
            span = self.span(memory.owner)
        except UnknownName:
            span = range(0)
        if not 0 <= memory.memory < len(span):
            place = f"layer {memory.layer}{self._of}"
            raise UnknownName(f"{memory} does not exist: {place} has {self._what(memory.layer)}")
        return span[memory.memory]

    def sql(self, layer: int, number: str) -> str:
        """Return an SQL expression for the name of a memory. `number` is an SQL expression for its number."""
        cases = []
        for group, first, expert in self._groups(layer):
            place = f"({number} - {first})"
            owner = f"{_LETTERS[group.kind]}' || ({place} // {group.size} + {expert}) || 'N'"
            owner = "N'" if group.kind == "dense" else owner
            end = first + group.count * group.size
            cases.append(f"WHEN {number} < {end} THEN 'L{layer}{owner} || ({place} % {group.size})")
        return f"CASE {' '.join(cases)} END"

    def _groups(self, layer: int) -> Iterator[tuple[GroupShape, int, int]]:
        """Yield the groups of a layer, each with the number of its first memory and of its first expert."""
        first, experts = 0, dict.fromkeys(_LETTERS, 0)
        for group in self.layers[layer]:
            yield group, first, experts[group.kind]
            first += group.count * group.size
            experts[group.kind] += group.count

    def _what(self, layer: int) -> str:
        """Describe the memories of a layer."""
        parts = []
        for group, _, expert in self._groups(layer):
            first, last = (ExpertId(layer, group.kind, number) for number in (expert, expert + group.count - 1))
            owners = f"{first} to {last} with " if group.count > 1 else f"{first} with "
            parts.append(f"{'' if group.kind == 'dense' else owners}memories 0 to {group.size - 1}")
        return " and ".join(parts) or "no memories"


@dataclass(frozen=True, order=True)
class Prefix:
    """The first `position + 1` tokens of a sentence.

    Example:
        >>> memlens.Prefix(sentence=12, position=3)
        Prefix(sentence=12, position=3)
    """

    sentence: int
    position: int


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text. ends[i] is the character offset at which token i ends."""

    ids: list[int]
    ends: list[int]


@dataclass(frozen=True)
class Trigger:
    """A prefix on which a memory has an extreme coefficient, with the text around it.

    Example:
        >>> trigger = index.triggers("L1N7", limit=1)[0]
        >>> trigger.text == trigger.before + trigger.token
        True
    """

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
        """Return the text of the prefix."""
        return self.before + self.token


_MARK = "background:#ffe08a;color:#000;border-radius:2px"
_CELL = "text-align:right;white-space:pre-wrap"


_SHOWN = 10  # triggers in the repr of a list


class TriggerList(list[Trigger]):
    """A list of triggers, best first. Notebooks display it as a table."""

    def __repr__(self) -> str:
        lines = [
            f"{trigger.rank:>4}  {trigger.coefficient:<8.4g}  {tail(trigger.before, 80)}«{visible(trigger.token)}»"
            for trigger in self[:_SHOWN]
        ]
        more = [f"... {len(self) - _SHOWN:,} more"] * (len(self) > _SHOWN)
        return "\n".join([f"{len(self):,} triggers", *lines, *more])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{trigger.rank}</td><td>{trigger.coefficient:.4g}</td>"
            f'<td style="{_CELL}">{escape(trigger.before)}<span style="{_MARK}">{escape(trigger.token)}</span></td>'
            f'<td style="text-align:left;white-space:pre-wrap;opacity:.6">{escape(trigger.after[:40])}</td></tr>'
            for trigger in self
        )
        head = "<tr><th>rank</th><th>coefficient</th><th>prefix</th><th>what follows</th></tr>"
        return f"<table>{head}{rows}</table>"
