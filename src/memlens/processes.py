"""Worker processes on this machine: programs with a pipe, and a map over items that keeps their order.

A worker is a program of its own, so that the driver's main module is not run a second time. It gets an order (pickled
bytes) first, then whatever its driver sends, and answers with tuples that begin with one of the words below.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from memlens import errors
from memlens.errors import MemlensError, WorkerError

READY, ANSWER, ERROR, BUG = "ready", "answer", "error", "bug"
LOOK = 0.2  # seconds between two looks whether the driver is still there, or somebody wants to stop
RETRIES = 3  # so often the same work may be lost with its worker, and so often in a row a worker may fail to start
GONE = (EOFError, BrokenPipeError, ConnectionResetError)  # what a pipe raises whose other end is closed
AHEAD = 2  # items that a worker has, so that it never waits for the driver

# sys.path as it is here: a test or a notebook may have added to it. A worker is ours, also where the driver is somebody
# else's process, which keeps its environment.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from memlens.own_process import prepare_process; prepare_process(); "
    "from {module} import serve; serve(int(sys.argv[1]))"
)


def usable_cores() -> int:
    """The cores this process may use; the default number of threads."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def leave_signals_to_driver() -> None:
    """Ignore Ctrl-C and the like in this worker: the driver says when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def leave_with(driver: int) -> None:
    """End this process when the driver has ended; files are written beside and renamed, so that is safe anywhere."""
    while os.getppid() == driver:
        time.sleep(LOOK)
    os._exit(1)


def error_message(error: Exception) -> tuple[str, ...]:
    if isinstance(error, GONE):
        raise error
    if isinstance(error, MemlensError):
        return (ERROR, type(error).__name__, str(error))
    if isinstance(error, MemoryError):
        return (ERROR, "WorkerError", "a worker process has not enough memory; try fewer --workers or --batch-tokens")
    return (BUG, "".join(traceback.format_exception(error)))


def worker_error(what: str, *details: str) -> Exception:
    """The error that a worker has sent a message about."""
    if what == ERROR:
        kind: type[MemlensError] = getattr(errors, details[0], MemlensError)
        return kind(details[1])
    return RuntimeError(f"a worker process failed:\n{details[0]}")


def received(connection: Connection) -> Iterator[Any]:
    """Yield the messages of the driver until it is gone.

    A thread reads, so that the driver can always send, also while a large answer waits to be read by it.
    """
    inbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    while message := inbox.get():
        yield message[0]


def _receive(connection: Connection, inbox: "SimpleQueue[tuple[Any, ...]]") -> None:
    with suppress(*GONE, OSError):
        while True:
            inbox.put((connection.recv(),))
    inbox.put(())


def start_program(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run `serve` of a module as a program of its own; the process and this end of its pipe.

    To be called with signals held back until somebody is sure to end it.
    """
    here, there = Pipe()
    with there:
        # -P: no module is taken from the current folder, which may be a checkpoint of somebody else's
        command = [
            sys.executable,
            "-P",
            "-c",
            _PROGRAM.format(module=module),
            str(there.fileno()),
            json.dumps(sys.path),
        ]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[there.fileno()]
            )
        except OSError as error:  # else it would be told as trouble with the file that is being written
            here.close()
            raise WorkerError(
                f"the system starts no worker process ({error.strerror or error}); try fewer --workers and --threads"
            ) from error
    return process, here


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A process that is started within begins with Ctrl-C held back; here it arrives afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerProcess:
    """One worker as the driver sees it."""

    def __init__(self, number: int, name: str, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self.number, self.name, self.process, self.connection = number, name, process, connection
        self.is_ready = False
        self.is_ending = False
        self.lacks_the_model = False
        self.assigned: list[Any] = []  # sent, in this order: ranges of batches, or numbers of items
        self.unsaved: list[Any] = []  # ranges of batches that are done, but not in the part yet

    def send(self, message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is noticed where its news are read
            self.connection.send(message)

    def end(self, message: str) -> None:
        if not self.is_ending:
            self.is_ending = True
            self.send(message)

    def how_it_ended(self) -> str:
        code = self.process.wait()
        if code >= 0:
            return f"worker process {self.number} ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"worker process {self.number} was ended by {name}"


def listen(
    workers: Sequence[WorkerProcess],
    hear: Callable[..., None],
    remove: Callable[[WorkerProcess], None],
    seconds: float | None = None,
) -> None:
    """Wait for news of workers, for so many seconds at most: what they send goes to `hear`, their end to `remove`."""
    by_connection = {worker.connection: worker for worker in workers}
    for connection in wait(list(by_connection), seconds):
        worker = by_connection[connection]  # type: ignore[index]
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):  # an OSError where it was killed in the middle of a message
            remove(worker)
        else:
            hear(worker, *message)


class ProcessMap:
    """Answers of worker programs to items, in the order of the items; few of both are in memory at a time.

    A worker gets the `order` and says READY, then gets (number, item) and answers (ANSWER, number, answer). An item
    whose worker died goes to another one, a few times. `most` bounds the sum of the items' sizes as `size_of` tells
    them, of items that wait and of answers that nobody has taken yet; one item is always let in. A subclass may let
    this process answer items, too (`answer_here`): as one of the `workers` (`here` is 1), or until one is ready.
    """

    here = 0  # workers that are this process

    def __init__(
        self,
        module: str,
        workers: int,
        *,
        size_of: Callable[[Any], int] = lambda item: 0,
        most: int = 1,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.module, self.size, self.size_of, self.most = module, workers, size_of, most
        self.look = look  # called at least every LOOK seconds; may raise
        self.workers: list[WorkerProcess] = []
        self.begun = self.lost = 0
        self.waiting: dict[int, Any] = {}  # number -> item that is not answered yet
        self.unassigned: deque[int] = deque()
        self.answers: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}  # of what waits and of what is answered

    def order(self, number: int) -> bytes:
        """The first message to worker `number`."""
        raise NotImplementedError

    def message(self, number: int) -> Any:
        """The message that asks a worker for the answer to an item."""
        return number, self.waiting[number]

    def in_order(self, items: Iterable[Any]) -> Iterator[Any]:
        given, following = enumerate(items), 0
        while True:
            self._supply(given)
            if following in self.answers:
                del self.sizes[following]
                yield self.answers.pop(following)
                following += 1
            elif self.waiting:
                listen(self.workers, self.hear, self._remove, 0 if self._work_here() else LOOK)
                self.look()
            else:
                return

    def _work_here(self) -> bool:
        """Answer one item that no worker has, where this process does so."""
        if not self.unassigned or not self.works_here():
            return False
        number = self.unassigned.popleft()
        self.answers[number] = self.answer_here(self.waiting[number])
        del self.waiting[number]
        return True

    def works_here(self) -> bool:
        """Does this process answer items now?"""
        return self.here > 0

    def answer_here(self, item: Any) -> Any:
        """The answer, computed in this process."""
        raise NotImplementedError

    def _supply(self, given: Iterator[tuple[int, Any]]) -> None:
        """Take some items more, start workers for them, and give workers that have too few."""
        while len(self.sizes) < 2 * AHEAD * self.size and sum(self.sizes.values()) < self.most:
            number, item = next(given, (-1, None))
            if number < 0:
                break
            self.waiting[number], self.sizes[number] = item, self.size_of(item)
            self.unassigned.append(number)
        # All begin before the first gets its order, which waits until that has imported what it needs.
        lacking = min(self.size, len(self.waiting)) - self.here - len(self.workers)
        for worker in [self._start() for _ in range(lacking)]:
            with suppress(BrokenPipeError, ConnectionResetError):
                worker.connection.send_bytes(self.order(worker.number))
        for worker in self.workers:
            while self.unassigned and worker.is_ready and len(worker.assigned) < AHEAD:
                worker.assigned.append(self.unassigned.popleft())
                worker.send(self.message(worker.assigned[-1]))

    def _start(self) -> WorkerProcess:
        with signals_held_back():
            process, connection = start_program(self.module)
            worker = WorkerProcess(self.begun, "", process, connection)
            self.workers.append(worker)  # from here on it is ended whatever happens
        self.begun += 1
        return worker

    def hear(self, worker: WorkerProcess, what: str, *details: Any) -> None:
        """A message of a worker."""
        if what == ANSWER:
            number, self.answers[details[0]] = details
            worker.assigned.remove(number)
            del self.waiting[number]
        elif what == READY:
            worker.is_ready = True
        else:
            raise worker_error(what, *details)

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
        self.waiting, self.answers, self.sizes, self.unassigned = {}, {}, {}, deque()
