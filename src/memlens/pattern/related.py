"""Which of many small sets are alike by their Jaccard index, exactly, without comparing all with all.

Two sets with a Jaccard index of at least `least` share at least ceil(least * length) entries of each of them, so they
share one of the first (length - that + 1) when both are sorted from the rarest entry on (prefix filtering). Pairs are
never kept: the neighbours of a set are found when they are asked for, however many there are in all. This module knows
sets of numbers only.

Memories that belong together: with the same pattern, the same triggers, or the same promoted tokens.

    related_memories    of one memory: how many triggers and value tokens it shares with others
    shared_patterns     patterns that several memories have ("12 memories end with 'press'")

Reads tables; keeps nothing. Pairs that are all but the same are found in duplicates.

Memories that are all but the same: with mostly equal triggers, or mostly equal promoted tokens.

Two sets are alike by their Jaccard index; which are is found in alike. Memories with equal sets are put together first,
so that a thousand copies of one memory cost no more than one. Reads tables; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.parallel import compiled
from memlens.pattern.words import read_trigger_rows

IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.floating[Any]]


class _Packed(NamedTuple):
    """Sets one after another, entries numbered from the rarest on and ascending; who has which as one of its rarest."""

    entries: IntArray
    starts: IntArray  # [sets + 1] into entries
    rare: IntArray  # [sets] how many of the first entries must be looked at
    owners: IntArray
    places: IntArray  # where in the owner's set the entry is
    owner_starts: IntArray  # [entries + 1] into owners


class AlikeSets:
    """Sets, none of them empty, and what each is alike to."""

    def __init__(self, sets: Sequence[frozenset[int]], least: float) -> None:
        self._packed, self.least = _pack(sets, least), least
        self._seen = np.zeros(len(sets), np.int64)  # in which question a set was last met
        self._asked = np.zeros(1, np.int64)
        self._numbers, self._alike = np.empty(len(sets), np.int64), np.empty(len(sets), np.float64)

    def of(self, number: int) -> tuple[IntArray, FloatArray]:
        """The other sets that are alike to this one, and their Jaccard indexes."""
        count = _neighbours_(self._packed, number, self.least, self._asked, self._seen, self._numbers, self._alike)
        return self._numbers[:count].copy(), self._alike[:count].copy()

    def weights(self, weight: IntArray) -> IntArray:
        """[sets] the sum of `weight` over each set and all that are alike to it."""
        sums = np.empty(len(weight), np.int64)
        _weights_(self._packed, self.least, weight, self._asked, self._seen, self._numbers, self._alike, sums)
        return sums


def _pack(sets: Sequence[frozenset[int]], least: float) -> _Packed:
    lengths = np.array([len(own) for own in sets], np.int64)
    starts = np.r_[0, np.cumsum(lengths)]
    flat = np.fromiter((entry for own in sets for entry in own), np.int64, int(starts[-1]))
    _, numbers, times = np.unique(flat, return_inverse=True, return_counts=True)
    by_rarity = np.empty(len(times), np.int64)
    by_rarity[np.argsort(times, kind="stable")] = np.arange(len(times))
    which = np.repeat(np.arange(len(sets)), lengths)
    entries = by_rarity[numbers]
    order = np.lexsort((entries, which))
    entries = entries[order]
    rare = lengths - np.ceil(least * lengths - 1e-9).astype(np.int64) + 1
    place = np.arange(len(entries)) - np.repeat(starts[:-1], lengths)
    looked_at = place < np.repeat(rare, lengths)
    counts = np.bincount(entries[looked_at], minlength=len(times))
    by_entry = np.flatnonzero(looked_at)[np.argsort(entries[looked_at], kind="stable")]
    owners, places = which[by_entry].astype(np.int32), place[by_entry].astype(np.int32)
    return _Packed(entries.astype(np.int32), starts, rare, owners, places, np.r_[0, np.cumsum(counts)])


@compiled
def _shared(entries: IntArray, a: int, a_stop: int, b: int, b_stop: int, needed: int) -> int:
    """How many entries two ascending runs have in common; 0 as soon as it cannot be `needed` any more."""
    left_a, left_b = a_stop - a - needed, b_stop - b - needed  # so many entries of each may be without a partner
    count = 0
    while a < a_stop and b < b_stop:
        if entries[a] == entries[b]:
            count, a, b = count + 1, a + 1, b + 1
            continue
        if entries[a] < entries[b]:
            a, left_a = a + 1, left_a - 1
        else:
            b, left_b = b + 1, left_b - 1
        if left_a < 0 or left_b < 0:
            return 0
    return count


@compiled
def _neighbours_(
    packed: _Packed, number: int, least: float, asked: IntArray, seen: IntArray, numbers: IntArray, alike: FloatArray
) -> int:
    entries, starts, rare, owners, places, owner_starts = packed
    first, stop = starts[number], starts[number + 1]
    length = stop - first
    count = 0
    asked[0] += 1
    seen[number] = asked[0]
    for place in range(first, first + rare[number]):
        entry = entries[place]
        for i in range(owner_starts[entry], owner_starts[entry + 1]):
            other = owners[i]
            if seen[other] == asked[0]:
                continue
            seen[other] = asked[0]
            theirs = starts[other + 1] - starts[other]
            # This is the first entry that both have, so what comes after it is all they can share besides.
            needed = np.int64(np.ceil(least * (length + theirs) / (1 + least) - 1e-9)) - 1
            a, b = place + 1, starts[other] + places[i] + 1
            if stop - a < needed or starts[other + 1] - b < needed:
                continue
            shared = 1 + _shared(entries, a, stop, b, starts[other + 1], needed)
            jaccard = shared / (length + theirs - shared)
            if jaccard >= least:
                numbers[count], alike[count] = other, jaccard
                count += 1
    return count


@compiled
def _weights_(
    packed: _Packed,
    least: float,
    weight: IntArray,
    asked: IntArray,
    seen: IntArray,
    numbers: IntArray,
    alike: FloatArray,
    sums: IntArray,
) -> None:
    for number in range(weight.shape[0]):
        count = _neighbours_(packed, number, least, asked, seen, numbers, alike)
        sums[number] = weight[number]
        for i in range(count):
            sums[number] += weight[numbers[i]]


_TOP = 25
_TOKENS = 10


@dataclass(frozen=True)
class Related:
    """Another memory and what it shares."""

    memory: MemoryId
    triggers: int  # equal prefixes among the first 25
    tokens: int | None  # equal tokens among the 10 most promoted; None without values
    patterns: tuple[str, ...]  # descriptions of equal patterns


@dataclass(frozen=True)
class SharedPattern:
    """A pattern and who has it."""

    pattern: str
    kind: str
    description: str
    memories: tuple[MemoryId, ...]


_TRIGGERS = f"""
WITH own AS (SELECT sentence, position FROM {{triggers}}
             WHERE layer = $1 AND memory = $2 AND "end" = 'top' AND rank < {_TOP})
SELECT t.layer, t.memory, count(*) AS n FROM {{triggers}} t JOIN own USING (sentence, position)
WHERE t."end" = 'top' AND t.rank < {_TOP} GROUP BY ALL
"""
_VALUES = f"""
WITH own AS (SELECT unnest(tokens[:{_TOKENS}]) AS token FROM {{values}} WHERE layer = $1 AND memory = $2),
     every AS (SELECT layer, memory, unnest(tokens[:{_TOKENS}]) AS token FROM {{values}})
SELECT every.layer, every.memory, count(*) AS n FROM every JOIN own USING (token) GROUP BY ALL
"""
_PATTERNS = """
SELECT p.layer, p.memory, list(p.description ORDER BY p.pattern) AS n
FROM {patterns} p JOIN (SELECT pattern FROM {patterns} WHERE layer = $1 AND memory = $2) own USING (pattern)
GROUP BY ALL
"""


def related_memories(index: Index, memory: str | MemoryId, limit: int = 20) -> list[Related]:
    """Most alike first: by shared triggers, then patterns, then promoted tokens (at least two of them)."""
    if limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
    name = index.check(memory)
    parts = {}
    for table, query in (("triggers", _TRIGGERS), ("values", _VALUES), ("patterns", _PATTERNS)):
        rows = index.sql(query, [name.layer, name.memory]) if index.has(table) else []
        parts[table] = {MemoryId(row["layer"], row["memory"]): row["n"] for row in rows}
    tokens = parts["values"]
    others = parts["triggers"].keys() | parts["patterns"].keys() | {m for m, n in tokens.items() if n > 1}
    found = [
        Related(
            other,
            parts["triggers"].get(other, 0),
            tokens.get(other, 0) if index.has("values") else None,
            tuple(parts["patterns"].get(other, ())),
        )
        for other in others - {name}
    ]
    return sorted(found, key=lambda r: (-r.triggers, -len(r.patterns), -(r.tokens or 0), r.memory))[:limit]


def shared_patterns(index: Index, limit: int = 20) -> list[SharedPattern]:
    """The patterns that most memories have."""
    if limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
    rows = index.sql(
        "SELECT pattern, min(kind) AS kind, min(description) AS description, count(*) AS n, "
        "list({{'layer': layer, 'memory': memory}} ORDER BY layer, memory) AS memories "
        "FROM {patterns} GROUP BY pattern HAVING n > 1 ORDER BY n DESC, pattern LIMIT $1",
        [limit],
    )
    return [
        SharedPattern(
            row["pattern"],
            row["kind"],
            row["description"],
            tuple(MemoryId(own["layer"], own["memory"]) for own in row["memories"]),
        )
        for row in rows
    ]


TOP, TOKENS = 25, 10  # triggers and promoted tokens that are compared

Named = dict[MemoryId, frozenset[int]]


@dataclass(frozen=True)
class Duplicate:
    """Two memories with mostly the same triggers or tokens."""

    one: MemoryId
    other: MemoryId
    shared: int
    jaccard: float


@dataclass(frozen=True)
class DuplicateGroup:
    """A memory and others that are alike to it, the most alike first."""

    memories: tuple[MemoryId, ...]
    least: float  # the lowest Jaccard index with the first


def duplicates(index: Index, least: float = 0.5, top: int = TOP) -> list[Duplicate]:
    """All pairs whose sets of triggers have a Jaccard index of at least `least`, most alike first."""
    _check(least)
    named = trigger_sets(index, top)
    return sorted(_pairs(named, least), key=lambda pair: (-pair.jaccard, pair.one, pair.other))


def duplicate_groups(named: Named, least: float) -> list[DuplicateGroup]:
    """The memory with most others alike to it and these others, then the same among those that are left, and so on."""
    _check(least)
    copies = sorted(sorted(own) for own in _equal(named).values())
    sets = AlikeSets([named[own[0]] for own in copies], least)
    weight = np.array([len(own) for own in copies], np.int64)  # 0 once a set is in a group
    waiting = [(-size, number) for number, size in enumerate(sets.weights(weight).tolist()) if size > 1]
    heapify(waiting)
    groups = []
    while waiting:
        promised, number = heappop(waiting)
        if not weight[number]:
            continue
        others, alike = sets.of(number)
        size = int(weight[number] + weight[others].sum())
        if size < -promised:  # others were taken since
            if size > 1:
                heappush(waiting, (-size, number))
            continue
        left = sorted(
            (-jaccard, other) for jaccard, other in zip(alike.tolist(), others.tolist(), strict=True) if weight[other]
        )
        members = copies[number] + [memory for _, other in left for memory in copies[other]]
        groups.append(DuplicateGroup(tuple(members), min([1.0, *(-jaccard for jaccard, _ in left)])))
        weight[[number, *(other for _, other in left)]] = 0
    return sorted(groups, key=lambda group: (-len(group.memories), -group.least, group.memories))


def trigger_sets(index: Index, top: int = TOP) -> Named:
    """The triggers of every memory that has any, as numbers of prefixes."""
    triggers = read_trigger_rows(index, top)
    names = map(MemoryId, triggers.layer.tolist(), triggers.memory.tolist())
    rows = triggers.rows.tolist()
    return {name: frozenset(row for row in own if row >= 0) for name, own in zip(names, rows, strict=True)}


def token_sets(index: Index, top: int = TOKENS) -> Named:
    """The tokens that every value promotes most."""
    table = index.table("values", ["layer", "memory", "tokens"])
    columns = (table.column(name).to_pylist() for name in ("layer", "memory", "tokens"))
    return {MemoryId(layer, memory): frozenset(tokens[:top]) for layer, memory, tokens in zip(*columns, strict=True)}


def _check(least: float) -> None:
    if not 0 < least <= 1:
        raise SettingError(f"the least Jaccard index is {least}; it lies above 0 and is at most 1")


def _equal(named: Named) -> dict[frozenset[int], list[MemoryId]]:
    found: dict[frozenset[int], list[MemoryId]] = {}
    for name, entries in named.items():
        if entries:
            found.setdefault(entries, []).append(name)
    return found


def _pairs(named: Named, least: float) -> Iterator[Duplicate]:
    """Each pair once, the lower memory first."""
    equal = _equal(named)
    entries, copies = list(equal), list(equal.values())
    sets = AlikeSets(entries, least)
    for number, own in enumerate(copies):
        for one, other in combinations(sorted(own), 2):
            yield Duplicate(one, other, len(entries[number]), 1.0)
        for neighbour, jaccard in zip(*(found.tolist() for found in sets.of(number)), strict=True):
            if neighbour > number:
                shared = len(entries[number] & entries[neighbour])
                for one, other in product(own, copies[neighbour]):
                    yield Duplicate(min(one, other), max(one, other), shared, jaccard)
