"""The web application: routers, error responses, and serve(), which runs the application until it is stopped.

Status codes: 404 for an unknown name, 422 for an invalid request, 409 for a missing model or a damaged index, 429 if
the model is busy. Any other error is a bug and gives 500. Under /api/, errors are JSON. Elsewhere, they are pages.
"""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from anyio import CapacityLimiter
from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from memlens import __version__
from memlens.errors import MemlensError, SettingError
from memlens.web import rendering
from memlens.web.pages import annotate, circuit, collections, compare, memory, overview, search, trace
from memlens.web.rendering import Json, page, status_of
from memlens.web.security import Access, Guard
from memlens.web.workbench import Workbench

_THREADS = 8
_MAX_CONNECTIONS = 512
_SHUTDOWN_SECONDS = 5
PAGES = (overview, memory, search, trace, circuit, collections, annotate, compare)


def create_app(workbench: Workbench, access: Access | None = None) -> FastAPI:
    """Return the workbench as an ASGI application.

    On startup, the application starts the workbench's background work.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        # pages need mostly CPU time, so more threads than cores would only use memory; one extra thread runs the model
        current_default_thread_limiter().total_tokens = _THREADS + 1
        workbench.start()
        if overview.list_experiment_tables(workbench.index):
            rendering.prepare_charts()
        yield

    app = FastAPI(
        title="memlens",
        version=__version__,
        description="An index of memories. All numbers on the pages are also available as JSON.",
        lifespan=lifespan,
        default_response_class=Json,
        # FastAPI's documentation pages load scripts from other sites
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    app.state.workbench, app.state.model_limiter = workbench, CapacityLimiter(1)
    app.include_router(rendering.router)
    for module in PAGES:
        app.include_router(module.router)
    app.add_exception_handler(MemlensError, _report_memlens_error)
    app.add_exception_handler(RequestValidationError, _report_invalid_request)
    app.add_exception_handler(HTTPException, _report_http_error)
    app.add_exception_handler(Exception, _report_bug)
    app.add_middleware(Guard, access=access or Access())
    return app


def _report_memlens_error(request: Request, error: Exception) -> Response:
    return _error_response(request, status_of(error), str(error))


def _report_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:]) or "request"
    return _error_response(request, 422, f"{field}: {first['msg']}")


def _report_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    line = "there is no page at this address" if error.status_code == 404 else str(error.detail)
    response = _error_response(request, error.status_code, line)
    response.headers.update(error.headers or {})
    return response


def _report_bug(request: Request, error: Exception) -> Response:
    name = type(error).__name__
    return _error_response(
        request, 500, f"this is a bug in memlens ({name}); please report it together with the server's log"
    )


def _error_response(request: Request, status: int, line: str) -> Response:
    line = " ".join(line.split())
    if request.url.path.startswith("/api/"):
        return Json({"error": line}, status)
    return page(request, "problem.html", status, title="Not found" if status == 404 else "Error", line=line)


def serve(workbench: Workbench, host: str, port: int, opened: Callable[[str, Access], None], log: str) -> None:
    """Serve until SIGINT or SIGTERM. uvicorn raises the signal again after its shutdown.

    Args:
        workbench: The workbench.
        host: Address to listen on.
        port: Port; 0 selects a free one.
        opened: Called with the address once the port is bound.
        log: Log level of uvicorn.
    """
    access = Access.for_host(host)
    with listen(host, port) as listener:
        shown_host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        query = "" if access.token is None else f"?token={access.token}"
        opened(f"http://{shown_host}:{listener.getsockname()[1]}/{query}", access)
        try:
            uvicorn.Server(server_config(create_app(workbench, access), log)).run(sockets=[listener])
        finally:
            workbench.close()


def server_config(app: FastAPI, log: str) -> uvicorn.Config:
    """Return the uvicorn settings for an application and a log level."""
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="on",
        log_level=log,
        access_log=log == "info",
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 means any free port.

    Raises:
        SettingError: The address is not available.
    """
    if not 0 <= port <= 65535:
        raise SettingError(f"--port is {port}; choose 1 to 65535, or 0 for any free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise SettingError(f"--host is '{host}', which is not an address of this machine; try 127.0.0.1") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise SettingError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another --port, or 0 for any free port"
        ) from error
    return listener
