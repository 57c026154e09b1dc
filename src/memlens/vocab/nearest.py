"""The nearest memories in all scanned layers, by the cosine of their keys or values.

The linear part of the norm before a block is folded into the block's keys (table.folded_keys), so that keys of
different layers can be compared. In a gated block, the key is the gate's weight vector. A value is a row of the down
projection.
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
    """A memory, and the cosine between its key or value and the key or value of the given memory."""

    name: MemoryId
    cosine: float
    summary: str | None  # summary of the memory in one line


def nearest_memories(
    index: Index, model: MemoryModel, memory: str | MemoryId, by: Side, limit: int = 12
) -> list[NearMemory]:
    """Return the nearest memories, sorted by cosine and name, with summaries from the index.

    Raises:
        SettingError: `limit` is less than 1.
        UnknownName: The index has no such memory.
    """
    if limit < 1:
        raise SettingError(f"limit is {limit}; it must be 1 or more")
    name = index.check(memory)
    vector = _vectors(model.layers[name.layer], by)[index.names.number(name)]
    near: dict[MemoryId, float] = {}
    for layer in index.layers:
        cosines = _cosines(_vectors(model.layers[layer], by), vector)
        best_numbers = np.argsort(-cosines, kind="stable")[: limit + 1].tolist()  # the memory itself may be included
        near |= {index.names.name(layer, number): float(cosines[number]) for number in best_numbers}
    near.pop(name, None)
    best = sorted(near.items(), key=lambda item: (-item[1], item[0]))[:limit]
    summaries = read_summaries(index, [other for other, _ in best])
    return [NearMemory(other, cosine, summaries.get(other)) for other, cosine in best]


def _vectors(memories: MemoryLayer, by: Side) -> torch.Tensor:
    """Return the keys or values of a layer, [memories, d]."""
    from memlens.models.lens import at_least_float32
    from memlens.vocab.table import folded_keys

    return (folded_keys(memories) if by == "key" else at_least_float32(memories.values)).detach()


def _cosines(rows: torch.Tensor, one: torch.Tensor) -> NDArray[np.float32]:
    """Return the cosine of each row with the vector `one`, or 0 if the row or the vector has length 0. [rows]"""
    lengths = rows.norm(dim=1) * one.norm()
    cosines: NDArray[np.float32] = ((rows @ one) / lengths.clamp(min=1e-30)).cpu().numpy()
    return cosines
