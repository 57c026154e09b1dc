"""Refinement (Figure 9): how often the residual of a layer already predicts the final token, top(r_l) == top(o_L).

`gain` is how much more often than in the first layer that was scanned. Both are seen on the same prefixes, so its
interval resamples prefixes, not the two shares.
"""

from typing import TYPE_CHECKING

import numpy as np

from memlens.experiments import experiment as ex
from memlens.stats import generator, paired_interval, rate_interval, share_difference, wilson
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import Aggregate

SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 match:int64 rate low high",
    "gain gain_low gain_high",  # rate less the first layer's
)


def compute(seen: "Aggregate", seed: int) -> list[ex.Row]:
    """Counts and rates with intervals, layer by layer."""
    final = seen.column("final_token")
    rows = []
    first = None
    for layer, columns in seen.by_layer():
        matches = np.asarray(columns["residual_token"] == final)
        first = matches if first is None else first
        match, prefixes = int(matches.sum()), len(final)
        low, high = rate_interval(match, prefixes, generator(seed, "refinement", layer))
        gain_low, gain_high = paired_interval(matches, first, generator(seed, "refinement gain", layer))
        rows.append(
            {
                "layer": layer,
                "prefixes": prefixes,
                "match": match,
                "rate": match / prefixes,
                "low": low,
                "high": high,
                "gain": (match - int(first.sum())) / prefixes,
                "gain_low": gain_low,
                "gain_high": gain_high,
            }
        )
    return rows


def published() -> list[ex.Row]:
    return [
        {"layer": layer, "prefixes": ex.SAMPLE, "match": match, "rate": match / ex.SAMPLE}
        for layer, match in enumerate(ex.paper_figures()["fig9_counts_of_4000"])
    ]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments.charts import share_panel

    title = "residuals that have the final token on top"
    text = "Share of prefixes whose residual already predicts the final token, by depth"
    return [share_panel("refinement", rows, published(), "match", title, text, model)]


def predictions_settle(evidence: ex.Evidence) -> ex.Judgement:
    ends = evidence.ends([row for row in evidence.rows if row["prefixes"]])
    if ends is None:
        return ex.NOT_MEASURED
    first, last = ends
    low, high = last.get("gain_low"), last.get("gain_high")  # of the same prefixes, from the first layer on
    if low is None or high is None:
        low, high = share_difference(last["match"], last["prefixes"], first["match"], first["prefixes"])
    yours = " → ".join(percent(row["match"] / row["prefixes"]) for row in ends)
    return ex.Judgement(yours, ex.as_points(low, high), ex.judge_difference(low, high, least=0.1))


def last_residual_knows_the_token(evidence: ex.Evidence) -> ex.Judgement:
    rows = [row for row in evidence.rows if row["layer"] == evidence.layers - 1 and row["prefixes"]]
    if not rows:
        return ex.NOT_MEASURED
    low, high = wilson(rows[0]["match"], rows[0]["prefixes"])
    yours = percent(rows[0]["match"] / rows[0]["prefixes"])
    return ex.Judgement(yours, ex.as_span(low, high), ex.judge_share(low, high, 0.5))


EXPERIMENT = ex.prefix_experiment(
    "refinement",
    "Figure 9",
    "Residual streams that already predict the final token",
    ex.ResultTable(
        "refinement",
        SCHEMA,
        compute,
        question="When is the prediction made?",
        lead="How many prefixes have their final token on top of the residual stream already, before each feed-forward "
        "layer.",
        how="The share of sampled prefixes for which the top token of the residual r before a layer’s feed-forward "
        "block is the token that the model finally predicts. States are read through the final norm and the output "
        "embedding. Intervals: bootstrap over prefixes, and Wilson’s where the share is 0 or 1; gain is the share less "
        "that of the first layer, on the same prefixes.",
        draw=draw,
        published=published,
        contract=("layer", "prefixes", "match", "rate"),
    ),
    claims=(
        ex.Claim(
            "refinement",
            "The prediction settles layer by layer",
            "2.6% → 86%",
            "Share of prefixes whose residual already has the final token on top, last layer minus first, on the same "
            "prefixes: the interval is a bootstrap over prefixes. " + ex.rule_of_difference("10 points"),
            predictions_settle,
        ),
        ex.Claim(
            "last-residual",
            "Before the last feed-forward layer most predictions are made",
            "86%",
            "Share of prefixes whose residual in the model's last layer has the final token on top. Appears if the 95% "
            "interval lies above one half; does not if it lies below.",
            last_residual_knows_the_token,
        ),
    ),
    picture=ex.Picture((ex.Column("predict it", "rate", interval=("low", "high")),), {"rate": "predict it"}),
)
