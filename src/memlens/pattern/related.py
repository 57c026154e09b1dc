"""Memories that belong together: with the same pattern, the same triggers, or the same promoted tokens.

related_memories    of one memory: how many triggers, value tokens and patterns it shares with others
order_by_likeness   memories of a layer in a row, each beside one that it shares most with
shared_patterns     patterns that several memories have ("12 memories end with 'press'")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memlens.errors import SettingError
from memlens.index.memory import read_summaries
from memlens.index.reader import Index
from memlens.memory import MemoryId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOP, TOKENS = 25, 10  # triggers and promoted tokens that are compared


@dataclass(frozen=True)
class RelatedMemory:
    """Another memory and what it shares."""

    name: MemoryId
    summary: str | None  # the memory in one line
    triggers: int  # equal prefixes among the first 25
    tokens: int | None  # equal tokens among the 10 most promoted; None without values
    patterns: tuple[str, ...]  # descriptions of equal patterns


@dataclass(frozen=True)
class SharedPattern:
    """A pattern and who has it."""

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
    """Most alike first: by shared triggers, then patterns, then promoted tokens (at least two of them)."""
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
    """A layer's memories in a row: after each the one left with most triggers and promoted tokens in common.

    Of equal ones the lowest number comes first, also where nothing is in common. [memories]
    """
    import numpy as np

    count = index.memories(layer)
    memory, shared = _things(index, layer)
    of_memory = _lists(memory, shared, count)
    by_thing = _lists(shared, memory, int(shared.max(initial=-1)) + 1)
    order, left = np.zeros(count, np.int64), np.ones(count, np.bool_)
    left[0] = False
    for place in range(1, count):
        others = [by_thing[thing] for thing in of_memory[order[place - 1]]]
        common = np.bincount(np.concatenate(others), minlength=count) if others else np.zeros(count, np.int64)
        order[place] = np.where(left, common, -1).argmax()
        left[order[place]] = False
    return order


def _things(index: Index, layer: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Memories of a layer, and the number of a trigger or token that each has, as two columns."""
    import numpy as np

    own = index.arrays(
        f"""SELECT memory, sentence, position FROM {{triggers}} WHERE layer = $1 AND "end" = 'top' AND rank < {TOP}""",
        [layer],
    )
    memory = np.asarray(own["memory"], np.int64)
    things = (np.asarray(own["sentence"], np.int64) << 24) + np.asarray(own["position"], np.int64) + 1  # BOS is at -1
    if index.has("values"):
        query = f"SELECT memory, unnest(tokens[:{TOKENS}]) AS token FROM {{values}} WHERE layer = $1"
        tokens = index.arrays(query, [layer])
        memory = np.concatenate([memory, np.asarray(tokens["memory"], np.int64)])
        things = np.concatenate([things, -1 - np.asarray(tokens["token"], np.int64)])
    return memory, np.unique(things, return_inverse=True)[1]


def _lists(key: NDArray[np.int64], item: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """The items of each key 0 to count - 1."""
    import numpy as np

    order = np.argsort(key, kind="stable")
    return np.split(item[order], np.cumsum(np.bincount(key, minlength=count))[:-1]) if count else []


def shared_patterns(index: Index, limit: int = 20) -> list[SharedPattern]:
    """The patterns that most memories have."""
    _check_limit(limit)
    rows = index.sql(
        "SELECT pattern, min(kind) AS kind, min(description) AS description, count(*) AS n, "
        "list({{'layer': layer, 'memory': memory}} ORDER BY layer, memory) AS memories "
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


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
