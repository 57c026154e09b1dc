"""An index in a few numbers: what was read, what was found. Reads the manifest and the statistics, no text."""

from __future__ import annotations

from typing import Any

from memlens.errors import IndexFolderError
from memlens.index.layout import MANIFEST
from memlens.index.reader import Index

_COUNTED = ("sentences", "tokens", "prefixes", "repeated_prefixes", "cut_sentences", "cut_tokens")


def summarize(index: Index) -> dict[str, Any]:
    """Counts of an index, ready for JSON; `dead` counts by layer the memories without any trigger."""
    model, counts = index.manifest["model"], index.manifest["counts"]
    missing = [name for name in _COUNTED if not isinstance(counts.get(name), int)]
    if missing:
        raise IndexFolderError(f"{index.folder / MANIFEST} is damaged: it does not count '{missing[0]}'; scan again")
    rows = index.sql(
        "SELECT layer, count(*) AS memories, count(*) FILTER (dead) AS dead FROM {memories} GROUP BY ALL ORDER BY layer"
    )
    return {
        "index": str(index.folder),
        "model": model["name"],
        "layers": list(index.layers),
        "memories": sum(row["memories"] for row in rows),
        "dead": {str(row["layer"]): row["dead"] for row in rows},
        "sentences": counts["sentences"],
        "tokens": counts["tokens"],
        "prefixes": counts["prefixes"],
        "repeated_prefixes": counts["repeated_prefixes"],
        "cut_sentences": counts["cut_sentences"],
        "cut_tokens": counts["cut_tokens"],
        "settings": index.manifest["plan"]["settings"],
    }
