"""An index whose triggers are written down instead of scanned: any text, any memory, no model."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from memlens.files import facts_of, write_table
from memlens.index import format as layout
from memlens.index.reader import Index
from memlens.vocab.table import VALUES_SCHEMA

PIECE = re.compile(r" ?\w+| ?[^\w\s]|\s")
Place = tuple[int, int]  # sentence, position


def pieces(text: str) -> list[str]:
    """Split a text into words, each with the space before it."""
    return PIECE.findall(text)


def complete_table(name: str, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return a table of a later stage. Required columns that rows leave out hold zeros, empty texts or empty lists."""
    empty: dict[str, Any] = {}
    for column in layout.DERIVED_COLUMNS[f"{name}.parquet"].split():
        kind = schema.field(column).type
        empty[column] = [] if pa.types.is_list(kind) else "" if pa.types.is_string(kind) else 0
    return pa.Table.from_pylist([{**empty, **row} for row in rows], schema)


def write_index(
    folder: Path,
    texts: Sequence[str],
    triggers: Mapping[tuple[int, int], Sequence[Place]],
    sources: Sequence[str] | None = None,
    values: Mapping[tuple[int, int], Sequence[int]] | None = None,
    tokenize: Callable[[str], list[str]] = pieces,
    lower: Mapping[tuple[int, int], Sequence[Place]] | None = None,
) -> Index:
    """Write an index with these triggers: (layer, memory) -> prefixes, best first.

    Each layer must have all memories from 0 to n - 1.

    `lower` has the bottom triggers, with coefficients of twice the size.
    """
    folder.mkdir(parents=True)
    cut = [tokenize(text) for text in texts]
    vocabulary = {piece: number for number, piece in enumerate(sorted({piece for own in cut for piece in own}))}
    tokens = [[vocabulary[piece] for piece in own] for own in cut]
    corpus = {
        "sentence": list(range(len(texts))),
        "text": list(texts),
        "tokens": tokens,
        "ends": [np.cumsum([len(piece) for piece in own]).tolist() for own in cut],
        "source": list(sources) if sources else [f"text.txt:{i}" for i in range(len(texts))],
        "cut": [0] * len(texts),
    }
    rows = [
        {"layer": layer, "memory": memory, "end": end, "rank": rank, "coefficient": scale * (100.0 - rank),
         "sentence": s, "position": p, "next_token": tokens[s][p + 1] if p + 1 < len(tokens[s]) else None}
        for (layer, memory) in sorted(triggers)
        for end, scale, own in (("top", 1, triggers), ("bottom", -2, lower or {}))
        for rank, (s, p) in enumerate(own.get((layer, memory), ()))
    ]  # fmt: skip
    facts = [
        {"layer": layer, "memory": memory, "max": 100.0,
         "min": -200.0 if (layer, memory) in (lower or {}) else 0.0, "mean": 0.1, "frequency": 0.1,
         "dead": not places, "histogram": [1]}
        for (layer, memory), places in sorted(triggers.items())
    ]  # fmt: skip
    tables = {
        layout.CORPUS: pa.table(corpus, layout.CORPUS_SCHEMA),
        layout.VOCABULARY: pa.table(
            {"token": range(len(vocabulary)), "text": list(vocabulary)}, layout.VOCABULARY_SCHEMA
        ),
        layout.TRIGGERS: pa.Table.from_pylist(rows, layout.TRIGGERS_SCHEMA),
        layout.MEMORIES: pa.Table.from_pylist(facts, layout.MEMORIES_SCHEMA),
        layout.ORDINARY: layout.ORDINARY_SCHEMA.empty_table(),
    }
    if values is not None:
        made = [
            {"layer": layer, "memory": memory, "max_p": 0.5, "argmax": own[0], "tokens": list(own),
             "p": [0.5] * len(own), "bottom_tokens": [0], "bottom_p": [0.0]}
            for (layer, memory), own in sorted(values.items())
        ]  # fmt: skip
        tables["values.parquet"] = complete_table("values", made, VALUES_SCHEMA)
    for name, table in tables.items():
        write_table(folder / name, table.schema, iter([table]))
    layers = sorted({layer for layer, _ in triggers})
    counts = {str(layer): sum(own == layer for own, _ in triggers) for layer in layers}
    manifest = {
        "schema": layout.SCHEMA_VERSION,
        "layers": layers,
        "model": {"name": "by hand", "source": None, "memories": counts, "vocabulary": len(vocabulary)},
        "counts": {"sentences": len(texts), "tokens": sum(map(len, tokens)), "prefixes": sum(map(len, tokens))},
        "plan": {"settings": {}},
        "histogram_edges": [],
        "files": {name: facts_of(folder / name) for name in tables},
    }
    layout.Manifest(manifest).write(folder)
    return Index(folder)
