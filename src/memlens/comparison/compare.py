"""compare_indexes(): how much the paired memories of two indexes differ, with details of the first pairs.

1. Pair memories by name. For two layers, pair each memory of the first layer with the memory of the second layer that
   has the largest overlap. Memories are read in blocks to limit memory use.
2. change = 1 - Jaccard index of the two lists (see overlap.py). If both indexes have the same corpus, triggers are
   compared by their prefixes. Otherwise, they are compared by their last tokens, because different corpora rarely share
   a prefix.
3. Sort pairs by change. For the first pairs, read all overlaps and both sides, with one query per table and index.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.comparison.overlap import (
    FloatArray,
    IntArray,
    ListQuery,
    Overlap,
    best_counterparts,
    memory_by_memory,
    overlap_of,
)
from memlens.errors import SettingError
from memlens.index.format import CORPUS, TRIGGERS, VOCABULARY
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.text import plain

ASPECTS = ("triggers", "values", "patterns", "roles")
_MEMORIES_AT_ONCE = 1 << 14
_TRIGGERS, _TOKENS = 3, 8  # numbers of triggers and tokens to list for each side


@dataclass(frozen=True)
class MemorySide:
    """What one index records about one memory."""

    memory: MemoryId
    coefficient: float | None  # coefficient of the first trigger; None without triggers
    triggers: tuple[tuple[str, str], ...]  # the best triggers: the text before the last token, and this token
    promotes: tuple[str, ...]  # tokens that the value promotes most; empty without a values table
    max_p: float | None
    name: str | None  # name of the memory in names.parquet
    kind: str | None  # none, shallow, semantic or both; None without a patterns table
    roles: tuple[str, ...] | None = None  # None without a roles table


@dataclass(frozen=True)
class MemoryChange:
    """The overlaps between one memory and its partner in the other index or layer, with both memories."""

    change: float  # from 0 (nothing changed) to 1 (everything changed)
    triggers: Overlap  # prefixes by text and position; weights are |coefficients|
    endings: Overlap  # last tokens by text; repeated tokens count separately
    values: Overlap | None  # promoted tokens; weights are p
    patterns: Overlap | None  # weights are confidences
    before: MemorySide
    after: MemorySide
    roles: Overlap | None = None  # weights are 1


@dataclass(frozen=True)
class LayerChange:
    """Statistics on all pairs of one layer of index a."""

    layer: int
    other: int  # layer of b
    memories: int
    matched: int  # number of memories with a partner, except pairs of two empty lists
    mean_change: float | None  # mean over matched memories; None if no memory is matched
    unchanged: int  # memories with change 0
    replaced: int  # memories with change 1


@dataclass(frozen=True)
class IndexComparison:
    """A comparison of two indexes or two layers."""

    by: str  # one of ASPECTS
    measure: str  # the compared lists: prefixes, endings, tokens, patterns or roles
    a: str  # folder of the index
    b: str
    models: tuple[str, str]
    same_model: bool
    same_corpus: bool
    memories: int  # memories of a
    matched: int  # memories of a that have a partner
    layers: tuple[LayerChange, ...]
    alike: bool  # True if the memories that changed least come first
    changes: tuple[MemoryChange, ...]  # the first `top` pairs

    def to_json(self) -> dict[str, Any]:
        """Return plain data for json.dumps."""
        return plain(self)

    def __repr__(self) -> str:
        first = f"; first: {self.changes[0].before.memory} ({self.changes[0].change:.2f})" if self.changes else ""
        return f"<IndexComparison of {self.a} and {self.b} by {self.by}: {self.matched:,} pairs{first}>"


def compare_indexes(
    a: Index,
    b: Index,
    *,
    by: str = "triggers",
    layers: str | tuple[int, int] | None = None,
    top: int = 20,
    alike: bool | None = None,
) -> IndexComparison:
    """Find the memories that changed most or least between two indexes. See `memlens.compare` for the arguments.

    `layers` is required if the indexes have different shapes.
    """
    if by not in ASPECTS:
        raise SettingError(f"--by is '{by}'; choose one of: {', '.join(ASPECTS)}")
    if top < 1:
        raise SettingError(f"--top is {top}; it must be 1 or more")
    pair = parse_pair(layers) if isinstance(layers, str) else layers
    alike = pair is not None if alike is None else alike
    queries = _queries(a, b, by)
    if pair is None:
        _refuse_other_shapes(a, b)
        parts = list(_pairs_by_name(a, b, queries[by]))
    else:
        parts = [_pairs_by_counterpart(a, b, queries[by], *pair)]
    summaries = tuple(_summaries(parts))
    return IndexComparison(
        by=by,
        measure="tokens" if by == "values" else queries[by].name,
        a=str(a.folder),
        b=str(b.folder),
        models=(a.manifest.model.name, b.manifest.model.name),
        same_model=a.manifest.model.fingerprint == b.manifest.model.fingerprint,
        same_corpus=_same_file(a, b, CORPUS),
        memories=sum(layer.memories for layer in summaries),
        matched=sum(layer.matched for layer in summaries),
        layers=summaries,
        alike=alike,
        changes=tuple(_read_changes(a, b, _first_pairs(a, b, parts, top, alike), queries)),
    )


def parse_pair(text: str) -> tuple[int, int]:
    """Parse a pair of layers: `3:5` -> (3, 5)."""
    left, colon, right = text.partition(":")
    numbers = [part.strip() for part in (left, right)]
    if not colon or not all(n.isascii() and n.isdecimal() and len(n) < 10 for n in numbers):
        raise SettingError(f"--layers is '{text}'; use one layer of each index, like 3:5")
    return int(numbers[0]), int(numbers[1])


def _queries(a: Index, b: Index, by: str) -> dict[str, ListQuery]:
    """Return queries for the lists that both indexes have. Raises IndexFolderError if the table of `by` is missing."""
    queries = {"prefixes": ListQuery("prefixes"), "endings": ListQuery("endings")}
    queries["triggers"] = queries["prefixes" if _same_file(a, b, CORPUS) else "endings"]
    for index in (a, b):
        if by != "triggers":
            index.path(by)  # if the table is missing, raises an error that names the command to run
    if a.has("values") and b.has("values"):
        notes = [index.manifest.values for index in (a, b)]
        readings = [f"{note.reading} over {note.vocabulary} tokens" for note in notes]
        depth = min(index.manifest.values.top for index in (a, b))
        if readings[0] == readings[1]:
            queries["values"] = ListQuery("tokens" if _same_file(a, b, VOCABULARY) else "texts", depth)
        elif by == "values":
            raise SettingError(
                f"the values of {a.folder} use the reading {readings[0]} and those of {b.folder} {readings[1]}; "
                "run `memlens values` on both with the same --reading and --vocabulary"
            )
    if a.has("patterns") and b.has("patterns"):
        queries["patterns"] = ListQuery("patterns")
    if a.has("roles") and b.has("roles"):
        queries["roles"] = ListQuery("roles")
    return queries


def _refuse_other_shapes(a: Index, b: Index) -> None:
    shapes = [{layer: index.memories(layer) for layer in index.layers} for index in (a, b)]
    groups = [[index.names.layers[layer] for layer in index.layers] for index in (a, b)]
    if shapes[0] != shapes[1] or groups[0] != groups[1]:
        sizes = [f"{len(shape)} layers with {sum(shape.values()):,} memories" for shape in shapes]
        raise SettingError(
            f"{a.folder} has {sizes[0]} and {b.folder} has {sizes[1]}, so names do not match; compare one layer of "
            "each, like --layers 3:5"
        )


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs of memories of two layers, in the order of a's memories."""

    layer: int
    other: int
    memories: IntArray
    partners: IntArray
    change: FloatArray
    tie: FloatArray  # weighted overlap, which decides the order of equal changes
    compared: int  # number of a's memories, with or without a partner


def _pairs_by_name(a: Index, b: Index, query: ListQuery) -> Iterator[_Pairs]:
    same = query.name == "prefixes" and _same_file(a, b, TRIGGERS)  # identical tables are read once
    for layers, memories in _blocks(a):
        ours = query.read(a, layers, memories)
        theirs = ours if same else query.read(b, layers, memories)
        jaccard, weighted = memory_by_memory(ours, theirs, len(layers) * len(memories))
        has_any = np.bincount(np.concatenate((ours.owners, theirs.owners)), minlength=len(jaccard)) > 0
        names = np.arange(memories.start, memories.stop, dtype=np.int64)
        for number, layer in enumerate(layers):
            columns = slice(number * len(names), (number + 1) * len(names))
            some = np.flatnonzero(has_any[columns])
            change, tie = 1 - jaccard[columns][some], weighted[columns][some]
            yield _Pairs(layer, layer, names[some], names[some], change, tie, len(names))


def _blocks(index: Index) -> Iterator[tuple[list[int], range]]:
    """Yield blocks of layers of the same size, or parts of a large layer.

    Blocks limit both the number of queries and the required RAM.
    """
    for count, group in groupby(index.layers, key=index.memories):
        layers, several = list(group), max(1, _MEMORIES_AT_ONCE // max(count, 1))
        for at in range(0, len(layers), several):
            for first in range(0, count, _MEMORIES_AT_ONCE):
                yield layers[at : at + several], range(first, min(first + _MEMORIES_AT_ONCE, count))


def _pairs_by_counterpart(a: Index, b: Index, query: ListQuery, layer: int, other: int) -> _Pairs:
    counts = a.memories(layer), b.memories(other)
    lists = query.read(a, [layer], range(counts[0])), query.read(b, [other], range(counts[1]))
    itself = layer == other and a.folder.resolve() == b.folder.resolve()
    partner, jaccard = best_counterparts(*lists, *counts, itself=itself)
    matched = np.flatnonzero(partner >= 0)
    return _Pairs(layer, other, matched, partner[matched], 1 - jaccard[matched], jaccard[matched], counts[0])


def _first_pairs(
    a: Index, b: Index, parts: list[_Pairs], top: int, alike: bool
) -> list[tuple[MemoryId, MemoryId, float]]:
    """Return the first `top` pairs with their change, sorted by change, weighted overlap and name."""
    if not parts:
        return []
    change = np.concatenate([part.change for part in parts])
    tie = np.concatenate([part.tie for part in parts])
    sign = 1 if alike else -1
    order = np.lexsort((-sign * tie, sign * change))[:top]  # this sort is stable, and names are already sorted
    columns: list[NDArray[Any]] = [
        np.concatenate([np.full(len(part.memories), part.layer) for part in parts]),
        np.concatenate([part.memories for part in parts]),
        np.concatenate([np.full(len(part.memories), part.other) for part in parts]),
        np.concatenate([part.partners for part in parts]),
        change,
    ]
    rows = zip(*(column[order].tolist() for column in columns), strict=True)
    return [(a.names.name(row[0], row[1]), b.names.name(row[2], row[3]), row[4]) for row in rows]


def _summaries(parts: list[_Pairs]) -> Iterator[LayerChange]:
    """Yield one summary per layer."""
    for layer in sorted({part.layer for part in parts}):
        of_layer = [part for part in parts if part.layer == layer]
        change = np.concatenate([part.change for part in of_layer])
        yield LayerChange(
            layer,
            of_layer[0].other,
            memories=sum(part.compared for part in of_layer),
            matched=len(change),
            mean_change=float(change.mean()) if len(change) else None,
            unchanged=int((change == 0).sum()),
            replaced=int((change == 1).sum()),
        )


def _read_changes(
    a: Index, b: Index, pairs: list[tuple[MemoryId, MemoryId, float]], queries: Mapping[str, ListQuery]
) -> Iterator[MemoryChange]:
    """Yield all overlaps and both sides of each pair, in the order of the pairs."""
    ours, theirs = [mine for mine, _, _ in pairs], [other for _, other, _ in pairs]
    before, after = _read_sides(a, ours), _read_sides(b, theirs)
    lists = {
        name: (query.read_texts(a, ours), query.read_texts(b, theirs))
        for name, query in queries.items()
        if name != "triggers" and pairs
    }
    for mine, other, change in pairs:
        overlaps = {name: overlap_of(left.get(mine, {}), right.get(other, {})) for name, (left, right) in lists.items()}
        yield MemoryChange(
            change=change,
            triggers=overlaps["prefixes"],
            endings=overlaps["endings"],
            values=overlaps.get("values"),
            patterns=overlaps.get("patterns"),
            before=before[mine],
            after=after[other],
            roles=overlaps.get("roles"),
        )


def _read_sides(index: Index, memories: list[MemoryId]) -> dict[MemoryId, MemorySide]:
    """Return the triggers, top tokens, name, kind and roles of each memory."""

    def rows(table: str, columns: str) -> dict[MemoryId, list[dict[str, Any]]]:
        return index.rows_of(table, memories, columns) if index.has(table) else {}

    top, bottom = (index.triggers_of(memories, end, limit=_TRIGGERS) for end in ("top", "bottom"))
    values = rows("values", f"max_p, tokens[:{_TOKENS}] AS tokens")
    names, kinds, roles = rows("names", "name"), rows("patterns", "kind"), rows("roles", "roles")
    sides = {}
    for memory in memories:
        triggers = top[memory] or bottom[memory]  # a memory that is never positive has only bottom triggers
        value = next(iter(values.get(memory, [])), None)
        pattern_kinds = sorted({row["kind"] for row in kinds.get(memory, [])} - {"next"})
        sides[memory] = MemorySide(
            memory,
            triggers[0].coefficient if triggers else None,
            tuple((trigger.before, trigger.token) for trigger in triggers),
            () if value is None else tuple(index.vocabulary[token] for token in value["tokens"]),
            None if value is None else value["max_p"],
            names[memory][0]["name"] if names.get(memory) else None,
            ("both" if len(pattern_kinds) == 2 else (*pattern_kinds, "none")[0]) if index.has("patterns") else None,
            tuple(roles[memory][0]["roles"]) if roles.get(memory) else None,
        )
    return sides


def _same_file(a: Index, b: Index, name: str) -> bool:
    """Return True if both manifests have the same checksum of this file."""
    file = a.manifest.files.get(name)
    return file is not None and file == b.manifest.files.get(name)
