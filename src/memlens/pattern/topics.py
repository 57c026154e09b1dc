"""Topics: prefixes of a memory that speak of the same thing beyond the words they share, and the words that name it.

Coherence, one hypothesis per memory (words of its shallow patterns are left out):

 1. S = sum over pairs of prefixes a < b of cos(a, b) less what equal words of a and b contribute to it.
 2. z = (S - sum mu_ab) / sqrt(sum sigma2_ab), with mean and variance of pairs of random prefixes with as many words as
    a and b have: short prefixes are noisier. Pairs of independent prefixes are uncorrelated, so variances add.
 3. p from z of NULL_SETS sets of random prefixes; beyond their 99th percentile the tail is continued as an exponential.
 4. A cut of its own at the rate of false discoveries (Benjamini and Hochberg, 1995).

Topic of a coherent memory:

 1. A prefix belongs if it is nearer to the mean of the others that belong than random prefixes with as many words are:
    above their median by BAR times the distance from the median to the 84th percentile. Repeated _ROUNDS times.
 2. Its words are over-represented in these prefixes (z-score of the log-odds with an informative Dirichlet prior;
    Monroe et al., 2008) and lie in the topic's direction.
 3. Fewer than three prefixes or three such words make no topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.parallel import Progress, compiled
from memlens.pattern.shallow import ShallowChoice, Texts
from memlens.pattern.word_vectors import SIZES, VectorWords, WordVectors, prefix_vector_, size_class
from memlens.pattern.words import GROUNDED, TriggerRows
from memlens.settings import PatternSettings
from memlens.stats import q_values

NULL_SETS = 20_000
BAR = 1.65
POOL = 400  # random prefixes of each size class
SHOWN = 5
_PAIRS = 200_000
_TAIL = 0.99
_ROUNDS = 3
_PRIOR = 200.0  # words that the prior counts for
_SURE = 1.96
_NEAR = 0.15  # cosine of a word with the topic


class ExcludedWords(NamedTuple):
    """Words of shallow patterns, by memory; a tuple, so that compiled code takes it."""

    words: NDArray[np.int32]  # rows of WordVectors
    offsets: NDArray[np.int64]  # [memories + 1]
    last: NDArray[np.uint64]  # [memories]: prefixes whose last word is left out, a bit each

    @classmethod
    def none(cls, memories: int) -> ExcludedWords:
        return cls(np.zeros(0, np.int32), np.zeros(memories + 1, np.int64), np.zeros(memories, np.uint64))


@compiled
def _coherence(
    sets: Any, prefixes: VectorWords, excluded: ExcludedWords, vectors: WordVectors, means: Any, variances: Any
) -> tuple[Any, Any]:
    """z, and the number of prefixes that have a vector, of each set of prefixes (-1: none)."""
    memories, triggers = sets.shape
    z, filled = np.zeros(memories), np.zeros(memories, np.int64)
    dimensions = vectors.vectors.shape[1]
    vector, total = np.empty(dimensions, np.float32), np.empty(dimensions)
    used, parts = np.empty(64, np.int32), np.empty(64, np.float32)
    all_words, all_parts = np.empty(64 * triggers, np.int32), np.empty(64 * triggers)
    for m in range(memories):
        own = excluded.words[excluded.offsets[m] : excluded.offsets[m + 1]]
        total[:] = 0
        in_class = np.zeros(len(SIZES))
        words = 0
        for i in range(triggers):
            if sets[m, i] < 0:
                continue
            drop_last = (excluded.last[m] >> np.uint64(i)) & np.uint64(1) == np.uint64(1)
            count = prefix_vector_(prefixes, sets[m, i], own, drop_last, vectors, vector, used, parts)
            if count == 0:
                continue
            filled[m] += 1
            in_class[size_class(count)] += 1
            total += vector
            all_words[words : words + count] = used[:count]
            all_parts[words : words + count] = parts[:count]
            words += count
        same = _equal_words(all_words[:words], all_parts[:words])
        pairs_sum = ((total * total).sum() - filled[m] - same) / 2
        expected, variance = 0.0, 1e-12
        for a in range(len(SIZES)):
            for b in range(a, len(SIZES)):
                pairs = in_class[a] * in_class[b] if a != b else in_class[a] * (in_class[a] - 1) / 2
                expected += pairs * means[a, b]
                variance += pairs * variances[a, b]
        z[m] = (pairs_sum - expected) / np.sqrt(variance)
    return z, filled


@compiled
def _equal_words(words: Any, parts: Any) -> float:
    """Twice what equal words of different prefixes contribute to the sum of cosines."""
    same, order, begin = 0.0, np.argsort(words), 0
    while begin < len(words):
        end, whole, squares = begin, 0.0, 0.0
        while end < len(words) and words[order[end]] == words[order[begin]]:
            part = parts[order[end]]
            whole, squares, end = whole + part, squares + part * part, end + 1
        same += whole * whole - squares
        begin = end
    return same


@dataclass(frozen=True, eq=False)
class Coherence:
    """The statistic and its null distribution for one corpus."""

    vectors: WordVectors
    means: NDArray[np.float64]  # [size classes, size classes]
    variances: NDArray[np.float64]
    null: dict[int, tuple[NDArray[np.float64], float]]  # by triggers: sorted null statistics, mean excess in the tail

    @classmethod
    def calibrate(cls, background: VectorWords, vectors: WordVectors, triggers: int, seed: int) -> Coherence:
        random = np.random.default_rng([seed, 8])
        usable = np.flatnonzero(np.diff(background.offsets) > 0)
        if len(usable) < 2:
            return cls(vectors, np.zeros((len(SIZES),) * 2), np.ones((len(SIZES),) * 2), {})
        means, variances = _pair_moments(background, vectors, random.choice(usable, (_PAIRS, 2)))
        calibrated = cls(vectors, means, variances, {})
        for size in sorted({size for size in (3, 4, 6, 9, 14, 20, 25, 35, 50, 64) if size < triggers} | {triggers}):
            z, _ = calibrated.z_scores(
                background, random.choice(usable, (NULL_SETS, size)), ExcludedWords.none(NULL_SETS)
            )
            z.sort()
            bar = z[int(_TAIL * NULL_SETS)]
            calibrated.null[size] = (z, float((z[z > bar] - bar).mean()) if (z > bar).any() else 1.0)
        return calibrated

    def z_scores(
        self, prefixes: VectorWords, sets: NDArray[np.int64], excluded: ExcludedWords
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """z and the number of prefixes with a vector, for each set of prefixes [sets, triggers]."""
        z, filled = _coherence(sets, prefixes, excluded, self.vectors, self.means, self.variances)
        return z, filled

    def p_values(self, z: NDArray[np.float64], filled: NDArray[np.int64]) -> NDArray[np.float64]:
        """Chance that random prefixes are as coherent; 1 where fewer than three have a vector."""
        p = np.ones(len(z))
        sizes = sorted(self.null)
        for size, following in zip(sizes, [*sizes[1:], np.iinfo(np.int64).max], strict=True):
            own = (filled >= size) & (filled < following)
            null, excess = self.null[size]
            above = len(null) - np.searchsorted(null, z[own], side="left")
            bar = null[int(_TAIL * len(null))]
            far = (1 - _TAIL) * np.exp(-np.maximum(z[own] - bar, 0) / excess)
            p[own] = np.where(z[own] > bar, far, (above + 1) / (len(null) + 1))
        return p


@compiled
def _pair_cosines(pairs: Any, prefixes: VectorWords, vectors: WordVectors) -> tuple[Any, Any]:
    found, classes = np.empty(len(pairs)), np.empty((len(pairs), 2), np.int64)
    dimensions = vectors.vectors.shape[1]
    one, other = np.empty(dimensions, np.float32), np.empty(dimensions, np.float32)
    used, parts = np.empty((2, 64), np.int32), np.empty((2, 64), np.float32)
    nothing = np.empty(0, np.int32)
    for n in range(len(pairs)):
        a = prefix_vector_(prefixes, pairs[n, 0], nothing, False, vectors, one, used[0], parts[0])
        b = prefix_vector_(prefixes, pairs[n, 1], nothing, False, vectors, other, used[1], parts[1])
        same = 0.0
        for i in range(a):
            for j in range(b):
                if used[0, i] == used[1, j]:
                    same += parts[0, i] * parts[1, j]
        found[n] = (one * other).sum() - same
        classes[n] = size_class(a), size_class(b)
    return found, classes


def _pair_moments(
    background: VectorWords, vectors: WordVectors, pairs: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and variance of a pair's cosine by the size classes of its two prefixes, in either order."""
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    cosines, classes = _pair_cosines(pairs, background, vectors)
    kinds = len(SIZES)
    flat = classes.min(1) * kinds + classes.max(1)
    counts = np.bincount(flat, minlength=kinds**2)
    sums, squares = (np.bincount(flat, cosines**power, minlength=kinds**2) for power in (1, 2))
    enough = counts >= 30
    means = np.where(enough, sums / np.maximum(counts, 1), cosines.mean())
    variances = np.where(enough, squares / np.maximum(counts, 1) - means**2, cosines.var())
    return means.reshape(kinds, kinds), np.maximum(variances, 1e-6).reshape(kinds, kinds)


@dataclass(frozen=True)
class SemanticTopic:
    """A semantic pattern."""

    members: int  # prefixes by trigger rank, a bit each
    words: tuple[int, ...]  # rows of WordVectors, the most telling first
    share: float  # of random prefixes that are as close


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
        """How close a prefix of each class must be, and which share of random ones are."""
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
    unit = np.zeros((len(rows), vectors.vectors.shape[1]), np.float32)
    counts, words = np.zeros(len(rows), np.int64), []
    used, parts = np.empty(64, np.int32), np.empty(64, np.float32)
    for i, row in enumerate(rows.tolist()):
        if row >= 0:
            drop_last = bool(last >> i & 1)
            counts[i] = prefix_vector_(prefixes, row, excluded, drop_last, vectors, unit[i], used, parts)
        words.append(used[: counts[i]].copy())
    return unit, counts, words


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
    return SemanticTopic(sum(1 << int(i) for i in np.flatnonzero(members)), tuple(telling[:SHOWN]), share)


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


def find_topics(
    texts: Texts,
    triggers: TriggerRows,
    chosen: Sequence[ShallowChoice],
    vectors: WordVectors,
    settings: PatternSettings,
    progress: Progress,
) -> dict[int, tuple[SemanticTopic, float]]:
    """Topic and q-value by row of TriggerRows."""
    if len(vectors.vectors) == 0:
        return {}
    sample = VectorWords.of(texts.sample, vectors)
    own = VectorWords.of(texts.triggers, vectors)
    coherence = Coherence.calibrate(sample, vectors, triggers.rows.shape[1], settings.seed)
    excluded = _words_of_patterns(chosen, vectors)
    z, filled = coherence.z_scores(own, triggers.one_per_sentence(), excluded)
    q = q_values(coherence.p_values(z, filled), len(z))
    pool = Pool.draw(sample, vectors, settings.seed)
    found: dict[int, tuple[SemanticTopic, float]] = {}
    coherent = np.flatnonzero(q <= settings.rate).tolist()
    for done, m in enumerate(coherent):
        progress("topics", done, len(coherent))
        topic = _find_topic(own, vectors, triggers.rows[m], excluded, m, pool)
        if topic:
            found[m] = (topic, float(q[m]))
    return found


def _words_of_patterns(chosen: Sequence[ShallowChoice], vectors: WordVectors) -> ExcludedWords:
    """The words of endings and n-grams wherever they stand, and the last word where a shape is about it."""
    rows = vectors.rows
    words: list[int] = []
    offsets, last = [0], []
    for memory in chosen:
        features = [(pattern.feature, pattern.members) for pattern in memory.patterns]
        words += sorted({int(rows[w]) for feature, _ in features for w in feature.words if rows[w] >= 0})
        offsets.append(len(words))
        at_end = 0
        for feature, members in features:
            at_end |= members if feature.kind == "shape" else 0
        last.append(at_end)
    flat: NDArray[np.int32] = np.array(words, np.int32)
    return ExcludedWords(flat, np.array(offsets, np.int64), np.array(last, np.uint64))
