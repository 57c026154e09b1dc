"""Memories that share triggers, promoted tokens or patterns.

related_memories    memories that share triggers, promoted tokens or patterns with one memory
order_by_likeness   the memories of a layer in an order that puts similar memories next to each other
shared_patterns     patterns that several memories share ("12 memories end with 'press'")
duplicates          pairs of memories with mostly the same triggers, by Jaccard index
duplicate_groups    groups of memories with mostly the same triggers or promoted tokens

Lookups import this module, so numpy is imported only inside the functions that need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import TYPE_CHECKING

from memlens.errors import SettingError
from memlens.index.memory import read_summaries
from memlens.index.reader import Index
from memlens.memory import MemoryId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOP, TOKENS = 25, 10  # numbers of triggers and promoted tokens to compare
NamedSets = dict[MemoryId, frozenset[int]]


@dataclass(frozen=True)
class RelatedMemory:
    """A memory that is related to a given memory, and what the two memories share."""

    name: MemoryId
    summary: str | None  # summary of the memory in one line
    triggers: int  # number of shared prefixes among the top 25 triggers
    tokens: int | None  # number of shared tokens among the 10 top tokens; None if there is no values table
    patterns: tuple[str, ...]  # descriptions of shared patterns


@dataclass(frozen=True)
class SharedPattern:
    """A pattern and the memories that have it."""

    pattern: str
    kind: str
    description: str
    memories: tuple[MemoryId, ...]


_TRIGGERS = f"""
WITH own AS (SELECT sentence, position FROM {{triggers}}
             WHERE layer = $1 AND memory = $2 AND "end" = 'top' AND rank < {TOP})
SELECT t.layer, t.memory, count(*) AS n FROM {{triggers}} t JOIN own USING (sentence, position)
WHERE t."end" = 'top' AND t.rank < {TOP} GROUP BY ALL
"""
_VALUES = f"""
WITH own AS (SELECT unnest(tokens[:{TOKENS}]) AS token FROM {{values}} WHERE layer = $1 AND memory = $2),
     every AS (SELECT layer, memory, unnest(tokens[:{TOKENS}]) AS token FROM {{values}})
SELECT every.layer, every.memory, count(*) AS n FROM every JOIN own USING (token) GROUP BY ALL
"""
_PATTERNS = """
SELECT p.layer, p.memory, list(p.description ORDER BY p.pattern) AS n
FROM {patterns} p JOIN (SELECT pattern FROM {patterns} WHERE layer = $1 AND memory = $2) own USING (pattern)
GROUP BY ALL
"""


def related_memories(index: Index, memory: str | MemoryId, limit: int = 20) -> list[RelatedMemory]:
    """Return related memories, sorted by the number of shared triggers, then patterns, then promoted tokens.

    A memory that shares only a single promoted token is not related.
    """
    _check_limit(limit)
    name = index.check(memory)
    parts = {}
    for table, query in (("triggers", _TRIGGERS), ("values", _VALUES), ("patterns", _PATTERNS)):
        rows = index.sql(query, [name.layer, index.names.number(name)]) if index.has(table) else []
        parts[table] = {index.names.name(row["layer"], row["memory"]): row["n"] for row in rows}
    tokens = parts["values"]
    others = parts["triggers"].keys() | parts["patterns"].keys() | {m for m, n in tokens.items() if n > 1}
    shared = {
        other: (
            parts["triggers"].get(other, 0),
            tokens.get(other, 0) if index.has("values") else None,
            tuple(parts["patterns"].get(other, ())),
        )
        for other in others - {name}
    }
    best = sorted(shared, key=lambda o: (-shared[o][0], -len(shared[o][2]), -(shared[o][1] or 0), o))[:limit]
    summaries = read_summaries(index, best)
    return [RelatedMemory(other, summaries.get(other), *shared[other]) for other in best]


def order_by_likeness(index: Index, layer: int) -> NDArray[np.int64]:
    """Return the memories of a layer, each followed by the most similar remaining memory. [memories]

    Similarity is the number of shared triggers and promoted tokens. Of equally similar memories, the one with the
    lowest number comes first.
    """
    import numpy as np

    count = index.memories(layer)
    memory, shared = _shared_items(index, layer)
    of_memory = _group_by(memory, shared, count)
    by_item = _group_by(shared, memory, int(shared.max(initial=-1)) + 1)
    order, is_free = np.zeros(count, np.int64), np.ones(count, np.bool_)
    is_free[0] = False
    for place in range(1, count):
        others = [by_item[item] for item in of_memory[order[place - 1]]]
        common = np.bincount(np.concatenate(others), minlength=count) if others else np.zeros(count, np.int64)
        order[place] = np.where(is_free, common, -1).argmax()
        is_free[order[place]] = False
    return order


def _shared_items(index: Index, layer: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two columns with a row per trigger or promoted token: the memory, and the number of this item."""
    import numpy as np

    triggers = index.arrays(
        f"""SELECT memory, sentence, position FROM {{triggers}} WHERE layer = $1 AND "end" = 'top' AND rank < {TOP}""",
        [layer],
    )
    memory, sentence, position = (np.asarray(triggers[name], np.int64) for name in ("memory", "sentence", "position"))
    items = (sentence << 24) + position + 1  # the position of BOS alone is -1
    if index.has("values"):
        query = f"SELECT memory, unnest(tokens[:{TOKENS}]) AS token FROM {{values}} WHERE layer = $1"
        tokens = index.arrays(query, [layer])
        memory = np.concatenate([memory, np.asarray(tokens["memory"], np.int64)])
        items = np.concatenate([items, -1 - np.asarray(tokens["token"], np.int64)])
    return memory, np.unique(items, return_inverse=True)[1]


def _group_by(key: NDArray[np.int64], item: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Return the items of each key from 0 to count - 1."""
    import numpy as np

    order = np.argsort(key, kind="stable")
    return np.split(item[order], np.cumsum(np.bincount(key, minlength=count))[:-1]) if count else []


def shared_patterns(index: Index, limit: int = 20) -> list[SharedPattern]:
    """Return the patterns that the largest numbers of memories share."""
    _check_limit(limit)
    rows = index.sql(
        "SELECT pattern, min(kind) AS kind, min(description) AS description, count(*) AS n, "
        "list({'layer': layer, 'memory': memory} ORDER BY layer, memory) AS memories "
        "FROM {patterns} GROUP BY pattern HAVING n > 1 ORDER BY n DESC, pattern LIMIT $1",
        [limit],
    )
    return [
        SharedPattern(
            row["pattern"],
            row["kind"],
            row["description"],
            tuple(index.names.name(own["layer"], own["memory"]) for own in row["memories"]),
        )
        for row in rows
    ]


@dataclass(frozen=True)
class DuplicatePair:
    """Two memories with mostly the same triggers."""

    one: MemoryId
    other: MemoryId
    shared: int
    jaccard: float


@dataclass(frozen=True)
class DuplicateGroup:
    """A memory and all memories that are similar to it, most similar first."""

    memories: tuple[MemoryId, ...]
    least: float  # lowest Jaccard index with the first memory


def duplicates(index: Index, least: float = 0.5, top: int = TOP) -> list[DuplicatePair]:
    """Return all pairs of memories whose triggers have a Jaccard index of at least `least`, most similar first."""
    _check_jaccard(least)
    equal = _equal_sets(trigger_sets(index, top))
    entries, copies = list(equal), list(equal.values())
    sets = AlikeSets(entries, least)
    pairs = []
    for number, memories in enumerate(copies):
        pairs += [DuplicatePair(*two, len(entries[number]), 1.0) for two in combinations(sorted(memories), 2)]
        for neighbor, jaccard in zip(*(column.tolist() for column in sets.of(number)), strict=True):
            if neighbor > number:
                shared = len(entries[number] & entries[neighbor])
                twos = (sorted(two) for two in product(memories, copies[neighbor]))
                pairs += [DuplicatePair(one, other, shared, jaccard) for one, other in twos]
    return sorted(pairs, key=lambda pair: (-pair.jaccard, pair.one, pair.other))


def duplicate_groups(named: NamedSets, least: float) -> list[DuplicateGroup]:
    """Group memories whose sets have a Jaccard index of at least `least`.

    The first group consists of the memory that has the largest number of similar memories, and of these memories.
    Further groups are formed in the same way from the remaining memories.
    """
    import numpy as np

    _check_jaccard(least)
    copies = sorted(sorted(memories) for memories in _equal_sets(named).values())
    sets = AlikeSets([named[memories[0]] for memories in copies], least)
    weight = np.array([len(memories) for memories in copies], np.int64)  # memories per set; 0 if the set is in a group

    def group_size(number: int) -> int:
        return int(weight[number] + weight[sets.of(number)[0]].sum())

    waiting = [(-size, number) for number in range(len(copies)) if (size := group_size(number)) > 1]
    heapify(waiting)
    groups = []
    while waiting:
        expected, number = heappop(waiting)
        if not weight[number]:
            continue
        size = group_size(number)
        if size < -expected:  # some of the similar sets have joined another group
            if size > 1:
                heappush(waiting, (-size, number))
            continue
        neighbors = sorted(
            (-jaccard, other)
            for other, jaccard in zip(*(column.tolist() for column in sets.of(number)), strict=True)
            if weight[other]
        )
        members = copies[number] + [memory for _, other in neighbors for memory in copies[other]]
        groups.append(DuplicateGroup(tuple(members), min([1.0, *(-jaccard for jaccard, _ in neighbors)])))
        weight[[number, *(other for _, other in neighbors)]] = 0
    return sorted(groups, key=lambda group: (-len(group.memories), -group.least, group.memories))


def trigger_sets(index: Index, top: int = TOP) -> NamedSets:
    """Return the set of triggers of each memory, as numbers of prefixes. Leaves out memories without triggers."""
    from memlens.pattern.words import read_trigger_rows

    triggers = read_trigger_rows(index, top)
    names = map(index.names.name, triggers.layer.tolist(), triggers.memory.tolist())
    rows = triggers.rows.tolist()
    return {name: frozenset(row for row in of_memory if row >= 0) for name, of_memory in zip(names, rows, strict=True)}


def token_sets(index: Index, top: int = TOKENS) -> NamedSets:
    """Return the set of top tokens of each memory's value."""
    table = index.table("values", ["layer", "memory", "tokens"])
    columns = (table.column(name).to_pylist() for name in ("layer", "memory", "tokens"))
    name = index.names.name
    return {name(layer, memory): frozenset(tokens[:top]) for layer, memory, tokens in zip(*columns, strict=True)}


def _equal_sets(named: NamedSets) -> dict[frozenset[int], list[MemoryId]]:
    """Return each distinct non-empty set with the memories that have it, so that equal sets are compared only once."""
    equal: dict[frozenset[int], list[MemoryId]] = {}
    for name, entries in named.items():
        if entries:
            equal.setdefault(entries, []).append(name)
    return equal


class AlikeSets:
    """Non-empty sets whose neighbors are computed on request, because the list of all pairs may not fit in RAM."""

    def __init__(self, sets: Sequence[frozenset[int]], least: float) -> None:
        import numpy as np

        self.least = least
        self.sizes = np.array(list(map(len, sets)), np.int64)
        owners = np.repeat(np.arange(len(sets)), self.sizes)
        entries = np.unique([entry for entries in sets for entry in entries], return_inverse=True)[1].astype(np.int64)
        self.entries = _group_by(owners, entries, len(sets))
        self.owners = _group_by(entries, owners, int(entries.max(initial=-1)) + 1)

    def of(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the numbers of other sets whose Jaccard index with this set is at least `least`, and the indexes."""
        import numpy as np

        owners = np.concatenate([self.owners[entry] for entry in self.entries[number]])
        others, shared = np.unique(owners, return_counts=True)
        jaccard = shared / (self.sizes[number] + self.sizes[others] - shared)
        is_alike = (jaccard >= self.least) & (others != number)
        return others[is_alike], jaccard[is_alike]


def _check_jaccard(least: float) -> None:
    if not 0 < least <= 1:
        raise SettingError(f"the minimum Jaccard index is {least}; it must be above 0 and at most 1")


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
