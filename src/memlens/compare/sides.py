"""The first pairs of a comparison, looked at closely: every overlap, and both sides as people want to see them.

A few dozen memories are read with one query a table and index. Knows tables; which pairs are shown is decided before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memlens.compare.lists import Measure
from memlens.compare.overlap import overlap_of
from memlens.compare.result import Change, Overlap, Side
from memlens.index.reader import Index
from memlens.index.trigger_list import trigger_of
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
