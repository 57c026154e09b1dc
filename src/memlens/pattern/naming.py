"""Descriptions of patterns as a person would write them, and a name for each memory.

Words are written in their most frequent spelling. The last word of a prefix is completed from the text if the prefix
ends inside it.

A name consists of the one or two patterns with the best evidence above CLEAR. Evidence is the AUROC on held-out
triggers against random prefixes (score). With fewer than ENOUGH held-out triggers it is estimated on the triggers
themselves. Other memories are called "no clear pattern", with their most common endings. A name says if a recurring
next token is among the first tokens of the memory's value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memlens.pattern.features import Feature, is_content_word, sentence_start
from memlens.pattern.following import FollowingTokens
from memlens.pattern.score import Scores
from memlens.pattern.shallow import Candidate, Ending, Texts
from memlens.pattern.states import StateSubject
from memlens.pattern.topics import SemanticTopic, WordVectors
from memlens.pattern.words import ENOUGH, GROUNDED, NEXT, PrefixWords
from memlens.stats import binomial_tail, upper_share

CLEAR = 0.7
UNCLEAR = "no clear pattern"
_NAMED = 2  # maximum number of patterns in a name
_ENDINGS = 3  # number of endings to list for a memory without a clear pattern
_MOSTLY = 0.5  # minimum share of a pattern's prefixes
_UNLIKELY = 1e-4  # highest p-value of a content word that describes a subject


@dataclass(frozen=True)
class Pattern:
    """A property that at least three triggers of a memory share."""

    name: str  # equal for the same pattern of different memories
    kind: str  # "shallow", "semantic" or "next"
    description: str
    members: int  # bit mask of trigger ranks
    share: float  # upper bound of the share of random prefixes with the pattern
    q: float
    scores: Scores  # scores on held-out triggers
    sense: int = 0  # patterns of one sense share most of their prefixes
    token: int | None = None  # the next token, for a pattern of kind "next"

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in range(self.members.bit_length()) if self.members >> rank & 1]

    def order(self, triggers: int) -> tuple[float, str]:
        """Return a sort key: patterns that are certain and confirmed on held-out triggers come first."""
        held = self.scores.auroc
        sure = self.confidence(triggers)
        return -(sure if held is None else (sure + max(2 * held - 1, 0.0)) / 2), self.name

    def confidence(self, triggers: int) -> float:
        """Return the share of triggers with the pattern beyond chance (0: as random, 1: all), times 1 - q."""
        beyond = (self.members.bit_count() / triggers - self.share) / max(1 - self.share, 1e-9)
        return max(beyond, 0.0) * (1 - self.q)

    def evidence(self, triggers: int, held: int) -> float:
        """Return the AUROC on `held` held-out triggers, or on the triggers themselves if these are too few."""
        if self.scores.auroc is not None and held >= ENOUGH:
            return self.scores.auroc
        return 0.5 + (self.members.bit_count() / triggers - self.share) / 2


class Describer:
    """Turns candidates and topics into described patterns."""

    def __init__(self, texts: Texts, vectors: WordVectors, vocabulary: Sequence[str]) -> None:
        self.texts = texts
        self.written = texts.words.as_written()
        self.content = texts.content_words()
        self.counts = _count_prefixes(texts.sample, len(texts.words.texts))
        self.vectors = vectors
        self.vocabulary = vocabulary

    def wording(self, candidate: Candidate, rows: NDArray[np.int64], ends: list[Ending], scores: Scores) -> Pattern:
        """Describe a candidate of a memory. `rows` and `ends` are its triggers and their last words, by rank."""
        if candidate.feature.kind == NEXT:
            text = self.vocabulary[candidate.token]
            described = (f"{NEXT}:{text}", NEXT, f'before "{text.strip() or text}"')
            return Pattern(*described, candidate.members, candidate.share, candidate.q, scores, token=candidate.token)
        feature = candidate.feature
        ranks = [rank for rank in range(len(rows)) if candidate.members >> rank & 1]
        own = rows[ranks]
        if feature.kind == "ending":
            described_as = self._ending(feature, own)
        else:
            words = [self._example(feature, int(rows[rank]), ends[rank]) for rank in ranks]
            described_as = feature.describe(self.written, _most_frequent(words))
        name = feature.name(self.texts.words)
        return Pattern(name, "shallow", described_as, candidate.members, candidate.share, candidate.q, scores)

    def topic(self, topic: SemanticTopic, scores: Scores) -> Pattern:
        numbers = [self.vectors.numbers[row] for row in topic.words]
        name = f"topic:{' '.join(sorted(self.texts.words.texts[number] for number in numbers))}"
        described = f"about: {', '.join(self.written[number] for number in numbers)}"
        return Pattern(name, "semantic", described, topic.members, topic.share, topic.q, scores)

    def subject(self, subject: StateSubject, rows: NDArray[np.int64]) -> Pattern:
        """Describe a subject by the tokens that the model expects next and by the content words of its triggers."""
        expected = [self.vocabulary[token].strip() for token in subject.expects]
        described = f"expects {', '.join(expected)}"
        words = self._typical_words(rows[_ranks(subject.members)])
        if words:
            described += f"; about: {', '.join(self.written[word] for word in words)}"
        name = f"subject:{' '.join(sorted(text.lower() for text in expected))}"
        return Pattern(name, "semantic", described, subject.members, subject.share, subject.q, subject.scores)

    def _typical_words(self, rows: NDArray[np.int64]) -> list[int]:
        """Return content words of at least three prefixes that are more frequent than in random prefixes."""
        prefixes = self.texts.prefixes
        words = (np.unique(prefixes.words[prefixes.offsets[row] : prefixes.offsets[row + 1]]) for row in rows.tolist())
        found, times = np.unique(np.concatenate(list(words)), return_counts=True)
        kept = [place for place, word in enumerate(found.tolist()) if word in self.content and times[place] >= GROUNDED]
        found, times = found[kept], times[kept]
        shares = upper_share(self.counts[found], self.texts.sample.size)
        p = binomial_tail(times, len(rows), shares)
        return found[np.lexsort((found, p))][: (p <= _UNLIKELY).sum()][:_ENDINGS].tolist()

    def is_nameable(self, candidate: Candidate, rows: NDArray[np.int64]) -> bool:
        """Return False for words anywhere without a content word, and for classes of function words or pieces."""
        feature = candidate.feature
        if feature.kind == "n-gram":
            return any(word in self.content for word in feature.words)
        if feature.kind != "class":
            return True
        prefixes, spellings = self.texts.prefixes, self.texts.words.spellings
        own = rows[[rank for rank in range(len(rows)) if candidate.members >> rank & 1]]
        last = [spellings[prefixes.last[row]].lower() for row in own.tolist() if not prefixes.goes_on[row]]
        words = [word for word in last if is_content_word(word)]
        return len(words) >= _MOSTLY * len(own) and len(set(words)) >= GROUNDED

    def endings(self, rows: NDArray[np.int64]) -> list[tuple[str, int]]:
        """Return the last words that recur, most frequent first, with their numbers of triggers."""
        last = self.texts.prefixes.whole[rows[rows >= 0]].tolist()
        counts = Counter(self.texts.words.spellings[word] for word in last if word)
        return [(word, times) for word, times in counts.most_common() if times > 1][:_ENDINGS]

    def _ending(self, feature: Feature, rows: NDArray[np.int64]) -> str:
        prefixes, spellings = self.texts.prefixes, self.texts.words.spellings
        last = _most_frequent(spellings[word] for word in prefixes.last[rows].tolist())[0]
        text = " ".join([*(self.written[word] for word in feature.words[:-1]), last])
        if prefixes.goes_on[rows].mean() < _MOSTLY:
            return f'ends with "{text}"'
        return f'ends with "{text}" of {_listed(spellings[word] for word in prefixes.whole[rows].tolist())}'

    def _example(self, feature: Feature, row: int, ends: Ending) -> str:
        """Return the word of a trigger at the place that the feature describes."""
        prefixes = self.texts.prefixes
        if feature.kind == "opening":
            begin, end = prefixes.offsets[row : row + 2].tolist()
            return self.written[prefixes.words[sentence_start(prefixes.words, self.texts.spelled.marks, begin, end)]]
        return self.written[ends[-2]] if feature.kind == "before" else self.texts.words.spellings[prefixes.whole[row]]


def _ranks(members: int) -> list[int]:
    return [rank for rank in range(members.bit_length()) if members >> rank & 1]


def _count_prefixes(prefixes: PrefixWords, words: int) -> NDArray[np.int64]:
    """Return the number of prefixes that contain each word."""
    owner = np.repeat(np.arange(prefixes.size), prefixes.lengths)
    pairs = np.unique(owner << 20 | prefixes.words)
    return np.bincount(pairs & ((1 << 20) - 1), minlength=words)


def _most_frequent(words: Iterable[str]) -> list[str]:
    return [word for word, _ in sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))]


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f'"{word}"' for word in _most_frequent(words)[:_ENDINGS])


def name_memory(
    patterns: Sequence[Pattern],
    following: FollowingTokens,
    endings: Sequence[tuple[str, int]],
    vocabulary: Sequence[str],
    triggers: int,
    held: int,
) -> tuple[str, float | None]:
    """Return the name of a memory, and the evidence of its best pattern (None without a clear one)."""
    evidence = {pattern.name: pattern.evidence(triggers, held) for pattern in patterns}
    clear = [pattern for pattern in patterns if evidence[pattern.name] > CLEAR]
    clear = sorted(clear, key=lambda pattern: (-evidence[pattern.name], *pattern.order(triggers)))[:_NAMED]
    best = evidence[clear[0].name] if clear else None
    clear = sorted(clear, key=lambda pattern: pattern.kind == NEXT)  # next tokens come last
    agreed = [(token, times) for token, times in following.typical if token in following.promoted]
    parts = []
    for pattern in clear:
        is_agreed = pattern.token in dict(agreed)
        parts.append(pattern.description)
        if pattern.kind == NEXT:
            parts[-1] += f" ({len(pattern.ranks)} of {triggers}{', promoted by its value' if is_agreed else ''})"
    one_sense = len({pattern.sense for pattern in clear}) < 2
    name = (", " if one_sense else " or ").join(parts)
    if not clear:
        name = UNCLEAR
        if endings:
            name += "; common endings: " + ", ".join(f'"{word}" ({times})' for word, times in endings)
    if agreed and not any(pattern.token in dict(agreed) for pattern in clear):
        token, times = agreed[0]
        name += f'; before "{vocabulary[token].strip()}" ({times} of {triggers}, promoted by its value)'
    return name, best
