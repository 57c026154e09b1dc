"""The model as a map: layers by memories, each cell a level of one statistic, small enough to be sent at once.

A layer with more memories than there is room for is drawn in cells of several; a cell then stands for its highest
memory, so that nothing rare disappears. Knows statistics; colours are the page's matter.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from memlens.errors import UnknownName
from memlens.web.statistics import Statistics

NOTHING = 255  # the level of a memory of which nothing is known
_STEPS = 254


@dataclass(frozen=True)
class Measure:
    """Something the map can be coloured by."""

    name: str
    label: str
    told: str  # what it means, in one line
    scale: str = "linear"  # linear or log, from the lowest to the highest
    kinds: tuple[str, ...] = ()  # names of levels, where it is no number
    percent: bool = False


MEASURES = (
    Measure("max", "strongest coefficient", "the highest coefficient that any prefix of the corpus gives it"),
    Measure("frequency", "how often it fires", "the share of prefixes with a positive coefficient", percent=True),
    Measure("mean", "mean coefficient", "over all prefixes of the corpus"),
    Measure("max_p", "confidence of its value", "the probability of the token it promotes most", "log", percent=True),
    Measure(
        "agreement",
        "agreement",
        "is the token it promotes most the one that follows its top trigger?",
        kinds=("nothing follows", "another token", "agrees"),
    ),
    Measure(
        "class",
        "kind of pattern",
        "what the machine found its triggers to have in common",
        kinds=("no pattern", "shallow", "semantic", "both"),
    ),
    Measure("dead", "never fires", "memories without any trigger", kinds=("fires", "never fires")),
)


class MapLayer(BaseModel):
    """One row of the map: how many memories it has, and how many of them are one cell."""

    layer: int
    memories: int
    size: int


class MapView(BaseModel):
    """Cells of all layers, one after another: a byte a cell, in base64. 255 is a cell of which nothing is known.

    A number's level l means low + (high - low) * l / 254, or on a log scale low * (high / low) ** (l / 254); for
    anything else it is a place in `kinds`. `highest` says which memory of a cell is meant (two bytes a cell, little
    endian), where any cell has several.
    """

    by: str
    label: str
    told: str
    scale: str
    percent: bool
    low: float | None
    high: float | None
    kinds: list[str]
    layers: list[MapLayer]
    levels: str
    highest: str | None


def measures(statistics: Statistics) -> list[Measure]:
    """What the tables of this index allow."""
    return [one for one in MEASURES if one.name in statistics.numbers or one.name in statistics.categories]


def draw_map(statistics: Statistics, by: str, room: int) -> MapView:
    """At most `room` cells a layer."""
    measure = next((one for one in measures(statistics) if one.name == by), None)
    if measure is None:
        known = ", ".join(one.name for one in measures(statistics))
        raise UnknownName(f"the map cannot be coloured by '{by}'; it can by: {known}")
    low = high = None
    if measure.kinds:
        levels = statistics.categories[by]
    else:
        low, high = _range(statistics.numbers[by], measure.scale)
        levels = _levels(statistics.numbers[by], measure.scale, low, high)
    rows, cells, places = [], [], []
    for layer in statistics.layers:
        own = levels[statistics.rows_of_layer(layer)]
        size = max(1, -(-len(own) // room))
        highest, place = _cells(own, size)
        rows.append(MapLayer(layer=layer, memories=len(own), size=size))
        cells.append(highest)
        places.append(place)
    is_binned = any(row.size > 1 for row in rows)
    return MapView(
        by=by,
        label=measure.label,
        told=measure.told,
        scale=measure.scale,
        percent=measure.percent,
        low=low,
        high=high,
        kinds=list(measure.kinds),
        layers=rows,
        levels=b64encode(np.concatenate(cells).tobytes()).decode(),
        highest=b64encode(np.concatenate(places).astype("<u2").tobytes()).decode() if is_binned else None,
    )


def _range(numbers: NDArray[np.floating], scale: str) -> tuple[float, float]:
    """From the lowest to the highest, the most extreme 1 in 500 left out: one odd memory must not hide all others."""
    known = numbers[np.isfinite(numbers) & ((numbers > 0) | (scale != "log"))]
    if not len(known):
        return (1e-9, 1.0) if scale == "log" else (0.0, 1.0)
    low, high = (float(number) for number in np.quantile(known, [0.002, 0.998]))
    if scale != "log":
        low = min(low, 0.0) if low < 0.3 * high else low
    return low, high if high > low else low + max(abs(low), 1e-9)


def _levels(numbers: NDArray[np.floating], scale: str, low: float, high: float) -> NDArray[np.uint8]:
    known = np.isfinite(numbers)
    value = np.clip(np.where(known, numbers, low), low, high).astype(np.float64)
    share = np.log(value / low) / np.log(high / low) if scale == "log" else (value - low) / (high - low)
    return np.where(known, np.rint(share * _STEPS), NOTHING).astype(np.uint8)


def _cells(levels: NDArray[np.uint8], size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The highest known level of each cell, and where in the cell it is."""
    if size == 1:
        return levels, np.zeros(len(levels), np.int64)
    padded = np.full(-(-len(levels) // size) * size, NOTHING, np.uint8)
    padded[: len(levels)] = levels
    block = padded.reshape(-1, size)
    order = np.where(block == NOTHING, -1, block.astype(np.int16))
    place = order.argmax(1)
    return block[np.arange(len(block)), place], place
