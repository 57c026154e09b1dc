"""The page Trace: what every layer predicts after every token of a prompt, one cell opened, memories changed.

The grid reads the output of every layer at every position as the model reads its last state; within an intervention
it is the edited model's. A cell is one layer of `memlens.trace`. The address holds everything that is shown, so that a
link is all that is needed to share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import StringConstraints

from memlens.errors import MemlensError, UnknownName
from memlens.tracer.intervention import Edit, Intervention
from memlens.tracer.result import InterventionEffect, TokenShare, Trace
from memlens.web.pages.collections import names_beside
from memlens.web.pages.memory import refuse_long_prompt, with_layers
from memlens.web.rendering import LIVE_PROBLEMS, Bench, LiveRoute, page, status_of
from memlens.web.workbench import READY, KeptPrompts, Workbench

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

COLUMNS = 64  # of the grid on a page: those up to the open one
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


def read_grid(model: MemoryModel, text: str, sets: list[str], cache: KeptPrompts | None = None) -> Grid:
    """All layers at all positions; with edits, the edited model's, and what was there without."""
    from memlens.tracer.prompt import read_prompt

    prompt, cache = read_prompt(model, text), cache or KeptPrompts()
    edits = last_of_each(sets)
    after = cache.run(model, prompt, tuple(edits)).tops  # first: refuses edits that cannot be made
    before = cache.run(model, prompt).tops if edits else after
    texts = model.tokenizer.token_text
    rows = (
        tuple(_cell(after, before, layer, position, texts) for position in range(len(prompt.tokens)))
        for layer in range(len(after))
    )
    return Grid(text, tuple(texts(token) for token in prompt.tokens), tuple(rows), tuple(edits))


def _cell(after: Any, before: Any, layer: int, position: int, texts: Callable[[int], str]) -> GridCell:
    token, p = after[layer][position]
    final = after[-1][position][0]
    settled = all(row[position][0] == final for row in after[layer:])
    without = before[layer][position][0]
    return GridCell(token, texts(token), p, settled, texts(without) if without != token else None)


def read_answer(bench: Workbench, address: TraceAddress) -> Trace | InterventionEffect:
    """All layers at one position, for one token or one against another; with edits, before and after."""
    with bench.model() as model:
        refuse_long_prompt(model, address.prompt, bench.live.prompt_tokens)
        return bench.kept.answer(address.question, lambda: _answer(bench, model, address))


def _answer(bench: Workbench, model: MemoryModel, address: TraceAddress) -> Trace | InterventionEffect:
    from memlens.tracer.intervene import effect_of
    from memlens.tracer.prompt import read_prompt, read_token

    prompt = read_prompt(model, address.prompt)
    place = prompt.place(address.at)
    token, against = (
        read_token(model, word.replace("␣", " ")) if word else None for word in (address.token, address.against)
    )
    edits = tuple(last_of_each(address.sets))
    if not edits:
        return bench.kept.run(model, prompt).trace(place, token, against, _LISTED, bench.index)[0]
    edited, without = bench.kept.run(model, prompt, edits), bench.kept.run(model, prompt)
    return effect_of(Intervention.of(edits), without, edited, place, token, against, _LISTED, bench.index)


def open_cell(bench: Workbench, address: TraceAddress) -> Trace | InterventionEffect:
    """The layer and the last one of the answer."""
    answer = read_answer(bench, address)
    if isinstance(answer, Trace):
        return _layer_and_last(answer, address.layer)
    before, after = (_layer_and_last(trace, address.layer) for trace in (answer.before, answer.after))
    return replace(answer, before=before, after=after)


def _layer_and_last(trace: Trace, layer: int | None) -> Trace:
    last = len(trace.layers) - 1
    if layer is not None and layer > last:
        raise UnknownName(f"layer {layer} does not exist: {trace.model} has layers 0 to {last}")
    return with_layers(trace, last if layer is None else layer, last)


router = APIRouter(tags=["trace"], route_class=LiveRoute)

MOST_LETTERS = 10_000
Text = Annotated[str, Query(max_length=MOST_LETTERS, description="The text to trace.")]
Given = Annotated[str, Query(min_length=1, max_length=MOST_LETTERS, description="The text to trace.")]
Target = Annotated[
    str, Query(max_length=100, description="Whose logit is explained; ␣ is a space. Default: the predicted token's.")
]
Other = Annotated[str, Query(max_length=100, description="Another token: the difference of the two is explained.")]
Layer = Annotated[int | None, Query(ge=0, le=100_000, description="From 0. Default: the last.")]
Position = Annotated[
    int, Query(alias="at", ge=-MOST_LETTERS, le=MOST_LETTERS, description="The prompt's token, from 0; -1 is the last.")
]
Sets = Annotated[
    list[Annotated[str, StringConstraints(max_length=200)]],
    Query(alias="set", max_length=20, description="L3N51=0 silences, =3.5 sets, =x2 scales; L3=0 is a whole layer."),
]


@dataclass(frozen=True)
class TraceAddress:
    """An address of the page, taken apart, and the addresses of its links."""

    prompt: str
    layer: int | None
    at: int
    sets: list[str]
    token: str = ""
    against: str = ""

    @property
    def question(self) -> tuple[object, ...]:
        """All that an answer depends on: every layer is in it."""
        return (self.prompt, self.at, tuple(self.sets), self.token, self.against)

    @property
    def command(self) -> str:
        """The same in a terminal."""
        tokens = [("--token", self.token), ("--against", self.against)]
        options = [] if self.at == -1 else [("--position", str(self.at))]
        options += [(option, text.replace("␣", " ")) for option, text in tokens if text]
        words = [f"{option} {quote(text)}" for option, text in (*options, *(("--set", edit) for edit in self.sets))]
        prompt = quote(self.prompt)
        # what begins with a dash is a text only behind --, and behind that nothing is an option
        words = [*words, "--", prompt] if self.prompt.startswith("-") else [prompt, *words]
        return " ".join(["memlens trace INDEX", *words])

    @property
    def steer(self) -> str:
        """The query of the page Steer with the same prompt and edits."""
        return urlencode([("prompt", self.prompt), *(("set", edit) for edit in self.sets)], errors="replace")

    def link(self, **changes: Any) -> str:
        """The same with another layer, position or edits."""
        asked = replace(self, **changes)
        pairs = [("prompt", asked.prompt)]
        pairs += [] if asked.layer is None else [("layer", str(asked.layer)), ("at", str(asked.at))]
        pairs += [("token", asked.token)] * bool(asked.token) + [("against", asked.against)] * bool(asked.against)
        return f"/trace?{urlencode([*pairs, *(('set', edit) for edit in asked.sets)], errors='replace')}"

    def without(self, edit: str | None = None) -> str:
        """The same with one edit less, or with none."""
        return self.link(sets=[] if edit is None else [known for known in self.sets if known != edit])


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


def _shown(bench: Workbench, address: TraceAddress) -> dict[str, Any]:
    """The variables of trace_cell.html and trace_answer.html."""
    opened, whole = open_cell(bench, address), read_answer(bench, address)
    before, after = (opened, None) if isinstance(opened, Trace) else (opened.before, opened.after)
    layer = (after or before).layers[0]
    sets = [] if after is None else last_of_each(address.sets)
    asked = replace(address, layer=layer.layer, at=before.position, sets=sets)
    answer = whole if isinstance(whole, Trace) else whole.after
    return {
        "address": asked,
        "opened": opened,
        "layer": layer,
        "before": before,
        "after": after,
        "answer": answer,
        "strongest": answer.memories[:_LISTED],
        "likely": answer.layers[-1].output,
        "linked": bench.index.layers,
        "kept": names_beside(bench.index),
    }


@router.get("/trace", response_class=HTMLResponse, include_in_schema=False)
def trace_page(
    request: Request,
    bench: Bench,
    prompt: Text = "",
    layer: Layer = None,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006 - FastAPI copies it
    token: Target = "",
    against: Other = "",
    memory: Annotated[str, Query(max_length=30)] = "",
    to: Annotated[str, Query(max_length=30)] = "",
) -> Response:
    address = TraceAddress(prompt, layer, at, sets, token, against)
    if memory and to.strip():  # a form's two fields become one edit in the address
        return RedirectResponse(address.link(sets=[*sets, f"{memory}={to.strip()}"]), 303)
    shown: dict[str, Any] = {"address": address}
    grid, problem, status = None, "", 200
    if prompt and bench.status == READY:
        try:
            address, problem, status = _without_bad_edits(bench, address)
            grid = read_trace_grid(bench, prompt, address.sets)
            shown = _shown(bench, address) | {"columns": _columns(grid, at)}
        except MemlensError as error:
            grid, problem, status = None, str(error), status_of(error)
    return page(request, "trace.html", status, grid=grid, problem=problem, examples=_EXAMPLES, **shown)


def _columns(grid: Grid, at: int) -> range:
    """The positions that the page shows: so many up to the open one, and those after it while there is room."""
    count = len(grid.tokens)
    last = min(count, max(at % count + 1, COLUMNS))
    return range(max(0, last - COLUMNS), last)


@router.get("/trace/cell", response_class=HTMLResponse, include_in_schema=False)
def cell_part(
    request: Request,
    bench: Bench,
    prompt: Given,
    layer: Layer = None,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006
    token: Target = "",
    against: Other = "",
) -> Response:
    """The parts of the page above and below the grid, for another cell."""
    shown = _shown(bench, TraceAddress(prompt, layer, at, sets, token, against))
    return page(request, "trace_parts.html", **shown)


@router.get("/api/trace", responses=LIVE_PROBLEMS)
def read_trace_grid(bench: Bench, prompt: Given, sets: Sets = []) -> Grid:  # noqa: B006
    """The prediction of every layer after every token of a prompt. Needs the model."""
    with bench.model() as model:
        refuse_long_prompt(model, prompt, bench.live.prompt_tokens)
        return read_grid(model, prompt, sets, bench.kept)


@router.get("/api/trace/cell", responses=LIVE_PROBLEMS)
def read_trace_cell(
    bench: Bench,
    prompt: Given,
    layer: Layer = None,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006
    token: Target = "",
    against: Other = "",
) -> Trace | InterventionEffect:
    """The layer and the last one of a trace; with edits, of the traces before and after. Needs the model."""
    return open_cell(bench, TraceAddress(prompt, layer, at, sets, token, against))


@router.get("/api/trace/answer", responses=LIVE_PROBLEMS)
def read_trace_answer(
    bench: Bench,
    prompt: Given,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006
    token: Target = "",
    against: Other = "",
) -> Trace | InterventionEffect:
    """The contributions of all layers to a token's logit, or to the difference of two. Needs the model."""
    return read_answer(bench, TraceAddress(prompt, None, at, sets, token, against))
