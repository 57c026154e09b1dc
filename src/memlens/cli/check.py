"""`memlens check`: is every file of an index whole and of one piece; what is damaged."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from memlens.cli.options import IndexFolder, Json, Quiet, Verbose
from memlens.cli.screen import ScanProgress, Screen
from memlens.errors import IndexFolderError
from memlens.text import visible

if TYPE_CHECKING:
    from memlens.index.check import Check

_STYLE = {"whole": "green", "damaged": "bold red", "outdated": "yellow", "not noted": "yellow"}


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
    if checked.damaged:
        names = [visible(finding.file) for finding in checked.damaged]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise IndexFolderError(
            f"{checked.folder} is damaged: {', '.join(names[:3])}{more}; make tables of later stages again with their "
            "command, or scan again with --fresh"
        )


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
