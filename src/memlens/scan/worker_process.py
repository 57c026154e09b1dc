"""The life of a local worker process: orders in, results into a part, news to the driver.

Started as a program of its own, so that the driver's main module is not run a second time. What it is told, in order:
the work order (pickled), its own number and part name, then pieces, at last FINISH or STOP. It answers with tuples
whose first word is one of the news below. Nothing heavy is imported before the order is there.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlens.corpus.batches import Batch
    from memlens.scan.recipe import ModelRecipe
    from memlens.scan.settings import ScanSettings
    from memlens.scan.work import Keeper, Windows

FINISH, STOP = "finish", "stop"
READY, BATCH, PIECE_DONE, SAVED, NO_MODEL, ERROR, BUG = "ready", "batch", "piece", "saved", "no model", "error", "bug"
_LOOK = 0.25  # seconds between two looks whether the driver is still there


@dataclass(frozen=True)
class WorkOrder:
    """What all workers of a scan are told at first."""

    driver: int  # its process id
    recipe: ModelRecipe
    settings: ScanSettings
    layers: tuple[int, ...]
    windows: Windows
    keeper: Keeper
    save_seconds: float


def serve(descriptor: int) -> None:
    """Work until there is nothing left to do or the driver is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the driver says when to stop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    connection = Connection(descriptor)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the driver is gone, and so are we
        packed = connection.recv_bytes()
        number, name = connection.recv()
        try:
            order: WorkOrder = pickle.loads(packed)
            threading.Thread(target=_leave_with, args=(order.driver,), daemon=True).start()
            with order.keeper.writing():
                # Only now is it sure that no other driver begins before this process ends, so look once more.
                if os.getppid() == order.driver:
                    _work(connection, order, number, name)
        except Exception as error:
            connection.send(_told(error))


def _told(error: Exception) -> tuple[str, ...]:
    from memlens.errors import MemlensError

    if isinstance(error, (EOFError, BrokenPipeError, ConnectionResetError)):
        raise error
    if isinstance(error, MemlensError):
        return (ERROR, type(error).__name__, str(error))
    if isinstance(error, MemoryError):
        return (ERROR, "WorkerError", "a worker process has not enough memory; try fewer --workers or --batch-tokens")
    return (BUG, "".join(traceback.format_exception(error)))


def _leave_with(driver: int) -> None:
    """End this process when the driver has ended; parts are written beside and renamed, so that is safe anywhere."""
    while os.getppid() == driver:
        time.sleep(_LOOK)
    os._exit(1)


def _work(connection: Connection, order: WorkOrder, number: int, name: str) -> None:
    import torch

    from memlens.errors import MemlensError
    from memlens.scan.work import Saver, Worker

    torch.set_num_threads(order.settings.threads)
    try:
        model = order.recipe.load(number)
    except MemlensError:
        if order.recipe.copy:
            raise
        connection.send((NO_MODEL,))
        return
    worker = Worker(model, order.settings, order.layers)
    saver = Saver(order.keeper, name, worker, order.save_seconds)
    inbox = _Inbox(connection)
    connection.send((READY,))

    def after_batch(batch: Batch) -> None:
        connection.send((BATCH, int(batch.lengths.sum())))
        if inbox.holds(STOP):
            raise _Stopped
        if saver.save_if_due():
            connection.send((SAVED,))

    with suppress(_Stopped):
        while (piece := inbox.next()) not in (FINISH, STOP):
            worker.scan(piece, order.windows.window, after_batch)
            connection.send((PIECE_DONE,))
    saver.save()
    connection.send((SAVED,))


class _Stopped(Exception):  # noqa: N818 - nothing went wrong
    """The driver has said stop."""


class _Inbox:
    """What the driver has sent, so that STOP is seen before the pieces that wait."""

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


if __name__ == "__main__":
    serve(int(sys.argv[1]))
