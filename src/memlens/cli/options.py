"""Options of the command line: those that several verbs share, and those made from the settings of a stage."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer

from memlens.cli.screen import Screen
from memlens.errors import SettingError
from memlens.settings import RUN, RunSettings, is_hub_source, option_name

Verb = Callable[..., None]


def setting(settings: type, name: str, option: str | None = None) -> Any:
    """The option of a field of settings; by another name where the verb has its own use for this one."""
    (field,) = [known for known in fields(settings) if known.name == name]
    known = field.metadata
    otherwise = known["otherwise"] or (str(field.default) if field.default is not None else "")
    return typer.Option(
        option or option_name(name),
        metavar=known["metavar"] or None,
        help=f"{known['help']} Default: {otherwise}." if otherwise else known["help"],
        rich_help_panel=known["panel"],
        show_default=False,
    )


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face id, a folder, a .gguf file, or bundled.")]
Corpus = Annotated[
    list[str],
    typer.Argument(metavar="CORPUS", help="Files or folders of .txt, .jsonl, .parquet; hf:NAME; or bundled."),
]
IndexFolder = Annotated[
    str, typer.Argument(metavar="INDEX", help="The folder that `memlens scan -o` has made, or hf:OWNER/NAME.")
]
Out = Annotated[str, typer.Option("--out", "-o", metavar="INDEX", help="The folder to write the index to.")]
Resume = Annotated[
    bool,
    typer.Option("--resume/--fresh", help="Continue what is in the folder, or replace it.", rich_help_panel=RUN),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a file that memlens did not make; never one of an index or a model.")
]

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but results and errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more about what is done, on stderr.")]

Device = Annotated[
    str, typer.Option(metavar="NAME", help="Where the model runs: auto, cpu, cuda, mps.", rich_help_panel=RUN)
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Numbers of the model: float32, bfloat16, float16, float64.", rich_help_panel=RUN
    ),
]
Threads = Annotated[int | None, setting(RunSettings, "threads")]
ModelNow = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="Where the model is now. Default: where it was scanned.", rich_help_panel=RUN
    ),
]
Validation = Annotated[
    list[str] | None,
    typer.Option(metavar="CORPUS", help="Text to draw prefixes from, repeatable. Default: the scanned corpus."),
]


def refuse_unused(given: Mapping[str, Any], why: str) -> None:
    """Refuse an option that was given and would change nothing."""
    for option, value in given.items():
        if value is not None and value is not False:
            raise SettingError(f"{option} {why}; leave it out")


def refuse_unused_column(options: Mapping[str, Any], sources: Iterable[str]) -> None:
    """Refuse --column where no source has columns."""
    from memlens.corpus.readers import list_files

    def has_columns(source: str) -> bool:
        return is_hub_source(source) or any(file.kind != ".txt" for file in list_files(source))

    if options.get("column") and not any(map(has_columns, sources)):
        refuse_unused({"--column": True}, "names a field of .jsonl, .parquet and hf:, but the text has none of these")


def with_screen(*, json: bool) -> Callable[[Verb], Verb]:
    """Give a verb, in the place of its `screen`, the options of every verb: --json where it has a result, -q and -v."""
    switches = {**({"as_json": Json} if json else {}), "quiet": Quiet, "verbose": Verbose}

    def decorate(verb: Verb) -> Verb:
        parameters = [
            known for name, known in inspect.signature(verb, eval_str=True).parameters.items() if name != "screen"
        ]
        further = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
            for name, annotation in switches.items()
        ]
        place = len(parameters) - bool(parameters and parameters[-1].kind == inspect.Parameter.VAR_KEYWORD)

        @wraps(verb)
        def run(as_json: bool = False, quiet: bool = False, verbose: bool = False, **given: Any) -> None:
            verb(Screen(as_json, quiet, verbose), **given)

        vars(run)["__signature__"] = inspect.Signature([*parameters[:place], *further, *parameters[place:]])
        return run

    return decorate


def with_settings(*settings: type) -> Callable[[Verb], Verb]:
    """Give a verb, in the place of its `**options`, the fields of settings that have a help.

    Where two settings have a field of one name, the later one describes it. The verb receives those options that were
    given on the command line; the settings have the defaults of the others.
    """

    def decorate(verb: Verb) -> Verb:
        known = inspect.signature(verb, eval_str=True).parameters.values()
        parameters = [parameter for parameter in known if parameter.kind != parameter.VAR_KEYWORD]
        options = {
            field.name: inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[_simple(get_type_hints(kind)[field.name]) | None, setting(kind, field.name)],
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
        signature = inspect.Signature(
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in in_order]
        )
        vars(run)["__signature__"] = signature
        return run

    return decorate


def _simple(hint: Any) -> Any:
    """The type of one word on the command line; what is none of the first three is written as text (--layers 0-5)."""
    return next((kind for kind in (int, float, str) if kind in (hint, *get_args(hint))), str)


@dataclass(frozen=True)
class Group:
    """A verb with subcommands. The callback reads the arguments before the subcommand, as in `annotate INDEX label`."""

    callback: Verb
    commands: Mapping[str, "Verb | Group"]
    needs_command: bool = True  # else the callback runs alone if no subcommand is named
