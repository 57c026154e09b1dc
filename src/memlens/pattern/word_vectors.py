"""Vectors of words and of prefixes, from the corpus alone: words that occur in the same stretches of text are near.

Words (latent semantic analysis; Deerwester et al., 1990):

 1. Count words in stretches of text: a few sentences of one paragraph, more of one file; at most words.TOKENS.
 2. Each cell of [stretches, words] is max(0, log(n_sw N / (n_s n_w))) / sqrt(n_s): positive pointwise mutual
    information, damped for long stretches, which say less about each of their words.
 3. Reduce to DIMENSIONS with a randomised singular value decomposition; centre; unit length.

Words in fewer than LEAST stretches have no vector (it would only say where they stood), nor have numbers and signs.

Prefixes: the mean of the words' vectors, each word once and weighted by its rarity, at unit length. The number of words
says how noisy that is: the prefix's size class.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from memlens.index.reader import Index
from memlens.parallel import compiled, compiled_part
from memlens.pattern.words import RUN, WINDOW, WORD, PrefixWords, Words, sampled_runs

DIMENSIONS = 96
LEAST = 3
NEAR, WIDE = 4, 16  # sentences in a stretch of a paragraph, and of a file
MOST_WORDS = 40_000
_FREQUENT = 1e-3  # of all words: weighs half (smooth inverse frequency)
_POWERS = 3
SIZES = np.array([1, 2, 3, 5, 9, 17])  # words with a vector: a prefix is in the last class whose bound it reaches

_QUERY = """
SELECT regexp_extract_all(text, $1) AS words, source FROM {corpus}
WHERE (sentence // $2) % $3 = $4 ORDER BY sentence
"""


class WordVectors(NamedTuple):
    """A vector and a weight for every word that has them; a tuple, so that compiled code takes it."""

    rows: NDArray[np.int32]  # [words of Words]: the word's row below, -1 for none
    numbers: NDArray[np.int64]  # [rows]: the word's number
    vectors: NDArray[np.float32]  # [rows, dimensions], unit length, centred
    weights: NDArray[np.float32]  # [rows]
    shares: NDArray[np.float64]  # [rows]: of all words of the corpus


def word_vectors(index: Index, words: Words, seed: int) -> WordVectors:
    cells = _count_cells(index, words, seed)
    chosen, weights, shares = _choose_words(cells, words)
    rows = np.full(len(words.texts), -1, np.int32)
    rows[chosen] = np.arange(len(chosen), dtype=np.int32)
    matrix = _information(cells, rows, len(chosen))
    vectors = _reduce(matrix, min(DIMENSIONS, max(len(chosen) // 4, 1)), seed)
    vectors -= vectors.mean(0) if len(vectors) else 0
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    return WordVectors(rows, chosen, vectors.astype(np.float32), weights, shares)


@dataclass(frozen=True, eq=False)
class _Cells:
    """The number of times that each word occurs in each stretch."""

    stretch: NDArray[np.int64]
    word: NDArray[np.int64]
    times: NDArray[np.int64]
    stretches: int


def _count_cells(index: Index, words: Words, seed: int) -> _Cells:
    every, which = sampled_runs(index, seed)
    near, wide = _Cutter(NEAR), _Cutter(WIDE)
    found = [np.zeros(0, np.int64)]
    for batch in index.batches(_QUERY, (WORD, RUN, every, which)):
        lists = batch.column("words")
        flat = lists.flatten().dictionary_encode()
        spelled = words.add(flat.dictionary.to_pylist())
        plain = np.asarray(words.plain, np.int64)[spelled][flat.indices.to_numpy(zero_copy_only=False)]
        sources = batch.column("source").to_pylist()
        sizes = lists.value_lengths().to_numpy(zero_copy_only=False)
        for number, cutter in enumerate((near, wide)):
            names = sources if cutter is near else [source.rpartition(":")[0] for source in sources]
            stretch = 2 * np.repeat(np.array([cutter.next(name) for name in names], np.int64), sizes) + number
            found.append((stretch << 20) | plain)
    keys, times = np.unique(np.concatenate(found), return_counts=True)
    return _Cells(keys >> 20, keys & ((1 << 20) - 1), times, 2 * max(near.stretch, wide.stretch) + 2)


class _Cutter:
    """Numbers stretches: so many sentences in a row of one source."""

    def __init__(self, sentences: int) -> None:
        self.sentences, self.stretch, self.inside, self.source = sentences, -1, 0, ""

    def next(self, source: str) -> int:
        is_new = source != self.source or self.inside == self.sentences or self.stretch < 0
        self.stretch, self.inside, self.source = self.stretch + is_new, 1 if is_new else self.inside + 1, source
        return self.stretch


def _choose_words(cells: _Cells, words: Words) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float64]]:
    """Words in enough stretches, in few enough to tell something; the most frequent where they are too many."""
    size = len(words.texts)
    near = cells.stretch % 2 == 0  # the wide stretches hold the same words once more
    stretches = np.bincount(cells.word[near], minlength=size)
    times = np.bincount(cells.word[near], cells.times[near], minlength=size)
    is_word = np.array([text.isalpha() and len(text) > 1 for text in words.texts])
    common = max(len(np.unique(cells.stretch[near])) / 4, LEAST)
    chosen = np.flatnonzero(is_word & (stretches >= LEAST) & (stretches <= common))
    chosen = np.sort(chosen[np.argsort(-times[chosen], kind="stable")][:MOST_WORDS])
    shares = times[chosen] / max(times.sum(), 1)
    return chosen, (_FREQUENT / (_FREQUENT + shares)).astype(np.float32), shares


def _information(cells: _Cells, rows: NDArray[np.int32], size: int) -> csr_matrix:
    """Damped positive pointwise mutual information, [stretches, words]."""
    column: NDArray[np.int64] = rows[cells.word].astype(np.int64)
    kept = column >= 0
    stretch, column, times = cells.stretch[kept], column[kept], cells.times[kept].astype(np.float64)
    in_stretch = np.bincount(stretch, times, minlength=cells.stretches)
    of_word = np.bincount(column, times, minlength=size)
    expected = in_stretch[stretch] * of_word[column] / max(times.sum(), 1)
    values = np.maximum(np.log(np.maximum(times, 1e-9) / expected), 0)
    values /= np.sqrt(np.maximum(in_stretch[stretch], 1))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(stretch, minlength=cells.stretches))])
    return csr_matrix((values, column, offsets), (cells.stretches, size))


def _reduce(matrix: csr_matrix, dimensions: int, seed: int) -> NDArray[np.float64]:
    """The words in the space of the leading singular vectors, scaled by the square root of the singular values."""
    width = matrix.shape[1]
    if width == 0:
        return np.zeros((0, 1))
    basis = np.random.default_rng([seed, 7]).standard_normal((width, min(dimensions + 8, width)))
    for _ in range(_POWERS):
        basis, _ = np.linalg.qr(matrix.T @ (matrix @ basis))
    projected = matrix @ basis  # [stretches, size]
    strengths, turns = np.linalg.eigh(projected.T @ projected)
    order = np.argsort(-strengths)[:dimensions]
    scale = np.maximum(strengths[order], 0) ** 0.25
    vectors: NDArray[np.float64] = (basis @ turns[:, order]) * scale
    return vectors


class VectorWords(NamedTuple):
    """The words of prefixes that have a vector, each once per prefix; a tuple, so that compiled code takes it."""

    rows: NDArray[np.int32]  # rows of WordVectors
    is_last: NDArray[np.bool_]  # does it stand nowhere but at the end?
    offsets: NDArray[np.int64]  # [prefixes + 1]

    @classmethod
    def of(cls, prefixes: PrefixWords, vectors: WordVectors) -> "VectorWords":
        return cls(*_vector_words(prefixes.words, prefixes.offsets, vectors.rows))


@compiled
def _vector_words(words: Any, offsets: Any, row_of: Any) -> tuple[Any, Any, Any]:
    rows, is_last = np.empty(len(words), np.int32), np.empty(len(words), np.bool_)
    found = np.zeros(len(offsets), np.int64)
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
        found[prefix + 1] = count
    return rows[:count].copy(), is_last[:count].copy(), found


@compiled_part
def dot(left: Any, right: Any) -> Any:
    """The product of two vectors, added up in order; an expression of arrays takes far longer to compile."""
    total = left[0] * right[0]
    for i in range(1, left.shape[0]):
        total += left[i] * right[i]
    return total


@compiled_part
def prefix_vector_(
    prefixes: VectorWords, prefix: int, excluded: Any, drop_last: bool, vectors: WordVectors,
    vector: Any, used: Any, parts: Any,
) -> int:  # fmt: skip
    """Write the unit vector, its words and their coefficients; how many words it has comes back (0: no vector)."""
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
    drop_last: NDArray[np.bool_],
    excluded: NDArray[np.int32] | None = None,
    words: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Unit vectors [rows, dimensions] of prefixes (-1 for none) and numbers of words [rows]; both 0 without a vector.

    `words` [rows, WINDOW] gets the rows of the words of each.
    """
    unit = np.empty((len(rows), vectors.vectors.shape[1]), np.float32)
    used = np.empty((1, WINDOW), np.int32) if words is None else words
    own = np.empty(0, np.int32) if excluded is None else excluded
    counts: NDArray[np.int64] = _prefix_vectors_(prefixes, rows, drop_last, own, vectors, unit, used)
    return unit, counts


@compiled_part
def size_class(count: int) -> int:
    found = 0
    while found + 1 < len(SIZES) and count >= SIZES[found + 1]:
        found += 1
    return found
