"""Statistics of weights: moments of a value's scores, its share in weak directions, and its cosine with the key."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.models.groups import MemoryLayer
from memlens.models.lens import to_float64, with_float64
from memlens.models.memory_model import MemoryModel
from memlens.stats import generator
from memlens.vocab.kernels import score_blocks
from memlens.vocab.table import through_norm

WEAK = 1 / 20  # share of the directions that count as weak because they have the smallest effect on the logits
_ROWS = 2048  # number of values or embeddings to convert to float64 at once
Arrays = dict[str, NDArray[np.float64]]


class ValueReader:
    """A reader of the values of a layer through the lens, for the tokens that occur in the corpus.

    Other tokens are left out, because undertrained tokens form a distant cluster that gives every direction heavy
    tails.
    """

    def __init__(self, model: MemoryModel, layer: int, reading: str, counts: NDArray[np.int64]) -> None:
        self.model, self.layer, self.reading = model, layer, reading
        self.tokens = np.flatnonzero(counts)
        log_frequency = np.log(counts[self.tokens] / counts.sum())
        self.frequency = log_frequency - log_frequency.mean()
        width = model.width
        identity = torch.eye(width, device=model.device)
        fold = to_float64(model.lens.folded(identity, layer, reading))  # maps v to v @ fold
        spread, follows = self._embedding_sums()
        eigenvalues, vectors = torch.linalg.eigh(fold @ spread @ fold.T)
        is_read = eigenvalues > 1e-9 * eigenvalues[-1]  # a norm that centers does not read one direction
        self.fold, self.rank = fold, int(is_read.sum())
        # eigenvalues of G, where v G v is the variance of the scores of v
        self.eigenvalues = (eigenvalues.clamp_min(0) / len(self.tokens)).cpu().numpy()
        self.directions = max(round(WEAK * self.rank), 1)
        self.weak, self.read = vectors[:, is_read][:, : self.directions], vectors[:, is_read]
        self.frequent = fold @ follows  # [d]

    def _embedding_sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums over tokens of e e^T [d, d] and of e times the log frequency [d].

        e is an embedding minus the mean embedding, because a softmax does not depend on the mean.
        """
        device = with_float64(self.model.device)
        frequency, width = torch.from_numpy(self.frequency).to(device), self.model.width
        self.mean = torch.zeros(width, dtype=torch.float64, device=device)  # mean embedding
        self.mean = sum((part.sum(0) for _, part in self._embeddings()), self.mean) / len(self.tokens)
        spread, follows = torch.zeros(width, width, dtype=torch.float64, device=device), torch.zeros_like(self.mean)
        for block, embedding in self._embeddings():
            spread += embedding.T @ embedding
            follows += embedding.T @ frequency[block]
        return spread, follows

    def _embeddings(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of token embeddings minus the mean embedding."""
        tokens = torch.from_numpy(self.tokens).to(self.model.device)
        for block in _row_blocks(len(tokens)):
            yield block, to_float64(self.model.lens.embedding[tokens[block]]) - self.mean

    def scores(self, block: Tensor, place: Tensor) -> Tensor:
        return self.model.lens.value_scores(block, self.layer, self.reading, place)

    def moments(self, values: Tensor) -> Arrays:
        """Return the moments over tokens of the scores of each value [n, d], scaled to unit length."""
        blocks = score_blocks(values, self.scores, self.model.vocabulary)
        parts = [_moments(scores[:, self.tokens], self.frequency) for _, scores in blocks]
        moments = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        norm = _in_blocks(lambda block: to_float64(block).norm(dim=1), values)
        has_length = norm > 0  # values of length 0 have no direction and get the moments of a normal distribution
        moments["variance"] = np.where(has_length, moments["variance"] / np.where(has_length, norm, 1.0) ** 2, 0.0)
        for name, default in (("skew", 0.0), ("kurtosis", 3.0), ("frequency", 0.0)):
            moments[name] = np.where(has_length, moments[name], default)
        return moments | {"norm": norm}

    def random_kurtosis(self, count: int, seed: int) -> NDArray[np.float64]:
        """Return the kurtosis of the scores of `count` random directions."""
        random, parts = generator(seed, "roles", self.layer), []
        for first in range(0, count, _ROWS):
            drawn = random.normal(size=(min(_ROWS, count - first), self.model.width))
            parts.append(_array(self.kurtosis(torch.from_numpy(drawn).to(self.fold.device))))
        return np.concatenate(parts)

    def kurtosis(self, values: Tensor) -> Tensor:
        """Return the kurtosis of the scores of each value [n, d], in a third of the time that `moments` needs."""
        folded = (to_float64(values) @ self.fold).float()
        second = torch.zeros(len(values), dtype=torch.float64, device=folded.device)
        fourth = torch.zeros_like(second)
        for _, embedding in self._embeddings():  # embeddings are centered, so the mean score is 0
            squared = (folded @ embedding.float().T).square_()
            second += squared.sum(1, dtype=torch.float64)
            fourth += squared.square_().sum(1, dtype=torch.float64)
        return fourth * len(self.tokens) / second.square()

    def part_in_weak(self, values: Tensor) -> NDArray[np.float64]:
        """Return the share of each value's squared length that lies in weak directions.

        Directions that the lens does not read do not count.
        """

        def part(block: Tensor) -> Tensor:
            wide = to_float64(block)
            return (wide @ self.weak).square().sum(1) / (wide @ self.read).square().sum(1).clamp_min(1e-300)

        return _in_blocks(part, values)

    def along_frequency(self, values: Tensor) -> NDArray[np.float64]:
        """Return the cosine of each value with the direction whose scores correlate most with the log frequency."""
        return _in_blocks(lambda block: _cosines(to_float64(block), self.frequent[None]), values)


def _moments(scores: NDArray[np.float32], frequency: NDArray[np.float64]) -> Arrays:
    centred = scores.astype(np.float64)
    centred -= centred.mean(1, keepdims=True)
    squared = centred * centred
    variance = squared.mean(1)
    is_flat = variance == 0
    scale = np.sqrt(np.where(is_flat, 1.0, variance))
    spread = max(float(np.sqrt((frequency**2).mean())), 1e-300)
    return {
        "variance": variance,
        "skew": np.einsum("ij,ij->i", squared, centred) / (len(frequency) * scale**3),
        "kurtosis": np.where(is_flat, 3.0, np.einsum("ij,ij->i", squared, squared) / (len(frequency) * scale**4)),
        "frequency": centred @ frequency / (len(frequency) * scale * spread),
    }


def cosines_of(memories: MemoryLayer) -> Arrays:
    """Return the cosines between input weights (up, or the key of a plain block), gate and value of each memory."""
    cosines: dict[str, list[NDArray[np.float64]]] = {"cos_in_out": [], "cos_gate_out": [], "cos_gate_in": []}
    for group in memories.groups:
        keys = group.keys
        reads = keys if group.up is None else group.up
        for part in _row_blocks(group.size):
            value = to_float64(group.values[part])
            gate, read = (to_float64(through_norm(rows[part], memories)) for rows in (keys, reads))
            for name, pair in zip(cosines, ((read, value), (gate, value), (gate, read)), strict=True):
                cosines[name].append(_array(_cosines(*pair)))
    gated = np.concatenate([np.full(group.size, group.gated) for group in memories.groups])
    return {name: np.concatenate(parts) for name, parts in cosines.items()} | {"gated": gated}


def _row_blocks(rows: int) -> list[slice]:
    return [slice(first, min(first + _ROWS, rows)) for first in range(0, rows, _ROWS)]


def _in_blocks(function: Callable[[Tensor], Tensor], values: Tensor) -> NDArray[np.float64]:
    """Return the function's number for each row of `values` [n, d], computed block by block."""
    return np.concatenate([_array(function(values[part])) for part in _row_blocks(len(values))])


def _cosines(rows: Tensor, others: Tensor) -> Tensor:
    lengths = (rows.norm(dim=1) * others.norm(dim=1)).clamp_min(1e-300)
    return (rows * others).sum(1) / lengths


def _array(tensor: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = to_float64(tensor.detach()).cpu().numpy()
    return array
