"""Finds patterns in a worker process while this process computes something else.

Finding patterns needs no model and keeps one core busy. Experiments that do not need patterns can run at the same
time. The worker reads the index and returns the tables. Only this process writes to the index.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from memlens.index.reader import Index
from memlens.pattern.table import PatternTables, make_patterns
from memlens.pool import POLL_SECONDS, PickledSource, ProcessPool
from memlens.progress import Progress
from memlens.settings import PatternSettings


class PatternSearch:
    """A running search for patterns."""

    def __init__(self, future: Future[tuple[PatternTables, float]]) -> None:
        self._future = future

    def wait(self, progress: Progress) -> tuple[PatternTables, float]:
        """Return the tables and the seconds that they took."""
        while not wait([self._future], POLL_SECONDS).done:
            progress("shallow", 0, None)
        return self._future.result()


@contextmanager
def find_patterns_beside(folder: Path, settings: PatternSettings) -> Iterator[PatternSearch]:
    """Find the patterns of an index in a worker process, which ends with this context."""
    is_over = threading.Event()

    def check_stop() -> None:
        if is_over.is_set():
            raise CancelledError

    def search() -> tuple[PatternTables, float]:
        (result,) = ProcessPool(PickledSource(settings), 1, check_stop=check_stop).map(_find_patterns, [folder])
        return result

    with ThreadPoolExecutor(1) as thread:
        try:
            yield PatternSearch(thread.submit(search))
        finally:
            is_over.set()


def _find_patterns(settings: PatternSettings, folder: Path) -> tuple[PatternTables, float]:
    began = time.monotonic()
    return make_patterns(Index(folder), settings), time.monotonic() - began
