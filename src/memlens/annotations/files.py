"""Import and export of people's labels, verdicts and notes: JSON with the whole history, CSV with what holds now.

JSON carries every event, so that importing it elsewhere (or twice) gives the same history, undos included:

    {"memlens_annotations": 2, "task": "labels", "model": ..., "corpus": ..., "events": [{"key": ..., ...}]}

A backup is the same with the task "both": everybody's events, finished or not, each with its own task.

CSV has one row per pattern (a memory without a pattern has a row with an empty kind) or per verdict; importing it saves
each (annotator, memory) or each row as a new answer. A file is refused as a whole if any part of it is wrong. Files of
version 1 name a subject by "layer" and "memory" or by "example"; those of verdicts say "memlens_verdicts".
"""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memlens.annotations.answers import (
    ANSWERS,
    UNREADABLE,
    Answer,
    Label,
    LabelledPattern,
    Note,
    Sample,
    Verdict,
    require_type,
)
from memlens.annotations.store import Annotations, check_annotator
from memlens.errors import FilesError, SettingError, UnknownName
from memlens.files import read_limited
from memlens.index.history import EVENT_KINDS, LABELS, NOTES, VERDICTS
from memlens.memory import MemoryId
from memlens.pattern.words import KINDS
from memlens.text import cell_text, harmless_cell

FORMATS = ("json", "csv")
_IMPORT_LIMIT = 256 << 20  # bytes of an export; far more than people have labelled
_BOTH = "both"  # the task of a backup
_COLUMNS = {
    LABELS: ("annotator", "memory", "kind", "description", "prefixes"),
    VERDICTS: ("annotator", "example", "verdict", "layer", "text", "residual", "residual_text", "output",
               "output_text"),
    NOTES: ("annotator", "memory", "star", "name", "note", "lists"),
}  # fmt: skip
_DONE = {LABELS: "labelled", VERDICTS: "judged", NOTES: "noted"}
_EXPORTED_BY = {
    LABELS: "annotate INDEX export",
    VERDICTS: "annotate INDEX verdicts export",
    NOTES: "collect INDEX --export FILE",
    _BOTH: "annotate INDEX backup FILE",
}
_IF_CSV = {NOTES: "name it .csv", _BOTH: "use `memlens annotate INDEX import`"}
_EVENT = {"key": str, "time": str, "kind": str, "annotator": str, "content": dict}


def export_text(notes: Annotations, task: str, format: str, annotator: str | None = None) -> str:
    """The export of everybody whose work may be seen (labels: who has finished), or of one person, finished or not."""
    _check_format(format)
    if annotator is not None and annotator not in notes.annotators(task):
        known = ", ".join(notes.annotators(task)) or "nobody"
        raise UnknownName(f"'{annotator}' has {_DONE[task]} nothing here; known: {known}")
    people = [annotator] if annotator else notes.annotators(task, finished=True if task == LABELS else None)
    if format == "json":
        events = [event for event in notes.history(task) if event["annotator"] in ("", *people)]  # a sample is nobody's
        content = {"memlens_annotations": 2, "task": task, **_origin(notes, task), "events": events}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    if task == NOTES:
        return _csv_text(task, (_note_row(note) for note in notes.notes().values() if note.annotator in people))
    if task == VERDICTS:
        return _csv_text(task, (_verdict_row(verdict) for person in people for verdict in notes.verdicts(person)))
    return _csv_text(
        task, (row for person in people for label in notes.labels_of(person) for row in _label_rows(label))
    )


def backup_text(notes: Annotations) -> str:
    """Everything, for safe keeping: restore_text makes the same history of it."""
    content = {"memlens_annotations": 2, "task": _BOTH, **_origin(notes, LABELS), "events": notes.history()}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def restore_text(notes: Annotations, text: str) -> int:
    """Add what a backup holds and the index does not; the number of events."""
    return notes.append_events(_read_events(notes, _BOTH, text))


def is_export(beginning: bytes) -> bool:
    """Does a file begin like one that memlens has exported?"""
    text = beginning.decode("utf-8-sig", "replace")
    first = [",".join(columns) for columns in _COLUMNS.values()]
    return text.lstrip("{ \r\n").startswith(('"memlens_annotations"', '"memlens_verdicts"')) or any(
        text.startswith((line + "\r\n", line + "\n")) for line in first
    )


def import_text(notes: Annotations, task: str, text: str, format: str) -> int:
    """Take an export over; the number of new events (JSON) or answers (CSV)."""
    _check_format(format)
    if format == "json":
        return notes.append_events(_read_events(notes, task, text))
    answers: Sequence[Answer]
    answers = _read_notes(text) if task == NOTES else _read_verdicts(text) if task == VERDICTS else _read_labels(text)
    notes.save(*answers)
    return len(answers)


def read_export(file: str | None, option: str = "--file") -> str:
    """The text of a file or of stdin; a spreadsheet may have put a byte order mark before it."""
    try:
        if file is not None:
            return read_limited(Path(file), _IMPORT_LIMIT).decode("utf-8-sig")
        content = b"" if sys.stdin is None else sys.stdin.buffer.read(_IMPORT_LIMIT + 1)
        if len(content) > _IMPORT_LIMIT:
            raise FilesError(f"it is larger than the {_IMPORT_LIMIT >> 20} MB that are read at once")
        return content.decode("utf-8-sig")
    except (OSError, FilesError, UnicodeDecodeError) as error:
        what = "stdin" if file is None else f"{option} {file}"
        raise SettingError(f"cannot read {what}: {error}; give an export as UTF-8 text") from error


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise SettingError(f"--format is '{format}'; choose one of: {', '.join(FORMATS)}")


def _origin(notes: Annotations, task: str) -> dict[str, str | None]:
    """The model that annotations belong to, and of labels and notes the corpus: a rank names a prefix of it."""
    manifest = notes.index.manifest
    model: dict[str, str | None] = {"model": manifest.model.fingerprint}
    return model if task == VERDICTS else {**model, "corpus": manifest.sha256("corpus")}


# JSON


def _read_events(notes: Annotations, task: str, text: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        advice = _IF_CSV.get(task, "say --format csv")
        raise SettingError(f"the file is not JSON ({error}); is it CSV? then {advice}") from error
    if not isinstance(content, dict) or not isinstance(content.get("events"), list):
        raise SettingError(f"the file is JSON, but no export of `memlens {_EXPORTED_BY[task]}`")
    version = content.get("memlens_annotations", content.get("memlens_verdicts", 1))
    if isinstance(version, bool) or version not in (1, 2):
        raise SettingError(f"the file has version {version!r:.40}, this memlens reads 1 and 2; export it anew")
    task_there = content.get("task", VERDICTS if "memlens_verdicts" in content else LABELS)
    if task_there != task:
        hint = "use `memlens annotate INDEX restore`" if task_there == _BOTH else "is it an export of the other kind?"
        raise SettingError(f"the file holds {task_there!r:.40}, not {task}; {hint}")
    for name, value in _origin(notes, task).items():
        if content.get(name, value if name == "corpus" else None) != value:  # the first exports lack the corpus
            raise SettingError(f"the {task} were made with another {name} than this index; they mean other prefixes")
    events = []
    for number, event in enumerate(content["events"]):
        place = f"event {number} of the file"
        event_task = event.get("task") if task == _BOTH and isinstance(event, Mapping) else task
        if event_task not in EVENT_KINDS:
            raise SettingError(f"{place} has no task; the file is damaged")
        events.append({**_read_event(notes, str(event_task), event, place), "task": event_task})
    return events


def _read_event(notes: Annotations, task: str, event: Any, where: str) -> dict[str, Any]:
    """The event with what memlens itself writes and nothing else: what is once in the history stays there."""
    if not isinstance(event, Mapping) or not all(isinstance(event.get(k), kind) for k, kind in _EVENT.items()):
        raise SettingError(f"{where} lacks {', '.join(_EVENT)}; the file is damaged")
    kind = event["kind"]
    if kind not in EVENT_KINDS[task]:
        raise SettingError(f"{where} is no event memlens knows ('{kind}'); the file is damaged")
    if not (event["key"] + event["time"]).isascii() or (kind == "sample" and event["annotator"]):
        raise SettingError(f"{where} has a key, a time or an annotator that memlens never writes; the file is damaged")
    if kind != "sample":
        check_annotator(event["annotator"])
    read = {name: event[name] for name in _EVENT}
    try:
        read["subject"] = "" if kind in ("sample", "finish") else _subject(notes, task, event)
        read["content"] = _content(notes, task, read)
    except UNREADABLE as error:
        raise SettingError(f"{where} has no readable subject and content; the file is damaged") from error
    return read


def _subject(notes: Annotations, task: str, event: Mapping[str, Any]) -> str:
    if task == VERDICTS:
        return require_type(event["subject"] if "subject" in event else event["example"], str)
    if "subject" in event:
        return str(notes.index.check(require_type(event["subject"], str)))
    return str(notes.index.check(MemoryId(require_type(event["layer"], int), require_type(event["memory"], int))))


def _content(notes: Annotations, task: str, event: Mapping[str, Any]) -> dict[str, Any]:
    if event["kind"] == "undo":
        return {"undoes": require_type(event["content"]["undoes"], str)}
    if event["kind"] == "finish":
        return {}
    if event["kind"] == "sample":
        sample = Sample.read(event["content"])
        for memory in sample.memories:
            notes.index.check(memory)
        return sample.content
    answer = ANSWERS[task].read(event)
    notes.check(answer)
    return answer.content


# CSV


def _csv_text(task: str, rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")  # quotes both signs within a cell, which "\n" alone would not
    writer.writerow(_COLUMNS[task])
    writer.writerows(map(harmless_cell, row) for row in rows)
    return out.getvalue()


def _csv_rows(task: str, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Every row and its place; refused where the text has other columns or is no CSV."""
    columns = _COLUMNS[task]
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        if tuple(reader.fieldnames or ()) != columns:
            wanted = ",".join(columns)
            raise SettingError(f"the file's first line is not {wanted}; is it an export of `memlens annotate`?")
        for row in reader:
            where = f"line {reader.line_num} of the file"
            if None in row or None in row.values():
                raise SettingError(f"{where} has not {len(columns)} columns")
            yield where, {name: cell_text(cell) for name, cell in row.items()}
    except csv.Error as error:
        where = f"line {reader.line_num + 1} of the file"
        raise SettingError(f"{where} is no CSV ({error}); save it as CSV again") from error


def _label_rows(label: Label) -> list[list[Any]]:
    rows = [[p.kind, p.description, " ".join(map(str, p.prefixes))] for p in label.patterns]
    return [[label.annotator, label.memory, *row] for row in rows or [["", "", ""]]]


def _verdict_row(verdict: Verdict) -> list[Any]:
    cells = {"annotator": verdict.annotator, "example": verdict.subject, **verdict.content}
    return [cells[name] for name in _COLUMNS[VERDICTS]]


def _note_row(note: Note) -> list[Any]:
    return [note.annotator, note.memory, "yes" if note.star else "", note.name, note.note, "; ".join(note.lists)]


def _read_notes(text: str) -> list[Note]:
    notes = []
    for place, row in _csv_rows(NOTES, text):
        if row["star"] not in ("", "yes"):
            raise SettingError(f"{place}: the star is '{row['star']}'; write yes, or nothing")
        lists = tuple(name.strip() for name in row["lists"].split(";") if name.strip())
        memory = MemoryId.parse(row["memory"])
        notes.append(Note(row["annotator"], memory, row["star"] == "yes", row["name"], row["note"], lists))
    return notes


def _read_labels(text: str) -> list[Label]:
    patterns: dict[tuple[str, MemoryId], list[LabelledPattern]] = {}
    for where, row in _csv_rows(LABELS, text):
        labelled = patterns.setdefault((row["annotator"], MemoryId.parse(row["memory"])), [])
        if not any(row[name] for name in ("kind", "description", "prefixes")):
            continue
        if row["kind"] not in KINDS:
            raise SettingError(f"{where}: '{row['kind']}' is not a class of pattern; choose {' or '.join(KINDS)}")
        try:
            ranks = tuple(map(int, row["prefixes"].split()))
        except ValueError as error:
            raise SettingError(f"{where}: '{row['prefixes']}' are not trigger ranks; write them like 0 3 7") from error
        labelled.append(LabelledPattern(row["description"], row["kind"], ranks))
    return [Label(annotator, memory, tuple(labelled)) for (annotator, memory), labelled in patterns.items()]


def _read_verdicts(text: str) -> list[Verdict]:
    verdicts = []
    for where, row in _csv_rows(VERDICTS, text):
        try:
            verdicts.append(Verdict.read({**row, "subject": row["example"], "content": row}))
        except UNREADABLE as error:
            raise SettingError(f"{where} has no readable example, or another than its name says") from error
    return verdicts
