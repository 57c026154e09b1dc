"""Reads passages of text from .txt, .jsonl and .parquet files and from Hub datasets (by the package `datasets`).

A passage of .txt is a line, or, where documents are asked for, the whole file; of .jsonl a line's record; of .parquet
and of a dataset a row. A null or blank text is an empty document and is passed over. A record's number counts from 1,
blank lines of a .jsonl file included, so that it is the number an editor shows.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from types import ModuleType
from typing import IO, Any

from memlens.corpus.files import (
    LINE_LIMIT,
    SourceFile,
    open_bytes,
    open_raw,
    printable,
    read_chunks,
    read_lines,
    too_long,
)
from memlens.errors import CorpusError, needing
from memlens.settings import HubSpec

DOCUMENT_LIMIT = 64 << 20  # characters of a .txt file that is read as one document
BLOCK_TEXT = 1 << 20  # characters after which a .txt file that will be cut into blocks goes on as a new document
_ROWS = 256  # rows of a .parquet file in memory at a time, fewer where texts are long


@dataclass(frozen=True)
class Passage:
    """One paragraph or document, and where it stands: `file.txt:12`, the file relative to the folder given."""

    text: str
    source: str


def read_paragraphs(file: SourceFile) -> Iterator[Passage]:
    """Each line of a .txt file that is not blank."""
    for number, line in read_lines(file):
        if text := line.strip():
            yield Passage(text, f"{file.name}:{number}")


def read_whole(file: SourceFile) -> Iterator[Passage]:
    """A .txt file as one document; it must fit in memory with ease."""
    lines: list[str] = []
    size = 0
    for _, line in read_lines(file):
        lines.append(line)
        size += len(line) + 1
        if size > DOCUMENT_LIMIT:
            raise CorpusError(
                f"'{file.shown}' holds more than {DOCUMENT_LIMIT >> 20} million characters, too many for one document; "
                "write one document per line as .jsonl, or use --unit block:N"
            )
    if text := "\n".join(lines).strip():
        yield Passage(text, file.name)


def read_for_blocks(file: SourceFile) -> Iterator[Passage]:
    """A .txt file to be cut into blocks: one document, or, where it is long, several that end with a line."""
    lines: list[str] = []
    first, size = 1, 0
    for number, line in read_lines(file):
        lines.append(line)
        size += len(line) + 1
        if size >= BLOCK_TEXT:
            yield from _joined_lines(file, first, lines)
            lines, first, size = [], number + 1, 0
    yield from _joined_lines(file, first, lines)


def _joined_lines(file: SourceFile, first: int, lines: list[str]) -> Iterator[Passage]:
    if text := "\n".join(lines).strip():
        yield Passage(text, f"{file.name}:{first}")


def read_jsonl(file: SourceFile, column: str) -> Iterator[Passage]:
    """Each line one JSON object with the column, or one JSON string."""
    for number, line in read_lines(file):
        if not line.strip():
            continue
        place = f"'{file.shown}' line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as problem:
            reason = f"{problem.msg} at column {problem.colno}" if isinstance(problem, JSONDecodeError) else problem
            raise CorpusError(f"{place}: not JSON ({reason}); write one object or string a line") from None
        if not isinstance(record, dict | str):
            raise CorpusError(f"{place}: a JSON {_json_name(record)}, not an object or a string; write one a line")
        value = record if isinstance(record, str) else pick_column(record, column, place)
        if text := check_text(value, column, place):
            yield Passage(text, f"{file.name}:{number}")


def read_parquet(file: SourceFile, column: str) -> Iterator[Passage]:
    """Each row; only the one column is read, a few rows at a time."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        # a buffer makes pyarrow read a column chunk page by page rather than at once
        with _seekable(file) as stream, ParquetFile(stream, buffer_size=1 << 16, pre_buffer=False) as table:
            _check_column(table.schema_arrow, column, file)
            for batch in table.iter_batches(
                batch_size=_rows_at_once(table, column), columns=[column], use_threads=False
            ):
                for scalar in batch.column(0):
                    number += 1
                    place = f"'{file.shown}' record {number}"
                    if text := check_text(_as_text(scalar, place), column, place):
                        yield Passage(text, f"{file.name}:{number}")
    except (pyarrow.ArrowException, OSError) as problem:
        reason = printable(str(problem).strip().split("\n")[0])
        raise CorpusError(
            f"'{file.shown}' record {number + 1}: not a whole .parquet file ({reason}); fetch or write it again"
        ) from None


def _rows_at_once(table: Any, column: str) -> int:
    """The number of rows to read at once, so that texts of a row group's average length fit in memory with ease."""
    rows = _ROWS
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        chunks = [group.column(place) for place in range(group.num_columns)]
        packed = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
        rows = min(rows, LINE_LIMIT * group.num_rows // max(packed, 1))
    return max(rows, 1)


@contextmanager
def _seekable(file: SourceFile) -> Iterator[IO[bytes]]:
    """A .parquet file is read from its end, so a compressed one is first unpacked to a nameless file on disk."""
    if not file.compression:
        with open_raw(file) as raw:
            yield raw
        return
    with open_bytes(file) as stream, tempfile.TemporaryFile() as unpacked:
        for chunk in read_chunks(file, stream):
            unpacked.write(chunk)
        unpacked.seek(0)
        yield unpacked


def _check_column(schema: Any, column: str, file: SourceFile) -> None:
    import pyarrow.types as types

    place = f"'{file.shown}' record 1"
    pick_column(dict.fromkeys(schema.names), column, place)
    if schema.names.count(column) > 1:
        raise CorpusError(f"{place}: column '{column}' exists more than once; rename one of them")
    found = schema.field(column).type
    plain = found.value_type if types.is_dictionary(found) else found
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    if not any(test(plain) for test in tests):
        raise CorpusError(f"{place}: column '{column}' is {found}, not text; name a text column with --column")


def _as_text(scalar: Any, place: str) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as problem:
        raise CorpusError(f"{place}: not UTF-8 at byte {problem.start + 1} of the text; write it as UTF-8") from None


def pick_column(record: dict[str, Any], column: str, place: str) -> object:
    """The column's value; a record without it is refused with the columns it has."""
    if column not in record:
        columns = printable(", ".join(map(str, record)))[:200] or "none"
        raise CorpusError(f"{place}: no column '{column}'; choose one of its columns with --column: {columns}")
    return record[column]


def check_text(value: object, column: str, place: str) -> str:
    """The text, stripped; "" for a null. Text that no tokenizer or table can hold is refused."""
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = _json_name(value)
        raise CorpusError(f"{place}: column '{column}' is a {kind}, not text; name a text column with --column")
    if len(value) > LINE_LIMIT:
        raise too_long(place)
    if "\0" in value:
        raise CorpusError(f"{place}: the text holds a NUL at character {value.index(chr(0)) + 1}; remove it")
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        code = f"U+{ord(value[problem.start]):04X}"
        raise CorpusError(
            f"{place}: the text holds half a surrogate pair ({code}) at character {problem.start + 1}; remove it"
        ) from None
    return value.strip()


def _json_name(value: object) -> str:
    names = {dict: "object", list: "list", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def read_hub(spec: HubSpec, column: str) -> Iterator[Passage]:
    """Each record of the split."""
    datasets = _import_datasets(spec)
    try:
        records = iter(datasets.load_dataset(spec.name, spec.config, split=spec.split, streaming=True))
    except Exception as problem:  # the package raises its own, the network's and the file formats' errors
        raise _refuse(spec, problem) from problem
    number = 0
    while True:
        number += 1
        try:
            record: dict[str, Any] = next(records)
        except StopIteration:
            return
        except Exception as problem:
            raise _refuse(spec, problem, f" record {number}") from problem
        place = f"'{spec}' record {number}"
        if text := check_text(pick_column(record, column, place), column, place):
            yield Passage(text, f"{spec}:{number}")


def hub_fingerprint(spec: HubSpec) -> str:
    """Changes when the dataset does: the Hub's commit, or for a local folder the package's hash of its files."""
    datasets = _import_datasets(spec)
    try:
        builder = datasets.load_dataset_builder(spec.name, spec.config)
    except Exception as problem:
        raise _refuse(spec, problem) from problem
    return f"{builder.hash} {builder.config_id}"


def _import_datasets(spec: HubSpec) -> ModuleType:
    with needing("datasets", f"corpus '{spec}'", CorpusError):
        import datasets
    module: ModuleType = datasets
    return module


def _refuse(spec: HubSpec, problem: Exception, place: str = "") -> CorpusError:
    reason = printable(str(problem).strip().split("\n")[0])[:300]
    what = f"corpus '{spec}'{place} cannot be read: {type(problem).__name__}: {reason}"
    at_the_cache = isinstance(problem, OSError) and problem.filename is not None  # what `datasets` itself keeps on disk
    advice = "set HF_HOME to a folder where you may write" if at_the_cache else "check name, config, split and network"
    return CorpusError(f"{what}; {advice}")
