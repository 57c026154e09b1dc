"""Statistics of every memory as columns in memory, and of every layer: for the map, the search form and the overview.

A million memories are some tens of megabytes. Columns of tables that the index does not have are missing here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.web.served_index import ServedIndex

TABLES = ("memories", "values", "patterns")
CLASSES = ("none", "shallow", "semantic", "both")  # of patterns; a memory's class is its place here
AGREEMENTS = ("unknown", "no", "yes")


@dataclass(frozen=True, eq=False)
class Statistics:
    """Memories by layer and memory; every column is [memories]."""

    layers: tuple[int, ...]
    starts: NDArray[np.int64]  # [layers + 1]: a layer's first row
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)  # max, mean, frequency, max_p
    categories: dict[str, NDArray[np.uint8]] = field(default_factory=dict)  # dead, agreement, class

    def __len__(self) -> int:
        return int(self.starts[-1])

    def row_of(self, memory: MemoryId) -> int:
        return int(self.starts[self.layers.index(memory.layer)]) + memory.memory

    def rows_of_layer(self, layer: int) -> slice:
        place = self.layers.index(layer)
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def rows_of(self, layer: NDArray[Any], memory: NDArray[Any]) -> NDArray[np.int64]:
        """Rows of many memories at once."""
        known = np.array(self.layers)
        order = np.argsort(known)
        place = order[np.searchsorted(known, layer, sorter=order)]
        rows: NDArray[np.int64] = self.starts[place] + memory
        return rows


def read_statistics(index: ServedIndex) -> Statistics:
    """Of an index as it is now; read once."""
    return index.remember(TABLES, ("statistics",), lambda: _read(index))


def _read(index: Index) -> Statistics:
    layers = tuple(index.layers)
    counts = [index.memories(layer) for layer in layers]
    found = Statistics(layers, np.concatenate([[0], np.cumsum(counts)]))
    table = index.table("memories", ["layer", "memory", "max", "mean", "frequency", "dead"])
    rows = found.rows_of(table.column("layer").to_numpy(), table.column("memory").to_numpy())
    for name in ("max", "mean", "frequency"):
        found.numbers[name] = _placed(len(found), rows, table.column(name).to_numpy(), np.nan)
    dead = table.column("dead").to_numpy(zero_copy_only=False).astype(np.uint8)
    found.categories["dead"] = _placed(len(found), rows, dead, 0)
    if index.has("values"):
        _add_values_(found, index)
    if index.has("patterns"):
        _add_classes_(found, index)
    return found


def _add_values_(found: Statistics, index: Index) -> None:
    table = index.table("values", ["layer", "memory", "max_p", "argmax", "target"])
    rows = found.rows_of(table.column("layer").to_numpy(), table.column("memory").to_numpy())
    found.numbers["max_p"] = _placed(len(found), rows, table.column("max_p").to_numpy(), np.nan)
    target = table.column("target").fill_null(-1).to_numpy()
    agrees = np.where(target < 0, 0, 1 + (table.column("argmax").to_numpy() == target))
    found.categories["agreement"] = _placed(len(found), rows, agrees.astype(np.uint8), 0)


def _add_classes_(found: Statistics, index: Index) -> None:
    table = index.table("patterns", ["layer", "memory", "kind"])
    rows = found.rows_of(table.column("layer").to_numpy(), table.column("memory").to_numpy())
    semantic = np.array([kind == "semantic" for kind in table.column("kind").to_pylist()], np.bool_)
    classes = np.zeros(len(found), np.uint8)
    np.bitwise_or.at(classes, rows, np.where(semantic, 2, 1).astype(np.uint8))  # shallow 1, semantic 2, both 3
    found.categories["class"] = classes


def _placed(count: int, rows: NDArray[np.int64], values: NDArray[Any], missing: Any) -> NDArray[Any]:
    column = np.full(count, missing, values.dtype)
    column[rows] = values
    return column


_DEAD_NAMED = 24


class LayerStatistics(BaseModel):
    """One layer; what its tables do not say is null."""

    layer: int
    memories: int
    dead: int
    median_max: float | None
    mean_frequency: float | None
    median_max_p: float | None
    agreement: float | None
    with_pattern: float | None
    strongest: str
    dead_memories: list[str]


def read_layers(index: ServedIndex) -> list[LayerStatistics]:
    """All layers of the index, made once."""
    return index.remember(TABLES, ("layers",), lambda: _layers(read_statistics(index)))


def _layers(statistics: Statistics) -> list[LayerStatistics]:
    return [_layer(statistics, layer) for layer in statistics.layers]


def _layer(statistics: Statistics, layer: int) -> LayerStatistics:
    rows = statistics.rows_of_layer(layer)
    numbers = {name: column[rows] for name, column in statistics.numbers.items()}
    kinds = {name: column[rows] for name, column in statistics.categories.items()}
    dead = np.flatnonzero(kinds["dead"])
    agreement = kinds.get("agreement")
    known = 0 if agreement is None else int((agreement > 0).sum())
    highest = np.where(np.isfinite(numbers["max"]), numbers["max"], -np.inf)
    return LayerStatistics(
        layer=layer,
        memories=rows.stop - rows.start,
        dead=len(dead),
        median_max=_or_none(np.median(numbers["max"])),
        mean_frequency=_or_none(numbers["frequency"].mean()),
        median_max_p=_or_none(np.median(numbers["max_p"])) if "max_p" in numbers else None,
        agreement=None
        if agreement is None or not known
        else float((agreement == AGREEMENTS.index("yes")).sum()) / known,
        with_pattern=float((kinds["class"] > 0).mean()) if "class" in kinds else None,
        strongest=str(MemoryId(layer, int(highest.argmax()))),
        dead_memories=[str(MemoryId(layer, int(memory))) for memory in dead[:_DEAD_NAMED]],
    )


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
