"""Fig 10: how probable the final token already is in the residual stream of a layer, softmax(r_l E)[top(o_L)].

Beside the quartiles of the probability stands the median rank of the final token there (1 = top).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from memlens.experiments.charts import quartiles_by_layer
from memlens.experiments.prefix_pass import Aggregate, on_prefixes, quartiles
from memlens.stats import generator, interval

SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("prefixes", pa.int64()),
        ("q1", pa.float64()),
        ("median", pa.float64()),
        ("q3", pa.float64()),
        ("low", pa.float64()),  # of the median
        ("high", pa.float64()),
        ("median_rank", pa.float64()),
    ]
)


@on_prefixes
def compute(seen: Aggregate, seed: int) -> pa.Table:
    """Quartiles over the prefixes, layer by layer."""
    rows = []
    for layer, columns in seen.by_layer():
        p = columns["p_final"]
        low, high = interval(p, np.median, generator(seed, "confidence", layer))
        numbers = {"low": low, "high": high, "median_rank": float(np.median(columns["rank_final"]))}
        rows.append({"layer": layer, "prefixes": len(p), **quartiles(p), **numbers})
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """Median probability by layer within its quartiles."""
    return quartiles_by_layer(table, "p of the final token in r")
