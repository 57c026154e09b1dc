"""What labels and verdicts of people share on the command line: files in and out, and rows as a table.

`memlens annotate INDEX verdicts ...`: people judge what the last layer changes. Not a verb of its own.

`memlens annotate`: people's pattern labels with the paper's protocol, and verdicts on the last layer's changes.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import IndexFolder, Json, Quiet, Verbose
from memlens.cli.screen import Screen
from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.text import cut_left, visible

if TYPE_CHECKING:
    from memlens.annotations.labels import Annotations, Example, LabelledPattern, Verdicts
    from memlens.index.reader import Index


def given(value: str | None, option: str) -> str:
    if value is None:
        raise SettingError(f"{option} is missing; say it")
    return value


def file_format(wanted: str | None, file: str | None) -> str:
    """As said, or by the file's name."""
    if wanted is not None:
        return wanted
    return "csv" if file is not None and file.lower().endswith(".csv") else "json"


def write_export(screen: Screen, index: Index, text: str, file: str | None, what: str) -> None:
    from memlens.files import replacing

    if file is None:
        sys.stdout.write(text)
        return
    path = Path(file)
    if path.is_dir() or path.resolve().is_relative_to(index.folder.resolve()):
        raise SettingError(f"--file {file} is a folder or lies inside the index; name a file elsewhere")
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="")
    screen.note(f"{what} written to {visible(file)}")


def read_export(file: str | None) -> str:
    """The text of a file or of stdin; a spreadsheet may have put a byte order mark before it."""
    try:
        content = sys.stdin.buffer.read() if file is None else Path(file).read_bytes()
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        what = "stdin" if file is None else f"--file {file}"
        raise SettingError(f"cannot read {what}: {error}; give an export as UTF-8 text") from error


def print_rows(screen: Screen, rows: list[dict[str, Any]], none: str = "nobody has labelled anything") -> None:
    """Rows with the same keys as a table, or as JSON."""
    if screen.as_json:
        screen.json(rows)
        return
    from rich.table import Table
    from rich.text import Text

    if not rows:
        screen.note(none)
        return
    table = Table(*(name.replace("_", " ") for name in rows[0]), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    screen.result(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else visible(str(value))


_ACTIONS = ("list", "judge", "undo", "status", "export", "import")
_TABLE = "experiments/last-layer"
_TEXT_TAKEN = 62  # columns beside a prefix


def do_verdicts(
    screen: Screen,
    index: Index,
    action: str,
    annotator: str | None,
    example: str | None,
    verdict: str | None,
    format_: str | None,
    file: str | None,
) -> None:
    if action not in _ACTIONS:
        raise SettingError(f"'{action}' is not something to do with verdicts; choose one of: {', '.join(_ACTIONS)}")
    from memlens.annotations.labels import Verdicts

    if action in ("list", "judge"):
        examples = _examples(index)  # refused before a file is made
    with Verdicts(index) as notes:
        if action == "list":
            print_rows(screen, _listed(screen, notes, examples, annotator), "the last layer changes nothing here")
        elif action == "status":
            print_rows(screen, _status(index, notes), "nobody has judged anything")
        elif action == "export":
            from memlens.annotations.files import export_verdicts

            text = export_verdicts(notes, file_format(format_, file), annotator)
            write_export(screen, index, text, file, "verdicts")
        elif action == "import":
            from memlens.annotations.files import import_verdicts

            new = import_verdicts(notes, read_export(file), file_format(format_, file))
            screen.note(f"{new:,} new verdicts or events")
        else:
            _say(screen, notes, action, given(annotator, "--annotator"), given(example, "--example"), verdict)


def _examples(index: Index) -> dict[str, Example]:
    from memlens.annotations.labels import Example

    table = index.table(_TABLE)
    if "example" not in table.column_names:
        again = f"memlens experiment {index.folder} last-layer"
        raise IndexFolderError(f"the table '{_TABLE}' of {index.folder} is of an older memlens; run `{again}` again")
    found = [Example.of(row) for row in table.to_pylist()]
    return {example.name: example for example in found}


def _say(screen: Screen, notes: Verdicts, action: str, annotator: str, name: str, verdict: str | None) -> None:
    if action == "undo":
        before = notes.undo(annotator, name)
        screen.note(f"{visible(name)}: {'no verdict' if before is None else before.verdict} again")
        return
    known = _examples(notes.index)
    if name not in known:
        raise UnknownName(f"there is no example '{name}'; list them with `memlens annotate INDEX verdicts`")
    notes.save(annotator, known[name], given(verdict, "--verdict"))
    screen.note(f"{name}: {verdict}; `memlens experiment {visible(str(notes.index.folder))} last-layer` counts it")


def _listed(
    screen: Screen, notes: Verdicts, examples: dict[str, Example], annotator: str | None
) -> list[dict[str, Any]]:
    """Every example with one's own verdict; what others say would sway a judge."""
    own = {one.example.name: one.verdict for one in notes.verdicts(annotator)} if annotator else {}
    room = max(screen.out.width - _TEXT_TAKEN, 16)
    return [
        {
            "example": name,
            "prefix": example.text if screen.as_json else cut_left(visible(example.text), room),
            "before": example.residual_text,
            "after": example.output_text,
            "verdict": own.get(name),
        }
        for name, example in examples.items()
    ]


def _status(index: Index, notes: Verdicts) -> list[dict[str, Any]]:
    """How far everybody is; nothing of what they say."""
    wanted = set(_examples(index)) if index.has(_TABLE) else set()
    rows = []
    for person in notes.annotators():
        judged = {one.example.name for one in notes.verdicts(person)}
        rows.append({"annotator": person, "judged": len(judged & wanted), "examples": len(wanted), "all": len(judged)})
    return rows


_STUDY, _LABEL, _FILES = "sample", "label, undo, finish, status", "export, import"
_VERDICTS = "verdicts list|judge|undo|status|export|import"
_ANNOTATE_ACTIONS = ("sample", "status", "label", "undo", "finish", "export", "import", "agreement", "compare",
            "verdicts")  # fmt: skip


def annotate(
    index: IndexFolder,
    action: Annotated[str, typer.Argument(metavar="|".join(_ANNOTATE_ACTIONS), help="What to do.")],
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
    if action not in _ANNOTATE_ACTIONS:
        raise SettingError(
            f"'{action}' is not something to do with annotations; choose one of: {', '.join(_ANNOTATE_ACTIONS)}"
        )
    from memlens.annotations import study
    from memlens.annotations.labels import Annotations
    from memlens.index.reader import Index

    opened = Index(index)
    if action == "verdicts":
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
    from memlens.annotations.labels import LabelledPattern

    kind, _, rest = text.partition(":")
    ranks, _, description = rest.partition(":")
    try:
        prefixes = tuple(int(rank) for rank in ranks.replace(",", " ").split())
    except ValueError as error:
        raise SettingError(f"--pattern is '{text}'; write it like shallow:0,3,7:ends with press") from error
    return LabelledPattern(description.strip(), kind.strip(), prefixes)


def _export(screen: Screen, notes: Annotations, format_: str | None, file: str | None, annotator: str | None) -> None:
    from memlens.annotations.files import export_labels

    text = export_labels(notes, file_format(format_, file), annotator)
    write_export(screen, notes.index, text, file, "labels")


def _import(screen: Screen, notes: Annotations, format_: str | None, file: str | None) -> None:
    from memlens.annotations.files import import_labels

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
