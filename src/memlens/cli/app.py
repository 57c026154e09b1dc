"""The verbs of `memlens`, their help texts, and the exit codes for errors.

    0 success    2 invalid input    130 interrupted    143 terminated    1 a bug (the only case with a traceback)

Each verb is a command of the same name in the module that GROUPS names. The docstring of its function is its help text.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

import click

from memlens import __version__
from memlens.cli.help import format_overview
from memlens.errors import MemlensError, RayAgentError
from memlens.signals import Interrupted, interruptible
from memlens.text import visible

DONE, BUG, WRONG_INPUT = 0, 1, 2
_MIN_WIDTH, _MAX_WIDTH = 10, 1000  # accepted widths of a terminal, in columns

GROUPS = {  # heading -> verb -> module in memlens.cli
    "Start": {"demo": "analyze", "analyze": "analyze", "serve": "index"},
    "Explore": {
        "show": "explore",
        "search": "explore",
        "trace": "live",
        "circuit": "circuit",
        "wires": "circuit",
        "compare": "explore",
    },
    "Evaluate": {"probe": "live", "experiment": "analyze", "report": "index"},
    "Label": {"annotate": "annotate", "collect": "collect"},
    "Build": {"info": "build", "scan": "build", "values": "build", "patterns": "build", "roles": "build"},
    "Share and maintain": {
        "site": "index",
        "push": "index",
        "pull": "index",
        "export": "index",
        "merge": "build",
        "check": "index",
        "repair": "index",
    },
}
VERBS = {verb: module for verbs in GROUPS.values() for verb, module in verbs.items()}


class _Program(click.Group):
    """The group of all verbs.

    It imports the module of a verb only when the verb is used, because lookups must be fast.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = getattr(import_module(f"memlens.cli.{VERBS[name]}"), name)
        return command

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        groups = [
            (heading, [command for verb in verbs if (command := self.get_command(context, verb)) is not None])
            for heading, verbs in GROUPS.items()
        ]
        formatter.write(format_overview(context, groups))


_COMPLETE = "_MEMLENS_COMPLETE"  # the environment variable by which a shell asks for completions
_SHELLS = ("bash", "zsh", "fish")


def _print_completion(context: click.Context, _option: click.Parameter, shell: str | None) -> None:
    """Print the script that makes a shell complete commands, and exit."""
    from click.shell_completion import get_completion_class

    if shell is not None and (kind := get_completion_class(shell)) is not None:
        click.echo(kind(program, {}, "memlens", _COMPLETE).source())
        context.exit()


@click.group(cls=_Program, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="memlens %(version)s")
@click.option("--completion", type=click.Choice(_SHELLS), is_eager=True, expose_value=False, callback=_print_completion)
@click.pass_context
def program(context: click.Context) -> None:
    """Analyze the feed-forward layers of a language model as key-value memories.

    L3N51 is memory 51 of layer 3. Both count from 0.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str] | None) -> int:
    """Parse and run a command line. Returns the exit code and never raises."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # "?" for characters that the terminal cannot show
    words = list(sys.argv[1:] if arguments is None else arguments)
    for word in words:
        if any("\ud800" <= character <= "\udfff" for character in word):
            print_error(f"'{word}' is not valid UTF-8; rename the file or write the text in UTF-8")
            return WRONG_INPUT
        if "\0" in word:
            print_error(f"'{word}' contains a NUL character; remove it")
            return WRONG_INPUT
    columns = os.environ.get("COLUMNS", "")
    if columns and not (columns.isascii() and columns.isdecimal() and _MIN_WIDTH <= int(columns[:9]) <= _MAX_WIDTH):
        del os.environ["COLUMNS"]  # not a valid width
    return run_guarded(lambda: _run_words(words))


def _run_words(words: list[str]) -> None:
    if instruction := os.environ.get(_COMPLETE):
        from click.shell_completion import shell_complete

        shell_complete(program, {}, "memlens", _COMPLETE, instruction)
        return
    # not command.main(), because it would handle interrupts and errors itself
    with program.make_context("memlens", words) as context:
        program.invoke(context)


def run_guarded(work: Callable[[], None]) -> int:
    """Call a function. If it raises an error, print the error on stderr. Returns the exit code."""
    try:
        with interruptible():
            work()
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.UsageError as error:
        print_error(_describe_usage_error(error))
        return WRONG_INPUT
    except RayAgentError as error:
        print_error(str(error))
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(WRONG_INPUT)  # after a normal exit, a thread of Ray could change the exit code to 1
    except MemlensError as error:
        print_error(str(error))
        return WRONG_INPUT
    except KeyboardInterrupt as error:
        print_error(str(error) or "interrupted; run the same command again to resume")
        return error.code if isinstance(error, Interrupted) else Interrupted.code
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        print_error(_describe_os_error(error))
        _discard_output(only_if_broken=True)
        return WRONG_INPUT
    except MemoryError:
        print_error("not enough memory; try a smaller --top, --batch-tokens or --unit")
        return WRONG_INPUT
    except Exception:
        traceback.print_exc()
        print_error("this is a bug in memlens, not in your input; please report it with the lines above")
        return BUG
    return DONE


def print_error(message: str) -> None:
    """Print one line on stderr."""
    with suppress(OSError, ValueError):  # stderr may be closed or its disk full
        print(f"memlens: {visible(message)}", file=sys.stderr, flush=True)


def _describe_usage_error(error: click.UsageError) -> str:
    similar = getattr(error, "possibilities", None)  # names of options or commands
    message = (error.message if similar else error.format_message()).strip().rstrip(".")
    advice = f"; similar: {', '.join(similar)}" if similar else ""
    path = error.ctx.command_path if error.ctx else "memlens"
    return f"{message[:1].lower()}{message[1:]}{advice}; see `{path} --help`"


def _describe_os_error(error: OSError) -> str:
    path = str(error.filename or "a file")
    shown = path if len(path) < 200 else path[:100] + "..."
    return f"{shown}: {error.strerror or error}; check the path, its permissions and the free disk space"


def _discard_output(only_if_broken: bool = False) -> None:
    """Drop buffered output that cannot be written (`| head`, full disk), so that Python does not fail at exit."""
    if only_if_broken:
        try:
            sys.stdout.flush()
            return
        except (OSError, ValueError):
            pass
    with suppress(OSError, ValueError):  # a replaced stdout may have no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
