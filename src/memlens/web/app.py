"""The application: all pages put together, errors as one line, and serve(), which runs it until it is stopped.

An unknown name is 404, a request that cannot work 422, one that needs a model which is not there, or an index that was
replaced, 409; 429 says that the model is busy and enough requests wait for it. Whatever else
goes wrong is a bug and answers 500. Under /api/ an error is JSON, elsewhere a page.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from memlens import __version__
from memlens.errors import MemlensError, SettingError
from memlens.web import rendering
from memlens.web.pages import annotate, collections, compare, expert, memory, overview, search, steer, trace
from memlens.web.pages.overview import experiment_tables
from memlens.web.rendering import Json, page, status_of
from memlens.web.security import Access, Guard
from memlens.web.workbench import Turns, Workbench

_THREADS = 8
_HEADERS_SECONDS = 10.0  # for the head of a request to arrive, from the moment that there is a connection for it
_MOST_CONNECTIONS = 512
PAGES = (overview, memory, expert, search, trace, steer, collections, annotate, compare)


def create_app(workbench: Workbench, access: Access | None = None) -> FastAPI:
    """The workbench as an ASGI application; what loads in the background begins with it."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        # Pages are work for the processor: more threads than this only hold more memory at once.
        # One more is for the one live request that is computed, so that it takes none away from the others.
        current_default_thread_limiter().total_tokens = _THREADS + 1
        workbench.start()
        if experiment_tables(workbench.index):
            rendering.prepare_charts()
        yield

    app = FastAPI(
        title="memlens",
        version=__version__,
        description="An index of memories. Every number a page shows can be had as JSON.",
        lifespan=lifespan,
        default_response_class=Json,
        # the usual pages of documentation load scripts from elsewhere
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    app.state.workbench, app.state.turns = workbench, Turns(workbench.live)
    app.include_router(rendering.router)
    for module in PAGES:
        app.include_router(module.router)
    app.add_exception_handler(MemlensError, _refused)
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Guard, access=access or Access())
    return app


def _refused(request: Request, error: Exception) -> Response:
    return _say(request, status_of(error), str(error))


def _not_understood(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or "the request"
    return _say(request, 422, f"{where}: {first['msg']}")


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    line = "there is nothing at this address" if error.status_code == 404 else str(error.detail)
    return _say(request, error.status_code, line, error.headers)


def _say(request: Request, status: int, line: str, headers: object = None) -> Response:
    line = " ".join(line.split())
    extra = dict(headers) if isinstance(headers, dict) else None
    if request.url.path.startswith("/api/"):
        return Json({"error": line}, status, extra)
    answer = page(request, "problem.html", status, title="Not found" if status == 404 else "Sorry", line=line)
    answer.headers.update(extra or {})
    return answer


def serve(workbench: Workbench, host: str, port: int, opened: Callable[[str, Access], None], log: str) -> None:
    """Answer until interrupted; `opened` is told the address as soon as it is taken."""
    access = Access.to(host)
    listener = listen(host, port)
    with listener:
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        query = "" if access.token is None else f"?token={access.token}"
        opened(f"http://{shown}:{listener.getsockname()[1]}/{query}", access)
        try:
            uvicorn.Server(server_config(create_app(workbench, access), log)).run(sockets=[listener])
        finally:
            workbench.close()


def server_config(app: FastAPI, log: str) -> uvicorn.Config:
    """The settings of uvicorn: requests have time limits, and malformed ones leave no lines on the terminal."""
    config = uvicorn.Config(
        app,
        http=PunctualProtocol,
        ws="none",
        lifespan="on",
        log_level=log,
        access_log=log == "info",
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_no_odd_request)
    return config


def _is_no_odd_request(record: logging.LogRecord) -> bool:
    """Drop uvicorn's warnings of malformed requests, unless details are asked for."""
    return record.levelno != logging.WARNING or logging.getLogger("uvicorn.error").isEnabledFor(logging.DEBUG)


class PunctualProtocol(H11Protocol):
    """HTTP that closes a connection on which no whole head of a request comes in time.

    uvicorn's own limit ends with the first byte, and begins with the first answer only.
    """

    _giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._giving_up is not None:
            self._giving_up.cancel()

    def _await_head(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._giving_up = self.loop.call_later(_HEADERS_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else a request is being answered
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free. An address that cannot be had is refused with one line."""
    if not 0 <= port <= 65535:
        raise SettingError(f"--port is {port}; choose 1 to 65535, or 0 for any that is free")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise SettingError(f"--host is '{host}', which is no address of this machine; try 127.0.0.1") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise SettingError(
            f"{host} port {port} cannot be had ({error.strerror}); choose another with --port, or 0 for any"
        ) from error
    return listener
