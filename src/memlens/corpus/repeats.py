"""Finds the prefixes of each sentence that an earlier sentence also begins with.

1. DuckDB sorts the sentences by their tokens and then by id, on disk if they do not fit in memory.
2. One pass over the sorted sentences computes how many tokens neighbors share.
3. From these numbers, a stack computes the longest prefix that each sentence shares with any earlier sentence.

Tokens are compared as bytes. The order of bytes is not the numeric order, but sentences with a common prefix are still
neighbors.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.errors import FilesError
from memlens.files import open_database

Ints = NDArray[np.int64]
_MEMORY = "256MB"  # beyond this size, DuckDB sorts on disk
_ROWS = 1 << 15  # number of sorted sentences to read at once


def split_sentences(tokens: bytes, lengths: Ints) -> list[bytes]:
    """Split consecutive int32 tokens into one bytes object per sentence."""
    edges = [0, *(4 * np.cumsum(lengths)).tolist()]
    return [tokens[begin:end] for begin, end in pairwise(edges)]


def find_repeats(
    chunks: Iterable[tuple[Ints, list[bytes]]],
    count: int,
    folder: Path,
    dedup: str,
    check_stop: Callable[[], None] = lambda: None,
) -> NDArray[np.int32]:
    """Return the length of the longest prefix that each sentence shares with an earlier sentence, [count].

    One number per sentence is enough: if the first n tokens occurred before, so did all shorter prefixes. With dedup
    "sentence", the number is the length of the sentence if an earlier sentence is identical, else 0.

    Args:
        chunks: Sentence ids and the int32 tokens of each sentence as bytes.
        count: Number of sentences; ids are 0 to count - 1.
        folder: Place for temporary files.
        dedup: "prefix" or "sentence".
        check_stop: Called frequently. It may raise an exception to stop.

    Raises:
        FilesError: The sort failed, for example because the disk is full.
    """
    fresh_from = np.zeros(count, np.int32)
    with TemporaryDirectory(dir=folder, prefix="sort-") as scratch, closing(open_database()) as database:
        try:
            database.execute(f"SET memory_limit = '{_MEMORY}'")
            database.execute("SET temp_directory = ?", [scratch])
            database.execute("CREATE TABLE sentences (id BIGINT, tokens BLOB)")
            for ids, sentences in chunks:
                check_stop()
                chunk = pa.table({"id": ids, "tokens": pa.array(sentences, pa.binary())})
                database.register("chunk", chunk)
                database.execute("INSERT INTO sentences SELECT * FROM chunk")
            shared = _shared_lengths(database, check_stop)
            for repeats in _longest_shared(shared) if dedup == "prefix" else _identical(shared):
                fresh_from[repeats[0]] = repeats[1]
        except duckdb.Error as error:
            raise FilesError(f"cannot sort the sentences in {folder}: {str(error).splitlines()[0]}") from error
    return fresh_from


def _shared_lengths(database: duckdb.DuckDBPyConnection, check_stop: Callable[[], None]) -> Iterator[Ints]:
    """Yield [3, n] arrays of sorted sentences: id, length, and length of the prefix shared with the sentence before."""
    check_stop()
    reader = database.sql("SELECT id, tokens FROM sentences ORDER BY tokens, id").to_arrow_reader(_ROWS)
    previous = np.zeros(0, np.int32)
    for batch in reader:
        check_stop()
        sentences = [np.frombuffer(sentence, np.int32) for sentence in batch.column(1).to_pylist()]
        lengths = np.array([len(sentence) for sentence in sentences], np.int64)
        shared = _shared_with_previous(np.concatenate([previous, *sentences]), np.array([len(previous), *lengths]))
        previous = sentences[-1]
        yield np.stack((np.asarray(batch.column(0), np.int64), lengths, shared[1:]))


def _shared_with_previous(tokens: NDArray[np.int32], lengths: Ints) -> Ints:
    """Return the length of the prefix that each sentence shares with the previous sentence.

    All pairs of neighbors that agree so far are compared at one position at a time. When few such pairs are left, they
    are compared one pair at a time.
    """
    shared = np.zeros(len(lengths), np.int64)
    begins = np.cumsum(lengths) - lengths
    shorter = np.minimum(lengths[1:], lengths[:-1])
    equal = np.flatnonzero(shorter) + 1
    position = 0
    while len(equal) > 16:
        equal = equal[tokens[begins[equal] + position] == tokens[begins[equal - 1] + position]]
        position += 1
        shared[equal] = position
        equal = equal[shorter[equal - 1] > position]
    for pair in equal.tolist():
        first, second = (tokens[begins[i] + position :][: shorter[pair - 1] - position] for i in (pair - 1, pair))
        differs = first != second
        shared[pair] = position + (int(differs.argmax()) if differs.any() else len(first))
    return shared


def _longest_shared(batches: Iterable[Ints]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield sentence ids, and the length of the longest prefix that each sentence shares with any of lower id.

    In sorted order, the number of tokens that two sentences share is the minimum over the neighbors between them. The
    longest shared prefix is therefore shared with the nearest sentence of lower id to the left or to the right.

    The stack holds sentences in ascending order of id. Each sentence has a link: the number of tokens that it shares
    with the sentence below it. Links ascend as well. Suppose that a new sentence shares no more tokens with the top
    sentence than the top's link. Then it shares the same number of tokens with the sentence below the top, which has a
    lower id. The same holds for all sentences after the new one, so the top is finished.
    """
    ids, links = [-1], [-1]  # a sentinel, so that the stack is never empty
    for batch in batches:
        finished: list[int] = []
        prefixes: list[int] = []
        for sentence, _, common in batch.T.tolist():
            shared = common
            while links[-1] >= shared:
                finished.append(ids.pop())
                prefixes.append(links.pop())
            while ids[-1] > sentence:
                finished.append(ids.pop())
                prefixes.append(shared)
                shared = links.pop()
            ids.append(sentence)
            links.append(shared)
        yield finished, prefixes
    yield ids[1:], links[1:]


def _identical(batches: Iterable[Ints]) -> Iterator[tuple[Ints, Ints]]:
    """Yield ids and lengths of sentences that equal an earlier sentence. Equal sentences are neighbors when sorted."""
    previous_length = -1
    for ids, lengths, shared in batches:
        is_same = (shared == lengths) & (shared == np.concatenate(([previous_length], lengths[:-1])))
        previous_length = int(lengths[-1])
        yield ids[is_same], lengths[is_same]
