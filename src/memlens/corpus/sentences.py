"""Units of text become sentences of tokens, each with an id that stays the same for one corpus and its settings.

"Sentence" is whatever is scanned in one piece, also where the unit is a line, a document or a block. This module
knows nothing of models: it is handed a function that encodes texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from memlens.corpus.units import TextUnit
from memlens.errors import SettingError

_BATCH_CHARACTERS = 4 << 20  # a batch of long documents is encoded before it fills the memory


class Encoded(Protocol):
    """One text as tokens: their ids without special tokens, and the character offset in the text where each ends."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def ends(self) -> list[int]: ...


@dataclass(frozen=True)
class Sentence:
    """What is scanned in one piece.

    text    the unit, or where tokens were dropped or a block was cut, the part of it that the tokens cover
    ends    for each token the offset in `text` where it ends; never falling
    cut     number of tokens that were dropped because the context is shorter
    """

    id: int
    text: str
    tokens: list[int]
    ends: list[int]
    source: str
    cut: int


def tokenize_units(
    units: Iterable[TextUnit],
    encode: Callable[[Sequence[str]], Sequence[Encoded]],
    *,
    max_length: int | None,
    max_tokens: int | None,
    block: int | None = None,
    batch: int = 512,
) -> Iterator[Sentence]:
    """Sentences with ids 0, 1, 2 … in reading order; units without tokens are passed over and get no id.

    max_length  own tokens a sentence may have (the context without BOS); longer ones are cut
    max_tokens  stop after the sentence that reaches this many tokens in all; that one is kept whole
    block       cut every unit into consecutive blocks of this many tokens, the last one shorter
    """
    for name, value in (("max length", max_length), ("max tokens", max_tokens), ("block", block), ("batch", batch)):
        if value is not None and value < 1:
            raise SettingError(f"{name} is {value}; it must be at least 1")
    if block and max_length and block > max_length:
        raise SettingError(
            f"unit block:{block} is longer than the {max_length} tokens that fit; use block:{max_length} or less"
        )
    return _sentences(_parts(units, encode, max_length, block, batch), max_tokens)


@dataclass(frozen=True)
class _Part:
    """A sentence that has no id yet."""

    text: str
    tokens: list[int]
    ends: list[int]
    source: str
    cut: int = 0


def _sentences(parts: Iterator[_Part], max_tokens: int | None) -> Iterator[Sentence]:
    total = 0
    for number, part in enumerate(parts):
        yield Sentence(number, part.text, part.tokens, part.ends, part.source, part.cut)
        total += len(part.tokens)
        if max_tokens is not None and total >= max_tokens:
            return


def _parts(
    units: Iterable[TextUnit],
    encode: Callable[[Sequence[str]], Sequence[Encoded]],
    max_length: int | None,
    block: int | None,
    batch: int,
) -> Iterator[_Part]:
    for group in _groups(units, batch):
        for unit, encoded in zip(group, encode([unit.text for unit in group]), strict=True):
            if block:
                yield from cut_blocks(unit, encoded, block)
            elif encoded.ids:
                yield _cut_to_length(unit, encoded, max_length)


def _groups(units: Iterable[TextUnit], batch: int) -> Iterator[list[TextUnit]]:
    group: list[TextUnit] = []
    characters = 0
    for unit in units:
        group.append(unit)
        characters += len(unit.text)
        if len(group) >= batch or characters >= _BATCH_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _cut_to_length(unit: TextUnit, encoded: Encoded, max_length: int | None) -> _Part:
    if max_length is None or len(encoded.ids) <= max_length:
        return _Part(unit.text, encoded.ids, encoded.ends, unit.source)
    ends = encoded.ends[:max_length]
    return _Part(unit.text[: ends[-1]], encoded.ids[:max_length], ends, unit.source, len(encoded.ids) - max_length)


def cut_blocks(unit: TextUnit, encoded: Encoded, block: int) -> Iterator[_Part]:
    """Consecutive blocks of tokens; their texts joined are the unit's text, and no token is lost.

    Where a block ends within a character (byte tokens), the character belongs to the block that begins it, and the
    next block's first tokens end at 0 of its text.
    """
    begin = 0
    for first in range(0, len(encoded.ids), block):
        tokens = encoded.ids[first : first + block]
        ends = encoded.ends[first : first + block]
        is_last = first + block >= len(encoded.ids)
        finish = len(unit.text) if is_last else ends[-1]
        yield _Part(unit.text[begin:finish], tokens, [end - begin for end in ends], unit.source)
        begin = finish
