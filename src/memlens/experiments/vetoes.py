"""Vetoes: which memories push the residual's top token down where a composition happens.

At every composition the ten memories that took most from the logit of top(r), beside the mean of all logits, are noted;
here they are counted by memory: how often a memory was among the ten, how much it took on average, from which token
most often. Memories that veto many different tokens and those that always veto one are told apart by `token_times`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pyarrow as pa

from memlens.experiments.charts import HEIGHT, WIDTH
from memlens.experiments.prefix_pass import Aggregate, on_prefixes
from memlens.memory import MemoryId

_DRAWN = 25
SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memory", pa.int32()),
        ("times", pa.int64()),  # among the ten strongest vetoes
        ("push", pa.float64()),  # mean, below 0
        ("token", pa.int32()),  # most vetoed; of equally often vetoed ones the lowest id
        ("token_text", pa.string()),
        ("token_times", pa.int64()),
        ("compositions", pa.int64()),  # of the layer, in the sample
    ]
)


@on_prefixes
def compute(seen: Aggregate, seed: int) -> pa.Table:
    """One row a memory that vetoed at all; by layer, most often first, then by memory."""
    rows: list[dict[str, Any]] = []
    for layer, columns in seen.by_layer():
        tokens: dict[int, Counter[int]] = defaultdict(Counter)
        pushes: dict[int, list[float]] = defaultdict(list)
        compositions = 0
        for token, memories, amounts in zip(
            columns["residual_token"], columns["vetoes"], columns["veto_pushes"], strict=True
        ):
            if memories is None:
                continue
            compositions += 1
            for memory, amount in zip(memories, amounts, strict=True):
                tokens[memory][int(token)] += 1
                pushes[memory].append(amount)
        for memory in sorted(tokens, key=lambda memory: (-len(pushes[memory]), memory)):
            token, times = min(tokens[memory].items(), key=lambda entry: (-entry[1], entry[0]))
            rows.append(
                {
                    "layer": layer,
                    "memory": memory,
                    "times": len(pushes[memory]),
                    "push": float(np.mean(pushes[memory])),
                    "token": token,
                    "token_text": seen.vocabulary[token],
                    "token_times": times,
                    "compositions": compositions,
                }
            )
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """The memories that veto most often."""
    import altair as alt

    rows = sorted(table.to_pylist(), key=lambda row: (-row["times"], row["layer"], row["memory"]))[:_DRAWN]
    for row in rows:
        row["name"] = str(MemoryId(row["layer"], row["memory"]))
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            x=alt.X("times:Q", title="compositions with a veto of this memory"),
            y=alt.Y("name:N", title=None, sort=[row["name"] for row in rows]),
            tooltip=["name:N", "times:Q", alt.Tooltip("push:Q", format=".3f"), "token_text:N", "token_times:Q"],
        )
        .properties(width=WIDTH, height=HEIGHT)
    )
