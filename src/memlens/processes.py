"""Worker processes on this machine: programs with a pipe, and a map over items that keeps their order.

A worker is a program of its own, so that the driver's main module is not run a second time. It gets an order (pickled
bytes) first, then whatever its driver sends, and answers with tuples that begin with one of the words below.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from memlens.errors import WorkerError

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
        time.sleep(0.2)
    os._exit(1)


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
