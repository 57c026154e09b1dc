"""`memlens serve`: the workbench in the browser."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import IndexFolder, Quiet, Verbose, with_settings
from memlens.cli.screen import Screen
from memlens.settings import LiveSettings

if TYPE_CHECKING:
    from memlens.web.security import Access


@with_settings(LiveSettings)
def serve(
    index: IndexFolder,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model of the index, for live pages. It loads while others answer."),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="0 takes any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Where to listen. Beyond this machine a token is needed.")] = "127.0.0.1",
    compare: Annotated[str | None, typer.Option(metavar="INDEX", help="A second index, for the page Compare.")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Browse, search and trace in the browser, on this machine."""
    from memlens.web.app import serve as serve_workbench
    from memlens.web.workbench import Workbench

    screen = Screen(False, quiet, verbose)
    workbench = Workbench(index, model, compare, LiveSettings(**options))

    def opened(address: str, access: Access) -> None:
        screen.result(address)
        if access.token is not None:
            screen.note(
                f"others on the network can reach {host}: whoever has the whole address, token included, may look"
            )
        screen.note("stop with Ctrl-C")

    with suppress(KeyboardInterrupt):  # this is how one stops it
        serve_workbench(workbench, host, port, opened, "info" if verbose else "warning")
