"""Which batches are done and which remain, compared with plain sets of numbers."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from memlens.errors import IndexFolderError, SettingError
from memlens.scanner.state import (
    BATCHES_PER_RANGE,
    BatchRange,
    DoneBatches,
    PartFolder,
    ShardNumber,
    all_ranges,
    remaining_ranges,
)

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def batches_of(ranges: list[BatchRange]) -> list[tuple[int, int]]:
    return [(one.window, batch) for one in ranges for batch in range(one.first, one.stop)]


@given(COUNTS, st.randoms(use_true_random=False))
def test_what_is_left_is_what_is_not_done(counts: list[int], random) -> None:
    everything = [(window, batch) for window, count in enumerate(counts) for batch in range(count)]
    chosen = random.sample(everything, random.randint(0, len(everything)))
    done = DoneBatches()
    for window, batch in chosen:
        done.add(window, batch, batch + 1)
    assert len(done) == len(chosen)
    left = batches_of(list(remaining_ranges(counts, done)))
    assert left == sorted(set(everything) - set(chosen))
    assert done.contains_all(counts) == (not left)
    again = DoneBatches.from_array(done.array())
    assert again.array().tolist() == done.array().tolist()


@given(COUNTS, st.randoms(use_true_random=False))
def test_any_order_of_adding_and_merging_gives_the_same(counts: list[int], random) -> None:
    ranges = list(all_ranges(counts))
    parts = [DoneBatches(), DoneBatches(), DoneBatches()]
    for batches in random.sample(ranges, len(ranges)):
        random.choice(parts).add(*batches)
    joined = DoneBatches()
    for part in random.sample(parts, 3):
        joined.merge(part)
    assert joined.array().tolist() == [[window, 0, count] for window, count in enumerate(counts) if count]


@given(COUNTS, st.integers(1, 5))
def test_the_shards_of_a_plan_are_disjoint_even_and_complete(counts: list[int], of: int) -> None:
    shards = [list(remaining_ranges(counts, DoneBatches(), ShardNumber(number, of))) for number in range(1, of + 1)]
    assert sorted(batches for shard in shards for batches in shard) == list(all_ranges(counts))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_a_range_never_crosses_a_window_and_depends_on_the_plan_only() -> None:
    assert list(all_ranges([5, 0, 2])) == [(0, 0, 2), (0, 2, 4), (0, 4, 5), (2, 0, 2)] and BATCHES_PER_RANGE == 2


def test_a_batch_in_two_parts_is_refused() -> None:
    one, other = DoneBatches(), DoneBatches()
    one.add(3, 0, 4)
    other.add(3, 3, 5)
    with pytest.raises(IndexFolderError, match=r"batch 3 of window 3 .* in two of the parts"):
        one.merge(other)


def test_checking_a_part_holds_one_of_its_arrays_in_memory(tmp_path: Path) -> None:
    parts = PartFolder(tmp_path / "parts")
    parts.save("part", {f"{layer}.keys": np.full(250_000, layer, np.float64) for layer in range(10)})
    tracemalloc.start()
    try:
        parts.check()
        assert tracemalloc.get_traced_memory()[1] < 3 * 250_000 * 8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "-1/4", "a/b", "1/0", "²/4", "1/4/2", "3/99999999"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--shard"):
        ShardNumber.parse(text)
