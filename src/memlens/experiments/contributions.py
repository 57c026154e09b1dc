"""Contributions (beyond the paper): what blocks, attention and individual memories add to the final token's logit.

A constant added to all logits does not change probabilities, so contributions refer to the final token's logit minus
the mean of all logits. This difference is the sum of the embedding, the feed-forward and attention blocks of all layers
and a constant (biases after the last layer). A share is the sum of a part over prefixes divided by the sum of the
whole. Shares sum to 1 and may be negative. `top1`, `top10` and `top100` are the summed contributions of the 1, 10 and
100 strongest memories, which other memories partly cancel. `ffn_logit` and `attention_logit` are contributions to the
logit itself. See models.decompose for the algebra.
"""

from typing import TYPE_CHECKING

import numpy as np

from memlens.experiments import experiment as ex
from memlens.stats import generator, mean_interval

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

_PARTS = {"ffn": "ffn_above", "attention": "attention_above", "top1": "top1", "top10": "top10", "top100": "top100"}
SCHEMA = ex.schema(
    "layer:int32 prefixes:int64",
    *_PARTS,  # means over prefixes
    "low high attention_low attention_high",  # intervals of ffn and attention
    *(f"{name}_share" for name in _PARTS),
    "embedding_share constant_share above_mean",  # equal in all rows; above_mean is the denominator of shares
    "ffn_logit attention_logit embedding_logit constant_logit logit",
    *ex.kind_columns("given", "low", "high"),  # per kind of memory, in a mixture: contribution without biases
)


def compute(tables: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return one row per layer with means over the prefixes."""
    whole = float(np.mean(tables.column("above_mean")))
    of_all_layers = {
        "above_mean": whole,
        "embedding_share": _share(float(np.mean(tables.column("embedding"))), whole),
        "constant_share": _share(float(np.mean(tables.column("constant"))), whole),
        "logit": float(np.mean(tables.column("logit"))),
        "embedding_logit": float(np.mean(tables.column("logit_embedding"))),
        "constant_logit": float(np.mean(tables.column("logit_constant"))),
    }
    rows = []
    for layer, columns in tables.by_layer():
        means = {name: float(np.mean(columns[column])) for name, column in _PARTS.items()}
        random = generator(seed, "contributions", layer)
        low, high = mean_interval(columns["ffn_above"], random)
        attention_low, attention_high = mean_interval(columns["attention_above"], random)
        rows.append(
            {"layer": layer, "prefixes": len(columns["active"]), **means, **of_all_layers}
            | {"low": low, "high": high, "attention_low": attention_low, "attention_high": attention_high}
            | {f"{name}_share": _share(mean, whole) for name, mean in means.items()}
            | {name: float(np.mean(columns[name])) for name in ("ffn_logit", "attention_logit")}
        )
        for kind in ex.kind_spans(tables.index.names, layer):
            contributions = np.asarray(columns[f"{kind}_given"], np.float64)
            low, high = mean_interval(contributions, random)
            rows[-1] |= ex.of_kind(kind, {"given": float(contributions.mean()), "low": low, "high": high})
    return rows


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot the contributions of attention, of all memories and of the ten strongest memories by layer."""
    from memlens.experiments import charts

    names = {"ffn": "feed-forward", "attention": "attention", "top10": "ten strongest memories"}
    parts = [
        {"whose": charts.YOURS, "layer": row["layer"], "part": label, "value": row[name], "share": row[f"{name}_share"]}
        for row in rows
        for name, label in names.items()
    ]
    title = "contribution to the final logit minus mean"
    placed = charts.with_depth(parts, model.layers)
    chart = charts.grouped_curves(placed, "part", list(names.values()), title, ".2f", model.layers)
    text = "Contribution of each part to the final token's logit"
    kinds = ex.draw_kinds(
        "contributions",
        rows,
        "given",
        "contribution of memories, by kind",
        ".2f",
        "Contribution of memories to the final token's logit",
        model,
    )
    return [charts.panel("contributions", chart, text, rows, "ffn"), *kinds]


EXPERIMENT = ex.prefix_experiment(
    "contributions",
    "beyond the paper",
    "Contributions to the logit of the final token",
    ex.ResultTable(
        "contributions",
        SCHEMA,
        compute,
        question="Where does the final logit come from?",
        lead="The chart shows what each layer’s attention and memories add to the logit of the predicted token.",
        how="With the scale of the final norm kept fixed, the logit of the final token is an exact sum of parts: "
        "embedding, attention and feed-forward blocks of every layer, and memories within a block. Parts are averaged "
        "over the sampled prefixes.",
        draw=draw,
    ),
    picture=ex.Picture(
        (
            ex.Column("ffn", "ffn_share"),
            ex.Column("attention", "attention_share"),
            ex.Column("top 1", "top1_share"),
            ex.Column("top 10", "top10_share"),
            ex.Column("top 100", "top100_share"),
            ex.Column("ffn logit", "ffn", "{:+.2f}".format, ("low", "high")),
        ),
        {"ffn_share": "ffn", "attention_share": "attention"},
    ),
)
