"""Random samples and 95% bootstrap intervals that depend on the seed, the experiment and the layer, and nothing else.

Memories are resampled, since they are what was drawn. This module knows numbers only.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """Of a share: resampling yes and no with replacement is a binomial draw."""
    if count == 0:
        return None, None
    return _interval(random.binomial(count, hits / count, RESAMPLES) / count)


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
