"""People's labels as files: JSON with the whole history, CSV with what holds now.

JSON carries every event, so that importing it elsewhere (or twice) gives the same history, undos included. CSV has one
row a pattern for a spreadsheet: annotator, memory, kind, description, prefixes (ranks with spaces between); a memory
without a pattern has a row with empty kind. Importing CSV saves each (annotator, memory) in it as a new label.
Both are refused as a whole if any part of them is wrong. Knows the two formats; the store checks what is in them.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from memlens.errors import SettingError, UnknownName
from memlens.index.annotations import KINDS, Annotations, LabelledPattern
from memlens.memory import MemoryId

FORMATS = ("json", "csv")
_COLUMNS = ("annotator", "memory", "kind", "description", "prefixes")
_EVENT = {"key": str, "time": str, "kind": str, "annotator": str, "content": dict}
_CONTENT = {"sample": ("memories", "top", "seed"), "label": ("patterns",), "undo": ("undoes",), "finish": ()}


def export_labels(notes: Annotations, format: str, annotator: str | None = None) -> str:
    """The text of an export: of everybody who has finished, or of one person, finished or not."""
    if annotator is not None and annotator not in notes.annotators():
        known = ", ".join(notes.annotators()) or "nobody"
        raise UnknownName(f"'{annotator}' has labelled nothing here; known: {known}")
    if format == "json":
        whose = {"", *_whose(notes, annotator)}  # a sample is nobody's
        events = [event for event in notes.history() if event["annotator"] in whose]
        model = notes.index.manifest["model"].get("fingerprint")
        content = {"memlens_annotations": 1, "model": model, "events": events}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    if format != "csv":
        raise SettingError(f"--format is '{format}'; choose one of: {', '.join(FORMATS)}")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for person in _whose(notes, annotator):
        for label in notes.labels_of(person):
            for pattern in label.patterns:
                ranks = " ".join(map(str, pattern.prefixes))
                writer.writerow([person, label.memory, pattern.kind, pattern.description, ranks])
            if not label.patterns:
                writer.writerow([person, label.memory, "", "", ""])
    return out.getvalue()


def _whose(notes: Annotations, annotator: str | None) -> list[str]:
    return notes.annotators(finished=True) if annotator is None else [annotator]


def import_labels(notes: Annotations, text: str, format: str) -> int:
    """Take an export over; how many events or labels were new."""
    if format == "json":
        return notes.append_events(_read_events(notes, text))
    if format != "csv":
        raise SettingError(f"--format is '{format}'; choose one of: {', '.join(FORMATS)}")
    labels = _read_rows(notes, text)
    return notes.save_all([(person, memory, patterns) for (person, memory), patterns in labels.items()])


def _read_events(notes: Annotations, text: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise SettingError(f"the file is not JSON ({error}); is it CSV? then say --format csv") from error
    if not isinstance(content, dict) or not isinstance(content.get("events"), list):
        raise SettingError("the file is JSON, but no export of `memlens annotate INDEX export`")
    ours = notes.index.manifest["model"].get("fingerprint")
    if content.get("model") != ours:
        raise SettingError("the labels were made with another model than this index; their prefixes are other ones")
    for number, event in enumerate(content["events"]):
        _check_event(notes, event, number)
    events: list[dict[str, Any]] = content["events"]
    return events


def _check_event(notes: Annotations, event: Any, number: int) -> None:
    where = f"event {number} of the file"
    if not isinstance(event, Mapping) or not all(isinstance(event.get(k), kind) for k, kind in _EVENT.items()):
        raise SettingError(f"{where} lacks {', '.join(_EVENT)}; the file is damaged")
    needed = _CONTENT.get(event["kind"])
    if needed is None or any(name not in event["content"] for name in needed):
        raise SettingError(f"{where} is no event memlens knows ('{event['kind']}'); the file is damaged")
    if event["kind"] in ("label", "undo"):
        try:
            memory = MemoryId(int(event["layer"]), int(event["memory"]))
            patterns = [
                LabelledPattern(str(p["description"]), str(p["kind"]), tuple(map(int, p["prefixes"])))
                for p in event["content"].get("patterns", ())
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise SettingError(f"{where} has no readable memory or patterns; the file is damaged") from error
        notes.check(memory, patterns)


def _read_rows(notes: Annotations, text: str) -> dict[tuple[str, MemoryId], list[LabelledPattern]]:
    reader = csv.DictReader(io.StringIO(text))
    if tuple(reader.fieldnames or ()) != _COLUMNS:
        raise SettingError(f"the file's first line is not {','.join(_COLUMNS)}; is it an export of `memlens annotate`?")
    labels: dict[tuple[str, MemoryId], list[LabelledPattern]] = {}
    for row in reader:
        where = f"line {reader.line_num} of the file"
        if None in row or None in row.values():
            raise SettingError(f"{where} has not {len(_COLUMNS)} columns")
        own = labels.setdefault((row["annotator"], MemoryId.parse(row["memory"])), [])
        if not row["kind"] and not row["description"]:
            continue
        if row["kind"] not in KINDS:
            raise SettingError(f"{where}: '{row['kind']}' is not a class of pattern; choose {' or '.join(KINDS)}")
        try:
            ranks = tuple(map(int, row["prefixes"].split()))
        except ValueError as error:
            raise SettingError(f"{where}: '{row['prefixes']}' are not trigger ranks; write them like 0 3 7") from error
        own.append(LabelledPattern(row["description"], row["kind"], ranks))
    return labels
