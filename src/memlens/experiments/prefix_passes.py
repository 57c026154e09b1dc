"""Forward passes over sampled prefixes: sentences in, what every layer did at the sampled positions out.

Sentences are fed up to their last sampled position, in batches; what is kept comes out in chunks of one size, as many
as one block of unembedding takes. This module knows nothing of what is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def _passes(model: MemoryModel, prefixes: Prefixes, layers: set[int]) -> Iterator[tuple[NDArray[np.int64], Positions]]:
    """One forward pass after another; sentences end at their last sampled position."""
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
        tokens = torch.from_numpy(batch.tokens)
        yield np.array(numbers, np.int64), record_positions(model, tokens, torch.tensor(places), layers)
