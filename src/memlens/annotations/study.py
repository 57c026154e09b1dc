"""The paper's study with people: which memories to label, how far people agree, and how the machine compares.

Agreement is computed among people who have finished, pair by pair, on the memories both have labelled. The class of a
memory is what its patterns are: none, shallow, semantic or both; Cohen's kappa is agreement on it beyond what the two
people's own shares of classes would give by chance. On prefixes it is the Jaccard index of the covered
prefixes, of each class and of either, as the mean over memories where at least one of the two covers any.
Knows labels and the patterns table; keeps nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from memlens.annotations.labels import KINDS, Annotations, Label, Sample
from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId

Covered = dict[str, frozenset[int]]  # class -> trigger ranks


def draw_sample(index: Index, per_layer: int = 10, top: int = 25, seed: int = 0) -> Sample:
    """Random memories of every layer, among those that have triggers; all of a layer that has no more."""
    if per_layer < 1:
        raise SettingError(f"--per-layer is {per_layer}; it must be 1 or more")
    if top < 3:
        raise SettingError(f"--top is {top}; a pattern needs at least 3 prefixes")
    rows = index.sql("SELECT DISTINCT layer, memory FROM {triggers} WHERE \"end\" = 'top' ORDER BY layer, memory")
    chosen: list[MemoryId] = []
    for layer in index.layers:
        alive = [row["memory"] for row in rows if row["layer"] == layer]
        random = np.random.default_rng([seed, 10, layer])
        drawn: list[int] = random.permutation(alive)[:per_layer].tolist() if alive else []
        chosen += [MemoryId(layer, memory) for memory in sorted(drawn)]
    if not chosen:
        raise SettingError(f"no memory of {index.folder} has triggers; there is nothing to label")
    return Sample(tuple(chosen), top, seed)


@dataclass(frozen=True)
class Progress:
    """How far somebody is; nothing of what they say."""

    annotator: str
    labelled: int
    sample: int | None  # memories to label; None before a sample is drawn
    finished: bool


def progress(notes: Annotations) -> list[Progress]:
    """How far everybody is who has labelled anything."""
    sample, finished = notes.sample(), notes.annotators(finished=True)
    return [
        Progress(person, len(notes.labels_of(person)), len(sample.memories) if sample else None, person in finished)
        for person in notes.annotators()
    ]


def covered_by_people(label: Label) -> Covered:
    found = {kind: frozenset(rank for p in label.patterns if p.kind == kind for rank in p.prefixes) for kind in KINDS}
    return found | {"either": frozenset().union(*found.values())}


def class_of(covered: Covered) -> str:
    has = [kind for kind in KINDS if covered[kind]]
    return "both" if len(has) == 2 else has[0] if has else "none"


def cohens_kappa(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Agreement beyond chance, 1 for perfect; None where there is nothing or chance alone would be perfect."""
    if not pairs:
        return None
    observed = sum(one == other for one, other in pairs) / len(pairs)
    left, right = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
    expected = sum(left[kind] * right[kind] for kind in left) / len(pairs) ** 2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def jaccard(one: frozenset[int], other: frozenset[int]) -> float | None:
    return len(one & other) / len(one | other) if one | other else None


@dataclass(frozen=True)
class Agreement:
    """How far two people agree."""

    one: str
    other: str
    memories: int
    same_class: int
    kappa: float | None
    jaccard: Mapping[str, float | None]  # by class, and "either"


def agreement(index: Index) -> list[Agreement]:
    """Every pair of people who have finished."""
    with Annotations(index) as notes:
        labels = notes.labels()
        waiting = notes.annotators(finished=False)
    people = sorted({label.annotator for label in labels})
    if len(people) < 2:
        still = f"; still labelling: {', '.join(waiting)}" if waiting else ""
        raise SettingError(f"agreement needs two people who have finished, there are {len(people)}{still}")
    by_person = {
        person: {label.memory: covered_by_people(label) for label in labels if label.annotator == person}
        for person in people
    }
    return [_pair(one, other, by_person[one], by_person[other]) for one, other in combinations(people, 2)]


def _pair(one: str, other: str, left: Mapping[MemoryId, Covered], right: Mapping[MemoryId, Covered]) -> Agreement:
    shared = sorted(left.keys() & right.keys())
    classes = [(class_of(left[memory]), class_of(right[memory])) for memory in shared]
    overlaps: dict[str, float | None] = {}
    for kind in (*KINDS, "either"):
        found = [jaccard(left[memory][kind], right[memory][kind]) for memory in shared]
        known = [value for value in found if value is not None]
        overlaps[kind] = sum(known) / len(known) if known else None
    return Agreement(one, other, len(shared), sum(a == b for a, b in classes), cohens_kappa(classes), overlaps)


@dataclass(frozen=True)
class Comparison:
    """The machine's patterns against one person's, for one class."""

    annotator: str
    kind: str
    memories: int
    memory_precision: float | None  # of memories to which the machine gives the class, those to which the person does
    memory_recall: float | None
    prefix_precision: float | None  # the same of prefixes, memory by memory pooled
    prefix_recall: float | None


def compare_with_people(index: Index) -> list[Comparison]:
    """Precision and recall of patterns.parquet, taking each person who has finished as the truth."""
    with Annotations(index) as notes:
        labels, sample = notes.labels(), notes.sample()
    if not labels:
        raise SettingError("nobody has finished labelling; there is nothing to compare the automatic patterns with")
    machine = _covered_by_machine(index, [label.memory for label in labels], sample.top if sample else None)
    found = []
    for person in sorted({label.annotator for label in labels}):
        own = {label.memory: covered_by_people(label) for label in labels if label.annotator == person}
        for kind in (*KINDS, "either"):
            pairs = [(machine[memory][kind], own[memory][kind]) for memory in own]
            found.append(Comparison(person, kind, len(own), *_rates(pairs)))
    return found


def _rates(
    pairs: Sequence[tuple[frozenset[int], frozenset[int]]],
) -> tuple[float | None, float | None, float | None, float | None]:
    both = sum(bool(machine) and bool(person) for machine, person in pairs)
    hits = sum(len(machine & person) for machine, person in pairs)
    return (
        _share(both, sum(bool(machine) for machine, _ in pairs)),
        _share(both, sum(bool(person) for _, person in pairs)),
        _share(hits, sum(len(machine) for machine, _ in pairs)),
        _share(hits, sum(len(person) for _, person in pairs)),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _covered_by_machine(index: Index, memories: Sequence[MemoryId], top: int | None) -> dict[MemoryId, Covered]:
    wanted = sorted(set(memories))
    names = ", ".join(f"({memory.layer}, {memory.memory})" for memory in wanted)
    rows: list[dict[str, Any]] = index.sql(f"SELECT * FROM {{patterns}} WHERE (layer, memory) IN ({names})")
    ranks: dict[MemoryId, dict[str, set[int]]] = {memory: {kind: set() for kind in KINDS} for memory in wanted}
    for row in rows:
        shown = [rank for rank in row["prefixes"] if top is None or rank < top]
        ranks[MemoryId(row["layer"], row["memory"])][row["kind"]].update(shown)
    return {
        memory: {kind: frozenset(own[kind]) for kind in KINDS} | {"either": frozenset().union(*own.values())}
        for memory, own in ranks.items()
    }
