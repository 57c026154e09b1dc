"""Suppression (beyond the paper): how often a layer lowers the final token's logit, even if it is already on top.

`push` is the block's contribution to the logit of the finally predicted token minus the mean of all logits (see
contributions). A prefix is identified if the residual already has the final token on top, and suppressed if the block
then lowers it.
"""

from typing import TYPE_CHECKING

import numpy as np

from memlens.experiments import experiment as ex
from memlens.stats import generator, mean_estimate, share_interval

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 push push_low push_high",  # push: mean over prefixes
    "against:int64 rate low high",  # number and share of prefixes whose final token is lowered
    "identified:int64 suppressed:int64 suppressed_rate suppressed_low suppressed_high",  # final token on top of r
)


def compute(seen: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return means and counts, by layer."""
    final = seen.column("final_token")
    rows = []
    for layer, columns in seen.by_layer():
        push = np.asarray(columns["ffn_above"], np.float64)
        identified = np.asarray(columns["residual_token"] == final)
        against, held = int((push < 0).sum()), int((identified & (push < 0)).sum())
        low, high = share_interval(against, len(push))
        of = int(identified.sum())
        suppressed = (held / of, *share_interval(held, of)) if of else None
        rows.append(
            {"layer": layer, "prefixes": len(push), "against": against, "rate": against / len(push)}
            | {"low": low, "high": high, "identified": of, "suppressed": held}
            | ex.estimate_columns("push", mean_estimate(push, generator(seed, "suppression", layer)))
            | {
                f"suppressed_{edge}": number
                for edge, number in zip(("rate", "low", "high"), suppressed or (None, None, None), strict=True)
            }
        )
    return rows


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot how often the final token is lowered, and the mean push."""
    import altair as alt

    from memlens.experiments import charts

    names = {"rate": "of all prefixes", "suppressed_rate": "of prefixes with the final token on top"}
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
        "mean push on the final token’s logit",
        ".2f",
        model.layers,
        scale=scale,
    )
    text = "Share of prefixes whose final token the layer lowers, by depth"
    return [
        charts.panel("suppression", both, text, rows, "rate", "%"),
        charts.panel("suppression-push", push, "Mean push on the final token's logit, by depth", rows, "push"),
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
        lead="Suppressed: the residual has the final token on top, and the layer lowers it.",
        how="The contribution of a layer’s feed-forward block to the logit of the finally predicted token minus the "
        "mean of all logits, at the scale of the final norm: its mean over the sampled prefixes, and how often it is "
        "below 0, for all prefixes and for those whose residual has that token on top. Wilson intervals for shares, "
        "intervals over prefixes for means.",
        draw=draw,
    ),
    picture=ex.Picture(
        (
            ex.Column("lowered", "rate", interval=("low", "high")),
            ex.Column("if on top", "suppressed_rate", interval=("suppressed_low", "suppressed_high")),
            ex.Column("mean push", "push", ex.short),
        ),
        {"rate": "lowered", "suppressed_rate": "if on top"},
    ),
)
