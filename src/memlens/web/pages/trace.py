"""A prompt seen through a model: what every layer would predict after every token, and one cell of that looked into.

The grid reads the output of every layer at every position as the model reads its last state; within an intervention
it is the edited model's. A cell is one layer of `memlens.trace`. Knows models; knows no page.

One prompt, live: what every layer predicts after every token, one cell opened, memories switched off or turned up.

Everything that is shown is in the address, so that a link is all that is needed to share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, Field

from memlens.errors import MemlensError, SettingError
from memlens.web.rendering import MODEL_PROBLEMS, Bench, page, status_of
from memlens.web.workbench import READY, Workbench

if TYPE_CHECKING:
    from memlens.index.reader import Index
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.result import LayerTrace, TokenShare, Trace, TracedMemory

MOST_TOKENS = 96  # of a prompt: a grid of more is no picture any longer
_TOKENS, _MEMORIES = 8, 10


class Cell(BaseModel):
    """The most likely next token as one layer has it after one token of the prompt."""

    token: int
    text: str
    p: float
    settled: bool = Field(description="From this layer on, the token stays what the model predicts.")
    was: str | None = Field(None, description="The token without the edits, where that is another one.")


class Grid(BaseModel):
    """Layers by positions."""

    prompt: str
    tokens: list[str]
    layers: list[list[Cell]] = Field(description="One row a layer, one cell a token of the prompt.")
    edits: list[str]


class Share(BaseModel):
    """A token and how likely it is."""

    token: int
    text: str
    p: float


class Effect(BaseModel):
    """A memory that fired, and what it did to the traced token's logit."""

    memory: str
    coefficient: float
    effect: float
    promotes: list[str]
    demotes: list[str]
    trigger: str | None
    patterns: list[str]


class Answer(BaseModel):
    """What the model predicts, and how likely the traced token is."""

    top: list[Share]
    p: float
    logit: float
    rank: int
    settled: int


class Opened(BaseModel):
    """One layer at one position: what came in, what the memories added, what went out."""

    layer: int
    position: int
    token: str = Field(description="The prompt's own token at the position.")
    traced: Share = Field(description="The token whose logit effects are about: what the unedited model predicts.")
    residual: list[Share]
    ffn: list[Share]
    output: list[Share]
    case: str
    p: float = Field(description="Of the traced token in the layer's output.")
    attention: float = Field(description="What the layer's attention added to the traced token's logit.")
    memories: float = Field(description="What its memories added.")
    by_effect: list[Effect]
    before: Answer
    after: Answer | None = Field(None, description="With the edits, where there are any.")
    kl: float | None = Field(None, description="KL(before || after) of the next token, in nats.")
    edits: list[str]


def last_of_each(sets: list[str]) -> list[str]:
    """Edits as they were written; of several of one memory or layer the last."""
    from memlens.tracer.intervention import Edit

    by_target: dict[str, str] = {}
    for text in sets:
        target = Edit.parse(text).target
        by_target.pop(target, None)
        by_target[target] = text.strip()
    return list(by_target.values())


def read_grid(model: MemoryModel, text: str, sets: list[str]) -> Grid:
    """All layers at all positions; with edits, the edited model's, and what was there without."""
    from memlens.tracer.intervene import applied
    from memlens.tracer.intervention import Intervention
    from memlens.tracer.prompt import read_prompt

    prompt = read_prompt(model, text)
    if len(prompt.tokens) > MOST_TOKENS:
        raise SettingError(f"the prompt has {len(prompt.tokens)} tokens; the grid shows {MOST_TOKENS}, so shorten it")
    edits = last_of_each(sets)
    changes = applied(model, Intervention.of(edits), prompt) if edits else None  # refuses before anything runs
    before = _tops(model, prompt)
    after = before
    if changes is not None:
        with changes:
            after = _tops(model, prompt)
    texts = model.tokenizer.token_text
    return Grid(
        prompt=text,
        tokens=[texts(token) for token in prompt.tokens],
        layers=[
            [_cell(after, before, layer, position, texts) for position in range(len(prompt.tokens))]
            for layer in range(len(after))
        ],
        edits=edits,
    )


def open_cell(index: Index, model: MemoryModel, text: str, layer: int, position: int, sets: list[str]) -> Opened:
    """One cell; with edits, as the edited model has it, with the answer before and after."""
    from memlens.errors import UnknownName
    from memlens.tracer.intervene import intervene
    from memlens.tracer.trace import trace

    if not 0 <= layer < len(model.layers):
        raise UnknownName(f"layer {layer} does not exist: {model.name} has layers 0 to {len(model.layers) - 1}")
    edits = last_of_each(sets)
    after: Trace | None = None
    kl = None
    if not edits:
        before = trace(model, text, position, top=_MEMORIES, index=index)
    else:
        compared = intervene(model, text, edits, position, top=_MEMORIES, index=index)
        before, after, kl = compared.before, compared.after, compared.kl
    shown: LayerTrace = (after or before).layers[layer]
    return Opened(
        layer=layer,
        position=before.position,
        token=before.prefix[-1].text,
        traced=_share(before.token),
        residual=_shares(shown.residual),
        ffn=_shares(shown.ffn),
        output=_shares(shown.output),
        case=shown.case,
        p=shown.p,
        attention=shown.attention,
        memories=shown.memories,
        by_effect=[_effect(one) for one in shown.by_effect],
        before=_answer(before),
        after=None if after is None else _answer(after),
        kl=kl,
        edits=edits,
    )


def _tops(model: MemoryModel, prompt: Any) -> list[list[tuple[int, float]]]:
    """[layers][positions]: the top token of o and its probability."""
    import torch

    from memlens.models.decompose import record_positions
    from memlens.tracer.trace import read_states

    fed = prompt.fed()
    rows = torch.arange(prompt.shift, fed.shape[1])
    positions = record_positions(model, fed, rows, layers=())
    found = []
    for layer in range(len(model.layers)):  # one at a time: a distribution is as wide as the vocabulary
        readings = read_states(model, positions.o[layer], 1)
        tops = [readings.top(row) for row in range(len(rows))]
        found.append([(token, readings.p(row, token)) for row, token in enumerate(tops)])
    return found


def _cell(after: Any, before: Any, layer: int, position: int, texts: Any) -> Cell:
    token, p = after[layer][position]
    final = after[-1][position][0]
    settled = all(row[position][0] == final for row in after[layer:])
    without = before[layer][position][0]
    was = texts(without) if without != token else None
    return Cell(token=token, text=texts(token), p=p, settled=settled, was=was)


def _share(one: TokenShare) -> Share:
    return Share(token=one.id, text=one.text, p=one.p)


def _shares(shares: tuple[TokenShare, ...]) -> list[Share]:
    return [_share(one) for one in shares[:_TOKENS]]


def _effect(one: TracedMemory) -> Effect:
    return Effect(
        memory=str(one.memory),
        coefficient=one.coefficient,
        effect=one.effect,
        promotes=[token.text for token in one.promotes[:_TOKENS]],
        demotes=[token.text for token in one.demotes[:_TOKENS]],
        trigger=one.trigger,
        patterns=list(one.patterns),
    )


def _answer(traced: Trace) -> Answer:
    return Answer(
        top=_shares(traced.layers[-1].output),
        p=traced.token.p,
        logit=traced.logit,
        rank=traced.rank,
        settled=traced.settled,
    )


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
