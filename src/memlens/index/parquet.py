"""Parquet files: written in parts as row groups, and named so that nothing in a path is taken for anything else.

This module knows the file format and two libraries' habits; it knows no table.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pyarrow as pa

from memlens.index.files import replacing


def fill_table(path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> None:
    """Write parts as row groups to a new file."""
    import pyarrow.parquet as pq

    # Absolute, since a relative path with a colon would be taken for an address.
    with closing(pq.ParquetWriter(path.absolute(), schema, compression="zstd")) as writer:
        for part in parts:
            writer.write_table(part)


def write_table(path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> None:
    """The same beside and renamed."""
    with replacing(path) as beside:
        fill_table(beside, schema, parts)


def reader_of(path: Path) -> str:
    """DuckDB's SQL for reading this very file: no wildcards, no columns made up from folder names like layer=3."""
    plain = "".join(f"[{sign}]" if sign in "*?[" else sign for sign in str(path.absolute()))
    quoted = plain.replace("'", "''")
    return f"read_parquet('{quoted}', hive_partitioning = false)"
