"""The life of a local worker process: orders in, results into a part, news to the driver.

Started as a program of its own, so that the driver's main module is not run a second time. What it is told, in order:
the work order (pickled), its own number and part name, then pieces, at last FINISH or STOP. It answers with tuples
whose first word is one of the news below. Nothing heavy is imported before the order is there.

Local workers: pieces on several processes of this machine, each with the model loaded and a part of its own.

A worker that dies costs what it had not saved: its part is kept, the rest goes to a new worker, a few times. Told to
stop, workers finish their batch and save; told twice, they are ended at once. The driver holds no state at all.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from memlens import errors
from memlens.errors import MemlensError, SettingError, WorkerError
from memlens.scanner.executors import Ledger
from memlens.scanner.scanner import ScanJob
from memlens.scanner.state import Piece

if TYPE_CHECKING:
    from memlens.corpus.batches import Batch
    from memlens.scanner.executors import ModelRecipe
    from memlens.scanner.scanner import Keeper, Windows
    from memlens.scanner.settings import ScanSettings

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
    from memlens.scanner.scanner import Saver, Worker

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


_AHEAD = 2  # pieces that a worker has, so that it never waits for the driver
_LOCAL_LOOK = 0.2  # seconds between two looks whether somebody wants to stop
MOST_WORKERS = 1024

# sys.path as it is here: a test or a notebook may have added to it.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from memlens.scanner.local import serve; "
_PROGRAM += "serve(int(sys.argv[1]))"


class LocalWorkers:
    """The executor with so many processes."""

    def __init__(self, workers: int) -> None:
        if not 1 <= workers <= MOST_WORKERS:
            raise SettingError(f"--workers is {workers}; it must be 1 to {MOST_WORKERS:,}")
        self.workers = workers

    def run(self, job: ScanJob) -> None:
        crew = _Crew(job, self.workers)
        try:
            crew.work()
        finally:
            crew.end()


class _Hand:
    """One worker as the driver sees it."""

    def __init__(self, number: int, name: str, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self.number, self.name, self.process, self.connection = number, name, process, connection
        self.is_ready = False
        self.is_told_to_end = False
        self.lacks_the_model = False
        self.assigned: list[Piece] = []  # sent, in this order
        self.unsaved: list[Piece] = []  # done, but not in the part yet

    def tell(self, message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is noticed where its news are read
            self.connection.send(message)

    def end(self, message: str) -> None:
        if not self.is_told_to_end:
            self.is_told_to_end = True
            self.tell(message)

    def how_it_ended(self) -> str:
        code = self.process.wait()
        if code >= 0:
            return f"worker process {self.number} ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"worker process {self.number} was ended by {name}"


class _Crew:
    """The workers of one job."""

    def __init__(self, job: ScanJob, size: int) -> None:
        self.job, self.size = job, size
        self.ledger = Ledger(job.pieces)
        self.hands: list[_Hand] = []
        self.hired = 0
        self.trouble: Exception | None = None
        self.recipe = job.recipe()
        self.order = self._order()

    def _order(self) -> bytes:
        job = self.job
        return pickle.dumps(
            WorkOrder(os.getpid(), self.recipe, job.settings, job.layers, job.windows, job.keeper, job.save_seconds)
        )

    def work(self) -> None:
        """Until every piece is kept."""
        waiting = self._wanted()
        while self.hands or waiting:
            for piece in waiting:
                self._hire()
                self.hands[-1].assigned.append(piece)
                self.hands[-1].tell(piece)
            self._listen()
            if self.job.stop.stopped or self.trouble is not None:
                self._stop()
            for hand in self.hands:
                self._supply(hand)
            if not any(hand.assigned for hand in self.hands):
                for hand in self.hands:
                    hand.end(FINISH)
            waiting = self._wanted()

    def _wanted(self) -> list[Piece]:
        """Pieces for which a worker is to be started."""
        pieces = (self.ledger.take() for _ in range(self.size - len(self.hands)))
        return [piece for piece in pieces if piece is not None]

    def _hire(self) -> None:
        name = self.job.keeper.new_name()
        here, there = Pipe()
        with there, _signals_held_back():
            command = [sys.executable, "-c", _PROGRAM, str(there.fileno()), json.dumps(sys.path)]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[there.fileno()]
            )
            hand = _Hand(self.hired, name, process, here)
            self.hands.append(hand)  # from here on it is ended whatever happens
        self.hired += 1
        with suppress(BrokenPipeError, ConnectionResetError):
            here.send_bytes(self.order)
        hand.tell((hand.number, name))

    def _supply(self, hand: _Hand) -> None:
        while hand.is_ready and not hand.is_told_to_end and len(hand.assigned) < _AHEAD:
            piece = self.ledger.take()
            if piece is None:
                return
            hand.assigned.append(piece)
            hand.tell(piece)

    def _listen(self) -> None:
        by_connection = {hand.connection: hand for hand in self.hands}
        for connection in wait(list(by_connection), _LOCAL_LOOK):
            hand = by_connection[connection]  # type: ignore[index]
            try:
                self._hear(hand, *hand.connection.recv())
            except (EOFError, ConnectionResetError):
                self._part_with(hand)

    def _hear(self, hand: _Hand, what: str, *details: Any) -> None:
        if what == READY:
            hand.is_ready = True
            self.ledger.started()
        elif what == BATCH:
            self.job.on_tokens(details[0])
        elif what == PIECE_DONE:
            hand.unsaved.append(hand.assigned.pop(0))
        elif what == SAVED:
            hand.unsaved.clear()
        elif what == NO_MODEL:
            hand.lacks_the_model = True
            if not self.recipe.copy:  # its files are gone or not what is in memory: workers get what is in memory
                self.recipe = self.recipe.as_copy(self.job.model)
                self.order = self._order()
        elif what == ERROR:
            kind = getattr(errors, details[0], MemlensError)
            self.trouble = self.trouble or kind(details[1])
        else:
            self.trouble = self.trouble or RuntimeError(f"a worker process failed:\n{details[0]}")

    def _part_with(self, hand: _Hand) -> None:
        """The worker has ended: what it has not kept is to be done again."""
        self.hands.remove(hand)
        hand.connection.close()
        how = hand.how_it_ended()
        kept = self.job.keeper.done_in(hand.name)
        left = [rest for piece in (*hand.unsaved, *hand.assigned) for rest in kept.left_of(piece)]
        if self.trouble is not None or not left:
            return
        if hand.is_ready:
            self.ledger.lose(left, how)
        else:
            self.ledger.put_back(left)
            if not hand.lacks_the_model:
                self.ledger.fail_start(how)

    def _stop(self) -> None:
        """Let every worker finish its batch and save, then raise."""
        while self.hands:
            for hand in list(self.hands):
                hand.end(STOP)
                if not hand.is_ready:  # still loading: nothing to lose
                    hand.process.kill()
            with suppress(WorkerError):
                self._listen()
        if self.trouble is not None:
            raise self.trouble
        self.job.stop.check()

    def end(self) -> None:
        """End whoever is left, at once."""
        for hand in self.hands:
            hand.process.kill()
        for hand in self.hands:
            hand.process.wait()
            hand.connection.close()
        self.hands = []


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """A process that is started within begins with Ctrl-C held back; here it arrives afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
