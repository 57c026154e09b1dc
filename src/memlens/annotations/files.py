"""Import and export of labels, verdicts and notes. JSON holds the full history, CSV the current answers.

A JSON file contains every event. Importing it into another copy of the index therefore recreates the same history, and
importing it twice adds nothing:

    {"memlens_annotations": 2, "task": "labels", "model": ..., "corpus": ..., "events": [{"key": ..., ...}]}

A backup has the same format with the task "both". It contains all events of all annotators, each with its task.

CSV has one row per pattern, verdict or note. A label without patterns has one row with an empty kind. Importing a CSV
file saves its rows as new answers. A file is rejected completely if any part of it is invalid.
"""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlens.annotations.log import Event
from memlens.annotations.records import (
    ANSWERS,
    CONTENT_ERRORS,
    EVENT_KINDS,
    LABELS,
    NOTES,
    VERDICTS,
    Annotations,
    Answer,
    Label,
    LabeledPattern,
    LastLayerChange,
    Note,
    Sample,
    Verdict,
    check_annotator,
    require_type,
)
from memlens.errors import FilesError, SettingError, UnknownName
from memlens.files import read_limited
from memlens.memory import MemoryId
from memlens.pattern.words import KINDS
from memlens.text import cell_text, harmless_cell

FORMATS = ("json", "csv")
_IMPORT_LIMIT = 256 << 20  # in bytes; far larger than any real export
_BOTH = "both"  # value of "task" in a backup
_COLUMNS = {
    LABELS: ("annotator", "memory", "kind", "description", "prefixes"),
    VERDICTS: ("annotator", "example", "verdict", "layer", "text", "residual", "residual_text", "output",
               "output_text"),
    NOTES: ("annotator", "memory", "star", "name", "note", "lists"),
}  # fmt: skip
_EXPORTED_BY = {
    LABELS: "annotate INDEX export",
    VERDICTS: "annotate INDEX verdicts export",
    NOTES: "collect INDEX --export FILE",
    _BOTH: "annotate INDEX backup FILE",
}
_CSV_ADVICE = {NOTES: "name it .csv", _BOTH: "use `memlens annotate INDEX import`"}
_EVENT = {"key": str, "time": str, "kind": str, "annotator": str, "content": dict}


def export_text(annotations: Annotations, task: str, format: str, annotator: str | None = None) -> str:
    """Return the text of an export, for one annotator or for all.

    An export of the labels of all annotators leaves out annotators who have not finished.
    """
    _check_format(format)
    everyone = annotations.list_annotators(task)
    if annotator is not None and annotator not in everyone:
        raise UnknownName(f"there are no {task} by '{annotator}'; annotators: {', '.join(everyone) or 'none'}")
    people = [annotator] if annotator else annotations.list_annotators(task, True if task == LABELS else None)
    if format == "json":
        events = [
            event for event in annotations.history(task) if event["annotator"] in ("", *people)
        ]  # an event that sets the sample has no annotator
        return _json_text(annotations, task, events)
    if task == NOTES:
        return _csv_text(task, (_note_row(note) for note in annotations.notes().values() if note.annotator in people))
    if task == VERDICTS:
        return _csv_text(task, (_verdict_row(verdict) for name in people for verdict in annotations.verdicts(name)))
    labels = (label for person in people for label in annotations.labels_of(person))
    return _csv_text(task, (row for label in labels for row in _label_rows(label)))


def backup_text(annotations: Annotations) -> str:
    """Return a backup of all events, from which `restore_text` recreates the same history."""
    return _json_text(annotations, _BOTH, annotations.history())


def restore_text(annotations: Annotations, text: str) -> int:
    """Add the events of a backup that are missing from the index. Returns the number of added events."""
    return annotations.append_events(_read_events(annotations, _BOTH, text))


def is_export(beginning: bytes) -> bool:
    """Return True if `beginning` is the beginning of a file that memlens exported."""
    text = beginning.decode("utf-8-sig", "replace")
    headers = [",".join(columns) for columns in _COLUMNS.values()]
    return text.lstrip("{ \r\n").startswith('"memlens_annotations"') or any(
        text.startswith((header + "\r\n", header + "\n")) for header in headers
    )


def import_text(annotations: Annotations, task: str, text: str, format: str) -> int:
    """Import an exported file. Returns the number of new events (JSON) or answers (CSV)."""
    _check_format(format)
    if format == "json":
        return annotations.append_events(_read_events(annotations, task, text))
    answers: Sequence[Answer]
    answers = _read_notes(text) if task == NOTES else _read_verdicts(text) if task == VERDICTS else _read_labels(text)
    annotations.save(*answers)
    return len(answers)


def read_export(file: str | None, option: str = "--file") -> str:
    """Return the text of a file or of stdin. A byte order mark, which spreadsheets may add, is removed."""
    try:
        if file is not None:
            return read_limited(Path(file), _IMPORT_LIMIT).decode("utf-8-sig")
        content = b"" if sys.stdin is None else sys.stdin.buffer.read(_IMPORT_LIMIT + 1)
        if len(content) > _IMPORT_LIMIT:
            raise FilesError(f"the file is larger than the limit of {_IMPORT_LIMIT >> 20} MB")
        return content.decode("utf-8-sig")
    except (OSError, FilesError, UnicodeDecodeError) as error:
        source = "stdin" if file is None else f"{option} {file}"
        raise SettingError(f"cannot read {source}: {error}; the file must be an export of memlens in UTF-8") from error


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise SettingError(f"--format is '{format}'; choose one of: {', '.join(FORMATS)}")


def _origin(annotations: Annotations, task: str) -> dict[str, str | None]:
    """Return the model and the corpus of an export. Verdicts omit the corpus, because they contain no trigger ranks."""
    manifest = annotations.index.manifest
    model: dict[str, str | None] = {"model": manifest.model.fingerprint}
    return model if task == VERDICTS else {**model, "corpus": manifest.sha256("corpus")}


# JSON


def _json_text(annotations: Annotations, task: str, events: list[dict[str, Any]]) -> str:
    content = {"memlens_annotations": 2, "task": task, **_origin(annotations, task), "events": events}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _read_events(annotations: Annotations, task: str, text: str) -> list[Event]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        advice = _CSV_ADVICE.get(task, "use --format csv")
        raise SettingError(f"the file is not JSON ({error}); if it is CSV, {advice}") from error
    if not isinstance(content, dict) or not isinstance(content.get("events"), list):
        raise SettingError(f"the file is JSON, but not an export of `memlens {_EXPORTED_BY[task]}`")
    version = content.get("memlens_annotations")
    if isinstance(version, bool) or version != 2:
        raise SettingError(
            f"the file has version {version!r:.40}, but this version of memlens reads version 2; export it again"
        )
    file_task = content.get("task")
    if file_task != task:
        advice = "use `memlens annotate INDEX restore`" if file_task == _BOTH else "export the right task"
        raise SettingError(f"the file contains {file_task!r:.40}, not {task}; {advice}")
    for name, value in _origin(annotations, task).items():
        if content.get(name) != value:
            raise SettingError(f"the {task} in the file are for another {name} than that of this index")
    events = []
    for number, event in enumerate(content["events"]):
        place = f"event {number} of the file"
        event_task = event.get("task") if task == _BOTH and isinstance(event, Mapping) else task
        if event_task not in EVENT_KINDS:
            raise SettingError(f"{place} has no task; the file is damaged")
        events.append(_read_event(annotations, str(event_task), event, place))
    return events


def _read_event(annotations: Annotations, task: str, event: Any, place: str) -> Event:
    """Return the event after validating it, with its content in the form that memlens writes."""
    if not isinstance(event, Mapping) or not all(isinstance(event.get(k), kind) for k, kind in _EVENT.items()):
        raise SettingError(f"{place} lacks one of the fields {', '.join(_EVENT)}; the file is damaged")
    kind = event["kind"]
    if kind not in EVENT_KINDS[task]:
        raise SettingError(f"{place} has the unknown kind '{kind}'; the file is damaged")
    if not (event["key"] + event["time"]).isascii() or (kind == "sample" and event["annotator"]):
        raise SettingError(f"{place} has an invalid key, time or annotator; the file is damaged")
    if kind != "sample":
        check_annotator(event["annotator"])
    try:
        subject = "" if kind in ("sample", "finish") else require_type(event["subject"], str)
        if subject and task != VERDICTS:
            subject = str(annotations.index.check(subject))
        read = Event(event["key"], event["time"], task, kind, event["annotator"], subject, event["content"])
        return replace(read, content=_read_content(annotations, read))
    except CONTENT_ERRORS as error:
        raise SettingError(f"{place} has an invalid subject or content; the file is damaged") from error


def _read_content(annotations: Annotations, event: Event) -> dict[str, Any]:
    if event.kind == "undo":
        return {"undoes": require_type(event.content["undoes"], str)}
    if event.kind == "finish":
        return {}
    if event.kind == "sample":
        sample = Sample.read(event.content)
        for memory in sample.memories:
            annotations.index.check(memory)
        return sample.content
    answer = ANSWERS[event.task].read(event)
    annotations.check(answer)
    return answer.content


# CSV


def _csv_text(task: str, rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")  # "\n" alone would leave "\r" in a cell unquoted
    writer.writerow(_COLUMNS[task])
    writer.writerows(map(harmless_cell, row) for row in rows)
    return out.getvalue()


def _csv_rows(task: str, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the location and the cells of every row. Raises SettingError for unexpected columns and for invalid CSV."""
    columns = _COLUMNS[task]
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        if tuple(reader.fieldnames or ()) != columns:
            header, command = ",".join(columns), _EXPORTED_BY[task]
            raise SettingError(f"the first line of the file must be {header}, as in an export of `memlens {command}`")
        for row in reader:
            place = f"line {reader.line_num} of the file"
            if None in row or None in row.values():
                raise SettingError(f"{place} does not have {len(columns)} columns")
            yield place, {name: cell_text(cell) for name, cell in row.items()}
    except csv.Error as error:
        place = f"line {reader.line_num + 1} of the file"
        raise SettingError(f"{place} is not valid CSV ({error}); save it as CSV again") from error


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
            raise SettingError(f"{place}: the star is '{row['star']}'; write yes, or leave it empty")
        lists = tuple(name.strip() for name in row["lists"].split(";") if name.strip())
        memory = MemoryId.parse(row["memory"])
        notes.append(Note(row["annotator"], memory, row["star"] == "yes", row["name"], row["note"], lists))
    return notes


def _read_labels(text: str) -> list[Label]:
    patterns: dict[tuple[str, MemoryId], list[LabeledPattern]] = {}
    for place, row in _csv_rows(LABELS, text):
        of_memory = patterns.setdefault((row["annotator"], MemoryId.parse(row["memory"])), [])
        if not any(row[name] for name in ("kind", "description", "prefixes")):
            continue
        if row["kind"] not in KINDS:
            raise SettingError(f"{place}: '{row['kind']}' is not a class of pattern; choose {' or '.join(KINDS)}")
        try:
            ranks = tuple(map(int, row["prefixes"].split()))
        except ValueError as error:
            raise SettingError(
                f"{place}: the prefixes are '{row['prefixes']}'; write trigger ranks separated by spaces, like 0 3 7"
            ) from error
        of_memory.append(LabeledPattern(row["description"], row["kind"], ranks))
    return [Label(annotator, memory, tuple(of_memory)) for (annotator, memory), of_memory in patterns.items()]


def _read_verdicts(text: str) -> list[Verdict]:
    verdicts = []
    for place, row in _csv_rows(VERDICTS, text):
        try:
            change = LastLayerChange.of(row)
        except CONTENT_ERRORS as error:
            raise SettingError(f"{place} does not describe a change by the last layer") from error
        if change.name != row["example"]:
            raise SettingError(f"{place} has the name {row['example']:.40}, but its content has the name {change.name}")
        verdicts.append(Verdict(row["annotator"], change, row["verdict"]))
    return verdicts
