"""Random samples and 95% bootstrap intervals that depend on the seed, the experiment and the layer, and nothing else.

What was drawn is resampled: memories or prefixes. Two shares of the same ones are resampled together (paired). Where a
share is 0 or 1 every draw would be the same: there the interval is Wilson's. This module knows numbers only.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.experiments.shares import share_difference, wilson

RESAMPLES = 1000
_LOW, _HIGH = 2.5, 97.5

Interval = tuple[float | None, float | None]


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
