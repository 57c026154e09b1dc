"""Index: a complete index folder, opened for reading; needs neither the model nor the original corpus.

Tables are read lazily with DuckDB, so that an index of a million memories opens as fast as a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from itertools import islice
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from memlens.errors import IndexFolderError, ModelError, SettingError, UnknownName
from memlens.files import (
    FileStamp,
    explain_os_errors,
    file_stamp,
    fill_table,
    is_as_noted,
    only_writer,
    open_database,
    reader_of,
    replacing,
)
from memlens.index.layout import LOCK, MANIFEST, PARTIAL, PULL, SHARD, Manifest, located, made_with
from memlens.memory import MemoryId, MemoryNames, Prefix, Trigger, TriggerList

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memlens.index.notebook import ShownMemory
    from memlens.models.memory_model import MemoryModel


def trigger_of(row: dict[str, Any], sentence: dict[str, Any], vocabulary: Sequence[str]) -> Trigger:
    """A row of a trigger table and the row of its sentence, as one trigger; position -1 is BOS alone."""
    text, ends, position = sentence["text"], sentence["ends"], row["position"]
    begin = ends[position - 1] if position > 0 else 0
    end = ends[position] if position >= 0 else 0
    prefix, following = Prefix(row["sentence"], position), row["next_token"]
    parts = text[:begin], text[begin:end], text[end:]
    next_text = None if following is None else vocabulary[following]
    return Trigger(row["rank"], row["coefficient"], prefix, *parts, following, next_text)


_ROWS_AT_ONCE = 8192
_MADE_BY = dict.fromkeys(("values", "keys", "routers", "tokens"), "memlens values")
_MADE_BY |= dict.fromkeys(("patterns", "names", "lower_patterns"), "memlens patterns")
_MADE_BY |= {"experiments": "memlens experiment", "roles": "memlens roles", "effects": "memlens roles --effects"}


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

    _advice_if_replaced = "run the command again"

    def __init__(self, folder: str | Path) -> None:
        self.folder = located(folder)
        self._opening = Lock()
        if not (self.folder / MANIFEST).is_file():
            raise IndexFolderError(_why_not_an_index(self.folder))
        self._manifest_stamp = file_stamp(self.folder / MANIFEST)
        self.manifest = Manifest.read(self.folder)
        self.model: MemoryModel | None = None  # to shade triggers in a notebook
        self._verified: dict[str, tuple[str, FileStamp]] = {}  # file -> its checksum, and its stamp when it was read

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that were scanned."""
        return self.manifest.layers

    def memories(self, layer: int) -> int:
        """The number of memories of a scanned layer."""
        if layer not in self.layers:
            raise UnknownName(f"layer {layer} is not in this index; it has {_ranges(self.layers)}")
        return self.manifest.model.memories[layer]

    def check(self, memory: str | MemoryId) -> MemoryId:
        """The memory of that name, refused if it is not in the index."""
        name = MemoryId.parse(memory) if isinstance(memory, str) else memory
        self.memories(name.layer)  # refuses a layer that is not there
        self.names.number(name)
        return name

    def __getitem__(self, memory: str | MemoryId) -> ShownMemory:
        """The record of a memory, which a notebook shows as a page does: `index["L5N94"]`."""
        from memlens.index.notebook import show_memory

        return show_memory(self, memory)

    @property
    def names(self) -> MemoryNames:
        """The names of memories, from and to the numbers in the tables."""
        return self.manifest.model.names

    def path(self, table: str) -> Path:
        """The Parquet file of a table (`triggers`, `values`, `experiments/agreement`); refused if it is not there."""
        path = self.folder / f"{table}.parquet"
        if not self.has(table):
            command = _MADE_BY.get(table.split("/")[0])
            damaged = "the index is damaged: scan again with --fresh"
            advice = f"run `{command} {self.folder}` first" if command else damaged
            raise IndexFolderError(f"{self.folder} has no table '{table}'; {advice}")
        self._verify(path.relative_to(self.folder).as_posix())
        return path

    def _verify(self, name: str) -> None:
        """Refuse a file that is not, byte for byte, what the manifest notes. Each is read once for that."""
        path = self.folder / name
        for _ in range(2):
            noted, stamp = self.manifest.files.get(name), file_stamp(path)
            if noted is None or stamp is None:
                break
            if self._verified.get(name) == (noted.sha256, stamp):
                return
            if is_as_noted(path, noted):
                self._verified[name] = (noted.sha256, stamp)
                return
            self._read_manifest_again()  # a later stage may have made the table again since this index was opened
        advice = f"make it again with `memlens repair {self.folder}`, or scan again with --fresh"
        raise IndexFolderError(f"{path} is damaged or being replaced; {advice}")

    def _read_manifest_again(self) -> None:
        """Take up what other stages have noted since; refused if the folder holds another scan by now."""
        stamp = file_stamp(self.folder / MANIFEST)
        self.manifest = self._current_manifest()
        self._manifest_stamp = stamp

    def _current_manifest(self) -> Manifest:
        if (self.folder / MANIFEST).is_file():
            manifest = Manifest.read(self.folder)
            if manifest.generation == self.manifest.generation:
                return manifest
        raise IndexFolderError(f"{self.folder} was replaced or removed since it was opened; {self._advice_if_replaced}")

    def _refuse_exchanged(self, read: Mapping[str, FileStamp]) -> None:
        """After reading: refuse an answer whose files were exchanged between their check and their reading."""
        for table, stamp in read.items():
            if file_stamp(self.folder / f"{table}.parquet") != stamp:
                self._read_manifest_again()
                raise IndexFolderError(f"table '{table}' was made again while it was read; run the command again")

    def refuse_replaced(self) -> None:
        """Refuse to go on if the folder holds another scan by now, or none; later stages of this one are taken up."""
        if file_stamp(self.folder / MANIFEST) != self._manifest_stamp:
            self._read_manifest_again()

    def take_up(self) -> None:
        """Begin a new piece of work on the index as it is now: every file is verified again when it is next read."""
        self._read_manifest_again()
        self._verified.clear()

    def has(self, table: str) -> bool:
        """Is the table there? A file that is not noted is none: a stage was killed while it replaced it."""
        name = f"{table}.parquet"
        self.refuse_replaced()  # another process may have made the table since
        return name in self.manifest.files and (self.folder / name).is_file()

    def is_whole(self, table: str) -> bool:
        """Is the table there, byte for byte as the manifest has it?"""
        name = f"{table}.parquet"
        return is_as_noted(self.folder / name, self.manifest.files.get(name))

    def table(self, table: str, columns: Sequence[str] | None = None, filters: Any = None) -> pa.Table:
        """A whole table, or some of its columns and rows (filters as pyarrow takes them)."""
        import pyarrow.parquet as pq

        path = self.path(table)
        # A handle, since a path with a colon would be taken for an address.
        # The open file is the one whose bytes are read, whatever takes its name meanwhile.
        with self._explaining_damage(), path.open("rb") as handle:
            self._refuse_exchanged({table: self._verified[f"{table}.parquet"][1]})
            names = None if columns is None else list(columns)
            if filters is None:  # filters need pyarrow.dataset, which imports pandas where it is installed
                content = pq.ParquetFile(handle).read(columns=names)
            else:
                content = pq.read_table(handle, columns=names, filters=filters)
            self._refuse_exchanged({table: self._verified[f"{table}.parquet"][1]})  # written to while it was read
            return content

    def schema_names(self, table: str) -> list[str]:
        """The columns of a table."""
        import pyarrow.parquet as pq

        with self._explaining_damage(), self.path(table).open("rb") as handle:
            names: list[str] = pq.ParquetFile(handle).schema_arrow.names
            return names

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of a DuckDB query; `{triggers}` in it stands for that table's file, and so for every table."""
        return list(self.stream(query, parameters))

    def stream(self, query: str, parameters: Sequence[Any] = ()) -> Iterator[dict[str, Any]]:
        """The same rows one after another, for results that are too large for a list."""
        names = TableNames(self)
        with self._explaining_damage(), self._connect() as database:
            cursor = database.execute(query.format_map(names), list(parameters))
            columns = [column[0] for column in cursor.description]
            rows = None
            while rows != []:
                rows = cursor.fetchmany(_ROWS_AT_ONCE)  # reads from the files
                self._refuse_exchanged(names.read)
                for row in rows:
                    yield dict(zip(columns, row, strict=True))

    def arrays(self, query: str, parameters: Sequence[Any] = ()) -> dict[str, NDArray[Any]]:
        """Columns of a DuckDB query by name, for results that are computed with."""
        names = TableNames(self)
        with self._explaining_damage(), self._connect() as database:
            columns = database.execute(query.format_map(names), list(parameters)).fetchnumpy()
            self._refuse_exchanged(names.read)
            return columns

    def batches(self, query: str, parameters: Sequence[Any] = ()) -> Iterator[pa.RecordBatch]:
        """The result of a DuckDB query as Arrow columns, piece by piece, for texts and lists that are computed with."""
        names = TableNames(self)
        with self._explaining_damage(), self._connect() as database:
            reader = database.sql(query.format_map(names), params=list(parameters)).to_arrow_reader(_ROWS_AT_ONCE)
            self._refuse_exchanged(names.read)
            yield from reader

    def _connect(self) -> duckdb.DuckDBPyConnection:
        """A cursor for one query, to be closed after it."""
        with self._opening:  # the connection that all cursors come from refuses two callers at once
            return self._database.cursor()

    @cached_property
    def _database(self) -> duckdb.DuckDBPyConnection:
        """The database, which stays open: opening it costs more than most queries."""
        # Sorting a result keeps it the same whatever the number of threads; one thread needs no sorting.
        return open_database()

    def _source_of(self, table: str) -> str:
        """The SQL expression from which a query reads a table."""
        return reader_of(self.path(table))

    @contextmanager
    def _explaining_damage(self) -> Iterator[None]:
        """A reader that fails on a damaged file becomes one line; one that fails on whole files is a bug."""
        try:
            yield
        except (duckdb.Error, pa.ArrowException, OSError):
            self._verified.clear()
            for name in self.manifest.files:
                if not self.is_whole(name.removesuffix(".parquet")):
                    self._verify(name)
            raise

    def facts(self, memory: str | MemoryId) -> MemoryFacts:
        """A memory's statistics over the whole corpus."""
        name = self.check(memory)
        rows = self.rows_of("memories", [name])[name]
        if not rows:
            raise IndexFolderError(f"{self.folder} has no row for {name}; see what is damaged with `memlens check`")
        numbers = {key: rows[0][key] for key in ("max", "min", "mean", "frequency", "dead", "histogram")}
        return MemoryFacts(name, **numbers)

    def triggers(self, memory: str | MemoryId, end: str = "top", limit: int | None = None) -> TriggerList:
        """A memory's triggers with their text, best first."""
        if end not in ("top", "bottom"):
            raise UnknownName(f"a memory has the ends 'top' and 'bottom', not '{end}'")
        if limit is not None and limit < 0:
            raise SettingError(f"limit is {limit}; give 0 or more, or None for all triggers")
        name = self.check(memory)
        return self.triggers_of([name], end, limit)[name]

    def ordinary(self, memory: str | MemoryId) -> TriggerList:
        """Random prefixes the memory fires on, triggers left out."""
        name = self.check(memory)
        return self.with_text(self.rows_of("ordinary", [name], order="rank")[name])

    def triggers_of(
        self, memories: Iterable[MemoryId], end: str = "top", limit: int | None = None
    ) -> dict[MemoryId, TriggerList]:
        """The triggers of several memories with their text, best first; an empty list where there are none."""
        where = f"\"end\" = '{end}'" + ("" if limit is None else f" AND rank < {int(limit)}")
        rows = self.rows_of("triggers", memories, where=where, order="rank")
        texts = iter(self.with_text([row for listed in rows.values() for row in listed]))
        return {memory: TriggerList(islice(texts, len(listed))) for memory, listed in rows.items()}

    def with_text(self, rows: Sequence[dict[str, Any]]) -> TriggerList:
        """Rows of a table of triggers as triggers with their text, in one look at the corpus."""
        sentences = self.sentences(sorted({row["sentence"] for row in rows}))
        return TriggerList(trigger_of(row, sentences[row["sentence"]], self.vocabulary) for row in rows)

    def rows_of(
        self, table: str, memories: Iterable[MemoryId], columns: str = "*", *, where: str = "true", order: str = ""
    ) -> dict[MemoryId, list[dict[str, Any]]]:
        """Rows of a table about some memories, by memory, in the table's order or another; `where` is SQL."""
        by_memory: dict[MemoryId, list[dict[str, Any]]] = {memory: [] for memory in memories}
        if not by_memory:
            return by_memory
        places = {(memory.layer, self.names.number(memory)): listed for memory, listed in by_memory.items()}
        wanted = "(layer, memory) IN (VALUES " + ", ".join(f"({layer}, {number})" for layer, number in places) + ")"
        if len(by_memory) == 1:  # by equality, with which DuckDB passes over the row groups that cannot hold it
            wanted = " AND ".join(f"layer = {layer} AND memory = {number}" for layer, number in places)
        chosen = columns if columns == "*" else f"layer, memory, {columns}"
        query = f"SELECT {chosen} FROM {{{table}}} WHERE {wanted} AND {where}"
        for row in self.stream(f"{query} ORDER BY {order}" if order else query):
            places[row["layer"], row["memory"]].append(row)
        return by_memory

    def sentences(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Rows of the corpus by sentence id."""
        if not ids:
            return {}
        wanted = ", ".join(str(int(i)) for i in ids)
        return {row["sentence"]: row for row in self.sql(f"SELECT * FROM {{corpus}} WHERE sentence IN ({wanted})")}

    @cached_property
    def vocabulary(self) -> list[str]:
        """The text of every token."""
        texts: list[str] = self.arrays("SELECT text FROM {vocabulary} ORDER BY token")["text"].tolist()
        return texts

    def chart(self, experiment: str) -> Any:
        """The figure of an experiment as an Altair chart."""
        import memlens  # the front door: experiments are above this package

        return memlens.chart(self, experiment)

    def load_model(self, model: str | None = None, **options: Any) -> MemoryModel:
        """The model this index was made from, from where it was then or from `model`; refused if it has changed."""
        from memlens.models.load import load

        source = self.manifest.model.source if model is None else model
        if model is None and not source:
            raise ModelError("the index was made from a model in memory; say where the model is with --model")
        loaded = load(source, **({"dtype": self.manifest.model.dtype} | options))
        self.check_model(loaded)
        return loaded

    def check_model(self, model: MemoryModel) -> None:
        """Refuse a model that is not the one that was scanned."""
        if model.fingerprint() != self.manifest.model.fingerprint:
            raise ModelError(
                f"{model.name} is not the model that was scanned into {self.folder} (its fingerprint differs); "
                "pass the right one with --model, or scan again"
            )

    def write(
        self, tables: Mapping[str, tuple[pa.Schema, Iterable[pa.Table]]], notes: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Write tables of a later stage as one: complete beside, then all renamed, then noted in the manifest.

        Killed between two of these, the tables count as not there, never as something they are not. Refused if the
        folder holds another scan by now, or another version of a table that was read from this index.
        """
        names = [f"{table}.parquet" for table in tables]
        with only_writer(self.folder / LOCK), explain_os_errors(self.folder):
            self._refuse_other_sources(names)
            facts: dict[str, Any] = {}
            with ExitStack() as stack:
                for name, (schema, parts) in zip(names, tables.values(), strict=True):
                    (self.folder / name).parent.mkdir(exist_ok=True)
                    written = fill_table(stack.enter_context(replacing(self.folder / name)), schema, parts)
                    facts[name] = {**asdict(written), "made_with": made_with()}
                self._current_manifest().with_files({}, without=names).write(self.folder)
            # Read again: another stage may have written it since this index was opened.
            self.manifest = self._current_manifest().with_files(facts)
            self.manifest = self.manifest.with_notes(notes())
            self.manifest.write(self.folder)
            for name in names:
                self._verified.pop(name, None)

    def _refuse_other_sources(self, names: Sequence[str]) -> None:
        """Under the lock: what is to be written must belong to what the folder holds now."""
        now = self._current_manifest().files
        for name, (sha256, _) in list(self._verified.items()):  # other threads may add to it
            if name not in names and (name not in now or now[name].sha256 != sha256):
                raise IndexFolderError(f"{self.folder / name} was made again meanwhile; run the command again")

    def __repr__(self) -> str:
        model, counts = self.manifest.model, self.manifest.counts
        total = sum(self.memories(layer) for layer in self.layers)
        return (
            f"<Index {self.folder}: {model.name}, {len(self.layers)} layers, {total:,} memories, "
            f"{counts.sentences:,} sentences, {counts.tokens:,} tokens>"
        )

    def _repr_html_(self) -> str:
        counts = self.manifest.counts
        facts = {
            "model": self.manifest.model.name,
            "layers": str(len(self.layers)),
            "memories": f"{sum(self.memories(layer) for layer in self.layers):,}",
            "sentences": f"{counts.sentences:,}",
            "tokens": f"{counts.tokens:,}",
        }
        rows = "".join(f"<tr><th>{name}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
        return f"<table><caption>Index {escape(str(self.folder))}</caption>{rows}</table>"


class TableNames(dict[str, str]):
    """`{triggers}` in a query -> a reader of that file; `read` has the stamps of the files that a query names."""

    def __init__(self, index: Index) -> None:
        super().__init__()
        self.index = index
        self.read: dict[str, FileStamp] = {}

    def __missing__(self, table: str) -> str:
        source = self.index._source_of(table)
        verified = self.index._verified.get(f"{table}.parquet")
        if verified is not None:
            self.read[table] = verified[1]
        return source


def open_index(folder: Index | str | PathLike[str]) -> Index:
    """An index that a scan has completed, by its folder or `hf:OWNER/NAME`; an open one comes back as it is."""
    return folder if isinstance(folder, Index) else Index(Path(folder))


def _why_not_an_index(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no index folder {folder}; make one with `memlens scan MODEL CORPUS -o {folder}`"
    if (folder / PARTIAL / SHARD).is_file():
        return f"{folder} is one shard of a scan; join all shards with `memlens merge SHARD... -o INDEX`"
    if (folder / PARTIAL / PULL).is_file():
        return f"{folder} is an unfinished copy from the Hub; repeat its `memlens pull` command to finish it"
    if (folder / PARTIAL).is_dir():
        return f"{folder} is an unfinished scan; repeat its `memlens scan` command to finish it"
    return f"{folder} is not an index (it has no {MANIFEST}); make one with `memlens scan MODEL CORPUS -o FOLDER`"


def _ranges(layers: Sequence[int]) -> str:
    return f"layers {', '.join(str(layer) for layer in layers)}" if len(layers) > 1 else f"layer {layers[0]}"
