"""Do the rows of a table speak of memories and prefixes that are there? Asked of whole files only, with DuckDB."""

from __future__ import annotations

from memlens.index.reader import Index

_PREFIX_TABLES = ("triggers", "ordinary")


def wrong_references(index: Index, table: str, with_corpus: bool = True) -> str:
    """What a row of the table speaks of that does not exist, in words; empty if all is there."""
    columns = set(index.schema_names(table))
    if {"layer", "memory"} <= columns:
        problem = _wrong_memories(index, table)
        if problem:
            return problem
    if table in _PREFIX_TABLES and with_corpus:
        return _wrong_prefixes(index, table)
    return ""


def _wrong_memories(index: Index, table: str) -> str:
    """Layers that were not scanned and memories that a layer does not have."""
    found = index.sql(
        f"SELECT layer, min(memory) AS low, max(memory) AS high, count(*) AS rows, "
        f"count(DISTINCT memory) AS memories FROM {{{table}}} WHERE memory IS NOT NULL GROUP BY layer ORDER BY layer"
    )
    for row in found:
        if row["layer"] not in index.layers:
            return f"it speaks of layer {row['layer']}, which was not scanned"
        count = index.memories(row["layer"])
        if row["low"] < 0 or row["high"] >= count:
            wrong = row["low"] if row["low"] < 0 else row["high"]
            return f"it speaks of memory {wrong} of layer {row['layer']}, which has {count:,}"
        if table == "memories" and not row["rows"] == row["memories"] == count:
            return f"it has {row['memories']:,} memories of layer {row['layer']} instead of {count:,}"
    return ""


def _wrong_prefixes(index: Index, table: str) -> str:
    """Sentences that the corpus does not have, and positions beyond a sentence's end."""
    wrong = index.sql(
        f"SELECT t.sentence, t.position, c.sentence IS NULL AS lost FROM "
        f"(SELECT sentence, min(position) AS low, max(position) AS position FROM {{{table}}} GROUP BY sentence) t "
        "LEFT JOIN (SELECT sentence, len(tokens) AS length FROM {corpus}) c USING (sentence) "
        "WHERE c.sentence IS NULL OR t.position >= c.length OR t.low < -1 ORDER BY t.sentence LIMIT 1"
    )
    if not wrong:
        return ""
    row = wrong[0]
    if row["lost"]:
        return f"it speaks of sentence {row['sentence']}, which the corpus does not have"
    return f"it speaks of position {row['position']} of sentence {row['sentence']}, which is shorter"
