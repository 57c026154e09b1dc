"""Options of the command line: those that several verbs share, and those generated from settings dataclasses."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer

from memlens.cli.screen import Screen
from memlens.errors import SettingError
from memlens.settings import RUN, RunSettings, is_hub_source, option_name

Verb = Callable[..., None]
OUTPUT = "Output"  # title of the last group of options in every help text


@dataclass(frozen=True)
class Group:
    """A verb with subcommands. The callback receives the arguments before the subcommand (`annotate INDEX label`)."""

    callback: Verb
    commands: Mapping[str, "Verb | Group"]
    needs_command: bool = True  # if False, the callback also runs without a subcommand


def setting(settings: type, name: str, option: str | None = None) -> Any:
    """Return the option for a field of a settings class, under another name if `option` is given."""
    (field,) = [field for field in fields(settings) if field.name == name]
    metadata = field.metadata
    default = metadata["default_text"] or (
        "" if field.default is None or field.default is False else str(field.default)
    )
    return typer.Option(
        option or option_name(name),
        metavar=metadata["metavar"] or None,
        help=f"{metadata['help']} Default: {default}." if default else metadata["help"],
        rich_help_panel=metadata["panel"],
        show_default=False,
    )


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, .gguf file, or `bundled`.", show_default=False)
]
ModelOrIndex = Annotated[
    str, typer.Argument(metavar="MODEL|INDEX", help="A model, or an index (its model is loaded).", show_default=False)
]
Corpus = Annotated[
    list[str],
    typer.Argument(
        metavar="CORPUS",
        help="Files or folders of .txt, .jsonl or .parquet, hf:NAME, or `bundled`.",
        show_default=False,
    ),
]
IndexFolder = Annotated[
    str, typer.Argument(metavar="INDEX", help="Index folder, or hf:OWNER/NAME.", show_default=False)
]
Out = Annotated[str, typer.Option("--out", "-o", metavar="INDEX", help="Folder to write the index to.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--fresh", help="Resume the work in the folder, or replace it. Default: resume.", rich_help_panel=RUN
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace a file that memlens did not write, except files of an index or model."),
]

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.", rich_help_panel=OUTPUT)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print details on stderr.", rich_help_panel=OUTPUT)]

Device = Annotated[
    str, typer.Option(metavar="NAME", help="Device of the model: auto, cpu, cuda or mps.", rich_help_panel=RUN)
]
Dtype = Annotated[
    str,
    typer.Option(metavar="NAME", help="Weight dtype: float32, bfloat16, float16 or float64.", rich_help_panel=RUN),
]
IndexDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="Weight dtype. Default: float32, or the dtype of the scan if an index is given.",
        rich_help_panel=RUN,
    ),
]
Threads = Annotated[int | None, setting(RunSettings, "threads")]
ModelNow = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Current location of the model. Default: where it was scanned.",
        rich_help_panel=RUN,
    ),
]
Validation = Annotated[
    list[str] | None,
    typer.Option(metavar="CORPUS", help="Text to sample prefixes from (repeatable). Default: the scanned corpus."),
]


def token_option(panel: str | None = None) -> Any:
    """Return --token, the token that a trace or a circuit explains."""
    return typer.Option(
        metavar="TEXT", help="Token to explain. Default: the model's prediction.", rich_help_panel=panel
    )


def against_option(panel: str | None = None) -> Any:
    """Return --against, the token that --token is compared with."""
    return typer.Option(
        metavar="TEXT", help="Explain the logit difference between --token and this token.", rich_help_panel=panel
    )


def refuse_unused(given: Mapping[str, Any], why: str) -> None:
    """Raise SettingError for the first option that is given. `why` completes the sentence "--option ..."."""
    for option, value in given.items():
        if value is not None and value is not False and value != []:
            raise SettingError(f"{option} {why}; leave it out")


def refuse_others(mode: str, given: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Raise SettingError if an option is given that has no effect in this mode of a verb.

    Args:
        mode: The option that selects the mode, like "--related".
        given: Values by option; None, False and [] mean not given.
        allowed: Options that have an effect in this mode.
    """
    refuse_unused({name: value for name, value in given.items() if name not in allowed}, f"has no effect with {mode}")


def refuse_unused_column(options: Mapping[str, Any], sources: Iterable[str]) -> None:
    """Raise SettingError if --column is given but no source has columns."""
    from memlens.corpus.readers import list_files

    def has_columns(source: str) -> bool:
        return is_hub_source(source) or any(file.kind != ".txt" for file in list_files(source))

    if options.get("column") and not any(map(has_columns, sources)):
        refuse_unused({"--column": True}, "has no effect: no source is .jsonl, .parquet or hf:")


def with_screen(*, json: bool) -> Callable[[Verb], Verb]:
    """Replace a verb's `screen` parameter by the options --quiet, --verbose and, with `json`, --json."""
    switches = {**({"as_json": Json} if json else {}), "quiet": Quiet, "verbose": Verbose}

    def decorate(verb: Verb) -> Verb:
        parameters = [
            parameter
            for name, parameter in inspect.signature(verb, eval_str=True).parameters.items()
            if name != "screen"
        ]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
            for name, annotation in switches.items()
        ]
        place = len(parameters) - bool(parameters and parameters[-1].kind == inspect.Parameter.VAR_KEYWORD)

        @wraps(verb)
        def run(as_json: bool = False, quiet: bool = False, verbose: bool = False, **given: Any) -> None:
            verb(Screen(as_json, quiet, verbose), **given)

        vars(run)["__signature__"] = inspect.Signature([*parameters[:place], *added, *parameters[place:]])
        return run

    return decorate


def with_settings(*settings: type) -> Callable[[Verb], Verb]:
    """Replace a verb's `**options` by one option for each settings field that has a help text.

    If two classes have a field of the same name, the later class describes it. The verb receives only the options that
    are given on the command line, so the defaults stay in the settings classes.
    """

    def decorate(verb: Verb) -> Verb:
        signature = inspect.signature(verb, eval_str=True).parameters.values()
        parameters = [parameter for parameter in signature if parameter.kind != parameter.VAR_KEYWORD]
        options = {
            field.name: inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[_word_type(get_type_hints(kind)[field.name]) | None, setting(kind, field.name)],
            )
            for kind in settings
            for field in fields(kind)
            if field.metadata.get("help")
        }

        @wraps(verb)
        def run(**given: Any) -> None:
            verb(**{name: value for name, value in given.items() if name not in options or value is not None})

        required = [parameter for parameter in parameters if parameter.default is parameter.empty]
        others = [parameter for parameter in parameters if parameter.default is not parameter.empty]
        in_order = [*required, *options.values(), *others]
        vars(run)["__signature__"] = inspect.Signature(
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in in_order]
        )
        return run

    return decorate


def _word_type(hint: Any) -> Any:
    """Return the type of an option on the command line: bool (a flag), int, float or str."""
    return next((kind for kind in (bool, int, float, str) if kind in (hint, *get_args(hint))), str)
