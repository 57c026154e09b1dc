"""Writes the corpus of an index: corpus.parquet for people, flat arrays for the scan, and corpus.json last."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memlens.corpus.encoding import ROWS, EncodedChunk
from memlens.corpus.repeats import find_repeats, split_sentences
from memlens.errors import CorpusError
from memlens.files import FileFacts, HashedFile, explain_os_errors, facts_of, replacing, write_sealed
from memlens.index.layout import CORPUS, CORPUS_SCHEMA
from memlens.settings import WINDOW

TOKENS, OFFSETS, FRESH = FLAT = ("tokens.bin", "offsets.npy", "fresh_from.npy")
HEAD = 128  # bytes before the numbers of an array of one dimension, however long it is


def write_corpus(
    folder: Path,
    chunks: Iterable[EncodedChunk],
    dedup: str,
    on_bytes: Callable[[int], None],
) -> None:
    """Write all sentences, replacing files that an interrupted call left behind.

    `on_bytes` is called repeatedly with the number of bytes read so far, until everything is written. It may raise.
    """
    read = 0

    def report(more: int = 0) -> None:
        nonlocal read
        read += more
        on_bytes(read)

    with explain_os_errors(folder / CORPUS):
        counts, corpus = _write_sentences(folder, chunks, dedup, report)
    files = {CORPUS: asdict(corpus), **{name: facts_of(folder / name) for name in FLAT}}
    write_sealed(folder / "corpus.json", {"counts": counts, "files": files})


def _write_sentences(
    folder: Path,
    chunks: Iterable[EncodedChunk],
    dedup: str,
    on_more: Callable[[int], None],
) -> tuple[dict[str, Any], FileFacts]:
    """Every file but corpus.json; the counts, and the facts of corpus.parquet."""
    counts = {"sentences": 0, "tokens": 0, "cut_sentences": 0, "cut_tokens": 0}
    with (
        replacing(folder / CORPUS) as corpus_path,
        replacing(folder / TOKENS) as tokens_path,
        replacing(folder / OFFSETS) as offsets_path,
        replacing(folder / FRESH) as fresh_path,
        HashedFile(corpus_path) as corpus,
        closing(pq.ParquetWriter(corpus, CORPUS_SCHEMA, compression="zstd")) as writer,
        tokens_path.open("wb") as flat,
        closing(_GrowingArray(offsets_path, np.int64)) as offsets,
        closing(_GrowingArray(fresh_path, np.int32)) as fresh,
    ):
        offsets.add(np.zeros(1, np.int64))
        for rows in _windows(chunks, on_more):
            first = counts["sentences"]
            ids = pa.array(np.arange(first, first + len(rows), dtype=np.int64))
            writer.write_table(rows.add_column(0, "sentence", ids).cast(CORPUS_SCHEMA), row_group_size=WINDOW)
            lengths = pc.list_value_length(rows.column("tokens")).to_numpy().astype(np.int64)
            offsets.add(counts["tokens"] + np.cumsum(lengths))
            for part in rows.column("tokens").chunks:
                flat.write(part.flatten().to_numpy().tobytes())
            cut = rows.column("cut").to_numpy()
            counts["sentences"] += len(rows)
            counts["tokens"] += int(lengths.sum())
            counts["cut_sentences"] += int((cut > 0).sum())
            counts["cut_tokens"] += int(cut.sum(dtype=np.int64))
        if counts["sentences"] == 0:
            raise CorpusError("the corpus holds no text: not one token was found; check the files and --unit")
        flat.flush()
        offsets.flush()
        fresh_from = _fresh_positions(folder, counts["sentences"], dedup, lambda: on_more(0))
        fresh.add(fresh_from)
        counts["repeated_prefixes"] = int(fresh_from.sum(dtype=np.int64))
    return counts, corpus.facts


def _windows(chunks: Iterable[EncodedChunk], on_more: Callable[[int], None]) -> Iterator[pa.Table]:
    """Rows of chunks, WINDOW at a time."""
    rows = ROWS.empty_table()
    for chunk in chunks:
        rows = pa.concat_tables([rows, pa.Table.from_batches([chunk.rows])])
        while len(rows) >= WINDOW:
            yield rows.slice(0, WINDOW).combine_chunks()
            rows = rows.slice(WINDOW)
        on_more(chunk.read)
    if len(rows):
        yield rows.combine_chunks()


class _GrowingArray:
    """An array of one dimension as np.save writes it, a piece at a time: it would grow in memory with the text."""

    def __init__(self, path: Path, kind: type) -> None:
        self._file, self._kind, self.count = path.open("wb"), np.dtype(kind), 0
        self._write_head()

    def _write_head(self) -> None:
        np.lib.format.write_array_header_1_0(
            self._file,
            {"descr": np.lib.format.dtype_to_descr(self._kind), "fortran_order": False, "shape": (self.count,)},
        )
        assert self._file.tell() == HEAD, "numpy leaves room in the head of an array for one that grows"

    def add(self, piece: NDArray[Any]) -> None:
        self._file.write(piece.astype(self._kind, copy=False).tobytes())
        self.count += len(piece)

    def flush(self) -> None:
        """Write buffered numbers, so that they can be read back."""
        self._file.flush()

    def close(self) -> None:
        with self._file:
            self._file.seek(0)
            self._write_head()


def _fresh_positions(folder: Path, sentences: int, dedup: str, check_stop: Callable[[], None]) -> NDArray[np.int32]:
    """Return the first new position of each stored sentence under `dedup`."""
    if dedup == "none":
        return np.zeros(sentences, np.int32)
    return find_repeats(_stored(folder, sentences), sentences, folder, dedup, check_stop)


def _stored(folder: Path, count: int) -> Iterator[tuple[NDArray[np.int64], list[bytes]]]:
    """Yield ids and tokens of the stored sentences, one window at a time."""
    with (folder / f"{OFFSETS}.part").open("rb") as offsets, (folder / f"{TOKENS}.part").open("rb") as tokens:
        offsets.seek(HEAD)
        end = np.frombuffer(offsets.read(8), np.int64)
        for first in range(0, count, WINDOW):
            ends = np.frombuffer(offsets.read(8 * min(WINDOW, count - first)), np.int64)
            lengths = np.diff(ends, prepend=end)
            end = ends[-1:]
            yield np.arange(first, first + len(lengths)), split_sentences(tokens.read(4 * int(lengths.sum())), lengths)
