"""Measure which part of a model's embedding decides whether lists of values are clear.

    python training/embedding.py MODEL

MODEL is a folder written by export.py. A list is clear if it is more coherent than the lists of 99% of random
directions (src/memlens/vocab/coherence.py). Subtracting the mean embedding from all embeddings, and adding it to the
positions, does not change what a model with tied embeddings and no final norm predicts, but it changes all cosines. The
script does this, weakens the strongest direction, which holds the frequencies of the tokens, and prints for each
version:

- the cosine above which a list is clear
- the share of tokens whose own embedding, taken as a value, has a clear list: an upper bound of what training can reach
  if every value promotes one token
- the share of clear values in each third of the layers
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from memlens.vocab.coherence import DIRECTIONS, LISTED, list_similarities

Array = NDArray[np.float32]


def similarities(directions: Array, embedding: Array) -> NDArray[np.float64]:
    """Return the similarity of the top tokens of every direction."""
    top = np.argpartition(-(directions @ embedding.T), LISTED, axis=1)[:, :LISTED]
    return list_similarities(embedding, top)


def versions(embedding: Array) -> dict[str, Array]:
    """Return the embedding as it is, centered, and centered with a weaker strongest direction."""
    centered = embedding - embedding.mean(axis=0)
    left, sizes, right = np.linalg.svd(centered, full_matrices=False)
    found = {"as trained": embedding, "centered": centered}
    for share in (0.5, 0.25, 0.0):
        weaker = sizes * np.where(np.arange(len(sizes)) == 0, share, 1)
        found[f"strongest direction x {share}"] = ((left * weaker) @ right).astype(np.float32)
    return found


def main(folder: str) -> None:
    weights = {name: array.astype(np.float32) for name, array in load_file(Path(folder) / "model.safetensors").items()}
    embedding = next(array for name, array in weights.items() if name.endswith("embed_tokens.weight"))
    layers = sum(name.endswith("fc2.weight") for name in weights)
    values = [
        next(a.T for name, a in weights.items() if name.endswith(f"layers.{n}.fc2.weight")) for n in range(layers)
    ]
    thirds = [np.concatenate(values[layers * n // 3 : layers * (n + 1) // 3]) for n in range(3)]
    random = np.random.default_rng(0).normal(size=(DIRECTIONS, embedding.shape[1])).astype(np.float32)
    print("embedding,clear above,tokens,lower third,middle third,upper third")
    for name, version in versions(embedding).items():
        bar = np.sort(similarities(random, version))[round(0.99 * DIRECTIONS) - 1]
        shares = [(similarities(rows, version) > bar).mean() for rows in (version, *thirds)]
        print(name, f"{bar:.3f}", *(f"{100 * share:.1f}%" for share in shares), sep=",", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
