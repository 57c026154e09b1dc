"""Help texts: verbs listed by group, and the options of a verb listed by heading."""

import inspect
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memlens.errors import SettingError
from memlens.settings import RUN, SAMPLES, SCALE, option_name

OUTPUT = "Output"  # heading of the last group of options in every help text
_LARGEST_NUMBER = 10**15  # largest value of an integer option


class Option(click.Option):
    """An option that the help text lists under the heading `panel`."""

    def __init__(self, *arguments: Any, panel: str | None = None, **attributes: Any) -> None:
        if not attributes.get("required") and not attributes.get("multiple"):
            attributes.setdefault("default", None)
        super().__init__(*arguments, **attributes)
        self.panel = panel or "Options"


class VerbCommand(click.Command):
    """A verb."""

    def invoke(self, context: click.Context) -> Any:
        for name, value in context.params.items():
            _check_number(name, value)
        return super().invoke(context)

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        arguments = [one for one in self.get_params(context) if isinstance(one, click.Argument)]
        groups: dict[str, list[tuple[str, str]]] = {}
        if arguments:
            groups["Arguments"] = [(_argument_name(one), one.help or "") for one in arguments]
        for one in self.params:
            if isinstance(one, Option):
                groups.setdefault(one.panel, []).append((_option_names(one), _option_help(one)))
        groups.setdefault(OUTPUT, []).append(("-h, --help", "Print this help."))
        for last in (SAMPLES, RUN, SCALE, OUTPUT):  # the most used options come first
            if last in groups:
                groups[last] = groups.pop(last)
        usage = " ".join([context.command_path, *map(_argument_usage, arguments), "[OPTIONS]"])
        formatter.write(_render_help(usage, self.help or "", groups.items()))


def _check_number(name: str, value: Any) -> None:
    """Raise SettingError for an integer that is too large for any option. Settings classes check narrower limits."""
    for number in value if isinstance(value, tuple) else [value]:
        if isinstance(number, int) and abs(number) > _LARGEST_NUMBER:
            limit = f"{_LARGEST_NUMBER:,}"
            raise SettingError(f"{option_name(name)} is {number}; it must be between -{limit} and {limit}")


class VerbGroup(click.Group):
    """A verb with subcommands, which its help text lists."""

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        arguments = [one for one in self.get_params(context) if isinstance(one, click.Argument)]
        usage = " ".join([context.command_path, *map(_argument_usage, arguments), "COMMAND [OPTIONS]"])
        groups = [("Arguments", [(_argument_name(one), one.help or "") for one in arguments])]
        groups.append(("Commands", [(name, _first_sentence(one)) for name, one in self.commands.items()]))
        formatter.write(_render_help(usage, self.help or "", [group for group in groups if group[1]], width=12))


def format_overview(context: click.Context, groups: Iterable[tuple[str, list[click.Command]]]) -> str:
    """Return the help text of the whole program.

    Args:
        context: The context of the program.
        groups: (heading, verbs) of every group.
    """
    listed = [(heading, [(one.name or "", _first_sentence(one)) for one in verbs]) for heading, verbs in groups]
    listed.append(
        (
            "Options",
            [
                ("--completion bash|zsh|fish", "Print a script that makes the shell complete commands and options."),
                ("--version", "Print the version."),
                ("-h, --help", "Print this help."),
            ],
        )
    )
    program = context.command_path
    text = f"{inspect.cleandoc(context.command.help or '')}\n\n`{program} COMMAND --help` explains a command."
    return _render_help(f"{program} COMMAND [ARGUMENTS] [OPTIONS]", text, listed, width=12)


def _first_sentence(command: click.Command) -> str:
    return (command.help or "").partition("\n\n")[0].replace("\n", " ")


def _argument_name(argument: click.Argument) -> str:
    return (argument.metavar or argument.name) + ("..." if argument.nargs == -1 else "")


def _argument_usage(argument: click.Argument) -> str:
    return _argument_name(argument) if argument.required else f"[{_argument_name(argument)}]"


def _option_names(option: Option) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names += " / " + ", ".join(option.secondary_opts)
    return names if option.is_flag else f"{names} {option.metavar or 'VALUE'}"


def _option_help(option: Option) -> str:
    if option.required:
        return f"{option.help} Required."
    if option.is_flag or option.multiple or option.default in (None, ""):
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
        console.print(Text.assemble(("Usage: ", "bold"), usage))
        console.print()
        for paragraph in inspect.cleandoc(text).split("\n\n"):
            console.print(Text(paragraph.replace("\n", " ")))
            console.print()
        for heading, rows in groups:
            console.print(Text(heading, "bold"))
            for names, help_text in rows:
                add_row(names, help_text)
            console.print()
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
