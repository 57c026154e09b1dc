"""People's work as CSV for a spreadsheet, written and read with one table of columns. Knows text and rows only.

People's labels as files: JSON with the whole history, CSV with what holds now.

JSON carries every event, so that importing it elsewhere (or twice) gives the same history, undos included. CSV has one
row a pattern for a spreadsheet: annotator, memory, kind, description, prefixes (ranks with spaces between); a memory
without a pattern has a row with empty kind. Importing CSV saves each (annotator, memory) in it as a new label.
Both are refused as a whole if any part of them is wrong. Knows the two formats; the store checks what is in them.

People's verdicts on changes of the last layer as files: JSON with the whole history, CSV with what holds now.

JSON carries every event, so that importing it elsewhere (or twice) gives the same history, undos included. CSV has one
row a verdict for a spreadsheet; importing it saves each row as a new verdict. Both are refused as a whole if any part
of them is wrong. Knows the two formats; labels of patterns have theirs in patterns/exchange.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from memlens.annotations.labels import KINDS, Annotations, Example, LabelledPattern, Verdict, Verdicts, check_verdict
from memlens.annotations.store import check_annotator
from memlens.errors import SettingError, UnknownName
from memlens.memory import MemoryId


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")  # quotes both signs within a cell, which "\n" alone would not
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()


def csv_rows(text: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Every row and where it is; refused where the text has other columns or is no CSV."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        if tuple(reader.fieldnames or ()) != tuple(columns):
            raise SettingError(
                f"the file's first line is not {','.join(columns)}; is it an export of `memlens annotate`?"
            )
        for row in reader:
            where = f"line {reader.line_num} of the file"
            if None in row or None in row.values():
                raise SettingError(f"{where} has not {len(columns)} columns")
            yield where, row
    except csv.Error as error:
        raise SettingError(
            f"line {reader.line_num + 1} of the file is no CSV ({error}); save it as CSV again"
        ) from error


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
    return {"model": manifest.model.fingerprint, "corpus": manifest.sha256("corpus")}


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


VERDICT_FILES_FORMATS = ("json", "csv")
_VERDICT_FILES_COLUMNS = (
    "annotator",
    "example",
    "verdict",
    "layer",
    "text",
    "residual",
    "residual_text",
    "output",
    "output_text",
)
_VERDICT_FILES_EVENT = {"key": str, "time": str, "kind": str, "annotator": str, "example": str, "content": dict}
_WRONG = (KeyError, TypeError, ValueError, OverflowError)


def export_verdicts(notes: Verdicts, format: str, annotator: str | None = None) -> str:
    """The text of an export, of everybody or of one person."""
    if annotator is not None and annotator not in notes.annotators():
        known = ", ".join(notes.annotators()) or "nobody"
        raise UnknownName(f"'{annotator}' has judged nothing here; known: {known}")
    if format == "json":
        events = [event for event in notes.history() if annotator in (None, event["annotator"])]
        content = {"memlens_verdicts": 1, "model": _model(notes), "events": events}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    _check_format(format)
    rows = []
    for one in notes.verdicts(annotator):
        own = {"annotator": one.annotator, "example": one.example.name, "verdict": one.verdict, **asdict(one.example)}
        rows.append([own[name] for name in _VERDICT_FILES_COLUMNS])
    return csv_text(_VERDICT_FILES_COLUMNS, rows)


def import_verdicts(notes: Verdicts, text: str, format: str) -> int:
    """Take an export over; how many events or verdicts were new."""
    if format == "json":
        return notes.append_events(_verdict_files_read_events(notes, text))
    _check_format(format)
    return notes.save_all(_verdict_files_read_rows(text))


def _check_format(format: str) -> None:
    if format not in VERDICT_FILES_FORMATS:
        raise SettingError(f"--format is '{format}'; choose one of: {', '.join(VERDICT_FILES_FORMATS)}")


def _model(notes: Verdicts) -> str | None:
    return notes.index.manifest.model.fingerprint


def _verdict_files_read_events(notes: Verdicts, text: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError("the file is not JSON; is it CSV? then say --format csv") from error
    if (
        not isinstance(content, dict)
        or "memlens_verdicts" not in content
        or not isinstance(content.get("events"), list)
    ):
        raise SettingError("the file is JSON, but no export of `memlens annotate INDEX verdicts export`")
    if content.get("model") != _model(notes):
        raise SettingError("the verdicts were made with another model than this index; its changes are other ones")
    events: list[dict[str, Any]] = content["events"]
    for number, event in enumerate(events):
        _check_event(event, f"event {number} of the file")
    return events


def _check_event(event: Any, where: str) -> None:
    if not isinstance(event, Mapping) or not all(
        isinstance(event.get(k), kind) for k, kind in _VERDICT_FILES_EVENT.items()
    ):
        raise SettingError(f"{where} lacks {', '.join(_VERDICT_FILES_EVENT)}; the file is damaged")
    check_annotator(event["annotator"])
    if event["kind"] == "undo" and isinstance(event["content"].get("undoes"), str):
        return
    if event["kind"] != "verdict":
        raise SettingError(f"{where} is no event memlens knows ('{event['kind']}'); the file is damaged")
    check_verdict(str(event["content"].get("verdict")))
    _checked_example(event["content"], event["example"], where)


def _verdict_files_read_rows(text: str) -> list[Verdict]:
    return [
        Verdict(row["annotator"], _checked_example(row, row["example"], where), row["verdict"])
        for where, row in csv_rows(text, _VERDICT_FILES_COLUMNS)
    ]


def _checked_example(content: Mapping[str, Any], name: str, where: str) -> Example:
    try:
        example = Example.of(content)
    except _WRONG as error:
        raise SettingError(f"{where} has no readable example; the file is damaged") from error
    if example.name != name:
        raise SettingError(f"{where}: its prefix and words are not those of example {name}; the file was changed")
    return example
