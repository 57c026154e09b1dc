"""Overlap of two memories, each of which is a list of keys with weights.

    jaccard(A, B)  = |A ∩ B| / |A ∪ B|
    weighted(A, B) = Σ min(a_k, b_k) / Σ max(a_k, b_k), where a missing key has weight 0 (the Ruzicka similarity)

Two empty lists are equal. Sums are added in a fixed order, so that equal tables give equal bits. Five kinds of lists
can be read from an index:

    prefixes   end, position and text of each trigger; the weight is |coefficient|
    endings    text of each trigger's last token, numbered if the token repeats; the weight is |coefficient|
    tokens     promoted tokens, by id if both indexes have the same vocabulary, otherwise by text; the weight is p
    patterns   names of the patterns, equal for equal patterns of different memories; the weight is the confidence
    roles      roles of the memory; the weight is 1

Keys are compared by their hashes, except for the few pairs that are shown. If several entries have the same key, only
the strongest entry counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.memory import MemoryId

_PAIRS_AT_ONCE = 1 << 22  # maximum number of pairs of rows with the same key to count at once
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio; makes the hashes of different memories differ

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_PREFIX = "left(c.text, CASE WHEN t.position < 0 THEN 0 ELSE c.ends[t.position + 1] END)"
_TOKEN = f"substr({_PREFIX}, 1 + CASE WHEN t.position > 0 THEN c.ends[t.position] ELSE 0 END)"
_TRIGGERS = """
SELECT t.layer, t.memory, t."end" AS part, t.rank AS place, abs(t.coefficient) AS weight, KEY({parts}) AS key
FROM {{triggers}} t JOIN {texts} c USING (sentence{also}) WHERE {{where}}
"""
# build or hash the text of each prefix only once, because it may trigger several memories
_PREFIXES = f"""(
    SELECT t.sentence, t.position, TEXT({_PREFIX}) AS prefix
    FROM (SELECT DISTINCT t.sentence, t.position FROM {{triggers}} t WHERE {{where}}) t
    JOIN {{corpus}} c USING (sentence)
)"""
_TOKENS = """
SELECT t.layer, t.memory, '' AS part, unnest(range(least(len(t.tokens), {depth}))) AS place,
       unnest(t.p[:{depth}]) AS weight, unnest(t.tokens[:{depth}]) AS key
FROM {values} t WHERE {where}
"""
_ENTRIES = {
    "prefixes": _TRIGGERS.format(parts='t."end", t.position, c.prefix', texts=_PREFIXES, also=", position"),
    "endings": _TRIGGERS.format(
        parts=f'row_number() OVER (PARTITION BY t.layer, t.memory, t."end", {_TOKEN} ORDER BY t.rank), '
        f't."end", {_TOKEN}',
        texts="{corpus}",
        also="",
    ),
    "tokens": _TOKENS,
    "texts": f"SELECT e.* EXCLUDE key, v.text AS key FROM ({_TOKENS}) e JOIN {{vocabulary}} v ON v.token = e.key",
    "patterns": """
SELECT t.layer, t.memory, '' AS part, t.confidence AS weight, t.pattern AS key,
       row_number() OVER (PARTITION BY t.layer, t.memory ORDER BY t.confidence DESC, t.pattern) AS place
FROM {patterns} t WHERE {where}
""",
    "roles": """
SELECT t.layer, t.memory, '' AS part, unnest(range(len(t.roles))) AS place, 1.0 AS weight, unnest(t.roles) AS key
FROM {roles} t WHERE {where}
""",
}
_IN_ORDER = "SELECT layer, memory, {key} AS key, weight FROM ({entries}) ORDER BY layer, memory, part DESC, place"


@dataclass(frozen=True, eq=False)
class KeyLists:
    """The lists of many memories, concatenated. The strongest row of each memory comes first."""

    owners: IntArray  # [rows]: number of the memory, ascending
    keys: NDArray[np.uint64]  # [rows]: 64-bit hashes; two keys of a memory have the same hash with probability 10^-15
    weights: FloatArray  # [rows]

    @cached_property
    def distinct(self) -> tuple[NDArray[np.uint64], IntArray]:
        """The sorted ids of all distinct pairs of owner and key, and the first row of each pair."""
        ids, rows = np.unique(self.keys + self.owners.astype(np.uint64) * _SPREAD, return_index=True)
        return ids, rows


@dataclass(frozen=True)
class ListQuery:
    """The name of a list, and the number of entries of each memory to read."""

    name: str
    depth: int = 0

    def read(self, index: Index, layers: Sequence[int], memories: range) -> KeyLists:
        """Return the lists of a range of memories in some layers. Owners are numbered layer after layer."""
        condition = f"t.memory >= {memories.start} AND t.memory < {memories.stop}"
        rows = index.arrays(
            self._sql("hash(", "hash(key)", f"t.layer IN ({', '.join(map(str, layers))}) AND {condition}")
        )
        place = np.zeros(max(layers) + 1, np.int64)
        place[list(layers)] = np.arange(len(layers)) * len(memories)
        owners = place[rows["layer"]] + rows["memory"] - memories.start
        return KeyLists(owners, rows["key"], rows["weight"].astype(np.float64))

    def read_texts(self, index: Index, memories: Iterable[MemoryId]) -> dict[MemoryId, dict[Any, float]]:
        """Return {memory: {key: weight}} for a few memories, with texts instead of hashes as keys."""
        names = index.names
        wanted = ", ".join(f"({memory.layer}, {names.number(memory)})" for memory in sorted(set(memories)))
        lists: dict[MemoryId, dict[Any, float]] = {}
        for row in index.sql(self._sql("concat_ws(' ', ", "key", f"(t.layer, t.memory) IN (VALUES {wanted})")):
            lists.setdefault(names.name(row["layer"], row["memory"]), {}).setdefault(row["key"], row["weight"])
        return lists

    def _sql(self, joined: str, key: str, where: str) -> str:
        """Return the query. `joined` is the SQL function that joins the parts of a trigger's key."""
        entries = _ENTRIES[self.name].replace("{where}", where).replace("{depth}", str(self.depth))
        entries = entries.replace("KEY(", joined).replace("TEXT(", "hash(" if joined == "hash(" else "(")
        return _IN_ORDER.replace("{key}", key).replace("{entries}", entries)


@dataclass(frozen=True)
class Overlap:
    """The overlap of the lists of two memories."""

    shared: int  # number of shared entries
    a: int  # number of distinct entries in a's list
    b: int
    jaccard: float
    weighted: float


def overlap_of(a: dict[Any, float], b: dict[Any, float]) -> Overlap:
    """Return the overlap of two lists, each given as {key: weight}."""
    both = sorted(a.keys() & b.keys())
    lesser = float(sum(min(a[key], b[key]) for key in both))
    total = float(sum(a.values()) + sum(b.values()))
    union = len(a) + len(b) - len(both)
    jaccard = len(both) / union if union else 1.0
    return Overlap(len(both), len(a), len(b), jaccard, lesser / (total - lesser) if total > 0 else jaccard)


def memory_by_memory(a: KeyLists, b: KeyLists, count: int) -> tuple[FloatArray, FloatArray]:
    """Return the Jaccard index and the weighted overlap of each memory in a with the same memory in b, both [count]."""
    (ids_a, rows_a), (ids_b, rows_b) = a.distinct, b.distinct
    places = np.searchsorted(ids_b, ids_a)  # `ids_a` and `ids_b` are sorted, so a search is faster than a joint sort
    in_a = np.flatnonzero(places < len(ids_b))
    in_a = in_a[ids_b[places[in_a]] == ids_a[in_a]]
    partners = np.full(len(a.keys), -1)  # row of a -> row of b with the same owner and key
    partners[rows_a[in_a]] = rows_b[places[in_a]]
    both_a = np.flatnonzero(partners >= 0)
    both_b = partners[both_a]
    rows_a, rows_b = _in_order(rows_a, len(a.keys)), _in_order(rows_b, len(b.keys))
    shared = np.bincount(a.owners[both_a], minlength=count)
    sizes = np.bincount(a.owners[rows_a], minlength=count) + np.bincount(b.owners[rows_b], minlength=count)
    lesser = np.bincount(a.owners[both_a], np.minimum(a.weights[both_a], b.weights[both_b]), count)
    total = np.bincount(a.owners[rows_a], a.weights[rows_a], count)
    total = total + np.bincount(b.owners[rows_b], b.weights[rows_b], count)
    jaccard = _share(shared, sizes - shared)
    # for lists with only zero weights, use the Jaccard index
    return jaccard, np.where(total > 0, _share(lesser, total - lesser), jaccard)


def best_counterparts(
    a: KeyLists, b: KeyLists, count_a: int, count_b: int, itself: bool = False
) -> tuple[IntArray, FloatArray]:
    """Return, for each memory of a, the memory of b with the highest Jaccard index, and that index.

    Ties go to the lowest number. A memory without any overlap has partner -1. With `itself`, a and b are the same
    layer, and a memory is not its own counterpart.
    """
    owners_a, keys_a, owners_b, keys_b, keys = _number_keys(a, b)
    size_a, size_b = np.bincount(owners_a, minlength=count_a), np.bincount(owners_b, minlength=count_b)
    order = np.argsort(keys_b, kind="stable")  # rows of b by key, then by owner
    edges = np.searchsorted(keys_b[order], np.arange(keys + 1))  # [keys + 1]
    owners_b = owners_b[order]
    times = (edges[1:] - edges[:-1])[keys_a]  # [rows of a]: memories of b with the same key
    partner, best = np.full(count_a, -1, np.int64), np.zeros(count_a)
    for first, last in _ranges(owners_a, times, count_a, count_b):
        rows = slice(*np.searchsorted(owners_a, (first, last)))
        counts = times[rows]
        begins = np.repeat(edges[keys_a[rows]] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
        partners = owners_b[begins + np.arange(int(counts.sum()))]
        cells = np.repeat(owners_a[rows] - first, counts) * count_b + partners
        shared = np.bincount(cells, minlength=(last - first) * count_b).reshape(last - first, count_b)
        union = size_a[first:last, None] + size_b[None, :] - shared
        jaccard = shared / np.maximum(union, 1)
        if itself:
            jaccard[np.arange(last - first), np.arange(first, last)] = 0
        highest = jaccard.argmax(1)  # ties go to the lowest number
        best[first:last] = jaccard[np.arange(last - first), highest]
        partner[first:last] = np.where(best[first:last] > 0, highest, -1)
    return partner, best


def _number_keys(a: KeyLists, b: KeyLists) -> tuple[IntArray, IntArray, IntArray, IntArray, int]:
    """Return owners and key numbers of the distinct rows of a and of b, and the number of different keys."""
    rows_a, rows_b = (_in_order(lists.distinct[1], len(lists.keys)) for lists in (a, b))
    distinct, numbers = np.unique(np.concatenate((a.keys[rows_a], b.keys[rows_b])), return_inverse=True)
    cut = len(rows_a)
    return a.owners[rows_a], numbers[:cut], b.owners[rows_b], numbers[cut:], len(distinct)


def _in_order(rows: IntArray, count: int) -> IntArray:
    """Return the row numbers in ascending order. Marking the rows in a mask is faster than sorting their numbers."""
    chosen = np.zeros(count, np.bool_)
    chosen[rows] = True
    return np.flatnonzero(chosen)


def _ranges(owners: IntArray, times: IntArray, count_a: int, count_b: int) -> list[tuple[int, int]]:
    """Return ranges of a's memories whose pairs fit in RAM. Each range has at least one memory."""
    work = np.bincount(owners, times, count_a) + count_b
    part = (np.cumsum(work) // _PAIRS_AT_ONCE).astype(np.int64)
    edges = np.flatnonzero(np.diff(part, prepend=-1, append=-1)).tolist() if count_a else []
    return list(pairwise(edges))


def _share(part: NDArray[Any], whole: NDArray[Any]) -> FloatArray:
    """Return part / whole, or 1 if whole is 0."""
    shares: FloatArray = np.divide(part, whole, out=np.ones(len(part)), where=whole > 0)
    return shares
