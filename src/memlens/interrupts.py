"""Ctrl-C and TERM: work stops where its state is whole, and never inside compiled code.

Python runs a signal's handler wherever C code asks for it, also on the way out of a compiled loop, where an exception
is lost, reported as a SystemError or fatal. So handlers here do not raise:

    stop_on_signal   the first signal sets a flag, which long work checks where its state is whole
    interruptible    a second thread has the exception raised between two bytecodes of the main thread, and by a handler
                     only where the main thread waits for a lock, a socket or a process and runs no bytecode

Outside of the main thread signals cannot be handled, and nothing changes.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 0.3  # seconds in which the main thread should have noticed
_WAITING = ("threading.py", "selectors.py", "subprocess.py", "socket.py", "ssl.py")  # files of Python that wait in C
_ENOUGH = 0  # in the pipe: no more signals are expected


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `code` is the exit code that goes with it."""

    code = 128 + signal.SIGINT


class Terminated(Interrupted):
    """TERM."""

    code = 128 + signal.SIGTERM


_KINDS: dict[int, type[Interrupted]] = {signal.SIGINT: Interrupted, signal.SIGTERM: Terminated}


class Stopper:
    """Has somebody asked to stop?"""

    def __init__(self) -> None:
        self.signal = 0
        self.before: dict[int, Any] = {}

    @property
    def stopped(self) -> bool:
        return self.signal != 0

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; a second one is what it was before."""
        if self.signal and callable(self.before.get(number)):
            self.before[number](number, frame)
        self.signal = self.signal or number

    def check(self) -> None:
        """Stop here, if asked to."""
        if self.signal:
            raise _KINDS[self.signal]


@contextmanager
def stop_on_signal() -> Iterator[Stopper]:
    """Signals set the stopper's flag."""
    stopper = Stopper()
    with _handled_by(stopper.ask) as before:
        stopper.before = before
        yield stopper


@contextmanager
def interruptible() -> Iterator[None]:
    """The first signal raises Interrupted or Terminated in the main thread; a second one ends the process at once.

    A library that notices the signal itself and fails in its own words becomes the same exception. For programs, not
    for libraries: somebody else's process must not be ended.
    """
    asked: list[Interrupted] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    wake = threading.Event()
    watcher = threading.Thread(target=_raise_in, args=(threading.get_ident(), reader, wake), daemon=True)
    watcher.start()

    def ask(number: int, frame: FrameType | None) -> None:
        if wake.is_set():
            wake.clear()
            raise _KINDS[number]
        asked.append(_KINDS[number]())
        os.write(writer, bytes([number]))

    try:
        with _handled_by(ask):
            yield
    except Exception as error:
        if asked:
            raise asked[0] from error
        raise
    finally:
        os.write(writer, bytes([_ENOUGH]))
        watcher.join()
        os.close(reader)
        os.close(writer)


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[dict[int, Any]]:
    """Signals go to `handler`; what they went to before comes back, and again at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield before
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _raise_in(thread: int, reader: int, wake: threading.Event) -> None:
    """Wait for signals; the first is raised in `thread`, the second ends the process.

    Raised between two bytecodes, the exception does not reach a thread that waits, and CPython may give it to a thread
    that is just being started by this one, which then waits forever: one that waits is woken by its signal.
    """
    from_signal = os.read(reader, 1)[0]
    if from_signal == _ENOUGH:
        return
    import ctypes

    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_in(ctypes.c_ulong(thread), ctypes.py_object(_KINDS[from_signal]))
    while not select.select([reader], [], [], _PATIENCE)[0]:
        frame = sys._current_frames().get(thread)
        if frame is not None and Path(frame.f_code.co_filename).name in _WAITING:
            wake.set()
            signal.pthread_kill(thread, from_signal)
    again = os.read(reader, 1)[0]
    if again == _ENOUGH:
        raise_in(ctypes.c_ulong(thread), None)  # too late: what was asked to stop is done
        return
    print("memlens: stopped at once; run the same command again to continue", file=sys.stderr, flush=True)
    os._exit(_KINDS[again].code)
