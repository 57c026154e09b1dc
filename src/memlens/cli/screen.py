"""Where things are said: results on stdout, notes and details on stderr.

Colour and the terminal's width are used on a terminal only; elsewhere lines are whole and plain. NO_COLOR is honoured.
This module knows nothing of memories.
"""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from memlens.finite import finite

_ENDLESS = 100_000  # columns, where nobody looks at a terminal


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # outcome.py knows what to do; rich would end the process


class Screen:
    """One command's output."""

    def __init__(self, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    @property
    def styled(self) -> bool:
        """Can a result be highlighted by style? Else it is by signs."""
        return self.out.color_system is not None

    @property
    def shows_progress(self) -> bool:
        return self.err.is_terminal and not self.quiet

    def result(self, content: Any = "") -> None:
        """A line of text, or anything rich can draw; text is never read as markup."""
        is_line = isinstance(content, (str, Text))
        if self.out.is_terminal:
            self.out.print(content, soft_wrap=is_line)
            return
        with self.out.capture() as drawn:
            self.out.print(content, soft_wrap=is_line)
        for line in drawn.get().splitlines():  # a table's padding is of no use in a file
            print(line.rstrip())

    def json(self, content: Any) -> None:
        """One JSON document on one line; characters beyond ASCII are escaped, so that it suits any terminal."""
        print(json.dumps(finite(content), allow_nan=False))

    def note(self, message: str) -> None:
        """Something beside the result that a person wants to know."""
        if not self.quiet:
            self.err.print(message, soft_wrap=True)

    def detail(self, message: str) -> None:
        """Something for those who said -v."""
        if self.verbose:
            self.err.print(message, soft_wrap=True)


def _console(stream: IO[str]) -> Console:
    has_width = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return _Console(
        file=stream,
        width=None if has_width else _ENDLESS,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        highlight=False,
        emoji=False,
    )
