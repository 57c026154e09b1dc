"""Reads the text of a scan into the index folder, in this process or, beside a scan, in one of its own.

A reader of its own writes the same files in the same way. It gets an order, tells its driver how much it has read and
how many windows are final, and at last that the text is whole, or why not. It ends with its driver, and while it may
write nobody else begins in the same folder.
"""

import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from memlens.corpus.encoding import NO_TOKENIZER, EncodedChunk, Encoder, encode_corpus
from memlens.corpus.sentences import corpus_stamps
from memlens.errors import CorpusError, SettingError
from memlens.files import FileStamp, attached
from memlens.index.corpus_writer import write_corpus
from memlens.processes import GONE, error_message, leave_signals_to_driver, leave_with
from memlens.settings import CorpusSettings

READ, FINAL, WHOLE = "read", "final", "whole"
_TELL_SECONDS = 1.0  # between two words about how much was read


@dataclass(frozen=True)
class TextOrder:
    """All that reading a text takes."""

    folder: Path  # partial/ of the index
    lock: Path  # held by processes that may write to the index
    corpus: CorpusSettings
    stamps: Mapping[str, FileStamp | None]  # of the files, when they were given their fingerprint
    tokenizer: Encoder
    model: str  # its name
    vocabulary: int
    max_length: int | None
    max_tokens: int | None
    dedup: str
    processes: int = 1

    @property
    def bytes_about(self) -> int:
        """About how much is to be read, by the sizes of files: packed ones hold more, those on the Hub count as 0."""
        size = sum(stamp[0] for stamp in self.stamps.values() if stamp is not None)
        return size if self.max_tokens is None else min(size, 4 * self.max_tokens)

    def pickled(self) -> bytes:
        """b"" where the tokenizer cannot be pickled."""
        try:
            return pickle.dumps(self)
        except Exception:  # anything an object's parts may raise
            return b""


def read_text(
    order: TextOrder,
    on_bytes: Callable[[int], None],
    look: Callable[[], None],
    on_windows: Callable[[int], None] | None = None,
) -> None:
    """Read, tokenize and store all text; see `write_corpus`. `look` is called every moment; all three may raise."""
    chunks = encode_corpus(
        order.corpus,
        order.tokenizer,
        max_length=order.max_length,
        max_tokens=order.max_tokens,
        processes=order.processes,
        look=look,
    )
    with closing(chunks):  # ends its processes, whatever happens
        checked = _refuse_changes(_checked(chunks, order), order)
        write_corpus(order.folder, checked, order.dedup, on_bytes, on_windows)


def _refuse_changes(chunks: Iterator[EncodedChunk], order: TextOrder) -> Iterator[EncodedChunk]:
    """All chunks, refused at the end if a file is not what it was when the corpus was given its fingerprint."""
    yield from chunks
    now = corpus_stamps(order.corpus)
    changed = [name for name in sorted({*now, *order.stamps}) if now.get(name) != order.stamps.get(name)]
    if changed:
        raise CorpusError(f"{changed[0]} changed while it was read; run the same command again when it is at rest")


def _checked(chunks: Iterator[EncodedChunk], order: TextOrder) -> Iterator[EncodedChunk]:
    """Refuse tokens that the model has no embedding for, before they fail deep inside it."""
    for chunk in chunks:
        largest = chunk.rows.column("tokens").flatten().to_numpy().max(initial=0)
        if largest >= order.vocabulary:
            row = next(row for row in chunk.rows.to_pylist() if max(row["tokens"]) >= order.vocabulary)
            raise SettingError(
                f"the tokenizer gives token {max(row['tokens'])} at {row['source']}, but {order.model} has only "
                f"{order.vocabulary}; use the tokenizer that belongs to the model"
            )
        yield chunk


def serve(descriptor: int) -> None:
    """Read until the text is whole or the driver is gone."""
    leave_signals_to_driver()
    connection = Connection(descriptor)
    with suppress(*GONE):
        try:
            driver, packed = pickle.loads(connection.recv_bytes())
            threading.Thread(target=leave_with, args=(driver,), daemon=True).start()
            order = _unpickled(packed)
            if order is None:
                connection.send((NO_TOKENIZER,))
                return
            with attached(order.lock):
                # Only now is it sure that no other driver begins before this process ends, so look once more.
                if os.getppid() == driver:
                    _read(connection, order)
        except Exception as error:
            connection.send(error_message(error))


def _unpickled(packed: bytes) -> TextOrder | None:
    try:
        order: TextOrder = pickle.loads(packed)
    except Exception:  # anything an object's parts may raise
        return None
    return order


def _read(connection: Connection, order: TextOrder) -> None:
    gc.freeze()  # collections need not look at the libraries' objects
    told, latest = 0.0, 0

    def look() -> None:
        if connection.poll():  # the driver says nothing more: it has closed its end
            connection.recv()

    def on_bytes(read: int) -> None:
        nonlocal told, latest
        look()
        latest = read
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            connection.send((READ, read))

    read_text(order, on_bytes, look, lambda windows: connection.send((FINAL, windows)))
    connection.send((READ, latest))
    connection.send((WHOLE,))
