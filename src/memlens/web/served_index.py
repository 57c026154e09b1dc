"""An index for a server: the same tables and the same queries, from many threads, many times a second.

Every query gets a cursor of its own, which is what makes it safe in every thread. Tables are copied into memory in the
background as far as they fit: a look-up that takes tens of milliseconds from Parquet takes one from there. Until then,
for tables that are too large, and for those that a stage has replaced meanwhile, the files are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import duckdb

from memlens.errors import IndexFolderError, MemlensError
from memlens.files import reader_of
from memlens.index.reader import Index

T = TypeVar("T")
Stamp = tuple[int, int, int]

# What pages ask for most comes first.
_COPIED = ("memories", "triggers", "corpus", "values", "names", "patterns", "keys")
_MOST_BYTES = 400_000_000  # of Parquet; in memory about four times as much
_MOST_RESULTS = 64


class ServedIndex(Index):
    """An index that stays open."""

    def __init__(self, folder: str | Path, most_bytes: int = _MOST_BYTES) -> None:
        super().__init__(folder)
        self._most_bytes = most_bytes
        self._in_memory: dict[str, Stamp] = {}  # table -> the file that was copied
        self._results: dict[tuple[Any, ...], tuple[tuple[Stamp | None, ...], Any]] = {}
        self._keeping, self._remembering = Lock(), Lock()
        self._is_closed = False

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

    def _copy(self, table: str, stamp: Stamp) -> None:
        with self._explaining_damage(), self._connect() as cursor:
            # Replaced in one step: questions that run meanwhile still see the earlier one.
            cursor.execute(f'CREATE OR REPLACE TABLE "{table}" AS SELECT * FROM {reader_of(self.path(table))}')
            if table == "corpus":
                cursor.execute("CREATE INDEX sentences ON corpus (sentence)")
        if self.stamp(table) == stamp:  # not replaced while it was read
            self._in_memory[table] = stamp

    def stamp(self, table: str) -> Stamp | None:
        """Size, time and number of a table's file, from which a new one is known; None where there is none."""
        if not self.has(table):
            return None
        found = (self.folder / f"{table}.parquet").stat()
        return found.st_size, found.st_mtime_ns, found.st_ino

    def remember(self, tables: Sequence[str], key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make` gives, made once for a key and these tables as they are now; the latest few are kept."""
        stamps = tuple(self.stamp(table) for table in tables)
        with self._remembering:
            entry = self._results.get(key)
        if entry is not None and entry[0] == stamps:
            known: T = entry[1]
            return known
        result = make()
        with self._remembering:
            self._results.pop(key, None)
            self._results[key] = (stamps, result)
            while len(self._results) > _MOST_RESULTS:
                self._results.pop(next(iter(self._results)))
        return result

    def close(self) -> None:
        """No question is answered after this; those that are being answered come to their end."""
        with self._opening:
            self._is_closed = True
            with suppress(duckdb.Error):  # refused while a cursor is at work; then the database goes with the last one
                self._database.close()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        with self._opening:  # the one connection that all cursors come from refuses two callers at once
            if self._is_closed:
                raise IndexFolderError(f"{self.folder} is closed; open it again")
            return self._database.cursor()

    def _source_of(self, table: str) -> str:
        kept = self._in_memory.get(table)
        if kept is not None:
            try:
                if self.stamp(table) == kept:
                    return f'"{table}"'
            except (OSError, MemlensError):  # being replaced at this moment; the file will say what is wrong
                pass
        return reader_of(self.path(table))
