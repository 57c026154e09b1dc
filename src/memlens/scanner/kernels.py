"""Compiled loops over coefficients: exact sorted lists of the best prefixes of every memory, sums and extremes.

An entry of a list is a 64-bit key and a position. The key holds the bits of a positive float32 score above the
complement of the sentence id, so that one integer comparison is the order of triggers: higher score, then lower
sentence. The position decides what is left. An empty place has the key 0.

Coefficients are row-major [rows, memories]. The first look is branch-free over the columns (extremes, sum and count of
one sentence), so that it runs at the speed of memory; only memories whose extreme reaches the last place of their list
are looked at again.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from memlens.parallel import compiled
from memlens.sorting import sort_

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]
KeyArray = NDArray[np.uint64]

LOW = uint64(0xFFFFFFFF)
_SHIFT = uint64(32)
MANY = 4  # from here on sorting and merging beats inserting one by one


class Lists(NamedTuple):
    """One sorted list per memory."""

    keys: KeyArray  # [memories, top]
    positions: IntArray  # [memories, top] int32
    filled: IntArray  # [memories] int32: how many places are taken

    @classmethod
    def empty(cls, memories: int, top: int) -> "Lists":
        return cls(
            np.zeros((memories, top), np.uint64), np.zeros((memories, top), np.int32), np.zeros(memories, np.int32)
        )

    def part(self, memories: slice) -> "Lists":
        """The lists of some memories, as views."""
        return Lists(self.keys[memories], self.positions[memories], self.filled[memories])

    def scores(self) -> NDArray[np.float32]:
        """[memories, top]; 0 in empty places."""
        return (self.keys >> np.uint64(32)).astype(np.uint32).view(np.float32)

    def sentences(self) -> NDArray[np.int64]:
        """[memories, top]; meaningless in empty places."""
        return (np.uint64(0xFFFFFFFF) - (self.keys & np.uint64(0xFFFFFFFF))).astype(np.int64)


@compiled
def make_key(score: np.float32, sentence: int) -> int:
    return (uint64(np.float32(score).view(np.uint32)) << _SHIFT) | (LOW - uint64(sentence))


@compiled
def score_of(key: int) -> np.float32:
    return np.uint32(key >> _SHIFT).view(np.float32)


@compiled
def bar_of(lists: Lists, m: int) -> np.float32:
    """The score of memory m's last place; 0 while its list is open."""
    return score_of(lists.keys[m, lists.keys.shape[1] - 1])


@compiled
def _remove_(lists: Lists, m: int, place: int) -> None:
    for i in range(place, lists.filled[m] - 1):
        lists.keys[m, i] = lists.keys[m, i + 1]
        lists.positions[m, i] = lists.positions[m, i + 1]
    lists.filled[m] -= 1
    lists.keys[m, lists.filled[m]] = 0


@compiled
def insert_(lists: Lists, m: int, key: int, position: int, one_a_sentence: bool) -> None:
    """Put one candidate into memory m's list, if it belongs there."""
    keys, positions, filled = lists
    if one_a_sentence:
        for i in range(filled[m]):
            if (keys[m, i] & LOW) == (key & LOW):
                if keys[m, i] > key or (keys[m, i] == key and positions[m, i] <= position):
                    return
                _remove_(lists, m, i)
                break
    top = keys.shape[1]
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


@compiled
def offer_(
    lists: Lists, memories: IntArray, scores: FloatArray, sentences: IntArray, positions: IntArray, one_a_sentence: bool
) -> None:
    """Offer n single candidates, each with its memory; a score that is not above zero is refused."""
    for i in range(memories.shape[0]):
        if scores[i] > 0:
            insert_(lists, memories[i], make_key(scores[i], sentences[i]), positions[i], one_a_sentence)


@compiled
def merge_(lists: Lists, others: Lists, one_a_sentence: bool) -> None:
    """Offer every entry of other lists."""
    for m in range(others.filled.shape[0]):
        for i in range(others.filled[m]):
            insert_(lists, m, others.keys[m, i], others.positions[m, i], one_a_sentence)


@compiled
def _knows_any(lists: Lists, m: int, found: KeyArray, count: int, sentences: IntArray) -> bool:
    """Is the sentence of one of the found prefixes in memory m's list already?"""
    for i in range(count):
        low = LOW - uint64(sentences[LOW - (found[i] & LOW)])
        known = False
        for j in range(lists.filled[m]):
            known |= (lists.keys[m, j] & LOW) == low
        if known:
            return True
    return False


@compiled
def take_(
    lists: Lists,
    m: int,
    found: KeyArray,  # [count] a score above the complement of the candidate's place in `sentences` and `positions`
    count: int,
    sentences: IntArray,  # ascending, and positions ascending within a sentence
    positions: IntArray,
    one_a_sentence: bool,
    spare: Lists,  # [1, top] to merge into
) -> None:
    """Put candidates into memory m's list: few of them one by one, many by sorting and merging."""
    if count < MANY or (one_a_sentence and _knows_any(lists, m, found, count, sentences)):
        for i in range(count):
            row = LOW - (found[i] & LOW)
            insert_(lists, m, make_key(score_of(found[i]), sentences[row]), positions[row], one_a_sentence)
        return
    sort_(found, count)
    keys, filled = lists.keys, lists.filled[m]
    old, new, taken = 0, count - 1, 0
    while taken < keys.shape[1] and (old < filled or new >= 0):
        key, position = uint64(0), 0
        if new >= 0:
            row = LOW - (found[new] & LOW)
            key, position = make_key(score_of(found[new]), sentences[row]), positions[row]
        if old < filled and (keys[m, old] > key or (keys[m, old] == key and lists.positions[m, old] <= position)):
            key, position = keys[m, old], lists.positions[m, old]
            old += 1
        else:
            new -= 1
        spare.keys[0, taken], spare.positions[0, taken] = key, position
        taken += 1
    for i in range(taken):
        keys[m, i], lists.positions[m, i] = spare.keys[0, i], spare.positions[0, i]
    lists.filled[m] = taken


# Chosen by measurement: the accumulators of some sentences stay in the second-level cache, one row in the first.
COLUMNS = 1024
ROWS = 4  # that are looked at together
SENTENCES = 32  # that are looked at before the lists are brought up to date, so that their bars rise


class Candidates(NamedTuple):
    """The rows of a block that are candidate prefixes, by sentence, then position."""

    rows: IntArray  # [n]
    sentences: IntArray  # [n]
    positions: IntArray  # [n] int32
    starts: IntArray  # [sentences + 1] where each sentence begins in the arrays above


class Sums(NamedTuple):
    """What is added up over all prefixes, one number per memory."""

    total: FloatArray  # float64
    positive: IntArray  # int64
    highest: FloatArray  # float32
    lowest: FloatArray  # float32

    @classmethod
    def empty(cls, memories: int) -> "Sums":
        return cls(
            np.zeros(memories, np.float64),
            np.zeros(memories, np.int64),
            np.full(memories, -np.inf, np.float32),
            np.full(memories, np.inf, np.float32),
        )


@compiled
def _look_at_sentence_(
    block: FloatArray,
    rows: IntArray,
    start: int,
    stop: int,
    tile: int,
    width: int,
    high: FloatArray,
    low: FloatArray,
    high_step: FloatArray,
    low_step: FloatArray,
    summed: FloatArray,
    fired: FloatArray,
) -> None:
    """Extremes, in which ROWS rows they are, sum and count of one sentence.

    Several rows at a time, so that the running results are loaded and stored once for all of them; steps and counts are
    floats, and conditional expressions stand where max() and min() could: that is what the compiler turns into vectors.
    """
    one, none = np.float32(1), np.float32(0)
    high[:], low[:], summed[:], fired[:] = -np.inf, np.inf, 0, 0
    whole = start + (stop - start) // ROWS * ROWS
    for i in range(start, whole, ROWS):
        row_a, row_b = block[rows[i], tile : tile + width], block[rows[i + 1], tile : tile + width]
        row_c, row_d = block[rows[i + 2], tile : tile + width], block[rows[i + 3], tile : tile + width]
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
            fired[c] += fired_ab + ((one if v_c > 0 else none) + (one if v_d > 0 else none))
    step = np.float32((whole - start) // ROWS)
    for i in range(whole, stop):
        row = block[rows[i], tile : tile + width]
        for c in range(width):
            value = row[c]
            high_step[c] = step if value > high[c] else high_step[c]
            low_step[c] = step if value < low[c] else low_step[c]
            high[c] = value if value > high[c] else high[c]
            low[c] = value if value < low[c] else low[c]
            summed[c] += value
            fired[c] += one if value > 0 else none


@compiled
def _first_row(block: FloatArray, rows: IntArray, first: int, stop: int, m: int, extreme: np.float32) -> int:
    """The first of some rows that holds memory m's extreme."""
    i = first
    while i < stop - 1 and block[rows[i], m] != extreme:
        i += 1
    return i


@compiled
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


@compiled
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
    top: Lists,
    bottom: Lists,
    keep_bottom: bool,
    one_a_sentence: bool,
    sums: Sums,
) -> None:
    """Everything that is kept of the columns [first_column, last_column) of one block."""
    one, shape = np.float32(1), (SENTENCES, COLUMNS)
    peak, peak_step = np.empty(shape, np.float32), np.empty(shape, np.float32)
    trough, trough_step = np.empty(shape, np.float32), np.empty(shape, np.float32)
    summed, fired = np.empty(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    group_peak, group_trough = np.empty(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    found = np.empty(max(candidates.rows.shape[0], 1), np.uint64)
    spare = Lists(
        np.empty((1, top.keys.shape[1]), np.uint64), np.empty((1, top.keys.shape[1]), np.int32), np.zeros(1, np.int32)
    )
    starts, sentences, positions = candidates.starts, candidates.sentences, candidates.positions
    for tile in range(first_column, last_column, COLUMNS):
        width = min(COLUMNS, last_column - tile)
        first = 0
        while first < starts.shape[0] - 1:
            last = _last_sentence(starts, first, one_a_sentence)
            group_peak[:], group_trough[:] = -np.inf, np.inf
            for s in range(first, last):
                g = s - first
                _look_at_sentence_(
                    block, candidates.rows, starts[s], starts[s + 1], tile, width,
                    peak[g], trough[g], peak_step[g], trough_step[g], summed, fired,
                )  # fmt: skip
                for c in range(width):
                    m = tile + c
                    sums.total[m] += summed[c]
                    sums.positive[m] += np.int64(fired[c])
                    group_peak[c] = peak[g, c] if peak[g, c] > group_peak[c] else group_peak[c]
                    group_trough[c] = trough[g, c] if trough[g, c] < group_trough[c] else group_trough[c]
            for c in range(width):
                m = tile + c
                sums.highest[m] = max(sums.highest[m], group_peak[c])
                sums.lowest[m] = min(sums.lowest[m], group_trough[c])
                bar = bar_of(top, m)
                if group_peak[c] > 0 and group_peak[c] >= bar:
                    count = _find(
                        block, candidates, first, last, m, one, peak[:, c], peak_step[:, c], bar, one_a_sentence, found
                    )
                    take_(top, m, found, count, sentences, positions, one_a_sentence, spare)
                if not keep_bottom:
                    continue
                bar = bar_of(bottom, m)
                if group_trough[c] < 0 and -group_trough[c] >= bar:
                    count = _find(
                        block, candidates, first, last, m, -one, trough[:, c], trough_step[:, c], bar, one_a_sentence,
                        found,
                    )  # fmt: skip
                    take_(bottom, m, found, count, sentences, positions, one_a_sentence, spare)
            first = last
