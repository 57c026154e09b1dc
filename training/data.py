"""Batches of sequences: BOS and then one sentence, or a run of consecutive sentences of one article."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from model import IGNORED

BOS_ID = 0
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Text:
    """Encoded text: sentence s is tokens[sentence_starts[s]:sentence_starts[s + 1]], article a is the sentences
    article_starts[a] to article_starts[a + 1]."""

    tokens: np.ndarray
    sentence_starts: np.ndarray
    article_starts: np.ndarray

    @classmethod
    def load(cls, path: Path) -> "Text":
        """Read what tokenize_text.py wrote."""
        with np.load(path) as arrays:
            return cls(arrays["tokens"], arrays["sentence_starts"], arrays["article_starts"])


def sequences(text: Text, length: int, single: float, rng: np.random.Generator) -> np.ndarray:
    """Cut the text into sequences of whole sentences: an array of [first token, end token), every token in one.

    A share `single` of the sequences holds a single sentence, as that is how memlens later feeds the model; the
    others hold as many sentences of the article as fit. Only a sentence longer than a sequence is cut.
    """
    starts, cut = text.sentence_starts, []
    room = length - 1  # BOS takes one place
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
    """Group sequences of like length into batches of at most `batch_tokens` places, in random order.

    Sorting within pools and not the whole epoch keeps a batch from being all of one kind, at little padding.
    """
    cut = cut[rng.permutation(len(cut))]
    batches = []
    pool = 4096
    for start in range(0, len(cut), pool):
        part = cut[start : start + pool]
        # Runs (mostly near the full length) and single sentences differ so much in length that a batch would be all
        # of one or of the other; that is fine, as the order of batches is random.
        part = part[np.argsort(part[:, 0] - part[:, 1], kind="stable")]
        first = 0
        while first < len(part):
            rows = max(1, batch_tokens // int(part[first, 1] - part[first, 0]))
            batches.append(part[first : first + rows])
            first += rows
    order = rng.permutation(len(batches))
    return [batches[i] for i in order]


def epoch_plan(text: Text, length: int, batch_tokens: int, single: float, seed: int, epoch: int) -> list[np.ndarray]:
    """All batches of one epoch. It hangs on nothing but the arguments, so (epoch, index) is the whole data cursor."""
    rng = np.random.default_rng([seed, epoch])
    return plan(sequences(text, length, single, rng), batch_tokens, rng)


def batch(text: Text, spans: np.ndarray) -> Batch:
    """Inputs (BOS, t1, ..., tn-1) and targets (t1, ..., tn), padded on the right."""
    longest = int((spans[:, 1] - spans[:, 0]).max())
    inputs = np.full((len(spans), longest), BOS_ID, dtype=np.int64)
    targets = np.full((len(spans), longest), IGNORED, dtype=np.int64)
    for row, (first, end) in enumerate(spans):
        inputs[row, 1 : end - first] = text.tokens[first : end - 1]
        targets[row, : end - first] = text.tokens[first:end]
    return torch.from_numpy(inputs), torch.from_numpy(targets)
