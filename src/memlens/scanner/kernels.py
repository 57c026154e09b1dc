"""One compiled pass over the coefficients of a batch: lists of triggers, sums, extremes, counts by position.

Coefficients are row-major [rows, memories]. The first look is branch-free over the columns (extremes, sum and counts of
one sentence), so that it runs at the speed of memory; only memories whose extreme reaches the last place of their list
are looked at again.
"""

from typing import NamedTuple

import numpy as np

from memlens.parallel import compiled, compiled_part
from memlens.scanner.lists import BUCKETS, Candidates, FloatArray, IntArray, KeyArray, Lists, bar_of, make_key, take_
from memlens.scanner.quadrants import (
    Gates,
    Quadrants,
    begin_quadrants_,
    empty_looks,
    end_quadrants_,
    look_at_quadrants_,
)
from memlens.scanner.routing import UNIT

# Chosen by measurement (docs/benchmarks.md): the accumulators of some sentences stay in the second-level cache, and
# rows of usual widths are read in one piece, which the processor can read ahead.
COLUMNS = 1536
ROWS = 4  # that are looked at together
SENTENCES = 16  # that are looked at before the lists are brought up to date, so that their bars rise


class Totals(NamedTuple):
    """Sums over all prefixes of a scan, one number per memory of a layer."""

    total: IntArray  # int64, in UNITs
    fired: IntArray  # [memories, BUCKETS] int64: prefixes with a coefficient above 0, by position
    highest: FloatArray  # float32
    lowest: FloatArray  # float32

    @classmethod
    def empty(cls, fired: IntArray) -> "Totals":
        memories = len(fired)
        return cls(
            np.zeros(memories, np.int64),
            fired,
            np.full(memories, -np.inf, np.float32),
            np.full(memories, np.inf, np.float32),
        )


class Sums(NamedTuple):
    """The same of one block, before its numbers are checked."""

    total: FloatArray  # float64
    fired: IntArray | FloatArray  # [BUCKETS, memories]
    highest: FloatArray  # float32
    lowest: FloatArray  # float32


# What `add_` returns if it is not the first column whose sum is not finite.
FINE, TOO_LARGE = -1, -2


@compiled
def add_(totals: Totals, sums: Sums, start: int, width: int) -> int:
    """Add the sums of the first `width` columns to the memories from number `start` on, or none of them."""
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
        # adding 0.0 makes -0.0 the other zero: which of the two a maximum keeps would depend on the order
        totals.highest[m] = max(totals.highest[m], sums.highest[c] + np.float32(0))
        totals.lowest[m] = min(totals.lowest[m], sums.lowest[c] + np.float32(0))
        for b in range(BUCKETS):
            totals.fired[m, b] += np.int64(sums.fired[b, c])
    return status


@compiled_part
def worse(status: int, other: int) -> int:
    """One answer of several calls of `add_`: the first column that is not finite, else whether any is too large."""
    if status >= 0 and other >= 0:
        return min(status, other)
    return max(status, other) if status >= 0 or other >= 0 else min(status, other)


@compiled_part
def _look_at_sentence_(
    block: FloatArray,
    candidates: Candidates,
    sentence: int,
    tile: int,
    width: int,
    high: FloatArray,
    low: FloatArray,
    high_step: FloatArray,
    low_step: FloatArray,
    summed: FloatArray,
    fired: FloatArray,  # [BUCKETS + 1, COLUMNS]; the last row is spare
) -> None:
    """Extremes, in which ROWS rows they are, sum and counts of one sentence.

    Several rows at a time, so that the running results are loaded and stored once for all of them; steps and counts are
    floats, and conditional expressions stand where max() and min() could: that is what the compiler turns into vectors.
    """
    one, none = np.float32(1), np.float32(0)
    rows, buckets = candidates.rows, candidates.buckets
    start, stop = candidates.starts[sentence], candidates.starts[sentence + 1]
    high[:], low[:], summed[:] = -np.inf, np.inf, 0
    whole = start + (stop - start) // ROWS * ROWS
    for i in range(start, whole, ROWS):
        row_a, row_b = block[rows[i], tile : tile + width], block[rows[i + 1], tile : tile + width]
        row_c, row_d = block[rows[i + 2], tile : tile + width], block[rows[i + 3], tile : tile + width]
        alike = buckets[i] == buckets[i + 3]  # positions ascend
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
                _count_(block[rows[j], tile : tile + width], fired[buckets[j]], width)
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
def _count_(row: FloatArray, counts: FloatArray, width: int) -> None:
    one, none = np.float32(1), np.float32(0)
    for c in range(width):
        counts[c] += one if row[c] > 0 else none


@compiled_part
def _first_row(block: FloatArray, rows: IntArray, first: int, stop: int, m: int, extreme: np.float32) -> int:
    """The first of some rows that holds memory m's extreme."""
    i = first
    while i < stop - 1 and block[rows[i], m] != extreme:
        i += 1
    return i


@compiled_part
def _find(
    block: FloatArray,
    candidates: Candidates,
    first: int,
    last: int,
    m: int,
    sign: np.float32,
    peaks: FloatArray,  # [SENTENCES] memory m's extreme in each of these sentences
    peak_steps: FloatArray,  # [SENTENCES] and the ROWS rows it is in
    bar: np.float32,
    one_a_sentence: bool,
    found: KeyArray,
) -> int:
    """Second look at memory m in some sentences: the prefixes that reach the bar; returns how many."""
    count = 0
    starts = candidates.starts
    for s in range(first, last):
        score = sign * peaks[s - first]
        if score < bar or score <= 0:
            continue
        if one_a_sentence:
            begin = starts[s] + ROWS * int(peak_steps[s - first])
            end = min(begin + ROWS, starts[s + 1])
            row = _first_row(block, candidates.rows, begin, end, m, peaks[s - first])
            found[count] = make_key(score, row)
            count += 1
            continue
        for i in range(starts[s], starts[s + 1]):
            score = sign * block[candidates.rows[i], m]
            if score >= bar and score > 0:
                found[count] = make_key(score, i)
                count += 1
    return count


class Region(NamedTuple):
    """The sentences [first, last) and columns [tile, tile + width) that were looked at."""

    first: int
    last: int
    tile: int
    width: int
    memory: int  # the number of the memory in the first column
    one_a_sentence: bool


@compiled_part
def _enter_(
    block: FloatArray, candidates: Candidates, region: Region, sign: np.float32, extremes: FloatArray,
    peaks: FloatArray, peak_steps: FloatArray, lists: Lists, found: KeyArray, spare: Lists,
) -> None:  # fmt: skip
    """Bring the lists of one end up to date: top with the sign 1, bottom with -1."""
    for c in range(region.width):
        m = region.memory + c
        bar, extreme = bar_of(lists, m), sign * extremes[c]
        if extreme > 0 and extreme >= bar:
            count = _find(
                block, candidates, region.first, region.last, region.tile + c, sign, peaks[:, c], peak_steps[:, c], bar,
                region.one_a_sentence, found,
            )  # fmt: skip
            take_(lists, m, found, count, candidates.sentences, candidates.positions, region.one_a_sentence, spare)


@compiled_part
def _last_sentence(starts: IntArray, first: int, one_a_sentence: bool) -> int:
    """One past the last sentence that is looked at together with `first`."""
    last, rows = first, 0
    while last < starts.shape[0] - 1 and last - first < SENTENCES:
        rows += starts[last + 1] - starts[last]
        if last > first and not one_a_sentence and rows > 4 * SENTENCES:
            break
        last += 1
    return last


@compiled
def collect_(
    block: FloatArray,  # [rows, memories]
    candidates: Candidates,
    first_column: int,
    last_column: int,
    start: int,  # the number of the memory in the block's first column
    top: Lists,
    bottom: Lists,
    keep_bottom: bool,
    one_a_sentence: bool,
    totals: Totals,
    gates: Gates,
    quadrants: Quadrants,
    has_gates: bool,
) -> int:
    """Everything that is kept of the columns [first_column, last_column) of one block; returns what `add_` says."""
    one, columns = np.float32(1), min(COLUMNS, last_column - first_column)
    shape = (SENTENCES, columns)
    peak, peak_step = np.empty(shape, np.float32), np.empty(shape, np.float32)
    trough, trough_step = np.empty(shape, np.float32), np.empty(shape, np.float32)
    summed, fired = np.empty(columns, np.float32), np.empty((BUCKETS + 1, columns), np.float32)
    group_peak, group_trough = np.empty(columns, np.float32), np.empty(columns, np.float32)
    sums = Sums(np.empty(columns, np.float64), fired, np.empty(columns, np.float32), np.empty(columns, np.float32))
    found = np.empty(max(candidates.rows.shape[0], 1), np.uint64)
    spare = Lists(
        np.empty((1, top.keys.shape[1]), np.uint64), np.empty((1, top.keys.shape[1]), np.int32), np.zeros(1, np.int32)
    )
    starts = candidates.starts
    status, looks = FINE, empty_looks(columns if has_gates else 0)
    for tile in range(first_column, last_column, COLUMNS):
        width, memory = min(COLUMNS, last_column - tile), start + tile
        if has_gates:
            begin_quadrants_(looks, quadrants.lists, memory, width)
        sums.total[:], sums.fired[:], sums.highest[:], sums.lowest[:] = 0, 0, -np.inf, np.inf
        first = 0
        while first < starts.shape[0] - 1:
            last = _last_sentence(starts, first, one_a_sentence)
            group_peak[:], group_trough[:] = -np.inf, np.inf
            for s in range(first, last):
                g = s - first
                _look_at_sentence_(
                    block, candidates, s, tile, width, peak[g], trough[g], peak_step[g], trough_step[g], summed, fired
                )
                for c in range(width):
                    sums.total[c] += summed[c]
                    group_peak[c] = peak[g, c] if peak[g, c] > group_peak[c] else group_peak[c]
                    group_trough[c] = trough[g, c] if trough[g, c] < group_trough[c] else group_trough[c]
                if has_gates:  # while the rows of the sentence are in the cache, but in loops of their own
                    look_at_quadrants_(
                        block, gates, candidates, s, tile, width, memory, looks, quadrants.lists, one_a_sentence
                    )
            for c in range(width):
                sums.highest[c] = max(sums.highest[c], group_peak[c])
                sums.lowest[c] = min(sums.lowest[c], group_trough[c])
            region = Region(first, last, tile, width, memory, one_a_sentence)
            _enter_(block, candidates, region, one, group_peak, peak, peak_step, top, found, spare)
            if keep_bottom:
                _enter_(block, candidates, region, -one, group_trough, trough, trough_step, bottom, found, spare)
            first = last
        if has_gates:
            end_quadrants_(looks, quadrants, memory, width)
        added = add_(totals, sums, memory, width)
        status = worse(status, tile + added if added >= 0 else added)
    return status
