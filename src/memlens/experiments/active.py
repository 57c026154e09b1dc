"""Fig 7: how many memories of a layer are active for a prefix.

Active means m > 0, which for GELU, SiLU and gated blocks is a matter of sign rather than of silence; so the effective
number of memories stands beside it: (sum a)^2 / sum a^2 with a_i = |m_i| ||v_i||, which is 1 for one loud memory and
the number of memories for equally loud ones. Reads the aggregate pass only.
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
        ("memories", pa.int64()),
        ("q1", pa.float64()),  # of the share of memories with m > 0
        ("median", pa.float64()),
        ("q3", pa.float64()),
        ("low", pa.float64()),  # of the median
        ("high", pa.float64()),
        ("effective_q1", pa.float64()),  # of the effective number of memories
        ("effective_median", pa.float64()),
        ("effective_q3", pa.float64()),
    ]
)


@on_prefixes
def compute(seen: Aggregate, seed: int) -> pa.Table:
    """Quartiles over the prefixes, layer by layer."""
    rows = []
    for layer, columns in seen.by_layer():
        memories = seen.memories[layer]
        shares = np.asarray(columns["active"], np.float64) / memories
        low, high = interval(shares, np.median, generator(seed, "active", layer))
        effective = quartiles(columns["effective"])
        rows.append(
            {"layer": layer, "prefixes": len(shares), "memories": memories, "low": low, "high": high}
            | quartiles(shares)
            | {f"effective_{name}": number for name, number in effective.items()}
        )
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """Median share of active memories by layer within its quartiles."""
    return quartiles_by_layer(table, "share of memories with m > 0")
