"""The context of a sentence: the document it comes from, and the sentences before and after it there."""

from __future__ import annotations

from dataclasses import dataclass

from memlens.errors import UnknownName
from memlens.index.reader import Index

_SENTENCES = """
SELECT sentence, text, source FROM {corpus} WHERE sentence BETWEEN $1 - $2 AND $1 + $2
AND source = (SELECT source FROM {corpus} WHERE sentence = $1) ORDER BY sentence
"""


@dataclass(frozen=True)
class SentenceContext:
    """A sentence between its neighbours of the same document."""

    sentence: int
    source: str  # file, and line or row in it
    before: tuple[str, ...]
    text: str
    after: tuple[str, ...]


def read_context(index: Index, sentence: int, around: int = 2) -> SentenceContext:
    """A sentence with at most `around` sentences on each side; refused if the corpus has no such sentence."""
    rows = index.sql(_SENTENCES, [sentence, around])
    place = next((place for place, row in enumerate(rows) if row["sentence"] == sentence), None)
    if place is None:
        raise UnknownName(f"the corpus has no sentence {sentence}; it has 0 to {index.manifest.counts.sentences - 1}")
    texts = [row["text"] for row in rows]
    return SentenceContext(
        sentence, rows[place]["source"], tuple(texts[:place]), texts[place], tuple(texts[place + 1 :])
    )
