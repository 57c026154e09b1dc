"""Numbers of a layer's weights: moments of every value over the vocabulary, its directions, its cosines."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.models.groups import MemoryLayer
from memlens.models.lens import at_least_float32
from memlens.models.memory_model import MemoryModel
from memlens.stats import generator
from memlens.vocab.kernels import score_blocks
from memlens.vocab.table import folded_keys, through_norm

WEAK = 1 / 20  # of the directions that the unembedding reads at all: those that it reads least
Arrays = dict[str, NDArray[np.float64]]


class ValueReader:
    """What the lens reads of a layer's values over tokens of the corpus: moments, weak directions, frequent tokens.

    Tokens that do not occur are left out: those that were hardly trained lie together, apart from all others, and would
    give every direction heavy tails.
    """

    def __init__(self, model: MemoryModel, layer: int, reading: str, counts: NDArray[np.int64]) -> None:
        self.model, self.layer, self.reading = model, layer, reading
        self.tokens = np.flatnonzero(counts)
        log_frequency = np.log(counts[self.tokens] / counts.sum())
        width = model.width
        fold = model.lens.folded(torch.eye(width, device=model.device), layer, reading).double()  # v -> v fold
        embedding = model.lens.embedding[torch.from_numpy(self.tokens).to(model.device)].double()
        embedding = embedding - embedding.mean(0)  # a softmax does not see what all tokens share
        gram = fold @ (embedding.T @ embedding) @ fold.T
        eigenvalues, vectors = torch.linalg.eigh(gram)
        kept = eigenvalues > 1e-9 * eigenvalues[-1]  # a norm that centres removes a direction altogether
        self.rank = int(kept.sum())
        self.eigenvalues = (eigenvalues.clamp_min(0) / len(self.tokens)).cpu().numpy()  # of the variance of scores
        self.directions = max(round(WEAK * self.rank), 1)
        self.weak, self.read = vectors[:, kept][:, : self.directions], vectors[:, kept]
        frequency = torch.from_numpy(log_frequency - log_frequency.mean()).to(embedding)
        self.frequent = fold @ (embedding.T @ frequency)  # [d]
        self.frequency = frequency.cpu().numpy()

    def scores(self, block: Tensor, place: Tensor) -> Tensor:
        return self.model.lens.value_scores(block, self.layer, self.reading, place)

    def moments(self, values: Tensor) -> Arrays:
        """Over the vocabulary, of the scores of each value [n, d] divided by its length."""
        blocks = score_blocks(values, self.scores, self.model.vocabulary)
        parts = [_moments(scores[:, self.tokens], self.frequency) for _, scores in blocks]
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        norm = at_least_float32(values).double().norm(dim=1).cpu().numpy()
        has_length = norm > 0  # the others (pruned, never trained) have no direction to ask about: nothing is unusual
        found["variance"] = np.where(has_length, found["variance"] / np.where(has_length, norm, 1.0) ** 2, 0.0)
        for name, usual in (("skew", 0.0), ("kurtosis", 3.0), ("frequency", 0.0)):
            found[name] = np.where(has_length, found[name], usual)
        return found | {"norm": norm}

    def random_values(self, count: int, seed: int) -> Tensor:
        """[count, d], random directions of length 1."""
        drawn = torch.from_numpy(generator(seed, "roles", self.layer).normal(size=(count, self.model.width)))
        return (drawn / drawn.norm(dim=1, keepdim=True)).to(self.model.device, torch.float32)

    def part_in_weak(self, values: Tensor) -> NDArray[np.float64]:
        """Of the squared length of each value that the lens reads at all, the part in the weak directions."""
        values = values.double()
        whole = (values @ self.read).square().sum(1).clamp_min(1e-300)
        return _array((values @ self.weak).square().sum(1) / whole)

    def along_frequency(self, values: Tensor) -> NDArray[np.float64]:
        """Cosine of each value with the direction along which scores follow the log of frequency most."""
        return _cosines(values.double(), self.frequent[None])


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
    """Of each memory: what it reads (up, or the key of a plain block), its gate, and its value."""
    values = torch.cat([at_least_float32(group.values) for group in memories.groups]).double()
    gates = folded_keys(memories).double()
    ups = [group.keys if group.up is None else group.up for group in memories.groups]
    reads = through_norm(torch.cat(ups), memories).double()
    return {
        "cos_in_out": _cosines(reads, values),
        "cos_gate_out": _cosines(gates, values),
        "cos_gate_in": _cosines(gates, reads),
        "gated": np.concatenate([np.full(group.size, group.gated) for group in memories.groups]),
    }


def _cosines(one: Tensor, other: Tensor) -> NDArray[np.float64]:
    lengths = (one.norm(dim=1) * other.norm(dim=1)).clamp_min(1e-300)
    return _array((one * other).sum(1) / lengths)


def _array(tensor: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = tensor.detach().double().cpu().numpy()
    return found
