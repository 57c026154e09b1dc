"""The index layer by layer in a few numbers: what the overview says without a picture."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel

from memlens.memory import MemoryId
from memlens.web.served_index import ServedIndex
from memlens.web.statistics import AGREEMENTS, TABLES, Statistics, read_statistics

_DEAD_NAMED = 24


class LayerView(BaseModel):
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


def read_layers(index: ServedIndex) -> list[LayerView]:
    """All layers of the index, made once."""
    return index.remember(TABLES, ("layers",), lambda: _layers(read_statistics(index)))


def _layers(statistics: Statistics) -> list[LayerView]:
    return [_layer(statistics, layer) for layer in statistics.layers]


def _layer(statistics: Statistics, layer: int) -> LayerView:
    rows = statistics.rows_of_layer(layer)
    numbers = {name: column[rows] for name, column in statistics.numbers.items()}
    kinds = {name: column[rows] for name, column in statistics.categories.items()}
    dead = np.flatnonzero(kinds["dead"])
    agreement = kinds.get("agreement")
    known = 0 if agreement is None else int((agreement > 0).sum())
    highest = np.where(np.isfinite(numbers["max"]), numbers["max"], -np.inf)
    return LayerView(
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
