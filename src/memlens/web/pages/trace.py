"""The page Trace: what every layer predicts after every token of a prompt, one cell opened, memories changed.

The grid reads the output of every layer at every position as the model reads its last state; within an intervention
it is the edited model's. A cell is one layer of `memlens.trace`. The address holds everything that is shown, so that a
link is all that is needed to share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import StringConstraints

from memlens.errors import MemlensError, SettingError
from memlens.tracer.intervention import Edit, Intervention, check_layer
from memlens.tracer.result import InterventionEffect, TokenShare, Trace
from memlens.web.pages.memory import refuse_long_prompt, with_layers
from memlens.web.rendering import LIVE_PROBLEMS, Bench, LiveRoute, page, status_of
from memlens.web.workbench import READY, Workbench

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.prompt import Prompt

MOST_TOKENS = 96  # of a prompt: a grid of more is no picture any longer
_LISTED = 10  # tokens and memories of an opened cell
_EXAMPLES = ("The capital of France is", "In 1990 the", "The river runs to the sea and")


@dataclass(frozen=True)
class GridCell(TokenShare):
    """The most likely next token as one layer has it after one token of the prompt."""

    settled: bool  # from this layer on, the token stays what the model predicts
    was: str | None  # the token without the edits, where that is another one


@dataclass(frozen=True)
class Grid:
    """Layers by positions."""

    prompt: str
    tokens: tuple[str, ...]
    layers: tuple[tuple[GridCell, ...], ...]  # one row per layer, one cell per token of the prompt
    edits: tuple[str, ...]


def last_of_each(sets: list[str]) -> list[str]:
    """Edits as they were written; of several of one memory or layer the last."""
    by_target: dict[str, str] = {}
    for text in sets:
        target = Edit.parse(text).target
        by_target.pop(target, None)
        by_target[target] = text.strip()
    return list(by_target.values())


def read_grid(model: MemoryModel, text: str, sets: list[str]) -> Grid:
    """All layers at all positions; with edits, the edited model's, and what was there without."""
    from memlens.tracer.intervene import apply_edits
    from memlens.tracer.prompt import read_prompt

    prompt = read_prompt(model, text)
    if len(prompt.tokens) > MOST_TOKENS:
        raise SettingError(f"the prompt has {len(prompt.tokens)} tokens; the grid shows {MOST_TOKENS}, so shorten it")
    edits = last_of_each(sets)
    changes = apply_edits(model, Intervention.of(edits), prompt) if edits else None  # refuses before anything runs
    before = _tops(model, prompt)
    after = before
    if changes is not None:
        with changes:
            after = _tops(model, prompt)
    texts = model.tokenizer.token_text
    rows = (
        tuple(_cell(after, before, layer, position, texts) for position in range(len(prompt.tokens)))
        for layer in range(len(after))
    )
    return Grid(text, tuple(texts(token) for token in prompt.tokens), tuple(rows), tuple(edits))


def _tops(model: MemoryModel, prompt: Prompt) -> list[list[tuple[int, float]]]:
    """[layers][positions]: the top token of o and its probability."""
    import torch

    from memlens.models.decompose import record_positions
    from memlens.tracer.trace import read_states

    fed = prompt.fed()
    rows = torch.arange(prompt.shift, fed.shape[1])
    positions = record_positions(model, fed, rows, layers=())
    by_layer = []
    for layer in range(len(model.layers)):  # one at a time: a distribution is as wide as the vocabulary
        readings = read_states(model, positions.o[layer], 1)
        tops = [readings.top(row) for row in range(len(rows))]
        by_layer.append([(token, readings.p(row, token)) for row, token in enumerate(tops)])
    return by_layer


def _cell(after: Any, before: Any, layer: int, position: int, texts: Callable[[int], str]) -> GridCell:
    token, p = after[layer][position]
    final = after[-1][position][0]
    settled = all(row[position][0] == final for row in after[layer:])
    without = before[layer][position][0]
    return GridCell(token, texts(token), p, settled, texts(without) if without != token else None)


def open_cell(bench: Workbench, address: TraceAddress) -> Trace | InterventionEffect:
    """The layer and the last one of a trace; with edits, before and after."""
    from memlens.tracer.intervene import intervene
    from memlens.tracer.trace import trace

    with bench.model() as model:
        refuse_long_prompt(model, address.prompt, bench.live.prompt_tokens)
        last = len(model.layers) - 1
        layer = last if address.layer is None else address.layer
        check_layer(model, layer)
        if not address.sets:
            found = trace(model, address.prompt, address.at, top=_LISTED, index=bench.index)
            return with_layers(found, layer, last)
        edits = last_of_each(address.sets)
        effect = intervene(model, address.prompt, edits, address.at, top=_LISTED, index=bench.index)
    return replace(effect, before=with_layers(effect.before, layer, last), after=with_layers(effect.after, layer, last))


router = APIRouter(tags=["trace"], route_class=LiveRoute)

Text = Annotated[str, Query(max_length=2000, description="The text to trace.")]
Given = Annotated[str, Query(min_length=1, max_length=2000, description="The text to trace.")]
Layer = Annotated[int | None, Query(ge=0, le=100_000, description="From 0. Default: the last.")]
Position = Annotated[
    int, Query(alias="at", ge=-2000, le=2000, description="The prompt's token, from 0; -1 is the last.")
]
Sets = Annotated[
    list[Annotated[str, StringConstraints(max_length=200)]],
    Query(alias="set", max_length=20, description="L3N512=0 silences, =3.5 sets, =x2 scales; L3=0 is a whole layer."),
]


@dataclass(frozen=True)
class TraceAddress:
    """An address of the page, taken apart, and the addresses of its links."""

    prompt: str
    layer: int | None
    at: int
    sets: list[str]

    def link(self, **changes: Any) -> str:
        """The same with another layer, position or edits."""
        asked = replace(self, **changes)
        pairs = [("prompt", asked.prompt)]
        pairs += [] if asked.layer is None else [("layer", str(asked.layer)), ("at", str(asked.at))]
        return f"/trace?{urlencode([*pairs, *(('set', edit) for edit in asked.sets)], errors='replace')}"

    def without(self, edit: str | None = None) -> str:
        """The same with one edit less, or with none."""
        return self.link(sets=[] if edit is None else [one for one in self.sets if one != edit])


def _without_bad_edits(bench: Workbench, address: TraceAddress) -> tuple[TraceAddress, str, int]:
    """The address with the edits that the model can make, what is wrong with the others, and the answer's status."""
    from memlens.tracer.intervene import apply_edits
    from memlens.tracer.prompt import read_prompt

    good, problems, status = [], [], 200
    with bench.model() as model:
        prompt = read_prompt(model, address.prompt)
        for edit in address.sets:
            try:
                apply_edits(model, Intervention.of(edit), prompt)
                good.append(edit)
            except MemlensError as error:
                problems.append(str(error))
                status = status_of(error)
    return replace(address, sets=good), "; ".join(problems), status


def _shown(address: TraceAddress, opened: Trace | InterventionEffect) -> dict[str, Any]:
    """The variables of trace_cell.html."""
    before, after = (opened, None) if isinstance(opened, Trace) else (opened.before, opened.after)
    layer = (after or before).layers[0]
    sets = [] if after is None else last_of_each(address.sets)
    asked = TraceAddress(address.prompt, layer.layer, before.position, sets)
    return {"address": asked, "opened": opened, "layer": layer, "before": before, "after": after}


@router.get("/trace", response_class=HTMLResponse, include_in_schema=False)
def trace_page(
    request: Request,
    bench: Bench,
    prompt: Text = "",
    layer: Layer = None,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006 - FastAPI copies it
    memory: Annotated[str, Query(max_length=30)] = "",
    to: Annotated[str, Query(max_length=30)] = "",
) -> Response:
    address = TraceAddress(prompt, layer, at, sets)
    if memory and to.strip():  # a form's two fields become one edit in the address
        return RedirectResponse(address.link(sets=[*sets, f"{memory}={to.strip()}"]), 303)
    shown: dict[str, Any] = {"address": address}
    grid, problem, status = None, "", 200
    if prompt and bench.status == READY:
        try:
            address, problem, status = _without_bad_edits(bench, address)
            grid = read_trace_grid(bench, prompt, address.sets)
            shown = _shown(address, open_cell(bench, address))
        except MemlensError as error:
            grid, problem, status = None, str(error), status_of(error)
    linked = bench.index.layers
    return page(request, "trace.html", status, grid=grid, problem=problem, examples=_EXAMPLES, linked=linked, **shown)


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
    address = TraceAddress(prompt, layer, at, sets)
    shown = _shown(address, open_cell(bench, address))
    return page(request, "trace_cell.html", linked=bench.index.layers, **shown)


@router.get("/api/trace", responses=LIVE_PROBLEMS)
def read_trace_grid(bench: Bench, prompt: Given, sets: Sets = []) -> Grid:  # noqa: B006
    """What every layer predicts after every token of a prompt. Needs the model."""
    with bench.model() as model:
        refuse_long_prompt(model, prompt, bench.live.prompt_tokens)
        return read_grid(model, prompt, sets)


@router.get("/api/trace/cell", responses=LIVE_PROBLEMS)
def read_trace_cell(
    bench: Bench,
    prompt: Given,
    layer: Layer = None,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006
) -> Trace | InterventionEffect:
    """The layer and the last one of a trace; with edits, of the traces before and after. Needs the model."""
    return open_cell(bench, TraceAddress(prompt, layer, at, sets))
