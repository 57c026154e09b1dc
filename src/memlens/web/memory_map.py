"""The map of all memories: one cell per memory, a byte each, coloured by a statistic and sorted within each layer.

A layer with more memories than there is room for is drawn in cells of several; a cell then stands for its highest
memory, so that nothing rare disappears.
"""

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from memlens.errors import UnknownName
from memlens.memory import ROLES, GroupShape
from memlens.pattern.related import order_by_likeness
from memlens.web.served_index import ServedIndex, Statistics

NOTHING = 255  # the level of a memory of which nothing is known
_STEPS = 254


@dataclass(frozen=True)
class Measure:
    """Something the map can be coloured by."""

    name: str
    label: str
    meaning: str  # in one line
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
        kinds=("no pattern", "shallow only", "semantic only", "both kinds"),
    ),
    Measure("role", "role", "what it is for, by the first of its roles", kinds=("no role", *ROLES)),
    Measure("dead", "never fires", "memories without any trigger", kinds=("fires", "never fires")),
)


@dataclass(frozen=True)
class Sort:
    """An order of a layer's memories on the map."""

    name: str
    label: str
    needs: str = ""  # a category of the statistics


SORTS = (
    Sort("place", "place in the layer"),
    Sort("level", "what it is coloured by"),
    Sort("class", "kind of pattern", "class"),
    Sort("role", "role", "role"),
    Sort("likeness", "likeness"),
)


class MapLayer(BaseModel):
    """One row of the map: how many memories it has, how many of them are one cell, and what names are made from."""

    layer: int
    memories: int
    size: int
    groups: list[GroupShape]


class MemoryMap(BaseModel):
    """Cells of all layers, one after another: a byte per cell, in base64. 255 is a cell of which nothing is known.

    A number's level l means low + (high - low) * l / 254, or on a log scale low * (high / low) ** (l / 254); for
    anything else it is a place in `kinds`. `memories` says which memory of its layer each cell stands for (four bytes
    per cell, little endian), where that is not simply its place.
    """

    by: str
    sort: str
    label: str
    meaning: str
    scale: str
    percent: bool
    low: float | None
    high: float | None
    kinds: list[str]
    layers: list[MapLayer]
    levels: str
    memories: str | None


def measures(statistics: Statistics) -> list[Measure]:
    """The measures that the tables of this index allow."""
    return [
        measure for measure in MEASURES if measure.name in statistics.numbers or measure.name in statistics.categories
    ]


def sorts(statistics: Statistics) -> list[Sort]:
    """The sort orders that the tables of this index allow."""
    return [sort for sort in SORTS if not sort.needs or sort.needs in statistics.categories]


Orders = dict[int, NDArray[np.int64]]  # layer -> its memories in a row


def draw_map(
    statistics: Statistics, by: str, room: int, sort: str = "place", alike: Callable[[], Orders] = dict
) -> MemoryMap:
    """The cells of the map, at most `room` per layer; `alike` is called where memories are sorted by likeness."""
    measure = next((known for known in measures(statistics) if known.name == by), None)
    if measure is None:
        known = ", ".join(known.name for known in measures(statistics))
        raise UnknownName(f"the map cannot be coloured by '{by}'; it can by: {known}")
    if all(known.name != sort for known in sorts(statistics)):
        known = ", ".join(known.name for known in sorts(statistics))
        raise UnknownName(f"the map cannot be sorted by '{sort}'; it can by: {known}")
    levels, low, high = _levels_of(statistics, measure)
    rows, cells, memories = [], [], []
    orders = alike() if sort == "likeness" else None
    for layer in statistics.layers:
        of_layer = levels[statistics.rows_of_layer(layer)]
        order = _order(statistics, layer, sort, of_layer) if orders is None else orders[layer]
        size = max(1, -(-len(of_layer) // room))
        highest, place = _cells(of_layer[order], size)
        groups = list(statistics.names.layers[layer])
        rows.append(MapLayer(layer=layer, memories=len(of_layer), size=size, groups=groups))
        cells.append(highest)
        memories.append(order[np.arange(len(place)) * size + place])
    is_plain = sort == "place" and all(row.size == 1 for row in rows)
    return MemoryMap(
        by=by,
        sort=sort,
        label=measure.label,
        meaning=measure.meaning,
        scale=measure.scale,
        percent=measure.percent,
        low=low,
        high=high,
        kinds=list(measure.kinds),
        layers=rows,
        levels=b64encode(np.concatenate(cells).tobytes()).decode(),
        memories=None if is_plain else b64encode(np.concatenate(memories).astype("<u4").tobytes()).decode(),
    )


def _order(statistics: Statistics, layer: int, sort: str, levels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The layer's memories in the order of the map: high levels first, what is not known last."""
    if sort == "place":
        return np.arange(len(levels))
    if sort != "level":
        levels = statistics.categories[sort][statistics.rows_of_layer(layer)]
    known = np.where(levels == NOTHING, -1, levels.astype(np.int16))
    return np.argsort(-known, kind="stable")


def likeness(index: ServedIndex) -> Orders:
    """The memories of every layer, each beside one that it shares most with; made once."""
    tables, key = ("triggers", "values"), ("likeness",)
    return index.remember(tables, key, lambda: {layer: order_by_likeness(index, layer) for layer in index.layers})


def _levels_of(statistics: Statistics, measure: Measure) -> tuple[NDArray[np.uint8], float | None, float | None]:
    if measure.kinds:
        return statistics.categories[measure.name], None, None
    numbers = statistics.numbers[measure.name]
    low, high = _range(numbers, measure.scale)
    return _levels(numbers, measure.scale, low, high), low, high


def _range(numbers: NDArray[np.floating], scale: str) -> tuple[float, float]:
    """The lowest and highest number without the most extreme 1 in 500: one odd memory must not hide all others."""
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
