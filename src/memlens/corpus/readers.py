"""Reads passages of text from .txt, .jsonl and .parquet files and from Hub datasets, in a fixed order.

Files: a folder is walked recursively, with names sorted by code point. Hidden files and files of other types in a
folder are skipped. A source that names a single file must have a supported type. Links are followed, except links to a
folder that contains them.

Lines: a line ends at a line feed, a carriage return or both. Form feeds and U+2028 do not end a line. A byte order mark
at the start of a file is dropped. Text that is not UTF-8, contains a NUL, or has a line longer than LINE_LIMIT raises
CorpusError.

Passages: a passage is a line of a .txt file (or the whole file if the unit is a document), a record of a .jsonl file,
or a row of a .parquet file or of a dataset. Null and blank texts are skipped. Records are numbered from 1, and blank
lines count, as in an editor.
"""

import gzip
import json
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from json import JSONDecodeError
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol
from unicodedata import category

from memlens.errors import CorpusError, needing
from memlens.settings import BUNDLED, HubSpec

CHUNK = 1 << 20
LINE_LIMIT = 16 << 20  # maximum bytes of a line, or characters of a record
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")
_READABLE = ".txt, .jsonl or .parquet, each also .gz or .zst"
# a sample of the text that the bundled model was trained on, articles that it was not trained on, and CC0 prose
_BUNDLED_TEXTS = {"train": "wikipedia/train.jsonl.gz", "held-out": "wikipedia/held-out.jsonl.gz", "prose": "prose"}
_UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")  # control characters, unpaired surrogates, line and paragraph separators


@dataclass(frozen=True)
class SourceFile:
    """A file to read."""

    path: Path
    name: str  # name in the index, relative to the source folder with "/", so that it is the same on every machine
    kind: str  # one of KINDS
    compression: str  # one of COMPRESSIONS, or "" for none

    @property
    def label(self) -> str:
        """The path as shown in error messages."""
        return printable(str(self.path))


def printable(text: str) -> str:
    """Return the text on one line, with characters that cannot be printed replaced."""
    return "".join("\ufffd" if category(character) in _UNPRINTABLE else character for character in text)


def list_files(source: str) -> Iterator[SourceFile]:
    """Yield the files of a source that is not on the Hub."""
    root = _bundled_text(source) if source.partition(":")[0] == BUNDLED else Path(source)
    try:
        if root.is_dir():
            yield from _list_folder(root)
        elif not root.exists():
            raise CorpusError(f"corpus '{printable(source)}' does not exist; check the path")
        elif file := _source_file(root, root.name):
            yield file
        else:
            raise CorpusError(f"'{printable(str(root))}' has an unknown file type; memlens reads {_READABLE}")
    except OSError as problem:
        # a folder cannot be listed; files that cannot be opened are reported by the reader
        place = printable(str(problem.filename or source))
        raise CorpusError(f"'{place}' cannot be read: {problem.strerror}; check the path and its permissions") from None


def _bundled_text(source: str) -> Path:
    """Return the path of a bundled text. The name `bundled` is short for `bundled:train`."""
    name = source.partition(":")[2] or "train"
    if name not in _BUNDLED_TEXTS:
        choices = ", ".join(f"{BUNDLED}:{name}" for name in _BUNDLED_TEXTS)
        raise CorpusError(f"there is no bundled text '{printable(source)}'; choose one of {choices}")
    return Path(str(files("memlens"))) / BUNDLED / _BUNDLED_TEXTS[name]


def _list_folder(root: Path) -> Iterator[SourceFile]:
    is_empty = True
    for path, name in _walk(root, "", (root.resolve(),)):
        if file := _source_file(path, name):
            is_empty = False
            yield file
    if is_empty:
        raise CorpusError(
            f"folder '{printable(str(root))}' has no file that memlens can read; supported types are {_READABLE}"
        )


def _walk(folder: Path, prefix: str, ancestors: tuple[Path, ...]) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            target = path.resolve()
            if target not in ancestors:
                yield from _walk(path, f"{prefix}{path.name}/", (*ancestors, target))
        else:
            yield path, prefix + path.name


def _source_file(path: Path, name: str) -> SourceFile | None:
    """Return a file with its type and compression, or None if its type is not supported."""
    ending = path.name.lower()
    compression = next((suffix for suffix in COMPRESSIONS if ending.endswith(suffix)), "")
    kind = next((suffix for suffix in KINDS if ending.removesuffix(compression).endswith(suffix)), None)
    return SourceFile(path, printable(name), kind, compression) if kind else None


class ByteStream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def open_raw(file: SourceFile) -> IO[bytes]:
    """Open a file without decompressing it. Raises CorpusError for a pipe or a device, which may never end."""
    try:
        if file.path.exists() and not file.path.is_file():
            raise CorpusError(f"'{file.label}' is not a regular file; copy its text to a file first")
        return file.path.open("rb")
    except OSError as problem:
        raise unreadable(file, problem) from None


@contextmanager
def open_bytes(file: SourceFile) -> Iterator[ByteStream]:
    """Open a file, and decompress it if its name ends in .gz or .zst."""
    with open_raw(file) as stream:
        if file.compression == ".gz":
            yield gzip.GzipFile(fileobj=stream)
        elif file.compression == ".zst":
            import pyarrow

            with pyarrow.CompressedInputStream(stream, "zstd") as decompressed:
                yield decompressed
        else:
            yield stream


def unreadable(file: SourceFile, problem: OSError) -> CorpusError:
    reason = problem.strerror or printable(str(problem))
    return CorpusError(f"'{file.label}' cannot be read: {reason}; check the path and its permissions")


def read_chunks(file: SourceFile, stream: ByteStream) -> Iterator[bytes]:
    """Yield chunks of at most CHUNK bytes. Raises CorpusError if a compressed file is damaged."""
    while True:
        try:
            chunk = stream.read(CHUNK)
        except (OSError, EOFError, zlib.error) as problem:
            if isinstance(problem, OSError) and (problem.errno or not file.compression):
                raise unreadable(file, problem) from None
            reason = printable(str(problem))
            raise CorpusError(
                f"'{file.label}' is truncated or not a {file.compression} file ({reason}); download or compress it "
                "again"
            ) from None
        if not chunk:
            return
        yield chunk


def read_lines(file: SourceFile, *, blank: bool = True) -> Iterator[tuple[int, str]]:
    """Yield (number, line) for each line of a file, counted from 1. Empty lines are left out if `blank` is False."""
    with open_bytes(file) as stream:
        for number, raw in _split_lines(_without_mark(read_chunks(file, stream)), blank=blank):
            if len(raw) > LINE_LIMIT:
                raise too_long(f"'{file.label}' line {number}")
            yield number, _decode(file, number, raw)


def too_long(place: str) -> CorpusError:
    return CorpusError(
        f"{place} is longer than {LINE_LIMIT >> 20} million characters, the limit for one text; split the text"
    )


def _without_mark(chunks: Iterator[bytes]) -> Iterator[bytes]:
    head = b""
    for chunk in chunks:  # the first chunk of a decompressor may be shorter than a byte order mark
        head += chunk
        if len(head) >= len(_BYTE_ORDER_MARK):
            break
    yield head.removeprefix(_BYTE_ORDER_MARK)
    yield from chunks


def _split_lines(chunks: Iterator[bytes], *, blank: bool = True) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) for each line, counted from 1.

    If `blank` is False, a chunk of empty lines is skipped without splitting it, because a small .gz file can contain
    millions of empty lines.
    """
    pending: list[bytes] = []  # the pieces of a line that began in an earlier chunk
    number, size = 1, 0
    after_return = False
    for chunk in chunks:
        if after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            after_return = False
        if chunk:
            after_return = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not blank and not size and not chunk.strip(b"\n"):
            number += len(chunk)
            continue
        first, *following = chunk.split(b"\n")
        pending.append(first)
        size += len(first)
        if following:
            for line in (b"".join(pending), *following[:-1]):
                if line or blank:
                    yield number, line
                number += 1
            pending, size = [following[-1]], len(following[-1])
        if b"\0" in pending[-1] or size > LINE_LIMIT:
            break  # the caller rejects this line; binary data may have no line end for gigabytes
    if any(pending):
        yield number, b"".join(pending)


def _decode(file: SourceFile, number: int, raw: bytes) -> str:
    if b"\0" in raw:
        raise CorpusError(
            f"'{file.label}' line {number} contains a NUL at byte {raw.index(0) + 1}; "
            "remove it, or convert a UTF-16 file with iconv -t UTF-8"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise CorpusError(
            f"'{file.label}' line {number} is not valid UTF-8 at byte {problem.start + 1} "
            f"(0x{raw[problem.start]:02x}); convert the file with iconv -t UTF-8"
        ) from None


DOCUMENT_LIMIT = 64 << 20  # maximum characters of a .txt file that is read as one document
BLOCK_TEXT = 1 << 20  # characters after which a .txt file that is cut into blocks continues as a new document
_ROWS = 256  # maximum rows of a .parquet file in memory; fewer if texts are long


@dataclass(frozen=True)
class Passage:
    """A text and its location relative to the source folder, such as `file.txt:12`."""

    text: str
    source: str


def read_paragraphs(file: SourceFile) -> Iterator[Passage]:
    """Yield the lines of a .txt file that are not blank."""
    for number, line in read_lines(file, blank=False):
        if text := line.strip():
            yield Passage(text, f"{file.name}:{number}")


def read_whole(file: SourceFile) -> Iterator[Passage]:
    """Yield a .txt file as one document. Raises CorpusError if it is longer than DOCUMENT_LIMIT."""
    lines: list[str] = []
    size = 0
    for _, line in read_lines(file):
        lines.append(line)
        size += len(line) + 1
        if size > DOCUMENT_LIMIT:
            raise CorpusError(
                f"'{file.label}' has more than {DOCUMENT_LIMIT >> 20} million characters, the limit for one document; "
                "write one document per line as .jsonl, or use --unit block:N"
            )
    if text := "\n".join(lines).strip():
        yield Passage(text, file.name)


def read_for_blocks(file: SourceFile) -> Iterator[Passage]:
    """Yield a .txt file as one document. A long file is split at line ends into several documents."""
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
    """Yield the texts of a .jsonl file. Each line is a JSON object that contains the column, or a JSON string."""
    for number, line in read_lines(file, blank=False):
        if not line.strip():
            continue
        place = f"'{file.label}' line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as problem:
            reason = f"{problem.msg} at column {problem.colno}" if isinstance(problem, JSONDecodeError) else problem
            raise CorpusError(f"{place} is not JSON ({reason}); write one object or string per line") from None
        if not isinstance(record, dict | str):
            raise CorpusError(
                f"{place} is a JSON {_json_name(record)}, not an object or string; write one object or string per line"
            )
        value = record if isinstance(record, str) else pick_column(record, column, place)
        if text := check_text(value, column, place):
            yield Passage(text, f"{file.name}:{number}")


def read_parquet(file: SourceFile, column: str) -> Iterator[Passage]:
    """Yield the texts of a .parquet file. Only one column is read, a few rows at a time."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        # with a buffer, pyarrow reads a column chunk page by page, which bounds memory
        with _seekable(file) as stream, ParquetFile(stream, buffer_size=1 << 16, pre_buffer=False) as table:
            _check_column(table.schema_arrow, column, file)
            for batch in table.iter_batches(
                batch_size=_rows_at_once(table, column), columns=[column], use_threads=False
            ):
                for scalar in batch.column(0):
                    number += 1
                    place = f"'{file.label}' record {number}"
                    if text := check_text(_as_text(scalar, place), column, place):
                        yield Passage(text, f"{file.name}:{number}")
    except (pyarrow.ArrowException, OSError) as problem:
        reason = printable(str(problem).strip().split("\n")[0])
        raise CorpusError(
            f"'{file.label}' record {number + 1}: damaged or not a .parquet file ({reason}); download or write it again"
        ) from None


def _rows_at_once(table: Any, column: str) -> int:
    """Return the number of rows to read at once, which is smaller if the texts of a row group are long."""
    rows = _ROWS
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        chunks = [group.column(place) for place in range(group.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
        rows = min(rows, LINE_LIMIT * group.num_rows // max(size, 1))
    return max(rows, 1)


@contextmanager
def _seekable(file: SourceFile) -> Iterator[IO[bytes]]:
    """Open a .parquet file with random access. A compressed file is first decompressed to a temporary file."""
    if not file.compression:
        with open_raw(file) as raw:
            yield raw
        return
    with open_bytes(file) as stream, tempfile.TemporaryFile() as plain_file:
        for chunk in read_chunks(file, stream):
            plain_file.write(chunk)
        plain_file.seek(0)
        yield plain_file


def _check_column(schema: Any, column: str, file: SourceFile) -> None:
    import pyarrow.types as types

    place = f"'{file.label}' record 1"
    pick_column(dict.fromkeys(schema.names), column, place)
    if schema.names.count(column) > 1:
        raise CorpusError(f"{place}: column '{column}' exists more than once; rename one of them")
    column_type = schema.field(column).type
    plain = column_type.value_type if types.is_dictionary(column_type) else column_type
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    if not any(test(plain) for test in tests):
        raise CorpusError(f"{place}: column '{column}' is {column_type}, not text; name a text column with --column")


def _as_text(scalar: Any, place: str) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as problem:
        raise CorpusError(f"{place} is not valid UTF-8 at byte {problem.start + 1}; store the text as UTF-8") from None


def pick_column(record: dict[str, Any], column: str, place: str) -> object:
    """Return the record's value in this column. Raises a CorpusError with all columns if the column is missing."""
    if column not in record:
        columns = printable(", ".join(map(str, record)))[:200] or "none"
        raise CorpusError(f"{place}: no column '{column}'; choose one of its columns with --column: {columns}")
    return record[column]


def check_text(value: object, column: str, place: str) -> str:
    """Return the stripped text, or "" for a null. Raises CorpusError for text that cannot be stored or tokenized."""
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = _json_name(value)
        raise CorpusError(f"{place}: column '{column}' is a {kind}, not text; name a text column with --column")
    if len(value) > LINE_LIMIT:
        raise too_long(place)
    if "\0" in value:
        raise CorpusError(f"{place} contains a NUL at character {value.index(chr(0)) + 1} of the text; remove it")
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        code = f"U+{ord(value[problem.start]):04X}"
        raise CorpusError(
            f"{place} contains an unpaired surrogate ({code}) at character {problem.start + 1} of the text; remove it"
        ) from None
    return value.strip()


def _json_name(value: object) -> str:
    names = {dict: "object", list: "list", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def read_hub(spec: HubSpec, column: str) -> Iterator[Passage]:
    """Yield the texts of a split of a Hub dataset."""
    datasets = _import_datasets(spec)
    try:
        records = iter(datasets.load_dataset(spec.name, spec.config, split=spec.split, streaming=True))
    except Exception as problem:  # the package raises many types of errors
        raise _hub_error(spec, problem) from problem
    number = 0
    while True:
        number += 1
        try:
            record: dict[str, Any] = next(records)
        except StopIteration:
            return
        except Exception as problem:
            raise _hub_error(spec, problem, f" record {number}") from problem
        place = f"'{spec}' record {number}"
        if text := check_text(pick_column(record, column, place), column, place):
            yield Passage(text, f"{spec}:{number}")


def hub_fingerprint(spec: HubSpec) -> str:
    """Return a string that changes if the dataset changes: the Hub's commit, or the package's hash of local files."""
    datasets = _import_datasets(spec)
    try:
        builder = datasets.load_dataset_builder(spec.name, spec.config)
    except Exception as problem:
        raise _hub_error(spec, problem) from problem
    return f"{builder.hash} {builder.config_id}"


def _import_datasets(spec: HubSpec) -> ModuleType:
    with needing("datasets", f"corpus '{spec}'", CorpusError):
        import datasets
    module: ModuleType = datasets
    return module


def _hub_error(spec: HubSpec, problem: Exception, place: str = "") -> CorpusError:
    reason = printable(str(problem).strip().split("\n")[0])[:300]
    message = f"corpus '{spec}'{place} cannot be read: {type(problem).__name__}: {reason}"
    is_cache_error = isinstance(problem, OSError) and problem.filename is not None  # in the cache of `datasets`
    advice = "set HF_HOME to a writable folder" if is_cache_error else "check name, config, split and network"
    return CorpusError(f"{message}; {advice}")
