"""The page of one memory: what triggers it, what that has in common, what it promotes, what happens without it.

Coefficients at every token of a trigger and the effect of changing the memory need the model. Sentences are fed as the
scan fed them, so that the coefficient at a trigger's last token is the one in the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, Field

from memlens.annotations.answers import Label
from memlens.annotations.store import Annotations, history_mark
from memlens.errors import SettingError
from memlens.index.history import LABELS
from memlens.index.memory import (
    ENDS,
    MemoryRecord,
    MemoryValue,
    SentenceContext,
    TriggerCoefficients,
    read_context,
    read_memory,
    shade_triggers,
)
from memlens.memory import MemoryId
from memlens.pattern.related import RelatedMemory, related_memories
from memlens.text import edge
from memlens.tracer.result import InterventionEffect, TextCoefficients, Trace
from memlens.vocab.nearest import NearMemory, Side, nearest_memories
from memlens.web.pages.collections import kept_notes
from memlens.web.rendering import LIVE_PROBLEMS, PROBLEMS, Bench, IndexRoute, LiveRoute, Name, Viewer, page
from memlens.web.served_index import ServedIndex

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

_TOKENS = 8


def silence(model: MemoryModel, name: MemoryId, prompt: str, change: str) -> InterventionEffect:
    """`change` is what follows the `=` in `memlens trace --set`: 0 silences, 3.5 sets, x2 scales. Last layer only."""
    from memlens.tracer.intervene import intervene

    effect = intervene(model, prompt, f"{name}={change}", top=_TOKENS)
    last = len(model.layers) - 1
    return replace(effect, before=with_layers(effect.before, last), after=with_layers(effect.after, last))


def refuse_long_prompt(model: MemoryModel, prompt: str, most: int) -> None:
    from memlens.tracer.prompt import read_prompt

    count = len(read_prompt(model, prompt).tokens)
    if count > most:
        raise SettingError(f"the prompt has {count} tokens; {most} are the most that is answered here, so shorten it")


def with_layers(trace: Trace, *layers: int) -> Trace:
    """The trace with some of its layers only, so that an answer is short."""
    return replace(trace, layers=tuple(trace.layers[layer] for layer in sorted(set(layers))))


router = APIRouter(tags=["memory"], route_class=IndexRoute)
live = APIRouter(tags=["memory"], route_class=LiveRoute)

TOKENS_SHOWN = 15
_FIRST = 10  # triggers; the others are folded away
_PROMOTED, _DEMOTED = 10, 5  # tokens of a value; the others are folded away
_WIDTH, _HEIGHT = 320.0, 72.0  # of the histogram
End = Literal["top", "bottom"]


class CoefficientChange(BaseModel):
    """The coefficient to set, and the text after which to predict."""

    prompt: str = Field(min_length=1, max_length=4000)
    change: str = Field(default="0", max_length=30, description="0 silences, 3.5 sets, x2 scales.")


@dataclass(frozen=True)
class LabelledMemory(MemoryRecord):
    """Everything that the index says of one memory, and what people say of it."""

    labels: tuple[Label, ...]
    unfinished: str | None  # who looks, if they still label and so see only their own labels


def read_labelled_memory(
    index: ServedIndex, name: str | MemoryId, viewer: str | None, ends: tuple[str, ...] = ENDS
) -> LabelledMemory:
    """Refused if the index has no such memory. The viewer is the annotator who looks, if it is one."""
    record = read_memory(index, name, ends)
    labels, may_see_all = _labels(index, viewer)
    of_memory = tuple(label for label in labels if label.memory == record.name)
    return LabelledMemory(**vars(record), labels=of_memory, unfinished=None if may_see_all else viewer)


def _labels(index: ServedIndex, viewer: str | None) -> tuple[list[Label], bool]:
    """The labels this viewer may see, and whether these are all of those who have finished. Never makes the file."""

    def read() -> tuple[list[Label], bool]:
        with Annotations(index) as notes:
            return notes.labels(viewer), viewer is None or viewer in notes.annotators(finished=True)

    mark = history_mark(index, LABELS)
    return ([], True) if mark is None else index.remember((), ("labels", mark, viewer), read)


@router.get("/m/{name}", response_class=HTMLResponse, include_in_schema=False)
def memory_page(
    request: Request,
    bench: Bench,
    viewer: Viewer,
    name: Name,
    end: End = "top",
    related: Literal["yes", "no"] = "no",
    context: Annotated[int | None, Query(ge=0, le=100_000, description="The rank of a trigger.")] = None,
) -> Response:
    memory = bench.index.check(name)
    if name != str(memory):  # L3D51, l3n51: one address for one memory
        return RedirectResponse(f"/m/{memory}" + (f"?{request.url.query}" if request.url.query else ""), 308)
    view = read_labelled_memory(bench.index, memory, viewer, (end,))
    related_memories = read_related(bench, str(memory)) if related == "yes" else None
    content = memory_content(bench.index, view, end)
    content |= {"kept": kept_notes(bench.index).get(memory), "expert": None if memory.kind == "dense" else memory.owner}
    opened = [trigger for trigger in view.triggers[end] if trigger.rank == context]
    content["contexts"] = {trigger.rank: read_context(bench.index, trigger.prefix.sentence) for trigger in opened}
    return page(request, "memory.html", related=related_memories, **content)


def memory_content(index: ServedIndex, view: LabelledMemory, end: str) -> dict[str, Any]:
    """The variables of memory.html for one end of a memory, but for its related memories."""
    return {
        "view": view,
        "end": end,
        "triggers": view.triggers[end],
        "has_bottom": has_bottom(index),
        "strongest": max((abs(trigger.coefficient) for trigger in view.triggers[end]), default=0.0),
        "shown": TOKENS_SHOWN,
        "first": _FIRST,
        "first_tokens": {"up": _PROMOTED, "down": _DEMOTED},
        "axis": None if view.value is None else score_axis(view.value),
        "histogram": draw_histogram(view.histogram, view.histogram_edges),
        "neighbours": _neighbours(index, view.name),
    }


@router.get("/api/memories/{name}", responses=PROBLEMS)
def read_one_memory(bench: Bench, viewer: Viewer, name: Name) -> LabelledMemory:
    """Everything the index knows of one memory."""
    return read_labelled_memory(bench.index, name, viewer)


@router.get("/api/memories/{name}/related", responses=PROBLEMS)
def read_related(bench: Bench, name: Name, limit: Annotated[int, Query(ge=1, le=100)] = 12) -> list[RelatedMemory]:
    """Memories with the same triggers, patterns or promoted tokens, the most alike first."""
    return related_memories(bench.index, name, limit)


@live.get("/api/memories/{name}/nearest", responses=LIVE_PROBLEMS)
def read_nearest(
    bench: Bench, name: Name, by: Side = "value", limit: Annotated[int, Query(ge=1, le=100)] = 12
) -> list[NearMemory]:
    """Memories by the cosine of their values, or of their keys. Needs the model."""
    memory = bench.index.check(name)
    with bench.model() as model:
        key = ("nearest", memory, by, limit)
        return bench.kept.answer(key, lambda: nearest_memories(bench.index, model, memory, by, limit))


@router.get("/api/sentences/{sentence}", responses=PROBLEMS)
def read_sentence(
    bench: Bench,
    sentence: Annotated[int, Path(ge=0, le=1 << 62)],
    around: Annotated[int, Query(ge=0, le=20, description="Sentences on each side.")] = 2,
) -> SentenceContext:
    """A sentence of the corpus, where it comes from, and what stands before and after it there."""
    return read_context(bench.index, sentence, around)


@live.get("/api/memories/{name}/coefficients", responses=LIVE_PROBLEMS)
def read_coefficients(bench: Bench, name: Name, end: End = "top") -> list[TriggerCoefficients]:
    """The memory's coefficient at every token of its triggers, computed now. Needs the model."""
    memory = bench.index.check(name)
    with bench.model() as model:
        return shade_triggers(bench.index, model, memory, end)


@live.get("/api/memories/{name}/on", responses=LIVE_PROBLEMS)
def read_coefficients_on(
    bench: Bench, name: Name, text: Annotated[str, Query(min_length=1, max_length=4000)]
) -> TextCoefficients:
    """The memory's coefficient at every token of a text. Needs the model."""
    from memlens.tracer.firing import coefficients_on

    memory = bench.index.check(name)
    with bench.model() as model:
        refuse_long_prompt(model, text, bench.live.prompt_tokens)
        return coefficients_on(model, memory, text)


@live.post("/api/memories/{name}/silence", responses=LIVE_PROBLEMS)
def silence_memory(bench: Bench, name: Name, change: CoefficientChange) -> InterventionEffect:
    """The model's predictions after a prompt with and without the memory. Needs the model; changes nothing."""
    memory = bench.index.check(name)
    with bench.model() as model:
        refuse_long_prompt(model, change.prompt, bench.live.prompt_tokens)
        return silence(model, memory, change.prompt, change.change)


router.include_router(live)


def _neighbours(index: ServedIndex, memory: MemoryId) -> tuple[MemoryId | None, MemoryId | None]:
    """The memory before and after in the index's order, over the edges of layers."""
    place, number, name = index.layers.index(memory.layer), index.names.number(memory), index.names.name
    before = after = None
    if number > 0:
        before = name(memory.layer, number - 1)
    elif place > 0:
        layer = index.layers[place - 1]
        before = name(layer, index.memories(layer) - 1)
    if number + 1 < index.memories(memory.layer):
        after = name(memory.layer, number + 1)
    elif place + 1 < len(index.layers):
        after = name(index.layers[place + 1], 0)
    return before, after


def has_bottom(index: ServedIndex) -> bool:
    """Did the scan keep the most negative triggers of any memory?"""
    query = "SELECT 1 AS one FROM {triggers} WHERE \"end\" = 'bottom' LIMIT 1"
    return index.remember(("triggers",), ("has bottom",), lambda: bool(index.sql(query)))


@dataclass(frozen=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Histogram:
    """Bars by bin; bins double in width outwards, so equal bars on the screen are no equal ranges."""

    width: float
    height: float
    bars: list[Bar]
    marks: list[tuple[float, str]]  # where, and which coefficient


def draw_histogram(counts: Sequence[int], edges: Sequence[float]) -> Histogram | None:
    """The filled part; None without a sample. Heights are square roots: rare bins are the interesting ones."""
    filled = [number for number, count in enumerate(counts) if count]
    if not filled or len(counts) != len(edges) + 1:
        return None
    first, last = filled[0], filled[-1]
    width = _WIDTH / (last - first + 1)
    most, total = max(counts), sum(counts)
    bars = []
    for place, number in enumerate(range(first, last + 1)):
        height = _HEIGHT * (counts[number] / most) ** 0.5
        title = f"{_range(number, edges)}: {counts[number]:,} of {total:,}"
        bars.append(Bar(place * width, _HEIGHT - height, max(width - 1.5, 0.5), height, title))
    inner = [(place + 1, edges[number]) for place, number in enumerate(range(first, last))]
    step = max(1, -(-len(inner) // 6))
    marks = [(place * width - 0.75, edge(at)) for place, at in inner[::step]]
    return Histogram(_WIDTH, _HEIGHT, bars, marks)


@dataclass(frozen=True)
class ScoreAxis:
    """The scores of a value on one line: its lowest and highest token, 0 between them, and how many are where."""

    low: float
    high: float
    bars: tuple[Bar, ...]  # of the histogram; none where the index has none

    def share(self, score: float) -> float:
        """The place of a score on the axis, from 0 to 100."""
        return 100 * (min(max(score, self.low), self.high) - self.low) / (self.high - self.low)


def score_axis(value: MemoryValue) -> ScoreAxis | None:
    """None where all tokens have one score. Heights are square roots: the few tokens at the ends are what counts."""
    scores = [
        token.score for token in (*value.promotes, *value.demotes) if token.score is not None and isfinite(token.score)
    ]
    axis = ScoreAxis(min([0.0, *scores]), max([0.0, *scores]), ())
    if not scores or axis.low == axis.high:
        return None
    if not value.histogram or not all(isfinite(end[0].score or 0.0) for end in (value.promotes, value.demotes)):
        return axis  # an end so improbable that its p is 0 in the table says nothing of edges
    low, step = min(scores), (max(scores) - min(scores)) / len(value.histogram)
    most, total, bars = max(value.histogram), sum(value.histogram), []
    for number, count in enumerate(value.histogram):
        first, last = (low + step * place for place in (number, number + 1))
        left, right = (_WIDTH * axis.share(at) / 100 for at in (first, last))
        height = _HEIGHT * (count / most) ** 0.5
        title = f"{first:.2f} to {last:.2f}: {count:,} of {total:,} tokens".replace("-", "−")
        bars.append(Bar(left, _HEIGHT - height, max(right - left - 0.8, 0.4), height, title))
    return replace(axis, bars=tuple(bars))


def _range(number: int, edges: Sequence[float]) -> str:
    if number == 0:
        return f"below {edge(edges[0])}"
    if number == len(edges):
        return f"{edge(edges[-1])} and above"
    return f"{edge(edges[number - 1])} to {edge(edges[number])}"
