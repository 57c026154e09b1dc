"""An index for a server, and statistics of all its memories as columns: many threads, many queries per second.

Every query gets a cursor of its own, which is what makes it safe in every thread. Tables are copied into memory in the
background as far as they fit: a look-up that takes tens of milliseconds from Parquet takes one from there. Until then,
for tables that are too large, and for those that a stage has replaced meanwhile, the files are read. The statistics of
a million memories are some tens of megabytes; columns of tables that the index does not have are missing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from memlens.errors import MemlensError
from memlens.files import FileStamp, file_stamp, reader_of
from memlens.index.reader import Index
from memlens.memory import ROLES, MemoryId, MemoryNames

T = TypeVar("T")

# What pages ask for most comes first.
_COPIED = (
    "memories", "triggers", "corpus", "values", "names", "patterns", "keys", "tokens", "ordinary", "counts", "roles",
    "quadrants",
)  # fmt: skip
_MOST_BYTES = 400_000_000  # of Parquet; in memory about four times as much
_MOST_RESULTS = 64


class ServedIndex(Index):
    """An index that stays open."""

    def __init__(self, folder: str | Path, most_bytes: int = _MOST_BYTES) -> None:
        super().__init__(folder)
        self._most_bytes = most_bytes
        self._in_memory: dict[str, FileStamp] = {}  # table -> the file that was copied
        self._results: dict[tuple[Any, ...], tuple[tuple[FileStamp | str | None, ...], Any]] = {}
        self._keeping, self._remembering = Lock(), Lock()

    @property
    def example(self) -> MemoryId:
        """A memory that there is, to show how names are written."""
        layer = self.layers[len(self.layers) // 2]
        return self.names.name(layer, self.memories(layer) // 2)

    def keep_in_memory(self) -> None:
        """Copy tables into memory, as many as fit; those that are there already are left alone."""
        with self._keeping:
            room = self._most_bytes
            for table in _COPIED:
                stamp = self.stamp(table)
                if stamp is None or stamp[0] > room:
                    continue
                room -= stamp[0]
                if self._in_memory.get(table) != stamp:
                    self._copy(table, stamp)

    def _copy(self, table: str, stamp: FileStamp) -> None:
        with self._explain_errors(), self._connect() as cursor:
            # Replaced in one step: questions that run meanwhile still see the earlier one.
            cursor.execute(f'CREATE OR REPLACE TABLE "{table}" AS SELECT * FROM {reader_of(self.path(table))}')
            if table == "corpus":
                cursor.execute("CREATE INDEX sentences ON corpus (sentence)")
        if self.stamp(table) == stamp:  # not replaced while it was read
            self._in_memory[table] = stamp

    def stamp(self, table: str) -> FileStamp | None:
        """The stamp by which a new file of a table is noticed; None where there is no file."""
        return file_stamp(self.folder / f"{table}.parquet") if self.has(table) else None

    def remember(self, tables: Sequence[str], key: tuple[Any, ...], make: Callable[[], T], mark: str = "") -> T:
        """The result of `make`, computed once for a key and these tables as they are now; the latest few are kept.

        `mark` stands for what else it is made from: with another one it is made again, and takes the place of the old.
        """
        stamps = (*(self.stamp(table) for table in tables), mark)
        with self._remembering:
            entry = self._results.pop(key, None)
            if entry is not None and entry[0] == stamps:
                self._results[key] = entry  # last in the row again: what is asked for often stays
                known: T = entry[1]
                return known
        result = make()
        with self._remembering:
            self._results.pop(key, None)
            self._results[key] = (stamps, result)
            while len(self._results) > _MOST_RESULTS:
                self._results.pop(next(iter(self._results)))
        return result

    def _source_of(self, table: str) -> str:
        loaded = self._in_memory.get(table)
        if loaded is not None:
            try:
                if self.stamp(table) == loaded:
                    return f'"{table}"'
            except (OSError, MemlensError):  # being replaced at this moment; the file will say what is wrong
                pass
        return reader_of(self.path(table))


TABLES = ("memories", "values", "patterns", "roles")
CLASSES = ("none", "shallow", "semantic", "both")  # of patterns; a memory's class is its place here
AGREEMENTS = ("unknown", "no", "yes")


@dataclass(frozen=True, eq=False)
class Statistics:
    """Memories by layer and memory; every column is [memories]."""

    layers: tuple[int, ...]
    names: MemoryNames
    starts: NDArray[np.int64]  # [layers + 1]: a layer's first row
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)  # max, mean, frequency, max_p
    categories: dict[str, NDArray[np.uint8]] = field(default_factory=dict)  # dead, agreement, class, role

    def __len__(self) -> int:
        return int(self.starts[-1])

    def row_of(self, memory: MemoryId) -> int:
        return int(self.starts[self.layers.index(memory.layer)]) + self.names.number(memory)

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
    """The statistics of an index as it is now; read once."""
    return index.remember(TABLES, ("statistics",), lambda: _read(index))


def _read(index: Index) -> Statistics:
    layers = tuple(index.layers)
    counts = [index.memories(layer) for layer in layers]
    statistics = Statistics(layers, index.names, np.concatenate([[0], np.cumsum(counts)]))
    table = index.table("memories", ["layer", "memory", "max", "mean", "frequency", "dead"])
    rows = statistics.rows_of(table.column("layer").to_numpy(), table.column("memory").to_numpy())
    for name in ("max", "mean", "frequency"):
        statistics.numbers[name] = _placed(len(statistics), rows, table.column(name).to_numpy(), np.nan)
    dead = table.column("dead").to_numpy(zero_copy_only=False).astype(np.uint8)
    statistics.categories["dead"] = _placed(len(statistics), rows, dead, 0)
    if index.has("values"):
        _add_values_(statistics, index)
    if index.has("patterns"):
        _add_classes_(statistics, index)
    if index.has("roles"):
        table = index.table("roles", ["layer", "memory", "role"])
        rows = statistics.rows_of(table.column("layer").to_numpy(), table.column("memory").to_numpy())
        places = {role: 1 + place for place, role in enumerate(ROLES)}  # 0: none, or one of another version
        roles = np.array([places.get(role, 0) for role in table.column("role").to_pylist()])
        statistics.categories["role"] = _placed(len(statistics), rows, roles.astype(np.uint8), 0)
    return statistics


def _add_values_(statistics: Statistics, index: Index) -> None:
    table = index.table("values", ["layer", "memory", "max_p", "argmax", "target"])
    rows = statistics.rows_of(table.column("layer").to_numpy(), table.column("memory").to_numpy())
    statistics.numbers["max_p"] = _placed(len(statistics), rows, table.column("max_p").to_numpy(), np.nan)
    target = table.column("target").fill_null(-1).to_numpy()
    agrees = np.where(target < 0, 0, 1 + (table.column("argmax").to_numpy() == target))
    statistics.categories["agreement"] = _placed(len(statistics), rows, agrees.astype(np.uint8), 0)


def _add_classes_(statistics: Statistics, index: Index) -> None:
    table = index.table("patterns", ["layer", "memory", "kind"])
    rows = statistics.rows_of(table.column("layer").to_numpy(), table.column("memory").to_numpy())
    semantic = np.array([kind == "semantic" for kind in table.column("kind").to_pylist()], np.bool_)
    classes = np.zeros(len(statistics), np.uint8)
    np.bitwise_or.at(classes, rows, np.where(semantic, 2, 1).astype(np.uint8))  # shallow 1, semantic 2, both 3
    statistics.categories["class"] = classes


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
        strongest=str(statistics.names.name(layer, int(highest.argmax()))),
        dead_memories=[str(statistics.names.name(layer, int(memory))) for memory in dead[:_DEAD_NAMED]],
    )


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
