"""Statistics of all memories as columns, the table of layers, and the map, which has one cell of one byte per memory.

The statistics of a million memories take some tens of megabytes. A column is missing if the index lacks its table. If a
layer has more memories than fit on the map, each cell stands for several memories and shows the highest level among
them, so that rare memories stay visible.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from memlens.errors import UnknownName
from memlens.index.reader import Index
from memlens.memory import ROLES, GroupShape, MemoryId, MemoryNames

if TYPE_CHECKING:
    from memlens.web.workbench import ServedIndex

# Statistics

CLASSES = ("none", "shallow", "semantic", "both")  # classes of memories by their patterns
AGREEMENTS = ("unknown", "no", "yes")
_DEAD_NAMED = 24


@dataclass(frozen=True, eq=False)
class Statistics:
    """Columns with one entry per memory, ordered by layer and memory."""

    layers: tuple[int, ...]
    names: MemoryNames
    starts: NDArray[np.int64]  # [layers + 1]: first row of each layer
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)  # keys: max, mean, frequency, max_p
    categories: dict[str, NDArray[np.uint8]] = field(default_factory=dict)  # keys: dead, agreement, class, role

    def __len__(self) -> int:
        return int(self.starts[-1])

    def row_of(self, memory: MemoryId) -> int:
        """Return the row of a memory."""
        return int(self.starts[self.layers.index(memory.layer)]) + self.names.number(memory)

    def rows_of_layer(self, layer: int) -> slice:
        """Return the rows of a layer."""
        place = self.layers.index(layer)
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def rows_of(self, layer: NDArray[Any], memory: NDArray[Any]) -> NDArray[np.int64]:
        """Return the rows of many memories."""
        layers = np.array(self.layers)
        order = np.argsort(layers)
        place = order[np.searchsorted(layers, layer, sorter=order)]
        rows: NDArray[np.int64] = self.starts[place] + memory
        return rows


def read_statistics(index: ServedIndex) -> Statistics:
    """Return the statistics of an index, which are read only once."""
    return index.remember("statistics", lambda: _read_statistics(index))


def _read_statistics(index: Index) -> Statistics:
    layers = tuple(index.layers)
    counts = [index.memories(layer) for layer in layers]
    statistics = Statistics(layers, index.names, np.concatenate([[0], np.cumsum(counts)]))

    def read(name: str, columns: list[str]) -> tuple[dict[str, Any], NDArray[np.int64]]:
        table = index.table(name, ["layer", "memory", *columns])
        rows = statistics.rows_of(table.column("layer").to_numpy(), table.column("memory").to_numpy())
        return {column: table.column(column) for column in columns}, rows

    def place(rows: NDArray[np.int64], values: NDArray[Any], missing: Any) -> NDArray[Any]:
        column = np.full(len(statistics), missing, values.dtype)
        column[rows] = values
        return column

    table, rows = read("memories", ["max", "mean", "frequency", "dead"])
    for name in ("max", "mean", "frequency"):
        statistics.numbers[name] = place(rows, table[name].to_numpy(), np.nan)
    dead = table["dead"].to_numpy(zero_copy_only=False).astype(np.uint8)
    statistics.categories["dead"] = place(rows, dead, 0)
    if index.has("values"):
        table, rows = read("values", ["max_p", "argmax", "target"])
        statistics.numbers["max_p"] = place(rows, table["max_p"].to_numpy(), np.nan)
        target = table["target"].fill_null(-1).to_numpy()
        agrees = np.where(target < 0, 0, 1 + (table["argmax"].to_numpy() == target))
        statistics.categories["agreement"] = place(rows, agrees.astype(np.uint8), 0)
    if index.has("patterns"):
        table, rows = read("patterns", ["kind"])
        bits = {"shallow": 1, "semantic": 2}  # 3 means both; "next token" is not a class
        own = np.array([bits.get(kind, 0) for kind in table["kind"].to_pylist()], np.uint8)
        classes = np.zeros(len(statistics), np.uint8)
        np.bitwise_or.at(classes, rows, own)
        statistics.categories["class"] = classes
    if index.has("roles"):
        table, rows = read("roles", ["role"])
        # 0 means no role, or a role that this version of memlens does not know
        places = {role: 1 + number for number, role in enumerate(ROLES)}
        roles = np.array([places.get(role, 0) for role in table["role"].to_pylist()])
        statistics.categories["role"] = place(rows, roles.astype(np.uint8), 0)
    return statistics


class LayerStatistics(BaseModel):
    """Statistics of one layer. A statistic is null if the index lacks its table."""

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
    """Return the statistics of every layer, which are computed only once per index."""

    def make() -> list[LayerStatistics]:
        statistics = read_statistics(index)
        return [_summarize_layer(statistics, layer) for layer in statistics.layers]

    return index.remember("layers", make)


def _summarize_layer(statistics: Statistics, layer: int) -> LayerStatistics:
    rows = statistics.rows_of_layer(layer)
    numbers = {name: column[rows] for name, column in statistics.numbers.items()}
    categories = {name: column[rows] for name, column in statistics.categories.items()}
    dead = np.flatnonzero(categories["dead"])
    agreement = None
    if "agreement" in categories and categories["agreement"].any():
        is_known = categories["agreement"] > 0
        agreement = float((categories["agreement"][is_known] == AGREEMENTS.index("yes")).mean())
    highest = np.where(np.isfinite(numbers["max"]), numbers["max"], -np.inf)
    return LayerStatistics(
        layer=layer,
        memories=rows.stop - rows.start,
        dead=len(dead),
        median_max=_or_none(np.median(numbers["max"])),
        mean_frequency=_or_none(numbers["frequency"].mean()),
        median_max_p=_or_none(np.median(numbers["max_p"])) if "max_p" in numbers else None,
        agreement=agreement,
        with_pattern=float((categories["class"] > 0).mean()) if "class" in categories else None,
        strongest=str(statistics.names.name(layer, int(highest.argmax()))),
        dead_memories=[str(statistics.names.name(layer, int(memory))) for memory in dead[:_DEAD_NAMED]],
    )


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


# The map

NOTHING = 255  # level of a memory without a value
_STEPS = 254
_QUANTILES = 33


@dataclass(frozen=True)
class Measure:
    """A statistic that can color the map."""

    name: str
    label: str
    meaning: str  # explanation in one line
    kinds: tuple[str, ...] = ()  # names of the levels of a category
    percent: bool = False


MEASURES = (
    Measure("max", "max coefficient", "the largest coefficient on the corpus"),
    Measure("frequency", "activation frequency", "the share of prefixes with a positive coefficient", percent=True),
    Measure("mean", "mean coefficient", "the mean coefficient over all prefixes of the corpus"),
    Measure("max_p", "max p of the value", "the probability of the value's top token", percent=True),
    Measure(
        "agreement",
        "agreement",
        "whether the top token of the value is the token that follows the top trigger",
        kinds=("no next token", "different token", "agrees"),
    ),
    Measure(
        "class",
        "kind of pattern",
        "what the triggers have in common",
        kinds=("no pattern", "shallow only", "semantic only", "both kinds"),
    ),
    Measure("role", "role", "the first role of each memory", kinds=("no role", *ROLES)),
    Measure("dead", "dead", "whether the memory is active on any prefix of the corpus", kinds=("active", "dead")),
)

# name -> label; "class" and "role" are offered only if their tables exist
SORTS = {
    "place": "position in the layer",
    "level": "color",
    "class": "kind of pattern",
    "role": "role",
    "likeness": "similarity",
}


class MapLayer(BaseModel):
    """One row of the map: number of memories, memories per cell, and the groups from which names are derived."""

    layer: int
    memories: int
    size: int
    groups: list[GroupShape]


class MemoryMap(BaseModel):
    """The cells of all layers, one byte per cell, in base64. A cell without a value is 255.

    If the statistic is a number, level l means that a share l / 254 of all memories has a lower value. To get the
    value, interpolate in `quantiles`, which are equally spaced. For a category, the level is an index into `kinds`.
    `memories` holds the index of the memory that each cell shows (four bytes per cell, little endian), or null if cell
    i shows memory i.
    """

    by: str
    sort: str
    label: str
    meaning: str
    percent: bool
    quantiles: list[float]
    kinds: list[str]
    layers: list[MapLayer]
    levels: str
    memories: str | None


def list_measures(statistics: Statistics) -> list[Measure]:
    """Return the measures that this index has."""
    return [one for one in MEASURES if one.name in statistics.numbers or one.name in statistics.categories]


def list_sorts(statistics: Statistics) -> dict[str, str]:
    """Return the sort orders that this index has, as {name: label}."""
    missing = {"class", "role"} - statistics.categories.keys()
    return {name: label for name, label in SORTS.items() if name not in missing}


Orders = dict[int, NDArray[np.int64]]  # layer -> memories in the order of the map


def read_similarity_orders(index: ServedIndex) -> Orders:
    """Return an order of each layer's memories in which similar memories are neighbors.

    It is computed only once per index.
    """
    from memlens.pattern.related import order_by_likeness

    return index.remember("likeness", lambda: {layer: order_by_likeness(index, layer) for layer in index.layers})


def draw_map(
    statistics: Statistics, by: str, room: int, sort: str = "place", read_orders: Callable[[], Orders] = dict
) -> MemoryMap:
    """Return the map with at most `room` cells per layer. `read_orders` is called only to sort by similarity.

    Raises:
        UnknownName: The index has no such measure or sort order.
    """
    measures = {measure.name: measure for measure in list_measures(statistics)}
    if by not in measures:
        raise UnknownName(f"the map cannot be colored by '{by}'; choose one of: {', '.join(measures)}")
    sorts = list_sorts(statistics)
    if sort not in sorts:
        raise UnknownName(f"the map cannot be sorted by '{sort}'; choose one of: {', '.join(sorts)}")
    measure = measures[by]
    quantiles = [] if measure.kinds else _read_quantiles(statistics.numbers[by])
    levels = statistics.categories[by] if measure.kinds else _read_levels(statistics.numbers[by], quantiles)
    orders = read_orders() if sort == "likeness" else None
    layers, cells, memories = [], [], []
    for layer in statistics.layers:
        layer_levels = levels[statistics.rows_of_layer(layer)]
        order = _sort_layer(statistics, layer, sort, layer_levels) if orders is None else orders[layer]
        size = max(1, -(-len(layer_levels) // room))
        highest, place = _merge_cells(layer_levels[order], size)
        groups = list(statistics.names.layers[layer])
        layers.append(MapLayer(layer=layer, memories=len(layer_levels), size=size, groups=groups))
        cells.append(highest)
        memories.append(order[np.arange(len(place)) * size + place])
    is_plain = sort == "place" and all(layer.size == 1 for layer in layers)
    return MemoryMap(
        by=by,
        sort=sort,
        label=measure.label,
        meaning=measure.meaning,
        percent=measure.percent,
        quantiles=quantiles,
        kinds=list(measure.kinds),
        layers=layers,
        levels=b64encode(np.concatenate(cells).tobytes()).decode(),
        memories=None if is_plain else b64encode(np.concatenate(memories).astype("<u4").tobytes()).decode(),
    )


def _sort_layer(statistics: Statistics, layer: int, sort: str, levels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the layer's memories in the order of the map: high levels first, memories without a value last."""
    if sort == "place":
        return np.arange(len(levels))
    if sort != "level":
        levels = statistics.categories[sort][statistics.rows_of_layer(layer)]
    signed_levels = np.where(levels == NOTHING, -1, levels.astype(np.int16))
    return np.argsort(-signed_levels, kind="stable")


def _read_quantiles(numbers: NDArray[np.floating]) -> list[float]:
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return [0.0] * _QUANTILES
    return [float(number) for number in np.quantile(finite, np.linspace(0, 1, _QUANTILES))]


def _read_levels(numbers: NDArray[np.floating], quantiles: list[float]) -> NDArray[np.uint8]:
    """Return the level of each number: the share of memories with a lower number, in steps of 1/254."""
    values, first = np.unique(quantiles, return_index=True)  # if quantiles are equal, use the first
    shares = first / (_QUANTILES - 1)
    is_finite = np.isfinite(numbers)
    share = np.interp(np.where(is_finite, numbers, values[0]), values, shares)
    return np.where(is_finite, np.rint(share * _STEPS), NOTHING).astype(np.uint8)


def _merge_cells(levels: NDArray[np.uint8], size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the highest level in each cell of `size` memories, and which memory of the cell has this level."""
    if size == 1:
        return levels, np.zeros(len(levels), np.int64)
    padded = np.full(-(-len(levels) // size) * size, NOTHING, np.uint8)
    padded[: len(levels)] = levels
    block = padded.reshape(-1, size)
    place = np.where(block == NOTHING, -1, block.astype(np.int16)).argmax(1)
    return block[np.arange(len(block)), place], place
