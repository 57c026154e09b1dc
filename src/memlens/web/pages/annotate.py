"""The Annotate page: label the memories of a sample by the paper's protocol.

The page consists of plain forms, and a script adds keyboard shortcuts. annotations/records.py determines which labels
an annotator sees.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, Field, StringConstraints

from memlens.annotations.records import LABELS, Annotations, Label, LabeledPattern
from memlens.annotations.study import PersonalStudy, Study, compute_agreement, draw_sample, read_person, read_study
from memlens.errors import MemlensError, SettingError, UnknownName
from memlens.memory import MemoryId
from memlens.pattern.words import GROUNDED, KINDS
from memlens.web.rendering import MODEL_PROBLEMS, Bench, page, remember_viewer
from memlens.web.workbench import Workbench

router = APIRouter(tags=["annotate"])

SLOTS = 6  # number of pattern fields in the form; the paper's annotators named 3.6 patterns per memory
_MAX_FORM_BYTES = 100_000
_MAX_DESCRIPTION = 200  # maximum length of a pattern's description
_DEFAULT_TOP = 25  # triggers shown per memory, as in the paper

# spaces around a name are stripped, so that " ann " and "ann" are the same annotator
Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=60)]
Annotator = Annotated[
    str, StringConstraints(strip_whitespace=True), Query(alias="as", max_length=60, description="Annotator name.")
]
Memory = Annotated[str, Query(max_length=30, description="Layer and memory from 0, like L3N51.")]


class SampleRequest(BaseModel):
    """The size and seed of a sample to draw."""

    per_layer: int = Field(10, ge=1, le=10_000)
    top: int = Field(_DEFAULT_TOP, ge=3, le=1000)
    seed: int = Field(0, ge=0, le=2**31)


class Person(BaseModel):
    """An annotator."""

    annotator: Name


class LabelReference(Person):
    """An annotator and a memory."""

    memory: str = Field(max_length=30)


class NewLabel(LabelReference):
    """One annotator's patterns of one memory. The list is empty if the memory has no pattern."""

    patterns: list[LabeledPattern] = Field(max_length=50)


async def form_fields(request: Request) -> list[tuple[str, str]]:
    """Return the fields of a plain form. Raises SettingError if the form is too long or invalid."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_FORM_BYTES:
            raise SettingError("the form is too long; shorten the descriptions")
    try:
        return parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=5000)
    except ValueError as error:
        raise SettingError("the form is invalid; reload the page") from error


Fields = Annotated[list[tuple[str, str]], Depends(form_fields)]


def patterns_of_form(fields: Iterable[tuple[str, str]]) -> list[LabeledPattern]:
    """Return the patterns in a form with the fields text0, kind0, ... and tick=slot:rank. Empty slots are skipped."""
    texts: dict[str, str] = {}
    kinds: dict[str, str] = {}
    ticks: dict[str, list[int]] = {}
    for name, value in fields:
        if name == "tick":
            slot, _, rank = value.partition(":")
            if not (rank.isascii() and rank.isdecimal() and len(rank) < 7):
                raise SettingError(
                    f"'{value[:40]}' is not a checkbox value; it must be a pattern number, a colon and a rank"
                )
            ticks.setdefault(slot, []).append(int(rank))
        elif name.startswith("text"):
            texts[name[4:]] = value[:_MAX_DESCRIPTION]
        elif name.startswith("kind"):
            kinds[name[4:]] = value[:20]
    slots = [slot for slot in sorted({*texts, *ticks}) if texts.get(slot, "").strip() or ticks.get(slot)]
    return [
        LabeledPattern(texts.get(slot, ""), kinds.get(slot, KINDS[0]), tuple(ticks.get(slot, ()))) for slot in slots
    ]


def _save(annotations: Annotations, annotator: str, memory: str, patterns: Sequence[LabeledPattern]) -> None:
    _require_sample(annotations)
    if any(len(pattern.description) > _MAX_DESCRIPTION for pattern in patterns):
        raise SettingError(f"a description has more than {_MAX_DESCRIPTION} characters; shorten it")
    stripped = tuple(replace(pattern, description=pattern.description.strip()) for pattern in patterns)
    annotations.save(Label(annotator, annotations.index.check(memory), stripped))


def _require_sample(annotations: Annotations) -> None:
    if annotations.sample is None:
        folder = shlex.quote(str(annotations.index.folder))
        raise SettingError(f"there is no sample yet; draw one here or with `memlens annotate {folder} sample`")


# Pages


@router.get("/annotate", response_class=HTMLResponse, include_in_schema=False)
def annotate_page(request: Request, bench: Bench, annotator: Annotator = "", memory: Memory = "") -> Response:
    annotations = bench.index.annotations
    if not annotator:
        study, problems = read_study(annotations), annotations.list_problems()
        return page(request, "annotate.html", study=study, problems=problems, annotator="")
    person = read_person(annotations, annotator)
    if not memory and not person.finished and person.following is not None:
        return RedirectResponse(_address(annotator, person.following), 303)
    if memory and not person.finished:
        return remember_viewer(request, _render_labeling(request, bench, person, memory), annotator)
    return remember_viewer(request, _render_overview(request, bench, person), annotator)


@router.post("/annotate/sample", include_in_schema=False)
def draw_from_form(bench: Bench, form: Fields) -> Response:
    fields = dict(form)
    try:
        numbers = [int(fields.get(name) or default) for name, default in (("per_layer", 10), ("top", 25), ("seed", 0))]
    except ValueError as error:
        raise SettingError("memories per layer, triggers and seed must be whole numbers") from error
    per_layer, top, seed = (min(max(number, 0), 2**31) for number in numbers)
    bench.index.annotations.set_sample(draw_sample(bench.index, per_layer, top, seed))
    return RedirectResponse(_address(fields.get("as", "").strip()), 303)


@router.post("/annotate/save", include_in_schema=False)
def save_from_form(request: Request, bench: Bench, annotator: Annotator, memory: Memory, form: Fields) -> Response:
    patterns = patterns_of_form(form)
    try:
        _save(bench.index.annotations, annotator, memory, patterns)
    except SettingError as error:  # show the form again with the reason, so that no input is lost
        person = read_person(bench.index.annotations, annotator)
        return _render_labeling(request, bench, person, memory, patterns, str(error))
    return RedirectResponse(_address(annotator), 303)


@router.post("/annotate/undo", include_in_schema=False)
def undo_from_form(bench: Bench, annotator: Annotator, memory: Memory) -> Response:
    bench.index.annotations.undo(LABELS, annotator, memory)
    return RedirectResponse(_address(annotator, memory), 303)


@router.post("/annotate/finish", include_in_schema=False)
def finish_from_form(bench: Bench, annotator: Annotator) -> Response:
    _require_sample(bench.index.annotations)
    bench.index.annotations.finish(annotator)
    return RedirectResponse(_address(annotator), 303)


# JSON


@router.get("/api/annotate", responses=MODEL_PROBLEMS)
def read_annotation_study(bench: Bench) -> Study:
    """Return the sample and the progress of all annotators, without labels."""
    return read_study(bench.index.annotations)


@router.get("/api/annotate/labels", responses=MODEL_PROBLEMS)
def read_labels(bench: Bench, annotator: Annotator) -> PersonalStudy:
    """Return an annotator's own labels and, if they have finished, the finished labels of others."""
    return read_person(bench.index.annotations, annotator)


@router.post("/api/annotate/sample", responses=MODEL_PROBLEMS)
def draw_annotation_sample(bench: Bench, draw: SampleRequest) -> Study:
    """Draw the memories to label. Fails if there are already labels."""
    bench.index.annotations.set_sample(draw_sample(bench.index, draw.per_layer, draw.top, draw.seed))
    return read_study(bench.index.annotations)


@router.post("/api/annotate/labels", responses=MODEL_PROBLEMS)
def save_one_label(bench: Bench, label: NewLabel) -> PersonalStudy:
    """Save an annotator's patterns for a memory."""
    _save(bench.index.annotations, label.annotator, label.memory, label.patterns)
    return read_person(bench.index.annotations, label.annotator)


@router.post("/api/annotate/undo", responses=MODEL_PROBLEMS)
def undo_one_label(bench: Bench, who: LabelReference) -> PersonalStudy:
    """Undo an annotator's last label of a memory, so that the previous one counts again."""
    bench.index.annotations.undo(LABELS, who.annotator, who.memory)
    return read_person(bench.index.annotations, who.annotator)


@router.post("/api/annotate/finish", responses=MODEL_PROBLEMS)
def finish_one_person(bench: Bench, who: Person) -> PersonalStudy:
    """Mark an annotator as finished. Their labels can no longer change, and they can see the labels of others."""
    _require_sample(bench.index.annotations)
    bench.index.annotations.finish(who.annotator)
    return read_person(bench.index.annotations, who.annotator)


# Parts


def _render_labeling(
    request: Request,
    bench: Workbench,
    person: PersonalStudy,
    memory: str,
    patterns: Sequence[LabeledPattern] | None = None,
    problem: str = "",
) -> Response:
    """Return the form for one memory, filled with its saved patterns or with those that were rejected."""
    name = bench.index.check(memory)
    study = read_study(bench.index.annotations)
    if name not in study.memories:
        raise UnknownName(f"{name} is not in the sample; choose a memory of the sample")
    place = study.memories.index(name)
    labels = (label for label in person.labels if (label.annotator, label.memory) == (person.annotator, name))
    patterns = next((label.patterns for label in labels), ()) if patterns is None else patterns
    return page(
        request,
        "annotate_memory.html",
        422 if problem else 200,
        study=study,
        person=person,
        memory=name,
        triggers=bench.index.triggers(name, limit=study.top or _DEFAULT_TOP),
        slots=[*patterns, *[None] * max(SLOTS - len(patterns), 1)],
        has_label=name in person.done,
        before=study.memories[place - 1] if place else None,
        after=study.memories[place + 1] if place + 1 < len(study.memories) else None,
        kinds=KINDS,
        least=GROUNDED,
        problem=problem,
    )


def _render_overview(request: Request, bench: Workbench, person: PersonalStudy) -> Response:
    """Return the page for an annotator who has labeled all memories. After finishing, it shows all labels."""
    study = read_study(bench.index.annotations)
    pairs, note = [], ""
    if person.finished:
        try:
            pairs = compute_agreement(bench.index.annotations)
        except MemlensError as error:
            note = str(error)
    by_memory = {name: [label for label in person.labels if label.memory == name] for name in study.memories}
    return page(request, "annotate_done.html", study=study, person=person, pairs=pairs, note=note, by_memory=by_memory)


def _address(annotator: str, memory: str | MemoryId = "") -> str:
    fields = {name: value for name, value in (("as", annotator), ("memory", memory)) if value}
    return f"/annotate?{urlencode(fields, errors='replace')}" if fields else "/annotate"
