"""Shallow features of prefixes, as 63-bit keys, and what a person would call them.

    FRAME          the last three words with a gap: "was … on", "was …", "was the …"
    ENDING + n     the last n words, n = 1..3
    ANYWHERE + n   n words in a row, anywhere in the window
    SHAPE          a shape of the last word (a year, a capital, an opening quote) or an affix (-ing, un-), a piece
                   inside a word that the last token is, a class of the last token (tokens.parquet), a list that the
                   last word is in (word_lists), whether the word goes on after the prefix, a list or a plain form
                   of the word before the last, the first word of the sentence that the prefix ends in, how many words
                   of it there are, or whether a bracket is open at its end

An affix is two to four letters at either end of a word that is longer by at least one. A key holds its kind and up to
three word numbers, so that it is read back without a table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.pattern.word_lists import SHOWN, describe_class, lists_of
from memlens.pattern.words import Words

LONGEST = 3
FRAME, ENDING, ANYWHERE, SHAPE = 0, 0, 3, 7  # an ending has one word at least, so that 0 is free for frames
# What a key of SHAPE is about, above its 40 lowest bits: the last word, the first word of the sentence as it is or by
# its list, how many words of the sentence there are, the word before the last, an open bracket, the last token's class.
LAST, FIRST, FIRST_LIST, EARLY, BEFORE, INSIDE, LAST_CLASS = 0, 1, 2, 3, 4, 5, 6
EARLY_WORDS = (1, 3, 6)  # of a sentence
GAP = 0  # in the words of a frame
BITS, KIND = 20, 60
_MASK = (1 << BITS) - 1
_AFFIXES = (2, 3, 4)
_STEM = 1

KeyArray = NDArray[np.int64]
# Families of hypotheses, each with a cut of its own: there are few sorts of words, more words and many wordings.
_WORDINGS = ("one word at the end", "two words at the end", "three words at the end", "words with a gap at the end")
_ANYWHERE = ("one word anywhere", "two words anywhere", "three words anywhere")
_SORTS_OF = ("forms of last words", "openings of sentences", "sorts of words before them", "classes of last words")
FAMILIES = (*_WORDINGS, *_ANYWHERE, *_SORTS_OF)
GAPS, OF_ANYWHERE = 3, 4  # places in FAMILIES; GAPS after endings of 1 to 3 words
OF_LAST_WORDS, OF_OPENINGS, OF_BEFORE, OF_CLASSES = 7, 8, 9, 10
_FAMILY = {"frame": GAPS, **dict.fromkeys(("shape", "piece", "list"), OF_LAST_WORDS), "class": OF_CLASSES}
_FAMILY |= {"opening": OF_OPENINGS, "early": OF_OPENINGS, "inside": OF_BEFORE, "before": OF_BEFORE}

# From the special to the general; a word has every shape that it matches.
_SHAPES = {
    "year": re.compile(r"1[0-9]{3}|20[0-9]{2}"),
    "decade": re.compile(r"1[0-9]{2}0s|20[0-9]0s"),
    "ordinal": re.compile(r"[0-9]+(?:st|nd|rd|th)", re.IGNORECASE),
    "number": re.compile(r"[0-9][0-9.,]*"),
    "digit": re.compile(r"[0-9].*[^\W\d_].*|[^\W\d_]+[0-9].*"),
}
OPENING_QUOTE, UNFINISHED, LATER_PIECE = "opening quote", "unfinished", "later piece"
STOP, SIGN, SHORT = 1, 2, 3
MOST_LISTS = 3  # that a word is in
MOST_SORTS = 5  # of a word before the last
_SORTS = ("-s", "-ed", "-ing", "-ly", "year", "number")  # of its forms, those that people name
PLURAL = "-s"  # not of words in -ss, -us and -is
PIECE, CLASS, LIST = "piece ", "class ", "list "  # how the names of these begin
_DESCRIPTIONS = {
    "year": "ends with a year",
    "decade": "ends with a decade",
    "ordinal": "ends with an ordinal number",
    "number": "ends with a number",
    "digit": "ends with letters and digits",
    "capitals": "ends with a word in capitals",
    "capital": "ends with a capitalised word",
    OPENING_QUOTE: "ends with an opening quote",
    UNFINISHED: "ends inside a word that goes on",
    LATER_PIECE: "ends with a word of several tokens",
    PLURAL: "ends with a plural or another word in -s",
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
        if len(word) > 3 and word.endswith("s") and word[-2] not in "siu":
            found.append(PLURAL)
    return found + [f"{LIST}{name}" for name in lists_of(word)]


def _mark(word: str) -> int:
    if word and not word[0].isalnum():
        return STOP if word in ".!?" else SIGN
    return SHORT if len(word) <= 2 else 0


def _describe(shape: str) -> str:
    affix = f"ends {'in' if shape.startswith('-') else 'with a word in'} {shape}"
    return _DESCRIPTIONS.get(shape, affix)


def _sort(shape: str) -> str:
    """The sort of a word before the last, in words."""
    plain = {PLURAL: "a plural or another word in -s", "year": "a year", "number": "a number"}
    return plain.get(shape, f"a word in {shape}" if shape.startswith("-") else shape)


def _early(words: int) -> str:
    which = {1: "with the first word", 3: "within the first three words", 6: "within the first six words"}
    return f"ends {which[words]} of a sentence"


@dataclass(frozen=True, eq=False)
class TokenFeatures:
    """The text of every token, and its classes at several grains (-1: none)."""

    texts: list[str]
    classes: NDArray[np.int32]  # [grains, vocabulary]


@dataclass(frozen=True, eq=False)
class SpellingFeatures:
    """The shapes of every spelling, and those of every token; `names[number - 1]` is a shape's name."""

    names: list[str]
    numbers: NDArray[np.int32]  # [all features of all spellings]
    offsets: NDArray[np.int64]  # [spellings + 1]
    classes: NDArray[np.int32]  # [grains, vocabulary]: numbers of a token's classes, 0 for none
    pieces: NDArray[np.int32]  # [vocabulary]: the number of a token as a piece inside a word, 0 for none
    lengths: NDArray[np.int32]  # [spellings]: letters
    token_lengths: NDArray[np.int32]  # [vocabulary]: letters
    marks: NDArray[np.int8]  # [words]: STOP, another SIGN, SHORT words, after which a stop is no end, or 0
    lists: NDArray[np.int32]  # [words, MOST_LISTS]: numbers of the lists a word is in, 0 for none
    sorts: NDArray[np.int32]  # [words, MOST_SORTS]: the same of lists and forms of a word before the last
    brackets: NDArray[np.int64]  # [2]: the words "(" and ")", 0 where there are none
    of_whole_words: NDArray[np.bool_]  # [names + 1]: is it said of whole words only, not of one that goes on?

    @classmethod
    def of(cls, words: Words, used: NDArray[Any], tokens: TokenFeatures) -> SpellingFeatures:
        """The features of the spellings that end a prefix; the others have none."""
        numbers = {name: number for number, name in enumerate((OPENING_QUOTE, UNFINISHED, LATER_PIECE), 1)}
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
        spelled = (np.array(flat, np.int32), np.array(offsets, np.int64))
        lengths = [np.array([len(text.strip()) for text in own], np.int32) for own in (words.spellings, tokens.texts)]
        classes = np.array(grains, np.int32).reshape(len(grains), len(tokens.texts))
        marks = np.array([_mark(text) for text in words.texts], np.int8)
        lists = np.zeros((len(words.texts), MOST_LISTS), np.int32)
        sorts = np.zeros((len(words.texts), MOST_SORTS), np.int32)
        for number, text in enumerate(words.texts):
            named = [f"{LIST}{name}" for name in lists_of(text)]
            plain = [name for name in shapes_of(text) if name in _SORTS] if len(text) > 3 else []
            for into, names in ((lists, named), (sorts, named + plain)):
                for place, name in enumerate(names[: into.shape[1]]):
                    into[number, place] = numbers.setdefault(name, len(numbers) + 1)
        brackets = np.array([words.find("("), words.find(")")], np.int64)
        whole = np.array([False, *(name == PLURAL or name.startswith(LIST) for name in numbers)])
        of_pieces = np.array(pieces, np.int32)
        sizes = (lengths[0], lengths[1])
        return cls(list(numbers), *spelled, classes, of_pieces, *sizes, marks, lists, sorts, brackets, whole)


@dataclass(frozen=True)
class Feature:
    """A key, read back."""

    kind: str  # "ending", "n-gram" or one of _FAMILY
    words: tuple[int, ...] = ()  # numbers of its words; GAP for any word
    shape: str = ""

    @property
    def family(self) -> int:
        """Its place in FAMILIES."""
        if self.kind in ("ending", "n-gram"):
            return min(len(self.words), LONGEST) - 1 + (OF_ANYWHERE if self.kind == "n-gram" else 0)
        return _FAMILY[self.kind]

    @property
    def places(self) -> frozenset[int]:
        """The last words that it looks at: 1 for the last, 0 for the start of its sentence; none for an n-gram."""
        if self.kind == "n-gram":
            return frozenset()
        if self.kind in ("opening", "early", "before", "inside"):
            return frozenset([{"before": 2, "inside": -1}.get(self.kind, 0)])
        words = reversed(self.words or (1,))
        return frozenset(place for place, word in enumerate(words, 1) if word != GAP)

    @property
    def is_of_last_word(self) -> bool:
        """Does it say something of the last word but not which one it is?"""
        return self.family in (OF_LAST_WORDS, OF_CLASSES) and self.shape != OPENING_QUOTE

    @property
    def is_broad(self) -> bool:
        """Does it say of what sort a word is, or where it stands, without a single word or piece of one?"""
        of_words = self.kind in ("list", "opening", "early", "before", "inside")
        return of_words or self.shape in (UNFINISHED, LATER_PIECE, PLURAL)

    def text(self, words: Words) -> str:
        texts = ["…" if number == GAP else words.texts[number] for number in self.words]
        return " ".join(texts).removeprefix("… ")

    def describe(self, words: Words, examples: Sequence[str] = ()) -> str:
        """`examples`: words of the prefixes that have it, in the place it is about, the most frequent first."""
        if self.kind == "class":
            return describe_class(examples)
        if self.kind == "early":
            return _early(int(self.shape))
        if self.kind == "inside":
            return "ends inside brackets"
        shown = f": {', '.join(examples[:SHOWN])}" if examples else ""
        if self.kind == "list":
            return f"ends with {self.shape}{shown}"
        if self.kind == "before":
            return f"{_sort(self.shape)} before the last word{shown}"
        if self.kind == "opening":
            return "sentence begins with " + (self.shape + shown if self.shape else f'"{self.text(words)}"')
        if self.shape in (UNFINISHED, LATER_PIECE, PLURAL):
            return _describe(self.shape) + shown
        if self.kind == "piece":
            return f'ends inside a word with "{self.shape}"'
        if self.kind == "shape":
            return _describe(self.shape)
        return f'{"contains" if self.kind == "n-gram" else "ends with"} "{self.text(words)}"'

    def name(self, words: Words) -> str:
        """The same for every memory that has it: what related memories are found by."""
        return f"{self.kind}:{self.shape or self.text(words)}"


def read_key(key: int, names: Sequence[str]) -> Feature:
    kind, body = key >> KIND, key & ((1 << KIND) - 1)
    if kind == SHAPE:
        about, number = body >> (2 * BITS), body & _MASK
        if about == EARLY:
            return Feature("early", shape=str(number))
        if about == INSIDE:
            return Feature("inside", shape="brackets")
        if about == FIRST:
            return Feature("opening", (number,))
        name = names[number - 1]
        if about == BEFORE:
            return Feature("before", shape=name.removeprefix(LIST))
        if about == FIRST_LIST:
            return Feature("opening", shape=name.removeprefix(LIST))
        for start in (PIECE, CLASS, LIST):
            if name.startswith(start):
                return Feature(start.strip(), shape=name.removeprefix(start))
        return Feature("shape", shape=name)
    if kind == FRAME:
        return Feature("frame", tuple((body >> (BITS * place)) & _MASK for place in (2, 1, 0)))
    length = kind - (ANYWHERE if kind > ANYWHERE else ENDING)
    numbers = tuple((body >> (BITS * place)) & _MASK for place in reversed(range(length)))
    return Feature("ending" if kind <= ANYWHERE else "n-gram", numbers)
