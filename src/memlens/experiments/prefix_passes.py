"""Forward passes over sampled prefixes: sentences in, what every layer did at the sampled positions out.

Sentences are fed up to their last sampled position, in batches; what is kept comes out in chunks of one size, as many
as one block of unembedding takes. This module knows nothing of what is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from memlens.corpus import cut_batches
from memlens.experiments.prefixes import Prefixes
from memlens.models.memory_model import MemoryModel
from memlens.models.positions import Positions, record_positions

_BATCH_TOKENS = 2048
_CHUNK_BYTES = 256 << 20  # states and coefficients of one chunk; a smaller chunk is taken where a model is large


def chunk_rows(model: MemoryModel, rows: int) -> int:
    a_prefix = sum(4 * (3 * model.width + block.memories) for block in model.layers)
    return max(1, min(rows, _CHUNK_BYTES // a_prefix))


def run_chunks(
    model: MemoryModel, prefixes: Prefixes, layers: set[int], rows: int
) -> Iterator[tuple[NDArray[np.int64], Positions]]:
    """Which prefixes, and what the model did at them; all chunks but the last have the same size."""
    waiting: list[Positions] = []
    numbers = np.zeros(0, np.int64)
    for batch_numbers, positions in _passes(model, prefixes, layers):
        waiting.append(positions)
        numbers = np.concatenate([numbers, batch_numbers])
        if len(numbers) < rows:
            continue
        joined = Positions.join(waiting)
        whole = len(numbers) - len(numbers) % rows
        for first in range(0, whole, rows):
            yield numbers[first : first + rows], joined[first : first + rows]
        waiting, numbers = [joined[whole:].copy()], numbers[whole:]
        del joined
    if len(numbers):
        yield numbers, Positions.join(waiting)


def run_chunk(
    model: MemoryModel, prefixes: Prefixes, layers: set[int], rows: int, number: int
) -> tuple[NDArray[np.int64], Positions]:
    """Chunk `number` of those that run_chunks gives, by itself: only the batches that it lies in are run."""
    first, last, done = number * rows, (number + 1) * rows, 0
    numbers, positions = [], []
    for planned in _planned(prefixes):
        begin, done = done, done + len(planned.numbers)
        if done > first and begin < last:
            part = slice(max(first - begin, 0), min(last, done) - begin)
            numbers.append(planned.numbers[part])
            positions.append(_run(model, planned, layers)[part])
    return np.concatenate(numbers), Positions.join(positions)


@dataclass(frozen=True)
class _Planned:
    """One forward pass: which prefixes, and where they are in its flattened tokens [batch, pos]."""

    numbers: NDArray[np.int64]
    places: list[int]
    tokens: NDArray[np.int64]


def _passes(model: MemoryModel, prefixes: Prefixes, layers: set[int]) -> Iterator[tuple[NDArray[np.int64], Positions]]:
    """One forward pass after another."""
    for planned in _planned(prefixes):
        yield planned.numbers, _run(model, planned, layers)


def _run(model: MemoryModel, planned: _Planned, layers: set[int]) -> Positions:
    return record_positions(model, torch.from_numpy(planned.tokens), torch.tensor(planned.places), layers)


def _planned(prefixes: Prefixes) -> Iterator[_Planned]:
    """The forward passes in their order; sentences end at their last sampled position."""
    ends = np.full(len(prefixes.sentences), -1, np.int64)
    np.maximum.at(ends, prefixes.rows, prefixes.positions)
    fed = [(row, sentence.tokens[: ends[row] + 1]) for row, sentence in enumerate(prefixes.sentences)]
    of_sentence: list[list[int]] = [[] for _ in fed]
    for number, row in enumerate(prefixes.rows.tolist()):
        of_sentence[row].append(number)
    shift = 0 if prefixes.bos is None else 1
    for batch in cut_batches(fed, _BATCH_TOKENS, prefixes.bos):
        numbers, places = [], []
        for line, row in enumerate(batch.sentences.tolist()):
            for number in of_sentence[row]:
                numbers.append(number)
                places.append(line * batch.tokens.shape[1] + shift + int(prefixes.positions[number]))
        yield _Planned(np.array(numbers, np.int64), places, batch.tokens)
