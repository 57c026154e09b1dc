"""Matched prefixes: prefixes of other documents that end with the same token as a trigger.

Matched prefixes show what the last token alone implies about the text before it. For each token that ends a trigger,
two samples of prefixes are drawn from at most words.TOKENS tokens of the corpus. The first sample gives the mean vector
of the text before the token (topics). The prefixes of the second sample replace triggers in null models
(swap_prefixes). Each sample covers as many documents as possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.compiling import compiled
from memlens.index.reader import Index
from memlens.pattern.words import RUN, PrefixWords, sampled_runs

TIMES = 4  # number of matched prefixes per trigger in same_last_tokens
LEAST, MOST = 8, 48  # minimum and maximum number of prefixes per token in a sample
_PLACES_QUERY = """
SELECT sentence, unnest(tokens) AS token, generate_subscripts(tokens, 1) - 1 AS position,
       (hash(source) // 2)::BIGINT AS document
FROM {corpus} WHERE (sentence // $1) % $2 = $3
"""


@dataclass(frozen=True, eq=False)
class MatchedPlaces:
    """The places of matched prefixes. Rows offsets[slots[t]] to offsets[slots[t] + 1] end with token t."""

    sentences: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int32]  # [vocabulary]: number of the token among the tokens that end triggers, or -1
    offsets: NDArray[np.int64]  # [slots + 1]: first row of each token's samples
    middles: NDArray[np.int64]  # [slots]: first row of the token's second sample


def draw_matched(index: Index, multiplicity: NDArray[np.int64], seed: int) -> MatchedPlaces:
    """Draw two samples of prefixes for each token that ends a trigger.

    `multiplicity` [vocabulary] is the largest number of triggers of one memory that end with each token, 0 for none.
    """
    every, which = sampled_runs(index, seed)
    parts = []
    for batch in index.batches(_PLACES_QUERY, (RUN, every, which)):
        columns = [batch.column(name).to_numpy() for name in ("token", "sentence", "position", "document")]
        kept = multiplicity[columns[0]] > 0
        parts.append([column[kept] for column in columns])
    token, sentence, position, document = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = _spread(token, document, _noise(sentence, position, seed))
    token, sentence, position = token[order], sentence[order], position[order]
    slots = np.full(len(multiplicity), -1, np.int32)
    tokens = np.flatnonzero(multiplicity)
    slots[tokens] = np.arange(len(tokens), dtype=np.int32)
    begins = np.searchsorted(token, tokens)
    available = np.searchsorted(token, tokens, side="right") - begins
    sizes = np.minimum(np.clip(2 * multiplicity[tokens], LEAST, MOST), (available + 1) // 2)
    counts = np.minimum(2 * sizes, available)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    source = np.repeat(begins - offsets[:-1], counts) + np.arange(offsets[-1])
    return MatchedPlaces(sentence[source], position[source], slots, offsets, offsets[:-1] + sizes)


def _noise(sentence: NDArray[np.int64], position: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """Return a random number for each position that depends only on the position and the seed (SplitMix64)."""
    start = np.uint64((2 * seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (sentence.astype(np.uint64) << np.uint64(24)) + position.astype(np.uint64) + start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def _spread(token: NDArray[np.int64], document: NDArray[np.int64], noise: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return an order of prefixes by token, and within a token by turns.

    The first turn has one random prefix of each document, the second turn another prefix of each document, and so on.
    """
    order = np.lexsort((noise, document, token))
    begins = np.concatenate([[True], (np.diff(token[order]) != 0) | (np.diff(document[order]) != 0)])[: len(order)]
    turn = np.arange(len(order)) - np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    return order[np.lexsort((noise[order], turn, token[order]))]


class LastTokens(NamedTuple):
    """The last tokens and documents of prefixes, and the samples for each token.

    This is a tuple so that compiled code can read it.
    """

    tokens: NDArray[np.int32]  # [prefixes]: last token
    documents: NDArray[np.int64]  # [prefixes]: document number
    slots: NDArray[np.int32]  # [vocabulary]: number of the token among the tokens that end triggers, or -1
    offsets: NDArray[np.int64]  # [slots + 1]: first row of each token's samples
    middles: NDArray[np.int64]  # [slots]: first row of the token's second sample

    @classmethod
    def of(cls, prefixes: PrefixWords, places: MatchedPlaces, first: int) -> LastTokens:
        """Return the last tokens of `prefixes`, which contains the matched prefixes of `places` from row `first` on."""
        samples = (places.slots, places.offsets + first, places.middles + first)
        return cls(prefixes.tokens, prefixes.documents, *samples)


@compiled
def _swap(rows: Any, tokens: LastTokens, starts: Any) -> Any:
    """Replace each prefix by an unused prefix of another document with the same last token, or by -1 if none exists."""
    swapped = np.full(rows.shape, -1, np.int64)
    for m in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            token = -1 if rows[m, i] < 0 else tokens.tokens[rows[m, i]]
            slot = -1 if token < 0 else tokens.slots[token]
            if slot < 0:
                continue
            begin, count = tokens.middles[slot], tokens.offsets[slot + 1] - tokens.middles[slot]
            for step in range(count):
                row = begin + (np.int64(starts[m, i] * count) + step) % count
                is_free = tokens.documents[row] != tokens.documents[rows[m, i]]
                for j in range(i):
                    is_free &= swapped[m, j] < 0 or tokens.documents[row] != tokens.documents[swapped[m, j]]
                if is_free:
                    swapped[m, i] = row
                    break
    return swapped


def swap_prefixes(rows: NDArray[np.int64], tokens: LastTokens, random: np.random.Generator) -> NDArray[np.int64]:
    """Replace each prefix by a random prefix of another document with the same last token, or by -1 if none is left."""
    swapped: NDArray[np.int64] = _swap(np.ascontiguousarray(rows), tokens, random.random(rows.shape))
    return swapped


def same_last_tokens(rows: NDArray[np.int64], tokens: LastTokens, seed: int) -> NDArray[np.int64]:
    """For each prefix, draw TIMES prefixes of other documents with the same last token, or -1 if none is left."""
    random = np.random.default_rng([seed, 11])
    return np.concatenate([swap_prefixes(rows, tokens, random) for _ in range(TIMES)], 1)


def effective_size(rows: NDArray[np.int64]) -> float:
    """Return the effective number of independent prefixes: (sum w)^2 / sum w^2 if prefixes occur w times."""
    times = np.unique(rows[rows >= 0], return_counts=True)[1]
    return float(times.sum() ** 2 / max((times**2).sum(), 1))
