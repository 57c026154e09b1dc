"""Conversion between the names of memories and experts and their numbers in tables."""

import itertools

import duckdb
import pytest

from memlens.errors import UnknownName
from memlens.memory import ExpertId, GroupShape, MemoryId, MemoryNames

LAYERS = {
    0: (GroupShape("dense", 1, 7),),
    2: (GroupShape("dense", 1, 3), GroupShape("shared", 2, 5), GroupShape("routed", 4, 6)),
    3: (),
}


def by_hand(layer: int) -> list[str]:
    """Return every name of a layer in order."""
    letters = {"dense": "", "shared": "S", "routed": "E"}
    return [
        f"L{layer}{letters[kind]}{expert if kind != 'dense' else ''}N{memory}"
        for kind, count, size in ((group.kind, group.count, group.size) for group in LAYERS[layer])
        for expert, memory in itertools.product(range(count), range(size))
    ]


@pytest.mark.parametrize("layer", LAYERS)
def test_names_and_numbers_of_a_layer_are_one_to_one_in_python_and_in_sql(layer: int) -> None:
    names, expected = MemoryNames(LAYERS), by_hand(layer)
    assert names.count(layer) == len(expected)
    memories = [names.name(layer, number) for number in range(len(expected))]
    assert [str(memory) for memory in memories] == expected and memories == sorted(memories)
    assert [MemoryId.parse(name) for name in expected] == memories
    assert [names.number(memory) for memory in memories] == list(range(len(expected)))
    for number, name in enumerate(expected):
        assert duckdb.sql(f"SELECT {names.sql(layer, str(number))}").fetchall() == [(name,)]
    with pytest.raises(UnknownName, match=f"has no memory with the number {len(expected)}"):
        names.name(layer, len(expected))


def test_an_unknown_memory_or_expert_is_rejected_with_those_that_exist() -> None:
    names = MemoryNames(LAYERS, "tiny")
    assert ExpertId.find(" l2e3 ") == ExpertId(2, "routed", 3) and ExpertId.find("L2N3") is ExpertId.find("L2") is None
    assert names.span(ExpertId(2, "routed", 3)) == range(31, 37) and names.span(ExpertId(2, "shared", 1)) == range(
        8, 13
    )
    assert str(ExpertId(2, "routed", 3)) == "L2E3" and MemoryId.parse("L2E3N5").owner == ExpertId(2, "routed", 3)
    experts = "L2S0 to L2S1 with memories 0 to 4 and L2E0 to L2E3 with memories 0 to 5"
    has = f"layer 2 of tiny has memories 0 to 2 and {experts}"
    for wrong in ("L2N3", "L2S2N0", "L2S0N5", "L2E4N0", "L2E0N6"):
        with pytest.raises(UnknownName, match=f"{wrong} does not exist: {has}"):
            names.number(MemoryId.parse(wrong))
    with pytest.raises(UnknownName, match="L2E9 does not exist"):
        names.span(ExpertId(2, "routed", 9))
    with pytest.raises(UnknownName, match="L3N0 does not exist: layer 3 of tiny has no memories"):
        names.number(MemoryId(3, 0))
