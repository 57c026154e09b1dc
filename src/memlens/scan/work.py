"""What there is to do in a scan and how one worker does it; the same code wherever it runs.

An executor (alone, local, on_ray) takes a ScanJob and sees to it that every piece ends up in a part that is kept. It
decides where pieces run and what becomes of a lost worker; what is computed is the same everywhere. Files are the
keeper's matter, which is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from memlens.corpus.batches import Batch
from memlens.models.memory_model import MemoryModel
from memlens.scan.done import Done, Piece
from memlens.scan.recipe import ModelRecipe
from memlens.scan.scanner import PlannedWindow, Scanner, WindowSentence
from memlens.scan.settings import ScanSettings
from memlens.scan.state import ScanState

SAVE_SECONDS = 15.0  # at least so long between two saves,
_SAVE_SHARE = 50  # and at least so many times as long as a save takes


class Windows(Protocol):
    """The sentences of a corpus by window; can be pickled."""

    def window(self, number: int) -> list[WindowSentence]: ...


class Keeper(Protocol):
    """Keeps the states of workers as parts of a scan; can be pickled."""

    def new_name(self) -> str:
        """A name that no part has or ever had."""

    def keep(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put a state in the place of what that part was before; whole, or an error and the old one stays."""

    def done_in(self, name: str) -> Done:
        """What a part holds; nothing if there is none of that name."""

    def writing(self) -> AbstractContextManager[None]:
        """Within, nobody else starts to write parts of this scan, even if the driver dies."""


class Stop(Protocol):
    """Has somebody asked to stop?"""

    @property
    def stopped(self) -> bool: ...

    def check(self) -> None:
        """Raise KeyboardInterrupt, if asked to."""


@dataclass(frozen=True)
class ScanJob:
    """Pieces of a scan that are to be done for some layers, with all that is needed for it."""

    model: MemoryModel
    recipe: Callable[[], ModelRecipe]
    settings: ScanSettings
    layers: tuple[int, ...]
    pieces: Iterable[Piece]
    windows: Windows
    keeper: Keeper
    on_tokens: Callable[[int], None]  # told how many tokens were fed, batch by batch
    stop: Stop
    save_seconds: float = SAVE_SECONDS


class Executor(Protocol):
    """Where pieces run."""

    def run(self, job: ScanJob) -> None:
        """Do every piece and keep the results, or raise; what was kept stays kept."""


class Worker:
    """Scans pieces into a state of its own."""

    def __init__(self, model: MemoryModel, settings: ScanSettings, layers: Sequence[int]) -> None:
        self.model, self.settings, self.layers = model, settings, layers
        self.scanner = Scanner(model, settings, ScanState.start(model, layers, settings))
        self._planned: tuple[int, PlannedWindow] | None = None  # the latest window: its pieces come in a row

    @property
    def state(self) -> ScanState:
        return self.scanner.state

    def scan(
        self, piece: Piece, window: Callable[[int], Sequence[WindowSentence]], after_batch: Callable[[Batch], None]
    ) -> None:
        """Do one piece; the state is whole after every batch."""
        if self._planned is None or self._planned[0] != piece.window:
            self._planned = (piece.window, self.scanner.planned(window(piece.window)))
        self.scanner.scan_piece(piece, self._planned[1], after_batch)

    def take_state(self) -> ScanState:
        """What was learned since the last time; the next piece begins anew."""
        taken, self.scanner.state = self.state, ScanState.start(self.model, self.layers, self.settings)
        return taken


class SaveTimes:
    """When to save: seldom enough to cost next to nothing. Does not care what day it is."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.next_save = time.monotonic() + seconds

    def is_due(self) -> bool:
        return time.monotonic() >= self.next_save

    def saved(self, began: float) -> None:
        """A save that began then, by time.monotonic(), has ended."""
        now = time.monotonic()
        self.next_save = now + max(self.seconds, _SAVE_SHARE * (now - began))


class Saver:
    """Keeps a worker's state under one name, at intervals."""

    def __init__(self, keeper: Keeper, name: str, worker: Worker, seconds: float) -> None:
        self.keeper, self.name, self.worker = keeper, name, worker
        self.times = SaveTimes(seconds)
        self._saved = 0

    def save_if_due(self) -> bool:
        due = self.times.is_due()
        if due:
            self.save()
        return due

    def save(self) -> None:
        """Keep the state, unless that very state is kept already."""
        held = len(self.worker.state.done)
        if held == self._saved:
            return
        began = time.monotonic()
        self.keeper.keep(self.name, self.worker.state.arrays())
        self._saved = held
        self.times.saved(began)
