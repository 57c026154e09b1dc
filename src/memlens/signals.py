"""Handling of Ctrl-C and SIGTERM.

    interruptible    for commands: the first signal raises Interrupted or Terminated, the second ends the process
    stop_on_signal   for scans: the first signal sets a flag; long loops check it whenever their state is complete

Python handles signals in the main thread only. In other threads, both context managers do nothing.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_RETRY_SECONDS = 0.05


class Interrupted(KeyboardInterrupt):
    """The user pressed Ctrl-C. `code` is the exit code of the command."""

    code = 128 + signal.SIGINT


class Terminated(Interrupted):
    """The process received SIGTERM."""

    code = 128 + signal.SIGTERM


_KINDS: dict[int, type[Interrupted]] = {signal.SIGINT: Interrupted, signal.SIGTERM: Terminated}


class Stopper:
    """A flag that is set by the first Ctrl-C or SIGTERM."""

    def __init__(self) -> None:
        self.signal = 0
        self._previous: dict[int, Any] = {}

    @property
    def stopped(self) -> bool:
        return self.signal != 0

    def check(self) -> None:
        """Raise Interrupted or Terminated if the flag is set."""
        if self.signal:
            raise _KINDS[self.signal]

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Set the flag on the first signal. The second signal ends a command; in a program, it calls its handler."""
        if not self.signal:
            self.signal = number
            return
        previous = self._previous[number]
        if previous is _interrupt:
            _end_process(number)
        if callable(previous):
            previous(number, frame)
        elif previous is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@contextmanager
def stop_on_signal() -> Iterator[Stopper]:
    """Set the flag of a Stopper on the first signal inside the block."""
    stopper = Stopper()
    with _handlers(stopper.handle) as stopper._previous:
        yield stopper


_received: list[int] = []  # at most one entry: the signal that this command received


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted or Terminated on the first signal inside the block, and end the process on the second.

    This is for commands. A library must not end its caller's process.
    """
    report = sys.unraisablehook

    def raise_again(event: Any) -> None:
        """Send the signal again if Python dropped its exception, as it does in weakref callbacks during imports."""
        if issubclass(event.exc_type, Interrupted) and _received:
            timer = threading.Timer(_RETRY_SECONDS, os.kill, (os.getpid(), _received.pop()))
            timer.daemon = True
            timer.start()
        else:
            report(event)

    with _handlers(_interrupt) as previous:
        if previous:
            sys.unraisablehook = raise_again
        try:
            yield
        except Exception as error:
            if _received:  # a library replaced our exception with its own
                raise _KINDS[_received[0]] from error
            raise
        finally:
            if previous:
                sys.unraisablehook = report
                _received.clear()


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _received:
        _end_process(number)
    _received.append(number)
    raise _KINDS[number]


def _end_process(number: int) -> None:
    try:
        os.write(2, b"memlens: stopped immediately; run the same command again to continue\n")
    finally:  # stderr may be closed
        os._exit(_KINDS[number].code)


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[dict[int, Any]]:
    """Handle SIGINT and SIGTERM inside the block. Yields the previous handlers, or {} outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    previous: dict[int, Any] = {number: signal.signal(number, handler) for number in _KINDS}
    try:
        yield previous
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)
