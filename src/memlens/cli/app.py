"""The verbs of `memlens`, their help, and the exit codes of errors.

    0 success    2 invalid input    130 interrupted    143 terminated    1 a bug (the only case with a traceback)

A verb is a function of the same name in the module given in GROUPS. Its docstring is its help text.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from memlens import __version__
from memlens.cli.options import Group
from memlens.errors import MemlensError, RayAgentError, SettingError
from memlens.settings import option_name
from memlens.signals import Interrupted, interruptible
from memlens.text import visible

DONE, BUG, WRONG_INPUT = 0, 1, 2
_LARGEST_NUMBER = 10**15  # largest value of an integer option
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


def print_error(message: str) -> None:
    """Print one line on stderr."""
    with suppress(OSError, ValueError):  # stderr may be closed or its disk full
        print(f"memlens: {visible(message)}", file=sys.stderr, flush=True)


def interrupted(error: BaseException) -> int:
    """Print the reason for the interruption. Returns the exit code."""
    print_error(str(error) or "interrupted; run the same command again to resume")
    return error.code if isinstance(error, Interrupted) else Interrupted.code


def guarded(verb: Callable[..., None]) -> Callable[..., int]:
    """Wrap a verb in a function that returns an exit code and never raises."""

    @wraps(verb)
    def run(*arguments: Any, **named: Any) -> int:
        try:
            for name, value in named.items():
                _check_number(name, value)
            with interruptible():
                verb(*arguments, **named)
            sys.stdout.flush()
        except RayAgentError as error:
            print_error(str(error))
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(WRONG_INPUT)  # otherwise a thread of Ray could change the exit code to 1
        except MemlensError as error:
            print_error(str(error))
            return WRONG_INPUT
        except KeyboardInterrupt as error:
            return interrupted(error)
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

    return run


def _check_number(name: str, value: Any) -> None:
    """Raise SettingError for an integer beyond the range of all options. Settings check narrower limits."""
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(number, int) and abs(number) > _LARGEST_NUMBER:
            limit = f"{_LARGEST_NUMBER:,}"
            raise SettingError(f"{option_name(name)} is {number}; it must be between -{limit} and {limit}")


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


# The base class of all usage errors; typer exports only this subclass.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


class _Command(TyperCommand):
    """A verb whose help lists options by group, without Python types."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        parameters: list[Any] = [
            parameter for parameter in self.get_params(ctx) if not getattr(parameter, "hidden", False)
        ]
        arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
        groups: dict[str, list[tuple[str, str]]] = {}
        if arguments:
            groups["Arguments"] = [(_argument_name(argument), argument.help or "") for argument in arguments]
        for option in parameters:
            if option.param_type_name == "option":
                group = "Output" if option.name == "help" else getattr(option, "rich_help_panel", None) or "Options"
                groups.setdefault(group, []).append((_option_names(option), _option_help(option)))
        if "Output" in groups:
            groups["Output"] = groups.pop("Output")  # move to the end
        usage = " ".join([ctx.command_path, *map(_argument_usage, arguments), "[OPTIONS]"])
        formatter.write(_render_help(usage, self.help or "", groups.items()))


class _Group(TyperGroup):
    """The main command, whose help lists all verbs by group."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        groups = []
        for heading, verbs in GROUPS.items():
            commands = {verb: self.commands[verb] for verb in verbs if verb in self.commands}
            groups.append((heading, [(verb, _first_sentence(command)) for verb, command in commands.items()]))
        groups.append(("Options", [("--version", "Print the version."), ("-h, --help", "Print this help.")]))
        usage = f"{ctx.command_path} COMMAND [ARGUMENTS] [OPTIONS]"
        help_text = f"{self.help}\n\n`{ctx.command_path} COMMAND --help` explains a command."
        formatter.write(_render_help(usage, help_text, groups, width=12))


class _Subgroup(TyperGroup):
    """A verb with subcommands, which its help lists."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        arguments: list[Any] = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        usage = " ".join([ctx.command_path, *map(_argument_usage, arguments), "COMMAND [OPTIONS]"])
        groups = [("Arguments", [(_argument_name(argument), argument.help or "") for argument in arguments])]
        groups.append(("Commands", [(name, _first_sentence(one)) for name, one in self.commands.items()]))
        formatter.write(_render_help(usage, self.help or "", [group for group in groups if group[1]], width=12))


def _first_sentence(command: Any) -> str:
    return (command.help or "").partition("\n\n")[0].replace("\n", " ")


def _argument_name(argument: Any) -> str:
    return argument.metavar + ("..." if argument.nargs == -1 else "")


def _argument_usage(argument: Any) -> str:
    return _argument_name(argument) if argument.required else f"[{_argument_name(argument)}]"


def _option_names(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names += " / " + ", ".join(option.secondary_opts)
    return names if option.is_flag else f"{names} {option.metavar or 'VALUE'}"


def _option_help(option: Any) -> str:
    if option.name == "help":
        return "Print this help."
    if option.required:
        return f"{option.help} Required."
    if option.is_flag or not option.show_default or option.default in (None, ""):
        return option.help or ""
    return f"{option.help} Default: {option.default}."


def _render_help(usage: str, text: str, groups: Iterable[tuple[str, list[tuple[str, str]]]], width: int = 24) -> str:
    """Return the help text. Names longer than `width` are on a separate line."""
    console = Console(highlight=False, markup=False, emoji=False)

    def add_row(names: str, help_text: str) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=width)
        table.add_column()
        is_long = Text(names).cell_len > width - 2
        if is_long:
            console.print(Text(f"  {names}", "cyan"), soft_wrap=True)
        table.add_row(Text("" if is_long else f"  {names}", "cyan"), Text(help_text))
        console.print(table)

    with console.capture() as captured:
        # typer puts braces around arguments that precede a subcommand
        console.print(Text.assemble(("Usage: ", "bold"), usage.replace("{", "").replace("}", "")))
        console.print()
        for paragraph in text.split("\n\n"):
            console.print(Text(paragraph.replace("\n", " ")))
            console.print()
        for heading, rows in groups:
            console.print(Text(heading, "bold"))
            for names, help_text in rows:
                add_row(names, help_text)
            console.print()
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def make_app(only: str | None = None) -> typer.Typer:
    """Return the app with all verbs, or with one, because building all options takes longer than a lookup."""
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
    group.callback(invoke_without_command=not verb.needs_command, cls=_Subgroup)(guarded(verb.callback))
    for subcommand, function in verb.commands.items():
        _register(group, subcommand, function)
    app.add_typer(group)


def run(arguments: Sequence[str] | None) -> int:
    """Parse and run a command line. Returns the exit code, also for invalid input."""
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
    try:
        with interruptible():
            command = typer.main.get_command(make_app(words[0] if words and words[0] in VERBS else None))
            with command.make_context("memlens", words) as context:  # command.main() would handle interrupts itself
                result = command.invoke(context)
    except typer.Exit as error:
        return error.exit_code
    except _UsageError as error:
        message = str(error.format_message()).strip().rstrip(".")
        program = error.ctx.command_path if error.ctx else "memlens"
        print_error(f"{message[:1].lower()}{message[1:]}; see `{program} --help`")
        return WRONG_INPUT
    except (typer.Abort, KeyboardInterrupt) as error:
        return interrupted(error)
    except BrokenPipeError:
        _discard_output()
        return DONE
    except OSError as error:  # raised while printing help
        print_error(_describe_os_error(error))
        _discard_output(only_if_broken=True)
        return WRONG_INPUT
    return result if isinstance(result, int) else DONE


def _print_version(requested: bool) -> None:
    if requested:
        print(f"memlens {__version__}")
        raise typer.Exit


def _memlens(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Analyze the feed-forward layers of a language model as key-value memories.

    L3N51 is memory 51 of layer 3. Both count from 0.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
