"""Agreement (Figure 4): the share of memories whose value's top token is the token after their top-1 trigger.

Two baselines: a token drawn at random, 1 / vocabulary; and the targets of the layer shuffled among its memories, as the
exact mean over all shuffles, which shows how much of the agreement comes from frequent tokens alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from memlens.experiments.charts import by_layer
from memlens.experiments.targets import Targets, read_targets
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress
from memlens.stats import generator, rate_interval

SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memories", pa.int64()),  # that take part
        ("agree", pa.int64()),
        ("rate", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("baseline", pa.float64()),
        ("shuffled", pa.float64()),
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
        progress("agreement", done, len(index.layers))
        random = generator(seed, "agreement", layer)
        targets = read_targets(index, layer, sample, random)
        count, agree = len(targets.memories), int(targets.agrees.sum())
        low, high = rate_interval(agree, count, random)
        rows.append(
            {
                "layer": layer,
                "memories": count,
                "agree": agree,
                "rate": agree / count if count else None,
                "low": low,
                "high": high,
                "baseline": 1 / index.manifest.model.vocabulary,
                "shuffled": shuffled_rate(targets),
                "no_trigger": targets.no_trigger,
                "no_next": targets.no_next,
            }
        )
    progress("agreement", len(index.layers), len(index.layers))
    return pa.Table.from_pylist(rows, SCHEMA)


def shuffled_rate(targets: Targets) -> float | None:
    """Mean agreement over all ways to deal the layer's targets out to its memories."""
    count = len(targets.memories)
    if count == 0:
        return None
    promoted, promoters = np.unique(targets.argmax, return_counts=True)
    wanted, times = np.unique(targets.target, return_counts=True)
    _, left, right = np.intersect1d(promoted, wanted, return_indices=True)
    return float((promoters[left] * times[right]).sum() / count**2)


def chart(table: pa.Table) -> Any:
    """Share of agreeing memories by layer with its interval; both baselines as lines."""
    return by_layer(
        table,
        "rate",
        "memories that agree",
        format="%",
        lines={"shuffled": "shuffled targets", "baseline": "random token"},
    )
