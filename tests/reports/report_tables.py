"""Experiment tables with known shapes, written into a real index with the real writers."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from memlens.experiments import patterns as figure
from memlens.experiments.run import EXPERIMENTS, all_tables
from memlens.index.reader import Index

Row = dict[str, Any]
PREFIXES = 400
EVIL = "</script><script>alert('x')</script>"


def write_rows(index: Index, name: str, rows: list[Row], folder: str = "experiments/") -> None:
    """A table of the index, registered as a stage would. Columns of an experiment that the rows lack are null."""
    schemas = {table.name: table.schema for _, table in all_tables()} if folder else {}
    table = pa.Table.from_pylist(rows, schemas.get(name))
    index.write({f"{folder}{name}": (table.schema, [table])}, dict)


def table_of(columns: str, rows: Iterable[tuple[Any, ...]]) -> list[Row]:
    return [dict(zip(columns.split(), row, strict=True)) for row in rows]


def like_the_paper(index: Index) -> dict[str, list[Row]]:
    """Tables that a model much like the paper's would have, with the columns that the report needs."""
    random = np.random.default_rng(5)
    layers, memories = len(index.layers), index.memories(0)

    def curve(name: str, column: str, **where: Any) -> Any:
        rows = [row for row in EXPERIMENTS[name].tables[0].published() if where.items() <= row.items()]
        depths, wanted = ((np.arange(count) + 0.5) / count for count in (16, layers))
        return np.interp(wanted, depths, [row[column] for row in rows]) * random.normal(1, 0.05, layers)

    def quartiles(name: str) -> list[Row]:
        found = zip(*(curve(name, column).tolist() for column in ("q1", "median", "q3")), strict=True)
        return table_of("layer q1 median q3", ((layer, *sorted(own)) for layer, own in enumerate(found)))

    def counted(name: str, column: str, low: float, high: float) -> list[Row]:
        counts = [round(rate * PREFIXES) for rate in curve(name, "rate").clip(low, high).tolist()]
        return table_of(f"layer prefixes {column} rate", ((n, PREFIXES, c, c / PREFIXES) for n, c in enumerate(counts)))

    def with_slope(rows: list[Row], column: str) -> list[Row]:
        """The rows with a slope over the depth that is known to a tenth."""
        slope = (rows[-1][column] - rows[1][column]) * layers / (layers - 2)
        low, high = sorted((0.9 * slope, 1.1 * slope))
        return [row | {"trend": slope, "trend_low": low, "trend_high": high} for row in rows]

    return {
        "agreement": table_of(
            "layer memories agree rate low high baseline",
            (
                (layer, 4096, round(rate * 4096), rate, rate * 0.85, rate * 1.15, 1 / 97)
                for layer, rate in enumerate(curve("agreement", "rate").clip(0, 1).tolist())
            ),
        ),
        "rank": [row | {"low": row["median"] * 0.97, "high": row["median"] * 1.03} for row in quartiles("rank")],
        "local-edits": table_of(
            "layer edit change low high memories prefixes left_out",
            (
                (layer, edit, change, change - 0.03, change + 0.03, 100, 5000, 12)
                for edit in ("first", "last", "random")
                for layer, change in enumerate(curve("local-edits", "change", edit=edit).tolist())
            ),
        ),
        "predictive-values": table_of(
            "layer memory max_p token precision agrees",
            (
                (layers - 1 - i % 5, 7 * i % memories, 0.4 / (i + 1), i * 5 % 97, max(0.0, 0.6 - 0.012 * i), i < 50)
                for i in range(100)
            ),
        ),
        "active": quartiles("active"),
        "composition": [row | {"zero_active": PREFIXES} for row in counted("composition", "zero", 0.66, 1)],
        "refinement": with_slope(counted("refinement", "match", 0, 0.99), "rate"),
        "confidence": with_slope(quartiles("confidence"), "median"),
        "cases": [_cases(layer, curve_at) for layer, curve_at in enumerate(curve("cases", "residual").tolist())],
    }


def _cases(layer: int, residual: float) -> Row:
    kept = min(round(residual / 4000 * PREFIXES), PREFIXES - 6)
    rest = PREFIXES - kept - 4
    shares = {"kept": 0.8, "kept_low": 0.78, "kept_high": 0.82}
    shares |= {"compromises": 0.98, "compromises_low": 0.97, "compromises_high": 0.99}
    return {"layer": layer, "residual": kept, "ffn": 1, "agreement": 2, "composition": rest, "reversal": 1} | shares


def shuffled_networks() -> list[Row]:
    """Shuffled networks that show none of the claims, and a network that shows all of them."""
    claims = [claim for experiment in EXPERIMENTS.values() for claim in experiment.claims]
    return [
        {"claim": claim.slug, "seed": 0, "tokens": 1000, "value": shuffled, "low": shuffled, "high": shuffled}
        | {"trained": trained, "trained_low": trained, "trained_high": trained}
        for claim in claims
        for shuffled, trained in [(0.0, float(claim.sign) if claim.target is None else claim.target)]
    ]


def patterns_of(index: Index) -> list[Row]:
    """Shallow patterns below, semantic ones above, one of them with a description that tries to break out."""
    rows = []
    for layer in index.layers:
        kind, said = (
            ("shallow", 'ends with "the"') if layer < len(index.layers) / 2 else ("semantic", "rivers and hills")
        )
        for memory in range(0, index.memories(layer), 4):
            own = (layer, memory, f"p{memory}", kind, said if memory else EVIL, [0, 1, 2], 1 - memory / 100)
            other = (layer, memory, "other", kind, EVIL, [3, 4], 0.0)
            precision = 0.9 - memory % 3 / 10
            rows += [(*own, 0.1, 0.0, 0, 0.9, 0.5, precision), (*other, 0.1, 0.0, 1, None, None, None)]
    return table_of(
        "layer memory pattern kind description prefixes confidence share q sense auroc auroc_same_token precision", rows
    )


def write_all(index: Index) -> None:
    for name, rows in like_the_paper(index).items():
        write_rows(index, name, rows)
    # a chart with names on its y axis, one of which tries to break out
    vetoes = [(index.layers[-1], memory, 90, 30 - memory, -1.5, 3, EVIL, 4) for memory in range(12)]
    columns = "layer memory compositions times push token token_text token_times"
    write_rows(index, "vetoes", table_of(columns, vetoes))
    write_rows(index, "shuffled", shuffled_networks())
    write_rows(index, "patterns", patterns_of(index), folder="")
    write_rows(index, "patterns", figure.compute(index))
    write_rows(index, "patterns-people", [{"annotator": EVIL, **row} for row in figure.compute(index)])
