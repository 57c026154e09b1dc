"""`memlens collect`: save memories with a star, a name, a note and lists."""

from __future__ import annotations

from pathlib import Path

import memlens
from memlens.cli.explore import suggest_memory
from memlens.cli.options import argument, force_option, index_argument, option, refuse_options, verb
from memlens.cli.screen import Screen, command_line, open_output
from memlens.errors import SettingError
from memlens.text import plain, visible

_NOTE, _FILES = "Note", "Import and export"


@verb(json=True)
@index_argument
@argument(
    "memory",
    required=False,
    metavar="MEMORY",
    help="Name of the memory to show or change. Default: list all saved memories.",
)
@option("--star/--no-star", panel=_NOTE, help="Add or remove the star.")
@option("--name", panel=_NOTE, metavar="TEXT", help="Name to give to the memory.")
@option("--note", panel=_NOTE, metavar="TEXT", help="Note to save.")
@option(
    "--list",
    "lists",
    multiple=True,
    panel=_NOTE,
    metavar="NAME",
    help="Name of a list to add the memory to. Repeatable.",
)
@option("--as", "person", default="me", panel=_NOTE, metavar="NAME", help="Name of the person who makes the change.")
@option("--export", panel=_FILES, metavar="FILE", help="Write all saved memories to a .json or .csv file.")
@option("--import", "source", panel=_FILES, metavar="FILE", help="Read saved memories from a .json or .csv file.")
@force_option
def collect(
    screen: Screen,
    index: str,
    memory: str | None,
    star: bool | None,
    name: str | None,
    note: str | None,
    lists: tuple[str, ...],
    person: str,
    export: str | None,
    source: str | None,
    force: bool,
) -> None:
    """Save a memory with a star, a name, a note or lists, or list the saved memories."""
    from memlens.annotations.files import export_text, import_text, is_export, read_export
    from memlens.annotations.records import NOTES, Annotations

    annotations = Annotations(memlens.Index(index))
    parts = {"star": star, "name": name, "note": note, "lists": lists or None}
    changes = {part: value for part, value in parts.items() if value is not None}
    if changes and memory is None:
        raise SettingError("MEMORY is missing; name the memory to change, like L3N51")
    if sum((memory is not None, export is not None, source is not None)) > 1:
        raise SettingError("MEMORY, --import and --export exclude each other; choose one")
    if not changes:
        refuse_options(["--as"], "has no effect without a change")
    if export is None:
        refuse_options(["--force"], "has no effect without --export")
    selected = None if memory is None else annotations.index.check(memory)
    for problem in annotations.list_problems():
        screen.note(f"{visible(str(annotations.path))}: {visible(problem)}")
    if source is not None:
        count = import_text(annotations, NOTES, read_export(source, "--import"), _get_format(source, "--import"))
        screen.note(f"{count:,} new events were imported")
    elif export is not None:
        with open_output(export, "--export", is_export, force=force) as handle:
            handle.write(export_text(annotations, NOTES, _get_format(export, "--export")).encode())
    elif changes and selected is not None:
        annotations.change_note(selected, person, changes)
    notes = [note for key, note in annotations.notes().items() if selected in (None, key)]
    rows = [
        ["★" if note.star else "", str(note.memory), *map(visible, (note.name, "; ".join(note.lists), note.note))]
        for note in notes
    ]
    empty = ""
    if not notes:
        example = command_line("collect", index, selected or suggest_memory(annotations.index), "--star")
        empty = f"no memory is saved; save one with `{example}`"
    screen.records([plain(note) for note in notes], ["", "memory", "name", "lists", "note"], rows, empty=empty)


def _get_format(file: str, option: str) -> str:
    from memlens.annotations.files import FORMATS

    ending = Path(file).suffix.lstrip(".").lower()
    if ending not in FORMATS:
        raise SettingError(f"{option} is '{file}'; the file name must end in .json or .csv")
    return ending
