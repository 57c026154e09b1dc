"""`memlens check` and `memlens repair`: which files of an index are damaged, and tables made again from whole ones."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from memlens.cli.options import IndexFolder, Json, ModelNow, Quiet, Verbose
from memlens.cli.screen import ScanProgress, Screen
from memlens.errors import FilesError, IndexFolderError
from memlens.text import visible

if TYPE_CHECKING:
    from memlens.index.check import Check

_STYLE = {
    "whole": "green",
    "damaged": "bold red",
    "unreadable": "bold yellow",
    "outdated": "yellow",
    "not noted": "yellow",
}


def check(index: IndexFolder, as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Verify every file of an index; exit code 2 if any is damaged."""
    screen = Screen(as_json, quiet, verbose)
    with ScanProgress(screen, first="check") as progress:
        from memlens import api

        checked = api.check(index, progress=progress)
    if as_json:
        findings = [asdict(finding) for finding in checked.findings]
        screen.json({"index": str(checked.folder), "whole": checked.is_whole, "files": findings})
    elif not quiet:
        _print(screen, checked)
    for finding in checked.damaged:
        if finding.file == "annotations.sqlite":  # nobody can make it again, and no advice for tables may cost it
            raise IndexFolderError(finding.detail)
    if checked.damaged:
        names = [visible(finding.file) for finding in checked.damaged]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise IndexFolderError(
            f"{checked.folder} is damaged: {', '.join(names[:3])}{more}; make tables of later stages again with "
            f"`memlens repair {checked.folder}`, or scan again with --fresh"
        )
    if checked.unreadable:
        first = checked.unreadable[0]
        raise FilesError(f"{visible(first.file)} was not checked: {first.detail}")


def repair(
    index: IndexFolder,
    model: ModelNow = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Make damaged or outdated tables of values, patterns and experiments again, from those that are whole."""
    screen = Screen(as_json, quiet, verbose)
    with ScanProgress(screen, first="check") as progress:
        from memlens.pipeline import repair as make_again

        names = make_again(index, model=model, progress=progress)
    if as_json:
        screen.json({"index": str(index), "made": names})
    elif not quiet:
        screen.result(f"made again: {', '.join(names)}" if names else "every table is whole; nothing was done")


def _print(screen: Screen, checked: Check) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("file", "state", ""):
        table.add_column(name)
    for finding in checked.findings:
        state = Text(finding.state, _STYLE[finding.state])
        table.add_row(Text(visible(finding.file)), state, Text(visible(finding.detail)))
    screen.result(table)
