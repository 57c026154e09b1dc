"""Fig 8: how often a layer's prediction is none of its memories' predictions.

A prefix has zero agreement where top(y) differs from the top token of every value of the layer (`zero`), or of every
value whose memory is active, m > 0 (`zero_active`). Values are read as the values table reads them. Among the other
prefixes: the share whose target is a stop word and the share of prefixes shorter than 5 tokens, with the same shares
among all prefixes to compare with. Prefixes at the end of a sentence have no target and are left out of the first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.experiments.charts import by_layer
from memlens.experiments.prefix_pass import Aggregate, on_prefixes
from memlens.stats import generator, rate_interval

SHORT = 5  # tokens
SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("prefixes", pa.int64()),
        ("zero", pa.int64()),
        ("rate", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("zero_active", pa.int64()),
        ("rate_active", pa.float64()),
        ("low_active", pa.float64()),
        ("high_active", pa.float64()),
        ("stop_words", pa.float64()),  # share among the prefixes that are not zero; null without any
        ("short", pa.float64()),
        ("stop_words_all", pa.float64()),  # the same among all prefixes
        ("short_all", pa.float64()),
        ("without_target", pa.int64()),  # of all prefixes
    ]
)


@on_prefixes
def compute(seen: Aggregate, seed: int) -> pa.Table:
    """Counts and rates with intervals, layer by layer."""
    stops = seen.prefixes.column("stop_word").to_pylist()
    known = np.array([stop is not None for stop in stops])
    is_stop = np.array([bool(stop) for stop in stops])
    is_short = seen.prefixes.column("position").to_numpy() + 1 < SHORT
    everything = np.ones(len(stops), bool)
    rows = []
    for layer, columns in seen.by_layer():
        some = np.asarray(columns["promoted"])
        count, zero = len(some), int((~some).sum())
        zero_active = int((~np.asarray(columns["promoted_active"])).sum())
        random = generator(seed, "composition", layer)
        low, high = rate_interval(zero, count, random)
        low_active, high_active = rate_interval(zero_active, count, random)
        row: dict[str, Any] = {
            "layer": layer,
            "prefixes": count,
            "zero": zero,
            "rate": zero / count,
            "low": low,
            "high": high,
            "zero_active": zero_active,
            "rate_active": zero_active / count,
            "low_active": low_active,
            "high_active": high_active,
            "stop_words": _share(is_stop, some & known),
            "short": _share(is_short, some),
            "stop_words_all": _share(is_stop, known),
            "short_all": _share(is_short, everything),
            "without_target": int((~known).sum()),
        }
        rows.append(row)
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """Share of prefixes by layer with its interval; against the active memories alone as a line."""
    return by_layer(
        table,
        "rate",
        "no memory predicts what the layer does",
        format="%",
        lines={"rate_active": "no active memory"},
    )


def _share(hits: NDArray[np.bool_], among: NDArray[np.bool_]) -> float | None:
    count = int(among.sum())
    return int((hits & among).sum()) / count if count else None
