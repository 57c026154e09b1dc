"""Files: atomic writes, JSON documents with a checksum, locks, Parquet files, and the rules for output paths.

A file is written under a temporary name, synced and then renamed, so a file under its final name is always complete.
When a user names an output path, these rules protect the user's files:

    a path inside an index or a model folder    rejected
    a device, a FIFO, a socket, a link          rejected, because it would be replaced instead of written to
    a file or folder that memlens wrote         replaced
    an empty file                               replaced
    any other file                              rejected without --force
    an existing file NAME.part                  rejected unless memlens wrote it, even with --force

The index folder that `scan -o` names has its own rules in index/staging.py.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from filelock import FileLock, Timeout

from memlens.errors import FilesError, MemlensError, OutputError

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EFBIG: "the file would exceed the size limit for files here; choose another folder with -o",
    errno.EROFS: "the disk is read-only; choose another folder with -o",
    errno.EACCES: "writing there is not permitted; choose another folder with -o",
    errno.EPERM: "writing there is not permitted; choose another folder with -o",
    errno.ENOTDIR: "part of the path is a file, not a folder; choose another folder with -o",
    errno.EEXIST: "a file with that name already exists; choose another folder with -o",
}

_MAKE_AGAIN = "start over with --fresh"
_JSON_LIMIT = 256 << 20  # maximum bytes of a JSON document; manifests and plans are far smaller


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a FilesError that tells the user what to do."""
    try:
        yield
    except MemlensError:
        raise
    except OSError as error:
        # Some libraries raise an OSError that has a message but no error number.
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error).splitlines()[0])
        raise FilesError(f"cannot write {path}: {advice}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. The file is then synced and renamed to `path`, or removed after an error."""
    beside = path.with_name(path.name + ".part")
    with explain_os_errors(path):
        try:
            yield beside
            sync_file(beside)
            beside.replace(path)
            sync_folder(path.parent)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def sync_file(path: Path) -> None:
    with path.open("r+b") as handle:  # Windows cannot sync a file that is open for reading only
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as beside:
        beside.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_limited(path: Path, limit: int) -> bytes:
    """Return the content of a file. Raises FilesError if the file exceeds `limit` bytes or is not a regular file."""
    try:
        if path.exists() and not path.is_file():
            raise FilesError(f"{path} is not a regular file; copy its content to a file first")
        if path.stat().st_size <= limit:
            return path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise FilesError(f"cannot read {path}: {reason}; check the path and its permissions") from error
    raise FilesError(f"{path} is larger than {limit >> 20:,} MB, the limit for this kind of file; check the path")


def read_json(path: Path, advice: str = _MAKE_AGAIN) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises FilesError if the file cannot be read. The message for damaged content ends with `advice`.
    """
    try:
        content = json.loads(read_limited(path, _JSON_LIMIT))
    except (ValueError, RecursionError) as error:
        raise FilesError(f"{path} is damaged (not JSON); {advice}") from error
    if not isinstance(content, dict):
        raise FilesError(f"{path} is damaged (not a JSON object); {advice}")
    return content


_SEAL = "seal"  # key of the checksum, which covers the rest of the document


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON document that contains its own checksum, so that later changes are detected."""
    write_json(path, {**content, _SEAL: _seal_of(content)})


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Return True if the document contains a checksum and the content still matches the checksum."""
    return _SEAL in content and content[_SEAL] == _seal_of(content)


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a document that `write_sealed` wrote. Raises FilesError if the checksum does not match."""
    content = read_json(path)
    if not is_sealed(content):
        raise FilesError(f"{path} is damaged; {_MAKE_AGAIN}")
    return content


def _seal_of(content: Mapping[str, Any]) -> str:
    body = {name: value for name, value in content.items() if name != _SEAL}
    as_read = json.loads(json.dumps(body))  # JSON converts integer keys to strings, which sort differently
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


Document = TypeVar("Document")


def parse_document(content: Mapping[str, Any], kind: type[Document]) -> Document:
    """Convert a JSON object to a msgspec struct.

    Raises:
        ValueError: A field is missing, has the wrong type or violates a constraint. The message names the field.
    """
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class FileFacts:
    """The size and the checksum of a file."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        return cls(path.stat().st_size, checksum(path))


def facts_of(path: Path) -> dict[str, Any]:
    """Return the size and the checksum of a file as a JSON object."""
    return asdict(FileFacts.of(path))


def has_size(path: Path, facts: FileFacts | None) -> bool:
    """Return True if the file exists and has the expected size."""
    return facts is not None and path.is_file() and path.stat().st_size == facts.bytes


FileStamp = tuple[int, int, int, int]


def file_stamp(path: Path) -> FileStamp | None:
    """Return the size, timestamps and inode of a file, or None if it does not exist.

    At least one of these numbers changes if the file is replaced.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def is_intact(path: Path, facts: FileFacts | None) -> bool:
    """Return True if the file exists with the expected size and checksum."""
    return facts is not None and has_size(path, facts) and checksum(path) == facts.sha256


@contextmanager
def lock_for_writing(lock: Path) -> Iterator[None]:
    """Hold a folder's lock inside the block. Raises FilesError immediately if another process holds the lock."""
    file_lock = FileLock(lock)
    with explain_os_errors(lock):
        try:
            file_lock.acquire(timeout=0)
        except Timeout as error:
            raise FilesError(
                f"another memlens process is writing to {lock.parent}; wait for it or choose another folder with -o"
            ) from error
    try:
        yield
    finally:
        file_lock.release()


def fill_table(path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> FileFacts:
    """Write tables to a new Parquet file. Each table starts a new row group."""
    import pyarrow.parquet as pq

    # pyarrow would read a path with a colon as a URL
    with path.open("wb") as file, closing(pq.ParquetWriter(file, schema, compression="zstd")) as writer:
        for part in parts:
            writer.write_table(part)
    return FileFacts.of(path)


def write_table(path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> FileFacts:
    """Write tables to the Parquet file `path`, completely or not at all."""
    with replacing(path) as beside:
        return fill_table(beside, schema, parts)


def open_database(threads: int = 1) -> duckdb.DuckDBPyConnection:
    """Return an in-memory database.

    With one thread, DuckDB runs in the caller's thread. If a process is forked while DuckDB's own threads run, the
    child hangs or crashes when it closes the database.
    """
    import duckdb

    return duckdb.connect(config={"threads": threads, "async_threads": 0})


def parquet_sql(path: Path) -> str:
    """Return an SQL expression that reads this Parquet file.

    The path is not expanded as a wildcard, and folder names such as layer=3 do not become columns.
    """
    plain = "".join(f"[{sign}]" if sign in "*?[" else sign for sign in str(path.absolute()))
    quoted = plain.replace("'", "''")
    return f"read_parquet('{quoted}', hive_partitioning = false)"


_HEAD = 4096  # number of bytes at the start of a file that are searched for the mark of memlens
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
FOLDER_MARK = "made-by-memlens.txt"


def refuse_output(path: Path, is_ours: Callable[[bytes], bool], *, force: bool = False) -> None:
    """Raise OutputError if writing the file would replace a user's file.

    `is_ours` receives the first bytes of the existing file and returns True if memlens wrote it.
    """
    refuse_place(path)
    refuse_content(path, is_ours, force=force)


def refuse_content(path: Path, is_ours: Callable[[bytes], bool], *, force: bool = False) -> None:
    """Raise OutputError if writing the file would replace a user's file. The file's folder is not checked."""
    _refuse_kind(path)
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    if not force and not _is_empty_or(is_ours, path):
        raise OutputError(f"{path} was not made by memlens; name another file, or replace it with --force")
    # the temporary name that `replacing` uses; downloads often have such names as well
    beside = path.with_name(path.name + ".part")
    _refuse_kind(beside)
    if beside.is_dir() or not _is_empty_or(is_ours, beside):
        raise OutputError(f"{beside} exists and was not made by memlens; move it, or name another output file")


def refuse_place(path: Path) -> None:
    """Raise OutputError for a link, a special file, or a path inside an index or model folder."""
    _refuse_kind(path)
    refuse_inside_others(path)


def refuse_inside_others(path: Path) -> None:
    """Raise OutputError if the path, after links and ".." are resolved, is inside an index or model folder."""
    refuse_nul(path)
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError) as error:  # raised for symbolic links that form a loop
        raise OutputError(f"cannot write {path}: its symbolic links form a loop; choose another path") from error
    for folder in resolved.parents:
        kind = valuable_folder(folder)
        if kind:
            raise OutputError(f"{path} lies inside {folder}, which is {kind}; choose a path outside of it")


def refuse_nul(path: Path) -> None:
    if "\0" in str(path):
        raise OutputError("a file name cannot contain a NUL character; name another file")


def prepare_output_folder(folder: Path, *, force: bool = False, replaced: Iterable[str] = ()) -> None:
    """Create a folder for output. Raises OutputError if it holds something that memlens did not make.

    The entries named in `replaced` are removed in this order. If one of them is a folder, OutputError is raised unless
    memlens made the output folder.
    """
    refuse_place(folder)
    if kind := valuable_folder(folder):
        raise OutputError(f"{folder} is {kind}; name another folder")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file; name a folder")
    old = [folder / name for name in replaced if (folder / name).exists()]
    is_ours = (folder / FOLDER_MARK).is_file()
    if folders := [] if is_ours else [entry for entry in old if entry.is_dir()]:
        raise OutputError(f"{folders[0]} would be replaced and was not made by memlens; name another folder")
    try:
        entries = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}; name another folder") from error
    if entries and not is_ours and not force:
        raise OutputError(f"{folder} holds files that memlens did not make; name another folder, or use --force")
    for entry in entries:  # a write through a link would change a file outside of the folder
        _refuse_kind(entry, "move it away, or name another folder")
    try:
        for entry in old:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FOLDER_MARK).write_text("memlens made the files in this folder and will replace them.\n")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}; name another folder") from error


def _refuse_kind(path: Path, advice: str = "name a regular file, or omit -o to print") -> None:
    refuse_nul(path)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = 0
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; name another file") from error
    for is_kind, words in _KINDS:
        if is_kind(mode):
            raise OutputError(f"{path} is {words}, which would be replaced; {advice}")


def _is_empty_or(is_ours: Callable[[bytes], bool], path: Path) -> bool:
    """Return True if the file does not exist, is empty, or was made by memlens."""
    try:
        if not path.is_file():
            return True
        with path.open("rb") as handle:
            head = handle.read(_HEAD)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; name another file") from error
    return not head or is_ours(head)


def valuable_folder(folder: Path) -> str:
    """Return "an index", "an unfinished scan" or "a model" if the folder holds one, otherwise ""."""
    if (folder / "manifest.json").is_file() and (folder / "triggers.parquet").is_file():
        return "an index"
    if (folder / "partial" / "plan.json").is_file():
        return "an unfinished scan"
    weights = any(next(folder.glob(f"*{ending}"), None) for ending in (".safetensors", ".bin", ".pt"))
    if weights and ((folder / "config.json").is_file() or (folder / "dict.txt").is_file()):
        return "a model"
    return ""
