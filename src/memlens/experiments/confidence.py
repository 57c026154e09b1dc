"""Confidence (Figure 10): the probability of the final token in a layer's residual, softmax(r_l E)[top(o_L)].

The table also has the median rank of the final token (1 = top).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memlens.experiments import experiment as ex
from memlens.stats import generator

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 q1 median q3 low high median_rank",  # low, high: interval of the median
    "trend trend_low trend_high",  # slope of the probability over relative depth from layer 1 on; equal in all rows
)


def compute(tables: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return one row per layer with quartiles over the prefixes."""
    by_layer = dict(tables.by_layer())
    matrix = np.stack([columns["p_final"] for columns in by_layer.values()])  # [layers, prefixes]
    depths = len(tables.index.manifest.model.memories)
    trend = ex.prefix_trend(matrix, list(by_layer), depths, generator(seed, "confidence trend"))
    rows = []
    for layer, columns in by_layer.items():
        p = columns["p_final"]
        rank = float(np.median(columns["rank_final"]))
        rows.append({"layer": layer, "prefixes": len(p), **ex.quartile_columns(p), "median_rank": rank, **trend})
    return rows


def published() -> list[ex.Row]:
    return ex.paper_quartiles("fig10_prob")


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    import altair as alt

    from memlens.experiments import charts

    chart = charts.bands(
        charts.beside_paper(rows, published(), model, keep=ex.QUARTILES),
        "probability of the final token",
        "~g",
        model.layers,
        scale=alt.Scale(type="symlog", constant=0.001, domainMax=1),
        ticks=(0, 0.001, 0.01, 0.1, 0.3, 1),
    )
    text = "Probability of the final token in the residual, by depth"
    return [charts.panel("confidence", chart, text, rows, "median")]


def confidence_grows(evidence: ex.Evidence) -> ex.Judgement:
    rows = ex.known_rows(evidence.rows, ("median",), "prefixes")
    yours = replace(evidence, rows=rows).trend("median")
    ends = [row["median"] for row in (rows[:1] + rows[-1:])]
    change = f"median {' → '.join(map(decimal, ends))}" if ends else ""
    first = f"median {decimal(evidence.first('median') or 0)}"
    judged = ex.judge_trend(yours, evidence.theirs.trend("median"), 1, first)
    return judged if yours is None else replace(judged, yours=change)


def decimal(value: float) -> str:
    """Format a number with two significant digits. Only numbers below 1e-6 have an exponent."""
    if value and abs(value) < 1e-6:
        return np.format_float_scientific(value, precision=1, trim="-", exp_digits=1)
    return np.format_float_positional(value, precision=2, fractional=False, trim="-")


EXPERIMENT = ex.prefix_experiment(
    "confidence",
    "Figure 10",
    "Probability of the final token in the residual stream",
    ex.ResultTable(
        "confidence",
        SCHEMA,
        compute,
        question="How confident is the residual?",
        lead="The line is the median over prefixes, and the band shows the quartiles. The axis is stretched near zero.",
        how="The probability of the finally predicted token when the residual r is read as a prediction.",
        draw=draw,
        published=published,
    ),
    claims=(
        ex.Claim(
            "confidence",
            "The residual’s confidence in the final token grows",
            "median .0004 → .295",
            "Probability of the final token, paired over prefixes (medians for the paper). "
            + ex.RULE_OF_TRENDS
            + ex.rule_of_enough("prefixes"),
            confidence_grows,
            write=ex.as_points_per_layer,
            curve="median",
        ),
    ),
    picture=ex.Picture(
        (
            ex.Column("median p", "median", ex.short, ("low", "high")),
            ex.Column("q1", "q1", ex.short),
            ex.Column("q3", "q3", ex.short),
            ex.Column("median rank", "median_rank", ex.count),
        ),
        {"median": "median"},
    ),
)
