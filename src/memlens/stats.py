"""Intervals, bootstrap samples, binomial tails and false discovery rates.

All intervals are 95%. A bootstrap depends on the seed, the name and part it is for, and nothing else. Shares have
Wilson's score interval (https://doi.org/10.1080/01621459.1927.10502953) where all observations are alike, since every
resample would be the same; differences of independent shares have Newcombe's.
"""

import zlib
from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float | None, float | None]

RESAMPLES = 1000
Z = 1.959964  # standard deviations of a two-sided 95% interval
_UPPER = 1.645  # of a one-sided bound
_LOW, _HIGH = 2.5, 97.5


def upper_share(counts: NDArray[Any], total: int) -> NDArray[np.float64]:
    """Upper 95% bound of a share that was met `counts` times among `total`; above 0 also for what was never met."""
    counts = np.asarray(counts, np.float64)
    return np.minimum((counts + 1 + _UPPER * np.sqrt(counts + 1)) / (total + 1), 1.0)


def binomial_tail(k: Any, t: Any, f: Any) -> NDArray[np.float64]:
    """P(X >= k) for X ~ Binomial(t, f), element by element.

    It is the chance that at least k of a memory's t triggers share a feature that a random prefix has with
    probability f. Where f differs from trigger to trigger, the mean gives a heavier tail than the true sum.
    """
    from scipy.special import bdtrc

    found: NDArray[np.float64] = bdtrc(np.asarray(k) - 1, np.asarray(t), np.asarray(f, np.float64))
    return found


def q_values(p: NDArray[np.float64], hypotheses: int) -> NDArray[np.float64]:
    """For each p-value the lowest rate of false discoveries at which it is believed (Benjamini and Hochberg).

    Hypotheses that are not listed count with p = 1.
    """
    order = np.argsort(p, kind="stable")
    scaled = p[order] * hypotheses / np.arange(1, len(p) + 1)
    lowest = np.minimum.accumulate(scaled[::-1])[::-1]
    found = np.empty(len(p))
    found[order] = np.minimum(lowest, 1.0)
    return found


def generator(seed: int, experiment: str, part: int = 0) -> np.random.Generator:
    """Independent random numbers for one part (a layer, a bin) of one experiment, whatever else is computed."""
    return np.random.default_rng([seed, zlib.crc32(experiment.encode()), part])


def draw(candidates: NDArray[Any], sample: int | None, random: np.random.Generator) -> NDArray[Any]:
    """`sample` of the candidates without repetition, in their own order; all of them for None or where they are few."""
    if sample is None or sample >= len(candidates):
        return candidates
    return candidates[np.sort(random.choice(len(candidates), sample, replace=False))]


def rate_interval(hits: int, count: int, random: np.random.Generator) -> Interval:
    """Of a share: resampling yes and no with replacement is a binomial draw; Wilson's where all are alike."""
    if count == 0:
        return None, None
    if hits in (0, count):
        return wilson(hits, count)
    return _interval(random.binomial(count, hits / count, RESAMPLES) / count)


def paired_interval(one: NDArray[np.bool_], other: NDArray[np.bool_], random: np.random.Generator) -> Interval:
    """Of the share of `one` less that of `other`, which were seen in the same observations [n]: these are resampled.

    Where all differ alike nothing can be resampled; then Newcombe's interval, as if the two were independent.
    """
    if len(one) == 0:
        return None, None
    more, less = int((one & ~other).sum()), int((other & ~one).sum())
    same = len(one) - more - less
    if len(one) in (more, less, same):
        return share_difference(int(one.sum()), len(one), int(other.sum()), len(one))
    drawn = random.multinomial(len(one), np.array([more, less, same]) / len(one), RESAMPLES)
    return _interval((drawn[:, 0] - drawn[:, 1]) / len(one))


def interval(
    numbers: NDArray[Any], statistic: Callable[[NDArray[Any]], float], random: np.random.Generator
) -> Interval:
    """Of a statistic of one number a memory, such as np.mean or np.median."""
    if len(numbers) == 0:
        return None, None
    draws = [statistic(numbers[random.integers(0, len(numbers), len(numbers))]) for _ in range(RESAMPLES)]
    return _interval(np.array(draws))


def _interval(draws: NDArray[Any]) -> Interval:
    low, high = np.percentile(draws, [_LOW, _HIGH])
    return float(low), float(high)


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
