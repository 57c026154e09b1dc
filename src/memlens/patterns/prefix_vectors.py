"""A prefix as a vector: the mean of its words' vectors, each weighted by its rarity, at unit length.

Words count once a prefix; some may be left out. How many words a prefix has says how noisy its vector is: that is its
size class. Compiled; knows prefixes and words as numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.compiled import compiled
from memlens.patterns.prefix_words import PrefixWords
from memlens.patterns.word_vectors import WordVectors

SIZES = np.array([1, 2, 3, 5, 9, 17])  # words with a vector: a prefix is in the last class whose bound it reaches


@dataclass(frozen=True, eq=False)
class VectorWords:
    """The words of prefixes that have a vector, each once a prefix."""

    rows: NDArray[np.int32]  # rows of WordVectors
    is_last: NDArray[np.bool_]  # does it stand nowhere but at the end?
    offsets: NDArray[np.int64]  # [prefixes + 1]

    @classmethod
    def of(cls, prefixes: PrefixWords, vectors: WordVectors) -> VectorWords:
        return cls(*_vector_words(prefixes.words, prefixes.offsets, vectors.rows))

    def __len__(self) -> int:
        return len(self.offsets) - 1


@compiled
def _vector_words(words: Any, offsets: Any, row_of: Any) -> tuple[Any, Any, Any]:
    rows, is_last = np.empty(len(words), np.int32), np.empty(len(words), np.bool_)
    found = np.zeros(len(offsets), np.int64)
    count = 0
    for prefix in range(len(offsets) - 1):
        begin = count
        for place in range(offsets[prefix], offsets[prefix + 1]):
            row = row_of[words[place]]
            is_new = row >= 0
            for earlier in range(begin, count):
                is_new &= rows[earlier] != row
            if is_new:
                rows[count], is_last[count] = row, place == offsets[prefix + 1] - 1
                count += 1
        found[prefix + 1] = count
    return rows[:count].copy(), is_last[:count].copy(), found


@compiled
def prefix_vector_(
    prefix: int, rows: Any, is_last: Any, offsets: Any, out: Any, drop_last: bool, vectors: Any, weights: Any,
    vector: Any, used: Any, parts: Any,
) -> int:  # fmt: skip
    """Write the unit vector, its words and their coefficients; how many words it has comes back (0: no vector)."""
    vector[:] = 0
    count = 0
    for place in range(offsets[prefix], offsets[prefix + 1]):
        row = rows[place]
        if drop_last and is_last[place]:
            continue
        is_out = False
        for other in out:
            is_out |= other == row
        if not is_out:
            used[count], parts[count] = row, weights[row]
            vector += weights[row] * vectors[row]
            count += 1
    norm = np.sqrt((vector * vector).sum())
    if norm < 1e-6:
        return 0
    vector /= norm
    for i in range(count):
        parts[i] /= norm
    return count


@compiled
def size_class(count: int) -> int:
    found = 0
    while found + 1 < len(SIZES) and count >= SIZES[found + 1]:
        found += 1
    return found
