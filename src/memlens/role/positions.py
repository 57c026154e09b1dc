"""Dependence of a memory's activity on position: the share of its entropy that position explains, and a p-value."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.index.reader import Index

Counts = NDArray[np.int64]
_AT_ONCE = 1 << 14  # memories per block


def position_numbers(index: Index, layer: int) -> dict[str, NDArray[Any]]:
    """Return `position`, `position_from` and `p` of each memory of a layer, as columns.

    `position` is the share of the entropy of being active that position explains, and `p` is its p-value.
    `position_from` is the first position of the range in which the memory is active most often. If the index has no
    counts table, the three columns are NaN, -1 and 1.
    """
    memories = index.memories(layer)
    if not index.has("counts"):
        return {"position": np.full(memories, np.nan), "position_from": np.full(memories, -1), "p": np.ones(memories)}
    starts = np.array([0, *index.manifest.position_edges])
    parts = []
    for fired, prefixes, sentences in _blocks(index, layer):
        rates = fired / np.maximum(prefixes, 1)
        most = np.where(rates.any(1), starts[np.argmax(rates, 1)], -1)
        parts.append((explained(fired, prefixes), most, p_of_positions(fired, prefixes, sentences)))
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return dict(zip(("position", "position_from", "p"), columns, strict=True))


def _blocks(index: Index, layer: int) -> Iterator[tuple[Counts, Counts, Counts]]:
    """Yield the counts of fired, prefixes and sentences for blocks of memories. [memories, ranges of positions]"""
    names, ranges = ("fired", "prefixes", "sentences"), len(index.manifest.position_edges) + 1
    for first in range(0, index.memories(layer), _AT_ONCE):
        rows = index.arrays(
            """SELECT unnest(fired) AS fired, unnest(prefixes) AS prefixes, unnest(sentences) AS sentences FROM
               (SELECT * FROM {counts} WHERE layer = $1 AND memory >= $2 AND memory < $3 ORDER BY memory)""",
            [layer, first, first + _AT_ONCE],
        )
        fired, prefixes, sentences = (np.asarray(rows[name], np.int64).reshape(-1, ranges) for name in names)
        yield fired, prefixes, sentences


def explained(fired: Counts, prefixes: Counts) -> NDArray[np.float64]:
    """Return the share of the entropy of being active that position explains: mutual information / entropy. [n]"""
    from scipy.special import entr

    weights = prefixes / np.maximum(prefixes.sum(1, keepdims=True), 1)
    whole = fired.sum(1, keepdims=True) / np.maximum(prefixes.sum(1, keepdims=True), 1)
    information = (weights * _divergence(_rates(fired, prefixes, whole), whole)).sum(1)
    entropy = (entr(whole) + entr(1 - whole))[:, 0]
    return np.asarray(np.where(entropy > 0, information / np.where(entropy > 0, entropy, 1.0), 0.0))


def p_of_positions(fired: Counts, prefixes: Counts, sentences: Counts) -> NDArray[np.float64]:
    """Return p-values [n] of the hypothesis that the activation frequency does not depend on position.

    This is a likelihood-ratio test of one rate for each range of positions against one rate for all ranges. Prefixes of
    one sentence are not independent, so each sentence counts as a single observation. The test is conservative: if the
    prefixes are independent after all, p is too high.
    """
    from scipy.special import chdtrc

    draws = np.maximum(sentences.sum(1, keepdims=True), 1)
    whole = np.minimum((sentences * (fired / np.maximum(prefixes, 1))).sum(1, keepdims=True) / draws, 1.0)
    ratio = 2 * (sentences * _divergence(_rates(fired, prefixes, whole), whole)).sum(1)
    freedom = (sentences > 0).sum(1) - 1
    return np.asarray(np.where(freedom > 0, chdtrc(np.maximum(freedom, 1), ratio), 1.0))


def _rates(fired: Counts, prefixes: Counts, whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the activation frequency in each range. An empty range has the overall frequency, so it has no effect."""
    return np.where(prefixes > 0, fired / np.maximum(prefixes, 1), whole)


def _divergence(rates: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the KL divergence, in nats, between Bernoulli distributions with rates [n, ranges] and `whole` [n, 1]."""
    from scipy.special import rel_entr

    divergence = rel_entr(rates, whole) + rel_entr(1 - rates, 1 - whole)
    return np.maximum(divergence, 0.0)  # rounding errors can make the divergence slightly negative
