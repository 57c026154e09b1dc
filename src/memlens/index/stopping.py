"""Stopping at a good moment: the first Ctrl-C (or TERM) asks, a second one insists.

While inside `stop_on_signal`, a signal only sets a flag; long work checks it where its state is whole. Outside of the
main thread signals cannot be handled, and nothing changes. This module knows nothing of what is being stopped.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopper:
    """Has somebody asked to stop?"""

    def __init__(self) -> None:
        self.stopped = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True

    def check(self) -> None:
        """Stop here, if asked to."""
        if self.stopped:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signal() -> Iterator[Stopper]:
    stopper = Stopper()
    if threading.current_thread() is not threading.main_thread():
        yield stopper
        return
    before = {number: signal.signal(number, stopper.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopper
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
