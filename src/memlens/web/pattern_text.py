"""Words in patterns, found while somebody types: the answer of memlens.index.search, from arrays in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from memlens.errors import SettingError
from memlens.index.search import PatternMatch, PatternSearch
from memlens.web.served_index import ServedIndex
from memlens.web.statistics import read_statistics

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
    all_of = index.remember(("patterns",), ("pattern text",), lambda: _prepare(index))
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


def _prepare(index: ServedIndex) -> PatternText:
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
