"""Coherence: do prefixes speak of the same thing, beyond the words they share and beyond what their last tokens imply?

1. The vector of a prefix is made of its words but the last; from it the mean vector of text before the same last token
   in other documents is taken (matched), as much of it as prefixes with so many words have on average. What is left
   has mean 0 for a random prefix with this last token.
2. S = sum over pairs of prefixes a < b, one prefix a document, of a . b less what equal words of a and b contribute.
   The mean is estimated from n prefixes, so pairs of one last token get 1/n of its variance less.
3. z = (S - sum mu_ab) / sqrt(sum sigma2_ab), with mean and variance of pairs of swapped prefixes with as many words as
   a and b have: short prefixes are noisier. Pairs of independent prefixes are uncorrelated, so variances add; for k
   prefixes of one last token the estimated mean widens the deviation by 1 + k / n.
4. p from z of sets in which every trigger of a memory is swapped for a random prefix of another document with the same
   last token; beyond their 99th percentile the tail is continued as an exponential.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.parallel import compiled, compiled_part
from memlens.pattern.matched import MatchedPlaces
from memlens.pattern.word_vectors import (
    SIZES,
    VectorWords,
    WordVectors,
    dot,
    prefix_vector_,
    prefix_vectors,
    size_class,
)
from memlens.pattern.words import GROUNDED, WINDOW, PrefixWords
from memlens.sorting import sort_with_

NULL_SETS, FEWER_SETS = 20_000, 4_000  # of the most triggers, and of fewer
_PAIRS = 200_000
_TAIL = 0.99
_SIZES = (3, 4, 6, 9, 14, 20, 25, 35, 50, 64)
_KNOWN = 3  # prefixes of other documents that say what text before a token is like


class ExcludedWords(NamedTuple):
    """Words of shallow patterns, by memory; a tuple, so that compiled code takes it."""

    words: NDArray[np.int32]  # rows of WordVectors
    offsets: NDArray[np.int64]  # [memories + 1]
    last: NDArray[np.uint64]  # [memories]: prefixes whose last word is left out, a bit each


class LastTokens(NamedTuple):
    """Prefixes with their last tokens and documents, and the samples for each token; for compiled code."""

    tokens: NDArray[np.int32]  # [prefixes]
    documents: NDArray[np.int64]  # [prefixes]
    slots: NDArray[np.int32]  # as in MatchedPlaces
    offsets: NDArray[np.int64]  # [slots + 1]: rows of prefixes
    middles: NDArray[np.int64]
    first: int  # row of the first sampled prefix
    vectors: NDArray[np.float32]  # [sampled prefixes, dimensions]: without the last word; 0 where there is none
    amounts: NDArray[np.float64]  # [size classes]: how much of the mean vector a prefix has

    @classmethod
    def of(cls, prefixes: PrefixWords, words: VectorWords, places: MatchedPlaces, vectors: WordVectors) -> LastTokens:
        first = len(prefixes) - len(places.sentences)
        unit = _unit_vectors(words, first, len(places.sentences), vectors)
        where = (places.slots, places.offsets + first, places.middles + first)
        found = cls(prefixes.tokens, prefixes.documents, *where, first, unit, np.ones(len(SIZES)))
        products, squares = _amounts(words, found, vectors)
        nearest = np.where(squares > 1, products / np.maximum(squares, 1), 1.0)  # to the prefixes of the second sample
        return found._replace(amounts=nearest)


def _unit_vectors(words: VectorWords, first: int, count: int, vectors: WordVectors) -> Any:
    unit, _ = prefix_vectors(words, vectors, np.arange(first, first + count), np.ones(count, np.bool_))
    return unit


@compiled
def _swap(rows: Any, tokens: LastTokens, starts: Any) -> Any:
    """Each prefix for one of another document with its last token; -1 where there is none that is not used already."""
    found = np.full(rows.shape, -1, np.int64)
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
                    is_free &= found[m, j] < 0 or tokens.documents[row] != tokens.documents[found[m, j]]
                if is_free:
                    found[m, i] = row
                    break
    return found


def swap_prefixes(rows: NDArray[np.int64], tokens: LastTokens, random: np.random.Generator) -> NDArray[np.int64]:
    found: NDArray[np.int64] = _swap(np.ascontiguousarray(rows), tokens, random.random(rows.shape))
    return found


@compiled_part
def _is_there(tokens: LastTokens, row: int) -> bool:
    """Has a sampled prefix a vector?"""
    found = False
    for i in range(tokens.vectors.shape[1]):
        found |= tokens.vectors[row - tokens.first, i] != 0
    return found


@compiled_part
def _mean_before(
    slot: int, documents: Any, filled: int, excluded: Any, words: VectorWords, tokens: LastTokens, vectors: WordVectors,
    mean: Any, vector: Any, used: Any, parts: Any,
) -> int:  # fmt: skip
    """Write the mean vector of text before a token in other documents; of how many prefixes comes back."""
    size, count = mean.shape[0], 0
    for i in range(size):
        mean[i] = 0
    for row in range(tokens.offsets[slot], tokens.middles[slot]):
        is_free, has_excluded = True, False
        for i in range(filled):
            is_free &= tokens.documents[row] != documents[i]
        if not is_free:
            continue
        for place in range(words.offsets[row], words.offsets[row + 1]):
            for other in excluded:
                has_excluded |= words.rows[place] == other
        if has_excluded:
            if prefix_vector_(words, row, excluded, True, vectors, vector, used, parts) > 0:
                for i in range(size):
                    mean[i] += vector[i]
                count += 1
        elif _is_there(tokens, row):
            for i in range(size):
                mean[i] += tokens.vectors[row - tokens.first, i]
            count += 1
    for i in range(size):
        mean[i] /= max(count, 1)
    return count


@compiled_part
def _variance(mean: Any, count: int) -> float:
    """Variance of unit vectors around their mean, summed over dimensions."""
    return max(1 - dot(mean, mean), 0.0) * count / (count - 1)


@compiled
def _amounts(words: VectorWords, tokens: LastTokens, vectors: WordVectors) -> tuple[Any, Any]:
    """Products of a token's mean vector with the prefixes of the second sample, and its squares, by size class."""
    products, squares = np.zeros(len(SIZES)), np.zeros(len(SIZES))
    mean, one, nothing = np.empty(tokens.vectors.shape[1]), np.empty(1, np.int64), np.empty(0, np.int32)
    spare, used, parts = (
        np.empty(tokens.vectors.shape[1], np.float32),
        np.empty(WINDOW, np.int32),
        np.empty(WINDOW, np.float32),
    )
    for slot in range(len(tokens.middles)):
        for row in range(tokens.middles[slot], tokens.offsets[slot + 1]):
            vector = tokens.vectors[row - tokens.first]
            one[0] = tokens.documents[row]
            count = _mean_before(slot, one, 1, nothing, words, tokens, vectors, mean, spare, used, parts)
            if count < _KNOWN or not _is_there(tokens, row):
                continue
            size = size_class(max(words.offsets[row + 1] - words.offsets[row] - 1, 1))
            products[size] += dot(vector, mean)
            squares[size] += dot(mean, mean) - _variance(mean, count) / count
    return products, squares


@compiled
def _pair_sums(
    sets: Any, owners: Any, words: VectorWords, tokens: LastTokens, excluded: ExcludedWords, vectors: WordVectors
) -> tuple[Any, Any, Any]:
    """S of each set of prefixes (-1: none), how much wider its deviation is, and its prefixes by size class."""
    memories, triggers = sets.shape
    sums, wider, classes = np.zeros(memories), np.ones(memories), np.zeros((memories, len(SIZES)))
    dimensions = vectors.vectors.shape[1]
    vector, left, total = np.empty(dimensions, np.float32), np.empty(dimensions), np.empty(dimensions)
    spare, spare_used, spare_parts = (
        np.empty(dimensions, np.float32),
        np.empty(WINDOW, np.int32),
        np.empty(WINDOW, np.float32),
    )
    used, parts = np.empty(WINDOW, np.int32), np.empty(WINDOW, np.float32)
    all_words, all_parts = np.empty(WINDOW * triggers, np.int32), np.empty(WINDOW * triggers)
    means, slots = np.empty((triggers, dimensions)), np.empty(triggers, np.int64)
    known, times, documents = np.empty(triggers, np.int64), np.empty(triggers, np.int64), np.empty(triggers, np.int64)
    taken, taken_squares = np.empty(triggers), np.empty(triggers)
    for m in range(memories):
        own = excluded.words[excluded.offsets[owners[m]] : excluded.offsets[owners[m] + 1]]
        prefixes = 0
        for row in sets[m]:
            if row >= 0:
                documents[prefixes] = tokens.documents[row]
                prefixes += 1
        for i in range(dimensions):
            total[i] = 0
        squares, groups, word_count, filled = 0.0, 0, 0, 0
        for row in sets[m]:
            slot = -1 if row < 0 or tokens.tokens[row] < 0 else tokens.slots[tokens.tokens[row]]
            count = 0 if slot < 0 else prefix_vector_(words, row, own, True, vectors, vector, used, parts)
            if count == 0:
                continue
            group = 0
            while group < groups and slots[group] != slot:
                group += 1
            if group == groups:
                slots[group], times[group], taken[group], taken_squares[group] = slot, 0, 0.0, 0.0
                known[group] = _mean_before(
                    slot, documents, prefixes, own, words, tokens, vectors, means[group], spare, spare_used, spare_parts
                )
                groups += 1
            if known[group] < _KNOWN:
                continue
            size = size_class(count)
            for i in range(dimensions):
                left[i] = vector[i] - tokens.amounts[size] * means[group, i]
                total[i] += left[i]
            squares += dot(left, left)
            times[group] += 1
            taken[group] += tokens.amounts[size]
            taken_squares[group] += tokens.amounts[size] ** 2
            filled += 1
            classes[m, size] += 1
            for i in range(count):
                all_words[word_count + i], all_parts[word_count + i] = used[i], parts[i]
            word_count += count
        same = _equal_words_(all_words, all_parts, word_count)
        bias, spread = 0.0, 0.0
        for group in range(groups):
            if times[group] > 0:
                k, n = times[group], known[group]
                pairs = (taken[group] ** 2 - taken_squares[group]) / 2
                bias += pairs * _variance(means[group], n) / n
                spread += k * (1 + k / n)
        sums[m] = (dot(total, total) - squares - same) / 2 - bias
        wider[m] = spread / filled if filled else 1.0
    return sums, wider, classes


@compiled_part
def _equal_words_(words: Any, parts: Any, count: int) -> float:
    """Twice what equal words of different prefixes contribute to the sum of cosines; the words get sorted."""
    sort_with_(words, parts, count)
    same, begin = 0.0, 0
    while begin < count:
        end, whole, squares = begin, 0.0, 0.0
        while end < count and words[end] == words[begin]:
            whole, squares, end = whole + parts[end], squares + parts[end] * parts[end], end + 1
        same += whole * whole - squares
        begin = end
    return same


@dataclass(frozen=True, eq=False)
class Coherence:
    """The statistic and its null distribution for one corpus and the triggers found in it."""

    words: VectorWords
    tokens: LastTokens
    excluded: ExcludedWords
    vectors: WordVectors
    means: NDArray[np.float64]  # [size classes, size classes]
    variances: NDArray[np.float64]
    null: dict[int, tuple[NDArray[np.float64], float]]  # by triggers: sorted null statistics, mean excess in the tail

    @classmethod
    def calibrate(
        cls,
        rows: NDArray[np.int64],
        words: VectorWords,
        tokens: LastTokens,
        excluded: ExcludedWords,
        vectors: WordVectors,
        seed: int,
    ) -> Coherence:
        """`rows` [memories, t]: the triggers, one a document."""
        random = np.random.default_rng([seed, 8])
        kinds = (len(SIZES),) * 2
        found = cls(words, tokens, excluded, vectors, np.zeros(kinds), np.ones(kinds), {})
        memory, rank = np.nonzero(rows >= 0)
        if len(memory) < 2:
            return found
        drawn = random.integers(0, len(memory), (_PAIRS, 2))
        pairs = found.swap(rows[memory[drawn], rank[drawn]], random)
        found.means[:], found.variances[:] = found._pair_moments(pairs, memory[drawn[:, 0]])
        packed = np.take_along_axis(rows, np.argsort(rows < 0, 1, kind="stable"), 1)  # triggers that are there first
        filled = (rows >= 0).sum(1)
        for size in sorted({size for size in _SIZES if size < rows.shape[1]} | {rows.shape[1]}):
            enough = np.flatnonzero(filled >= min(size, filled.max()))
            owners = random.choice(enough, NULL_SETS if size >= rows.shape[1] else FEWER_SETS)
            z, _ = found.z_scores(found.swap(packed[owners, :size], random), owners)
            z.sort()
            bar = z[int(_TAIL * len(z))]
            found.null[size] = (z, float((z[z > bar] - bar).mean()) if (z > bar).any() else 1.0)
        return found

    def swap(self, rows: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        """The same sets with every prefix swapped for one of another document with the same last token."""
        return swap_prefixes(rows, self.tokens, random)

    def z_scores(
        self, sets: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """z and the number of prefixes that count, of sets [sets, t] with the excluded words of their owners."""
        sums, wider, classes = self._sums(sets, owners)
        pairs = classes[:, :, None] * classes[:, None, :]
        pairs -= classes[:, :, None] * np.eye(len(SIZES))
        pairs /= 2  # each pair is there twice
        expected = (pairs * self.means).sum((1, 2))
        variance = (pairs * self.variances).sum((1, 2)) + 1e-12
        return (sums - expected) / (np.sqrt(variance) * wider), classes.sum(1).astype(np.int64)

    def _sums(self, sets: NDArray[np.int64], owners: NDArray[np.int64]) -> tuple[Any, Any, Any]:
        found: tuple[Any, Any, Any] = _pair_sums(sets, owners, self.words, self.tokens, self.excluded, self.vectors)
        return found

    def _pair_moments(
        self, pairs: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and variance of a pair's product by the size classes of its two prefixes, in either order."""
        sums, _, classes = self._sums(pairs, owners)
        both = classes.sum(1) == 2
        sums, classes = sums[both], classes[both]
        low = classes.argmax(1)
        high = len(SIZES) - 1 - classes[:, ::-1].argmax(1)
        flat = low * len(SIZES) + high
        kinds = len(SIZES) ** 2
        counts = np.bincount(flat, minlength=kinds)
        added, squares = (np.bincount(flat, sums**power, minlength=kinds) for power in (1, 2))
        enough = counts >= 30
        overall = (sums.mean(), sums.var()) if len(sums) else (0.0, 1.0)
        means = np.where(enough, added / np.maximum(counts, 1), overall[0]).reshape(len(SIZES), -1)
        variances = np.where(enough, squares / np.maximum(counts, 1), overall[1] + overall[0] ** 2)
        variances = np.maximum(variances.reshape(len(SIZES), -1) - means**2, 1e-6)
        upper = np.triu(np.ones((len(SIZES),) * 2, np.bool_))
        return np.where(upper, means, means.T), np.where(upper, variances, variances.T)

    def p_values(self, z: NDArray[np.float64], filled: NDArray[np.int64]) -> NDArray[np.float64]:
        """Chance that swapped triggers are as coherent; 1 where fewer than three count."""
        p = np.ones(len(z))
        sizes = sorted(self.null)
        for size, following in zip(sizes, [*sizes[1:], np.iinfo(np.int64).max], strict=True):
            own = (filled >= max(size, GROUNDED)) & (filled < following)
            null, excess = self.null[size]
            above = len(null) - np.searchsorted(null, z[own], side="left")
            bar = null[int(_TAIL * len(null))]
            far = (1 - _TAIL) * np.exp(-np.maximum(z[own] - bar, 0) / excess)
            p[own] = np.where(z[own] > bar, far, (above + 1) / (len(null) + 1))
        return p
