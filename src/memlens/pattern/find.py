"""Patterns of all memories of an index, and the tokens that follow their triggers, in memory.

 1. Read triggers and a sample of all prefixes as words (words).
 2. Find features that three triggers share, with one cut for all memories (features, shallow).
 3. Choose the few of them that a person would name (shallow).
 4. Find memories that are coherent beyond their words and last tokens, with a cut of its own, and their topics
    (words.draw_matched, topics). The share of memories that pass with swapped triggers is noted. Topics
    that held-out triggers do not bear out are dropped (score).
 5. Add content words that no topic accounts for (shallow).
 6. Score every pattern on triggers that were held out (score) and drop broad ones that these do not have (of a list of
    words, of the place in the sentence). Patterns of much the same prefixes make one sense.
 7. A next token is typical if it follows at least three triggers, more often than its share of the corpus allows: again
    a binomial tail and a cut over all memories and all tokens.

The rate of false discoveries holds in each family of hypotheses: features.FAMILIES, topics, next tokens. Memory grows
with the number of triggers, not with the corpus. No model is needed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memlens.index.memory import token_counts
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress
from memlens.pattern.features import FAMILIES, Feature, sentence_start
from memlens.pattern.score import (
    RANDOM,
    Scores,
    is_refuted,
    nearness,
    same_last_tokens,
    topic_scores,
    whole_vectors,
    wording_scores,
)
from memlens.pattern.shallow import Candidate, Ending, ShallowChoice, Texts, add_waiting, choose, find_significant
from memlens.pattern.topics import LastTokens, SemanticTopic, VectorWords, WordVectors, find_topics, word_vectors
from memlens.pattern.words import ENOUGH, GROUNDED, HELD, TriggerRows, read_trigger_rows
from memlens.settings import PatternSettings
from memlens.stats import binomial_tail, q_values, upper_share

PROMOTED = 3  # tokens of a value that are named
_GENERAL, _SAME_SENSE = 0.7, 0.5  # shares of triggers, and of the smaller of two sets of prefixes
_HELD_SURE = 0.05
_LOOKED_AT = 10  # tokens of a value that a typical next token is looked for in


@dataclass(frozen=True)
class Pattern:
    """Something that at least three of a memory's triggers have in common."""

    name: str  # equal for equal patterns of different memories
    kind: str  # "shallow" or "semantic"
    description: str
    members: int  # trigger ranks, a bit each
    share: float  # of random prefixes that have it
    q: float
    scores: Scores  # on triggers that were held out
    sense: int = 0  # patterns of one sense hold for much the same prefixes

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in range(self.members.bit_length()) if self.members >> rank & 1]

    def order(self, triggers: int) -> tuple[float, str]:
        """The first is what a person would say first: sure here, and on triggers that were held out."""
        held = self.scores[0]
        sure = self.confidence(triggers)
        return -(sure if held is None else (sure + max(2 * held - 1, 0.0)) / 2), self.name

    def confidence(self, triggers: int) -> float:
        """Share of triggers that have it beyond chance (0: as random ones, 1: all), times the chance to be real."""
        beyond = (self.members.bit_count() / triggers - self.share) / max(1 - self.share, 1e-9)
        return max(beyond, 0.0) * (1 - self.q)


@dataclass(frozen=True, eq=False)
class PatternResult:
    """The result: patterns by row of TriggerRows, the most telling first, and notes for the manifest."""

    triggers: TriggerRows
    patterns: list[list[Pattern]]
    notes: dict[str, Any]

    def coverage(self) -> NDArray[np.int64]:
        """Counts by row: patterns, triggers with at least one, triggers. [memories, 3]"""
        covered = []
        for patterns in self.patterns:
            members = 0
            for pattern in patterns:
                members |= pattern.members
            covered.append((len(patterns), members.bit_count()))
        both = np.array(covered, np.int64).reshape(-1, 2)
        return np.concatenate([both, self.triggers.filled[: len(both), None]], 1)


def find_patterns(
    index: Index, settings: PatternSettings, progress: Progress = no_progress, end: str = "top"
) -> PatternResult:
    """`end`: of the largest coefficients, or of the most negative ones ("bottom"), which gated blocks have as well."""
    triggers = read_trigger_rows(index, settings.top, HELD, end)
    if len(triggers.rows) == 0:
        return PatternResult(triggers, [], {})
    progress("words", 0, None)
    texts = Texts.read(index, triggers, settings)
    significant = find_significant(texts, triggers, settings, progress)
    candidates = list(significant.candidates(texts, len(triggers.rows)))
    vectors = word_vectors(index, texts.words, settings.seed)
    filled = triggers.filled.tolist()
    content = texts.content_words()
    ends = _endings(texts, triggers)
    chosen = [
        choose(own, filled[m], ends[m], content, significant.cutoffs) if own else ShallowChoice((), ())
        for m, own in enumerate(candidates)
    ]
    own = VectorWords.of(texts.prefixes, vectors)
    tokens = LastTokens.of(texts.prefixes, own, texts.matched, vectors)
    same = same_last_tokens(triggers.held, tokens, settings.seed)
    found, swapped = find_topics(texts, triggers, chosen, own, tokens, same, vectors, settings, progress)
    topics = _score_topics(found, texts, triggers, own, same, vectors, settings.seed)
    kept = []
    for m, significant_here in enumerate(candidates):
        members = 0
        for topic, _ in topics.get(m, ()):
            members |= topic.members
        kept.append(add_waiting(chosen[m], significant_here, members, filled[m], ends[m], significant.cutoffs))
    wordings = wording_scores(texts, triggers.held, same, [[c.key for c in of_memory] for of_memory in kept])
    patterns = []
    held = (triggers.held >= 0).sum(1).tolist()
    for m, of_memory in enumerate(kept):
        scored = zip(of_memory, wordings[m], strict=True)
        named = [
            _shallow_pattern(candidate, texts, triggers.rows[m], ends[m], scores)
            for candidate, scores in scored
            if not _is_refuted(candidate, texts, held[m], scores)
        ]
        named += [_semantic_pattern(topic, texts, vectors, scores) for topic, scores in topics.get(m, ())]
        patterns.append(in_senses(named, filled[m]))
    notes: dict[str, Any] = {
        "families": {**dict(zip(FAMILIES, significant.hypotheses, strict=True)), "topics": len(triggers.rows)},
        "background": len(texts.sample),
        "highest_p": dict(zip(FAMILIES, significant.cutoffs, strict=True)),
        "word_vectors": len(vectors.vectors),
        "swapped": _by_layer(swapped, triggers.layer),
    }
    return PatternResult(triggers, patterns, notes)


def _by_layer(swapped: NDArray[np.float64], layers: NDArray[np.int32]) -> dict[str, float]:
    """By layer, the share of memories with a topic if triggers are swapped, of those that were tried (nan: not)."""
    tried = ~np.isnan(swapped)
    return {str(layer): float(swapped[tried & (layers == layer)].mean()) for layer in np.unique(layers[tried])}


def _score_topics(
    topics: Mapping[int, list[SemanticTopic]],
    texts: Texts,
    triggers: TriggerRows,
    own: VectorWords,
    same: NDArray[np.int64],
    vectors: WordVectors,
    seed: int,
) -> dict[int, list[tuple[SemanticTopic, Scores]]]:
    """The topics that held-out triggers do not refute, with their scores, by memory."""
    sample = VectorWords.of(texts.sample, vectors)
    some = np.random.default_rng([seed, 12]).integers(0, len(texts.sample), RANDOM)
    random = whole_vectors(sample, vectors, some)
    found: dict[int, list[tuple[SemanticTopic, Scores]]] = {}
    for m, of_memory in topics.items():
        for topic in of_memory:
            near = nearness(random, topic.direction)
            scores = topic_scores(own, vectors, topic.direction, triggers.held[m], same[m], near)
            if not is_refuted(scores, triggers.held[m], same[m]):
                found.setdefault(m, []).append((topic, scores))
    return found


def in_senses(patterns: list[Pattern], triggers: int) -> list[Pattern]:
    """The patterns, best first, each with its sense: those that hold for much the same prefixes are of one.

    A pattern of nearly all triggers belongs to every sense and makes none of its own, unless there is no other.
    """
    ordered = sorted(patterns, key=lambda pattern: pattern.order(triggers))
    senses: list[int] = []  # prefixes, a bit each
    found = []
    for pattern in ordered:
        size = pattern.members.bit_count()
        is_general = size >= _GENERAL * triggers
        shared = [(own & pattern.members).bit_count() / min(size, own.bit_count()) for own in senses]
        best = max(range(len(senses)), key=lambda sense: shared[sense], default=0)
        if is_general or (senses and shared[best] >= _SAME_SENSE):
            if not is_general:
                senses[best] |= pattern.members
        else:
            best = len(senses)
            senses.append(pattern.members)
        found.append(replace(pattern, sense=0 if is_general else best))
    return found


def _endings(texts: Texts, triggers: TriggerRows) -> list[list[Ending]]:
    """The last three words of every trigger, by memory and rank; 0 where there is none."""
    prefixes = texts.prefixes
    padded = np.concatenate([np.zeros(3, np.int32), prefixes.words])
    last = np.stack([padded[prefixes.offsets[1:] + 2 - back] * (prefixes.lengths > back) for back in (2, 1, 0)], 1)
    own = last[triggers.rows] * (triggers.rows >= 0)[..., None]
    return [[(one, two, three) for one, two, three in memory] for memory in own.tolist()]


def _shallow_pattern(
    candidate: Candidate, texts: Texts, rows: NDArray[np.int64], ends: list[Ending], scores: Scores
) -> Pattern:
    feature, words = candidate.feature, texts.words
    met = Counter(
        words.texts[word]
        for rank, own in enumerate(ends)
        if candidate.members >> rank & 1
        for word in _example_words(feature, texts, int(rows[rank]), own)
    )
    examples = [word for word, _ in sorted(met.items(), key=lambda pair: (-pair[1], pair[0]))]
    described = (feature.name(words), "shallow", feature.describe(words, examples))
    return Pattern(*described, candidate.members, candidate.share, candidate.q, scores)


def _example_words(feature: Feature, texts: Texts, row: int, ends: Ending) -> list[int]:
    """The words of a trigger in the place that a feature is about."""
    if feature.kind != "opening":
        return [ends[-2 if feature.kind == "before" else -1]]
    prefixes = texts.prefixes
    start = sentence_start(
        prefixes.words, texts.spelled.marks, int(prefixes.offsets[row]), int(prefixes.offsets[row + 1])
    )
    return [int(prefixes.words[start])]


def _is_refuted(candidate: Candidate, texts: Texts, held: int, scores: Scores) -> bool:
    """Do held-out triggers have a broad feature no more often than random prefixes, by a binomial test at 5%?

    Wordings that stand there word for word are not asked: of a rare one there may be no more triggers in the corpus.
    """
    if not candidate.feature.is_broad or scores[0] is None or held < ENOUGH:
        return False
    random = candidate.count / max(texts.background.prefixes, 1)
    met = round((2 * scores[0] - 1 + random) * held)
    return bool(binomial_tail(met, held, candidate.share) > _HELD_SURE)


def _semantic_pattern(topic: SemanticTopic, texts: Texts, vectors: WordVectors, scores: Scores) -> Pattern:
    words = [texts.words.texts[vectors.numbers[row]] for row in topic.words]
    described = (f"topic:{' '.join(sorted(words))}", "semantic", f"about: {', '.join(words)}")
    return Pattern(*described, topic.members, topic.share, topic.q, scores)


@dataclass(frozen=True)
class FollowingTokens:
    """Tokens after the triggers of one memory."""

    typical: tuple[tuple[int, int], ...] = ()  # token, triggers it follows; the most frequent first
    promoted: tuple[int, ...] = ()  # the value's top tokens
    agrees: bool | None = None  # is a typical next token among the value's top tokens? None: cannot be said


def what_follows(index: Index, triggers: TriggerRows, rate: float) -> list[FollowingTokens]:
    """The tokens that typically follow the triggers of each memory, and whether its value promotes one of them."""
    typical = _typical_tokens(index, triggers, rate)
    promoted = dict(_promoted_tokens(index)) if index.has("values") else {}
    found = []
    names = zip(triggers.layer.tolist(), triggers.memory.tolist(), strict=True)
    for own, name in zip(typical, names, strict=True):
        tokens = promoted.get(name, ())
        agrees = any(token in tokens for token, _ in own) if own and tokens else None
        found.append(FollowingTokens(tuple(own), tuple(tokens[:PROMOTED]), agrees))
    return found


def _typical_tokens(index: Index, triggers: TriggerRows, rate: float) -> list[list[tuple[int, int]]]:
    counts = token_counts(index)
    memory, rank = np.nonzero(triggers.following >= 0)
    pairs, times = np.unique(
        memory.astype(np.int64) << 32 | triggers.following[memory, rank].astype(np.int64), return_counts=True
    )
    kept = times >= GROUNDED
    pairs, times = pairs[kept], times[kept]
    owner, token = pairs >> 32, pairs & 0xFFFFFFFF
    shares = upper_share(counts[token], int(counts.sum()))
    followed = (triggers.following >= 0).sum(1)
    q = q_values(binomial_tail(times, followed[owner], shares), max(len(counts) * len(followed), len(times)))
    found: list[list[tuple[int, int]]] = [[] for _ in followed]
    for m, t, k in zip(owner[q <= rate].tolist(), token[q <= rate].tolist(), times[q <= rate].tolist(), strict=True):
        found[m].append((t, k))
    return [sorted(own, key=lambda pair: (-pair[1], pair[0])) for own in found]


def _promoted_tokens(index: Index) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    with pq.ParquetFile(index.path("values")) as file:
        for batch in file.iter_batches(4096, columns=["layer", "memory", "tokens"]):
            for row in batch.to_pylist():
                yield (row["layer"], row["memory"]), tuple((row["tokens"] or ())[:_LOOKED_AT])
