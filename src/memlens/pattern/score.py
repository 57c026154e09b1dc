"""Scores of patterns on triggers they were not found in: the area under the ROC curve, against two kinds of prefixes.

Held out are the triggers after those that patterns are looked for in (ranks 25 to 49). 0.5: as often in other prefixes
as in them, 1: in all of them and nowhere else. There are two scores, against random prefixes and against prefixes of
other documents with the same last tokens; for a pattern that says no more than what the last token is, the second is
0.5. A wording is there or not, which gives 0.5 + (share of triggers - share of others) / 2; a topic ranks prefixes by
how near they are to its direction. A topic that held-out triggers do not bear out is dropped.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.pattern.features import key_shares
from memlens.pattern.shallow import Texts
from memlens.pattern.topics import LastTokens, VectorWords, WordVectors, effective_size, prefix_vectors, swap_prefixes
from memlens.pattern.words import ENOUGH
from memlens.stats import ONE_SIDED, roc_area

TIMES = 4  # prefixes with the same last token for each of them
RANDOM = 1000  # random prefixes that topics are compared with
Scores = tuple[float | None, float | None]  # against random prefixes, against the same last tokens


def wording_scores(
    texts: Texts, held: NDArray[np.int64], same: NDArray[np.int64], keys: Sequence[Sequence[int]]
) -> list[list[Scores]]:
    """Scores of features (keys) of every memory; held [memories, h], same [memories, h * TIMES]: rows, -1 for none."""
    flat = np.array([key for own in keys for key in own], np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(own) for own in keys])]).astype(np.int64)
    random = texts.background.count(flat) / max(texts.background.prefixes, 1)
    mine, others = (key_shares(rows, flat, offsets, texts.prefixes, texts.spelled) for rows in (held, same))
    owner = np.repeat(np.arange(len(keys)), np.diff(offsets))
    enough = ((held >= 0).sum(1) > 0)[owner]
    against = [0.5 + (mine - other) / 2 for other in (random, others)]
    known = [enough, enough & ((same >= 0).sum(1) > 0)[owner]]
    columns = [
        [float(score) if is_known else None for score, is_known in zip(*pair, strict=True)]
        for pair in zip(against, known, strict=True)
    ]
    pairs = list(zip(*columns, strict=True))
    return [pairs[first:last] for first, last in pairwise(offsets.tolist())]


def topic_scores(
    prefixes: VectorWords, vectors: WordVectors, direction: NDArray[Any], held: Any, same: Any, random: NDArray[Any]
) -> Scores:
    """Scores of one topic; `random`: nearness of random prefixes to its direction."""
    mine, others = (nearness(whole_vectors(prefixes, vectors, rows[rows >= 0]), direction) for rows in (held, same))
    return roc_area(mine, random), roc_area(mine, others)


def is_refuted(scores: Scores, held: NDArray[np.int64], same: NDArray[np.int64]) -> bool:
    """Do held-out triggers not bear a topic out: are they no nearer to it than prefixes with the same last tokens?

    By the normal approximation of the rank-sum test, one-sided, at 5%. Fewer than ENOUGH triggers say nothing. A prefix
    that was drawn more than once is one observation: it counts by Kish's effective size of a weighted sample.
    """
    mine, others = (effective_size(rows) for rows in (held, same))
    if scores[1] is None or mine < ENOUGH:
        return False
    return scores[1] < 0.5 + ONE_SIDED * math.sqrt((mine + others + 1) / (12 * mine * others))


def same_last_tokens(held: NDArray[np.int64], tokens: LastTokens, seed: int) -> NDArray[np.int64]:
    """Prefixes of other documents with the last tokens of the given ones, TIMES each; -1 where there are none."""
    random = np.random.default_rng([seed, 11])
    return np.concatenate([swap_prefixes(held, tokens, random) for _ in range(TIMES)], 1)


def whole_vectors(prefixes: VectorWords, vectors: WordVectors, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Unit vectors of prefixes, last words included; 0 where there is none."""
    return prefix_vectors(prefixes, vectors, rows, np.zeros(len(rows), np.bool_))[0]


def nearness(unit: NDArray[np.float32], direction: NDArray[Any]) -> NDArray[Any]:
    """The cosine of every vector [n, dimensions] with a direction."""
    # running sums are added up in order, so that the last bits are those of a loop
    found: NDArray[Any] = np.cumsum(unit * direction, 1)[:, -1].astype(np.float64)
    return found
