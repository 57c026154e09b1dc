"""How far lists overlap: memory by memory, or each with its best counterpart. Knows arrays only: no index, no text.

A list is a set of keys with weights. Jaccard: shared by all distinct keys of the two. Weighted: the sum of the lesser
weights by the sum of the greater ones. Two empty lists are equal. Sums are made in a fixed order, so that the same
tables give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.compare.lists import Lists
from memlens.compare.result import Overlap

_PAIRS_AT_ONCE = 1 << 22  # of rows with the same key, while counterparts are counted

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Of many pairs, [pairs] each."""

    shared: IntArray
    a: IntArray
    b: IntArray
    jaccard: FloatArray
    weighted: FloatArray


@dataclass(frozen=True, eq=False)
class Counterparts:
    """The best partner of each memory of a, -1 for none, and how far they overlap. [memories of a]"""

    partner: IntArray
    jaccard: FloatArray


@dataclass(frozen=True, eq=False)
class _Sets:
    """Distinct rows in order of owner and key."""

    owners: IntArray
    keys: IntArray
    weights: FloatArray

    def sizes(self, count: int) -> IntArray:
        return np.bincount(self.owners, minlength=count).astype(np.int64)


def memory_by_memory(a: Lists, b: Lists, memories: range) -> Overlaps:
    """Each memory of the range in a with the same one in b."""
    one, other = _as_sets(a, b, memories.start, memories.start)
    count = len(memories)
    wide = np.int64(max(one.keys.max(initial=0), other.keys.max(initial=0)) + 1)
    _, in_one, in_other = np.intersect1d(
        one.owners * wide + one.keys, other.owners * wide + other.keys, assume_unique=True, return_indices=True
    )
    whose = one.owners[in_one]
    lesser = np.bincount(whose, np.minimum(one.weights[in_one], other.weights[in_other]), count)
    total = np.bincount(one.owners, one.weights, count) + np.bincount(other.owners, other.weights, count)
    shared = np.bincount(whose, minlength=count).astype(np.int64)
    sizes = one.sizes(count), other.sizes(count)
    jaccard = _share(shared, sizes[0] + sizes[1] - shared)
    # lists whose weights are all nothing differ as far as their keys do
    weighted = np.where(total > 0, _share(lesser, total - lesser), jaccard)
    return Overlaps(shared, *sizes, jaccard, weighted)


def best_counterparts(a: Lists, b: Lists, count_a: int, count_b: int, itself: bool = False) -> Counterparts:
    """For each of a's memories the one of b with the highest Jaccard index, of equal ones the lowest.

    One that shares nothing with anybody has none. `itself`: both are one layer, and no memory is its own counterpart.
    """
    one, other = _as_sets(a, b, 0, 0)
    size_a, size_b = one.sizes(count_a), other.sizes(count_b)
    order = np.argsort(other.keys, kind="stable")  # rows of b by key, owners in order within
    owners_b = other.owners[order]
    keys = int(max(one.keys.max(initial=-1), other.keys.max(initial=-1))) + 1
    edges = np.searchsorted(other.keys[order], np.arange(keys + 1))  # [keys + 1]
    times = (edges[1:] - edges[:-1])[one.keys]  # [rows of a]: memories of b with the same key
    partner, best = np.full(count_a, -1, np.int64), np.zeros(count_a)
    for first, last in _parts(one.owners, times, count_a, count_b):
        rows = slice(*np.searchsorted(one.owners, (first, last)))
        own = times[rows]
        begins = np.repeat(edges[one.keys[rows]] - np.concatenate(([0], np.cumsum(own)[:-1])), own)
        partners = owners_b[begins + np.arange(int(own.sum()))]
        cells = np.repeat(one.owners[rows] - first, own) * count_b + partners
        shared = np.bincount(cells, minlength=(last - first) * count_b).reshape(last - first, count_b)
        union = size_a[first:last, None] + size_b[None, :] - shared
        jaccard = shared / np.maximum(union, 1)
        if itself:
            jaccard[np.arange(last - first), np.arange(first, last)] = 0
        found = jaccard.argmax(1)  # the first of equal ones
        best[first:last] = jaccard[np.arange(last - first), found]
        partner[first:last] = np.where(best[first:last] > 0, found, -1)
    return Counterparts(partner, best)


def overlap_of(a: dict[Any, float], b: dict[Any, float]) -> Overlap:
    """Of one pair, in plain Python."""
    both = sorted(a.keys() & b.keys())
    lesser = float(sum(min(a[key], b[key]) for key in both))
    total = float(sum(a.values()) + sum(b.values()))
    union = len(a) + len(b) - len(both)
    jaccard = len(both) / union if union else 1.0
    return Overlap(len(both), len(a), len(b), jaccard, lesser / (total - lesser) if total > 0 else jaccard)


def _parts(owners: IntArray, times: IntArray, count_a: int, count_b: int) -> list[tuple[int, int]]:
    """Memories of a in ranges whose work fits the memory, at least one in each."""
    work = np.bincount(owners, times, count_a) + count_b
    part = (np.cumsum(work) // _PAIRS_AT_ONCE).astype(np.int64)
    edges = np.flatnonzero(np.diff(part, prepend=-1, append=-1)).tolist() if count_a else []
    return list(pairwise(edges))


def _as_sets(a: Lists, b: Lists, first_a: int, first_b: int) -> tuple[_Sets, _Sets]:
    """Keys of both numbered in common; of equal ones of a memory the first."""
    encoded = pa.array([*a.keys, *b.keys]).dictionary_encode() if a.keys or b.keys else None
    numbers = np.zeros(0, np.int64) if encoded is None else encoded.indices.to_numpy().astype(np.int64)
    cut = len(a.keys)
    return _distinct(a, numbers[:cut], first_a), _distinct(b, numbers[cut:], first_b)


def _distinct(lists: Lists, keys: IntArray, first: int) -> _Sets:
    owners = lists.owners - first
    wide = np.int64(keys.max(initial=0) + 1)
    _, kept = np.unique(owners * wide + keys, return_index=True)
    return _Sets(owners[kept], keys[kept], lists.weights[kept])


def _share(part: NDArray[Any], whole: NDArray[Any]) -> FloatArray:
    """part / whole; where there is nothing at all the two are equal."""
    shares: FloatArray = np.divide(part, whole, out=np.ones(len(part)), where=whole > 0)
    return shares
