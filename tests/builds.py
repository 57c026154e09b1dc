"""Checkpoints, texts and indexes that are built once for all test processes and kept for later runs."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

import memlens
from index_by_hand import write_index
from memlens.index.reader import Index
from memlens.pattern.table import compute_patterns
from memlens.scanner.kernels import warm_up

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".pytest_cache" / "memlens"


@cache
def source_key() -> str:
    """Return a digest of everything that the bytes of an index depend on: sources, libraries, vector unit, threads."""
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted((ROOT / "src").rglob("*.py"))):
        digest.update(path.read_bytes())
    digest.update(repr([version(name) for name in ("torch", "transformers", "numba", "pyarrow")]).encode())
    digest.update(repr([os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS")]).encode())
    return digest.hexdigest()[:16]


def build_once(name: str, build: Callable[[Path], object]) -> Path:
    """Return a folder that `build(folder)` fills, built by the first test process that needs it.

    The path of the folder also depends on the file that defines `build`. Never change its files, because later runs use
    them. Use checkpoints and texts in place, and indexes through `open_copy`.
    """
    defined_in = hashlib.sha256(Path(build.__code__.co_filename).read_bytes()).hexdigest()[:8]  # type: ignore[attr-defined]
    folder = CACHE / source_key() / defined_in / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    finished = folder.with_suffix(".finished")
    with FileLock(folder.with_suffix(".lock")):
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
            folder.mkdir()
            build(folder)
            finished.touch()
    os.utime(folder.parent.parent)
    return folder


def open_copy(built: Path, folder: Path) -> Index:
    """Return the index of a `build_once` folder, copied to a folder of this process: opening one may write a lock."""
    return memlens.open_index(shutil.copytree(built / "index", folder / "index"))


def compile_loops(process: int, processes: int) -> None:
    """Compile the loops of scans and patterns before the first test, so that no two test processes compile the same."""
    jobs = (warm_up, _find_a_pattern)
    for job in jobs[process::processes]:
        job()


def _find_a_pattern() -> None:
    with tempfile.TemporaryDirectory() as folder:
        texts = ["The river runs to the sea.", "Rain fell on the hills by the river."] * 6
        prefixes = [(number, 1 + number % 2) for number in range(len(texts))]
        compute_patterns(write_index(Path(folder) / "index", texts, {(0, 0): prefixes}))


def remove_old_builds() -> None:
    """Remove builds of other sources that no run has used for a day."""
    for folder in CACHE.iterdir() if CACHE.is_dir() else ():
        if folder.name != source_key() and folder.stat().st_mtime < time.time() - 86_400:
            shutil.rmtree(folder, ignore_errors=True)
