"""Counts by position: how many prefixes of each range of positions a memory fires on, and how many there are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.parallel import compiled
from memlens.scanner.lists import BUCKETS, Candidates, IntArray


@compiled
def _count_(prefixes: IntArray, sentences: IntArray, row: int, candidates: Candidates) -> None:
    for s in range(candidates.starts.shape[0] - 1):
        before = -1
        for i in range(candidates.starts[s], candidates.starts[s + 1]):
            bucket = candidates.buckets[i]
            prefixes[row, bucket] += 1
            sentences[row, bucket] += bucket != before
            before = bucket


class PositionCounts:
    """The counts of one layer; whole numbers, which add up to the same in any order."""

    def __init__(self, memories: int, experts: int) -> None:
        self.fired = np.zeros((memories, BUCKETS), np.int64)  # prefixes with a coefficient above 0
        # Row 0: what reaches memories that every token meets; then a row per expert behind a router.
        self.prefixes = np.zeros((1 + experts, BUCKETS), np.int64)
        self.sentences = np.zeros((1 + experts, BUCKETS), np.int64)  # that have such a prefix

    def add_prefixes(self, row: int, candidates: Candidates) -> None:
        """Note the prefixes of one batch that have reached the memories of a row."""
        _count_(self.prefixes, self.sentences, row, candidates)

    def of_memories(self, counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """Rows of `prefixes` or `sentences` as [memories, BUCKETS]; `size`: memories of one expert."""
        routed = np.repeat(counts[1:], size, axis=0)
        return np.concatenate([np.repeat(counts[:1], len(self.fired) - len(routed), axis=0), routed])

    def merge(self, other: PositionCounts) -> None:
        for name, array in self.arrays().items():
            array += other.arrays()[name]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The state as plain arrays, to be saved."""
        return {
            "positions.fired": self.fired,
            "positions.prefixes": self.prefixes,
            "positions.sentences": self.sentences,
        }

    def restore_(self, saved: dict[str, NDArray[Any]]) -> None:
        for name, array in self.arrays().items():
            array[:] = saved[name]
