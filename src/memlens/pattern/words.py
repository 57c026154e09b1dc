"""The words of triggers and random prefixes.

A word is a run of letters (possibly with an apostrophe), a number (1,900.5; 1990s; 21st), one character of a script
that is written without spaces, or a single punctuation mark. The last word of a prefix may be incomplete, because a
tokenizer may split words. Words are compared in lower case. The spelling of the last word is stored to detect its
shape. Only the last WINDOW words of a long prefix count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from memlens.files import open_database, parquet_sql
from memlens.index.reader import Index

KINDS = ("shallow", "semantic")  # kinds of patterns of prefixes, as in the paper
NEXT = "next"  # kind of a pattern of next tokens, which follow the prefix
GROUNDED = 3  # minimum number of prefixes of a pattern, as in the paper
HELD = 25  # number of held-out triggers, which rank below the triggers in which patterns are found
ENOUGH = 10  # minimum number of held-out triggers to test a pattern
WINDOW = 64
UNKNOWN = 0  # word number of all words that do not fit into the vocabulary; patterns never contain it
ROOM = 1 << 20  # size of the vocabulary: three word numbers fit into a 60-bit key
TOKENS = 3_000_000  # maximum number of tokens to read from a large corpus, in runs of RUN sentences
RUN = 64
_ROWS_AT_ONCE = 32_768
_CHARACTERS = 16 * WINDOW  # number of characters to read, enough for the last WINDOW words of a long prefix


@dataclass(frozen=True, eq=False)
class TriggerRows:
    """The triggers of all memories. Prefixes are numbered, because several memories may share them."""

    layer: NDArray[np.int32]  # [memories]: layer of the memory
    memory: NDArray[np.int32]  # [memories]: number of the memory
    rows: NDArray[np.int64]  # [memories, t]: numbers of prefixes by rank, -1 for none
    following: NDArray[np.int32]  # [memories, t]: next tokens, -1 for none
    sentences: NDArray[np.int64]  # [prefixes]: sentence number
    positions: NDArray[np.int64]  # [prefixes]: position of the last token
    held: NDArray[np.int64]  # [memories, h]: numbers of held-out prefixes, -1 for none

    @property
    def filled(self) -> NDArray[np.int64]:
        """The number of triggers of each memory. [memories]"""
        counts: NDArray[np.int64] = (self.rows >= 0).sum(1)
        return counts

    def names(self) -> Iterator[tuple[int, int]]:
        """Return the layer and memory of each row."""
        return zip(self.layer.tolist(), self.memory.tolist(), strict=True)


def ranks_of(members: int) -> list[int]:
    """Return the trigger ranks in a bit mask."""
    return [rank for rank in range(members.bit_length()) if members >> rank & 1]


def one_per_document(rows: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replace all but the best prefix of each document by -1 in `rows` [memories, t].

    Prefixes of one document are similar and therefore not independent.
    """
    numbers = np.where(rows >= 0, documents[np.maximum(rows, 0)], -1)
    distinct = rows.copy()
    for rank in range(1, distinct.shape[1]):
        repeats = (numbers[:, :rank] == numbers[:, rank, None]).any(1)
        distinct[repeats, rank] = -1
    return distinct


def read_trigger_rows(index: Index, top: int, held: int = 0, end: str = "top") -> TriggerRows:
    """Return the first `top` triggers of every memory at one end, and the next `held` triggers as held-out triggers."""
    columns = ["layer", "memory", "rank", "sentence", "position", "next_token"]
    filters = [("end", "=", end), ("rank", "<", top + held)]
    table = index.table("triggers", columns, filters)
    layer, memory, rank, sentence, position = (table.column(name).to_numpy() for name in columns[:-1])
    following = pc.fill_null(table.column("next_token"), -1).to_numpy()
    names, owner = np.unique(layer.astype(np.int64) << 32 | memory.astype(np.int64), return_inverse=True)
    places, prefix = np.unique(sentence.astype(np.int64) << 24 | (position.astype(np.int64) + 1), return_inverse=True)
    width = max(int(rank.max(initial=-1)) + 1, 1)
    rows = np.full((len(names), width), -1, np.int64)
    rows[owner, rank] = prefix
    next_tokens = np.full((len(names), width), -1, np.int32)
    next_tokens[owner, rank] = following
    return TriggerRows(
        (names >> 32).astype(np.int32),
        (names & 0xFFFFFFFF).astype(np.int32),
        rows[:, :top],
        next_tokens[:, :top],
        places >> 24,
        (places & 0xFFFFFF) - 1,
        rows[:, top:],
    )


def sample_prefixes(index: Index, size: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sentences and positions of `size` distinct random prefixes, or of all prefixes if there are fewer."""
    sentences, lengths = sentence_lengths(index)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    total = int(edges[-1])
    if size >= total:
        drawn = np.arange(total)
    else:
        random = np.random.default_rng([seed, 5])
        if total < 20 * size:
            drawn = np.sort(random.choice(total, size, replace=False))
        else:  # repeats are rare, and drawing without replacement would need an array of size `total`
            drawn = np.unique(random.integers(0, total, size))
    place = np.searchsorted(edges, drawn, side="right") - 1
    return sentences[place].astype(np.int64), (drawn - edges[place]).astype(np.int64)


def sampled_runs(index: Index, seed: int) -> tuple[int, int]:
    """Return (every, which). The runs of sentences whose number % every == which contain about TOKENS tokens."""
    _, lengths = sentence_lengths(index)
    every = max(1, -(-int(lengths.sum()) // TOKENS))
    return every, int(np.random.default_rng([seed, 6]).integers(every))


def sentence_lengths(index: Index) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers and lengths of all sentences without loading their tokens."""
    columns = index.arrays("SELECT sentence, len(ends)::BIGINT AS tokens FROM {corpus} ORDER BY sentence")
    return np.asarray(columns["sentence"], np.int64), np.asarray(columns["tokens"], np.int64)


_ALONE = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}"
_LETTER = rf"[^\P{{L}}{_ALONE}]|\p{{M}}"
WORD = (
    r"\p{N}+(?:[.,]\p{N}+)*\p{L}*"
    rf"|[{_ALONE}]"
    rf"|(?:{_LETTER})+(?:[\x{{27}}\x{{2019}}](?:{_LETTER})+|\p{{N}}+)*"
    r"|[^\s\p{L}\p{M}\p{N}]"
)
_OPENING = r"(?:^|[\s(\[])[\x{22}\x{27}\x{60}\x{2018}\x{201C}\x{201E}\x{AB}]$"

# matches the two characters around the end of a prefix if the prefix ends inside a word
_INSIDE = rf"(?:{_LETTER}){{2}}|\p{{N}}{{2}}"
_REST = rf"^(?:\p{{N}}+\p{{L}}*|(?:{_LETTER})+)"

_QUERY = f"""
WITH cut AS (
    SELECT p.row, right(left(c.text, c.ends[p.position + 1]), {_CHARACTERS}) AS text,
           coalesce(c.tokens[p.position + 1], -1) AS token,
           coalesce(c.tokens[p.position + 2], -1) AS following, hash(c.source) // 2 AS document,
           substr(c.text, c.ends[p.position + 1], 2) AS edge,
           regexp_extract(substr(c.text, c.ends[p.position + 1] + 1, 32), $rest) AS rest
    FROM prefixes p JOIN {{corpus}} c ON p.sentence = c.sentence
    WHERE c.sentence BETWEEN $first AND $last
)
SELECT row, regexp_extract_all(text, $word)[-{WINDOW}:] AS words, regexp_matches(rtrim(text), $opening) AS opens,
       regexp_full_match(edge, $inside) AS goes_on, CASE WHEN goes_on THEN rest ELSE '' END AS rest, token, following,
       document::BIGINT AS document
FROM cut ORDER BY row
"""


@dataclass
class Words:
    """A growing vocabulary. Words in lower case and spellings are numbered separately."""

    texts: list[str] = field(default_factory=lambda: [""])
    _numbers: dict[str, int] = field(default_factory=lambda: {"": UNKNOWN})
    spellings: list[str] = field(default_factory=lambda: [""])  # text as written
    _spelling_numbers: dict[str, int] = field(default_factory=lambda: {"": 0})
    plain: list[int] = field(default_factory=lambda: [UNKNOWN])  # number of the word of each spelling

    def add(self, words: pa.DictionaryArray) -> NDArray[np.int32]:
        """Add new spellings and return the spelling number of each word."""
        numbers = []
        for spelling in words.dictionary.to_pylist():
            number = self._spelling_numbers.get(spelling)
            if number is None:
                number = self._spelling_numbers[spelling] = len(self.spellings)
                self.spellings.append(spelling)
                self.plain.append(self._word(spelling.lower().replace("’", "'")))
            numbers.append(number)
        return np.array(numbers, np.int32)[words.indices.to_numpy(zero_copy_only=False).astype(np.int64)]

    def _word(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = len(self.texts) if len(self.texts) < ROOM else UNKNOWN
            if number != UNKNOWN:
                self.texts.append(text)
                self._numbers[text] = number
        return number

    def find(self, text: str) -> int:
        """Return the number of a lower-case word, or UNKNOWN."""
        return self._numbers.get(text, UNKNOWN)


class PrefixWords(NamedTuple):
    """The words of many prefixes, concatenated. This is a tuple so that compiled code can read it."""

    words: NDArray[np.int32]  # [all words]
    spellings: NDArray[np.int32]  # [all words]: the words as they are written
    offsets: NDArray[np.int64]  # [prefixes + 1]
    last: NDArray[np.int32]  # [prefixes]: spelling of the last word up to the end of the prefix
    whole: NDArray[np.int32]  # [prefixes]: spelling of the complete last word
    opens: NDArray[np.bool_]  # [prefixes]: whether the prefix ends with an opening quotation mark
    tokens: NDArray[np.int32]  # [prefixes]: last token, -1 for BOS alone
    following: NDArray[np.int32]  # [prefixes]: next token, -1 at the end of a sentence
    goes_on: NDArray[np.bool_]  # [prefixes]: whether the next character of the text belongs to the last word
    documents: NDArray[np.int64]  # [prefixes]: number of the paragraph (.txt) or record

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def size(self) -> int:
        return len(self.last)

    def join(self, other: PrefixWords) -> PrefixWords:
        """Append the prefixes of `other`."""
        offsets = np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]])
        names = ("last", "whole", "opens", "tokens", "following", "goes_on", "documents")
        each = (np.concatenate([getattr(self, name), getattr(other, name)]) for name in names)
        words = np.concatenate([self.words, other.words])
        spellings = np.concatenate([self.spellings, other.spellings])
        return PrefixWords(words, spellings, offsets, *each)


def read_prefix_words(
    index: Index, sentences: NDArray[np.int64], positions: NDArray[np.int64], words: Words
) -> PrefixWords:
    """Return the words of prefixes in the given order. Position -1 (BOS alone) has no words."""
    order = np.lexsort((positions, sentences))
    parts = list(_read_sorted(index, sentences[order], positions[order], words))
    lengths, spellings, *each = (np.concatenate(column) for column in zip(*parts, strict=True))
    begins = np.concatenate([[0], np.cumsum(lengths)])
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    offsets = np.concatenate([[0], np.cumsum(lengths[back])]).astype(np.int64)
    # index of each word of the result in `spellings`
    source = np.repeat(begins[:-1][back] - offsets[:-1], lengths[back]) + np.arange(offsets[-1])
    spellings = spellings[source]
    numbers = np.asarray(words.plain, np.int32)[spellings]
    return PrefixWords(numbers, spellings, offsets, *(column[back] for column in each))


def _read_sorted(
    index: Index, sentences: NDArray[np.int64], positions: NDArray[np.int64], words: Words
) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield lengths, spellings and the other columns of PrefixWords for sorted prefixes, in chunks."""
    kinds = (np.int64, np.int32, np.int32, np.int32, np.bool_, np.int32, np.int32, np.bool_, np.int64)
    yield tuple(np.zeros(0, kind) for kind in kinds)
    query = _QUERY.format(corpus=parquet_sql(index.path("corpus")))
    with closing(open_database(os.cpu_count() or 1)) as database:
        for first in range(0, len(sentences), _ROWS_AT_ONCE):
            chunk = slice(first, first + _ROWS_AT_ONCE)
            rows = np.arange(len(sentences[chunk]))
            prefixes = pa.table({"row": rows, "sentence": sentences[chunk], "position": positions[chunk]})
            database.register("prefixes", prefixes)
            parameters = {
                "first": int(sentences[chunk][0]),
                "last": int(sentences[chunk][-1]),
                "word": WORD,
                "opening": _OPENING,
                "inside": _INSIDE,
                "rest": _REST,
            }
            yield _number_words(database.sql(query, params=parameters).to_arrow_table().combine_chunks(), words)


def _number_words(table: pa.Table, words: Words) -> tuple[NDArray[Any], ...]:
    """Return lengths, spellings and the other columns of PrefixWords for the result of _QUERY."""
    lists = table.column("words").combine_chunks()
    flat = lists.flatten().dictionary_encode()
    spelling = words.add(flat)
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(lengths)
    last = np.zeros(len(lengths), np.int32)
    last[lengths > 0] = spelling[ends[lengths > 0] - 1]
    opens = table.column("opens").fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_)
    whole = last.copy()
    rests = table.column("rest").fill_null("").to_pylist()
    broken = [row for row, rest in enumerate(rests) if rest and last[row]]
    completed = [words.spellings[last[row]] + rests[row] for row in broken]
    whole[broken] = words.add(pa.array(completed, pa.string()).dictionary_encode())
    goes_on = table.column("goes_on").fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_)
    tokens, following, documents = (table.column(name).to_numpy() for name in ("token", "following", "document"))
    return lengths, spelling, last, whole, opens, tokens, following, goes_on, documents
