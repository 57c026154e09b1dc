"""The text of an index on disk, as Parquet for users and as flat arrays for the scan.

    corpus.parquet       sentence, text, tokens, ends, source, cut
    tokens.bin           all tokens, one sentence after another, int32
    offsets.bin          position of each sentence in tokens.bin, and the end of the last sentence, int64
    fresh_from.bin       first new position of each sentence (shorter prefixes are repeats), int32
    corpus.json          counts and checksums; written last, so the text is complete if this file exists
    batches.npz          number of batches in each window, computed from the other files

A window is a run of `settings.WINDOW` sentences, which are cut into batches together. The flat arrays are
memory-mapped, so memory does not grow with the corpus.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memlens.corpus.encoding import ROWS, EncodedChunk, Encoder, encode_corpus
from memlens.corpus.repeats import find_repeats
from memlens.corpus.sentences import ScanSentence, corpus_stamps
from memlens.errors import CorpusError, IndexFolderError, SettingError
from memlens.files import (
    FileFacts,
    FileStamp,
    explain_os_errors,
    facts_of,
    is_intact,
    parse_document,
    read_sealed,
    replacing,
    write_sealed,
)
from memlens.settings import WINDOW, CorpusSettings

CORPUS = "corpus.parquet"
SCHEMA = pa.schema([("sentence", pa.int64()), *ROWS])
TOKENS, OFFSETS, FRESH = FLAT = ("tokens.bin", "offsets.bin", "fresh_from.bin")
BATCHES = "batches.npz"
COUNTS = {"sentences", "tokens", "cut_sentences", "cut_tokens", "repeated_prefixes"}


class CorpusDocument(msgspec.Struct, frozen=True):
    """The content of corpus.json."""

    counts: dict[str, Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]]
    files: dict[str, FileFacts]


class CorpusStore:
    """The sentences of an index during a scan."""

    def __init__(self, folder: Path) -> None:
        try:  # a valid checksum does not guarantee valid content
            document = parse_document(read_sealed(folder / "corpus.json"), CorpusDocument)
        except ValueError as error:
            raise _damaged(folder / "corpus.json") from error
        if not document.counts.keys() >= COUNTS or document.files.keys() != {CORPUS, *FLAT}:
            raise _damaged(folder / "corpus.json")
        self.counts, self.files = document.counts, document.files
        self.folder = folder.absolute()
        tokens, sentences = self.counts["tokens"], self.counts["sentences"]
        self.tokens: NDArray[np.int32] = _map_array(folder / TOKENS, np.int32, tokens)
        self.offsets: NDArray[np.int64] = _map_array(folder / OFFSETS, np.int64, sentences + 1)
        self.fresh_from: NDArray[np.int32] = _map_array(folder / FRESH, np.int32, sentences)

    @classmethod
    def verified(cls, folder: Path) -> "CorpusStore":
        """Open the store in a folder. Raises IndexFolderError if a checksum is wrong."""
        store = cls(folder)
        for name, facts in store.files.items():
            path = folder / name
            if name == CORPUS and not path.exists():
                path = folder.parent / name  # publishing may have moved the file there before the process was killed
            if not is_intact(path, facts):
                raise _damaged(path)
        return store

    @staticmethod
    def exists(folder: Path) -> bool:
        return (folder / "corpus.json").is_file()

    @property
    def windows(self) -> int:
        return -(-int(self.counts["sentences"]) // WINDOW)

    def window(self, number: int) -> list[ScanSentence]:
        """Return the sentences of a window."""
        first = number * WINDOW
        last = min(first + WINDOW, int(self.counts["sentences"]))
        edges = self.offsets[first : last + 1]
        begins = (edges - edges[0]).tolist()
        tokens = np.asarray(self.tokens[edges[0] : edges[-1]], np.int64)
        fresh_from = self.fresh_from[first:last].tolist()
        return [
            ScanSentence(first + i, tokens[begins[i] : begins[i + 1]], fresh_from[i]) for i in range(len(fresh_from))
        ]

    def batches(
        self, count: Callable[[int, list[ScanSentence]], int], check_stop: Callable[[], None]
    ) -> NDArray[np.int32]:
        """Return the number of batches in each window.

        If the numbers are not stored yet, `count(window number, sentences)` is called once per window.
        """
        path = self.folder / BATCHES
        if path.is_file():
            return read_batches(path)
        counts = np.zeros(self.windows, np.int32)
        for number in range(self.windows):
            counts[number] = count(number, self.window(number))
            check_stop()
        with replacing(path) as beside, beside.open("wb") as handle:
            np.savez(handle, batches=counts)  # unlike an .npy file, an .npz file has a checksum
        return counts

    def next_tokens(self, sentences: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the token that follows each prefix, or -1 if the prefix is the whole sentence."""
        places = self.offsets[sentences] + positions + 1
        is_end = places >= self.offsets[sentences + 1]
        return np.where(is_end, -1, self.tokens[np.where(is_end, 0, places)]).astype(np.int64)


def read_batches(path: Path) -> NDArray[np.int32]:
    """Return the number of batches in each window. Raises IndexFolderError if the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            batches: NDArray[np.int32] = saved["batches"]
    except Exception as error:  # a damaged archive can raise many types of exceptions
        raise IndexFolderError(f"{path} is damaged; remove this file and run the command again") from error
    return batches


def _map_array(path: Path, kind: type, length: int) -> NDArray[Any]:
    try:
        return np.memmap(path, kind, "r", shape=(length,))
    except (OSError, ValueError, OverflowError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> IndexFolderError:
    return IndexFolderError(f"{path} is missing or damaged; start over with --fresh")


# --- writing ----------------------------------------------------------------------------------------------------------


def store_corpus(
    folder: Path,
    corpus: CorpusSettings,
    tokenizer: Encoder,
    *,
    stamps: Mapping[str, FileStamp | None],
    vocabulary: int,
    model_name: str,
    max_length: int | None,
    max_tokens: int | None,
    dedup: str,
    processes: int = 1,
    on_bytes: Callable[[int], None] = lambda read: None,
    check_stop: Callable[[], None] = lambda: None,
) -> CorpusStore:
    """Read, tokenize and store a corpus.

    Args:
        folder: Folder to write to. Files that an interrupted call left there are replaced.
        corpus: The sources of the corpus and its unit of text.
        tokenizer: The tokenizer.
        stamps: Stamps of the files, taken when the corpus was fingerprinted.
        vocabulary: Number of tokens in the model's vocabulary.
        model_name: Name of the model for error messages.
        max_length: Maximum number of tokens of a sentence.
        max_tokens: Maximum number of tokens in total.
        dedup: "prefix", "sentence" or "none" (see `find_repeats`).
        processes: Number of processes that tokenize.
        on_bytes: Called with the number of bytes read so far. It may raise an exception to stop.
        check_stop: Called several times per second. It may raise an exception to stop.

    Raises:
        CorpusError: The corpus has no text, or a file changed while it was being read.
        SettingError: The tokenizer produces tokens that are not in the model's vocabulary.
    """
    chunks = encode_corpus(
        corpus, tokenizer, max_length=max_length, max_tokens=max_tokens, processes=processes, check_stop=check_stop
    )
    with closing(chunks):

        def checked_chunks() -> Iterator[EncodedChunk]:
            for chunk in chunks:
                _check_vocabulary(chunk, vocabulary, model_name)
                yield chunk
            now = corpus_stamps(corpus)
            changed_files = [name for name in sorted({*now, *stamps}) if now.get(name) != stamps.get(name)]
            if changed_files:
                raise CorpusError(f"{changed_files[0]} changed while it was being read; run the same command again")

        write_corpus(folder, checked_chunks(), dedup, on_bytes)
    return CorpusStore(folder)


def _check_vocabulary(chunk: EncodedChunk, vocabulary: int, model_name: str) -> None:
    largest = chunk.rows.column("tokens").flatten().to_numpy().max(initial=0)
    if largest >= vocabulary:
        row = next(row for row in chunk.rows.to_pylist() if max(row["tokens"]) >= vocabulary)
        raise SettingError(
            f"the tokenizer produces token {max(row['tokens'])} at {row['source']}, but {model_name} has only "
            f"{vocabulary} tokens; use the model's own tokenizer"
        )


def write_corpus(
    folder: Path, chunks: Iterable[EncodedChunk], dedup: str, on_bytes: Callable[[int], None] = lambda read: None
) -> None:
    """Write encoded chunks to a folder."""
    read = 0

    def report(count: int = 0) -> None:
        nonlocal read
        read += count
        on_bytes(read)

    with explain_os_errors(folder / CORPUS):
        counts = _write_sentences(folder, chunks, dedup, report)
    files = {name: facts_of(folder / name) for name in (CORPUS, *FLAT)}
    write_sealed(folder / "corpus.json", {"counts": counts, "files": files})


def _write_sentences(
    folder: Path, chunks: Iterable[EncodedChunk], dedup: str, on_more: Callable[[int], None]
) -> dict[str, int]:
    """Write every file except corpus.json. Returns the counts."""
    counts = {"sentences": 0, "tokens": 0, "cut_sentences": 0, "cut_tokens": 0}
    with (
        replacing(folder / CORPUS) as corpus_path,
        replacing(folder / TOKENS) as tokens_path,
        replacing(folder / OFFSETS) as offsets_path,
        replacing(folder / FRESH) as fresh_path,
        corpus_path.open("wb") as corpus,
        closing(pq.ParquetWriter(corpus, SCHEMA, compression="zstd")) as writer,
        tokens_path.open("wb") as tokens,
        offsets_path.open("wb") as offsets,
    ):
        offsets.write(np.zeros(1, np.int64).tobytes())
        for rows in _windows(chunks, on_more):
            first = counts["sentences"]
            ids = pa.array(np.arange(first, first + len(rows), dtype=np.int64))
            writer.write_table(rows.add_column(0, "sentence", ids).cast(SCHEMA), row_group_size=WINDOW)
            lengths = pc.list_value_length(rows.column("tokens")).to_numpy().astype(np.int64)
            offsets.write((counts["tokens"] + np.cumsum(lengths)).tobytes())
            for part in rows.column("tokens").chunks:
                tokens.write(part.flatten().to_numpy().tobytes())
            cut = rows.column("cut").to_numpy()
            counts["sentences"] += len(rows)
            counts["tokens"] += int(lengths.sum())
            counts["cut_sentences"] += int((cut > 0).sum())
            counts["cut_tokens"] += int(cut.sum(dtype=np.int64))
        if counts["sentences"] == 0:
            raise CorpusError("the corpus contains no text; check the files and --unit")
        tokens.flush()
        offsets.flush()
        if dedup == "none":
            fresh_from = np.zeros(counts["sentences"], np.int32)
        else:
            sentences = _read_back(tokens_path, offsets_path)
            fresh_from = find_repeats(sentences, counts["sentences"], folder, dedup, lambda: on_more(0))
        fresh_path.write_bytes(fresh_from.data)
        counts["repeated_prefixes"] = int(fresh_from.sum(dtype=np.int64))
    return counts


def _windows(chunks: Iterable[EncodedChunk], on_more: Callable[[int], None]) -> Iterator[pa.Table]:
    """Yield the rows of all chunks, regrouped into tables of WINDOW rows."""
    rows = ROWS.empty_table()
    for chunk in chunks:
        rows = pa.concat_tables([rows, pa.Table.from_batches([chunk.rows])])
        while len(rows) >= WINDOW:
            yield rows.slice(0, WINDOW).combine_chunks()
            rows = rows.slice(WINDOW)
        on_more(chunk.read)
    if len(rows):
        yield rows.combine_chunks()


def _read_back(tokens_path: Path, offsets_path: Path) -> Iterator[tuple[NDArray[np.int64], list[bytes]]]:
    """Yield the ids and the tokens of the sentences that were just written, one window at a time."""
    tokens, offsets = np.memmap(tokens_path, np.int32, "r"), np.memmap(offsets_path, np.int64, "r")
    for first in range(0, len(offsets) - 1, WINDOW):
        edges = offsets[first : first + WINDOW + 1].tolist()
        sentences = [tokens[begin:end].tobytes() for begin, end in pairwise(edges)]
        yield np.arange(first, first + len(sentences)), sentences
