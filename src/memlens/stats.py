"""Intervals, contrasts, binomial tails and false discovery rates.

All intervals are 95%:

    share                  Wilson, https://doi.org/10.1080/01621459.1927.10502953
    paired shares          Bonett and Price, https://doi.org/10.3102/1076998611411915
    mean                   Student's t below 30 observations, otherwise a studentized bootstrap
    median                 Hettmansperger and Sheather, https://doi.org/10.1016/0167-7152(86)90021-0
    weighted sum           Zou and Donner, https://doi.org/10.1002/sim.3095
    area under the ROC     Newcombe's method 5, https://doi.org/10.1002/sim.2324
    correlation            Fisher

The random numbers of a bootstrap depend only on the seed, the experiment and the part (see `generator`). Distributions
come from scipy.special, which is imported where it is used. Importing scipy.stats would add half a second to a command.
"""

import zlib
from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float | None, float | None]

RESAMPLES = 1000
FEW = 30  # with fewer observations, Student's t gives the interval of a mean
Z = 1.959964  # quantile of a two-sided 95% interval
ONE_SIDED = 1.645  # quantile of a one-sided 95% bound
_TAIL = 0.025
_DRAWN_AT_ONCE = 1 << 21  # maximum number of random numbers in memory at once


class Estimate(NamedTuple):
    """A number with the bounds of its interval. For numbers from the paper, which have no interval, all are equal."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Estimate":
        low, high = sorted((self.low * factor, self.high * factor))
        return Estimate(self.value * factor, low, high)

    def minus(self, number: float) -> "Estimate":
        """Return the estimate minus an exact number."""
        return Estimate(self.value - number, self.low - number, self.high - number)

    def widened(self, comparisons: int) -> "Estimate":
        """Return the estimate with a simultaneous interval for several comparisons (Bonferroni)."""
        factor = critical(comparisons) / Z
        return Estimate(
            self.value, self.value - factor * (self.value - self.low), self.value + factor * (self.high - self.value)
        )


def critical(comparisons: int = 1) -> float:
    """Return the normal quantile of simultaneous 95% intervals for several comparisons (Bonferroni)."""
    from scipy.special import ndtri

    return Z if comparisons == 1 else float(-ndtri(_TAIL / comparisons))


def upper_share(counts: NDArray[Any], total: int) -> NDArray[np.float64]:
    """Return the upper 95% bound of the share counts / total. The bound exceeds 0 even if the count is 0."""
    counts = np.asarray(counts, np.float64)
    return np.minimum((counts + 1 + ONE_SIDED * np.sqrt(counts + 1)) / (total + 1), 1.0)


def binomial_tail(k: Any, t: Any, f: Any) -> NDArray[np.float64]:
    """Return P(X >= k) for X ~ Binomial(t, f), elementwise.

    This is the probability that at least k of a memory's t triggers share a feature that a random prefix has with
    probability f. If f differs between triggers, the mean of f gives an upper bound.
    """
    from scipy.special import bdtrc

    tail: NDArray[np.float64] = bdtrc(np.asarray(k) - 1, np.asarray(t), np.asarray(f, np.float64))
    return tail


def q_values(p: NDArray[np.float64], hypotheses: int) -> NDArray[np.float64]:
    """Return the lowest false discovery rate at which each p-value is accepted (Benjamini and Hochberg).

    `hypotheses` may be larger than the number of p-values. The remaining hypotheses are assumed to have p = 1.
    """
    order = np.argsort(p, kind="stable")
    multiples = p[order] * hypotheses / np.arange(1, len(p) + 1)
    lowest = np.minimum.accumulate(multiples[::-1])[::-1]
    q = np.empty(len(p))
    q[order] = np.minimum(lowest, 1.0)
    return q


def decoy_q_values(numbers: NDArray[Any], decoys: NDArray[Any]) -> NDArray[np.float64]:
    """Return the lowest false discovery rate at which each number is accepted, estimated from decoys.

    Decoys are numbers drawn under the null hypothesis. The rate at a threshold is the number of false positives that
    the decoys predict, divided by the count of `numbers` at or above the threshold. The number of decoys at or above
    the threshold is increased by one (Barber and Candès, https://doi.org/10.1214/15-AOS1337).

    Raises:
        ValueError: A number is NaN.
    """
    if np.isnan(numbers).any() or np.isnan(decoys).any():
        raise ValueError("NaN cannot be ordered")
    order = np.argsort(numbers, kind="stable")
    ascending, decoys = numbers[order], np.sort(decoys)
    above = len(numbers) - np.searchsorted(ascending, ascending, "left")
    expected = (1 + len(decoys) - np.searchsorted(decoys, ascending, "left")) * len(numbers) / len(decoys)
    q = np.empty(len(numbers))
    q[order] = np.minimum(np.minimum.accumulate(expected / above), 1.0)
    return q


def generator(seed: int, experiment: str, part: int = 0) -> np.random.Generator:
    """Return an independent random generator for one part (a layer, a bin) of an experiment."""
    return np.random.default_rng([seed, zlib.crc32(experiment.encode()), part])


def draw(candidates: NDArray[Any], sample: int | None, random: np.random.Generator) -> NDArray[Any]:
    """Return a random sample of the candidates in their original order. If `sample` is None, return all of them."""
    if sample is None or sample >= len(candidates):
        return candidates
    return candidates[np.sort(random.choice(len(candidates), sample, replace=False))]


def share_interval(hits: float, count: float) -> Interval:
    """Return Wilson's interval of the share hits / count, or (None, None) if count is 0."""
    return wilson(hits, count) if count else (None, None)


def wilson(hits: float, total: float, z: float = Z) -> tuple[float, float]:
    """Return Wilson's interval of the share hits / total, or (0, 1) if total is 0."""
    if total <= 0:
        return 0.0, 1.0
    share = hits / total
    center = share + z * z / (2 * total)
    spread = z * sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    low, high = (center - spread) / scale, (center + spread) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding must not exclude the share itself


def paired_interval(first: NDArray[np.bool_], second: NDArray[np.bool_], comparisons: int = 1) -> Interval:
    """Return the interval of a difference of two shares, `first` minus `second`, over the same observations [n]."""
    if len(first) == 0:
        return None, None
    total = len(first) + 2
    gain_share, loss_share = (int((first & ~second).sum()) + 1) / total, (int((second & ~first).sum()) + 1) / total
    spread = critical(comparisons) * sqrt(max(gain_share + loss_share - (gain_share - loss_share) ** 2, 0) / total)
    return max(gain_share - loss_share - spread, -1.0), min(gain_share - loss_share + spread, 1.0)


def mean_interval(numbers: NDArray[Any], random: np.random.Generator) -> Interval:
    """Return the interval of the mean of numbers [n], or (None, None) if there are fewer than two or all are equal."""
    count = len(numbers)
    if count < 2:
        return None, None
    numbers = np.asarray(numbers, np.float64)
    if np.ptp(numbers) == 0:
        return None, None
    mean, error = float(numbers.mean()), float(numbers.std(ddof=1)) / sqrt(count)
    if count < FEW:
        from scipy.special import stdtrit

        spread = float(stdtrit(count - 1, 1 - _TAIL)) * error
        return mean - spread, mean + spread
    at_once = max(_DRAWN_AT_ONCE // count, 1)
    distances = [
        _distances(numbers[random.integers(0, count, (min(at_once, RESAMPLES - done), count))], mean)
        for done in range(0, RESAMPLES, at_once)
    ]
    low, high = np.percentile(np.concatenate(distances), [100 * _TAIL, 100 - 100 * _TAIL])
    return mean - float(high) * error, mean - float(low) * error


def _distances(resamples: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    """Return the distance between the mean of each resample [resamples, n] and `mean`, in standard errors.

    Resamples in which all numbers are equal are left out.
    """
    errors = resamples.std(1, ddof=1) / sqrt(resamples.shape[1])
    is_spread = errors > 0
    distances: NDArray[np.float64] = (resamples.mean(1)[is_spread] - mean) / errors[is_spread]
    return distances


def mean_estimate(
    numbers: NDArray[Any], random: np.random.Generator
) -> tuple[float, float | None, float | None] | None:
    """Return the mean of numbers [n] and its interval, or None if there are no numbers."""
    return (float(np.mean(numbers)), *mean_interval(numbers, random)) if len(numbers) else None


def ratio_estimate(
    parts: NDArray[Any],
    wholes: NDArray[Any],
    random: np.random.Generator,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> Estimate | None:
    """Return sum(parts) / sum(wholes) over observations [n] with its interval, or None if the interval is unknown.

    If all observations have the same ratio, the interval is Wilson's, scaled to the `bounds` of the ratio. Without
    `bounds`, the interval is then unknown.
    """
    whole, count = float(np.sum(wholes)), int(np.count_nonzero(wholes))
    if count < 2:
        return None
    ratio = float(np.sum(parts)) / whole
    moves = (parts - ratio * wholes) * (len(wholes) / whole)  # influence of each observation on the ratio
    if np.abs(moves).max() < 1e-12:
        if bounds is None:
            return None
        lowest, highest = bounds
        edges = wilson((ratio - lowest) / (highest - lowest) * count, count)
        below, above = (lowest + edge * (highest - lowest) for edge in edges)
        return Estimate(ratio, min(below, ratio), max(above, ratio))
    low, high = mean_interval(ratio + moves, random)
    return None if low is None or high is None else Estimate(ratio, low, high)


def median_interval(numbers: NDArray[Any]) -> Interval:
    """Return the interval of the median of numbers [n], interpolated between order statistics.

    Returns (None, None) for fewer than six numbers, because even the range from minimum to maximum then contains the
    median in less than 95% of cases.
    """
    from scipy.special import bdtr

    count = len(numbers)
    if 1 - 2 * 0.5**count < 1 - 2 * _TAIL:
        return None, None
    ascending = np.sort(np.asarray(numbers, np.float64))

    def coverage(place: int) -> float:
        """Return the probability that the median lies between the place-th smallest and the place-th largest number."""
        return float(1 - 2 * bdtr(place - 1, count, 0.5))

    place = 1
    while place + 1 <= count // 2 and coverage(place + 1) >= 1 - 2 * _TAIL:
        place += 1
    here, inside = coverage(place), coverage(place + 1)
    excess = (here - 1 + 2 * _TAIL) / (here - inside)
    share = (count - place) * excess / (place + (count - 2 * place) * excess)
    low = (1 - share) * ascending[place - 1] + share * ascending[place]
    high = (1 - share) * ascending[-place] + share * ascending[-place - 1]
    return float(low), float(high)


def contrast(weights: Sequence[float], estimates: Sequence[Estimate]) -> Estimate:
    """Return the weighted sum of independent estimates (Zou and Donner)."""
    value, below, above = 0.0, 0.0, 0.0
    for weight, estimate in zip(weights, estimates, strict=True):
        down, up = weight * (estimate.value - estimate.low), weight * (estimate.high - estimate.value)
        value += weight * estimate.value
        below += (down if weight > 0 else up) ** 2
        above += (up if weight > 0 else down) ** 2
    return Estimate(value, value - sqrt(below), value + sqrt(above))


def slope_weights(places: Sequence[float], sizes: Sequence[float] | None = None) -> list[float]:
    """Return weights such that the weighted sum of numbers at `places` is the slope of their regression line.

    `sizes` are the weights of the points in the regression.
    """
    x, w = np.asarray(places, np.float64), np.ones(len(places)) if sizes is None else np.asarray(sizes, np.float64)
    deviations = w * (x - (w * x).sum() / w.sum())
    weights: list[float] = (deviations / (deviations * x).sum()).tolist()
    return weights


def roc_area(ones: NDArray[Any], others: NDArray[Any]) -> float | None:
    """Return the area under the ROC curve: P(one > other), where ties count half. None if either array is empty."""
    return float(_placements(ones, others).mean()) if len(ones) and len(others) else None


def roc_estimate(ones: NDArray[Any], others: NDArray[Any]) -> Estimate:
    """Return the area A under the ROC curve with Newcombe's score interval (method 5).

    The interval contains every area a for which |A - a| <= Z sqrt(V(a)), where V is the variance of Hanley and McNeil
    with n = (ones + others) / 2 - 1:

        V(a) = a (1 - a) (1 + n (1 - a) / (2 - a) + n a / (1 + a)) / (ones * others)

    V depends on a rather than on the sample, so the interval does not collapse or jump when A reaches 1. If either
    array is empty, the estimate is 0.5 with the interval 0 to 1.
    """
    from scipy.optimize import brentq

    if not (len(ones) and len(others)):
        return Estimate(0.5, 0.0, 1.0)
    area = float(_placements(ones, others).mean())
    n, pairs = (len(ones) + len(others)) / 2 - 1, len(ones) * len(others)

    def excess(a: float) -> float:
        variance = a * (1 - a) * (1 + n * (1 - a) / (2 - a) + n * a / (1 + a)) / pairs
        return (area - a) ** 2 - Z**2 * variance

    tiny = 1e-12  # the excess also has roots at a = A = 0 and a = A = 1
    low = 0.0 if area < tiny else float(brentq(excess, 0, area - tiny))
    high = 1.0 if area > 1 - tiny else float(brentq(excess, area + tiny, 1))
    return Estimate(area, low, high)


def _placements(ones: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64]:
    """Return, for each of `ones`, the share of `others` that are smaller. Ties count half."""
    others = np.sort(others)
    below = np.searchsorted(others, ones, "left") + np.searchsorted(others, ones, "right")
    return np.asarray(below / (2 * len(others)))


def correlation_estimate(x: NDArray[Any], y: NDArray[Any]) -> Estimate:
    """Return Pearson's correlation with Fisher's interval.

    If an array is constant or there are fewer than four pairs, the estimate is 0 with the interval -1 to 1.
    """
    if len(x) < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Estimate(0.0, -1.0, 1.0)
    r = float(np.clip(np.corrcoef(x, y)[0, 1], -1, 1))
    with np.errstate(divide="ignore"):
        low, high = np.tanh(np.arctanh(r) + np.array([-1, 1]) * Z / sqrt(len(x) - 3))
    return Estimate(r, float(low), float(high))
