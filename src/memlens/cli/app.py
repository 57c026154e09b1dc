"""The verbs of `memlens`, and the one place where a command line is run and its errors become exit codes.

    0 done    2 wrong input    130 interrupted    143 terminated    1 a bug, the only case that shows a traceback

A verb is a function of the same name in the module that VERBS names; its docstring is its help.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from memlens import __version__
from memlens.cli.options import Group
from memlens.errors import MemlensError, SettingError
from memlens.settings import option_name
from memlens.signals import Interrupted, interruptible
from memlens.text import visible

DONE, BUG, WRONG_INPUT = 0, 1, 2
_LARGEST = 10**15  # of a whole number on the command line
_WHOLE = re.compile("-?[0-9]{1,18}")
_NARROWEST, _WIDEST = 10, 1000  # columns of a terminal


def say(message: str) -> None:
    """One line to stderr, whatever the message holds."""
    with suppress(OSError, ValueError):  # nobody can be told where stderr is closed or full
        print(f"memlens: {visible(message)}", file=sys.stderr, flush=True)


def interrupted(error: BaseException) -> int:
    say(str(error) or "interrupted; run the same command again to continue")
    return error.code if isinstance(error, Interrupted) else Interrupted.code


def guarded(verb: Callable[..., None]) -> Callable[..., int]:
    """The verb as a function that gives an exit code and raises nothing."""

    @wraps(verb)
    def run(*arguments: Any, **named: Any) -> int:
        try:
            for name, value in named.items():
                _refuse_endless(name, value)
            with interruptible():
                verb(*arguments, **named)
            sys.stdout.flush()
        except MemlensError as error:
            say(str(error))
            return WRONG_INPUT
        except KeyboardInterrupt as error:
            return interrupted(error)
        except BrokenPipeError:
            _drop_output()
        except OSError as error:
            say(_about_file(error))
            _drop_output(only_if_broken=True)
            return WRONG_INPUT
        except MemoryError:
            say("there is not enough memory for this; try a smaller --top, --batch-tokens or --unit")
            return WRONG_INPUT
        except Exception:  # the last stop: whatever arrives here is ours to mend
            traceback.print_exc()
            say("this is a bug in memlens, not in your input; please report it with the lines above")
            return BUG
        return DONE

    return run


def _refuse_endless(name: str, value: Any) -> None:
    """Refuse a number of twenty digits, with which no part computes; narrower limits are each part's own."""
    for word in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(word, int) and abs(word) > _LARGEST:
            raise SettingError(f"{option_name(name)} is {word}; it must be between -{_LARGEST:,} and {_LARGEST:,}")


def _about_file(error: OSError) -> str:
    """The system's message about a path, for errors that no other part of memlens explains."""
    where = str(error.filename or "a file")
    shown = where if len(where) < 200 else where[:100] + "..."
    return f"{shown}: {error.strerror or error}; check the path, its permissions and the space on the disk"


def _drop_output(only_if_broken: bool = False) -> None:
    """The reader (`| head`) has enough, or the disk is full: what is still buffered must not fail when Python ends."""
    if only_if_broken:
        try:
            sys.stdout.flush()
            return
        except (OSError, ValueError):
            pass
    with suppress(OSError, ValueError):  # a replaced stdout may have no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


VERBS = {  # verb -> module of memlens.cli
    "demo": "analyze",
    "analyze": "analyze",
    "info": "info",
    "scan": "scan",
    "merge": "scan",
    "check": "index",
    "repair": "index",
    "values": "stages",
    "patterns": "stages",
    "roles": "stages",
    "experiment": "experiment",
    "report": "index",
    "show": "lookup",
    "search": "lookup",
    "export": "index",
    "trace": "trace",
    "probe": "probe",
    "annotate": "annotate",
    "collect": "collect",
    "compare": "compare",
    "serve": "index",
    "site": "index",
    "push": "index",
    "pull": "index",
}

# The base of everything typer says about a wrong command line; typer exports this one member of the family.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


@dataclass(frozen=True)
class _Coercion:
    """A word of the command line as a value: typer would import pydantic, which takes longer than most look-ups."""

    slow: Callable[[], Any]  # typer's own

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Pass missing values and text through, parse whole numbers, and leave everything else to typer."""
        kind, is_ranged = param.type_descriptor.annotation, param.type_descriptor.is_ranged
        several = param.multiple or param.nargs != 1
        if value is None:
            return () if several else None
        if kind in (str, int, float) and type(value) is kind and not several:
            return value
        if kind == list[str] and several and type(value) in (list, tuple) and all(type(word) is str for word in value):
            return list(value)
        if kind is int and type(value) is str and not (several or is_ranged) and _WHOLE.fullmatch(value):
            return int(value)
        return self.slow().coerce(value, param=param, ctx=ctx)


class _PlainParameters:
    """Parameters that are read without pydantic, and help without Python's types: an argument has its name, a switch
    takes no value."""

    def get_params(self, context: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in parameters:
            if hasattr(parameter, "get_runtime_param"):
                parameter.get_runtime_param = partial(_Coercion, parameter.get_runtime_param)
            if parameter.param_type_name == "argument" or getattr(parameter, "is_flag", False):
                parameter.display_type_rich = lambda ctx: None
            elif parameter.metavar is None:
                parameter.display_type_rich = lambda ctx: "VALUE"
        return parameters


class _Command(_PlainParameters, TyperCommand):
    pass


class _Group(_PlainParameters, TyperGroup):
    pass


def make_app(only: str | None = None) -> typer.Typer:
    """All verbs, or one alone: reading the options of all of them costs more than a look-up."""
    app = typer.Typer(
        name="memlens",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True, cls=_Group)(_memlens)
    for name, module in VERBS.items() if only is None else [(only, VERBS[only])]:
        _register(app, name, getattr(import_module(f"memlens.cli.{module}"), name))
    return app


def _register(app: typer.Typer, name: str, verb: Callable[..., None] | Group) -> None:
    """Add a verb, and its subcommands if it has any."""
    if not isinstance(verb, Group):
        app.command(name, cls=_Command)(guarded(verb))
        return
    group = typer.Typer(name=name)
    group.callback(invoke_without_command=not verb.needs_command, cls=_Group)(guarded(verb.callback))
    for subcommand, function in verb.commands.items():
        _register(group, subcommand, function)
    app.add_typer(group)


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
        if "\0" in argument:
            say(f"'{argument}' holds a NUL character, which neither a name nor a text can; leave it out")
            return WRONG_INPUT
    columns = os.environ.get("COLUMNS", "")
    if columns and not (columns.isascii() and columns.isdecimal() and _NARROWEST <= int(columns[:9]) <= _WIDEST):
        del os.environ["COLUMNS"]  # no terminal has that width; with 0 nothing would be printed
    try:
        with interruptible():
            command = typer.main.get_command(make_app(given[0] if given and given[0] in VERBS else None))
            with command.make_context("memlens", given) as context:  # its main() would make a code of an interrupt
                result = command.invoke(context)
    except typer.Exit as error:
        return error.exit_code
    except _UsageError as error:
        say(f"{_sentence(error)}; see `{error.ctx.command_path if error.ctx else 'memlens'} --help`")
        return WRONG_INPUT
    except (typer.Abort, KeyboardInterrupt) as error:
        return interrupted(error)
    except BrokenPipeError:
        _drop_output()
        return DONE
    except OSError as error:  # the help, which no verb prints
        say(_about_file(error))
        _drop_output(only_if_broken=True)
        return WRONG_INPUT
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

    A memory is written L3N51: layer 3, memory 51, both counted from 0.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
