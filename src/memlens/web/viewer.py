"""Who looks, as far as they have said: the name under which this browser labels, kept in a cookie.

There are no accounts: this keeps people from seeing others' labels too soon by accident, not by intent.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote, unquote

from fastapi import Depends, Request
from fastapi.responses import Response

from memlens.web.security import cookie_name, read_cookies

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
