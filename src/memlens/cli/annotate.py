"""`memlens annotate`: people's pattern labels, with the paper's protocol."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import IndexFolder, Json, Quiet, Verbose
from memlens.cli.screen import Screen
from memlens.cli.text import visible
from memlens.errors import SettingError

if TYPE_CHECKING:
    from memlens.index.annotations import Annotations, LabelledPattern

_STUDY, _LABEL, _FILES = "sample", "label, undo, finish, status", "export, import"
_ACTIONS = ("sample", "status", "label", "undo", "finish", "export", "import", "agreement", "compare")


def annotate(
    index: IndexFolder,
    action: Annotated[str, typer.Argument(metavar="|".join(_ACTIONS), help="What to do.")],
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
    """Draw a sample, label memories, exchange labels, and measure how far people and the machine agree."""
    screen = Screen(as_json, quiet, verbose)
    if action not in _ACTIONS:
        raise SettingError(f"'{action}' is not something to do with annotations; choose one of: {', '.join(_ACTIONS)}")
    from memlens.index.annotations import Annotations
    from memlens.index.reader import Index
    from memlens.patterns import study

    opened = Index(index)
    if action == "agreement":
        _rows(screen, [_flat(asdict(pair)) for pair in study.agreement(opened)])
        return
    if action == "compare":
        _rows(screen, [asdict(row) for row in study.compare_with_people(opened)])
        return
    with Annotations(opened) as notes:
        if action == "sample":
            sample = study.draw_sample(opened, per_layer, top, seed)
            notes.set_sample(sample)
            _list(screen, [str(name) for name in sample.memories])
        elif action == "status":
            _rows(screen, _status(notes))
        elif action == "export":
            _export(screen, notes, format_, file, annotator)
        elif action == "import":
            _import(screen, notes, format_, file)
        else:
            _label(screen, notes, action, _given(annotator, "--annotator"), memory, pattern or [])


def _given(value: str | None, option: str) -> str:
    if value is None:
        raise SettingError(f"{option} is missing; say it")
    return value


def _label(
    screen: Screen, notes: Annotations, action: str, annotator: str, memory: str | None, patterns: list[str]
) -> None:
    if action == "finish":
        notes.finish(annotator)
        screen.note(f"{annotator} has finished")
        return
    name = _given(memory, "--memory")
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


def _status(notes: Annotations) -> list[dict[str, Any]]:
    """How far everybody is; nothing of what they say."""
    sample = notes.sample()
    finished = notes.annotators(finished=True)
    return [
        {
            "annotator": person,
            "labelled": len(notes.labels_of(person)),
            "sample": len(sample.memories) if sample else None,
            "finished": person in finished,
        }
        for person in notes.annotators()
    ]


def _format(given: str | None, file: str | None) -> str:
    if given is not None:
        return given
    return "csv" if file is not None and file.lower().endswith(".csv") else "json"


def _export(screen: Screen, notes: Annotations, format_: str | None, file: str | None, annotator: str | None) -> None:
    from memlens.index.files import replacing
    from memlens.patterns.exchange import export_labels

    text = export_labels(notes, _format(format_, file), annotator)
    if file is None:
        sys.stdout.write(text)
        return
    path = Path(file)
    if path.is_dir() or path.resolve().is_relative_to(notes.index.folder.resolve()):
        raise SettingError(f"--file {file} is a folder or lies inside the index; name a file elsewhere")
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="")
    screen.note(f"labels written to {visible(file)}")


def _import(screen: Screen, notes: Annotations, format_: str | None, file: str | None) -> None:
    from memlens.patterns.exchange import import_labels

    try:
        text = sys.stdin.read() if file is None else Path(file).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read --file {file}: {error}; give an export as UTF-8 text") from error
    new = import_labels(notes, text, _format(format_, file))
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


def _rows(screen: Screen, rows: list[dict[str, Any]]) -> None:
    if screen.as_json:
        screen.json(rows)
        return
    from rich.table import Table
    from rich.text import Text

    if not rows:
        screen.note("nobody has labelled anything")
        return
    table = Table(*(name.replace("_", " ") for name in rows[0]), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    screen.result(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else visible(str(value))
