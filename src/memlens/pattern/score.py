"""Scores of patterns on held-out triggers: the area under the ROC curve against two kinds of prefixes.

Held-out triggers follow those in which patterns are found (ranks 25 to 49). A score of 0.5 means that the pattern is as
frequent in other prefixes, 1 that it holds for all held-out triggers and no other prefix. The first score compares with
random prefixes, the second with prefixes of other documents that end with the same tokens. A pattern that only states
the last token has a second score of 0.5. The precision is the share of the strongest held-out triggers that have the
pattern. A wording is present or absent, so its score is 0.5 + (share of triggers - share of others) / 2. A topic ranks
prefixes by their cosine with its direction.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.pattern.features import key_shares
from memlens.pattern.shallow import Candidate, Texts
from memlens.pattern.topics import LastTokens, VectorWords, WordVectors, effective_size, prefix_vectors, swap_prefixes
from memlens.pattern.words import ENOUGH
from memlens.stats import ONE_SIDED, binomial_tail, roc_area

_LEVEL = 0.05
TIMES = 4  # number of matched prefixes per held-out trigger
RANDOM = 1000  # number of random prefixes to compare topics with
STRONGEST = 10  # number of held-out triggers for the precision


class Scores(NamedTuple):
    """Scores of a pattern on held-out triggers, None if there are none."""

    auroc: float | None  # against random prefixes
    same_token: float | None  # against prefixes with the same last tokens
    precision: float | None = None  # share of the STRONGEST held-out triggers that have the pattern


def wording_scores(
    texts: Texts, held: NDArray[np.int64], same: NDArray[np.int64], keys: Sequence[Sequence[int]]
) -> list[list[Scores]]:
    """Return the scores of features (keys) of every memory.

    `held` [memories, h] and `same` [memories, h * TIMES] hold rows of prefixes, -1 for none.
    """
    flat = np.array([key for own in keys for key in own], np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(own) for own in keys])]).astype(np.int64)
    random = texts.background.count(flat) / max(texts.background.prefixes, 1)
    mine, others = (key_shares(rows, flat, offsets, texts.prefixes, texts.spelled) for rows in (held, same))
    first = held[:, :STRONGEST]
    strongest = key_shares(first, flat, offsets, texts.prefixes, texts.spelled)
    owner = np.repeat(np.arange(len(keys)), np.diff(offsets))
    there, others_there = (((rows >= 0).sum(1) > 0)[owner] for rows in (held, same))
    enough = ((first >= 0).sum(1) == STRONGEST)[owner]
    measured = (0.5 + (mine - random) / 2, 0.5 + (mine - others) / 2, strongest)
    columns = [
        [float(score) if is_known else None for score, is_known in zip(*pair, strict=True)]
        for pair in zip(measured, (there, there & others_there, enough), strict=True)
    ]
    scores = [Scores(*row) for row in zip(*columns, strict=True)]
    return [scores[begin:end] for begin, end in pairwise(offsets.tolist())]


def topic_scores(
    prefixes: VectorWords,
    vectors: WordVectors,
    direction: NDArray[Any],
    held: Any,
    same: Any,
    random: NDArray[Any],
    bar: float,
) -> Scores:
    """Return the scores of one topic.

    `random` holds the cosines of random prefixes with its direction. A prefix above `bar` has the topic.
    """
    mine, others = (nearness(whole_vectors(prefixes, vectors, rows[rows >= 0]), direction) for rows in (held, same))
    strongest = mine[: (held[:STRONGEST] >= 0).sum()]
    precision = float((strongest > bar).mean()) if len(strongest) == STRONGEST else None
    return Scores(roc_area(mine, random), roc_area(mine, others), precision)


def is_wording_refuted(candidate: Candidate, texts: Texts, held: int, scores: Scores) -> bool:
    """Return True if a broad feature is no more frequent in held-out triggers than at random (binomial test at 5%).

    Literal wordings are not tested: the corpus may hold no further triggers of a rare wording.
    """
    if not candidate.feature.is_broad or scores[0] is None or held < ENOUGH:
        return False
    random = candidate.count / max(texts.background.prefixes, 1)
    matches = round((2 * scores[0] - 1 + random) * held)
    return bool(binomial_tail(matches, held, candidate.share) > _LEVEL)


def is_topic_refuted(scores: Scores, held: NDArray[np.int64], same: NDArray[np.int64]) -> bool:
    """Return True if held-out triggers are no closer to a topic than prefixes with the same last tokens.

    This is a one-sided rank-sum test at 5% with the normal approximation. Fewer than ENOUGH triggers refute nothing. A
    prefix that was drawn several times counts once (Kish's effective sample size).
    """
    mine, others = (effective_size(rows) for rows in (held, same))
    if scores[1] is None or mine < ENOUGH:
        return False
    return scores[1] < 0.5 + ONE_SIDED * math.sqrt((mine + others + 1) / (12 * mine * others))


def same_last_tokens(held: NDArray[np.int64], tokens: LastTokens, seed: int) -> NDArray[np.int64]:
    """Draw TIMES prefixes of other documents with the last token of each given prefix, or -1 without any."""
    random = np.random.default_rng([seed, 11])
    return np.concatenate([swap_prefixes(held, tokens, random) for _ in range(TIMES)], 1)


def whole_vectors(prefixes: VectorWords, vectors: WordVectors, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return unit vectors of prefixes including their last words; 0 for a prefix without a vector."""
    return prefix_vectors(prefixes, vectors, rows, drop_last=False)[0]


def nearness(unit: NDArray[np.float32], direction: NDArray[Any]) -> NDArray[Any]:
    """Return the cosine of every vector [n, dimensions] with a direction."""
    # cumulative sums add in a fixed order, so the last bits do not depend on the BLAS library
    found: NDArray[Any] = np.cumsum(unit * direction, 1)[:, -1].astype(np.float64)
    return found
