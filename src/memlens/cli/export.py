"""`memlens export`: an index as text for other programs."""

import sys
from pathlib import Path
from typing import IO, Annotated

import typer

from memlens.cli.options import Force, IndexFolder, Quiet, Verbose
from memlens.cli.screen import Screen
from memlens.errors import SettingError
from memlens.text import visible

_UNITS = {"jsonl": "memories", "csv": "triggers", "neuronpedia": "memories"}


def export(
    index: IndexFolder,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="jsonl|csv|neuronpedia",
            help="One memory a line, one trigger a row, or one memory a line in Neuronpedia's layout of features.",
        ),
    ] = "jsonl",
    out: Annotated[str | None, typer.Option("--out", "-o", metavar="FILE", help="Default: stdout.")] = None,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write all memories and triggers as JSON Lines or CSV, or as Neuronpedia's features."""
    from memlens.files import replacing
    from memlens.index.export import FORMATS, is_export
    from memlens.index.reader import Index
    from memlens.outputs import refuse_output

    screen = Screen(False, quiet, verbose)
    if format_ not in FORMATS:
        raise SettingError(f"--format is '{format_}'; choose one of: {', '.join(FORMATS)}")
    opened = Index(index)
    if out is None:
        if getattr(sys.stdout, "name", None) == 1:  # put in the place of a closed one, see cli/__init__.py
            raise SettingError("stdout is closed, so the export would go nowhere; name a file with -o")
        count = FORMATS[format_](opened, _Stdout(sys.stdout))
    else:
        path = Path(out)
        refuse_output(path, is_export, force=force)
        with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="") as handle:
            count = FORMATS[format_](opened, handle)
    screen.note(f"{count:,} {_UNITS[format_]} written{'' if out is None else ' to ' + visible(out)}")


class _Stdout:
    """Stdout as UTF-8; on a terminal every control character but the end of a line is made visible."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self.is_terminal = stream, stream.isatty()
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", newline="")

    def write(self, text: str) -> None:
        self.stream.write("\n".join(visible(line) for line in text.split("\n")) if self.is_terminal else text)
