"""Scores of patterns on held-out triggers: the area under the ROC curve (AUROC) against two kinds of prefixes.

Held-out triggers have ranks 25 to 49, below those in which patterns are found. An AUROC of 0.5 means that a pattern is
equally frequent in other prefixes. An AUROC of 1 means that all held-out triggers and no other prefixes have it. The
first AUROC compares triggers with random prefixes. The second AUROC compares triggers with prefixes of other documents
that end with the same tokens, so that a pattern that only states the last token scores 0.5. The precision is the share
of the strongest held-out triggers that have the pattern. A wording is present or absent, so its AUROC is 0.5 + (share
of triggers - share of others) / 2. A topic ranks prefixes by their cosine with its direction.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.pattern.features import key_shares
from memlens.pattern.matched import effective_size
from memlens.pattern.shallow import Candidate, Texts
from memlens.pattern.topics import VectorWords, WordVectors, prefix_vectors
from memlens.pattern.words import ENOUGH
from memlens.stats import ONE_SIDED, binomial_tail, roc_area

_LEVEL = 0.05
RANDOM = 1000  # number of random prefixes to compare topics with
STRONGEST = 10  # number of held-out triggers for the precision


class Scores(NamedTuple):
    """Scores of a pattern on held-out triggers. A score is None if there are no prefixes to compute it from."""

    auroc: float | None  # AUROC against random prefixes
    same_token: float | None  # AUROC against prefixes with the same last tokens
    precision: float | None = None  # share of the STRONGEST held-out triggers that have the pattern


def wording_scores(
    texts: Texts, held: NDArray[np.int64], same: NDArray[np.int64], keys: Sequence[Sequence[int]]
) -> list[list[Scores]]:
    """Return the scores of the features of every memory, given by their keys.

    `held` [memories, h] are held-out triggers, and `same` [memories, h * TIMES] are prefixes with the same last tokens,
    as rows of `texts.prefixes`, -1 for none.
    """
    flat = np.array([key for of_memory in keys for key in of_memory], np.int64)
    offsets = np.concatenate([[0], np.cumsum(list(map(len, keys)))]).astype(np.int64)
    random = texts.background.count(flat) / max(texts.background.prefixes, 1)
    mine, others = (key_shares(rows, flat, offsets, texts.prefixes, texts.spelled) for rows in (held, same))
    first = held[:, :STRONGEST]
    strongest = key_shares(first, flat, offsets, texts.prefixes, texts.spelled)
    owner = np.repeat(np.arange(len(keys)), np.diff(offsets))
    has_triggers, has_others = (((rows >= 0).sum(1) > 0)[owner] for rows in (held, same))
    has_strongest = ((first >= 0).sum(1) == STRONGEST)[owner]
    measured = (0.5 + (mine - random) / 2, 0.5 + (mine - others) / 2, strongest)
    columns = [
        [float(score) if is_measured else None for score, is_measured in zip(*pair, strict=True)]
        for pair in zip(measured, (has_triggers, has_triggers & has_others, has_strongest), strict=True)
    ]
    scores = [Scores(*row) for row in zip(*columns, strict=True)]
    return [scores[begin:end] for begin, end in pairwise(offsets.tolist())]


def subject_scores(
    nearness: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    held: NDArray[np.int64],
    same: NDArray[np.int64],
    random: NDArray[np.float64],
    bar: float,
) -> Scores:
    """Return the scores of a topic or subject.

    Args:
        nearness: Returns the cosines of prefixes with the subject's direction.
        held: Held-out triggers, strongest first, -1 for none.
        same: Prefixes with the same last tokens, -1 for none.
        random: Cosines of random prefixes.
        bar: Cosine above which a prefix has the subject.
    """
    mine, others = (nearness(rows[rows >= 0]) for rows in (held, same))
    strongest = mine[: (held[:STRONGEST] >= 0).sum()]
    precision = float((strongest > bar).mean()) if len(strongest) == STRONGEST else None
    return Scores(roc_area(mine, random), roc_area(mine, others), precision)


def is_wording_refuted(candidate: Candidate, texts: Texts, held: int, scores: Scores) -> bool:
    """Return True if a broad feature is no more frequent in held-out triggers than at random (binomial test at 5%).

    Literal wordings are not tested, because the corpus may contain no other triggers with a rare wording.
    """
    if not candidate.feature.is_broad or scores[0] is None or held < ENOUGH:
        return False
    random = candidate.count / max(texts.background.prefixes, 1)
    matches = round((2 * scores[0] - 1 + random) * held)
    return bool(binomial_tail(matches, held, candidate.share) > _LEVEL)


def is_subject_refuted(scores: Scores, held: NDArray[np.int64], same: NDArray[np.int64]) -> bool:
    """Return True if held-out triggers are no closer to a topic or subject than prefixes with the same last tokens.

    A one-sided rank-sum test at 5% with the normal approximation decides. With fewer than ENOUGH triggers, no topic or
    subject is refuted. Sample sizes are Kish's effective sizes, because prefixes may be drawn several times.
    """
    mine, others = (effective_size(rows) for rows in (held, same))
    if scores[1] is None or mine < ENOUGH:
        return False
    return scores[1] < 0.5 + ONE_SIDED * math.sqrt((mine + others + 1) / (12 * mine * others))


def whole_vectors(prefixes: VectorWords, vectors: WordVectors, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return unit vectors of prefixes, including their last words. A prefix without a vector gets a zero vector."""
    return prefix_vectors(prefixes, vectors, rows, drop_last=False)[0]


def topic_nearness(
    words: VectorWords, vectors: WordVectors, direction: NDArray[Any], rows: NDArray[np.int64]
) -> NDArray[Any]:
    """Return the cosines of prefixes with the direction of a topic."""
    return nearness(whole_vectors(words, vectors, rows), direction)


def nearness(unit: NDArray[np.float32], direction: NDArray[Any]) -> NDArray[Any]:
    """Return the cosine of every vector [n, dimensions] with a direction."""
    # a cumulative sum adds in a fixed order, so the last bits do not depend on the BLAS library
    cosines: NDArray[Any] = np.cumsum(unit * direction, 1)[:, -1].astype(np.float64)
    return cosines
