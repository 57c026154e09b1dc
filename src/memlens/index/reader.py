"""Index: a complete index folder, opened for reading. Neither the model nor the original text is needed.

Tables are read with DuckDB on demand, so an index of a million memories opens as fast as a small one. A table is
compared with its checksum in the manifest when it is first opened, and again if the file was replaced. Files are
replaced by renaming, so a reader keeps the content of the file that it has opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
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
    is_intact,
    lock_for_writing,
    open_database,
    parquet_sql,
    replacing,
)
from memlens.index.format import (
    BACKUP,
    LOCK,
    MANIFEST,
    OPTIONAL_TABLES,
    PARTIAL,
    PULL,
    SCAN_TABLES,
    SHARD,
    Manifest,
    find_problem,
    located,
    made_with,
)
from memlens.memory import MemoryId, MemoryNames, Prefix, Trigger, TriggerList
from memlens.text import visible

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memlens.index.memory import ShownMemory
    from memlens.index.search import SearchResult
    from memlens.models.memory_model import MemoryModel


def trigger_of(row: dict[str, Any], sentence: dict[str, Any] | None, vocabulary: Sequence[str]) -> Trigger:
    """Return a row of a trigger table as a Trigger with its text. Position -1 is BOS alone, which has no text."""
    position, following = row["position"], row["next_token"]
    if sentence is None or position >= len(sentence["ends"]):
        raise IndexFolderError(
            f"a trigger refers to position {position} of sentence {row['sentence']}, which does not exist; "
            "see what is damaged with `memlens check`"
        )
    text, ends = sentence["text"], sentence["ends"]
    begin = ends[position - 1] if position > 0 else 0
    end = ends[position] if position >= 0 else 0
    parts = text[:begin], text[begin:end], text[end:]
    next_text = None if following is None else vocabulary[following]
    return Trigger(row["rank"], row["coefficient"], Prefix(row["sentence"], position), *parts, following, next_text)


_ROWS_AT_ONCE = 8192
_ROWS_SHOWN = 10  # rows of a query result in its repr and in a notebook
_MADE_BY = dict.fromkeys(("values", "keys", "routers", "tokens"), "memlens values")
_MADE_BY |= dict.fromkeys(("patterns", "names", "lower_patterns"), "memlens patterns")
_MADE_BY |= {"experiments": "memlens experiment", "roles": "memlens roles", "effects": "memlens roles --effects"}


class Index:
    """An index folder, opened for reading: the memories of one model on one corpus.

    Args:
        folder: The index folder, or `hf:OWNER/NAME`.

    Raises:
        IndexFolderError: The folder does not hold a complete index.

    Example:
        >>> index.layers, index.manifest.counts.sentences
        ((0, 1, 2), 7)
        >>> index.triggers("L1N7", limit=1)[0].rank
        0
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = located(folder)
        self._opening, self._is_closed = Lock(), False
        try:
            if not (self.folder / MANIFEST).is_file():
                raise IndexFolderError(_why_not_an_index(self.folder))
            self._manifest_stamp = file_stamp(self.folder / MANIFEST)
        except OSError as error:
            why = error.strerror or error
            raise IndexFolderError(f"cannot read {self.folder}: {why}; check the path and its permissions") from error
        self.manifest = Manifest.read(self.folder)
        self.model: MemoryModel | None = None  # used to shade triggers in a notebook
        # file -> (checksum, file stamp) when its checksum was last compared, and when its content was last validated
        self._verified: dict[str, tuple[str, FileStamp]] = {}
        self._validated: dict[str, tuple[str, FileStamp]] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that were scanned."""
        return self.manifest.layers

    def memories(self, layer: int) -> int:
        """Return the number of memories of a layer.

        Args:
            layer: A layer, counted from 0.

        Returns:
            The number of memories, including those of all experts.

        Raises:
            UnknownName: The layer was not scanned.

        Example:
            >>> index.memories(1)
            40
        """
        if layer not in self.layers:
            raise UnknownName(f"layer {layer} is not in this index; it has {_name_layers(self.layers)}")
        return self.manifest.model.memories[layer]

    def check(self, memory: str | MemoryId) -> MemoryId:
        """Return the memory with this name.

        Args:
            memory: A name like "L5N94", or a MemoryId.

        Returns:
            The memory as a MemoryId.

        Raises:
            UnknownName: The index has no such memory.

        Example:
            >>> index.check("L1N7").layer
            1
        """
        name = MemoryId.parse(memory) if isinstance(memory, str) else memory
        self.memories(name.layer)
        self.names.number(name)
        return name

    def __getitem__(self, memory: str | MemoryId) -> ShownMemory:
        """Return the record of a memory, which a notebook shows as a page.

        Args:
            memory: A name like "L5N94", or a MemoryId.

        Returns:
            The record of the memory.

        Raises:
            UnknownName: The index has no such memory.

        Example:
            >>> str(index["L1N7"].name)
            'L1N7'
        """
        from memlens.index.memory import show_memory

        return show_memory(self, memory)

    @property
    def names(self) -> MemoryNames:
        """Conversion between names of memories and their numbers in the tables."""
        return self.manifest.model.names

    def path(self, table: str) -> Path:
        """Return the Parquet file of a table.

        Args:
            table: The name of the table, like "triggers", "values" or "experiments/agreement".

        Returns:
            The path of the file, after its checksum was verified.

        Raises:
            IndexFolderError: The table was not computed, or its file is missing or damaged.

        Example:
            >>> index.path("triggers").name
            'triggers.parquet'
        """
        if not self.has(table):
            command = _MADE_BY.get(table.split("/")[0])
            damaged = "the index is damaged: scan again with --fresh"
            advice = f"run `{command} {self.folder}` first" if command else damaged
            raise IndexFolderError(f"{self.folder} has no table '{table}'; {advice}")
        if not self.is_whole(table):
            self.reload()  # a later stage may have replaced the table since this index was opened
            if not self.is_whole(table):
                raise self._damaged(f"{table}.parquet", "is damaged or being replaced")
        name = f"{table}.parquet"
        path, verified = self.folder / name, self._verified.get(name)
        if verified is not None and self._validated.get(name) != verified:
            if problem := find_problem(path, name, self.manifest):
                raise self._damaged(name, f"does not fit the index ({problem})")
            self._validated[name] = verified
        return path

    def has(self, table: str) -> bool:
        """Return True if the table was computed.

        Args:
            table: The name of the table, like "triggers", "values" or "experiments/agreement".

        Returns:
            True if the manifest lists the table.

        Raises:
            IndexFolderError: The table was computed, but its file is missing.

        Example:
            >>> index.has("memories"), index.has("effects")
            (True, False)
        """
        name = f"{table}.parquet"
        if name not in self.manifest.files:
            self.reload()  # another process may have computed the table since this index was opened
        if name not in self.manifest.files:
            return False
        if not (self.folder / name).is_file():
            self.reload()
            raise self._damaged(name, "is missing")
        return True

    def _damaged(self, name: str, what: str) -> IndexFolderError:
        is_from_scan = name in SCAN_TABLES + OPTIONAL_TABLES
        advice = "scan again with --fresh" if is_from_scan else f"make it again with `memlens repair {self.folder}`"
        return IndexFolderError(f"{self.folder / name} {what}; {advice}")

    def is_whole(self, table: str) -> bool:
        """Return True if the table's file has the checksum in the manifest. A file is read again only after a change.

        Args:
            table: The name of the table.

        Returns:
            False if the file is damaged or missing, or if the table was not computed.

        Example:
            >>> index.is_whole("triggers")
            True
        """
        name = f"{table}.parquet"
        facts, stamp = self.manifest.files.get(name), file_stamp(self.folder / name)
        if facts is None or stamp is None:
            return False
        if self._verified.get(name) != (facts.sha256, stamp):
            if not is_intact(self.folder / name, facts):
                return False
            self._verified[name] = (facts.sha256, stamp)
        return True

    def reload(self) -> None:
        """Read the manifest again if it was replaced since the last read.

        Raises:
            IndexFolderError: The folder now holds another scan, or no index.

        Example:
            >>> index.reload()  # does nothing if the manifest has not changed
        """
        stamp = file_stamp(self.folder / MANIFEST)
        if stamp == self._manifest_stamp:
            return
        manifest = Manifest.read(self.folder) if stamp else None
        if manifest is None or manifest.generation != self.manifest.generation:
            raise IndexFolderError(f"{self.folder} was replaced or removed since it was opened; run the command again")
        self.manifest, self._manifest_stamp = manifest, stamp

    def table(self, table: str, columns: Sequence[str] | None = None, filters: Any = None) -> pa.Table:
        """Return a table, or some of its columns and rows.

        Args:
            table: The name of the table.
            columns: Columns to read. None reads all.
            filters: Conditions on rows, as in `pyarrow.parquet.read_table`.

        Returns:
            The table.

        Raises:
            IndexFolderError: The table was not computed, or its file is missing or damaged.

        Example:
            >>> index.table("memories", ["max", "dead"]).num_rows
            120
        """
        import pyarrow.parquet as pq

        names = None if columns is None else list(columns)
        # pyarrow would read a path with a colon as a URL
        with self._explain_errors(), self.path(table).open("rb") as handle:
            self._check_opened([table])
            if filters is None:  # filters need pyarrow.dataset, which imports pandas if it is installed
                return pq.ParquetFile(handle).read(columns=names)
            return pq.read_table(handle, columns=names, filters=filters)

    def schema_names(self, table: str) -> list[str]:
        """Return the columns of a table.

        Args:
            table: The name of the table.

        Returns:
            The names of the columns.

        Raises:
            IndexFolderError: The table was not computed, or its file is missing or damaged.

        Example:
            >>> index.schema_names("memories")[:2]
            ['layer', 'memory']
        """
        import pyarrow.parquet as pq

        with self._explain_errors(), self.path(table).open("rb") as handle:
            self._check_opened([table])
            names: list[str] = pq.ParquetFile(handle).schema_arrow.names
            return names

    def search(self, *texts: str, place: str = "triggers", **options: Any) -> SearchResult:
        """Find memories, like `memlens search`.

        Args:
            texts: The text to find, or several tokens with `place="values"`. None lists all memories.
            place: Where to search: "triggers", "values" (promoted tokens), "patterns" or "name".
            options: Other options of `memlens search`: layers, kind, agreement, role, order, limit, ends, ignore_case,
                substring, bottom.

        Returns:
            The best matches and the total number of matches.

        Raises:
            SettingError: An option is not valid.
            IndexFolderError: A table was not computed, or its file is missing or damaged.

        Example:
            >>> index.search("river", limit=3).place
            'triggers'
        """
        from memlens.index.search import SearchQuery, search
        from memlens.settings import parse_layers, split_options

        (checked,) = split_options("search", {"place": place, **options}, SearchQuery)
        if isinstance(layers := checked.get("layers"), str):
            checked["layers"] = parse_layers(layers)
        return search(self, SearchQuery(**checked | {"texts": texts}))

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> QueryResult:
        """Return the rows of a DuckDB query.

        Args:
            query: SQL in which a name in braces, like `{triggers}`, stands for a table.
            parameters: Values of $1, $2 and so on.

        Returns:
            A list of one dictionary per row, with the methods `to_arrow` and `to_pandas`.

        Raises:
            IndexFolderError: A table was not computed, or its file is missing or damaged.
            SettingError: DuckDB cannot run the query.

        Example:
            >>> index.sql("SELECT count(*) AS n FROM {memories} WHERE layer = $1", [2])
            [{'n': 40}]
        """
        return QueryResult(self, query, parameters)

    def stream(self, query: str, parameters: Sequence[Any] = ()) -> Iterator[dict[str, Any]]:
        """Yield the rows of a DuckDB query, for results that are too large for a list.

        Args:
            query: SQL, as in `sql`.
            parameters: Values of $1, $2 and so on.

        Returns:
            An iterator of one dictionary per row.

        Raises:
            IndexFolderError: A table was not computed, or its file is missing or damaged.
            SettingError: DuckDB cannot run the query.

        Example:
            >>> sum(1 for row in index.stream("SELECT * FROM {memories}"))
            120
        """
        with self._run_query(query, parameters) as cursor:
            columns = [column[0] for column in cursor.description]
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                for row in rows:
                    yield dict(zip(columns, row, strict=True))

    def arrays(self, query: str, parameters: Sequence[Any] = ()) -> dict[str, NDArray[Any]]:
        """Return the columns of a DuckDB query as NumPy arrays.

        Args:
            query: SQL, as in `sql`.
            parameters: Values of $1, $2 and so on.

        Returns:
            {column: array}.

        Raises:
            IndexFolderError: A table was not computed, or its file is missing or damaged.
            SettingError: DuckDB cannot run the query.

        Example:
            >>> index.arrays("SELECT max FROM {memories}")["max"].shape
            (120,)
        """
        with self._run_query(query, parameters) as cursor:
            return cursor.fetchnumpy()

    def batches(self, query: str, parameters: Sequence[Any] = ()) -> Iterator[pa.RecordBatch]:
        """Yield the result of a DuckDB query as Arrow batches.

        Args:
            query: SQL, as in `sql`.
            parameters: Values of $1, $2 and so on.

        Returns:
            An iterator of record batches.

        Raises:
            IndexFolderError: A table was not computed, or its file is missing or damaged.
            SettingError: DuckDB cannot run the query.

        Example:
            >>> sum(batch.num_rows for batch in index.batches("SELECT * FROM {memories}"))
            120
        """
        with self._open_reader(query, parameters) as reader:
            yield from reader

    @contextmanager
    def _open_reader(self, query: str, parameters: Sequence[Any]) -> Iterator[pa.RecordBatchReader]:
        """Run a query and yield a reader of its result. Unlike a cursor, the reader does not copy the whole result."""
        with self._explain_errors(), self._connect() as database:
            filled, tables = self._fill_in_tables(query)
            reader = database.sql(filled, params=list(parameters)).to_arrow_reader(_ROWS_AT_ONCE)
            self._check_opened(tables)
            yield reader

    @contextmanager
    def _run_query(self, query: str, parameters: Sequence[Any]) -> Iterator[duckdb.DuckDBPyConnection]:
        """Run a query in which names in braces stand for tables. Yields a cursor with the result."""
        with self._explain_errors(), self._connect() as cursor:
            filled, tables = self._fill_in_tables(query)
            cursor.execute(filled, list(parameters))
            self._check_opened(tables)
            yield cursor

    def _fill_in_tables(self, query: str) -> tuple[str, list[str]]:
        """Replace names of tables in braces by SQL that reads them. Returns the query and the names."""
        name = re.compile(r"{([A-Za-z][\w/-]*)}")  # {4} is part of a regular expression
        return name.sub(lambda match: self._source_of(match[1]), query), name.findall(query)

    def _source_of(self, table: str) -> str:
        """Return SQL that reads a table."""
        return parquet_sql(self.path(table))

    def _check_opened(self, tables: Iterable[str]) -> None:
        """Raise IndexFolderError if a file was replaced after its checksum was compared and before it was opened."""
        for table in tables:
            name = f"{table}.parquet"
            verified = self._verified.get(name)
            if verified is not None and verified[1] != file_stamp(self.folder / name):
                raise IndexFolderError(f"{self.folder / name} was replaced while it was opened; run the command again")

    def _connect(self) -> duckdb.DuckDBPyConnection:
        """Return a cursor for one query, so that several threads can run queries. The caller closes the cursor."""
        with self._opening:  # the connection itself is not thread-safe
            if self._is_closed:
                raise IndexFolderError(f"{self.folder} is closed; open it again")
            return self._database.cursor()

    @cached_property
    def _database(self) -> duckdb.DuckDBPyConnection:
        """The DuckDB database, which stays open because opening it costs more than most queries.

        It uses one thread, so that rows have the same order in every run.
        """
        return open_database()

    def close(self) -> None:
        """Close the database. Running queries finish, and later queries raise IndexFolderError.

        Example:
            >>> memlens.Index(index.folder).close()
        """
        with self._opening:
            self._is_closed = True
            with suppress(duckdb.Error):  # the database closes with the last cursor
                self._database.close()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Raise a MemlensError for errors of DuckDB and pyarrow: damaged files and queries that cannot run."""
        try:
            yield
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            self._verified.clear()
            for name in self.manifest.files:
                if not self.is_whole(name.removesuffix(".parquet")):
                    self.path(name.removesuffix(".parquet"))
            if self._is_closed:
                raise IndexFolderError(f"{self.folder} is closed; open it again") from error
            if isinstance(error, OSError):
                raise
            why = str(error).strip().partition("\n")[0]
            if isinstance(error, duckdb.CatalogException | duckdb.BinderException | duckdb.ParserException):
                is_name = isinstance(error, (duckdb.CatalogException, duckdb.ParserException))
                advice = "; write tables in braces, like {memories}" if is_name else ""
                raise SettingError(f"the query is invalid: {why.partition(': ')[2]}{advice}") from error
            failure = "cannot read" if isinstance(error, pa.ArrowException) else "a query failed on"
            raise IndexFolderError(f"{failure} {self.folder}: {why}") from error

    def triggers(self, memory: str | MemoryId, end: str = "top", limit: int | None = None) -> TriggerList:
        """Return the triggers of a memory with their text, best first.

        Args:
            memory: A name like "L5N94", or a MemoryId.
            end: "top" for the largest coefficients, "bottom" for the most negative ones.
            limit: The maximum number of triggers. None returns all.

        Returns:
            The triggers, ordered by rank.

        Raises:
            UnknownName: The index has no such memory.
            SettingError: The end or the limit is not valid.

        Example:
            >>> [trigger.rank for trigger in index.triggers("L1N7", limit=2)]
            [0, 1]
        """
        if end not in ("top", "bottom"):
            raise UnknownName(f"a memory has the ends 'top' and 'bottom', not '{end}'")
        if limit is not None and limit < 0:
            raise SettingError(f"limit is {limit}; give 0 or more, or None for all triggers")
        name = self.check(memory)
        return self.triggers_of([name], end, limit)[name]

    def ordinary(self, memory: str | MemoryId) -> TriggerList:
        """Return random prefixes on which the memory is active and that are not triggers.

        Args:
            memory: A name like "L5N94", or a MemoryId.

        Returns:
            The prefixes, in the form of triggers.

        Raises:
            UnknownName: The index has no such memory.

        Example:
            >>> all(example.coefficient > 0 for example in index.ordinary("L1N7"))
            True
        """
        name = self.check(memory)
        return self.with_text(self.rows_of("ordinary", [name], order="rank")[name])

    def triggers_of(
        self, memories: Iterable[MemoryId], end: str = "top", limit: int | None = None
    ) -> dict[MemoryId, TriggerList]:
        """Return the triggers of several memories with their text, best first.

        Args:
            memories: The memories.
            end: "top" for the largest coefficients, "bottom" for the most negative ones.
            limit: The maximum number of triggers per memory. None returns all.

        Returns:
            {memory: its triggers}.

        Raises:
            UnknownName: The index has no such memory.

        Example:
            >>> [len(triggers) for triggers in index.triggers_of([index.check("L1N7")], limit=2).values()]
            [2]
        """
        where = f"\"end\" = '{end}'" + ("" if limit is None else f" AND rank < {int(limit)}")
        rows = self.rows_of("triggers", memories, where=where, order="rank")
        texts = iter(self.with_text([row for memory_rows in rows.values() for row in memory_rows]))
        return {memory: TriggerList(islice(texts, len(memory_rows))) for memory, memory_rows in rows.items()}

    def with_text(self, rows: Sequence[dict[str, Any]]) -> TriggerList:
        """Return rows of a trigger table as triggers with their text. Queries the corpus once.

        Args:
            rows: Rows of a table with the columns of "triggers".

        Returns:
            The triggers, in the order of the rows.

        Raises:
            IndexFolderError: A row refers to a position that does not exist.

        Example:
            >>> len(index.with_text(index.sql("SELECT * FROM {triggers} LIMIT 3")))
            3
        """
        sentences = self.sentences(sorted({row["sentence"] for row in rows}))
        return TriggerList(trigger_of(row, sentences.get(row["sentence"]), self.vocabulary) for row in rows)

    def rows_of(
        self, table: str, memories: Iterable[MemoryId], columns: str = "*", *, where: str = "true", order: str = ""
    ) -> dict[MemoryId, list[dict[str, Any]]]:
        """Return the rows of a table about some memories.

        Args:
            table: The name of the table.
            memories: The memories.
            columns: SQL for the columns to read.
            where: SQL for a condition on the rows.
            order: SQL for the order of the rows.

        Returns:
            {memory: its rows}.

        Raises:
            IndexFolderError: The table was not computed, or its file is missing or damaged.

        Example:
            >>> len(index.rows_of("memories", [index.check("L1N7")], "max")[index.check("L1N7")])
            1
        """
        by_memory: dict[MemoryId, list[dict[str, Any]]] = {memory: [] for memory in memories}
        if not by_memory:
            return by_memory
        places = {(memory.layer, self.names.number(memory)): rows for memory, rows in by_memory.items()}
        condition = "(layer, memory) IN (VALUES " + ", ".join(f"({layer}, {number})" for layer, number in places) + ")"
        if len(by_memory) == 1:  # an equality lets DuckDB skip row groups
            condition = " AND ".join(f"layer = {layer} AND memory = {number}" for layer, number in places)
        selection = columns if columns == "*" else f"layer, memory, {columns}"
        query = f"SELECT {selection} FROM {{{table}}} WHERE {condition} AND {where}"
        for row in self.stream(f"{query} ORDER BY {order}" if order else query):
            places[row["layer"], row["memory"]].append(row)
        return by_memory

    def sentences(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return rows of the corpus by sentence id.

        Args:
            ids: The ids.

        Returns:
            {id: row}. Ids that do not exist are left out.

        Raises:
            IndexFolderError: The table of the corpus is missing or damaged.

        Example:
            >>> sorted(index.sentences([0, 2]))
            [0, 2]
        """
        if not ids:
            return {}
        numbers = ", ".join(str(int(i)) for i in ids)
        return {row["sentence"]: row for row in self.sql(f"SELECT * FROM {{corpus}} WHERE sentence IN ({numbers})")}

    @cached_property
    def vocabulary(self) -> list[str]:
        """The text of every token."""
        texts: list[str] = self.arrays("SELECT text FROM {vocabulary} ORDER BY token")["text"].tolist()
        return texts

    def chart(self, experiment: str) -> Any:
        """Return the figure of an experiment as an Altair chart, like `memlens.chart`.

        Args:
            experiment: Name of an experiment that was run.

        Returns:
            An Altair chart.

        Raises:
            UnknownName: No experiment has this name.
            IndexFolderError: The experiment was not run, or its table is empty.

        Example:
            >>> _ = memlens.experiment(memlens.values(index, model=index.load_model()), "rank")
            >>> hasattr(index.chart("rank"), "to_dict")
            True
        """
        import memlens  # the top of this module must not import experiments

        return memlens.chart(self, experiment)

    def load_model(self, model: MemoryModel | str | None = None, **options: Any) -> MemoryModel:
        """Return the model that was scanned.

        Args:
            model: The model or its location. None uses the location that the scan recorded.
            options: Options of `memlens.load`.

        Returns:
            The loaded model.

        Raises:
            ModelError: The model has changed, or its location is unknown because the scan used a loaded object.

        Example:
            >>> len(index.load_model().layers)
            3
        """
        from memlens.models.load import load

        source = self.manifest.model.source if model is None else model
        if model is None and not source:
            raise ModelError(
                "the index was scanned from a model in memory; name the location of the model with --model"
            )
        loaded = load(source, **({"dtype": self.manifest.model.dtype} | options))
        self.check_model(loaded)
        return loaded

    def check_model(self, model: MemoryModel) -> None:
        """Raise ModelError if this is not the model that was scanned.

        Args:
            model: A loaded model.

        Raises:
            ModelError: The fingerprint of `model` differs from that of the scanned model.

        Example:
            >>> index.check_model(index.load_model())
        """
        if model.fingerprint() != self.manifest.model.fingerprint:
            raise ModelError(
                f"{model.name} is not the model that was scanned into {self.folder} (its fingerprint differs); "
                "name the scanned model with --model, or scan again"
            )

    def write(
        self, tables: Mapping[str, tuple[pa.Schema, Iterable[pa.Table]]], notes: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Write the tables of a later stage together.

        The tables are written under temporary names, removed from the manifest, renamed, and added to the manifest. If
        the process is killed in between, they count as not computed.

        Raises:
            IndexFolderError: The folder now holds another scan, or another version of a table that was read.
        """
        names = [f"{table}.parquet" for table in tables]
        with lock_for_writing(self.folder / LOCK), explain_os_errors(self.folder):
            self._check_sources(names)
            facts: dict[str, Any] = {}
            with ExitStack() as stack:
                for name, (schema, parts) in zip(names, tables.values(), strict=True):
                    (self.folder / name).parent.mkdir(exist_ok=True)
                    file_facts = fill_table(stack.enter_context(replacing(self.folder / name)), schema, parts)
                    facts[name] = {**asdict(file_facts), "made_with": made_with()}
                self.reload()
                self._save(self.manifest.with_files({}, without=names))
            for name in names:
                self._verified.pop(name, None)  # the version that was read no longer exists
            self.manifest = self.manifest.with_files(facts)  # `notes` may read the manifest
            self._save(self.manifest.with_notes(notes()))

    def _save(self, manifest: Manifest) -> None:
        manifest.write(self.folder)
        self.manifest, self._manifest_stamp = manifest, file_stamp(self.folder / MANIFEST)

    def _check_sources(self, names: Sequence[str]) -> None:
        """Raise IndexFolderError if a table that is not in `names` was replaced after it was read."""
        self.reload()
        for name, (sha256, _) in list(self._verified.items()):  # a copy, because other threads may add entries
            if name not in names and self.manifest.sha256(name.removesuffix(".parquet")) != sha256:
                raise IndexFolderError(f"{self.folder / name} was replaced during this command; run it again")

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


class QueryResult(list[dict[str, Any]]):
    """The rows of a query, one dictionary each. Notebooks show them as a table."""

    def __init__(self, index: Index, query: str, parameters: Sequence[Any] = ()) -> None:
        super().__init__(index.stream(query, parameters))
        self._index, self._query, self._parameters = index, query, tuple(parameters)

    def to_arrow(self) -> pa.Table:
        """Run the query again and return its result as an Arrow table.

        Returns:
            The table, whose columns have the types of the query.

        Example:
            >>> index.sql("SELECT layer, max FROM {memories}").to_arrow().num_rows
            120
        """
        with self._index._open_reader(self._query, self._parameters) as reader:
            return reader.read_all()

    def to_pandas(self) -> Any:
        """Run the query again and return its result as a pandas DataFrame. Needs pandas.

        Returns:
            The DataFrame.
        """
        return self.to_arrow().to_pandas()

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return list, (list(self),)  # other processes receive the rows without the index

    def __repr__(self) -> str:
        if len(self) <= _ROWS_SHOWN:
            return super().__repr__()
        rows = ", ".join(map(repr, self[:_ROWS_SHOWN]))
        return f"[{rows}, ... {len(self) - _ROWS_SHOWN:,} more rows]"

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{escape(name)}</th>" for name in (self[0] if self else ()))
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(visible(str(cell)))}</td>" for cell in row.values()) + "</tr>"
            for row in self[:_ROWS_SHOWN]
        )
        return f"<table><caption>{len(self):,} rows</caption><tr>{heads}</tr>{rows}</table>"


def open_index(folder: Index | str | PathLike[str]) -> Index:
    """Open an index.

    Args:
        folder: An index folder or `hf:OWNER/NAME`. An open Index is returned unchanged.

    Returns:
        The open index.

    Raises:
        IndexFolderError: The folder does not hold a complete index.

    Example:
        >>> memlens.open_index(index.folder).layers
        (0, 1, 2)
    """
    return folder if isinstance(folder, Index) else Index(Path(folder))


def _why_not_an_index(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no index folder {folder}; make one with `memlens scan MODEL CORPUS -o {folder}`"
    if (folder / PARTIAL / SHARD).is_file():
        return f"{folder} is one shard of a scan; merge all shards with `memlens merge SHARD... -o INDEX`"
    if (folder / PARTIAL / PULL).is_file():
        return f"{folder} is an unfinished copy from the Hub; repeat its `memlens pull` command to finish it"
    if (folder / PARTIAL).is_dir():
        return f"{folder} is an unfinished scan; repeat its `memlens scan` command to finish it"
    if (folder / BACKUP).is_file():
        return f"{folder} has lost its {MANIFEST}; restore it with `memlens repair {folder}`"
    return f"{folder} is not an index (it has no {MANIFEST}); make one with `memlens scan MODEL CORPUS -o FOLDER`"


def _name_layers(layers: Sequence[int]) -> str:
    return f"layers {', '.join(str(layer) for layer in layers)}" if len(layers) > 1 else f"layer {layers[0]}"
