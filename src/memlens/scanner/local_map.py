"""LocalMapper: a map over items on worker processes of this machine, each with the model loaded.

The driver sends a worker the model's recipe and its threads, then the work of a map (pickled) and its items; a worker
answers with tuples that begin with one of the words of `local`. Workers stay for the next map and end with `close`. An
item whose worker died goes to another one, a few times; answers come in the order of the items, so that nobody can tell
how many workers there were.
"""

import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from memlens import errors
from memlens.errors import MemlensError, WorkerError
from memlens.models.memory_model import MemoryModel
from memlens.scanner.executors import RETRIES, ModelRecipe
from memlens.scanner.local import (
    ERROR,
    NO_MODEL,
    READY,
    WorkerProcess,
    error_message,
    leave_signals_to_driver,
    leave_with,
    listen,
    signals_held_back,
    start_program,
)

ANSWER, ITEM, WORK = "answer", "item", "work"
_AHEAD = 2  # items that a worker has, so that it never waits for the driver
_GONE = (EOFError, BrokenPipeError, ConnectionResetError)


def serve(descriptor: int) -> None:
    """Answer items until the driver is gone."""
    leave_signals_to_driver()
    connection = Connection(descriptor)
    with suppress(*_GONE):
        try:
            driver, recipe, threads, number = pickle.loads(connection.recv_bytes())
            threading.Thread(target=leave_with, args=(driver,), daemon=True).start()
            torch.set_num_threads(threads)
            model = recipe.load_or_none(number)
            connection.send((NO_MODEL,) if model is None else (READY,))
            if model is not None:
                _answer_all(connection, model)
        except Exception as error:
            connection.send(error_message(error))


def _answer_all(connection: Connection, model: MemoryModel) -> None:
    inbox: SimpleQueue[Any] = SimpleQueue()
    # A thread reads, so that the driver can always send, also while a large answer waits to be read by it.
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    work: Any = None
    while (message := inbox.get()) is not None:
        kind, content = message
        if kind == WORK:
            work = pickle.loads(content)
        else:
            number, item = content
            connection.send((ANSWER, number, work(model, item)))


def _receive(connection: Connection, inbox: "SimpleQueue[Any]") -> None:
    with suppress(*_GONE, OSError):
        while True:
            inbox.put(connection.recv())
    inbox.put(None)


class LocalMapper:
    """The Mapper on processes of this machine; `close` ends them."""

    def __init__(self, model: MemoryModel, workers: int, threads: int) -> None:
        self.model, self.size, self.threads = model, workers, threads
        self.recipe = ModelRecipe.of(model, model.fingerprint())
        self.workers: list[WorkerProcess] = []
        self.begun = self.lost = 0
        self.work = b""
        self.waiting: dict[int, Any] = {}  # number -> item that is not answered yet
        self.unassigned: deque[int] = deque()
        self.answers: dict[int, Any] = {}

    def map(self, work: Callable[[MemoryModel, Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        self.work = pickle.dumps(work)
        for worker in self.workers:
            worker.send((WORK, self.work))
        try:
            yield from self._in_order(enumerate(items))
        finally:
            if self.waiting or self.answers:  # nobody wants them any more, and workers may be at them
                self.close()

    def _in_order(self, given: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        following = 0
        while True:
            self._supply(given)
            if following in self.answers:
                yield self.answers.pop(following)
                following += 1
            elif self.waiting:
                listen(self.workers, self._hear, self._remove)
            else:
                return

    def _supply(self, given: Iterator[tuple[int, Any]]) -> None:
        """Take some items more, start workers for them, and give workers that have too few."""
        room = 2 * _AHEAD * self.size - len(self.waiting) - len(self.answers)
        for number, item in islice(given, max(room, 0)):
            self.waiting[number] = item
            self.unassigned.append(number)
        while len(self.workers) < min(self.size, len(self.waiting)):
            self._start()
        for worker in self.workers:
            while self.unassigned and worker.is_ready and len(worker.assigned) < _AHEAD:
                worker.assigned.append(self.unassigned.popleft())
                worker.send((ITEM, (worker.assigned[-1], self.waiting[worker.assigned[-1]])))

    def _start(self) -> None:
        with signals_held_back():
            process, connection = start_program(__name__)
            worker = WorkerProcess(self.begun, "", process, connection)
            self.workers.append(worker)  # from here on it is ended whatever happens
        self.begun += 1
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send_bytes(pickle.dumps((os.getpid(), self.recipe, self.threads, worker.number)))

    def _hear(self, worker: WorkerProcess, what: str, *details: Any) -> None:
        if what == ANSWER:
            number, self.answers[details[0]] = details
            worker.assigned.remove(number)
            del self.waiting[number]
        elif what == READY:
            worker.is_ready = True
            worker.send((WORK, self.work))
        elif what == NO_MODEL:  # its files are gone or not what is in memory: workers get what is in memory
            worker.lacks_the_model = True
            self.recipe = self.recipe.as_copy(self.model)
        elif what == ERROR:
            raise getattr(errors, details[0], MemlensError)(details[1])
        else:
            raise RuntimeError(f"a worker process failed:\n{details[0]}")

    def _remove(self, worker: WorkerProcess) -> None:
        """The worker has ended: its items go to others."""
        self.workers.remove(worker)
        worker.connection.close()
        how = worker.how_it_ended()
        self.unassigned.extendleft(reversed(worker.assigned))
        self.lost += not worker.lacks_the_model
        if self.lost > RETRIES:
            raise WorkerError(
                f"{how}, as did {RETRIES} before it; mend the cause (often memory: try fewer --workers) and run the "
                "same command again"
            )

    def close(self) -> None:
        """End the workers; they hold nothing that is not here."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            worker.connection.close()
        self.workers = []
        self.waiting, self.answers, self.unassigned = {}, {}, deque()
