"""Sorting inside compiled loops against numpy's."""

import numpy as np
import pytest

from memlens.parallel import compiled
from memlens.sorting import sort_, sort_with_


@compiled
def sort_compiled_(keys, count):
    sort_(keys, count)


@compiled
def sort_with_compiled_(keys, others, count):
    sort_with_(keys, others, count)


@pytest.mark.parametrize("kind", [np.uint64, np.int64, np.int32, np.float32])
def test_the_first_keys_are_sorted_and_the_rest_is_left(kind: type) -> None:
    random = np.random.default_rng(0)
    for count in (0, 1, 2, 3, 11, 57, 702, 5_000):
        keys = random.integers(0, max(count // 2, 2), count + 3).astype(kind)
        expected = np.concatenate([np.sort(keys[:count]), keys[count:]])
        sort_compiled_(keys, count)
        assert np.array_equal(keys, expected)


def test_numbers_beside_the_keys_go_along() -> None:
    random = np.random.default_rng(1)
    for count in (0, 1, 2, 3, 11, 57, 702, 5_000):
        keys, others = random.integers(0, max(count // 2, 2), count + 3), random.standard_normal(count + 3)
        pairs = sorted(zip(keys[:count].tolist(), others[:count].tolist(), strict=True))
        rest = list(zip(keys[count:].tolist(), others[count:].tolist(), strict=True))
        sort_with_compiled_(keys, others, count)
        found = list(zip(keys.tolist(), others.tolist(), strict=True))
        assert sorted(found[:count]) == pairs
        assert [key for key, _ in found[:count]] == [key for key, _ in pairs]
        assert found[count:] == rest
