"""Memories in the layout of Neuronpedia's features: one record a memory, activations inside, as its site answers.

Filled from a scan:

    modelId, layer, index            the model's name, "3-memlens", "512"
    activations                      one a top trigger, strongest first: tokens, values, maxValue, minValue,
                                     maxValueTokenIndex, qualifyingTokenIndex, binMin, binMax, binContains
    maxActApprox, frac_nonzero       the highest coefficient; the share of prefixes on which it is above 0
    freq_hist_data_bar_values        middles of the histogram's bins (they double in width outwards), and how many
    freq_hist_data_bar_heights       sampled prefixes lie in each, from the first filled bin to the last

Filled from later stages, else empty: pos_str, pos_values, neg_str, neg_values (`memlens values`; a number is
ln(p * vocabulary), the logit above that of a uniform choice), explanations (`memlens patterns`).

What cannot be known and how that is said: an index keeps a coefficient at the trigger's own position only, so all other
`values` are 0; tokens are cut to a window around it; bottom triggers have no place in the layout and are left out.
neuron_alignment_*, correlated_*, topkCosSim*, logits_hist_*, decoder_weights_dist and vector speak of sparse
autoencoders or of things not in an index: they are empty lists. Who made it and when is for whoever publishes it.
Knows the index's tables; writes no file.

An index as plain text for other programs: JSON Lines, one memory a line, or CSV, one trigger a row.

JSON Lines come in two layouts: memlens' own, and that of Neuronpedia's features, of which neuronpedia.py says more.

Memories are read some at a time, so that memory stays bounded however large the index is. Texts are written as they
are in the corpus; a spreadsheet may take one that begins with = for a formula. Knows no files but the index's own.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Protocol

from memlens.index.reader import Index
from memlens.memory import MemoryId

_MEMORIES_AT_ONCE = 1024
_BEFORE, _AFTER = 64, 16  # tokens kept around a trigger
_TOKENS = 10  # at each end of a value, as the site shows
_LEAST_P = 1.1754944e-38  # what float32 holds; a probability of 0 has no logarithm

_UNKNOWN = (
    *("topkCosSimIndices", "topkCosSimValues", "decoder_weights_dist", "vector"),
    *(f"neuron_alignment_{part}" for part in ("indices", "values", "l1")),
    *(f"correlated_{what}_{part}" for what in ("neurons", "features") for part in ("indices", "pearson", "l1")),
    *("logits_hist_data_bar_heights", "logits_hist_data_bar_values"),
)

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


def neuronpedia_features(index: Index) -> Iterator[dict[str, Any]]:
    """Every memory of the index in order."""
    for layer in index.layers:
        count = index.memories(layer)
        for first in range(0, count, _MEMORIES_AT_ONCE):
            yield from _some(index, layer, first, min(first + _MEMORIES_AT_ONCE, count))


def _some(index: Index, layer: int, first: int, last: int) -> Iterator[dict[str, Any]]:
    part = [layer, first, last]
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


_EXPORT_MEMORIES_AT_ONCE = 4096  # the corpus is read once for so many
# JSON allows these signs as they are, but terminals act on them; inside a JSON string an escape means the same.
_ESCAPES = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}

CSV_COLUMNS = (
    *("name", "layer", "memory", "end", "rank", "coefficient", "sentence", "position", "next_token", "next_text"),
    *("token", "text"),
)

_EXPORT_TRIGGERS = """
SELECT t.memory, t."end", t.rank, t.coefficient, t.sentence, t.position, t.next_token, v.text AS next_text,
       CASE WHEN t.position < 0 THEN '' ELSE left(c.text, c.ends[t.position + 1]) END AS text,
       CASE WHEN t.position > 0 THEN c.ends[t.position] ELSE 0 END AS token_begins
FROM {triggers} t JOIN {corpus} c ON c.sentence = t.sentence LEFT JOIN {vocabulary} v ON v.token = t.next_token
WHERE t.layer = $1 AND t.memory >= $2 AND t.memory < $3
ORDER BY t.memory, t."end" DESC, t.rank
"""

_EXPORT_FACTS = """
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
        for first in range(0, count, _EXPORT_MEMORIES_AT_ONCE):
            part = [layer, first, min(first + _EXPORT_MEMORIES_AT_ONCE, count)]
            groups = groupby(index.stream(_EXPORT_TRIGGERS, part), key=itemgetter("memory"))
            waiting = next(groups, None)
            for facts in index.sql(_EXPORT_FACTS, part):
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
