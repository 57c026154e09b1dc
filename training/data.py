"""Batches of sequences. A sequence is BOS and one or more consecutive sentences of an article."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from model import IGNORED

BOS_ID = 0
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Text:
    """Encoded text.

    Sentence s is tokens[sentence_starts[s]:sentence_starts[s + 1]]. Article a consists of the sentences
    article_starts[a] to article_starts[a + 1].
    """

    tokens: np.ndarray
    sentence_starts: np.ndarray
    article_starts: np.ndarray

    @classmethod
    def load(cls, path: Path) -> "Text":
        """Read a file that tokenize_text.py wrote."""
        with np.load(path) as arrays:
            return cls(arrays["tokens"], arrays["sentence_starts"], arrays["article_starts"])


def sequences(text: Text, length: int, single: float, rng: np.random.Generator) -> np.ndarray:
    """Cut the text into sequences of whole sentences. Returns an array of [first token, end token).

    A share `single` of the sequences contains one sentence, because memlens feeds the model one sentence at a time. The
    others contain as many sentences of the article as fit. Only sentences longer than a sequence are cut.
    """
    starts, cut = text.sentence_starts, []
    room = length - 1  # one position is for BOS
    for first, end in zip(text.article_starts[:-1], text.article_starts[1:], strict=True):
        # The last sentence boundary that fits, for every sentence of the article at once.
        fits = np.searchsorted(starts, starts[first:end] + room, side="right") - 1
        alone = rng.random(end - first) < single
        sentence = first
        while sentence < end:
            stop = sentence + 1 if alone[sentence - first] else min(max(fits[sentence - first], sentence + 1), end)
            cut.append((starts[sentence], min(starts[stop], starts[sentence] + room)))
            sentence = stop
    return np.array(cut)


def plan(cut: np.ndarray, batch_tokens: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Group sequences of similar length into batches of at most `batch_tokens` tokens, in random order.

    Sorting within pools instead of the whole epoch mixes the batches and needs little padding.
    """
    cut = cut[rng.permutation(len(cut))]
    batches = []
    pool = 4096
    for start in range(0, len(cut), pool):
        part = cut[start : start + pool]
        part = part[np.argsort(part[:, 0] - part[:, 1], kind="stable")]
        first = 0
        while first < len(part):
            rows = max(1, batch_tokens // int(part[first, 1] - part[first, 0]))
            batches.append(part[first : first + rows])
            first += rows
    order = rng.permutation(len(batches))
    return [batches[i] for i in order]


def epoch_plan(text: Text, length: int, batch_tokens: int, single: float, seed: int, epoch: int) -> list[np.ndarray]:
    """Return all batches of an epoch. They depend only on the arguments, so (epoch, index) is a complete cursor."""
    rng = np.random.default_rng([seed, epoch])
    return plan(sequences(text, length, single, rng), batch_tokens, rng)


def batch(text: Text, spans: np.ndarray) -> Batch:
    """Return inputs (BOS, t1, ..., tn-1) and targets (t1, ..., tn), padded on the right."""
    longest = int((spans[:, 1] - spans[:, 0]).max())
    inputs = np.full((len(spans), longest), BOS_ID, dtype=np.int64)
    targets = np.full((len(spans), longest), IGNORED, dtype=np.int64)
    for row, (first, end) in enumerate(spans):
        inputs[row, 1 : end - first] = text.tokens[first : end - 1]
        targets[row, : end - first] = text.tokens[first:end]
    return torch.from_numpy(inputs), torch.from_numpy(targets)
