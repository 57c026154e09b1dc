"""Ledger: which pieces wait, and how often each was lost with a worker. The same for every kind of worker."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from memlens.errors import WorkerError
from memlens.scan.done import Piece

RETRIES = 3  # so often a piece may be lost, and so often in a row a worker may fail to start


class Ledger:
    """Pieces on their way to being done."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._fresh = iter(pieces)
        self._again: deque[Piece] = deque()
        self._lost: Counter[tuple[int, int]] = Counter()
        self._failed_starts = 0

    def take(self) -> Piece | None:
        """The next piece to do; None while there is none."""
        if self._again:
            return self._again.popleft()
        return next(self._fresh, None)

    def has_more(self) -> bool:
        """Is there a piece to take?"""
        piece = self.take()
        if piece is not None:
            self._again.appendleft(piece)
        return piece is not None

    def put_back(self, pieces: Iterable[Piece]) -> None:
        """Pieces that were handed out but not begun."""
        self._again.extend(pieces)

    def lose(self, pieces: Iterable[Piece], reason: str) -> None:
        """Pieces that a lost worker had not kept; they are done again, unless that has been tried often enough."""
        for piece in pieces:
            self._lost[piece.key] += 1
            if self._lost[piece.key] > RETRIES:
                raise WorkerError(
                    f"{reason}, and so did {RETRIES} before it at the same place (window {piece.window}); "
                    "what was done is kept: mend the cause (often memory: try fewer --workers) and run the same "
                    "command again"
                )
            self._again.append(piece)

    def started(self) -> None:
        self._failed_starts = 0

    def fail_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts > RETRIES:
            raise WorkerError(
                f"{reason} while starting, {self._failed_starts} times in a row; what was done is kept: mend the cause "
                "(often memory: try fewer --workers) and run the same command again"
            )
