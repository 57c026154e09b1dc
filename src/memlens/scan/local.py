"""Local workers: pieces on several processes of this machine, each with the model loaded and a part of its own.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from memlens import errors
from memlens.errors import MemlensError, SettingError, WorkerError
from memlens.scan import worker_process as news
from memlens.scan.done import Piece
from memlens.scan.ledger import Ledger
from memlens.scan.work import ScanJob

_AHEAD = 2  # pieces that a worker has, so that it never waits for the driver
_LOOK = 0.2  # seconds between two looks whether somebody wants to stop
MOST_WORKERS = 1024

# sys.path as it is here: a test or a notebook may have added to it.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from memlens.scan.worker_process import serve; "
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
            news.WorkOrder(
                os.getpid(), self.recipe, job.settings, job.layers, job.windows, job.keeper, job.save_seconds
            )
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
                    hand.end(news.FINISH)
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
        for connection in wait(list(by_connection), _LOOK):
            hand = by_connection[connection]  # type: ignore[index]
            try:
                self._hear(hand, *hand.connection.recv())
            except (EOFError, ConnectionResetError):
                self._part_with(hand)

    def _hear(self, hand: _Hand, what: str, *details: Any) -> None:
        if what == news.READY:
            hand.is_ready = True
            self.ledger.started()
        elif what == news.BATCH:
            self.job.on_tokens(details[0])
        elif what == news.PIECE_DONE:
            hand.unsaved.append(hand.assigned.pop(0))
        elif what == news.SAVED:
            hand.unsaved.clear()
        elif what == news.NO_MODEL:
            hand.lacks_the_model = True
            if not self.recipe.copy:  # its files are gone or not what is in memory: workers get what is in memory
                self.recipe = self.recipe.as_copy(self.job.model)
                self.order = self._order()
        elif what == news.ERROR:
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
                hand.end(news.STOP)
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
