"""Memories that share triggers, values and patterns; Figure 2 from the machine's patterns and from people's."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from index_by_hand import complete_table, write_index
from memlens.annotations.records import Annotations, Label, LabeledPattern
from memlens.experiments import patterns as figure
from memlens.experiments.experiment import ModelShape
from memlens.experiments.run import EXPERIMENTS, is_made, is_outdated, run
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.pattern.related import (
    duplicate_groups,
    duplicates,
    order_by_likeness,
    related_memories,
    shared_patterns,
    token_sets,
    trigger_sets,
)
from memlens.pattern.table import PATTERNS_SCHEMA
from memlens.stats import wilson

TEXTS = [f"the press of day {n} was free" for n in range(40)]


@pytest.fixture
def index(tmp_path: Path) -> Index:
    random = np.random.default_rng(0)
    pools = [range(0, 12), range(0, 14), range(10, 40)]
    memories = {
        (layer, memory): [(int(s), 1) for s in random.choice(pools[memory % 3], 10, replace=False)]
        for layer in range(2)
        for memory in range(6)
    }
    values = {memory: [memory[1], 3 + memory[1] % 2, 6] for memory in memories}
    made = write_index(tmp_path / "index", TEXTS, memories, values=values)
    rows = [
        {"layer": layer, "memory": memory, "pattern": f"ending:{memory % 2}", "kind": kind, "description": "d",
         "prefixes": ranks, "confidence": 0.5}
        for layer in range(2) for memory, kind, ranks in ((0, "shallow", [0, 1, 2]), (0, "semantic", [2, 3, 4, 5]),
                                                          (2, "shallow", [7, 8, 9]))
    ]  # fmt: skip
    made.write({"patterns": (PATTERNS_SCHEMA, [complete_table("patterns", rows, PATTERNS_SCHEMA)])}, dict)
    return made


def naive_sets(index: Index) -> dict[MemoryId, set[int]]:
    found: dict[MemoryId, set[int]] = {}
    for row in index.table("triggers").to_pylist():
        found.setdefault(MemoryId(row["layer"], row["memory"]), set()).add(row["sentence"])
    return found


def test_the_most_similar_duplicates_come_first(index: Index) -> None:
    jaccards = [pair.jaccard for pair in duplicates(index, 0.3)]
    assert jaccards == sorted(jaccards, reverse=True) and jaccards[0] > jaccards[-1]


@pytest.mark.parametrize("least", [0.3, 0.5, 0.8, 1.0])
def test_duplicates_are_all_pairs_that_are_alike_enough(index: Index, least: float) -> None:
    sets = naive_sets(index)
    naive = {
        (one, other): len(sets[one] & sets[other]) / len(sets[one] | sets[other])
        for one, other in combinations(sorted(sets), 2)
    }
    found = {(pair.one, pair.other): pair.jaccard for pair in duplicates(index, least)}
    assert found == {pair: value for pair, value in naive.items() if value >= least}
    assert naive and len(found) < len(naive)


@pytest.mark.parametrize("of", [trigger_sets, token_sets])
@pytest.mark.parametrize("least", [0.3, 0.5, 0.8, 1.0])
def test_a_group_is_a_memory_and_all_that_are_alike_to_it(index: Index, of: Any, least: float) -> None:
    named, groups = of(index), []
    left = sorted(named)
    while left:
        alike = {
            name: [o for o in left if len(named[name] & named[o]) / len(named[name] | named[o]) >= least]
            for name in left
        }
        centre = min(left, key=lambda name: (-len(alike[name]), name))
        groups.append(alike[centre])
        left = [name for name in left if name not in alike[centre]]
    found = duplicate_groups(named, least)
    assert sorted(sorted(group.memories) for group in found) == sorted(group for group in groups if len(group) > 1)
    for group in found:
        first = named[group.memories[0]]
        shares = [len(first & named[name]) / len(first | named[name]) for name in group.memories]
        assert shares == sorted(shares, reverse=True) and shares[0] == 1 and shares[-1] == group.least >= least
    assert [len(group.memories) for group in found] == sorted((len(g) for g in groups if len(g) > 1), reverse=True)


def test_thousands_of_equal_memories_are_two_groups() -> None:
    named = {MemoryId(0, n): frozenset({1, 2, 3, 4 + n % 2}) for n in range(5000)}
    (odd, even) = duplicate_groups(named, 0.9)
    assert len(odd.memories) == len(even.memories) == 2500 and odd.least == 1.0


@pytest.mark.parametrize("layer", [0, 1])
def test_in_order_of_likeness_each_memory_is_followed_by_the_one_left_that_shares_most_with_it(
    index: Index, layer: int
) -> None:
    things: dict[int, set[object]] = {memory: set() for memory in range(index.memories(layer))}
    for memory, own in things.items():
        own |= {(one.prefix.sentence, one.prefix.position) for one in index.triggers(MemoryId(layer, memory))}
        own |= set(index.rows_of("values", [MemoryId(layer, memory)])[MemoryId(layer, memory)][0]["tokens"])
    order, left = [0], set(things) - {0}
    while left:
        order.append(min(left, key=lambda memory: (-len(things[order[-1]] & things[memory]), memory)))
        left.remove(order[-1])
    assert order_by_likeness(index, layer).tolist() == order != sorted(order)


def test_related_memories_share_triggers_tokens_or_patterns(index: Index) -> None:
    sets, own = naive_sets(index), MemoryId(0, 0)
    found = {related.name: related for related in related_memories(index, "L0N0", limit=100)}
    assert own not in found
    for memory, related in found.items():
        assert related.triggers == len(sets[own] & sets[memory])
    assert all(memory in found for memory in sets if memory != own and sets[own] & sets[memory])
    assert found[MemoryId(1, 0)].tokens == 3 and len(found[MemoryId(1, 0)].patterns) == 4  # 2 x 2 of one name


def test_shared_patterns_list_who_has_them(index: Index) -> None:
    (shared,) = shared_patterns(index)
    assert shared.pattern == "ending:0" and MemoryId(1, 2) in shared.memories


def test_figure_two_counts_every_prefix_once(index: Index) -> None:
    for row in figure.compute(index):
        assert row["prefixes"] == 60 == sum(row[kind] for kind in figure.KINDS)
        assert (row["shallow"], row["semantic"], row["both"]) == (5, 3, 1)
        assert row["shallow_low"] <= 5 / 60 <= row["shallow_high"]
        assert (row["memories"], row["patterned_memories"], row["patterns"]) == (6, 2, 3)
    assert [row["memories"] for row in figure.compute(index, sample=2)] == [2, 2]
    assert len(figure.draw(figure.compute(index), ModelShape.of(index))) == 2


def test_semantic_prefixes_are_implied_by_the_last_word_or_beyond_it(index: Index) -> None:
    described = [
        ("list:a month", "shallow", "ends with a month: may", [0, 1, 2]),
        ("topic:press", "semantic", "about: press", [2, 3]),
        ("ending:day", "shallow", 'ends with "day"', [3, 4]),
        ("early:3", "shallow", "ends within the first three words of a sentence", [5, 6]),
    ]
    rows = [
        {"layer": layer, "memory": 1, "pattern": name, "kind": kind, "description": text, "prefixes": ranks}
        for layer in range(2)
        for name, kind, text, ranks in described
    ]
    index.write({"patterns": (PATTERNS_SCHEMA, [complete_table("patterns", rows, PATTERNS_SCHEMA)])}, dict)
    for row in figure.compute(index):
        # ranks 0, 1: a month; 2: also a topic; 3: a topic and a wording; 4, 5, 6: wordings, of which 5 and 6 are new
        assert (row["implied"], row["beyond"], row["both"], row["shallow"]) == (2, 1, 1, 3)
        assert row["semantic"] == row["implied"] + row["beyond"]
        assert (row["paper_kinds"], row["paper_kinds_memories"]) == (5, 1)
        assert row["paper_kinds_low"] <= 5 / 60 <= row["paper_kinds_high"]


def test_figure_two_is_an_experiment_that_knows_when_patterns_or_labels_are_others(index: Index) -> None:
    known = EXPERIMENTS["patterns"]
    assert not is_made(index, known)
    made = run(index, "patterns")
    assert set(made) == {"patterns", "patterns-people"}
    assert made["patterns"] == pa.Table.from_pylist(figure.compute(index), made["patterns"].schema)
    assert is_made(index, known) and not is_outdated(index, known)
    notes = Annotations(index)
    notes.save(Label("ann", MemoryId(1, 0), ()))
    assert is_outdated(index, known) and not is_made(index, known)
    notes.finish("ann")
    assert run(index, "patterns")["patterns-people"].num_rows == 1 and is_made(index, known)
    table = index.table("patterns")
    index.write({"patterns": (PATTERNS_SCHEMA, [table.slice(1)])}, dict)
    assert is_outdated(index, known) and not is_made(index, known)


def test_a_kind_without_a_prefix_has_an_interval_all_the_same(index: Index) -> None:
    index.write({"patterns": (PATTERNS_SCHEMA, [PATTERNS_SCHEMA.empty_table()])}, dict)
    for row in figure.compute(index):
        assert (row["shallow_low"], row["shallow_high"]) == wilson(0, 6)
        assert (row["not_covered_low"], row["not_covered_high"]) == wilson(6, 6)


def test_figure_two_from_people_waits_until_they_have_finished(index: Index) -> None:
    assert figure.compute_people(index) == []
    notes = Annotations(index)
    notes.save(Label("ann", MemoryId(1, 0), (LabeledPattern("x", "semantic", (0, 1, 2)),)))
    assert figure.compute_people(index) == []
    notes.finish("ann")
    (row,) = figure.compute_people(index)
    assert (row["annotator"], row["layer"], row["semantic"], row["not_covered"]) == ("ann", 1, 3, 7)
    assert [panel.name for panel in figure.draw_people([row], ModelShape.of(index))] == ["patterns-people-0"]
