"""Refinement (Figure 9): how often the residual of a layer already predicts the final token, top(r_l) == top(o_L).

`step` is the rate minus the rate of the previous layer. `pace` is the mean step after a layer minus the mean step up to
this layer. All layers are measured on the same prefixes, so intervals of differences are paired over prefixes.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memlens.experiments import experiment as ex
from memlens.stats import Estimate, generator, mean_estimate, paired_interval, wilson
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

_NEAR_BEND = 0.1  # maximum distance in relative depth from the bend of the paper's curve
_MARGIN = 0.05  # largest difference from the paper's "a third" that counts as equal
SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 match:int64 rate low high",
    "step step_low step_high",  # rate minus the previous layer's rate; the intervals hold for all layers at once
    "pace pace_low pace_high",  # mean step after this layer minus mean step from the first scanned layer to this one
    "trend trend_low trend_high",  # slope over relative depth from layer 1 on; equal in all rows
)


def compute(tables: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return one row per layer with counts, rates and intervals."""
    final = tables.column("final_token")
    by_layer = {layer: np.asarray(columns["residual_token"] == final) for layer, columns in tables.by_layer()}
    layers, matches = list(by_layer), np.stack(list(by_layer.values()))  # [layers, prefixes]
    depths = len(tables.index.manifest.model.memories)
    trend = ex.prefix_trend(matches, layers, depths, generator(seed, "refinement trend"))
    rows = []
    for place, layer in enumerate(layers):
        match, prefixes = int(matches[place].sum()), len(final)
        row: ex.Row = {"layer": layer, "prefixes": prefixes, "match": match} | ex.share_columns(match, prefixes)
        if place:
            edges = paired_interval(matches[place], matches[place - 1], comparisons=len(layers) - 1)
            step = float(np.mean(matches[place]) - np.mean(matches[place - 1]))
            row |= ex.estimate_columns("step", (step, *edges))
        if 0 < place < len(layers) - 1:
            after = (matches[-1].astype(np.float64) - matches[place]) / (layers[-1] - layer)
            before = (matches[place].astype(np.float64) - matches[0]) / (layer - layers[0])
            pace = mean_estimate(after - before, generator(seed, "refinement pace", layer))
            row |= ex.estimate_columns("pace", pace)
        rows.append(row | trend)
    return rows


def published() -> list[ex.Row]:
    rates = [match / ex.SAMPLE for match in ex.paper_figures()["fig9_counts_of_4000"]]
    last = len(rates) - 1
    rows: list[ex.Row] = []
    for layer, rate in enumerate(rates):
        row: ex.Row = {"layer": layer, "prefixes": ex.SAMPLE, "match": round(rate * ex.SAMPLE), "rate": rate}
        row |= {"step": rate - rates[layer - 1]} if layer else {}
        if 0 < layer < last:
            row["pace"] = (rates[last] - rate) / (last - layer) - (rate - rates[0]) / layer
        rows.append(row)
    return rows


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments.charts import share_panel

    title = "share of residuals that predict the final token"
    text = "Share of prefixes whose residual already predicts the final token, by depth"
    return [share_panel("refinement", rows, published(), "match", title, text, model)]


def predictions_settle(evidence: ex.Evidence) -> ex.Judgement:
    evidence = _enough(evidence)
    steps = [step for row in evidence.rows if (step := ex.estimate_of(row, "step", "step_low", "step_high"))]
    if not steps:
        return ex.NOT_MEASURED
    falls = sum(step.high < 0 for step in steps)
    decreases = f"the share decreases in {falls} of {len(steps)} steps from layer to layer"
    first = percent(evidence.first("rate"))
    yours, theirs = evidence.trend("rate"), evidence.theirs.trend("rate")
    return ex.judge_trend(yours, theirs, 1, first, (not falls, decreases))


def _enough(evidence: ex.Evidence) -> ex.Evidence:
    return replace(evidence, rows=ex.known_rows(evidence.rows, ("rate",), "prefixes"))


def last_residual_knows_the_token(evidence: ex.Evidence) -> ex.Judgement:
    share, published = (_share_of(source, source.layers - 1) for source in (evidence, evidence.theirs))
    yours = "" if share is None else percent(share.value)
    return ex.judge_share(share, 0.5, "one half", published.value if published else None, yours)


def bottom_layers_decide_a_third(evidence: ex.Evidence) -> ex.Judgement:
    lower = [layer for layer in range(evidence.layers) if ex.third(layer, evidence.layers) == "lower"]
    share = _share_of(evidence, max(lower, default=-1))
    return ex.judge_equivalence(share, 1 / 3, _MARGIN, "by the end of the lower third")


def _share_of(evidence: ex.Evidence, layer: int) -> Estimate | None:
    rows = [row for row in _enough(evidence).rows if row["layer"] == layer]
    return Estimate(rows[0]["rate"], *wilson(rows[0]["match"], rows[0]["prefixes"])) if rows else None


def upper_layers_settle_faster(evidence: ex.Evidence) -> ex.Judgement:
    yours, theirs = (_pace(source) for source in (evidence, evidence.theirs))
    if yours is None or theirs is None:
        return ex.NOT_MEASURED
    verdict = ex.direction(yours, theirs.value)
    pace = "faster than" if yours.low > 0 else "more slowly than" if yours.high < 0 else "about as fast as"
    return ex.Judgement(
        f"{ex.as_points(yours.value)} per layer relative to the lower part",
        ex.write_span(yours),
        verdict,
        f"From {percent(ex.BEND, 0)} of the depth on, the share grows {pace} before. The difference is "
        f"{ex.as_points(yours.value)} per layer, published {ex.as_points(theirs.value)}.",
        yours,
    )


def _pace(evidence: ex.Evidence) -> Estimate | None:
    """Return the pace at the layer where the paper's curve bends.

    Returns None if this layer, the first layer or the last layer is missing.
    """
    rows = _enough(evidence).rows
    layers = {row["layer"] for row in rows}
    rows = [row for row in rows if row.get("pace") is not None]
    by_distance = {abs(ex.depth(row["layer"], evidence.layers) - ex.BEND): row for row in rows}
    nearest = min(by_distance, default=1.0)
    if nearest > _NEAR_BEND or not {0, evidence.layers - 1} <= layers:
        return None
    return ex.estimate_of(by_distance[nearest], "pace", "pace_low", "pace_high")


EXPERIMENT = ex.prefix_experiment(
    "refinement",
    "Figure 9",
    "Residuals that already predict the final token",
    ex.ResultTable(
        "refinement",
        SCHEMA,
        compute,
        question="When is the prediction made?",
        lead="The share of prefixes whose residual already predicts the final token, before each feed-forward layer.",
        how="The share of sampled prefixes for which the top token of the residual r before a layer’s feed-forward "
        "block is the finally predicted token. States are read through the final norm and the output embedding. "
        "Shares have Wilson intervals. Intervals of steps and paces are paired over prefixes.",
        draw=draw,
        published=published,
    ),
    claims=(
        ex.Claim(
            "refinement",
            "The prediction settles layer by layer",
            "2.6% → 86%",
            "Share of prefixes whose residual already predicts the final token, paired over prefixes. "
            + ex.RULE_OF_TRENDS
            + " It appears only in part if the share decreases from one layer to the next, with intervals that hold "
            "for all layers at once." + ex.rule_of_enough("prefixes"),
            predictions_settle,
            write=ex.as_points_per_layer,
            curve="rate",
        ),
        ex.Claim(
            "last-residual",
            "Most predictions are made before the last feed-forward layer",
            "86%",
            "Share of prefixes whose residual in the last layer predicts the final token. The claim appears if the "
            "Wilson interval lies above one half, and does not appear if it lies below."
            + ex.rule_of_enough("prefixes"),
            last_residual_knows_the_token,
            curve="rate",
            write=percent,
        ),
        ex.Claim(
            "bottom-third",
            "A third of the predictions are made in the bottom few layers",
            "31% by layer 4, the last of its lower third (inferred from the figure)",
            "Share of prefixes whose residual in the last layer of the lower third predicts the final token. The claim "
            "appears if the Wilson interval lies within 5 points of a third, and does not appear if it lies outside."
            + ex.rule_of_enough("prefixes"),
            bottom_layers_decide_a_third,
            curve="rate",
            write=percent,
            target=1 / 3,
        ),
        ex.Claim(
            "acceleration",
            "Predictions settle faster in the upper layers",
            "from layer 9 on, by 3.2 points per layer more than before",
            "Mean step of the share from the paper’s layer 9 on (59% of the depth; the nearest layer here) minus the "
            "mean step before, paired over prefixes. The claim appears if the 95% interval lies above 0, and in part "
            "if it also ends below a tenth of the published difference. It does not appear if the interval lies "
            "below 0, or if it contains 0 and ends below that tenth. The first layer, the last layer and this layer "
            "must have been scanned." + ex.rule_of_enough("prefixes"),
            upper_layers_settle_faster,
            curve="rate",
        ),
    ),
    picture=ex.Picture((ex.Column("final token", "rate", interval=("low", "high")),), {"rate": "final token"}),
)
