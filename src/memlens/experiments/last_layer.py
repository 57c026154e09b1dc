"""Last layer: 100 random prefixes whose last layer is a composition, for people to judge how far the word moved.

Both words, the prefix, and the memories that pushed the change: those with the largest m_i (score of the output's token
less score of the residual's token), scores at the final norm's scale for the layer's output. The cosine of the two
words' output embeddings is a hint, not a verdict; people's verdicts are annotations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from memlens.errors import IndexFolderError
from memlens.experiments.aggregate import Aggregate, on_prefixes
from memlens.experiments.bootstrap import draw, generator
from memlens.experiments.charts import HEIGHT, WIDTH

EXAMPLES = 100
SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("prefix", pa.int32()),  # in experiments/prefixes
        ("sentence", pa.int64()),
        ("position", pa.int32()),
        ("text", pa.string()),
        ("residual", pa.int32()),  # token before
        ("residual_text", pa.string()),
        ("output", pa.int32()),  # token after
        ("output_text", pa.string()),
        ("cosine", pa.float32()),
        ("memories", pa.list_(pa.int32())),  # strongest first
        ("pushes", pa.list_(pa.float32())),
        ("compositions", pa.int64()),  # in the whole sample
    ]
)


@on_prefixes
def compute(seen: Aggregate, seed: int) -> pa.Table:
    """At most 100 rows, in the order of the prefixes."""
    layers = dict(seen.by_layer())
    if seen.last_layer not in layers:
        raise IndexFolderError(
            f"the model's last layer, {seen.last_layer}, was not scanned into this index; scan with it in --layers"
        )
    columns = layers[seen.last_layer]
    compositions = np.array([row for row, memories in enumerate(columns["pushers"]) if memories is not None], np.int64)
    places = seen.prefixes.select(["prefix", "sentence", "position", "text"]).to_pylist()
    rows = []
    for row in draw(compositions, EXAMPLES, generator(seed, "last-layer")).tolist():
        before, after = int(columns["residual_token"][row]), int(columns["output_token"][row])
        rows.append(
            {
                "layer": seen.last_layer,
                **places[row],
                "residual": before,
                "residual_text": seen.vocabulary[before],
                "output": after,
                "output_text": seen.vocabulary[after],
                "cosine": columns["cosine"][row],
                "memories": columns["pushers"][row],
                "pushes": columns["pushes"][row],
                "compositions": len(compositions),
            }
        )
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """How alike the two words are, as a histogram."""
    import altair as alt

    return (
        alt.Chart(table.select(["cosine"]))
        .mark_bar()
        .encode(
            x=alt.X("cosine:Q", bin=alt.Bin(maxbins=20), title="cosine of the two words in E"),
            y=alt.Y("count()", title="prefixes"),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )
