"""Intervals hold what they are said to: simulations with a seed, where the truth is known, and naive formulas."""

from collections.abc import Callable
from math import comb

import numpy as np
import pytest

from memlens.stats import (
    Estimate,
    contrast,
    critical,
    generator,
    mean_interval,
    median_interval,
    paired_interval,
    ratio_estimate,
    share_interval,
    slope_weights,
    wilson,
)

Random = np.random.Generator
TIMES = 400  # a coverage of 95% is seen within 92% and 98%


def coverage(truth: float, draw: Callable[[Random], tuple[float | None, float | None]], times: int = TIMES) -> float:
    """The share of intervals that hold the truth."""
    random = np.random.default_rng(17)
    held = 0
    for _ in range(times):
        low, high = draw(random)
        assert low is not None and high is not None
        held += low <= truth <= high
    return held / times


@pytest.mark.parametrize("count", [6, 12, 29, 30, 60, 120])
def test_means_of_few_and_of_many(count: int) -> None:
    held = coverage(3.0, lambda random: mean_interval(random.normal(3, 2, count), random))
    assert 0.92 <= held <= 0.98


@pytest.mark.parametrize("count", [40, 100, 150])
def test_means_of_skewed_numbers(count: int) -> None:
    assert 0.92 <= coverage(1.0, lambda random: mean_interval(random.exponential(1, count), random)) <= 0.98


@pytest.mark.parametrize("count", [7, 10, 25, 60, 201])
def test_medians_of_skewed_numbers(count: int) -> None:
    truth = float(np.log(2))
    assert 0.92 <= coverage(truth, lambda random: median_interval(random.exponential(1, count)), 800) <= 0.98


@pytest.mark.parametrize(("share", "count"), [(0.5, 20), (0.1, 40), (0.02, 300), (0.93, 100), (0.003, 2000)])
def test_shares(share: float, count: int) -> None:
    assert 0.92 <= coverage(share, lambda random: share_interval(random.binomial(count, share), count), 2000) <= 0.98


@pytest.mark.parametrize(("count", "alike"), [(25, 0.5), (60, 0.5), (60, 0.8), (300, 0.8)])
def test_differences_of_paired_shares(count: int, alike: float) -> None:
    def draw(random: Random) -> tuple[float | None, float | None]:
        one = random.random(count) < 0.6
        other = np.where(random.random(count) < alike, one, random.random(count) < 0.3)
        return paired_interval(one, other)

    assert 0.92 <= coverage(0.6 - (alike * 0.6 + (1 - alike) * 0.3), draw, 2000) <= 0.98


@pytest.mark.parametrize("count", [15, 80])
def test_paired_slopes_over_layers(count: int) -> None:
    """Five layers seen on the same prefixes, each with a level of its own: the slope is a mean over prefixes."""
    weights = np.array(slope_weights([0.1, 0.3, 0.5, 0.7, 0.9]))

    def draw(random: Random) -> tuple[float | None, float | None]:
        seen = random.exponential(2, count) + 0.4 * np.arange(5)[:, None] + random.normal(0, 1, (5, count))
        return mean_interval(weights @ seen, random)

    assert 0.92 <= coverage(2.0, draw) <= 0.98


def test_ratios_over_memories_of_unequal_size() -> None:
    def draw(random: Random) -> tuple[float | None, float | None]:
        wholes = random.integers(1, 26, 60)
        found = ratio_estimate(random.binomial(wholes, random.beta(1, 3, 60)), wholes, random)
        assert found is not None
        return found.low, found.high

    assert 0.92 <= coverage(0.25, draw) <= 0.98


def test_slopes_of_shares_of_different_memories() -> None:
    shares, weights = np.array([0.01, 0.02, 0.05, 0.1]), slope_weights([0.125, 0.375, 0.625, 0.875])

    def draw(random: Random) -> tuple[float | None, float | None]:
        hits = random.binomial(200, shares)
        return contrast(weights, [Estimate(hit / 200, *wilson(hit, 200)) for hit in hits])[1:]

    assert 0.92 <= coverage(float(np.dot(weights, shares)), draw, 2000) <= 0.98


def test_intervals_of_all_layers_at_once_hold_all_together() -> None:
    def draw(random: Random) -> tuple[float | None, float | None]:
        edges = [wilson(random.binomial(300, 0.7), 300, critical(16)) for _ in range(16)]
        return max(low for low, _ in edges), min(high for _, high in edges)

    assert 0.92 <= coverage(0.7, draw, 1000) <= 0.99


def test_nothing_seen_is_no_wider_than_something_seen() -> None:
    edges = [share_interval(hits, 511)[1] or 0 for hits in (0, 1, 2)]
    assert edges == sorted(edges) and share_interval(0, 0) == (None, None)
    for hits, count in ((0, 1), (0, 600), (7, 7), (600, 600)):
        low, high = wilson(hits, count)
        assert 0 <= low <= hits / count <= high <= 1 and high - low > 0.005


def test_student_for_fewer_than_thirty_and_none_for_one() -> None:
    numbers = np.array([1.0, 2.0, 4.0])  # t with 2 degrees of freedom: 4.302653
    spread = 4.302653 * numbers.std(ddof=1) / 3**0.5
    expected = [numbers.mean() - spread, numbers.mean() + spread]
    assert mean_interval(numbers, generator(0, "x")) == pytest.approx(expected, rel=1e-6)
    assert mean_interval(numbers[:1], generator(0, "x")) == (None, None)


def test_observations_that_are_all_alike_are_no_certainty() -> None:
    random = generator(0, "x")
    for count in (2, 29, 60):
        assert mean_interval(np.full(count, 0.1), random) == (None, None)
        wholes = np.full(count, 7)
        for ratio, bounds in ((1, (0, 1)), (0, (0, 1)), (-1, (-1, 1))):
            found = ratio_estimate(ratio * wholes, wholes, random, bounds)
            low, high = wilson(count * (ratio - bounds[0]) / (bounds[1] - bounds[0]), count)
            width = bounds[1] - bounds[0]
            assert found == pytest.approx((ratio, bounds[0] + width * low, bounds[0] + width * high))
        assert ratio_estimate(3 * wholes, wholes, random, None) is None
    assert ratio_estimate(np.array([3, 0]), np.array([5, 0]), random) is None  # one observation
    assert ratio_estimate(np.array([]), np.array([]), random) is None


def test_a_median_lies_between_the_order_statistics_that_bracket_95_percent() -> None:
    for count in (7, 20, 63):
        numbers = np.arange(count, dtype=float)
        held = [
            1 - 2 * sum(comb(count, j) for j in range(k)) / 2**count for k in range(count // 2)
        ]  # of (k, n - k + 1)
        inner = max(k for k, share in enumerate(held) if share >= 0.95)
        low, high = median_interval(numbers)
        assert low is not None and high is not None
        assert numbers[inner - 1] <= low <= numbers[inner] and low + high == pytest.approx(count - 1)


def test_a_median_of_fewer_than_six_numbers_has_no_interval() -> None:
    for count in range(6):
        assert median_interval(np.arange(count)) == (None, None)
    assert median_interval(np.full(6, 3.0)) == (3.0, 3.0)  # at most 3 and at least 3, as seldom as other numbers


def test_a_contrast_is_a_slope_a_mean_or_a_difference_of_shares() -> None:
    rng = np.random.default_rng(2)
    x, y, sizes = rng.random(6), rng.random(6), rng.integers(1, 9, 6)
    estimates = [Estimate(float(one), float(one), float(one)) for one in y]
    assert contrast(slope_weights(x.tolist()), estimates).value == pytest.approx(np.polyfit(x, y, 1)[0])
    weighted = contrast(slope_weights(x.tolist(), sizes.tolist()), estimates).value
    assert weighted == pytest.approx(np.polyfit(x, y, 1, w=np.sqrt(sizes))[0])
    shares = [Estimate(hits / total, *wilson(hits, total)) for hits, total in ((30, 100), (20, 80))]
    _, low, high = contrast((1, -1), shares)  # Newcombe's tenth method, by hand
    (a, b), (c, d) = wilson(30, 100), wilson(20, 80)
    below, above = ((0.3 - a) ** 2 + (d - 0.25) ** 2) ** 0.5, ((b - 0.3) ** 2 + (0.25 - c) ** 2) ** 0.5
    assert (low, high) == pytest.approx((0.05 - below, 0.05 + above))


def test_more_comparisons_make_wider_intervals() -> None:
    one = Estimate(0.4, 0.3, 0.6)
    wide = one.widened(16)
    assert critical(1) == pytest.approx(1.959964) and critical(16) == pytest.approx(2.955, abs=1e-3)
    assert (
        (wide.value - wide.low) / 0.1 == pytest.approx((wide.high - wide.value) / 0.2) == pytest.approx(1.508, abs=1e-3)
    )
    assert one.times(-2) == (-0.8, -1.2, -0.6)
