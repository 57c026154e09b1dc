"""The paper's study with people: memories to label, progress, agreement among people and of the machine with people.

Agreement is computed among people who have finished, pair by pair, on the memories both have labelled.

    class       of a memory: none, shallow, semantic or both, after its patterns
    kappa       (p_o - p_e) / (1 - p_e), p_o the share of memories of equal class, p_e that share by chance, from each
                person's own shares of classes (Cohen, 1960)
    Jaccard     |A & B| / |A | B| of the prefixes that the two cover, for each class and for either; the mean over
                memories where at least one of them covers any
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np

from memlens.annotations.answers import Label, Sample
from memlens.annotations.store import Annotations, has_annotations
from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.pattern.words import KINDS

Coverage = dict[str, frozenset[int]]  # class, or "either" -> trigger ranks
_CLASSES = (*KINDS, "either")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class StudyProgress:
    """The number of memories that a person has labelled, without the labels themselves."""

    annotator: str
    labelled: int
    sample: int | None  # memories to label; None before a sample is drawn
    finished: bool


@dataclass(frozen=True)
class Study:
    """The sample of a study, and everybody's progress."""

    memories: tuple[MemoryId, ...]
    top: int | None  # triggers shown of each memory; None before a sample is drawn
    people: tuple[StudyProgress, ...]


@dataclass(frozen=True)
class PersonalStudy:
    """The study as one person sees it."""

    annotator: str
    finished: bool
    done: tuple[MemoryId, ...]
    following: MemoryId | None  # the first memory of the sample without a label
    labels: tuple[Label, ...]  # the person's own; after finishing, those of all who have finished


@dataclass(frozen=True)
class PairAgreement:
    """The agreement of two people."""

    one: str
    other: str
    memories: int
    same_class: int
    kappa: float | None
    jaccard_shallow: float | None
    jaccard_semantic: float | None
    jaccard_either: float | None


@dataclass(frozen=True)
class MachineAgreement:
    """The machine's patterns against one person's, for one class."""

    annotator: str
    kind: str
    memories: int
    memory_precision: float | None  # of memories to which the machine gives the class, those to which the person does
    memory_recall: float | None
    prefix_precision: float | None  # the same of prefixes, memory by memory pooled
    prefix_recall: float | None


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
        chosen += [index.names.name(layer, memory) for memory in sorted(drawn)]
    if not chosen:
        raise SettingError(f"no memory of {index.folder} has triggers; there is nothing to label")
    return Sample(tuple(chosen), top, seed)


def read_study(index: Index) -> Study:
    """Reads only: where nobody has begun, no file is made."""
    if not has_annotations(index):
        return Study((), None, ())
    with Annotations(index) as notes:
        sample, finished = notes.sample(), notes.annotators(finished=True)
        size = len(sample.memories) if sample else None
        people = tuple(
            StudyProgress(person, len(notes.labels_of(person)), size, person in finished)
            for person in notes.annotators()
        )
    return Study(sample.memories, sample.top, people) if sample else Study((), None, people)


def read_person(index: Index, annotator: str) -> PersonalStudy:
    """Reads only: where nobody has begun, no file is made."""
    if not has_annotations(index):
        return PersonalStudy(annotator, False, (), None, ())
    with Annotations(index) as notes:
        sample, labels = notes.sample(), notes.labels(annotator)
        done = tuple(label.memory for label in notes.labels_of(annotator))
        finished = annotator in notes.annotators(finished=True)
    following = next((memory for memory in (sample.memories if sample else ()) if memory not in done), None)
    return PersonalStudy(annotator, finished, done, following, tuple(labels))


def agreement(index: Index) -> list[PairAgreement]:
    """The agreement of every pair of people who have finished."""
    with Annotations(index) as notes:
        labels = notes.labels()
        waiting = notes.annotators(finished=False)
    by_person = _covered_by_people(labels)
    if len(by_person) < 2:
        still = f"; still labelling: {', '.join(waiting)}" if waiting else ""
        raise SettingError(f"agreement needs two people who have finished, there are {len(by_person)}{still}")
    return [
        _pair(person, other, by_person[person], by_person[other])
        for person, other in combinations(sorted(by_person), 2)
    ]


def compare_with_people(index: Index) -> list[MachineAgreement]:
    """Precision and recall of patterns.parquet, taking each person who has finished as the truth."""
    with Annotations(index) as notes:
        labels, sample = notes.labels(), notes.sample()
    if not labels:
        raise SettingError("nobody has finished labelling; there is nothing to compare the automatic patterns with")
    machine = _covered_by_machine(index, {label.memory for label in labels}, sample.top if sample else None)
    agreements = []
    for person, of_person in sorted(_covered_by_people(labels).items()):
        for kind in _CLASSES:
            both = (machine, of_person)
            prefixes = [{(memory, rank) for memory in of_person for rank in by[memory][kind]} for by in both]
            memories = [{memory for memory, _ in covered} for covered in prefixes]
            rates = *_precision_and_recall(*memories), *_precision_and_recall(*prefixes)
            agreements.append(MachineAgreement(person, kind, len(of_person), *rates))
    return agreements


def cohens_kappa(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Agreement beyond chance, 1 for perfect; None where there is nothing or chance alone would be perfect."""
    if not pairs:
        return None
    observed = sum(mine == other for mine, other in pairs) / len(pairs)
    left, right = Counter(mine for mine, _ in pairs), Counter(other for _, other in pairs)
    expected = sum(left[kind] * right[kind] for kind in left) / len(pairs) ** 2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def _covered_by_people(labels: Sequence[Label]) -> dict[str, dict[MemoryId, Coverage]]:
    by_person: dict[str, dict[MemoryId, Coverage]] = {}
    for label in labels:
        ranks = {kind: {rank for p in label.patterns if p.kind == kind for rank in p.prefixes} for kind in KINDS}
        by_person.setdefault(label.annotator, {})[label.memory] = _coverage(ranks)
    return by_person


def _covered_by_machine(index: Index, memories: set[MemoryId], top: int | None) -> dict[MemoryId, Coverage]:
    ranks: dict[MemoryId, dict[str, set[int]]] = {memory: {kind: set() for kind in KINDS} for memory in memories}
    for memory, rows in index.rows_of("patterns", memories, "kind, prefixes").items():
        for row in rows:
            ranks[memory][row["kind"]].update(rank for rank in row["prefixes"] if top is None or rank < top)
    return {memory: _coverage(covered) for memory, covered in ranks.items()}


def _coverage(ranks: Mapping[str, set[int]]) -> Coverage:
    return {kind: frozenset(ranks[kind]) for kind in KINDS} | {"either": frozenset().union(*ranks.values())}


def _class_of(covered: Coverage) -> str:
    has = [kind for kind in KINDS if covered[kind]]
    return "both" if len(has) == 2 else has[0] if has else "none"


def _pair(
    person: str, other: str, left: Mapping[MemoryId, Coverage], right: Mapping[MemoryId, Coverage]
) -> PairAgreement:
    shared = sorted(left.keys() & right.keys())
    classes = [(_class_of(left[memory]), _class_of(right[memory])) for memory in shared]
    overlaps = [_mean_jaccard([(left[memory][kind], right[memory][kind]) for memory in shared]) for kind in _CLASSES]
    return PairAgreement(person, other, len(shared), sum(a == b for a, b in classes), cohens_kappa(classes), *overlaps)


def _mean_jaccard(pairs: Sequence[tuple[frozenset[int], frozenset[int]]]) -> float | None:
    overlaps = [len(mine & other) / len(mine | other) for mine, other in pairs if mine | other]
    return _share(sum(overlaps), len(overlaps))


def _precision_and_recall(machine: set[_Item], person: set[_Item]) -> tuple[float | None, float | None]:
    shared = len(machine & person)
    return _share(shared, len(machine)), _share(shared, len(person))


def _share(part: float, total: int) -> float | None:
    return part / total if total else None
