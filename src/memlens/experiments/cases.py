"""Fig 11: whose token a layer's output has: the residual's, the feed-forward block's, both's, or neither's.

What each case is, models/cases.py says. Counts of prefixes, layer by layer.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from memlens.experiments.charts import HEIGHT, WIDTH
from memlens.experiments.prefix_pass import Aggregate, on_prefixes
from memlens.models.lens import split_cases

# told apart by people who see few colours, too
COLOURS = {
    "residual": "#0072b2",
    "agreement": "#56b4e9",
    "composition": "#d55e00",
    "ffn": "#f0e442",
    "reversal": "#777777",
}
SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("prefixes", pa.int64()),
        ("residual", pa.int64()),
        ("ffn", pa.int64()),
        ("agreement", pa.int64()),
        ("composition", pa.int64()),
        ("reversal", pa.int64()),
    ]
)


@on_prefixes
def compute(seen: Aggregate, seed: int) -> pa.Table:
    """Counts, layer by layer; the five cases sum to the prefixes."""
    rows = []
    for layer, columns in seen.by_layer():
        r, y, o = columns["residual_token"], columns["ffn_token"], columns["output_token"]
        counts = {case: int(holds.sum()) for case, holds in split_cases(r, y, o).items()}
        rows.append({"layer": layer, "prefixes": len(o), **counts})
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """Shares of the five cases by layer, stacked."""
    import altair as alt

    rows = [
        {
            "layer": row["layer"],
            "case": case,
            "prefixes": row[case],
            "share": row[case] / row["prefixes"],
            "order": order,
        }
        for row in table.to_pylist()
        for order, case in enumerate(COLOURS)
    ]
    colours = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    return (
        alt.Chart(pa.Table.from_pylist(rows))
        .mark_bar()
        .encode(
            x=alt.X("layer:O", title="layer"),
            y=alt.Y("share:Q", title="prefixes", axis=alt.Axis(format="%")),
            color=alt.Color("case:N", title=None, scale=colours),
            order="order:Q",
            tooltip=["layer", "case", "prefixes", alt.Tooltip("share:Q", format=".1%")],
        )
        .properties(width=WIDTH, height=HEIGHT)
    )
