"""Counts of features: the keys of every prefix, in compiled loops, and the share of random prefixes that have each.

Background: a seeded sample of all prefixes (all of them where they are few) goes through the same code as triggers do.
The share of an ending or a shape is counted. An n-gram is likelier in a longer prefix: its share among prefixes of L
words is 1 - exp(-rate L), with the one rate that gives its share over the whole sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.parallel import compiled, compiled_part
from memlens.pattern.features import (
    ANYWHERE,
    BEFORE,
    BITS,
    EARLY,
    EARLY_WORDS,
    ENDING,
    FAMILIES,
    FIRST,
    FIRST_LIST,
    GAPS,
    INSIDE,
    KIND,
    LAST,
    LAST_CLASS,
    LONGEST,
    OF_ANYWHERE,
    OF_BEFORE,
    OF_CLASSES,
    OF_LAST_WORDS,
    OF_OPENINGS,
    SHAPE,
    SHORT,
    SIGN,
    STOP,
    KeyArray,
    SpellingFeatures,
)
from memlens.pattern.words import GROUNDED, WINDOW, PrefixWords
from memlens.sorting import sort_, sort_with_
from memlens.stats import upper_share

_RATES = np.geomspace(1e-9, 20, 4000)


class _PrefixArrays(NamedTuple):
    """Prefixes and the shapes of their last words, for compiled code."""

    words: Any  # the arrays of PrefixWords
    offsets: Any
    last: Any
    opens: Any
    goes_on: Any
    shapes: Any  # the arrays of SpellingFeatures
    shape_offsets: Any
    tokens: Any
    classes: Any
    pieces: Any
    lengths: Any
    token_lengths: Any
    marks: Any
    lists: Any
    sorts: Any
    brackets: Any
    of_whole_words: Any

    @classmethod
    def of(cls, prefixes: PrefixWords, spelled: SpellingFeatures) -> _PrefixArrays:
        own = (prefixes.words, prefixes.offsets, prefixes.last, prefixes.opens, prefixes.goes_on)
        of_tokens = (prefixes.tokens, spelled.classes, spelled.pieces, spelled.lengths, spelled.token_lengths)
        of_words = (spelled.marks, spelled.lists, spelled.sorts, spelled.brackets, spelled.of_whole_words)
        return cls(*own, spelled.numbers, spelled.offsets, *of_tokens, *of_words)


@compiled_part
def _add_keys_(prefixes: _PrefixArrays, row: int, keys: Any, count: int) -> int:
    """Append the keys of one prefix (an n-gram as often as it occurs); the new count comes back."""
    words, end = prefixes.words, prefixes.offsets[row + 1]
    for start in range(prefixes.offsets[row], end):
        body = np.int64(0)
        for n in range(1, LONGEST + 1):
            if start + n > end or words[start + n - 1] == 0:
                break
            body = (body << BITS) | np.int64(words[start + n - 1])
            keys[count] = (np.int64(ANYWHERE + n) << KIND) | body
            count += 1
            if start + n == end:
                keys[count] = (np.int64(ENDING + n) << KIND) | body
                count += 1
    last = prefixes.last[row]
    for place in range(prefixes.shape_offsets[last], prefixes.shape_offsets[last + 1]):
        if not (prefixes.goes_on[row] and prefixes.of_whole_words[prefixes.shapes[place]]):
            keys[count] = (np.int64(SHAPE) << KIND) | np.int64(prefixes.shapes[place])
            count += 1
    if prefixes.opens[row]:
        keys[count] = (np.int64(SHAPE) << KIND) | np.int64(1)  # as numbered by SpellingFeatures
        count += 1
    if prefixes.goes_on[row]:
        keys[count] = (np.int64(SHAPE) << KIND) | np.int64(2)
        count += 1
    token = prefixes.tokens[row]
    if token >= 0:
        for grain in range(len(prefixes.classes)):
            if prefixes.classes[grain, token] > 0:
                own = (np.int64(LAST_CLASS) << (2 * BITS)) | np.int64(prefixes.classes[grain, token])
                keys[count] = (np.int64(SHAPE) << KIND) | own
                count += 1
        if prefixes.pieces[token] > 0 and prefixes.token_lengths[token] < prefixes.lengths[last]:
            keys[count] = (np.int64(SHAPE) << KIND) | np.int64(prefixes.pieces[token])
            keys[count + 1] = (np.int64(SHAPE) << KIND) | np.int64(3)
            count += 2
    count = _add_opening_(prefixes, prefixes.offsets[row], end, keys, count)
    count = _add_before_(prefixes, prefixes.offsets[row], end, keys, count)
    return _add_frames_(words, prefixes.offsets[row], end, keys, count)


@compiled_part
def sentence_start(words: Any, marks: Any, begin: int, end: int) -> int:
    """The beginning of the sentence that words[begin:end] end in; -1 where that is before them."""
    start = -1 if end - begin >= WINDOW else begin
    for place in range(end - 2, begin, -1):
        if marks[words[place]] == STOP and marks[words[place - 1]] != SHORT:
            start = place + 1
            break
    while 0 <= start < end - 1 and (marks[words[start]] == STOP or marks[words[start]] == SIGN):
        start += 1
    return start


@compiled_part
def _add_opening_(prefixes: _PrefixArrays, begin: int, end: int, keys: Any, count: int) -> int:
    """Append the first word of the sentence, unless it is the last as well, its lists, and how early it is."""
    start = sentence_start(prefixes.words, prefixes.marks, begin, end) if end > begin else -1
    if start < 0:
        return count
    for bound in EARLY_WORDS:
        if end - start <= bound:
            keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(EARLY) << (2 * BITS)) | np.int64(bound)
            count += 1
    first = np.int64(prefixes.words[start])
    if end - start > 1 and first > 0:
        keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(FIRST) << (2 * BITS)) | first
        count += 1
        for number in prefixes.lists[first]:
            if number > 0:
                keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(FIRST_LIST) << (2 * BITS)) | np.int64(number)
                count += 1
    return count


@compiled_part
def _add_before_(prefixes: _PrefixArrays, begin: int, end: int, keys: Any, count: int) -> int:
    """Append the sorts of the word before the last, and whether a bracket is open."""
    if end - begin >= 2:
        for number in prefixes.sorts[prefixes.words[end - 2]]:
            if number > 0:
                keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(BEFORE) << (2 * BITS)) | np.int64(number)
                count += 1
    words, opens, closes = prefixes.words, prefixes.brackets[0], prefixes.brackets[1]
    place = end - 1
    while place >= begin and words[place] != opens and words[place] != closes:
        place -= 1
    # a bracket that is the last word itself is an ending; 0 is any word that is not known
    if begin <= place < end - 1 and words[place] == opens and opens > 0:
        keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(INSIDE) << (2 * BITS)) | np.int64(1)
        count += 1
    return count


@compiled_part
def _add_frames_(words: Any, begin: int, end: int, keys: Any, count: int) -> int:
    """Append the frames of the last three words: "one … three", "… two …", "one two …"."""
    if end - begin < 2:
        return count
    first = np.int64(words[end - 3]) if end - begin >= 3 else np.int64(0)
    second, third = np.int64(words[end - 2]), np.int64(words[end - 1])
    if second > 0:
        keys[count] = second << BITS
        count += 1
    if first > 0 and third > 0:
        keys[count] = (first << (2 * BITS)) | third
        count += 1
    if first > 0 and second > 0:
        keys[count] = (first << (2 * BITS)) | (second << BITS)
        count += 1
    return count


@compiled_part
def _room(prefixes: _PrefixArrays, row: int) -> int:
    """An upper bound of the number of keys of a prefix."""
    return (prefixes.offsets[row + 1] - prefixes.offsets[row] + 1) * LONGEST + 56


@compiled
def _all_keys(prefixes: _PrefixArrays) -> KeyArray:
    """Every key of every prefix, once per prefix."""
    total = 0
    for row in range(len(prefixes.last)):
        total += _room(prefixes, row)
    found = np.empty(total, np.int64)
    kept = 0
    for row in range(len(prefixes.last)):
        keys = np.empty(_room(prefixes, row), np.int64)
        count = _add_keys_(prefixes, row, keys, 0)
        sort_(keys, count)
        for i in range(count):
            if i == 0 or keys[i] != keys[i - 1]:
                found[kept] = keys[i]
                kept += 1
    return found[:kept]


@compiled
def _shared_keys(rows: Any, least: int, prefixes: _PrefixArrays) -> tuple[Any, Any, Any, Any]:
    memories, triggers = rows.shape
    total, largest = 0, 0
    for m in range(memories):
        room = 0
        for i in range(triggers):
            if rows[m, i] >= 0:
                room += _room(prefixes, rows[m, i])
        total += room // least + 1
        largest = max(largest, room)
    out_memory, out_key = np.empty(total, np.int32), np.empty(total, np.int64)
    out_set, out_size = np.empty(total, np.uint64), np.empty(total, np.int64)
    keys, owners = np.empty(largest, np.int64), np.empty(largest, np.int64)
    kept = 0
    for m in range(memories):
        count = 0
        for i in range(triggers):
            if rows[m, i] >= 0:
                before = count
                count = _add_keys_(prefixes, rows[m, i], keys, count)
                for place in range(before, count):
                    owners[place] = i
        sort_with_(keys, owners, count)
        begin = 0
        while begin < count:
            key, members, end = keys[begin], np.uint64(0), begin
            while end < count and keys[end] == key:
                members |= np.uint64(1) << np.uint64(owners[end])
                end += 1
            size = _size(members) if end - begin >= least else 0
            if size >= least:
                out_memory[kept], out_key[kept], out_set[kept], out_size[kept] = m, key, members, size
                kept += 1
            begin = end
    return out_memory[:kept], out_key[:kept], out_set[:kept], out_size[:kept]


@compiled_part
def _size(members: Any) -> int:
    count = 0
    while members:
        members &= members - np.uint64(1)
        count += 1
    return count


def shared_keys(
    rows: NDArray[np.int64], prefixes: PrefixWords, spelled: SpellingFeatures, least: int
) -> tuple[NDArray[np.int32], KeyArray, NDArray[np.uint64], NDArray[np.int64]]:
    """Keys that `least` triggers (rows [memories, t]) or more share: memory, key, set of prefixes as bits, its size."""
    memory, keys, sets, sizes = _shared_keys(rows, least, _PrefixArrays.of(prefixes, spelled))
    return memory, keys, sets, sizes


@compiled
def _key_shares(rows: Any, keys: Any, offsets: Any, prefixes: _PrefixArrays) -> Any:
    shares = np.zeros(len(keys))
    for m in range(len(rows)):
        first, last = offsets[m], offsets[m + 1]
        there = 0
        for row in rows[m]:
            if row < 0 or first == last:
                continue
            there += 1
            own = np.empty(_room(prefixes, row), np.int64)
            count = _add_keys_(prefixes, row, own, 0)
            for k in range(first, last):
                for i in range(count):
                    if own[i] == keys[k]:
                        shares[k] += 1
                        break
        if there:
            for k in range(first, last):
                shares[k] /= there
    return shares


def key_shares(
    rows: NDArray[np.int64],
    keys: KeyArray,
    offsets: NDArray[np.int64],
    prefixes: PrefixWords,
    spelled: SpellingFeatures,
) -> NDArray[np.float64]:
    """The share of a memory's prefixes (rows [memories, t], -1 for none) that have each of its keys, by offsets."""
    arrays = _PrefixArrays.of(prefixes, spelled)
    found: NDArray[np.float64] = _key_shares(np.ascontiguousarray(rows), keys, offsets, arrays)
    return found


def families_of(keys: KeyArray) -> NDArray[np.int64]:
    """The place of every key in FAMILIES: as Feature.family, for many at once."""
    kinds, about = keys >> KIND, (keys >> (2 * BITS)) & ((1 << BITS) - 1)
    of_wordings = np.array([GAPS, *range(LONGEST), *range(OF_ANYWHERE, OF_ANYWHERE + LONGEST)])[kinds % SHAPE]
    of_shapes = np.full(LAST_CLASS + 1, OF_OPENINGS)
    of_shapes[[LAST, BEFORE, INSIDE, LAST_CLASS]] = OF_LAST_WORDS, OF_BEFORE, OF_BEFORE, OF_CLASSES
    of_shapes = of_shapes[np.minimum(about, LAST_CLASS)]
    return np.where(kinds == SHAPE, of_shapes, of_wordings)


@dataclass(frozen=True, eq=False)
class Background:
    """Counts of features among sampled prefixes."""

    keys: KeyArray  # sorted
    counts: NDArray[np.int64]
    prefixes: int
    length_shares: NDArray[np.float64]  # [WINDOW + 1]: share of prefixes of each length
    hypotheses: tuple[int, ...]  # per memory, by family

    @classmethod
    def of(cls, prefixes: PrefixWords, spelled: SpellingFeatures) -> Background:
        keys, counts = np.unique(_all_keys(_PrefixArrays.of(prefixes, spelled)), return_counts=True)
        kept = counts > 1  # what was met once is looked up as met once, without being kept
        lengths = np.bincount(prefixes.lengths, minlength=WINDOW + 1) / max(len(prefixes), 1)
        hypotheses = np.bincount(families_of(keys[counts >= GROUNDED]), minlength=len(FAMILIES))
        return cls(keys[kept], counts[kept], len(prefixes), lengths, tuple(hypotheses.tolist()))

    def count(self, keys: KeyArray) -> NDArray[np.int64]:
        """The number of sampled prefixes with each feature; at least 1."""
        if len(self.keys) == 0:
            return np.ones(len(keys), np.int64)
        where = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[where] == keys, self.counts[where], 1)

    def shares(self, keys: KeyArray, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Upper bound of the chance that a random prefix has each feature; lengths [keys, t], -1 where there is none.

        The mean over prefixes as long as those given.
        """
        shares = upper_share(self.count(keys), self.prefixes)
        anywhere = (families_of(keys) >= OF_ANYWHERE) & (families_of(keys) < OF_ANYWHERE + LONGEST)
        there = lengths[anywhere] >= 0
        rates = np.interp(shares[anywhere], self._shares_by_rate(), _RATES)
        chances = (1 - np.exp(-rates[:, None] * np.maximum(lengths[anywhere], 0))) * there
        shares[anywhere] = chances.sum(1) / np.maximum(there.sum(1), 1)
        return np.maximum(shares, 1e-300)

    def _shares_by_rate(self) -> NDArray[np.float64]:
        chances = 1 - np.exp(-_RATES[:, None] * np.arange(WINDOW + 1)[None, :])
        by_rate: NDArray[np.float64] = chances @ self.length_shares
        return by_rate
