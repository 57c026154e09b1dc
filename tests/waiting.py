"""Waiting for an event of another thread or process, on a machine of any speed."""

import time
from collections.abc import Callable

PATIENCE = 300.0  # seconds; far more than any event needs


def wait_until(holds: Callable[[], bool], event: str) -> None:
    """Return as soon as the condition holds. Fails after five minutes."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"{event}: this has not happened in {PATIENCE:g} seconds"
        time.sleep(0.01)
