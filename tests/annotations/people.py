"""Answers that people give in these tests, and an index to give them on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from index_by_hand import write_index
from memlens.annotations.records import Annotations, Label, LabeledPattern, LastLayerChange, Verdict
from memlens.index.reader import Index
from memlens.memory import MemoryId

PRESS = LabeledPattern('ends with "press"', "shallow", (0, 1, 2, 3))
NEWS = LabeledPattern('about, say, "news"\nand more', "semantic", (2, 3, 4))
DAY = LastLayerChange(1, "the press of", 3, " day", 4, " free")
COMMA = LastLayerChange(1, 'the "press", of\nday', 5, " 1", 6, ",")


def make_index(folder: Path) -> Index:
    """Two layers of six memories, each with eight triggers, and one without any."""
    places = [(sentence, 1) for sentence in range(8)]
    memories = {(layer, memory): places for layer in range(2) for memory in range(6)}
    return write_index(folder, [f"the press of day {n} was free" for n in range(8)], memories | {(1, 6): []})


def label(annotator: str, memory: str, *patterns: LabeledPattern) -> Label:
    return Label(annotator, MemoryId.parse(memory), patterns)


def first_answer(task: str, annotator: str) -> Label | Verdict:
    return label(annotator, "L0N0", PRESS) if task == "labels" else Verdict(annotator, DAY, "related")


def second_answer(task: str, annotator: str) -> Label | Verdict:
    """On the same subject."""
    return label(annotator, "L0N0", PRESS, NEWS) if task == "labels" else Verdict(annotator, DAY, "distant")


def answers(notes: Annotations, task: str, annotator: str) -> Sequence[Label | Verdict]:
    return notes.labels_of(annotator) if task == "labels" else notes.verdicts(annotator)
