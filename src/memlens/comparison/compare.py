"""The first pairs of a comparison, looked at closely: every overlap, and both sides as people want to see them.

A few dozen memories are read with one query a table and index. Knows tables; which pairs are shown is decided before.

compare_indexes(): pairs of memories, how much each changed, and the first of them with both sides to look at.

Memories are paired by name, layer by layer and some at a time, so that memory stays bounded; or, for two layers, each
memory of the one with the memory of the other that it overlaps with most. Triggers are compared by their prefixes where
both indexes have one corpus, else by their last tokens: two corpora seldom have a prefix in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.comparison.overlap import (
    ASPECTS,
    Change,
    Comparison,
    LayerSummary,
    Measure,
    Overlap,
    Side,
    best_counterparts,
    memory_by_memory,
    overlap_of,
)
from memlens.errors import SettingError
from memlens.index.layout import CORPUS, VOCABULARY
from memlens.index.reader import Index, trigger_of
from memlens.memory import MemoryId

_TRIGGERS, _TOKENS = 3, 8
_Pair = tuple[int, int, int, int, float]


def look_closer(a: Index, b: Index, pairs: Sequence[_Pair], measures: Mapping[str, Measure]) -> Iterator[Change]:
    """One Change a pair, in the same order."""
    ours = [MemoryId(layer, memory) for layer, memory, _, _, _ in pairs]
    theirs = [MemoryId(layer, memory) for _, _, layer, memory, _ in pairs]
    sides = read_sides(a, ours), read_sides(b, theirs)
    overlaps = {name: _overlaps(a, b, ours, theirs, measures[name]) for name in measures if name != "triggers"}
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        yield Change(
            change=pairs[place][4],
            triggers=overlaps["prefixes"][place],
            endings=overlaps["endings"][place],
            values=overlaps["values"][place] if "values" in overlaps else None,
            patterns=overlaps["patterns"][place] if "patterns" in overlaps else None,
            before=sides[0][one],
            after=sides[1][other],
        )


def _overlaps(
    a: Index, b: Index, ours: Sequence[MemoryId], theirs: Sequence[MemoryId], measure: Measure
) -> list[Overlap]:
    left, right = _lists(a, ours, measure), _lists(b, theirs, measure)
    return [overlap_of(left.get(one, {}), right.get(other, {})) for one, other in zip(ours, theirs, strict=True)]


def _lists(index: Index, memories: Sequence[MemoryId], measure: Measure) -> dict[MemoryId, dict[Any, float]]:
    found: dict[MemoryId, dict[Any, float]] = {}
    for layer in sorted({memory.layer for memory in memories}):
        own = sorted({memory.memory for memory in memories if memory.layer == layer})
        lists = measure.read(index, layer, own).by_memory()
        found |= {MemoryId(layer, memory): entries for memory, entries in lists.items()}
    return found


def read_sides(index: Index, memories: Sequence[MemoryId]) -> dict[MemoryId, Side]:
    """Each memory with its best triggers and what else the index knows of it."""
    if not memories:
        return {}
    wanted = ", ".join(f"({memory.layer}, {memory.memory})" for memory in sorted(set(memories)))
    triggers = _rows(index, f"SELECT * FROM {{triggers}} WHERE (layer, memory) IN (VALUES {wanted}) "
                     f"AND rank < {_TRIGGERS} ORDER BY \"end\" DESC, rank")  # fmt: skip
    sentences = index.sentences(sorted({row["sentence"] for own in triggers.values() for row in own}))
    values = _optional(index, "values", f"layer, memory, max_p, tokens[:{_TOKENS}] AS tokens", wanted)
    names = _optional(index, "names", "layer, memory, name", wanted)
    kinds = _optional(index, "patterns", "DISTINCT layer, memory, kind", wanted)
    found = {}
    for memory in memories:
        # the top triggers; a memory that only ever is negative has none but bottom ones
        best = triggers.get(memory, [])[:_TRIGGERS]
        shown = [trigger_of(row, sentences[row["sentence"]]) for row in best if row["end"] == best[0]["end"]]
        value = values.get(memory, [None])[0]
        own_kinds = sorted(row["kind"] for row in kinds.get(memory, []))
        found[memory] = Side(
            memory,
            shown[0].coefficient if shown else None,
            tuple((trigger.before, trigger.token) for trigger in shown),
            () if value is None else tuple(index.vocabulary[token] for token in value["tokens"]),
            None if value is None else value["max_p"],
            names[memory][0]["name"] if memory in names else None,
            ("both" if len(own_kinds) == 2 else (*own_kinds, "none")[0]) if index.has("patterns") else None,
        )
    return found


def _optional(index: Index, table: str, columns: str, wanted: str) -> dict[MemoryId, list[dict[str, Any]]]:
    if not index.has(table):
        return {}
    return _rows(index, f"SELECT {columns} FROM {{{table}}} WHERE (layer, memory) IN (VALUES {wanted})")


def _rows(index: Index, query: str) -> dict[MemoryId, list[dict[str, Any]]]:
    found: dict[MemoryId, list[dict[str, Any]]] = {}
    for row in index.sql(query):
        found.setdefault(MemoryId(row["layer"], row["memory"]), []).append(row)
    return found


_MEMORIES_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs of two layers, in order of a's memories. [pairs]"""

    layer: int
    other: int
    memories: NDArray[np.int64]
    partners: NDArray[np.int64]
    change: NDArray[np.float64]
    tie: NDArray[np.float64]  # the weighted overlap: of equal changes, the lower comes first
    of: int  # memories of a's layer that were looked at, those without a partner included


def compare_indexes(
    a: Index,
    b: Index,
    *,
    by: str = "triggers",
    layers: str | tuple[int, int] | None = None,
    top: int = 20,
    alike: bool = False,
) -> Comparison:
    """Which memories changed most from a to b, by their triggers, values or patterns.

    `layers` ("3:5", or a pair) matches each memory of a's layer with its best counterpart in b's; it is needed where
    the two have different shapes. `top`: how many to list; `alike`: those that changed least first.
    """
    if by not in ASPECTS:
        raise SettingError(f"--by is '{by}'; choose one of: {', '.join(ASPECTS)}")
    if top < 1:
        raise SettingError(f"--top is {top}; it must be 1 or more")
    pair = parse_pair(layers) if isinstance(layers, str) else layers
    measures = _measures(a, b, by)
    if pair is None:
        _refuse_other_shapes(a, b)
        parts = list(_by_name(a, b, measures[by]))
    else:
        parts = [_by_counterpart(a, b, measures[by], *pair)]
    chosen = _first(parts, top, alike)
    return Comparison(
        by=by,
        measure="tokens" if by == "values" else measures[by].query,
        a=str(a.folder),
        b=str(b.folder),
        models=(a.manifest.model.name, b.manifest.model.name),
        same_model=_fingerprint(a) == _fingerprint(b),
        same_corpus=_same_file(a, b, CORPUS),
        layers=tuple(_summaries(parts)),
        changes=tuple(look_closer(a, b, chosen, measures)),
    )


def parse_pair(text: str) -> tuple[int, int]:
    """`3:5` -> (3, 5)."""
    left, colon, right = text.partition(":")
    numbers = [part.strip() for part in (left, right)]
    if not colon or not all(n.isascii() and n.isdecimal() and len(n) < 10 for n in numbers):
        raise SettingError(f"--layers is '{text}'; write a layer of each index, like 3:5")
    return int(numbers[0]), int(numbers[1])


def _measures(a: Index, b: Index, by: str) -> dict[str, Measure]:
    """What can be compared; refused is only what was asked for."""
    measures = {"prefixes": Measure("prefixes"), "endings": Measure("endings")}
    measures["triggers"] = measures["prefixes" if _same_file(a, b, CORPUS) else "endings"]
    for index in (a, b):
        if by != "triggers":
            index.path(by)  # says which command makes the table, if it is not there
    if a.has("values") and b.has("values"):
        readings = [index.manifest.values.reading for index in (a, b)]
        depth = min(index.manifest.values.top for index in (a, b))
        if readings[0] == readings[1]:
            measures["values"] = Measure("tokens" if _same_file(a, b, VOCABULARY) else "texts", depth)
        elif by == "values":
            raise SettingError(
                f"the values of {a.folder} are read {readings[0]}, those of {b.folder} {readings[1]}; "
                "make both with the same `memlens values --reading`"
            )
    if a.has("patterns") and b.has("patterns"):
        measures["patterns"] = Measure("patterns")
    return measures


def _refuse_other_shapes(a: Index, b: Index) -> None:
    shapes = [{layer: index.memories(layer) for layer in index.layers} for index in (a, b)]
    if shapes[0] != shapes[1]:
        told = [f"{len(shape)} layers with {sum(shape.values()):,} memories" for shape in shapes]
        raise SettingError(
            f"{a.folder} has {told[0]}, {b.folder} {told[1]}, and not the same ones; compare a layer of each by "
            "counterpart, like --layers 3:5"
        )


def _by_name(a: Index, b: Index, measure: Measure) -> Iterator[_Pairs]:
    for layer in a.layers:
        count = a.memories(layer)
        for first in range(0, count, _MEMORIES_AT_ONCE):
            part = range(first, min(first + _MEMORIES_AT_ONCE, count))
            lists = measure.read(a, layer, part), measure.read(b, layer, part)
            found = memory_by_memory(*lists, part)
            names = np.arange(part.start, part.stop, dtype=np.int64)
            yield _Pairs(layer, layer, names, names, 1 - found.jaccard, found.weighted, len(part))


def _by_counterpart(a: Index, b: Index, measure: Measure, layer: int, other: int) -> _Pairs:
    counts = a.memories(layer), b.memories(other)
    lists = measure.read(a, layer, range(counts[0])), measure.read(b, other, range(counts[1]))
    itself = layer == other and a.folder.resolve() == b.folder.resolve()
    found = best_counterparts(*lists, *counts, itself=itself)
    matched = np.flatnonzero(found.partner >= 0)
    jaccard = found.jaccard[matched]
    return _Pairs(layer, other, matched, found.partner[matched], 1 - jaccard, jaccard, counts[0])


def _first(parts: list[_Pairs], top: int, alike: bool) -> list[tuple[int, int, int, int, float]]:
    """layer, memory, other layer, other memory, change: most changed first, then less weight shared, then by name."""
    if not parts:
        return []
    change = np.concatenate([part.change for part in parts])
    tie = np.concatenate([part.tie for part in parts])
    sign = 1 if alike else -1
    order = np.lexsort((-sign * tie, sign * change))[:top]  # stable: names are in order already
    columns: list[NDArray[Any]] = [
        np.concatenate([np.full(len(part.memories), part.layer) for part in parts]),
        np.concatenate([part.memories for part in parts]),
        np.concatenate([np.full(len(part.memories), part.other) for part in parts]),
        np.concatenate([part.partners for part in parts]),
        change,
    ]
    return list(zip(*(column[order].tolist() for column in columns), strict=True))


def _summaries(parts: list[_Pairs]) -> Iterator[LayerSummary]:
    """One a layer, whatever the number of its parts."""
    for layer in sorted({part.layer for part in parts}):
        own = [part for part in parts if part.layer == layer]
        change = np.concatenate([part.change for part in own])
        yield LayerSummary(
            layer,
            own[0].other,
            memories=sum(part.of for part in own),
            matched=len(change),
            mean_change=float(change.mean()) if len(change) else None,
            unchanged=int((change == 0).sum()),
            replaced=int((change == 1).sum()),
        )


def _same_file(a: Index, b: Index, name: str) -> bool:
    """Are the two files one, byte for byte, as the manifests have it?"""
    facts = a.manifest.files.get(name)
    return facts is not None and facts == b.manifest.files.get(name)


def _fingerprint(index: Index) -> Any:
    return index.manifest.model.fingerprint
