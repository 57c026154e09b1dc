"""Fig 9: how often the residual stream of a layer already predicts the final token, top(r_l) == top(o_L)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from memlens.experiments.aggregate import Aggregate, on_prefixes
from memlens.experiments.bootstrap import generator, rate_interval
from memlens.experiments.charts import by_layer

SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("prefixes", pa.int64()),
        ("match", pa.int64()),
        ("rate", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
    ]
)


@on_prefixes
def compute(seen: Aggregate, seed: int) -> pa.Table:
    """Counts and rates with intervals, layer by layer."""
    final = seen.column("final_token")
    rows = []
    for layer, columns in seen.by_layer():
        match, count = int((columns["residual_token"] == final).sum()), len(final)
        low, high = rate_interval(match, count, generator(seed, "refinement", layer))
        rows.append(
            {"layer": layer, "prefixes": count, "match": match, "rate": match / count, "low": low, "high": high}
        )
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """Share of prefixes by layer with its interval."""
    return by_layer(table, "rate", "r already predicts the final token", format="%")
