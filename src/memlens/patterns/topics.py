"""Which of a coherent memory's prefixes belong to its topic, and which words say what it is about.

A prefix belongs if it is close to the mean of the others that belong: closer than random prefixes with as many words
are by far (their median plus BAR times the distance from the median to the 84th percentile). The words are those that
are over-represented in these prefixes against the corpus: log-odds with an informative Dirichlet prior, as a z-score,
among the words that lie in the topic's direction. At least three prefixes and three such words make a topic. Knows one
corpus' vectors and prefixes as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.patterns.background import GROUNDED
from memlens.patterns.coherence import LeftOut
from memlens.patterns.prefix_vectors import SIZES, VectorWords, prefix_vector_, size_class
from memlens.patterns.word_vectors import WordVectors

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
