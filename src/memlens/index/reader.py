"""Index: a complete index folder, opened for reading. Needs neither the model nor the original corpus.

Tables are read lazily with DuckDB, one row group or column at a time, so that an index of a million memories opens as
fast as a small one. This module knows the tables of a scan; what other stages add is read through `table` and `sql`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from memlens.errors import IndexFolderError, ModelError, UnknownName
from memlens.index.files import checksum, read_json, write_json
from memlens.index.layout import MANIFEST, PARTIAL, SCHEMA_VERSION
from memlens.index.trigger_list import TriggerList, trigger_of
from memlens.memory import MemoryId

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

_ROWS_AT_ONCE = 1024
_MADE_BY = {
    "values": "memlens values",
    "keys": "memlens values",
    "patterns": "memlens patterns",
    "names": "memlens patterns",
    "experiments": "memlens experiment",
}


@dataclass(frozen=True)
class MemoryFacts:
    """One row of memories.parquet."""

    id: MemoryId
    max: float
    min: float
    mean: float
    frequency: float
    dead: bool
    histogram: list[int]


class Index:
    """The memories of one model as one corpus shows them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise IndexFolderError(_why_not_an_index(self.folder))
        self.manifest = read_json(self.folder / MANIFEST)
        found = self.manifest.get("schema")
        if found != SCHEMA_VERSION:
            raise IndexFolderError(
                f"{self.folder} has schema version {found}, this memlens reads {SCHEMA_VERSION}; "
                "use the memlens that wrote it or scan again"
            )

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that were scanned."""
        return tuple(self.manifest["layers"])

    def memories(self, layer: int) -> int:
        """How many memories a scanned layer has."""
        if layer not in self.layers:
            raise UnknownName(f"layer {layer} is not in this index; it has {_ranges(self.layers)}")
        return int(self.manifest["model"]["memories"][str(layer)])

    def check(self, memory: str | MemoryId) -> MemoryId:
        """The memory of that name, refused if it is not in the index."""
        name = MemoryId.parse(memory) if isinstance(memory, str) else memory
        count = self.memories(name.layer)
        if name.memory >= count:
            raise UnknownName(f"{name} does not exist: layer {name.layer} has memories 0 to {count - 1}")
        return name

    def path(self, table: str) -> Path:
        """The Parquet file of a table (`triggers`, `values`, `experiments/agreement`); refused if it is not there."""
        path = self.folder / f"{table}.parquet"
        if not path.is_file():
            command = _MADE_BY.get(table.split("/")[0])
            advice = f"run `{command} {self.folder}` first" if command else "the index is damaged: scan again"
            raise IndexFolderError(f"{self.folder} has no table '{table}'; {advice}")
        return path

    def has(self, table: str) -> bool:
        return (self.folder / f"{table}.parquet").is_file()

    def is_whole(self, table: str) -> bool:
        """Is the table there, byte for byte as the manifest has it?"""
        entry = self.manifest["files"].get(f"{table}.parquet")
        path = self.folder / f"{table}.parquet"
        if entry is None or not path.is_file() or path.stat().st_size != entry["bytes"]:
            return False
        return bool(checksum(path) == entry["sha256"])

    def table(self, table: str, columns: Sequence[str] | None = None) -> pa.Table:
        """A whole table, or some of its columns."""
        import pyarrow.parquet as pq

        return pq.read_table(self.path(table), columns=None if columns is None else list(columns))

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of a DuckDB query; `{triggers}` in it stands for that table's file, and so for every table."""
        return list(self.stream(query, parameters))

    def stream(self, query: str, parameters: Sequence[Any] = ()) -> Iterator[dict[str, Any]]:
        """The same rows one after another, for results that are too large for a list."""
        names = _TableNames(self)
        # Sorting a result keeps it the same whatever the number of threads; one thread needs no sorting.
        with duckdb.connect(config={"threads": 1}) as database:
            cursor = database.execute(query.format_map(names), list(parameters))
            columns = [column[0] for column in cursor.description]
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                for row in rows:
                    yield dict(zip(columns, row, strict=True))

    def facts(self, memory: str | MemoryId) -> MemoryFacts:
        name = self.check(memory)
        row = self.sql("SELECT * FROM {memories} WHERE layer = $1 AND memory = $2", [name.layer, name.memory])[0]
        numbers = {key: row[key] for key in ("max", "min", "mean", "frequency", "dead", "histogram")}
        return MemoryFacts(name, **numbers)

    def triggers(self, memory: str | MemoryId, end: str = "top", limit: int | None = None) -> TriggerList:
        """A memory's triggers with their text, best first."""
        if end not in ("top", "bottom"):
            raise UnknownName(f"a memory has the ends 'top' and 'bottom', not '{end}'")
        return self._with_text("{triggers}", self.check(memory), 'AND t."end" = $3', [end], limit)

    def ordinary(self, memory: str | MemoryId) -> TriggerList:
        """Random prefixes the memory fires on, triggers left out."""
        return self._with_text("{ordinary}", self.check(memory), "", [], None)

    def _with_text(
        self, table: str, name: MemoryId, where: str, parameters: list[Any], limit: int | None
    ) -> TriggerList:
        rows = self.sql(
            f"SELECT * FROM {table} t WHERE layer = $1 AND memory = $2 {where} ORDER BY rank",
            [name.layer, name.memory, *parameters],
        )[:limit]
        sentences = self.sentences(sorted({row["sentence"] for row in rows}))
        return TriggerList(trigger_of(row, sentences[row["sentence"]]) for row in rows)

    def sentences(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Rows of the corpus by sentence id."""
        if not ids:
            return {}
        wanted = ", ".join(str(int(i)) for i in ids)
        rows = self.sql(f"SELECT * FROM {{corpus}} WHERE sentence IN ({wanted})")
        return {row["sentence"]: row for row in rows}

    @cached_property
    def vocabulary(self) -> list[str]:
        """The text of every token."""
        texts: list[str] = self.table("vocabulary", ["text"]).column("text").to_pylist()
        return texts

    def load_model(self, model: str | None = None, **options: Any) -> MemoryModel:
        """The model this index was made from, from where it was then or from `model`; refused if it has changed."""
        from memlens.models import load

        source = model or self.manifest["model"]["source"]
        if not source:
            raise ModelError("the index was made from a model in memory; say where the model is with --model")
        loaded = load(source, **({"dtype": self.manifest["model"]["dtype"]} | options))
        self.check_model(loaded)
        return loaded

    def check_model(self, model: MemoryModel) -> None:
        """Refuse a model that is not the one that was scanned."""
        if model.fingerprint() != self.manifest["model"]["fingerprint"]:
            raise ModelError(
                f"{model.name} is not the model that was scanned into {self.folder} (its fingerprint differs); "
                "pass the right one with --model, or scan again"
            )

    def register(self, *tables: str, notes: Mapping[str, Any] | None = None) -> None:
        """Note size and checksum of tables that a later stage has written, and what it says about them."""
        self.manifest = read_json(self.folder / MANIFEST)  # another stage may have written it since
        files = dict(self.manifest["files"])
        for table in tables:
            path = self.path(table)
            files[f"{table}.parquet"] = {"bytes": path.stat().st_size, "sha256": checksum(path)}
        self.manifest = {**self.manifest, **(notes or {}), "files": files}
        write_json(self.folder / MANIFEST, self.manifest)

    def __repr__(self) -> str:
        model, counts = self.manifest["model"], self.manifest["counts"]
        total = sum(self.memories(layer) for layer in self.layers)
        return (
            f"<Index {self.folder}: {model['name']}, {len(self.layers)} layers, {total:,} memories, "
            f"{counts['sentences']:,} sentences, {counts['tokens']:,} tokens>"
        )

    def _repr_html_(self) -> str:
        model, counts = self.manifest["model"], self.manifest["counts"]
        facts = {
            "model": model["name"],
            "layers": str(len(self.layers)),
            "memories": f"{sum(self.memories(layer) for layer in self.layers):,}",
            "sentences": f"{counts['sentences']:,}",
            "tokens": f"{counts['tokens']:,}",
        }
        rows = "".join(f"<tr><th>{name}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
        return f"<table><caption>Index {escape(str(self.folder))}</caption>{rows}</table>"


class _TableNames(dict[str, str]):
    """`{triggers}` in a query -> a reader of that file."""

    def __init__(self, index: Index) -> None:
        super().__init__()
        self.index = index

    def __missing__(self, table: str) -> str:
        path = str(self.index.path(table)).replace("'", "''")
        return f"read_parquet('{path}')"


def _why_not_an_index(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no index folder {folder}; make one with `memlens scan MODEL CORPUS -o {folder}`"
    if (folder / PARTIAL).is_dir():
        return f"{folder} is an unfinished scan; repeat its `memlens scan` command to finish it"
    return f"{folder} is not an index (it has no {MANIFEST}); make one with `memlens scan MODEL CORPUS -o FOLDER`"


def _ranges(layers: Sequence[int]) -> str:
    return f"layers {', '.join(str(layer) for layer in layers)}" if len(layers) > 1 else f"layer {layers[0]}"
