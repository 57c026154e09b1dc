"""95% intervals of shares and of their differences, from counts alone.

Wilson's score interval for one share, Newcombe's for the difference of two; both stay sensible at 0 and 1, where a
bootstrap says nothing since every observation is alike. Knows numbers only.
"""

from __future__ import annotations

from math import sqrt

Z = 1.959964  # 95%, two-sided


def wilson(hits: float, total: float) -> tuple[float, float]:
    """Interval of the share hits / total; everything is possible where nothing was seen."""
    if total <= 0:
        return 0.0, 1.0
    share = hits / total
    centre = share + Z * Z / (2 * total)
    spread = Z * sqrt(share * (1 - share) / total + Z * Z / (4 * total * total))
    scale = 1 + Z * Z / total
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding must not leave the share outside


def share_difference(hits: float, total: float, other_hits: float, other_total: float) -> tuple[float, float]:
    """Interval of hits / total - other_hits / other_total for independent samples."""
    share, other = hits / total if total else 0.5, other_hits / other_total if other_total else 0.5
    low, high = wilson(hits, total)
    other_low, other_high = wilson(other_hits, other_total)
    difference = share - other
    below = sqrt((share - low) ** 2 + (other_high - other) ** 2)
    above = sqrt((high - share) ** 2 + (other - other_low) ** 2)
    return difference - below, difference + above
