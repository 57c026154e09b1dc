"""Tokens in values, found while somebody types: the answer of memlens.values.search, from arrays in memory.

Every value's list lies in one row of numbers, so that a token is found in all of them by one look-up each. An index
that is too large for this is searched with search_values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memlens.values.search import FoundToken, Promotion, search_values
from memlens.web.served_index import ServedIndex
from memlens.web.statistics import read_statistics

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
    return index.remember(("values",), ("value tokens",), lambda: _prepare(index))


def _prepare(index: ServedIndex) -> ValueTokens | None:
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
