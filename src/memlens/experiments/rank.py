"""Rank (Figure 5): where the token after the top-1 trigger stands in the distribution of the memory's value.

Quartiles over the memories of a layer; rank 1 is the top token. The interval is of the median.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from memlens.experiments.charts import quartiles_by_layer
from memlens.experiments.targets import read_targets
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress
from memlens.stats import generator, interval

SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("q1", pa.float64()),
        ("median", pa.float64()),
        ("q3", pa.float64()),
        ("low", pa.float64()),  # of the median
        ("high", pa.float64()),
        ("memories", pa.int64()),  # that take part
        ("no_trigger", pa.int64()),  # left out
        ("no_next", pa.int64()),  # left out
    ]
)


def compute(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> pa.Table:
    """One row a layer; `sample` memories of each, or all."""
    rows = []
    for done, layer in enumerate(index.layers):
        progress("rank", done, len(index.layers))
        random = generator(seed, "rank", layer)
        targets = read_targets(index, layer, sample, random)
        some = len(targets.rank) > 0
        q1, median, q3 = np.percentile(targets.rank, [25, 50, 75]).tolist() if some else (None, None, None)
        low, high = interval(targets.rank, np.median, random)
        counts = {
            "memories": len(targets.rank),
            "no_trigger": targets.no_trigger,
            "no_next": targets.no_next,
        }
        rows.append({"layer": layer, "q1": q1, "median": median, "q3": q3, "low": low, "high": high} | counts)
    progress("rank", len(index.layers), len(index.layers))
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """Median rank by layer within its quartiles."""
    return quartiles_by_layer(table, "rank of the next token", scale="log")
