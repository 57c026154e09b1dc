"""One memory: what triggers it, what its triggers have in common, what it promotes, and what happens without it."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, Field

from memlens.memory import MemoryId
from memlens.web.live import Shaded, Silenced, shade_triggers, silence
from memlens.web.memory_view import MemoryView, RelatedView, read_memory, read_related
from memlens.web.rendering import MODEL_PROBLEMS, PROBLEMS, Bench, Viewer, page
from memlens.web.served_index import ServedIndex
from memlens.web.statistics import draw_histogram

router = APIRouter(tags=["memory"])

_TOKENS_SHOWN = 15
End = Literal["top", "bottom"]
Name = Annotated[str, Path(description="Layer and memory from 0, like L3N512.", max_length=30)]


class Change(BaseModel):
    """What to do to the memory, and after which text to look."""

    prompt: str = Field(min_length=1, max_length=4000)
    change: str = Field(default="0", max_length=30, description="0 silences, 3.5 sets, x2 scales.")


@router.get("/m/{name}", response_class=HTMLResponse, include_in_schema=False)
def memory_page(
    request: Request,
    bench: Bench,
    viewer: Viewer,
    name: Name,
    end: End = "top",
    related: Literal["yes", "no"] = "no",
) -> Response:
    memory = bench.index.check(name)
    if name != str(memory):  # L3D512, l3n512: one address for one memory
        return RedirectResponse(f"/m/{memory}" + (f"?{request.url.query}" if request.url.query else ""), 308)
    view = read_memory(bench.index, memory, (end,), viewer)
    return page(
        request,
        "memory.html",
        view=view,
        end=end,
        triggers=view.triggers[end],
        has_bottom=_has_bottom(bench.index),
        strongest=max((abs(trigger.coefficient) for trigger in view.triggers[end]), default=0.0),
        shown=_TOKENS_SHOWN,
        histogram=draw_histogram(view.histogram, view.histogram_edges),
        neighbours=_neighbours(bench.index, memory),
        related=read_related(bench.index, memory) if related == "yes" else None,
    )


@router.get("/api/memories/{name}", responses=PROBLEMS)
def read_one_memory(bench: Bench, viewer: Viewer, name: Name) -> MemoryView:
    """Everything the index knows of one memory."""
    return read_memory(bench.index, name, viewer=viewer)


@router.get("/api/memories/{name}/related", responses=PROBLEMS)
def read_related_memories(
    bench: Bench, name: Name, limit: Annotated[int, Query(ge=1, le=100)] = 12
) -> list[RelatedView]:
    """Memories with the same triggers, patterns or promoted tokens, the most alike first."""
    return read_related(bench.index, name, limit)


@router.get("/api/memories/{name}/coefficients", responses=MODEL_PROBLEMS)
def read_coefficients(bench: Bench, name: Name, end: End = "top") -> list[Shaded]:
    """The memory's coefficient at every token of its triggers, computed now. Needs the model."""
    memory = bench.index.check(name)
    with bench.model() as model:
        return shade_triggers(bench.index, model, memory, end)


@router.post("/api/memories/{name}/silence", responses=MODEL_PROBLEMS)
def silence_memory(bench: Bench, name: Name, change: Change) -> Silenced:
    """What the model predicts after a prompt with and without the memory. Needs the model; changes nothing."""
    memory = bench.index.check(name)
    with bench.model() as model:
        return silence(bench.index, model, memory, change.prompt, change.change)


def _neighbours(index: ServedIndex, memory: MemoryId) -> tuple[MemoryId | None, MemoryId | None]:
    """The memory before and after in the index's order, over the edges of layers."""
    place = index.layers.index(memory.layer)
    before = after = None
    if memory.memory > 0:
        before = MemoryId(memory.layer, memory.memory - 1)
    elif place > 0:
        layer = index.layers[place - 1]
        before = MemoryId(layer, index.memories(layer) - 1)
    if memory.memory + 1 < index.memories(memory.layer):
        after = MemoryId(memory.layer, memory.memory + 1)
    elif place + 1 < len(index.layers):
        after = MemoryId(index.layers[place + 1], 0)
    return before, after


def _has_bottom(index: ServedIndex) -> bool:
    """Did the scan keep the most negative triggers of any memory?"""
    query = "SELECT 1 AS one FROM {triggers} WHERE \"end\" = 'bottom' LIMIT 1"
    return index.remember(("triggers",), ("has bottom",), lambda: bool(index.sql(query)))
