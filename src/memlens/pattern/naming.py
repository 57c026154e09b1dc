"""Describe patterns as a person would, and name each memory.

Words are written in their most frequent spelling in the described triggers. If a prefix ends inside a word, this word
is completed from the text.

A name consists of one or two clear patterns:

 1. The rate of a pattern is the share of triggers that have it. If a smaller share of held-out triggers has the
    pattern, the rate is the mean of the two shares. If the share of held-out triggers is less than twice the share of
    random prefixes, the rate is the share of held-out triggers.
    If the text has N prefixes with a wording and n of them are triggers, at most N - n held-out triggers can have this
    wording. The share of held-out triggers is a share of this number. If the number is below ENOUGH, held-out triggers
    do not change the rate.
 2. The evidence of a pattern is its AUROC at this rate, (1 + rate - share) / 2, where share is the share of random
    prefixes with the pattern. The evidence of a subject is at most the AUROC on its held-out triggers. A pattern is
    clear if its evidence exceeds CLEAR.
 3. Endings of different words form one pattern: ends with "did", "could" or "should".
 4. Clear patterns are ranked by information, the divergence of the rate from the share of random prefixes:
    rate log(rate / share) + (1 - rate) log((1 - rate) / (1 - share)). The name contains the first pattern, and the next
    pattern that describes something else.

If no pattern is clear, or if all clear patterns are as broad as "ends with a capitalized word", the name also states
what at least a share PARTLY of the triggers has in common: partly ends with "but" (10 of 25). The remaining memories
are called "no clear pattern", with their most common endings. A name also states if a recurring next token is among the
top tokens of the memory's value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import log
from operator import or_

import numpy as np
from numpy.typing import NDArray

from memlens.pattern.features import GAP, Feature, is_content_word, sentence_start
from memlens.pattern.following import FollowingTokens
from memlens.pattern.score import Scores
from memlens.pattern.shallow import Candidate, Texts
from memlens.pattern.states import StateSubject
from memlens.pattern.topics import SemanticTopic, WordVectors
from memlens.pattern.words import ENOUGH, GROUNDED, NEXT, PrefixWords, ranks_of
from memlens.stats import binomial_tail, upper_share

CLEAR = 0.7
PARTLY = 0.2
_BROAD = 0.05  # a pattern with a larger share of random prefixes is broad and says little
UNCLEAR = "no clear pattern"
_ENDINGS = 3  # number of endings to list for a memory without a clear pattern
_JOINED = 4  # maximum number of endings in one pattern
_RAREST = 1e-3  # smaller shares of random prefixes count as this share, so rarity does not decide the order
_CONFIRMED = 2  # minimum share of held-out triggers, as a multiple of the share of random prefixes
_MOSTLY = 0.5  # share of a pattern's prefixes that counts as most of them
_PLACES = {"before": "before", "opening": "sentence", "early": "sentence", "inside": "sentence"}
_ORDER = ("last", "before", "", "sentence", "semantic", NEXT)  # order of the patterns in a name, by Pattern.about
_UNLIKELY = 1e-4  # maximum p-value of a content word that describes a subject


@dataclass(frozen=True)
class Pattern:
    """A property that at least three triggers of a memory share."""

    name: str  # equal for equal patterns of different memories
    kind: str  # "shallow", "semantic" or "next"
    description: str
    members: int  # bit mask of trigger ranks
    share: float  # upper bound of the share of random prefixes with the pattern
    q: float
    scores: Scores  # scores on held-out triggers
    sense: int = 0  # patterns of one sense share most of their prefixes
    token: int | None = None  # the next token, for a pattern of kind "next"
    place: str = ""  # what a wording describes: the "last" word, the word "before" it, the "sentence", or ""
    ending: str = ""  # the ending in quotes, for a pattern that can be joined with other endings
    further: float = 0.0  # estimated number of prefixes of the text that have the wording and are not triggers

    @property
    def ranks(self) -> list[int]:
        return ranks_of(self.members)

    @property
    def about(self) -> str:
        """What the pattern describes. The two patterns of a name describe different things."""
        return self.place if self.kind == "shallow" else self.kind

    def order(self, triggers: int) -> tuple[float, str]:
        """Return a sort key. Patterns that are certain and that held-out triggers confirm come first."""
        held = self.scores.auroc
        sure = self.confidence(triggers)
        return -(sure if held is None else (sure + max(2 * held - 1, 0.0)) / 2), self.name

    def confidence(self, triggers: int) -> float:
        """Return (1 - q) times the share of triggers that have the pattern beyond chance, from 0 to 1."""
        beyond = (self.members.bit_count() / triggers - self.share) / max(1 - self.share, 1e-9)
        return max(beyond, 0.0) * (1 - self.q)

    def rate(self, triggers: int, held: int) -> float:
        """Return the rate of the pattern (step 1), given the numbers of triggers and of held-out triggers."""
        own = self.members.bit_count() / triggers
        possible = min(held, self.further)
        if self.kind == "semantic" or self.scores.auroc is None or possible < ENOUGH:
            return own
        confirmed = min(max(2 * self.scores.auroc - 1 + self.share, 0.0) * held / possible, 1.0)
        return min(own, (own + confirmed) / 2 if confirmed >= _CONFIRMED * self.share else confirmed)

    def evidence(self, triggers: int, held: int) -> float:
        """Return the evidence of the pattern (step 2), given the numbers of triggers and of held-out triggers."""
        found = 0.5 + (self.rate(triggers, held) - self.share) / 2
        is_scored = self.kind == "semantic" and self.scores.auroc is not None and held >= ENOUGH
        return min(found, self.scores.auroc) if is_scored and self.scores.auroc is not None else found

    def information(self, rate: float) -> float:
        """Return the information of the pattern at this rate: the divergence from random prefixes (step 4), in nats."""
        share = min(max(self.share, _RAREST), 1 - 1e-9)
        rate = min(max(rate, share), 1 - 1e-9)
        return rate * log(rate / share) + (1 - rate) * log((1 - rate) / (1 - share))


class Describer:
    """Describes candidates, topics and subjects as patterns."""

    def __init__(self, texts: Texts, vectors: WordVectors, vocabulary: Sequence[str], prefixes: int) -> None:
        self.texts = texts
        self.times = prefixes / max(texts.background.prefixes, 1)  # prefixes of the text per sampled prefix
        self.plain = np.asarray(texts.words.plain, np.int32)
        self.content = texts.content_words()
        self.counts = _count_prefixes(texts.sample, len(texts.words.texts))
        self.vectors = vectors
        self.vocabulary = vocabulary

    def wording(self, candidate: Candidate, rows: NDArray[np.int64], scores: Scores) -> Pattern:
        """Describe a candidate of a memory. `rows` are the memory's triggers by rank."""
        feature, further = candidate.feature, max(candidate.count * self.times - candidate.size, 0.0)
        if feature.kind == NEXT:
            text = self.vocabulary[candidate.token]
            return Pattern(
                f"{NEXT}:{text}",
                NEXT,
                f'before "{text.strip() or text}"',
                candidate.members,
                candidate.share,
                candidate.q,
                scores,
                token=candidate.token,
                further=further,
            )
        own = rows[ranks_of(candidate.members)]
        ending = ""
        if feature.kind == "ending":
            ending = self._ending(feature, own, 1)
            described_as = f"ends with {self._ending(feature, own)}"
        else:
            words = _most_frequent(self._example(feature, row) for row in own.tolist())
            described_as = feature.describe(self._spell(feature.words, own), words)
            if feature.kind == "piece":
                ending = f'"{feature.shape}" inside "{words[0]}"'
        place = "last" if 1 in feature.places else _PLACES.get(feature.kind, "")
        return Pattern(
            feature.name(self.texts.words),
            "shallow",
            described_as,
            candidate.members,
            candidate.share,
            candidate.q,
            scores,
            place=place,
            ending=ending,
            further=further,
        )

    def topic(self, topic: SemanticTopic, rows: NDArray[np.int64], scores: Scores) -> Pattern:
        """Describe a topic of a memory. `rows` are the memory's triggers by rank."""
        numbers = [self.vectors.numbers[row] for row in topic.words]
        name = f"topic:{' '.join(sorted(self.texts.words.texts[number] for number in numbers))}"
        described = f"about: {', '.join(self._spell(numbers, rows[ranks_of(topic.members)]).values())}"
        return Pattern(name, "semantic", described, topic.members, topic.share, topic.q, scores)

    def subject(self, subject: StateSubject, rows: NDArray[np.int64]) -> Pattern:
        """Describe a subject by the tokens that the model expects next and by the content words of its triggers."""
        expected = [self.vocabulary[token].strip() for token in subject.expects]
        own = rows[ranks_of(subject.members)]
        words = self._spell(self._typical_words(own), own).values()
        described = (f"about: {', '.join(words)}; " if words else "") + f"expects {', '.join(expected)}"
        name = f"subject:{' '.join(sorted(text.lower() for text in expected))}"
        return Pattern(name, "semantic", described, subject.members, subject.share, subject.q, subject.scores)

    def _typical_words(self, rows: NDArray[np.int64]) -> list[int]:
        """Return content words that are in at least three of these prefixes, and in more of them than expected."""
        prefixes = self.texts.prefixes
        words = (np.unique(prefixes.words[prefixes.offsets[row] : prefixes.offsets[row + 1]]) for row in rows.tolist())
        found, times = np.unique(np.concatenate(list(words)), return_counts=True)
        kept = [place for place, word in enumerate(found.tolist()) if word in self.content and times[place] >= GROUNDED]
        found, times = found[kept], times[kept]
        shares = upper_share(self.counts[found], self.texts.sample.size)
        p = binomial_tail(times, len(rows), shares)
        return found[np.lexsort((found, p))][: (p <= _UNLIKELY).sum()][:_ENDINGS].tolist()

    def is_nameable(self, candidate: Candidate, rows: NDArray[np.int64]) -> bool:
        """Return False for an n-gram without a content word, and for a class of function words or word pieces."""
        feature = candidate.feature
        if feature.kind == "n-gram":
            return any(word in self.content for word in feature.words)
        if feature.kind != "class":
            return True
        prefixes, spellings = self.texts.prefixes, self.texts.words.spellings
        own = rows[ranks_of(candidate.members)]
        last = [
            spellings[prefixes.last[row]].lower()
            for row in own.tolist()
            if not prefixes.goes_on[row] and self._is_one_token(row)
        ]
        words = [word for word in last if is_content_word(word)]
        return len(words) >= _MOSTLY * len(own) and len(set(words)) >= GROUNDED

    def _is_one_token(self, row: int) -> bool:
        """Return True if the last word of a prefix is one token. The class of a piece does not describe the word."""
        token = int(self.texts.prefixes.tokens[row])
        return (
            token >= 0 and self.vocabulary[token].strip() == self.texts.words.spellings[self.texts.prefixes.last[row]]
        )

    def endings(self, rows: NDArray[np.int64]) -> list[tuple[str, int]]:
        """Return recurring last words, most frequent first, with the number of triggers that end with each word."""
        last = self.texts.prefixes.whole[rows[rows >= 0]].tolist()
        counts = Counter(self.texts.words.spellings[word] for word in last if word)
        return [(word, times) for word, times in counts.most_common() if times > 1][:_ENDINGS]

    def _ending(self, feature: Feature, rows: NDArray[np.int64], examples: int = _ENDINGS) -> str:
        """Return the words of an ending in quotes. If most prefixes end inside a word, add the complete words."""
        prefixes, spellings = self.texts.prefixes, self.texts.words.spellings
        last = _most_frequent(spellings[word] for word in prefixes.last[rows].tolist())[0]
        written = self._spell(feature.words[:-1], rows)
        text = " ".join([*(written[word] for word in feature.words[:-1]), last])
        if prefixes.goes_on[rows].mean() < _MOSTLY:
            return f'"{text}"'
        words = _most_frequent(spellings[word] for word in prefixes.whole[rows].tolist())[:examples]
        return f'"{text}" of {", ".join(map(_quote, words))}'

    def _spell(self, words: Sequence[int], rows: NDArray[np.int64]) -> dict[int, str]:
        """Return the most frequent spelling of each word in these prefixes, by number of the word."""
        prefixes, spellings = self.texts.prefixes, self.texts.words.spellings
        places = [np.arange(*prefixes.offsets[row : row + 2]) for row in rows.tolist()] if len(words) else []
        written = prefixes.spellings[np.concatenate([np.zeros(0, np.int64), *places])]
        plain = self.plain[written]
        return {
            word: _most_frequent(spellings[number] for number in written[plain == word].tolist())[0]
            for word in words
            if word != GAP
        }

    def _example(self, feature: Feature, row: int) -> str:
        """Return the word of a trigger at the place that the feature describes."""
        prefixes = self.texts.prefixes
        begin, end = prefixes.offsets[row : row + 2].tolist()
        number, spellings = prefixes.whole[row], self.texts.words.spellings
        if feature.is_inside:
            read = spellings[prefixes.last[row]]
            return f"{read}|{spellings[number].removeprefix(read)}"
        if feature.kind == "opening":
            number = prefixes.spellings[sentence_start(prefixes.words, self.texts.spelled.marks, begin, end)]
        elif feature.kind == "before":
            number = prefixes.spellings[end - 2]
        return spellings[number]


def _count_prefixes(prefixes: PrefixWords, words: int) -> NDArray[np.int64]:
    """Return the number of prefixes that contain each word."""
    owner = np.repeat(np.arange(prefixes.size), prefixes.lengths)
    pairs = np.unique(owner << 20 | prefixes.words)
    return np.bincount(pairs & ((1 << 20) - 1), minlength=words)


def _most_frequent(words: Iterable[str]) -> list[str]:
    return [word for word, _ in sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))]


def _quote(word: str) -> str:
    return f'"{word}"'


def join_endings(patterns: Sequence[Pattern]) -> Pattern | None:
    """Join the endings of different triggers into one pattern. Returns None if there are fewer than two endings."""
    joined: list[Pattern] = []
    for pattern in sorted(patterns, key=lambda pattern: (-pattern.members.bit_count(), pattern.name)):
        if pattern.ending and not any(pattern.members & other.members for other in joined):
            joined.append(pattern)
    joined = joined[:_JOINED]
    if len(joined) < 2:
        return None
    texts = [pattern.ending for pattern in joined]
    described = f"ends with {', '.join(texts[:-1])} or {texts[-1]}"
    share, members = sum(pattern.share for pattern in joined), reduce(or_, (pattern.members for pattern in joined))
    scores = [pattern.scores.auroc for pattern in joined]
    held = None if None in scores else 0.5 + sum(score - 0.5 for score in scores if score is not None)
    q, further = max(pattern.q for pattern in joined), sum(pattern.further for pattern in joined)
    name = " | ".join(pattern.name for pattern in joined)
    return Pattern(name, "shallow", described, members, share, q, Scores(held, None), place="last", further=further)


def name_memory(
    patterns: Sequence[Pattern],
    following: FollowingTokens,
    endings: Sequence[tuple[str, int]],
    vocabulary: Sequence[str],
    triggers: int,
    held: int,
) -> tuple[str, float | None]:
    """Return the name of a memory and the evidence of its best pattern, which is None if no pattern is clear."""
    joined = join_endings(patterns)
    candidates = [*patterns, *([joined] if joined else [])]
    clear = [pattern for pattern in candidates if pattern.evidence(triggers, held) > CLEAR]
    named = _choose_two(clear, lambda pattern: pattern.rate(triggers, held))
    partly: list[Pattern] = []
    if all(pattern.share > _BROAD for pattern in named):
        possible = [p for p in candidates if p not in named and len(p.ranks) >= PARTLY * triggers]
        possible = [p for p in possible if p.share <= _BROAD] if named else possible
        partly = _choose_two(possible, lambda pattern: len(pattern.ranks) / triggers)[: 2 - bool(named)]
    agreed = {token: times for token, times in following.typical if token in following.promoted}
    parts = []
    for pattern in (*named, *partly):
        numbers = [f"{len(pattern.ranks)} of {triggers}"] if pattern.kind == NEXT or pattern in partly else []
        numbers += ["promoted by its value"] if pattern.token in agreed else []
        start = "partly " if pattern in partly else ""
        parts.append(f"{start}{pattern.description}" + (f" ({', '.join(numbers)})" if numbers else ""))
    name = "; ".join(parts)
    if not parts:
        name = UNCLEAR
        if endings:
            name += "; common endings: " + ", ".join(f'"{word}" ({times})' for word, times in endings)
    if agreed and not any(pattern.token in agreed for pattern in (*named, *partly)):
        token, times = next(iter(agreed.items()))
        name += f'; before "{vocabulary[token].strip()}" ({times} of {triggers}, promoted by its value)'
    return name, max((pattern.evidence(triggers, held) for pattern in named), default=None)


def _choose_two(patterns: Sequence[Pattern], rate: Callable[[Pattern], float]) -> list[Pattern]:
    """Return the most informative pattern and the next one that describes something else, in the order of a name."""
    ordered = sorted(patterns, key=lambda pattern: (-pattern.information(rate(pattern)), pattern.name))
    second = [pattern for pattern in ordered[1:] if pattern.about != ordered[0].about]
    return sorted([*ordered[:1], *second[:1]], key=lambda pattern: _ORDER.index(pattern.about))
