"""How far a stage is, as it is told to whoever wants to know. Knows nothing of stages or screens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how far a stage is; `total` is None while nobody can know."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


def no_progress(stage: str, done: int, total: int | None) -> None:
    """For callers who do not look."""
