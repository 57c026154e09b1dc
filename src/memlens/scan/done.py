"""Which batches of the plan are done, and the pieces that are left to do.

A piece is a short run of consecutive batches of one window. Where pieces begin and end depends on the batch plan only,
never on who works on them, so that any split of the work can be continued by any other. This module knows numbers
only: no model, no text, no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.errors import IndexFolderError, SettingError

PIECE = 2  # batches: a corpus of a few windows still splits evenly over a handful of workers


class Piece(NamedTuple):
    """Batches [first, stop) of a window's plan."""

    window: int
    first: int
    stop: int

    @property
    def key(self) -> tuple[int, int]:
        """The same for a piece and for what is left of it."""
        return self.window, self.first // PIECE


class Done:
    """A set of batches, kept as runs, so that it stays small however long the corpus is."""

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int]]] = {}  # window -> disjoint runs [first, stop), ascending

    def add(self, window: int, first: int, stop: int) -> None:
        """Note batches as done; one that is done already is refused."""
        if stop <= first:
            return
        joined: list[tuple[int, int]] = []
        for a, b in sorted([*self._runs.get(window, []), (first, stop)]):
            if joined and a < joined[-1][1]:
                raise IndexFolderError(
                    f"batch {a} of window {window} of the corpus is in two of the parts; give each part once"
                )
            if joined and a == joined[-1][1]:
                joined[-1] = (joined[-1][0], b)
            else:
                joined.append((a, b))
        self._runs[window] = joined

    def merge(self, other: Done) -> None:
        for window, runs in other._runs.items():
            for first, stop in runs:
                self.add(window, first, stop)

    def left_of(self, piece: Piece) -> list[Piece]:
        """What of a piece is not done."""
        left, first = [], piece.first
        for a, b in self._runs.get(piece.window, []):
            if b <= first or a >= piece.stop:
                continue
            if a > first:
                left.append(Piece(piece.window, first, a))
            first = b
        if first < piece.stop:
            left.append(Piece(piece.window, first, piece.stop))
        return left

    def is_all_of(self, batches: Sequence[int] | NDArray[np.integer[Any]]) -> bool:
        """Is every batch of every window done? `batches` says how many each window has."""
        return all(not self.left_of(Piece(w, 0, int(count))) for w, count in enumerate(batches))

    def array(self) -> NDArray[np.int64]:
        """[runs, 3]: window, first, stop; the same for equal sets."""
        rows = [(window, a, b) for window in sorted(self._runs) for a, b in self._runs[window]]
        return np.array(rows, np.int64).reshape(-1, 3)

    @classmethod
    def from_array(cls, rows: NDArray[np.int64]) -> Done:
        done = cls()
        for window, first, stop in rows.reshape(-1, 3).tolist():
            done.add(window, first, stop)
        return done

    def __len__(self) -> int:
        return sum(b - a for runs in self._runs.values() for a, b in runs)


def all_pieces(batches: Sequence[int] | NDArray[np.integer[Any]]) -> Iterator[Piece]:
    """The pieces of a plan in its order; `batches` says how many each window has."""
    for window, count in enumerate(batches):
        for first in range(0, int(count), PIECE):
            yield Piece(window, first, min(first + PIECE, int(count)))


def pieces_left(
    batches: Sequence[int] | NDArray[np.integer[Any]], done: Done, share: Share | None = None
) -> Iterator[Piece]:
    """The pieces of a plan, or of a share of it, that are not done; of half done ones the rest."""
    for number, piece in enumerate(all_pieces(batches)):
        if share is None or share.has(number):
            yield from done.left_of(piece)


class Share(NamedTuple):
    """Part `number` (from 1) of `of` equal parts of a scan: every so manyth piece."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """`3/16`: the third of sixteen."""
        number, slash, of = text.strip().partition("/")
        if not slash or not all(n.isascii() and n.isdecimal() and len(n) < 7 for n in (number, of)):
            raise SettingError(f"--shard is '{text}'; write it like 3/16: the third of sixteen parts")
        if not 1 <= int(number) <= int(of):
            raise SettingError(f"--shard is '{text}'; the first number must be 1 to {of}")
        return cls(int(number), int(of))

    def has(self, piece: int) -> bool:
        return piece % self.of == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"
