"""What a prefix's last word looks like: a year, a number, a capital, an opening quote, -ing, un-.

A shape is a named class of spellings, an affix two to four letters at either end of a word that is longer by at least
one. Every affix of the corpus is a candidate; whether it matters is for statistics to say. Knows spellings only.

Everything shallow that prefixes may share, as 63-bit keys: endings, n-grams anywhere, shapes of the last word.

    ENDING + n     the last n words, n = 1..3
    ANYWHERE + n   n words in a row, anywhere in the window
    SHAPE          a shape or an affix of the last word (see shapes)

A key holds its kind and up to three word numbers, so that it can be read back without a table. Compiled, since there
are about a thousand keys a memory. Knows words and memories as numbers only.

How often a random prefix of the corpus has each feature.

A seeded sample of all prefixes (all of them where they are few) goes through the same code as triggers do. The share of
an ending or a shape is simply counted. An n-gram anywhere is likelier in a longer prefix: its share among prefixes of L
words is taken as 1 - exp(-rate * L), with the one rate that gives its share over the whole sample. Every feature that
at least three prefixes of the sample have is a hypothesis for every memory. Knows no memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.parallel import compiled
from memlens.pattern.words import WINDOW, PrefixWords, Words
from memlens.stats import upper_share

SUFFIX, PREFIX = "suffix", "prefix"
_AFFIXES = (2, 3, 4)
_STEM = 1

# From the special to the general; a word has every shape that it matches.
_SHAPES = {
    "year": re.compile(r"1[0-9]{3}|20[0-9]{2}"),
    "decade": re.compile(r"1[0-9]{2}0s|20[0-9]0s"),
    "ordinal": re.compile(r"[0-9]+(?:st|nd|rd|th)", re.IGNORECASE),
    "number": re.compile(r"[0-9][0-9.,]*"),
    "digit": re.compile(r"[0-9].*[^\W\d_].*|[^\W\d_]+[0-9].*"),
}
OPENING_QUOTE = "opening quote"
DESCRIPTIONS = {
    "year": "ends with a year",
    "decade": "ends with a decade",
    "ordinal": "ends with an ordinal number",
    "number": "ends with a number",
    "digit": "ends with letters and digits",
    "capitals": "ends with a word in capitals",
    "capital": "ends with a capitalised word",
    OPENING_QUOTE: "ends with an opening quote",
}


def features(spelling: str) -> list[str]:
    """Shapes and affixes of a word as written; an affix is `-ing` or `un-`."""
    found = [name for name, form in _SHAPES.items() if form.fullmatch(spelling)]
    if spelling[:1].isupper():
        found.append("capitals" if len(spelling) > 1 and spelling.isupper() else "capital")
    word = spelling.lower()
    if word.isalpha():
        lengths = [size for size in _AFFIXES if len(word) >= size + _STEM]
        found += [f"-{word[-size:]}" for size in lengths]
        found += [f"{word[:size]}-" for size in lengths]
    return found


def describe(feature: str) -> str:
    if feature in DESCRIPTIONS:
        return DESCRIPTIONS[feature]
    side = "in" if feature.startswith("-") else "with a word in"
    return f"ends {side} {feature}"


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
        numbers: dict[str, int] = {OPENING_QUOTE: 1}
        wanted = np.zeros(len(words.spellings), np.bool_)
        wanted[used] = True
        flat: list[int] = []
        offsets = [0]
        for spelling, is_used in zip(words.spellings, wanted.tolist(), strict=True):
            if is_used:
                flat += [numbers.setdefault(name, len(numbers) + 1) for name in features(spelling)]
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
            return describe(self.shape)
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


SAMPLE = 150_000
GROUNDED = 3
_RATES = np.geomspace(1e-9, 20, 4000)


@dataclass(frozen=True, eq=False)
class Background:
    """Counts of features among sampled prefixes."""

    keys: KeyArray  # sorted
    counts: NDArray[np.int64]
    prefixes: int
    length_shares: NDArray[np.float64]  # [WINDOW + 1]: share of prefixes of each length
    hypotheses: int  # a memory

    @classmethod
    def of(cls, prefixes: PrefixWords, spelled: SpellingFeatures) -> Background:
        keys, counts = np.unique(all_keys(prefixes, spelled), return_counts=True)
        kept = counts > 1  # what was met once is looked up as met once, without being kept
        lengths = np.bincount(prefixes.lengths, minlength=WINDOW + 1) / max(len(prefixes), 1)
        return cls(keys[kept], counts[kept], len(prefixes), lengths, int((counts >= GROUNDED).sum()))

    def count(self, keys: KeyArray) -> NDArray[np.int64]:
        """How many of the sampled prefixes have each feature; at least 1."""
        if len(self.keys) == 0:
            return np.ones(len(keys), np.int64)
        where = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[where] == keys, self.counts[where], 1)

    def shares(self, keys: KeyArray, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Upper bound of the chance that a random prefix has each feature; lengths [keys, t], -1 where there is none.

        The mean over prefixes as long as those given.
        """
        shares = upper_share(self.count(keys), self.prefixes)
        kinds = keys >> 60
        anywhere = (kinds > ANYWHERE) & (kinds < SHAPE)
        there = lengths[anywhere] >= 0
        rates = np.interp(shares[anywhere], self._shares_by_rate(), _RATES)
        chances = (1 - np.exp(-rates[:, None] * np.maximum(lengths[anywhere], 0))) * there
        shares[anywhere] = chances.sum(1) / np.maximum(there.sum(1), 1)
        return np.maximum(shares, 1e-300)

    def _shares_by_rate(self) -> NDArray[np.float64]:
        chances = 1 - np.exp(-_RATES[:, None] * np.arange(WINDOW + 1)[None, :])
        by_rate: NDArray[np.float64] = chances @ self.length_shares
        return by_rate


def sample_prefixes(index: Index, size: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sentences and positions of random prefixes, each at most once; all where there are no more than `size`."""
    sentences, lengths = sentence_lengths(index)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    total = int(edges[-1])
    if size >= total:
        drawn = np.arange(total)
    else:
        random = np.random.default_rng([seed, 5])
        drawn = (
            np.sort(random.choice(total, size, replace=False)) if total < 20 * size else _distinct(random, total, size)
        )
    place = np.searchsorted(edges, drawn, side="right") - 1
    return sentences[place].astype(np.int64), (drawn - edges[place]).astype(np.int64)


def sentence_lengths(index: Index) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number and tokens of every sentence; the tokens themselves are not loaded."""
    query = "SELECT sentence, len(ends)::BIGINT AS tokens FROM read_parquet($1) ORDER BY sentence"
    with closing(duckdb.connect(config={"threads": 1})) as database:
        found = database.execute(query, [str(index.path("corpus"))]).fetchnumpy()
    return np.asarray(found["sentence"], np.int64), np.asarray(found["tokens"], np.int64)


def _distinct(random: np.random.Generator, total: int, size: int) -> NDArray[np.int64]:
    """About `size` different numbers below a large total, without an array of that size."""
    return np.unique(random.integers(0, total, size))
