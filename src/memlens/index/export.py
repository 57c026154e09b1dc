"""Export of an index as text: JSON Lines with one memory per line, or CSV with one trigger per row.

    jsonl         statistics and triggers of MemoryRecord, named as in `memlens show --json`
    csv           one row per trigger

Memories are read in groups to bound memory use. Texts are written as they are in the corpus, except that CSV prefixes a
text with ' if a spreadsheet would read it as a formula (text.harmless_cell). neuronpedia.py writes Neuronpedia's
layout, which needs the model.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.text import FORMULA

_BYTES_AT_ONCE = 1 << 26  # approximate size of the sentences read at a time
_PIECES_AT_ONCE = 1 << 13  # pieces per write
_ESCAPED = r'[\x00-\x1f"\\]'  # characters that JSON escapes
_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")

# An export is a sequence of pieces of text that the database formats, because formatting a trigger in Python takes
# longer than reading it. A trigger consists of its own piece and the piece of its prefix. The latter is formatted only
# once, because a prefix triggers several memories.
_PART = "layer BETWEEN $1 AND $2 AND memory >= $3 AND memory < $4"
_PREFIX = "(sentence::UBIGINT << 32) + (position + 1)::UBIGINT AS prefix"  # position -1 is BOS alone
_PREFIXES = f"""
SELECT {_PREFIX}, PIECE AS text
FROM (
    SELECT t.sentence, t.position, t.next_token, v.text AS next_text, c.text AS whole, c.is_plain,
           CASE WHEN t.position > 0 THEN c.ends[t.position] ELSE 0 END AS begins,  -- BOS alone has no text
           CASE WHEN t.position >= 0 THEN c.ends[t.position + 1] ELSE 0 END AS stops
    FROM (SELECT sentence, position, any_value(next_token) AS next_token FROM {{triggers}} WHERE {_PART}
          GROUP BY sentence, position) t
    JOIN (SELECT sentence, text, ends, NOT regexp_matches(text, '{_ESCAPED}') AS is_plain FROM {{corpus}}) c
        USING (sentence) LEFT JOIN {{vocabulary}} v ON v.token = t.next_token
)"""
_MEMORY = "(layer::BIGINT << 32) + memory"
_TRIGGERS = f"""
SELECT ({_MEMORY}) * 2 + ("end" <> 'top')::BIGINT AS end_of_memory, rank::BIGINT AS rank, {_PREFIX}, PIECE AS text
FROM {{triggers}} WHERE {_PART}"""
_MEMORIES = f"SELECT {_MEMORY} AS memory, PIECE AS text FROM {{memories}} WHERE {_PART} ORDER BY layer, memory"


@dataclass(frozen=True)
class _Layout:
    """The pieces of a format as SQL. NAME stands for the name of a memory."""

    prefix: str
    trigger: str
    memory: str | None = None  # piece before the triggers of a memory; None if the format has none
    between: str = ""  # piece between the top and the bottom triggers
    after: str = ""  # piece after all triggers of a memory


# Most sentences contain no character that JSON escapes. Quoting them directly saves about a quarter of the time.
_JSONL = _Layout(
    prefix="""CASE WHEN is_plain THEN concat('"prefix":{{"sentence":', sentence, ',"position":', position,
        '}},"before":"', left(whole, begins), '","token":"', substr(whole, begins + 1, stops - begins),
        '","after":"', substr(whole, stops + 1), '","next_token":', coalesce(next_token::VARCHAR, 'null'),
        ',"next_text":', coalesce(to_json(next_text)::VARCHAR, 'null'), '}}')
    ELSE substr(to_json(struct_pack(
        prefix := struct_pack(sentence := sentence, position := position),
        before := left(whole, begins), token := substr(whole, begins + 1, stops - begins),
        after := substr(whole, stops + 1), next_token := next_token, next_text := next_text))::VARCHAR, 2) END""",
    trigger="""concat(CASE WHEN rank > 0 THEN ',' END, '{{"rank":', rank,
        ',"coefficient":', to_json(coefficient::DOUBLE), ',')""",
    memory="""left(to_json(struct_pack(
        name := NAME, layer := layer, memory := memory, max := max, min := min,
        mean := mean, frequency := frequency, dead := dead, histogram := histogram,
        triggers := struct_pack(top := [])))::VARCHAR, -3)""",
    between='],"bottom":[',
    after="]}}\n",
)


def _cell(text: str) -> str:
    """Return SQL for a CSV cell that spreadsheets do not treat as a formula (see text.harmless_cell)."""
    formula = f"regexp_matches({text}, '^(?:{FORMULA.pattern.replace(chr(39), chr(39) * 2)})')"
    harmless = f"CASE WHEN {formula} THEN chr(39) ELSE '' END || {text}"
    return f"""concat('"', replace({harmless}, '"', '""'), '"')"""


CSV_COLUMNS = (
    *("name", "layer", "memory", "end", "rank", "coefficient", "sentence", "position", "next_token", "next_text"),
    *("token", "text"),
)
_CSV = _Layout(
    prefix=f"""concat(concat_ws(',', coalesce(next_token::VARCHAR, '""'), {_cell("next_text")},
        {_cell("substr(whole, begins + 1, stops - begins)")}, {_cell("left(whole, stops)")}), chr(10))""",
    trigger="""concat('"', NAME, '",', layer, ',', memory, ',"', "end", '",', rank, ',', coefficient::DOUBLE,
        ',', sentence, ',', position, ',')""",
)


class Sink(Protocol):
    """An object with a write method for bytes."""

    def write(self, data: Any, /) -> Any: ...


def _split_memories(index: Index) -> Iterator[list[int]]:
    """Yield ranges [first layer, last layer, first memory, end of memories] whose texts fit in memory."""
    memories = [index.memories(layer) for layer in index.layers]
    size = index.sql("SELECT (SELECT count(*) FROM {triggers}) * avg(strlen(text)) AS bytes FROM {corpus}")[0]["bytes"]
    most = max(int(_BYTES_AT_ONCE * sum(memories) / max(size or 0, 1)), 1)
    at_once = max(most // max(memories), 1)
    for place in range(0, len(memories), at_once):
        layers = index.layers[place : place + at_once]
        for first in range(0, max(memories), most):
            yield [layers[0], layers[-1], first, first + most]


def _generate_text(index: Index, layout: _Layout) -> Iterator[pa.Buffer]:
    """Yield the text of an export in the order of the index."""
    names = " ".join(f"WHEN {layer} THEN {index.names.sql(layer, 'memory')}" for layer in index.layers)
    name = f"CASE layer {names} END"

    def read(query: str, piece: str, part: list[int]) -> list[pa.RecordBatch]:
        return list(index.batches(query.replace("PIECE", piece.replace("NAME", name)), part))

    for part in _split_memories(index):
        prefixes, triggers = read(_PREFIXES, layout.prefix, part), read(_TRIGGERS, layout.trigger, part)
        memories = [] if layout.memory is None else read(_MEMORIES, layout.memory, part)
        borders = index.batches("SELECT unnest([$1, $2]) AS text", [layout.between, layout.after])
        pieces = [batch.column("text") for batch in (*triggers, *prefixes, *memories, *borders)]
        yield from _reorder(pieces, _order_pieces(triggers, prefixes, memories))


def _order_pieces(
    triggers: list[pa.RecordBatch], prefixes: list[pa.RecordBatch], memories: list[pa.RecordBatch]
) -> NDArray[np.int64]:
    """Return the order in which pieces are written.

    Pieces of triggers have the first numbers, `between` and `after` the last two. A memory's piece comes before its
    top triggers, `between` before its bottom triggers, and `after` at its end.
    """
    ends, known, numbers = _column(triggers, "end_of_memory"), _column(prefixes, "prefix"), _column(memories, "memory")
    sorted_rows = np.lexsort((_column(triggers, "rank"), ends))
    rows = len(ends) + _find_positions(known, _column(triggers, "prefix")[sorted_rows])
    pairs = np.column_stack([sorted_rows, rows]).ravel()
    first = len(ends) + len(known)
    around = np.empty((len(numbers), 3), np.int64)
    around[:, 0] = first + np.arange(len(numbers))
    around[:, 1:] = first + len(numbers) + np.arange(2)
    places = np.searchsorted(ends[sorted_rows], (numbers * 2)[:, None] + np.arange(3))
    return np.insert(pairs, 2 * places.ravel(), around.ravel())


def _column(batches: Sequence[pa.RecordBatch], name: str) -> NDArray[np.int64]:
    """Return a column of 64-bit numbers without pyarrow's to_numpy, which imports pandas."""
    columns = [batch.column(name) for batch in batches]
    views = [np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset) for column in columns]
    return np.concatenate([np.empty(0, np.int64), *views])


def _find_positions(known: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each wanted number in `known`, which has no duplicates."""
    order = np.argsort(known)
    return order[np.searchsorted(known[order], wanted)]


def _reorder(pieces: Sequence[pa.Array], order: NDArray[np.int64]) -> Iterator[pa.Buffer]:
    """Yield the bytes of pieces of text in this order, _PIECES_AT_ONCE at a time."""
    texts = pa.concat_arrays([piece.cast(pa.large_string()) for piece in pieces])  # string() is limited to 2 GB
    for first in range(0, len(order), _PIECES_AT_ONCE):
        chosen = order[first : first + _PIECES_AT_ONCE]
        # shares the memory of `chosen`
        numbers = pa.Array.from_buffers(pa.int64(), len(chosen), [None, pa.py_buffer(chosen)])
        yield texts.take(numbers).buffers()[2]


def export_jsonl(index: Index, sink: Sink) -> int:
    """Write one JSON object per memory, including dead ones. Return the number of lines."""
    # every exported text is part of the corpus, so searching the corpus once replaces searching every line
    query = f"SELECT 1 AS found FROM {{corpus}} WHERE regexp_matches(text, '{_CONTROLS.pattern}') LIMIT 1"
    has_controls = bool(index.sql(query))
    for data in _generate_text(index, _JSONL):
        sink.write(escaped(data.to_pybytes().decode()).encode() if has_controls else data)
    return sum(map(index.memories, index.layers))


def escaped(line: str) -> str:
    """Escape control characters that a terminal would interpret."""
    return _CONTROLS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", line)


def export_csv(index: Index, sink: Sink) -> int:
    """Write one row per trigger after a row of column names. Return the number of triggers."""
    sink.write(",".join(f'"{name}"' for name in CSV_COLUMNS).encode() + b"\n")
    for data in _generate_text(index, _CSV):
        sink.write(data)
    return int(index.sql("SELECT count(*) AS n FROM {triggers}")[0]["n"])


# How files of each format begin. Only such a file is replaced by a new export; any other file belongs to the user.
_BEGINNINGS = (
    re.compile(rb'\{"name":"L\d+(?:[SE]\d+)?N\d+","layer":\d+,"memory":\d+,"max":'),
    re.compile(re.escape(",".join(f'"{name}"' for name in CSV_COLUMNS).encode())),
)


def is_export(head: bytes) -> bool:
    """Return True if a file with this start was written by an export."""
    return any(beginning.match(head) for beginning in _BEGINNINGS)


FORMATS: dict[str, Callable[[Index, Sink], int]] = {
    "jsonl": export_jsonl,
    "csv": export_csv,
}
