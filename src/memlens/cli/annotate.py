"""`memlens annotate`: people's pattern labels with the paper's protocol, and verdicts on the last layer's changes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.annotation_files import file_format, given, print_rows, read_export, write_export
from memlens.cli.options import IndexFolder, Json, Quiet, Verbose
from memlens.cli.screen import Screen
from memlens.errors import SettingError

if TYPE_CHECKING:
    from memlens.index.annotations import Annotations, LabelledPattern

_STUDY, _LABEL, _FILES = "sample", "label, undo, finish, status", "export, import"
_VERDICTS = "verdicts list|judge|undo|status|export|import"
_ACTIONS = ("sample", "status", "label", "undo", "finish", "export", "import", "agreement", "compare",
            "verdicts")  # fmt: skip


def annotate(
    index: IndexFolder,
    action: Annotated[str, typer.Argument(metavar="|".join(_ACTIONS), help="What to do.")],
    what: Annotated[
        str | None, typer.Argument(metavar="[WHAT]", help="After verdicts: what to do with them. Default: list.")
    ] = None,
    per_layer: Annotated[
        int, typer.Option(metavar="K", help="Memories of each layer to draw.", rich_help_panel=_STUDY)
    ] = 10,
    top: Annotated[int, typer.Option(metavar="N", help="Triggers to show of each.", rich_help_panel=_STUDY)] = 25,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.", rich_help_panel=_STUDY)] = 0,
    annotator: Annotated[str | None, typer.Option(metavar="NAME", help="Who labels.", rich_help_panel=_LABEL)] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="MEMORY", help="Which memory, like L3N512.", rich_help_panel=_LABEL)
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:RANKS:TEXT",
            help='A pattern, like "shallow:0,3,7:ends with press"; may be repeated; none at all says there is none.',
            rich_help_panel=_LABEL,
        ),
    ] = None,
    example: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which change, as listed.", rich_help_panel=_VERDICTS)
    ] = None,
    verdict: Annotated[
        str | None,
        typer.Option(metavar="related|distant", help="How the two words stand.", rich_help_panel=_VERDICTS),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="json|csv", help="Default: by the file's name.", rich_help_panel=_FILES),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Read or written. Default: stdin, stdout.", rich_help_panel=_FILES),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Draw a sample, label memories, exchange labels, measure agreement; judge changes of the last layer."""
    screen = Screen(as_json, quiet, verbose)
    if action not in _ACTIONS:
        raise SettingError(f"'{action}' is not something to do with annotations; choose one of: {', '.join(_ACTIONS)}")
    from memlens.index.annotations import Annotations
    from memlens.index.reader import Index
    from memlens.patterns import study

    opened = Index(index)
    if action == "verdicts":
        from memlens.cli.verdicts import do_verdicts

        do_verdicts(screen, opened, what or "list", annotator, example, verdict, format_, file)
        return
    if what is not None or example is not None or verdict is not None:
        raise SettingError(f"'{what or example or verdict}' belongs to `annotate INDEX verdicts`, not to {action}")
    if action == "agreement":
        print_rows(screen, [_flat(asdict(pair)) for pair in study.agreement(opened)])
        return
    if action == "compare":
        print_rows(screen, [asdict(row) for row in study.compare_with_people(opened)])
        return
    with Annotations(opened) as notes:
        if action == "sample":
            sample = study.draw_sample(opened, per_layer, top, seed)
            notes.set_sample(sample)
            _list(screen, [str(name) for name in sample.memories])
        elif action == "status":
            print_rows(screen, [asdict(person) for person in study.progress(notes)])
        elif action == "export":
            _export(screen, notes, format_, file, annotator)
        elif action == "import":
            _import(screen, notes, format_, file)
        else:
            _label(screen, notes, action, given(annotator, "--annotator"), memory, pattern or [])


def _label(
    screen: Screen, notes: Annotations, action: str, annotator: str, memory: str | None, patterns: list[str]
) -> None:
    if action == "finish":
        notes.finish(annotator)
        screen.note(f"{annotator} has finished")
        return
    name = given(memory, "--memory")
    if action == "undo":
        before = notes.undo(annotator, name)
        screen.note(f"{name}: {'no label' if before is None else f'{len(before.patterns)} patterns'} again")
        return
    labelled = [_parse(text) for text in patterns]
    notes.save(annotator, name, labelled)
    screen.note(f"{name}: {len(labelled)} patterns saved")


def _parse(text: str) -> LabelledPattern:
    from memlens.index.annotations import LabelledPattern

    kind, _, rest = text.partition(":")
    ranks, _, description = rest.partition(":")
    try:
        prefixes = tuple(int(rank) for rank in ranks.replace(",", " ").split())
    except ValueError as error:
        raise SettingError(f"--pattern is '{text}'; write it like shallow:0,3,7:ends with press") from error
    return LabelledPattern(description.strip(), kind.strip(), prefixes)


def _export(screen: Screen, notes: Annotations, format_: str | None, file: str | None, annotator: str | None) -> None:
    from memlens.patterns.exchange import export_labels

    text = export_labels(notes, file_format(format_, file), annotator)
    write_export(screen, notes.index, text, file, "labels")


def _import(screen: Screen, notes: Annotations, format_: str | None, file: str | None) -> None:
    from memlens.patterns.exchange import import_labels

    new = import_labels(notes, read_export(file), file_format(format_, file))
    screen.note(f"{new:,} new labels or events")


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    overlaps = row.pop("jaccard")
    return row | {f"jaccard_{kind}": value for kind, value in overlaps.items()}


def _list(screen: Screen, names: list[str]) -> None:
    if screen.as_json:
        screen.json({"memories": names})
    else:
        for name in names:
            screen.result(name)
