"""Rank (Figure 5): the rank of the token after the top-1 trigger in the distribution of the memory's value.

The table has quartiles over the memories of a layer, and an interval of the median. Rank 1 is the top token. `shuffled`
is the median rank of another memory's target in the same value, which reflects only how frequent tokens are.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from memlens.experiments import experiment as ex
from memlens.experiments.agreement import read_targets
from memlens.index.reader import Index
from memlens.progress import Progress, no_progress
from memlens.stats import generator
from memlens.text import percent

SCHEMA = ex.schema(
    "layer:int32 q1 median q3 low high",  # interval of the median
    "memories:int64 vocabulary:int64",  # number of memories with a target; size of the vocabulary
    "shuffled",  # median rank of the targets of other memories of the layer
    "no_trigger:int64 no_next:int64",  # numbers of excluded memories
    *ex.kind_columns("memories:int64", "median", "low", "high"),  # by kind, in a mixture
)


def compute(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> list[ex.Row]:
    """Return one row per layer, computed from `sample` random memories of the layer or, if it is None, from all."""
    rows: list[ex.Row] = []
    for layer in ex.layers_of(index, "rank", progress):
        random = generator(seed, "rank", layer)
        targets = read_targets(index, layer, sample, random)
        counts = {"memories": len(targets.rank), "no_trigger": targets.no_trigger, "no_next": targets.no_next}
        counts["vocabulary"] = index.manifest.value_tokens
        shuffled = targets.shuffled_rank[targets.shuffled_rank > 0]
        chance = float(np.median(shuffled)) if len(shuffled) else None
        rows.append({"layer": layer, "shuffled": chance} | ex.quartile_columns(targets.rank) | counts)
        for kind, span in ex.kind_spans(index.names, layer).items():
            ranks = targets.among(span).rank
            rows[-1] |= ex.of_kind(kind, {"memories": len(ranks)} | ex.quartile_columns(ranks))
    return rows


def published() -> list[ex.Row]:
    return [row | {"vocabulary": ex.PAPER_HEAD} for row in ex.paper_quartiles("fig5_rank")]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot ranks as shares of the vocabulary, so that models can be compared."""
    import altair as alt

    from memlens.experiments import charts

    both = charts.beside_paper(_relative(rows, model.vocabulary), _relative(published()), model, keep=ex.QUARTILES)
    chance = [
        {
            "baseline": "this model, shuffled targets",
            "layer": row["layer"],
            "value": row["shuffled"] / (row.get("vocabulary") or model.vocabulary),
        }
        for row in rows
        if row.get("shuffled") is not None
    ]
    title = "rank of the next token (share of the vocabulary)"
    scale = alt.Scale(type="log")
    baselines = charts.with_depth(chance, model.layers)
    chart = charts.bands(both, title, ".2~%", model.layers, scale=scale, ticks=charts.LOG_TICKS, baselines=baselines)
    text = "Rank of the next token in the value, by depth"
    kinds = ex.draw_kinds("rank", rows, "median", "median rank, by kind", ",", "Rank of the next token", model)
    return [charts.panel("rank", chart, text, rows, "median"), *kinds]


def _relative(rows: list[ex.Row], vocabulary: int = 0) -> list[ex.Row]:
    """Return quartiles and the interval of the median as shares of the vocabulary. None stays None."""
    columns = (*ex.QUARTILES, "low", "high", "shuffled")
    return [
        {"layer": row["layer"], "memories": row.get("memories")}
        | {
            key: None if row[key] is None else row[key] / (row.get("vocabulary") or vocabulary)
            for key in columns
            if key in row
        }
        for row in rows
    ]


def rank_improves(evidence: ex.Evidence) -> ex.Judgement:
    measured = ex.known_rows(evidence.rows, ("median",), "memories")
    if any(not row.get("vocabulary") for row in measured):
        return ex.NOT_MEASURED
    relative = [
        replace(source, rows=_relative(rows))
        for source, rows in ((evidence, measured), (evidence.theirs, evidence.published))
    ]
    yours, theirs = (source.trend("median") for source in relative)
    first = relative[0].first("median")
    judged = ex.judge_trend(yours, theirs, -1, f"median rank {percent(first)} of the vocabulary")
    last = [row for row in measured if row.get("shuffled") is not None][-1:]
    if yours is None or not last:
        return judged
    beside = f"{last[0]['median']:,.0f} in layer {last[0]['layer']}, {last[0]['shuffled']:,.0f} with shuffled targets"
    return judged.and_also(f"median rank {beside}")


EXPERIMENT = ex.Experiment(
    "rank",
    "Figure 5",
    "Rank of the top trigger's next token in the value's distribution",
    (
        ex.ResultTable(
            "rank",
            SCHEMA,
            compute,
            question="How does the value rank the next token?",
            lead="Lower is better. The line is the median over the memories of a layer, and the band shows quartiles.",
            how="The rank of the token after the strongest trigger in p(v): 1 + the number of tokens with a strictly "
            "higher score. The table has ranks. The chart divides them by the size of the vocabulary, on a logarithmic "
            "axis, so that models can be compared. The paper’s ranks are divided by 20,000, the head of its adaptive "
            "softmax, because a flat value ranks all targets there (inferred from the published quartiles of layers "
            "0–5, which are uniform over 20,000). Shuffled: the median rank of the target of the next memory of the "
            "layer. The interval of the median is computed from order statistics.",
            draw=draw,
            published=published,
        ),
    ),
    needs=("values",),
    claims=(
        ex.Claim(
            "rank",
            "The rank of the next token improves with depth",
            "median 9,611 of 20,000 (inferred) in layer 0, 5,139 in layer 15",
            "Median rank as a share of the vocabulary (of the head of the softmax for the paper), by layer. "
            + ex.RULE_OF_TRENDS
            + ex.rule_of_enough("memories"),
            rank_improves,
            write=ex.as_points_per_layer,
            curve="median",
            sign=-1,
        ),
    ),
    picture=ex.Picture(
        (
            ex.Column("median", "median", ex.count, ("low", "high")),
            ex.Column("q1", "q1", ex.count),
            ex.Column("q3", "q3", ex.count),
            ex.Column("shuffled", "shuffled", ex.count),
            ex.Column("memories", "memories", ex.count),
        ),
        {"median": "median"},
    ),
)
