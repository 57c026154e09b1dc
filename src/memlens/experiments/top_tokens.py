"""The token with the highest score of each row, in one branch-free look; also of a weighted sum of two rows.

Lanes (tokens that lie LANES apart) are what the compiler turns into vectors; only lanes that reach the highest score
are looked at again, so that of equal scores the lowest token id is found. Knows arrays only.
"""

from __future__ import annotations

import numpy as np

from memlens.compiled import compiled
from memlens.values.rows import FloatArray, IntArray

LANES = 256  # the highest of all lanes fit the first-level cache
_ONE, _ZERO = np.float32(1), np.float32(0)


@compiled
def _top_of(row: FloatArray, best: FloatArray) -> int:
    """The lowest token with the highest score; -1 where there is none, since scores are not finite."""
    lanes = best.shape[0]
    best[:] = row[:lanes]
    for start in range(lanes, row.shape[0], lanes):
        part = row[start : min(start + lanes, row.shape[0])]
        for c in range(part.shape[0]):
            best[c] = part[c] if part[c] > best[c] else best[c]
    most = best[0]
    for c in range(lanes):
        most = best[c] if best[c] > most else most
    if not np.isfinite(most):
        return -1
    lowest = row.shape[0]
    for c in range(lanes):
        if best[c] == most:
            token = c
            while row[token] != most:
                token += lanes
            lowest = min(lowest, token)
    return lowest


@compiled
def find_top_(scores: FloatArray, first: int, last: int, tokens: IntArray) -> None:
    """Fill tokens [rows] from first to last for scores [rows, vocabulary] float32."""
    best = np.empty(min(LANES, scores.shape[1]), np.float32)
    for r in range(first, last):
        tokens[r] = _top_of(scores[r], best)


@compiled
def find_top_of_sum_(
    left: FloatArray,  # [rows, vocabulary]
    right: FloatArray,  # [rows, vocabulary]
    constant: FloatArray,  # [vocabulary]
    weights: FloatArray,  # [rows, 3]
    first: int,
    last: int,
    tolerance: float,  # of the sum's highest number in size
    tokens: IntArray,  # [rows] out; -1 where another token is within the tolerance of the highest
) -> None:
    vocabulary = left.shape[1]
    best, total = np.empty(min(LANES, vocabulary), np.float32), np.empty(vocabulary, np.float32)
    for r in range(first, last):
        a, b = left[r], right[r]
        u, v, w = weights[r, 0], weights[r, 1], weights[r, 2]
        for c in range(vocabulary):
            total[c] = a[c] * u + b[c] * v + constant[c] * w
        token = _top_of(total, best)
        if token >= 0:
            size = max(abs(total[token]), abs(a[token] * u), abs(b[token] * v))
            bar = np.float32(total[token] - np.float32(tolerance) * size)
            close = _ZERO
            for c in range(vocabulary):
                close += _ONE if total[c] >= bar else _ZERO
            token = token if close < 2 else -1
        tokens[r] = token
