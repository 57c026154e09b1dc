"""A layer's share of a scan: the path for other devices, and sums that do not depend on order."""

import numpy as np
import pytest
import torch

from memlens.models.groups import CoefficientBlock, LinearGroup
from memlens.scanner.layer import LayerScan, make_candidates
from memlens.settings import ScanSettings

GROUP = LinearGroup(key_projection=torch.nn.Linear(4, 33), down=torch.nn.Linear(33, 4))


def as_block(coefficients: torch.Tensor) -> CoefficientBlock:
    return CoefficientBlock(GROUP, (8, 6), None, coefficients, None)


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
    here, there = (LayerScan(0, 33, bottom=True, settings=settings) for _ in range(2))
    for block, sentences, positions in batches(1):
        candidates = make_candidates(np.arange(48), sentences, positions)
        here.update(as_block(block), candidates)
        there._update_on_device(GROUP, block, candidates)  # the tensors lie here, the path is the one of other devices
    for name, array in here.arrays().items():
        if name == "total":
            np.testing.assert_allclose(array, there.arrays()[name], atol=40)  # units of 2^-20; last bits differ
        elif not name.endswith("positions"):
            np.testing.assert_array_equal(array, there.arrays()[name], err_msg=name)
    for end, lists in here.triggers.result().items():
        np.testing.assert_array_equal(lists.positions, there.triggers.result()[end].positions)


def test_merging_in_any_order_gives_the_same_bits() -> None:
    settings = ScanSettings(top=5, sample_every=2)

    def merged(order: list[int]) -> dict[str, np.ndarray]:
        whole = LayerScan(0, 33, bottom=True, settings=settings)
        for number in order:
            block, sentences, positions = batches(2)[number]
            part = LayerScan(0, 33, bottom=True, settings=settings)
            part.update(as_block(block), make_candidates(np.arange(48), sentences, positions))
            whole.merge(part)
        return whole.arrays()

    forward, shuffled = merged(list(range(12))), merged([7, 3, 11, 0, 5, 1, 10, 2, 8, 4, 9, 6])
    for name, array in forward.items():
        np.testing.assert_array_equal(array, shuffled[name], err_msg=name)
