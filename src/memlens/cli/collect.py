"""`memlens collect`: memories that somebody keeps, with a star, a name, a note and lists; nobody needs an account."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import memlens
from memlens.cli.options import Force, IndexFolder, refuse_unused, with_screen
from memlens.cli.screen import Screen, open_output
from memlens.errors import SettingError
from memlens.text import plain, visible

if TYPE_CHECKING:
    from memlens.annotations.answers import Note

_WRITE, _FILES = "Keeping a memory", "Import and export"


@with_screen(json=True)
def collect(
    screen: Screen,
    index: IndexFolder,
    memory: Annotated[
        str | None, typer.Argument(metavar="[MEMORY]", help="What to keep, like L3N51. Without one, all are listed.")
    ] = None,
    star: Annotated[bool | None, typer.Option("--star/--no-star", help="Mark it.", rich_help_panel=_WRITE)] = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Your own name.", rich_help_panel=_WRITE)] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="A note.", rich_help_panel=_WRITE)] = None,
    lists: Annotated[
        list[str] | None,
        typer.Option("--list", metavar="NAME", help="A list to put it in; repeatable.", rich_help_panel=_WRITE),
    ] = None,
    person: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Who writes. Default: me.", rich_help_panel=_WRITE)
    ] = None,
    out: Annotated[
        str | None, typer.Option("--export", metavar="FILE", help="A .json or .csv file.", rich_help_panel=_FILES)
    ] = None,
    source: Annotated[
        str | None, typer.Option("--import", metavar="FILE", help="An export to take over.", rich_help_panel=_FILES)
    ] = None,
    force: Force = False,
) -> None:
    """Keep memories with a star, a name, a note and lists, or list those that are kept."""
    from memlens.annotations.files import export_text, import_text, is_export, read_export
    from memlens.annotations.store import Annotations, read_notes
    from memlens.index.history import NOTES

    opened = memlens.Index(index)
    changes = {"star": star, "name": name, "note": note, "lists": None if lists is None else tuple(lists)}
    given = {part: value for part, value in changes.items() if value is not None}
    if given and memory is None:
        raise SettingError("name the memory to keep, like L3N51, before what is said of it")
    if sum((memory is not None, out is not None, source is not None)) > 1:
        raise SettingError("name a memory, --import or --export, one at a time")
    if not given:
        refuse_unused({"--as": person}, "says who keeps a memory, but nothing is said of one")
    if out is None:
        refuse_unused({"--force": force}, "is for --export, which is not there")
    known = None if memory is None else opened.check(memory)
    if source is not None:
        with Annotations(opened) as notes:
            count = import_text(notes, NOTES, read_export(source, "--import"), _format(source, "--import"))
        screen.note(f"{count:,} new")
    elif out is not None:
        with Annotations(opened) as notes, open_output(out, "--export", is_export, force=force) as handle:
            handle.write(export_text(notes, NOTES, _format(out, "--export")).encode())
    elif given and known is not None:
        with Annotations(opened) as notes:
            notes.change_note(known, "me" if person is None else person, given)
    _show(screen, [note for key, note in read_notes(opened).items() if known in (None, key)])


def _show(screen: Screen, notes: list[Note]) -> None:
    if screen.as_json:
        screen.json([plain(note) for note in notes])
    elif notes:
        rows = [
            ["★" if note.star else "", str(note.memory), *map(visible, (note.name, "; ".join(note.lists), note.note))]
            for note in notes
        ]
        screen.table(["", "memory", "name", "lists", "note"], rows)
    else:
        screen.note("nothing is kept yet; begin with `memlens collect INDEX MEMORY --star`")


def _format(file: str, option: str) -> str:
    from memlens.annotations.files import FORMATS

    ending = Path(file).suffix.lstrip(".").lower()
    if ending not in FORMATS:
        raise SettingError(f"{option} {file} ends neither in .json nor in .csv; name a file that does")
    return ending
