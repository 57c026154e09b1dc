"""Reads the text of a scan into the index folder."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from memlens.corpus.encoding import EncodedChunk, Encoder, encode_corpus
from memlens.corpus.sentences import corpus_stamps
from memlens.errors import CorpusError, SettingError
from memlens.files import FileStamp
from memlens.index.corpus_writer import write_corpus
from memlens.settings import CorpusSettings


@dataclass(frozen=True)
class TextOrder:
    """Everything needed to read the text of a scan."""

    folder: Path  # partial/ of the index
    corpus: CorpusSettings
    stamps: Mapping[str, FileStamp | None]  # of the files, when they were given their fingerprint
    tokenizer: Encoder
    model: str  # its name
    vocabulary: int
    max_length: int | None
    max_tokens: int | None
    dedup: str
    processes: int = 1


def read_text(
    order: TextOrder,
    on_bytes: Callable[[int], None],
    look: Callable[[], None],
) -> None:
    """Read, tokenize and store all text (see `write_corpus`). `look` is called frequently. Both callbacks may raise."""
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
        write_corpus(order.folder, checked, order.dedup, on_bytes)


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
