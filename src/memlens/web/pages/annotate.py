"""What the page Annotate shows one person: the memories to label, their own labels, and never anybody else's too soon.

Everything is read and written through memlens.annotations.labels, which knows the rules. Knows no HTTP.

The paper's protocol for people: prefixes of sampled memories, patterns defined and ticked, saved, next.

Works as plain forms; the script adds keys. Whose labels may be seen is decided in memlens.annotations.labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, Field, StringConstraints

from memlens.annotations.labels import GROUNDED, KINDS, Annotations, Label, LabelledPattern
from memlens.annotations.store import has_annotations
from memlens.errors import MemlensError, SettingError, UnknownName
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.web.rendering import MODEL_PROBLEMS, Bench, page, remember_viewer
from memlens.web.workbench import Workbench

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
    from memlens.annotations.study import progress

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
    from memlens.annotations.study import draw_sample

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


router = APIRouter(tags=["annotate"])

_MOST_BYTES = 100_000  # of a form
_SHOWN = 25  # triggers of a memory, as in the paper, where a sample does not say

# " ann " is ann: nobody means to be two people
Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=60)]
Annotator = Annotated[
    str, StringConstraints(strip_whitespace=True), Query(alias="as", max_length=60, description="Who labels.")
]
Memory = Annotated[str, Query(max_length=30, description="Layer and memory from 0, like L3N512.")]


class Draw(BaseModel):
    """A sample to draw."""

    per_layer: int = Field(10, ge=1, le=10_000)
    top: int = Field(_SHOWN, ge=3, le=1000)
    seed: int = Field(0, ge=0, le=2**31)


class NewLabel(BaseModel):
    """One person's patterns of one memory; none is an answer, too."""

    annotator: Name
    memory: str = Field(max_length=30)
    patterns: list[PatternView] = Field(max_length=50)


class Who(BaseModel):
    """A person, and the memory their last label of is meant."""

    annotator: Name
    memory: str = Field(max_length=30)


class Person(BaseModel):
    """A person who is done."""

    annotator: Name


async def form_fields(request: Request) -> list[tuple[str, str]]:
    """The fields of a plain form."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise SettingError("the form is far too long; write less")
    try:
        return parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=5000)
    except ValueError as error:
        raise SettingError("the form cannot be read; open the page again") from error


Fields = Annotated[list[tuple[str, str]], Depends(form_fields)]

# Pages


@router.get("/annotate", response_class=HTMLResponse, include_in_schema=False)
def annotate_page(request: Request, bench: Bench, annotator: Annotator = "", memory: Memory = "") -> Response:
    if not annotator:
        return page(request, "annotate.html", study=read_study(bench.index), annotator="", problem="")
    person = read_person(bench.index, annotator)
    if not memory and not person.finished and person.following is not None:
        return RedirectResponse(_address(annotator, person.following), 303)
    if memory and not person.finished:
        return remember_viewer(request, _labelling(request, bench, person, memory), annotator)
    return remember_viewer(request, _overview(request, bench, person), annotator)


@router.post("/annotate/sample", include_in_schema=False)
def draw_from_form(bench: Bench, form: Fields) -> Response:
    fields = dict(form)
    try:
        numbers = [int(fields.get(name) or default) for name, default in (("per_layer", 10), ("top", 25), ("seed", 0))]
    except ValueError as error:
        raise SettingError("a sample is drawn with three whole numbers: memories a layer, triggers, seed") from error
    begin_study(bench.index, *(min(max(number, 0), 2**31) for number in numbers))
    return RedirectResponse(_address(fields.get("as", "").strip()), 303)


@router.post("/annotate/save", include_in_schema=False)
def save_from_form(request: Request, bench: Bench, annotator: Annotator, memory: Memory, form: Fields) -> Response:
    patterns = patterns_of_form(form)
    try:
        save_label(bench.index, annotator, memory, patterns)
    except SettingError as error:  # nothing that was written is lost: the same page, with the reason
        return _labelling(request, bench, read_person(bench.index, annotator), memory, patterns, str(error))
    return RedirectResponse(_address(annotator), 303)


@router.post("/annotate/undo", include_in_schema=False)
def undo_from_form(bench: Bench, annotator: Annotator, memory: Memory) -> Response:
    undo_label(bench.index, annotator, memory)
    return RedirectResponse(_address(annotator, memory), 303)


@router.post("/annotate/finish", include_in_schema=False)
def finish_from_form(bench: Bench, annotator: Annotator) -> Response:
    finish_study(bench.index, annotator)
    return RedirectResponse(_address(annotator), 303)


# JSON


@router.get("/api/annotate", responses=MODEL_PROBLEMS)
def read_annotation_study(bench: Bench) -> StudyView:
    """The sample, and how far everybody is; nothing of what they say."""
    return read_study(bench.index)


@router.get("/api/annotate/labels", responses=MODEL_PROBLEMS)
def read_labels(bench: Bench, annotator: Annotator) -> PersonalView:
    """One's own labels; those of others only after one has finished."""
    return read_person(bench.index, annotator)


@router.post("/api/annotate/sample", responses=MODEL_PROBLEMS)
def draw_annotation_sample(bench: Bench, draw: Draw) -> StudyView:
    """Draw the memories to label; refused once somebody has labelled."""
    begin_study(bench.index, draw.per_layer, draw.top, draw.seed)
    return read_study(bench.index)


@router.post("/api/annotate/labels", responses=MODEL_PROBLEMS)
def save_one_label(bench: Bench, label: NewLabel) -> PersonalView:
    """Save one person's patterns of one memory."""
    save_label(bench.index, label.annotator, label.memory, label.patterns)
    return read_person(bench.index, label.annotator)


@router.post("/api/annotate/undo", responses=MODEL_PROBLEMS)
def undo_one_label(bench: Bench, who: Who) -> PersonalView:
    """Take a person's last label of a memory back; the one before counts again."""
    undo_label(bench.index, who.annotator, who.memory)
    return read_person(bench.index, who.annotator)


@router.post("/api/annotate/finish", responses=MODEL_PROBLEMS)
def finish_one_person(bench: Bench, who: Person) -> PersonalView:
    """Say that all is labelled: from here on nothing can be changed, and others' labels are seen."""
    finish_study(bench.index, who.annotator)
    return read_person(bench.index, who.annotator)


# Parts


def _labelling(
    request: Request,
    bench: Workbench,
    person: PersonalView,
    memory: str,
    patterns: list[PatternView] | None = None,
    problem: str = "",
) -> Response:
    """The page of one memory, with what was said before or what was just refused."""
    name = bench.index.check(memory)
    study = read_study(bench.index)
    if str(name) not in study.memories:
        raise UnknownName(f"{name} is not in the sample; choose one that is")
    place = study.memories.index(str(name))
    said = own_patterns(person, name)
    shown = said if patterns is None else patterns
    return page(
        request,
        "annotate_memory.html",
        422 if problem else 200,
        study=study,
        person=person,
        memory=str(name),
        triggers=bench.index.triggers(name, limit=study.top or _SHOWN),
        slots=[*shown, *[None] * max(SLOTS - len(shown), 1)],
        has_label=str(name) in person.done,
        before=study.memories[place - 1] if place else None,
        after=study.memories[place + 1] if place + 1 < len(study.memories) else None,
        place=place,
        kinds=KINDS,
        least=GROUNDED,
        problem=problem,
    )


def _overview(request: Request, bench: Workbench, person: PersonalView) -> Response:
    """All labelled, or finished: what there is to do, and after finishing what everybody says."""
    study = read_study(bench.index)
    pairs, note = [], ""
    if person.finished:
        from memlens.annotations.study import agreement

        try:
            pairs = agreement(bench.index)
        except MemlensError as error:
            note = str(error)
    by_memory = {name: [one for one in person.labels if one.memory == name] for name in study.memories}
    return page(request, "annotate_done.html", study=study, person=person, pairs=pairs, note=note, by_memory=by_memory)


def _address(annotator: str, memory: str = "") -> str:
    fields = {name: value for name, value in (("as", annotator), ("memory", memory)) if value}
    return f"/annotate?{urlencode(fields, errors='replace')}" if fields else "/annotate"
