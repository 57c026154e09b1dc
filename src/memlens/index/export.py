"""Export of an index as text: JSON Lines with one memory per line, or CSV with one trigger per row.

    jsonl         statistics and triggers of MemoryRecord, named as in `memlens show --json`
    csv           one row per trigger

DuckDB formats the lines of one group of memories at a time to bound memory use. Texts are written as in the corpus,
except that CSV prefixes a text with ' if a spreadsheet would read the text as a formula (text.harmless_cell).
neuronpedia.py writes Neuronpedia's layout, which needs the model.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from memlens.index.reader import Index
from memlens.text import FORMULA

_BYTES_AT_ONCE = 1 << 26  # approximate size of the sentences read at a time
MOST_TRIGGERS = 2**31 - 1  # more than a memory can have, so that all are exported
_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")

_PART = "layer BETWEEN $1 AND $2 AND memory >= $3 AND memory < $4"
_TRIGGERS = f"""
SELECT t.*, v.text AS next_text, c.text AS whole,
       CASE WHEN t.position > 0 THEN c.ends[t.position] ELSE 0 END AS begins,  -- BOS alone has no text
       CASE WHEN t.position >= 0 THEN c.ends[t.position + 1] ELSE 0 END AS stops
FROM {{triggers}} t JOIN {{corpus}} c USING (sentence) LEFT JOIN {{vocabulary}} v ON v.token = t.next_token
WHERE {_PART} AND rank < TOP
"""
# In both queries, NAME stands for the name of a memory, and TOP for the number of triggers of each end.
_JSONL = f"""
WITH lists AS (
    SELECT layer, memory, "end", list(struct_pack(
        rank := rank, coefficient := coefficient::DOUBLE,
        prefix := struct_pack(sentence := sentence, position := position),
        before := left(whole, begins), token := substr(whole, begins + 1, stops - begins),
        after := substr(whole, stops + 1), next_token := next_token, next_text := next_text) ORDER BY rank) AS triggers
    FROM ({_TRIGGERS}) GROUP BY layer, memory, "end"
)
SELECT to_json(struct_pack(
    name := NAME, layer := m.layer, memory := m.memory, max := max, min := min,
    mean := mean, frequency := frequency, dead := dead, histogram := histogram,
    triggers := struct_pack(top := coalesce(top.triggers, []), bottom := coalesce(bottom.triggers, []))))::VARCHAR
    AS line
FROM (SELECT * FROM {{memories}} WHERE {_PART}) m
LEFT JOIN lists top ON top.layer = m.layer AND top.memory = m.memory AND top."end" = 'top'
LEFT JOIN lists bottom ON bottom.layer = m.layer AND bottom.memory = m.memory AND bottom."end" = 'bottom'
ORDER BY m.layer, m.memory
"""


def _cell(text: str) -> str:
    """Return SQL for a CSV cell that spreadsheets do not treat as a formula (see text.harmless_cell)."""
    formula = f"regexp_matches({text}, '^(?:{FORMULA.pattern.replace(chr(39), chr(39) * 2)})')"
    harmless = f"CASE WHEN {formula} THEN chr(39) ELSE '' END || {text}"
    return f"""concat('"', replace({harmless}, '"', '""'), '"')"""


CSV_COLUMNS = (
    *("name", "layer", "memory", "end", "rank", "coefficient", "sentence", "position", "next_token", "next_text"),
    *("token", "text"),
)
_CSV = f"""
SELECT concat('"', NAME, '",', layer, ',', memory, ',"', "end", '",', rank, ',', coefficient::DOUBLE, ',', sentence,
    ',', position, ',', concat_ws(',', coalesce(next_token::VARCHAR, '""'), {_cell("next_text")},
    {_cell("substr(whole, begins + 1, stops - begins)")}, {_cell("left(whole, stops)")})) AS line
FROM ({_TRIGGERS}) m ORDER BY layer, memory, "end" DESC, rank
"""


class Sink(Protocol):
    """An object with a write method for bytes."""

    def write(self, data: Any, /) -> Any: ...


def _split_memories(index: Index) -> Iterator[list[int]]:
    """Yield ranges [first layer, last layer, first memory, memory after the last] whose texts fit in memory."""
    memories = [index.memories(layer) for layer in index.layers]
    size = index.sql("SELECT (SELECT count(*) FROM {triggers}) * avg(strlen(text)) AS bytes FROM {corpus}")[0]["bytes"]
    most = max(int(_BYTES_AT_ONCE * sum(memories) / max(size or 0, 1)), 1)
    at_once = max(most // max(memories), 1)
    for place in range(0, len(memories), at_once):
        layers = index.layers[place : place + at_once]
        for first in range(0, max(memories), most):
            yield [layers[0], layers[-1], first, first + most]


def _write_lines(index: Index, query: str, top: int, sink: Sink, escape: Callable[[str], str] = str) -> None:
    """Write the lines of a query in the order of the index."""
    names = " ".join(f"WHEN {layer} THEN {index.names.sql(layer, 'm.memory')}" for layer in index.layers)
    query = query.replace("NAME", f"CASE m.layer {names} END").replace("TOP", str(top))
    for part in _split_memories(index):
        for batch in index.batches(query, part):
            for line in batch.column("line").to_pylist():
                sink.write(f"{escape(line)}\n".encode())


def export_jsonl(index: Index, sink: Sink, top: int = MOST_TRIGGERS) -> int:
    """Write one JSON object per memory, including dead ones, with up to `top` triggers at each end.

    Returns the number of lines.
    """
    # every exported text is part of the corpus, so searching the corpus once replaces searching every line
    query = f"SELECT 1 AS one FROM {{corpus}} WHERE regexp_matches(text, '{_CONTROLS.pattern}') LIMIT 1"
    _write_lines(index, _JSONL, top, sink, escaped if index.sql(query) else str)
    return sum(map(index.memories, index.layers))


def escaped(line: str) -> str:
    """Escape control characters that a terminal would interpret."""
    return _CONTROLS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", line)


def export_csv(index: Index, sink: Sink, top: int = MOST_TRIGGERS) -> int:
    """Write a header row and one row for each of the `top` triggers at each end. Return the number of trigger rows."""
    sink.write(",".join(f'"{name}"' for name in CSV_COLUMNS).encode() + b"\n")
    _write_lines(index, _CSV, top, sink)
    return int(index.sql("SELECT count(*) AS n FROM {triggers} WHERE rank < $1", [top])[0]["n"])


# How files of each format begin. An export replaces an existing file only if it begins like this.
_BEGINNINGS = (
    re.compile(rb'\{"name":"L\d+(?:[SE]\d+)?N\d+","layer":\d+,"memory":\d+,"max":'),
    re.compile(re.escape(",".join(f'"{name}"' for name in CSV_COLUMNS).encode())),
)


def is_export(head: bytes) -> bool:
    """Return True if a file with this start was written by an export."""
    return any(beginning.match(head) for beginning in _BEGINNINGS)


FORMATS: dict[str, Callable[[Index, Sink, int], int]] = {
    "jsonl": export_jsonl,
    "csv": export_csv,
}
