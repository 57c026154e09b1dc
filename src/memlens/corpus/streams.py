"""Bytes of a file, decompressed, and lines of text, a chunk at a time.

A line ends at \\n, \\r\\n or \\r and nowhere else: form feeds and U+2028 belong to a line. A byte order mark at the
start of a file is dropped. Text that is not UTF-8 or holds a NUL is refused. This module knows nothing of records.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Protocol

from memlens.corpus.sources import SourceFile, printable
from memlens.errors import CorpusError

CHUNK = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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
            yield number, _decode(file, number, raw)
            number += 1


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
        if others:
            yield b"".join(pending)
            yield from others[:-1]
            pending = [others[-1]]
        if b"\0" in pending[-1]:
            break  # binary data may have no line end for gigabytes: let the decoder refuse it now
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
