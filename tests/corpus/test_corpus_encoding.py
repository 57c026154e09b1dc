"""Text cut and tokenized in chunks and in several processes: the sentences of one plain loop, and as many errors."""

import gzip
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memlens import processes as process_module
from memlens.corpus import encoding
from memlens.corpus.encoding import EncodedChunk, encode_corpus
from memlens.corpus.readers import Passage
from memlens.corpus.sentences import read_units, tokenize_units
from memlens.errors import CorpusError, MemlensError, SettingError, WorkerError
from memlens.memory import EncodedText
from memlens.models.tokenizer import Tokenizer
from memlens.settings import CorpusSettings
from memlens.testing import tiny_tokenizer

LINE = "The river runs to the sea. In {} a café opened near St. Mary's, and it rained! \u201cWhy?\u201d asked nobody."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind: line ends of all systems, a long line, blank ones, a byte order mark, no end at the end."""
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
    """Chunks of sizes that divide nothing, and processes for the smallest text, which do all of the work."""
    monkeypatch.setattr(encoding._TextProcesses, "works_here", lambda pool: False)
    for name, value in {"_WORTH": 1, "_WORTH_TOKENS": 1, "_FIRST": 97, "_CHUNK": 1009}.items():
        monkeypatch.setattr(encoding, name, value)


def rows(chunks: Iterator[EncodedChunk]) -> list[dict[str, Any]]:
    return [row for chunk in chunks for row in chunk.rows.to_pylist()]


def outcome(corpus: CorpusSettings, tokenizer: Any, **options: Any) -> tuple[list[dict[str, Any]], str]:
    """The sentences that came, and what was said in the end."""
    found: list[dict[str, Any]] = []
    try:
        for chunk in encode_corpus(corpus, tokenizer, **{"max_length": None, "max_tokens": None, **options}):
            found += chunk.rows.to_pylist()
    except MemlensError as error:
        return found, str(error)
    return found, ""


@pytest.mark.usefixtures("odd_chunks")
@pytest.mark.parametrize(
    ("unit", "max_length", "max_tokens"),
    [("sentence", None, None), ("sentence", 20, 777), ("document", 9, None), ("block:7", 20, 777)],
)
def test_one_two_and_three_processes_give_the_sentences_of_a_plain_loop(
    folder: Path, tokenizer: Tokenizer, unit: str, max_length: int | None, max_tokens: int | None
) -> None:
    corpus = CorpusSettings((str(folder), str(folder / "a.txt")), unit=unit)
    limits: dict[str, Any] = {"max_length": max_length, "max_tokens": max_tokens}
    expected = [
        {"text": s.text, "tokens": s.tokens, "ends": s.ends, "source": s.source, "cut": s.cut}
        for s in tokenize_units(read_units(corpus), tokenizer.encode, block=corpus.block, **limits)
    ]
    assert len(expected) > 5
    for processes in (1, 2, 3):
        assert rows(encode_corpus(corpus, tokenizer, processes=processes, **limits)) == expected, processes


class Noting:
    """A tokenizer that notes how often it was called in this process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.calls = tokenizer, 0

    def encode(self, texts: Sequence[str]) -> Sequence[EncodedText]:
        self.calls += 1
        return self.tokenizer.encode(texts)


@pytest.mark.sweep
def test_this_process_works_until_another_one_is_ready_and_nobody_can_tell(
    folder: Path, tokenizer: Tokenizer, odd_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = CorpusSettings((str(folder),))
    expected = outcome(corpus, tokenizer)

    def works_here(pool: Any) -> bool:
        while pool.begun and noting.calls == 3 and not any(worker.is_ready for worker in pool.workers):
            process_module.listen(pool.workers, pool.hear, pool._remove, 0.1)  # slow from here on
        return not any(worker.is_ready for worker in pool.workers)

    monkeypatch.setattr(encoding._TextProcesses, "works_here", works_here)
    noting = Noting(tokenizer)
    assert outcome(corpus, noting, processes=2) == expected
    assert 1 <= noting.calls <= 3  # fewer where a process was very quick to be ready


def test_what_was_read_is_counted_in_bytes(folder: Path, tokenizer: Tokenizer) -> None:
    corpus = CorpusSettings((str(folder / "c.txt.gz"),))
    read = sum(chunk.read for chunk in encode_corpus(corpus, tokenizer, max_length=2, max_tokens=None))
    assert read == len("".join(LINE.format(1930 + number) for number in range(30)).encode())


@pytest.mark.usefixtures("odd_chunks")
@pytest.mark.sweep
def test_an_error_is_met_after_the_same_sentences_or_not_at_all(tmp_path: Path, tokenizer: Tokenizer) -> None:
    good = "".join(LINE.format(number) + "\n" for number in range(80))
    (tmp_path / "a.txt").write_bytes(good.encode() + b"caf\xe9 opened\n" + good.encode())
    corpus = CorpusSettings((str(tmp_path / "a.txt"),), unit="line")
    first, message = outcome(corpus, tokenizer)
    assert len(first) == 80 and "line 81: not UTF-8 at byte 4" in message
    enough = sum(len(row["tokens"]) for row in first)
    for processes in (2, 3):
        assert outcome(corpus, tokenizer, processes=processes) == (first, message)
        # the limit is reached before the bad line: nobody ever learns of it, however far reading was ahead
        assert outcome(corpus, tokenizer, processes=processes, max_tokens=enough) == (first, "")


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

    begun: list[Any] = []
    start = process_module.start_program

    def start_and_note(module: str) -> Any:
        process, connection = start(module)
        begun.append(process)
        return process, connection

    monkeypatch.setattr(process_module, "start_program", start_and_note)
    monkeypatch.setattr(encoding, "read_passages", endless)
    chunks = encode_corpus(CorpusSettings(("a.txt",)), tokenizer, max_length=None, max_tokens=None, processes=processes)
    assert len(list(islice(chunks, 30))) == 30
    assert len(read) * len(LINE) < 60 * 1009
    chunks.close()
    assert len(begun) == (processes if processes > 1 else 0)
    assert all(process.returncode is not None for process in begun)


@pytest.mark.usefixtures("odd_chunks")
def test_a_process_that_is_killed_is_replaced_a_few_times(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = CorpusSettings((str(folder),), unit="line")
    expected = outcome(corpus, tokenizer)
    begun: list[Any] = []
    start = process_module.start_program

    def start_and_note(module: str) -> Any:
        begun.append(start(module))
        return begun[-1]

    monkeypatch.setattr(process_module, "start_program", start_and_note)
    chunks = encode_corpus(corpus, tokenizer, max_length=None, max_tokens=None, processes=2)
    found = next(chunks).rows.to_pylist()
    os.kill(begun[0][0].pid, signal.SIGKILL)
    assert (found + rows(chunks), "") == expected
    monkeypatch.setattr(process_module, "RETRIES", 0)
    chunks = encode_corpus(corpus, tokenizer, max_length=None, max_tokens=None, processes=2)
    next(chunks)
    for process, _ in begun[-2:]:
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="was ended by SIGKILL"):
        list(chunks)


HALF_AN_ANSWER = """
import os, struct
from multiprocessing.connection import Connection
from pathlib import Path
from memlens.processes import ANSWER, READY, received

def serve(descriptor):
    connection = Connection(descriptor)
    note = Path(connection.recv_bytes().decode())
    connection.send((READY,))
    for number, item in received(connection):
        if not note.exists():
            note.touch()
            os.write(descriptor, struct.pack("!i", 1000) + b"half an answer")
            os._exit(1)
        connection.send((ANSWER, number, item))
"""


def test_an_item_whose_process_is_killed_while_it_answers_goes_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_an_answer.py").write_text(HALF_AN_ANSWER)
    monkeypatch.syspath_prepend(tmp_path)

    class Map(process_module.ProcessMap):
        def order(self, number: int) -> bytes:
            return str(tmp_path / "note").encode()

    with closing(Map("half_an_answer", 1)) as pool:
        assert list(pool.in_order(range(5))) == list(range(5))
        assert pool.lost == 1


class Picky:
    """A tokenizer that refuses a word."""

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        if any("1955" in text for text in texts):
            raise CorpusError("1955 cannot be cut into tokens")
        return [EncodedText([1], [len(text)]) for text in texts]


@pytest.mark.usefixtures("odd_chunks")
@pytest.mark.sweep
def test_what_the_tokenizer_refuses_is_the_same_line_from_a_process(folder: Path) -> None:
    corpus = CorpusSettings((str(folder / "c.txt.gz"),), unit="line")
    for processes in (1, 2):
        assert outcome(corpus, Picky(), processes=processes)[1] == "1955 cannot be cut into tokens"


class OfAProcess:
    """A tokenizer with the number of the process that it works in as its only token."""

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        return [EncodedText([os.getpid()], [len(text)]) for text in texts]


class Rooted(OfAProcess):
    """Can be pickled, but cannot be unpickled where its files are not."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["process"] != os.getpid():
            raise FileNotFoundError("vocab.txt")


@pytest.mark.usefixtures("odd_chunks")
def test_a_tokenizer_that_only_this_process_can_have_works_in_this_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(OfAProcess):
        pass

    class OfMain(OfAProcess):
        pass

    OfMain.__module__, OfMain.__qualname__ = "__main__", "OfMain"
    monkeypatch.setattr(sys.modules["__main__"], "OfMain", OfMain, raising=False)
    corpus = CorpusSettings((str(folder),), unit="line")
    for tokenizer in (Local(), OfMain(), Rooted()):
        found = outcome(corpus, tokenizer, processes=2)
        assert found == outcome(corpus, tokenizer)
        assert {token for row in found[0] for token in row["tokens"]} == {os.getpid()}


def test_a_short_text_starts_no_process(folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "start_program", None)
    corpus = CorpusSettings((str(folder),))
    assert outcome(corpus, tokenizer, processes=2) == outcome(corpus, tokenizer)
    monkeypatch.setattr(encoding, "_WORTH", 1)
    assert outcome(corpus, tokenizer, processes=2, max_tokens=50) == outcome(corpus, tokenizer, max_tokens=50)


@pytest.mark.usefixtures("odd_chunks")
def test_a_system_that_starts_no_process_is_told_in_one_line(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(folder / "nowhere"))
    said = outcome(CorpusSettings((str(folder),)), tokenizer, processes=2)[1]
    assert "starts no worker process (No such file or directory); try fewer" in said


def test_more_tokens_than_an_int32_counts_are_counted() -> None:
    many = 1 << 24
    row = {"text": "a", "tokens": np.zeros(many, np.int32), "ends": np.zeros(many, np.int32), "source": "a", "cut": 0}
    chunk = EncodedChunk(pa.RecordBatch.from_pylist([row], schema=encoding.ROWS), 1)
    chunks = (chunk for _ in range(200))
    assert len(list(encoding._up_to(chunks, (1 << 31) + 1))) == (1 << 31) // many + 1


def test_lengths_that_cannot_be_had_are_refused_before_anything_is_read(tokenizer: Tokenizer) -> None:
    with pytest.raises(SettingError, match="block:9 is longer than the 8 tokens"):
        encode_corpus(CorpusSettings(("nowhere.txt",), unit="block:9"), tokenizer, max_length=8, max_tokens=None)
