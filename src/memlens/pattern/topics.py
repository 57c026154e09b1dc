"""Topics: triggers of a memory with a common subject beyond the words that they share, and words that name the subject.

Word vectors are computed from the corpus alone (latent semantic analysis; Deerwester et al., 1990):

 1. Count words in passages from at most words.TOKENS tokens. A passage is NEAR sentences of a paragraph, or WIDE
    sentences of a file.
 2. Each cell of [passages, words] is max(0, log(n_pw N / (n_p n_w))) / sqrt(n_p): positive pointwise mutual
    information, damped for long passages.
 3. Reduce to DIMENSIONS with a randomized singular value decomposition, center, and scale to unit length.

Words in fewer than LEAST passages, numbers and punctuation have no vector.

The vector of a prefix is the mean of the vectors of its distinct words, weighted by rarity and scaled to unit length.
The fewer words a prefix has, the noisier its vector. Prefixes are therefore grouped into size classes.

Coherence tests whether triggers share a subject beyond common words and beyond what their last tokens imply:

 1. The vector of a trigger excludes its last word. Subtract the mean vector of text before the same last token in other
    documents (matched), scaled to the size class. The remainder has mean 0 for a random prefix with this
    last token.
 2. S = sum over pairs a < b of a . b, with one trigger per document, minus the contribution of equal words. The mean in
    step 1 is estimated from n prefixes. For pairs with the same last token, subtract the variance of this mean, which
    is the variance of the vectors / n.
 3. z = (S - sum mu_ab) / sqrt(sum sigma2_ab), where mu_ab and sigma2_ab are the mean and variance of a . b over pairs
    of swapped prefixes of the same size classes. Pairs of independent prefixes are uncorrelated, so variances add. For
    k prefixes with the same last token, the estimated mean increases the deviation by the factor 1 + k / n.
 4. p is computed from the z of sets in which every trigger is swapped for a random prefix of another document with the
    same last token. Beyond the 99th percentile of these z, the tail is modeled as exponential.

A topic is tested with one hypothesis per memory and two tests on different triggers. Words of shallow patterns are
excluded from both tests. (a) The triggers are more coherent than swapped triggers. (b) Held-out triggers of other
documents are closer to the topic than prefixes with the same last tokens (rank-sum test). Fisher's method combines the
two p-values, and the false discovery rate is controlled over all memories (Benjamini and Hochberg, 1995). A memory with
a p-value above _WORTH in (a) has no topic. If there are too few held-out triggers, (a) alone decides.

The members and words of a topic are found in three steps:

 1. A trigger belongs to the topic if it is closer to the mean of the other members than random prefixes of its size
    class are. The cosine of the trigger must exceed the median cosine of these random prefixes by BAR times the
    distance from their median to their 84th percentile. Repeat this step _ROUNDS times.
 2. The topic's words are over-represented in these triggers (z-score of the log-odds with an informative Dirichlet
    prior; Monroe et al., 2008) and lie in the topic's direction.
 3. Drop the topic if its triggers are from fewer than three documents or if it has fewer than three such words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from memlens.compiling import compiled, compiled_part, sort_with_
from memlens.index.reader import Index
from memlens.pattern.matched import LastTokens, effective_size, swap_prefixes
from memlens.pattern.shallow import ShallowChoice, Texts
from memlens.pattern.words import (
    ENOUGH,
    GROUNDED,
    HELD,
    RUN,
    WINDOW,
    WORD,
    PrefixWords,
    TriggerRows,
    Words,
    one_per_document,
    ranks_of,
    sampled_runs,
)
from memlens.progress import Progress
from memlens.settings import PatternSettings
from memlens.stats import q_values, roc_area

DIMENSIONS = 96
LEAST = 3
NEAR, WIDE = 4, 16  # sentences per passage within a paragraph, and within a file
MOST_WORDS = 40_000
_FREQUENT = 1e-3  # a word of this frequency has half the weight of a rare word (smooth inverse frequency)
_POWERS = 3
SIZES = np.array([1, 2, 3, 5, 9, 17])  # lower bounds of the size classes, in words that have a vector

_QUERY = """
SELECT regexp_extract_all(text, $1) AS words, source FROM {corpus}
WHERE (sentence // $2) % $3 = $4 ORDER BY sentence
"""


class WordVectors(NamedTuple):
    """The vectors and weights of words. This is a tuple so that compiled code can read it."""

    rows: NDArray[np.int32]  # [all words]: row of the word in the arrays below; -1 for a word without a vector
    numbers: NDArray[np.int64]  # [rows]: number of the word
    vectors: NDArray[np.float32]  # [rows, dimensions], unit length, centered
    weights: NDArray[np.float32]  # [rows]: weight by rarity
    shares: NDArray[np.float64]  # [rows]: frequency of the word as a share of all words of the corpus


def word_vectors(index: Index, words: Words, seed: int) -> WordVectors:
    """Return the vectors of words, computed from the corpus of an index. Words of the corpus are added to `words`."""
    cells = _count_cells(index, words, seed)
    numbers, weights, shares = _select_words(cells, words)
    rows = np.full(len(words.texts), -1, np.int32)
    rows[numbers] = np.arange(len(numbers), dtype=np.int32)
    matrix = _information(cells, rows, len(numbers))
    vectors = _reduce(matrix, min(DIMENSIONS, max(len(numbers) // 4, 1)), seed)
    vectors -= vectors.mean(0) if len(vectors) else 0
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    return WordVectors(rows, numbers, vectors.astype(np.float32), weights, shares)


@dataclass(frozen=True, eq=False)
class _Cells:
    """The number of times that each word occurs in each passage."""

    passage: NDArray[np.int64]
    word: NDArray[np.int64]
    times: NDArray[np.int64]
    passages: int


def _count_cells(index: Index, words: Words, seed: int) -> _Cells:
    every, which = sampled_runs(index, seed)
    near, wide = _PassageCounter(NEAR), _PassageCounter(WIDE)
    cells = [np.zeros(0, np.int64)]
    for batch in index.batches(_QUERY, (WORD, RUN, every, which)):
        lists = batch.column("words")
        flat = lists.flatten().dictionary_encode()
        spelled = words.add(flat)  # new words are appended to words.plain
        plain = np.asarray(words.plain, np.int64)[spelled]
        sources = batch.column("source").to_pylist()
        sizes = lists.value_lengths().to_numpy(zero_copy_only=False)
        for number, counter in enumerate((near, wide)):
            names = sources if counter is near else [source.rpartition(":")[0] for source in sources]
            passage = 2 * np.repeat(np.array([counter.next(name) for name in names], np.int64), sizes) + number
            cells.append((passage << 20) | plain)
    keys, times = np.unique(np.concatenate(cells), return_counts=True)
    return _Cells(keys >> 20, keys & ((1 << 20) - 1), times, 2 * max(near.passage, wide.passage) + 2)


class _PassageCounter:
    """A counter that assigns consecutive sentences of one source to numbered passages."""

    def __init__(self, sentences: int) -> None:
        self.sentences, self.passage, self.inside, self.source = sentences, -1, 0, ""

    def next(self, source: str) -> int:
        is_new = source != self.source or self.inside == self.sentences or self.passage < 0
        self.passage, self.inside, self.source = self.passage + is_new, 1 if is_new else self.inside + 1, source
        return self.passage


def _select_words(cells: _Cells, words: Words) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float64]]:
    """Return the numbers, weights and shares of the words that get vectors.

    Words get a vector if they occur in at least LEAST passages and in at most a quarter of all passages. If there are
    more than MOST_WORDS such words, return the most frequent ones.
    """
    size = len(words.texts)
    near = cells.passage % 2 == 0  # leave out wide passages, because they contain the same words again
    passages = np.bincount(cells.word[near], minlength=size)
    times = np.bincount(cells.word[near], cells.times[near], minlength=size)
    is_word = np.array([text.isalpha() and len(text) > 1 for text in words.texts])
    common = max(len(np.unique(cells.passage[near])) / 4, LEAST)
    numbers = np.flatnonzero(is_word & (passages >= LEAST) & (passages <= common))
    numbers = np.sort(numbers[np.argsort(-times[numbers], kind="stable")][:MOST_WORDS])
    shares = times[numbers] / max(times.sum(), 1)
    return numbers, (_FREQUENT / (_FREQUENT + shares)).astype(np.float32), shares


def _information(cells: _Cells, rows: NDArray[np.int32], size: int) -> csr_matrix:
    """Return the damped positive pointwise mutual information of passages and words, [passages, words]."""
    column: NDArray[np.int64] = rows[cells.word].astype(np.int64)
    has_vector = column >= 0
    passage, column, times = cells.passage[has_vector], column[has_vector], cells.times[has_vector].astype(np.float64)
    passage_sizes = np.bincount(passage, times, minlength=cells.passages)
    word_counts = np.bincount(column, times, minlength=size)
    expected = passage_sizes[passage] * word_counts[column] / max(times.sum(), 1)
    values = np.maximum(np.log(np.maximum(times, 1e-9) / expected), 0)
    values /= np.sqrt(np.maximum(passage_sizes[passage], 1))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(passage, minlength=cells.passages))])
    return csr_matrix((values, column, offsets), (cells.passages, size))


def _reduce(matrix: csr_matrix, dimensions: int, seed: int) -> NDArray[np.float64]:
    """Return the leading singular vectors of the words, multiplied by the square root of the singular values."""
    width = matrix.shape[1]
    if width == 0:
        return np.zeros((0, 1))
    basis = np.random.default_rng([seed, 7]).standard_normal((width, min(dimensions + 8, width)))
    for _ in range(_POWERS):
        basis, _ = np.linalg.qr(matrix.T @ (matrix @ basis))
    projected = matrix @ basis  # [passages, size]
    eigenvalues, rotation = np.linalg.eigh(projected.T @ projected)
    order = np.argsort(-eigenvalues)[:dimensions]
    scale = np.maximum(eigenvalues[order], 0) ** 0.25
    vectors: NDArray[np.float64] = (basis @ rotation[:, order]) * scale
    return vectors


class VectorWords(NamedTuple):
    """The distinct words of each prefix that have a vector. This is a tuple so that compiled code can read it."""

    rows: NDArray[np.int32]  # rows of WordVectors
    is_last: NDArray[np.bool_]  # whether the word occurs only at the end of the prefix
    offsets: NDArray[np.int64]  # [prefixes + 1]

    @classmethod
    def of(cls, prefixes: PrefixWords, vectors: WordVectors) -> VectorWords:
        return cls(*_vector_words(prefixes.words, prefixes.offsets, vectors.rows))


@compiled
def _vector_words(words: Any, offsets: Any, row_of: Any) -> tuple[Any, Any, Any]:
    rows, is_last = np.empty(len(words), np.int32), np.empty(len(words), np.bool_)
    ends = np.zeros(len(offsets), np.int64)
    count = 0
    for prefix in range(len(offsets) - 1):
        begin = count
        for place in range(offsets[prefix], offsets[prefix + 1]):
            row = row_of[words[place]]
            is_new = row >= 0
            for earlier in range(begin, count):
                is_new &= rows[earlier] != row
            if is_new:
                rows[count], is_last[count] = row, place == offsets[prefix + 1] - 1
                count += 1
        ends[prefix + 1] = count
    return rows[:count].copy(), is_last[:count].copy(), ends


@compiled_part
def dot(left: Any, right: Any) -> Any:
    """Return the dot product, summed in order. A loop compiles much faster than an array expression."""
    total = left[0] * right[0]
    for i in range(1, left.shape[0]):
        total += left[i] * right[i]
    return total


@compiled_part
def prefix_vector_(
    prefixes: VectorWords, prefix: int, excluded: Any, drop_last: bool, vectors: WordVectors,
    vector: Any, used: Any, parts: Any,
) -> int:  # fmt: skip
    """Write a prefix's unit vector, its words (`used`) and their weights (`parts`). Returns the number of words."""
    size, count = vector.shape[0], 0
    for i in range(size):
        vector[i] = 0
    for place in range(prefixes.offsets[prefix], prefixes.offsets[prefix + 1]):
        row = prefixes.rows[place]
        if drop_last and prefixes.is_last[place]:
            continue
        is_out = False
        for other in excluded:
            is_out |= other == row
        if not is_out:
            used[count], parts[count] = row, vectors.weights[row]
            for i in range(size):
                vector[i] += vectors.weights[row] * vectors.vectors[row, i]
            count += 1
    norm = np.sqrt(dot(vector, vector))
    if norm < 1e-6:
        return 0
    for i in range(size):
        vector[i] /= norm
    for i in range(count):
        parts[i] /= norm
    return count


@compiled
def _prefix_vectors_(
    prefixes: VectorWords, rows: Any, drop_last: Any, excluded: Any, vectors: WordVectors, unit: Any, words: Any
) -> Any:
    counts, parts = np.zeros(len(rows), np.int64), np.empty(WINDOW, np.float32)
    for i in range(len(rows)):
        used = words[i if i < len(words) else 0]
        if rows[i] >= 0:
            counts[i] = prefix_vector_(prefixes, rows[i], excluded, drop_last[i], vectors, unit[i], used, parts)
        if counts[i] == 0:
            for d in range(unit.shape[1]):
                unit[i, d] = 0
    return counts


def prefix_vectors(
    prefixes: VectorWords,
    vectors: WordVectors,
    rows: NDArray[np.int64],
    drop_last: NDArray[np.bool_] | bool,
    excluded: NDArray[np.int32] | None = None,
    words: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the unit vectors [rows, dimensions] of prefixes and the number of words in each vector.

    The number is 0 for a prefix without a vector.

    Args:
        prefixes: The words of all prefixes.
        vectors: The word vectors.
        rows: The prefixes to compute, -1 for none.
        drop_last: Whether to leave out the last word, for all rows or for each row.
        excluded: Words to leave out, as rows of `vectors`.
        words: Array [rows, WINDOW] that receives the words of each vector.
    """
    unit = np.empty((len(rows), vectors.vectors.shape[1]), np.float32)
    without_last = np.full(len(rows), drop_last)
    excluded = np.empty(0, np.int32) if excluded is None else excluded
    words = np.empty((1, WINDOW), np.int32) if words is None else words
    counts: NDArray[np.int64] = _prefix_vectors_(prefixes, rows, without_last, excluded, vectors, unit, words)
    return unit, counts


@compiled_part
def size_class(count: int) -> int:
    """Return the size class of a prefix with this number of words."""
    number = 0
    while number + 1 < len(SIZES) and count >= SIZES[number + 1]:
        number += 1
    return number


NULL_SETS, FEWER_SETS = 20_000, 4_000  # number of null sets for the largest set size, and for each smaller set size
_PAIRS = 200_000
_TAIL = 0.99
_SIZES = (3, 4, 6, 9, 14, 20, 25, 35, 50, 64)
_LEAST_PREFIXES = 3  # minimum number of prefixes of other documents for the mean vector before a token


class ExcludedWords(NamedTuple):
    """The words of each memory's shallow patterns, which its topics leave out.

    This is a tuple so that compiled code can read it.
    """

    words: NDArray[np.int32]  # rows of WordVectors
    offsets: NDArray[np.int64]  # [memories + 1]
    last: NDArray[np.uint64]  # [memories]: bit mask of the prefixes whose last word is excluded

    def of(self, memory: int) -> NDArray[np.int32]:
        """Return the excluded words of one memory."""
        return self.words[self.offsets[memory] : self.offsets[memory + 1]]


class TextBefore(NamedTuple):
    """Vectors of the text before the last tokens of matched prefixes.

    This is a tuple so that compiled code can read it.
    """

    first: int  # row of the first matched prefix
    vectors: NDArray[np.float32]  # [matched prefixes, dimensions]: vectors without the last word, 0 for none
    amounts: NDArray[np.float64]  # [size classes]: factor that scales mean vectors to the size class

    @classmethod
    def of(cls, words: VectorWords, tokens: LastTokens, vectors: WordVectors) -> TextBefore:
        first, last = int(tokens.offsets[0]), int(tokens.offsets[-1])
        unit, _ = prefix_vectors(words, vectors, np.arange(first, last), drop_last=True)
        before = cls(first, unit, np.ones(len(SIZES)))
        products, squares = _amounts(words, tokens, before, vectors)
        # the factors are a least-squares fit to the second sample
        return before._replace(amounts=np.where(squares > 1, products / np.maximum(squares, 1), 1.0))


@compiled_part
def _has_vector(before: TextBefore, row: int) -> bool:
    """Return True if a matched prefix has a vector."""
    is_nonzero = False
    for i in range(before.vectors.shape[1]):
        is_nonzero |= before.vectors[row - before.first, i] != 0
    return is_nonzero


@compiled_part
def _mean_before(
    slot: int, documents: Any, filled: int, excluded: Any, words: VectorWords, tokens: LastTokens,
    before: TextBefore, vectors: WordVectors, mean: Any, vector: Any, used: Any, parts: Any,
) -> int:  # fmt: skip
    """Write the mean vector of the text before a token in other documents. Returns the number of prefixes in the mean.

    The first `filled` entries of `documents` are the documents to leave out.
    """
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
        elif _has_vector(before, row):
            for i in range(size):
                mean[i] += before.vectors[row - before.first, i]
            count += 1
    for i in range(size):
        mean[i] /= max(count, 1)
    return count


@compiled_part
def _variance(mean: Any, count: int) -> float:
    """Return the variance of unit vectors around their mean, summed over dimensions."""
    return max(1 - dot(mean, mean), 0.0) * count / (count - 1)


@compiled
def _amounts(words: VectorWords, tokens: LastTokens, before: TextBefore, vectors: WordVectors) -> tuple[Any, Any]:
    """Return the two sums of the least-squares fit of TextBefore.amounts, by size class.

    The first sum is over products of mean vectors with vectors of the second sample. The second sum is over squared
    lengths of these mean vectors.
    """
    products, squares = np.zeros(len(SIZES)), np.zeros(len(SIZES))
    mean, one, nothing = np.empty(before.vectors.shape[1]), np.empty(1, np.int64), np.empty(0, np.int32)
    spare, used, parts = (
        np.empty(before.vectors.shape[1], np.float32),
        np.empty(WINDOW, np.int32),
        np.empty(WINDOW, np.float32),
    )
    for slot in range(len(tokens.middles)):
        for row in range(tokens.middles[slot], tokens.offsets[slot + 1]):
            vector = before.vectors[row - before.first]
            one[0] = tokens.documents[row]
            count = _mean_before(slot, one, 1, nothing, words, tokens, before, vectors, mean, spare, used, parts)
            if count < _LEAST_PREFIXES or not _has_vector(before, row):
                continue
            size = size_class(max(words.offsets[row + 1] - words.offsets[row] - 1, 1))
            products[size] += dot(vector, mean)
            squares[size] += dot(mean, mean) - _variance(mean, count) / count
    return products, squares


@compiled
def _pair_sums(
    sets: Any, owners: Any, words: VectorWords, tokens: LastTokens, before: TextBefore, excluded: ExcludedWords,
    vectors: WordVectors,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return, for each set of prefixes, S, the factor that scales its deviation, and its prefixes by size class.

    `sets` [sets, t] are rows of prefixes, -1 for none. `owners` [sets] are the memories whose words are excluded.
    """
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
    sizes, times, documents = np.empty(triggers, np.int64), np.empty(triggers, np.int64), np.empty(triggers, np.int64)
    taken, taken_squares = np.empty(triggers), np.empty(triggers)
    for m in range(memories):
        words_out = excluded.words[excluded.offsets[owners[m]] : excluded.offsets[owners[m] + 1]]
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
            count = 0 if slot < 0 else prefix_vector_(words, row, words_out, True, vectors, vector, used, parts)
            if count == 0:
                continue
            group = 0
            while group < groups and slots[group] != slot:
                group += 1
            if group == groups:
                slots[group], times[group], taken[group], taken_squares[group] = slot, 0, 0.0, 0.0
                sizes[group] = _mean_before(
                    slot, documents, prefixes, words_out, words, tokens, before, vectors, means[group],
                    spare, spare_used, spare_parts,
                )  # fmt: skip
                groups += 1
            if sizes[group] < _LEAST_PREFIXES:
                continue
            size = size_class(count)
            for i in range(dimensions):
                left[i] = vector[i] - before.amounts[size] * means[group, i]
                total[i] += left[i]
            squares += dot(left, left)
            times[group] += 1
            taken[group] += before.amounts[size]
            taken_squares[group] += before.amounts[size] ** 2
            filled += 1
            classes[m, size] += 1
            for i in range(count):
                all_words[word_count + i], all_parts[word_count + i] = used[i], parts[i]
            word_count += count
        same = _equal_words_(all_words, all_parts, word_count)
        bias, spread = 0.0, 0.0
        for group in range(groups):
            if times[group] > 0:
                k, n = times[group], sizes[group]
                pairs = (taken[group] ** 2 - taken_squares[group]) / 2
                bias += pairs * _variance(means[group], n) / n
                spread += k * (1 + k / n)
        sums[m] = (dot(total, total) - squares - same) / 2 - bias
        wider[m] = spread / filled if filled else 1.0
    return sums, wider, classes


@compiled_part
def _equal_words_(words: Any, parts: Any, count: int) -> float:
    """Return twice the contribution of equal words in different prefixes to the sum of cosines.

    Sorts `words` and `parts` in place.
    """
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
    """The coherence statistic and its null distribution for the triggers of one corpus."""

    words: VectorWords
    tokens: LastTokens
    before: TextBefore
    excluded: ExcludedWords
    vectors: WordVectors
    means: NDArray[np.float64]  # [size classes, size classes]: mean product of a pair of prefixes
    variances: NDArray[np.float64]
    # number of triggers -> sorted null statistics, and the mean of their excess over the 99th percentile
    null: dict[int, tuple[NDArray[np.float64], float]]

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
        """Estimate the null distribution. `rows` [memories, t] are the triggers, one per document."""
        random = np.random.default_rng([seed, 8])
        shape = (len(SIZES),) * 2
        before = TextBefore.of(words, tokens, vectors)
        coherence = cls(words, tokens, before, excluded, vectors, np.zeros(shape), np.ones(shape), {})
        memory, rank = np.nonzero(rows >= 0)
        if len(memory) < 2:
            return coherence
        drawn = random.integers(0, len(memory), (_PAIRS, 2))
        pairs = swap_prefixes(rows[memory[drawn], rank[drawn]], tokens, random)
        coherence.means[:], coherence.variances[:] = coherence._pair_moments(pairs, memory[drawn[:, 0]])
        packed = np.take_along_axis(rows, np.argsort(rows < 0, 1, kind="stable"), 1)  # move missing triggers to the end
        filled = (rows >= 0).sum(1)
        for size in sorted({size for size in _SIZES if size < rows.shape[1]} | {rows.shape[1]}):
            enough = np.flatnonzero(filled >= min(size, filled.max()))
            owners = random.choice(enough, NULL_SETS if size >= rows.shape[1] else FEWER_SETS)
            z, _ = coherence.z_scores(swap_prefixes(packed[owners, :size], tokens, random), owners)
            z.sort()
            bar = z[int(_TAIL * len(z))]
            coherence.null[size] = (z, float((z[z > bar] - bar).mean()) if (z > bar).any() else 1.0)
        return coherence

    def z_scores(
        self, sets: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return z and the number of prefixes with a vector, for each set of prefixes [sets, t]."""
        sums, wider, classes = self._pair_sums(sets, owners)
        pairs = classes[:, :, None] * classes[:, None, :]
        pairs -= classes[:, :, None] * np.eye(len(SIZES))
        pairs /= 2  # each pair was counted twice
        expected = (pairs * self.means).sum((1, 2))
        variance = (pairs * self.variances).sum((1, 2)) + 1e-12
        return (sums - expected) / (np.sqrt(variance) * wider), classes.sum(1).astype(np.int64)

    def _pair_sums(
        self, sets: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        texts = (self.words, self.tokens, self.before, self.excluded, self.vectors)
        sums, wider, classes = _pair_sums(sets, owners, *texts)
        return sums, wider, classes

    def _pair_moments(
        self, pairs: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the mean and variance of a . b over pairs of prefixes, by the size classes of the two prefixes."""
        sums, _, classes = self._pair_sums(pairs, owners)
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
        """Return the probability that swapped triggers are at least as coherent, or 1 below three prefixes."""
        p = np.ones(len(z))
        sizes = sorted(self.null)
        for size, following in zip(sizes, [*sizes[1:], np.iinfo(np.int64).max], strict=True):
            mask = (filled >= max(size, GROUNDED)) & (filled < following)
            null, excess = self.null[size]
            above = len(null) - np.searchsorted(null, z[mask], side="left")
            bar = null[int(_TAIL * len(null))]
            tail = (1 - _TAIL) * np.exp(-np.maximum(z[mask] - bar, 0) / excess)
            p[mask] = np.where(z[mask] > bar, tail, (above + 1) / (len(null) + 1))
        return p


BAR = 1.65
TOPICS = 3  # maximum number of topics per memory
BACKGROUND = 400  # number of random prefixes of each size class
SHOWN = 5
_ROUNDS = 3
_PRIOR = 200.0  # weight of the prior, as a number of words
_TYPICAL = 1.96  # minimum z-score of a topic's words
_NEAR = 0.15  # minimum cosine of a word with the topic
_SWAPPED = 8192  # approximate number of memories to test with swapped triggers
_WORTH = 0.15  # maximum p-value of coherence for which a topic is computed


@dataclass(frozen=True)
class SemanticTopic:
    """A topic of one memory."""

    members: int  # bit mask of trigger ranks
    words: tuple[int, ...]  # rows of WordVectors, most typical first
    share: float  # share of random prefixes that are as close to the direction as the members are
    direction: NDArray[np.float32]  # unit length
    q: float = 0.0


@dataclass(frozen=True, eq=False)
class BackgroundVectors:
    """The vectors of random prefixes, by size class."""

    vectors: list[NDArray[np.float32]]  # by size class: [prefixes, dimensions]

    @classmethod
    def draw(cls, background: VectorWords, vectors: WordVectors, seed: int) -> BackgroundVectors:
        sizes = np.diff(background.offsets)
        classes = np.searchsorted(SIZES, np.maximum(sizes, 1), side="right") - 1
        random = np.random.default_rng([seed, 9])
        by_class = []
        for number in range(len(SIZES)):
            rows = np.flatnonzero((classes == number) & (sizes > 0))
            rows = random.choice(rows, min(BACKGROUND, len(rows)), replace=False) if len(rows) else rows
            unit, counts = prefix_vectors(background, vectors, rows, drop_last=False)
            by_class.append(unit[counts > 0])
        return cls(by_class)

    def bars(self, direction: NDArray[Any]) -> tuple[NDArray[np.float64], float]:
        """Return the minimum cosine of members for each size class, and the share of random prefixes above it."""
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


def _find_topic(
    prefixes: VectorWords,
    vectors: WordVectors,
    rows: NDArray[np.int64],
    excluded: ExcludedWords,
    memory: int,
    background: BackgroundVectors,
) -> SemanticTopic | None:
    """Return the topic of a memory with coherent triggers, or None if it has fewer than three triggers or words."""
    words = np.empty((len(rows), WINDOW), np.int32)
    drop_last = np.array([bool(int(excluded.last[memory]) >> rank & 1) for rank in range(len(rows))])
    unit, counts = prefix_vectors(prefixes, vectors, np.ascontiguousarray(rows), drop_last, excluded.of(memory), words)
    classes = np.array([size_class(count) for count in counts.tolist()])
    members = counts > 0
    share = 1.0
    for _ in range(_ROUNDS):
        total = unit[members].sum(0)
        bars, share = background.bars(total / max(float(np.linalg.norm(total)), 1e-9))
        others = total[None, :] - unit * members[:, None]  # compare each prefix with the sum of the other prefixes
        close = (unit * others).sum(1) / np.maximum(np.linalg.norm(others, axis=1), 1e-9)
        members = (counts > 0) & (close > bars[classes])
        if members.sum() < GROUNDED:
            return None
    direction = unit[members].sum(0)
    direction = direction / max(float(np.linalg.norm(direction)), 1e-9)
    ranks = np.flatnonzero(members).tolist()
    typical = _typical_words(np.concatenate([words[rank, : counts[rank]] for rank in ranks]), vectors, direction)
    if len(typical) < GROUNDED:
        return None
    mask = sum(1 << rank for rank in ranks)
    return SemanticTopic(mask, tuple(typical[:SHOWN]), share, direction.astype(np.float32))


def _typical_words(words: NDArray[np.int32], vectors: WordVectors, direction: NDArray[Any]) -> list[int]:
    """Return the over-represented words that lie in the topic's direction, most typical first."""
    rows, times = np.unique(words, return_counts=True)
    prior = _PRIOR * vectors.shares[rows]
    total = times.sum() + _PRIOR
    log_odds = np.log((times + prior) / (total - times - prior))
    expected = np.log(vectors.shares[rows] / (1 - vectors.shares[rows]))
    z = (log_odds - expected) / np.sqrt(1 / (times + prior))
    near = vectors.vectors[rows] @ direction
    kept = (z > _TYPICAL) & (near > _NEAR)
    order = np.lexsort((rows, -z * near))
    return [int(rows[i]) for i in order if kept[i]]


@dataclass(frozen=True, eq=False)
class _TopicTest:
    """The inputs of the two tests of topics."""

    words: VectorWords
    vectors: WordVectors
    excluded: ExcludedWords
    background: BackgroundVectors
    documents: NDArray[np.int64]  # document of every prefix

    def run(
        self, p: NDArray[np.float64], memories: NDArray[np.int64], sets: NDArray[np.int64], held: Any, same: Any
    ) -> tuple[dict[int, SemanticTopic], NDArray[np.float64]]:
        """Return topics by index into `memories`, and the combined p-value of each memory, which is 1 without a topic.

        `p` are the p-values of coherence. `sets` [all memories, t], `held` and `same` [all memories, any] hold rows of
        prefixes, -1 for none.
        """
        topics, combined = {}, np.ones(len(memories))
        for i in np.flatnonzero(p <= _WORTH).tolist():
            m = int(memories[i])
            topic = _find_topic(self.words, self.vectors, sets[m], self.excluded, m, self.background)
            ranks = [] if topic is None else ranks_of(topic.members)
            if topic and len(set(self.documents[sets[m, ranks]].tolist())) >= GROUNDED:
                topics[i] = topic
                combined[i] = _combined(float(p[i]), self._held_out(topic, m, sets[m], held[m], same[m]))
        return topics, combined

    def _held_out(self, topic: SemanticTopic, m: int, triggers: Any, held: Any, same: Any) -> float | None:
        """Return the p-value of held-out triggers of other documents, or None if there are too few."""
        used = self.documents[triggers[triggers >= 0]]
        free = np.where((held >= 0) & ~np.isin(self.documents[np.maximum(held, 0)], used), held, -1)
        free = one_per_document(free[None], self.documents)[0]
        (mine, rows), (others, other_rows) = (self._nearness(topic, m, rows) for rows in (free, same))
        if len(mine) < ENOUGH or len(others) < ENOUGH:
            return None
        n, k = effective_size(rows), effective_size(other_rows)
        area = roc_area(mine, others)
        z = 0.0 if area is None else (area - 0.5) / math.sqrt((n + k + 1) / (12 * n * k))
        return math.erfc(z / math.sqrt(2)) / 2

    def _nearness(self, topic: SemanticTopic, m: int, rows: Any) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the cosines of prefixes with the topic, and the rows of these prefixes.

        Leaves out prefixes without a vector. Vectors exclude the words of the memory's shallow patterns.
        """
        rows = np.ascontiguousarray(rows[rows >= 0])
        unit, counts = prefix_vectors(self.words, self.vectors, rows, True, self.excluded.of(m))
        return (unit[counts > 0] @ topic.direction).astype(np.float64), rows[counts > 0]


def _combined(p: float, other: float | None) -> float:
    """Combine two independent p-values: the tail of chi-squared with 4 degrees of freedom at -2 log(p other)."""
    if other is None:
        return p
    product = max(p * other, 1e-300)
    return product * (1 - math.log(product))


def find_topics(
    texts: Texts,
    triggers: TriggerRows,
    shallow: Sequence[ShallowChoice],
    words: VectorWords,
    tokens: LastTokens,
    same: NDArray[np.int64],
    vectors: WordVectors,
    settings: PatternSettings,
    progress: Progress,
) -> tuple[dict[int, list[SemanticTopic]], NDArray[np.float64]]:
    """Return topics by row of TriggerRows, and whether each memory would have a topic with swapped triggers.

    The second result is nan for memories that were not tested with swapped triggers. `shallow` are the shallow
    patterns, and `same` are prefixes with the last tokens of held-out triggers (score). After a topic is found, the
    remaining triggers are tested again, for up to TOPICS topics per memory.
    """
    if len(vectors.vectors) == 0:
        return {}, np.zeros(len(triggers.rows))
    excluded = _words_of_patterns(shallow, vectors)
    rows = one_per_document(triggers.rows, texts.prefixes.documents)
    coherence = Coherence.calibrate(rows, words, tokens, excluded, vectors, settings.seed)
    background = BackgroundVectors.draw(VectorWords.of(texts.sample, vectors), vectors, settings.seed)
    test = _TopicTest(words, vectors, excluded, background, texts.prefixes.documents)
    topics_by_memory: dict[int, list[SemanticTopic]] = {}
    remaining, memories, cutoff = triggers.rows.copy(), np.arange(len(rows)), -1.0
    for turn in range(TOPICS):
        progress("topics", turn, TOPICS)
        p = coherence.p_values(*coherence.z_scores(np.where(remaining >= 0, rows, -1)[memories], memories))
        topics, p = test.run(p, memories, remaining, triggers.held, same)
        q = q_values(p, len(p))
        kept = [i for i in topics if q[i] <= settings.rate]
        cutoff = float(p[kept].max(initial=-1.0)) if turn == 0 else cutoff
        for i in kept:
            m, members = int(memories[i]), topics[i].members
            topics_by_memory.setdefault(m, []).append(replace(topics[i], q=float(q[i])))
            remaining[m, ranks_of(members)] = -1
        memories = memories[kept]
        if len(memories) == 0:
            break
    random = np.random.default_rng([settings.seed, 10])
    tested = np.arange(0, len(rows), max(len(rows) // _SWAPPED, 1))
    sets = np.full(rows.shape, -1)
    sets[tested] = swap_prefixes(rows[tested], tokens, random)
    p = coherence.p_values(*coherence.z_scores(sets[tested], tested))
    swapped = np.full(len(rows), np.nan)
    swapped[tested] = test.run(p, tested, sets, same[:, :HELD], same[:, HELD:])[1] <= cutoff
    return topics_by_memory, swapped


def _words_of_patterns(shallow: Sequence[ShallowChoice], vectors: WordVectors) -> ExcludedWords:
    """Return the words of endings and n-grams, and the prefixes whose last word is described by a shape."""
    rows = vectors.rows
    words: list[int] = []
    offsets, last = [0], []
    for memory in shallow:
        features = [(pattern.feature, pattern.members) for pattern in memory.patterns]
        words += sorted({int(rows[w]) for feature, _ in features for w in feature.words if w and rows[w] >= 0})
        offsets.append(len(words))
        at_end = 0
        for feature, members in features:
            at_end |= members if feature.is_of_last_word else 0
        last.append(at_end)
    flat: NDArray[np.int32] = np.array(words, np.int32)
    return ExcludedWords(flat, np.array(offsets, np.int64), np.array(last, np.uint64))
