"""Lists of triggers against a sort of all prefixes, in any order, split and merge tree, with ties."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from memlens.models.groups import CoefficientBlock
from memlens.scanner.kernels import COLUMNS, make_candidates
from memlens.scanner.layer import LayerScan, TopTriggers
from memlens.settings import ScanSettings

MEMORIES = 3


def empty_scan(memories: int, top: int, per_sentence: str) -> LayerScan:
    return LayerScan(0, memories, bottom=True, settings=ScanSettings(top=top, per_sentence=per_sentence))


def add(scan: LayerScan, coefficients: np.ndarray, sentences: np.ndarray, positions: np.ndarray) -> None:
    """Add n prefixes: their coefficients [n, memories], sentences [n] and positions [n]."""
    count, memories = coefficients.shape
    group: Any = SimpleNamespace(start=0, columns=slice(0, memories), kind="dense", expert=0)
    block = torch.from_numpy(coefficients.astype(np.float32))
    candidates = make_candidates(np.arange(count), sentences, positions)
    scan.update(CoefficientBlock(group, (1, count), None, block, None), candidates)


def brute_force(rows: list[tuple[int, int, list[float]]], top: int, per_sentence: str, sign: int) -> list[list]:
    """Return the (coefficient, sentence, position) triples of each memory in the order of triggers."""
    lists = []
    for memory in range(MEMORIES):
        found = sorted((-sign * m[memory], s, p) for s, p, m in rows if sign * m[memory] > 0)
        if per_sentence == "best":
            first: dict[int, tuple] = {}
            for entry in found:
                first.setdefault(entry[1], entry)
            found = list(first.values())
        lists.append([(-sign * score, s, p) for score, s, p in found[:top]])
    return lists


def as_lists(triggers: TopTriggers, end: str) -> list[list]:
    found = triggers.result()[end]
    columns = (found.coefficients, found.sentences, found.positions)
    return [list(zip(*(column[m, :n].tolist() for column in columns), strict=True)) for m, n in enumerate(found.filled)]


def assert_equals_brute_force(triggers: TopTriggers, rows: list, top: int, per_sentence: str) -> None:
    assert as_lists(triggers, "top") == brute_force(rows, top, per_sentence, 1)
    assert as_lists(triggers, "bottom") == brute_force(rows, top, per_sentence, -1)


def fed(rows: list[tuple[int, int, list[float]]], top: int, per_sentence: str) -> TopTriggers:
    scan = empty_scan(MEMORIES, top, per_sentence)
    if rows:
        sentences, positions, coefficients = (np.array(column) for column in zip(*rows, strict=True))
        add(scan, coefficients, sentences, positions)
    return scan.triggers


# Few distinct values, so that ties abound; a prefix occurs once.
prefixes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), unique=True, min_size=0, max_size=60)
values = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.0, 2.0])


@st.composite
def corpora(draw: st.DrawFn) -> list[tuple[int, int, list[float]]]:
    return [(s, p, [draw(values) for _ in range(MEMORIES)]) for s, p in draw(prefixes)]


@given(corpora(), st.integers(1, 7), st.sampled_from(["best", "all"]))
def test_one_update_equals_brute_force(rows: list, top: int, per_sentence: str) -> None:
    assert_equals_brute_force(fed(rows, top, per_sentence), rows, top, per_sentence)


@given(corpora(), st.integers(1, 7), st.sampled_from(["best", "all"]), st.randoms(use_true_random=False))
def test_any_order_split_and_merge_tree_gives_the_same(rows: list, top: int, per_sentence: str, random) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    parts = []
    while shuffled:  # splits cut sentences in two as well
        size = random.randint(1, len(shuffled))
        parts.append(fed(shuffled[:size], top, per_sentence))
        shuffled = shuffled[size:]
    while len(parts) > 1:
        first = parts.pop(random.randrange(len(parts)))
        parts[random.randrange(len(parts))].merge(first)
    merged = parts[0] if parts else fed([], top, per_sentence)
    whole = fed(rows, top, per_sentence)
    np.testing.assert_array_equal(merged.top_lists.keys, whole.top_lists.keys)
    np.testing.assert_array_equal(merged.bottom_lists.keys, whole.bottom_lists.keys)
    assert_equals_brute_force(merged, rows, top, per_sentence)


@pytest.mark.parametrize("per_sentence", ["best", "all"])
def test_many_updates_over_wide_blocks_equal_brute_force(per_sentence: str) -> None:
    """Wider than one tile, more sentences than one group, lists that fill up and turn over."""
    random = np.random.default_rng(7)
    memories, top = COLUMNS + 476, 9
    scan = empty_scan(memories, top, per_sentence)
    sentences = np.repeat(np.arange(120), 5)
    positions = np.tile(np.arange(5), 120)
    coefficients = np.round(random.normal(size=(600, memories)), 1).astype(np.float32)
    for part in np.array_split(random.permutation(600), 4):
        add(scan, coefficients[part], sentences[part], positions[part])
    found = scan.triggers.result()["top"]
    for memory in range(0, memories, 37):
        order = np.lexsort((positions, sentences, -coefficients[:, memory]))
        expected, seen = [], set()
        for row in order:
            if coefficients[row, memory] > 0 and not (per_sentence == "best" and sentences[row] in seen):
                expected.append((sentences[row], positions[row]))
                seen.add(sentences[row])
        got = list(zip(found.sentences[memory], found.positions[memory], strict=True))
        assert got == expected[:top]


def test_a_memory_that_never_fires_has_no_triggers() -> None:
    triggers = fed([(0, 0, [0.0, -1.0, 1.0]), (0, 1, [0.0, 0.0, 0.0])], 5, "best")
    assert [len(entries) for entries in as_lists(triggers, "top")] == [0, 0, 1]
    assert [len(entries) for entries in as_lists(triggers, "bottom")] == [0, 1, 0]
