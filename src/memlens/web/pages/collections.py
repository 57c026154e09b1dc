"""The page Collections: memories that people keep, with star, name, note and lists; append-only, as labels are."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field, StringConstraints

from memlens.annotations.answers import Note
from memlens.annotations.store import Annotations, history_mark, read_notes
from memlens.errors import IndexFolderError
from memlens.index.history import NOTES
from memlens.index.memory import read_summaries
from memlens.memory import MemoryId
from memlens.web.rendering import PROBLEMS, Bench, Name, Viewer, page
from memlens.web.workbench import ServedIndex

router = APIRouter(tags=["collections"])


class KeptMemory(BaseModel):
    """Star, name, note and lists of a memory to keep; all empty removes it."""

    star: bool = False
    name: str = Field(default="", max_length=200)
    note: str = Field(default="", max_length=10_000)
    lists: list[Annotated[str, StringConstraints(max_length=100)]] = Field(default=[], max_length=50)


def kept_notes(index: ServedIndex) -> dict[MemoryId, Note]:
    """The notes of all people, read again only after somebody has written. Never creates the file."""
    mark = history_mark(index, NOTES)
    return {} if mark is None else index.remember("notes", lambda: read_notes(index), mark)


def names_beside(index: ServedIndex) -> dict[MemoryId, Note]:
    """The same for pages on which it stands beside something else: those answer even if the file is damaged."""
    try:
        return kept_notes(index)
    except IndexFolderError:  # the pages of people's work say what is wrong and how to mend it
        return {}


@router.get("/collections", response_class=HTMLResponse, include_in_schema=False)
def collections_page(request: Request, bench: Bench) -> HTMLResponse:
    return page(request, "collections.html", **collections_content(bench.index, kept_notes(bench.index)))


def collections_content(index: ServedIndex, notes: dict[MemoryId, Note]) -> dict[str, Any]:
    """Return the variables of collections.html."""
    names = sorted({name for note in notes.values() for name in note.lists}, key=str.casefold)
    lists = [(name, [note for note in notes.values() if name in note.lists]) for name in names]
    rest = [note for note in notes.values() if not note.lists]
    return {"lists": [*lists, *([("", rest)] if rest else [])], "summaries": read_summaries(index, list(notes))}


@router.get("/api/collections")
def read_collections(bench: Bench) -> list[Note]:
    """Every memory that is kept, with what holds now."""
    return list(kept_notes(bench.index).values())


@router.put("/api/collections/{name}", responses=PROBLEMS)
def keep_memory(bench: Bench, viewer: Viewer, name: Name, content: KeptMemory) -> Note:
    """Keep a memory, or remove it where all is empty; earlier notes stay in the history."""
    note = Note(viewer or "me", bench.index.check(name), **_parts(content))
    with Annotations(bench.index) as annotations:
        annotations.save(note)
    return note


@router.patch("/api/collections/{name}", responses=PROBLEMS)
def change_kept(bench: Bench, viewer: Viewer, name: Name, content: KeptMemory) -> Note:
    """Change what is given and leave the rest as it is now, whoever wrote it and since when a page is open."""
    with Annotations(bench.index) as annotations:
        return annotations.change_note(bench.index.check(name), viewer or "me", _parts(content))


def _parts(content: KeptMemory) -> dict[str, Any]:
    """The parts of a note that were given."""
    parts: dict[str, Any] = {name: getattr(content, name) for name in content.model_fields_set}
    parts |= {name: parts[name].strip() for name in ("name", "note") if name in parts}
    if "lists" in parts:
        parts["lists"] = tuple(dict.fromkeys(name.strip() for name in parts["lists"] if name.strip()))
    return parts
