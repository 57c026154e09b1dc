"""Memories that are all but the same: with mostly equal triggers, or mostly equal promoted tokens, by Jaccard index.

Exact, without comparing all with all (prefix filtering; Bayardo et al., 2007):

 1. Memories with equal sets are put together, so that a thousand copies of one cost no more than one.
 2. Entries are numbered from the rarest on, and each set is sorted by these numbers.
 3. Two sets with a Jaccard index of at least j share at least ceil(j n) entries of a set of n, so they share one of its
    first n - ceil(j n) + 1. Only sets that meet there are compared, entry by entry, until j is out of reach.

Pairs are never kept: the neighbours of a set are found when they are asked for, however many there are in all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.parallel import compiled, compiled_part
from memlens.pattern.related import TOKENS, TOP
from memlens.pattern.words import read_trigger_rows

IntArray = NDArray[np.integer[Any]]
NamedSets = dict[MemoryId, frozenset[int]]


@dataclass(frozen=True)
class DuplicatePair:
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


def duplicates(index: Index, least: float = 0.5, top: int = TOP) -> list[DuplicatePair]:
    """All pairs whose sets of triggers have a Jaccard index of at least `least`: each once, most alike first."""
    _check(least)
    equal = _equal_sets(trigger_sets(index, top))
    entries, copies = list(equal), list(equal.values())
    sets = AlikeSets(entries, least)
    pairs = []
    for number, own in enumerate(copies):
        pairs += [DuplicatePair(*two, len(entries[number]), 1.0) for two in combinations(sorted(own), 2)]
        for neighbour, jaccard in zip(*(found.tolist() for found in sets.of(number)), strict=True):
            if neighbour > number:
                shared = len(entries[number] & entries[neighbour])
                two_each = (sorted(two) for two in product(own, copies[neighbour]))
                pairs += [DuplicatePair(one, other, shared, jaccard) for one, other in two_each]
    return sorted(pairs, key=lambda pair: (-pair.jaccard, pair.one, pair.other))


def duplicate_groups(named: NamedSets, least: float) -> list[DuplicateGroup]:
    """The memory with most others alike to it and these others, then the same among those that are left, and so on."""
    _check(least)
    copies = sorted(sorted(own) for own in _equal_sets(named).values())
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


def trigger_sets(index: Index, top: int = TOP) -> NamedSets:
    """The triggers of every memory that has any, as numbers of prefixes."""
    triggers = read_trigger_rows(index, top)
    names = map(index.names.name, triggers.layer.tolist(), triggers.memory.tolist())
    rows = triggers.rows.tolist()
    return {name: frozenset(row for row in own if row >= 0) for name, own in zip(names, rows, strict=True)}


def token_sets(index: Index, top: int = TOKENS) -> NamedSets:
    """The tokens that every value promotes most."""
    table = index.table("values", ["layer", "memory", "tokens"])
    columns = (table.column(name).to_pylist() for name in ("layer", "memory", "tokens"))
    name = index.names.name
    return {name(layer, memory): frozenset(tokens[:top]) for layer, memory, tokens in zip(*columns, strict=True)}


def _check(least: float) -> None:
    if not 0 < least <= 1:
        raise SettingError(f"the least Jaccard index is {least}; it lies above 0 and is at most 1")


def _equal_sets(named: NamedSets) -> dict[frozenset[int], list[MemoryId]]:
    found: dict[frozenset[int], list[MemoryId]] = {}
    for name, entries in named.items():
        if entries:
            found.setdefault(entries, []).append(name)
    return found


class _SetArrays(NamedTuple):
    """Sets one after another, and by entry the sets that have it among their rarest."""

    entries: IntArray
    starts: IntArray  # [sets + 1] into entries
    rare: IntArray  # [sets] how many of the first entries must be looked at
    owners: IntArray  # sets that have an entry among these
    places: IntArray  # where in the owner's set the entry is
    owner_starts: IntArray  # [entries + 1] into owners


class _Answer(NamedTuple):
    """Room for the neighbours of one set at a time."""

    question: IntArray  # [1] its number
    seen: IntArray  # [sets] in which question a set was last met
    numbers: IntArray  # [sets] the neighbours
    alike: NDArray[np.float64]  # [sets] their Jaccard indexes


class AlikeSets:
    """Sets, none of them empty, and the sets that each is alike to."""

    def __init__(self, sets: Sequence[frozenset[int]], least: float) -> None:
        self._arrays, self.least = _pack(sets, least), least
        seen, numbers = np.zeros((2, len(sets)), np.int64)
        self._answer = _Answer(np.zeros(1, np.int64), seen, numbers, np.zeros(len(sets)))

    def of(self, number: int) -> tuple[IntArray, NDArray[np.float64]]:
        """The other sets that are alike to this one, and their Jaccard indexes."""
        count = _neighbours_(self._arrays, number, self.least, self._answer)
        return self._answer.numbers[:count].copy(), self._answer.alike[:count].copy()

    def weights(self, weight: IntArray) -> IntArray:
        """[sets] the sum of `weight` over each set and all that are alike to it."""
        sums: IntArray = _weights(self._arrays, self.least, weight, self._answer)
        return sums


def _pack(sets: Sequence[frozenset[int]], least: float) -> _SetArrays:
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
    return _SetArrays(entries.astype(np.int32), starts, rare, owners, places, np.r_[0, np.cumsum(counts)])


@compiled_part
def _count_shared(entries: IntArray, a: int, a_stop: int, b: int, b_stop: int, needed: int) -> int:
    """The number of entries that two ascending runs share; 0 as soon as it cannot reach `needed` any more."""
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
def _neighbours_(sets: _SetArrays, number: int, least: float, answer: _Answer) -> int:
    """Write the neighbours of one set; how many there are comes back."""
    entries, starts, rare, owners, places, owner_starts = sets
    question, seen, numbers, alike = answer
    first, stop = starts[number], starts[number + 1]
    length = stop - first
    count = 0
    question[0] += 1
    seen[number] = question[0]
    for place in range(first, first + rare[number]):
        entry = entries[place]
        for i in range(owner_starts[entry], owner_starts[entry + 1]):
            other = owners[i]
            if seen[other] == question[0]:
                continue
            seen[other] = question[0]
            theirs = starts[other + 1] - starts[other]
            # This is the first entry that both have, so what comes after it is all they can share besides.
            needed = np.int64(np.ceil(least * (length + theirs) / (1 + least) - 1e-9)) - 1
            a, b = place + 1, starts[other] + places[i] + 1
            if stop - a < needed or starts[other + 1] - b < needed:
                continue
            shared = 1 + _count_shared(entries, a, stop, b, starts[other + 1], needed)
            jaccard = shared / (length + theirs - shared)
            if jaccard >= least:
                numbers[count], alike[count] = other, jaccard
                count += 1
    return count


@compiled
def _weights(sets: _SetArrays, least: float, weight: IntArray, answer: _Answer) -> IntArray:
    sums = np.empty(len(weight), np.int64)
    for number in range(len(weight)):
        count = _neighbours_(sets, number, least, answer)
        sums[number] = weight[number]
        for i in range(count):
            sums[number] += weight[answer.numbers[i]]
    return sums
