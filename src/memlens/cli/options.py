"""Verbs and their options: how a function becomes a verb, options that several verbs share, and options generated from
settings dataclasses.

    @verb(json=True)
    @index_argument
    @option("--top", type=int, default=10, metavar="N", help="Number of memories to list.")
    def show(screen: Screen, index: str, top: int) -> None: ...
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import partial, wraps
from typing import Any, get_args, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from memlens.cli.help import OUTPUT, Option, VerbCommand
from memlens.cli.screen import Screen
from memlens.errors import SettingError
from memlens.settings import RUN, RunSettings, is_hub_source, option_name

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_FILES = {"CORPUS", "DIR", "FILE", "FILE.html", "INDEX", "LABELS", "MODEL", "OTHER", "SHARD"}  # completed as paths


def complete_word(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return completions of a value: paths, the choices in its metavar, or those of its type."""
    words = (getattr(parameter, "metavar", None) or "").split("|")
    if _FILES & set(words):
        return [CompletionItem(incomplete, type="file")]
    if len(words) > 1:
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]
    return parameter.type.shell_complete(context, parameter, incomplete)


argument = partial(click.argument, shell_complete=complete_word)


def option(*names: str, **attributes: Any) -> Decorator:
    """Add an option to a verb. `panel` is its heading in the help text."""
    return click.option(*names, cls=Option, shell_complete=complete_word, **attributes)


def flag(*names: str, **attributes: Any) -> Decorator:
    """Add an option without a value to a verb."""
    return option(*names, is_flag=True, default=False, **attributes)


class WholeNumber(click.ParamType):
    """The type of an option whose value is a whole number within limits."""

    name = "number"

    def __init__(self, minimum: int, maximum: int | None = None) -> None:
        self.minimum, self.maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"'{value}' is not a valid integer", param, ctx)
        if number < self.minimum:
            self.fail(f"{number} is less than {self.minimum}", param, ctx)
        if self.maximum is not None and number > self.maximum:
            self.fail(f"{number} is more than {self.maximum:,}", param, ctx)
        return number


def verb(
    name: str | None = None, *, json: bool, parent: click.Group | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function a verb with the options --quiet, --verbose and, with `json`, --json.

    The function receives a Screen and the values of its arguments and options. If the function has a parameter
    `**options`, it receives only the options that the user gave. All other options keep the defaults of the library.

    Args:
        name: Name of the verb. By default, the name of the function.
        json: True if the verb can print its result as JSON.
        parent: The verb of which this one is a subcommand.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        parameters = inspect.signature(function).parameters.values()
        named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}

        @wraps(function)
        def run(quiet: bool, verbose: bool, as_json: bool = False, **values: Any) -> None:
            context = click.get_current_context()
            received = {name: value for name, value in values.items() if name in named or _is_given(context, name)}
            function(Screen(as_json, quiet, verbose), **received)

        command = flag("--verbose", "-v", help="Print details on stderr.", panel=OUTPUT)(run)
        command = flag("--quiet", "-q", help="Print only results and errors.", panel=OUTPUT)(command)
        if json:
            command = flag("--json", "as_json", help="Print the result as JSON.", panel=OUTPUT)(command)
        make = click.command if parent is None else parent.command
        return make(name or function.__name__, cls=VerbCommand)(command)

    return decorate


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def settings_options(*settings: type) -> Decorator:
    """Add one option for each field of the settings classes that has a help text.

    If two classes have a field of the same name, the help text of the later class is used.
    """
    kinds = {field.name: kind for kind in settings for field in fields(kind) if field.metadata.get("help")}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, kind in reversed(kinds.items()):
            function = setting_option(kind, name)(function)
        return function

    return decorate


def setting_option(settings: type, name: str, option_as: str | None = None, panel: str | None = None) -> Decorator:
    """Add the option for one field of a settings class, under another name or heading if these are given."""
    (field,) = [field for field in fields(settings) if field.name == name]
    hint, metadata = get_type_hints(settings)[name], field.metadata
    default = metadata["default_text"] or (
        "" if field.default is None or field.default is False else str(field.default)
    )
    attributes: dict[str, Any] = {
        "help": f"{metadata['help']} Default: {default}." if default else metadata["help"],
        "panel": panel or metadata["panel"],
    }
    if bool in (hint, *get_args(hint)):
        return flag(option_as or option_name(name), **attributes)
    kind = next((kind for kind in (int, float) if kind in (hint, *get_args(hint))), str)
    return option(option_as or option_name(name), type=kind, metavar=metadata["metavar"] or None, **attributes)


model_argument = argument("model", metavar="MODEL", help="Hugging Face id, folder, .gguf file or `bundled`.")
model_or_index_argument = argument("model", metavar="MODEL|INDEX", help="Model, or index whose model is loaded.")
corpus_argument = argument(
    "corpus",
    nargs=-1,
    required=True,
    metavar="CORPUS",
    help="Text: .txt, .jsonl or .parquet files, folders, hf:NAME or `bundled`.",
)
index_argument = argument("index", metavar="INDEX", help="Index folder or hf:OWNER/NAME.")
out_option = option("--out", "-o", required=True, metavar="INDEX", help="Folder to write the index to.")
resume_option = option(
    "--resume/--fresh",
    default=True,
    panel=RUN,
    help="Resume the work in the folder, or replace it. Default: resume.",
)
states_option = option(
    "--states/--no-states",
    default=True,
    panel=RUN,
    help="Run the model once more on the triggers to find subjects in its final states. Default: yes.",
)
force_option = flag(
    "--force", help="Allow replacing files that memlens did not write. Files of an index or a model are never replaced."
)
device_option = option(
    "--device", default="auto", metavar="NAME", panel=RUN, help="Device of the model: auto, cpu, cuda or mps."
)
dtype_option = option(
    "--dtype",
    default="auto",
    metavar="NAME",
    panel=RUN,
    help="Data type of the weights: float32, bfloat16, float16, float64 or auto. auto uses the checkpoint's type on a "
    "GPU and float32 on a CPU.",
)
threads_option = setting_option(RunSettings, "threads")
validation_option = option(
    "--validation",
    multiple=True,
    metavar="CORPUS",
    help="Corpus from which experiments sample prefixes. Repeatable. Default: the scanned corpus.",
)


def location_option(name: str = "model") -> Decorator:
    """Add --model, the current location of an index's model. The verb receives the value as its parameter `name`."""
    return option(
        "--model",
        name,
        metavar="MODEL",
        panel=RUN,
        help="Folder or name of the scanned model. Default: as recorded in the index.",
    )


def open_model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --model, --device and --dtype.

    The verb receives their values as `place`, a dict of options for `open_model`.
    """

    @wraps(function)
    def run(*arguments: Any, **values: Any) -> None:
        place = {name: values.pop(name) for name in ("where", "device", "dtype") if name in values}
        function(*arguments, place=place, **values)

    add_dtype = option(
        "--dtype",
        metavar="NAME",
        panel=RUN,
        help="Data type of the weights. Default: as recorded in the index, or float32 without an index.",
    )
    return location_option("where")(device_option(add_dtype(run)))


def token_options(panel: str | None = None) -> Decorator:
    """Add --token and --against, which select the logit or the logit difference to explain."""
    add_token = option(
        "--token", metavar="TEXT", panel=panel, help="Token to explain. Default: the token that the model predicts."
    )
    add_against = option(
        "--against",
        metavar="TEXT",
        panel=panel,
        help="Explain a difference of logits: the logit of --token minus the logit of this token.",
    )
    return lambda function: add_token(add_against(function))


def given_options(panel: str | None = None) -> list[str]:
    """Return the options that the user gave to the current verb, except output options.

    Args:
        panel: Return only options under this heading of the help text.
    """
    context = click.get_current_context()
    given = []
    for parameter in context.command.params:
        if isinstance(parameter, Option) and parameter.panel != OUTPUT and _is_given(context, parameter.name):
            is_negated = parameter.secondary_opts and context.params[parameter.name] is False
            if panel in (None, parameter.panel):
                given.append((parameter.secondary_opts if is_negated else parameter.opts)[0])
    return given


def refuse_options(names: Iterable[str], why: str) -> None:
    """Raise SettingError if the user gave one of these options. `why` completes "--option ..."."""
    refused = set(names)
    for name in given_options():
        if name in refused:
            raise SettingError(f"{name} {why}; leave it out")


def refuse_others(mode: str, allowed: Collection[str]) -> None:
    """Raise SettingError if the user gave an option that has no effect in this mode of a verb.

    Args:
        mode: The option that selects the mode, like "--related".
        allowed: Options that have an effect in this mode.
    """
    refuse_options([name for name in given_options() if name not in allowed], f"has no effect with {mode}")


def refuse_unused_column(options: Mapping[str, Any], sources: Iterable[str]) -> None:
    """Raise SettingError if --column is given but no source has columns."""
    from memlens.corpus.readers import list_files

    def has_columns(source: str) -> bool:
        return is_hub_source(source) or any(file.kind != ".txt" for file in list_files(source))

    if options.get("column") and not any(map(has_columns, sources)):
        raise SettingError("--column has no effect: no source is .jsonl, .parquet or hf:; leave it out")
