"""Text encoded by several processes has the bytes of one process, also after a kill or an interruption."""

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from scale_helpers import TEXTS, Scans

from memlens.corpus import encoding
from memlens.corpus.store import FLAT, CorpusStore, write_corpus
from memlens.errors import CorpusError
from memlens.index.build import build_index
from memlens.models.memory_model import MemoryModel
from memlens.settings import CorpusSettings, ScanSettings
from processes import list_workers


@pytest.fixture(autouse=True)
def odd_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set odd chunk sizes, and start processes for the shortest text."""
    for name, value in {"_LONG": 1, "_LONG_TOKENS": 1, "_FIRST": 97, "_CHUNK": 5003}.items():
        monkeypatch.setattr(encoding, name, value)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every kind of file: 8,000 lines in several windows, many with a common beginning."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [f"The river {number % 700} runs to the sea. It rains." for number in range(4000)]
    (folder / "a.txt").write_bytes("\r\n".join(lines[:1500]).encode() + b"\r\n" + b"long " * 5000)
    (folder / "b.txt.gz").write_bytes(gzip.compress("\n".join(lines[1500:3000]).encode()))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[3000:]))
    return folder


def corpus_files(folder: Path, texts: Path, model: MemoryModel, processes: int, dedup: str, most: int | None) -> Any:
    """Return the bytes of every file that the text stage writes."""
    folder.mkdir()
    chunks = encoding.encode_corpus(
        CorpusSettings((str(texts), TEXTS[0])), model.tokenizer, max_length=30, max_tokens=most, processes=processes
    )
    write_corpus(folder, chunks, dedup)
    counts = CorpusStore(folder).counts
    assert sorted(path.name for path in folder.iterdir()) == sorted(("corpus.parquet", "corpus.json", *FLAT))
    assert most or counts["sentences"] > 8000
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("dedup", "most"),
    [
        ("prefix", None),
        pytest.param("sentence", 20_011, marks=pytest.mark.sweep),
        pytest.param("none", None, marks=pytest.mark.sweep),
    ],
)
def test_every_file_of_the_corpus_has_the_same_bytes(
    scans: Scans, texts: Path, tmp_path: Path, dedup: str, most: int | None, processes: int
) -> None:
    alone = corpus_files(tmp_path / "1", texts, scans.model, 1, dedup, most)
    assert corpus_files(tmp_path / "several", texts, scans.model, processes, dedup, most) == alone


def test_a_bad_line_is_the_same_line_and_nothing_is_left(scans: Scans, texts: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes((texts / "a.txt").read_bytes() + b"\ncaf\xe9\n" + (texts / "a.txt").read_bytes())
    said = set()
    for processes in (1, 2):
        with pytest.raises(CorpusError, match=r"line 1502 is not valid UTF-8 at byte 4 \(0xe9\)") as refused:
            build_index(
                scans.model, CorpusSettings((str(bad),)), ScanSettings(threads=1), tmp_path / "index",
                text_processes=processes,
            )  # fmt: skip
        said.add(str(refused.value))
        assert not (tmp_path / "index").exists() and not list_workers(os.getpid())
    assert len(said) == 1


def test_ctrl_c_while_text_is_read_leaves_no_process_and_the_same_command_goes_on(scans: Scans, tmp_path: Path) -> None:
    seen: list[int] = []

    def interrupt(stage: str, done: int, total: int | None) -> None:
        if stage == "corpus" and done > 0 and not seen:
            seen.extend(list_workers(os.getpid()))
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        scans.run(tmp_path, workers=2, progress=interrupt)
    assert len(seen) == 2 and not list_workers(os.getpid())
    scans.end(tmp_path)
