"""Memories that are all but the same: with mostly equal triggers, or mostly equal promoted tokens.

Two sets are alike by their Jaccard index; which are is found in alike. Memories with equal sets are put together first,
so that a thousand copies of one memory cost no more than one. Reads tables; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations, product

import numpy as np

from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.patterns.alike import AlikeSets
from memlens.patterns.trigger_rows import read_trigger_rows

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
