"""A layer's share of a scan: the path for other devices, and statistics that do not depend on order."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st

from memlens.models.groups import CoefficientBlock, LinearGroup
from memlens.scanner.kernels import COLUMNS
from memlens.scanner.layer import LayerScan
from memlens.scanner.lists import make_candidates
from memlens.settings import ScanSettings

GROUP = LinearGroup(
    key_projection=torch.nn.Linear(4, 33), up_projection=torch.nn.Linear(4, 33), down=torch.nn.Linear(33, 4),
    activation="silu", activate=torch.nn.functional.silu,
)  # fmt: skip


def as_block(coefficients: torch.Tensor) -> CoefficientBlock:
    return CoefficientBlock(GROUP, (8, 6), None, coefficients, None, coefficients.roll(1, 0))


def batches(seed: int) -> list[tuple[torch.Tensor, np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    parts = []
    for number in range(12):
        sentences = np.repeat(np.arange(8) + 8 * number, 6)
        positions = np.tile(np.arange(6), 8)
        parts.append((torch.from_numpy(random.normal(size=(48, 33)).astype(np.float32)), sentences, positions))
    return parts


@pytest.mark.parametrize("per_sentence", ["best", "all"])
def test_filtering_on_the_device_keeps_the_same_as_the_compiled_pass(per_sentence: str) -> None:
    settings = ScanSettings(top=5, per_sentence=per_sentence, sample_every=3)
    here, there = (LayerScan(0, 33, bottom=True, gated=True, settings=settings) for _ in range(2))
    for block, sentences, positions in batches(1):
        candidates = make_candidates(np.arange(48), sentences, positions)
        here.update(as_block(block), candidates)
        there.positions.add_prefixes(0, candidates)
        there.quadrants.turns[:] = True
        # the tensors lie here, the path is the one of other devices
        there._update_on_device(GROUP, block, block.roll(1, 0), candidates)
    for name, array in here.arrays().items():
        if name == "total":
            np.testing.assert_allclose(array, there.arrays()[name], atol=40)  # units of 2^-20; last bits differ
        elif not name.endswith("positions"):
            np.testing.assert_array_equal(array, there.arrays()[name], err_msg=name)
    for end, lists in here.triggers.result().items():
        np.testing.assert_array_equal(lists.positions, there.triggers.result()[end].positions)


@pytest.mark.parametrize("per_sentence", ["best", "all"])
def test_memories_of_a_wide_layer_are_as_in_narrow_ones(per_sentence: str) -> None:
    """A block of several tiles beside blocks of one tile each: lists, sums and counts, those of quadrants, too."""
    settings = ScanSettings(top=4, per_sentence=per_sentence)
    random, width = np.random.default_rng(4), COLUMNS + 77
    lengths = np.resize([11, 10, 9, 3], 20)  # of ROWS rows at a time, with and without some left over
    sentences, positions = np.repeat(np.arange(20), lengths), np.concatenate([np.arange(size) for size in lengths])
    rows = len(sentences)
    coefficients, gates = torch.from_numpy(random.normal(size=(2, rows, width)).astype(np.float32))

    def arrays_of(first: int, last: int) -> dict[str, np.ndarray]:
        size = last - first
        group = LinearGroup(
            key_projection=torch.nn.Linear(1, size), up_projection=torch.nn.Linear(1, size),
            down=torch.nn.Linear(size, 1), activate=torch.nn.functional.silu,
        )  # fmt: skip
        layer = LayerScan(0, size, bottom=True, gated=True, settings=settings)
        block = CoefficientBlock(group, (1, rows), None, coefficients[:, first:last], None, gates[:, first:last])
        layer.update(block, make_candidates(np.arange(rows), sentences, positions))
        return layer.arrays()

    wide, left, right = arrays_of(0, width), arrays_of(0, 900), arrays_of(900, width)
    compared = 0
    for name, array in wide.items():
        is_drawn = name.startswith("sample") and name != "sample.counts"  # by the number of the memory
        if len(array) % width == 0 and not is_drawn:
            np.testing.assert_array_equal(array, np.concatenate([left[name], right[name]]), err_msg=name)
            compared += 1
    assert compared >= 13 and wide["quadrants.counts"].min() > 0


def test_merging_in_any_order_gives_the_same_bits() -> None:
    settings = ScanSettings(top=5, sample_every=2)

    def merged(order: list[int]) -> dict[str, np.ndarray]:
        whole = LayerScan(0, 33, bottom=True, gated=True, settings=settings)
        for number in order:
            block, sentences, positions = batches(2)[number]
            part = LayerScan(0, 33, bottom=True, gated=True, settings=settings)
            part.update(as_block(block), make_candidates(np.arange(48), sentences, positions))
            whole.merge(part)
        return whole.arrays()

    forward, shuffled = merged(list(range(12))), merged([7, 3, 11, 0, 5, 1, 10, 2, 8, 4, 9, 6])
    for name, array in forward.items():
        np.testing.assert_array_equal(array, shuffled[name], err_msg=name)


TINY = np.float32(1e-45)  # the smallest number of all, a denormal one
ODD = np.array([0.0, -0.0, TINY, -TINY, 1e-40, -1e-40, 1.1754944e-38, 0.5, -0.5, 0.5 + 2**-24, 3.0, 1e9], np.float32)


@pytest.mark.parametrize("per_sentence", ["best", "all"])
@hypothesis_settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_statistic_merges_to_the_same_bits_in_any_tree(per_sentence: str, random: Random) -> None:
    """Zeros of both signs, denormal numbers and ties, in parts that are joined by any brackets in any order."""
    options = ScanSettings(top=3, per_sentence=per_sentence, sample_every=2)
    width, rows, count = 5, 6, 7
    draw = np.random.default_rng(random.getrandbits(32))
    group = LinearGroup(
        key_projection=torch.nn.Linear(1, width), up_projection=torch.nn.Linear(1, width),
        down=torch.nn.Linear(width, 1), activate=torch.nn.functional.silu,
    )  # fmt: skip
    blocks = [draw.choice(ODD[: draw.integers(1, len(ODD) + 1)], (rows, width)) for _ in range(count)]

    def scanned(numbers: list[int]) -> LayerScan:
        layer = LayerScan(0, width, bottom=True, gated=True, settings=options)
        for number in numbers:
            sentences = np.arange(rows) // 2 + 3 * number
            candidates = make_candidates(np.arange(rows), sentences, np.arange(rows) % 2)
            coefficients = torch.from_numpy(blocks[number])
            block = CoefficientBlock(group, (rows // 2, 2), None, coefficients, None, coefficients.flip(0))
            layer.update(block, candidates)
        return layer

    whole = scanned(list(range(count))).arrays()
    parts = [scanned([number]) for number in random.sample(range(count), count)]
    while len(parts) > 1:
        one, other = (parts.pop(random.randrange(len(parts))) for _ in range(2))
        one.merge(other)
        parts.append(one)
    for name, array in parts[0].arrays().items():
        assert array.tobytes() == whole[name].tobytes(), name
    together = np.concatenate(blocks)
    assert (whole["highest"] == together.max(0)).all() and not np.signbit(whole["highest"][whole["highest"] == 0]).any()
    assert (whole["lowest"] == together.min(0)).all() and not np.signbit(whole["lowest"][whole["lowest"] == 0]).any()
    assert (whole["positions.fired"].sum(1) == (together > 0).sum(0)).all()
