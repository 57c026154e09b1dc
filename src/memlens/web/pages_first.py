"""Pages before the model: its loading begins, and goes on from step to step, while nobody opens a page.

Loading takes seconds of Python, mostly for importing, which pages would have to share the interpreter with. A page that
needs the model ends the wait.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

_AFTER, _LONGEST, _IN_ALL = 1.0, 2.0, 10.0  # seconds that loading waits: after a page, for a long one, for all of them
_STEP = 0.02


class PagesFirst:
    """Requests are counted on the server's event loop; one thread loads, and waits between its steps."""

    def __init__(self) -> None:
        self._answered = 0  # requests, now
        self._since = 0.0  # when the first of them came, or the last was answered
        self._left = _IN_ALL

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around the answer to a request."""
        if not self._answered:
            self._since = time.monotonic()
        self._answered += 1
        try:
            yield
        finally:
            self._answered -= 1
            if not self._answered:
                self._since = time.monotonic()

    def hurry(self) -> None:
        """Somebody has asked for something that needs the model."""
        self._left = 0.0

    def wait_for(self, thread: Thread) -> None:
        """Wait until a thread has ended, or somebody needs the model."""
        while thread.is_alive() and self._left > 0:
            thread.join(_STEP)

    def wait(self) -> None:
        """Wait until the last page is some moments old, or one takes long; _IN_ALL seconds at most in all."""
        while self._left > 0 and time.monotonic() - self._since < (_LONGEST if self._answered else _AFTER):
            time.sleep(_STEP)
            self._left -= _STEP
