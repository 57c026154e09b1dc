"""Shallow features of prefixes, as 63-bit keys, and what a person would call them.

    FRAME          the last three words with a gap: "was … on", "was …", "was the …"
    ENDING + n     the last n words, n = 1..3
    ANYWHERE + n   n words in a row, anywhere in the window
    SHAPE          a shape of the last word (a year, a capital, an opening quote) or an affix (-ing, un-), a piece
                   inside a word that the last token is, or a class of the last token (tokens.parquet)

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

from memlens.pattern.word_lists import describe_class
from memlens.pattern.words import Words

LONGEST = 3
FRAME, ENDING, ANYWHERE, SHAPE = 0, 0, 3, 7  # an ending has one word at least, so that 0 is free for frames
GAP = 0  # in the words of a frame
BITS, KIND = 20, 60
_MASK = (1 << BITS) - 1
_AFFIXES = (2, 3, 4)
_STEM = 1

KeyArray = NDArray[np.int64]
# Families of hypotheses, each with a cut of its own: there are few classes of words and many wordings.
FAMILIES = ("wordings at the end", "wordings anywhere", "classes of the last word")

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
    def family(self) -> int:
        """Its place in FAMILIES."""
        return 1 if self.kind == "n-gram" else 2 if self.kind in ("shape", "piece", "class") else 0

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
    kind, body = key >> KIND, key & ((1 << KIND) - 1)
    if kind == SHAPE:
        name = names[body - 1]
        for start in (PIECE, CLASS):
            if name.startswith(start):
                return Feature(start.strip(), shape=name.removeprefix(start))
        return Feature("shape", shape=name)
    if kind == FRAME:
        return Feature("frame", tuple((body >> (BITS * place)) & _MASK for place in (2, 1, 0)))
    length = kind - (ANYWHERE if kind > ANYWHERE else ENDING)
    numbers = tuple((body >> (BITS * place)) & _MASK for place in reversed(range(length)))
    return Feature("ending" if kind <= ANYWHERE else "n-gram", numbers)
