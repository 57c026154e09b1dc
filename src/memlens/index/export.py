"""An index as text for other programs: JSON Lines, one memory per line, or CSV, one trigger per row.

    jsonl         statistics and triggers of MemoryRecord, named as in `memlens show --json`
    neuronpedia   Neuronpedia's features: one record per memory, activations inside, as its site answers
    csv           one row per trigger

Memories are read some at a time, so that memory stays bounded. Texts are written as they are in the corpus; only in CSV
one that a spreadsheet would take for a formula has a ' before it (text.harmless_cell).

Neuronpedia's fields, filled from a scan:

    modelId, layer, index            the model's name, "3-memlens", "512"
    activations                      one per top trigger, strongest first: tokens, values, maxValue, minValue,
                                     maxValueTokenIndex, qualifyingTokenIndex, binMin, binMax, binContains
    maxActApprox, frac_nonzero       the highest coefficient; the share of prefixes on which it is above 0
    freq_hist_data_bar_values        middles of the histogram's bins (they double in width outwards), and how many
    freq_hist_data_bar_heights       sampled prefixes lie in each, from the first filled bin to the last

From later stages, else empty: pos_str, pos_values, neg_str, neg_values (`memlens values`; a number is
ln(p * vocabulary), the logit above that of a uniform choice), explanations (`memlens patterns`). An index keeps a
coefficient at the trigger's own position only, so all other `values` are 0; tokens are cut to a window around it;
bottom triggers have no place in the layout. neuron_alignment_*, correlated_*, topkCosSim*, logits_hist_*,
decoder_weights_dist and vector speak of sparse autoencoders or of things not in an index: they are empty lists.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Protocol

import pyarrow as pa

from memlens.index.reader import Index
from memlens.text import FORMULA

_BYTES_AT_ONCE = 1 << 26  # of the sentences of all triggers, about
_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")
_BEFORE, _AFTER = 64, 16  # tokens kept around a trigger
_TOKENS = 10  # at each end of a value, as the site shows
_LEAST_P = 1.1754944e-38  # what float32 holds; a probability of 0 has no logarithm

_UNKNOWN = (
    *("topkCosSimIndices", "topkCosSimValues", "decoder_weights_dist", "vector"),
    *(f"neuron_alignment_{part}" for part in ("indices", "values", "l1")),
    *(f"correlated_{what}_{part}" for what in ("neurons", "features") for part in ("indices", "pearson", "l1")),
    *("logits_hist_data_bar_heights", "logits_hist_data_bar_values"),
)

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

_TRIGGERS = f"""
WITH own AS (
    SELECT layer, memory, rank, coefficient, position, greatest(position - {_BEFORE}, 0) AS first, text, ends
    FROM {{triggers}} JOIN {{corpus}} USING (sentence) WHERE {_PART} AND "end" = 'top'
), cut AS (
    SELECT * EXCLUDE ends, ends[first + 1 : position + 1 + {_AFTER}] AS ends,
           CASE WHEN first > 0 THEN own.ends[first] ELSE 0 END AS begins
    FROM own
)
SELECT * EXCLUDE text, substr(text, begins + 1, coalesce(ends[len(ends)], begins) - begins) AS text
FROM cut ORDER BY layer, memory, rank
"""
_FACTS = f"SELECT layer, memory, max, min, frequency, histogram FROM {{memories}} WHERE {_PART} ORDER BY layer, memory"
_VALUES = f"SELECT layer, memory, tokens, p, bottom_tokens, bottom_p FROM {{values}} WHERE {_PART}"
_NAMES = f"SELECT layer, memory, name FROM {{names}} WHERE {_PART}"
_MEMORY = itemgetter("layer", "memory")


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
        sink.write(_escaped(data.to_pybytes().decode()).encode() if has_controls else data)
    return sum(map(index.memories, index.layers))


def export_neuronpedia(index: Index, sink: Sink) -> int:
    """The same in the layout of Neuronpedia's features."""
    count = 0
    for feature in (feature for part in _parts(index) for feature in _features(index, part)):
        line = _escaped(json.dumps(feature, ensure_ascii=False, allow_nan=False))
        sink.write(f"{line}\n".encode())
        count += 1
    return count


def _escaped(line: str) -> str:
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
    re.compile(rb'\{"modelId": "(?:[^"\\]|\\.)*", "layer": "\d+-memlens", "index": "\d+", '),
    re.compile(re.escape(",".join(f'"{name}"' for name in CSV_COLUMNS).encode())),
)


def is_export(head: bytes) -> bool:
    """Was the file that begins like this made by one of these functions?"""
    return any(beginning.match(head) for beginning in _BEGINNINGS)


FORMATS: dict[str, Callable[[Index, Sink], int]] = {
    "jsonl": export_jsonl,
    "csv": export_csv,
    "neuronpedia": export_neuronpedia,
}


def _features(index: Index, part: list[int]) -> Iterator[dict[str, Any]]:
    groups = groupby(index.stream(_TRIGGERS, part), key=_MEMORY)
    waiting = next(groups, None)
    values = {_MEMORY(row): row for row in index.sql(_VALUES, part)} if index.has("values") else {}
    names = {_MEMORY(row): row["name"] for row in index.sql(_NAMES, part)} if index.has("names") else {}
    for facts in index.sql(_FACTS, part):
        memory, triggers = _MEMORY(facts), []
        if waiting is not None and waiting[0] == memory:  # a dead memory has no group
            triggers = list(waiting[1])
            waiting = next(groups, None)
        name = {"modelId": index.manifest.model.name, "layer": f"{memory[0]}-memlens", "index": str(memory[1])}
        yield {
            **name,
            "maxActApprox": facts["max"],
            "frac_nonzero": facts["frequency"],
            **_histogram(facts, index.manifest.histogram_edges),
            **_both_ends(index, values.get(memory)),
            **{field: [] for field in _UNKNOWN},
            "explanations": [name | {"description": names[memory]}] if memory in names else [],
            "activations": list(_activations(name, triggers, index.manifest.counts.prefixes)),
        }


def _activations(whose: dict[str, Any], triggers: list[dict[str, Any]], prefixes: int) -> Iterator[dict[str, Any]]:
    for row in triggers:
        edges = [row["begins"], *row["ends"]]
        tokens = [row["text"][one - edges[0] : other - edges[0]] for one, other in pairwise(edges)]
        place = row["position"] - row["first"]
        if row["position"] < 0:  # BOS alone, which has no text
            tokens, place = ["", *tokens], 0
        values: list[float] = [0] * len(tokens)  # written as 0: most of a file is this
        values[place] = row["coefficient"]
        yield whose | {
            "tokens": tokens,
            "values": values,
            "maxValue": row["coefficient"],
            "maxValueTokenIndex": place,
            "minValue": min(values),
            "qualifyingTokenIndex": place,
            "binMin": triggers[-1]["coefficient"],
            "binMax": triggers[0]["coefficient"],
            "binContains": len(triggers) / prefixes,
        }


def _both_ends(index: Index, row: dict[str, Any] | None) -> dict[str, list[Any]]:
    if row is None:
        return {"pos_str": [], "pos_values": [], "neg_str": [], "neg_values": []}

    def logits(p: list[float]) -> list[float]:
        return [math.log(max(one, _LEAST_P) * len(index.vocabulary)) for one in p[:_TOKENS]]

    return {
        "pos_str": [index.vocabulary[token] for token in row["tokens"][:_TOKENS]],
        "pos_values": logits(row["p"]),
        "neg_str": [index.vocabulary[token] for token in row["bottom_tokens"][:_TOKENS]],
        "neg_values": logits(row["bottom_p"]),
    }


def _histogram(facts: dict[str, Any], edges: list[float]) -> dict[str, list[float]]:
    """Bin by bin from the first filled one to the last; the two outermost bins end where the coefficients do."""
    counts = facts["histogram"]
    filled = [place for place, count in enumerate(counts) if count]
    shown = range(filled[0], filled[-1] + 1) if filled else range(0)
    whole = [min(facts["min"], edges[0]), *edges, max(facts["max"], edges[-1])] if edges else []
    middles = [(whole[place] + whole[place + 1]) / 2 for place in shown] if whole else []
    return {
        "freq_hist_data_bar_values": middles,
        "freq_hist_data_bar_heights": [counts[place] for place in shown][: len(middles)],
    }
