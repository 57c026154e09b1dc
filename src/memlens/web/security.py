"""Access to the workbench: one ASGI layer around the whole application.

- The Host header must name this machine, so that no foreign name can be pointed at it (DNS rebinding).
- Beyond this machine a token is needed: once in the address (?token=), from then on as a cookie.
- Whatever changes something must come from one of our own pages: browsers say where a request comes from, and the
  request repeats (header X-Memlens-Csrf or ?csrf=) the secret that only our pages know.
- JSON and what keeps the model at work are for our own pages, too, or for an address that a person typed.
- A request is as large as it says, no larger than any should be, and arrives in time.
- Pages may run our own scripts only, load nothing from elsewhere, and be framed by nobody.
"""

import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from urllib.parse import parse_qsl, urlencode

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CSRF_HEADER, CSRF_COOKIE, TOKEN_COOKIE = "x-memlens-csrf", "memlens-csrf", "memlens-token"
_MOST_BYTES = 1_000_000
_MOST_SECONDS = 30.0  # for a request to arrive, once its headers are here
_SAFE = ("GET", "HEAD", "OPTIONS")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.ASCII)
_LOG = logging.getLogger("memlens.web")

HEADERS = {
    "content-security-policy": (
        # Charts set styles on elements they make; there is no other way for them. No style element is allowed.
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # not no-referrer: then a plain form would say that it comes from nowhere
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


def is_local(host: str) -> bool:
    """Does an address to bind to reach this machine only?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """The host that is bound to, and the token that a request must bring. None: all of this machine may come in."""

    host: str = "127.0.0.1"
    token: str | None = None
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @classmethod
    def to(cls, host: str) -> "Access":
        """The access that an address to bind to calls for."""
        return cls(host, None if is_local(host) else secrets.token_urlsafe(24))

    def knows(self, host: str) -> bool:
        """Is this (a Host header's name) a name of this machine?"""
        if host in _LOCAL or host == self.host.lower():
            return True
        if is_local(self.host):
            return False
        if host in (name := socket.gethostname().lower(), f"{name}.local"):
            return True
        try:
            ipaddress.ip_address(host)  # a bare address cannot be rebound
        except ValueError:
            return False
        return True


class Guard:
    """The ASGI middleware that lets a request pass, or answers it with the reason why not."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        scope["memlens_csrf"] = self.access.csrf
        headers = Headers(scope=scope)
        refused = self._refuse(scope, headers)
        if refused is not None and refused.status_code >= 400:
            _LOG.debug("%s %r answered %d", scope["method"], scope["path"], refused.status_code)
        answer: ASGIApp = self.app if refused is None else refused
        await answer(scope, _arriving(receive), self._dressed(send, headers))

    def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        host = _name_of(headers.get("host", ""))
        if not self.access.knows(host):
            given = headers.get("host", "")[:80]
            return _say(scope, 421, f"'{given}' is not a name of this machine; use the address that was printed")
        if _is_oddly_framed(scope, headers):
            line = "this request says in two ways how long it is, or brings what nobody asked for; send it plainly"
            return _say(scope, 400, line, {"connection": "close"})
        if self.access.token is not None:
            answer = self._ask_for_token(scope, headers, self.access.token)
            if answer is not None:
                return answer
        if not self._is_from_our_pages(scope, headers):
            return _say(scope, 403, "this request does not come from a page of this workbench; open the page again")
        if scope["method"] not in _SAFE:
            size = headers.get("content-length", "")
            if not _is_number(size) or int(size) > _MOST_BYTES:
                return _say(scope, 413, _TOO_LARGE, {"connection": "close"})
        return None

    def _ask_for_token(self, scope: Scope, headers: Headers, token: str) -> Response | None:
        query = _query(scope)
        given = [value for name, value in query if name == "token"]
        if given and _same(given[0], token):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            path = "/" + str(scope["path"]).lstrip("/\\")  # never the address of another machine
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            # lax, since the address may be a link in a message; what changes something is guarded otherwise
            answer.set_cookie(cookie_name(TOKEN_COOKIE, headers), token, httponly=True, samesite="lax", path="/")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if _same(read_cookies(headers).get(cookie_name(TOKEN_COOKIE, headers), ""), token) or _same(bearer, token):
            return None
        return _say(scope, 401, "this workbench needs its token; open the whole address that was printed when it began")

    def _is_from_our_pages(self, scope: Scope, headers: Headers) -> bool:
        safe = scope["method"] in _SAFE
        if safe and not (_is_api(scope) or keeps_model_at_work(scope["path"], dict(_query(scope)))):
            return True
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return False
        # browsers that do not say so, or only to addresses with https, may still say from which page they come
        for name in ("origin",) if "sec-fetch-site" in headers else ("origin", "referer"):
            origin = headers.get(name)
            if origin is not None and _host_of(origin) != headers.get("host", "").lower():
                return False
        if safe:
            return True
        repeated = headers.get(CSRF_HEADER) or dict(_query(scope)).get("csrf", "")
        cookie = read_cookies(headers).get(cookie_name(CSRF_COOKIE, headers), "")
        return _same(repeated, self.access.csrf) and _same(cookie, self.access.csrf)

    def _dressed(self, send: Send, asked: Headers) -> Send:
        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-cache")
                is_page = headers.get("content-type", "").startswith("text/html")
                name = cookie_name(CSRF_COOKIE, asked)
                if is_page and message["status"] == 200 and read_cookies(asked).get(name) != self.access.csrf:
                    cookie = f"{name}={self.access.csrf}; Path=/; SameSite=Strict; HttpOnly"
                    headers.append("set-cookie", cookie)
            await send(message)

        return dressed


def cookie_name(name: str, headers: Headers) -> str:
    """Browsers share cookies between ports, but two workbenches must not share theirs."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"{name}-{port}" if _is_number(port) else name


def read_cookies(headers: Headers) -> dict[str, str]:
    """Read cookies. Those of other programs on this machine come along, may be malformed, and must not hide ours."""
    return cookie_parser(headers.get("cookie", ""))


def _name_of(host: str) -> str:
    """The name in a Host header, its port left out; empty where it is nothing but that."""
    match = _HOST.fullmatch(host.lower())
    if match is None or (match[1] is not None and ":" not in match[1]):
        return ""
    return match[1] or match[2]


def _host_of(address: str) -> str:
    """Name and port of an Origin or Referer."""
    return address.partition("://")[2].partition("/")[0].lower()


def _is_oddly_framed(scope: Scope, headers: Headers) -> bool:
    """Two lengths, a length beside chunks, or a body of a request that has none: what one reader of it takes for its
    end, another does not."""
    sizes, is_chunked = headers.getlist("content-length"), "transfer-encoding" in headers
    if len(sizes) + is_chunked > 1:
        return True
    return scope["method"] in _SAFE and (is_chunked or sizes not in ([], ["0"]))


_TOO_LARGE = f"the request is too large, or does not say how large it is ({_MOST_BYTES:,} bytes at most); send less"


def _arriving(receive: Receive) -> Receive:
    """The body as it really arrives, refused as soon as it is too long or too slow."""
    size, until = 0, anyio.current_time() + _MOST_SECONDS
    is_complete = False

    async def arriving() -> Message:
        nonlocal size, is_complete
        if is_complete:  # what comes now is that the other side has left, which takes as long as it takes
            return await receive()
        with anyio.move_on_after(until - anyio.current_time()) as waiting:
            message = await receive()
        if waiting.cancelled_caught:
            raise HTTPException(408, "the request did not arrive in time; send it again", {"connection": "close"})
        size += len(message.get("body", b""))
        if size > _MOST_BYTES:
            raise HTTPException(413, _TOO_LARGE, {"connection": "close"})
        is_complete = not message.get("more_body", False)
        return message

    return arriving


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def _is_number(text: str) -> bool:
    """A short whole number, and nothing that only looks like one."""
    return text.isascii() and text.isdecimal() and len(text) < 20


def _same(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _is_api(scope: Scope) -> bool:
    return str(scope["path"]).startswith("/api/")


def keeps_model_at_work(path: str, asked: Mapping[str, str]) -> bool:
    """Does a page's answer, or what its script asks for at once, need the model?

    A page to type into needs none, nor does a search in what the index holds.
    """
    if path in ("/trace", "/steer"):
        return bool(asked.get("prompt") or asked.get("set"))
    if path in ("/search", "/search/results", "/api/search"):
        return asked.get("in") == "fires"
    return path.startswith(("/trace/", "/api/"))


def _say(scope: Scope, status: int, line: str, headers: dict[str, str] | None = None) -> Response:
    if _is_api(scope):
        return JSONResponse({"error": line}, status, headers)
    if scope["method"] in _SAFE:
        text = f"<!doctype html><title>memlens</title><p>{escape(line)}</p>"
        return Response(text.encode("utf-8", "replace"), status, headers, "text/html")
    return PlainTextResponse(line, status, headers)
