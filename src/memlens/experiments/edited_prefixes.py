"""Coefficients of edited prefixes.

Each edited prefix is run at most once, even if several memories need it. A prefix that is the beginning of another one
is not run: attention is causal, so its coefficients are read from the longer prefix. A pass stops at the deepest layer
that is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memlens.pool import Pool
from memlens.progress import Progress, no_progress

if TYPE_CHECKING:
    from memlens.corpus.sentences import Batch
    from memlens.models.groups import CoefficientBlock
    from memlens.models.memory_model import MemoryModel

_BATCHES_PER_ITEM = 4  # number of batches sent to a worker at a time


class EditedPrefixes:
    """A growing set of prefixes with their ids."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}  # tokens, with eight bytes each -> id
        self._prefixes: list[NDArray[np.int64]] = []

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, tokens: NDArray[np.int64]) -> int:
        """Return the id of the prefix. Equal prefixes share one id."""
        number = self._ids.setdefault(tokens.tobytes(), len(self._prefixes))
        if number == len(self._prefixes):
            self._prefixes.append(tokens)
        return number

    def coefficients(
        self,
        pool: Pool,
        wanted: Mapping[int, tuple[NDArray[np.int64], NDArray[np.int64]]],  # layer -> memories [n], prefix ids [n]
        *,
        threads: int,
        bos: int | None,
        batch_tokens: int,
        progress: Progress = no_progress,
    ) -> dict[int, NDArray[np.float64]]:
        """Run the prefixes and return {layer: coefficients [n]} in the order of `wanted`."""
        hosts = self._hosts()
        deepest = np.full(len(self), -1, np.int64)
        for layer, (_, prefixes) in wanted.items():
            np.maximum.at(deepest, hosts[prefixes], layer)
        batches = self._cut(deepest, batch_tokens, bos)
        lengths = np.array([len(prefix) for prefix in self._prefixes], np.int64)
        places = _Places([batch for _, batch in batches], hosts, lengths, bos)
        by_layer = {layer: np.zeros(len(memories), np.float64) for layer, (memories, _) in wanted.items()}
        by_batch = {layer: places.by_batch(prefixes, len(batches)) for layer, (_, prefixes) in wanted.items()}

        def item(number: int) -> EditedBatch:
            selected = {layer: indices[number] for layer, indices in by_batch.items() if len(indices[number])}
            columns = {layer: [column[rows] for column in wanted[layer]] for layer, rows in selected.items()}
            cells = {layer: (places.row[ids], places.last[ids], memories) for layer, (memories, ids) in columns.items()}
            return EditedBatch(batches[number][0], batches[number][1].tokens, cells)

        numbers = range(len(batches))
        groups = [numbers[first : first + _BATCHES_PER_ITEM] for first in numbers[::_BATCHES_PER_ITEM]]
        done, total = 0, int((deepest >= 0).sum())
        progress("local-edits", 0, total)
        work = partial(run_edited_batches, threads=threads)
        answers = pool.map(work, ([item(number) for number in group] for group in groups))
        for group, coefficients in zip(groups, answers, strict=True):
            for number, answer in zip(group, coefficients, strict=True):
                for layer, values in answer.items():
                    by_layer[layer][by_batch[layer][number]] = values
                done += len(batches[number][1].sentences)
            progress("local-edits", done, total)
        return by_layer

    def _hosts(self) -> NDArray[np.int64]:
        """Return, for each prefix, the prefix that is run for it: itself or the longest one that begins with it."""
        hosts = np.arange(len(self))
        ordered = sorted(self._ids)
        for tokens, longer in zip(ordered[-2::-1], ordered[:0:-1], strict=True):
            if longer.startswith(tokens):  # in sorted order, prefixes that begin with these tokens follow directly
                hosts[self._ids[tokens]] = hosts[self._ids[longer]]
        return hosts

    def _cut(self, deepest: NDArray[np.int64], batch_tokens: int, bos: int | None) -> list[tuple[int, Batch]]:
        """Return pairs (deepest layer, batch). Prefixes with layer -1 are not run: another prefix covers them."""
        from memlens.corpus.sentences import cut_batches

        batches = []
        for layer in np.unique(deepest[deepest >= 0]).tolist():
            prefixes = [(number, self._prefixes[number]) for number in np.flatnonzero(deepest == layer).tolist()]
            batches += [(layer, batch) for batch in cut_batches(prefixes, batch_tokens, bos)]
        return batches


@dataclass(frozen=True, eq=False)
class EditedBatch:
    """A batch of edited prefixes. Any worker that has the model can run it."""

    deepest: int  # last layer to run
    tokens: NDArray[np.int64]  # [batch, pos]
    cells: Mapping[int, tuple[NDArray[np.int64], ...]]  # layer -> rows, positions and memories [n] to read


def run_edited(model: MemoryModel, batch: EditedBatch) -> dict[int, NDArray[np.float64]]:
    """Run a batch and return {layer: coefficients [n] of its cells}."""
    import torch

    from memlens.models.lens import to_float64

    by_layer = {layer: np.zeros(len(cells[0]), np.float64) for layer, cells in batch.cells.items()}

    def take(layer: int, block: CoefficientBlock) -> None:
        rows, positions, memories = batch.cells[layer]
        columns = memories - block.group.start
        inside = np.flatnonzero((columns >= 0) & (columns < block.group.size))
        if len(inside):
            cells = tuple(torch.from_numpy(index[inside]) for index in (rows, positions, columns))
            by_layer[layer][inside] = to_float64(block.everywhere()[cells]).numpy()

    with torch.inference_mode(), model.watch(take, sorted(batch.cells)):
        model.run_to(batch.deepest, torch.from_numpy(batch.tokens))
    return by_layer


def run_edited_batches(
    model: MemoryModel, batches: Sequence[EditedBatch], threads: int
) -> list[dict[int, NDArray[np.float64]]]:
    """Run batches with this number of threads, so that all workers compute the same bits. See `run_edited`."""
    from memlens.vocab.kernels import use_threads

    with use_threads(threads):
        return [run_edited(model, batch) for batch in batches]


class _Places:
    """The batch, row and last position of each prefix."""

    def __init__(
        self, batches: Sequence[Batch], hosts: NDArray[np.int64], lengths: NDArray[np.int64], bos: int | None
    ) -> None:
        self.batch, self.row = np.zeros(len(hosts), np.int64), np.zeros(len(hosts), np.int64)
        for number, batch in enumerate(batches):
            self.batch[batch.sentences] = number
            self.row[batch.sentences] = np.arange(len(batch.sentences))
        self.batch, self.row = self.batch[hosts], self.row[hosts]
        self.last = lengths - (1 if bos is None else 0)

    def by_batch(self, prefixes: NDArray[np.int64], batches: int) -> list[NDArray[Any]]:
        """Return, for each batch, the indices into `prefixes` that belong to it."""
        order = np.argsort(self.batch[prefixes], kind="stable")
        edges = np.searchsorted(self.batch[prefixes][order], np.arange(batches + 1))
        return [order[edges[number] : edges[number + 1]] for number in range(batches)]
