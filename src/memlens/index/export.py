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

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Protocol

from memlens.index.reader import Index
from memlens.text import harmless_cell

_MEMORIES_AT_ONCE = 1024
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

# Records are made by the database: in Python each trigger would cost more than reading it.
_BEGIN = "CASE WHEN t.position > 0 THEN c.ends[t.position] ELSE 0 END"  # position -1 is BOS alone, which has no text
_STOP = "CASE WHEN t.position >= 0 THEN c.ends[t.position + 1] ELSE 0 END"
_SOURCES = """
FROM {triggers} t JOIN {corpus} c ON c.sentence = t.sentence LEFT JOIN {vocabulary} v ON v.token = t.next_token
WHERE t.layer = $1 AND t.memory >= $2 AND t.memory < $3"""
_RECORDS = f"""
WITH own AS (
    SELECT t.memory, t."end", t.rank, struct_pack(
        rank := t.rank, coefficient := t.coefficient::DOUBLE,
        prefix := struct_pack(sentence := t.sentence, position := t.position),
        before := left(c.text, {_BEGIN}), token := substr(c.text, {_BEGIN} + 1, {_STOP} - {_BEGIN}),
        after := substr(c.text, {_STOP} + 1), next_token := t.next_token, next_text := v.text) AS trigger {_SOURCES}
), lists AS (
    SELECT memory, list(trigger ORDER BY rank) FILTER ("end" = 'top') AS top,
           list(trigger ORDER BY rank) FILTER ("end" = 'bottom') AS bottom FROM own GROUP BY memory
)
SELECT to_json(struct_pack(
    name := NAME_OF(m), layer := m.layer, memory := m.memory, max := m.max, min := m.min,
    mean := m.mean, frequency := m.frequency, dead := m.dead, histogram := m.histogram,
    triggers := struct_pack(top := coalesce(top, []), bottom := coalesce(bottom, []))))::VARCHAR AS line
FROM {{memories}} m LEFT JOIN lists USING (memory)
WHERE m.layer = $1 AND m.memory >= $2 AND m.memory < $3 ORDER BY m.memory
"""
CSV_COLUMNS = (
    *("name", "layer", "memory", "end", "rank", "coefficient", "sentence", "position", "next_token", "next_text"),
    *("token", "text"),
)
_ROWS = f"""
SELECT NAME_OF(t) AS name, t.layer, t.memory, t."end", t.rank, t.coefficient, t.sentence,
       t.position, t.next_token, v.text AS next_text, substr(c.text, {_BEGIN} + 1, {_STOP} - {_BEGIN}) AS token,
       left(c.text, {_STOP}) AS text {_SOURCES} ORDER BY t.memory, t."end" DESC, t.rank
"""

_TRIGGERS = f"""
WITH own AS (
    SELECT t.memory, t.rank, t.coefficient, t.position, greatest(t.position - {_BEFORE}, 0) AS first, c.text, c.ends
    FROM {{triggers}} t JOIN {{corpus}} c ON c.sentence = t.sentence
    WHERE t.layer = $1 AND t.memory >= $2 AND t.memory < $3 AND t."end" = 'top'
), cut AS (
    SELECT memory, rank, coefficient, position, first, text, ends[first + 1 : position + 1 + {_AFTER}] AS ends,
           CASE WHEN first > 0 THEN ends[first] ELSE 0 END AS begins
    FROM own
)
SELECT memory, rank, coefficient, position, first, begins, ends,
       substr(text, begins + 1, coalesce(ends[len(ends)], begins) - begins) AS text
FROM cut ORDER BY memory, rank
"""
_PART = "FROM {{{table}}} WHERE layer = $1 AND memory >= $2 AND memory < $3"
_FACTS = f"SELECT memory, max, min, frequency, histogram {_PART.format(table='memories')} ORDER BY memory"
_VALUES = f"SELECT memory, tokens, p, bottom_tokens, bottom_p {_PART.format(table='values')}"
_NAMES = f"SELECT memory, name {_PART.format(table='names')}"


class TextSink(Protocol):
    """Anything with a write method that takes text."""

    def write(self, text: str, /) -> Any: ...


def _parts(index: Index) -> Iterator[list[int]]:
    """Layer, first memory and the one after the last, in the order of the index."""
    for layer in index.layers:
        count = index.memories(layer)
        for first in range(0, count, _MEMORIES_AT_ONCE):
            yield [layer, first, min(first + _MEMORIES_AT_ONCE, count)]


def _named(index: Index, query: str, layer: int) -> str:
    """A query about one layer, with the names of its memories."""
    for table in ("m", "t"):
        query = query.replace(f"NAME_OF({table})", index.names.sql(layer, f"{table}.memory"))
    return query


def export_jsonl(index: Index, sink: TextSink) -> int:
    """One JSON object per memory, dead ones included; the number of lines comes back."""
    # Every text is of the corpus, so one look at it saves looking at each line.
    query = f"SELECT 1 AS found FROM {{corpus}} WHERE regexp_matches(text, '{_CONTROLS.pattern}') LIMIT 1"
    has_controls = bool(index.sql(query))
    lines = (row["line"] for part in _parts(index) for row in index.stream(_named(index, _RECORDS, part[0]), part))
    return _write_lines(map(_escaped, lines) if has_controls else lines, sink)


def export_neuronpedia(index: Index, sink: TextSink) -> int:
    """The same in the layout of Neuronpedia's features."""
    features = (feature for part in _parts(index) for feature in _features(index, part))
    return _write_lines((_escaped(json.dumps(own, ensure_ascii=False, allow_nan=False)) for own in features), sink)


def _escaped(line: str) -> str:
    """JSON allows these signs as they are, but terminals act on them; an escape means the same."""
    return _CONTROLS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", line)


def _write_lines(lines: Iterable[str], sink: TextSink) -> int:
    count = 0
    for line in lines:
        sink.write(line + "\n")
        count += 1
    return count


def export_csv(index: Index, sink: TextSink) -> int:
    """One row per trigger below a row of column names; the number of triggers comes back."""
    writer = csv.writer(sink, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    rows = 0
    for part in _parts(index):
        for row in index.stream(_named(index, _ROWS, part[0]), part):
            writer.writerow(map(harmless_cell, row.values()))
            rows += 1
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


FORMATS: dict[str, Callable[[Index, TextSink], int]] = {
    "jsonl": export_jsonl,
    "csv": export_csv,
    "neuronpedia": export_neuronpedia,
}


def _features(index: Index, part: list[int]) -> Iterator[dict[str, Any]]:
    layer = part[0]
    groups = groupby(index.stream(_TRIGGERS, part), key=itemgetter("memory"))
    waiting = next(groups, None)
    values = {row["memory"]: row for row in index.sql(_VALUES, part)} if index.has("values") else {}
    names = {row["memory"]: row["name"] for row in index.sql(_NAMES, part)} if index.has("names") else {}
    whose = {"modelId": index.manifest.model.name, "layer": f"{layer}-memlens"}
    for facts in index.sql(_FACTS, part):
        memory, triggers = facts["memory"], []
        if waiting is not None and waiting[0] == memory:  # a dead memory has no group
            triggers = list(waiting[1])
            waiting = next(groups, None)
        name = whose | {"index": str(memory)}
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
