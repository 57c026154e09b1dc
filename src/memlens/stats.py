"""Intervals, contrasts, binomial tails and false discovery rates.

All intervals are 95%. Shares have Wilson's score interval (https://doi.org/10.1080/01621459.1927.10502953), differences
of paired shares that of Bonett and Price (https://doi.org/10.3102/1076998611411915), means Student's below 30
observations and a studentized bootstrap from there on, medians interpolated order statistics (Hettmansperger and
Sheather, https://doi.org/10.1016/0167-7152(86)90021-0). A sum of independent estimates with weights has the interval
that theirs imply (Zou and Donner, https://doi.org/10.1002/sim.3095), an area under the ROC curve that of DeLong et al.
(https://doi.org/10.2307/2531595), a correlation Fisher's. A bootstrap depends on the seed, the name and part
it is for, and nothing else.
"""

import zlib
from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float | None, float | None]

RESAMPLES = 1000
FEW = 30  # observations; of fewer, a mean has Student's interval
Z = 1.959964  # standard deviations of a two-sided 95% interval
ONE_SIDED = 1.645  # standard errors of a one-sided bound of 95%
_TAIL = 0.025
_DRAWN_AT_ONCE = 1 << 21  # numbers, so that resamples of a large sample fit the memory


class Estimate(NamedTuple):
    """A number with the ends of its interval; all three are the same for a number that the paper states."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Estimate":
        low, high = sorted((self.low * factor, self.high * factor))
        return Estimate(self.value * factor, low, high)

    def widened(self, comparisons: int) -> "Estimate":
        """The estimate with an interval that holds for so many at once (Bonferroni), widened like a normal one."""
        more = critical(comparisons) / Z
        return Estimate(
            self.value, self.value - more * (self.value - self.low), self.value + more * (self.high - self.value)
        )


def critical(comparisons: int = 1) -> float:
    """Standard deviations of intervals that hold for all of so many comparisons at once in 95% of cases."""
    from scipy.special import ndtri

    return Z if comparisons == 1 else float(-ndtri(_TAIL / comparisons))


def upper_share(counts: NDArray[Any], total: int) -> NDArray[np.float64]:
    """Upper 95% bound of a share that was met `counts` times among `total`; above 0 also for what was never met."""
    counts = np.asarray(counts, np.float64)
    return np.minimum((counts + 1 + ONE_SIDED * np.sqrt(counts + 1)) / (total + 1), 1.0)


def binomial_tail(k: Any, t: Any, f: Any) -> NDArray[np.float64]:
    """P(X >= k) for X ~ Binomial(t, f), element by element.

    It is the chance that at least k of a memory's t triggers share a feature that a random prefix has with
    probability f. Where f differs from trigger to trigger, the mean gives a heavier tail than the true sum.
    """
    from scipy.special import bdtrc

    tail: NDArray[np.float64] = bdtrc(np.asarray(k) - 1, np.asarray(t), np.asarray(f, np.float64))
    return tail


def q_values(p: NDArray[np.float64], hypotheses: int) -> NDArray[np.float64]:
    """The lowest rate of false discoveries at which each p-value is believed (Benjamini and Hochberg).

    Hypotheses that are not listed count with p = 1.
    """
    order = np.argsort(p, kind="stable")
    scaled = p[order] * hypotheses / np.arange(1, len(p) + 1)
    lowest = np.minimum.accumulate(scaled[::-1])[::-1]
    q = np.empty(len(p))
    q[order] = np.minimum(lowest, 1.0)
    return q


def decoy_q_values(numbers: NDArray[Any], decoys: NDArray[Any]) -> NDArray[np.float64]:
    """The same for numbers of which large ones are believed, where as many or more were drawn under the hypothesis.

    Of all thresholds that let a number pass, the lowest rate of decoys that pass among all that do; one decoy more is
    counted than was met (Barber and Candès, https://doi.org/10.1214/15-AOS1337).
    """
    if np.isnan(numbers).any() or np.isnan(decoys).any():
        raise ValueError("a number that is not known (NaN) has no place in an order")
    order = np.argsort(numbers, kind="stable")
    ascending, met = numbers[order], np.sort(decoys)
    above = len(numbers) - np.searchsorted(ascending, ascending, "left")
    expected = (1 + len(met) - np.searchsorted(met, ascending, "left")) * len(numbers) / len(met)
    q = np.empty(len(numbers))
    q[order] = np.minimum(np.minimum.accumulate(expected / above), 1.0)
    return q


def generator(seed: int, experiment: str, part: int = 0) -> np.random.Generator:
    """Independent random numbers for one part (a layer, a bin) of one experiment, whatever else is computed."""
    return np.random.default_rng([seed, zlib.crc32(experiment.encode()), part])


def draw(candidates: NDArray[Any], sample: int | None, random: np.random.Generator) -> NDArray[Any]:
    """`sample` of the candidates without repetition, in their own order; all of them for None or where they are few."""
    if sample is None or sample >= len(candidates):
        return candidates
    return candidates[np.sort(random.choice(len(candidates), sample, replace=False))]


def share_interval(hits: float, count: float) -> Interval:
    """Wilson's interval of the share hits / count; none where nothing was seen."""
    return wilson(hits, count) if count else (None, None)


def wilson(hits: float, total: float, z: float = Z) -> tuple[float, float]:
    """Interval of the share hits / total; everything is possible where nothing was seen."""
    if total <= 0:
        return 0.0, 1.0
    share = hits / total
    centre = share + z * z / (2 * total)
    spread = z * sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding must not leave the share outside


def paired_interval(first: NDArray[np.bool_], second: NDArray[np.bool_], comparisons: int = 1) -> Interval:
    """Interval of the share of `first` less that of `second`, seen in the same observations [n] (Bonett and Price)."""
    if len(first) == 0:
        return None, None
    total = len(first) + 2
    more, less = (int((first & ~second).sum()) + 1) / total, (int((second & ~first).sum()) + 1) / total
    spread = critical(comparisons) * sqrt(max(more + less - (more - less) ** 2, 0) / total)
    return max(more - less - spread, -1.0), min(more - less + spread, 1.0)


def mean_interval(numbers: NDArray[Any], random: np.random.Generator) -> Interval:
    """Interval of the mean of independent numbers [n]; none for fewer than two, or where all are equal."""
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


def _distances(drawn: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    """The distance of each resample's mean [resamples, n] from the true mean, in its own standard errors."""
    errors = drawn.std(1, ddof=1) / sqrt(drawn.shape[1])
    is_spread = errors > 0
    distances: NDArray[np.float64] = (drawn.mean(1)[is_spread] - mean) / errors[is_spread]
    return distances


def mean_estimate(
    numbers: NDArray[Any], random: np.random.Generator
) -> tuple[float, float | None, float | None] | None:
    """The mean of independent numbers [n] and its interval; None where there are none."""
    return (float(np.mean(numbers)), *mean_interval(numbers, random)) if len(numbers) else None


def ratio_estimate(
    parts: NDArray[Any],
    wholes: NDArray[Any],
    random: np.random.Generator,
    bounds: tuple[float, float] | None = (0.0, 1.0),  # of what the ratio can be
) -> Estimate | None:
    """sum(parts) / sum(wholes) over observations [n] that belong together inside; None where its error is unknown.

    Where all observations have the same ratio there is nothing to resample: the interval is Wilson's within the bounds,
    and without bounds nothing is known.
    """
    whole, observed = float(np.sum(wholes)), int(np.count_nonzero(wholes))
    if observed < 2:
        return None
    ratio = float(np.sum(parts)) / whole
    moves = (parts - ratio * wholes) * (len(wholes) / whole)  # of the ratio by each observation, so that it is a mean
    if np.abs(moves).max() < 1e-12:
        if bounds is None:
            return None
        least, most = bounds
        edges = wilson((ratio - least) / (most - least) * observed, observed)
        below, above = (least + edge * (most - least) for edge in edges)
        return Estimate(ratio, min(below, ratio), max(above, ratio))
    low, high = mean_interval(ratio + moves, random)
    return None if low is None or high is None else Estimate(ratio, low, high)


def median_interval(numbers: NDArray[Any]) -> Interval:
    """Interval of the median of independent numbers [n]: between the order statistics that have it in 95% of cases.

    None for fewer than six: even the smallest and the largest have it less often.
    """
    from scipy.special import bdtr

    count = len(numbers)
    if 1 - 2 * 0.5**count < 1 - 2 * _TAIL:
        return None, None
    ordered = np.sort(np.asarray(numbers, np.float64))

    def holds(place: int) -> float:  # how often the median lies within the so-many-th smallest and largest
        return float(1 - 2 * bdtr(place - 1, count, 0.5))

    place = 1
    while place + 1 <= count // 2 and holds(place + 1) >= 1 - 2 * _TAIL:
        place += 1
    here, inside = holds(place), holds(place + 1)
    excess = (here - 1 + 2 * _TAIL) / (here - inside)
    share = (count - place) * excess / (place + (count - 2 * place) * excess)
    low = (1 - share) * ordered[place - 1] + share * ordered[place]
    high = (1 - share) * ordered[-place] + share * ordered[-place - 1]
    return float(low), float(high)


def contrast(weights: Sequence[float], estimates: Sequence[Estimate]) -> Estimate:
    """The sum of independent estimates times their weights, with the interval that theirs imply."""
    value, below, above = 0.0, 0.0, 0.0
    for weight, estimate in zip(weights, estimates, strict=True):
        down, up = weight * (estimate.value - estimate.low), weight * (estimate.high - estimate.value)
        value += weight * estimate.value
        below += (down if weight > 0 else up) ** 2
        above += (up if weight > 0 else down) ** 2
    return Estimate(value, value - sqrt(below), value + sqrt(above))


def slope_weights(places: Sequence[float], sizes: Sequence[float] | None = None) -> list[float]:
    """Weights of numbers whose sum is the slope of a straight line through them; `sizes`: how much each counts."""
    x, w = np.asarray(places, np.float64), np.ones(len(places)) if sizes is None else np.asarray(sizes, np.float64)
    centred = w * (x - (w * x).sum() / w.sum())
    weights: list[float] = (centred / (centred * x).sum()).tolist()
    return weights


def roc_area(ones: NDArray[Any], others: NDArray[Any]) -> float | None:
    """The area under the ROC curve: the chance that one of `ones` is above one of `others`, ties counting half."""
    return float(_placements(ones, others).mean()) if len(ones) and len(others) else None


def roc_estimate(ones: NDArray[Any], others: NDArray[Any]) -> Estimate:
    """The area under the ROC curve with DeLong's interval, symmetric in its logit; 0 to 1 where one side is empty."""
    if not (len(ones) and len(others)):
        return Estimate(0.5, 0.0, 1.0)
    above, below = _placements(ones, others), 1 - _placements(others, ones)
    area = float(above.mean())
    fewer = min(len(ones), len(others))
    error = 0.0 if fewer < 2 else sqrt(above.var(ddof=1) / len(ones) + below.var(ddof=1) / len(others))
    if error == 0:  # none is seen, as where all are equal or told apart: as of a share of the smaller side
        return Estimate(area, *wilson(area * fewer, fewer))
    odds, spread = area / (1 - area), np.exp(Z * error / (area * (1 - area)))
    return Estimate(area, float(odds / (odds + spread)), float(odds * spread / (1 + odds * spread)))


def _placements(ones: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64]:
    """[ones]: the share of the others that is below each, ties counting half."""
    others = np.sort(others)
    below = np.searchsorted(others, ones, "left") + np.searchsorted(others, ones, "right")
    return np.asarray(below / (2 * len(others)))


def correlation_estimate(x: NDArray[Any], y: NDArray[Any]) -> Estimate:
    """Pearson's correlation with Fisher's interval; 0 where a side does not vary."""
    if len(x) < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Estimate(0.0, -1.0, 1.0)
    r = float(np.clip(np.corrcoef(x, y)[0, 1], -1, 1))
    with np.errstate(divide="ignore"):
        low, high = np.tanh(np.arctanh(r) + np.array([-1, 1]) * Z / sqrt(len(x) - 3))
    return Estimate(r, float(low), float(high))
