"""Sorted lists of the best prefixes of every memory, one entry an integer: made, merged and added to in compiled loops.

An entry of a list is a 64-bit key and a position. The key holds the bits of a positive float32 score above the
complement of the sentence id, so that one integer comparison is the order of triggers: higher score, then lower
sentence. The position decides what is left. An empty place has the key 0.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from memlens.errors import SettingError
from memlens.parallel import compiled, compiled_part
from memlens.sorting import sort_

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]
KeyArray = NDArray[np.uint64]

LOW = uint64(0xFFFFFFFF)
_SHIFT = uint64(32)
EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # between ranges of positions: 0, 1, 2 to 3, 4 to 7, ... 512 and more
BUCKETS = len(EDGES) + 1
MANY = 4  # from here on sorting and merging beats inserting one by one


class Candidates(NamedTuple):
    """The rows of a block that are candidate prefixes, by sentence, then position."""

    rows: IntArray  # [n]
    sentences: IntArray  # [n]
    positions: IntArray  # [n] int32
    buckets: IntArray  # [n] int32: which of BUCKETS ranges of positions each is in
    starts: IntArray  # [sentences + 1] where each sentence begins in the arrays above


def make_candidates(rows: IntArray, sentences: IntArray, positions: IntArray) -> Candidates:
    """Rows of a block as the hot path wants them: by sentence, then position."""
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


@compiled_part
def make_key(score: np.float32, sentence: int) -> int:
    return (uint64(np.float32(score).view(np.uint32)) << _SHIFT) | (LOW - uint64(sentence))


@compiled_part
def score_of(key: int) -> np.float32:
    return np.uint32(key >> _SHIFT).view(np.float32)


@compiled_part
def bar_of(lists: Lists, m: int) -> np.float32:
    """The score of memory m's last place; 0 while its list is open."""
    return score_of(lists.keys[m, lists.keys.shape[1] - 1])


@compiled_part
def _remove_(lists: Lists, m: int, place: int) -> None:
    for i in range(place, lists.filled[m] - 1):
        lists.keys[m, i] = lists.keys[m, i + 1]
        lists.positions[m, i] = lists.positions[m, i + 1]
    lists.filled[m] -= 1
    lists.keys[m, lists.filled[m]] = 0


@compiled_part
def _knows(lists: Lists, m: int, low: int) -> bool:
    """Is a sentence, by its complement, in memory m's list? No branch, so that several places are seen at once."""
    known = False
    for i in range(lists.filled[m]):
        known |= (lists.keys[m, i] & LOW) == low
    return known


@compiled_part
def insert_(lists: Lists, m: int, key: int, position: int, one_a_sentence: bool) -> None:
    """Put one candidate into memory m's list, if it belongs there."""
    keys, positions, filled = lists
    top = keys.shape[1]
    if filled[m] == top and keys[m, top - 1] > key:
        return
    if one_a_sentence and _knows(lists, m, key & LOW):
        for i in range(filled[m]):
            if (keys[m, i] & LOW) == (key & LOW):
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


@compiled_part
def _knows_any(lists: Lists, m: int, found: KeyArray, count: int, sentences: IntArray) -> bool:
    """Is the sentence of one of the found prefixes in memory m's list already?"""
    known = False
    for i in range(count):
        known |= _knows(lists, m, LOW - uint64(sentences[LOW - (found[i] & LOW)]))
    return known


@compiled_part
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
