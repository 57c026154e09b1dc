"""Find the patterns of all memories of an index. The algorithm starts in find_patterns:

 1. Read the words of triggers and of a random sample of prefixes (words).
 2. Find features that at least three triggers share, and more triggers than expected by chance, at one false discovery
    rate for all memories (features, shallow). Recurring next tokens are among these features.
 3. For each memory, select the few features that a person would name (shallow).
 4. Find topics: triggers that are coherent beyond their shared words and last tokens (topics, matched). Record how many
    memories have a topic when their triggers are swapped for other prefixes with the same last tokens. Drop topics that
    held-out triggers do not confirm (score).
 5. Add content words that no topic explains (shallow).
 6. Drop next tokens that the last tokens of the triggers explain (following).
 7. Score every pattern on held-out triggers (score). Drop broad patterns (word lists, positions in the sentence) that
    held-out triggers do not confirm. Patterns that mostly cover the same triggers form one sense.
 8. If the model ran on the triggers, add the subjects that were found in its states (states).

The false discovery rate holds within each family of hypotheses: features.FAMILIES and topics. The required RAM grows
with the number of triggers, not with the size of the corpus. Only step 8 needs the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.pattern.features import FAMILIES
from memlens.pattern.following import FollowingTokens, drop_explained, read_promoted
from memlens.pattern.matched import LastTokens, same_last_tokens
from memlens.pattern.naming import Describer, Pattern
from memlens.pattern.score import (
    RANDOM,
    Scores,
    is_subject_refuted,
    is_wording_refuted,
    nearness,
    subject_scores,
    topic_nearness,
    whole_vectors,
    wording_scores,
)
from memlens.pattern.shallow import Ending, Texts, add_waiting, choose, find_significant
from memlens.pattern.states import StateSubject
from memlens.pattern.topics import SemanticTopic, VectorWords, WordVectors, find_topics, word_vectors
from memlens.pattern.words import HELD, NEXT, TriggerRows, read_trigger_rows
from memlens.progress import Progress, no_progress
from memlens.settings import PatternSettings

_GENERAL = 0.7  # a pattern that covers at least this share of triggers belongs to every sense
_SAME_SENSE = 0.5  # minimum share of the smaller set of triggers that a pattern and its sense have in common


@dataclass(frozen=True, eq=False)
class PatternResult:
    """The patterns of each memory, best first, in the order of TriggerRows, and notes for the manifest."""

    triggers: TriggerRows
    patterns: list[list[Pattern]]
    following: list[FollowingTokens]
    endings: list[list[tuple[str, int]]]  # most frequent last words, and how many triggers end with each
    notes: dict[str, Any]

    def coverage(self) -> NDArray[np.int64]:
        """Return three counts per memory: patterns (except next tokens), covered triggers, triggers. [memories, 3]"""
        counts = []
        for patterns in self.patterns:
            members = [pattern.members for pattern in patterns if pattern.kind != NEXT]
            counts.append((len(members), reduce(or_, members, 0).bit_count()))
        columns = np.array(counts, np.int64).reshape(-1, 2)
        return np.concatenate([columns, self.triggers.filled[: len(columns), None]], 1)


def find_patterns(
    index: Index,
    settings: PatternSettings,
    progress: Progress = no_progress,
    end: str = "top",
    subjects: Mapping[int, StateSubject] | None = None,
) -> PatternResult:
    """Find the patterns of all memories.

    `end` is "top" for the largest coefficients, or "bottom" for the most negative coefficients. `subjects` maps rows of
    TriggerRows to the subjects that were found in the model's states (states).
    """
    # 1. words
    triggers = read_trigger_rows(index, settings.top, HELD, end)
    if len(triggers.rows) == 0:
        return PatternResult(triggers, [], [], [], {})
    progress("words", 0, None)
    texts = Texts.read(index, triggers, settings)
    filled, ends = triggers.filled.tolist(), _endings(texts, triggers)
    # 2. significant features
    significant = find_significant(texts, triggers, settings, progress)
    features = list(significant.candidates(texts, len(triggers.rows)))
    next_tokens = [[c for c in of_memory if c.feature.kind == NEXT] for of_memory in features]
    # 3. shallow patterns
    vectors = word_vectors(index, texts.words, settings.seed)
    describer = Describer(texts, vectors, index.vocabulary, index.manifest.counts.prefixes)
    wordings = [
        [c for c in of_memory if c.feature.kind != NEXT and describer.is_nameable(c, rows)]
        for of_memory, rows in zip(features, triggers.rows, strict=True)
    ]
    shallow = [
        choose(of_memory, filled[m], ends[m], describer.content, significant.cutoffs)
        for m, of_memory in enumerate(wordings)
    ]
    # 4. topics
    words = VectorWords.of(texts.prefixes, vectors)
    tokens = LastTokens.of(texts.prefixes, texts.matched, texts.prefixes.size - len(texts.matched.sentences))
    same = same_last_tokens(triggers.held, tokens, settings.seed)
    found, swapped = find_topics(texts, triggers, shallow, words, tokens, same, vectors, settings, progress)
    topics = _score_topics(found, texts, triggers, words, same, vectors, settings.seed)
    # 5. content words that no topic explains, and 6. next tokens that no last token explains
    unexplained = drop_explained(next_tokens, triggers, texts, tokens, settings.seed, settings.rate)
    selected = []
    for m, candidates in enumerate(wordings):
        of_topics = reduce(or_, (topic.members for topic, _ in topics.get(m, ())), 0)
        more = add_waiting(shallow[m], candidates, of_topics, filled[m], ends[m], significant.cutoffs)
        selected.append((*more, *unexplained[m]))
    # 7. scores and senses, and 8. subjects in states
    scores = wording_scores(texts, triggers.held, same, [[c.key for c in of_memory] for of_memory in selected])
    held = (triggers.held >= 0).sum(1).tolist()
    patterns = []
    for m, of_memory in enumerate(selected):
        rows = triggers.rows[m]
        described = [
            describer.wording(candidate, rows, scores_of_candidate)
            for candidate, scores_of_candidate in zip(of_memory, scores[m], strict=True)
            if not is_wording_refuted(candidate, texts, held[m], scores_of_candidate)
        ]
        described += [
            describer.topic(topic, triggers.rows[m], scores_of_topic) for topic, scores_of_topic in topics.get(m, ())
        ]
        if subjects and m in subjects:
            described.append(describer.subject(subjects[m], rows))
        patterns.append(in_senses(described, filled[m]))
    notes: dict[str, Any] = {
        "families": {**dict(zip(FAMILIES, significant.hypotheses, strict=True)), "topics": len(triggers.rows)},
        "background": texts.sample.size,
        "highest_p": dict(zip(FAMILIES, significant.cutoffs, strict=True)),
        "word_vectors": len(vectors.vectors),
        "swapped": _by_layer(swapped, triggers.layer),
    }
    promoted = read_promoted(index)
    following = [
        FollowingTokens.of(of_memory, promoted.get(name, ()))
        for of_memory, name in zip(next_tokens, triggers.names(), strict=True)
    ]
    endings = [describer.endings(rows) for rows in triggers.rows]
    return PatternResult(triggers, patterns, following, endings, notes)


def _by_layer(swapped: NDArray[np.float64], layers: NDArray[np.int32]) -> dict[str, float]:
    """Return, by layer, the share of memories that have a topic with swapped triggers.

    Memories that were not tested (nan) do not count.
    """
    tested = ~np.isnan(swapped)
    return {str(layer): float(swapped[tested & (layers == layer)].mean()) for layer in np.unique(layers[tested])}


def _score_topics(
    topics: Mapping[int, list[SemanticTopic]],
    texts: Texts,
    triggers: TriggerRows,
    words: VectorWords,
    same: NDArray[np.int64],
    vectors: WordVectors,
    seed: int,
) -> dict[int, list[tuple[SemanticTopic, Scores]]]:
    """Return, by row of TriggerRows, the topics that held-out triggers do not refute, each with its scores."""
    sample = VectorWords.of(texts.sample, vectors)
    rows = np.random.default_rng([seed, 12]).integers(0, texts.sample.size, RANDOM)
    random = whole_vectors(sample, vectors, rows)
    scored: dict[int, list[tuple[SemanticTopic, Scores]]] = {}
    for m, of_memory in topics.items():
        for topic in of_memory:
            near = nearness(random, topic.direction)
            bar = float(np.quantile(near, 1 - topic.share))
            near_topic = partial(topic_nearness, words, vectors, topic.direction)
            scores = subject_scores(near_topic, triggers.held[m], same[m], near, bar)
            if not is_subject_refuted(scores, triggers.held[m], same[m]):
                scored.setdefault(m, []).append((topic, scores))
    return scored


def in_senses(patterns: list[Pattern], triggers: int) -> list[Pattern]:
    """Sort patterns, best first, and number their senses. Patterns that mostly cover the same triggers share a sense.

    A pattern that covers most triggers belongs to every sense, and has the number 0.
    """
    ordered = sorted(patterns, key=lambda pattern: pattern.order(triggers))
    senses: list[int] = []  # bit mask of the triggers of each sense
    numbered = []
    for pattern in ordered:
        size = pattern.members.bit_count()
        is_general = size >= _GENERAL * triggers
        shared = [(sense & pattern.members).bit_count() / min(size, sense.bit_count()) for sense in senses]
        best = max(range(len(senses)), key=lambda sense: shared[sense], default=0)
        if is_general or (senses and shared[best] >= _SAME_SENSE):
            if not is_general:
                senses[best] |= pattern.members
        else:
            best = len(senses)
            senses.append(pattern.members)
        numbered.append(replace(pattern, sense=0 if is_general else best))
    return numbered


def _endings(texts: Texts, triggers: TriggerRows) -> list[list[Ending]]:
    """Return the last three words of every trigger by memory and rank, with 0 for missing words."""
    prefixes = texts.prefixes
    padded = np.concatenate([np.zeros(3, np.int32), prefixes.words])
    last = np.stack([padded[prefixes.offsets[1:] + 2 - back] * (prefixes.lengths > back) for back in (2, 1, 0)], 1)
    by_memory = last[triggers.rows] * (triggers.rows >= 0)[..., None]
    return [[(one, two, three) for one, two, three in memory] for memory in by_memory.tolist()]
