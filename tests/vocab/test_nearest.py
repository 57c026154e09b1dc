"""Nearest memories, against all cosines one by one."""

import pytest
import torch

from memlens.errors import SettingError, UnknownName
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.vocab.nearest import Side, nearest_memories


def naive_vector(model: MemoryModel, layer: int, number: int, by: Side) -> torch.Tensor:
    memories = model.layers[layer]
    if by == "value":
        return memories.values[number].double()
    norm, key = memories.input_norm, memories.keys[number].double()
    return key if norm is None else norm.folded(torch.eye(len(key))).double() @ key  # what each unit of stream does


@pytest.mark.parametrize("by", ["key", "value"])
def test_nearest_memories_are_those_with_the_highest_cosines(fresh: tuple[Index, MemoryModel], by: Side) -> None:
    index, model = fresh
    vectors = {
        index.names.name(layer, number): naive_vector(model, layer, number, by)
        for layer in index.layers
        for number in range(index.memories(layer))
    }
    for name in (index.names.name(0, 3), index.names.name(index.layers[-1], 17)):
        cosines = {
            other: float(torch.cosine_similarity(vectors[name], vector, dim=0))
            for other, vector in vectors.items()
            if other != name
        }
        found = nearest_memories(index, model, name, by, 7)
        best = sorted(cosines, key=lambda other: (-cosines[other], other))[:7]
        assert [one.cosine for one in found] == pytest.approx([cosines[other] for other in best], abs=1e-5)
        assert [one.cosine for one in found] == pytest.approx([cosines[one.name] for one in found], abs=1e-5)
    with pytest.raises(SettingError):
        nearest_memories(index, model, "L0N0", by, 0)
    with pytest.raises(UnknownName):
        nearest_memories(index, model, "L0N4000", by)
