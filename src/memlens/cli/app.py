"""The verbs of `memlens`, and the one place where a command line is run.

A verb is a file of this folder with a function of the same name, whose docstring is its help; naming it in VERBS is
all that is needed. Exit codes are outcome.py's matter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from memlens import __version__
from memlens.cli.outcome import WRONG_INPUT, guarded, interrupted, say

VERBS = (
    "demo",
    "analyze",
    "info",
    "scan",
    "merge",
    "check",
    "values",
    "patterns",
    "experiment",
    "report",
    "show",
    "search",
    "export",
    "trace",
    "annotate",
    "compare",
    "serve",
)

# The base of everything typer says about a wrong command line; typer exports this one member of the family.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


def make_app() -> typer.Typer:
    app = typer.Typer(
        name="memlens",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_memlens)
    for name in VERBS:
        verb = getattr(import_module(f"memlens.cli.{name}"), name)
        app.command(name)(guarded(verb))
    return app


def run(arguments: Sequence[str] | None) -> int:
    """Parse and run; the exit code comes back, nothing is raised for bad input."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign gets a "?", not a traceback
    given = list(sys.argv[1:] if arguments is None else arguments)
    for argument in given:
        if any("\ud800" <= sign <= "\udfff" for sign in argument):
            say(f"'{argument}' is not UTF-8; rename the file or write the text in UTF-8")
            return WRONG_INPUT
    try:
        result = make_app()(given, prog_name="memlens", standalone_mode=False)
    except _UsageError as error:
        say(f"{_sentence(error)}; see `{error.ctx.command_path if error.ctx else 'memlens'} --help`")
        return WRONG_INPUT
    except (typer.Abort, KeyboardInterrupt):
        return interrupted()
    return result if isinstance(result, int) else 0


def _sentence(error: Any) -> str:
    """The library's own words, as the first half of one line."""
    message = str(error.format_message()).strip().rstrip(".")
    return message[:1].lower() + message[1:]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"memlens {__version__}")
        raise typer.Exit


def _memlens(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Read the feed-forward layers of a language model as key-value memories.

    A memory is written L3N512: layer 3, memory 512, both counted from 0.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
