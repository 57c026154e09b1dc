"""People's verdicts on changes of the last layer as files: JSON with the whole history, CSV with what holds now.

JSON carries every event, so that importing it elsewhere (or twice) gives the same history, undos included. CSV has one
row a verdict for a spreadsheet; importing it saves each row as a new verdict. Both are refused as a whole if any part
of them is wrong. Knows the two formats; labels of patterns have theirs in patterns/exchange.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from memlens.errors import SettingError, UnknownName
from memlens.index.csv_text import csv_rows, csv_text
from memlens.index.history import check_annotator
from memlens.index.verdicts import Example, Verdict, Verdicts, check_verdict

FORMATS = ("json", "csv")
_COLUMNS = ("annotator", "example", "verdict", "layer", "text", "residual", "residual_text", "output", "output_text")
_EVENT = {"key": str, "time": str, "kind": str, "annotator": str, "example": str, "content": dict}
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
        rows.append([own[name] for name in _COLUMNS])
    return csv_text(_COLUMNS, rows)


def import_verdicts(notes: Verdicts, text: str, format: str) -> int:
    """Take an export over; how many events or verdicts were new."""
    if format == "json":
        return notes.append_events(_read_events(notes, text))
    _check_format(format)
    return notes.save_all(_read_rows(text))


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise SettingError(f"--format is '{format}'; choose one of: {', '.join(FORMATS)}")


def _model(notes: Verdicts) -> str | None:
    fingerprint: str | None = notes.index.manifest["model"].get("fingerprint")
    return fingerprint


def _read_events(notes: Verdicts, text: str) -> list[dict[str, Any]]:
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
    if not isinstance(event, Mapping) or not all(isinstance(event.get(k), kind) for k, kind in _EVENT.items()):
        raise SettingError(f"{where} lacks {', '.join(_EVENT)}; the file is damaged")
    check_annotator(event["annotator"])
    if event["kind"] == "undo" and isinstance(event["content"].get("undoes"), str):
        return
    if event["kind"] != "verdict":
        raise SettingError(f"{where} is no event memlens knows ('{event['kind']}'); the file is damaged")
    check_verdict(str(event["content"].get("verdict")))
    _checked_example(event["content"], event["example"], where)


def _read_rows(text: str) -> list[Verdict]:
    return [
        Verdict(row["annotator"], _checked_example(row, row["example"], where), row["verdict"])
        for where, row in csv_rows(text, _COLUMNS)
    ]


def _checked_example(content: Mapping[str, Any], name: str, where: str) -> Example:
    try:
        example = Example.of(content)
    except _WRONG as error:
        raise SettingError(f"{where} has no readable example; the file is damaged") from error
    if example.name != name:
        raise SettingError(f"{where}: its prefix and words are not those of example {name}; the file was changed")
    return example
