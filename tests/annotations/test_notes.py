"""Notes on memories: the last word counts, nothing is lost, and files carry it elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from memlens.annotations.files import backup_text, export_text, import_text, restore_text
from memlens.annotations.records import LABELS, NOTES, Annotations, Note
from memlens.errors import SettingError, UnknownName
from memlens.index.reader import Index

Run = Callable[..., tuple[int, str, str]]


def note(index: Index, number: int, who: str = "me", **parts: object) -> Note:
    return Note(who, index.names.name(index.layers[0], number), **parts)  # type: ignore[arg-type]


def test_the_last_word_counts_and_everything_stays_in_the_history(index: Index) -> None:
    assert Annotations(index).notes() == {} and Annotations(index).mark(NOTES) is None
    one, other = note(index, 1, star=True, name="months"), note(index, 1, "ann", name="dates", lists=("time", "a; b"))
    notes = Annotations(index)
    notes.save(one)
    notes.save(note(index, 0, note='odd\nlines, "quotes"'), other)
    assert notes.notes()[one.memory] == other and len(notes.history(NOTES)) == 3
    notes.undo(NOTES, "ann", str(one.memory))
    assert notes.notes()[one.memory] == one
    notes.save(note(index, 1))  # nothing in it: taken back
    assert list(Annotations(index).notes()) == [note(index, 0).memory]
    assert notes.mark(LABELS) is None  # a note does not make an experiment outdated


@pytest.mark.parametrize("format", ["json", "csv"])
def test_exports_carry_notes_to_another_copy(
    index: Index, copy_of: Callable[..., Index], format: str, tmp_path: Path
) -> None:
    other = copy_of(index, "copy")
    kept = [note(index, 0, star=True, lists=("x", "y")), note(index, 1, name="=1+1", note="a\nb")]
    notes = Annotations(index)
    theirs = Annotations(other)
    notes.save(*kept)
    text = export_text(notes, NOTES, format)
    assert import_text(theirs, NOTES, text, format) == 2
    assert theirs.notes() == notes.notes()
    if format == "json":
        assert import_text(theirs, NOTES, text, format) == 0
        with pytest.raises(SettingError, match="not labels"):
            import_text(theirs, LABELS, text, format)
        assert restore_text(theirs, backup_text(notes)) == 0


def test_what_is_no_note_is_refused(index: Index) -> None:
    notes = Annotations(index)
    for bad in (note(index, 0, name="x" * 201), note(index, 0, lists=(" ",)), note(index, 0, note="\ud800")):
        with pytest.raises(SettingError):
            notes.save(bad)
    with pytest.raises(UnknownName):
        notes.save(note(index, 10**6, star=True))
    with pytest.raises(SettingError, match="star is 'maybe'"):
        import_text(notes, NOTES, "annotator,memory,star,name,note,lists\r\nme,L0N0,maybe,,,\r\n", "csv")
    assert notes.notes() == {}


def test_the_command_line_keeps_lists_and_exports(index: Index, run: Run, tmp_path: Path) -> None:
    name = str(index.names.name(index.layers[0], 0))
    assert run("collect", index.folder, name, "--star", "--name", "a name", "--list", "one", "--list", "two")[0] == 0
    code, out, _ = run("collect", index.folder, name, "--note", "more", "--json")
    (kept,) = json.loads(out)
    assert code == 0 and kept["star"] and kept["name"] == "a name" and kept["note"] == "more"
    assert kept["lists"] == ["one", "two"] and "a name" in run("collect", index.folder)[1]
    for file in ("notes.json", "notes.csv"):
        assert run("collect", index.folder, "--export", tmp_path / file)[0] == 0
        assert run("collect", index.folder, "--import", tmp_path / file)[0] == 0
    for wrong in (["--star"], [name, "--star", "--export", tmp_path / "x.csv"], ["L99N0", "--star"]):
        assert run("collect", index.folder, *wrong)[0] == 2
