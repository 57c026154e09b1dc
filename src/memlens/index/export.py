"""An index as text for other programs: JSON Lines, one memory per line, or CSV, one trigger per row.

    jsonl         statistics and triggers of MemoryRecord, named as in `memlens show --json`
    csv           one row per trigger

Memories are read some at a time, so that memory stays bounded. Texts are written as they are in the corpus; only in CSV
one that a spreadsheet would take for a formula has a ' before it (text.harmless_cell). Neuronpedia's layout, which
needs the model, is in neuronpedia.py.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pyarrow as pa

from memlens.index.reader import Index
from memlens.text import FORMULA

_BYTES_AT_ONCE = 1 << 26  # of the sentences of all triggers, about
_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")

# Lines are made by the database: in Python each trigger would cost more than reading it. A prefix triggers several
# memories, so what is written of it is made once; a line is the texts of its pieces in order.
_PART = "layer BETWEEN $1 AND $2 AND memory >= $3 AND memory < $4"
_PREFIXES = f"""
prefixes AS (
    SELECT t.sentence, t.position, t.next_token, v.text AS next_text, c.text AS whole,
           CASE WHEN t.position > 0 THEN c.ends[t.position] ELSE 0 END AS begins,  -- BOS alone, at -1, has no text
           CASE WHEN t.position >= 0 THEN c.ends[t.position + 1] ELSE 0 END AS stops
    FROM (SELECT sentence, position, any_value(next_token) AS next_token FROM {{triggers}} WHERE {_PART}
          GROUP BY sentence, position) t
    JOIN {{corpus}} c USING (sentence) LEFT JOIN {{vocabulary}} v ON v.token = t.next_token
)"""
_RECORDS = f"""
WITH {_PREFIXES}, shown AS (
    SELECT sentence, position, substr(to_json(struct_pack(
        prefix := struct_pack(sentence := sentence, position := position),
        before := left(whole, begins), token := substr(whole, begins + 1, stops - begins),
        after := substr(whole, stops + 1), next_token := next_token, next_text := next_text))::VARCHAR, 2) AS prefix
    FROM prefixes
), pieces AS (
    SELECT layer, memory, 0 AS place, 0 AS rank, left(to_json(struct_pack(
        name := NAME, layer := layer, memory := memory, max := max, min := min,
        mean := mean, frequency := frequency, dead := dead, histogram := histogram,
        triggers := struct_pack(top := [])))::VARCHAR, -3) AS text
    FROM {{memories}} WHERE {_PART}
    UNION ALL
    SELECT layer, memory, CASE "end" WHEN 'top' THEN 1 ELSE 3 END, rank,
           concat(CASE WHEN rank > 0 THEN ',' END, left(to_json(struct_pack(rank := rank,
           coefficient := coefficient::DOUBLE))::VARCHAR, -1), ',', prefix)
    FROM {{triggers}} JOIN shown USING (sentence, position) WHERE {_PART}
    UNION ALL SELECT layer, memory, 2, 0, '],"bottom":[' FROM {{memories}} WHERE {_PART}
    UNION ALL SELECT layer, memory, 4, 0, ']}}}}}}}}' || chr(10) FROM {{memories}} WHERE {_PART}
)
SELECT text FROM pieces ORDER BY layer, memory, place, rank
"""
CSV_COLUMNS = (
    *("name", "layer", "memory", "end", "rank", "coefficient", "sentence", "position", "next_token", "next_text"),
    *("token", "text"),
)


def _cell(text: str) -> str:
    """SQL for a text as a cell, by the rule of text.harmless_cell."""
    formula = f"regexp_matches({text}, '^(?:{FORMULA.pattern.replace(chr(39), chr(39) * 2)})')"
    harmless = f"CASE WHEN {formula} THEN chr(39) ELSE '' END || {text}"
    return f"""concat('"', replace({harmless}, '"', '""'), '"')"""


_ROWS = f"""
WITH {_PREFIXES}, shown AS (
    SELECT sentence, position, concat_ws(',', coalesce(next_token::VARCHAR, '""'), {_cell("next_text")},
           {_cell("substr(whole, begins + 1, stops - begins)")}, {_cell("left(whole, stops)")}) AS prefix
    FROM prefixes
)
SELECT concat('"', NAME, '",', layer, ',', memory, ',"', "end", '",', rank, ',', coefficient::DOUBLE,
              ',', sentence, ',', position, ',', prefix, chr(10)) AS text
FROM {{triggers}} JOIN shown USING (sentence, position) WHERE {_PART} ORDER BY layer, memory, "end" DESC, rank
"""


class Sink(Protocol):
    """Anything with a write method that takes bytes."""

    def write(self, data: Any, /) -> Any: ...


def _parts(index: Index) -> Iterator[list[int]]:
    """First and last layer, first memory and the one after the last: some layers, or some memories of one."""
    memories = [index.memories(layer) for layer in index.layers]
    size = index.sql("SELECT (SELECT count(*) FROM {triggers}) * avg(strlen(text)) AS bytes FROM {corpus}")[0]["bytes"]
    most = max(int(_BYTES_AT_ONCE * sum(memories) / max(size or 0, 1)), 1)
    at_once = max(most // max(memories), 1)
    for place in range(0, len(memories), at_once):
        layers = index.layers[place : place + at_once]
        for first in range(0, max(memories), most):
            yield [layers[0], layers[-1], first, first + most]


def _texts(index: Index, query: str) -> Iterator[pa.Array]:
    """The texts of a query in pieces, in the order of the index; NAME in it is that of a memory."""
    names = " ".join(f"WHEN {layer} THEN {index.names.sql(layer, 'memory')}" for layer in index.layers)
    query = query.replace("NAME", f"CASE layer {names} END")
    return (batch.column(0) for part in _parts(index) for batch in index.batches(query, part) if len(batch))


def export_jsonl(index: Index, sink: Sink) -> int:
    """One JSON object per memory, dead ones included; the number of lines comes back."""
    # Every text is of the corpus, so one look at it saves looking at each line.
    query = f"SELECT 1 AS found FROM {{corpus}} WHERE regexp_matches(text, '{_CONTROLS.pattern}') LIMIT 1"
    has_controls = bool(index.sql(query))
    for piece in _texts(index, _RECORDS):
        data = piece.buffers()[2]
        sink.write(escaped(data.to_pybytes().decode()).encode() if has_controls else data)
    return sum(map(index.memories, index.layers))


def escaped(line: str) -> str:
    """JSON allows these signs as they are, but terminals act on them; an escape means the same."""
    return _CONTROLS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", line)


def export_csv(index: Index, sink: Sink) -> int:
    """One row per trigger below a row of column names; the number of triggers comes back."""
    sink.write(",".join(f'"{name}"' for name in CSV_COLUMNS).encode() + b"\n")
    rows = 0
    for piece in _texts(index, _ROWS):
        sink.write(piece.buffers()[2])
        rows += len(piece)
    return rows


# How a file of each format begins: what is told from it is replaced by a new export, all else is somebody's own.
_BEGINNINGS = (
    re.compile(rb'\{"name":"L\d+(?:[SE]\d+)?N\d+","layer":\d+,"memory":\d+,"max":'),
    re.compile(re.escape(",".join(f'"{name}"' for name in CSV_COLUMNS).encode())),
)


def is_export(head: bytes) -> bool:
    """Was the file that begins like this made by one of these functions?"""
    return any(beginning.match(head) for beginning in _BEGINNINGS)


FORMATS: dict[str, Callable[[Index, Sink], int]] = {
    "jsonl": export_jsonl,
    "csv": export_csv,
}
