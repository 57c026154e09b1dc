"""Packs sentences into rectangular batches with little padding.

The batches depend on nothing but the sentences handed in, so that a scan gives the same bytes wherever it runs. Padding
is token 0, on the right, where a causal model's earlier positions cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

_SMALLEST = 8  # a batch may end early once it has an eighth of the places it could have
_LEAST_FILL = 0.96


@dataclass(frozen=True, eq=False)
class Batch:
    """A rectangle of tokens that the model is fed at once, one sentence per row."""

    tokens: np.ndarray  # int64 [batch, pos]; BOS in column 0 if there is one, then the sentence, then zeros
    sentences: np.ndarray  # int64 [batch]; ids
    lengths: np.ndarray  # int64 [batch]; own tokens, BOS not counted


def cut_batches(sentences: Sequence[tuple[int, np.ndarray]], batch_tokens: int, bos: int | None) -> list[Batch]:
    """Every sentence (id, tokens) in exactly one batch, longest first, then by id.

    A batch has at most `batch_tokens` places, padding and BOS included, but always one sentence at least. It ends
    earlier where shorter sentences would leave too much padding, once it is large enough to be worth a pass.
    """
    ordered = sorted(sentences, key=lambda sentence: (-len(sentence[1]), sentence[0]))
    widths = [len(own) + (bos is not None) for _, own in ordered]  # falling
    batches = []
    first = 0
    while first < len(ordered):
        rows = _count_rows(widths, first, batch_tokens)
        batches.append(_fill(ordered[first : first + rows], widths[first], bos))
        first += rows
    return batches


def _count_rows(widths: Sequence[int], first: int, batch_tokens: int) -> int:
    """The number of sentences from `first` on that make one batch."""
    width = widths[first]
    filled = width
    rows = 1
    for own in islice(widths, first + 1, None):
        places = (rows + 1) * width
        if places > batch_tokens:
            break
        is_worth_a_pass = rows * width * _SMALLEST >= batch_tokens
        if is_worth_a_pass and filled + own < _LEAST_FILL * places:
            break
        filled += own
        rows += 1
    return rows


def _fill(sentences: Sequence[tuple[int, np.ndarray]], width: int, bos: int | None) -> Batch:
    tokens = np.zeros((len(sentences), width), dtype=np.int64)  # [batch, pos]
    start = 0
    if bos is not None:
        tokens[:, 0] = bos
        start = 1
    for row, (_, own) in zip(tokens, sentences, strict=True):
        row[start : start + len(own)] = own
    ids = np.array([sentence for sentence, _ in sentences], dtype=np.int64)
    return Batch(tokens, ids, np.array([len(own) for _, own in sentences], dtype=np.int64))
