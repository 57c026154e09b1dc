"""The state of a layer: against plain loops, on other devices, in tiles, and merged in any order."""

from itertools import pairwise
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numba import typeof

from memlens.errors import ModelError
from memlens.models.groups import CoefficientBlock, LinearGroup
from memlens.scanner import kernels, layer as layer_module
from memlens.scanner.kernels import COLUMNS, EDGES, UNIT, bin_edges, make_candidates, prefix_hashes
from memlens.scanner.layer import LayerScan
from memlens.settings import ScanSettings


def make_group(size: int) -> LinearGroup:
    return LinearGroup(
        key_projection=torch.nn.Linear(4, size), up_projection=torch.nn.Linear(4, size),
        down=torch.nn.Linear(size, 4), activation="silu", activate=torch.nn.functional.silu,
    )  # fmt: skip


def make_block(coefficients: torch.Tensor, gates: torch.Tensor | None) -> CoefficientBlock:
    group = make_group(coefficients.shape[1])
    return CoefficientBlock(group, (1, len(coefficients)), None, coefficients, None, gates)


# --- against plain loops ----------------------------------------------------------------------------------------------

LENGTHS = (9, 1, 7, 4, 13, 2, 70)  # with and without a rest after steps of four rows, and over several position ranges
SENTENCES = np.repeat(np.arange(len(LENGTHS)) * 3 + 2, LENGTHS)
POSITIONS = np.concatenate([np.arange(length) for length in LENGTHS])
WIDTH, TOP = 19, 6


@pytest.fixture(scope="module", params=["best", "all"])
def scanned(request: pytest.FixtureRequest) -> tuple[LayerScan, np.ndarray, np.ndarray]:
    """A layer after one block with many ties, its coefficients and its gates."""
    random = np.random.default_rng(6)
    coefficients = np.round(random.normal(size=(len(SENTENCES), WIDTH)), 1).astype(np.float32)
    gates = np.round(random.normal(size=coefficients.shape), 1).astype(np.float32)
    settings = ScanSettings(top=TOP, per_sentence=request.param, sample_every=2, seed=5)
    scan = LayerScan(3, WIDTH, bottom=True, gated=True, settings=settings)
    order = random.permutation(len(SENTENCES))  # rows of a batch are in any order
    candidates = make_candidates(np.arange(len(order)), SENTENCES[order], POSITIONS[order])
    scan.update(make_block(torch.from_numpy(coefficients[order]), torch.from_numpy(gates[order])), candidates)
    return scan, coefficients, gates


def naive_list(scores: np.ndarray, top: int, best: bool) -> list[tuple[float, int, int]]:
    """(score, sentence, position) of the positive scores [n] in the order of triggers."""
    ordered = sorted((-score, s, p) for score, s, p in zip(scores, SENTENCES, POSITIONS, strict=True) if score > 0)
    if best:
        ordered = list({s: (score, s, p) for score, s, p in reversed(ordered)}.values())
        ordered.sort()
    return [(-float(score), int(s), int(p)) for score, s, p in ordered[:top]]


def as_tuples(lists: kernels.Lists, row: int) -> list[tuple[float, int, int]]:
    columns = (lists.scores(), lists.sentences(), lists.positions)
    return list(zip(*(column[row, : lists.filled[row]].tolist() for column in columns), strict=True))


def test_triggers_are_the_highest_and_lowest_prefixes(scanned: tuple[LayerScan, np.ndarray, np.ndarray]) -> None:
    scan, coefficients, _ = scanned
    best = scan.triggers.one_a_sentence
    for m in range(WIDTH):
        assert as_tuples(scan.triggers.top_lists, m) == naive_list(coefficients[:, m], TOP, best)
        assert as_tuples(scan.triggers.bottom_lists, m) == naive_list(-coefficients[:, m], TOP, best)


def test_quadrants_are_split_by_the_signs_of_gate_and_coefficient(
    scanned: tuple[LayerScan, np.ndarray, np.ndarray],
) -> None:
    scan, coefficients, gates = scanned
    assert scan.quadrants is not None
    for quadrant, (sign, is_open) in enumerate([(1, True), (-1, True), (1, False), (-1, False)]):
        scores = np.where((gates > 0) == is_open, sign * coefficients, 0)
        assert scan.quadrants.counts[:, quadrant].tolist() == (scores > 0).sum(0).tolist()
        for m in range(WIDTH):
            expected = naive_list(scores[:, m], kernels.KEPT, scan.triggers.one_a_sentence)
            assert as_tuples(scan.quadrants.lists, 4 * m + quadrant) == expected


def test_the_order_of_quadrants_follows_the_sign_of_a_shut_gate() -> None:
    quadrants = kernels.Quadrants.empty(2)
    quadrants.turns[1] = True  # as with SiLU: f(g) < 0, so that a positive coefficient has a negative input
    assert quadrants.order().tolist() == [[0, 1, 2, 3], [0, 1, 3, 2]]


def test_totals_are_sums_extremes_and_counts_by_position(scanned: tuple[LayerScan, np.ndarray, np.ndarray]) -> None:
    scan, coefficients, _ = scanned
    np.testing.assert_allclose(scan.totals.total * UNIT, coefficients.sum(0, dtype=np.float64), atol=1e-4)
    assert scan.totals.highest.tolist() == coefficients.max(0).tolist()
    assert scan.totals.lowest.tolist() == coefficients.min(0).tolist()
    assert (scan.totals.highest.dtype, scan.totals.total.dtype) == (np.float32, np.int64)
    edges = [0, *EDGES, 10**9]
    for bucket, (first, stop) in enumerate(pairwise(edges)):
        rows = (first <= POSITIONS) & (stop > POSITIONS)
        assert scan.totals.fired[:, bucket].tolist() == (coefficients[rows] > 0).sum(0).tolist()
        assert scan.reach.prefixes[0, bucket] == rows.sum()
        assert scan.reach.sentences[0, bucket] == len(set(SENTENCES[rows]))


def test_sums_over_sentences_are_exact() -> None:
    """In float32, adding 1 to 2^24 changes nothing. Halves of a UNIT are rounded, not cut off."""
    scan = LayerScan(0, 2, bottom=False, settings=ScanSettings(top=1))
    coefficients = torch.ones(41, 2)
    coefficients[0, 0] = 2**24
    coefficients[:, 1] = 0
    coefficients[40, 1] = -0.75 * UNIT
    scan.update(make_block(coefficients, None), make_candidates(np.arange(41), np.arange(41), np.zeros(41)))
    assert scan.totals.total.tolist() == [(2**24 + 40) / UNIT, -1]


def test_extremes_of_negative_zeros_are_positive_zeros() -> None:
    """Which of the two zeros a maximum keeps would depend on the order of merges."""
    scan = LayerScan(0, 1, bottom=False, settings=ScanSettings(top=1))
    block = make_block(torch.full((5, 1), -0.0), None)
    scan.update(block, make_candidates(np.arange(5), np.zeros(5), np.arange(5)))
    assert not np.signbit([scan.totals.highest, scan.totals.lowest]).any()


def test_the_sample_is_a_histogram_and_the_examples_with_the_lowest_hashes(
    scanned: tuple[LayerScan, np.ndarray, np.ndarray],
) -> None:
    scan, coefficients, _ = scanned
    hashes = prefix_hashes(scan.seed, SENTENCES, POSITIONS)
    sampled = hashes <= scan.sample.limit
    assert 20 < sampled.sum() < len(sampled) - 20
    for m in range(WIDTH):
        expected, _edges = np.histogram(coefficients[sampled, m], [-np.inf, *bin_edges(), np.inf])
        # an edge belongs to the bin with the larger magnitude, which numpy's left-closed bins do for positive ones
        on_edge = [int((coefficients[sampled, m] == edge).sum()) for edge in bin_edges()[: kernels.SIDE]]
        for place, count in enumerate(on_edge):
            expected[place + 1] -= count
            expected[place] += count
        assert scan.sample.counts[m].tolist() == expected.tolist()
        positive = sampled & (coefficients[:, m] > 0)
        prefixes = zip(SENTENCES[positive], POSITIONS[positive], strict=True)
        rows = dict(zip(prefixes, coefficients[positive, m], strict=True))
        examples = scan.sample.examples
        filled = int((examples.hashes[m] != np.uint64(2**64 - 1)).sum())
        prefixes = zip(examples.sentences[m, :filled], examples.positions[m, :filled], strict=True)
        shown = dict(zip(prefixes, examples.coefficients[m, :filled], strict=True))
        assert len(shown) == min(len(rows), kernels.EXAMPLES) and shown.items() <= rows.items()
        assert examples.hashes[m].tolist() == sorted(examples.hashes[m].tolist())


def test_hashes_are_the_same_on_every_machine() -> None:
    """Each is one step of splitmix64 per number, here with Python's integers."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    prefixes = [(0, -1), (0, 0), (7, 3), (2**32 - 2, 511)]
    sentences, positions = (np.array(column) for column in zip(*prefixes, strict=True))
    expected = [mix(mix(mix(12) ^ s) ^ (p + 1)) for s, p in prefixes]
    assert prefix_hashes(12, sentences, positions).tolist() == expected


@pytest.mark.parametrize(("bad", "words"), [(np.nan, "memory L3N11 .* NaN"), (np.inf, "L3N11"), (1e30, "beyond 1e12")])
def test_coefficients_that_cannot_be_summed_are_refused(bad: float, words: str) -> None:
    scan = LayerScan(3, WIDTH, bottom=False, settings=ScanSettings(top=TOP))
    coefficients = torch.ones(5, WIDTH)
    coefficients[4, 11] = bad  # the last row
    with pytest.raises(ModelError, match=words):
        scan.update(make_block(coefficients, None), make_candidates(np.arange(5), np.zeros(5), np.arange(5)))


def test_an_expert_counts_only_the_tokens_that_its_router_sent_there() -> None:
    """Expert 1 of 2, each with 3 memories after 2 dense ones, in a batch of 3 sentences of 4 tokens."""
    scan = LayerScan(0, 2 + 6, bottom=False, experts=2, size=3, settings=ScanSettings(top=4, seed=9))
    rows, weights = np.array([11, 1, 2, 6, 7, 8]), np.array([0.5, 0.25, 1.0, 0.75, 0.125, 0.75], np.float32)
    coefficients = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    candidates = make_candidates(np.arange(11), np.arange(11) // 4 + 10, np.arange(11) % 4)  # row 11 is padding
    group = SimpleNamespace(start=5, expert=1, kind="routed", columns=slice(5, 8))
    tensors = [torch.from_numpy(array) for array in (rows, coefficients, weights)]
    scan.update(CoefficientBlock(group, (3, 4), *tensors, None), candidates)  # type: ignore[arg-type]
    assert scan.routing is not None
    assert scan.routing.chosen.tolist() == [0, 5]
    assert (scan.routing.weight * UNIT).tolist() == [0, 0.25 + 1.0 + 0.75 + 0.125 + 0.75]
    assert as_tuples(scan.routing.heaviest, 1) == [(1.0, 10, 2), (0.75, 11, 2), (0.75, 12, 0)]  # best of each sentence
    assert {entry[1:] for entry in as_tuples(scan.routing.drawn, 1)} == {(10, 1), (10, 2), (11, 2), (11, 3), (12, 0)}
    assert scan.reach.prefixes.sum(1).tolist() == [0, 0, 5] and scan.reach.sentences[2].tolist()[:3] == [1, 1, 2]
    assert scan.by_memory(scan.reach.prefixes).sum(1).tolist() == [0, 0, 0, 0, 0, 5, 5, 5]
    best = max((value, row) for value, row in zip(coefficients[1:, 2], rows[1:], strict=True))
    assert as_tuples(scan.triggers.top_lists, 7)[0] == (best[0], best[1] // 4 + 10, best[1] % 4)


# --- the same in every way --------------------------------------------------------------------------------------------


def batches(seed: int) -> list[tuple[torch.Tensor, np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    parts = []
    for number in range(12):
        sentences = np.repeat(np.arange(8) + 8 * number, 6)
        positions = np.tile(np.arange(6), 8)
        parts.append((torch.from_numpy(random.normal(size=(48, 33)).astype(np.float32)), sentences, positions))
    return parts


def test_warming_up_compiles_what_a_scan_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    types: list[list[str]] = []

    def record(*arguments: object) -> int:
        types.append([str(typeof(argument)) for argument in arguments])
        return kernels.FINE

    monkeypatch.setattr(kernels, "add_block_", record)
    monkeypatch.setattr(layer_module, "add_block_", record)
    kernels.warm_up()
    coefficients, sentences, positions = batches(0)[0]
    for gates in (None, coefficients, coefficients[:, ::2].T.contiguous().T):
        scan = LayerScan(0, 33, bottom=gates is not None, gated=gates is not None, settings=ScanSettings(top=2))
        scan.update(make_block(coefficients, gates), make_candidates(np.arange(48), sentences, positions))
    assert types[0] == types[1] == types[2] == types[3]


@pytest.mark.parametrize("per_sentence", ["best", "all"])
def test_memories_of_a_wide_layer_are_as_in_narrow_ones(per_sentence: str) -> None:
    """A block of several tiles has the same lists, sums, counts and quadrants as blocks of one tile each."""
    settings = ScanSettings(top=4, per_sentence=per_sentence)
    random, width = np.random.default_rng(4), COLUMNS + 77
    lengths = np.resize([11, 10, 9, 3], 20)
    sentences, positions = np.repeat(np.arange(20), lengths), np.concatenate([np.arange(size) for size in lengths])
    rows = len(sentences)
    coefficients, gates = torch.from_numpy(random.normal(size=(2, rows, width)).astype(np.float32))

    def arrays_of(first: int, last: int) -> dict[str, np.ndarray]:
        layer = LayerScan(0, last - first, bottom=True, gated=True, settings=settings)
        block = make_block(coefficients[:, first:last], gates[:, first:last])
        layer.update(block, make_candidates(np.arange(rows), sentences, positions))
        return layer.arrays()

    wide, left, right = arrays_of(0, width), arrays_of(0, 900), arrays_of(900, width)
    compared = 0
    for name, array in wide.items():
        is_drawn = name.startswith("sample.examples")  # by the number of the memory
        if len(array) % width == 0 and not is_drawn:
            np.testing.assert_array_equal(array, np.concatenate([left[name], right[name]]), err_msg=name)
            compared += 1
    assert compared >= 13 and wide["quadrants.counts"].min() > 0


TINY = np.float32(1e-45)  # the smallest positive float32
ODD = np.array([0.0, -0.0, TINY, -TINY, 1e-40, -1e-40, 1.1754944e-38, 0.5, -0.5, 0.5 + 2**-24, 3.0, 1e9], np.float32)


@pytest.mark.parametrize("per_sentence", ["best", "all"])
@given(st.randoms(use_true_random=False))
def test_every_statistic_merges_to_the_same_bits_in_any_tree(per_sentence: str, random: Random) -> None:
    """Zeros of both signs, denormal numbers and ties, in parts that are merged in any order."""
    options = ScanSettings(top=3, per_sentence=per_sentence, sample_every=2)
    width, rows, count = 5, 6, 7
    draw = np.random.default_rng(random.getrandbits(32))
    blocks = [draw.choice(ODD[: draw.integers(1, len(ODD) + 1)], (rows, width)) for _ in range(count)]

    def scan_blocks(numbers: list[int]) -> LayerScan:
        layer = LayerScan(0, width, bottom=True, gated=True, settings=options)
        for number in numbers:
            sentences = np.arange(rows) // 2 + 3 * number
            candidates = make_candidates(np.arange(rows), sentences, np.arange(rows) % 2)
            coefficients = torch.from_numpy(blocks[number])
            layer.update(make_block(coefficients, coefficients.flip(0)), candidates)
        return layer

    whole = scan_blocks(list(range(count))).arrays()
    parts = [scan_blocks([number]) for number in random.sample(range(count), count)]
    while len(parts) > 1:
        one, other = (parts.pop(random.randrange(len(parts))) for _ in range(2))
        one.merge(other)
        parts.append(one)
    restored = LayerScan(0, width, bottom=True, gated=True, settings=options)
    restored.restore_(parts[0].arrays())
    for name, array in restored.arrays().items():
        assert array.tobytes() == whole[name].tobytes(), name
    together = np.concatenate(blocks)
    highest, lowest = whole["totals.highest"], whole["totals.lowest"]
    assert (highest == together.max(0)).all() and not np.signbit(highest[highest == 0]).any()
    assert (lowest == together.min(0)).all() and not np.signbit(lowest[lowest == 0]).any()
    assert (whole["totals.fired"].sum(1) == (together > 0).sum(0)).all()
