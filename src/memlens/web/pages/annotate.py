"""The paper's protocol for people: prefixes of sampled memories, patterns defined and ticked, saved, next.

Works as plain forms; the script adds keys. Whose labels may be seen is decided in memlens.index.annotations.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, Field, StringConstraints

from memlens.errors import MemlensError, SettingError, UnknownName
from memlens.index.annotations import GROUNDED, KINDS
from memlens.web.labelling import (
    SLOTS,
    PatternView,
    PersonalView,
    StudyView,
    begin_study,
    finish_study,
    own_patterns,
    patterns_of_form,
    read_person,
    read_study,
    save_label,
    undo_label,
)
from memlens.web.rendering import MODEL_PROBLEMS, Bench, page
from memlens.web.viewer import remember_viewer
from memlens.web.workbench import Workbench

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
        from memlens.patterns.study import agreement

        try:
            pairs = agreement(bench.index)
        except MemlensError as error:
            note = str(error)
    by_memory = {name: [one for one in person.labels if one.memory == name] for name in study.memories}
    return page(request, "annotate_done.html", study=study, person=person, pairs=pairs, note=note, by_memory=by_memory)


def _address(annotator: str, memory: str = "") -> str:
    fields = {name: value for name, value in (("as", annotator), ("memory", memory)) if value}
    return f"/annotate?{urlencode(fields, errors='replace')}" if fields else "/annotate"
