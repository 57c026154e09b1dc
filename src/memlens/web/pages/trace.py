"""The Trace and Steer pages and their JSON. The address of each page contains everything that the page shows.

Trace shows what every layer predicts after every token of a prompt, where the logit of a token comes from, and what
changes if memories are edited. To predict a token, the grid applies the final norm and the unembedding to the output of
every layer. A cell corresponds to one layer of `memlens.trace`.

Steer continues a text with and without edits. A continuation is sent as one line of JSON per token, followed by the
whole text or an error. Requests for the model take turns after every token. Several texts can therefore be continued at
once, and other pages stay responsive.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from pydantic import StringConstraints

from memlens.errors import MemlensError, UnknownName
from memlens.text import finite
from memlens.tracer.intervention import Edit, Intervention
from memlens.tracer.result import InterventionEffect, TokenShare, Trace
from memlens.web.pages.collections import names_beside
from memlens.web.pages.memory import check_prompt_length, select_layers
from memlens.web.rendering import LIVE_PROBLEMS, Bench, page, run_model, status_of
from memlens.web.workbench import READY, KeptPrompts, Workbench

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.intervene import Generation

router = APIRouter()

COLUMNS = 64  # maximum number of columns of the grid
MAX_CHARACTERS = 10_000
MAX_TOKENS = 200  # maximum length of a continuation
_LISTED = 10  # tokens and memories listed for an opened cell
EXAMPLES = ("The capital of France is", "In 1990 the", "The river runs to the sea and")

Text = Annotated[str, Query(max_length=MAX_CHARACTERS, description="The prompt.")]
Prompt = Annotated[str, Query(min_length=1, max_length=MAX_CHARACTERS, description="The prompt.")]
Target = Annotated[
    str, Query(max_length=100, description="The token to explain, with ␣ for a space. Default: the predicted token.")
]
Other = Annotated[str, Query(max_length=100, description="Another token. The difference of both logits is explained.")]
Layer = Annotated[
    int | None,
    Query(ge=0, le=100_000, description="Layer, counted from 0. Default: the layer whose memories contribute most."),
]
Position = Annotated[
    int,
    Query(
        alias="at",
        ge=-MAX_CHARACTERS,
        le=MAX_CHARACTERS,
        description="Position in the prompt, counted from 0. -1 is the last token.",
    ),
]
Sets = Annotated[
    list[Annotated[str, StringConstraints(max_length=200)]],
    Query(
        alias="set",
        max_length=500,
        description="Edits of coefficients: L3N51=0 silences a memory, L3N51=3.5 sets it, L3N51=x2 scales it, and L3=0 "
        "silences a layer.",
    ),
]
Count = Annotated[int, Query(ge=1, le=MAX_TOKENS, description="Number of tokens to generate.")]
Temperature = Annotated[
    float, Query(ge=0, le=100, description="Sampling temperature. 0 always selects the most likely token.")
]
Seed = Annotated[int, Query(ge=0, le=2**53, description="Random seed for sampled tokens.")]


# Trace


@dataclass(frozen=True)
class GridCell(TokenShare):
    """The next token that one layer predicts after one token of the prompt."""

    settled: bool  # True if this layer and all later layers predict the same token as the last layer
    was: str | None  # token predicted without the edits, if it differs


@dataclass(frozen=True)
class Grid:
    """Predictions by layer and position."""

    prompt: str
    tokens: tuple[str, ...]
    layers: tuple[tuple[GridCell, ...], ...]  # [layer][token of the prompt]
    edits: tuple[str, ...]


def last_of_each(sets: list[str]) -> list[str]:
    """Return the edits, with only the last edit of each memory, expert or layer."""
    by_target: dict[str, str] = {}
    for text in sets:
        target = Edit.parse(text).target
        by_target.pop(target, None)
        by_target[target] = text.strip()
    return list(by_target.values())


def read_grid(model: MemoryModel, text: str, sets: list[str], kept: KeptPrompts | None = None) -> Grid:
    """Return the predictions of all layers at all positions, with the edits and, for comparison, without."""
    from memlens.tracer.prompt import read_prompt

    prompt, kept = read_prompt(model, text), kept or KeptPrompts()
    edits = last_of_each(sets)
    after = kept.run(model, prompt, tuple(edits)).tops  # first, because it raises if an edit is impossible
    before = kept.run(model, prompt).tops if edits else after
    texts = model.tokenizer.token_text
    rows = (
        tuple(_read_cell(after, before, layer, position, texts) for position in range(len(prompt.tokens)))
        for layer in range(len(after))
    )
    return Grid(text, tuple(texts(token) for token in prompt.tokens), tuple(rows), tuple(edits))


def _read_cell(after: Any, before: Any, layer: int, position: int, texts: Callable[[int], str]) -> GridCell:
    token, p = after[layer][position]
    final = after[-1][position][0]
    settled = all(row[position][0] == final for row in after[layer:])
    without = before[layer][position][0]
    return GridCell(token, texts(token), p, settled, texts(without) if without != token else None)


@dataclass(frozen=True)
class TraceAddress:
    """The parameters of the Trace page, and the addresses of its links."""

    prompt: str
    layer: int | None
    at: int
    sets: list[str]
    token: str = ""
    against: str = ""

    def command(self, folder: str) -> str:
        """Return a shell command for the same trace. `folder` is the quoted index folder."""
        tokens = [("--token", self.token), ("--against", self.against)]
        options = [] if self.at == -1 else [("--position", str(self.at))]
        options += [(option, text.replace("␣", " ")) for option, text in tokens if text]
        words = [f"{option} {quote(text)}" for option, text in (*options, *(("--set", edit) for edit in self.sets))]
        prompt = quote(self.prompt)
        # a prompt that starts with a dash must follow `--`, after all options
        words = [*words, "--", prompt] if self.prompt.startswith("-") else [prompt, *words]
        return " ".join([f"memlens trace {folder}", *words])

    @property
    def steer(self) -> str:
        """The query of the Steer page with the same prompt and edits."""
        return urlencode([("prompt", self.prompt), *(("set", edit) for edit in self.sets)], errors="replace")

    def link(self, **changes: Any) -> str:
        """Return the address with another layer, position or edits."""
        changed = replace(self, **changes)
        pairs = [("prompt", changed.prompt)]
        pairs += [] if changed.layer is None else [("layer", str(changed.layer)), ("at", str(changed.at))]
        pairs += [("token", changed.token)] * bool(changed.token) + [("against", changed.against)] * bool(
            changed.against
        )
        return f"/trace?{urlencode([*pairs, *(('set', edit) for edit in changed.sets)], errors='replace')}"

    def without(self, edit: str | None = None) -> str:
        """Return the address without one edit, or without all edits."""
        return self.link(sets=[] if edit is None else [known for known in self.sets if known != edit])


def read_address(
    prompt: Prompt,
    layer: Layer = None,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006
    token: Target = "",
    against: Other = "",
) -> TraceAddress:
    return TraceAddress(prompt, layer, at, sets, token, against)


Address = Annotated[TraceAddress, Depends(read_address)]


def read_answer(bench: Workbench, model: MemoryModel, address: TraceAddress) -> Trace | InterventionEffect:
    """Trace one position in all layers, for one token or the difference of two.

    If there are edits, trace with and without them.
    """
    from memlens.tracer.intervene import effect_of
    from memlens.tracer.prompt import read_prompt, read_token

    check_prompt_length(model, address.prompt, bench.live.prompt_tokens)

    def read() -> Trace | InterventionEffect:
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

    # the key does not contain the layer, because an answer covers all layers
    key = (address.prompt, address.at, tuple(address.sets), address.token, address.against)
    return bench.kept.answer(key, read)


def open_cell(bench: Workbench, model: MemoryModel, address: TraceAddress) -> Trace | InterventionEffect:
    """Return a copy of the answer that contains only the opened layer and the last layer."""
    answer = read_answer(bench, model, address)
    traced = answer if isinstance(answer, Trace) else answer.after
    last = len(traced.layers) - 1
    layer = address.layer
    if layer is None:
        layer = max(traced.layers, key=lambda one: abs(one.memories)).layer
    if layer > last:
        raise UnknownName(f"layer {layer} does not exist: {traced.model} has layers 0 to {last}")
    if isinstance(answer, Trace):
        return select_layers(answer, layer, last)
    before, after = (select_layers(trace, layer, last) for trace in (answer.before, answer.after))
    return replace(answer, before=before, after=after)


def _check_edits(model: MemoryModel, address: TraceAddress) -> tuple[TraceAddress, str, int]:
    """Return the address without invalid edits, the errors of those edits, and the HTTP status."""
    from memlens.tracer.intervene import apply_edits
    from memlens.tracer.prompt import read_prompt

    valid, problems, status = [], [], 200
    prompt = read_prompt(model, address.prompt)
    for edit in address.sets:
        try:
            apply_edits(model, Intervention.of(edit), prompt)
            valid.append(edit)
        except MemlensError as error:
            problems.append(str(error))
            status = status_of(error)
    return replace(address, sets=valid), "; ".join(problems), status


def _cell_content(bench: Workbench, model: MemoryModel, address: TraceAddress) -> dict[str, Any]:
    """Return the variables of trace_cell.html and trace_answer.html."""
    opened, whole = open_cell(bench, model, address), read_answer(bench, model, address)
    before, after = (opened, None) if isinstance(opened, Trace) else (opened.before, opened.after)
    layer = (after or before).layers[0]
    sets = [] if after is None else last_of_each(address.sets)
    answer = whole if isinstance(whole, Trace) else whole.after
    return {
        "address": replace(address, layer=layer.layer, at=before.position, sets=sets),
        "command": replace(address, sets=sets).command(bench.folder),
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


def _columns(grid: Grid, at: int) -> range:
    """Return the positions that the page shows: at most COLUMNS, including the open one."""
    count = len(grid.tokens)
    last = min(count, max(at % count + 1, COLUMNS))
    return range(max(0, last - COLUMNS), last)


@router.get("/trace", response_class=HTMLResponse, include_in_schema=False)
async def trace_page(
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
    if memory and to.strip():  # the form sends a memory and an amount, which become one edit
        return RedirectResponse(address.link(sets=[*sets, f"{memory}={to.strip()}"]), 303)

    def show(model: MemoryModel) -> Response:
        valid, problem, status = _check_edits(model, address)
        check_prompt_length(model, prompt, bench.live.prompt_tokens)
        grid = read_grid(model, prompt, valid.sets, bench.kept)
        content = _cell_content(bench, model, valid) | {"columns": _columns(grid, at)}
        return page(request, "trace.html", status, grid=grid, problem=problem, examples=EXAMPLES, **content)

    problem, status = "", 200
    if prompt and bench.status == READY:
        try:
            return await run_model(request, bench, show)
        except MemlensError as error:
            problem, status = str(error), status_of(error)
    return page(request, "trace.html", status, grid=None, problem=problem, examples=EXAMPLES, address=address)


@router.get("/trace/cell", response_class=HTMLResponse, include_in_schema=False)
async def cell_part(request: Request, bench: Bench, address: Address) -> Response:
    """Return the parts of the page above and below the grid, for a newly opened cell."""
    return await run_model(
        request, bench, lambda model: page(request, "trace_parts.html", **_cell_content(bench, model, address))
    )


@router.get("/api/trace", responses=LIVE_PROBLEMS, tags=["trace"])
async def read_trace_grid(request: Request, bench: Bench, prompt: Prompt, sets: Sets = []) -> Grid:  # noqa: B006
    """Return the prediction of every layer after every token of a prompt. Needs the model."""

    def read(model: MemoryModel) -> Grid:
        check_prompt_length(model, prompt, bench.live.prompt_tokens)
        return read_grid(model, prompt, sets, bench.kept)

    return await run_model(request, bench, read)


@router.get("/api/trace/cell", responses=LIVE_PROBLEMS, tags=["trace"])
async def read_trace_cell(request: Request, bench: Bench, address: Address) -> Trace | InterventionEffect:
    """Return one layer and the last layer of a trace.

    If there are edits, return them with and without the edits. Needs the model.
    """
    return await run_model(request, bench, lambda model: open_cell(bench, model, address))


@router.get("/api/trace/answer", responses=LIVE_PROBLEMS, tags=["trace"])
async def read_trace_answer(
    request: Request,
    bench: Bench,
    prompt: Prompt,
    at: Position = -1,
    sets: Sets = [],  # noqa: B006
    token: Target = "",
    against: Other = "",
) -> Trace | InterventionEffect:
    """Return the contributions of all layers to the logit of a token, or to the difference of two. Needs the model."""
    address = TraceAddress(prompt, None, at, sets, token, against)
    return await run_model(request, bench, lambda model: read_answer(bench, model, address))


# Steer


@router.get("/steer", response_class=HTMLResponse, include_in_schema=False)
def steer_page(request: Request, bench: Bench, prompt: Text = "") -> HTMLResponse:
    return page(request, "steer.html", prompt=prompt or EXAMPLES[-1], folder=bench.folder)


_LINES: dict[int | str, dict[str, Any]] = {
    200: {"model": TokenShare, "description": "One line per token; the last line is the whole text."}
}


@router.get("/api/steer", responses=LIVE_PROBLEMS | _LINES, tags=["steer"])
async def continue_text(
    request: Request,
    bench: Bench,
    prompt: Prompt,
    sets: Sets = [],  # noqa: B006
    count: Count = 40,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
) -> StreamingResponse:
    """Continue a text with or without edits: one line of JSON per token, then the whole text. Needs the model."""

    def begin(model: MemoryModel) -> tuple[Generation, TokenShare | None]:
        from memlens.tracer.intervene import Generation

        check_prompt_length(model, prompt, bench.live.prompt_tokens)
        generation = Generation.begin(model, prompt, count, last_of_each(sets) or None, temperature, seed)
        return generation, next(generation, None)

    # the first token is computed before the response starts, so that an error has its own status
    generation, token = await run_model(request, bench, begin)

    async def write_lines(token: TokenShare | None) -> AsyncIterator[bytes]:
        while token is not None:
            yield _write_line(token)
            try:
                token = await run_model(request, bench, lambda _model: next(generation, None), may_refuse=False)
            except MemlensError as error:  # too late for an error status
                yield _write_line({"error": str(error)})
                return
        yield _write_line(generation.continuation)

    return StreamingResponse(write_lines(token), media_type="application/x-ndjson")


def _write_line(content: Any) -> bytes:
    return json.dumps(finite(content), allow_nan=False).encode("ascii") + b"\n"
