"""Everything shallow that prefixes may share, as 63-bit keys: endings, n-grams anywhere, shapes of the last word.

    ENDING + n     the last n words, n = 1..3
    ANYWHERE + n   n words in a row, anywhere in the window
    SHAPE          a shape or an affix of the last word (see shapes)

A key holds its kind and up to three word numbers, so that it can be read back without a table. Compiled, since there
are about a thousand keys a memory. Knows words and memories as numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.compiled import compiled
from memlens.patterns import shapes
from memlens.patterns.prefix_words import PrefixWords, Words

LONGEST = 3
ENDING, ANYWHERE, SHAPE = 0, 3, 7
_BITS, _KIND = 20, 60
_MASK = (1 << _BITS) - 1

KeyArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SpellingFeatures:
    """The shapes of every spelling; `names[number - 1]` is a shape's name."""

    names: list[str]
    numbers: NDArray[np.int32]  # [all features of all spellings]
    offsets: NDArray[np.int64]  # [spellings + 1]
    opening: int  # the number of the opening quote

    @classmethod
    def of(cls, words: Words, used: NDArray[Any]) -> SpellingFeatures:
        """Of the spellings that end a prefix; the others have none."""
        numbers: dict[str, int] = {shapes.OPENING_QUOTE: 1}
        wanted = np.zeros(len(words.spellings), np.bool_)
        wanted[used] = True
        flat: list[int] = []
        offsets = [0]
        for spelling, is_used in zip(words.spellings, wanted.tolist(), strict=True):
            if is_used:
                flat += [numbers.setdefault(name, len(numbers) + 1) for name in shapes.features(spelling)]
            offsets.append(len(flat))
        return cls(list(numbers), np.array(flat, np.int32), np.array(offsets, np.int64), 1)


@dataclass(frozen=True)
class Feature:
    """A key, read back."""

    kind: str  # "ending", "n-gram" or "shape"
    words: tuple[int, ...] = ()  # numbers of its words
    shape: str = ""

    def text(self, words: Words) -> str:
        return " ".join(words.texts[number] for number in self.words)

    def describe(self, words: Words) -> str:
        if self.kind == "shape":
            return shapes.describe(self.shape)
        return f'{"ends with" if self.kind == "ending" else "contains"} "{self.text(words)}"'

    def name(self, words: Words) -> str:
        """The same for every memory that has it: what related memories are found by."""
        return f"{self.kind}:{self.shape or self.text(words)}"


def read_key(key: int, names: Sequence[str]) -> Feature:
    kind, body = key >> _KIND, key & ((1 << _KIND) - 1)
    if kind == SHAPE:
        return Feature("shape", shape=names[body - 1])
    length = kind - (ANYWHERE if kind > ANYWHERE else ENDING)
    numbers = tuple((body >> (_BITS * place)) & _MASK for place in reversed(range(length)))
    return Feature("ending" if kind <= ANYWHERE else "n-gram", numbers)


def word_key(kind: int, numbers: Sequence[int]) -> int:
    """The key of an ending or an n-gram."""
    body = 0
    for number in numbers:
        body = (body << _BITS) | number
    return ((kind + len(numbers)) << _KIND) | body


@compiled
def _prefix_keys_(words: Any, first: int, end: int, shapes_of_last: Any, opening: int, keys: Any, count: int) -> int:
    """Append the keys of one prefix (an n-gram as often as it occurs); the new count comes back."""
    for start in range(first, end):
        body = np.int64(0)
        for n in range(1, LONGEST + 1):
            if start + n > end or words[start + n - 1] == 0:
                break
            body = (body << _BITS) | np.int64(words[start + n - 1])
            keys[count] = (np.int64(ANYWHERE + n) << _KIND) | body
            count += 1
            if start + n == end:
                keys[count] = (np.int64(ENDING + n) << _KIND) | body
                count += 1
    for number in shapes_of_last:
        keys[count] = (np.int64(SHAPE) << _KIND) | np.int64(number)
        count += 1
    if opening:
        keys[count] = (np.int64(SHAPE) << _KIND) | np.int64(opening)
        count += 1
    return count


@compiled
def _room(words: int) -> int:
    return (words + 1) * LONGEST + 16


@compiled
def _all_keys(
    words: Any, offsets: Any, last: Any, opens: Any, numbers: Any, number_offsets: Any, opening: int
) -> KeyArray:
    """Every key of every prefix, each once a prefix."""
    total = 0
    for row in range(len(last)):
        total += _room(offsets[row + 1] - offsets[row])
    found = np.empty(total, np.int64)
    kept = 0
    for row in range(len(last)):
        own = numbers[number_offsets[last[row]] : number_offsets[last[row] + 1]]
        keys = np.empty(_room(offsets[row + 1] - offsets[row]), np.int64)
        quote = opening if opens[row] else 0
        count = _prefix_keys_(words, offsets[row], offsets[row + 1], own, quote, keys, 0)
        keys = np.sort(keys[:count])
        for i in range(count):
            if i == 0 or keys[i] != keys[i - 1]:
                found[kept] = keys[i]
                kept += 1
    return found[:kept]


def all_keys(prefixes: PrefixWords, spelled: SpellingFeatures) -> KeyArray:
    found: KeyArray = _all_keys(
        prefixes.words, prefixes.offsets, prefixes.last, prefixes.opens, spelled.numbers, spelled.offsets,
        spelled.opening,
    )  # fmt: skip
    return found


@compiled
def _shared(
    rows: Any, least: int, words: Any, offsets: Any, last: Any, opens: Any,
    numbers: Any, number_offsets: Any, opening: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Memory, key and set of prefixes (a bit each) of every key that `least` prefixes of a memory share."""
    memories, triggers = rows.shape
    total, largest = 0, 0
    for m in range(memories):
        room = 0
        for i in range(triggers):
            if rows[m, i] >= 0:
                room += _room(offsets[rows[m, i] + 1] - offsets[rows[m, i]])
        total += room // least + 1
        largest = max(largest, room)
    out_memory, out_key, out_set = np.empty(total, np.int32), np.empty(total, np.int64), np.empty(total, np.uint64)
    keys, owners = np.empty(largest, np.int64), np.empty(largest, np.int64)
    kept = 0
    for m in range(memories):
        count = 0
        for i in range(triggers):
            row = rows[m, i]
            if row >= 0:
                own = numbers[number_offsets[last[row]] : number_offsets[last[row] + 1]]
                before = count
                quote = opening if opens[row] else 0
                count = _prefix_keys_(words, offsets[row], offsets[row + 1], own, quote, keys, count)
                owners[before:count] = i
        order = np.argsort(keys[:count])
        begin = 0
        while begin < count:
            key, members, end = keys[order[begin]], np.uint64(0), begin
            while end < count and keys[order[end]] == key:
                members |= np.uint64(1) << np.uint64(owners[order[end]])
                end += 1
            if end - begin >= least and _size(members) >= least:
                out_memory[kept], out_key[kept], out_set[kept] = m, key, members
                kept += 1
            begin = end
    return out_memory[:kept], out_key[:kept], out_set[:kept]


@compiled
def _size(members: Any) -> int:
    count = 0
    while members:
        members &= members - np.uint64(1)
        count += 1
    return count


@compiled
def sizes(sets: Any) -> NDArray[np.int64]:
    """How many prefixes are in each set."""
    found = np.empty(len(sets), np.int64)
    for i in range(len(sets)):
        found[i] = _size(sets[i])
    return found


def shared_keys(
    rows: NDArray[np.int64], prefixes: PrefixWords, spelled: SpellingFeatures, least: int
) -> tuple[NDArray[np.int32], KeyArray, NDArray[np.uint64]]:
    """Memory, key and set of prefixes of what at least `least` of a memory's triggers (rows [memories, t]) share."""
    memory, keys, sets = _shared(
        rows, least, prefixes.words, prefixes.offsets, prefixes.last, prefixes.opens,
        spelled.numbers, spelled.offsets, spelled.opening,
    )  # fmt: skip
    return memory, keys, sets
