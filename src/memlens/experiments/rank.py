"""Rank (Figure 5): the place of the token after the top-1 trigger in the distribution of the memory's value.

Quartiles over the memories of a layer; rank 1 is the top token. The interval is of the median.
"""

from typing import Any

import numpy as np

from memlens.experiments import experiment as ex
from memlens.experiments.agreement import read_targets
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress
from memlens.stats import difference_of, generator, interval, mean_of

SCHEMA = ex.schema(
    "layer:int32 q1 median q3 low high",  # low and high of the median
    "memories:int64",  # that take part
    "no_trigger:int64 no_next:int64",  # left out
)


def compute(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> list[ex.Row]:
    """One row a layer; `sample` memories of each, or all."""
    rows: list[ex.Row] = []
    for layer in ex.layers_of(index, "rank", progress):
        random = generator(seed, "rank", layer)
        targets = read_targets(index, layer, sample, random)
        low, high = interval(targets.rank, np.median, random)
        counts = {"memories": len(targets.rank), "no_trigger": targets.no_trigger, "no_next": targets.no_next}
        places = ex.quartiles(targets.rank) if len(targets.rank) else {}
        rows.append({"layer": layer, "low": low, "high": high} | places | counts)
    return rows


def published() -> list[ex.Row]:
    return ex.paper_quartiles("fig5_rank")


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """As shares of the vocabulary: a rank of 5,000 is one thing among 50,000 tokens and another among 250,000."""
    import altair as alt

    from memlens.experiments import charts

    theirs = _scaled(published(), 1 / ex.PAPER_VOCABULARY)
    both = charts.quartiles_beside_paper(_scaled(rows, 1 / model.vocabulary), theirs, model)
    title = "rank of the following token, as a share of the vocabulary"
    chart = charts.bands(both, title, ".2~%", model.layers, scale=alt.Scale(type="log"))
    text = "Rank of the following token under the value, by depth"
    return [charts.panel("rank", chart, text, rows, "median")]


def _scaled(rows: list[ex.Row], by: float) -> list[ex.Row]:
    """Quartiles times a number; a layer without any stays a gap."""
    return [
        {"layer": row["layer"], **{key: None if row[key] is None else row[key] * by for key in ex.QUARTILES}}
        for row in rows
    ]


def rank_improves(evidence: ex.Evidence) -> ex.Judgement:
    upper, lower = (ex.known_rows(evidence.third(which), ("median",), "memories") for which in ("upper", "lower"))
    if not upper or not lower:
        return ex.NOT_MEASURED
    above, below = (sum(row["median"] for row in rows) / len(rows) for rows in (upper, lower))
    yours = f"median {below:,.0f} in the lower third, {above:,.0f} in the upper"
    if not all(row.get("low") is not None and row.get("high") is not None for row in upper + lower):
        verdict = ex.APPEARS if above <= 0.9 * below else ex.ABSENT if above >= below else ex.UNCLEAR
        return ex.Judgement(yours, "", verdict)
    ends = [mean_of([(row["median"], row["low"], row["high"]) for row in rows]) for rows in (lower, upper)]
    _, low, high = difference_of(ends[0], ends[1])
    better = f"better by {low:,.0f} to {high:,.0f} places".replace("-", "−")
    return ex.Judgement(yours, better, ex.judge_difference(low, high, least=0.1 * below))


EXPERIMENT = ex.Experiment(
    "rank",
    "Figure 5",
    "Rank of the top trigger's next token in the value's distribution",
    (
        ex.ResultTable(
            "rank",
            SCHEMA,
            compute,
            question="How highly does the value rank what follows?",
            lead="Lower is better. Line: the median memory of a layer; band: the middle half of its memories.",
            how="The rank of the token after the strongest trigger in p(v): 1 + the number of tokens with a strictly "
            "higher score. The table has ranks; the chart divides them by the size of the vocabulary, on a logarithmic "
            "axis, so that models with different vocabularies can be compared (the paper’s has 267,744 words).",
            draw=draw,
            published=published,
            contract=("layer", *ex.QUARTILES),
        ),
    ),
    needs=("values",),
    claims=(
        ex.Claim(
            "rank",
            "The following token ranks better under the value with depth",
            "median 9,611 in layer 0, 5,139 in layer 15",
            "Mean of the layers' median ranks, lower third minus upper third. Appears if the 95% interval lies above "
            "a tenth of the lower third's rank; does not if it ends below that. Without intervals: appears from a "
            "tenth on." + ex.rule_of_enough("memories"),
            rank_improves,
        ),
    ),
    picture=ex.Picture(
        (
            ex.Column("median", "median", ex.count, ("low", "high")),
            ex.Column("q1", "q1", ex.count),
            ex.Column("q3", "q3", ex.count),
            ex.Column("memories", "memories", ex.count),
        ),
        {"median": "median"},
    ),
)
