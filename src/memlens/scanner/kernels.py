"""Compiled loops of a scan.

A block holds the coefficients of one group of memories in one batch: float32 [rows, memories], in C order. `Candidates`
lists the rows of a block that are candidate prefixes, sorted by sentence and position. `add_block_` adds a range of
columns of a block to the state of a layer, in tiles of COLUMNS columns and groups of up to SENTENCES sentences:

1. Read each sentence without branches, and compute the maximum, the minimum, the sum and the number of positive
   coefficients of each memory (`_scan_sentence_`). The speed of this step is limited by memory bandwidth.
2. For gated memories, read the sentence again while it is in the cache, and compute the maximum and the number of
   coefficients in each sign quadrant. Insert the few prefixes that qualify for a list (`_scan_quadrants_`).
3. After each group of sentences, compare the extremes of each memory with the last entry of its list of triggers. Only
   memories with an extreme that qualifies are read again (`_update_lists_`).
4. After each tile, add sums, extremes and counts to the totals of the layer (`_add_sums_`).
5. Add the prefixes of a random sample to the histograms and to the example prefixes (`sample_block_`).

Lists have a total order: higher scores first, then lower sentence numbers, then lower positions. Sums are whole
numbers, and the sample depends only on seed, sentence and position. The state is therefore the same for any order of
blocks, batches and merges.

A list entry consists of a 64-bit key and a position. The high 32 bits of the key are the bits of a positive float32
score. The low 32 bits are the complement of the sentence number. Comparing two keys as integers therefore compares
scores first, then sentences. The key of an empty entry is 0. In lists of bottom triggers, the score is the coefficient
times -1.

Numba turns loops into vector code only if they have no branches. The loops below therefore use conditional expressions,
float32 counters and unrolled rows, and fill arrays by assignment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from memlens.compiling import compiled, compiled_part
from memlens.errors import SettingError

if TYPE_CHECKING:
    import torch

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]
KeyArray = NDArray[np.uint64]

# Measured (docs/benchmarks.md): with this tile width, the accumulators of a group of sentences fit into the
# second-level cache, and rows of usual widths are read in one piece.
COLUMNS = 1536
ROWS = 4  # rows read together in the first pass
SENTENCES = 16  # number of sentences to read before the lists and their thresholds are updated

EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # edges of position ranges: 0, 1, 2 to 3, 4 to 7, ..., 512 and more
BUCKETS = len(EDGES) + 1
UNIT = 2.0**-20  # sums are counted in integer multiples of UNIT, which add up to the same bits in any order
KEPT = 5  # number of prefixes listed for each sign quadrant
DRAWN = 100  # number of prefixes in the random sample of each expert
EXAMPLES = 8  # number of example prefixes per memory; the index leaves out those that are triggers
SMALLEST, LARGEST = -10, 5  # exponents of histogram edges: |m| < 2^-10 in the middle bin, |m| >= 2^5 in the outer bins
SIDE = LARGEST - SMALLEST + 1
BINS = 2 * SIDE + 1

FINE, TOO_LARGE = -1, -2  # status codes of a block; any other status is the first column whose sum is not finite
_LOW, _SHIFT = uint64(0xFFFFFFFF), uint64(32)
_NO_HASH = uint64(0xFFFFFFFFFFFFFFFF)  # marks empty entries of Examples
_SMALLEST_SCORE = np.float32(1e-45)
_CACHE_LINE = 16  # number of float32 columns in a cache line
_WORD = 8  # bytes in a word


# --- records ---------------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """The rows of a block that are candidate prefixes, sorted by sentence, then by position."""

    rows: IntArray  # [n]: row of the block
    sentences: IntArray  # [n]: sentence number
    positions: IntArray  # [n] int32
    buckets: IntArray  # [n] int32: index of the position range, below BUCKETS
    starts: IntArray  # [sentences + 1]: index at which each sentence starts in the arrays above


def make_candidates(rows: IntArray, sentences: IntArray, positions: IntArray) -> Candidates:
    """Return rows of a block as sorted candidates. Raises SettingError if a sentence id needs more than 32 bits."""
    order = np.lexsort((positions, sentences))
    rows, sentences, positions = rows[order], np.asarray(sentences)[order], np.asarray(positions)[order]
    if len(sentences) and not 0 <= int(sentences[0]) <= int(sentences[-1]) < 2**32 - 1:
        raise SettingError("a scan holds at most 4,294,967,294 sentences; split the corpus into several indexes")
    starts = np.flatnonzero(np.r_[True, sentences[1:] != sentences[:-1], True]) if len(sentences) else np.zeros(1)
    buckets = np.searchsorted(EDGES, positions, side="right")
    return Candidates(
        rows.astype(np.int64), sentences.astype(np.int64), positions.astype(np.int32), buckets.astype(np.int32),
        starts.astype(np.int64),
    )  # fmt: skip


class Lists(NamedTuple):
    """One sorted list of prefixes per memory."""

    keys: KeyArray  # [memories, top]
    positions: IntArray  # [memories, top] int32
    filled: IntArray  # [memories] int32: number of entries

    @classmethod
    def empty(cls, memories: int, top: int) -> Lists:
        shape = (memories, top)
        return cls(np.zeros(shape, np.uint64), np.zeros(shape, np.int32), np.zeros(memories, np.int32))

    def part(self, memories: slice) -> Lists:
        """Return views of the lists for a range of memories."""
        return Lists(self.keys[memories], self.positions[memories], self.filled[memories])

    def scores(self) -> NDArray[np.float32]:
        """Return the scores [memories, top]. Empty entries have a score of 0."""
        return (self.keys >> np.uint64(32)).astype(np.uint32).view(np.float32)

    def sentences(self) -> NDArray[np.int64]:
        """Return the sentence numbers [memories, top]. In empty entries, the number has no meaning."""
        return (np.uint64(0xFFFFFFFF) - (self.keys & np.uint64(0xFFFFFFFF))).astype(np.int64)


class Totals(NamedTuple):
    """Statistics of all prefixes of a scan, for each memory of a layer."""

    total: IntArray  # [memories] int64: sum of coefficients, in UNITs
    fired: IntArray  # [memories, BUCKETS] int64: number of prefixes with a positive coefficient
    highest: FloatArray  # [memories] float32
    lowest: FloatArray  # [memories] float32

    @classmethod
    def empty(cls, memories: int) -> Totals:
        return cls(
            np.zeros(memories, np.int64),
            np.zeros((memories, BUCKETS), np.int64),
            np.full(memories, -np.inf, np.float32),
            np.full(memories, np.inf, np.float32),
        )


class Sums(NamedTuple):
    """The statistics of `Totals` for a range of columns of a block, before they are checked to be finite."""

    total: FloatArray  # [columns] float64: sum of coefficients
    fired: IntArray | FloatArray  # [BUCKETS or more, columns]
    highest: FloatArray  # float32
    lowest: FloatArray  # float32


class Gates(NamedTuple):
    """The gate values of a block, before the activation function."""

    values: FloatArray  # [rows, any]
    start: int  # column of the first memory

    @classmethod
    def of(cls, gates: torch.Tensor) -> Gates:
        """Wrap gate values [rows, memories], without a copy if they are columns of a wider array."""
        gates = gates.float()
        wide, start, storage = gates.stride(0), int(gates.storage_offset()), gates.untyped_storage().nbytes() // 4
        first = start - start % wide if wide else start
        if gates.stride(1) == 1 and wide >= gates.shape[1] and first + len(gates) * wide <= storage:
            return cls(gates.as_strided((len(gates), wide), (wide, 1), first).numpy(), start - first)
        return cls(gates.contiguous().numpy(), 0)


NO_GATES = Gates(np.zeros((1, 1), np.float32), 0)


class Quadrants(NamedTuple):
    """The number of prefixes, and the best prefixes, in each sign quadrant of each gated memory.

    A gated coefficient is f(g) u, where g and u are the products of the block's input with the gate row and the up row.
    The quadrant of the coefficient is (sign of g, sign of u), after Gerstner and Schütze,
    https://arxiv.org/abs/2505.17936. The sign of u follows from the signs of the coefficient and of f(g), so the loops
    only compare coefficients and gates with 0. A coefficient of 0 belongs to no quadrant.

    A gate is open if it is above 0, otherwise closed. The quadrants are numbered in this order: open gate and positive
    coefficient, open and negative, closed and positive, closed and negative.
    """

    counts: IntArray  # [memories, 4] int64
    lists: Lists  # [4 * memories, KEPT]: row 4 m + quadrant, scores are |coefficients|
    turns: NDArray[np.bool_]  # [memories]: whether f(g) is negative for a negative gate, as with SiLU and GELU

    @classmethod
    def empty(cls, memories: int) -> Quadrants:
        return cls(np.zeros((memories, 4), np.int64), Lists.empty(4 * memories, KEPT), np.zeros(memories, np.bool_))

    def order(self) -> IntArray:
        """Return, for each memory, the numbers of the quadrants ++, +-, -+ and -- of (g, u), [memories, 4]."""
        return np.where(self.turns[:, None], [0, 1, 3, 2], [0, 1, 2, 3])

    def part(self, memories: slice) -> Quadrants:
        """Return views of these arrays for a range of memories."""
        lists = self.lists.part(slice(4 * memories.start, 4 * memories.stop))
        return Quadrants(self.counts[memories], lists, self.turns[memories])


class Examples(NamedTuple):
    """Example prefixes of each memory: the sampled prefixes with a positive coefficient that have the lowest hashes."""

    hashes: KeyArray  # [memories, EXAMPLES]; _NO_HASH in empty entries
    coefficients: FloatArray
    sentences: IntArray
    positions: IntArray


class Sample(NamedTuple):
    """Histograms and examples of a pseudo-random sample of prefixes."""

    counts: IntArray  # [memories, BINS] int64
    examples: Examples
    seed: int
    limit: np.uint64  # highest hash of a prefix in the sample

    @classmethod
    def empty(cls, memories: int, seed: int, every: int) -> Sample:
        """Return an empty sample, which will take one in `every` prefixes."""
        shape = (memories, EXAMPLES)
        examples = Examples(
            np.full(shape, _NO_HASH, np.uint64),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
        )
        return cls(np.zeros((memories, BINS), np.int64), examples, seed, np.uint64((2**64 - 1) // every))


class Reach(NamedTuple):
    """The number of prefixes that were sent to each set of memories, by position range.

    Row 0 is for memories that receive every token, row 1 + e for the memories of routed expert e.
    """

    prefixes: IntArray  # [1 + experts, BUCKETS] int64
    sentences: IntArray  # [1 + experts, BUCKETS] int64: number of sentences with at least one such prefix

    @classmethod
    def empty(cls, experts: int) -> Reach:
        shape = (1 + experts, BUCKETS)
        return cls(np.zeros(shape, np.int64), np.zeros(shape, np.int64))


class Routing(NamedTuple):
    """The prefixes that the router sent to each expert."""

    chosen: IntArray  # [experts] int64: number of prefixes
    weight: IntArray  # [experts] int64: sum of the router weights, in UNITs
    heaviest: Lists  # [experts, top]: prefixes with the largest router weights
    drawn: Lists  # [experts, DRAWN]: random prefixes, chosen by the highest hashes

    @classmethod
    def empty(cls, experts: int, top: int) -> Routing:
        counts = np.zeros(experts, np.int64), np.zeros(experts, np.int64)
        return cls(*counts, Lists.empty(experts, top), Lists.empty(experts, DRAWN))


class LayerArrays(NamedTuple):
    """All arrays of a layer that `add_block_` updates."""

    top: Lists
    bottom: Lists  # lists for a single memory if bottom triggers are not collected
    totals: Totals
    quadrants: Quadrants  # empty if the layer is not gated
    sample: Sample


# --- one block --------------------------------------------------------------------------------------------------------


@compiled
def add_block_(
    arrays: LayerArrays, block: FloatArray, gates: Gates, candidates: Candidates, first_column: int, last_column: int,
    start: int, keep_bottom: bool, one_a_sentence: bool, has_gates: bool,
) -> int:  # fmt: skip
    """Add the columns [first_column, last_column) of a block [rows, memories] to a layer. Returns a status code.

    `start` is the number of the memory in the block's first column. If `one_a_sentence` is true, a list holds only the
    best prefix of each sentence. All steps are in one call, because the blocks of experts are small.
    """
    status = _scan_block_(
        block, candidates, first_column, last_column, start, arrays.top, arrays.bottom, keep_bottom, one_a_sentence,
        arrays.totals, gates, arrays.quadrants, has_gates,
    )  # fmt: skip
    sample_block_(arrays.sample, block, candidates, first_column, last_column, start)
    return status


@compiled_part
def _scan_block_(
    block: FloatArray,
    candidates: Candidates,
    first_column: int,
    last_column: int,
    start: int,
    top: Lists,
    bottom: Lists,
    keep_bottom: bool,
    one_a_sentence: bool,
    totals: Totals,
    gates: Gates,
    quadrants: Quadrants,
    has_gates: bool,
) -> int:
    """Run steps 1 to 4 of the algorithm above. Returns a status code."""
    one, columns = np.float32(1), min(COLUMNS, last_column - first_column)
    shape = (SENTENCES, columns)
    peak, peak_step = np.empty(shape, np.float32), np.empty(shape, np.float32)
    trough, trough_step = np.empty(shape, np.float32), np.empty(shape, np.float32)
    summed, fired = np.empty(columns, np.float32), np.empty((BUCKETS + 1, columns), np.float32)
    group_peak, group_trough = np.empty(columns, np.float32), np.empty(columns, np.float32)
    sums = Sums(np.empty(columns, np.float64), fired, np.empty(columns, np.float32), np.empty(columns, np.float32))
    starts = candidates.starts
    status, running = FINE, _running_quadrants(columns if has_gates else 0)
    for tile in range(first_column, last_column, COLUMNS):
        width, memory = min(COLUMNS, last_column - tile), start + tile
        if has_gates:
            _begin_quadrants_(running, quadrants.lists, memory, width)
        sums.total[:], sums.fired[:], sums.highest[:], sums.lowest[:] = 0, 0, -np.inf, np.inf
        first = 0
        while first < starts.shape[0] - 1:
            last = _group_end(starts, first, one_a_sentence)
            group_peak[:], group_trough[:] = -np.inf, np.inf
            for s in range(first, last):
                g = s - first
                _scan_sentence_(
                    block, candidates, s, tile, width, peak[g], trough[g], peak_step[g], trough_step[g], summed, fired
                )
                for c in range(width):
                    sums.total[c] += summed[c]
                    group_peak[c] = peak[g, c] if peak[g, c] > group_peak[c] else group_peak[c]
                    group_trough[c] = trough[g, c] if trough[g, c] < group_trough[c] else group_trough[c]
                if has_gates:
                    _scan_quadrants_(
                        block, gates, candidates, s, tile, width, memory, running, quadrants.lists, one_a_sentence
                    )
            for c in range(width):
                sums.highest[c] = max(sums.highest[c], group_peak[c])
                sums.lowest[c] = min(sums.lowest[c], group_trough[c])
            region = _Region(first, last, tile, width, memory, one_a_sentence)
            _update_lists_(block, candidates, region, one, group_peak, peak, peak_step, top)
            if keep_bottom:
                _update_lists_(block, candidates, region, -one, group_trough, trough, trough_step, bottom)
            first = last
        if has_gates:
            for c in range(width):
                for quadrant in range(4):
                    quadrants.counts[memory + c, quadrant] += np.int64(running.counts[quadrant, c])
        tile_status = _add_sums_(totals, sums, memory, width)
        status = worse_status(status, tile + tile_status if tile_status >= 0 else tile_status)
    return status


@compiled_part
def _group_end(starts: IntArray, first: int, one_a_sentence: bool) -> int:
    """Return the end (exclusive) of the group of sentences that starts with `first`."""
    last, rows = first, 0
    while last < starts.shape[0] - 1 and last - first < SENTENCES:
        rows += starts[last + 1] - starts[last]
        if last > first and not one_a_sentence and rows > 4 * SENTENCES:
            break
        last += 1
    return last


@compiled_part
def _add_sums_(totals: Totals, sums: Sums, start: int, width: int) -> int:
    """Add the sums of the first `width` columns to the totals of the memories from `start` on. Returns a status code.

    If one of the sums is not finite or too large, nothing is added.
    """
    status = FINE
    for c in range(width):
        if not np.isfinite(sums.total[c]):
            return c
        if abs(sums.total[c]) > 2.0**62 * UNIT:
            status = TOO_LARGE
    if status != FINE:
        return status
    for c in range(width):
        m = start + c
        totals.total[m] += np.int64(np.rint(sums.total[c] / UNIT))
        # adding 0.0 turns -0.0 into 0.0; otherwise the order of batches would decide which zero a maximum keeps
        totals.highest[m] = max(totals.highest[m], sums.highest[c] + np.float32(0))
        totals.lowest[m] = min(totals.lowest[m], sums.lowest[c] + np.float32(0))
        for b in range(BUCKETS):
            totals.fired[m, b] += np.int64(sums.fired[b, c])
    return status


@compiled_part
def worse_status(status: int, other: int) -> int:
    """Return the worse of two statuses: the first column with a sum that is not finite, else TOO_LARGE, else FINE."""
    if status >= 0 and other >= 0:
        return min(status, other)
    return max(status, other) if status >= 0 or other >= 0 else min(status, other)


# --- step 1: one sentence ---------------------------------------------------------------------------------------------


@compiled_part
def _scan_sentence_(
    block: FloatArray,
    candidates: Candidates,
    sentence: int,
    tile: int,
    width: int,
    high: FloatArray,  # [columns] out: maximum
    low: FloatArray,  # [columns] out: minimum
    high_step: FloatArray,  # [columns] out: number of the first group of ROWS rows that contains the maximum
    low_step: FloatArray,  # [columns] out: number of the first group that contains the minimum
    summed: FloatArray,  # [columns] out
    fired: FloatArray,  # [BUCKETS + 1, columns]: counts to add to; the last row is not used
) -> None:
    """Read the columns [tile, tile + width) of one sentence, ROWS rows at a time."""
    one, none = np.float32(1), np.float32(0)
    rows, buckets = candidates.rows, candidates.buckets
    start, stop = candidates.starts[sentence], candidates.starts[sentence + 1]
    high[:], low[:], summed[:] = -np.inf, np.inf, 0
    whole = start + (stop - start) // ROWS * ROWS
    for i in range(start, whole, ROWS):
        row_a, row_b = block[rows[i], tile : tile + width], block[rows[i + 1], tile : tile + width]
        row_c, row_d = block[rows[i + 2], tile : tile + width], block[rows[i + 3], tile : tile + width]
        alike = buckets[i] == buckets[i + 3]  # positions ascend, so comparing the first with the last is enough
        counts = fired[buckets[i] if alike else BUCKETS]
        step = np.float32((i - start) // ROWS)
        for c in range(width):
            v_a, v_b, v_c, v_d = row_a[c], row_b[c], row_c[c], row_d[c]
            high_ab, high_cd = v_a if v_a > v_b else v_b, v_c if v_c > v_d else v_d
            low_ab, low_cd = v_a if v_a < v_b else v_b, v_c if v_c < v_d else v_d
            highest, lowest = high_ab if high_ab > high_cd else high_cd, low_ab if low_ab < low_cd else low_cd
            high_step[c] = step if highest > high[c] else high_step[c]
            low_step[c] = step if lowest < low[c] else low_step[c]
            high[c] = highest if highest > high[c] else high[c]
            low[c] = lowest if lowest < low[c] else low[c]
            summed[c] += (v_a + v_b) + (v_c + v_d)
            fired_ab = (one if v_a > 0 else none) + (one if v_b > 0 else none)
            counts[c] += fired_ab + ((one if v_c > 0 else none) + (one if v_d > 0 else none))
        if not alike:
            for j in range(i, i + ROWS):
                _count_positive_(block[rows[j], tile : tile + width], fired[buckets[j]], width)
    step = np.float32((whole - start) // ROWS)
    for i in range(whole, stop):
        row, counts = block[rows[i], tile : tile + width], fired[buckets[i]]
        for c in range(width):
            value = row[c]
            high_step[c] = step if value > high[c] else high_step[c]
            low_step[c] = step if value < low[c] else low_step[c]
            high[c] = value if value > high[c] else high[c]
            low[c] = value if value < low[c] else low[c]
            summed[c] += value
            counts[c] += one if value > 0 else none


@compiled_part
def _count_positive_(row: FloatArray, counts: FloatArray, width: int) -> None:
    one, none = np.float32(1), np.float32(0)
    for c in range(width):
        counts[c] += one if row[c] > 0 else none


# --- step 2: sign quadrants -------------------------------------------------------------------------------------------


class _RunningQuadrants(NamedTuple):
    """Intermediate results for the columns of a tile, by quadrant in the order of `Quadrants`."""

    extremes: FloatArray  # [4, columns]: maximum, minimum, maximum, minimum of one sentence
    counts: FloatArray  # [4, columns]: counts of the whole block
    thresholds: FloatArray  # [4, columns]: minimum |extreme| that qualifies for the list
    reached: IntArray  # [columns] uint8: whether an extreme qualifies for its list
    zeros: FloatArray  # [columns]: zeros for padding


@compiled_part
def _running_quadrants(columns: int) -> _RunningQuadrants:
    shape, whole = (4, columns), (columns + _WORD - 1) // _WORD * _WORD
    extremes, counts, thresholds = np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(shape, np.float32)
    return _RunningQuadrants(extremes, counts, thresholds, np.zeros(whole, np.uint8), np.zeros(columns, np.float32))


@compiled_part
def _begin_quadrants_(running: _RunningQuadrants, lists: Lists, memory: int, width: int) -> None:
    """Reset the results for a tile whose first column belongs to memory number `memory`."""
    running.counts[:] = 0
    running.reached[:] = 0
    for quadrant in range(4):
        for c in range(width):
            running.thresholds[quadrant, c] = _quadrant_threshold(lists, 4 * (memory + c) + quadrant)


@compiled_part
def _quadrant_threshold(lists: Lists, row: int) -> np.float32:
    return max(_score_of(lists.keys[row, lists.keys.shape[1] - 1]), _SMALLEST_SCORE)


@compiled_part
def _scan_quadrants_(
    block: FloatArray, gates: Gates, candidates: Candidates, sentence: int, tile: int, width: int, memory: int,
    running: _RunningQuadrants, lists: Lists, one_a_sentence: bool,
) -> None:  # fmt: skip
    """Update counts and extremes with one sentence, and insert the prefixes that qualify for a list."""
    _read_quadrants_(block, gates, candidates, sentence, tile, width, running)
    reached = running.reached
    _compare_(
        running.extremes[0], running.extremes[1], running.extremes[2], running.extremes[3],
        running.thresholds[0], running.thresholds[1], running.thresholds[2], running.thresholds[3], reached, width,
    )  # fmt: skip
    words = reached.view(np.uint64)
    for word in range((width + _WORD - 1) // _WORD):
        if words[word]:
            for c in range(word * _WORD, min((word + 1) * _WORD, width)):
                if reached[c]:
                    _insert_quadrants_(
                        block, gates, candidates, sentence, tile, c, memory, running, lists, one_a_sentence
                    )


@compiled_part
def _compare_(
    high_open: FloatArray, low_open: FloatArray, high_shut: FloatArray, low_shut: FloatArray,
    least_a: FloatArray, least_b: FloatArray, least_c: FloatArray, least_d: FloatArray, reached: IntArray, width: int,
) -> None:  # fmt: skip
    for c in range(width):
        above = (high_open[c] >= least_a[c]) | (high_shut[c] >= least_c[c])
        reached[c] = above | (-low_open[c] >= least_b[c]) | (-low_shut[c] >= least_d[c])


@compiled_part
def _read_quadrants_(
    block: FloatArray, gates: Gates, candidates: Candidates, sentence: int, tile: int, width: int,
    running: _RunningQuadrants,
) -> None:  # fmt: skip
    """Compute the extremes and counts of one sentence, four rows at a time. The last group is padded with zeros."""
    start, stop = candidates.starts[sentence], candidates.starts[sentence + 1]
    running.extremes[:] = 0
    for i in range(start, stop, 4):
        row_a, gate_a = _row_and_gates(block, gates, candidates, i, stop, tile, width, running)
        row_b, gate_b = _row_and_gates(block, gates, candidates, i + 1, stop, tile, width, running)
        row_c, gate_c = _row_and_gates(block, gates, candidates, i + 2, stop, tile, width, running)
        row_d, gate_d = _row_and_gates(block, gates, candidates, i + 3, stop, tile, width, running)
        _read_four_rows_(
            row_a, row_b, row_c, row_d, gate_a, gate_b, gate_c, gate_d,
            running.extremes[0], running.extremes[1], running.extremes[2], running.extremes[3],
            running.counts[0], running.counts[1], running.counts[2], running.counts[3],
        )  # fmt: skip


@compiled_part
def _row_and_gates(
    block: FloatArray, gates: Gates, candidates: Candidates, i: int, stop: int, tile: int, width: int,
    running: _RunningQuadrants,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    if i >= stop:
        return running.zeros[:width], running.zeros[:width]
    row, first = candidates.rows[i], gates.start + tile
    return block[row, tile : tile + width], gates.values[row, first : first + width]


@compiled_part
def _read_four_rows_(
    row_a: FloatArray, row_b: FloatArray, row_c: FloatArray, row_d: FloatArray,
    gate_a: FloatArray, gate_b: FloatArray, gate_c: FloatArray, gate_d: FloatArray,
    high_open: FloatArray, low_open: FloatArray, high_shut: FloatArray, low_shut: FloatArray,
    above_open: FloatArray, below_open: FloatArray, above_shut: FloatArray, below_shut: FloatArray,
) -> None:  # fmt: skip
    one, none = np.float32(1), np.float32(0)
    for c in range(row_a.shape[0]):
        v_a, v_b, v_c, v_d = row_a[c], row_b[c], row_c[c], row_d[c]
        a, b = v_a if gate_a[c] > 0 else none, v_b if gate_b[c] > 0 else none
        d, e = v_c if gate_c[c] > 0 else none, v_d if gate_d[c] > 0 else none
        high_ab, high_de, low_ab, low_de = a if a > b else b, d if d > e else e, a if a < b else b, d if d < e else e
        high, low = high_ab if high_ab > high_de else high_de, low_ab if low_ab < low_de else low_de
        high_open[c] = high if high > high_open[c] else high_open[c]
        low_open[c] = low if low < low_open[c] else low_open[c]
        above_ab, above_de = (one if a > 0 else none) + (one if b > 0 else none), (one if d > 0 else none)
        below_ab, below_de = (one if a < 0 else none) + (one if b < 0 else none), (one if d < 0 else none)
        above_open[c] += above_ab + (above_de + (one if e > 0 else none))
        below_open[c] += below_ab + (below_de + (one if e < 0 else none))
        a, b, d, e = v_a - a, v_b - b, v_c - d, v_d - e  # 0 where the gate is open
        high_ab, high_de, low_ab, low_de = a if a > b else b, d if d > e else e, a if a < b else b, d if d < e else e
        high, low = high_ab if high_ab > high_de else high_de, low_ab if low_ab < low_de else low_de
        high_shut[c] = high if high > high_shut[c] else high_shut[c]
        low_shut[c] = low if low < low_shut[c] else low_shut[c]
        above_ab, above_de = (one if a > 0 else none) + (one if b > 0 else none), (one if d > 0 else none)
        below_ab, below_de = (one if a < 0 else none) + (one if b < 0 else none), (one if d < 0 else none)
        above_shut[c] += above_ab + (above_de + (one if e > 0 else none))
        below_shut[c] += below_ab + (below_de + (one if e < 0 else none))


@compiled_part
def _insert_quadrants_(
    block: FloatArray, gates: Gates, candidates: Candidates, sentence: int, tile: int, c: int, memory: int,
    running: _RunningQuadrants, lists: Lists, one_a_sentence: bool,
) -> None:  # fmt: skip
    """Insert the prefixes of one sentence that qualify for a list of the memory in column c of the tile."""
    m = tile + c
    for quadrant in range(4):
        sign = np.float32(1 - 2 * (quadrant % 2))
        extreme, threshold = sign * running.extremes[quadrant, c], running.thresholds[quadrant, c]
        if extreme < threshold:
            continue
        row = 4 * (memory + c) + quadrant
        for i in range(candidates.starts[sentence], candidates.starts[sentence + 1]):
            score = sign * block[candidates.rows[i], m]
            is_open = gates.values[candidates.rows[i], gates.start + m] > 0
            if score < threshold or is_open != (quadrant < 2) or (one_a_sentence and score != extreme):
                continue
            _insert_(lists, row, _make_key(score, candidates.sentences[i]), candidates.positions[i], one_a_sentence)
            if one_a_sentence:
                break
        running.thresholds[quadrant, c] = _quadrant_threshold(lists, row)


# --- step 3: lists of triggers ----------------------------------------------------------------------------------------


class _Region(NamedTuple):
    """The sentences [first, last) and columns [tile, tile + width) that were read."""

    first: int
    last: int
    tile: int
    width: int
    memory: int  # number of the memory in the first column
    one_a_sentence: bool


@compiled_part
def _update_lists_(
    block: FloatArray, candidates: Candidates, region: _Region, sign: np.float32, extremes: FloatArray,
    peaks: FloatArray, peak_steps: FloatArray, lists: Lists,
) -> None:  # fmt: skip
    """Update the lists of top triggers if the sign is 1, or of bottom triggers if it is -1."""
    for c in range(region.width):
        extreme = sign * extremes[c]
        if extreme > 0 and extreme >= _score_of(lists.keys[region.memory + c, lists.keys.shape[1] - 1]):
            _insert_column_(block, candidates, region, c, sign, peaks[:, c], peak_steps[:, c], lists)


@compiled_part
def _insert_column_(
    block: FloatArray,
    candidates: Candidates,
    region: _Region,
    c: int,
    sign: np.float32,
    peaks: FloatArray,  # [SENTENCES]: extreme of column c in each sentence
    peak_steps: FloatArray,  # [SENTENCES]: number of the group of ROWS rows that contains the extreme
    lists: Lists,
) -> None:
    """Read column c of the tile again and insert the candidates that qualify for the list of its memory."""
    starts, rows, column, m = candidates.starts, candidates.rows, region.tile + c, region.memory + c
    threshold = _score_of(lists.keys[m, lists.keys.shape[1] - 1])
    for s in range(region.first, region.last):
        score = sign * peaks[s - region.first]
        if score < threshold or score <= 0:
            continue
        if region.one_a_sentence:
            i = starts[s] + ROWS * int(peak_steps[s - region.first])
            stop = min(i + ROWS, starts[s + 1])
            while i < stop - 1 and block[rows[i], column] != peaks[s - region.first]:
                i += 1
            _insert_(lists, m, _make_key(score, candidates.sentences[i]), candidates.positions[i], True)
            continue
        for i in range(starts[s], starts[s + 1]):
            score = sign * block[rows[i], column]
            if score >= threshold and score > 0:
                _insert_(lists, m, _make_key(score, candidates.sentences[i]), candidates.positions[i], False)


@compiled_part
def _insert_(lists: Lists, m: int, key: int, position: int, one_a_sentence: bool) -> None:
    """Insert one prefix into the list of memory m, unless all entries of a full list are better."""
    keys, positions, filled = lists
    top = keys.shape[1]
    if filled[m] == top and keys[m, top - 1] > key:
        return
    if one_a_sentence and _contains(lists, m, key & _LOW):
        for i in range(filled[m]):
            if (keys[m, i] & _LOW) == (key & _LOW):
                if keys[m, i] > key or (keys[m, i] == key and positions[m, i] <= position):
                    return
                _remove_(lists, m, i)
                break
    place = filled[m]
    while place > 0 and (
        keys[m, place - 1] < key or (keys[m, place - 1] == key and positions[m, place - 1] > position)
    ):
        if place < top:
            keys[m, place] = keys[m, place - 1]
            positions[m, place] = positions[m, place - 1]
        place -= 1
    if place < top:
        keys[m, place], positions[m, place] = key, position
        filled[m] = min(filled[m] + 1, top)


@compiled_part
def _remove_(lists: Lists, m: int, place: int) -> None:
    for i in range(place, lists.filled[m] - 1):
        lists.keys[m, i] = lists.keys[m, i + 1]
        lists.positions[m, i] = lists.positions[m, i + 1]
    lists.filled[m] -= 1
    lists.keys[m, lists.filled[m]] = 0


@compiled_part
def _contains(lists: Lists, m: int, low: int) -> bool:
    """Return True if the list of memory m holds the sentence whose complement is `low`."""
    is_there = False
    for i in range(lists.filled[m]):  # no early exit, so that several entries are compared at once
        is_there |= (lists.keys[m, i] & _LOW) == low
    return is_there


@compiled_part
def _make_key(score: np.float32, sentence: int) -> int:
    return (uint64(np.float32(score).view(np.uint32)) << _SHIFT) | (_LOW - uint64(sentence))


@compiled_part
def _score_of(key: int) -> np.float32:
    return np.uint32(key >> _SHIFT).view(np.float32)


@compiled
def insert_all_(
    lists: Lists, memories: IntArray, scores: FloatArray, sentences: IntArray, positions: IntArray, one_a_sentence: bool
) -> None:
    """Insert n prefixes, each into the list of its memory. Prefixes with a score of 0 or less are skipped."""
    for i in range(memories.shape[0]):
        if scores[i] > 0:
            _insert_(lists, memories[i], _make_key(scores[i], sentences[i]), positions[i], one_a_sentence)


@compiled
def merge_lists_(lists: Lists, others: Lists, one_a_sentence: bool) -> None:
    """Insert every entry of `others` into `lists`."""
    for m in range(others.filled.shape[0]):
        for i in range(others.filled[m]):
            _insert_(lists, m, others.keys[m, i], others.positions[m, i], one_a_sentence)


# --- step 5: a sample of prefixes -------------------------------------------------------------------------------------


def bin_edges() -> list[float]:
    """Return the finite edges of the histogram bins in ascending order."""
    magnitudes = [2.0**e for e in range(SMALLEST, LARGEST + 1)]
    return [-x for x in reversed(magnitudes)] + magnitudes


@compiled
def sample_block_(
    sample: Sample, block: FloatArray, candidates: Candidates, first_column: int, last_column: int, start: int
) -> None:
    """Add the sampled candidates of a range of columns of a block to the histograms and examples."""
    bits, counts, hashes = block.view(np.int32), sample.counts, sample.examples.hashes
    sampled = sampled_candidates(sample, candidates)
    for tile in range(first_column, last_column, _CACHE_LINE):  # one cache line at a time, to keep counts in the cache
        for i in sampled:
            row, sentence, position = candidates.rows[i], candidates.sentences[i], candidates.positions[i]
            hash_of_prefix = prefix_hash(sample.seed, sentence, position)
            for c in range(tile, min(tile + _CACHE_LINE, last_column)):
                m, value = start + c, block[row, c]
                # The exponent bits are floor(log2 |value|) + 127. Those of zero and denormal numbers are 0.
                exponent = ((bits[row, c] >> 23) & 0xFF) - 127
                away = min(max(exponent - SMALLEST + 1, 0), SIDE)
                counts[m, SIDE + (away if value > 0 else -away)] += 1
                hash_ = _mix(hash_of_prefix ^ uint64(m))
                if value > 0 and hash_ < hashes[m, EXAMPLES - 1]:
                    _insert_example_(sample.examples, m, hash_, value, sentence, position)


@compiled
def sampled_candidates(sample: Sample, candidates: Candidates) -> IntArray:
    """Return the indices of the candidates that are in the sample."""
    sampled, count = np.empty(candidates.rows.shape[0], np.int64), 0
    for i in range(candidates.rows.shape[0]):
        sampled[count] = i
        count += prefix_hash(sample.seed, candidates.sentences[i], candidates.positions[i]) <= sample.limit
    return sampled[:count]


@compiled_part
def _insert_example_(
    examples: Examples, m: int, hash_: int, coefficient: np.float32, sentence: int, position: int
) -> None:
    """Insert a prefix into the examples of memory m, which are sorted by hash."""
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


@compiled
def merge_examples_(examples: Examples, others: Examples) -> None:
    """Insert every example of `others` into `examples`."""
    for m in range(others.hashes.shape[0]):
        for i in range(EXAMPLES):
            if others.hashes[m, i] != _NO_HASH:
                _insert_example_(
                    examples, m, others.hashes[m, i], others.coefficients[m, i], others.sentences[m, i],
                    others.positions[m, i],
                )  # fmt: skip


@compiled
def prefix_hashes(seed: int, sentences: IntArray, positions: IntArray) -> KeyArray:
    """Return the hash of each prefix, [n]."""
    hashes = np.empty(sentences.shape[0], np.uint64)
    for i in range(sentences.shape[0]):
        hashes[i] = prefix_hash(seed, sentences[i], positions[i])
    return hashes


@compiled_part
def prefix_hash(seed: int, sentence: int, position: int) -> int:
    """Return a 64-bit hash of a prefix that is the same on every machine."""
    return _mix(_mix(_mix(uint64(seed)) ^ uint64(sentence)) ^ uint64(position + 1))


@compiled_part
def _mix(x: int) -> int:
    """Return the next number of splitmix64 after x."""
    x = uint64(x) + uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


# --- counts of prefixes and experts -----------------------------------------------------------------------------------


@compiled
def count_reach_(reach: Reach, row: int, candidates: Candidates) -> None:
    """Add the number of candidates to a row of `reach`, by position range."""
    for s in range(candidates.starts.shape[0] - 1):
        before = -1
        for i in range(candidates.starts[s], candidates.starts[s + 1]):
            bucket = candidates.buckets[i]
            reach.prefixes[row, bucket] += 1
            reach.sentences[row, bucket] += bucket != before
            before = bucket


@compiled
def select_rows(candidates: Candidates, rows: IntArray, tokens: int) -> Candidates:
    """Return the candidates among `rows`, with row numbers relative to `rows`. The batch has `tokens` rows."""
    place = np.full(tokens, -1, np.int64)
    for i in range(rows.shape[0]):
        place[rows[i]] = i
    most = min(rows.shape[0], candidates.rows.shape[0])
    selected, sentences, starts = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most + 1, np.int64)
    positions, buckets = np.empty(most, np.int32), np.empty(most, np.int32)
    count, groups = 0, 0
    for i in range(candidates.rows.shape[0]):
        row = place[candidates.rows[i]]
        if row < 0:
            continue
        if count == 0 or candidates.sentences[i] != sentences[count - 1]:
            starts[groups] = count
            groups += 1
        selected[count], sentences[count], positions[count] = row, candidates.sentences[i], candidates.positions[i]
        buckets[count] = candidates.buckets[i]
        count += 1
    starts[groups] = count
    return Candidates(selected[:count], sentences[:count], positions[:count], buckets[:count], starts[: groups + 1])


@compiled
def count_routed_(routing: Routing, expert: int, seed: int, weights: FloatArray, candidates: Candidates) -> None:
    """Add the candidates that the router sent to an expert to the counts and lists of the expert."""
    routing.chosen[expert] += candidates.rows.shape[0]
    for i in range(candidates.rows.shape[0]):
        weight, sentence, position = weights[candidates.rows[i]], candidates.sentences[i], candidates.positions[i]
        routing.weight[expert] += np.int64(np.rint(np.float64(weight) / UNIT))
        if weight > 0:
            _insert_(routing.heaviest, expert, _make_key(weight, sentence), position, True)
        score = np.float32((prefix_hash(seed, sentence, position) >> uint64(40)) + uint64(1))  # 24 bits: exact
        _insert_(routing.drawn, expert, _make_key(score, sentence), position, False)


def warm_up() -> None:
    """Compile `add_block_`, or load it from the cache folder.

    The driver calls this function before workers start, so that they load the machine code that it compiled.
    """
    nothing = np.zeros(0, np.int64)
    arrays = LayerArrays(
        Lists.empty(1, 1), Lists.empty(1, 1), Totals.empty(1), Quadrants.empty(0), Sample.empty(1, 0, 1)
    )
    candidates, block = make_candidates(nothing, nothing, nothing), np.zeros((0, 1), np.float32)
    add_block_(arrays, block, NO_GATES, candidates, 0, 1, 0, False, True, False)
