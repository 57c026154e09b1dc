"""The page Annotate: people label sampled memories with the paper's protocol.

Works as plain forms; the script adds keys. Whose labels may be seen is decided in memlens.annotations.store.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, Field, StringConstraints

from memlens.annotations.answers import Label, LabelledPattern
from memlens.annotations.store import Annotations
from memlens.annotations.study import PersonalStudy, Study, agreement, draw_sample, read_person, read_study
from memlens.errors import MemlensError, SettingError, UnknownName
from memlens.index.history import LABELS
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.pattern.words import GROUNDED, KINDS
from memlens.web.rendering import MODEL_PROBLEMS, Bench, page, remember_viewer
from memlens.web.workbench import Workbench

router = APIRouter(tags=["annotate"])

SLOTS = 6  # patterns a person can define for one memory; the paper's have 3.6 on average
_MOST_BYTES = 100_000  # of a form
_MOST_CHARACTERS = 200  # of a description
_SHOWN = 25  # triggers of a memory, as in the paper, where a sample does not say

# " ann " is ann: nobody means to be two people
Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=60)]
Annotator = Annotated[
    str, StringConstraints(strip_whitespace=True), Query(alias="as", max_length=60, description="Who labels.")
]
Memory = Annotated[str, Query(max_length=30, description="Layer and memory from 0, like L3N51.")]


class SampleRequest(BaseModel):
    """A sample to draw."""

    per_layer: int = Field(10, ge=1, le=10_000)
    top: int = Field(_SHOWN, ge=3, le=1000)
    seed: int = Field(0, ge=0, le=2**31)


class Person(BaseModel):
    """A person who is done."""

    annotator: Name


class LabelReference(Person):
    """A person, and the memory whose label is meant."""

    memory: str = Field(max_length=30)


class NewLabel(LabelReference):
    """One person's patterns of one memory; none is an answer, too."""

    patterns: list[LabelledPattern] = Field(max_length=50)


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


def patterns_of_form(fields: Iterable[tuple[str, str]]) -> list[LabelledPattern]:
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
            texts[name[4:]] = value[:_MOST_CHARACTERS]
        elif name.startswith("kind"):
            kinds[name[4:]] = value[:20]
    slots = [slot for slot in sorted({*texts, *ticks}) if texts.get(slot, "").strip() or ticks.get(slot)]
    return [
        LabelledPattern(texts.get(slot, ""), kinds.get(slot, KINDS[0]), tuple(ticks.get(slot, ()))) for slot in slots
    ]


def _begin_study(index: Index, per_layer: int, top: int, seed: int) -> None:
    sample = draw_sample(index, per_layer, top, seed)
    with Annotations(index) as notes:
        notes.set_sample(sample)


def _save(index: Index, annotator: str, memory: str, patterns: Sequence[LabelledPattern]) -> None:
    with _open_study(index) as notes:
        if any(len(pattern.description) > _MOST_CHARACTERS for pattern in patterns):
            raise SettingError(f"a description has more than {_MOST_CHARACTERS} characters; write less")
        named = tuple(
            LabelledPattern(pattern.description.strip(), pattern.kind, pattern.prefixes) for pattern in patterns
        )
        notes.save(Label(annotator, index.check(memory), named))


def _undo(index: Index, annotator: str, memory: str) -> None:
    with _open_study(index) as notes:
        notes.undo(LABELS, annotator, memory)


def _finish(index: Index, annotator: str) -> None:
    with _open_study(index) as notes:
        notes.finish(annotator)


def _open_study(index: Index) -> Annotations:
    """A study begins with a sample, so that everybody labels the same."""
    notes = Annotations(index)
    if notes.sample() is None:
        notes.close()
        raise SettingError("there is no sample to label yet; draw one on this page, or with `memlens annotate sample`")
    return notes


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
        raise SettingError("a sample is drawn with three whole numbers: memories per layer, triggers, seed") from error
    _begin_study(bench.index, *(min(max(number, 0), 2**31) for number in numbers))
    return RedirectResponse(_address(fields.get("as", "").strip()), 303)


@router.post("/annotate/save", include_in_schema=False)
def save_from_form(request: Request, bench: Bench, annotator: Annotator, memory: Memory, form: Fields) -> Response:
    patterns = patterns_of_form(form)
    try:
        _save(bench.index, annotator, memory, patterns)
    except SettingError as error:  # nothing that was written is lost: the same page, with the reason
        return _labelling(request, bench, read_person(bench.index, annotator), memory, patterns, str(error))
    return RedirectResponse(_address(annotator), 303)


@router.post("/annotate/undo", include_in_schema=False)
def undo_from_form(bench: Bench, annotator: Annotator, memory: Memory) -> Response:
    _undo(bench.index, annotator, memory)
    return RedirectResponse(_address(annotator, memory), 303)


@router.post("/annotate/finish", include_in_schema=False)
def finish_from_form(bench: Bench, annotator: Annotator) -> Response:
    _finish(bench.index, annotator)
    return RedirectResponse(_address(annotator), 303)


# JSON


@router.get("/api/annotate", responses=MODEL_PROBLEMS)
def read_annotation_study(bench: Bench) -> Study:
    """The sample, and how far everybody is; nothing of what they say."""
    return read_study(bench.index)


@router.get("/api/annotate/labels", responses=MODEL_PROBLEMS)
def read_labels(bench: Bench, annotator: Annotator) -> PersonalStudy:
    """One's own labels; those of others only after one has finished."""
    return read_person(bench.index, annotator)


@router.post("/api/annotate/sample", responses=MODEL_PROBLEMS)
def draw_annotation_sample(bench: Bench, draw: SampleRequest) -> Study:
    """Draw the memories to label; refused once somebody has labelled."""
    _begin_study(bench.index, draw.per_layer, draw.top, draw.seed)
    return read_study(bench.index)


@router.post("/api/annotate/labels", responses=MODEL_PROBLEMS)
def save_one_label(bench: Bench, label: NewLabel) -> PersonalStudy:
    """Save one person's patterns of one memory."""
    _save(bench.index, label.annotator, label.memory, label.patterns)
    return read_person(bench.index, label.annotator)


@router.post("/api/annotate/undo", responses=MODEL_PROBLEMS)
def undo_one_label(bench: Bench, who: LabelReference) -> PersonalStudy:
    """Take a person's last label of a memory back; the one before counts again."""
    _undo(bench.index, who.annotator, who.memory)
    return read_person(bench.index, who.annotator)


@router.post("/api/annotate/finish", responses=MODEL_PROBLEMS)
def finish_one_person(bench: Bench, who: Person) -> PersonalStudy:
    """Say that all is labelled: from here on nothing can be changed, and others' labels are seen."""
    _finish(bench.index, who.annotator)
    return read_person(bench.index, who.annotator)


# Parts


def _labelling(
    request: Request,
    bench: Workbench,
    person: PersonalStudy,
    memory: str,
    patterns: Sequence[LabelledPattern] | None = None,
    problem: str = "",
) -> Response:
    """The page of one memory, with what was said before or what was just refused."""
    name = bench.index.check(memory)
    study = read_study(bench.index)
    if name not in study.memories:
        raise UnknownName(f"{name} is not in the sample; choose one that is")
    place = study.memories.index(name)
    labels = (label for label in person.labels if (label.annotator, label.memory) == (person.annotator, name))
    shown = next((label.patterns for label in labels), ()) if patterns is None else patterns
    return page(
        request,
        "annotate_memory.html",
        422 if problem else 200,
        study=study,
        person=person,
        memory=name,
        triggers=bench.index.triggers(name, limit=study.top or _SHOWN),
        slots=[*shown, *[None] * max(SLOTS - len(shown), 1)],
        has_label=name in person.done,
        before=study.memories[place - 1] if place else None,
        after=study.memories[place + 1] if place + 1 < len(study.memories) else None,
        kinds=KINDS,
        least=GROUNDED,
        problem=problem,
    )


def _overview(request: Request, bench: Workbench, person: PersonalStudy) -> Response:
    """All labelled, or finished: what there is to do, and after finishing what everybody says."""
    study = read_study(bench.index)
    pairs, note = [], ""
    if person.finished:
        try:
            pairs = agreement(bench.index)
        except MemlensError as error:
            note = str(error)
    by_memory = {name: [label for label in person.labels if label.memory == name] for name in study.memories}
    return page(request, "annotate_done.html", study=study, person=person, pairs=pairs, note=note, by_memory=by_memory)


def _address(annotator: str, memory: str | MemoryId = "") -> str:
    fields = {name: value for name, value in (("as", annotator), ("memory", memory)) if value}
    return f"/annotate?{urlencode(fields, errors='replace')}" if fields else "/annotate"
