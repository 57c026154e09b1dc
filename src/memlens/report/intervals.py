"""95% intervals of means and differences of numbers that have one each. Knows numbers only; shares are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from memlens.experiments.shares import Z


def mean_of(intervals: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Mean of independent (estimate, low, high), with the interval that their widths imply."""
    count = len(intervals)
    estimate = sum(value for value, _, _ in intervals) / count
    error = sqrt(sum(((high - low) / (2 * Z)) ** 2 for _, low, high in intervals)) / count
    return estimate, estimate - Z * error, estimate + Z * error


def difference_of(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float, float]:
    """one - other for independent (estimate, low, high)."""
    error = sqrt(((one[2] - one[1]) / (2 * Z)) ** 2 + ((other[2] - other[1]) / (2 * Z)) ** 2)
    estimate = one[0] - other[0]
    return estimate, estimate - Z * error, estimate + Z * error
