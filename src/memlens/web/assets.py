"""Styles and scripts: the files of static/, by name and no other way, and the chart library of the report."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from threading import Lock, Thread

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from memlens.report.chart_style import css_variables

router = APIRouter(include_in_schema=False)

_MAKING = Lock()  # it is made once, however many ask at the same time
_KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@cache
def static_files() -> dict[str, tuple[bytes, str, str]]:
    """Name -> content, media type, tag. Read once: no name from a request ever becomes a path."""
    found = {}
    for entry in files("memlens.web").joinpath("static").iterdir():
        kind = _KINDS.get("." + entry.name.rpartition(".")[2])
        if kind:
            content = entry.read_bytes()
            if entry.name == "style.css":
                content = css_variables().encode() + content
            found[entry.name] = (content, kind, _tag(content))
    return found


@router.get("/static/{name}")
def static(request: Request, name: str) -> Response:
    if name == "vega.js":
        return _answer(request, *_vega())
    if name not in static_files():
        raise HTTPException(404)
    return _answer(request, *static_files()[name])


def _vega() -> tuple[bytes, str, str]:
    with _MAKING:
        return _made_vega()


@cache
def _made_vega() -> tuple[bytes, str, str]:
    from memlens.report.bundle import vega_bundle

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
