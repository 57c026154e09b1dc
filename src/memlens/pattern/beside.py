"""Patterns found in a process of their own, while this one computes something else.

Finding patterns needs no model and keeps one core busy; experiments that do not need them can run meanwhile. The
process reads the index and sends the tables back; only the driver writes, so that two writers never meet.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from memlens.index.reader import Index
from memlens.parallel import Progress
from memlens.pattern.table import PatternTables, make_patterns
from memlens.processes import (
    ANSWER,
    GONE,
    LOOK,
    WorkerProcess,
    error_message,
    leave_signals_to_driver,
    leave_with,
    listen,
    signals_held_back,
    start_program,
    worker_error,
)
from memlens.settings import PatternSettings


def serve(descriptor: int) -> None:
    """Find the patterns of one index, send them, and end."""
    leave_signals_to_driver()
    connection = Connection(descriptor)
    with suppress(*GONE):
        try:
            driver, folder, settings = pickle.loads(connection.recv_bytes())
            threading.Thread(target=leave_with, args=(driver,), daemon=True).start()
            began = time.monotonic()
            made = make_patterns(Index(folder), settings)
            connection.send((ANSWER, made, time.monotonic() - began))
        except Exception as error:
            connection.send(error_message(error))


class PatternProcess:
    """The process as its driver sees it."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.seconds = 0.0  # that it took
        self._made: PatternTables | None = None
        self._is_gone = False

    def wait(self, progress: Progress) -> PatternTables | None:
        """The tables that the process has made; None where somebody ended it, so that the work is to be done here."""
        while self._made is None and not self._is_gone:
            progress("shallow", 0, None)
            listen([self.worker], self._hear, self._lose, LOOK)
        return self._made

    def _hear(self, worker: WorkerProcess, what: str, *details: Any) -> None:
        if what != ANSWER:
            raise worker_error(what, *details)
        self._made, self.seconds = details

    def _lose(self, worker: WorkerProcess) -> None:
        self._is_gone = True


@contextmanager
def finding_patterns(folder: Path, settings: PatternSettings) -> Iterator[PatternProcess]:
    """Patterns of the index in `folder` are being found within; whatever happens, the process ends with the context."""
    with signals_held_back():
        process, connection = start_program(__name__)
        found = PatternProcess(WorkerProcess(0, "", process, connection))
        try:
            with suppress(*GONE):
                connection.send_bytes(pickle.dumps((os.getpid(), folder, settings)))
        except BaseException:
            process.kill()
            raise
    try:
        yield found
    finally:
        process.kill()
        process.wait()
        connection.close()
