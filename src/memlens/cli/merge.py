"""`memlens merge`: parts of a scan that were made apart become one index."""

from __future__ import annotations

from typing import Annotated

import typer

from memlens.cli.options import Json, Quiet, Verbose
from memlens.cli.scan import Out, Resume, print_index
from memlens.cli.screen import ScanProgress, Screen


def merge(
    parts: Annotated[
        list[str], typer.Argument(metavar="PART...", help="Folders that `memlens scan --shard I/N` has made.")
    ],
    out: Out,
    resume: Resume = True,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Join the parts of a scan, given in any order, into one index."""
    screen = Screen(as_json, quiet, verbose)
    with ScanProgress(screen, first="check") as progress:
        from memlens import api

        index = api.merge(parts, out=out, resume=resume, progress=progress)
    print_index(screen, index)
