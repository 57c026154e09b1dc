"""Where a layer sits, so that models of different depth share one axis.

Relative depth is (layer + 1/2) / L: the middle of the layer's part of the stack. It is never 0 or 1, it exists for a
model of one layer, and layers of two models that cover the same part of the stack lie at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

FORMULA = "(layer + ½) / L"
THIRDS = ("lower", "middle", "upper")


def depth(layer: int, layers: int) -> float:
    """Relative depth of a layer (from 0) of a model that has so many."""
    return round((layer + 0.5) / layers, 6)


def third(layer: int, layers: int) -> str:
    """In which third of the stack the middle of the layer lies."""
    return THIRDS[min(int(3 * (layer + 0.5) / layers), 2)]


def in_third(rows: Iterable[Row], which: str, layers: int) -> list[Row]:
    """The rows whose layer lies in that third."""
    return [row for row in rows if third(row["layer"], layers) == which]


def with_depth(rows: Iterable[Row], layers: int) -> list[Row]:
    """The rows with their relative depth."""
    return [{"depth": depth(row["layer"], layers), **row} for row in rows]
