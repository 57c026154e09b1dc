"""Topics of all memories: which are coherent beyond their shallow patterns' words, and what they are about.

One hypothesis a memory, with its own cut at the same rate of false discoveries as the shallow ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memlens.index.build import Progress
from memlens.patterns.choosing import Chosen
from memlens.patterns.coherence import Coherence, LeftOut
from memlens.patterns.prefix_vectors import VectorWords
from memlens.patterns.settings import PatternSettings
from memlens.patterns.shallow import Texts
from memlens.patterns.significance import q_values
from memlens.patterns.topics import Pool, Topic, find_topic
from memlens.patterns.trigger_rows import TriggerRows
from memlens.patterns.word_vectors import WordVectors


def find_topics(
    texts: Texts,
    triggers: TriggerRows,
    chosen: Sequence[Chosen],
    vectors: WordVectors,
    settings: PatternSettings,
    progress: Progress,
) -> dict[int, tuple[Topic, float]]:
    """Topic and q-value by row of TriggerRows."""
    if len(vectors.vectors) == 0:
        return {}
    sample = VectorWords.of(texts.sample, vectors)
    own = VectorWords.of(texts.triggers, vectors)
    coherence = Coherence.calibrate(sample, vectors, triggers.rows.shape[1], settings.seed)
    out = words_left_out(chosen, vectors)
    z, filled = coherence.standardised(own, triggers.one_a_sentence(), out)
    q = q_values(coherence.p_values(z, filled), len(z))
    pool = Pool.draw(sample, vectors, settings.seed)
    found: dict[int, tuple[Topic, float]] = {}
    coherent = np.flatnonzero(q <= settings.rate).tolist()
    for done, m in enumerate(coherent):
        progress("topics", done, len(coherent))
        topic = find_topic(own, vectors, triggers.rows[m], out, m, pool)
        if topic:
            found[m] = (topic, float(q[m]))
    return found


def words_left_out(chosen: Sequence[Chosen], vectors: WordVectors) -> LeftOut:
    """The words of endings and n-grams wherever they stand, and the last word where a shape is about it."""
    rows = vectors.rows
    words: list[int] = []
    offsets, last = [0], []
    for memory in chosen:
        features = [(pattern.feature, pattern.members) for pattern in memory.patterns]
        words += sorted({int(rows[w]) for feature, _ in features for w in feature.words if rows[w] >= 0})
        offsets.append(len(words))
        at_end = 0
        for feature, members in features:
            at_end |= members if feature.kind == "shape" else 0
        last.append(at_end)
    flat: NDArray[np.int32] = np.array(words, np.int32)
    return LeftOut(flat, np.array(offsets, np.int64), np.array(last, np.uint64))
