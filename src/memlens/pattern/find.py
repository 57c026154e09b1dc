"""Find the patterns of all memories of an index. The algorithm starts in find_patterns:

 1. Read triggers and a random sample of prefixes as words (words).
 2. Find features that at least three triggers share more often than chance allows, with one false discovery rate for
    all memories (features, shallow).
 3. For each memory, choose the few features that a person would name (shallow).
 4. Find topics: triggers that are coherent beyond their shared words and last tokens (topics). Record the share of
    memories that would have a topic with swapped triggers. Drop topics that held-out triggers do not confirm (score).
 5. Add content words that no topic explains (shallow).
 6. Score every pattern on held-out triggers (score). Drop broad patterns (word lists, positions in the sentence) that
    held-out triggers do not confirm. Patterns of mostly the same prefixes form one sense.
 7. Find typical next tokens: tokens that follow at least three triggers, more often than their frequency in the corpus
    explains (a binomial tail, with a false discovery rate over all memories and tokens).

The false discovery rate holds within each family of hypotheses: features.FAMILIES, topics, next tokens. Memory use
grows with the number of triggers, not with the corpus. No model is needed.
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
from memlens.pattern.features import FAMILIES, Feature, sentence_start
from memlens.pattern.score import (
    RANDOM,
    Scores,
    is_topic_refuted,
    is_wording_refuted,
    nearness,
    same_last_tokens,
    topic_scores,
    whole_vectors,
    wording_scores,
)
from memlens.pattern.shallow import Candidate, Ending, ShallowChoice, Texts, add_waiting, choose, find_significant
from memlens.pattern.topics import LastTokens, SemanticTopic, VectorWords, WordVectors, find_topics, word_vectors
from memlens.pattern.words import GROUNDED, HELD, TriggerRows, read_trigger_rows
from memlens.progress import Progress, no_progress
from memlens.settings import PatternSettings
from memlens.stats import binomial_tail, q_values, upper_share

PROMOTED = 3  # top tokens of a value in a memory's name
_GENERAL, _SAME_SENSE = 0.7, 0.5  # share of triggers; share of the smaller of two sets of prefixes
_LOOKED_AT = 10  # top tokens of a value that are compared with typical next tokens


@dataclass(frozen=True)
class Pattern:
    """A property that at least three triggers of a memory share."""

    name: str  # the same for the same pattern of different memories
    kind: str  # "shallow" or "semantic"
    description: str
    members: int  # bit mask of trigger ranks
    share: float  # upper bound of the share of random prefixes with the pattern
    q: float
    scores: Scores  # on held-out triggers
    sense: int = 0  # patterns of one sense share most of their prefixes

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in range(self.members.bit_length()) if self.members >> rank & 1]

    def order(self, triggers: int) -> tuple[float, str]:
        """Return a sort key: patterns that are certain here and on held-out triggers come first."""
        held = self.scores[0]
        sure = self.confidence(triggers)
        return -(sure if held is None else (sure + max(2 * held - 1, 0.0)) / 2), self.name

    def confidence(self, triggers: int) -> float:
        """Return the share of triggers with the pattern beyond chance (0: as random, 1: all), times 1 - q."""
        beyond = (self.members.bit_count() / triggers - self.share) / max(1 - self.share, 1e-9)
        return max(beyond, 0.0) * (1 - self.q)


@dataclass(frozen=True, eq=False)
class PatternResult:
    """Patterns by row of TriggerRows, best first, and notes for the manifest."""

    triggers: TriggerRows
    patterns: list[list[Pattern]]
    notes: dict[str, Any]

    def coverage(self) -> NDArray[np.int64]:
        """Count patterns, covered triggers and triggers of each memory. [memories, 3]"""
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
    """Find the patterns of all memories.

    `end` is "top" for the largest coefficients or "bottom" for the most negative ones of gated blocks.
    """
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
            if not is_wording_refuted(candidate, texts, held[m], scores)
        ]
        named += [_semantic_pattern(topic, texts, vectors, scores) for topic, scores in topics.get(m, ())]
        patterns.append(in_senses(named, filled[m]))
    notes: dict[str, Any] = {
        "families": {**dict(zip(FAMILIES, significant.hypotheses, strict=True)), "topics": len(triggers.rows)},
        "background": texts.sample.size,
        "highest_p": dict(zip(FAMILIES, significant.cutoffs, strict=True)),
        "word_vectors": len(vectors.vectors),
        "swapped": _by_layer(swapped, triggers.layer),
    }
    return PatternResult(triggers, patterns, notes)


def _by_layer(swapped: NDArray[np.float64], layers: NDArray[np.int32]) -> dict[str, float]:
    """Return, by layer, the share of tested memories that have a topic with swapped triggers (nan: not tested)."""
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
    """Return the topics that held-out triggers do not refute, with their scores, by memory."""
    sample = VectorWords.of(texts.sample, vectors)
    some = np.random.default_rng([seed, 12]).integers(0, texts.sample.size, RANDOM)
    random = whole_vectors(sample, vectors, some)
    found: dict[int, list[tuple[SemanticTopic, Scores]]] = {}
    for m, of_memory in topics.items():
        for topic in of_memory:
            near = nearness(random, topic.direction)
            scores = topic_scores(own, vectors, topic.direction, triggers.held[m], same[m], near)
            if not is_topic_refuted(scores, triggers.held[m], same[m]):
                found.setdefault(m, []).append((topic, scores))
    return found


def in_senses(patterns: list[Pattern], triggers: int) -> list[Pattern]:
    """Sort patterns, best first, and number their senses: patterns of mostly the same prefixes have one sense.

    A pattern of nearly all triggers belongs to every sense and starts no sense, unless it is the only one.
    """
    ordered = sorted(patterns, key=lambda pattern: pattern.order(triggers))
    senses: list[int] = []  # bit masks of prefixes
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
    """Return the last three words of every trigger by memory and rank; 0 for none."""
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
    """Return the words of a trigger at the place that the feature describes."""
    if feature.kind != "opening":
        return [ends[-2 if feature.kind == "before" else -1]]
    prefixes = texts.prefixes
    start = sentence_start(
        prefixes.words, texts.spelled.marks, int(prefixes.offsets[row]), int(prefixes.offsets[row + 1])
    )
    return [int(prefixes.words[start])]


def _semantic_pattern(topic: SemanticTopic, texts: Texts, vectors: WordVectors, scores: Scores) -> Pattern:
    words = [texts.words.texts[vectors.numbers[row]] for row in topic.words]
    described = (f"topic:{' '.join(sorted(words))}", "semantic", f"about: {', '.join(words)}")
    return Pattern(*described, topic.members, topic.share, topic.q, scores)


@dataclass(frozen=True)
class FollowingTokens:
    """Tokens that follow the triggers of one memory."""

    typical: tuple[tuple[int, int], ...] = ()  # (token, number of triggers it follows), most frequent first
    promoted: tuple[int, ...] = ()  # the value's top tokens
    agrees: bool | None = None  # whether a typical next token is a top token of the value; None if unknown


def what_follows(index: Index, triggers: TriggerRows, rate: float) -> list[FollowingTokens]:
    """Return the typical next tokens of each memory and whether its value promotes one of them."""
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
