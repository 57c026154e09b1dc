"""Files: atomic writes, sealed JSON documents, checksums, locks, Parquet files, and one rule for output paths.

A file is written beside its place, synced and renamed, so that a name always means a whole file. Where a person names a
file or folder as output, nothing of theirs is overwritten:

    inside an index or a model folder           always refused
    a device, a FIFO, a socket, a link          always refused: they would be replaced, not written to
    a file or folder that memlens made before   replaced, and so is an empty file
    any other file                              refused, unless --force
    a file beside it with .part at its end      refused unless memlens made it: --force is said of the file itself

The folder of an index itself, which `scan -o` names, has rules of its own in index/staging.py; here it is only kept out
of other indexes and of models.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens.errors import FilesError, MemlensError, OutputError

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EFBIG: "the file would be larger than allowed here; choose another folder with -o",
    errno.EROFS: "the disk is read-only; choose another folder with -o",
    errno.EACCES: "writing there is not permitted; choose another folder with -o",
    errno.EPERM: "writing there is not permitted; choose another folder with -o",
    errno.ENOTDIR: "a part of that path is a file; choose another folder with -o",
    errno.EEXIST: "a file of that name is in the way; choose another folder with -o",
}

_MAKE_AGAIN = "start over with --fresh"
_JSON_LIMIT = 256 << 20  # bytes; far beyond what a manifest or plan has


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one line that says what to do."""
    try:
        yield
    except (MemlensError, BlockingIOError):  # the latter is no trouble: somebody else holds a lock
        raise
    except OSError as error:
        # Libraries that write for us may lose the number; then their own words are all there is.
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error).splitlines()[0])
        raise FilesError(f"cannot write {path}: {advice}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the path that is given; on success it is synced and takes the place of `path`, else it is removed."""
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
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as beside:
        beside.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_limited(path: Path, limit: int) -> bytes:
    """The bytes of a file that is read whole; refused beyond the limit, as is a pipe or device, which may never end."""
    try:
        if path.exists() and not path.is_file():
            raise FilesError(f"{path} is not a regular file; copy its content to a file first")
        if path.stat().st_size <= limit:
            return path.read_bytes()
    except OSError as error:
        why = error.strerror or error
        raise FilesError(f"cannot read {path}: {why}; check the path and its permissions") from error
    raise FilesError(f"{path} is larger than the {limit >> 20:,} MB that are read at once; name the right file")


def read_json(path: Path, advice: str = _MAKE_AGAIN) -> dict[str, Any]:
    """A JSON object; one that cannot be read is refused, with what to do about it."""
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise FilesError(f"{path} is not a regular file; {advice}")
        if path.stat().st_size > _JSON_LIMIT:
            raise FilesError(f"{path} is damaged (larger than any such file of memlens); {advice}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FilesError(f"cannot read {path}: {error.strerror or error}; {advice}") from error
    except (ValueError, RecursionError) as error:
        raise FilesError(f"{path} is damaged (not JSON); {advice}") from error
    if not isinstance(content, dict):
        raise FilesError(f"{path} is damaged (not a JSON object); {advice}")
    return content


_SEAL = "seal"  # a checksum of all else in the document


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON document that shows if it was changed afterwards."""
    write_json(path, {**content, _SEAL: _seal_of(content)})


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Is the document as it was written? One that never was sealed counts as it is."""
    return not has_seal(content) or content[_SEAL] == _seal_of(content)


def has_seal(content: Mapping[str, Any]) -> bool:
    return _SEAL in content


def read_sealed(path: Path) -> dict[str, Any]:
    """A document that was written sealed; refused if it is not as it was written."""
    content = read_json(path)
    if not has_seal(content) or not is_sealed(content):
        raise FilesError(f"{path} is damaged; {_MAKE_AGAIN}")
    return content


def _seal_of(content: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != _SEAL}
    as_read = json.loads(json.dumps(rest))  # numbers that are names have become text, which sorts in another way
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        return cls(path.stat().st_size, checksum(path))


def facts_of(path: Path) -> dict[str, Any]:
    """Size and checksum of a file, for a JSON document."""
    return asdict(FileFacts.of(path))


def has_size(path: Path, facts: FileFacts | None) -> bool:
    """Is a file of that size there? A quick look, where reading all of it would take long."""
    return facts is not None and path.is_file() and path.stat().st_size == facts.bytes


FileStamp = tuple[int, int, int, int]


def file_stamp(path: Path) -> FileStamp | None:
    """Size, times and inode of a file, which change when it is replaced; None where there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def is_as_noted(path: Path, facts: FileFacts | None) -> bool:
    """Is the file there, byte for byte?"""
    return facts is not None and has_size(path, facts) and checksum(path) == facts.sha256


@contextmanager
def only_writer(lock: Path) -> Iterator[Callable[[], None]]:
    """Hold the folder's lock; a second writer is refused at once. The system frees it when the process ends.

    What comes back refuses to go on if the folder of that name is not the one that is held any more.
    """
    with explain_os_errors(lock):
        handle = lock.open("a")
    with handle:
        try:
            with explain_os_errors(lock):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FilesError(
                f"another memlens process is writing to {lock.parent}; wait for it or choose another folder with -o"
            ) from error

        def refuse_replaced() -> None:
            if (stamp := file_stamp(lock)) is None or stamp[-1] != os.fstat(handle.fileno()).st_ino:
                raise FilesError(f"{lock.parent} was replaced or removed by somebody else; run the same command again")

        refuse_replaced()  # also where who held it has just removed it
        yield refuse_replaced


@contextmanager
def attached(lock: Path) -> Iterator[None]:
    """Hold a lock together with others; it is free again when the last of them has ended, in whatever way."""
    with explain_os_errors(lock):
        handle = lock.open("a")
    with handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield


@contextmanager
def holding(folder: Path, *, alone: bool, wait: bool = True) -> Iterator[bool]:
    """Hold a folder for a moment, alone or together with others; leaves no file. Is it held? Not every disk can.

    A BlockingIOError if others hold it and there is no time to wait.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        held = True
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def is_free(lock: Path) -> bool:
    """Is nobody attached to the lock?"""
    if not lock.exists():
        return True
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


class HashedFile(io.FileIO):
    """A new file whose facts are those of what was written to it, whatever becomes of it on the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self._digest, self._bytes = hashlib.sha256(), 0

    def write(self, content: Any) -> int:
        """Write all of it; a disk that takes only a part is asked again, and then says why."""
        left = memoryview(content).cast("B")
        self._digest.update(left)
        self._bytes += (size := len(left))
        while left:
            left = left[super().write(left) or 0 :]
        return size

    @property
    def facts(self) -> FileFacts:
        return FileFacts(self._bytes, self._digest.hexdigest())


def fill_table(path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> FileFacts:
    """Write tables as row groups to a new file."""
    import pyarrow.parquet as pq

    with HashedFile(path) as file:
        with closing(pq.ParquetWriter(file, schema, compression="zstd")) as writer:
            for part in parts:
                writer.write_table(part)
        return file.facts


def write_table(path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> FileFacts:
    """Write a table in the place of `path`, whole or not at all."""
    with replacing(path) as beside:
        return fill_table(beside, schema, parts)


def open_database(threads: int = 1) -> duckdb.DuckDBPyConnection:
    """A database in memory. With one thread it is the caller's: a process that is forked while others run hangs or
    crashes when it drops the database, and DuckDB starts eight for reading unless it is told not to."""
    import duckdb

    return duckdb.connect(config={"threads": threads, "async_threads": 0})


def reader_of(path: Path) -> str:
    """SQL with which DuckDB reads this very file: no wildcards, no columns from folder names like layer=3."""
    plain = "".join(f"[{sign}]" if sign in "*?[" else sign for sign in str(path.absolute()))
    quoted = plain.replace("'", "''")
    return f"read_parquet('{quoted}', hive_partitioning = false)"


_HEAD = 4096  # bytes that tell a file's kind
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
FOLDER_MARK = "made-by-memlens.txt"


def refuse_output(path: Path, is_ours: Callable[[bytes], bool], *, force: bool = False) -> None:
    """Refuse to write a file where it would replace something of a person's; `is_ours` sees the file's beginning."""
    refuse_place(path)
    refuse_content(path, is_ours, force=force)


def refuse_content(path: Path, is_ours: Callable[[bytes], bool], *, force: bool = False) -> None:
    """The same where the place is known to be right, as that of an index's own report."""
    _refuse_kind(path)
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    if not force and not _is_empty_or(is_ours, path):
        raise OutputError(f"{path} was not made by memlens; name another file, or replace it with --force")
    beside = path.with_name(path.name + ".part")  # what files.replacing writes first: a browser may load a file there
    _refuse_kind(beside)
    if beside.is_dir() or not _is_empty_or(is_ours, beside):
        raise OutputError(f"{beside} is in the way and was not made by memlens; move it away, or name another file")


def refuse_place(path: Path) -> None:
    """Refuse what lies inside an index or a model, and anything but a file or a folder."""
    _refuse_kind(path)
    refuse_inside_others(path)


def refuse_inside_others(path: Path) -> None:
    """Refuse a path inside an index or a model, by whatever links and dots it is named."""
    refuse_nul(path)
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise OutputError(f"cannot write {path}: its links lead nowhere; name another place") from error
    for folder in resolved.parents:
        kind = valuable_folder(folder)
        if kind:
            raise OutputError(f"{path} lies inside {folder}, which is {kind}; name a place outside of it")


def refuse_nul(path: Path) -> None:
    if "\0" in str(path):
        raise OutputError("a file name cannot hold a NUL character; name another file")


def prepare_output_folder(folder: Path, *, force: bool = False, replaced: Iterable[str] = ()) -> None:
    """Make a folder for files of memlens' own making, or refuse one that holds something else.

    What is `replaced` is thrown away in that order; folders, whatever is forced, only if memlens has made them.
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
    entries = list(_entries(folder))
    if entries and not is_ours and not force:
        raise OutputError(f"{folder} holds files that memlens did not make; name another folder, or say --force")
    for entry in entries:  # what is written to a link ends up elsewhere
        _refuse_kind(entry, "move it away, or name another folder")
    try:
        for entry in old:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FOLDER_MARK).write_text("memlens made the files in this folder and will replace them.\n")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}; name another folder") from error


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir() if folder.is_dir() else ()
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}; name another folder") from error


def _refuse_kind(path: Path, advice: str = "name a file, or leave -o out to print") -> None:
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
    """May the file be replaced? Also where there is none."""
    try:
        if not path.is_file():
            return True
        with path.open("rb") as handle:
            head = handle.read(_HEAD)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; name another file") from error
    return not head or is_ours(head)


def valuable_folder(folder: Path) -> str:
    """A folder that no output may go into, in words: an index, an unfinished scan or a model; empty for any other."""
    if (folder / "manifest.json").is_file() and (folder / "triggers.parquet").is_file():
        return "an index"
    if (folder / "partial" / "plan.json").is_file():
        return "an unfinished scan"
    weights = any(next(folder.glob(f"*{ending}"), None) for ending in (".safetensors", ".bin", ".pt"))
    if weights and ((folder / "config.json").is_file() or (folder / "dict.txt").is_file()):
        return "a model"
    return ""
