"""95% intervals of shares and of their differences, from counts alone.

Wilson's score interval for one share, Newcombe's for the difference of two; both stay sensible at 0 and 1. Knows
numbers only. A bootstrap says nothing where every observation is alike; these intervals still do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

Z = 1.959964  # 95%, two-sided

Interval = tuple[float, float]


def wilson(hits: float, total: float) -> Interval:
    """Interval of the share hits / total; everything is possible where nothing was seen."""
    if total <= 0:
        return 0.0, 1.0
    share = hits / total
    centre = share + Z * Z / (2 * total)
    spread = Z * sqrt(share * (1 - share) / total + Z * Z / (4 * total * total))
    scale = 1 + Z * Z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def share_difference(hits: float, total: float, other_hits: float, other_total: float) -> Interval:
    """Interval of hits / total - other_hits / other_total for independent samples."""
    share, other = hits / total if total else 0.5, other_hits / other_total if other_total else 0.5
    low, high = wilson(hits, total)
    other_low, other_high = wilson(other_hits, other_total)
    difference = share - other
    below = sqrt((share - low) ** 2 + (other_high - other) ** 2)
    above = sqrt((high - share) ** 2 + (other - other_low) ** 2)
    return difference - below, difference + above


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
