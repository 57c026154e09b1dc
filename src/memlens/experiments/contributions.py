"""Contributions: what feed-forward blocks, attention and single memories put into the logit of the final token.

Logits can all be shifted alike without changing a probability, so a share is taken of how far the final token's logit
stands above the mean of all logits. All layers' ffn and attention, the embedding and the constant (biases behind the
last layer) add up to that; `*_share` is the sum over prefixes of a part over the sum of the whole, so shares add up to
1 and may be negative. top1, top10 and top100 are what the memories that gave most gave together; others take some of
it back. `ffn_logit` and `attention_logit` are the same parts of the plain logit. The algebra is in models/accounting.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from memlens.experiments.charts import HEIGHT, WIDTH
from memlens.experiments.prefix_pass import Aggregate, on_prefixes
from memlens.stats import generator, interval

_PARTS = {"ffn": "ffn_above", "attention": "attention_above", "top1": "top1", "top10": "top10", "top100": "top100"}
SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("prefixes", pa.int64()),
        *((name, pa.float64()) for name in _PARTS),  # means over the prefixes
        ("low", pa.float64()),  # of ffn
        ("high", pa.float64()),
        ("attention_low", pa.float64()),
        ("attention_high", pa.float64()),
        *((f"{name}_share", pa.float64()) for name in _PARTS),
        ("embedding_share", pa.float64()),  # the same in every row
        ("constant_share", pa.float64()),
        ("above_mean", pa.float64()),  # what shares are of
        ("ffn_logit", pa.float64()),
        ("attention_logit", pa.float64()),
        ("embedding_logit", pa.float64()),
        ("constant_logit", pa.float64()),
        ("logit", pa.float64()),
    ]
)


@on_prefixes
def compute(seen: Aggregate, seed: int) -> pa.Table:
    """Means over the prefixes, layer by layer."""
    whole = float(np.mean(seen.column("above_mean")))
    same = {
        "above_mean": whole,
        "embedding_share": _share(float(np.mean(seen.column("embedding"))), whole),
        "constant_share": _share(float(np.mean(seen.column("constant"))), whole),
        "logit": float(np.mean(seen.column("logit"))),
        "embedding_logit": float(np.mean(seen.column("logit_embedding"))),
        "constant_logit": float(np.mean(seen.column("logit_constant"))),
    }
    rows = []
    for layer, columns in seen.by_layer():
        means = {name: float(np.mean(columns[column])) for name, column in _PARTS.items()}
        random = generator(seed, "contributions", layer)
        low, high = interval(columns["ffn_above"], np.mean, random)
        attention_low, attention_high = interval(columns["attention_above"], np.mean, random)
        rows.append(
            {"layer": layer, "prefixes": len(columns["active"]), **means, **same}
            | {"low": low, "high": high, "attention_low": attention_low, "attention_high": attention_high}
            | {f"{name}_share": _share(mean, whole) for name, mean in means.items()}
            | {name: float(np.mean(columns[name])) for name in ("ffn_logit", "attention_logit")}
        )
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """What attention, memories and the strongest ten of them gave, by layer."""
    import altair as alt

    names = {"ffn": "feed-forward", "attention": "attention", "top10": "its ten strongest memories"}
    rows = [
        {"layer": row["layer"], "part": label, "logit": row[name], "share": row[f"{name}_share"]}
        for row in table.to_pylist()
        for name, label in names.items()
    ]
    return (
        alt.Chart(pa.Table.from_pylist(rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("layer:O", title="layer"),
            y=alt.Y("logit:Q", title="added to the final token, above the mean"),
            color=alt.Color("part:N", title=None),
            strokeDash=alt.StrokeDash("part:N", title=None),
            tooltip=["layer", "part", alt.Tooltip("logit:Q", format=".3f"), alt.Tooltip("share:Q", format=".1%")],
        )
        .properties(width=WIDTH, height=HEIGHT)
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
