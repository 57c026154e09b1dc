"""Topics: prefixes of a memory that speak of the same thing beyond the words they share, and the words that name it.

Whether a memory has a topic is one hypothesis with two tests of different triggers, words of its shallow patterns left
out of both. (a) Its triggers are more coherent than swapped ones (coherence). (b) Triggers that were held out, of other
documents, are nearer to the topic of the first than prefixes with the same last tokens are (a rank-sum test). Both
p-values make one (Fisher's sum of logarithms), with a cut of its own at the rate of false discoveries (Benjamini and
Hochberg, 1995). A memory above _WORTH in (a) has no topic; one with too few held-out triggers has (a) alone.

Topic of a coherent memory:

 1. A prefix belongs if it is nearer to the mean of the others that belong than random prefixes with as many words are:
    above their median by BAR times the distance from the median to the 84th percentile. Repeated _ROUNDS times.
 2. Its words are over-represented in these prefixes (z-score of the log-odds with an informative Dirichlet prior;
    Monroe et al., 2008) and lie in the topic's direction.
 3. Prefixes of fewer than three documents or fewer than three such words make no topic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.parallel import Progress
from memlens.pattern.coherence import Coherence, ExcludedWords, LastTokens
from memlens.pattern.score import ENOUGH, HELD, effective_size
from memlens.pattern.shallow import ShallowChoice, Texts
from memlens.pattern.word_vectors import SIZES, VectorWords, WordVectors, prefix_vectors, size_class
from memlens.pattern.words import GROUNDED, WINDOW, TriggerRows, one_per_document
from memlens.settings import PatternSettings
from memlens.stats import q_values, roc_area

BAR = 1.65
TOPICS = 3  # of a memory, at most
POOL = 400  # random prefixes of each size class
SHOWN = 5
_ROUNDS = 3
_PRIOR = 200.0  # words that the prior counts for
_SURE = 1.96
_NEAR = 0.15  # cosine of a word with the topic
_SWAPPED = 8192  # memories, about, that are tested with swapped triggers
_WORTH = 0.15  # a memory with a higher p-value of coherence is not looked at


@dataclass(frozen=True)
class SemanticTopic:
    """A semantic pattern."""

    members: int  # prefixes by trigger rank, a bit each
    words: tuple[int, ...]  # rows of WordVectors, the most telling first
    share: float  # of random prefixes that are as close
    direction: NDArray[np.float32]  # unit length
    q: float = 0.0


@dataclass(frozen=True, eq=False)
class Pool:
    """Vectors of random prefixes, by size class."""

    vectors: list[NDArray[np.float32]]  # of each class [prefixes, dimensions]

    @classmethod
    def draw(cls, background: VectorWords, vectors: WordVectors, seed: int) -> Pool:
        sizes = np.diff(background.offsets)
        classes = np.searchsorted(SIZES, np.maximum(sizes, 1), side="right") - 1
        random = np.random.default_rng([seed, 9])
        found = []
        for number in range(len(SIZES)):
            own = np.flatnonzero((classes == number) & (sizes > 0))
            chosen = random.choice(own, min(POOL, len(own)), replace=False) if len(own) else own
            unit, counts, _ = _set_vectors(background, vectors, chosen, np.zeros(0, np.int32), 0)
            found.append(unit[counts > 0])
        return cls(found)

    def bars(self, direction: NDArray[Any]) -> tuple[NDArray[np.float64], float]:
        """The least nearness of a prefix of each class, and the share of random prefixes that reach it."""
        bars, over, total = np.full(len(SIZES), np.inf), 0, 0
        for number, vectors in enumerate(self.vectors):
            if len(vectors) < 20:
                bars[number] = bars[number - 1] if number else 0.5
                continue
            close = vectors @ direction
            middle, high = np.percentile(close, [50, 84])
            bars[number] = middle + BAR * (high - middle)
            over, total = over + int((close > bars[number]).sum()), total + len(close)
        return bars, (over + 1) / (total + 1)


def _set_vectors(
    prefixes: VectorWords, vectors: WordVectors, rows: NDArray[np.int64], excluded: NDArray[np.int32], last: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], list[NDArray[np.int32]]]:
    """Unit vectors [rows, dimensions], numbers of words (0: no vector) and the words themselves."""
    used = np.empty((len(rows), WINDOW), np.int32)
    drop_last = np.array([bool(last >> i & 1) for i in range(len(rows))], np.bool_)
    unit, counts = prefix_vectors(prefixes, vectors, np.ascontiguousarray(rows), drop_last, excluded, used)
    return unit, counts, [own[:count] for own, count in zip(used, counts.tolist(), strict=True)]


def _find_topic(
    prefixes: VectorWords,
    vectors: WordVectors,
    rows: NDArray[np.int64],
    excluded: ExcludedWords,
    memory: int,
    pool: Pool,
) -> SemanticTopic | None:
    """The topic of a memory whose prefixes [triggers] are known to be coherent; None where no three words say it."""
    own = excluded.words[excluded.offsets[memory] : excluded.offsets[memory + 1]]
    unit, counts, words = _set_vectors(prefixes, vectors, rows, own, int(excluded.last[memory]))
    classes = np.array([size_class(count) for count in counts.tolist()])
    members = counts > 0
    share = 1.0
    for _ in range(_ROUNDS):
        total = unit[members].sum(0)
        bars, share = pool.bars(total / max(float(np.linalg.norm(total)), 1e-9))
        others = total[None, :] - unit * members[:, None]  # a prefix is compared with the others only
        close = (unit * others).sum(1) / np.maximum(np.linalg.norm(others, axis=1), 1e-9)
        members = (counts > 0) & (close > bars[classes])
        if members.sum() < GROUNDED:
            return None
    direction = unit[members].sum(0)
    telling = _telling_words([words[i] for i in np.flatnonzero(members)], vectors, direction)
    if len(telling) < GROUNDED:
        return None
    unit_direction = direction / max(float(np.linalg.norm(direction)), 1e-9)
    ranks = sum(1 << int(i) for i in np.flatnonzero(members))
    return SemanticTopic(ranks, tuple(telling[:SHOWN]), share, unit_direction.astype(np.float32))


def _telling_words(words: list[NDArray[np.int32]], vectors: WordVectors, direction: NDArray[Any]) -> list[int]:
    rows, times = np.unique(np.concatenate(words), return_counts=True)
    prior = _PRIOR * vectors.shares[rows]
    total = times.sum() + _PRIOR
    here = np.log((times + prior) / (total - times - prior))
    everywhere = np.log(vectors.shares[rows] / (1 - vectors.shares[rows]))
    z = (here - everywhere) / np.sqrt(1 / (times + prior))
    near = vectors.vectors[rows] @ (direction / max(float(np.linalg.norm(direction)), 1e-9))
    kept = (z > _SURE) & (near > _NEAR)
    order = np.lexsort((rows, -z * near))
    return [int(rows[i]) for i in order if kept[i]]


@dataclass(frozen=True, eq=False)
class _TopicTest:
    """Inputs of the two tests of topics."""

    own: VectorWords
    vectors: WordVectors
    excluded: ExcludedWords
    pool: Pool
    documents: NDArray[np.int64]  # of every prefix

    def run(
        self, p: NDArray[np.float64], memories: NDArray[np.int64], sets: NDArray[np.int64], held: Any, same: Any
    ) -> tuple[dict[int, SemanticTopic], NDArray[np.float64]]:
        """Topics by place in `memories`, and the p-values of both tests (1: no topic); `p` are those of coherence.

        sets [all memories, t], held and same [all memories, any]: rows of prefixes, -1 for none.
        """
        found, both = {}, np.ones(len(memories))
        for i in np.flatnonzero(p <= _WORTH).tolist():
            m = int(memories[i])
            topic = _find_topic(self.own, self.vectors, sets[m], self.excluded, m, self.pool)
            ranks = [] if topic is None else [rank for rank in range(sets.shape[1]) if topic.members >> rank & 1]
            if topic and len(set(self.documents[sets[m, ranks]].tolist())) >= GROUNDED:
                found[i] = topic
                both[i] = _combined(float(p[i]), self._held_out(topic, m, sets[m], held[m], same[m]))
        return found, both

    def _held_out(self, topic: SemanticTopic, m: int, own: Any, held: Any, same: Any) -> float | None:
        """Chance that held-out triggers of other documents are as near to the topic; None if they are too few."""
        seen = self.documents[own[own >= 0]]
        free = np.where((held >= 0) & ~np.isin(self.documents[np.maximum(held, 0)], seen), held, -1)
        free = one_per_document(free[None], self.documents)[0]
        (mine, rows), (others, other_rows) = (self._nearness(topic, m, rows) for rows in (free, same))
        if len(mine) < ENOUGH or len(others) < ENOUGH:
            return None
        n, k = effective_size(rows), effective_size(other_rows)
        area = roc_area(mine, others)
        z = 0.0 if area is None else (area - 0.5) / math.sqrt((n + k + 1) / (12 * n * k))
        return math.erfc(z / math.sqrt(2)) / 2

    def _nearness(self, topic: SemanticTopic, m: int, rows: Any) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Of prefixes that have a vector without last word and words of patterns: the cosine with the topic; rows."""
        there = np.ascontiguousarray(rows[rows >= 0])
        words = self.excluded.words[self.excluded.offsets[m] : self.excluded.offsets[m + 1]]
        unit, counts = prefix_vectors(self.own, self.vectors, there, np.ones(len(there), np.bool_), words)
        return (unit[counts > 0] @ topic.direction).astype(np.float64), there[counts > 0]


def _combined(p: float, other: float | None) -> float:
    """One p-value of two independent ones: the tail of chi-squared with 4 degrees of freedom at -2 log(p other)."""
    if other is None:
        return p
    product = max(p * other, 1e-300)
    return product * (1 - math.log(product))


def find_topics(
    texts: Texts,
    triggers: TriggerRows,
    chosen: Sequence[ShallowChoice],
    own: VectorWords,
    tokens: LastTokens,
    same: NDArray[np.int64],
    vectors: WordVectors,
    settings: PatternSettings,
    progress: Progress,
) -> tuple[dict[int, list[SemanticTopic]], NDArray[np.float64]]:
    """Topics by row of TriggerRows; and which memories would have one with swapped triggers: 1, 0, nan if not tried.

    `same` are prefixes with the last tokens of held-out triggers (score). After a topic the triggers that it does not
    hold are tested again, for another; a memory has TOPICS at most.
    """
    if len(vectors.vectors) == 0:
        return {}, np.zeros(len(triggers.rows))
    excluded = _words_of_patterns(chosen, vectors)
    rows = one_per_document(triggers.rows, texts.prefixes.documents)
    coherence = Coherence.calibrate(rows, own, tokens, excluded, vectors, settings.seed)
    pool = Pool.draw(VectorWords.of(texts.sample, vectors), vectors, settings.seed)
    test = _TopicTest(own, vectors, excluded, pool, texts.prefixes.documents)
    found: dict[int, list[SemanticTopic]] = {}
    left, memories, cut = triggers.rows.copy(), np.arange(len(rows)), -1.0
    for turn in range(TOPICS):
        progress("topics", turn, TOPICS)
        p = coherence.p_values(*coherence.z_scores(np.where(left >= 0, rows, -1)[memories], memories))
        topics, p = test.run(p, memories, left, triggers.held, same)
        q = q_values(p, len(p))
        kept = [i for i in topics if q[i] <= settings.rate]
        cut = float(p[kept].max(initial=-1.0)) if turn == 0 else cut
        for i in kept:
            m, members = int(memories[i]), topics[i].members
            found.setdefault(m, []).append(replace(topics[i], q=float(q[i])))
            left[m, [rank for rank in range(left.shape[1]) if members >> rank & 1]] = -1
        memories = memories[kept]
        if len(memories) == 0:
            break
    random = np.random.default_rng([settings.seed, 10])
    some = np.arange(0, len(rows), max(len(rows) // _SWAPPED, 1))
    sets = np.full(rows.shape, -1)
    sets[some] = coherence.swap(rows[some], random)
    p = coherence.p_values(*coherence.z_scores(sets[some], some))
    swapped = np.full(len(rows), np.nan)
    swapped[some] = test.run(p, some, sets, same[:, :HELD], same[:, HELD:])[1] <= cut
    return found, swapped


def _words_of_patterns(chosen: Sequence[ShallowChoice], vectors: WordVectors) -> ExcludedWords:
    """The words of endings and n-grams wherever they stand, and the last word where a shape is about it."""
    rows = vectors.rows
    words: list[int] = []
    offsets, last = [0], []
    for memory in chosen:
        features = [(pattern.feature, pattern.members) for pattern in memory.patterns]
        words += sorted({int(rows[w]) for feature, _ in features for w in feature.words if w and rows[w] >= 0})
        offsets.append(len(words))
        at_end = 0
        for feature, members in features:
            at_end |= members if feature.is_of_last_word else 0
        last.append(at_end)
    flat: NDArray[np.int32] = np.array(words, np.int32)
    return ExcludedWords(flat, np.array(offsets, np.int64), np.array(last, np.uint64))
