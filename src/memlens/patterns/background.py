"""How often a random prefix of the corpus has each feature.

A seeded sample of all prefixes (all of them where they are few) goes through the same code as triggers do. The share of
an ending or a shape is simply counted. An n-gram anywhere is likelier in a longer prefix: its share among prefixes of L
words is taken as 1 - exp(-rate * L), with the one rate that gives its share over the whole sample. Every feature that
at least three prefixes of the sample have is a hypothesis for every memory. Knows no memory.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import duckdb
import numpy as np
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.patterns.features import ANYWHERE, SHAPE, KeyArray, SpellingFeatures, all_keys
from memlens.patterns.prefix_words import WINDOW, PrefixWords
from memlens.patterns.significance import upper_share

SAMPLE = 150_000
GROUNDED = 3
_RATES = np.geomspace(1e-9, 20, 4000)


@dataclass(frozen=True, eq=False)
class Background:
    """Counts of features among sampled prefixes."""

    keys: KeyArray  # sorted
    counts: NDArray[np.int64]
    prefixes: int
    length_shares: NDArray[np.float64]  # [WINDOW + 1]: share of prefixes of each length
    hypotheses: int  # a memory

    @classmethod
    def of(cls, prefixes: PrefixWords, spelled: SpellingFeatures) -> Background:
        keys, counts = np.unique(all_keys(prefixes, spelled), return_counts=True)
        kept = counts > 1  # what was met once is looked up as met once, without being kept
        lengths = np.bincount(prefixes.lengths, minlength=WINDOW + 1) / max(len(prefixes), 1)
        return cls(keys[kept], counts[kept], len(prefixes), lengths, int((counts >= GROUNDED).sum()))

    def count(self, keys: KeyArray) -> NDArray[np.int64]:
        """How many of the sampled prefixes have each feature; at least 1."""
        if len(self.keys) == 0:
            return np.ones(len(keys), np.int64)
        where = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[where] == keys, self.counts[where], 1)

    def shares(self, keys: KeyArray, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Upper bound of the chance that a random prefix has each feature; lengths [keys, t], -1 where there is none.

        The mean over prefixes as long as those given.
        """
        shares = upper_share(self.count(keys), self.prefixes)
        kinds = keys >> 60
        anywhere = (kinds > ANYWHERE) & (kinds < SHAPE)
        there = lengths[anywhere] >= 0
        rates = np.interp(shares[anywhere], self._shares_by_rate(), _RATES)
        chances = (1 - np.exp(-rates[:, None] * np.maximum(lengths[anywhere], 0))) * there
        shares[anywhere] = chances.sum(1) / np.maximum(there.sum(1), 1)
        return np.maximum(shares, 1e-300)

    def _shares_by_rate(self) -> NDArray[np.float64]:
        chances = 1 - np.exp(-_RATES[:, None] * np.arange(WINDOW + 1)[None, :])
        by_rate: NDArray[np.float64] = chances @ self.length_shares
        return by_rate


def sample_prefixes(index: Index, size: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sentences and positions of random prefixes, each at most once; all where there are no more than `size`."""
    sentences, lengths = sentence_lengths(index)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    total = int(edges[-1])
    if size >= total:
        drawn = np.arange(total)
    else:
        random = np.random.default_rng([seed, 5])
        drawn = (
            np.sort(random.choice(total, size, replace=False)) if total < 20 * size else _distinct(random, total, size)
        )
    place = np.searchsorted(edges, drawn, side="right") - 1
    return sentences[place].astype(np.int64), (drawn - edges[place]).astype(np.int64)


def sentence_lengths(index: Index) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number and tokens of every sentence; the tokens themselves are not loaded."""
    query = "SELECT sentence, len(ends)::BIGINT AS tokens FROM read_parquet($1) ORDER BY sentence"
    with closing(duckdb.connect(config={"threads": 1})) as database:
        found = database.execute(query, [str(index.path("corpus"))]).fetchnumpy()
    return np.asarray(found["sentence"], np.int64), np.asarray(found["tokens"], np.int64)


def _distinct(random: np.random.Generator, total: int, size: int) -> NDArray[np.int64]:
    """About `size` different numbers below a large total, without an array of that size."""
    return np.unique(random.integers(0, total, size))
