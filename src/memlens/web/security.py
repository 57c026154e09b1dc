"""Access to the workbench: an ASGI middleware around the whole application.

- The Host header must name this machine, which prevents DNS rebinding.
- If the server accepts other machines, requests need a token: first in the address (?token=), then as a cookie.
- Requests from other sites are rejected, except links that the user follows.
- Request bodies are limited to 1 MB.
- Pages run only the workbench's own scripts, load nothing from other sites and cannot be framed.
"""

import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_COOKIE = "memlens-token"
MAX_BODY_BYTES = 1_000_000

HEADERS = {
    "content-security-policy": (
        # charts set style attributes on their elements; <style> elements are not allowed
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


def is_local(host: str) -> bool:
    """Return True if a server bound to this address can be reached only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """The address to which the server is bound, and the token that requests need, or None."""

    host: str = "127.0.0.1"
    token: str | None = None

    @classmethod
    def for_host(cls, host: str) -> "Access":
        """Return the access rules for a bind address.

        If other machines can reach the address, requests need a random token.
        """
        return cls(host, None if is_local(host) else secrets.token_urlsafe(24))

    def allows_host(self, header: str) -> bool:
        """Return True if a Host header (`localhost:8000`, `[::1]:8000`) names this machine."""
        name = re.sub(r":[0-9]{1,5}$", "", header.lower())
        bound_name = f"[{self.host}]" if ":" in self.host else self.host.lower()
        if name in ("localhost", "127.0.0.1", "[::1]", bound_name):
            return True
        if is_local(self.host):
            return False
        own_name = socket.gethostname().lower()
        if name in (own_name, f"{own_name}.local"):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True  # a numeric address is not subject to DNS rebinding


class Guard:
    """Middleware that rejects requests with one line or passes them on, and adds security headers to all responses."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        response = self._refuse(Request(scope)) or self.app
        await response(scope, _limit_body(receive), send_with_headers)

    def _refuse(self, request: Request) -> Response | None:
        if not self.access.allows_host(request.headers.get("host", "")):
            line = "the Host header does not name this machine; use the address that `memlens serve` printed"
            return _error_response(request, 421, line)
        if self.access.token is not None:
            response = _check_token(request, self.access.token)
            if response is not None:
                return response
        if _is_cross_site(request):
            return _error_response(request, 403, "this request comes from another website; open the workbench directly")
        return None


def _check_token(request: Request, token: str) -> Response | None:
    """Return None if the request has the token, a redirect if the token is in the address, otherwise an error."""
    cookie = cookie_name(TOKEN_COOKIE, request)
    if _is_same(request.query_params.get("token", ""), token):
        query = urlencode([pair for pair in request.query_params.multi_items() if pair[0] != "token"])
        path = "/" + request.scope["path"].lstrip("/\\")  # a path like //name would redirect to another machine
        response = RedirectResponse(f"{path}?{query}" if query else path, 303)
        # "lax", because users follow links with the token, for example from a message
        response.set_cookie(cookie, token, httponly=True, samesite="lax", path="/")
        return response
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    if _is_same(request.cookies.get(cookie, ""), token) or _is_same(bearer, token):
        return None
    line = "this workbench requires a token; open the complete address that `memlens serve` printed"
    return _error_response(request, 401, line)


def _is_cross_site(request: Request) -> bool:
    """Return True if another site sent the request, except for a page link that the user followed.

    Browsers send Sec-Fetch-Site only to localhost and https addresses. For other addresses, Origin is checked.
    """
    site = request.headers.get("sec-fetch-site")
    if site is None:
        origin = request.headers.get("origin")
        return origin is not None and origin.partition("://")[2] != request.headers.get("host")
    is_link = request.method == "GET" and request.headers.get("sec-fetch-dest") == "document" and not _is_api(request)
    return site not in ("same-origin", "none") and not is_link


def _limit_body(receive: Receive) -> Receive:
    """Return a `receive` that raises HTTP error 413 as soon as the body exceeds MAX_BODY_BYTES."""
    size = 0

    async def receive_limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            line = f"the request body is larger than {MAX_BODY_BYTES:,} bytes"
            raise HTTPException(413, line, {"connection": "close"})
        return message

    return receive_limited


def cookie_name(name: str, request: Request) -> str:
    """Return the name of a cookie, including the port, because browsers share cookies between ports."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{name}-{port}" if re.fullmatch("[0-9]{1,5}", port) else name


def _is_same(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _is_api(request: Request) -> bool:
    return str(request.scope["path"]).startswith("/api/")


def _error_response(request: Request, status: int, line: str) -> Response:
    return JSONResponse({"error": line}, status) if _is_api(request) else PlainTextResponse(line, status)
