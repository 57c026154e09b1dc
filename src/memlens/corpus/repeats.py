"""Which prefixes of a sentence were seen before, in a sentence of lower id.

Prefixes nest: if the first n tokens were seen before, so were all shorter prefixes. So one number a sentence says it
all, `fresh_from`: the longest token prefix it shares with any sentence of lower id. Positions from there on are new.
This module knows nothing of text; sorting is the caller's work, since a corpus may not fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Repeats:
    fresh_from: np.ndarray  # int32 [sentences]; positions >= fresh_from are new
    repeated: np.ndarray  # bool [sentences]; an earlier sentence has exactly the same tokens


def fresh_from(sorted_sentences: Iterable[tuple[int, Sequence[int] | np.ndarray]], count: int) -> np.ndarray:
    return find_repeats(sorted_sentences, count).fresh_from


def repeated_sentences(sorted_sentences: Iterable[tuple[int, Sequence[int] | np.ndarray]], count: int) -> np.ndarray:
    return find_repeats(sorted_sentences, count).repeated


def find_repeats(sorted_sentences: Iterable[tuple[int, Sequence[int] | np.ndarray]], count: int) -> Repeats:
    """One pass over (id, tokens) in lexicographic order of tokens, then id.

    In sorted order, what two sentences share is the least that any two neighbours between them share. So the best
    earlier sentence is the nearest one of lower id to the left or to the right. The stack holds the ids, rising, that
    still await their nearest lower id to the right; beside each stands what it shares with the one below it.
    """
    fresh = np.zeros(count, dtype=np.int32)
    repeated = np.zeros(count, dtype=bool)
    ids: list[int] = []
    links: list[int] = []
    previous = np.empty(0, dtype=np.int64)
    previous_id = -1
    for sentence, given in sorted_sentences:
        tokens = np.asarray(given)
        shared = _shared_prefix(previous, tokens)
        is_same = shared == len(previous) == len(tokens) and previous_id >= 0
        _check_order(previous, tokens, shared, is_same and previous_id >= sentence)
        repeated[sentence] = is_same  # equal sentences are neighbours, the lowest id first
        if not shared:
            ids.clear()
            links.clear()
        while ids and ids[-1] > sentence:
            fresh[ids[-1]] = max(fresh[ids[-1]], shared)
            ids.pop()
            shared = min(shared, links.pop())
        if ids:
            fresh[sentence] = shared
        ids.append(sentence)
        links.append(shared if len(ids) > 1 else 0)
        previous, previous_id = tokens, sentence
    return Repeats(fresh, repeated)


def _shared_prefix(left: np.ndarray, right: np.ndarray) -> int:
    shorter = min(len(left), len(right))
    if not shorter or left[0] != right[0]:  # most neighbours of different first words end here
        return 0
    differs = left[:shorter] != right[:shorter]
    at = int(differs.argmax())
    return at if differs[at] else shorter


def _check_order(left: np.ndarray, right: np.ndarray, shared: int, wrong_id: bool) -> None:
    """Unsorted sentences would give wrong answers silently; this is a caller's mistake, not a person's."""
    wrong_tokens = shared < len(left) and (shared == len(right) or left[shared] > right[shared])
    if wrong_tokens or wrong_id:
        raise ValueError("sentences must come sorted by tokens, then by id")
