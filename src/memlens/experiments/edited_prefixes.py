"""Coefficients of memories on edited prefixes.

Each edited prefix is run at most once, even if several memories need it. If a prefix is the beginning of another one,
only the longer prefix is run: attention is causal, so the coefficients of both can be read from it. A forward pass
stops at the deepest layer that is needed.
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


class EditedPrefixes:
    """A set of prefixes that are numbered in the order in which they are added."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}  # bytes of the tokens -> id
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

        done, total = 0, int((deepest >= 0).sum())
        progress("local-edits", 0, total)
        results = pool.map(partial(run_edited, threads=threads), map(item, range(len(batches))))
        for number, ((_, batch), coefficients) in enumerate(zip(batches, results, strict=True)):
            for layer, values in coefficients.items():
                by_layer[layer][by_batch[layer][number]] = values
            done += len(batch.sentences)
            progress("local-edits", done, total)
        return by_layer

    def _hosts(self) -> NDArray[np.int64]:
        """Return, for each prefix, the id of the longest prefix that begins with it (possibly its own id)."""
        hosts = np.arange(len(self))
        ordered = sorted(self._ids)
        for tokens, longer in zip(ordered[-2::-1], ordered[:0:-1], strict=True):
            if longer.startswith(tokens):  # in sorted order, longer prefixes directly follow their beginnings
                hosts[self._ids[tokens]] = hosts[self._ids[longer]]
        return hosts

    def _cut(self, deepest: NDArray[np.int64], batch_tokens: int, bos: int | None) -> list[tuple[int, Batch]]:
        """Return the batches as pairs (deepest layer to run, batch).

        Prefixes with layer -1 are left out: a longer prefix covers them.
        """
        from memlens.corpus.sentences import cut_batches

        batches = []
        for layer in np.unique(deepest[deepest >= 0]).tolist():
            prefixes = [(number, self._prefixes[number]) for number in np.flatnonzero(deepest == layer).tolist()]
            batches += [(layer, batch) for batch in cut_batches(prefixes, batch_tokens, bos)]
        return batches


@dataclass(frozen=True, eq=False)
class EditedBatch:
    """A batch of edited prefixes, which any worker with the model can run."""

    deepest: int  # last layer to run
    tokens: NDArray[np.int64]  # [batch, pos]
    cells: Mapping[int, tuple[NDArray[np.int64], ...]]  # layer -> rows, positions and memories [n] to read


def run_edited(model: MemoryModel, batch: EditedBatch, threads: int) -> dict[int, NDArray[np.float64]]:
    """Run a batch and return {layer: coefficients [n] of its cells}.

    All workers use the same number of threads, so that they compute the same bits.
    """
    import torch

    from memlens.models.lens import to_float64
    from memlens.vocab.kernels import use_threads

    by_layer = {layer: np.zeros(len(cells[0]), np.float64) for layer, cells in batch.cells.items()}

    def take(layer: int, block: CoefficientBlock) -> None:
        rows, positions, memories = batch.cells[layer]
        columns = memories - block.group.start
        inside = np.flatnonzero((columns >= 0) & (columns < block.group.size))
        if len(inside):
            cells = tuple(torch.from_numpy(index[inside]) for index in (rows, positions, columns))
            by_layer[layer][inside] = to_float64(block.everywhere()[cells]).cpu().numpy()

    with use_threads(threads), torch.inference_mode(), model.watch(take, sorted(batch.cells)):
        model.run_to(batch.deepest, torch.from_numpy(batch.tokens))
    return by_layer


class _Places:
    """Where each prefix runs: its batch, and its row and last position in this batch."""

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
        """Return, for each batch, the indexes into `prefixes` of the prefixes that run in this batch."""
        order = np.argsort(self.batch[prefixes], kind="stable")
        edges = np.searchsorted(self.batch[prefixes][order], np.arange(batches + 1))
        return [order[edges[number] : edges[number + 1]] for number in range(batches)]
