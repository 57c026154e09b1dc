"""serve(): the workbench on an address of this machine, until it is stopped. Knows sockets and uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Callable

from memlens.errors import SettingError
from memlens.web.app import create_app
from memlens.web.security import Access
from memlens.web.workbench import Workbench


def serve(workbench: Workbench, host: str, port: int, opened: Callable[[str, Access], None], log: str) -> None:
    """Answer until interrupted; `opened` is told the address as soon as it is taken."""
    import uvicorn

    access = Access.to(host)
    listener = listen(host, port)
    with listener:
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        query = "" if access.token is None else f"?token={access.token}"
        opened(f"http://{shown}:{listener.getsockname()[1]}/{query}", access)
        config = uvicorn.Config(
            create_app(workbench, access), log_level=log, access_log=log == "info", server_header=False, lifespan="on"
        )
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            workbench.close()


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
