"""LocalMapper: a map over items on worker processes of this machine, each with the model loaded.

The driver sends a worker the model's recipe and its threads, then the work of a map (pickled) and its items. Workers
stay for the next map and end with `close`. Answers come in the order of the items, so that nobody can tell how many
workers there were. The driver is one of the workers: it has the model, so that work begins while others start.
"""

import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from memlens.models.memory_model import MemoryModel
from memlens.processes import (
    ANSWER,
    GONE,
    READY,
    ProcessMap,
    WorkerProcess,
    error_message,
    leave_signals_to_driver,
    leave_with,
    received,
)
from memlens.scanner.executors import ModelRecipe
from memlens.scanner.local import NO_MODEL

ITEM, WORK = "item", "work"


def serve(descriptor: int) -> None:
    """Answer items until the driver is gone."""
    leave_signals_to_driver()
    connection = Connection(descriptor)
    with suppress(*GONE):
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
    work: Any = None
    for kind, content in received(connection):
        if kind == WORK:
            work = pickle.loads(content)
        else:
            number, item = content
            connection.send((ANSWER, number, work(model, item)))


class LocalMapper(ProcessMap):
    """The Mapper on processes of this machine, of which this is one; `close` ends the others.

    The caller has set torch's threads to `threads`, which last bits depend on.
    """

    here = 1

    def __init__(self, model: MemoryModel, workers: int, threads: int) -> None:
        super().__init__(__name__, workers)
        self.model, self.threads = model, threads
        self.recipe = ModelRecipe.of(model, model.fingerprint())
        self.work = b""
        self.work_here: Callable[[MemoryModel, Any], Any] | None = None

    def order(self, number: int) -> bytes:
        return pickle.dumps((os.getpid(), self.recipe, self.threads, number))

    def message(self, number: int) -> Any:
        return ITEM, super().message(number)

    def answer_here(self, item: Any) -> Any:
        assert self.work_here is not None
        return self.work_here(self.model, item)

    def map(self, work: Callable[[MemoryModel, Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        self.work, self.work_here = pickle.dumps(work), work
        for worker in self.workers:
            worker.send((WORK, self.work))
        try:
            yield from self.in_order(items)
        finally:
            if self.waiting or self.answers:  # nobody wants them any more, and workers may be at them
                self.close()

    def hear(self, worker: WorkerProcess, what: str, *details: Any) -> None:
        if what == NO_MODEL:  # its files are gone or not what is in memory: workers get what is in memory
            worker.lacks_the_model = True
            self.recipe = self.recipe.as_copy(self.model)
            return
        super().hear(worker, what, *details)
        if what == READY:
            worker.send((WORK, self.work))
