"""Text in triggers, found while somebody types: the answer of memlens.index.search, from arrays in memory.

A prefix contains a text exactly if the text's first place in the sentence ends no later than the prefix does. So each
sentence is looked through once, and every trigger is then one comparison of two numbers; counting and filtering are
sums over rows that lie together. An index that is too large for this is searched with search_triggers.

Tokens in values, found while somebody types: the answer of memlens.vocab.search, from arrays in memory.

Every value's list lies in one row of numbers, so that a token is found in all of them by one look-up each. An index
that is too large for this is searched with search_values.

Words in patterns, found while somebody types: the answer of memlens.index.search, from arrays in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from memlens.errors import SettingError
from memlens.index.reader import trigger_of
from memlens.index.search import MemoryMatch, PatternMatch, PatternSearch, TriggerSearch, search_triggers
from memlens.vocab.search import FoundToken, Promotion, search_values
from memlens.web.served_index import ServedIndex
from memlens.web.statistics import read_statistics

Rows = slice | NDArray[np.int64]

_MOST_TRIGGERS = 30_000_000
_GROUPS_AT_ONCE = 4096
_NEVER = np.iinfo(np.int32).max
# Where prefixes end in bytes, by position + 1: position -1 is BOS alone, which has no text.
_STOPS = ", ".join(
    f"""[0] || CASE WHEN strlen(text) = length(text) THEN ends
        ELSE list_transform(ends, lambda stop: strlen(left({text}, stop))::INTEGER) END AS {name}"""
    for text, name in (("text", "stops"), ("lower(text)", "lowered_stops"))
)


@dataclass(frozen=True, eq=False)
class TriggerText:
    """Triggers by memory, end and rank, and the sentences they lie in. A group is one end of one memory."""

    text: pa.Array  # [sentences]
    lowered: pa.Array  # [sentences]
    number: NDArray[np.int64]  # [sentences]: a sentence's own number
    sentence: NDArray[np.int32]  # [triggers]: its row in `text`
    stop: NDArray[np.int32]  # [triggers]: where the prefix ends, in bytes of the text
    lowered_stop: NDArray[np.int32]  # [triggers]: the same in the lowered text
    columns: dict[str, NDArray[Any]]  # [triggers]: rank, coefficient, position, next_token (-1 for none)
    starts: NDArray[np.int64]  # [groups + 1]: a group's first trigger
    memory: NDArray[np.int64]  # [groups]: row of Statistics
    is_top: NDArray[np.bool_]  # [groups]

    def finder(self, text: str, ignore_case: bool) -> Callable[[Rows], NDArray[np.bool_]]:
        """A function of triggers (a slice or their numbers) that says which of them contain the text."""
        # The library that made `lowered` knows one small letter for each capital, Python sometimes two.
        wanted = "".join(sign.lower() if len(sign.lower()) == 1 else sign for sign in text) if ignore_case else text
        places = pc.find_substring(self.lowered if ignore_case else self.text, wanted)
        first = places.to_numpy(zero_copy_only=False)
        needed = np.where(first < 0, _NEVER, first + len(wanted.encode())).astype(np.int32)  # [sentences]
        stop = self.lowered_stop if ignore_case else self.stop
        return lambda rows: stop[rows] >= needed[self.sentence[rows]]

    def count(self, contains: Callable[[Rows], NDArray[np.bool_]]) -> NDArray[np.int32]:
        """Matching triggers of each group, [groups]; part by part, so that little memory is needed at once."""
        counts = np.zeros(len(self.memory), np.int32)
        for begin in range(0, len(counts), _GROUPS_AT_ONCE):
            starts = self.starts[begin : begin + _GROUPS_AT_ONCE + 1]
            found = contains(slice(int(starts[0]), int(starts[-1])))
            counts[begin : begin + len(starts) - 1] = np.add.reduceat(found, starts[:-1] - starts[0], dtype=np.int32)
        return counts

    def best(self, contains: Callable[[Rows], NDArray[np.bool_]], groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first matching trigger of each of these groups, which all have one."""
        lengths = self.starts[groups + 1] - self.starts[groups]
        begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        rows = np.arange(lengths.sum()) + np.repeat(self.starts[groups] - begins, lengths)
        best: NDArray[np.int64] = np.minimum.reduceat(np.where(contains(rows), rows, np.iinfo(np.int64).max), begins)
        return best

    def row(self, trigger: int) -> dict[str, Any]:
        """A trigger as a row of its table."""
        found = {name: column[trigger].item() for name, column in self.columns.items()}
        found["next_token"] = None if found["next_token"] < 0 else found["next_token"]
        return found | {"sentence": int(self.number[self.sentence[trigger]])}


def find_triggers(
    index: ServedIndex, text: str, mask: NDArray[np.bool_] | None, *, ignore_case: bool, limit: int
) -> TriggerSearch:
    """As search_triggers finds them, of memories that pass the mask [memories] alone."""
    statistics = read_statistics(index)
    prepared = prepare_triggers(index)
    if prepared is None:
        everything = search_triggers(index, text, ignore_case=ignore_case, limit=max(2 * len(statistics), 1))
        kept = [one for one in everything.found if mask is None or mask[statistics.row_of(one.memory)]]
        return TriggerSearch(tuple(kept[:limit]), len(kept))
    contains = prepared.finder(text, ignore_case)
    counts = prepared.count(contains)
    groups = np.flatnonzero(counts if mask is None else counts * mask[prepared.memory])
    if not len(groups):
        return TriggerSearch((), 0)
    shown = min(limit, len(groups))
    least = np.partition(counts[groups], -shown)[-shown]
    likely = groups[counts[groups] >= least]
    best = prepared.best(contains, likely)
    keys = (~prepared.is_top[likely], prepared.memory[likely], prepared.columns["rank"][best], -counts[likely])
    order = np.lexsort(keys)[:limit]
    rows = [prepared.row(trigger) for trigger in best[order].tolist()]
    sentences = index.sentences(sorted({row["sentence"] for row in rows}))
    found = tuple(
        MemoryMatch(
            statistics.memory_at(int(prepared.memory[group])),
            "top" if prepared.is_top[group] else "bottom",
            int(counts[group]),
            trigger_of(row, sentences[row["sentence"]]),
        )
        for group, row in zip(likely[order].tolist(), rows, strict=True)
    )
    return TriggerSearch(found, len(groups))


def prepare_triggers(index: ServedIndex) -> TriggerText | None:
    """Of an index as it is now, made once; None where it would be too large."""
    return index.remember(("triggers", "corpus"), ("trigger text",), lambda: _prepare(index))


def _prepare(index: ServedIndex) -> TriggerText | None:
    if index.sql("SELECT count(*) AS n FROM {triggers}")[0]["n"] > _MOST_TRIGGERS:
        return None
    corpus = index.arrow(f"SELECT sentence, text, lower(text) AS lowered, {_STOPS} FROM {{corpus}} ORDER BY sentence")
    text, lowered = (corpus.column(name).combine_chunks() for name in ("text", "lowered"))
    number = corpus.column("sentence").to_numpy()
    triggers = _ordered(index)
    sentence = np.searchsorted(number, triggers.pop("sentence")).astype(np.int32)
    stop, lowered_stop = (
        _at(corpus.column(name), sentence, triggers["position"] + 1) for name in ("stops", "lowered_stops")
    )
    memory, is_top = triggers.pop("row"), triggers.pop("is_top")
    is_first = np.ones(len(memory), np.bool_)
    is_first[1:] = (memory[1:] != memory[:-1]) | (is_top[1:] != is_top[:-1])
    first = np.flatnonzero(is_first)
    starts = np.append(first, len(memory))
    return TriggerText(
        text, lowered, number, sentence, stop, lowered_stop, triggers, starts, memory[first], is_top[first]
    )


def _at(lists: pa.ChunkedArray, rows: NDArray[Any], places: NDArray[Any]) -> NDArray[np.int32]:
    """lists[rows[i]][places[i]] for every i."""
    whole = lists.combine_chunks()
    found: NDArray[np.int32] = whole.values.to_numpy()[whole.offsets.to_numpy()[rows] + places].astype(np.int32)
    return found


def _ordered(index: ServedIndex) -> dict[str, NDArray[Any]]:
    """The columns of the triggers by memory, end (top first) and rank."""
    names = ["layer", "memory", "end", "rank", "coefficient", "sentence", "position", "next_token"]
    table = index.table("triggers", names)
    table = table.set_column(2, "is_top", pc.equal(table.column("end"), "top"))
    table = table.set_column(7, "next_token", pc.fill_null(table.column("next_token"), -1))
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    columns["row"] = read_statistics(index).rows_of(columns.pop("layer"), columns.pop("memory"))
    place = (columns["row"] * 2 + ~columns["is_top"]) << 32 | columns["rank"]
    if (np.diff(place) < 0).any():  # a scan writes them in order
        order = np.argsort(place, kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
    return columns


_MOST_TOKENS = 60_000_000


@dataclass(frozen=True, eq=False)
class ValueTokens:
    """The lists of all values, one after another, each from its top token on."""

    tokens: NDArray[np.int32]  # [values x listed]
    p: NDArray[np.float32]  # [values x listed]
    starts: NDArray[np.int64]  # [values + 1]: where a value's list begins
    memory: NDArray[np.int64]  # [values]: row of Statistics


def find_tokens(
    index: ServedIndex, texts: list[str], mask: NDArray[np.bool_] | None, limit: int
) -> tuple[list[Promotion], int]:
    """Of the memories that pass the mask [memories], those search_values finds for these tokens, and how many."""
    statistics = read_statistics(index)
    prepared = prepare_values(index)
    if prepared is None:
        every = search_values(index, texts, "token", limit=None)
        kept = [one for one in every if mask is None or mask[statistics.row_of(one.memory)]]
        return kept[:limit], len(kept)
    text_of = np.full(len(index.vocabulary), -1, np.int64)  # [vocabulary]: which of the texts a token reads
    for number, text in enumerate(texts):
        text_of[read_readings(index)[text]] = number
    places = np.flatnonzero((text_of >= 0)[prepared.tokens])
    owner = np.searchsorted(prepared.starts, places, side="right") - 1
    if mask is not None:
        passes = mask[prepared.memory[owner]]
        places, owner = places[passes], owner[passes]
    if not len(places):
        return [], 0
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    own = owner[first]
    p = np.add.reduceat(prepared.p[places].astype(np.float64), first)
    pairs = np.unique(owner * len(texts) + text_of[prepared.tokens[places]])
    found_texts = np.bincount(pairs // len(texts), minlength=len(prepared.memory))[own] if len(texts) > 1 else p * 0
    rank = places[first] - prepared.starts[own]
    order = np.lexsort((prepared.memory[own], rank, -p, -found_texts))[:limit]
    ends = np.append(first, len(places))
    shown = []
    for number in order.tolist():
        tokens = [
            FoundToken(token, index.vocabulary[token], place, share)
            for token, place, share in zip(
                prepared.tokens[places[ends[number] : ends[number + 1]]].tolist(),
                (places[ends[number] : ends[number + 1]] - prepared.starts[own[number]]).tolist(),
                prepared.p[places[ends[number] : ends[number + 1]]].tolist(),
                strict=True,
            )
        ]
        memory = statistics.memory_at(int(prepared.memory[own[number]]))
        shown.append(Promotion(memory, sum(token.p for token in tokens), tuple(tokens)))
    return shown, len(own)


def read_readings(index: ServedIndex) -> dict[str, list[int]]:
    """Text -> the tokens that read it, made once."""

    def make() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for token, text in enumerate(index.vocabulary):
            found.setdefault(text, []).append(token)
        return found

    return index.remember(("vocabulary",), ("readings",), make)


def prepare_values(index: ServedIndex) -> ValueTokens | None:
    """Of an index as it is now, made once; None where it would be too large."""
    return index.remember(("values",), ("value tokens",), lambda: _value_tokens_prepare(index))


def _value_tokens_prepare(index: ServedIndex) -> ValueTokens | None:
    total = index.sql("SELECT coalesce(sum(len(tokens)), 0) AS n FROM {values}")[0]["n"]
    if total > _MOST_TOKENS:
        return None
    table = index.table("values", ["layer", "memory", "tokens", "p"])
    lists, numbers = (table.column(name).combine_chunks() for name in ("tokens", "p"))
    return ValueTokens(
        lists.flatten().to_numpy(),
        numbers.flatten().to_numpy(),
        np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy())]).astype(np.int64),
        read_statistics(index).rows_of(table.column("layer").to_numpy(), table.column("memory").to_numpy()),
    )


_WORD = re.compile(r'[^\t\n\f\r ",:]')


@dataclass(frozen=True, eq=False)
class PatternText:
    """All patterns, as the table has them. Every column is [patterns]."""

    said: pa.Array  # description and pattern, in small letters
    description: pa.ChunkedArray
    kind: pa.ChunkedArray
    confidence: NDArray[np.float64]
    prefixes: NDArray[np.int64]  # how many
    memory: NDArray[np.int64]  # row of Statistics


def find_patterns(index: ServedIndex, text: str, mask: NDArray[np.bool_] | None, limit: int) -> PatternSearch:
    """As search_patterns finds them within words, of memories that pass the mask [memories] alone; without names."""
    if not _WORD.search(text):
        raise SettingError("the text to search for has no word in it; give at least one")
    statistics = read_statistics(index)
    index.path("patterns")  # says which command makes it
    all_of = index.remember(("patterns",), ("pattern text",), lambda: _pattern_text_prepare(index))
    wanted = "".join(sign.lower() if len(sign.lower()) == 1 else sign for sign in text)
    rows = np.flatnonzero(pc.match_substring(all_of.said, wanted).to_numpy(zero_copy_only=False))
    if mask is not None:
        rows = rows[mask[all_of.memory[rows]]]
    if not len(rows):
        return PatternSearch((), 0)
    # the surest pattern of each memory comes first among its own
    rows = rows[np.lexsort((rows, -all_of.prefixes[rows], -all_of.confidence[rows], all_of.memory[rows]))]
    first = np.flatnonzero(np.diff(all_of.memory[rows], prepend=-1))
    matches = np.diff(np.append(first, len(rows)))
    best = rows[first]
    order = np.lexsort((all_of.memory[best], -all_of.prefixes[best], -all_of.confidence[best]))[:limit]
    found = tuple(
        PatternMatch(
            statistics.memory_at(int(all_of.memory[best[number]])),
            int(matches[number]),
            all_of.description[int(best[number])].as_py(),
            all_of.kind[int(best[number])].as_py(),
            float(all_of.confidence[best[number]]),
            int(all_of.prefixes[best[number]]),
            "",
        )
        for number in order.tolist()
    )
    return PatternSearch(found, len(first))


def _pattern_text_prepare(index: ServedIndex) -> PatternText:
    table = index.arrow(
        """SELECT layer, memory, lower(description || ' ' || pattern) AS said, description, kind, confidence,
                  len(prefixes)::BIGINT AS prefixes FROM {patterns}"""
    )
    numbers = {name: table.column(name).to_numpy() for name in ("layer", "memory", "confidence", "prefixes")}
    memory = read_statistics(index).rows_of(numbers["layer"], numbers["memory"])
    said = table.column("said").combine_chunks()
    return PatternText(
        said, table.column("description"), table.column("kind"), numbers["confidence"], numbers["prefixes"], memory
    )
