"""The page Steer: a text goes on without and with edits, side by side, token by token; the address holds everything.

A continuation comes as lines of JSON, one a token, the last one the whole text. The model is lent for each token, so
that several texts, of one person or of two, go on at once. All numbers are those of `memlens trace --generate`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from memlens.errors import BusyError
from memlens.text import finite
from memlens.tracer.result import TokenShare
from memlens.web.pages.memory import refuse_long_prompt
from memlens.web.pages.trace import Given, Sets, Text, last_of_each
from memlens.web.rendering import LIVE_PROBLEMS, Bench, IndexRoute, page
from memlens.web.workbench import Workbench

if TYPE_CHECKING:
    from memlens.tracer.intervene import Generation

router = APIRouter(tags=["steer"], route_class=IndexRoute)

MOST_TOKENS = 200
Count = Annotated[int, Query(ge=1, le=MOST_TOKENS, description="Tokens to go on with.")]
Temperature = Annotated[float, Query(ge=0, le=100, description="0: the most likely token; above: drawn.")]
Seed = Annotated[int, Query(ge=0, le=2**53, description="For drawn tokens.")]
_EXAMPLE = "The river runs to the sea and"


@router.get("/steer", response_class=HTMLResponse, include_in_schema=False)
def steer_page(request: Request, prompt: Text = "") -> HTMLResponse:
    return page(request, "steer.html", prompt=prompt or _EXAMPLE)


_LINES: dict[int | str, dict[str, Any]] = {
    200: {"model": TokenShare, "description": "A line a token; the last line is the whole text."}
}


@router.get("/api/steer", responses=LIVE_PROBLEMS | _LINES)
def continue_text(
    bench: Bench,
    prompt: Given,
    sets: Sets = [],  # noqa: B006 - FastAPI copies it
    count: Count = 40,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
) -> StreamingResponse:
    """How the model goes on, with edits or without: a line of JSON a token, then the whole. Needs the model."""
    from memlens.tracer.intervene import Generation

    with bench.model() as model:
        refuse_long_prompt(model, prompt, bench.live.prompt_tokens)
        going_on = Generation.begin(model, prompt, count, last_of_each(sets) or None, temperature, seed)
    if not bench.texts.acquire(blocking=False):
        raise BusyError("as many texts as may go on at once do so already; try again in a moment")
    return StreamingResponse(_lines(bench, going_on), media_type="application/x-ndjson")


def _lines(bench: Workbench, going_on: Generation) -> Iterator[bytes]:
    try:
        while True:
            with bench.model():
                token = next(going_on, None)
            if token is None:
                yield _line(going_on.continuation)
                return
            yield _line(token)
    finally:
        bench.texts.release()


def _line(content: Any) -> bytes:
    return json.dumps(finite(content), allow_nan=False).encode("ascii") + b"\n"
