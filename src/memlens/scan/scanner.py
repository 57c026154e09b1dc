"""Scanner: feeds batches of sentences to the model and hands the coefficients of the candidate prefixes to the state.

One forward pass without the LM head; nothing is stored but what the state keeps. Where the sentences come from and
where the work runs is somebody else's business: this module knows a model, a batch and a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from memlens.corpus.batches import Batch, cut_batches
from memlens.models.memory_model import MemoryModel
from memlens.scan.blocks import Candidates
from memlens.scan.done import Piece
from memlens.scan.settings import ScanSettings
from memlens.scan.state import ScanState
from memlens.scan.top_triggers import make_candidates


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
