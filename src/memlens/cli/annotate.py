"""`memlens annotate INDEX ...`: pattern labels with the paper's protocol, and verdicts on changes by the last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memlens
from memlens.cli.options import Force, Group, IndexFolder, Verb, refuse_unused, with_screen
from memlens.cli.screen import Screen, open_output
from memlens.errors import SettingError, UnknownName
from memlens.settings import MOST_SEED
from memlens.text import cut_left, visible

if TYPE_CHECKING:
    from memlens.annotations.records import Annotations, LabeledPattern, LastLayerChange

_CHANGES = "experiments/last-layer"
_OTHER_COLUMNS = 62  # total width of the columns next to a prefix

_Annotator = Annotated[str, typer.Option(metavar="NAME", help="Name of the annotator.")]
_Memory = Annotated[str, typer.Option(metavar="MEMORY", help="The memory, like L3N51.")]
_Example = Annotated[str, typer.Option(metavar="NAME", help="Name of the change, from `verdicts list`.")]
_Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="json|csv", help="File format. Default: csv if the file name ends in .csv, else json."
    ),
]


def _annotate(context: typer.Context, index: IndexFolder) -> None:
    """Label memories by the paper's protocol, exchange labels, measure agreement, and judge last-layer changes.

    Draw a sample, let each annotator label its memories and finish, then compare.
    """
    context.obj = index


def _verdicts(context: typer.Context) -> None:
    """Judge whether predictions before and after the last layer are related. Default: list."""
    if context.invoked_subcommand is None:
        _list_changes(Screen(), context, None)


def _open(screen: Screen, context: typer.Context) -> Annotations:
    """Open the annotations of the index and report lines that were skipped."""
    from memlens.annotations.records import Annotations

    annotations = Annotations(memlens.Index(context.obj))
    for problem in annotations.list_problems():
        screen.note(f"{visible(str(annotations.path))}: {visible(problem)}")
    return annotations


@with_screen(json=True)
def _sample(
    screen: Screen,
    context: typer.Context,
    per_layer: Annotated[int, typer.Option(metavar="K", help="Memories per layer.")] = 10,
    top: Annotated[int, typer.Option(metavar="N", help="Triggers to show per memory.")] = 25,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed.")] = 0,
) -> None:
    """Draw the memories to label and print their names."""
    from memlens.annotations.study import draw_sample

    annotations = _open(screen, context)
    sample = draw_sample(annotations.index, per_layer, top, seed)
    annotations.set_sample(sample)
    if screen.as_json:
        screen.json({"memories": sample.memories})
        return
    for name in sample.memories:
        screen.result(str(name))


@with_screen(json=False)
def _label(
    screen: Screen,
    context: typer.Context,
    annotator: _Annotator,
    memory: _Memory,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:RANKS:TEXT",
            help='A pattern like "shallow:0,3,7:ends with press" (repeatable). Default: the memory has no pattern.',
        ),
    ] = None,
) -> None:
    """Save an annotator's patterns for a memory."""
    from memlens.annotations.records import Label

    annotations = _open(screen, context)
    label = Label(annotator, annotations.index.check(memory), tuple(map(_parse_pattern, pattern or [])))
    annotations.save(label)
    screen.note(f"{memory}: {len(label.patterns)} patterns saved")


def _parse_pattern(text: str) -> LabeledPattern:
    from memlens.annotations.records import LabeledPattern

    kind, _, rest = text.partition(":")
    ranks, _, description = rest.partition(":")
    try:
        prefixes = tuple(int(rank) for rank in ranks.replace(",", " ").split())
    except ValueError as error:
        raise SettingError(f"--pattern is '{text}'; write it like shallow:0,3,7:ends with press") from error
    return LabeledPattern(description.strip(), kind.strip(), prefixes)


@with_screen(json=False)
def _undo(screen: Screen, context: typer.Context, annotator: _Annotator, memory: _Memory) -> None:
    """Undo an annotator's last label of a memory."""
    from memlens.annotations.records import LABELS, Label

    label = _open(screen, context).undo(LABELS, annotator, memory)
    screen.note(
        f"{visible(memory)}: {len(label.patterns)} patterns" if isinstance(label, Label) else f"{memory}: no label"
    )


@with_screen(json=False)
def _finish(screen: Screen, context: typer.Context, annotator: _Annotator) -> None:
    """Finish labeling. From now on, the labels count and can no longer change."""
    _open(screen, context).finish(annotator)
    screen.note(f"{annotator} has finished")


@with_screen(json=True)
def _status(screen: Screen, context: typer.Context) -> None:
    """Show each annotator's progress."""
    from memlens.annotations.study import read_study

    study = read_study(_open(screen, context))
    _print_rows(screen, [asdict(person) for person in study.people], empty="no memory has been labeled")


@with_screen(json=True)
def _agreement(screen: Screen, context: typer.Context) -> None:
    """Show the agreement of annotators who have finished."""
    from memlens.annotations.study import compute_agreement

    _print_rows(screen, [asdict(pair) for pair in compute_agreement(_open(screen, context))])


@with_screen(json=True)
def _compare(screen: Screen, context: typer.Context) -> None:
    """Show the agreement of automatic patterns with each annotator."""
    from memlens.annotations.study import compare_with_people

    _print_rows(screen, [asdict(row) for row in compare_with_people(_open(screen, context))])


def _print_rows(screen: Screen, rows: Sequence[Mapping[str, Any]], *, empty: str = "") -> None:
    """Print rows whose columns have the names of the JSON fields."""
    heads = [name.replace("_", " ") for name in rows[0]] if rows else []
    screen.records(rows, heads, [[*row.values()] for row in rows], empty=empty)


def _make_export(task: str, help_text: str) -> Verb:
    """Return the subcommand that exports labels or verdicts."""

    def export(
        screen: Screen,
        context: typer.Context,
        annotator: Annotated[
            str | None, typer.Option(metavar="NAME", help="Export this annotator only, finished or not.")
        ] = None,
        format_: _Format = None,
        file: Annotated[
            str | None, typer.Option("--file", metavar="FILE", help="File to write. Default: stdout.")
        ] = None,
        force: Force = False,
    ) -> None:
        from memlens.annotations.files import export_text

        if file is None:
            refuse_unused({"--force": force}, "has no effect without --file")
        text = export_text(_open(screen, context), task, format_ or _guess_format(file), annotator)
        _write(screen, text, file, force, task)

    export.__doc__ = help_text
    return with_screen(json=False)(export)


def _make_import(task: str, help_text: str) -> Verb:
    """Return the subcommand that imports labels or verdicts."""

    def import_(
        screen: Screen,
        context: typer.Context,
        format_: _Format = None,
        file: Annotated[
            str | None, typer.Option("--file", metavar="FILE", help="File to read. Default: stdin.")
        ] = None,
    ) -> None:
        from memlens.annotations.files import import_text, read_export

        annotations = _open(screen, context)
        count = import_text(annotations, task, read_export(file), format_ or _guess_format(file))
        screen.note(f"imported {count:,} new events")

    import_.__doc__ = help_text
    return with_screen(json=False)(import_)


def _guess_format(file: str | None) -> str:
    return "csv" if file is not None and file.lower().endswith(".csv") else "json"


def _write(screen: Screen, text: str, file: str | None, force: bool, what: str) -> None:
    """Write text to stdout, or to a file unless it exists and is not an export."""
    from memlens.annotations.files import is_export

    with open_output(file, "--file", is_export, force=force) as handle:
        handle.write(text.encode())
    if file is not None:
        screen.note(f"{what} written to {visible(file)}")


@with_screen(json=False)
def _backup(
    screen: Screen,
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="File to write.")],
    force: Force = False,
) -> None:
    """Write the annotations of all annotators, finished or not, to a file."""
    from memlens.annotations.files import backup_text

    _write(screen, backup_text(_open(screen, context)), file, force, "all annotations")


@with_screen(json=False)
def _restore(
    screen: Screen,
    context: typer.Context,
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="A backup. Default: stdin.")] = None,
) -> None:
    """Add missing annotations from a backup."""
    from memlens.annotations.files import read_export, restore_text

    annotations = _open(screen, context)
    screen.note(f"restored {restore_text(annotations, read_export(file, 'FILE')):,} missing events")


@with_screen(json=True)
def _recover(screen: Screen, context: typer.Context) -> None:
    """Remove damaged lines from the annotations, and keep the damaged file under another name."""
    from memlens.annotations.log import AnnotationLog
    from memlens.annotations.records import describe_damage
    from memlens.index.format import ANNOTATIONS

    recovery = AnnotationLog(memlens.Index(context.obj).folder / ANNOTATIONS).recover()
    if screen.as_json:
        screen.json({**asdict(recovery), "damaged_file": recovery.damaged_file and str(recovery.damaged_file)})
    elif recovery.damaged_file is None:
        screen.result(f"{ANNOTATIONS} has no damaged lines: {recovery.events:,} events; nothing was changed")
    else:
        (damage,) = describe_damage(recovery.damaged_lines)
        name = visible(recovery.damaged_file.name)
        screen.result(f"{recovery.events:,} events kept; {damage}; the damaged file is now {name}")


@with_screen(json=True)
def _list(
    screen: Screen,
    context: typer.Context,
    annotator: Annotated[str | None, typer.Option(metavar="NAME", help="Annotator whose verdicts to show.")] = None,
) -> None:
    """List the changes to judge and the annotator's verdicts."""
    _list_changes(screen, context, annotator)


def _list_changes(screen: Screen, context: typer.Context, annotator: str | None) -> None:
    annotations = _open(screen, context)
    verdicts = {verdict.subject: verdict.verdict for verdict in annotations.verdicts(annotator or "")}
    room = max(screen.out.width - _OTHER_COLUMNS, 16)
    rows = [
        {
            "example": name,
            "prefix": change.text if screen.as_json else cut_left(visible(change.text), room),
            "before": change.residual_text,
            "after": change.output_text,
            "verdict": verdicts.get(name),
        }
        for name, change in _read_changes(annotations.index).items()
    ]
    _print_rows(screen, rows, empty="the last layer changes no prediction of the sample")


def _read_changes(index: memlens.Index) -> dict[str, LastLayerChange]:
    """Return {name: change} for the changes to judge."""
    from memlens.annotations.records import LastLayerChange

    changes = [LastLayerChange.of(row) for row in index.sql(f"SELECT * FROM {{{_CHANGES}}}")]
    return {change.name: change for change in changes}


@with_screen(json=False)
def _judge(
    screen: Screen,
    context: typer.Context,
    annotator: _Annotator,
    example: _Example,
    verdict: Annotated[str, typer.Option(metavar="related|distant", help="Verdict on the pair of predictions.")],
) -> None:
    """Save an annotator's verdict on a change."""
    from memlens.annotations.records import Verdict

    annotations = _open(screen, context)
    changes = _read_changes(annotations.index)
    if example not in changes:
        raise UnknownName(f"there is no example '{example}'; list them with `memlens annotate INDEX verdicts`")
    annotations.save(Verdict(annotator, changes[example], verdict))
    folder = visible(str(annotations.index.folder))
    screen.note(f"{example}: {verdict}; run `memlens experiment {folder} last-layer` to count it")


@with_screen(json=False)
def _undo_verdict(screen: Screen, context: typer.Context, annotator: _Annotator, example: _Example) -> None:
    """Undo an annotator's last verdict on a change."""
    from memlens.annotations.records import VERDICTS, Verdict

    verdict = _open(screen, context).undo(VERDICTS, annotator, example)
    screen.note(f"{visible(example)}: {verdict.verdict if isinstance(verdict, Verdict) else 'no verdict'}")


@with_screen(json=True)
def _verdict_status(screen: Screen, context: typer.Context) -> None:
    """Show how many changes each annotator has judged."""
    from memlens.annotations.records import VERDICTS

    annotations = _open(screen, context)
    examples = set(_read_changes(annotations.index)) if annotations.index.has(_CHANGES) else set()
    rows = []
    for person in annotations.list_annotators(VERDICTS):
        names = {verdict.subject for verdict in annotations.verdicts(person)}
        rows.append(
            {"annotator": person, "judged": len(names & examples), "examples": len(examples), "all": len(names)}
        )
    _print_rows(screen, rows, empty="no change has been judged")


verdicts = Group(
    _verdicts,
    {
        "list": _list,
        "judge": _judge,
        "undo": _undo_verdict,
        "status": _verdict_status,
        "export": _make_export("verdicts", "Export verdicts as JSON (with history) or CSV (current verdicts)."),
        "import": _make_import("verdicts", "Import verdicts from an export."),
    },
    needs_command=False,
)
annotate = Group(
    _annotate,
    {
        "sample": _sample,
        "label": _label,
        "undo": _undo,
        "finish": _finish,
        "status": _status,
        "agreement": _agreement,
        "compare": _compare,
        "export": _make_export(
            "labels",
            "Export labels as JSON (with history) or CSV (current labels). Unfinished annotators are left out.",
        ),
        "import": _make_import("labels", "Import labels from an export."),
        "backup": _backup,
        "restore": _restore,
        "recover": _recover,
        "verdicts": verdicts,
    },
)
