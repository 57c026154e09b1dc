"""`memlens annotate INDEX ...`: pattern labels with the paper's protocol, and verdicts on changes by the last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

import memlens
from memlens.cli.help import VerbGroup
from memlens.cli.options import WholeNumber, argument, force_option, index_argument, option, refuse_options, verb
from memlens.cli.screen import Screen, command_line, open_output
from memlens.errors import SettingError, UnknownName
from memlens.settings import MOST_SEED
from memlens.text import cut_left, visible

if TYPE_CHECKING:
    from memlens.annotations.records import Annotations, LabeledPattern, LastLayerChange

_CHANGES = "experiments/last-layer"
_OTHER_COLUMNS = 62  # total width of the columns next to a prefix

annotator_option = option("--annotator", required=True, metavar="NAME", help="Name of the annotator.")
memory_option = option("--memory", required=True, metavar="MEMORY", help="Name of the memory, like L3N51.")
example_option = option(
    "--example", required=True, metavar="NAME", help="Name of the change, as printed by `verdicts list`."
)
format_option = option(
    "--format",
    "format_",
    type=click.Choice(("json", "csv")),
    metavar="json|csv",
    help="File format. Default: csv if the file name ends in .csv, otherwise json.",
)


@click.group(cls=VerbGroup)
@index_argument
@click.pass_context
def annotate(context: click.Context, index: str) -> None:
    """Label the patterns of memories by hand, measure the agreement of annotators, and judge last-layer changes.

    Draw a sample, let each annotator label its memories and finish, then compare. This is the protocol of the paper.
    """
    context.obj = index


@annotate.group(cls=VerbGroup, invoke_without_command=True)
@click.pass_context
def verdicts(context: click.Context) -> None:
    """Judge whether the predictions before and after the last layer are related. By default, list the changes."""
    if context.invoked_subcommand is None:
        _list_changes(Screen(), None)


def _open(screen: Screen) -> Annotations:
    """Open the annotations of the index and report lines that were skipped."""
    from memlens.annotations.records import Annotations

    annotations = Annotations(memlens.Index(click.get_current_context().obj))
    for problem in annotations.list_problems():
        screen.note(f"{visible(str(annotations.path))}: {visible(problem)}")
    return annotations


@verb("sample", json=True, parent=annotate)
@option("--per-layer", type=int, default=10, metavar="K", help="Number of memories per layer.")
@option("--top", type=int, default=25, metavar="N", help="Number of triggers to show per memory.")
@option("--seed", type=WholeNumber(0, MOST_SEED), default=0, help="Random seed.")
def _sample(screen: Screen, per_layer: int, top: int, seed: int) -> None:
    """Draw a random sample of memories to label, and print their names."""
    from memlens.annotations.study import draw_sample

    annotations = _open(screen)
    sample = draw_sample(annotations.index, per_layer, top, seed)
    annotations.set_sample(sample)
    if screen.as_json:
        screen.json({"memories": sample.memories})
        return
    for name in sample.memories:
        screen.result(str(name))


@verb("label", json=False, parent=annotate)
@annotator_option
@memory_option
@option(
    "--pattern",
    multiple=True,
    metavar="KIND:RANKS:TEXT",
    help='A pattern: its kind, the ranks of its triggers and a description, like "shallow:0,3,7:ends with press". '
    "Repeatable. Default: the memory has no pattern.",
)
def _label(screen: Screen, annotator: str, memory: str, pattern: tuple[str, ...]) -> None:
    """Save an annotator's patterns for a memory."""
    from memlens.annotations.records import Label

    annotations = _open(screen)
    label = Label(annotator, annotations.index.check(memory), tuple(map(_parse_pattern, pattern)))
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


@verb("undo", json=False, parent=annotate)
@annotator_option
@memory_option
def _undo(screen: Screen, annotator: str, memory: str) -> None:
    """Undo an annotator's last label of a memory."""
    from memlens.annotations.records import LABELS, Label

    label = _open(screen).undo(LABELS, annotator, memory)
    screen.note(
        f"{visible(memory)}: {len(label.patterns)} patterns" if isinstance(label, Label) else f"{memory}: no label"
    )


@verb("finish", json=False, parent=annotate)
@annotator_option
def _finish(screen: Screen, annotator: str) -> None:
    """Finish labeling. After that, the labels are included in results and can no longer change."""
    _open(screen).finish(annotator)
    screen.note(f"{annotator} has finished")


@verb("status", json=True, parent=annotate)
def _status(screen: Screen) -> None:
    """Show each annotator's progress."""
    from memlens.annotations.study import read_study

    study = read_study(_open(screen))
    _print_rows(screen, [asdict(person) for person in study.people], empty="no memory is labeled yet")


@verb("agreement", json=True, parent=annotate)
def _agreement(screen: Screen) -> None:
    """Show how often annotators agree. Only annotators who have finished are included."""
    from memlens.annotations.study import compute_agreement

    _print_rows(screen, [asdict(pair) for pair in compute_agreement(_open(screen))])


@verb("compare", json=True, parent=annotate)
def _compare(screen: Screen) -> None:
    """Show how often automatic patterns match those of each annotator."""
    from memlens.annotations.study import compare_with_people

    _print_rows(screen, [asdict(row) for row in compare_with_people(_open(screen))])


def _print_rows(screen: Screen, rows: Sequence[Mapping[str, Any]], *, empty: str = "") -> None:
    """Print a table whose columns are named like the JSON fields."""
    heads = [name.replace("_", " ") for name in rows[0]] if rows else []
    screen.records(rows, heads, [[*row.values()] for row in rows], empty=empty)


def _add_exchange(parent: click.Group, task: str, export_help: str) -> None:
    """Add the subcommands that export and import labels or verdicts."""

    @verb("export", json=False, parent=parent)
    @option("--annotator", metavar="NAME", help="Export only the work of this annotator, finished or not.")
    @format_option
    @option("--file", metavar="FILE", help="File to write. Default: stdout.")
    @force_option
    def export(screen: Screen, annotator: str | None, format_: str | None, file: str | None, force: bool) -> None:
        from memlens.annotations.files import export_text

        if file is None:
            refuse_options(["--force"], "has no effect without --file")
        text = export_text(_open(screen), task, format_ or _guess_format(file), annotator)
        _write(screen, text, file, force, task)

    @verb("import", json=False, parent=parent)
    @format_option
    @option("--file", metavar="FILE", help="File to read. Default: stdin.")
    def import_(screen: Screen, format_: str | None, file: str | None) -> None:
        from memlens.annotations.files import import_text, read_export

        annotations = _open(screen)
        count = import_text(annotations, task, read_export(file), format_ or _guess_format(file))
        screen.note(f"{count:,} new events were imported")

    export.help, import_.help = export_help, f"Import {task} from an export."


_add_exchange(
    annotate,
    "labels",
    "Export labels as JSON (with history) or CSV (current labels). Unfinished annotators are left out.",
)
_add_exchange(verdicts, "verdicts", "Export verdicts as JSON (with history) or CSV (current verdicts).")


def _guess_format(file: str | None) -> str:
    return "csv" if file is not None and file.lower().endswith(".csv") else "json"


def _write(screen: Screen, text: str, file: str | None, force: bool, what: str) -> None:
    """Write text to stdout or to a file. An existing file is replaced only if it is an export."""
    from memlens.annotations.files import is_export

    with open_output(file, "--file", is_export, force=force) as handle:
        handle.write(text.encode())
    if file is not None:
        screen.note(f"{what} written to {visible(file)}")


@verb("backup", json=False, parent=annotate)
@argument("file", metavar="FILE", help="File to write.")
@force_option
def _backup(screen: Screen, file: str, force: bool) -> None:
    """Write the annotations of all annotators, finished or not, to a file."""
    from memlens.annotations.files import backup_text

    _write(screen, backup_text(_open(screen)), file, force, "annotations")


@verb("restore", json=False, parent=annotate)
@argument("file", required=False, metavar="FILE", help="Backup to read. Default: stdin.")
def _restore(screen: Screen, file: str | None) -> None:
    """Add missing annotations from a backup."""
    from memlens.annotations.files import read_export, restore_text

    annotations = _open(screen)
    screen.note(f"{restore_text(annotations, read_export(file, 'FILE')):,} missing events were added")


@verb("recover", json=True, parent=annotate)
def _recover(screen: Screen) -> None:
    """Remove damaged lines from the annotations, and keep the damaged file under another name."""
    from memlens.annotations.log import AnnotationLog
    from memlens.annotations.records import describe_damage
    from memlens.index.format import ANNOTATIONS

    recovery = AnnotationLog(memlens.Index(click.get_current_context().obj).folder / ANNOTATIONS).recover()
    if screen.as_json:
        screen.json({**asdict(recovery), "damaged_file": recovery.damaged_file and str(recovery.damaged_file)})
    elif recovery.damaged_file is None:
        screen.result(f"{ANNOTATIONS} has {recovery.events:,} events and no damaged lines, so nothing was changed")
    else:
        (damage,) = describe_damage(recovery.damaged_lines)
        name = visible(recovery.damaged_file.name)
        screen.result(f"{recovery.events:,} events were kept; {damage}; the damaged file was renamed to {name}")


@verb("list", json=True, parent=verdicts)
@option("--annotator", metavar="NAME", help="Show the verdicts of this annotator.")
def _list(screen: Screen, annotator: str | None) -> None:
    """List the changes to judge and the annotator's verdicts."""
    _list_changes(screen, annotator)


def _list_changes(screen: Screen, annotator: str | None) -> None:
    annotations = _open(screen)
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
    _print_rows(screen, rows, empty="the last layer changes none of the sampled predictions")


def _read_changes(index: memlens.Index) -> dict[str, LastLayerChange]:
    """Return {name: change} for the changes to judge."""
    from memlens.annotations.records import LastLayerChange

    changes = [LastLayerChange.of(row) for row in index.sql(f"SELECT * FROM {{{_CHANGES}}}")]
    return {change.name: change for change in changes}


@verb("judge", json=False, parent=verdicts)
@annotator_option
@example_option
@option("--verdict", required=True, metavar="related|distant", help="Whether the two predictions are related.")
def _judge(screen: Screen, annotator: str, example: str, verdict: str) -> None:
    """Save an annotator's verdict on a change."""
    from memlens.annotations.records import Verdict

    annotations = _open(screen)
    changes = _read_changes(annotations.index)
    if example not in changes:
        command = command_line("annotate", annotations.index.folder, "verdicts")
        raise UnknownName(f"there is no example '{example}'; list them with `{command}`")
    annotations.save(Verdict(annotator, changes[example], verdict))
    command = command_line("experiment", annotations.index.folder, "last-layer")
    screen.note(f"{example}: {verdict}; to include the verdict in the results, run `{command}`")


@verb("undo", json=False, parent=verdicts)
@annotator_option
@example_option
def _undo_verdict(screen: Screen, annotator: str, example: str) -> None:
    """Undo an annotator's last verdict on a change."""
    from memlens.annotations.records import VERDICTS, Verdict

    verdict = _open(screen).undo(VERDICTS, annotator, example)
    screen.note(f"{visible(example)}: {verdict.verdict if isinstance(verdict, Verdict) else 'no verdict'}")


@verb("status", json=True, parent=verdicts)
def _verdict_status(screen: Screen) -> None:
    """Show how many changes each annotator has judged."""
    from memlens.annotations.records import VERDICTS

    annotations = _open(screen)
    examples = set(_read_changes(annotations.index)) if annotations.index.has(_CHANGES) else set()
    rows = []
    for person in annotations.list_annotators(VERDICTS):
        names = {verdict.subject for verdict in annotations.verdicts(person)}
        rows.append(
            {"annotator": person, "judged": len(names & examples), "examples": len(examples), "all": len(names)}
        )
    _print_rows(screen, rows, empty="no change is judged yet")
