"""Prefixes of other documents with the same last tokens as triggers: what the last token alone says of its text.

Of every token that ends a trigger two samples are drawn from the corpus (at most TOKENS of it): one that says what text
before this token is like on average, and one that triggers are swapped for. Each takes prefixes of as many documents as
there are. A token that ends many triggers of one memory needs more of them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.pattern.words import RUN, sampled_runs

LEAST, MOST = 8, 48  # prefixes of a token in a sample
_QUERY = """
SELECT sentence, unnest(tokens) AS token, generate_subscripts(tokens, 1) - 1 AS position,
       (hash(source) // 2)::BIGINT AS document
FROM {corpus} WHERE (sentence // $1) % $2 = $3
"""


@dataclass(frozen=True, eq=False)
class MatchedPlaces:
    """Prefixes by their last token: those of token t are offsets[slots[t]] to offsets[slots[t] + 1]."""

    sentences: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int32]  # [vocabulary]: -1 for a token that no trigger ends with
    offsets: NDArray[np.int64]  # [slots + 1]
    middles: NDArray[np.int64]  # [slots]: where the second sample of a token begins


def draw_matched(index: Index, multiplicity: NDArray[np.int64], seed: int) -> MatchedPlaces:
    """`multiplicity` [vocabulary]: how many triggers of one memory end with each token, at most; 0 for none."""
    every, which = sampled_runs(index, seed)
    parts = []
    for batch in index.batches(_QUERY, (RUN, every, which)):
        columns = [batch.column(name).to_numpy() for name in ("token", "sentence", "position", "document")]
        kept = multiplicity[columns[0]] > 0
        parts.append([column[kept] for column in columns])
    token, sentence, position, document = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = _spread(token, document, _noise(sentence, position, seed))
    token, sentence, position = token[order], sentence[order], position[order]
    slots = np.full(len(multiplicity), -1, np.int32)
    wanted = np.flatnonzero(multiplicity)
    slots[wanted] = np.arange(len(wanted), dtype=np.int32)
    begins = np.searchsorted(token, wanted)
    there = np.searchsorted(token, wanted, side="right") - begins
    sizes = np.minimum(np.clip(2 * multiplicity[wanted], LEAST, MOST), (there + 1) // 2)
    taken = np.minimum(2 * sizes, there)
    offsets = np.concatenate([[0], np.cumsum(taken)]).astype(np.int64)
    source = np.repeat(begins - offsets[:-1], taken) + np.arange(offsets[-1])
    return MatchedPlaces(sentence[source], position[source], slots, offsets, offsets[:-1] + sizes)


def _noise(sentence: NDArray[np.int64], position: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """A random number for every place that depends on nothing but place and seed (SplitMix64)."""
    start = np.uint64((2 * seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (sentence.astype(np.uint64) << np.uint64(24)) + position.astype(np.uint64) + start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def _spread(token: NDArray[np.int64], document: NDArray[np.int64], noise: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Order by token, and within a token at random, but first one of every document, then a second, and so on."""
    order = np.lexsort((noise, document, token))
    begins = np.concatenate([[True], (np.diff(token[order]) != 0) | (np.diff(document[order]) != 0)])[: len(order)]
    turn = np.arange(len(order)) - np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    return order[np.lexsort((noise[order], turn, token[order]))]
