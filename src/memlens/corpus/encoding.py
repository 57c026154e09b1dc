"""Cuts passages into sentences and tokenizes them, chunk by chunk, in this process or in several.

1. This process reads passages in order and packs them into chunks.
2. Each chunk is turned into an EncodedChunk, in this process or on a process pool. Few chunks are in memory at a time.
3. The encoded chunks are yielded in reading order, up to `max_tokens` tokens in total.

Reading takes about 1% of the time, so it stays in one process. If reading fails, the error is raised after all earlier
chunks have been yielded, so it occurs at the same place for any number of processes. A short text is encoded in this
process, because starting another process takes as long as encoding a megabyte.
"""

from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import pyarrow as pa

from memlens.corpus.readers import Passage
from memlens.corpus.sentences import check_lengths, cut_units, read_passages, tokenize_units
from memlens.errors import MemlensError
from memlens.memory import EncodedText
from memlens.pool import PickledSource, Pool, ProcessPool, SerialPool
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
MOST_PROCESSES = 16  # more processes would only wait for the main process, which reads and writes
_FIRST, _CHUNK = 1 << 14, 1 << 18  # characters in the first chunk; later chunks double in size up to _CHUNK
_LONG, _LONG_TOKENS = 1 << 22, 1 << 20  # minimum characters, and minimum token limit, for which processes start
_PASSAGE = 64  # size that a passage is assumed to have in addition to its text, for the name of its source


class Encoder(Protocol):
    """A tokenizer. If it cannot be pickled, all text is encoded in this process."""

    def encode(self, texts: Sequence[str]) -> Sequence[EncodedText]: ...


@dataclass(frozen=True)
class EncodedChunk:
    """The encoded sentences of a chunk of text, which have no ids yet."""

    rows: pa.RecordBatch  # columns as in ROWS, explained in `Sentence`
    read: int  # bytes of the UTF-8 text that the sentences were cut from


@dataclass(frozen=True)
class ChunkEncoder:
    """Cuts passages into sentences and tokenizes them."""

    corpus: CorpusSettings
    tokenizer: Encoder
    max_length: int | None

    def encode(self, passages: Sequence[Passage]) -> EncodedChunk:
        texts: list[str] = []
        sources: list[str] = []
        dropped, counts, tokens, ends = array("i"), array("i", [0]), array("i"), array("i")
        for sentence in tokenize_units(
            cut_units(passages, self.corpus),
            self.tokenizer.encode,
            max_length=self.max_length,
            block=self.corpus.block,
        ):
            texts.append(sentence.text)
            sources.append(sentence.source)
            dropped.append(sentence.cut)
            tokens.extend(sentence.tokens)
            ends.extend(sentence.ends)
            counts.append(len(tokens))
        edges = _numbers(counts)
        columns = [
            pa.array(texts, pa.string()),
            pa.ListArray.from_arrays(edges, _numbers(tokens)),
            pa.ListArray.from_arrays(edges, _numbers(ends)),
            pa.array(sources, pa.string()),
            _numbers(dropped),
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
    check_stop: Callable[[], None] = lambda: None,
) -> Generator[EncodedChunk, None, None]:
    """Return the sentences of a corpus in reading order. Units without tokens are skipped.

    Args:
        corpus: The sources of the corpus and its unit of text.
        tokenizer: The tokenizer.
        max_length: Maximum number of tokens of a sentence (the context without BOS). Longer sentences are cut.
        max_tokens: Stop after the sentence with which the total number of tokens reaches this limit. That sentence is
            not cut. None for no limit.
        processes: Number of processes that cut and tokenize the text. It does not affect the result.
        check_stop: Called several times per second while this process waits for other processes. It may raise an
            exception to stop.
    """
    check_lengths(max_length, corpus.block)
    return _up_to(_encode(ChunkEncoder(corpus, tokenizer, max_length), max_tokens, processes, check_stop), max_tokens)


def _up_to(chunks: Generator[EncodedChunk, None, None], max_tokens: int | None) -> Generator[EncodedChunk, None, None]:
    """Yield chunks up to the sentence that reaches `max_tokens`."""
    total = 0
    with closing(chunks):
        for chunk in chunks:
            ends = chunk.rows.column("tokens").offsets.to_numpy()[1:]
            so_far = total + ends.astype(np.int64)  # int64, because the sum over all chunks may exceed an int32
            if max_tokens is not None and len(so_far) and so_far[-1] >= max_tokens:
                count = int(np.searchsorted(so_far, max_tokens)) + 1
                yield EncodedChunk(chunk.rows.slice(0, count), chunk.read)
                return
            total = int(so_far[-1]) if len(so_far) else total
            yield chunk


def _encode(
    encoder: ChunkEncoder, max_tokens: int | None, processes: int, check_stop: Callable[[], None]
) -> Generator[EncodedChunk, None, None]:
    reader = _Reader(encoder.corpus)
    chunks = reader.chunks()
    pool: Pool = SerialPool(encoder)
    if processes > 1 and (max_tokens is None or max_tokens >= _LONG_TOKENS):
        first_chunks: list[list[Passage]] = []
        while sum(map(_size, first_chunks)) < _LONG and (next_chunk := next(chunks, None)):
            first_chunks.append(next_chunk)
        chunks = chain(first_chunks, chunks)
        if sum(map(_size, first_chunks)) >= _LONG:
            pool = ProcessPool(PickledSource(encoder), min(processes, MOST_PROCESSES), check_stop=check_stop)
    with closing(pool.map(ChunkEncoder.encode, chunks)) as encoded:  # ends the processes if this generator is closed
        yield from encoded
    if reader.error is not None:
        raise reader.error


class _Reader:
    """Packs passages into chunks. If reading fails, `chunks` ends early and stores the exception in `error`."""

    def __init__(self, corpus: CorpusSettings) -> None:
        self.corpus = corpus
        self.error: MemlensError | None = None

    def chunks(self) -> Iterator[list[Passage]]:
        chunk: list[Passage] = []
        size, limit = 0, _FIRST
        try:
            for passage in read_passages(self.corpus):
                chunk.append(passage)
                size += len(passage.text) + _PASSAGE
                if size >= limit:
                    yield chunk
                    chunk, size, limit = [], 0, min(2 * limit, _CHUNK)
        except MemlensError as error:
            self.error = error
        if chunk:
            yield chunk


def _size(chunk: list[Passage]) -> int:
    return sum(len(passage.text) + _PASSAGE for passage in chunk)
