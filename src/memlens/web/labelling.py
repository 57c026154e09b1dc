"""What the page Annotate shows one person: the memories to label, their own labels, and never anybody else's too soon.

Everything is read and written through memlens.index.annotations, which knows the rules. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from pydantic import BaseModel, Field

from memlens.errors import SettingError
from memlens.index.annotations import KINDS, Annotations, Label, LabelledPattern
from memlens.index.history import has_annotations
from memlens.index.reader import Index
from memlens.memory import MemoryId

SLOTS = 6  # patterns a person can define for one memory; the paper's have 3.6 on average


class PatternView(BaseModel):
    """A pattern that somebody sees in a memory's triggers."""

    description: str = Field(max_length=200)
    kind: str = Field(max_length=20, description="shallow or semantic")
    prefixes: list[int] = Field(max_length=1000, description="Ranks of the triggers that have it, three at least.")


class LabelView(BaseModel):
    """What one person says about one memory."""

    annotator: str
    memory: str
    patterns: list[PatternView]


class PersonView(BaseModel):
    """How far somebody is; nothing of what they say."""

    annotator: str
    labelled: int
    sample: int | None
    finished: bool


class StudyView(BaseModel):
    """The sample, and how far everybody is."""

    memories: list[str]
    top: int | None = Field(description="Triggers shown of each memory; null before a sample is drawn.")
    people: list[PersonView]


class PersonalView(BaseModel):
    """The study as one person sees it."""

    annotator: str
    finished: bool
    done: list[str]
    following: str | None = Field(description="The first memory of the sample without a label.")
    labels: list[LabelView] = Field(description="One's own; after finishing, those of all who have finished.")


def read_study(index: Index) -> StudyView:
    """Reads only: where nobody has begun, nothing is made."""
    from memlens.patterns.study import progress

    if not has_annotations(index):
        return StudyView(memories=[], top=None, people=[])
    with Annotations(index) as notes:
        sample = notes.sample()
        people = [PersonView(**asdict(person)) for person in progress(notes)]
    if sample is None:
        return StudyView(memories=[], top=None, people=people)
    return StudyView(memories=[str(memory) for memory in sample.memories], top=sample.top, people=people)


def read_person(index: Index, annotator: str) -> PersonalView:
    if not has_annotations(index):
        return PersonalView(annotator=annotator, finished=False, done=[], following=None, labels=[])
    with Annotations(index) as notes:
        sample = notes.sample()
        own = {label.memory for label in notes.labels_of(annotator)}
        finished = annotator in notes.annotators(finished=True)
        labels = notes.labels(annotator)
    wanted = sample.memories if sample else ()
    return PersonalView(
        annotator=annotator,
        finished=finished,
        done=[str(memory) for memory in sorted(own)],
        following=next((str(memory) for memory in wanted if memory not in own), None),
        labels=[_view(label) for label in labels],
    )


def own_patterns(person: PersonalView, memory: MemoryId) -> list[PatternView]:
    """What this person has said of a memory, nothing where they have not."""
    found = (one for one in person.labels if (one.annotator, one.memory) == (person.annotator, str(memory)))
    return next((label.patterns for label in found), [])


def save_label(index: Index, annotator: str, memory: str, patterns: Sequence[PatternView]) -> None:
    _need_sample(index)
    labelled = [LabelledPattern(one.description.strip(), one.kind, tuple(one.prefixes)) for one in patterns]
    with Annotations(index) as notes:
        notes.save(annotator, memory, labelled)


def undo_label(index: Index, annotator: str, memory: str) -> None:
    _need_sample(index)
    with Annotations(index) as notes:
        notes.undo(annotator, memory)


def finish_study(index: Index, annotator: str) -> None:
    _need_sample(index)
    with Annotations(index) as notes:
        notes.finish(annotator)


def begin_study(index: Index, per_layer: int, top: int, seed: int) -> None:
    from memlens.patterns.study import draw_sample

    sample = draw_sample(index, per_layer, top, seed)
    with Annotations(index) as notes:
        notes.set_sample(sample)


def patterns_of_form(fields: Iterable[tuple[str, str]]) -> list[PatternView]:
    """A plain form's fields: text0, kind0 and so on, and ticks as slot:rank; a slot without text and ticks is none."""
    texts: dict[str, str] = {}
    kinds: dict[str, str] = {}
    ticks: dict[str, list[int]] = {}
    for name, value in fields:
        if name == "tick":
            slot, _, rank = value.partition(":")
            if not (rank.isascii() and rank.isdecimal() and len(rank) < 7):
                raise SettingError(f"'{value[:40]}' is not a tick; it must be a pattern's number, a colon and a rank")
            ticks.setdefault(slot, []).append(int(rank))
        elif name.startswith("text"):
            texts[name[4:]] = value[:200]
        elif name.startswith("kind"):
            kinds[name[4:]] = value[:20]
    slots = [slot for slot in sorted({*texts, *ticks}) if texts.get(slot, "").strip() or ticks.get(slot)]
    return [
        PatternView(description=texts.get(slot, ""), kind=kinds.get(slot, KINDS[0]), prefixes=ticks.get(slot, []))
        for slot in slots
    ]


def _need_sample(index: Index) -> None:
    """A study begins with a sample, so that everybody labels the same."""
    if not read_study(index).memories:
        raise SettingError("there is no sample to label yet; draw one on this page, or with `memlens annotate sample`")


def _view(label: Label) -> LabelView:
    patterns = [PatternView(description=p.description, kind=p.kind, prefixes=list(p.prefixes)) for p in label.patterns]
    return LabelView(annotator=label.annotator, memory=str(label.memory), patterns=patterns)
