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

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.corpus.encoding import EncodedChunk
from memlens.errors import IndexFolderError
from memlens.files import (
    FileFacts,
    FileStamp,
    file_stamp,
    is_as_noted,
    read_sealed,
    replacing,
)
from memlens.index.corpus_writer import FLAT, write_corpus
from memlens.index.layout import CORPUS
from memlens.scanner.scanner import ScanSentence
from memlens.settings import WINDOW

BATCHES = "batches.npz"
COUNTS = {"sentences", "tokens", "cut_sentences", "cut_tokens", "repeated_prefixes"}


class CorpusStore:
    """The sentences of one index while it is being made."""

    def __init__(self, folder: Path) -> None:
        saved = read_sealed(folder / "corpus.json")
        if not _can_be_read(saved):  # whoever sends a scan can seal anything
            raise _damaged(folder / "corpus.json")
        self.counts: dict[str, int] = saved["counts"]
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
        """Write all sentences (see `write_corpus`), and open them."""
        write_corpus(folder, chunks, dedup, on_bytes)
        return cls(folder)

    @property
    def windows(self) -> int:
        return -(-int(self.counts["sentences"]) // WINDOW)

    def window(self, number: int) -> list[ScanSentence]:
        first = number * WINDOW
        last = min(first + WINDOW, int(self.counts["sentences"]))
        edges = self.offsets[first : last + 1]
        return _sentences(first, edges, self.tokens[edges[0] : edges[-1]], self.fresh_from[first:last])

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
            np.savez(handle, batches=counts)  # an archive has a checksum inside, a bare array does not
        return counts

    def next_tokens(self, sentences: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.int64]:
        """The token after each prefix, -1 where the sentence ends."""
        where = self.offsets[sentences] + positions + 1
        ended = where >= self.offsets[sentences + 1]
        return np.where(ended, -1, self.tokens[np.where(ended, 0, where)]).astype(np.int64)


def _sentences(
    first: int, edges: NDArray[np.int64], flat: NDArray[np.int32], fresh_from: NDArray[np.int32]
) -> list[ScanSentence]:
    """Sentences one after another, from the number of the first on."""
    at, fresh = (edges - edges[0]).tolist(), fresh_from.tolist()
    tokens = np.asarray(flat, np.int64)
    return [ScanSentence(first + i, tokens[at[i] : at[i + 1]], fresh[i]) for i in range(len(fresh))]


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


def _can_be_read(saved: dict[str, Any]) -> bool:
    """Does corpus.json hold numbers as counts, and size and checksum of every file?"""
    counts, files = saved.get("counts"), saved.get("files")
    if not isinstance(counts, dict) or not isinstance(files, dict):
        return False
    if not counts.keys() >= COUNTS or files.keys() != {CORPUS, *FLAT}:
        return False
    if not all(type(count) is int and 0 <= count < 1 << 60 for count in counts.values()):
        return False
    return all(
        isinstance(facts, dict)
        and facts.keys() == {"bytes", "sha256"}
        and type(facts["bytes"]) is int
        and isinstance(facts["sha256"], str)
        for facts in files.values()
    )


def _damaged(path: Path) -> IndexFolderError:
    return IndexFolderError(f"{path} is missing or damaged; start over with --fresh")
