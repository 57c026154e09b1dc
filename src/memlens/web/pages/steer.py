"""The page Steer: a text goes on without and with edits, side by side, token by token; the address holds everything.

A continuation comes as lines of JSON, one per token, then the whole text, or what went wrong. Each token waits
for its turn with the model, so that several texts, of one person or of two, go on at once and other pages answer
meanwhile. All numbers are those of `memlens trace --generate`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from memlens.errors import BusyError, MemlensError
from memlens.text import finite
from memlens.tracer.result import TokenShare
from memlens.web.pages.memory import refuse_long_prompt
from memlens.web.pages.trace import Given, Sets, Text, last_of_each
from memlens.web.rendering import LIVE_PROBLEMS, Bench, LiveRoute, page
from memlens.web.workbench import MOST_TEXTS, Turns, Workbench

if TYPE_CHECKING:
    from memlens.tracer.intervene import Generation

router = APIRouter(tags=["steer"], route_class=LiveRoute)

MOST_TOKENS = 200
Count = Annotated[int, Query(ge=1, le=MOST_TOKENS, description="Tokens to go on with.")]
Temperature = Annotated[float, Query(ge=0, le=100, description="0: the most likely token; above: drawn.")]
Seed = Annotated[int, Query(ge=0, le=2**53, description="For drawn tokens.")]
_EXAMPLE = "The river runs to the sea and"


@router.get("/steer", response_class=HTMLResponse, include_in_schema=False)
def steer_page(request: Request, prompt: Text = "") -> HTMLResponse:
    return page(request, "steer.html", prompt=prompt or _EXAMPLE)


_LINES: dict[int | str, dict[str, Any]] = {
    200: {"model": TokenShare, "description": "A line per token; the last line is the whole text."}
}


@router.get("/api/steer", responses=LIVE_PROBLEMS | _LINES)
def continue_text(
    request: Request,
    bench: Bench,
    prompt: Given,
    sets: Sets = [],  # noqa: B006 - FastAPI copies it
    count: Count = 40,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
) -> StreamingResponse:
    """Continue a text with edits or without: a line of JSON per token, then the whole. Needs the model."""
    from memlens.tracer.intervene import Generation

    if bench.texts >= MOST_TEXTS:
        raise BusyError("as many texts as may go on at once do so already; try again in a moment")
    with bench.model() as model:
        refuse_long_prompt(model, prompt, bench.live.prompt_tokens)
        going_on = Generation.begin(model, prompt, count, last_of_each(sets) or None, temperature, seed)
        first = next(going_on, None)  # what cannot be done is refused before the answer begins
    return _GrowingText(bench, request.app.state.turns, going_on, first)


class _GrowingText(StreamingResponse):
    """Counts as a text that goes on while it is sent, whatever ends that."""

    def __init__(self, bench: Workbench, turns: Turns, going_on: Generation, first: TokenShare | None) -> None:
        super().__init__(_lines(bench, turns, going_on, first), media_type="application/x-ndjson")
        self._bench = bench

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._bench.texts += 1  # in the event loop, as everything that counts them
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._bench.texts -= 1


async def _lines(
    bench: Workbench, turns: Turns, going_on: Generation, token: TokenShare | None
) -> AsyncIterator[bytes]:
    while token is not None:
        yield _line(token)
        try:
            token = await turns.step(partial(run_in_threadpool, _next_token, bench, going_on))
        except MemlensError as error:  # the head is sent already
            yield _line({"error": str(error)})
            return
    yield _line(going_on.continuation)


def _next_token(bench: Workbench, going_on: Generation) -> TokenShare | None:
    with bench.model():
        return next(going_on, None)


def _line(content: Any) -> bytes:
    return json.dumps(finite(content), allow_nan=False).encode("ascii") + b"\n"
