"""Scanner: feeds batches of sentences to the model and hands the coefficients of the candidate prefixes to the state.

One forward pass without the LM head; nothing is stored but what the state keeps. Where the sentences come from and
where the work runs is somebody else's business: this module knows a model, a batch and a state.

What there is to do in a scan and how one worker does it; the same code wherever it runs.

An executor (alone, local, on_ray) takes a ScanJob and sees to it that every piece ends up in a part that is kept. It
decides where pieces run and what becomes of a lost worker; what is computed is the same everywhere. Files are the
keeper's matter, which is handed in.

Alone: every piece in this process, one after another, with the model that is loaded already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from memlens.corpus.batches import Batch, cut_batches
from memlens.models.memory_model import MemoryModel
from memlens.scanner.executors import ModelRecipe
from memlens.scanner.kernels import Candidates
from memlens.scanner.layer import make_candidates
from memlens.scanner.settings import ScanSettings
from memlens.scanner.state import Done, Piece, ScanState


@dataclass(frozen=True)
class WindowSentence:
    """A sentence as the scan needs it; prefixes shorter than `fresh_from + 1` tokens are not candidates."""

    id: int
    tokens: NDArray[np.int64]
    fresh_from: int = 0


@dataclass(frozen=True)
class PlannedWindow:
    """A window cut into batches."""

    batches: list[Batch]
    by_id: dict[int, WindowSentence]


def bos_to_feed(model: MemoryModel, settings: ScanSettings) -> int | None:
    """The BOS id to put in front of every sentence, or None."""
    wanted = model.tokenizer.adds_bos if settings.bos == "auto" else settings.bos == "yes"
    return model.tokenizer.bos if wanted else None


class Scanner:
    """Runs windows of sentences through the model into a state."""

    def __init__(self, model: MemoryModel, settings: ScanSettings, state: ScanState) -> None:
        self.model, self.settings, self.state = model, settings, state
        self.bos = bos_to_feed(model, settings)

    def plan(self, window: Sequence[WindowSentence]) -> list[Batch]:
        """The batches of a window; sentences without any new prefix are not fed."""
        return plan_window(window, self.settings, self.bos)

    def scan_window(
        self, number: int, window: Sequence[WindowSentence], after_batch: Callable[[Batch], None] = lambda batch: None
    ) -> None:
        """Scan what is not done yet of one window; the state is whole after every batch."""
        planned = self.planned(window)
        for left in self.state.done.left_of(Piece(number, 0, len(planned.batches))):
            self.scan_piece(left, planned, after_batch)

    def planned(self, window: Sequence[WindowSentence]) -> PlannedWindow:
        return PlannedWindow(self.plan(window), {sentence.id: sentence for sentence in window})

    def scan_piece(
        self, piece: Piece, window: PlannedWindow, after_batch: Callable[[Batch], None] = lambda batch: None
    ) -> None:
        """Scan some batches of a window; the state is whole after every batch."""
        with torch.inference_mode(), _threads(self.settings.threads) as pool:
            for place in range(piece.first, piece.stop):
                self._scan_batch(window.batches[place], window.by_id, pool)
                self.state.done.add(piece.window, place, place + 1)
                after_batch(window.batches[place])

    def _scan_batch(self, batch: Batch, by_id: dict[int, WindowSentence], pool: ThreadPoolExecutor | None) -> None:
        candidates = self._candidates(batch, by_id)

        def take(layer: int, coefficients: torch.Tensor) -> None:  # [batch, pos, memories]
            self.state.layers[layer].update(coefficients.flatten(0, 1), candidates, pool)

        tokens = torch.from_numpy(batch.tokens).to(self.model.device)
        with self.model.watch(take, list(self.state.layers)):
            self.model.run_body(tokens)
        self.state.prefixes += len(candidates.rows)
        self.state.tokens += int(batch.lengths.sum())

    def _candidates(self, batch: Batch, by_id: dict[int, WindowSentence]) -> Candidates:
        """Which rows of the flattened batch [batch * pos] are candidate prefixes."""
        width, shift = batch.tokens.shape[1], 0 if self.bos is None else 1
        rows, sentences, positions = [], [], []
        for row, sentence in enumerate(batch.sentences.tolist()):
            first, last = candidate_range(by_id[sentence], self.settings, self.bos)
            position = np.arange(first, last)
            positions.append(position)
            rows.append(row * width + shift + position)
            sentences.append(np.full(last - first, sentence))
        return make_candidates(np.concatenate(rows), np.concatenate(sentences), np.concatenate(positions))


def plan_window(window: Sequence[WindowSentence], settings: ScanSettings, bos: int | None) -> list[Batch]:
    """The batches of a window, which depend on nothing else; sentences without any new prefix are not fed."""
    fed = []
    for sentence in window:
        first, last = candidate_range(sentence, settings, bos)
        if last > first:
            fed.append((sentence.id, sentence.tokens))
    return cut_batches(fed, settings.batch_tokens, bos)


def candidate_range(sentence: WindowSentence, settings: ScanSettings, bos: int | None) -> tuple[int, int]:
    """First and one past the last candidate position; -1 is the BOS-only prefix."""
    alone = settings.bos_prefix and bos is not None and sentence.fresh_from == 0
    first = -1 if alone else sentence.fresh_from
    return first, len(sentence.tokens) - (0 if settings.whole_sentence else 1)


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """Run torch with this many threads and lend a pool of as many to the compiled pass; restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    pool = ThreadPoolExecutor(count) if count > 1 else None
    try:
        yield pool
    finally:
        if pool is not None:
            pool.shutdown()
        torch.set_num_threads(before)


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


class Alone:
    """The executor without workers."""

    def run(self, job: ScanJob) -> None:
        worker = Worker(job.model, job.settings, job.layers)
        saver = Saver(job.keeper, job.keeper.new_name(), worker, job.save_seconds)

        def after_batch(batch: Batch) -> None:
            job.on_tokens(int(batch.lengths.sum()))
            if job.stop.stopped:
                saver.save()
            job.stop.check()
            saver.save_if_due()

        for piece in job.pieces:
            worker.scan(piece, job.windows.window, after_batch)
        saver.save()
