"""Nearest memories of all scanned layers: by the cosine of their values, or of their keys as the stream meets them.

A key is taken through the linear part of the norm before its block (table.folded_keys), so that keys of different
layers look at the same stream; of a gated block it is the gate's. A value is the row of the down projection as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from memlens.errors import SettingError
from memlens.index.memory import read_summaries
from memlens.index.reader import Index
from memlens.memory import MemoryId

if TYPE_CHECKING:
    import torch

    from memlens.models.groups import MemoryLayer
    from memlens.models.memory_model import MemoryModel

Side = Literal["key", "value"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class NearMemory:
    """Another memory and the cosine of the two."""

    name: MemoryId
    cosine: float
    summary: str | None  # the memory in one line


def nearest_memories(
    index: Index, model: MemoryModel, memory: str | MemoryId, by: Side, limit: int = 12
) -> list[NearMemory]:
    """The highest cosine first; of equal ones the earlier memory. The index says which layers, and what they are."""
    if limit < 1:
        raise SettingError(f"limit is {limit}; it must be 1 or more")
    name = index.check(memory)
    own = _vectors(model.layers[name.layer], by)[index.names.number(name)]
    found: dict[MemoryId, float] = {}
    for layer in index.layers:
        cosines = _cosines(_vectors(model.layers[layer], by), own)
        best_numbers = np.argsort(-cosines, kind="stable")[: limit + 1].tolist()  # one of them may be itself
        found |= {index.names.name(layer, number): float(cosines[number]) for number in best_numbers}
    found.pop(name, None)
    best = sorted(found.items(), key=lambda one: (-one[1], one[0]))[:limit]
    summaries = read_summaries(index, [other for other, _ in best])
    return [NearMemory(other, cosine, summaries.get(other)) for other, cosine in best]


def _vectors(memories: MemoryLayer, by: Side) -> torch.Tensor:
    """[memories, d]"""
    from memlens.models.lens import at_least_float32
    from memlens.vocab.table import folded_keys

    return (folded_keys(memories) if by == "key" else at_least_float32(memories.values)).detach()


def _cosines(rows: torch.Tensor, one: torch.Tensor) -> NDArray[np.float32]:
    """0 where a vector has no direction. [rows]"""
    lengths = rows.norm(dim=1) * one.norm()
    cosines: NDArray[np.float32] = ((rows @ one) / lengths.clamp(min=1e-30)).cpu().numpy()
    return cosines
