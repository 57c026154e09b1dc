"""Helpers of the tests of scaling: a checkpoint, a corpus, and scans whose bytes are compared."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import memlens
from memlens.models.memory_model import MemoryModel

BUNDLED = Path(memlens.__file__).parent / "bundled" / "prose"
TEXTS = tuple(str(BUNDLED / name) for name in ("birds.txt", "bridges.txt", "film.txt"))
TABLES = ("corpus", "memories", "ordinary", "triggers", "vocabulary")
OPTIONS: dict[str, Any] = {"top": 5, "batch_tokens": 64, "threads": 1}  # about a hundred batches in one window

# A scan with two workers as a separate process, so that it can be killed. After some tokens it reports, and waits.
PROGRAM = """
import sys
from pathlib import Path
from memlens.index import build
from memlens.models.load import load
from memlens.scanner import scan
from memlens.settings import CorpusSettings, ScanSettings
model, out, until, *texts = sys.argv[1:]
build.segment_size, scan.SAVE_RATIO = (lambda *plan: 2), 0
def wait_after_some_tokens(stage, done, total):
    if stage == "scan" and done > int(until):
        print("waiting", flush=True)
        sys.stdin.readline()
settings = ScanSettings(top=5, batch_tokens=64, threads=1)
build.build_index(load(model, prove=False), CorpusSettings(tuple(texts)), settings, Path(out), save_seconds=0.0,
                  progress=wait_after_some_tokens, workers=2)
"""


def tables_of(folder: Path) -> dict[str, bytes]:
    others = [name for name in ("counts", "quadrants", "experts", "routing") if (folder / f"{name}.parquet").exists()]
    return {name: (folder / f"{name}.parquet").read_bytes() for name in (*TABLES, *others)}


@dataclass(frozen=True)
class Scans:
    """Repeats the scan of `alone` in another way or in several runs."""

    model: MemoryModel
    alone: Path

    def run(self, out: Path, **options: Any) -> Any:
        return memlens.scan(self.model, TEXTS, out=out, **{"workers": 1, **OPTIONS, **options})

    def stop(self, out: Path, batches: int, number: int = signal.SIGINT, **options: Any) -> None:
        """Start or resume the scan, and send this process a signal after this number of batches."""
        with pytest.raises(KeyboardInterrupt):
            self.run(out, progress=interrupting_after(batches, number), **options)

    def end(self, out: Path, **options: Any) -> None:
        """Finish the scan and compare its bytes with those of `alone`."""
        self.run(out, **options)
        assert tables_of(out) == tables_of(self.alone)

    def go_on(self, out: Path) -> None:
        """Finish the scan, compare its bytes, and check that no finished batch is scanned again."""
        steps: list[int] = []
        self.end(out, progress=lambda stage, done, total: steps.append(done))
        assert steps[0] > 0, "the second run began where the first one stopped"


def start(checkpoint: Path, out: Path, until: int) -> subprocess.Popen[str]:
    """Start a driver with two workers. Returns it when it has scanned this number of tokens and waits."""
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(out), str(until), *TEXTS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=environment, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    return process


def interrupting_after(batches: int, number: int = signal.SIGINT) -> Callable[[str, int, int | None], None]:
    """Return a progress function that sends this process a signal after this number of batches."""
    calls = 0

    def interrupt(stage: str, done: int, total: int | None) -> None:
        nonlocal calls
        calls += stage == "scan" and done > 0
        if calls == batches:
            calls += 1  # once only
            os.kill(os.getpid(), number)

    return interrupt
