"""The compiled look at rows of scores, against numpy's own sorting and softmax."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from memlens.vocab.kernels import MOST_LANES, find_ends, read_softmax


def some_scores(vocabulary: int, kind: str) -> np.ndarray:
    scores = np.random.default_rng(vocabulary).normal(size=(9, vocabulary)).astype(np.float32) * 4
    if kind == "tied":
        scores = np.round(scores)
        scores[0], scores[1, ::2], scores[1, 1::2] = 0, 0.0, -0.0
    return scores


@pytest.mark.parametrize("kind", ["distinct", "tied"])
@pytest.mark.parametrize("vocabulary", [1, 97, MOST_LANES, MOST_LANES + 1, 3 * MOST_LANES + 700])
def test_both_ends_are_what_a_stable_sort_gives(vocabulary, kind):
    scores = some_scores(vocabulary, kind)
    for k in {1, min(50, vocabulary), min(200, vocabulary), min(MOST_LANES + 5, vocabulary)}:
        ends = find_ends(scores, k)
        top = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        bottom = np.argsort(scores, axis=1, kind="stable")[:, :k]
        assert (ends.top == top).all() and (ends.bottom == bottom).all()
        assert (ends.top_scores == np.take_along_axis(scores, top, 1)).all()
        assert (ends.bottom_scores == np.take_along_axis(scores, bottom, 1)).all()


@pytest.mark.parametrize("vocabulary", [1, 97, 5000])
def test_softmax_entropy_and_rank_are_the_definitions(vocabulary):
    scores = some_scores(vocabulary, "tied")
    targets = np.random.default_rng(0).integers(-1, vocabulary, size=9)
    ends = find_ends(scores, 1)
    softmax = read_softmax(scores, ends, targets)
    p = np.exp(scores.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(softmax.p(scores), p, rtol=1e-6)
    np.testing.assert_allclose(softmax.entropy, -(p * np.log(p)).sum(1), atol=1e-6)
    for row, target in enumerate(targets):
        assert softmax.above[row] == (-1 if target < 0 else (scores[row] > scores[row, target]).sum())


def test_scores_far_below_the_best_add_nothing():
    scores = np.array([[0.0, -200.0, -1e30, -80.0]], np.float32)
    ends = find_ends(scores, 4)
    softmax = read_softmax(scores, ends, np.array([2]))
    assert ends.top[0].tolist() == [0, 3, 1, 2] and softmax.above[0] == 3
    np.testing.assert_allclose(softmax.total, 1.0, rtol=1e-7)
    np.testing.assert_allclose(softmax.entropy, 0.0, atol=1e-7)


def test_several_threads_give_the_same_bits():
    scores = some_scores(3 * MOST_LANES, "distinct")
    targets = np.arange(9)
    alone = find_ends(scores, 40)
    with ThreadPoolExecutor(4) as pool:
        together = find_ends(scores, 40, pool)
        softmax = read_softmax(scores, together, targets, pool)
    for one, other in zip((*alone, *read_softmax(scores, alone, targets)), (*together, *softmax), strict=True):
        assert one.tobytes() == other.tobytes()
