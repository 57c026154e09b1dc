"""tokens.parquet: count, embedding norm, training state and classes of each token.

A token is undertrained if it was rare in the training text. The softmax then pushes its output embedding in a direction
that all such tokens share (Land and Bartolo, 2024, https://arxiv.org/abs/2405.05417), or weight decay shrinks it. A
token counts as undertrained in two cases:

1. Its output embedding has a cosine above ALIKE with the direction that most tokens with a count of 0 share. The count
   of the token itself does not matter, because a token of the corpus was not necessarily predicted in training.
2. Its output embedding is less than half as long as that of every frequent token, and the token is rare in the corpus.

Classes are clusters of the input embeddings of tokens that occur in the corpus, by k-means on unit vectors. A class
contains words that the model treats as similar, such as months. Embeddings are rounded to small whole numbers, so that
every product and sum is exact and the classes do not depend on the number of threads or the processor.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.index.memory import token_counts
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel

CLASSES = {"broad": 50, "coarse": 150, "fine": 500, "finest": 1500}
ALIKE = 0.9  # minimum cosine with the shared direction
_OFTEN = 10  # minimum count of a frequent token
_RARE = 5e-6  # maximum share of a rare token in the corpus
_ROUNDS, _TURNS = 5, 12
_SPREAD, _LARGEST = 32, 127  # whole numbers for one standard deviation and for the largest entry
_TOKENS_AT_ONCE = 4096

TOKENS_SCHEMA = pa.schema(
    [
        ("token", pa.int32()),
        ("count", pa.int64()),  # occurrences in the corpus
        ("norm", pa.float32()),  # length of the output embedding
        ("trained", pa.bool_()),
        *((name, pa.int32()) for name in CLASSES),  # null for a token that does not occur in the corpus
    ]
)


def token_tables(index: Index, model: MemoryModel) -> Iterator[pa.Table]:
    """Yield the rows of tokens.parquet."""
    counts = token_counts(index)
    output = model.lens.embedding.cpu().numpy()
    columns = {
        "token": np.arange(model.vocabulary),
        "count": counts[: model.vocabulary],
        "norm": np.sqrt((output.astype(np.float64) ** 2).sum(1)),
        "trained": ~undertrained(output, counts[: model.vocabulary]),
    }
    embedding = model.lens.input_embedding.cpu().numpy()
    occurring = np.flatnonzero(counts[: len(embedding)])
    whole = whole_numbers(embedding[occurring])
    for name, size in CLASSES.items():
        classes = np.full(model.vocabulary, -1)
        classes[occurring] = k_means(whole, size)
        columns[name] = pa.array(classes, pa.int32(), mask=classes < 0)
    yield pa.table(columns).cast(TOKENS_SCHEMA)


def trained_tokens(index: Index, model: MemoryModel) -> NDArray[np.int64]:
    """Return the tokens that are not undertrained, ascending."""
    counts = token_counts(index)[: model.vocabulary]
    return np.flatnonzero(~undertrained(model.lens.embedding.cpu().numpy(), counts))


def tokens_read(index: Index) -> NDArray[np.int64] | None:
    """Return the tokens that enter the softmax of this index's values, ascending, or None for all tokens."""
    if index.manifest.values.vocabulary == "all":
        return None
    return np.flatnonzero(index.table("tokens", ["trained"]).column("trained").to_numpy(zero_copy_only=False))


def undertrained(embedding: NDArray[np.float32], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask [vocabulary] of the undertrained tokens.

    `embedding` [vocabulary, d] are the output embeddings, and `counts` [vocabulary] the counts in the corpus.
    """
    often, rare = counts >= _OFTEN, counts <= _RARE * counts.sum()
    if not often.any():
        return np.zeros(len(counts), np.bool_)
    centred = embedding - embedding[often].mean(0)
    unit = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-9)
    near = counts == 0
    for _ in range(_ROUNDS):
        direction = unit[near].sum(0)
        close = unit @ (direction / max(float(np.linalg.norm(direction)), 1e-9)) > ALIKE
        near = close & (counts == 0)
    is_shared = near.sum() >= max(3, (close & often).sum())  # otherwise, frequent tokens share this direction
    norms = np.linalg.norm(embedding, axis=1)
    mask: NDArray[np.bool_] = (close & is_shared) | (rare & (norms < norms[often].min() / 2))
    return mask


def whole_numbers(embedding: NDArray[np.float32]) -> NDArray[np.float64]:
    """Center embeddings, scale them to unit length, and return them as whole numbers up to _LARGEST. [tokens, d]"""
    vectors = embedding.astype(np.float64) - (embedding.astype(np.float64).mean(0) if len(embedding) else 0)
    vectors /= np.maximum(np.sqrt((vectors**2).sum(1, keepdims=True)), 1e-12)
    return np.clip(np.rint(vectors * _SPREAD * np.sqrt(vectors.shape[1])), -_LARGEST, _LARGEST)


def k_means(vectors: NDArray[np.float64], clusters: int) -> NDArray[np.int64]:
    """Return the cluster of each vector of whole numbers. A cluster without vectors keeps its center."""
    clusters = min(clusters, len(vectors))
    if clusters == 0:
        return np.zeros(0, np.int64)
    centres = vectors[np.sort(np.random.default_rng([0, clusters]).choice(len(vectors), clusters, replace=False))]
    nearest = _nearest(vectors, centres)
    for _ in range(_TURNS):
        counts = np.bincount(nearest, minlength=clusters)
        order = np.argsort(nearest, kind="stable")
        begins = np.concatenate([[0], np.cumsum(counts)])[:-1]
        filled = np.flatnonzero(counts)
        sums = np.add.reduceat(vectors[order], begins[filled], axis=0)
        centres = centres.copy()
        centres[filled] = np.rint(sums / counts[filled, None])
        before, nearest = nearest, _nearest(vectors, centres)
        if (before == nearest).all():
            break
    return nearest


def _nearest(vectors: NDArray[np.float64], centres: NDArray[np.float64]) -> NDArray[np.int64]:
    half = (centres**2).sum(1) / 2
    parts = [
        np.argmax(vectors[first : first + _TOKENS_AT_ONCE] @ centres.T - half, 1)
        for first in range(0, len(vectors), _TOKENS_AT_ONCE)
    ]
    return np.concatenate(parts)
