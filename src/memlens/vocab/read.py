"""values.parquet in a few numbers, for people. Reads the index alone: no model, no torch."""

from __future__ import annotations

from typing import Any

from memlens.index.reader import Index
from memlens.memory import MemoryId


def summarize_values(index: Index, count: int = 10) -> dict[str, Any]:
    """The values in a few numbers, ready for JSON, with the `count` most confident of them."""
    whole = index.sql(
        """SELECT count(*) AS memories, count(target) AS with_target, count(*) FILTER (argmax = target) AS agree,
                  median(max_p) AS median_max_p FROM {values}"""
    )[0]
    best = index.sql(
        """SELECT layer, memory, argmax, max_p, argmax = target AS agrees FROM {values}
           ORDER BY max_p DESC, layer, memory LIMIT $1""",
        [count],
    )
    noted = index.manifest.values
    return {
        "index": str(index.folder),
        "model": index.manifest.model.name,
        "reading": noted.reading,
        "top": noted.top,
        **whole,
        "most_confident": [
            {
                "name": str(MemoryId(row["layer"], row["memory"])),
                "layer": row["layer"],
                "memory": row["memory"],
                "token": row["argmax"],
                "text": index.vocabulary[row["argmax"]],
                "p": row["max_p"],
                "agrees": row["agrees"],
            }
            for row in best
        ],
    }
