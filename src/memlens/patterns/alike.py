"""Which of many small sets are alike by their Jaccard index, exactly, without comparing all with all.

Two sets with a Jaccard index of at least `least` share at least ceil(least * length) entries of each of them, so they
share one of the first (length - that + 1) when both are sorted from the rarest entry on (prefix filtering). Pairs are
never kept: the neighbours of a set are found when they are asked for, however many there are in all. This module knows
sets of numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.compiled import compiled

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
