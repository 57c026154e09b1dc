"""What is compared of a memory, as lists of keys with weights, read some memories at a time.

    prefixes   end, position and text of each trigger's prefix; |coefficient|
    endings    the last token's text, and for the how-manieth time it occurs; |coefficient|
    tokens     what the value promotes, by number where both vocabularies are one, else by text; p
    patterns   the pattern's name, equal for equal patterns of different memories; confidence

Texts are keys themselves, so nothing is equal by chance; of prefixes too long to keep by the thousand, their SHA-256.
Of several entries with one key the first, strongest one counts. Knows tables; what overlaps is not its matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.index.reader import Index

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
