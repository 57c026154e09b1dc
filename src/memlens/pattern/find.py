"""Patterns of all memories of an index, in memory.

    1  triggers and a sample of all prefixes as words                  prefix_words, background
    2  features that three triggers share; one cut for all             features, significance, shallow
    3  the few of them that a person would name                        choosing
    4  coherence beyond their words, with its own cut; topics          word_vectors, coherence, topics, semantic
    5  content words that no topic accounts for                        choosing

False discoveries are held to one rate in each of two families of hypotheses: every feature of the background for every
memory, and one coherence a memory. Memory grows with the number of triggers, not with the corpus. No model is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress
from memlens.pattern.choose import Candidate, Chosen, add_waiting, choose
from memlens.pattern.shallow import Texts, find_shared
from memlens.pattern.topics import Topic, find_topics
from memlens.pattern.word_vectors import WordVectors, word_vectors
from memlens.pattern.words import TriggerRows, read_trigger_rows
from memlens.settings import PatternSettings


@dataclass(frozen=True)
class Pattern:
    """Something that at least three of a memory's triggers have in common."""

    name: str  # equal for equal patterns of different memories
    kind: str  # "shallow" or "semantic"
    description: str
    members: int  # trigger ranks, a bit each
    share: float  # of random prefixes that have it
    q: float

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in range(self.members.bit_length()) if self.members >> rank & 1]

    def confidence(self, triggers: int) -> float:
        """Share of triggers that have it beyond chance (0: as random ones, 1: all), times the chance to be real."""
        beyond = (self.members.bit_count() / triggers - self.share) / max(1 - self.share, 1e-9)
        return max(beyond, 0.0) * (1 - self.q)


@dataclass(frozen=True, eq=False)
class Found:
    """Patterns by row of TriggerRows, the most telling first, and how they were found."""

    triggers: TriggerRows
    patterns: list[list[Pattern]]
    notes: dict[str, float | int]


def find_patterns(index: Index, settings: PatternSettings, progress: Progress = no_progress) -> Found:
    triggers = read_trigger_rows(index, settings.top)
    if len(triggers.rows) == 0:
        return Found(triggers, [], {})
    progress("words", 0, None)
    texts = Texts.read(index, triggers, settings)
    believed = find_shared(texts, triggers, settings, progress)
    candidates = list(believed.candidates(texts, len(triggers.rows)))
    vectors = word_vectors(index, texts.words, settings.seed)
    filled = triggers.filled.tolist()
    content = texts.content_words()
    last = _last_words(texts, triggers)
    chosen = [
        choose(own, filled[m], last[m], content, believed.cutoff) if own else Chosen((), ())
        for m, own in enumerate(candidates)
    ]
    topics = find_topics(texts, triggers, chosen, vectors, settings, progress)
    patterns = []
    for m, own in enumerate(candidates):
        topic, q = topics.get(m, (None, 1.0))
        members = topic.members if topic else 0
        kept = add_waiting(chosen[m], own, members, filled[m], last[m], believed.cutoff)
        named = [_shallow(candidate, texts) for candidate in kept]
        named += [_semantic(topic, texts, vectors, q)] if topic else []
        patterns.append(sorted(named, key=lambda pattern: (-pattern.confidence(filled[m]), pattern.name)))
    notes: dict[str, float | int] = {
        "hypotheses": believed.hypotheses + len(triggers.rows),
        "background": len(texts.sample),
        "highest_p": believed.cutoff,
        "word_vectors": len(vectors.vectors),
    }
    return Found(triggers, patterns, notes)


def _last_words(texts: Texts, triggers: TriggerRows) -> list[list[int]]:
    """The last word of every trigger, by memory and rank; 0 where there is none."""
    words = texts.triggers
    ends = words.words[words.offsets[1:] - 1] if len(words.words) else words.last
    last = (ends * (words.lengths > 0))[triggers.rows] * (triggers.rows >= 0)
    found: list[list[int]] = last.tolist()
    return found


def _shallow(candidate: Candidate, texts: Texts) -> Pattern:
    feature = candidate.feature
    return Pattern(
        feature.name(texts.words),
        "shallow",
        feature.describe(texts.words),
        candidate.members,
        candidate.share,
        candidate.q,
    )


def _semantic(topic: Topic, texts: Texts, vectors: WordVectors, q: float) -> Pattern:
    words = [texts.words.texts[vectors.numbers[row]] for row in topic.words]
    return Pattern(
        f"topic:{' '.join(sorted(words))}", "semantic", f"about: {', '.join(words)}", topic.members, topic.share, q
    )
