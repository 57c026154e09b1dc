"""Endings of triggers: the last token and the last two tokens of each memory's triggers, and their frequencies."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from memlens.corpus.repeats import find_repeats, split_sentences
from memlens.index.reader import Index
from memlens.role.rules import TOKENS

Ints = NDArray[np.int64]
_SHIFT = 32
_NONE = -1  # stands for the missing token before the first token


class CorpusEndings:
    """Counts of the corpus's prefixes by their last token and, for some pairs, by their last two tokens.

    Only prefixes that can be triggers count. If several sentences share a beginning, the scan reads this beginning
    once, so its prefixes count once. `frequency` counts every token of the corpus.
    """

    def __init__(self, index: Index, pairs: Ints) -> None:
        self.pairs = np.unique(pairs)
        self.frequency = np.zeros(index.manifest.model.vocabulary + 1, np.int64)
        self.tokens, self.times = np.zeros_like(self.frequency), np.zeros(len(self.pairs), np.int64)
        for before, last, is_candidate in _prefix_ends(index):
            self.frequency += np.bincount(last, minlength=len(self.frequency))
            before, last = before[is_candidate], last[is_candidate]
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
    """Return the memory, the second-to-last token (-1 for none) and the last token of every top trigger of a layer.

    Some scans include BOS alone (position -1) as a prefix. It is left out, because it has no token of the corpus.
    """
    rows = index.arrays(
        """SELECT t.memory, CASE WHEN t.position > 0 THEN c.tokens[t.position] ELSE -1 END AS before,
                  c.tokens[t.position + 1] AS last
           FROM {triggers} t JOIN {corpus} c USING (sentence)
           WHERE t.layer = $1 AND t."end" = 'top' AND t.position >= 0""",
        [layer],
    )
    memory, before, last = (np.asarray(rows[name], np.int64) for name in ("memory", "before", "last"))
    return memory, before, last


def count_endings(memory: Ints, before: Ints, last: Ints, memories: int) -> dict[str, Ints | NDArray[np.float64]]:
    """Return statistics on the endings of each memory's triggers, as columns with one number per memory."""
    triggers = np.bincount(memory, minlength=memories)
    token, token_triggers, token_cover = _commonest(memory, last, triggers)
    pair, pair_triggers, pair_cover = _commonest(memory, pair_of(before, last), triggers)
    same = last == (pair & ((1 << _SHIFT) - 1))[memory]
    owners = np.unique(np.stack([memory, last]), axis=1)[0]
    return {
        "triggers": triggers,
        "token": token,
        "token_triggers": token_triggers,
        "token_cover": token_cover,
        "last_tokens": np.bincount(owners, minlength=memories),
        "pair": pair,
        "pair_triggers": pair_triggers,
        "pair_cover": pair_cover,
        "pair_token_triggers": np.bincount(memory[same], minlength=memories),
    }


def _commonest(memory: Ints, ending: Ints, triggers: Ints) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Return three columns: each memory's most common ending, the number of triggers with it, and a share of triggers.

    The share counts triggers that have one of the memory's TOKENS most common endings.
    """
    both, times = np.unique(np.stack([memory, ending]), axis=1, return_counts=True)
    order = np.lexsort((both[1], -times, both[0]))  # by memory, then by count (highest first), then by ending
    owner, endings, times = both[0][order], both[1][order], times[order]
    place = np.arange(len(owner)) - np.searchsorted(owner, owner)
    first = place == 0
    best, most = np.zeros(len(triggers), np.int64), np.zeros(len(triggers), np.int64)
    best[owner[first]], most[owner[first]] = endings[first], times[first]
    held = np.bincount(owner[place < TOKENS], weights=times[place < TOKENS], minlength=len(triggers))
    return best, most, held / np.maximum(triggers, 1)


def _prefix_ends(index: Index) -> Iterator[tuple[Ints, Ints, NDArray[np.bool_]]]:
    """Yield batches of prefixes: second-to-last token, last token, and whether the prefix can be a trigger."""
    settings, fresh_from = index.manifest.settings, _fresh_from(index)
    for batch in index.batches("SELECT tokens, sentence FROM {corpus}"):
        lists, sentences = batch.column(0), np.asarray(batch.column(1), np.int64)
        last = np.asarray(lists.flatten(), np.int64)
        lengths = np.asarray(lists.value_lengths())
        before = np.concatenate([[_NONE], last[:-1]]) if len(last) else last
        starts = np.cumsum(lengths) - lengths
        before[starts[lengths > 0]] = _NONE
        position = np.arange(len(last)) - np.repeat(starts, lengths)
        is_candidate = position >= np.repeat(fresh_from[sentences], lengths)
        if not settings.whole_sentence:
            is_candidate &= position < np.repeat(lengths, lengths) - 1
        yield before, last, is_candidate


def _fresh_from(index: Index) -> NDArray[np.int32]:
    """Return the first position in each sentence whose prefix was scanned."""
    counts, dedup = index.manifest.counts, index.manifest.settings.dedup
    if dedup == "none":
        return np.zeros(counts.sentences, np.int32)
    with TemporaryDirectory() as scratch:
        return find_repeats(_stored(index), counts.sentences, Path(scratch), dedup)


def _stored(index: Index) -> Iterator[tuple[Ints, list[bytes]]]:
    """Yield ids and tokens of the sentences of an index."""
    for batch in index.batches("SELECT sentence, tokens FROM {corpus}"):
        lists = batch.column(1)
        lengths, tokens = np.asarray(lists.value_lengths(), np.int64), np.asarray(lists.flatten(), np.int32)
        yield np.asarray(batch.column(0), np.int64), split_sentences(tokens.tobytes(), lengths)
