"""The command line: one file per verb. It parses, calls and prints; what is computed is decided elsewhere.

    app        the verbs and how they are run; a new verb is one file and one line there
    outcome    what becomes of errors: exit codes and the one line on stderr
    options    options that several verbs share
    screen     where results, notes and details go; width and colour
    text       corpus text made harmless, cut and highlighted
    progress   bars, on a terminal only

Nothing here imports torch, pyarrow or duckdb before a verb needs them.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's own arguments) and give its exit code."""
    from memlens.cli.app import run

    return run(arguments)
