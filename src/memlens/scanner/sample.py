"""A sample of ordinary prefixes: the histogram of every memory's coefficients, and a few prefixes that it fires on.

Whether a prefix is in the sample depends on seed, sentence and position only, so samples of disjoint batches merge in
any order to the same sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from memlens.parallel import compiled, compiled_part
from memlens.scanner.lists import Candidates, FloatArray, IntArray, KeyArray

EXAMPLES = 8  # drawn per memory; those that turn out to be triggers are left out when the index is written
SMALLEST, LARGEST = -10, 5  # exponents of two: |m| below 2^-10 is the middle bin, from 2^5 on the outermost
SIDE = LARGEST - SMALLEST + 1
BINS = 2 * SIDE + 1
_COLUMNS = 16  # one cache line of a row


def bin_edges() -> list[float]:
    """The finite edges between the bins, from the most negative to the most positive."""
    magnitudes = [2.0**e for e in range(SMALLEST, LARGEST + 1)]
    return [-x for x in reversed(magnitudes)] + magnitudes


@compiled_part
def _mix(x: int) -> int:
    """A 64-bit finaliser (splitmix64): equal inputs give equal, well spread outputs on every machine."""
    x = uint64(x) + uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@compiled_part
def prefix_hash(seed: int, sentence: int, position: int) -> int:
    return _mix(_mix(_mix(uint64(seed)) ^ uint64(sentence)) ^ uint64(position + 1))


@compiled
def prefix_hashes(seed: int, sentences: IntArray, positions: IntArray) -> KeyArray:
    """One hash per prefix, [n]."""
    hashes = np.empty(sentences.shape[0], np.uint64)
    for i in range(sentences.shape[0]):
        hashes[i] = prefix_hash(seed, sentences[i], positions[i])
    return hashes


class Examples(NamedTuple):
    """The prefixes with the lowest hashes among those that a memory fires on, for every memory."""

    hashes: KeyArray  # [memories, EXAMPLES]; all ones in empty places
    coefficients: FloatArray
    sentences: IntArray
    positions: IntArray


@compiled_part
def _keep_(examples: Examples, m: int, hash_: int, coefficient: np.float32, sentence: int, position: int) -> None:
    place = EXAMPLES
    while place > 0 and hash_ < examples.hashes[m, place - 1]:
        if place < EXAMPLES:
            examples.hashes[m, place] = examples.hashes[m, place - 1]
            examples.coefficients[m, place] = examples.coefficients[m, place - 1]
            examples.sentences[m, place] = examples.sentences[m, place - 1]
            examples.positions[m, place] = examples.positions[m, place - 1]
        place -= 1
    if place < EXAMPLES:
        examples.hashes[m, place] = hash_
        examples.coefficients[m, place] = coefficient
        examples.sentences[m, place] = sentence
        examples.positions[m, place] = position


class SampleArrays(NamedTuple):
    """The sample so far: its prefixes, and what is recorded of them."""

    counts: IntArray  # [memories, BINS]
    examples: Examples
    seed: int
    limit: np.uint64  # prefixes with a hash up to this are in the sample


@compiled
def drawn_of(sample: SampleArrays, candidates: Candidates) -> IntArray:
    """The candidates that are in the sample, as indices."""
    drawn, count = np.empty(candidates.rows.shape[0], np.int64), 0
    for i in range(candidates.rows.shape[0]):
        drawn[count] = i
        count += prefix_hash(sample.seed, candidates.sentences[i], candidates.positions[i]) <= sample.limit
    return drawn[:count]


@compiled
def draw_(sample: SampleArrays, block: FloatArray, candidates: Candidates, first: int, last: int, start: int) -> None:
    """Draw from the columns [first, last) of a block; `start`: the number of the memory in the block's first column."""
    bits, counts, highest = block.view(np.int32), sample.counts, sample.examples.hashes
    drawn = drawn_of(sample, candidates)
    for tile in range(first, last, _COLUMNS):  # so that the counts of a few memories stay close while all rows pass
        for i in drawn:
            row, sentence, position = candidates.rows[i], candidates.sentences[i], candidates.positions[i]
            hash_of_prefix = prefix_hash(sample.seed, sentence, position)
            for c in range(tile, min(tile + _COLUMNS, last)):
                m, value = start + c, block[row, c]
                # The exponent field is floor(log2 |value|) + 127, exactly; zero and denormals lie far below.
                exponent = ((bits[row, c] >> 23) & 0xFF) - 127
                away = min(max(exponent - SMALLEST + 1, 0), SIDE)
                counts[m, SIDE + (away if value > 0 else -away)] += 1
                hash_ = _mix(hash_of_prefix ^ uint64(m))
                if value > 0 and hash_ < highest[m, EXAMPLES - 1]:
                    _keep_(sample.examples, m, hash_, value, sentence, position)


@compiled
def _merge_(examples: Examples, others: Examples) -> None:
    empty = uint64(0xFFFFFFFFFFFFFFFF)
    for m in range(others.hashes.shape[0]):
        for i in range(EXAMPLES):
            if others.hashes[m, i] != empty:
                _keep_(
                    examples, m, others.hashes[m, i], others.coefficients[m, i], others.sentences[m, i],
                    others.positions[m, i],
                )  # fmt: skip


class OrdinarySample:
    """Histogram and example prefixes of one layer's memories."""

    def __init__(self, memories: int, seed: int, every: int) -> None:
        self.seed = seed
        self.limit = np.uint64((2**64 - 1) // every)
        self.counts = np.zeros((memories, BINS), np.int64)
        shape = (memories, EXAMPLES)
        self.examples = Examples(
            np.full(shape, 2**64 - 1, np.uint64),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
        )

    def kept(self) -> SampleArrays:
        """The arrays of the sample as the compiled loops take them."""
        return SampleArrays(self.counts, self.examples, self.seed, self.limit)

    def merge(self, other: OrdinarySample) -> None:
        self.counts += other.counts
        _merge_(self.examples, other.examples)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"sample.counts": self.counts} | {f"sample.{n}": a for n, a in self.examples._asdict().items()}

    def restore_(self, saved: dict[str, NDArray[Any]]) -> None:
        for name, array in self.arrays().items():
            array[:] = saved[name]
