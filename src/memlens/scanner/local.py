"""LocalExecutor: a pool of worker processes on this machine, each with the model loaded and a part of its own.

A worker that dies costs what it had not saved: its part stays, the rest goes to a new worker, a few times. At the first
signal workers finish their batch and save; at the second they are ended at once. The driver holds no state, but where a
text is still read it scans itself until a worker is ready.

The driver sends a worker (see `processes`) the work order, its number and the name of its part, then ranges of batches,
at last FINISH or STOP. It answers with tuples that begin with one of the words below.
"""

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from memlens.corpus.sentences import Batch
from memlens.errors import WorkerError
from memlens.processes import (
    AHEAD,
    GONE,
    LOOK,
    READY,
    WorkerProcess,
    error_message,
    leave_signals_to_driver,
    leave_with,
    listen,
    signals_held_back,
    start_program,
    worker_error,
)
from memlens.scanner.executors import ModelRecipe, Saver, ScanJob, WorkQueue
from memlens.scanner.scanner import ScanSentence, Worker
from memlens.scanner.state import PartFolder
from memlens.settings import ScanSettings

FINISH, STOP = "finish", "stop"
BATCH, RANGE_DONE, SAVED, NO_MODEL = "batch", "range", "saved", "no model"


@dataclass(frozen=True)
class WorkOrder:
    """The first message to every worker of a scan."""

    driver: int  # its process id
    recipe: ModelRecipe
    settings: ScanSettings
    layers: tuple[int, ...]
    window: Callable[[int], Sequence[ScanSentence]]
    parts: PartFolder
    save_seconds: float


def serve(descriptor: int) -> None:
    """Work until there is nothing left to do or the driver is gone."""
    leave_signals_to_driver()
    connection = Connection(descriptor)
    with suppress(*GONE):  # the driver is gone, and so are we
        packed = connection.recv_bytes()
        number, name = connection.recv()
        try:
            order: WorkOrder = pickle.loads(packed)
            threading.Thread(target=leave_with, args=(order.driver,), daemon=True).start()
            with order.parts.writing():
                # Only now is it sure that no other driver begins before this process ends, so look once more.
                if os.getppid() == order.driver:
                    _work(connection, order, number, name)
        except Exception as error:
            connection.send(error_message(error))


def _work(connection: Connection, order: WorkOrder, number: int, name: str) -> None:
    torch.set_num_threads(order.settings.threads)
    model = order.recipe.load_or_none(number)
    if model is None:
        connection.send((NO_MODEL,))
        return
    worker = Worker(model, order.settings, order.layers)
    saver = Saver(order.parts, name, order.save_seconds)
    inbox = _Inbox(connection)
    connection.send((READY,))

    def after_batch(batch: Batch) -> None:
        connection.send((BATCH, int(batch.lengths.sum())))
        if inbox.holds(STOP):
            raise _Stopped
        if saver.is_due():
            saver.save(worker.state)
            connection.send((SAVED,))

    with suppress(_Stopped):
        while (message := inbox.next()) not in (FINISH, STOP):
            worker.scan(message, order.window, after_batch)
            connection.send((RANGE_DONE,))
    saver.save(worker.state)
    connection.send((SAVED,))


class _Stopped(Exception):  # noqa: N818 - nothing went wrong
    """The driver has said stop."""


class _Inbox:
    """Take in all that the driver has sent, so that STOP is seen before the ranges that wait."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.waiting: list[Any] = []

    def next(self) -> Any:
        if self.holds(STOP):
            return STOP
        return self.waiting.pop(0) if self.waiting else self.connection.recv()

    def holds(self, message: str) -> bool:
        while self.connection.poll():
            self.waiting.append(self.connection.recv())
        return message in self.waiting


class LocalExecutor:
    """Runs a job on so many processes."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def run(self, job: ScanJob) -> None:
        pool = WorkerPool(job, self.workers)
        try:
            pool.work()
        finally:
            pool.end()


class WorkerPool:
    """The workers of one job."""

    def __init__(self, job: ScanJob, size: int) -> None:
        self.job, self.size = job, size
        self.queue = WorkQueue(job.ranges)
        self.processes: list[WorkerProcess] = []
        self.begun = 0
        self.trouble: Exception | None = None
        self.recipe = job.recipe()
        self.order = self._order()

    def _order(self) -> bytes:
        job = self.job
        return pickle.dumps(
            WorkOrder(os.getpid(), self.recipe, job.settings, job.layers, job.window, job.parts, job.save_seconds)
        )

    def work(self) -> None:
        """Hand out batches until every one is saved."""
        self._start_workers()
        while self.processes or not self.queue.has_ended:
            self._listen()
            if self._must_stop:
                self._stop()
            for worker in self.processes:
                self._supply(worker)
            if self.queue.has_ended and not any(worker.assigned for worker in self.processes):
                for worker in self.processes:
                    worker.end(FINISH)
            self._start_workers()

    @property
    def _must_stop(self) -> bool:
        return self.job.stop.stopped or self.trouble is not None

    def _start_workers(self) -> None:
        """Start those that are lacking, each with a range, as far as there are ranges."""
        ranges = [self.queue.take() for _ in range(self.size - len(self.processes))]
        for batches in ranges:
            if batches is not None:
                self._start()
                self.processes[-1].assigned.append(batches)
                self.processes[-1].send(batches)

    def _start(self) -> None:
        name = self.job.parts.new_name()
        with signals_held_back():
            process, here = start_program(__name__)
            worker = WorkerProcess(self.begun, name, process, here)
            self.processes.append(worker)  # from here on it is ended whatever happens
        self.begun += 1
        with suppress(BrokenPipeError, ConnectionResetError):
            here.send_bytes(self.order)
        worker.send((worker.number, name))

    def _supply(self, worker: WorkerProcess) -> None:
        while worker.is_ready and not worker.is_ending and len(worker.assigned) < AHEAD:
            batches = self.queue.take()
            if batches is None:
                return
            worker.assigned.append(batches)
            worker.send(batches)

    def _listen(self, seconds: float = LOOK) -> None:
        listen(self.processes, self._hear, self._remove, seconds)

    def _hear(self, worker: WorkerProcess, what: str, *details: Any) -> None:
        if what == READY:
            worker.is_ready = True
            self.queue.note_start()
        elif what == BATCH:
            self.job.on_tokens(details[0])
        elif what == RANGE_DONE:
            worker.unsaved.append(worker.assigned.pop(0))
        elif what == SAVED:
            worker.unsaved.clear()
        elif what == NO_MODEL:
            worker.lacks_the_model = True
            if not self.recipe.copy:  # its files are gone or not what is in memory: workers get what is in memory
                self.recipe = self.recipe.as_copy(self.job.model)
                self.order = self._order()
        else:
            self.trouble = self.trouble or worker_error(what, *details)

    def _remove(self, worker: WorkerProcess) -> None:
        """The worker has ended: what it has not saved is to be done again."""
        self.processes.remove(worker)
        worker.connection.close()
        how = worker.how_it_ended()
        saved = self.job.parts.done_in(worker.name)
        left = [rest for batches in (*worker.unsaved, *worker.assigned) for rest in saved.left_of(batches)]
        if self.trouble is not None or not left:
            return
        if worker.is_ready:
            self.queue.lose(left, how)
        else:
            self.queue.put_back(left)
            if not worker.lacks_the_model:
                self.queue.fail_start(how)

    def _stop(self) -> None:
        """Let every worker finish its batch and save, then raise."""
        while self.processes:
            for worker in list(self.processes):
                worker.end(STOP)
                if not worker.is_ready:  # still loading: nothing to lose
                    worker.process.kill()
            with suppress(WorkerError):
                self._listen()
        if self.trouble is not None:
            raise self.trouble
        self.job.stop.check()

    def end(self) -> None:
        """End whoever is left, at once."""
        for worker in self.processes:
            worker.process.kill()
        for worker in self.processes:
            worker.process.wait()
            worker.connection.close()
        self.processes = []
