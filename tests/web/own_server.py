"""Helpers of the web tests: a server, a browser page, changes to an index."""

import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from memlens.cli.live import trace
from memlens.index.reader import Index
from memlens.web.app import create_app, listen, server_config
from memlens.web.security import Access
from memlens.web.workbench import Workbench
from waiting import wait_until

OTHER_SCREENS = ((390, "light"), (1280, "light"), (1280, "dark"))

# one screen by default, all widths and color schemes as a sweep
EVERY_SCREEN = pytest.mark.parametrize(
    ("width", "scheme"),
    [(390, "dark"), *(pytest.param(*screen, marks=pytest.mark.sweep) for screen in OTHER_SCREENS)],
)


def without_labels(index: Index) -> Index:
    """The same folder as if nobody had begun: other tests may have drawn a sample in what it was copied from."""
    for path in index.folder.glob("annotations.jsonl*"):
        path.unlink()
    return index


def fewer_patterns(index: Index) -> None:
    """Replace the table of patterns by its first row, as a stage would do."""
    table = index.table("patterns")
    index.write({"patterns": (table.schema, [table.slice(0, 1)])}, dict)


def parsed_command(shown: str) -> dict[str, Any]:
    """Return the parameters of a `memlens trace` command shown on a page."""
    name, verb, *words = shlex.split(shown)
    assert (name, verb) == ("memlens", "trace")
    parsed: dict[str, Any] = trace.make_context("trace", words).params
    return {**parsed, "sets": list(parsed["sets"])}


@contextmanager
def serving(workbench: Workbench, access: Access | None = None) -> Iterator[str]:
    """Serve a workbench and yield its address."""
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(server_config(create_app(workbench, access), "error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive(), "the server starts")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


@contextmanager
def opened(
    browser: Any, address: str, width: int = 1280, javascript: bool = True, scheme: str = "light"
) -> Iterator[Any]:
    """Open a browser page that must not log errors or send requests to other machines."""
    complaints: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=javascript
    )

    def route(handler: Any) -> None:
        if handler.request.url.startswith((address, "data:", "blob:")):
            handler.continue_()
        else:
            complaints.append(f"asked for {handler.request.url}")
            handler.abort()

    context.route("**/*", route)
    page = context.new_page()
    page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    assert complaints == []
