"""Experiment tables with known shapes, written into a real index with the real writers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from memlens.experiments import patterns as figure
from memlens.experiments.registry import EXPERIMENTS
from memlens.index.reader import Index

Row = dict[str, Any]

PREFIXES = 400
EVIL = "</script><script>alert('x')</script>"


def write_rows(index: Index, name: str, rows: list[Row], folder: str = "experiments/") -> None:
    """A table of the index, registered as a stage would."""
    table = pa.Table.from_pylist(rows)
    index.write({f"{folder}{name}": (table.schema, [table])}, dict)


def like_the_paper(index: Index) -> dict[str, list[Row]]:
    """Tables that a model much like the paper's would have, with all columns of the contract and some more."""
    random = np.random.default_rng(5)
    layers, memories = len(index.layers), index.memories(0)

    def curve(name: str, column: str, **where: Any) -> Any:
        rows = [
            row
            for row in EXPERIMENTS[name].tables[0].published()
            if all(row[key] == value for key, value in where.items())
        ]
        depths = (np.arange(16) + 0.5) / 16
        wanted = (np.arange(layers) + 0.5) / layers
        return np.interp(wanted, depths, [row[column] for row in rows]) * random.normal(1, 0.05, layers)

    def quartiles(name: str) -> list[Row]:
        found = {column: curve(name, column) for column in ("q1", "median", "q3")}
        return [
            {"layer": layer} | dict(zip(found, sorted(float(c[layer]) for c in found.values()), strict=True))
            for layer in range(layers)
        ]

    return {
        "agreement": [
            {
                "layer": layer,
                "memories": 4096,
                "agree": round(rate * 4096),
                "rate": rate,
                "low": rate * 0.85,
                "high": rate * 1.15,
                "baseline": 1 / 97,
            }
            for layer, rate in enumerate(curve("agreement", "rate").clip(0, 1).tolist())
        ],
        "rank": [row | {"low": row["median"] * 0.97, "high": row["median"] * 1.03} for row in quartiles("rank")],
        "local-edits": [
            {
                "layer": layer,
                "edit": edit,
                "change": change,
                "low": change - 0.03,
                "high": change + 0.03,
                "memories": 100,
                "prefixes": 5000,
                "left_out": 12,
            }
            for edit in ("first", "last", "random")
            for layer, change in enumerate(curve("local-edits", "change", edit=edit).tolist())
        ],
        "predictive-values": [
            {
                "layer": layers - 1 - i % 5,
                "memory": (7 * i) % memories,
                "max_p": 0.4 / (i + 1),
                "token": (i * 5) % 97,
                "precision": max(0.0, 0.6 - 0.012 * i),
                "agrees": i < 50,
            }
            for i in range(100)
        ],
        "active": quartiles("active"),
        "composition": [
            {
                "layer": layer,
                "prefixes": PREFIXES,
                "zero": round(rate * PREFIXES),
                "rate": round(rate * PREFIXES) / PREFIXES,
                "zero_active": PREFIXES,
            }
            for layer, rate in enumerate(curve("composition", "rate").clip(0.66, 1).tolist())
        ],
        "refinement": [
            {
                "layer": layer,
                "prefixes": PREFIXES,
                "match": round(rate * PREFIXES),
                "rate": round(rate * PREFIXES) / PREFIXES,
            }
            for layer, rate in enumerate(curve("refinement", "rate").clip(0, 0.99).tolist())
        ],
        "confidence": quartiles("confidence"),
        "cases": [_cases(layer, curve_at) for layer, curve_at in enumerate(curve("cases", "residual").tolist())],
    }


def _cases(layer: int, residual: float) -> Row:
    kept = min(round(residual / 4000 * PREFIXES), PREFIXES - 6)
    rest = PREFIXES - kept - 4
    return {"layer": layer, "residual": kept, "ffn": 1, "agreement": 2, "composition": rest, "reversal": 1}


def patterns_of(index: Index) -> list[Row]:
    """Shallow patterns below, semantic ones above, one of them with a description that tries to break out."""
    rows = []
    for layer in index.layers:
        for memory in range(0, index.memories(layer), 4):
            kind = "shallow" if layer < len(index.layers) / 2 else "semantic"
            description = EVIL if memory == 0 else 'ends with "the"' if kind == "shallow" else "rivers and hills"
            rows.append(
                {
                    "layer": layer,
                    "memory": memory,
                    "pattern": f"p{memory}",
                    "kind": kind,
                    "description": description,
                    "prefixes": [0, 1, 2],
                    "confidence": 1 - memory / 100,
                }
            )
    return rows


def vetoes_of(index: Index) -> list[Row]:
    """A chart with names on its y axis, one of which tries to break out."""
    layer = index.layers[-1]
    return [
        {"layer": layer, "memory": memory, "compositions": 90, "times": 30 - memory, "push": -1.5, "token": 3,
         "token_text": EVIL, "token_times": 4}
        for memory in range(12)
    ]  # fmt: skip


def write_all(index: Index) -> None:
    for name, rows in like_the_paper(index).items():
        write_rows(index, name, rows)
    write_rows(index, "vetoes", vetoes_of(index))
    write_rows(index, "patterns", patterns_of(index), folder="")
    write_rows(index, "patterns", figure.compute(index))
    people = [{"annotator": EVIL, **row} for row in figure.compute(index)]
    write_rows(index, "patterns-people", people)
