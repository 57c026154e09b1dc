"""People's labels as files: JSON with the whole history, CSV with what holds now.

JSON carries every event, so that importing it elsewhere (or twice) gives the same history, undos included. CSV has one
row a pattern for a spreadsheet: annotator, memory, kind, description, prefixes (ranks with spaces between); a memory
without a pattern has a row with empty kind. Importing CSV saves each (annotator, memory) in it as a new label.
Both are refused as a whole if any part of them is wrong. Knows the two formats; the store checks what is in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from memlens.errors import SettingError, UnknownName
from memlens.index.annotations import KINDS, Annotations, LabelledPattern
from memlens.index.csv_text import csv_rows, csv_text
from memlens.index.history import check_annotator
from memlens.index.layout import CORPUS
from memlens.memory import MemoryId

FORMATS = ("json", "csv")
_COLUMNS = ("annotator", "memory", "kind", "description", "prefixes")
_EVENT = {"key": str, "time": str, "kind": str, "annotator": str, "content": dict}
_EVENT_KINDS = ("sample", "label", "undo", "finish")

_Value = TypeVar("_Value")


def export_labels(notes: Annotations, format: str, annotator: str | None = None) -> str:
    """The text of an export: of everybody who has finished, or of one person, finished or not."""
    if annotator is not None and annotator not in notes.annotators():
        known = ", ".join(notes.annotators()) or "nobody"
        raise UnknownName(f"'{annotator}' has labelled nothing here; known: {known}")
    if format == "json":
        whose = {"", *_whose(notes, annotator)}  # a sample is nobody's
        events = [event for event in notes.history() if event["annotator"] in whose]
        content = {"memlens_annotations": 1, **_made_from(notes), "events": events}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    if format != "csv":
        raise SettingError(f"--format is '{format}'; choose one of: {', '.join(FORMATS)}")
    rows: list[list[Any]] = []
    for person in _whose(notes, annotator):
        for label in notes.labels_of(person):
            for pattern in label.patterns:
                ranks = " ".join(map(str, pattern.prefixes))
                rows.append([person, label.memory, pattern.kind, pattern.description, ranks])
            if not label.patterns:
                rows.append([person, label.memory, "", "", ""])
    return csv_text(_COLUMNS, rows)


def _made_from(notes: Annotations) -> dict[str, str | None]:
    """What decides which prefix a trigger rank means."""
    manifest = notes.index.manifest
    return {"model": manifest["model"].get("fingerprint"), "corpus": manifest["files"][CORPUS]["sha256"]}


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
    except (ValueError, RecursionError) as error:
        raise SettingError(f"the file is not JSON ({error}); is it CSV? then say --format csv") from error
    if not isinstance(content, dict) or not isinstance(content.get("events"), list):
        raise SettingError("the file is JSON, but no export of `memlens annotate INDEX export`")
    for what, ours in _made_from(notes).items():
        if content.get(what, ours if what == "corpus" else None) != ours:  # the first exports did not say the corpus
            raise SettingError(f"the labels were made with another {what} than this index; they mean other prefixes")
    return [_checked(notes, event, f"event {number} of the file") for number, event in enumerate(content["events"])]


def _checked(notes: Annotations, event: Any, where: str) -> dict[str, Any]:
    """The event with what memlens itself writes and nothing else: what is once in the history stays there."""
    if not isinstance(event, Mapping) or not all(isinstance(event.get(k), kind) for k, kind in _EVENT.items()):
        raise SettingError(f"{where} lacks {', '.join(_EVENT)}; the file is damaged")
    kind = event["kind"]
    if kind not in _EVENT_KINDS:
        raise SettingError(f"{where} is no event memlens knows ('{kind}'); the file is damaged")
    if not (event["key"] + event["time"]).isascii() or (kind == "sample" and event["annotator"]):
        raise SettingError(f"{where} has a key, a time or an annotator that memlens never writes; the file is damaged")
    if kind != "sample":
        check_annotator(event["annotator"])
    found: dict[str, Any] = {name: event[name] for name in _EVENT}
    try:
        found["content"] = _content(notes, kind, event["content"])
        if kind in ("label", "undo"):
            memory = MemoryId(_typed(event["layer"], int), _typed(event["memory"], int))
            notes.check(memory, [LabelledPattern(**own) for own in found["content"].get("patterns", ())])
            found |= asdict(memory)
    except (KeyError, TypeError) as error:
        raise SettingError(f"{where} has no readable memory, patterns or sample; the file is damaged") from error
    return found


def _content(notes: Annotations, kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "sample":
        memories = [str(notes.index.check(_typed(name, str))) for name in _typed(content["memories"], list)]
        return {"memories": memories, "top": _typed(content["top"], int), "seed": _typed(content["seed"], int)}
    if kind == "label":
        return {"patterns": [_pattern(own) for own in _typed(content["patterns"], list)]}
    return {"undoes": _typed(content["undoes"], str)} if kind == "undo" else {}


def _pattern(content: Mapping[str, Any]) -> dict[str, Any]:
    ranks = [_typed(rank, int) for rank in _typed(content["prefixes"], list)]
    return {"description": _typed(content["description"], str), "kind": _typed(content["kind"], str), "prefixes": ranks}


def _typed(value: Any, kind: type[_Value]) -> _Value:
    if type(value) is not kind:  # True is an int, but no rank
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _read_rows(notes: Annotations, text: str) -> dict[tuple[str, MemoryId], list[LabelledPattern]]:
    labels: dict[tuple[str, MemoryId], list[LabelledPattern]] = {}
    for where, row in csv_rows(text, _COLUMNS):
        own = labels.setdefault((row["annotator"], MemoryId.parse(row["memory"])), [])
        if not any(row[name] for name in ("kind", "description", "prefixes")):
            continue
        if row["kind"] not in KINDS:
            raise SettingError(f"{where}: '{row['kind']}' is not a class of pattern; choose {' or '.join(KINDS)}")
        try:
            ranks = tuple(map(int, row["prefixes"].split()))
        except ValueError as error:
            raise SettingError(f"{where}: '{row['prefixes']}' are not trigger ranks; write them like 0 3 7") from error
        own.append(LabelledPattern(row["description"], row["kind"], ranks))
    return labels
