"""Lists the files of a source in an order that never varies, and reads their bytes and lines.

A folder is walked recursively, names sorted by code point. Files of other kinds and hidden ones (a leading dot) in a
folder are passed over; a file that is named itself must be of a known kind. Links are followed, except a link to a
folder that is already being walked.

A line ends at a line feed, a carriage return or both, and nowhere else: form feeds and U+2028 belong to a line. A byte
order mark at the start of a file is dropped. Text that is not UTF-8, holds a NUL or has a line beyond LINE_LIMIT, which
a small compressed file can unpack to, is refused.
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Protocol
from unicodedata import category

from memlens.errors import CorpusError
from memlens.settings import BUNDLED

CHUNK = 1 << 20
LINE_LIMIT = 16 << 20  # bytes of one line, or characters of one record
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")
_READABLE = ".txt, .jsonl or .parquet, each also .gz or .zst"
# A sample of the text that the bundled model was trained on, articles it never saw, and CC0 prose; folder or file.
_BUNDLED_TEXTS = {"train": "wikipedia/train.jsonl.gz", "held-out": "wikipedia/held-out.jsonl.gz", "prose": "prose"}
_UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")  # control characters, half surrogate pairs, line and paragraph separators


@dataclass(frozen=True)
class SourceFile:
    """One file to read: where it is, what it is called in the index, how it is written."""

    path: Path
    name: str  # relative to the folder that was given, with "/", so that it is the same on every machine
    kind: str  # one of KINDS
    compression: str  # one of COMPRESSIONS or ""

    @property
    def shown(self) -> str:
        """The path as it stands in an error message."""
        return printable(str(self.path))


def printable(text: str) -> str:
    """The text on one line and valid UTF-8, whatever bytes a file system or a library put in it."""
    return "".join("\ufffd" if category(character) in _UNPRINTABLE else character for character in text)


def list_files(source: str) -> Iterator[SourceFile]:
    """The files of one source that is not on the Hub."""
    root = _bundled_text(source) if source.partition(":")[0] == BUNDLED else Path(source)
    try:
        if root.is_dir():
            yield from _list_folder(root)
        elif not root.exists():
            raise CorpusError(f"corpus '{printable(source)}' does not exist; check the path")
        else:
            yield _known_file(root)
    except OSError as problem:
        # what cannot be opened later is reported by the reader; here it is a folder that cannot be listed
        place = printable(str(problem.filename or source))
        raise CorpusError(f"'{place}' cannot be read: {problem.strerror}; check the path and its permissions") from None


def _bundled_text(source: str) -> Path:
    """`bundled` is `bundled:train`."""
    name = source.partition(":")[2] or "train"
    if name not in _BUNDLED_TEXTS:
        known = ", ".join(f"{BUNDLED}:{name}" for name in _BUNDLED_TEXTS)
        raise CorpusError(f"there is no bundled text '{printable(source)}'; choose {known}")
    return Path(str(files("memlens"))) / BUNDLED / _BUNDLED_TEXTS[name]


def _list_folder(root: Path) -> Iterator[SourceFile]:
    found = False
    for path, name in _walk(root, "", (root.resolve(),)):
        written = _how_written(path)
        if written:
            found = True
            yield SourceFile(path, printable(name), *written)
    if not found:
        raise CorpusError(f"folder '{printable(str(root))}' holds no file memlens can read; it reads {_READABLE}")


def _walk(folder: Path, prefix: str, being_walked: tuple[Path, ...]) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            target = path.resolve()
            if target not in being_walked:
                yield from _walk(path, f"{prefix}{path.name}/", (*being_walked, target))
        else:
            yield path, prefix + path.name


def _known_file(path: Path) -> SourceFile:
    written = _how_written(path)
    if not written:
        raise CorpusError(f"'{printable(str(path))}' is of an unknown kind; memlens reads {_READABLE}")
    return SourceFile(path, printable(path.name), *written)


def _how_written(path: Path) -> tuple[str, str] | None:
    name = path.name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    name = name.removesuffix(compression)
    kind = next((ending for ending in KINDS if name.endswith(ending)), None)
    return (kind, compression) if kind else None


class ByteStream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def open_raw(file: SourceFile) -> IO[bytes]:
    """The file's bytes as they are on disk. A pipe or a device would be read forever, or only once: refused."""
    try:
        if file.path.exists() and not file.path.is_file():
            raise CorpusError(f"'{file.shown}' is not a regular file; copy its text to a file first")
        return file.path.open("rb")
    except OSError as problem:
        raise unreadable(file, problem) from None


@contextmanager
def open_bytes(file: SourceFile) -> Iterator[ByteStream]:
    """The file's bytes, decompressed where its ending says so."""
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
    return CorpusError(f"'{file.shown}' cannot be read: {reason}; check the path and its permissions")


def read_chunks(file: SourceFile, stream: ByteStream) -> Iterator[bytes]:
    """Chunks of at most CHUNK bytes; a broken compressed file is refused where it breaks."""
    while True:
        try:
            chunk = stream.read(CHUNK)
        except (OSError, EOFError, zlib.error) as problem:
            if isinstance(problem, OSError) and (problem.errno or not file.compression):
                raise unreadable(file, problem) from None
            reason = printable(str(problem))
            raise CorpusError(
                f"'{file.shown}' is truncated or not a {file.compression} file ({reason}); fetch or compress it again"
            ) from None
        if not chunk:
            return
        yield chunk


def read_lines(file: SourceFile) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end), every line of the file, empty ones too."""
    number = 1
    with open_bytes(file) as stream:
        for raw in _split_lines(_without_mark(read_chunks(file, stream))):
            if len(raw) > LINE_LIMIT:
                raise too_long(f"'{file.shown}' line {number}")
            yield number, _decode(file, number, raw)
            number += 1


def too_long(place: str) -> CorpusError:
    return CorpusError(
        f"{place}: longer than the {LINE_LIMIT >> 20} million characters that one text may have; divide it into several"
    )


def _without_mark(chunks: Iterator[bytes]) -> Iterator[bytes]:
    head = b""
    for chunk in chunks:  # a decompressor may give less than three bytes at first
        head += chunk
        if len(head) >= len(_BYTE_ORDER_MARK):
            break
    yield head.removeprefix(_BYTE_ORDER_MARK)
    yield from chunks


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    pending: list[bytes] = []  # the pieces of a line that began in an earlier chunk; joined once, so never quadratic
    size = 0
    after_return = False
    for chunk in chunks:
        if after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            after_return = False
        if chunk:
            after_return = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *others = chunk.split(b"\n")
        pending.append(first)
        size += len(first)
        if others:
            yield b"".join(pending)
            yield from others[:-1]
            pending, size = [others[-1]], len(others[-1])
        if b"\0" in pending[-1] or size > LINE_LIMIT:
            break  # a line, or binary data, may have no end for gigabytes: let it be refused now
    if any(pending):
        yield b"".join(pending)


def _decode(file: SourceFile, number: int, raw: bytes) -> str:
    if b"\0" in raw:
        raise CorpusError(
            f"'{file.shown}' line {number}: holds a NUL at byte {raw.index(0) + 1} of the line; "
            "remove it, or if the file is UTF-16 convert it with iconv -t UTF-8"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise CorpusError(
            f"'{file.shown}' line {number}: not UTF-8 at byte {problem.start + 1} of the line "
            f"(0x{raw[problem.start]:02x}); convert the file with iconv -t UTF-8"
        ) from None
