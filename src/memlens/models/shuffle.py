"""A network with shuffled weights, to show which results an untrained model of the same shape would give.

The entries of every weight matrix are permuted, so that their distribution stays the same and their order is lost.
Embeddings, the unembedding, norms and biases keep their values. The entries of stacked experts are permuted within each
expert.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memlens.models.memory_model import MemoryModel


@contextmanager
def shuffled_weights(model: MemoryModel, seed: int) -> Iterator[MemoryModel]:
    """Shuffle the weight matrices of a model in place, and restore every bit on exit.

    Nothing is copied, so a large model does not need twice the memory. Workers must not load the model inside the
    context, because they would load its original weights.
    """
    matrices = weight_matrices(model)
    permuted: list[str] = []
    try:
        for name, matrix in matrices.items():
            permuted.append(name)
            _permute_(matrix, name, seed, restore=False)
        yield model
    finally:
        for name in permuted:
            _permute_(matrices[name], name, seed, restore=True)


def weight_matrices(model: MemoryModel) -> dict[str, Tensor]:
    """Return the matrices to shuffle, by name: all except the embeddings and the unembedding."""
    kept = {
        parameter
        for module in model.network.modules()
        if isinstance(module, nn.Embedding) or module in model.lens.modules
        for parameter in module.parameters()
    }
    return {
        name: parameter.data
        for name, parameter in sorted(model.network.named_parameters())
        if parameter.dim() > 1 and parameter not in kept
    }


def _permute_(matrix: Tensor, name: str, seed: int, *, restore: bool) -> None:
    random = torch.Generator().manual_seed(seed * 0x10001 + zlib.crc32(name.encode()))
    for part in matrix if matrix.dim() > 2 else (matrix,):
        entries = part.reshape(-1).clone()
        order = torch.randperm(len(entries), generator=random).to(entries.device)
        if restore:
            shuffled = entries
            entries = torch.empty_like(shuffled)
            entries[order] = shuffled
        else:
            entries = entries[order]
        part.copy_(entries.view(part.shape))
