"""The paper's labeling study: sample, progress, agreement between annotators, and comparison with automatic patterns.

Agreement is computed for each pair of annotators who have finished, on the memories that both have labeled.

    class       none, shallow, semantic or both: the kinds of a memory's patterns
    kappa       (p_o - p_e) / (1 - p_e): p_o is the share of memories with equal class, p_e the share expected by chance
                from each annotator's class frequencies (Cohen, 1960)
    Jaccard     |A & B| / |A | B| of the prefixes that the patterns of two annotators cover, for each class and for both
                classes together; mean over memories of which at least one annotator covers a prefix
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np

from memlens.annotations.records import Annotations, Label, Sample
from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.pattern.words import GROUNDED, KINDS

Coverage = dict[str, frozenset[int]]  # class or "either" -> ranks of covered triggers
_CLASSES = (*KINDS, "either")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class StudyProgress:
    """The number of memories that an annotator has labeled."""

    annotator: str
    labeled: int
    sample: int | None  # number of memories to label; None if no sample was drawn
    finished: bool


@dataclass(frozen=True)
class Study:
    """The sample of a study and the progress of all annotators."""

    memories: tuple[MemoryId, ...]
    top: int | None  # number of triggers shown per memory; None if no sample was drawn
    people: tuple[StudyProgress, ...]


@dataclass(frozen=True)
class PersonalStudy:
    """The study as one annotator sees it."""

    annotator: str
    finished: bool
    done: tuple[MemoryId, ...]  # labeled memories of the sample
    following: MemoryId | None  # first memory of the sample without a label
    labels: tuple[Label, ...]  # the annotator's own labels; after finishing, the labels of all finished annotators


@dataclass(frozen=True)
class PairAgreement:
    """The agreement of two annotators."""

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
    """Agreement of the automatic patterns of one class with the patterns of one annotator."""

    annotator: str
    kind: str
    memories: int
    memory_precision: float | None  # share of memories with automatic patterns that also have one by the annotator
    memory_recall: float | None
    prefix_precision: float | None  # share of automatically covered prefixes that the annotator also covers
    prefix_recall: float | None


def draw_sample(index: Index, per_layer: int = 10, top: int = 25, seed: int = 0) -> Sample:
    """Draw `per_layer` random memories that have triggers from each layer, or all of them if there are fewer."""
    if per_layer < 1:
        raise SettingError(f"--per-layer is {per_layer}; it must be 1 or more")
    if top < GROUNDED:
        raise SettingError(f"--top is {top}; a pattern needs at least {GROUNDED} prefixes")
    rows = index.sql("SELECT DISTINCT layer, memory FROM {triggers} WHERE \"end\" = 'top' ORDER BY layer, memory")
    memories: list[MemoryId] = []
    for layer in index.layers:
        alive = [row["memory"] for row in rows if row["layer"] == layer]
        random = np.random.default_rng([seed, 10, layer])
        drawn: list[int] = random.permutation(alive)[:per_layer].tolist() if alive else []
        memories += [index.names.name(layer, memory) for memory in sorted(drawn)]
    if not memories:
        raise SettingError(f"no memory of {index.folder} has triggers; there is nothing to label")
    return Sample(tuple(memories), top, seed)


def read_study(annotations: Annotations) -> Study:
    """Return the sample and the progress of all annotators."""
    sample, finished = annotations.sample, annotations.list_annotators(finished=True)
    memories = sample.memories if sample else ()
    progress = []
    for person in annotations.list_annotators():
        labels = [label for label in annotations.labels_of(person) if sample is None or label.memory in memories]
        progress.append(StudyProgress(person, len(labels), len(memories) if sample else None, person in finished))
    return Study(memories, sample.top if sample else None, tuple(progress))


def read_person(annotations: Annotations, annotator: str) -> PersonalStudy:
    """Return the study as one annotator sees it."""
    memories = annotations.sample.memories if annotations.sample else ()
    labeled = {label.memory for label in annotations.labels_of(annotator)}
    done = tuple(memory for memory in memories if memory in labeled)
    following = next((memory for memory in memories if memory not in labeled), None)
    finished = annotator in annotations.list_annotators(finished=True)
    return PersonalStudy(annotator, finished, done, following, tuple(annotations.labels(annotator)))


def compute_agreement(annotations: Annotations) -> list[PairAgreement]:
    """Return the agreement of every pair of annotators who have finished."""
    by_person = _covered_by_people(annotations.labels())
    if len(by_person) < 2:
        unfinished = annotations.list_annotators(finished=False)
        still_labeling = f"; still labeling: {', '.join(unfinished)}" if unfinished else ""
        raise SettingError(
            f"agreement needs two annotators who have finished; finished: {len(by_person)}{still_labeling}"
        )
    return [
        _compare_pair(one, other, by_person[one], by_person[other]) for one, other in combinations(sorted(by_person), 2)
    ]


def compare_with_people(annotations: Annotations) -> list[MachineAgreement]:
    """Return precision and recall of automatic patterns against each annotator who has finished."""
    labels, sample = annotations.labels(), annotations.sample
    if not labels:
        raise SettingError("no annotator has finished; there is nothing to compare the automatic patterns with")
    memories = {label.memory for label in labels}
    automatic = _covered_by_machine(annotations.index, memories, sample.top if sample else None)
    agreements = []
    for person, of_person in sorted(_covered_by_people(labels).items()):
        for kind in _CLASSES:
            both = (automatic, of_person)
            prefixes = [{(memory, rank) for memory in of_person for rank in by[memory][kind]} for by in both]
            covered = [{memory for memory, _ in pairs} for pairs in prefixes]
            rates = *_precision_and_recall(*covered), *_precision_and_recall(*prefixes)
            agreements.append(MachineAgreement(person, kind, len(of_person), *rates))
    return agreements


def cohens_kappa(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Return Cohen's kappa (1 if agreement is perfect), or None if there are no pairs or chance agreement is 1."""
    if not pairs:
        return None
    observed = sum(one == other for one, other in pairs) / len(pairs)
    left, right = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
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
            if row["kind"] in KINDS:
                ranks[memory][row["kind"]].update(rank for rank in row["prefixes"] if top is None or rank < top)
    return {memory: _coverage(covered) for memory, covered in ranks.items()}


def _coverage(ranks: Mapping[str, set[int]]) -> Coverage:
    return {kind: frozenset(ranks[kind]) for kind in KINDS} | {"either": frozenset().union(*ranks.values())}


def _class_of(covered: Coverage) -> str:
    kinds = [kind for kind in KINDS if covered[kind]]
    return "both" if len(kinds) == 2 else kinds[0] if kinds else "none"


def _compare_pair(
    one: str, other: str, left: Mapping[MemoryId, Coverage], right: Mapping[MemoryId, Coverage]
) -> PairAgreement:
    shared = sorted(left.keys() & right.keys())
    classes = [(_class_of(left[memory]), _class_of(right[memory])) for memory in shared]
    overlaps = [_mean_jaccard([(left[memory][kind], right[memory][kind]) for memory in shared]) for kind in _CLASSES]
    return PairAgreement(one, other, len(shared), sum(a == b for a, b in classes), cohens_kappa(classes), *overlaps)


def _mean_jaccard(pairs: Sequence[tuple[frozenset[int], frozenset[int]]]) -> float | None:
    overlaps = [len(one & other) / len(one | other) for one, other in pairs if one | other]
    return _share(sum(overlaps), len(overlaps))


def _precision_and_recall(machine: set[_Item], person: set[_Item]) -> tuple[float | None, float | None]:
    shared = len(machine & person)
    return _share(shared, len(machine)), _share(shared, len(person))


def _share(part: float, total: int) -> float | None:
    return part / total if total else None
