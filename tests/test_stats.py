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
    error = np.sqrt(pairs.mean(1).var(ddof=1) / 31 + pairs.mean(0).var(ddof=1) / 47)  # DeLong
    area = pairs.mean()
    ends = [
        1 / (1 + np.exp(-(np.log(area / (1 - area)) + z * error / (area * (1 - area))))) for z in (-stats.Z, stats.Z)
    ]
    assert stats.roc_estimate(ones, others) == pytest.approx((area, *ends))
    assert stats.roc_area(ones, others) == pytest.approx(area) and stats.roc_area(ones, others[:0]) is None
    assert stats.roc_estimate(np.ones(9), np.ones(5)) == pytest.approx((0.5, *stats.wilson(2.5, 5)))  # no width 0
    assert stats.roc_estimate(np.ones(9), np.zeros(5)) == pytest.approx((1.0, stats.wilson(5, 5)[0], 1.0))


def test_a_correlation_has_fishers_interval() -> None:
    random = np.random.default_rng(5)
    one = random.normal(size=40)
    other = one + random.normal(size=40)
    r = np.corrcoef(one, other)[0, 1]
    ends = np.tanh(np.arctanh(r) + np.array([-1, 1]) * stats.Z / np.sqrt(37))
    assert stats.correlation_estimate(one, other) == pytest.approx((r, *ends))
    assert stats.correlation_estimate(one, np.ones(40)) == (0.0, -1.0, 1.0)
