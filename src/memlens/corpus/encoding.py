"""Passages cut into sentences and tokenized, chunk by chunk, in this process or in several: the same rows either way.

    1  this process reads passages in order and packs them into chunks
    2  a chunk becomes an EncodedChunk: here, or in one of several processes, with few chunks under way at a time
    3  chunks come back in reading order and are cut at `max_tokens`

Reading takes a hundredth of the time, so it stays in one process, with its order and its refusals. An error of reading
is raised where its chunk would have come, so that it is met at the same place however far reading is ahead. A text that
is soon done is worked on here: starting a process takes about as long as a megabyte of text.
"""

import gc
import os
import pickle
import threading
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from memlens.corpus.readers import Passage
from memlens.corpus.sentences import check_lengths, cut_units, read_passages, tokenize_units
from memlens.errors import MemlensError
from memlens.memory import EncodedText
from memlens.processes import (
    ANSWER,
    GONE,
    READY,
    ProcessMap,
    WorkerProcess,
    error_message,
    leave_signals_to_driver,
    leave_with,
    received,
)
from memlens.settings import CorpusSettings

ROWS = pa.schema(
    [
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("ends", pa.list_(pa.int32())),
        ("source", pa.string()),
        ("cut", pa.int32()),
    ]
)
NO_TOKENIZER = "no tokenizer"  # what a process answers that cannot have it
MOST_PROCESSES = 16  # beyond, this process cannot read and write fast enough to keep them busy
_FIRST, _CHUNK = 1 << 14, 1 << 18  # characters of the first chunk and, after some doublings, of all later ones
_WORTH = 1 << 22  # characters from which on processes are worth their start
_WORTH_TOKENS = 1 << 20
_UNDER_WAY = 1 << 23  # characters of chunks that are read but not written; more only where one chunk has more
_PASSAGE = 64  # characters that a passage counts beside its own: it is an object, and has a source


class Encoder(Protocol):
    """A tokenizer; one that can be pickled, and unpickled elsewhere, works in several processes."""

    def encode(self, texts: Sequence[str]) -> Sequence[EncodedText]: ...


@dataclass(frozen=True)
class EncodedChunk:
    """Some sentences that have no ids yet."""

    rows: pa.RecordBatch  # of ROWS; see Sentence
    read: int  # bytes of UTF-8 that they were cut from


@dataclass(frozen=True)
class ChunkEncoder:
    """All that a process needs to turn passages into tokens."""

    corpus: CorpusSettings
    tokenizer: Encoder
    max_length: int | None

    def __call__(self, passages: Sequence[Passage]) -> EncodedChunk:
        texts: list[str] = []
        sources: list[str] = []
        cut, counts, tokens, ends = array("i"), array("i", [0]), array("i"), array("i")
        for sentence in tokenize_units(
            cut_units(passages, self.corpus),
            self.tokenizer.encode,
            max_length=self.max_length,
            max_tokens=None,
            block=self.corpus.block,
        ):
            texts.append(sentence.text)
            sources.append(sentence.source)
            cut.append(sentence.cut)
            tokens.extend(sentence.tokens)
            ends.extend(sentence.ends)
            counts.append(len(tokens))
        edges = _numbers(counts)
        columns = [
            pa.array(texts, pa.string()),
            pa.ListArray.from_arrays(edges, _numbers(tokens)),
            pa.ListArray.from_arrays(edges, _numbers(ends)),
            pa.array(sources, pa.string()),
            _numbers(cut),
        ]
        read = sum(len(passage.text.encode()) for passage in passages)
        return EncodedChunk(pa.RecordBatch.from_arrays(columns, schema=ROWS), read)


def _numbers(numbers: "array[int]") -> pa.Array:
    return pa.array(np.asarray(numbers, np.int32))


def encode_corpus(
    corpus: CorpusSettings,
    tokenizer: Encoder,
    *,
    max_length: int | None,
    max_tokens: int | None,
    processes: int = 1,
    look: Callable[[], None] = lambda: None,
) -> Generator[EncodedChunk, None, None]:
    """The sentences of a corpus in reading order; units without tokens are passed over.

    max_length  own tokens a sentence may have (the context without BOS); longer ones are cut
    max_tokens  stop after the sentence that reaches this many tokens in all; that one is kept whole
    processes   that cut and tokenize at once; they change nothing of what comes out
    look        called every moment while processes are waited for; may raise
    """
    check_lengths(max_length, corpus.block)
    return _up_to(_encoded(ChunkEncoder(corpus, tokenizer, max_length), max_tokens, processes, look), max_tokens)


def _up_to(chunks: Generator[EncodedChunk, None, None], max_tokens: int | None) -> Generator[EncodedChunk, None, None]:
    total = 0
    with closing(chunks):
        for chunk in chunks:
            ends = chunk.rows.column("tokens").offsets.to_numpy()[1:]
            so_far = total + ends.astype(np.int64)  # of all chunks: more than an int32 holds
            if max_tokens is not None and len(so_far) and so_far[-1] >= max_tokens:
                kept = int(np.searchsorted(so_far, max_tokens)) + 1
                yield EncodedChunk(chunk.rows.slice(0, kept), chunk.read)
                return
            total = int(so_far[-1]) if len(so_far) else total
            yield chunk


def _encoded(
    encoder: ChunkEncoder, max_tokens: int | None, processes: int, look: Callable[[], None]
) -> Generator[EncodedChunk, None, None]:
    reader = _Reader(encoder.corpus)
    chunks = reader.chunks()
    order = b""
    if processes > 1 and (max_tokens is None or max_tokens >= _WORTH_TOKENS):
        begun = _begin(chunks)
        chunks = chain(begun, chunks)
        order = _pickled(encoder) if sum(map(_size, begun)) >= _WORTH else b""
    if order:
        with closing(_TextProcesses(min(processes, MOST_PROCESSES), encoder, order, look)) as pool:
            try:
                yield from pool.in_order(chunks)
            except _NoTokenizerError:
                for number in sorted({*pool.waiting, *pool.answers}):
                    yield pool.answers[number] if number in pool.answers else encoder(pool.waiting[number])
                yield from map(encoder, chunks)
    else:
        yield from map(encoder, chunks)
    if reader.refusal is not None:
        raise reader.refusal


class _Reader:
    """Packs passages into chunks; where reading is refused they end, and `refusal` says why."""

    def __init__(self, corpus: CorpusSettings) -> None:
        self.corpus = corpus
        self.refusal: MemlensError | None = None

    def chunks(self) -> Iterator[list[Passage]]:
        chunk: list[Passage] = []
        size, full = 0, _FIRST
        try:
            for passage in read_passages(self.corpus):
                chunk.append(passage)
                size += len(passage.text) + _PASSAGE
                if size >= full:
                    yield chunk
                    chunk, size, full = [], 0, min(2 * full, _CHUNK)
        except MemlensError as error:
            self.refusal = error
        if chunk:
            yield chunk


def _begin(chunks: Iterator[list[Passage]]) -> list[list[Passage]]:
    """The first chunks: all, or enough to make processes worth their start."""
    begun: list[list[Passage]] = []
    while sum(map(_size, begun)) < _WORTH and (more := list(islice(chunks, 1))):
        begun += more
    return begun


def _size(chunk: list[Passage]) -> int:
    return sum(len(passage.text) + _PASSAGE for passage in chunk)


def _pickled(encoder: ChunkEncoder) -> bytes:
    """b"" where the tokenizer cannot be pickled."""
    try:
        return pickle.dumps(encoder)
    except Exception:  # anything an object's parts may raise
        return b""


class _NoTokenizerError(Exception):
    """Another process cannot have the tokenizer: it is of a program's main module, or its files are gone."""


class _TextProcesses(ProcessMap):
    """Until one of them is ready this process does their work: who waits for the first sentences has them sooner."""

    def __init__(self, processes: int, encoder: ChunkEncoder, packed: bytes, look: Callable[[], None]) -> None:
        super().__init__(__name__, processes, size_of=_size, most=max(_UNDER_WAY, 2 * processes * _CHUNK), look=look)
        self.encoder, self.packed = encoder, packed

    def order(self, number: int) -> bytes:
        return pickle.dumps((os.getpid(), self.packed))

    def works_here(self) -> bool:
        return not any(worker.is_ready for worker in self.workers)

    def answer_here(self, item: Any) -> Any:
        return self.encoder(item)

    def hear(self, worker: WorkerProcess, what: str, *details: Any) -> None:
        if what == NO_TOKENIZER:
            raise _NoTokenizerError
        super().hear(worker, what, *details)


def _unpickled(packed: bytes) -> ChunkEncoder | None:
    try:
        encoder: ChunkEncoder = pickle.loads(packed)
    except Exception:  # anything an object's parts may raise
        return None
    return encoder


def serve(descriptor: int) -> None:
    """Encode chunks until the driver is gone."""
    leave_signals_to_driver()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is a core
    connection = Connection(descriptor)
    with suppress(*GONE):
        try:
            driver, packed = pickle.loads(connection.recv_bytes())
            threading.Thread(target=leave_with, args=(driver,), daemon=True).start()
            encoder = _unpickled(packed)
            if encoder is None:
                connection.send((NO_TOKENIZER,))
                return
            gc.freeze()  # collections need not look at the libraries' objects: a seventh of the time
            connection.send((READY,))
            for number, chunk in received(connection):
                connection.send((ANSWER, number, encoder(chunk)))
        except Exception as error:
            connection.send(error_message(error))
