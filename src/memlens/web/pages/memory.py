"""The pages of one memory and of one expert, and their JSON.

Computing coefficients at every token of a trigger, or the effect of changing the memory, requires the model. The model
reads sentences in the same way as the scan did, so the coefficient at the last token of a trigger equals that in the
index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, Field

from memlens.annotations.records import Label
from memlens.errors import SettingError
from memlens.index.memory import (
    ENDS,
    ExpertRecord,
    LayerRouting,
    MemoryRecord,
    MemoryValue,
    SentenceContext,
    TriggerCoefficients,
    find_expert,
    read_context,
    read_expert,
    read_memory,
    read_routing,
    shade_triggers,
)
from memlens.memory import ExpertId, MemoryId
from memlens.pattern.related import RelatedMemory, related_memories
from memlens.text import edge, plain
from memlens.tracer.result import InterventionEffect, TextCoefficients, Trace
from memlens.vocab.nearest import NearMemory, Side, nearest_memories
from memlens.web.rendering import LIVE_PROBLEMS, PROBLEMS, Bench, Name, Viewer, page, run_model
from memlens.web.workbench import ServedIndex

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

router = APIRouter(tags=["memory"])

TOKENS_SHOWN = 15
_FIRST_TRIGGERS = 10  # triggers shown at first
_FIRST_TOKENS = {"up": 10, "down": 5}  # promoted and demoted tokens shown at first
_EXPERT_TOKENS, _EXPERT_PREFIXES = 40, 20
_SILENCE_TOKENS = 8
_WIDTH, _HEIGHT = 320.0, 72.0  # size of a histogram in SVG units
End = Literal["top", "bottom"]
ExpertName = Annotated[
    str, Path(description="An expert: layer and number from 0, like L3E5, or L3S0 for a shared expert.", max_length=30)
]

Limit = Annotated[int, Query(ge=1, le=100, description="Number of entries to list.")]

# The model


def check_prompt_length(model: MemoryModel, prompt: str, limit: int) -> None:
    """Raise SettingError if the prompt has more than `limit` tokens."""
    from memlens.tracer.prompt import read_prompt

    count = len(read_prompt(model, prompt).tokens)
    if count > limit:
        raise SettingError(f"the prompt has {count} tokens; the limit is {limit}, so shorten it")


def silence(model: MemoryModel, name: MemoryId, prompt: str, change: str) -> InterventionEffect:
    """Return the effect of changing one memory, reduced to the last layer.

    `change` is the part after `=` in `memlens trace --set`: 0 silences, 3.5 sets, x2 scales.
    """
    from memlens.tracer.intervene import intervene

    effect = intervene(model, prompt, f"{name}={change}", top=_SILENCE_TOKENS)
    last = len(model.layers) - 1
    return replace(effect, before=select_layers(effect.before, last), after=select_layers(effect.after, last))


def select_layers(trace: Trace, *layers: int) -> Trace:
    """Return a copy of the trace that contains only these layers."""
    return replace(trace, layers=tuple(trace.layers[layer] for layer in sorted(set(layers))))


class CoefficientChange(BaseModel):
    """A prompt and a change of the memory's coefficient."""

    prompt: str = Field(min_length=1, max_length=4000)
    change: str = Field(
        default="0",
        max_length=30,
        description="The change of the coefficient: 0 silences the memory, 3.5 sets it, x2 scales it.",
    )


# A memory


@dataclass(frozen=True)
class LabeledMemory(MemoryRecord):
    """Everything that the index contains about one memory, with its labels."""

    labels: tuple[Label, ...]
    unfinished: str | None  # name of a viewer who has not finished and sees only their own labels


def read_labeled_memory(
    index: ServedIndex, name: str | MemoryId, viewer: str | None, ends: tuple[str, ...] = ENDS
) -> LabeledMemory:
    """Return a memory with the labels that this viewer (an annotator's name or None) may see.

    Raises:
        UnknownName: The index has no such memory.
    """
    record = read_memory(index, name, ends)
    labels = tuple(label for label in index.annotations.labels(viewer) if label.memory == record.name)
    has_study = index.annotations.sample is not None or index.annotations.list_annotators()
    may_see_all = not has_study or viewer in (None, *index.annotations.list_annotators(finished=True))
    return LabeledMemory(**vars(record), labels=labels, unfinished=None if may_see_all else viewer)


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
    if name != str(memory):  # redirect other spellings, like L3D51 and l3n51
        return RedirectResponse(f"/m/{memory}" + (f"?{request.url.query}" if request.url.query else ""), 308)
    view = read_labeled_memory(bench.index, memory, viewer, (end,))
    related_memories = read_related(bench, str(memory)) if related == "yes" else None
    content = memory_content(bench.index, view, end)
    content |= {
        "kept": bench.index.annotations.notes().get(memory),
        "expert": None if memory.kind == "dense" else memory.owner,
    }
    opened = [trigger for trigger in view.triggers[end] if trigger.rank == context]
    content["contexts"] = {trigger.rank: read_context(bench.index, trigger.prefix.sentence) for trigger in opened}
    return page(request, "memory.html", related=related_memories, **content)


def memory_content(index: ServedIndex, view: LabeledMemory, end: str) -> dict[str, Any]:
    """Return the variables that memory.html needs both in the workbench and in a static site."""
    return {
        "view": view,
        "end": end,
        "triggers": view.triggers[end],
        "has_bottom": has_bottom(index),
        "strongest": max((abs(trigger.coefficient) for trigger in view.triggers[end]), default=0.0),
        "shown": TOKENS_SHOWN,
        "first": _FIRST_TRIGGERS,
        "first_tokens": _FIRST_TOKENS,
        "axis": None if view.value is None else score_axis(view.value),
        "histogram": draw_histogram(view.histogram, view.histogram_edges),
        "neighbors": _find_neighbors(index, view.name),
    }


@router.get("/api/memories/{name}", responses=PROBLEMS)
def read_one_memory(bench: Bench, viewer: Viewer, name: Name) -> LabeledMemory:
    """Return everything in the index about one memory."""
    return read_labeled_memory(bench.index, name, viewer)


@router.get("/api/memories/{name}/related", responses=PROBLEMS)
def read_related(bench: Bench, name: Name, limit: Limit = 12) -> list[RelatedMemory]:
    """List memories that share triggers, patterns or promoted tokens with this one, most similar first."""
    return related_memories(bench.index, name, limit)


@router.get("/api/memories/{name}/nearest", responses=LIVE_PROBLEMS)
async def read_nearest(
    request: Request, bench: Bench, name: Name, by: Side = "value", limit: Limit = 12
) -> list[NearMemory]:
    """List the memories whose keys or values have the largest cosine with this memory's. Needs the model."""
    memory = bench.index.check(name)

    def find(model: MemoryModel) -> list[NearMemory]:
        return nearest_memories(bench.index, model, memory, by, limit)

    return await run_model(request, bench, find, key=("nearest", memory, by, limit))


@router.get("/api/memories/{name}/wires", responses=LIVE_PROBLEMS)
async def read_wires(request: Request, bench: Bench, name: Name, limit: Limit = 8) -> dict[str, Any]:
    """List possible connections to tokens and other memories, computed from weights alone. Needs the model."""
    memory = bench.index.check(name)

    def find(model: MemoryModel) -> dict[str, Any]:
        from memlens.circuits.wires import wires

        result: dict[str, Any] = plain(wires(bench.index, model, memory, limit))
        return result

    return await run_model(request, bench, find, key=("wires", memory, limit))


@router.get("/api/sentences/{sentence}", responses=PROBLEMS)
def read_sentence(
    bench: Bench,
    sentence: Annotated[int, Path(ge=0, le=1 << 62)],
    around: Annotated[int, Query(ge=0, le=20, description="Number of sentences to return before and after it.")] = 2,
) -> SentenceContext:
    """Return a sentence of the corpus with its source and neighboring sentences."""
    return read_context(bench.index, sentence, around)


@router.get("/api/memories/{name}/coefficients", responses=LIVE_PROBLEMS)
async def read_coefficients(request: Request, bench: Bench, name: Name, end: End = "top") -> list[TriggerCoefficients]:
    """Compute the memory's coefficient at every token of its triggers. Needs the model."""
    memory = bench.index.check(name)
    return await run_model(request, bench, lambda model: shade_triggers(bench.index, model, memory, end))


@router.get("/api/memories/{name}/on", responses=LIVE_PROBLEMS)
async def read_coefficients_on(
    request: Request, bench: Bench, name: Name, text: Annotated[str, Query(min_length=1, max_length=4000)]
) -> TextCoefficients:
    """Compute the memory's coefficient at every token of a text. Needs the model."""
    memory = bench.index.check(name)

    def compute(model: MemoryModel) -> TextCoefficients:
        from memlens.tracer.firing import coefficients_on

        check_prompt_length(model, text, bench.live.prompt_tokens)
        return coefficients_on(model, memory, text)

    return await run_model(request, bench, compute)


@router.post("/api/memories/{name}/silence", responses=LIVE_PROBLEMS)
async def silence_memory(request: Request, bench: Bench, name: Name, change: CoefficientChange) -> InterventionEffect:
    """Compare the predictions for a prompt with and without changing a memory. Needs the model."""
    memory = bench.index.check(name)

    def compute(model: MemoryModel) -> InterventionEffect:
        check_prompt_length(model, change.prompt, bench.live.prompt_tokens)
        return silence(model, memory, change.prompt, change.change)

    return await run_model(request, bench, compute)


@router.get("/api/memories/{name}/effect", responses=LIVE_PROBLEMS)
async def read_effect(request: Request, bench: Bench, name: Name, limit: Limit = 10) -> dict[str, Any]:
    """List the tokens whose probability changes most if the memory is silenced at its triggers. Needs the model."""
    memory = bench.index.check(name)

    def find(model: MemoryModel) -> dict[str, Any]:
        from memlens.tracer.token_change import token_change

        change = token_change(bench.index, model, memory, top=limit)
        result: dict[str, Any] = plain(change) | {"note": change.note}
        return result

    return await run_model(request, bench, find, key=("effect", memory, limit))


def _find_neighbors(index: ServedIndex, memory: MemoryId) -> tuple[MemoryId | None, MemoryId | None]:
    """Return the memories before and after this one, across layers."""
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
    """Return True if the scan kept the most negative triggers."""
    query = "SELECT 1 AS one FROM {triggers} WHERE \"end\" = 'bottom' LIMIT 1"
    return index.remember("has bottom", lambda: bool(index.sql(query)))


# Charts


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram, in SVG units."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Histogram:
    """A histogram with bars of equal width. Each bar's bin is twice as wide as the next bin towards zero."""

    width: float
    height: float
    bars: list[Bar]
    marks: list[tuple[float, str]]  # x and coefficient of each mark


def draw_histogram(counts: Sequence[int], edges: Sequence[float]) -> Histogram | None:
    """Return the histogram from the first to the last non-empty bin, or None if all bins are empty.

    The height of a bar is the square root of its count, which keeps rare bins visible.
    """
    filled = [number for number, count in enumerate(counts) if count]
    if not filled or len(counts) != len(edges) + 1:
        return None
    first, last = filled[0], filled[-1]
    width = _WIDTH / (last - first + 1)
    highest, total = max(counts), sum(counts)
    bars = []
    for place, number in enumerate(range(first, last + 1)):
        height = _HEIGHT * (counts[number] / highest) ** 0.5
        title = f"{_describe_bin(number, edges)}: {counts[number]:,} of {total:,}"
        bars.append(Bar(place * width, _HEIGHT - height, max(width - 1.5, 0.5), height, title))
    inner = [(place + 1, edges[number]) for place, number in enumerate(range(first, last))]
    step = max(1, -(-len(inner) // 6))
    marks = [(place * width - 0.75, edge(at)) for place, at in inner[::step]]
    return Histogram(_WIDTH, _HEIGHT, bars, marks)


def _describe_bin(number: int, edges: Sequence[float]) -> str:
    if number == 0:
        return f"below {edge(edges[0])}"
    if number == len(edges):
        return f"{edge(edges[-1])} and above"
    return f"{edge(edges[number - 1])} to {edge(edges[number])}"


@dataclass(frozen=True)
class ScoreAxis:
    """The axis of a value's scores, from the lowest to the highest score, with a histogram if the index has one."""

    low: float
    high: float
    bars: tuple[Bar, ...]

    def share(self, score: float) -> float:
        """Return the position of a score on the axis, from 0 to 100."""
        return 100 * (min(max(score, self.low), self.high) - self.low) / (self.high - self.low)


def score_axis(value: MemoryValue) -> ScoreAxis | None:
    """Return the axis, or None if all tokens have the same score.

    The height of a bar is the square root of its count, which keeps the extremes visible.
    """
    scores = [
        token.score for token in (*value.promotes, *value.demotes) if token.score is not None and isfinite(token.score)
    ]
    axis = ScoreAxis(min([0.0, *scores]), max([0.0, *scores]), ())
    if not scores or axis.low == axis.high:
        return None
    if not value.histogram or not all(isfinite(end[0].score or 0.0) for end in (value.promotes, value.demotes)):
        return axis  # without the scores of the extreme tokens (stored p of 0), the bins are unknown
    low, step = min(scores), (max(scores) - min(scores)) / len(value.histogram)
    highest, total, bars = max(value.histogram), sum(value.histogram), []
    for number, count in enumerate(value.histogram):
        first, last = (low + step * place for place in (number, number + 1))
        left, right = (_WIDTH * axis.share(at) / 100 for at in (first, last))
        height = _HEIGHT * (count / highest) ** 0.5
        title = f"{first:.2f} to {last:.2f}: {count:,} of {total:,} tokens".replace("-", "−")
        bars.append(Bar(left, _HEIGHT - height, max(right - left - 0.8, 0.4), height, title))
    return replace(axis, bars=tuple(bars))


# An expert of a mixture


@router.get("/e/{name}", response_class=HTMLResponse, include_in_schema=False)
def expert_page(request: Request, bench: Bench, name: ExpertName) -> Response:
    expert = find_expert(bench.index, name)
    if name != str(expert):
        return RedirectResponse(f"/e/{expert}", 308)
    groups = bench.index.names.layers[expert.layer]
    count = sum(group.count for group in groups if group.kind == expert.kind)
    numbers = [number for number in (expert.expert - 1, expert.expert + 1) if 0 <= number < count]
    return page(
        request,
        "expert.html",
        view=read_expert(bench.index, expert),
        neighbors=[ExpertId(expert.layer, expert.kind, number) for number in numbers],
        tokens_shown=_EXPERT_TOKENS,
        prefixes_shown=_EXPERT_PREFIXES,
    )


@router.get("/api/experts", responses=PROBLEMS)
def read_all_routing(bench: Bench) -> list[LayerRouting]:
    """Return how the router of each layer uses its experts. The list is empty for a model without experts."""
    return read_routing(bench.index)


@router.get("/api/experts/{name}", responses=PROBLEMS)
def read_one_expert(bench: Bench, name: ExpertName) -> ExpertRecord:
    """Return everything in the index about one expert."""
    return read_expert(bench.index, name)
