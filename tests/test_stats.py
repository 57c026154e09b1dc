"""Tail probabilities, false discovery rates and confidence intervals."""

from math import comb

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from memlens import stats
from memlens.stats import binomial_tail, decoy_q_values, paired_interval, q_values, upper_share


@settings(deadline=None)  # the first call imports scipy
@given(st.integers(1, 40), st.integers(0, 40), st.floats(1e-6, 0.999))
def test_the_tail_is_the_sum_of_its_terms(t: int, k: int, f: float) -> None:
    k = min(k, t)
    naive = sum(comb(t, j) * f**j * (1 - f) ** (t - j) for j in range(k, t + 1))
    assert binomial_tail(k, t, f) == pytest.approx(naive, rel=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 50), st.sampled_from([0.01, 0.05, 0.2]))
def test_q_values_accept_the_hypotheses_of_benjamini_and_hochberg(p: list[float], unlisted: int, rate: float) -> None:
    hypotheses = len(p) + unlisted
    ascending = sorted(p)
    passing = [i for i, value in enumerate(ascending, 1) if value * hypotheses / i <= rate]
    threshold = ascending[max(passing) - 1] if passing else -1.0
    is_accepted = q_values(np.array(p), hypotheses) <= rate
    assert is_accepted.tolist() == [value <= threshold for value in p]


def test_random_p_values_are_rarely_accepted() -> None:
    random = np.random.default_rng(0)
    has_accepted = [bool((q_values(random.uniform(size=500), 500) <= 0.05).any()) for _ in range(400)]
    assert np.mean(has_accepted) < 0.08


def test_the_upper_share_of_a_count_of_zero_is_positive_and_falls_with_the_sample() -> None:
    assert 0 < upper_share(np.array(0), 10_000) < upper_share(np.array(0), 100) < 1
    assert upper_share(np.array(50), 100) > 0.5


def test_the_upper_share_adds_one_count_and_its_error() -> None:
    assert upper_share(np.array(3), 100) == pytest.approx((4 + 1.645 * 2) / 101)


def test_decoy_q_values_add_one_decoy() -> None:
    assert decoy_q_values(np.full(10, 5.0), np.zeros(10)).tolist() == pytest.approx([0.1] * 10)


def test_a_paired_interval_adds_one_pair_of_each_kind() -> None:
    first, second = np.arange(10) < 6, np.arange(10) == 9  # 6 pairs one way, 1 the other
    spread = stats.Z * np.sqrt((7 / 12 + 2 / 12 - (5 / 12) ** 2) / 12)
    assert paired_interval(first, second) == pytest.approx((5 / 12 - spread, 5 / 12 + spread))


def test_the_area_under_the_roc_curve_and_its_interval_are_those_of_all_pairs() -> None:
    random = np.random.default_rng(4)
    ones, others = random.normal(0.8, 1, 31).round(1), random.normal(0, 1, 47).round(1)  # rounded, so that ties occur
    pairs = np.array([[1.0 if one > other else 0.5 if one == other else 0.0 for other in others] for one in ones])
    area = pairs.mean()

    def interval(area: float, first: int, second: int) -> tuple[float, float]:
        every, n = np.linspace(0, 1, 100_001), (first + second) / 2 - 1
        variance = every * (1 - every) * (1 + n * (1 - every) / (2 - every) + n * every / (1 + every))
        inside = every[abs(every - area) <= stats.Z * np.sqrt(variance / (first * second))]
        return inside.min(), inside.max()

    assert stats.roc_estimate(ones, others) == pytest.approx((area, *interval(area, 31, 47)), abs=2e-5)
    assert stats.roc_area(ones, others) == pytest.approx(area) and stats.roc_area(ones, others[:0]) is None
    assert stats.roc_estimate(np.ones(9), np.ones(5)) == pytest.approx(
        (0.5, *interval(0.5, 9, 5)), abs=2e-5
    )  # no width 0


def test_the_interval_of_an_area_of_1_is_hardly_wider_than_that_of_the_next_smaller_area() -> None:
    """With DeLong's variance, the lower bound was .929 at an area of 1 but .994 if one of 2,500 pairs was reversed."""
    ones, others = np.arange(50.0) + 50, np.arange(50.0)
    perfect = stats.roc_estimate(ones, others)
    others[-1] = 50.5
    nearly = stats.roc_estimate(ones, others)
    assert perfect.value == perfect.high == 1 > nearly.value and nearly.value == 1 - 1 / 2500
    assert 0.94 < nearly.low < perfect.low < 0.97
    mirrored = stats.roc_estimate(np.zeros(50), np.ones(50))
    assert mirrored == pytest.approx((0, 0, 1 - perfect.low))


def test_the_interval_of_an_area_covers_it_in_95_of_100_samples() -> None:
    random = np.random.default_rng(0)
    for true, distance in ((0.8, 1.1902), (0.99, 3.29)):  # of two normal distributions
        samples = [stats.roc_estimate(random.normal(distance, 1, 20), random.normal(0, 1, 20)) for _ in range(300)]
        assert sum(sample.low <= true <= sample.high for sample in samples) > 0.92 * 300


def test_a_correlation_has_fishers_interval() -> None:
    random = np.random.default_rng(5)
    one = random.normal(size=40)
    other = one + random.normal(size=40)
    r = np.corrcoef(one, other)[0, 1]
    ends = np.tanh(np.arctanh(r) + np.array([-1, 1]) * stats.Z / np.sqrt(37))
    assert stats.correlation_estimate(one, other) == pytest.approx((r, *ends))
    assert stats.correlation_estimate(one, np.ones(40)) == (0.0, -1.0, 1.0)
