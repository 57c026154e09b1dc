"""TextStream: a text that a process of its own reads while its first windows are scanned, as the driver sees it."""

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from subprocess import TimeoutExpired

import numpy as np

from memlens.corpus.encoding import NO_TOKENIZER
from memlens.errors import WorkerError
from memlens.index.corpus_reading import FINAL, READ, WHOLE, TextOrder
from memlens.index.corpus_store import CorpusStore, GrowingCorpus
from memlens.processes import GONE, WorkerProcess, signals_held_back, start_program, worker_error
from memlens.scanner.scanner import ScanSentence

_PATIENCE = 2.0  # seconds that a reader has to tidy up in


class TextStream:
    """Starts the reader; `store` is the text as soon as it is whole. To be closed, which ends the reader."""

    def __init__(self, order: TextOrder, on_bytes: Callable[[int], None]) -> None:
        self.store: CorpusStore | None = None
        self.corpus = GrowingCorpus(order.folder)
        self.on_bytes = on_bytes
        self.windows = 0  # that are final
        self.goes_on = False
        self._reader: WorkerProcess | None = None
        packed = order.pickled()
        if packed:
            self._start(pickle.dumps((os.getpid(), packed)))

    def _start(self, order: bytes) -> None:
        with signals_held_back():
            self._reader = WorkerProcess(0, "", *start_program("memlens.index.corpus_reading"))
        self.goes_on = True
        try:
            with suppress(*GONE):  # its end is noticed where its news are read
                self._reader.connection.send_bytes(order)
        except BaseException:
            self.close()
            raise

    def batches(self, plan: Callable[[Sequence[ScanSentence]], int]) -> Iterator[int | None]:
        """The number of batches in each window, as `plan` counts them; None wherever the next one is still read.

        Ends without a store where another process cannot have the tokenizer: then nobody has read anything. An error
        of reading is raised here.
        """
        counts: list[int] = []
        while self.goes_on:
            self._listen()
            if len(counts) < self.windows:
                counts.append(plan(self.corpus.window(len(counts))))
                yield counts[-1]
            elif self.goes_on:
                yield None
        if self.store is not None:
            for number in range(len(counts), self.store.windows):
                counts.append(plan(self.store.window(number)))
                yield counts[-1]
            self.store.note_batches(np.array(counts, np.int32))

    def _listen(self) -> None:
        """Take in what the reader has told; does not wait."""
        reader = self._reader
        while reader is not None and self.goes_on and reader.connection.poll():
            try:
                what, *details = reader.connection.recv()
            except (EOFError, OSError) as error:
                self.goes_on = False
                raise WorkerError(
                    f"{reader.how_it_ended()} while it read text (often memory: try fewer --workers and --threads); "
                    "run the same command again"
                ) from error
            if what == READ:
                self.on_bytes(details[0])
            elif what == FINAL:
                self.windows = details[0]
            elif what == WHOLE:
                self.goes_on, self.store = False, CorpusStore(self.corpus.folder)
            elif what == NO_TOKENIZER:
                self.goes_on = False
            else:
                self.goes_on = False
                raise worker_error(what, *details)

    def raise_if_refused(self) -> None:
        """Raise the error of a reader that gives up; it takes its files away before it tells, so wait a moment."""
        until = time.monotonic() + _PATIENCE
        while (reader := self._reader) is not None and self.goes_on and (left := until - time.monotonic()) > 0:
            if reader.connection.poll(left):
                self._listen()

    def close(self) -> None:
        """End the reader: it tidies up when it finds the pipe closed, and is killed where that takes long."""
        if self._reader is None:
            return
        reader, self._reader, self.goes_on = self._reader, None, False
        reader.connection.close()
        try:
            with suppress(TimeoutExpired):
                reader.process.wait(_PATIENCE)
        finally:
            reader.process.kill()
            reader.process.wait()
