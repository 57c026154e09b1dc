"""What the tests of scaling share: one small checkpoint, one corpus, and the bytes that every way must give."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memlens

BUNDLED = Path(memlens.__file__).parent / "bundled" / "corpus"
TEXTS = tuple(str(BUNDLED / name) for name in ("birds.txt", "bridges.txt", "film.txt"))
TABLES = ("corpus", "memories", "ordinary", "triggers", "vocabulary")
OPTIONS: dict[str, Any] = {"top": 5, "batch_tokens": 64, "threads": 1}  # about a hundred batches in one window

# A scan as a process of its own, so that it can be killed; tells each step it takes.
PROGRAM = """
import sys
from pathlib import Path
from memlens.settings import CorpusSettings
from memlens.index.build import build_index
from memlens.models.load import load
from memlens.scanner.executors import make_executor
from memlens.settings import ScanSettings
from memlens.settings import RunSettings
model, out, workers, seconds, *texts = sys.argv[1:]
executor = make_executor(RunSettings(), int(workers))
tell = lambda *step: print(*step, flush=True)
settings = ScanSettings(top=5, batch_tokens=64, threads=1)
build_index(load(model, prove=False), CorpusSettings(tuple(texts)), settings, Path(out), save_seconds=float(seconds),
            progress=tell, executor=executor)
"""


def tables_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.parquet").read_bytes() for name in TABLES}


def start(checkpoint: Path, out: Path, workers: int = 1, seconds: float = 0.0, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(out), str(workers), str(seconds), *TEXTS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **more)


def children_of(process: int) -> list[int]:
    """The worker processes that a process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            command = status.with_name("cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == process and fields[0] != "Z" and b"memlens.scanner.local" in command:
            found.append(int(status.parent.name))
    return found


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def interrupting_after(batches: int, number: int = signal.SIGINT) -> Callable[[str, int, int | None], None]:
    """A progress function that sends this process a signal after so many batches."""
    calls = 0

    def interrupt(stage: str, done: int, total: int | None) -> None:
        nonlocal calls
        calls += stage == "scan" and done > 0
        if calls == batches:
            calls += 1  # once only
            os.kill(os.getpid(), number)

    return interrupt
