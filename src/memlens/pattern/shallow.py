"""Significant shared features of all memories: one test a feature and memory, one cut for the whole model.

The hypotheses are all features that at least three prefixes of the background have, for every memory; a feature that
three triggers share is tested, the others count with p = 1. Done for some thousand memories at a time, so that only
what may be significant stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.parallel import Progress
from memlens.pattern.choose import Candidate
from memlens.pattern.features import (
    GROUNDED,
    Background,
    SpellingFeatures,
    read_key,
    sample_prefixes,
    shared_keys,
    sizes,
)
from memlens.pattern.words import PrefixWords, TriggerRows, Words, read_prefix_words
from memlens.settings import PatternSettings
from memlens.stats import binomial_tail, q_values

_AT_ONCE = 2048  # memories
_FREQUENT = 4e-3  # of all words: a word that is so frequent has no content


@dataclass(frozen=True, eq=False)
class Texts:
    """Triggers and random prefixes as words, and what random ones share."""

    words: Words
    triggers: PrefixWords
    sample: PrefixWords
    spelled: SpellingFeatures
    background: Background

    @classmethod
    def read(cls, index: Index, triggers: TriggerRows, settings: PatternSettings) -> Texts:
        words = Words()
        own = read_prefix_words(index, triggers.sentences, triggers.positions, words)
        sample = read_prefix_words(index, *sample_prefixes(index, settings.background, settings.seed), words)
        spelled = SpellingFeatures.of(words, np.concatenate([own.last, sample.last]))
        return cls(words, own, sample, spelled, Background.of(sample, spelled))

    def content_words(self) -> set[int]:
        """Words that are not among the most frequent ones of the corpus."""
        ends = np.maximum(self.sample.offsets[1:][self.sample.lengths > 0] - 1, 0)
        shares = np.bincount(self.sample.words[ends], minlength=len(self.words.texts)) / max(len(ends), 1)
        function = set(np.flatnonzero(shares > _FREQUENT).tolist())
        letters = {number for number, text in enumerate(self.words.texts) if any(map(str.isalpha, text))}
        return letters - function


@dataclass(frozen=True, eq=False)
class Believed:
    """Features that survive the cut, sorted by memory."""

    memory: NDArray[np.int32]  # rows of TriggerRows
    keys: NDArray[np.int64]
    sets: NDArray[np.uint64]
    shares: NDArray[np.float64]
    q: NDArray[np.float64]
    cutoff: float  # the highest p-value that is believed
    hypotheses: int

    def candidates(self, texts: Texts, memories: int) -> Iterator[list[Candidate]]:
        """Those of each memory."""
        counts = texts.background.count(self.keys)
        columns = zip(self.keys.tolist(), self.sets.tolist(), self.shares.tolist(), counts.tolist(), self.q.tolist(),
                      strict=True)  # fmt: skip
        flat = [Candidate(read_key(key, texts.spelled.names), *rest) for key, *rest in columns]
        edges = np.searchsorted(self.memory, np.arange(memories + 1)).tolist()
        for first, last in pairwise(edges):
            yield flat[first:last]


def find_shared(texts: Texts, triggers: TriggerRows, settings: PatternSettings, progress: Progress) -> Believed:
    parts = []
    memories = len(triggers.rows)
    for first in range(0, memories, _AT_ONCE):
        progress("shallow", first, memories)
        rows = triggers.rows[first : first + _AT_ONCE]
        memory, keys, sets = shared_keys(rows, texts.triggers, texts.spelled, GROUNDED)
        lengths = np.where(rows >= 0, texts.triggers.lengths[np.maximum(rows, 0)], -1)
        shares = texts.background.shares(keys, lengths[memory])
        p = binomial_tail(sizes(sets), (rows >= 0).sum(1)[memory], shares)
        kept = p <= settings.rate  # no higher p-value can survive
        parts.append((memory[kept] + first, keys[kept], sets[kept], shares[kept], p[kept]))
    progress("shallow", memories, memories)
    memory, keys, sets, shares, p = (np.concatenate(column) for column in zip(*parts, strict=True))
    hypotheses = texts.background.hypotheses * int((triggers.filled >= GROUNDED).sum())
    q = q_values(p, max(hypotheses, len(p)))
    kept = q <= settings.rate
    cutoff = float(p[kept].max(initial=0.0))
    return Believed(memory[kept], keys[kept], sets[kept], shares[kept], q[kept], cutoff, hypotheses)
