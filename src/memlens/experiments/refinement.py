"""Fig 9: how often the residual stream of a layer already predicts the final token, top(r_l) == top(o_L).

`gain` is how much more often than in the first layer that was scanned. Both are seen on the same prefixes, so its
interval resamples prefixes, not the two shares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from memlens.experiments.charts import by_layer
from memlens.experiments.prefix_pass import Aggregate, on_prefixes
from memlens.stats import generator, paired_interval, rate_interval

SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("prefixes", pa.int64()),
        ("match", pa.int64()),
        ("rate", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("gain", pa.float64()),  # rate less the first layer's
        ("gain_low", pa.float64()),
        ("gain_high", pa.float64()),
    ]
)


@on_prefixes
def compute(seen: Aggregate, seed: int) -> pa.Table:
    """Counts and rates with intervals, layer by layer."""
    final = seen.column("final_token")
    rows = []
    first = None
    for layer, columns in seen.by_layer():
        matches = np.asarray(columns["residual_token"] == final)
        first = matches if first is None else first
        match, count = int(matches.sum()), len(final)
        low, high = rate_interval(match, count, generator(seed, "refinement", layer))
        gain_low, gain_high = paired_interval(matches, first, generator(seed, "refinement gain", layer))
        rows.append(
            {
                "layer": layer,
                "prefixes": count,
                "match": match,
                "rate": match / count,
                "low": low,
                "high": high,
                "gain": (match - int(first.sum())) / count,
                "gain_low": gain_low,
                "gain_high": gain_high,
            }
        )
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """Share of prefixes by layer with its interval."""
    return by_layer(table, "rate", "r already predicts the final token", format="%")
