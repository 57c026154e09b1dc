"""Progress reports of long work."""

from typing import Protocol


class Progress(Protocol):
    """A function that is called with the amount of work done in a stage. `total` is None while it is unknown."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


def no_progress(stage: str, done: int, total: int | None) -> None:
    """Ignore the progress report."""
