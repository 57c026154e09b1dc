"""Shallow features of prefixes, as 63-bit keys, and how often a random prefix of the corpus has each.

    FRAME          the last three words with a gap: "was … on", "was …", "was the …"
    ENDING + n     the last n words, n = 1..3
    ANYWHERE + n   n words in a row, anywhere in the window
    SHAPE          a shape of the last word (a year, a capital, an opening quote) or an affix (-ing, un-), a piece
                   inside a word that the last token is, or a class of the last token (tokens.parquet)

An affix is two to four letters at either end of a word that is longer by at least one. A key holds its kind and up to
three word numbers, so that it is read back without a table. The loops are compiled: a memory has a thousand keys.

Background: a seeded sample of all prefixes (all of them where they are few) goes through the same code as triggers do.
The share of an ending or a shape is counted. An n-gram is likelier in a longer prefix: its share among prefixes of L
words is 1 - exp(-rate L), with the one rate that gives its share over the whole sample.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.parallel import compiled, compiled_part
from memlens.pattern.word_lists import describe_class
from memlens.pattern.words import GROUNDED, WINDOW, PrefixWords, Words
from memlens.sorting import sort_, sort_with_
from memlens.stats import upper_share

LONGEST = 3
FRAME, ENDING, ANYWHERE, SHAPE = 0, 0, 3, 7  # an ending has one word at least, so that 0 is free for frames
GAP = 0  # in the words of a frame
_BITS, _KIND = 20, 60
_MASK = (1 << _BITS) - 1
_RATES = np.geomspace(1e-9, 20, 4000)
_AFFIXES = (2, 3, 4)
_STEM = 1

KeyArray = NDArray[np.int64]

# From the special to the general; a word has every shape that it matches.
_SHAPES = {
    "year": re.compile(r"1[0-9]{3}|20[0-9]{2}"),
    "decade": re.compile(r"1[0-9]{2}0s|20[0-9]0s"),
    "ordinal": re.compile(r"[0-9]+(?:st|nd|rd|th)", re.IGNORECASE),
    "number": re.compile(r"[0-9][0-9.,]*"),
    "digit": re.compile(r"[0-9].*[^\W\d_].*|[^\W\d_]+[0-9].*"),
}
OPENING_QUOTE = "opening quote"
PIECE, CLASS = "piece ", "class "  # how the names of these begin
_DESCRIPTIONS = {
    "year": "ends with a year",
    "decade": "ends with a decade",
    "ordinal": "ends with an ordinal number",
    "number": "ends with a number",
    "digit": "ends with letters and digits",
    "capitals": "ends with a word in capitals",
    "capital": "ends with a capitalised word",
    OPENING_QUOTE: "ends with an opening quote",
}


def shapes_of(spelling: str) -> list[str]:
    """Shapes and affixes (`-ing`, `un-`) of a word as written."""
    found = [name for name, form in _SHAPES.items() if form.fullmatch(spelling)]
    if spelling[:1].isupper():
        found.append("capitals" if len(spelling) > 1 and spelling.isupper() else "capital")
    word = spelling.lower()
    if word.isalpha():
        lengths = [size for size in _AFFIXES if len(word) >= size + _STEM]
        found += [f"-{word[-size:]}" for size in lengths]
        found += [f"{word[:size]}-" for size in lengths]
    return found


def _describe(shape: str) -> str:
    affix = f"ends {'in' if shape.startswith('-') else 'with a word in'} {shape}"
    return _DESCRIPTIONS.get(shape, affix)


@dataclass(frozen=True, eq=False)
class TokenFeatures:
    """What is known of every token: its text, and its classes at several grains (-1: none)."""

    texts: list[str]
    classes: NDArray[np.int32]  # [grains, vocabulary]


@dataclass(frozen=True, eq=False)
class SpellingFeatures:
    """The shapes of every spelling, and those of every token; `names[number - 1]` is a shape's name."""

    names: list[str]
    numbers: NDArray[np.int32]  # [all features of all spellings]
    offsets: NDArray[np.int64]  # [spellings + 1]
    opening: int  # the number of the opening quote
    classes: NDArray[np.int32]  # [grains, vocabulary]: numbers of a token's classes, 0 for none
    pieces: NDArray[np.int32]  # [vocabulary]: the number of a token as a piece inside a word, 0 for none
    lengths: NDArray[np.int32]  # [spellings]: letters
    token_lengths: NDArray[np.int32]  # [vocabulary]: letters

    @classmethod
    def of(cls, words: Words, used: NDArray[Any], tokens: TokenFeatures) -> SpellingFeatures:
        """The features of the spellings that end a prefix; the others have none."""
        numbers: dict[str, int] = {OPENING_QUOTE: 1}
        wanted = np.zeros(len(words.spellings), np.bool_)
        wanted[used] = True
        flat: list[int] = []
        offsets = [0]
        for spelling, is_used in zip(words.spellings, wanted.tolist(), strict=True):
            if is_used:
                flat += [numbers.setdefault(name, len(numbers) + 1) for name in shapes_of(spelling)]
            offsets.append(len(flat))
        pieces = [
            numbers.setdefault(f"{PIECE}{text.lower()}", len(numbers) + 1) if text.isalpha() and len(text) > 1 else 0
            for text in tokens.texts
        ]
        grains = [
            [0 if own < 0 else numbers.setdefault(f"{CLASS}{grain}.{own}", len(numbers) + 1) for own in classes]
            for grain, classes in enumerate(tokens.classes.tolist())
        ]
        spelled = (np.array(flat, np.int32), np.array(offsets, np.int64), 1)
        lengths = (np.array([len(text.strip()) for text in own], np.int32) for own in (words.spellings, tokens.texts))
        classes = np.array(grains, np.int32).reshape(len(grains), len(tokens.texts))
        return cls(list(numbers), *spelled, classes, np.array(pieces, np.int32), *lengths)


@dataclass(frozen=True)
class Feature:
    """A key, read back."""

    kind: str  # "ending", "n-gram", "frame", "shape", "piece" or "class"
    words: tuple[int, ...] = ()  # numbers of its words; GAP for any word
    shape: str = ""

    @property
    def places(self) -> frozenset[int]:
        """Which of the last words it looks at, 1 for the last; none for an n-gram, which may stand anywhere."""
        if self.kind == "n-gram":
            return frozenset()
        words = reversed(self.words or (1,))
        return frozenset(place for place, word in enumerate(words, 1) if word != GAP)

    @property
    def is_of_last_word(self) -> bool:
        """Does it say something of the last word but not which one it is?"""
        return self.kind in ("shape", "piece", "class") and self.shape != OPENING_QUOTE

    def text(self, words: Words) -> str:
        texts = ["…" if number == GAP else words.texts[number] for number in self.words]
        return " ".join(texts).removeprefix("… ")

    def describe(self, words: Words, examples: Sequence[str] = ()) -> str:
        """`examples`: last words of the prefixes that have it, the most frequent first; for a class."""
        if self.kind == "class":
            return describe_class(examples)
        if self.kind == "piece":
            return f'ends inside a word with "{self.shape}"'
        if self.kind == "shape":
            return _describe(self.shape)
        return f'{"contains" if self.kind == "n-gram" else "ends with"} "{self.text(words)}"'

    def name(self, words: Words) -> str:
        """The same for every memory that has it: what related memories are found by."""
        return f"{self.kind}:{self.shape or self.text(words)}"


def read_key(key: int, names: Sequence[str]) -> Feature:
    kind, body = key >> _KIND, key & ((1 << _KIND) - 1)
    if kind == SHAPE:
        name = names[body - 1]
        for start in (PIECE, CLASS):
            if name.startswith(start):
                return Feature(start.strip(), shape=name.removeprefix(start))
        return Feature("shape", shape=name)
    if kind == FRAME:
        return Feature("frame", tuple((body >> (_BITS * place)) & _MASK for place in (2, 1, 0)))
    length = kind - (ANYWHERE if kind > ANYWHERE else ENDING)
    numbers = tuple((body >> (_BITS * place)) & _MASK for place in reversed(range(length)))
    return Feature("ending" if kind <= ANYWHERE else "n-gram", numbers)


class _PrefixArrays(NamedTuple):
    """Prefixes and the shapes of their last words, for compiled code."""

    words: Any  # the arrays of PrefixWords
    offsets: Any
    last: Any
    opens: Any
    shapes: Any  # the arrays of SpellingFeatures
    shape_offsets: Any
    opening: int
    tokens: Any
    classes: Any
    pieces: Any
    lengths: Any
    token_lengths: Any

    @classmethod
    def of(cls, prefixes: PrefixWords, spelled: SpellingFeatures) -> _PrefixArrays:
        own = (prefixes.words, prefixes.offsets, prefixes.last, prefixes.opens)
        of_tokens = (prefixes.tokens, spelled.classes, spelled.pieces, spelled.lengths, spelled.token_lengths)
        return cls(*own, spelled.numbers, spelled.offsets, spelled.opening, *of_tokens)


@compiled_part
def _add_keys_(prefixes: _PrefixArrays, row: int, keys: Any, count: int) -> int:
    """Append the keys of one prefix (an n-gram as often as it occurs); the new count comes back."""
    words, end = prefixes.words, prefixes.offsets[row + 1]
    for start in range(prefixes.offsets[row], end):
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
    last = prefixes.last[row]
    for place in range(prefixes.shape_offsets[last], prefixes.shape_offsets[last + 1]):
        keys[count] = (np.int64(SHAPE) << _KIND) | np.int64(prefixes.shapes[place])
        count += 1
    if prefixes.opens[row]:
        keys[count] = (np.int64(SHAPE) << _KIND) | np.int64(prefixes.opening)
        count += 1
    token = prefixes.tokens[row]
    if token >= 0:
        for grain in range(len(prefixes.classes)):
            if prefixes.classes[grain, token] > 0:
                keys[count] = (np.int64(SHAPE) << _KIND) | np.int64(prefixes.classes[grain, token])
                count += 1
        if prefixes.pieces[token] > 0 and prefixes.token_lengths[token] < prefixes.lengths[last]:
            keys[count] = (np.int64(SHAPE) << _KIND) | np.int64(prefixes.pieces[token])
            count += 1
    return _add_frames_(words, prefixes.offsets[row], end, keys, count)


@compiled_part
def _add_frames_(words: Any, begin: int, end: int, keys: Any, count: int) -> int:
    """Append the frames of the last three words: "one … three", "… two …", "one two …"."""
    if end - begin < 2:
        return count
    first = np.int64(words[end - 3]) if end - begin >= 3 else np.int64(0)
    second, third = np.int64(words[end - 2]), np.int64(words[end - 1])
    if second > 0:
        keys[count] = second << _BITS
        count += 1
    if first > 0 and third > 0:
        keys[count] = (first << (2 * _BITS)) | third
        count += 1
    if first > 0 and second > 0:
        keys[count] = (first << (2 * _BITS)) | (second << _BITS)
        count += 1
    return count


@compiled_part
def _room(prefixes: _PrefixArrays, row: int) -> int:
    """At least as many keys as a prefix has."""
    return (prefixes.offsets[row + 1] - prefixes.offsets[row] + 1) * LONGEST + 24


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
    """What at least `least` triggers (rows [memories, t]) share: memory, key, set of prefixes as bits, its size."""
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


def is_anywhere(keys: KeyArray) -> NDArray[np.bool_]:
    """Which keys are of n-grams, that may stand anywhere; the others look at the end."""
    kinds = keys >> _KIND
    found: NDArray[np.bool_] = (kinds > ANYWHERE) & (kinds < SHAPE)
    return found


@dataclass(frozen=True, eq=False)
class Background:
    """Counts of features among sampled prefixes."""

    keys: KeyArray  # sorted
    counts: NDArray[np.int64]
    prefixes: int
    length_shares: NDArray[np.float64]  # [WINDOW + 1]: share of prefixes of each length
    hypotheses: tuple[int, int]  # per memory: at the end, anywhere

    @classmethod
    def of(cls, prefixes: PrefixWords, spelled: SpellingFeatures) -> Background:
        keys, counts = np.unique(_all_keys(_PrefixArrays.of(prefixes, spelled)), return_counts=True)
        kept = counts > 1  # what was met once is looked up as met once, without being kept
        lengths = np.bincount(prefixes.lengths, minlength=WINDOW + 1) / max(len(prefixes), 1)
        anywhere = is_anywhere(keys[counts >= GROUNDED])
        hypotheses = (int((~anywhere).sum()), int(anywhere.sum()))
        return cls(keys[kept], counts[kept], len(prefixes), lengths, hypotheses)

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
        anywhere = is_anywhere(keys)
        there = lengths[anywhere] >= 0
        rates = np.interp(shares[anywhere], self._shares_by_rate(), _RATES)
        chances = (1 - np.exp(-rates[:, None] * np.maximum(lengths[anywhere], 0))) * there
        shares[anywhere] = chances.sum(1) / np.maximum(there.sum(1), 1)
        return np.maximum(shares, 1e-300)

    def _shares_by_rate(self) -> NDArray[np.float64]:
        chances = 1 - np.exp(-_RATES[:, None] * np.arange(WINDOW + 1)[None, :])
        by_rate: NDArray[np.float64] = chances @ self.length_shares
        return by_rate
