"""`memlens annotate`: people's pattern labels with the paper's protocol, and verdicts on the last layer's changes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memlens
from memlens.cli.options import Force, IndexFolder, refuse_unused, with_screen
from memlens.cli.screen import Screen, open_output
from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.settings import MOST_SEED, option_name
from memlens.text import cut_left, visible

if TYPE_CHECKING:
    from memlens.annotations.answers import LabelledPattern, LastLayerChange
    from memlens.annotations.store import Annotations

_STUDY, _LABEL, _FILES = "sample", "label, undo, finish, status", "export, import, backup, restore"
_VERDICTS = "verdicts list|judge|undo|status|export|import"
_SAFE = ("backup", "restore", "recover")
_ACTIONS = (
    "sample",
    "status",
    "label",
    "undo",
    "finish",
    "export",
    "import",
    "agreement",
    "compare",
    "verdicts",
    *_SAFE,
)
_VERDICT_ACTIONS = ("list", "judge", "undo", "status", "export", "import")
# What belongs to an action beside --json, --quiet and --verbose; anything else would be ignored, and is refused.
_OPTIONS = {
    "sample": {"per_layer", "top", "seed"},
    "label": {"annotator", "memory", "pattern"},
    "undo": {"annotator", "memory"},
    "finish": {"annotator"},
    "export": {"annotator", "format_", "file", "force"},
    "import": {"format_", "file"},
    "backup": {"what", "file", "force"},
    "restore": {"what", "file"},
    "verdicts list": {"annotator"},
    "verdicts judge": {"annotator", "example", "verdict"},
    "verdicts undo": {"annotator", "example"},
    "verdicts export": {"annotator", "format_", "file", "force"},
    "verdicts import": {"format_", "file"},
}
_ALWAYS = {"index", "action", "as_json", "quiet", "verbose"}
_CHANGES = "experiments/last-layer"
_TEXT_TAKEN = 62  # columns beside a prefix


_What = Annotated[
    str | None,
    typer.Argument(
        metavar="[WHAT]",
        help="After verdicts: what to do with them, by default list; after backup, restore: the file.",
    ),
]
_PerLayer = Annotated[int, typer.Option(metavar="K", help="Memories of each layer to draw.", rich_help_panel=_STUDY)]
_Top = Annotated[int, typer.Option(metavar="N", help="Triggers to show of each.", rich_help_panel=_STUDY)]
_Seed = Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the draw.", rich_help_panel=_STUDY)]
_Annotator = Annotated[str | None, typer.Option(metavar="NAME", help="Who labels.", rich_help_panel=_LABEL)]
_Memory = Annotated[
    str | None, typer.Option(metavar="MEMORY", help="Which memory, like L3N51.", rich_help_panel=_LABEL)
]
_Pattern = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND:RANKS:TEXT",
        help='A pattern, like "shallow:0,3,7:ends with press"; may be repeated; none at all says there is none.',
        rich_help_panel=_LABEL,
    ),
]
_Example = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which change, as listed.", rich_help_panel=_VERDICTS)
]
_Verdict = Annotated[
    str | None,
    typer.Option(metavar="related|distant", help="How the two words stand.", rich_help_panel=_VERDICTS),
]
_Format = Annotated[
    str | None,
    typer.Option("--format", metavar="json|csv", help="Default: by the file's name.", rich_help_panel=_FILES),
]
_File = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Read or written. Default: stdin, stdout.", rich_help_panel=_FILES),
]


@with_screen(json=True)
def annotate(
    screen: Screen,
    context: typer.Context,
    index: IndexFolder,
    action: Annotated[str, typer.Argument(metavar="|".join(_ACTIONS), help="What to do.")],
    what: _What = None,
    per_layer: _PerLayer = 10,
    top: _Top = 25,
    seed: _Seed = 0,
    annotator: _Annotator = None,
    memory: _Memory = None,
    pattern: _Pattern = None,
    example: _Example = None,
    verdict: _Verdict = None,
    format_: _Format = None,
    file: _File = None,
    force: Force = False,
) -> None:
    """Draw a sample, label memories, exchange labels, measure agreement; judge changes of the last layer."""
    if action not in _ACTIONS:
        raise SettingError(f"'{action}' is not something to do with annotations; choose one of: {', '.join(_ACTIONS)}")
    from memlens.annotations.store import Annotations
    from memlens.index.history import LABELS, VERDICTS

    opened = memlens.Index(index)
    task, doing = LABELS, action
    if action == "verdicts":
        task, doing = VERDICTS, what or "list"
        if doing not in _VERDICT_ACTIONS:
            known = ", ".join(_VERDICT_ACTIONS)
            raise SettingError(f"'{doing}' is not something to do with verdicts; choose one of: {known}")
    _refuse_others(context, action, doing)
    if action in _SAFE:
        if what is not None and file is not None:
            raise SettingError(f"two files are named, '{what}' and --file '{file}'; name one")
        _keep_safe(screen, opened, action, what or file, force)
        return
    if doing in ("status", "agreement", "compare", "list"):
        _report(screen, opened, task, doing, annotator)
        return
    if doing == "judge":
        _changes(opened)  # refused before a file is made
    with Annotations(opened) as notes:
        if doing == "sample":
            _draw(screen, notes, per_layer, top, seed)
        elif doing == "export":
            from memlens.annotations.files import export_text

            text = export_text(notes, task, _format(format_, file), annotator)
            _write(screen, text, file, force, task)
        elif doing == "import":
            _import(screen, notes, task, format_, file)
        elif doing == "undo":
            subject = _require(memory, "--memory") if task == LABELS else _require(example, "--example")
            _undo(screen, notes, task, _require(annotator, "--annotator"), subject)
        elif doing == "judge":
            _judge(screen, notes, _require(annotator, "--annotator"), _require(example, "--example"), verdict)
        elif doing == "finish":
            notes.finish(_require(annotator, "--annotator"))
            screen.note(f"{annotator} has finished")
        else:
            _label(screen, notes, _require(annotator, "--annotator"), _require(memory, "--memory"), pattern or [])


def _as_option(parameter: str) -> str:
    """The option of the command line that a parameter stands for."""
    return option_name(parameter.rstrip("_"))


def _refuse_others(context: typer.Context, action: str, doing: str) -> None:
    """Refuse options that were given and belong to other actions."""
    is_verdicts = action == "verdicts"
    name = f"verdicts {doing}" if is_verdicts else action
    known = _ALWAYS | _OPTIONS.get(name, set()) | ({"what"} if is_verdicts else set())
    for option in context.params:
        source = context.get_parameter_source(option)
        if option not in known and source is not None and source.name == "COMMANDLINE":
            if option == "what":
                raise SettingError(f"'{context.params[option]}' says nothing to `annotate INDEX {name}`; leave it out")
            uses = ", ".join(sorted(map(_as_option, known - _ALWAYS - {"what"}))) or "no options"
            raise SettingError(f"{_as_option(option)} is not an option of `annotate INDEX {name}`, which takes {uses}")


def _report(screen: Screen, index: memlens.Index, task: str, doing: str, annotator: str | None) -> None:
    """Print progress, agreement, comparison or the changes to judge, as a table or as JSON."""
    from memlens.annotations import study
    from memlens.index.history import VERDICTS

    if doing == "agreement":
        rows, none = [asdict(pair) for pair in study.agreement(index)], ""
    elif doing == "compare":
        rows, none = [asdict(row) for row in study.compare_with_people(index)], ""
    elif doing == "list":
        rows, none = _listing(screen, index, annotator), "the last layer changes nothing here"
    elif task == VERDICTS:
        rows, none = _verdict_progress(index), "nobody has judged anything"
    else:
        rows, none = [asdict(person) for person in study.read_study(index).people], "nobody has labelled anything"
    if screen.as_json:
        screen.json(rows)
    elif rows:
        screen.table([name.replace("_", " ") for name in rows[0]], [[*row.values()] for row in rows])
    else:
        screen.note(none)


def _draw(screen: Screen, notes: Annotations, per_layer: int, top: int, seed: int) -> None:
    from memlens.annotations.study import draw_sample

    sample = draw_sample(notes.index, per_layer, top, seed)
    notes.set_sample(sample)
    if screen.as_json:
        screen.json({"memories": sample.memories})
        return
    for name in sample.memories:
        screen.result(str(name))


def _label(screen: Screen, notes: Annotations, annotator: str, memory: str, patterns: list[str]) -> None:
    from memlens.annotations.answers import Label

    label = Label(annotator, notes.index.check(memory), tuple(_parse(text) for text in patterns))
    notes.save(label)
    screen.note(f"{memory}: {len(label.patterns)} patterns saved")


def _parse(text: str) -> LabelledPattern:
    from memlens.annotations.answers import LabelledPattern

    kind, _, rest = text.partition(":")
    ranks, _, description = rest.partition(":")
    try:
        prefixes = tuple(int(rank) for rank in ranks.replace(",", " ").split())
    except ValueError as error:
        raise SettingError(f"--pattern is '{text}'; write it like shallow:0,3,7:ends with press") from error
    return LabelledPattern(description.strip(), kind.strip(), prefixes)


def _changes(index: memlens.Index) -> dict[str, LastLayerChange]:
    """The changes to judge, by name."""
    from memlens.annotations.answers import LastLayerChange

    if "example" not in index.schema_names(_CHANGES):
        again = f"memlens experiment {index.folder} last-layer"
        raise IndexFolderError(f"the table '{_CHANGES}' of {index.folder} is of an older memlens; run `{again}` again")
    changes = [LastLayerChange.of(row) for row in index.sql(f"SELECT * FROM {{{_CHANGES}}}")]
    return {change.name: change for change in changes}


def _judge(screen: Screen, notes: Annotations, annotator: str, name: str, verdict: str | None) -> None:
    from memlens.annotations.answers import Verdict

    known = _changes(notes.index)
    if name not in known:
        raise UnknownName(f"there is no example '{name}'; list them with `memlens annotate INDEX verdicts`")
    notes.save(Verdict(annotator, known[name], _require(verdict, "--verdict")))
    screen.note(f"{name}: {verdict}; `memlens experiment {visible(str(notes.index.folder))} last-layer` counts it")


def _listing(screen: Screen, index: memlens.Index, annotator: str | None) -> list[dict[str, Any]]:
    """Every change with the person's own verdict; what others say would sway a judge."""
    from memlens.annotations.store import Annotations, has_annotations

    changes = _changes(index)
    verdicts: dict[str, str] = {}
    if annotator and has_annotations(index):
        with Annotations(index) as notes:
            verdicts = {verdict.subject: verdict.verdict for verdict in notes.verdicts(annotator)}
    room = max(screen.out.width - _TEXT_TAKEN, 16)
    return [
        {
            "example": name,
            "prefix": change.text if screen.as_json else cut_left(visible(change.text), room),
            "before": change.residual_text,
            "after": change.output_text,
            "verdict": verdicts.get(name),
        }
        for name, change in changes.items()
    ]


def _verdict_progress(index: memlens.Index) -> list[dict[str, Any]]:
    """The number of changes that each person has judged, without the verdicts themselves."""
    from memlens.annotations.store import Annotations, has_annotations
    from memlens.index.history import VERDICTS

    if not has_annotations(index):
        return []
    wanted = set(_changes(index)) if index.has(_CHANGES) else set()
    with Annotations(index) as notes:
        judged = {
            person: {verdict.subject for verdict in notes.verdicts(person)} for person in notes.annotators(VERDICTS)
        }
    return [
        {"annotator": person, "judged": len(names & wanted), "examples": len(wanted), "all": len(names)}
        for person, names in judged.items()
    ]


def _undo(screen: Screen, notes: Annotations, task: str, annotator: str, subject: str) -> None:
    from memlens.annotations.answers import Label, Verdict

    before = notes.undo(task, annotator, subject)
    now = f"{len(before.patterns)} patterns" if isinstance(before, Label) else ""
    now = before.verdict if isinstance(before, Verdict) else now
    screen.note(f"{visible(subject)}: {now or f'no {task[:-1]}'} again")


def _write(screen: Screen, text: str, file: str | None, force: bool, what: str) -> None:
    """Write text to stdout, or to a file that is new or was exported before."""
    from memlens.annotations.files import is_export

    if file is None:
        refuse_unused({"--force": force}, "is for --file, which is not there")
    with open_output(file, "--file", is_export, force=force) as handle:
        handle.write(text.encode())
    if file is not None:
        screen.note(f"{what} written to {visible(file)}")


def _keep_safe(screen: Screen, index: memlens.Index, action: str, file: str | None, force: bool) -> None:
    """Everything that people wrote: to a file, from a file, or out of a damaged annotations.sqlite."""
    from memlens.annotations.files import backup_text, read_export, restore_text
    from memlens.annotations.recover import recover
    from memlens.annotations.store import Annotations
    from memlens.index.format import ANNOTATIONS

    if action == "recover":
        done = recover(index.folder / ANNOTATIONS)
        if screen.as_json:
            screen.json({**asdict(done), "damaged": done.damaged and str(done.damaged)})
            return
        if done.damaged is None:
            did = f"{done.protected:,} of them have checksums now" if done.protected else "nothing was done"
            screen.result(f"{ANNOTATIONS} is whole: {done.kept:,} events; {did}")
            return
        damaged = visible(done.damaged.name)
        screen.result(f"{done.kept:,} events kept, {len(done.lost):,} lost; the damaged file is now {damaged}")
        for lost in done.lost:
            screen.result(f"lost: event {lost.event}, {visible(lost.about)}")
        return
    with Annotations(index) as notes:
        if action == "backup":
            _write(
                screen, backup_text(notes), _require(file, "the file, like `backup labels.json`,"), force, "everything"
            )
        else:
            screen.note(f"{restore_text(notes, read_export(file)):,} new events")


def _import(screen: Screen, notes: Annotations, task: str, format_: str | None, file: str | None) -> None:
    from memlens.annotations.files import import_text, read_export

    added = import_text(notes, task, read_export(file), _format(format_, file))
    screen.note(f"{added:,} new {task} or events")


def _format(wanted: str | None, file: str | None) -> str:
    """The wanted format, or that of the file's name."""
    if wanted is not None:
        return wanted
    return "csv" if file is not None and file.lower().endswith(".csv") else "json"


def _require(value: str | None, option: str) -> str:
    if value is None:
        raise SettingError(f"{option} is missing; say it")
    return value
