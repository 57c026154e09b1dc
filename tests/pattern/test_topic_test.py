"""The second test of a topic, on held-out triggers, and the p-value of both tests, against plain loops."""

import math

import numpy as np
import pytest
from scipy.stats import combine_pvalues
from test_coherence import PREFIXES, WORDS, made

from memlens.pattern.topics import BackgroundVectors, ExcludedWords, SemanticTopic, _combined, _TopicTest


@pytest.mark.parametrize(("p", "other"), [(0.04, 0.3), (1e-6, 1e-5), (0.05, 1.0), (1.0, 1.0)])
def test_two_p_values_make_one_by_fishers_method(p: float, other: float) -> None:
    assert _combined(p, other) == pytest.approx(combine_pvalues([p, other], "fisher").pvalue)
    assert _combined(p, None) == p


def test_the_chance_of_held_out_triggers_is_that_of_plain_loops() -> None:
    words, _, vectors = made()
    left_out = np.array([3, 8], np.int32)
    excluded = ExcludedWords(left_out, np.array([0, len(left_out)]), np.zeros(1, np.uint64))
    documents = np.arange(PREFIXES)
    documents[14], documents[15] = documents[2], documents[16]  # of a trigger's document, and two of one document
    test = _TopicTest(words, vectors, excluded, BackgroundVectors([]), documents)
    direction = vectors.vectors[5]
    topic = SemanticTopic(0b111, (5,), 0.1, direction)
    own, held, same = np.arange(1, 11), np.array([*range(11, 29), -1]), np.array([*range(30, 60), 30, 31])

    def near(row: int) -> float:
        numbers = [n for n in words.rows[words.offsets[row] : words.offsets[row + 1]] if n not in left_out]
        vector = vectors.vectors[numbers].astype(float).sum(0)
        return float(vector @ direction / np.linalg.norm(vector))

    mine = [near(row) for row in held[:-1] if row not in (14, 16)]
    others = [near(row) for row in same]
    area = np.mean([(a > b) + (a == b) / 2 for a in mine for b in others])
    n, k = len(mine), len(same) ** 2 / (28 + 2 * 2**2)  # two prefixes are there twice
    z = (area - 0.5) / math.sqrt((n + k + 1) / (12 * n * k))
    assert test._held_out(topic, 0, own, held, same) == pytest.approx(math.erfc(z / math.sqrt(2)) / 2, rel=1e-4)
    assert test._held_out(topic, 0, own, held[:9], same) is None  # too few
    assert len(vectors.vectors) == WORDS
