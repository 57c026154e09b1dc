"""Endings of triggers: which last tokens, and last two tokens, each memory's triggers have, and how rare they are."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.role.rules import TOKENS

Ints = NDArray[np.int64]
_SHIFT = 32
_NONE = -1  # no token before the first one


class CorpusEndings:
    """The corpus as endings of prefixes: how often each token ends one, and how often chosen pairs do."""

    def __init__(self, index: Index, pairs: Ints) -> None:
        self.pairs = np.unique(pairs)
        self.tokens = np.zeros(index.manifest.model.vocabulary + 1, np.int64)
        self.times = np.zeros(len(self.pairs), np.int64)
        for before, last in _prefix_ends(index):
            self.tokens += np.bincount(last, minlength=len(self.tokens))
            keys = pair_of(before, last)
            place = np.minimum(np.searchsorted(self.pairs, keys), len(self.pairs) - 1)
            if len(self.pairs):
                self.times += np.bincount(place[self.pairs[place] == keys], minlength=len(self.pairs))

    @property
    def prefixes(self) -> int:
        return int(self.tokens.sum())

    def pair_counts(self, pairs: Ints) -> Ints:
        if not len(self.pairs):
            return np.zeros(len(pairs), np.int64)
        place = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
        return np.asarray(np.where(self.pairs[place] == pairs, self.times[place], 0))


def pair_of(before: Ints, last: Ints) -> Ints:
    return (before.astype(np.int64) + 1) << _SHIFT | last


def trigger_ends(index: Index, layer: int) -> tuple[Ints, Ints, Ints]:
    """(memory, token before the last, last token) of every top trigger of a layer; -1 before a first token."""
    rows = index.arrays(
        """SELECT t.memory, CASE WHEN t.position > 0 THEN c.tokens[t.position] ELSE -1 END AS before,
                  c.tokens[t.position + 1] AS last
           FROM {triggers} t JOIN {corpus} c USING (sentence) WHERE t.layer = $1 AND t."end" = 'top'""",
        [layer],
    )
    memory, before, last = (np.asarray(rows[name], np.int64) for name in ("memory", "before", "last"))
    return memory, before, last


def count_endings(memory: Ints, before: Ints, last: Ints, memories: int) -> dict[str, Ints | NDArray[np.float64]]:
    """Columns over the memories of a layer; what is rare about them comes from the corpus, by `token` and `pair`."""
    triggers = np.bincount(memory, minlength=memories)
    token, token_triggers, token_cover = _commonest(memory, last, triggers)
    pair, pair_triggers, pair_cover = _commonest(memory, pair_of(before, last), triggers)
    same = last == (pair & ((1 << _SHIFT) - 1))[memory]
    return {
        "triggers": triggers,
        "token": token,
        "token_triggers": token_triggers,
        "token_cover": token_cover,
        "pair": pair,
        "pair_triggers": pair_triggers,
        "pair_cover": pair_cover,
        "pair_token_triggers": np.bincount(memory[same], minlength=memories),
    }


def _commonest(memory: Ints, ending: Ints, triggers: Ints) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Of each memory its commonest ending, how many triggers have it, and the share that TOKENS commonest make up."""
    both, times = np.unique(np.stack([memory, ending]), axis=1, return_counts=True)
    order = np.lexsort((both[1], -times, both[0]))  # by memory, commonest first, of equals the lowest
    owner, endings, times = both[0][order], both[1][order], times[order]
    place = np.arange(len(owner)) - np.searchsorted(owner, owner)
    first = place == 0
    best, most = np.zeros(len(triggers), np.int64), np.zeros(len(triggers), np.int64)
    best[owner[first]], most[owner[first]] = endings[first], times[first]
    held = np.bincount(owner[place < TOKENS], weights=times[place < TOKENS], minlength=len(triggers))
    return best, most, held / np.maximum(triggers, 1)


def _prefix_ends(index: Index) -> Iterator[tuple[Ints, Ints]]:
    """(token before, last token) of every prefix of the corpus, some sentences at a time."""
    for batch in index.batches("SELECT tokens FROM {corpus}"):
        lists = batch.column(0)
        last = np.asarray(lists.flatten(), np.int64)
        lengths = np.asarray(lists.value_lengths())
        before = np.concatenate([[_NONE], last[:-1]]) if len(last) else last
        starts = np.cumsum(lengths) - lengths
        before[starts[lengths > 0]] = _NONE
        yield before, last
