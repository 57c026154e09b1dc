"""The corpus of an index, as Parquet for people and as flat arrays for the scan, read back window by window.

    corpus.parquet       sentence, text, tokens, ends, source, cut
    tokens.bin           all tokens one after another, int32
    offsets.npy          where each sentence begins in them, and the end
    fresh_from.npy       first new position of each sentence
    corpus.json          counts; written last, so that its presence means the stage is done
    batches.npz          how many batches each window has; made from the others

A window is `settings.WINDOW` sentences that are cut into batches together. The flat arrays are mapped, not loaded:
memory does not grow with the corpus.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memlens.corpus.encoding import ROWS, EncodedChunk
from memlens.corpus.repeats import SentenceGroup, StoredSentences, cut_by_size, find_repeats
from memlens.errors import CorpusError, IndexFolderError
from memlens.files import (
    FileFacts,
    FileStamp,
    HashedFile,
    explain_os_errors,
    facts_of,
    file_stamp,
    is_as_noted,
    read_sealed,
    replacing,
    write_sealed,
)
from memlens.index.layout import CORPUS, CORPUS_SCHEMA
from memlens.scanner.scanner import ScanSentence
from memlens.settings import WINDOW

BATCHES = "batches.npz"
FLAT = ("tokens.bin", "offsets.npy", "fresh_from.npy")


class CorpusStore:
    """The sentences of one index while it is being made."""

    def __init__(self, folder: Path) -> None:
        saved = read_sealed(folder / "corpus.json")
        self.counts: dict[str, Any] = saved["counts"]
        self.files = {name: FileFacts(**facts) for name, facts in saved["files"].items()}
        self.folder = folder.absolute()
        self._stamps = self._stamps_now()
        tokens, sentences = self.counts["tokens"], self.counts["sentences"]
        try:
            self.tokens: NDArray[np.int32] = np.memmap(folder / "tokens.bin", np.int32, "r", shape=(tokens,))
        except (OSError, ValueError) as error:
            raise _damaged(folder / "tokens.bin") from error
        self.offsets: NDArray[np.int64] = _mapped(folder / "offsets.npy", np.int64, sentences + 1)
        self.fresh_from: NDArray[np.int32] = _mapped(folder / "fresh_from.npy", np.int32, sentences)

    def __reduce__(self) -> tuple[Any, ...]:
        return CorpusStore, (self.folder,)  # another process maps the files itself

    @classmethod
    def verified(cls, folder: Path) -> "CorpusStore":
        """The store in `folder`, every file read again: damage would be passed on to the index."""
        store = cls(folder)
        for name, facts in store.files.items():
            path = folder / name
            if name == CORPUS and not path.exists():
                path = folder.parent / name  # moved up by a call that was killed while it published
            if not is_as_noted(path, facts):
                raise _damaged(path)
        return store

    def refuse_changes(self) -> None:
        """Refuse what was computed from the mapped arrays if a file was changed since: they would have changed, too."""
        if self._stamps_now() != self._stamps:
            raise IndexFolderError(f"{self.folder} was changed while it was scanned; start over with --fresh")

    def _stamps_now(self) -> list[FileStamp | None]:
        return [file_stamp(self.folder / name) for name in FLAT]

    @staticmethod
    def exists(folder: Path) -> bool:
        return (folder / "corpus.json").is_file()

    @classmethod
    def create(
        cls, folder: Path, chunks: Iterable[EncodedChunk], dedup: str, on_bytes: Callable[[int], None]
    ) -> "CorpusStore":
        """Write all sentences; what was half written before is overwritten.

        `on_bytes` hears how much was read, again and again until all is written; it may raise.
        """
        read = 0

        def report(more: int = 0) -> None:
            nonlocal read
            read += more
            on_bytes(read)

        with explain_os_errors(folder / CORPUS):
            counts, corpus = _write_sentences(folder, chunks, report)
            if counts["sentences"] == 0:
                raise CorpusError("the corpus holds no text: not one token was found; check the files and --unit")
            counts["repeated_prefixes"] = _write_fresh(folder, counts, dedup, report)
        files = {CORPUS: asdict(corpus), **{name: facts_of(folder / name) for name in FLAT}}
        write_sealed(folder / "corpus.json", {"counts": counts, "files": files})
        return cls(folder)

    @property
    def windows(self) -> int:
        return -(-int(self.counts["sentences"]) // WINDOW)

    def window(self, number: int) -> list[ScanSentence]:
        first = number * WINDOW
        last = min(first + WINDOW, int(self.counts["sentences"]))
        edges = self.offsets[first : last + 1].tolist()
        tokens = np.asarray(self.tokens[edges[0] : edges[-1]], np.int64)
        fresh = self.fresh_from[first:last].tolist()
        return [
            ScanSentence(first + i, tokens[edges[i] - edges[0] : edges[i + 1] - edges[0]], fresh[i])
            for i in range(last - first)
        ]

    def batches(self, plan: Callable[[list[ScanSentence]], int], after_window: Callable[[], None]) -> NDArray[np.int32]:
        """The number of batches in each window, as `plan` counts them; computed once."""
        path = self.folder / BATCHES
        if path.is_file():
            return read_batches(path)
        counts = np.zeros(self.windows, np.int32)
        for number in range(self.windows):
            counts[number] = plan(self.window(number))
            after_window()
        with replacing(path) as beside, beside.open("wb") as handle:
            np.savez(handle, batches=counts)  # an archive has a checksum inside, a bare array has none
        return counts

    def next_tokens(self, sentences: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.int64]:
        """The token after each prefix, -1 where the sentence ends."""
        where = self.offsets[sentences] + positions + 1
        ended = where >= self.offsets[sentences + 1]
        return np.where(ended, -1, self.tokens[np.where(ended, 0, where)]).astype(np.int64)


def read_batches(path: Path) -> NDArray[np.int32]:
    """The number of batches in each window, as it was written."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            known: NDArray[np.int32] = saved["batches"]
    except Exception as error:  # a damaged archive fails in many ways
        raise IndexFolderError(f"{path} is damaged; remove this one file and run the command again") from error
    return known


def _mapped(path: Path, kind: type, length: int) -> NDArray[Any]:
    """An array on disk, of numbers and as long as it should be."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise _damaged(path) from error
    if array.dtype != kind or array.shape != (length,):
        raise _damaged(path)
    return array


def _damaged(path: Path) -> IndexFolderError:
    return IndexFolderError(f"{path} is missing or damaged; start over with --fresh")


def _write_sentences(
    folder: Path, chunks: Iterable[EncodedChunk], on_more: Callable[[int], None]
) -> tuple[dict[str, Any], FileFacts]:
    """Corpus and tokens; their counts and the facts of the former."""
    counts = {"sentences": 0, "tokens": 0, "cut_sentences": 0, "cut_tokens": 0}
    with (
        replacing(folder / CORPUS) as corpus_path,
        replacing(folder / "tokens.bin") as tokens_path,
        HashedFile(corpus_path) as corpus,
        closing(pq.ParquetWriter(corpus, CORPUS_SCHEMA, compression="zstd")) as writer,
        tokens_path.open("wb") as flat,
        TemporaryFile(dir=folder) as all_lengths,
    ):
        for rows in _windows(chunks, on_more):
            first = counts["sentences"]
            ids = pa.array(np.arange(first, first + len(rows), dtype=np.int64))
            writer.write_table(rows.add_column(0, "sentence", ids).cast(CORPUS_SCHEMA), row_group_size=WINDOW)
            lengths = pc.list_value_length(rows.column("tokens")).to_numpy().astype(np.int64)
            all_lengths.write(lengths.tobytes())
            for part in rows.column("tokens").chunks:
                flat.write(part.flatten().to_numpy().tobytes())
            cut = rows.column("cut").to_numpy()
            counts["sentences"] += len(rows)
            counts["tokens"] += int(lengths.sum())
            counts["cut_sentences"] += int((cut > 0).sum())
            counts["cut_tokens"] += int(cut.sum(dtype=np.int64))
        _write_offsets(folder / "offsets.npy", all_lengths, counts["sentences"])
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


def _write_offsets(path: Path, lengths: IO[bytes], count: int) -> None:
    def pieces() -> Iterator[NDArray[np.int64]]:
        total = np.zeros(1, np.int64)
        yield total
        lengths.seek(0)
        while piece := lengths.read(8 * WINDOW):
            offsets = total + np.cumsum(np.frombuffer(piece, np.int64))
            yield offsets
            total = offsets[-1:]

    _write_array(path, np.int64, count + 1, pieces())


def _write_array(path: Path, kind: type, count: int, pieces: Iterable[NDArray[Any]]) -> None:
    """Write an array in the format of np.save, a piece at a time: as a whole it would grow in memory with the text."""
    with replacing(path) as beside, beside.open("wb") as handle:
        np.lib.format.write_array_header_1_0(
            handle,
            {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": (count,)},
        )
        for piece in pieces:
            handle.write(piece.tobytes())


def _write_fresh(folder: Path, counts: dict[str, Any], dedup: str, look: Callable[[], None]) -> int:
    """First new position of each sentence under `dedup`; how many prefixes that leaves out."""
    count = int(counts["sentences"])
    left_out = 0

    def pieces() -> Iterator[NDArray[np.int32]]:
        nonlocal left_out
        if dedup == "none":
            for first in range(0, count, WINDOW):
                yield np.zeros(min(WINDOW, count - first), np.int32)
            return
        group = SentenceGroup(count, int(counts["tokens"]), lambda: _stored(folder, count))
        for piece in find_repeats(group, folder, dedup, look):
            left_out += int(piece.sum(dtype=np.int64))
            yield piece

    _write_array(folder / "fresh_from.npy", np.int32, count, pieces())
    return left_out


def _stored(folder: Path, count: int) -> Iterator[StoredSentences]:
    """All sentences, some at a time; read, since what is mapped counts as memory as soon as it was looked at."""
    with (folder / "offsets.npy").open("rb") as offsets, (folder / "tokens.bin").open("rb") as tokens:
        np.lib.format.read_magic(offsets)
        np.lib.format.read_array_header_1_0(offsets)
        end = np.frombuffer(offsets.read(8), np.int64)
        for first in range(0, count, WINDOW):
            ends = np.frombuffer(offsets.read(8 * min(WINDOW, count - first)), np.int64)
            lengths = np.diff(ends, prepend=end)
            end = ends[-1:]
            for begin, stop in pairwise(cut_by_size(lengths)):
                own = lengths[begin:stop]
                yield StoredSentences(np.arange(first + begin, first + stop), own, tokens.read(4 * int(own.sum())))
