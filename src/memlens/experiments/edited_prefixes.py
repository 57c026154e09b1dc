"""Prefixes that are in no sentence, each run once, and the coefficients of chosen memories at their last positions.

This module knows a model and batches, but not why a prefix is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memlens.corpus.batches import Batch, cut_batches
from memlens.index.build import Progress, no_progress
from memlens.models.memory_model import MemoryModel

Wanted = tuple[NDArray[np.int64], NDArray[np.int64]]  # memories [n] of a layer and the prefix [n] for each


class EditedPrefixes:
    """A growing set of prefixes."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._prefixes: list[NDArray[np.int64]] = []

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, tokens: NDArray[np.int64]) -> int:
        """The prefix's id; an equal one keeps the id it has."""
        number = self._ids.setdefault(tokens.tobytes(), len(self._prefixes))
        if number == len(self._prefixes):
            self._prefixes.append(tokens)
        return number

    def coefficients(
        self,
        model: MemoryModel,
        wanted: Mapping[int, Wanted],
        *,
        bos: int | None,
        batch_tokens: int,
        progress: Progress = no_progress,
    ) -> dict[int, NDArray[np.float64]]:
        """For each layer the coefficients [n] that are wanted, in their order."""
        batches = cut_batches(list(enumerate(self._prefixes)), batch_tokens, bos)
        places = _Places(batches, len(self), bos)
        found = {layer: np.empty(len(memories), np.float64) for layer, (memories, _) in wanted.items()}
        by_batch = {layer: places.by_batch(prefixes, len(batches)) for layer, (_, prefixes) in wanted.items()}
        done = 0
        progress("local-edits", 0, len(self))
        for number, batch in enumerate(batches):

            def take(layer: int, block: torch.Tensor, number: int = number) -> None:  # [batch, pos, memories]
                chosen = by_batch[layer][number]
                memories, prefixes = (column[chosen] for column in wanted[layer])
                where = (places.row[prefixes], places.last[prefixes], memories)
                found[layer][chosen] = block[tuple(torch.from_numpy(i) for i in where)].double().cpu().numpy()

            with torch.inference_mode(), model.watch(take, list(wanted)):
                model.run_body(torch.from_numpy(batch.tokens))
            done += len(batch.sentences)
            progress("local-edits", done, len(self))
        return found


class _Places:
    """Where each prefix lies in its batch."""

    def __init__(self, batches: list[Batch], count: int, bos: int | None) -> None:
        self.batch, self.row, self.last = (np.empty(count, np.int64) for _ in range(3))
        shift = 0 if bos is None else 1
        for number, batch in enumerate(batches):
            self.batch[batch.sentences] = number
            self.row[batch.sentences] = np.arange(len(batch.sentences))
            self.last[batch.sentences] = shift + batch.lengths - 1

    def by_batch(self, prefixes: NDArray[np.int64], batches: int) -> list[NDArray[Any]]:
        """For each batch which of the wanted prefixes [n] are in it."""
        order = np.argsort(self.batch[prefixes], kind="stable")
        edges = np.searchsorted(self.batch[prefixes][order], np.arange(batches + 1))
        return [order[edges[number] : edges[number + 1]] for number in range(batches)]
