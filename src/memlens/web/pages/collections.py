"""The Collections page: memories with a star, a name, a note or lists."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field, StringConstraints

from memlens.annotations.records import Note
from memlens.errors import FilesError
from memlens.index.memory import read_summaries
from memlens.memory import MemoryId
from memlens.web.rendering import PROBLEMS, Bench, Name, Viewer, page
from memlens.web.workbench import ServedIndex

router = APIRouter(tags=["collections"])


class KeptMemory(BaseModel):
    """The star, name, note and lists of a memory. If all are empty, the memory is removed from the collections."""

    star: bool = False
    name: str = Field(default="", max_length=200)
    note: str = Field(default="", max_length=10_000)
    lists: list[Annotated[str, StringConstraints(max_length=100)]] = Field(default=[], max_length=50)


def names_beside(index: ServedIndex) -> dict[MemoryId, Note]:
    """Return all notes, for pages that show names next to memories. Returns no notes if the file cannot be read."""
    try:
        return index.annotations.notes()
    except FilesError:  # the Collections page reports this error
        return {}


@router.get("/collections", response_class=HTMLResponse, include_in_schema=False)
def collections_page(request: Request, bench: Bench) -> HTMLResponse:
    notes, problems = bench.index.annotations.notes(), bench.index.annotations.list_problems()
    return page(request, "collections.html", problems=problems, **collections_content(bench.index, notes))


def collections_content(index: ServedIndex, notes: dict[MemoryId, Note]) -> dict[str, Any]:
    """Return the variables of collections.html."""
    names = sorted({name for note in notes.values() for name in note.lists}, key=str.casefold)
    lists = [(name, [note for note in notes.values() if name in note.lists]) for name in names]
    rest = [note for note in notes.values() if not note.lists]
    return {"lists": [*lists, *([("", rest)] if rest else [])], "summaries": read_summaries(index, list(notes))}


@router.get("/api/collections")
def read_collections(bench: Bench) -> list[Note]:
    """Return the current note of every memory in the collections."""
    return list(bench.index.annotations.notes().values())


@router.put("/api/collections/{name}", responses=PROBLEMS)
def keep_memory(bench: Bench, viewer: Viewer, name: Name, content: KeptMemory) -> Note:
    """Replace the note of a memory.

    An empty note removes the memory from the collections. Earlier notes stay in the history.
    """
    note = Note(viewer or "me", bench.index.check(name), **_parts(content))
    bench.index.annotations.save(note)
    return note


@router.patch("/api/collections/{name}", responses=PROBLEMS)
def change_kept(bench: Bench, viewer: Viewer, name: Name, content: KeptMemory) -> Note:
    """Change some parts of a note and keep the others."""
    return bench.index.annotations.change_note(bench.index.check(name), viewer or "me", _parts(content))


def _parts(content: KeptMemory) -> dict[str, Any]:
    """Return the given parts of a note, with surrounding spaces and empty list names removed."""
    parts: dict[str, Any] = {name: getattr(content, name) for name in content.model_fields_set}
    parts |= {name: parts[name].strip() for name in ("name", "note") if name in parts}
    if "lists" in parts:
        parts["lists"] = tuple(dict.fromkeys(name.strip() for name in parts["lists"] if name.strip()))
    return parts
