"""Texts of triggers: one with the sentences around it, and all as arrays, in which a server finds what is typed.

A prefix contains a text exactly if the text's first place in the sentence ends no later than the prefix does. So each
sentence is looked through once, and every trigger is then one comparison of two numbers. The rows are those of the
query in memlens.index.search (docs/decisions/2026-11-16-tables-at-hand.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from memlens.errors import UnknownName
from memlens.index.reader import Index

_MOST_TRIGGERS = 30_000_000
_GROUPS_AT_ONCE = 4096
_NEVER = np.iinfo(np.int32).max
# Where prefixes end in bytes, by position + 1: position -1 is BOS alone, which has no text.
_STOPS = ", ".join(
    f"""[0] || CASE WHEN strlen(text) = length(text) THEN ends
        ELSE list_transform(ends, lambda stop: strlen(left({text}, stop))::INTEGER) END AS {name}"""
    for text, name in (("text", "stops"), ("lower(text)", "lowered_stops"))
)
_AROUND = """
SELECT sentence, text, source FROM {corpus} WHERE sentence BETWEEN $1 - $2 AND $1 + $2
AND source = (SELECT source FROM {corpus} WHERE sentence = $1) ORDER BY sentence
"""

Contains = Callable[[Any], NDArray[np.bool_]]  # of triggers, a slice or their numbers: which of them contain the text


@dataclass(frozen=True, eq=False)
class TriggerText:
    """Triggers by memory, end and rank, and the sentences they lie in. A group is one end of one memory."""

    text: pa.Array  # [sentences]
    lowered: pa.Array  # [sentences]
    number: NDArray[np.int64]  # [sentences]: the sentence's id
    sentence: NDArray[np.int32]  # [triggers]: its row in `text`
    stop: NDArray[np.int32]  # [triggers]: where the prefix ends, in bytes of the text
    lowered_stop: NDArray[np.int32]  # [triggers]: the same in the lowered text
    columns: dict[str, NDArray[Any]]  # [triggers]: rank, coefficient, position, next_token (-1 for none)
    starts: NDArray[np.int64]  # [groups + 1]: a group's first trigger
    layer: NDArray[np.int64]  # [groups]
    memory: NDArray[np.int64]  # [groups]
    is_top: NDArray[np.bool_]  # [groups]

    @classmethod
    def read(cls, index: Index) -> "TriggerText | None":
        """None where it would be too large."""
        if index.sql("SELECT count(*) AS n FROM {triggers}")[0]["n"] > _MOST_TRIGGERS:
            return None
        query = f"SELECT sentence, text, lower(text) AS lowered, {_STOPS} FROM {{corpus}} ORDER BY sentence"
        corpus = pa.Table.from_batches(index.batches(query))
        text, lowered = (corpus.column(name).combine_chunks() for name in ("text", "lowered"))
        number = corpus.column("sentence").to_numpy()
        columns = _ordered_columns(index)
        layer, memory, is_top = (columns.pop(name) for name in ("layer", "memory", "is_top"))
        sentence = np.searchsorted(number, columns.pop("sentence")).astype(np.int32)
        stop, lowered_stop = (
            _at(corpus.column(name), sentence, columns["position"] + 1) for name in ("stops", "lowered_stops")
        )
        is_first = np.ones(len(memory), np.bool_)
        is_first[1:] = (np.diff(layer) != 0) | (np.diff(memory) != 0) | (is_top[1:] != is_top[:-1])
        first = np.flatnonzero(is_first)
        starts = np.append(first, len(memory))
        groups = (column[first] for column in (layer, memory, is_top))
        return cls(text, lowered, number, sentence, stop, lowered_stop, columns, starts, *groups)

    def search(
        self, text: str, ignore_case: bool, allowed: Mapping[int, Sequence[int]] | None, limit: int
    ) -> list[dict[str, Any]]:
        """The best groups of the allowed memories (layer -> memories), as rows with their best matching trigger."""
        contains = self._contains(text, ignore_case)
        counts = self._count(contains)
        if allowed is not None:
            counts = np.where(self._is_allowed(allowed), counts, 0)
        groups = np.flatnonzero(counts)
        if not len(groups):
            return []
        shown = min(limit, len(groups))
        least = np.partition(counts[groups], -shown)[-shown]
        likely = groups[counts[groups] >= least]
        best = self._best(contains, likely)
        by = (
            ~self.is_top[likely],
            self.memory[likely],
            self.layer[likely],
            self.columns["rank"][best],
            -counts[likely],
        )
        return [
            {
                "layer": int(self.layer[likely[place]]),
                "memory": int(self.memory[likely[place]]),
                "end": "top" if self.is_top[likely[place]] else "bottom",
                "matches": int(counts[likely[place]]),
                "best": self._row(int(best[place])),
                "total": len(groups),
            }
            for place in np.lexsort(by)[:limit].tolist()
        ]

    def _contains(self, text: str, ignore_case: bool) -> Contains:
        # The library that made `lowered` knows one small letter for each capital, Python sometimes two.
        wanted = "".join(sign.lower() if len(sign.lower()) == 1 else sign for sign in text) if ignore_case else text
        places = pc.find_substring(self.lowered if ignore_case else self.text, wanted)
        first = places.to_numpy(zero_copy_only=False)
        needed = np.where(first < 0, _NEVER, first + len(wanted.encode())).astype(np.int32)  # [sentences]
        stop = self.lowered_stop if ignore_case else self.stop
        return lambda rows: stop[rows] >= needed[self.sentence[rows]]

    def _count(self, contains: Contains) -> NDArray[np.int32]:
        """Matching triggers of each group, [groups]; part by part, so that little memory is needed at once."""
        counts = np.zeros(len(self.memory), np.int32)
        for begin in range(0, len(counts), _GROUPS_AT_ONCE):
            starts = self.starts[begin : begin + _GROUPS_AT_ONCE + 1]
            is_match = contains(slice(int(starts[0]), int(starts[-1])))
            counts[begin : begin + len(starts) - 1] = np.add.reduceat(is_match, starts[:-1] - starts[0], dtype=np.int32)
        return counts

    def _is_allowed(self, allowed: Mapping[int, Sequence[int]]) -> NDArray[np.bool_]:
        mask = np.zeros(len(self.memory), np.bool_)
        for layer, memories in allowed.items():
            of_layer = np.flatnonzero(self.layer == layer)
            mask[of_layer] = np.isin(self.memory[of_layer], memories)
        return mask

    def _best(self, contains: Contains, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first matching trigger of each of these groups, which all have one."""
        lengths = self.starts[groups + 1] - self.starts[groups]
        begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        rows = np.arange(lengths.sum()) + np.repeat(self.starts[groups] - begins, lengths)
        best: NDArray[np.int64] = np.minimum.reduceat(np.where(contains(rows), rows, np.iinfo(np.int64).max), begins)
        return best

    def _row(self, trigger: int) -> dict[str, Any]:
        """A trigger as a row of its table."""
        row = {name: column[trigger].item() for name, column in self.columns.items()}
        row["next_token"] = None if row["next_token"] < 0 else row["next_token"]
        return row | {"sentence": int(self.number[self.sentence[trigger]])}


def _at(lists: pa.ChunkedArray, rows: NDArray[Any], places: NDArray[Any]) -> NDArray[np.int32]:
    """lists[rows[i]][places[i]] for every i."""
    whole = lists.combine_chunks()
    entries: NDArray[np.int32] = whole.values.to_numpy()[whole.offsets.to_numpy()[rows] + places].astype(np.int32)
    return entries


def _ordered_columns(index: Index) -> dict[str, NDArray[Any]]:
    """The columns of the triggers by memory, end (top first) and rank, in which a scan has written them already."""
    names = ["layer", "memory", "end", "rank", "coefficient", "sentence", "position", "next_token"]
    table = index.table("triggers", names)
    table = table.set_column(2, "is_top", pc.equal(table.column("end"), "top"))
    table = table.set_column(7, "next_token", pc.fill_null(table.column("next_token"), -1))
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    order = np.lexsort((columns["rank"], ~columns["is_top"], columns["memory"], columns["layer"]))
    if (np.diff(order) < 0).any():
        columns = {name: column[order] for name, column in columns.items()}
    return columns


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
    rows = index.sql(_AROUND, [sentence, around])
    place = next((place for place, row in enumerate(rows) if row["sentence"] == sentence), None)
    if place is None:
        raise UnknownName(f"the corpus has no sentence {sentence}; it has 0 to {index.manifest.counts.sentences - 1}")
    texts = [row["text"] for row in rows]
    return SentenceContext(
        sentence, rows[place]["source"], tuple(texts[:place]), texts[place], tuple(texts[place + 1 :])
    )
