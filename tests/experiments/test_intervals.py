"""Intervals: as wide as they should be, also where nothing varies and where two shares are of the same observations."""

import numpy as np
import pytest

from memlens.stats import generator, paired_interval, rate_interval, share_difference, wilson


@pytest.mark.parametrize(("hits", "count"), [(0, 1), (0, 600), (7, 7), (600, 600)])
def test_a_rate_without_variance_still_has_an_interval(hits: int, count: int) -> None:
    low, high = rate_interval(hits, count, generator(0, "x"))
    assert (low, high) == wilson(hits, count) and low is not None and high is not None
    assert high - low > 0.005 and low <= hits / count <= high


def test_a_rate_with_variance_has_the_bootstraps_interval() -> None:
    low, high = rate_interval(30, 100, generator(0, "x"))
    draws = [np.random.default_rng(n).choice([1] * 30 + [0] * 70, 100).mean() for n in range(4000)]
    assert (low, high) == pytest.approx(np.percentile(draws, [2.5, 97.5]).tolist(), abs=0.02)
    assert rate_interval(0, 0, generator(0, "x")) == (None, None)


@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_a_paired_interval_is_that_of_resampled_observations(alike: float) -> None:
    random = np.random.default_rng(3)
    one = random.random(300) < 0.6
    other = np.where(random.random(300) < alike, one, random.random(300) < 0.4)
    low, high = paired_interval(one, other, generator(0, "x"))
    draws = []
    for _ in range(4000):
        drawn = random.integers(0, 300, 300)
        draws.append(one[drawn].mean() - other[drawn].mean())
    assert (low, high) == pytest.approx(np.percentile(draws, [2.5, 97.5]).tolist(), abs=0.015)
    apart_low, apart_high = share_difference(one.sum(), 300, other.sum(), 300)
    assert low is not None and high is not None
    if alike:  # observations that are alike in both say more about the difference than two samples would
        assert high - low < 0.6 * (apart_high - apart_low)


@pytest.mark.parametrize(("one", "other"), [(True, False), (False, True), (True, True)])
def test_a_difference_without_variance_still_has_an_interval(one: bool, other: bool) -> None:
    low, high = paired_interval(np.full(50, one), np.full(50, other), generator(0, "x"))
    assert (low, high) == share_difference(50 * one, 50, 50 * other, 50)
    assert low is not None and high is not None and high - low > 0.01
