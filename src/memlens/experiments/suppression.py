"""Suppression (beyond the paper): how often a layer lowers the final token's logit, even if r already predicts it.

`push` is the effect of the block on the logit of the finally predicted token minus the mean of all logits (see
contributions). A prefix is `identified` if the residual already predicts the final token, and `suppressed` if the
block also lowers this token.
"""

from typing import TYPE_CHECKING

import numpy as np

from memlens.experiments import experiment as ex
from memlens.stats import generator, mean_estimate

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 push push_low push_high",  # push: mean over prefixes
    "against:int64 rate low high",  # number and share of prefixes whose final token is lowered
    "identified:int64 suppressed:int64 suppressed_rate suppressed_low suppressed_high",  # top(r) is the final token
)


def compute(tables: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return one row per layer with means and counts."""
    final = tables.column("final_token")
    rows = []
    for layer, columns in tables.by_layer():
        push = np.asarray(columns["ffn_above"], np.float64)
        is_identified = np.asarray(columns["residual_token"] == final)
        against, suppressed = int((push < 0).sum()), int((is_identified & (push < 0)).sum())
        identified = int(is_identified.sum())
        rows.append(
            {"layer": layer, "prefixes": len(push), "against": against}
            | ex.share_columns(against, len(push))
            | {"identified": identified, "suppressed": suppressed}
            | ex.share_columns(suppressed, identified, ("suppressed_rate", "suppressed_low", "suppressed_high"))
            | ex.estimate_columns("push", mean_estimate(push, generator(seed, "suppression", layer)))
        )
    return rows


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot how often layers lower the final token, and the mean effect."""
    import altair as alt

    from memlens.experiments import charts

    names = {"rate": "of all prefixes", "suppressed_rate": "of prefixes whose residual predicts the final token"}
    edges = {"rate": ("low", "high"), "suppressed_rate": ("suppressed_low", "suppressed_high")}
    shares = [
        {"whose": charts.YOURS, "share": label, "layer": row["layer"], "value": row[name]}
        | dict(zip(("low", "high"), (row[edge] for edge in edges[name]), strict=True))
        for name, label in names.items()
        for row in rows
        if row[name] is not None
    ]
    title = "share of final tokens that the layer lowers"
    both = charts.grouped_curves(
        charts.with_depth(shares, model.layers), "share", list(names.values()), title, ".0%", model.layers
    )
    pushes = [
        {"whose": charts.YOURS, "layer": row["layer"], "value": row["push"]}
        | {"low": row["push_low"], "high": row["push_high"]}
        for row in rows
    ]
    scale = alt.Scale(zero=True)
    push = charts.curves(
        charts.with_depth(pushes, model.layers),
        "mean effect on the final token’s logit",
        ".2f",
        model.layers,
        scale=scale,
    )
    text = "Share of prefixes whose final token the layer lowers, by depth"
    return [
        charts.panel("suppression", both, text, rows, "rate", "%"),
        charts.panel("suppression-push", push, "Mean effect on the final token's logit, by depth", rows, "push"),
    ]


EXPERIMENT = ex.prefix_experiment(
    "suppression",
    "beyond the paper",
    "Layers that lower the final token",
    ex.ResultTable(
        "suppression",
        SCHEMA,
        compute,
        question="Do layers raise or lower the final token?",
        lead="A prefix is suppressed if the residual already predicts the final token and the layer lowers it.",
        how="The effect of a layer’s feed-forward block on the logit of the finally predicted token minus the "
        "mean of all logits, at the scale of the final norm: its mean over the sampled prefixes, and how often it is "
        "below 0, for all prefixes and for those whose residual already predicts this token. Shares have Wilson "
        "intervals, and means have intervals over prefixes.",
        draw=draw,
    ),
    picture=ex.Picture(
        (
            ex.Column("lowered", "rate", interval=("low", "high")),
            ex.Column("if predicted", "suppressed_rate", interval=("suppressed_low", "suppressed_high")),
            ex.Column("mean effect", "push", ex.short),
        ),
        {"rate": "lowered", "suppressed_rate": "if predicted"},
    ),
)
