"""`memlens annotate INDEX verdicts ...`: people judge what the last layer changes. Not a verb of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlens.cli.annotation_files import file_format, given, print_rows, read_export, write_export
from memlens.cli.screen import Screen
from memlens.cli.text import cut_left, visible
from memlens.errors import IndexFolderError, SettingError, UnknownName

if TYPE_CHECKING:
    from memlens.index.reader import Index
    from memlens.index.verdicts import Example, Verdicts

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
    from memlens.index.verdicts import Verdicts

    if action in ("list", "judge"):
        examples = _examples(index)  # refused before a file is made
    with Verdicts(index) as notes:
        if action == "list":
            print_rows(screen, _listed(screen, notes, examples, annotator), "the last layer changes nothing here")
        elif action == "status":
            print_rows(screen, _status(index, notes), "nobody has judged anything")
        elif action == "export":
            from memlens.experiments.verdict_files import export_verdicts

            text = export_verdicts(notes, file_format(format_, file), annotator)
            write_export(screen, index, text, file, "verdicts")
        elif action == "import":
            from memlens.experiments.verdict_files import import_verdicts

            new = import_verdicts(notes, read_export(file), file_format(format_, file))
            screen.note(f"{new:,} new verdicts or events")
        else:
            _say(screen, notes, action, given(annotator, "--annotator"), given(example, "--example"), verdict)


def _examples(index: Index) -> dict[str, Example]:
    from memlens.index.verdicts import Example

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
