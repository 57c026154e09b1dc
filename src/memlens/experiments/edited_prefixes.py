"""Coefficients of edited prefixes: each prefix is run once, several passes at a time where batches are small.

An edited prefix is run once, whichever memories want it, not at all where it is the beginning of another one, and only
up to the deepest layer that wants it. Passes over small batches gain nothing from more threads, which wait for each
other after every product: they are run beside each other instead, each on a network of its own that shares the weights.
How many at once, and threads of each, depend on the model and on torch's threads alone, so that the numbers are the
same on every worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memlens.parallel import Progress, no_progress
from memlens.pool import Pool

if TYPE_CHECKING:
    from memlens.corpus.sentences import Batch
    from memlens.models.groups import CoefficientBlock
    from memlens.models.memory_model import MemoryModel

ROOM = 1 << 29  # bytes that passes beside each other may take
_COPIES = 8  # of a layer's coefficients that a pass holds, with what the heap keeps of freed ones
_ROUNDS = 4  # batches that a worker gets at a time, for each pass that it runs at once


class EditedPrefixes:
    """A growing set of prefixes."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}  # tokens, eight bytes each
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
        pool: Pool,
        wanted: Mapping[int, tuple[NDArray[np.int64], NDArray[np.int64]]],  # layer -> memories [n], prefix [n] for each
        passes: EditedPasses,
        *,
        bos: int | None,
        batch_tokens: int,
        progress: Progress = no_progress,
    ) -> dict[int, NDArray[np.float64]]:
        """The wanted coefficients [n] by layer, in their order."""
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
            chosen = {layer: own[number] for layer, own in by_batch.items() if len(own[number])}
            asked = {layer: [column[rows] for column in wanted[layer]] for layer, rows in chosen.items()}
            cells = {layer: (places.row[own], places.last[own], memories) for layer, (memories, own) in asked.items()}
            return EditedBatch(batches[number][0], batches[number][1].tokens, cells)

        size = passes.at_once * _ROUNDS
        groups = [range(first, min(first + size, len(batches))) for first in range(0, len(batches), size)]
        done, total = 0, int((deepest >= 0).sum())
        progress("local-edits", 0, total)
        answers = pool.map(passes, ([item(number) for number in group] for group in groups))
        for group, coefficients in zip(groups, answers, strict=True):
            for number, answer in zip(group, coefficients, strict=True):
                for layer, own in answer.items():
                    by_layer[layer][by_batch[layer][number]] = own
                done += len(batches[number][1].sentences)
            progress("local-edits", done, total)
        return by_layer

    def _hosts(self) -> NDArray[np.int64]:
        """The prefix that is run for each prefix: itself, or the longest that begins with it."""
        hosts = np.arange(len(self))
        ordered = sorted(self._ids)
        for tokens, longer in zip(ordered[-2::-1], ordered[:0:-1], strict=True):
            if longer.startswith(tokens):  # whatever begins with these tokens comes right after them
                hosts[self._ids[tokens]] = hosts[self._ids[longer]]
        return hosts

    def _cut(self, deepest: NDArray[np.int64], batch_tokens: int, bos: int | None) -> list[tuple[int, Batch]]:
        """Batches of prefixes with the same deepest layer, which is -1 where another prefix is run instead."""
        from memlens.corpus.sentences import cut_batches

        batches = []
        for layer in np.unique(deepest[deepest >= 0]).tolist():
            prefixes = [(number, self._prefixes[number]) for number in np.flatnonzero(deepest == layer).tolist()]
            batches += [(layer, batch) for batch in cut_batches(prefixes, batch_tokens, bos)]
        return batches


@dataclass(frozen=True, eq=False)
class EditedBatch:
    """A batch of edited prefixes, to be run on any worker that has the model."""

    deepest: int  # layer
    tokens: NDArray[np.int64]  # [batch, pos]
    cells: Mapping[int, tuple[NDArray[np.int64], ...]]  # layer -> rows, positions and memories [n] to be read


def run_edited(model: MemoryModel, batch: EditedBatch) -> dict[int, NDArray[np.float64]]:
    """layer -> the coefficients [n] of a batch's cells."""
    import torch

    by_layer = {layer: np.zeros(len(cells[0]), np.float64) for layer, cells in batch.cells.items()}

    def take(layer: int, block: CoefficientBlock) -> None:
        rows, positions, memories = batch.cells[layer]
        columns = memories - block.group.start
        inside = np.flatnonzero((columns >= 0) & (columns < block.group.size))
        if len(inside):
            cells = tuple(torch.from_numpy(index[inside]) for index in (rows, positions, columns))
            by_layer[layer][inside] = block.everywhere()[cells].double().cpu().numpy()

    with torch.inference_mode(), model.watch(take, sorted(batch.cells)):
        model.run_to(batch.deepest, torch.from_numpy(batch.tokens))
    return by_layer


class EditedPasses:
    """Runs batches of edited prefixes, some at once. Can be pickled until it was called."""

    def __init__(self, at_once: int, threads: int) -> None:
        self.at_once, self.threads = at_once, threads  # passes beside each other, and torch's threads of each
        self._models: list[MemoryModel] = []  # as many as there are passes; they share their weights

    @classmethod
    def plan(cls, model: MemoryModel, batch_tokens: int, threads: int) -> EditedPasses:
        """Choose the number of passes at once: as threads and room allow; one, with all threads, off the processor."""
        if model.device.type != "cpu":
            return cls(1, threads)
        widest = max(group.size for layer in model.layers for group in layer.groups)
        room = ROOM // (_COPIES * batch_tokens * widest * model.dtype.itemsize)
        at_once = max(1, min(threads, room))
        return cls(at_once, threads // at_once)

    def __call__(self, model: MemoryModel, batches: Sequence[EditedBatch]) -> list[dict[int, NDArray[np.float64]]]:
        """Run the batches; for each, layer -> the coefficients [n] of its cells."""
        import torch

        from memlens.vocab.kernels import use_threads

        if not self._models:
            self._models = _sharing_weights(model, self.at_once)
        if len(self._models) == 1:
            with use_threads(self.threads):
                return [run_edited(model, batch) for batch in batches]
        idle = list(self._models)

        def run(batch: EditedBatch) -> dict[int, NDArray[np.float64]]:
            clone = idle.pop()  # there is one for every thread
            try:
                return run_edited(clone, batch)
            finally:
                idle.append(clone)

        with (
            use_threads(self.threads),  # which threads that start within take over
            ThreadPoolExecutor(len(self._models), initializer=torch.set_num_threads, initargs=(self.threads,)) as pool,
        ):
            return list(pool.map(run, batches))


def _sharing_weights(model: MemoryModel, count: int) -> list[MemoryModel]:
    """The model and others that share its weights, `count` in all; the model alone where it cannot be copied."""
    try:
        return [model, *(model.sharing_weights() for _ in range(count - 1))]
    except Exception:  # anything an object's parts may raise that is pickled
        return [model]


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
        """The wanted prefixes [n] that are in each batch."""
        order = np.argsort(self.batch[prefixes], kind="stable")
        edges = np.searchsorted(self.batch[prefixes][order], np.arange(batches + 1))
        return [order[edges[number] : edges[number + 1]] for number in range(batches)]
