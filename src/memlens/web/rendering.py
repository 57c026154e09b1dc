"""Templates, JSON responses, static files, and the objects that routes depend on: workbench, viewer and model.

Templates escape all text, and replace characters that cannot be displayed or encoded. Annotators are identified by a
name in a cookie. The cookie does not control access: it only prevents annotators from seeing other people's labels by
accident.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from functools import cache
from importlib.resources import files
from threading import Lock, Thread
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import quote, unquote, urlencode

from anyio import CapacityLimiter, move_on_after, to_thread
from fastapi import APIRouter, Depends, HTTPException, Path, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from jinja2 import Environment
from markupsafe import Markup, escape
from pydantic import BaseModel

from memlens import __version__
from memlens.errors import BusyError, FilesError, IndexFolderError, ModelError, UnknownName
from memlens.experiments.style import css_variables
from memlens.reports.report import template_environment, vega_bundle
from memlens.text import finite, head, letter, probability, signed, tail
from memlens.web.security import cookie_name
from memlens.web.workbench import Workbench

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

T = TypeVar("T")
router = APIRouter(include_in_schema=False)

# Static files

_MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_VEGA_LOCK = Lock()


@cache
def static_files() -> dict[str, tuple[bytes, str, str]]:
    """Return all static files as {name: (content, media type, tag)}, so that no request can name a path."""
    by_name = {}
    for entry in files("memlens.web").joinpath("static").iterdir():
        media_type = _MEDIA_TYPES.get("." + entry.name.rpartition(".")[2])
        if media_type:
            content = entry.read_bytes()
            if entry.name == "style.css":
                content = css_variables().encode() + content
            by_name[entry.name] = (content, media_type, _tag(content))
    return by_name


@cache
def vega_file() -> tuple[bytes, str, str]:
    """Return the chart library as (content, media type, tag). Building it takes some seconds on first use."""
    content = vega_bundle().encode()
    return content, "text/javascript", _tag(content)


def _build_vega_once() -> tuple[bytes, str, str]:
    with _VEGA_LOCK:
        return vega_file()


def prepare_charts() -> None:
    """Build the chart library in the background."""
    Thread(target=_build_vega_once, name="memlens charts", daemon=True).start()


def _tag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:20]}"'


@router.get("/static/{name}")
def static(request: Request, name: str) -> Response:
    if name != "vega.js" and name not in static_files():
        raise HTTPException(404)
    content, media_type, tag = _build_vega_once() if name == "vega.js" else static_files()[name]
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=media_type, headers={"etag": tag})


@router.get("/{name}.html")
def redirect_from_site(request: Request, name: Literal["index", "search", "memory"]) -> Response:
    """Redirect an address of a static site (`memlens site`) to the same page of the workbench."""
    query = dict(request.query_params)
    path = {"index": "/", "search": "/search", "memory": f"/m/{quote(query.pop('name', ''), safe='')}"}[name]
    return RedirectResponse(path + (f"?{urlencode(query)}" if query else ""), 308)


# Dependencies of routes

_VIEWER_COOKIE = "memlens-annotator"
_VIEWER_SECONDS = 365 * 24 * 3600  # lifetime of the cookie; a study may take weeks


async def get_workbench(request: Request) -> Workbench:
    """Return the workbench for one request. An index that has changed since the last request is opened again."""
    workbench: Workbench = request.app.state.workbench
    workbench.reopen_changed()
    return copy(workbench)  # a copy keeps its index if a later request opens another one


async def get_viewer(request: Request) -> str | None:
    """Return the name of the annotator who uses this browser, or None."""
    return unquote(request.cookies.get(cookie_name(_VIEWER_COOKIE, request), "")) or None


Bench = Annotated[Workbench, Depends(get_workbench)]
Viewer = Annotated[str | None, Depends(get_viewer)]
Name = Annotated[str, Path(description="A memory: layer and number from 0, like L3N51.", max_length=30)]


def remember_viewer(request: Request, response: Response, annotator: str) -> Response:
    """Set the cookie with the annotator's name, and return the response."""
    name, value = cookie_name(_VIEWER_COOKIE, request), quote(annotator, safe="", errors="replace")
    response.set_cookie(name, value, max_age=_VIEWER_SECONDS, httponly=True, samesite="lax", path="/")
    return response


async def run_model(
    request: Request,
    bench: Workbench,
    function: Callable[[MemoryModel], T],
    *,
    key: Hashable = None,
    may_refuse: bool = True,
) -> T:
    """Run function(model) in a thread. One request runs at a time, a few may wait, and others are rejected.

    Args:
        request: The request.
        bench: The workbench, which holds the model and its recent answers.
        function: The function to run.
        key: If given, the result is remembered under this key and not computed again.
        may_refuse: If True, reject the request if too many requests are waiting.

    Raises:
        BusyError: Too many requests are waiting, or the model did not become free in time.
        ModelError: There is no model.
    """
    limiter: CapacityLimiter = request.app.state.model_limiter
    waiting, limits = limiter.statistics().tasks_waiting, bench.live
    if may_refuse and limiter.available_tokens < 1 and waiting >= limits.waiting:
        raise BusyError(f"the model is busy and {waiting} requests are waiting; try again in a moment")
    with move_on_after(limits.seconds) as scope:
        await limiter.acquire()
    if scope.cancelled_caught:
        raise BusyError(f"the model was busy for {limits.seconds:g} seconds; try again in a moment")

    def run() -> T:
        with bench.model() as model:
            return function(model) if key is None else bench.kept.answer(key, lambda: function(model))

    try:
        return await to_thread.run_sync(run)
    finally:
        limiter.release()


# Errors and JSON

_STATUS = {UnknownName: 404, ModelError: 409, IndexFolderError: 409, FilesError: 409, BusyError: 429}


def status_of(error: Exception) -> int:
    """Return the HTTP status of a MemlensError."""
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 422)


class Problem(BaseModel):
    """A one-line error message."""

    error: str


# values of `responses=` in JSON routes
PROBLEMS: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "The memory, layer or token does not exist."},
    422: {"model": Problem, "description": "The request is not valid."},
}
MODEL_PROBLEMS: dict[int | str, dict[str, Any]] = {
    **PROBLEMS,
    409: {"model": Problem, "description": "The model or a table is not available."},
}
LIVE_PROBLEMS: dict[int | str, dict[str, Any]] = {
    **MODEL_PROBLEMS,
    429: {"model": Problem, "description": "The model is busy, and no more requests may wait."},
}


class Json(JSONResponse):
    """JSON for any content: NaN and infinities become null, and non-ASCII characters are escaped."""

    def render(self, content: Any) -> bytes:
        return json.dumps(finite(content), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


# Pages

PAGES = (
    ("/", "Overview"),
    ("/search", "Search"),
    ("/trace", "Trace"),
    ("/circuit", "Circuit"),
    ("/steer", "Steer"),
    ("/collections", "Collections"),
    ("/annotate", "Annotate"),
    ("/compare", "Compare"),
)


def page(request: Request, template: str, status: int = 200, **content: Any) -> HTMLResponse:
    """Return a page rendered from a template. `content` holds the template's variables."""
    text = render(template, request.app.state.workbench, request.url.path, PAGES, **content)
    return HTMLResponse(text.encode("utf-8", errors="replace"), status)


def render(
    template: str,
    workbench: Workbench,
    path: str,
    pages: Sequence[tuple[str, str]],
    *,
    is_site: bool = False,
    **content: Any,
) -> str:
    """Return a rendered template for a response or a static file. `pages` holds the links in the page header."""
    shared = {"workbench": workbench, "version": __version__, "path": path, "pages": pages, "is_site": is_site}
    return environment().get_template(template).render(**shared, **content)


@cache
def environment() -> Environment:
    """Return the Jinja environment with the filters of the workbench."""
    environment = template_environment("memlens.web")
    environment.filters.update(
        head=head, tail=tail, share=probability, signed=signed, letter=letter, highlight=highlight
    )
    return environment


def highlight(text: str, query: str) -> Markup:
    """Return the text with every occurrence of the query in <b>. Case matters only if the query contains capitals."""
    if not query:
        return escape(text)
    pattern = re.compile(re.escape(query), re.IGNORECASE if query == query.lower() else 0)
    parts, position = [], 0
    for match in pattern.finditer(text):
        parts += [escape(text[position : match.start()]), Markup("<b>"), escape(match[0]), Markup("</b>")]
        position = match.end()
    return Markup("").join([*parts, escape(text[position:])])
