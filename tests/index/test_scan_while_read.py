"""A scan that begins while its text is still read: the bytes of one that begins afterwards, whoever stops or dies."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gated_tokenizer import MARK, GatedTokenizer
from scale_helpers import children_of, is_alive, tables_of

import memlens
from memlens.corpus.encoding import encode_corpus
from memlens.errors import CorpusError, WorkerError
from memlens.index.build import build_index
from memlens.index.corpus_store import CorpusStore, GrowingCorpus
from memlens.index.corpus_writer import write_corpus
from memlens.models.memory_model import MemoryModel
from memlens.processes import WorkerProcess
from memlens.scanner.autotune import stream_bytes
from memlens.scanner.executors import RunSettings, make_executor
from memlens.scanner.local import WorkerPool
from memlens.scanner.scanner import ScanSentence, Worker
from memlens.scanner.state import BatchRange, ShardNumber
from memlens.settings import WINDOW, CorpusSettings, ScanRunSettings, ScanSettings

READER = "memlens.index.corpus_reading"
SETTINGS: dict[str, Any] = {"top": 3, "batch_tokens": 2048, "threads": 1, "max_length": 4, "layers": (0, 1)}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little more than four windows of lines that begin alike or are repeated; the mark is in the last chunk."""
    lines = [f"{number % 97} {number % 1009}" for number in range(4 * WINDOW + 700)]
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join([*lines, MARK]) + "\n")
    return path


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def gated(small_checkpoint: Path, gate: Path) -> MemoryModel:
    """The model, whose tokenizer stops at the mark until the gate is there."""
    model = memlens.load(small_checkpoint, prove=False)
    model._tokenizer = GatedTokenizer.of(model.tokenizer, gate)
    return model


def build(model: MemoryModel, texts: tuple[Path, ...], out: Path, workers: int = 1, **options: Any) -> Path:
    given = {name: options.pop(name) for name in ("dedup", "max_tokens") if name in options}
    settings = ScanSettings(**SETTINGS | given)
    corpus = CorpusSettings(tuple(map(str, texts)), unit="line")
    build_index(model, corpus, settings, out, executor=make_executor(RunSettings(), workers), **options)
    return out


class Beside:
    """A progress function that does something once, as soon as a batch was scanned while text was still read."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.heard = act, 0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage == "scan" and done and total is None:
            self.heard += 1
            if self.heard == 1:
                self.act()


def at_the_gate(model: MemoryModel) -> bool:
    """Was all text before the mark given?"""
    assert isinstance(model.tokenizer, GatedTokenizer)
    return model.tokenizer.is_at_the_gate


def wait_until(condition: Callable[[], object], seconds: float = 200) -> None:
    """Less than the gate waits and a test may take, so that it is said which condition never came."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name[0] != "."}


@pytest.fixture(scope="module")
def whole(small_checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Indexes of texts that were whole before their scan began; only read them."""
    model = memlens.load(small_checkpoint, prove=False)
    folder = tmp_path_factory.mktemp("whole")
    return {dedup: build(model, (text,), folder / dedup, dedup=dedup) for dedup in ("prefix", "sentence", "none")}


@pytest.mark.parametrize(("dedup", "workers"), [("prefix", 1), ("prefix", 2), ("sentence", 1), ("none", 2)])
def test_a_scan_begins_while_text_is_read_and_has_the_same_bytes(
    gated: MemoryModel, gate: Path, text: Path, whole: dict[str, Path], tmp_path: Path, dedup: str, workers: int
) -> None:
    beside = Beside(gate.touch)  # reading cannot end before a batch was scanned
    out = build(gated, (text,), tmp_path / "index", workers, dedup=dedup, stream_bytes=1, progress=beside)
    assert beside.heard and not (out / "partial").exists()
    assert files_of(out) == files_of(whole[dedup])
    assert not children_of(os.getpid(), READER)


def test_a_reader_has_its_own_processes_that_cut_and_tokenize(
    gated: MemoryModel, gate: Path, text: Path, tmp_path: Path
) -> None:
    long = tmp_path / "a.txt"
    # Enough to make processes worth their start; few of its tokens are kept.
    long.write_text("".join(f"{'far ' * 6000}{number}\n" for number in range(180)))
    found: list[int] = []

    def look() -> None:
        reader = children_of(os.getpid(), READER)[0]
        found.extend(children_of(reader, "memlens.corpus.encoding"))
        gate.touch()

    out = build(gated, (long, text), tmp_path / "2", text_processes=2, stream_bytes=1, progress=Beside(look))
    assert len(found) == 2 and not any(map(is_alive, found))
    assert files_of(out) == files_of(build(gated, (long, text), tmp_path / "1"))


def test_with_a_limit_of_tokens_or_of_layers_the_bytes_are_the_same(
    gated: MemoryModel, gate: Path, text: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    beside = Beside(gate.touch)
    one_by_one = build(gated, (text,), tmp_path / "layers", stream_bytes=1, layer_budget=1, progress=beside)
    assert beside.heard and files_of(one_by_one) == files_of(whole["prefix"])
    gate.unlink()
    for tokens in (20_001, 3_001):  # in the middle of the second window, and of the first
        found = [
            build(gated, (text,), tmp_path / f"{tokens}{size}", max_tokens=tokens, stream_bytes=size)
            for size in (1, None)
        ]
        assert files_of(found[0]) == files_of(found[1])


def test_shards_of_which_one_began_while_its_text_was_read_are_merged(
    gated: MemoryModel, gate: Path, text: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    beside = Beside(gate.touch)
    for number, size in ((1, 1), (2, None)):
        build(
            gated, (text,), tmp_path / str(number), shard=ShardNumber(number, 2), stream_bytes=size, progress=beside
        )  # fmt: skip
    assert beside.heard
    merged = memlens.merge([tmp_path / "2", tmp_path / "1"], out=tmp_path / "merged").folder
    assert tables_of(merged) == tables_of(whole["prefix"])


def longest_seen(sentences: list[list[int]]) -> list[int]:
    """Of each sentence, the longest prefix that an earlier one has, too."""
    seen: set[tuple[int, ...]] = set()
    longest = []
    for tokens in sentences:
        prefixes = [tuple(tokens[:size]) for size in range(1, len(tokens) + 1)]
        longest.append(max((len(prefix) for prefix in prefixes if prefix in seen), default=0))
        seen.update(prefixes)
    return longest


def test_windows_that_are_called_final_are(gated: MemoryModel, gate: Path, text: Path, tmp_path: Path) -> None:
    gate.touch()
    chunks = list(
        encode_corpus(CorpusSettings((str(text),), unit="line"), gated.tokenizer, max_length=4, max_tokens=None)
    )
    sentences = [row["tokens"] for chunk in chunks for row in chunk.rows.to_pylist()]
    expected = list(zip(sentences, longest_seen(sentences), strict=True))
    corpus, called = GrowingCorpus(tmp_path), []

    def look(windows: int) -> None:
        called.append(windows)
        found = [one for number in range(windows) for one in corpus.window(number)]
        assert [(one.tokens.tolist(), one.fresh_from) for one in found] == expected[: windows * WINDOW]
        assert [one.id for one in found] == list(range(windows * WINDOW))

    write_corpus(tmp_path, iter(chunks), "prefix", lambda read: None, look)
    assert called == [1, 2, 4] and len(expected) > 4 * WINDOW
    store = CorpusStore(tmp_path)
    for number in range(store.windows):
        at_the_end = [(one.id, one.tokens.tolist(), one.fresh_from) for one in store.window(number)]
        assert at_the_end == [(one.id, one.tokens.tolist(), one.fresh_from) for one in corpus.window(number)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_that_is_refused_at_its_end_leaves_the_folder_as_it_was(
    gated: MemoryModel, gate: Path, text: Path, tmp_path: Path, workers: int
) -> None:
    bad = tmp_path / "z.txt"
    bad.write_bytes(f"{MARK}\n".encode() + b"caf\xe9\n")
    gate.touch()
    new, old = tmp_path / "new", build(gated, (text,), tmp_path / "old", max_tokens=2000)
    before = files_of(old)
    gate.unlink()
    for folder in (new, old):
        beside = Beside(gate.touch)
        with pytest.raises(CorpusError, match=r"z.txt. line 2: not UTF-8 at byte 4 of the line \(0xe9\)"):
            build(gated, (text, bad), folder, workers, stream_bytes=1, resume=False, progress=beside)
        assert beside.heard
        gate.unlink()
    assert not new.exists()
    assert files_of(old) == before and not (old / "partial").exists()
    assert not children_of(os.getpid(), READER) and not children_of(os.getpid())


def test_a_refusal_is_what_is_said_where_the_text_of_a_window_is_gone_with_it(
    gated: MemoryModel, gate: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "z.txt").write_bytes(f"{MARK}\n".encode() + b"caf\xe9\n")
    window = GrowingCorpus.window

    def too_late(corpus: GrowingCorpus, number: int) -> list[ScanSentence]:
        gate.touch()
        while (corpus.folder / "offsets.npy.part").exists():
            time.sleep(0.01)
        return window(corpus, number)

    monkeypatch.setattr(GrowingCorpus, "window", too_late)
    with pytest.raises(CorpusError, match=r"z.txt. line 2: not UTF-8"):
        build(gated, (text, tmp_path / "z.txt"), tmp_path / "index", stream_bytes=1)
    assert not (tmp_path / "index").exists()


FULL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import memlens
from memlens.parallel import no_progress
from memlens.scanner.scanner import Worker
from test_scan_while_read import build
checkpoint, text, out = map(Path, sys.argv[1:])
model = memlens.load(checkpoint, prove=False)
Worker(model, memlens.settings.ScanSettings(threads=1), (0,)).warm_up()  # loops are kept on the disk, too
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    build(model, (text,), out, 1, stream_bytes=1)
except memlens.MemlensError as error:
    print(type(error).__name__, error)
"""


def test_a_reader_that_cannot_write_says_so(small_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    code = FULL.format(here=str(Path(__file__).parent))
    command = [sys.executable, "-c", code, *map(str, (small_checkpoint, text, tmp_path / "index"))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.stdout.startswith("FilesError cannot write ") and "larger than allowed" in ran.stdout, ran


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[WorkerPool]:
    """The pools of workers that a test makes."""
    made: list[WorkerPool] = []
    begin = WorkerPool.__init__

    def note(pool: WorkerPool, *given: Any) -> None:
        begin(pool, *given)
        made.append(pool)

    monkeypatch.setattr(WorkerPool, "__init__", note)
    return made


def test_the_driver_scans_until_a_worker_is_ready_and_workers_do_the_rest(
    gated: MemoryModel,
    gate: Path,
    text: Path,
    whole: dict[str, Path],
    pools: list[WorkerPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate.touch()
    scan, before, after = Worker.scan, [], []

    def scan_and_note(worker: Worker, batches: BatchRange, *more: Any) -> None:
        (after if any(process.is_ready for pool in pools for process in pool.processes) else before).append(batches)
        scan(worker, batches, *more)
        while pools and pools[0].processes and not any(process.is_ready for process in pools[0].processes):
            pools[0]._listen()  # slow from here on; a worker is started once there is text for it

    monkeypatch.setattr(Worker, "scan", scan_and_note)
    assert files_of(build(gated, (text,), tmp_path / "index", 2, stream_bytes=1)) == files_of(whole["prefix"])
    assert len(before) >= 2 and not after  # the first of them to warm up
    assert pools[0].begun > 0


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_while_text_is_waited_for_is_answered_at_once(
    gated: MemoryModel, gate: Path, text: Path, whole: dict[str, Path], tmp_path: Path, workers: int
) -> None:
    asked: list[float] = []

    def ask() -> None:
        asked.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def wait_and_ask() -> None:
        wait_until(lambda: at_the_gate(gated))
        time.sleep(3.0)  # until all there is was scanned, as a rule
        ask()

    beside = Beside(threading.Thread(target=wait_and_ask, daemon=True).start)
    with pytest.raises(KeyboardInterrupt):
        build(gated, (text,), tmp_path / "index", workers, stream_bytes=1, progress=beside)
    assert time.monotonic() - asked[0] < 60, "not when the text goes on, which is never"
    assert not children_of(os.getpid(), READER) and not children_of(os.getpid())
    assert not CorpusStore.exists(tmp_path / "index" / "partial")
    gate.touch()
    assert files_of(build(gated, (text,), tmp_path / "index")) == files_of(whole["prefix"])


def test_the_work_of_a_worker_that_dies_while_text_is_waited_for_is_done_again_at_once(
    gated: MemoryModel, gate: Path, text: Path, whole: dict[str, Path], pools: list[WorkerPool], tmp_path: Path
) -> None:
    def wait_for_text() -> None:  # so that a worker is started, whoever is faster
        wait_until(lambda: at_the_gate(gated))
        threading.Thread(target=kill_and_wait, daemon=True).start()

    def kill_and_wait() -> None:
        idle: list[WorkerProcess] = []
        wait_until(lambda: idle.extend(one for one in pools[0].processes if one.unsaved and not one.assigned) or idle)
        killed, lost = idle[0], idle[0].unsaved[0]
        killed.process.kill()
        wait_until(lambda: any(lost in one.unsaved for one in pools[0].processes if one is not killed))
        gate.touch()  # only now does reading go on

    beside, never = Beside(wait_for_text), 1e9
    out = build(gated, (text,), tmp_path / "index", 2, stream_bytes=1, save_seconds=never, progress=beside)
    assert gate.exists() and files_of(out) == files_of(whole["prefix"])


def test_a_reader_that_dies_is_said_and_nothing_is_left(gated: MemoryModel, text: Path, tmp_path: Path) -> None:
    beside = Beside(lambda: os.kill(children_of(os.getpid(), READER)[0], signal.SIGKILL))
    with pytest.raises(WorkerError, match=r"ended by SIGKILL while it read text .* run the same command again"):
        build(gated, (text,), tmp_path / "index", stream_bytes=1, progress=beside)
    assert not (tmp_path / "index").exists()


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import memlens
from gated_tokenizer import GatedTokenizer
from test_scan_while_read import build
checkpoint, text, out, gate = map(Path, sys.argv[1:])
model = memlens.load(checkpoint, prove=False)
model._tokenizer = GatedTokenizer.of(model.tokenizer, gate)
tell = lambda *step: print(*step, flush=True)
build(model, (text,), out, 2, stream_bytes=1, save_seconds=0.0, progress=tell)
"""


def test_a_driver_that_is_killed_while_text_is_read_leaves_nobody_and_the_same_command_goes_on(
    small_checkpoint: Path, gated: MemoryModel, gate: Path, text: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    out, moments = tmp_path / "index", random.Random(5)
    for until in ("corpus", "scan"):
        code = DRIVER.format(here=str(Path(__file__).parent))
        command = [sys.executable, "-c", code, *map(str, (small_checkpoint, text, out, gate))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
            next(line for line in driver.stdout or () if line.startswith(until))
            while until == "scan" and not list((out / "partial" / "parts").glob("*.npz")):
                assert driver.poll() is None
                time.sleep(0.05)
            time.sleep(2 * moments.random())
            left = [*children_of(driver.pid, READER), *children_of(driver.pid)]
            driver.kill()
        began = time.monotonic()
        while any(is_alive(process) for process in left):
            assert time.monotonic() - began < 300
            time.sleep(0.1)
        assert len(left) >= (until == "scan") and not CorpusStore.exists(out / "partial")
    assert list((out / "partial" / "parts").glob("*.npz")), "of a text that was never whole: they do not count"
    beside = Beside(gate.touch)
    build(gated, (text,), out, stream_bytes=1, progress=beside)
    assert beside.heard and files_of(out) == files_of(whole["prefix"])


def test_short_texts_and_ray_have_their_text_whole_first(
    gated: MemoryModel, gate: Path, text: Path, tmp_path: Path
) -> None:
    assert stream_bytes(ScanRunSettings(executor="ray")) is None
    limit, size = stream_bytes(ScanRunSettings()), text.stat().st_size
    assert limit is not None and limit > size
    for most, at_least in ((None, limit), (None, None), (5000, 20_001)):
        beside = Beside(lambda: None)
        gate.touch()
        out = build(
            gated, (text,), tmp_path / f"{most}{at_least}", max_tokens=most, stream_bytes=at_least, progress=beside
        )  # fmt: skip
        assert not beside.heard and (out / "manifest.json").is_file()
