"""One prompt, live: what every layer predicts after every token, one cell opened, memories switched off or turned up.

Everything that is shown is in the address, so that a link is all that is needed to share it.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from memlens.errors import MemlensError
from memlens.web.app_errors import status_of
from memlens.web.prompt_grid import Grid, Opened, open_cell, read_grid
from memlens.web.rendering import MODEL_PROBLEMS, Bench, page
from memlens.web.workbench import READY, Workbench

router = APIRouter(tags=["trace"])

_EXAMPLES = ("The capital of France is", "In 1990 the", "The river runs to the sea and")

Prompt = Annotated[str, Query(max_length=2000, description="The text to trace.")]
Given = Annotated[str, Query(min_length=1, max_length=2000, description="The text to trace.")]
Layer = Annotated[int | None, Query(ge=0, le=100_000, description="From 0. Default: the last.")]
Position = Annotated[
    int, Query(alias="at", ge=-2000, le=2000, description="The prompt's token, from 0; -1 is the last.")
]
Sets = Annotated[
    list[str],
    Query(alias="set", max_length=20, description="L3N512=0 silences, =3.5 sets, =x2 scales; L3=0 is a whole layer."),
]


class View:
    """What an address asks for, and the addresses beside it."""

    def __init__(self, prompt: str, layer: int | None, at: int, sets: list[str]) -> None:
        self.prompt, self.layer, self.at, self.sets = prompt, layer, at, sets

    def address(self, path: str = "/trace", layer: int | None = None, at: int | None = None) -> str:
        return self._address(path, self.layer if layer is None else layer, self.at if at is None else at, self.sets)

    def without(self, edit: str | None = None) -> str:
        """The same with one edit less, or with none."""
        return self._address("/trace", self.layer, self.at, [] if edit is None else [s for s in self.sets if s != edit])

    def and_set(self, edit: str) -> str:
        return self._address("/trace", self.layer, self.at, [*self.sets, edit])

    def _address(self, path: str, layer: int | None, at: int, sets: list[str]) -> str:
        pairs: list[tuple[str, str]] = [("prompt", self.prompt)]
        pairs += [] if layer is None else [("layer", str(layer)), ("at", str(at))]
        return f"{path}?{urlencode([*pairs, *(('set', edit) for edit in sets)], errors='replace')}"


@router.get("/trace", response_class=HTMLResponse, include_in_schema=False)
def trace_page(
    request: Request,
    bench: Bench,
    prompt: Prompt = "",
    layer: Layer = None,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006 - FastAPI copies it
    memory: Annotated[str, Query(max_length=30)] = "",
    to: Annotated[str, Query(max_length=30)] = "",
) -> Response:
    view = View(prompt, layer, at, sets)
    if memory and to.strip():  # a form's two fields become one edit in the address
        return RedirectResponse(view.and_set(f"{memory}={to.strip()}"), 303)
    grid, opened, problem, status = None, None, "", 200
    if prompt and bench.status == READY:
        try:
            grid, opened = _look(bench, view)
        except MemlensError as error:
            problem, status = str(error), status_of(error)
    if opened is not None:
        view = View(prompt, opened.layer, opened.position, opened.edits)
    return page(
        request, "trace.html", status, view=view, grid=grid, opened=opened, problem=problem, examples=_EXAMPLES,
        linked=bench.index.layers,
    )  # fmt: skip


@router.get("/trace/cell", response_class=HTMLResponse, include_in_schema=False)
def cell_part(
    request: Request,
    bench: Bench,
    prompt: Given,
    layer: Layer = None,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006
) -> Response:
    """The part of the page below the grid, for another cell."""
    opened = _open(bench, View(prompt, layer, at, sets))
    view = View(prompt, opened.layer, opened.position, opened.edits)
    return page(request, "trace_cell.html", view=view, opened=opened, linked=bench.index.layers)


@router.get("/api/trace", responses=MODEL_PROBLEMS)
def read_trace_grid(bench: Bench, prompt: Given, sets: Sets = []) -> Grid:  # noqa: B006
    """What every layer predicts after every token of a prompt. Needs the model."""
    with bench.model() as model:
        return read_grid(model, prompt, sets)


@router.get("/api/trace/cell", responses=MODEL_PROBLEMS)
def read_trace_cell(
    bench: Bench,
    prompt: Given,
    layer: Layer = None,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006
) -> Opened:
    """One layer at one token of a prompt: residual, feed-forward, memories, before and after edits. Needs the model."""
    return _open(bench, View(prompt, layer, at, sets))


def _look(bench: Workbench, view: View) -> tuple[Grid, Opened]:
    with bench.model() as model:
        grid = read_grid(model, view.prompt, view.sets)
    return grid, _open(bench, view)


def _open(bench: Workbench, view: View) -> Opened:
    with bench.model() as model:
        layer = len(model.layers) - 1 if view.layer is None else view.layer
        return open_cell(bench.index, model, view.prompt, layer, view.at, view.sets)
