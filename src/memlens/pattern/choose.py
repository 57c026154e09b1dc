"""From many significant features of one memory to the few patterns that a person would name.

Features overlap: whoever ends with "free press" also ends with "press" and in -ess, and contains "press". The most
telling one is taken first (rarer than one in a thousand counts as one in a thousand, so that what covers more wins over
what is merely rarer); another one that concerns the same words must then be significant among the prefixes that are
left. A longer ending or n-gram that covers as much takes the place of the shorter one. An ending or an n-gram that is
no more frequent than the presence of one of its content words explains is dropped in favour of that word; a content
word alone waits until topics are known, since a word of the memory's topic is no pattern of its own.
Knows one memory's candidates; reads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, lgamma, log, log1p

from memlens.pattern.features import GROUNDED, OPENING_QUOTE, Feature

_RARE = 1e-3  # below this, rarity adds nothing to the order of choice
_COVERS_AS_MUCH = 0.9
_EXPLAINED = 0.01  # a feature no rarer than this, given its content word, is explained by the word
_DOMINANT = 0.6  # a content word in so many of the triggers is a pattern whatever the topic


@dataclass(frozen=True)
class Candidate:
    """A significant feature of one memory."""

    feature: Feature
    members: int  # prefixes by trigger rank, a bit each
    share: float  # chance that a random prefix has it
    count: int  # how many of the sampled prefixes have it
    q: float

    @property
    def size(self) -> int:
        return self.members.bit_count()

    def is_content_word(self, content: Collection[int]) -> bool:
        return self.feature.kind == "n-gram" and len(self.feature.words) == 1 and self.feature.words[0] in content


@dataclass(frozen=True)
class Chosen:
    """Patterns of one memory, and content words that may yet become some."""

    patterns: tuple[Candidate, ...]
    waiting: tuple[Candidate, ...]


def tail(k: int, t: int, f: float) -> float:
    """P(X >= k), X ~ Binomial(t, f), for the few numbers of one memory."""
    if k <= 0 or f >= 1:
        return 1.0
    log_f, log_rest, all_ways = log(f), log1p(-f), lgamma(t + 1)
    terms = (all_ways - lgamma(j + 1) - lgamma(t - j + 1) + j * log_f + (t - j) * log_rest for j in range(k, t + 1))
    return min(sum(map(exp, terms)), 1.0)


def choose(
    candidates: Sequence[Candidate], triggers: int, last_words: Sequence[int], content: Collection[int], cutoff: float
) -> Chosen:
    """The shallow patterns among a memory's significant features; `cutoff` is the highest p-value that is believed."""
    kept = _without_explained(candidates, content)
    waiting = [c for c in kept if c.is_content_word(content) and c.size < _DOMINANT * triggers]
    names = {c.feature for c in waiting}
    patterns = _greedy([], [c for c in kept if c.feature not in names], triggers, last_words, cutoff)
    return Chosen(tuple(_longest(patterns, candidates)), tuple(waiting))


def add_waiting(
    chosen: Chosen, candidates: Sequence[Candidate], topic: int, triggers: int, last_words: Sequence[int], cutoff: float
) -> tuple[Candidate, ...]:
    """Patterns with those waiting words that the topic's prefixes (a bit each) do not account for."""
    free = [c for c in chosen.waiting if (c.members & topic).bit_count() < c.size / 2]
    more = _greedy(list(chosen.patterns), free, triggers, last_words, cutoff)
    return tuple(_longest(more, candidates, before=len(chosen.patterns)))


def _without_explained(candidates: Sequence[Candidate], content: Collection[int]) -> list[Candidate]:
    words = {c.feature.words[0]: c for c in candidates if c.is_content_word(content)}
    return [c for c in candidates if not any(_explains(words.get(w), c) for w in set(c.feature.words))]


def _explains(word: Candidate | None, candidate: Candidate) -> bool:
    """Given that the word is in so many prefixes, is it no wonder that the candidate is in those it is in?"""
    if word is None or word is candidate:
        return False
    given = min((candidate.count + 1) / (word.count + 1), 1.0)
    return tail(candidate.size, word.size, given) > _EXPLAINED


def _score(candidate: Candidate, triggers: int) -> tuple[float, int, float, str]:
    """Sorts the most telling first; equal ones by length, rarity and name, so that the order is always the same."""
    telling = tail(candidate.size, triggers, max(candidate.share, _RARE))
    feature = candidate.feature
    return (
        log(max(telling, 1e-300)),
        -max(len(feature.words), 1),
        candidate.share,
        repr((feature.words, feature.shape)),
    )


def _greedy(
    picked: list[Candidate], candidates: Iterable[Candidate], triggers: int, last_words: Sequence[int], cutoff: float
) -> list[Candidate]:
    for candidate in sorted(candidates, key=lambda c: _score(c, triggers)):
        taken = 0
        at_end = sum(1 << rank for rank, word in enumerate(last_words) if word in candidate.feature.words)
        for other in picked:
            if _same_words(candidate.feature, other.feature):
                taken |= other.members
            elif other.feature.kind == "shape":
                taken |= other.members & at_end
        fresh = candidate.members & ~taken
        if fresh.bit_count() < GROUNDED:
            continue
        if _is_of_words(candidate.feature) and _distinct(fresh, last_words) < GROUNDED:
            continue  # a few words over and over are endings, not a shape
        if taken and tail(fresh.bit_count(), triggers - taken.bit_count(), candidate.share) > cutoff:
            continue
        picked.append(candidate)
    return picked


def _same_words(one: Feature, other: Feature) -> bool:
    """Do two features look at the same place? Endings and shapes do: at the last word."""
    if one.kind != "n-gram" and other.kind != "n-gram":
        return True
    return not set(one.words).isdisjoint(other.words)


def _is_of_words(feature: Feature) -> bool:
    """Is it a shape that many different words may have? An opening quote is always the same sign."""
    return feature.kind == "shape" and feature.shape != OPENING_QUOTE


def _distinct(members: int, last_words: Sequence[int]) -> int:
    return len({word for rank, word in enumerate(last_words) if members >> rank & 1})


def _longest(patterns: Iterable[Candidate], candidates: Sequence[Candidate], before: int = 0) -> list[Candidate]:
    """Each pattern, from number `before` on, in its longest form; what then repeats an earlier one is dropped."""
    found: list[Candidate] = []
    for number, pattern in enumerate(patterns):
        best = pattern
        for other in candidates if number >= before else ():
            is_longer = _length(other.feature) > _length(best.feature) and _implies(other.feature, pattern.feature)
            if is_longer and other.size >= _COVERS_AS_MUCH * pattern.size:
                best = other
        taken = 0
        for earlier in found:
            if _same_words(best.feature, earlier.feature):
                taken |= earlier.members
        if (best.members & ~taken).bit_count() >= GROUNDED:
            found.append(best)
        else:
            found = [_joined(earlier, best) for earlier in found]
    return found


def _joined(one: Candidate, other: Candidate) -> Candidate:
    """Two n-grams of the same prefixes that continue each other, as one: "for the first" and "the first time"."""
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
    return len(feature.words) or (len(feature.shape) if "-" in feature.shape else 0)


def _implies(longer: Feature, shorter: Feature) -> bool:
    if longer.kind != shorter.kind:
        return False
    if longer.kind == "shape":  # of affixes: -ing implies -ng, under- implies und-
        one, other = longer.shape, shorter.shape
        if other.startswith("-"):
            return one.startswith("-") and one.endswith(other[1:])
        return other.endswith("-") and one.startswith(other[:-1])
    size = len(shorter.words)
    if longer.kind == "ending":
        return longer.words[-size:] == shorter.words
    return any(longer.words[i : i + size] == shorter.words for i in range(len(longer.words) - size + 1))
