"""What a comparison found, as plain frozen data that needs no index to be read, printed or written as JSON.

How far lists overlap: memory by memory, or each with its best counterpart. Knows arrays only: no index, no text.

A list is a set of keys with weights. Jaccard: shared by all distinct keys of the two. Weighted: the sum of the lesser
weights by the sum of the greater ones. Two empty lists are equal. Sums are made in a fixed order, so that the same
tables give the same bits.

What is compared of a memory, as lists of keys with weights, read some memories at a time.

    prefixes   end, position and text of each trigger's prefix; |coefficient|
    endings    the last token's text, and for the how-manieth time it occurs; |coefficient|
    tokens     what the value promotes, by number where both vocabularies are one, else by text; p
    patterns   the pattern's name, equal for equal patterns of different memories; confidence

Texts are keys themselves, so nothing is equal by chance; of prefixes too long to keep by the thousand, their SHA-256.
Of several entries with one key the first, strongest one counts. Knows tables; what overlaps is not its matter.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.memory import MemoryId

ASPECTS = ("triggers", "values", "patterns")


@dataclass(frozen=True)
class Overlap:
    """Two lists as sets: what they share. Two empty lists are equal."""

    shared: int
    a: int  # distinct entries of a's list
    b: int
    jaccard: float
    weighted: float  # sum of the lesser weights by sum of the greater ones; a missing entry weighs nothing


@dataclass(frozen=True)
class Side:
    """One memory as one index knows it."""

    memory: MemoryId
    coefficient: float | None  # of its best trigger; None without triggers
    triggers: tuple[tuple[str, str], ...]  # the best prefixes: what stands before the last token, and that token
    promotes: tuple[str, ...]  # the first tokens its value promotes; none without a values table
    max_p: float | None
    name: str | None  # of names.parquet
    kind: str | None  # none, shallow, semantic or both; None without a patterns table


@dataclass(frozen=True)
class Change:
    """One memory and its partner."""

    change: float  # 0 for nothing, 1 for everything
    triggers: Overlap  # prefixes by text and position; weights are |coefficients|
    endings: Overlap  # last tokens by text, as often as they occur
    values: Overlap | None  # promoted tokens; weights are p
    patterns: Overlap | None  # weights are confidences
    before: Side
    after: Side

    def to_json(self) -> dict[str, Any]:
        sides = {side: asdict(own) | {"memory": str(own.memory)} for side, own in self._sides()}
        return asdict(self) | sides

    def _sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        return ("before", self.before), ("after", self.after)


@dataclass(frozen=True)
class LayerSummary:
    """All pairs of one layer of a."""

    layer: int
    other: int  # the layer of b
    memories: int
    matched: int  # memories that have a partner
    mean_change: float | None  # of those; None where there are none
    unchanged: int  # change 0
    replaced: int  # change 1


@dataclass(frozen=True)
class Comparison:
    """Two indexes, or two layers, beside each other."""

    by: str  # one of ASPECTS
    measure: str  # whose Jaccard index `change` is 1 minus: prefixes, endings, tokens or patterns
    a: str  # the indexes' folders
    b: str
    models: tuple[str, str]
    same_model: bool
    same_corpus: bool
    layers: tuple[LayerSummary, ...]
    changes: tuple[Change, ...]  # the first of them

    @property
    def memories(self) -> int:
        return sum(layer.memories for layer in self.layers)

    @property
    def matched(self) -> int:
        return sum(layer.matched for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for json.dumps."""
        totals = {"memories": self.memories, "matched": self.matched}
        return asdict(self) | totals | {"changes": [change.to_json() for change in self.changes]}

    def __repr__(self) -> str:
        first = f"; most: {self.changes[0].before.memory} ({self.changes[0].change:.2f})" if self.changes else ""
        return f"<Comparison of {self.a} and {self.b} by {self.by}: {self.matched:,} pairs{first}>"


_PAIRS_AT_ONCE = 1 << 22  # of rows with the same key, while counterparts are counted

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Of many pairs, [pairs] each."""

    shared: IntArray
    a: IntArray
    b: IntArray
    jaccard: FloatArray
    weighted: FloatArray


@dataclass(frozen=True, eq=False)
class Counterparts:
    """The best partner of each memory of a, -1 for none, and how far they overlap. [memories of a]"""

    partner: IntArray
    jaccard: FloatArray


@dataclass(frozen=True, eq=False)
class _Sets:
    """Distinct rows in order of owner and key."""

    owners: IntArray
    keys: IntArray
    weights: FloatArray

    def sizes(self, count: int) -> IntArray:
        return np.bincount(self.owners, minlength=count).astype(np.int64)


def memory_by_memory(a: Lists, b: Lists, memories: range) -> Overlaps:
    """Each memory of the range in a with the same one in b."""
    one, other = _as_sets(a, b, memories.start, memories.start)
    count = len(memories)
    wide = np.int64(max(one.keys.max(initial=0), other.keys.max(initial=0)) + 1)
    _, in_one, in_other = np.intersect1d(
        one.owners * wide + one.keys, other.owners * wide + other.keys, assume_unique=True, return_indices=True
    )
    whose = one.owners[in_one]
    lesser = np.bincount(whose, np.minimum(one.weights[in_one], other.weights[in_other]), count)
    total = np.bincount(one.owners, one.weights, count) + np.bincount(other.owners, other.weights, count)
    shared = np.bincount(whose, minlength=count).astype(np.int64)
    sizes = one.sizes(count), other.sizes(count)
    jaccard = _share(shared, sizes[0] + sizes[1] - shared)
    # lists whose weights are all nothing differ as far as their keys do
    weighted = np.where(total > 0, _share(lesser, total - lesser), jaccard)
    return Overlaps(shared, *sizes, jaccard, weighted)


def best_counterparts(a: Lists, b: Lists, count_a: int, count_b: int, itself: bool = False) -> Counterparts:
    """For each of a's memories the one of b with the highest Jaccard index, of equal ones the lowest.

    One that shares nothing with anybody has none. `itself`: both are one layer, and no memory is its own counterpart.
    """
    one, other = _as_sets(a, b, 0, 0)
    size_a, size_b = one.sizes(count_a), other.sizes(count_b)
    order = np.argsort(other.keys, kind="stable")  # rows of b by key, owners in order within
    owners_b = other.owners[order]
    keys = int(max(one.keys.max(initial=-1), other.keys.max(initial=-1))) + 1
    edges = np.searchsorted(other.keys[order], np.arange(keys + 1))  # [keys + 1]
    times = (edges[1:] - edges[:-1])[one.keys]  # [rows of a]: memories of b with the same key
    partner, best = np.full(count_a, -1, np.int64), np.zeros(count_a)
    for first, last in _parts(one.owners, times, count_a, count_b):
        rows = slice(*np.searchsorted(one.owners, (first, last)))
        own = times[rows]
        begins = np.repeat(edges[one.keys[rows]] - np.concatenate(([0], np.cumsum(own)[:-1])), own)
        partners = owners_b[begins + np.arange(int(own.sum()))]
        cells = np.repeat(one.owners[rows] - first, own) * count_b + partners
        shared = np.bincount(cells, minlength=(last - first) * count_b).reshape(last - first, count_b)
        union = size_a[first:last, None] + size_b[None, :] - shared
        jaccard = shared / np.maximum(union, 1)
        if itself:
            jaccard[np.arange(last - first), np.arange(first, last)] = 0
        found = jaccard.argmax(1)  # the first of equal ones
        best[first:last] = jaccard[np.arange(last - first), found]
        partner[first:last] = np.where(best[first:last] > 0, found, -1)
    return Counterparts(partner, best)


def overlap_of(a: dict[Any, float], b: dict[Any, float]) -> Overlap:
    """Of one pair, in plain Python."""
    both = sorted(a.keys() & b.keys())
    lesser = float(sum(min(a[key], b[key]) for key in both))
    total = float(sum(a.values()) + sum(b.values()))
    union = len(a) + len(b) - len(both)
    jaccard = len(both) / union if union else 1.0
    return Overlap(len(both), len(a), len(b), jaccard, lesser / (total - lesser) if total > 0 else jaccard)


def _parts(owners: IntArray, times: IntArray, count_a: int, count_b: int) -> list[tuple[int, int]]:
    """Memories of a in ranges whose work fits the memory, at least one in each."""
    work = np.bincount(owners, times, count_a) + count_b
    part = (np.cumsum(work) // _PAIRS_AT_ONCE).astype(np.int64)
    edges = np.flatnonzero(np.diff(part, prepend=-1, append=-1)).tolist() if count_a else []
    return list(pairwise(edges))


def _as_sets(a: Lists, b: Lists, first_a: int, first_b: int) -> tuple[_Sets, _Sets]:
    """Keys of both numbered in common; of equal ones of a memory the first."""
    encoded = pa.array([*a.keys, *b.keys]).dictionary_encode() if a.keys or b.keys else None
    numbers = np.zeros(0, np.int64) if encoded is None else encoded.indices.to_numpy().astype(np.int64)
    cut = len(a.keys)
    return _distinct(a, numbers[:cut], first_a), _distinct(b, numbers[cut:], first_b)


def _distinct(lists: Lists, keys: IntArray, first: int) -> _Sets:
    owners = lists.owners - first
    wide = np.int64(keys.max(initial=0) + 1)
    _, kept = np.unique(owners * wide + keys, return_index=True)
    return _Sets(owners[kept], keys[kept], lists.weights[kept])


def _share(part: NDArray[Any], whole: NDArray[Any]) -> FloatArray:
    """part / whole; where there is nothing at all the two are equal."""
    shares: FloatArray = np.divide(part, whole, out=np.ones(len(part)), where=whole > 0)
    return shares


_LONGEST = 256  # characters of a prefix that is its own key

_PREFIX = "left(c.text, CASE WHEN t.position < 0 THEN 0 ELSE c.ends[t.position + 1] END)"
_TOKEN = f"substr({_PREFIX}, 1 + CASE WHEN t.position > 0 THEN c.ends[t.position] ELSE 0 END)"
_KEPT = f"CASE WHEN length({_PREFIX}) > {_LONGEST} THEN '#' || sha256({_PREFIX}) ELSE {_PREFIX} END"

_TRIGGERS = """
SELECT t.memory, t."end" AS part, t.rank AS place, abs(t.coefficient) AS weight, {key} AS key
FROM {{triggers}} t JOIN {{corpus}} c ON c.sentence = t.sentence WHERE t.layer = $1 AND {{where}}
"""
_ENTRIES = {
    "prefixes": _TRIGGERS.format(key=f"t.\"end\" || ' ' || t.position || ' ' || {_KEPT}"),
    "endings": _TRIGGERS.format(
        key=f'row_number() OVER (PARTITION BY t.memory, t."end", {_TOKEN} ORDER BY t.rank)'
        f" || ' ' || t.\"end\" || ' ' || {_TOKEN}"
    ),
    "tokens": """
SELECT memory, '' AS part, unnest(range(least(len(tokens), $2))) AS place,
       unnest(p[:$2]) AS weight, unnest(tokens[:$2]) AS key
FROM {values} t WHERE t.layer = $1 AND {where}
""",
    "texts": """
SELECT e.memory, '' AS part, e.place, e.weight, v.text AS key FROM (
    SELECT memory, unnest(range(least(len(tokens), $2))) AS place, unnest(p[:$2]) AS weight,
           unnest(tokens[:$2]) AS token
    FROM {values} t WHERE t.layer = $1 AND {where}
) e JOIN {vocabulary} v ON v.token = e.token
""",
    "patterns": """
SELECT memory, '' AS part, row_number() OVER (PARTITION BY memory ORDER BY confidence DESC, pattern) AS place,
       confidence AS weight, pattern AS key
FROM {patterns} t WHERE t.layer = $1 AND {where}
""",
}
_GROUPED = """
SELECT memory, list(key ORDER BY part DESC, place) AS keys, list(weight ORDER BY part DESC, place) AS weights
FROM ({entries}) GROUP BY memory ORDER BY memory
"""


@dataclass(frozen=True, eq=False)
class Lists:
    """The lists of some memories, one after another; rows of one memory stand together, the strongest first."""

    owners: NDArray[np.int64]  # [rows] memories
    keys: list[Any]  # [rows] texts or numbers
    weights: NDArray[np.float64]  # [rows]

    def by_memory(self) -> dict[int, dict[Any, float]]:
        """memory -> key -> weight."""
        found: dict[int, dict[Any, float]] = {}
        for owner, key, weight in zip(self.owners.tolist(), self.keys, self.weights.tolist(), strict=True):
            found.setdefault(owner, {}).setdefault(key, weight)
        return found


@dataclass(frozen=True)
class Measure:
    """One kind of list: its query's name, and how many entries of each memory count (0: all)."""

    query: str
    depth: int = 0

    def read(self, index: Index, layer: int, memories: range | list[int]) -> Lists:
        """The lists of these memories of a layer."""
        if isinstance(memories, range):
            where = f"t.memory >= {memories.start} AND t.memory < {memories.stop}"
        else:
            where = f"t.memory IN ({', '.join(str(int(memory)) for memory in memories)})" if memories else "false"
        entries = _ENTRIES[self.query].replace("{where}", where)
        parameters = [layer, self.depth] if self.depth else [layer]
        rows = index.sql(_GROUPED.replace("{entries}", entries), parameters)
        lengths = [len(row["keys"]) for row in rows]
        return Lists(
            np.repeat(np.array([row["memory"] for row in rows], np.int64), lengths),
            [key for row in rows for key in row["keys"]],
            np.array([weight for row in rows for weight in row["weights"]], np.float64),
        )
