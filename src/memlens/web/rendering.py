"""Templates, and what a page needs to be drawn: every page goes through `page`, every part of a request through Bench.

Text passes through autoescape; a character that cannot be shown or sent is replaced. Knows Jinja and HTTP answers;
knows no page.
"""

from __future__ import annotations

import json
import math
import re
from functools import cache
from string import ascii_lowercase
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment
from markupsafe import Markup, escape
from pydantic import BaseModel

from memlens import __version__
from memlens.finite import finite
from memlens.report.templating import template_environment
from memlens.report.text import head, tail
from memlens.web.workbench import Workbench


def the_workbench(request: Request) -> Workbench:
    workbench: Workbench = request.app.state.workbench
    return workbench


Bench = Annotated[Workbench, Depends(the_workbench)]


class Problem(BaseModel):
    """What is wrong, in one line."""

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


class Json(JSONResponse):
    """JSON for any content: numbers that JSON lacks become null, characters that UTF-8 lacks stay escaped."""

    def render(self, content: Any) -> bytes:
        return json.dumps(finite(content), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def page(request: Request, template: str, status: int = 200, **content: Any) -> HTMLResponse:
    """A page, from the template of that name; `content` are its variables."""
    text = (
        environment()
        .get_template(template)
        .render(
            workbench=the_workbench(request),
            version=__version__,
            csrf=request.scope.get("memlens_csrf", ""),
            path=request.url.path,
            **content,
        )
    )
    return HTMLResponse(text.encode("utf-8", errors="replace"), status)


@cache
def environment() -> Environment:
    made = template_environment("memlens.web")
    made.filters.update(head=head, tail=tail, share=share, letter=letter, hits=hits)
    return made


def share(value: float | None) -> str:
    """A probability or a frequency, as people read it: 12.3%, 0.04%, 3e-7."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0 or value >= 0.0001:
        return f"{100 * value:.3g}%"
    return f"{value:.1e}".replace("e-0", "e-")


def letter(number: int) -> str:
    """a, b, … z, then numbers: how patterns are marked beside triggers."""
    return ascii_lowercase[number] if number < len(ascii_lowercase) else f"({number})"


def hits(text: str, wanted: str) -> Markup:
    """The text with every place of what was looked for in <b>; capitals matter only if it has some."""
    if not wanted:
        return escape(text)
    pattern = re.compile(re.escape(wanted), re.IGNORECASE if wanted == wanted.lower() else 0)
    parts, at = [], 0
    for found in pattern.finditer(text):
        parts += [escape(text[at : found.start()]), Markup("<b>"), escape(found[0]), Markup("</b>")]
        at = found.end()
    return Markup("").join([*parts, escape(text[at:])])
