"""Shallow patterns: features that more triggers of a memory share than expected by chance.

Significance is tested for all memories together:

 1. A hypothesis is a pair of a memory and a feature that at least three background prefixes have.
 2. p = P(X >= k) with X ~ Binomial(t, f): k of the memory's t triggers share a feature that a random prefix has with
    probability f. A feature that fewer than three triggers share has p = 1.
 3. One cutoff per family of features controls the false discovery rate (Benjamini and Hochberg, 1995), because there
    are few classes of last words, more words, and many wordings of three words.

The patterns of a memory are selected from its significant features, which overlap (the ending "free press" implies the
ending "press", the affix -ess and the n-gram "press"):

 1. Drop an ending or n-gram that one of its content words explains, and keep the word.
 2. Hold back content words that few triggers share until topics are known, because a word of a topic is not a separate
    pattern.
 3. Select the strongest feature first. Below a frequency of 1 in 1000, rarity does not count, so that coverage decides.
    A feature about the same words as a selected one must be significant among the remaining prefixes.
 4. Also keep an ending that is frequent even among the prefixes of a broader pattern ("and his" next to "his").
 5. Replace an ending or n-gram with a longer one that covers at least 90% as many triggers.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.pattern.features import (
    GAP,
    Background,
    Feature,
    SpellingFeatures,
    families_of,
    number_features,
    read_key,
    shared_keys,
)
from memlens.pattern.matched import MatchedPlaces, draw_matched
from memlens.pattern.words import (
    GROUNDED,
    PrefixWords,
    TriggerRows,
    Words,
    read_prefix_words,
    sample_prefixes,
)
from memlens.progress import Progress
from memlens.settings import PatternSettings
from memlens.stats import binomial_tail, q_values

_AT_ONCE = 2048  # memories per block
_FREQUENT = 4e-3  # a word with a larger share of all words is not a content word
_RARE = 1e-3  # smaller frequencies count as this frequency, so rarity does not decide the order
_COVERS_AS_MUCH = 0.9
_COVERS_MUCH_LESS = 0.7
_EXPLAINED = 0.01  # if a feature has a larger p-value within another feature, the other feature explains it
_GRAINS = ("broad", "coarse", "fine", "finest")  # columns of tokens.parquet
_ONE_WORD = 0.67  # if one word makes up a larger share of a class or shape, the word is preferred
_DOMINANT = 0.6  # a content word with a larger share of triggers is a pattern even if a topic explains it


Ending = tuple[int, int, int]  # the last three words of a trigger, 0 for none
Cutoffs = tuple[float, ...]  # the highest p-value of significant features, by family


@dataclass(frozen=True)
class Candidate:
    """A significant feature of one memory."""

    feature: Feature
    members: int  # bit mask of trigger ranks
    share: float  # probability that a random prefix has the feature
    count: int  # number of sampled prefixes with the feature
    q: float
    key: int = 0  # key of the feature; a joined n-gram has the key of one of its parts

    @property
    def size(self) -> int:
        return self.members.bit_count()

    @property
    def token(self) -> int:
        """The token number, if the feature is a next token."""
        return int(self.feature.shape)

    def is_content_word(self, content: Collection[int]) -> bool:
        return self.feature.kind == "n-gram" and len(self.feature.words) == 1 and self.feature.words[0] in content


@dataclass(frozen=True)
class ShallowChoice:
    """The shallow patterns of one memory, and the content words that are held back until topics are known."""

    patterns: tuple[Candidate, ...]
    waiting: tuple[Candidate, ...]


@dataclass(frozen=True, eq=False)
class Texts:
    """The words of triggers and random prefixes, and the features of random prefixes."""

    words: Words
    prefixes: PrefixWords  # prefixes of TriggerRows, followed by the prefixes of `matched`
    matched: MatchedPlaces
    sample: PrefixWords
    spelled: SpellingFeatures
    feature_names: list[str]  # by number; the first name has number 1
    background: Background

    @classmethod
    def read(cls, index: Index, triggers: TriggerRows, settings: PatternSettings) -> "Texts":
        words = Words()
        prefixes = read_prefix_words(index, triggers.sentences, triggers.positions, words)
        matched = draw_matched(index, last_token_counts(triggers.rows, prefixes.tokens, index), settings.seed)
        prefixes = prefixes.join(read_prefix_words(index, matched.sentences, matched.positions, words))
        sample = read_prefix_words(index, *sample_prefixes(index, settings.background, settings.seed), words)
        last = np.concatenate([prefixes.last, sample.last])
        spelled, names = number_features(words, last, index.vocabulary, token_classes(index))
        return cls(words, prefixes, matched, sample, spelled, names, Background.of(sample, spelled))

    def content_words(self) -> set[int]:
        """Return the numbers of words that are not among the most frequent words of the corpus.

        ASCII words must have at least three characters.
        """
        ends = np.maximum(self.sample.offsets[1:][self.sample.lengths > 0] - 1, 0)
        shares = np.bincount(self.sample.words[ends], minlength=len(self.words.texts)) / max(len(ends), 1)
        frequent = set(np.flatnonzero(shares > _FREQUENT).tolist())
        long = (text for text in enumerate(self.words.texts) if len(text[1]) > 2 or not text[1].isascii())
        return {number for number, text in long if any(map(str.isalpha, text))} - frequent


def token_classes(index: Index) -> NDArray[np.int32]:
    """Return the class of every token at each grain (broad to finest), -1 for none. [grains, vocabulary]

    The array has no rows if the index has no tokens table.
    """
    if not index.has("tokens"):
        return np.zeros((0, len(index.vocabulary)), np.int32)
    table = index.table("tokens", list(_GRAINS))
    classes = [pc.fill_null(column, -1).to_numpy() for column in table.columns]
    return np.array(classes, np.int32)[:, : len(index.vocabulary)]


def last_token_counts(rows: NDArray[np.int64], tokens: NDArray[np.int32], index: Index) -> NDArray[np.int64]:
    """Return, for each token, the largest number of triggers of one memory that end with it. [vocabulary]"""
    memory, rank = np.nonzero(rows >= 0)
    last = tokens[rows[memory, rank]].astype(np.int64)
    pairs, times = np.unique(memory[last >= 0] << 32 | last[last >= 0], return_counts=True)
    largest = np.zeros(index.manifest.model.vocabulary, np.int64)
    np.maximum.at(largest, pairs & 0xFFFFFFFF, times)
    return largest


@dataclass(frozen=True, eq=False)
class SignificantFeatures:
    """The significant features of all memories, sorted by memory."""

    memory: NDArray[np.int32]  # rows of TriggerRows
    keys: NDArray[np.int64]
    sets: NDArray[np.uint64]
    shares: NDArray[np.float64]
    q: NDArray[np.float64]
    cutoffs: Cutoffs
    hypotheses: tuple[int, ...]  # number of hypotheses, by family

    def candidates(self, texts: Texts, memories: int) -> Iterator[list[Candidate]]:
        """Yield a list of candidates for each memory."""
        counts = texts.background.count(self.keys)
        columns = (self.sets, self.shares, counts, self.q, self.keys)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        flat = [Candidate(read_key(row[-1], texts.feature_names), *row) for row in rows]
        edges = np.searchsorted(self.memory, np.arange(memories + 1)).tolist()
        for first, last in pairwise(edges):
            yield flat[first:last]


def find_significant(
    texts: Texts, triggers: TriggerRows, settings: PatternSettings, progress: Progress
) -> SignificantFeatures:
    """Return the features of all memories that are significant at the false discovery rate."""
    parts = []
    memories = len(triggers.rows)
    for first in range(0, memories, _AT_ONCE):
        progress("shallow", first, memories)
        rows = triggers.rows[first : first + _AT_ONCE]
        memory, keys, sets, sizes = shared_keys(rows, texts.prefixes, texts.spelled, GROUNDED)
        lengths = np.where(rows >= 0, texts.prefixes.lengths[np.maximum(rows, 0)], -1)
        shares = texts.background.shares(keys, lengths[memory])
        p = binomial_tail(sizes, (rows >= 0).sum(1)[memory], shares)
        kept = p <= settings.rate  # larger p-values cannot be significant
        parts.append((memory[kept] + first, keys[kept], sets[kept], shares[kept], p[kept]))
    progress("shallow", memories, memories)
    memory, keys, sets, shares, p = (np.concatenate(column) for column in zip(*parts, strict=True))
    memories = int((triggers.filled >= GROUNDED).sum())
    families, q = families_of(keys), np.ones(len(p))
    highest = []
    for number, hypotheses in enumerate(texts.background.hypotheses):
        family = families == number
        q[family] = q_values(p[family], max(hypotheses * memories, int(family.sum())))
        highest.append(float(p[family & (q <= settings.rate)].max(initial=0.0)))
    kept = q <= settings.rate
    significant = (memory[kept], keys[kept], sets[kept], shares[kept], q[kept])
    tested = tuple(hypotheses * memories for hypotheses in texts.background.hypotheses)
    return SignificantFeatures(*significant, tuple(highest), tested)


def choose(
    candidates: Sequence[Candidate], triggers: int, ends: Sequence[Ending], content: Collection[int], cutoffs: Cutoffs
) -> ShallowChoice:
    """Select the shallow patterns of a memory from its significant features."""
    words = {c.feature.words[0]: c for c in candidates if c.is_content_word(content)}
    kept = [c for c in candidates if not any(_explains(words.get(w), c) for w in set(c.feature.words))]
    waiting = [c for c in kept if c.is_content_word(content) and c.size < _DOMINANT * triggers]
    names = {c.feature for c in waiting}
    patterns = _pick([], [c for c in kept if c.feature not in names], triggers, ends, cutoffs)
    return ShallowChoice(tuple(_longest(patterns, candidates)), tuple(waiting))


def add_waiting(
    chosen: ShallowChoice,
    candidates: Sequence[Candidate],
    topic: int,
    triggers: int,
    ends: Sequence[Ending],
    cutoffs: Cutoffs,
) -> tuple[Candidate, ...]:
    """Return the chosen patterns, the held-back words that no topic explains, and endings within broader patterns.

    `topic` is a bit mask of the triggers that belong to a topic.
    """
    free = [c for c in chosen.waiting if (c.members & topic).bit_count() < c.size / 2]
    more = _pick(list(chosen.patterns), free, triggers, ends, cutoffs)
    named = _longest(more, candidates, before=len(chosen.patterns))
    return (*named, *_inside(named, sorted(candidates, key=lambda c: _score(c, triggers))))


def _explains(word: Candidate | None, candidate: Candidate) -> bool:
    """Return True if the candidate is no more frequent among prefixes with the word than expected by chance."""
    if word is None or word is candidate:
        return False
    given = min((candidate.count + 1) / (word.count + 1), 1.0)
    return bool(binomial_tail(candidate.size, word.size, given) > _EXPLAINED)


def _score(candidate: Candidate, triggers: int) -> tuple[float, int, float, str]:
    """Return a sort key by strength (strongest first), length, rarity and name."""
    feature, p = candidate.feature, float(binomial_tail(candidate.size, triggers, max(candidate.share, _RARE)))
    name = repr((feature.words, feature.shape))
    return log(max(p, 1e-300)), -max(len(feature.places), len(feature.words), 1), candidate.share, name


def _pick(
    picked: list[Candidate], candidates: Iterable[Candidate], triggers: int, ends: Sequence[Ending], cutoffs: Cutoffs
) -> list[Candidate]:
    """Add features to `picked`, strongest first. Classes and shapes that are mostly one word come last."""
    queue = sorted(candidates, key=lambda c: _score(c, triggers))
    waiting = [c for c in queue if c.feature.is_of_last_word and _most_frequent(c.members, ends) > _ONE_WORD]
    for candidate in [c for c in queue if c not in waiting] + waiting:
        taken = 0
        at_end = sum(1 << rank for rank, words in enumerate(ends) if words[-1] in candidate.feature.words)
        for other in picked:
            if candidate.feature.kind in ("opening", "early") or _same_words(candidate.feature, other.feature):
                # prefixes that share a wording are not evidence for a position in the sentence
                taken |= other.members
            elif other.feature.is_of_last_word:
                taken |= other.members & at_end
        fresh = candidate.members & ~taken
        if fresh.bit_count() < GROUNDED or not _is_varied(candidate.feature, fresh, ends):
            continue
        chance = binomial_tail(fresh.bit_count(), triggers - taken.bit_count(), candidate.share)
        if taken and chance > cutoffs[candidate.feature.family]:
            continue
        picked.append(candidate)
    return picked


def _inside(picked: Sequence[Candidate], queue: Iterable[Candidate]) -> list[Candidate]:
    """Return endings and pieces that are frequent even within a broader pattern, such as "and his" within "his"."""
    inside: list[Candidate] = []
    for candidate in queue:
        if candidate in picked or candidate.feature.kind not in ("ending", "piece"):
            continue
        if any((candidate.members & other.members).bit_count() > candidate.size / 2 for other in inside):
            continue
        wider = [
            other
            for other in picked
            if not other.feature.places.isdisjoint(candidate.feature.places)
            and candidate.size <= _COVERS_MUCH_LESS * other.size
            and (candidate.members & other.members).bit_count() >= _COVERS_AS_MUCH * candidate.size
        ]
        given = [min((candidate.count + 1) / (other.count + 1), 1.0) for other in wider]
        sizes = [other.size for other in wider]
        if wider and max(binomial_tail(candidate.size, sizes, given)) <= _EXPLAINED:
            inside.append(candidate)
    return inside


def _most_frequent(members: int, ends: Sequence[Ending]) -> float:
    """Return the share of the prefixes in a bit mask that end with the most frequent of their last words."""
    words = [own[-1] for rank, own in enumerate(ends) if members >> rank & 1]
    return max(words.count(word) for word in set(words)) / len(words) if words else 0.0


def _is_varied(feature: Feature, members: int, ends: Sequence[Ending]) -> bool:
    """Return True if enough different words occur at the place that a feature leaves open.

    Recurring words are already covered by an "ending" feature. Three different words are enough. For the second-to-last
    word, two are enough, such as "his" and "their".
    """
    if feature.kind == "frame":
        gaps = [place for place, word in enumerate(feature.words) if word == GAP and any(feature.words[:place])]
    else:
        gaps = [-1] if feature.is_of_last_word else [-2] if feature.kind == "before" else []
    open_words = {tuple(own[gap] for gap in gaps) for rank, own in enumerate(ends) if members >> rank & 1}
    return not gaps or len(open_words) >= (2 if feature.kind == "before" else GROUNDED)


def _same_words(one: Feature, other: Feature) -> bool:
    """Return True if two features describe the same words."""
    if one.kind != "n-gram" and other.kind != "n-gram":
        return not one.places.isdisjoint(other.places)
    return not {*one.words, GAP}.isdisjoint({*other.words} - {GAP})


def _longest(patterns: Iterable[Candidate], candidates: Sequence[Candidate], before: int = 0) -> list[Candidate]:
    """Replace each pattern with its longest form, starting at number `before`, and drop repeated patterns."""
    longest: list[Candidate] = []
    for number, pattern in enumerate(patterns):
        best = pattern
        for other in candidates if number >= before else ():
            is_longer = _length(other.feature) > _length(best.feature) and _implies(other.feature, pattern.feature)
            if is_longer and other.size >= _COVERS_AS_MUCH * pattern.size:
                best = other
        taken = 0
        for earlier in longest:
            if _same_words(best.feature, earlier.feature):
                taken |= earlier.members
        if (best.members & ~taken).bit_count() >= GROUNDED:
            longest.append(best)
        else:
            longest = [_join(earlier, best) for earlier in longest]
    return longest


def _join(one: Candidate, other: Candidate) -> Candidate:
    """Join two overlapping n-grams of the same prefixes, such as "for the first" and "the first time"."""
    left, right = one.feature.words, other.feature.words
    if one.feature.kind != "n-gram" or other.feature.kind != "n-gram" or _implies(one.feature, other.feature):
        return one
    both = one.members & other.members
    if both.bit_count() < _COVERS_AS_MUCH * one.size:
        return one
    for first, second in ((left, right), (right, left)):
        for overlap in range(min(len(first), len(second)) - 1, 0, -1):
            if first[-overlap:] == second[:overlap]:
                return replace(one, feature=Feature("n-gram", first + second[overlap:]), members=both)
    return one


def _length(feature: Feature) -> int:
    """Return the number of words of a feature, or the number of characters of an affix."""
    return sum(word != GAP for word in feature.words) or (len(feature.shape) if "-" in feature.shape else 0)


def _implies(longer: Feature, shorter: Feature) -> bool:
    """Return True if every prefix with the longer feature also has the shorter one."""
    if longer.kind != shorter.kind:
        return False
    if longer.kind in ("piece", "class", "list", "opening", "early", "before", "inside"):
        return False
    if longer.kind == "shape":  # affixes: -ing implies -ng, under- implies und-
        one, other = longer.shape, shorter.shape
        if other.startswith("-"):
            return one.startswith("-") and one.endswith(other[1:])
        return other.endswith("-") and one.startswith(other[:-1])
    size = len(shorter.words)
    if longer.kind == "frame":
        return all(one == other for one, other in zip(longer.words, shorter.words, strict=True) if other != GAP)
    if longer.kind == "ending":
        return longer.words[-size:] == shorter.words
    return any(longer.words[i : i + size] == shorter.words for i in range(len(longer.words) - size + 1))
