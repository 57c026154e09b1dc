"""Vocabulary scores of many vectors, in blocks: highest and lowest tokens, softmax, entropy and ranks of each row.

A block is a C-ordered array [rows, vocabulary] with one row per vector, so that the whole matrix [memories, vocabulary]
is never in memory. Each row is read twice while it is in the cache:

1. Divide the row into n lanes, each of which contains every n-th token, and compute the maximum of each lane without
   branches. The k-th highest of these maxima is a lower bound of the k-th highest score. Only lanes whose maximum
   reaches this bound are read again, and only a few more than k scores are sorted. The lowest scores are found in the
   same way.
2. Compute the softmax, its entropy and the rank of the target.

Tokens are sorted by score (descending at the top, ascending at the bottom), then by id.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import uint64
from numpy.typing import NDArray

from memlens.compiling import compiled, compiled_part, sort_
from memlens.errors import SettingError
from memlens.models.lens import at_least_float32

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]
KeyArray = NDArray[np.uint64]

# Fewer lanes are sorted faster, and more lanes give a tighter bound. MOST_LANES maxima fit into the first-level cache.
# If a list has more entries than there are lanes, there is no bound and all scores are sorted.
_LANES_PER_PLACE, _LEAST_LANES, MOST_LANES = 2, 128, 1024
_BLOCK_BYTES = 104 << 20  # large enough for a fast matrix product; every block uses the same memory
_LEAST_ROWS = 128  # minimum number of rows; with fewer, reading the embedding takes longer than the product
SCORE_BINS = 40
_STEP = 64  # number of parallel sums; it is fixed so that results do not depend on the processor's vector width
_GROUP = 32  # number of steps that are summed in float32 before this sum is added to a float64 total
_LOW, _SHIFT = uint64(0xFFFFFFFF), uint64(32)
_SIGN, _ALL = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)

# exp(x) = 2^n exp(r), where n is x / ln 2, rounded by adding 1.5 * 2^23, and exp(r) is a series up to r^7. The compiler
# can vectorize this formula, unlike the library function exp. The relative error is below 1e-7.
_LEAST = np.float32(-87.0)  # exp underflows below this
_LOG2_E, _ROUND = np.float32(1.44269504), np.float32(12582912.0)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
_C5, _C6, _C7 = np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)
_ZERO, _ONE = np.float32(0), np.float32(1)


class Ends(NamedTuple):
    """The k highest and the k lowest tokens of each row, the most extreme first."""

    top: IntArray  # [rows, k] int32
    top_scores: FloatArray  # [rows, k] float32
    bottom: IntArray  # [rows, k] int32
    bottom_scores: FloatArray  # [rows, k] float32

    @classmethod
    def empty(cls, rows: int, k: int) -> "Ends":
        shape = (rows, k)
        return cls(
            np.empty(shape, np.int32),
            np.empty(shape, np.float32),
            np.empty(shape, np.int32),
            np.empty(shape, np.float32),
        )


class Softmax(NamedTuple):
    """The softmax of each row: p(token) = exp(score - highest) / total."""

    highest: FloatArray  # [rows] float32
    total: FloatArray  # [rows] float64
    entropy: FloatArray  # [rows] float64, in nats
    above: IntArray  # [rows] int64: number of tokens with a higher score than the target; -1 without a target

    def p(self, scores: FloatArray) -> NDArray[np.float64]:
        """Return the probabilities that belong to scores [rows, n] of the same rows."""
        probabilities: NDArray[np.float64] = (
            np.exp(scores.astype(np.float64) - self.highest[:, None]) / self.total[:, None]
        )
        return probabilities


def find_ends(scores: FloatArray, k: int, pool: ThreadPoolExecutor | None = None) -> Ends:
    """Return the k highest and lowest tokens of each row of `scores`, float32 [rows, vocabulary]; k <= vocabulary."""
    ends = Ends.empty(len(scores), k)
    _in_parts(pool, len(scores), lambda first, last: _find_ends_(scores, first, last, ends))
    return ends


def read_softmax(scores: FloatArray, ends: Ends, targets: IntArray, pool: ThreadPoolExecutor | None = None) -> Softmax:
    """Return the softmax of every row. `targets` [rows] are the tokens to rank, -1 for none."""
    rows = len(scores)
    softmax = Softmax(ends.top_scores[:, 0].copy(), np.empty(rows), np.empty(rows), np.full(rows, -1, np.int64))
    targets = np.ascontiguousarray(targets, np.int32)
    _in_parts(pool, rows, lambda first, last: _read_softmax_(scores, first, last, targets, softmax))
    return softmax


def count_above(scores: FloatArray, tokens: IntArray, pool: ThreadPoolExecutor | None = None) -> IntArray:
    """Return, for each row, the number of tokens with a higher score than the given token, or -1 for token -1."""
    above = np.full(len(scores), -1, np.int64)
    tokens = np.ascontiguousarray(tokens, np.int32)
    _in_parts(pool, len(scores), lambda first, last: _count_above_(scores, first, last, tokens, above))
    return above


def count_scores(scores: FloatArray, ends: Ends, pool: ThreadPoolExecutor | None = None) -> IntArray:
    """Return the number of tokens per bin of scores, [rows, SCORE_BINS].

    The bins of a row have equal width and range from its lowest to its highest score. If all scores of a row are equal,
    all its tokens are in the first bin.
    """
    counts = np.zeros((len(scores), SCORE_BINS), np.int32)
    _in_parts(pool, len(scores), lambda first, last: _count_scores_(scores, first, last, ends, counts))
    return counts


def _in_parts(pool: ThreadPoolExecutor | None, rows: int, work: Callable[[int, int], None]) -> None:
    if pool is None:
        work(0, rows)
        return
    edges = np.linspace(0, rows, pool._max_workers + 1).astype(int).tolist()
    list(pool.map(work, edges[:-1], edges[1:]))


@compiled_part
def _lane_extremes_(row: FloatArray, high: FloatArray, low: FloatArray) -> None:
    lanes = high.shape[0]
    for c in range(lanes):  # loops compile faster than array assignments
        high[c], low[c] = row[c], row[c]
    for first in range(lanes, row.shape[0], lanes):
        part = row[first : min(first + lanes, row.shape[0])]
        for c in range(part.shape[0]):
            score = part[c]
            high[c] = score if score > high[c] else high[c]
            low[c] = score if score < low[c] else low[c]


@compiled_part
def _key(score: np.float32, token: int) -> int:
    """Return a sort key that is larger for higher scores and, among equal scores, for lower token ids.

    0.0 and -0.0 are equal scores.
    """
    bits = np.float32(score + _ZERO).view(np.uint32)
    ordered = bits ^ _ALL if bits & _SIGN else bits | _SIGN
    return (uint64(ordered) << _SHIFT) | (_LOW - uint64(token))


@compiled_part
def _find_end_(
    row: FloatArray,
    extremes: FloatArray,  # [lanes]: maximum of sign * row in each lane
    sign: np.float32,
    ordered: FloatArray,  # [lanes]: work space
    keys: KeyArray,  # [vocabulary]: work space
    tokens: IntArray,  # [k]: receives the tokens
    scores: FloatArray,  # [k]: receives the scores of these tokens
) -> None:
    k, lanes = tokens.shape[0], extremes.shape[0]
    for lane in range(lanes):
        ordered[lane] = extremes[lane]
    sort_(ordered, lanes)
    least = ordered[lanes - k] if k <= lanes else np.float32(-np.inf)
    count = 0
    for lane in range(lanes):
        if extremes[lane] >= least:
            for token in range(lane, row.shape[0], lanes):
                if sign * row[token] >= least:
                    keys[count] = _key(sign * row[token], token)
                    count += 1
    sort_(keys, count)
    for place in range(k):
        tokens[place] = _LOW - (keys[count - 1 - place] & _LOW)
        scores[place] = row[tokens[place]]


@compiled
def _find_ends_(scores: FloatArray, first: int, last: int, ends: Ends) -> None:
    lanes = min(max(_LEAST_LANES, _LANES_PER_PLACE * ends.top.shape[1]), MOST_LANES, scores.shape[1])
    high, low, ordered = np.empty(lanes, np.float32), np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    keys = np.empty(scores.shape[1], np.uint64)
    for r in range(first, last):
        _lane_extremes_(scores[r], high, low)
        _find_end_(scores[r], high, _ONE, ordered, keys, ends.top[r], ends.top_scores[r])
        for lane in range(lanes):
            low[lane] = -low[lane]
        _find_end_(scores[r], low, -_ONE, ordered, keys, ends.bottom[r], ends.bottom_scores[r])


@compiled_part(inline="always")
def _exp(x: np.float32) -> np.float32:
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    series = ((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2
    power = (np.float32(shifted).view(np.int32) << np.int32(23)) + np.int32(0x3F800000)
    return (series * r * r + r + _ONE) * np.int32(power).view(np.float32)


@compiled_part
def _add_step_(
    part: FloatArray,
    highest: np.float32,
    target: np.float32,
    total: FloatArray,
    weighted: FloatArray,
    above: FloatArray,
) -> None:
    for c in range(part.shape[0]):
        score = part[c]
        x = score - highest
        x = x if x > _LEAST else _LEAST
        e = _exp(x)
        total[c] += e
        weighted[c] += e * x
        above[c] += _ONE if score > target else _ZERO


@compiled
def _read_softmax_(scores: FloatArray, first: int, last: int, targets: IntArray, softmax: Softmax) -> None:
    total, weighted, above = np.empty(_STEP, np.float32), np.empty(_STEP, np.float32), np.empty(_STEP, np.float32)
    vocabulary = scores.shape[1]
    for r in range(first, last):
        row, highest = scores[r], softmax.highest[r]
        target = row[targets[r]] if targets[r] >= 0 else highest
        all_total, all_weighted, all_above = 0.0, 0.0, np.int64(0)
        for group in range(0, vocabulary, _STEP * _GROUP):
            total[:], weighted[:], above[:] = 0, 0, 0
            end = min(group + _STEP * _GROUP, vocabulary)
            for step in range(group, end, _STEP):
                _add_step_(row[step : min(step + _STEP, end)], highest, target, total, weighted, above)
            for c in range(_STEP):
                all_total += total[c]
                all_weighted += weighted[c]
                all_above += np.int64(above[c])
        softmax.total[r] = all_total
        softmax.entropy[r] = np.log(all_total) - all_weighted / all_total
        if targets[r] >= 0:
            softmax.above[r] = all_above


@compiled
def _count_above_(scores: FloatArray, first: int, last: int, tokens: IntArray, above: IntArray) -> None:
    for r in range(first, last):
        if tokens[r] >= 0:
            row, target, count = scores[r], scores[r, tokens[r]], np.int64(0)
            for token in range(row.shape[0]):
                count += row[token] > target
            above[r] = count


@compiled
def _count_scores_(scores: FloatArray, first: int, last: int, ends: Ends, counts: IntArray) -> None:
    bins = counts.shape[1]
    for r in range(first, last):
        row, own, low = scores[r], counts[r], ends.bottom_scores[r, 0]
        spread = ends.top_scores[r, 0] - low
        scale = np.float32(bins) / spread if spread > _ZERO else _ZERO
        for token in range(row.shape[0]):
            x = (row[token] - low) * scale
            own[np.int32(x) if x >= _ZERO and x < bins else bins - 1] += (
                1  # the highest score and NaN go to the last bin
            )


def rows_per_block(vocabulary: int) -> int:
    """Return the number of rows of float32 scores in one block."""
    return max(_LEAST_ROWS, _BLOCK_BYTES // (4 * vocabulary))


Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (vectors [rows, d], output array) -> scores


def score_blocks(vectors: torch.Tensor, score: Score, vocabulary: int) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Yield blocks of rows with their scores [rows, vocabulary]. Each block overwrites the scores of the last block."""
    step = min(rows_per_block(vocabulary), len(vectors))
    place = torch.empty(step, vocabulary, device=vectors.device, dtype=at_least_float32(vectors[:0]).dtype)
    for first in range(0, len(vectors), step):
        part = slice(first, min(first + step, len(vectors)))
        yield part, _scored(vectors[part], score, place[: part.stop - part.start])


@torch.inference_mode()
def _scored(vectors: torch.Tensor, score: Score, place: torch.Tensor) -> NDArray[np.float32]:
    scores: NDArray[np.float32] = score(vectors, place).to("cpu", torch.float32).contiguous().numpy()
    return scores


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Run torch and the compiled loops with this number of threads inside the block."""
    if count < 1:
        raise SettingError(f"--threads is {count}; it must be 1 or more")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def thread_pool() -> Iterator[ThreadPoolExecutor | None]:
    """Yield a pool with as many threads as torch uses, or None if torch uses only one thread."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield None
        return
    with ThreadPoolExecutor(threads) as pool:
        yield pool
