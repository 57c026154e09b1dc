"""Do the prefixes of a memory speak of the same thing, beyond the words they share?

The statistic is the sum over all pairs of prefixes of their cosine without what equal words contribute to it: only
different words that belong together count. Prefixes with few words have noisier vectors, so every pair is compared
with pairs of random prefixes with as many words (mean and variance by size); of independent prefixes the pairs are
uncorrelated, so that the sum of variances is the variance of the sum. The null distribution of the standardised sum
comes from sets of random prefixes; beyond its 99th percentile it is continued as an exponential, which is what such
sums have. Words of a memory's shallow patterns are left out. Compiled; knows prefixes and words as numbers only.

Which of a coherent memory's prefixes belong to its topic, and which words say what it is about.

A prefix belongs if it is close to the mean of the others that belong: closer than random prefixes with as many words
are by far (their median plus BAR times the distance from the median to the 84th percentile). The words are those that
are over-represented in these prefixes against the corpus: log-odds with an informative Dirichlet prior, as a z-score,
among the words that lie in the topic's direction. At least three prefixes and three such words make a topic. Knows one
corpus' vectors and prefixes as numbers.

Topics of all memories: which are coherent beyond their shallow patterns' words, and what they are about.

One hypothesis a memory, with its own cut at the same rate of false discoveries as the shallow ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.parallel import Progress, compiled
from memlens.pattern.choose import Chosen
from memlens.pattern.features import GROUNDED
from memlens.pattern.shallow import Texts
from memlens.pattern.word_vectors import SIZES, VectorWords, WordVectors, prefix_vector_, size_class
from memlens.pattern.words import TriggerRows
from memlens.settings import PatternSettings
from memlens.stats import q_values

NULL_SETS = 20_000
_PAIRS = 200_000
_TAIL = 0.99


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Words of shallow patterns, by memory."""

    words: NDArray[np.int32]  # rows of WordVectors
    offsets: NDArray[np.int64]  # [memories + 1]
    last: NDArray[np.uint64]  # [memories]: prefixes whose last word is left out, a bit each

    @classmethod
    def nothing(cls, memories: int) -> LeftOut:
        return cls(np.zeros(0, np.int32), np.zeros(memories + 1, np.int64), np.zeros(memories, np.uint64))


@compiled
def _sums(
    sets: Any, rows: Any, is_last: Any, offsets: Any, out_words: Any, out_offsets: Any, out_last: Any,
    vectors: Any, weights: Any, means: Any, variances: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Standardised sum over pairs, and how many prefixes have a vector, of each set of prefixes (-1: none)."""
    memories, triggers = sets.shape
    z, filled = np.zeros(memories), np.zeros(memories, np.int64)
    vector, total = np.empty(vectors.shape[1], np.float32), np.empty(vectors.shape[1])
    used, parts = np.empty(64, np.int32), np.empty(64, np.float32)
    all_words, all_parts = np.empty(64 * triggers, np.int32), np.empty(64 * triggers)
    for m in range(memories):
        out = out_words[out_offsets[m] : out_offsets[m + 1]]
        total[:] = 0
        in_class = np.zeros(len(SIZES))
        words = 0
        for i in range(triggers):
            if sets[m, i] < 0:
                continue
            drop_last = (out_last[m] >> np.uint64(i)) & np.uint64(1) == np.uint64(1)
            count = prefix_vector_(
                sets[m, i], rows, is_last, offsets, out, drop_last, vectors, weights, vector, used, parts
            )
            if count == 0:
                continue
            filled[m] += 1
            in_class[size_class(count)] += 1
            total += vector
            all_words[words : words + count] = used[:count]
            all_parts[words : words + count] = parts[:count]
            words += count
        same, order, begin = 0.0, np.argsort(all_words[:words]), 0
        while begin < words:  # equal words of different prefixes
            end, whole, squares = begin, 0.0, 0.0
            while end < words and all_words[order[end]] == all_words[order[begin]]:
                part = all_parts[order[end]]
                whole, squares, end = whole + part, squares + part * part, end + 1
            same += whole * whole - squares
            begin = end
        pairs_sum = ((total * total).sum() - filled[m] - same) / 2
        expected, variance = 0.0, 1e-12
        for a in range(len(SIZES)):
            for b in range(a, len(SIZES)):
                pairs = in_class[a] * in_class[b] if a != b else in_class[a] * (in_class[a] - 1) / 2
                expected += pairs * means[a, b]
                variance += pairs * variances[a, b]
        z[m] = (pairs_sum - expected) / np.sqrt(variance)
    return z, filled


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
        made = cls(vectors, means, variances, {})
        for size in sorted({size for size in (3, 4, 6, 9, 14, 20, 25, 35, 50, 64) if size < triggers} | {triggers}):
            z, _ = made.standardised(background, random.choice(usable, (NULL_SETS, size)), LeftOut.nothing(NULL_SETS))
            z.sort()
            bar = z[int(_TAIL * NULL_SETS)]
            made.null[size] = (z, float((z[z > bar] - bar).mean()) if (z > bar).any() else 1.0)
        return made

    def standardised(
        self, prefixes: VectorWords, sets: NDArray[np.int64], out: LeftOut
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """z and the number of prefixes with a vector, for each set of prefixes [sets, triggers]."""
        z, filled = _sums(
            sets, prefixes.rows, prefixes.is_last, prefixes.offsets, out.words, out.offsets, out.last,
            self.vectors.vectors, self.vectors.weights, self.means, self.variances,
        )  # fmt: skip
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
def _pair_cosines(pairs: Any, rows: Any, is_last: Any, offsets: Any, vectors: Any, weights: Any) -> tuple[Any, Any]:
    found, classes = np.empty(len(pairs)), np.empty((len(pairs), 2), np.int64)
    one, other = np.empty(vectors.shape[1], np.float32), np.empty(vectors.shape[1], np.float32)
    used, parts = np.empty((2, 64), np.int32), np.empty((2, 64), np.float32)
    nothing = np.empty(0, np.int32)
    for n in range(len(pairs)):
        a = prefix_vector_(
            pairs[n, 0], rows, is_last, offsets, nothing, False, vectors, weights, one, used[0], parts[0]
        )
        b = prefix_vector_(
            pairs[n, 1], rows, is_last, offsets, nothing, False, vectors, weights, other, used[1], parts[1]
        )
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
    cosines, classes = _pair_cosines(
        pairs, background.rows, background.is_last, background.offsets, vectors.vectors, vectors.weights
    )
    kinds = len(SIZES)
    flat = classes.min(1) * kinds + classes.max(1)
    counts = np.bincount(flat, minlength=kinds**2)
    sums, squares = (np.bincount(flat, cosines**power, minlength=kinds**2) for power in (1, 2))
    enough = counts >= 30
    means = np.where(enough, sums / np.maximum(counts, 1), cosines.mean())
    variances = np.where(enough, squares / np.maximum(counts, 1) - means**2, cosines.var())
    return means.reshape(kinds, kinds), np.maximum(variances, 1e-6).reshape(kinds, kinds)


BAR = 1.65
POOL = 400  # random prefixes of each size class
SHOWN = 5
_ROUNDS = 3
_PRIOR = 200.0  # words that the prior counts for
_SURE = 1.96
_NEAR = 0.15  # cosine of a word with the topic


@dataclass(frozen=True)
class Topic:
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
            made, counts, _ = set_vectors(background, vectors, chosen, np.zeros(0, np.int32), 0)
            found.append(made[counts > 0])
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


def set_vectors(
    prefixes: VectorWords, vectors: WordVectors, rows: NDArray[np.int64], out: NDArray[np.int32], out_last: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], list[NDArray[np.int32]]]:
    """Unit vectors [rows, dimensions], numbers of words (0: no vector) and the words themselves."""
    made = np.zeros((len(rows), vectors.vectors.shape[1]), np.float32)
    counts, words = np.zeros(len(rows), np.int64), []
    used, parts = np.empty(64, np.int32), np.empty(64, np.float32)
    for i, row in enumerate(rows.tolist()):
        if row >= 0:
            counts[i] = prefix_vector_(
                row, prefixes.rows, prefixes.is_last, prefixes.offsets, out, bool(out_last >> i & 1),
                vectors.vectors, vectors.weights, made[i], used, parts,
            )  # fmt: skip
        words.append(used[: counts[i]].copy())
    return made, counts, words


def find_topic(
    prefixes: VectorWords, vectors: WordVectors, rows: NDArray[np.int64], out: LeftOut, memory: int, pool: Pool
) -> Topic | None:
    """The topic of a memory whose prefixes [triggers] are known to be coherent; None where no three words say it."""
    left_out = out.words[out.offsets[memory] : out.offsets[memory + 1]]
    made, counts, words = set_vectors(prefixes, vectors, rows, left_out, int(out.last[memory]))
    classes = np.array([size_class(count) for count in counts.tolist()])
    members = counts > 0
    share = 1.0
    for _ in range(_ROUNDS):
        total = made[members].sum(0)
        bars, share = pool.bars(total / max(float(np.linalg.norm(total)), 1e-9))
        others = total[None, :] - made * members[:, None]  # a prefix is compared with the others only
        close = (made * others).sum(1) / np.maximum(np.linalg.norm(others, axis=1), 1e-9)
        members = (counts > 0) & (close > bars[classes])
        if members.sum() < GROUNDED:
            return None
    direction = made[members].sum(0)
    telling = _telling_words([words[i] for i in np.flatnonzero(members)], vectors, direction)
    if len(telling) < GROUNDED:
        return None
    return Topic(sum(1 << int(i) for i in np.flatnonzero(members)), tuple(telling[:SHOWN]), share)


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
    chosen: Sequence[Chosen],
    vectors: WordVectors,
    settings: PatternSettings,
    progress: Progress,
) -> dict[int, tuple[Topic, float]]:
    """Topic and q-value by row of TriggerRows."""
    if len(vectors.vectors) == 0:
        return {}
    sample = VectorWords.of(texts.sample, vectors)
    own = VectorWords.of(texts.triggers, vectors)
    coherence = Coherence.calibrate(sample, vectors, triggers.rows.shape[1], settings.seed)
    out = words_left_out(chosen, vectors)
    z, filled = coherence.standardised(own, triggers.one_a_sentence(), out)
    q = q_values(coherence.p_values(z, filled), len(z))
    pool = Pool.draw(sample, vectors, settings.seed)
    found: dict[int, tuple[Topic, float]] = {}
    coherent = np.flatnonzero(q <= settings.rate).tolist()
    for done, m in enumerate(coherent):
        progress("topics", done, len(coherent))
        topic = find_topic(own, vectors, triggers.rows[m], out, m, pool)
        if topic:
            found[m] = (topic, float(q[m]))
    return found


def words_left_out(chosen: Sequence[Chosen], vectors: WordVectors) -> LeftOut:
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
    return LeftOut(flat, np.array(offsets, np.int64), np.array(last, np.uint64))
