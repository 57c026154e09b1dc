"""Text that is encoded in chunks by several processes has the sentences and errors of one plain loop."""

import gzip
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memlens import pool as pool_module
from memlens.corpus import encoding
from memlens.corpus.encoding import EncodedChunk, encode_corpus
from memlens.corpus.readers import Passage
from memlens.corpus.sentences import read_units, tokenize_units
from memlens.errors import MemlensError, SettingError
from memlens.models.tokenizer import Tokenizer
from memlens.settings import CorpusSettings
from memlens.testing import tiny_tokenizer
from processes import list_workers

LINE = "The river runs to the sea. In {} a café opened near St. Mary's, and it rained! \u201cWhy?\u201d asked nobody."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all file types: every line end, a long line, blank lines, a BOM, a last line without end."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [LINE.format(1900 + number) for number in range(60)]
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines[:20]).encode() + b"\r\n\r\n")
    (folder / "b.txt").write_bytes("\r".join(lines[20:30]).encode() + b"\n \n" + b"word " * 9000 + b"\nlast")
    (folder / "c.txt.gz").write_bytes(gzip.compress("\n".join(lines[30:]).encode()))
    records = [{"text": f"{one}\n{two}"} for one, two in zip(lines, reversed(lines), strict=True)]
    (folder / "d.jsonl").write_text("\n".join(map(json.dumps, [*records, {"text": None}, "日本語 text。"])) + "\n")
    pq.write_table(pa.table({"text": [*lines[:9], None, "  ", lines[3]]}), folder / "e.parquet")
    (folder / "f.txt").write_bytes(b"")
    return folder


@pytest.fixture
def odd_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set odd chunk sizes, and start processes for the shortest text."""
    for name, value in {"_LONG": 1, "_LONG_TOKENS": 1, "_FIRST": 97, "_CHUNK": 1009}.items():
        monkeypatch.setattr(encoding, name, value)


def rows(chunks: Iterator[EncodedChunk]) -> list[dict[str, Any]]:
    return [row for chunk in chunks for row in chunk.rows.to_pylist()]


def outcome(corpus: CorpusSettings, tokenizer: Any, **options: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the sentences and the message of the error that follows them, or an empty string."""
    sentences: list[dict[str, Any]] = []
    try:
        for chunk in encode_corpus(corpus, tokenizer, **{"max_length": None, "max_tokens": None, **options}):
            sentences += chunk.rows.to_pylist()
    except MemlensError as error:
        return sentences, str(error)
    return sentences, ""


WAYS = (("sentence", 20, 777), ("sentence", None, None), ("document", 9, None), ("block:7", 20, 777))
BY_DEFAULT = [(*way, 1) for way in WAYS] + [(*WAYS[0], 2)]


@pytest.mark.usefixtures("odd_chunks")
@pytest.mark.parametrize(
    ("unit", "max_length", "max_tokens", "processes"),
    [
        pytest.param(*way, processes, marks=() if (*way, processes) in BY_DEFAULT else pytest.mark.sweep)
        for way in WAYS
        for processes in (1, 2, 3)
    ],
)
def test_several_processes_give_the_sentences_of_a_plain_loop(
    folder: Path, tokenizer: Tokenizer, unit: str, max_length: int | None, max_tokens: int | None, processes: int
) -> None:
    corpus = CorpusSettings((str(folder), str(folder / "a.txt")), unit=unit)
    limits: dict[str, Any] = {"max_length": max_length, "max_tokens": max_tokens}
    expected = [
        {"text": s.text, "tokens": s.tokens, "ends": s.ends, "source": s.source, "cut": s.cut}
        for s in tokenize_units(read_units(corpus), tokenizer.encode, max_length=max_length, block=corpus.block)
    ]
    if max_tokens is not None:  # the sentence that reaches the limit is the last one; dropped tokens do not count
        totals = np.cumsum([len(row["tokens"]) for row in expected])
        expected = expected[: int((totals < max_tokens).sum()) + 1]
    assert len(expected) > 5
    assert rows(encode_corpus(corpus, tokenizer, processes=processes, **limits)) == expected


def test_chunks_count_the_bytes_of_their_text(folder: Path, tokenizer: Tokenizer) -> None:
    corpus = CorpusSettings((str(folder / "c.txt.gz"),))
    read = sum(chunk.read for chunk in encode_corpus(corpus, tokenizer, max_length=2, max_tokens=None))
    assert read == len("".join(LINE.format(1930 + number) for number in range(30)).encode())


@pytest.mark.usefixtures("odd_chunks")
@pytest.mark.sweep
def test_an_error_follows_the_same_sentences_or_does_not_occur(tmp_path: Path, tokenizer: Tokenizer) -> None:
    good = "".join(LINE.format(number) + "\n" for number in range(80))
    (tmp_path / "a.txt").write_bytes(good.encode() + b"caf\xe9 opened\n" + good.encode())
    corpus = CorpusSettings((str(tmp_path / "a.txt"),), unit="line")
    first, message = outcome(corpus, tokenizer)
    assert len(first) == 80 and "line 81 is not valid UTF-8 at byte 4" in message
    tokens = sum(len(row["tokens"]) for row in first)
    for processes in (2, 3):
        assert outcome(corpus, tokenizer, processes=processes) == (first, message)
        # the limit is reached before the bad line, so there is no error, however far ahead the reader is
        assert outcome(corpus, tokenizer, processes=processes, max_tokens=tokens) == (first, "")


@pytest.mark.usefixtures("odd_chunks")
@pytest.mark.parametrize("processes", [1, 2])
def test_reading_is_not_far_ahead_and_processes_end_with_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    read: list[int] = []

    def endless(corpus: CorpusSettings) -> Iterator[Passage]:
        while True:
            read.append(1)
            yield Passage(LINE, "a.txt:1")

    monkeypatch.setattr(encoding, "read_passages", endless)
    chunks = encode_corpus(CorpusSettings(("a.txt",)), tokenizer, max_length=None, max_tokens=None, processes=processes)
    assert len(list(islice(chunks, 30))) == 30
    assert len(read) * len(LINE) < 60 * 1009
    assert len(list_workers(os.getpid())) == (processes if processes > 1 else 0)
    chunks.close()
    assert not list_workers(os.getpid())


def test_a_short_text_starts_no_process(folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_start_executor", None)
    corpus = CorpusSettings((str(folder),))
    assert outcome(corpus, tokenizer, processes=2) == outcome(corpus, tokenizer)
    monkeypatch.setattr(encoding, "_LONG", 1)
    assert outcome(corpus, tokenizer, processes=2, max_tokens=50) == outcome(corpus, tokenizer, max_tokens=50)


def test_the_limit_of_tokens_may_exceed_an_int32() -> None:
    size = 1 << 24
    row = {"text": "a", "tokens": np.zeros(size, np.int32), "ends": np.zeros(size, np.int32), "source": "a", "cut": 0}
    chunk = EncodedChunk(pa.RecordBatch.from_pylist([row], schema=encoding.ROWS), 1)
    chunks = (chunk for _ in range(200))
    assert len(list(encoding._up_to(chunks, (1 << 31) + 1))) == (1 << 31) // size + 1


def test_impossible_lengths_are_rejected_before_anything_is_read(tokenizer: Tokenizer) -> None:
    with pytest.raises(SettingError, match="block:9, but the model reads at most 8 tokens"):
        encode_corpus(CorpusSettings(("nowhere.txt",), unit="block:9"), tokenizer, max_length=8, max_tokens=None)
