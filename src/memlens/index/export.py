"""An index as plain text for other programs: JSON Lines, one memory a line, or CSV, one trigger a row.

JSON Lines come in two layouts: memlens' own, and that of Neuronpedia's features, of which neuronpedia.py says more.

Memories are read some at a time, so that memory stays bounded however large the index is. Texts are written as they
are in the corpus; a spreadsheet may take one that begins with = for a formula. Knows no files but the index's own.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

from memlens.index.neuronpedia import neuronpedia_features
from memlens.index.reader import Index
from memlens.memory import MemoryId

_MEMORIES_AT_ONCE = 4096  # the corpus is read once for so many
# JSON allows these signs as they are, but terminals act on them; inside a JSON string an escape means the same.
_ESCAPES = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}

CSV_COLUMNS = (
    *("name", "layer", "memory", "end", "rank", "coefficient", "sentence", "position", "next_token", "next_text"),
    *("token", "text"),
)

_TRIGGERS = """
SELECT t.memory, t."end", t.rank, t.coefficient, t.sentence, t.position, t.next_token, v.text AS next_text,
       CASE WHEN t.position < 0 THEN '' ELSE left(c.text, c.ends[t.position + 1]) END AS text,
       CASE WHEN t.position > 0 THEN c.ends[t.position] ELSE 0 END AS token_begins
FROM {triggers} t JOIN {corpus} c ON c.sentence = t.sentence LEFT JOIN {vocabulary} v ON v.token = t.next_token
WHERE t.layer = $1 AND t.memory >= $2 AND t.memory < $3
ORDER BY t.memory, t."end" DESC, t.rank
"""

_FACTS = """
SELECT layer, memory, max, min, mean, frequency, dead, histogram FROM {memories}
WHERE layer = $1 AND memory >= $2 AND memory < $3 ORDER BY memory
"""


class TextSink(Protocol):
    """Anything with a write method that takes text."""

    def write(self, text: str, /) -> Any: ...


def export_jsonl(index: Index, sink: TextSink) -> int:
    """One JSON object a memory, dead ones included; the number of lines comes back."""
    return _write_lines(_memories(index), sink)


def export_neuronpedia(index: Index, sink: TextSink) -> int:
    """The same in the layout of Neuronpedia's features."""
    return _write_lines(neuronpedia_features(index), sink)


def _write_lines(records: Iterable[dict[str, Any]], sink: TextSink) -> int:
    lines = 0
    for record in records:
        sink.write(json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_ESCAPES) + "\n")
        lines += 1
    return lines


def export_csv(index: Index, sink: TextSink) -> int:
    """One row a trigger below a row of column names; the number of triggers comes back."""
    writer = csv.writer(sink, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    rows = 0
    for memory in _memories(index):
        whose = {"name": memory["name"], "layer": memory["layer"], "memory": memory["memory"]}
        for end, triggers in memory["triggers"].items():
            for trigger in triggers:
                row: dict[str, Any] = {**whose, "end": end, **trigger}
                writer.writerow([row[column] for column in CSV_COLUMNS])
                rows += 1
    return rows


FORMATS: dict[str, Callable[[Index, TextSink], int]] = {
    "jsonl": export_jsonl,
    "csv": export_csv,
    "neuronpedia": export_neuronpedia,
}


def _memories(index: Index) -> Iterator[dict[str, Any]]:
    """Every memory of the index in order, with statistics and triggers."""
    for layer in index.layers:
        count = index.memories(layer)
        for first in range(0, count, _MEMORIES_AT_ONCE):
            part = [layer, first, min(first + _MEMORIES_AT_ONCE, count)]
            groups = groupby(index.stream(_TRIGGERS, part), key=itemgetter("memory"))
            waiting = next(groups, None)
            for facts in index.sql(_FACTS, part):
                triggers: dict[str, list[dict[str, Any]]] = {"top": []}
                if waiting is not None and waiting[0] == facts["memory"]:  # a dead memory has no group
                    _sort_by_end_(triggers, waiting[1])
                    waiting = next(groups, None)
                name = str(MemoryId(layer, facts["memory"]))
                yield {"name": name, **facts, "triggers": triggers}


def _sort_by_end_(triggers: dict[str, list[dict[str, Any]]], rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        del row["memory"]
        end, begins = row.pop("end"), row.pop("token_begins")
        row["token"] = row["text"][begins:]
        triggers.setdefault(end, []).append(row)
