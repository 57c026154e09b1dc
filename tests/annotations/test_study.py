"""The study with people: samples, progress, agreement, and the machine against people."""

from __future__ import annotations

import pytest
from people import NEWS, PRESS, label

from index_by_hand import complete_table
from memlens.annotations.records import Annotations, LabeledPattern
from memlens.annotations.study import (
    cohens_kappa,
    compare_with_people,
    compute_agreement,
    draw_sample,
)
from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.pattern.table import PATTERNS_SCHEMA


def label_four(index: Index) -> None:
    """Two people, four memories: they agree on the class of three."""
    notes = Annotations(index)
    for name, patterns in {
        "ann": ([PRESS], [NEWS], [], [PRESS, NEWS]),
        "bob": ([LabeledPattern("press", "shallow", (0, 1, 2, 5))], [NEWS], [], [PRESS]),
    }.items():
        for memory, own in enumerate(patterns):
            notes.save(label(name, f"L0N{memory}", *own))
        notes.finish(name)


def test_a_sample_has_as_many_live_memories_of_each_layer(index: Index) -> None:
    sample = draw_sample(index, per_layer=4, seed=3)
    assert [memory.layer for memory in sample.memories] == [0] * 4 + [1] * 4
    assert len(set(sample.memories)) == 8 and sample == draw_sample(index, per_layer=4, seed=3)
    assert sample != draw_sample(index, per_layer=4, seed=4)
    assert len(draw_sample(index, per_layer=50).memories) == 12  # the dead memory is left out


def test_kappa_is_one_for_equal_and_about_zero_for_unrelated_labels() -> None:
    assert cohens_kappa([("a", "a"), ("b", "b")]) == 1
    assert cohens_kappa([("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]) == 0
    assert cohens_kappa([("a", "a")]) is None and cohens_kappa([]) is None
    # worked by hand: 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no
    pairs = [("y", "y")] * 20 + [("y", "n")] * 5 + [("n", "y")] * 10 + [("n", "n")] * 15
    assert cohens_kappa(pairs) == pytest.approx(0.4)


def test_agreement_counts_classes_and_overlaps_of_prefixes(index: Index) -> None:
    with pytest.raises(SettingError, match="two annotators"):
        compute_agreement(Annotations(index))
    label_four(index)
    (pair,) = compute_agreement(Annotations(index))
    assert (pair.one, pair.other, pair.memories, pair.same_class) == ("ann", "bob", 4, 3)
    # classes: shallow-shallow, semantic-semantic, none-none, both-shallow; by chance 1/4*2/4 + 1/4*1/4 + 1/4*1/4
    assert pair.kappa == pytest.approx((3 / 4 - 1 / 4) / (1 - 1 / 4))
    assert pair.jaccard_shallow == pytest.approx((3 / 5 + 1) / 2)
    assert pair.jaccard_semantic == pytest.approx((1 + 0) / 2)
    assert pair.jaccard_either == pytest.approx((3 / 5 + 1 + 4 / 5) / 3)


def test_the_machine_is_compared_with_each_person(index: Index) -> None:
    label_four(index)
    rows = [
        {"layer": 0, "memory": 0, "pattern": "p", "kind": "shallow", "description": "d", "prefixes": [0, 1, 7]},
        {"layer": 0, "memory": 2, "pattern": "p", "kind": "shallow", "description": "d", "prefixes": [0, 1, 2]},
        {"layer": 1, "memory": 0, "pattern": "p", "kind": "shallow", "description": "d", "prefixes": [0, 1, 2]},
    ]
    table = complete_table("patterns", rows, PATTERNS_SCHEMA)
    index.write({"patterns": (PATTERNS_SCHEMA, [table])}, dict)
    found = {(row.annotator, row.kind): row for row in compare_with_people(Annotations(index))}
    ann = found["ann", "shallow"]
    assert (ann.memory_precision, ann.memory_recall) == (1 / 2, 1 / 2)
    assert (ann.prefix_precision, ann.prefix_recall) == (2 / 6, 2 / 8)
    assert found["bob", "semantic"].memory_precision is None and found["bob", "semantic"].memory_recall == 0
