"""Coherence: whether the top tokens of a value are more similar to each other than those of a random direction.

This comparison is necessary because people see a theme in any ten words, even in the top tokens of a random vector.

1. The similarity of a list is the mean cosine over all pairs of its first ten tokens, in the model's output embedding.
2. The null distribution contains the similarities for 1,000 seeded random directions with the mean length of values.
   Random directions are read in the same way as the values of the layer, and their lists are drawn from the same
   allowed tokens.
3. The coherence of a value is the share of random directions with a smaller similarity. A list is clear if its
   coherence is at least 0.99, so that 1% of random directions have clear lists.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from memlens.models.lens import at_least_float32
from memlens.models.memory_model import MemoryModel
from memlens.stats import generator
from memlens.vocab.kernels import find_ends, score_blocks, thread_pool

LISTED = 10  # number of tokens in a list to compare
DIRECTIONS = 1000
_ROWS_AT_ONCE = 256
_COMPARED = 8  # layers that read this many directions identically share a null distribution


def list_similarities(embedding: NDArray[np.float32], tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the mean cosine over all pairs of the first LISTED tokens in each row, or 0 for a single token."""
    tokens = tokens[:, :LISTED]
    count = tokens.shape[1]
    similarities = np.zeros(len(tokens))
    if count < 2:
        return similarities
    for first in range(0, len(tokens), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        unit = embedding[tokens[rows]].astype(np.float64)  # [rows, count, d]
        squares = (unit**2).sum(-1, keepdims=True)
        unit /= np.sqrt(np.maximum(squares, 1e-30))
        alone = (unit**2).sum((1, 2))  # number of tokens whose embedding is not 0
        similarities[rows] = ((unit.sum(1) ** 2).sum(-1) - alone) / (count * (count - 1))
    return similarities


def random_similarities(
    model: MemoryModel, layers: Sequence[int], reading: str, listed: NDArray[np.int64] | None, seed: int = 0
) -> dict[int, NDArray[np.float64]]:
    """Return the sorted similarities of random directions for each layer.

    Layers with the same reading share an array. `listed` are the tokens that lists may contain, or None for all tokens.
    """
    random = generator(seed, "coherence").normal(size=(DIRECTIONS, model.width)).astype(np.float32)
    directions = torch.from_numpy(random / np.linalg.norm(random, axis=1, keepdims=True)).to(model.device)
    lengths = [float(at_least_float32(model.layers[layer].values).norm(dim=1).mean()) for layer in layers]
    directions *= float(np.mean(lengths)) if lengths else 1.0
    embedding = model.lens.embedding.cpu().numpy()
    computed: list[tuple[torch.Tensor, NDArray[np.float64]]] = []
    by_layer = {}
    for layer in layers:
        folded = model.lens.folded(directions[:_COMPARED], layer, reading)
        same = next((similarities for other, similarities in computed if torch.equal(other, folded)), None)
        if same is None:
            same = np.sort(_similarities_of(model, directions, layer, reading, listed, embedding))
            computed.append((folded, same))
        by_layer[layer] = same
    return by_layer


def _similarities_of(
    model: MemoryModel,
    directions: torch.Tensor,
    layer: int,
    reading: str,
    listed: NDArray[np.int64] | None,
    embedding: NDArray[np.float32],
) -> NDArray[np.float64]:
    def score(block: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return model.lens.value_scores(block, layer, reading, place)

    lists = []
    with thread_pool() as pool:
        for _rows, scores in score_blocks(directions, score, model.vocabulary):
            columns = scores if listed is None else scores.take(listed, 1)
            top = find_ends(columns, min(LISTED, columns.shape[1]), pool).top
            lists.append(top if listed is None else listed[top])
    return list_similarities(embedding, np.concatenate(lists))


def coherence(similarities: NDArray[np.float64], null: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of the sorted null distribution below each similarity."""
    return np.asarray(np.searchsorted(null, similarities, "left") / len(null))
