"""The command line: it parses, calls and prints. Verbs are listed in app.py, each in the file of its name.

    app        the verbs, how they are run, exit codes
    options    options that verbs share, and options made from settings
    screen     results on stdout, notes and progress on stderr; width and colour

Nothing here imports torch, pyarrow or duckdb before a verb needs them.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's own arguments) and give its exit code."""
    from memlens.cli.app import run
    from memlens.parallel import rest_idle_threads

    rest_idle_threads()
    return run(arguments)
