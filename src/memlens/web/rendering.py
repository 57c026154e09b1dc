"""Pages from templates, JSON answers, static files, and the parts of a request that routes ask for.

Text passes through autoescape; a character that cannot be shown or sent is replaced. A person who labels is known by a
name in a cookie. There are no accounts: this keeps people from seeing others' labels too soon by accident, not by
intent.
"""

import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from functools import cache, partial
from importlib.resources import files
from threading import Lock, Thread
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote, urlencode

from fastapi import APIRouter, Depends, HTTPException, Path, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from jinja2 import Environment
from markupsafe import Markup, escape
from pydantic import BaseModel

from memlens import __version__
from memlens.errors import BusyError, FilesError, IndexFolderError, ModelError, UnknownName
from memlens.experiments.style import css_variables
from memlens.reports.report import template_environment, vega_bundle
from memlens.text import finite, head, letter, probability, signed, tail
from memlens.web.security import cookie_name, keeps_model_at_work, read_cookies
from memlens.web.workbench import Turns, Workbench

_STATUS = {UnknownName: 404, ModelError: 409, IndexFolderError: 409, FilesError: 409, BusyError: 429}


def status_of(error: Exception) -> int:
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 422)


router = APIRouter(include_in_schema=False)

_MAKING = Lock()  # it is made once, however many ask at the same time
_KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@cache
def static_files() -> dict[str, tuple[bytes, str, str]]:
    """Name -> content, media type, tag. Read once: no name from a request ever becomes a path."""
    by_name = {}
    for entry in files("memlens.web").joinpath("static").iterdir():
        kind = _KINDS.get("." + entry.name.rpartition(".")[2])
        if kind:
            content = entry.read_bytes()
            if entry.name == "style.css":
                content = css_variables().encode() + content
            by_name[entry.name] = (content, kind, _tag(content))
    return by_name


@router.get("/static/{name}")
def static(request: Request, name: str) -> Response:
    if name == "vega.js":
        return _answer(request, *_vega())
    if name not in static_files():
        raise HTTPException(404)
    return _answer(request, *static_files()[name])


@router.get("/{name}.html")
def page_of_site(request: Request, name: Literal["index", "search", "memory"]) -> Response:
    """Addresses of a site that `memlens site` has made lead to the same pages here."""
    asked = dict(request.query_params)
    path = {"index": "/", "search": "/search", "memory": f"/m/{quote(asked.pop('name', ''), safe='')}"}[name]
    return RedirectResponse(path + (f"?{urlencode(asked)}" if asked else ""), 308)


def _vega() -> tuple[bytes, str, str]:
    with _MAKING:
        return vega_file()


@cache
def vega_file() -> tuple[bytes, str, str]:
    content = vega_bundle().encode()
    return content, "text/javascript", _tag(content)


def prepare_charts() -> None:
    """Make the chart library, in the background: the very first time it takes some seconds."""
    Thread(target=_vega, name="memlens charts", daemon=True).start()


def _tag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:20]}"'


def _answer(request: Request, content: bytes, kind: str, tag: str) -> Response:
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=kind, headers={"etag": tag})


_COOKIE = "memlens-annotator"
_SECONDS = 365 * 24 * 3600  # a study may take weeks


def the_viewer(request: Request) -> str | None:
    """None for somebody who has not begun to label."""
    return unquote(read_cookies(request.headers).get(cookie_name(_COOKIE, request.headers), "")) or None


Viewer = Annotated[str | None, Depends(the_viewer)]


def remember_viewer(request: Request, answer: Response, annotator: str) -> Response:
    """The same answer; from here on this browser's pages are for this person."""
    name, value = cookie_name(_COOKIE, request.headers), quote(annotator, safe="", errors="replace")
    answer.set_cookie(name, value, max_age=_SECONDS, httponly=True, samesite="lax", path="/")
    return answer


def the_workbench(request: Request) -> Workbench:
    workbench: Workbench = request.app.state.workbench
    return workbench


Bench = Annotated[Workbench, Depends(the_workbench)]
Name = Annotated[str, Path(description="Layer and memory from 0, like L3N51.", max_length=30)]


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class IndexRoute(APIRoute):
    """A page or JSON of one index: refused if that was replaced before its answer was complete."""

    def get_route_handler(self) -> Handler:
        answer = super().get_route_handler()

        async def whole(request: Request) -> Response:
            bench = the_workbench(request)
            bench.refuse_replaced()
            try:
                # whoever asks for the status waits for the model
                with nullcontext() if request.url.path == "/api/status" else bench.pages_first.answering():
                    return await answer(request)
            finally:  # also of an error: what is wrong is then, first of all, that the index is another one
                bench.refuse_replaced()

        return whole


class LiveRoute(IndexRoute):
    """One that needs the model for its answer, and so waits for its turn."""

    def get_route_handler(self) -> Handler:
        answer = super().get_route_handler()

        async def in_turn(request: Request) -> Response:
            if not keeps_model_at_work(request.url.path, request.query_params):
                return await answer(request)
            the_workbench(request).pages_first.hurry()
            await request.body()  # one who sends slowly keeps nobody waiting
            turns: Turns = request.app.state.turns
            return await turns.take(partial(answer, request), partial(_until_gone, request))

        return in_turn


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Problem(BaseModel):
    """An error, in one line."""

    error: str


# For `responses=` of JSON routes: what else they may answer.
PROBLEMS: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "There is no such memory, layer or token."},
    422: {"model": Problem, "description": "The request cannot be understood."},
}
MODEL_PROBLEMS: dict[int | str, dict[str, Any]] = {
    **PROBLEMS,
    409: {"model": Problem, "description": "The model is not loaded, or cannot do this."},
}

LIVE_PROBLEMS: dict[int | str, dict[str, Any]] = {
    **MODEL_PROBLEMS,
    429: {"model": Problem, "description": "The model is busy, and enough requests wait for it."},
}


class Json(JSONResponse):
    """JSON for any content: numbers that JSON lacks become null, characters that UTF-8 lacks stay escaped."""

    def render(self, content: Any) -> bytes:
        return json.dumps(finite(content), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def page(request: Request, template: str, status: int = 200, **content: Any) -> HTMLResponse:
    """A page, from the template of that name; `content` are its variables."""
    csrf = request.scope.get("memlens_csrf", "")
    text = render(template, the_workbench(request), request.url.path, PAGES, csrf=csrf, **content)
    return HTMLResponse(text.encode("utf-8", errors="replace"), status)


PAGES = (
    ("/", "Overview"),
    ("/search", "Search"),
    ("/trace", "Trace"),
    ("/steer", "Steer"),
    ("/collections", "Collections"),
    ("/annotate", "Annotate"),
    ("/compare", "Compare"),
)


def render(
    template: str,
    workbench: Workbench,
    path: str,
    pages: Sequence[tuple[str, str]],
    *,
    csrf: str = "",
    is_site: bool = False,
    **content: Any,
) -> str:
    """A template as text, for an answer or for a file of a site. `pages` are the addresses and names in its head."""
    given = {"workbench": workbench, "version": __version__, "csrf": csrf, "path": path, "pages": pages}
    return environment().get_template(template).render(**given, is_site=is_site, **content)


@cache
def environment() -> Environment:
    environment = template_environment("memlens.web")
    environment.filters.update(head=head, tail=tail, share=probability, signed=signed, letter=letter, hits=hits)
    return environment


def hits(text: str, wanted: str) -> Markup:
    """The text with every place of what was looked for in <b>; capitals matter only if it has some."""
    if not wanted:
        return escape(text)
    pattern = re.compile(re.escape(wanted), re.IGNORECASE if wanted == wanted.lower() else 0)
    parts, at = [], 0
    for match in pattern.finditer(text):
        parts += [escape(text[at : match.start()]), Markup("<b>"), escape(match[0]), Markup("</b>")]
        at = match.end()
    return Markup("").join([*parts, escape(text[at:])])
