"""A complete experiment in one file: how many triggers a memory has, layer by layer."""

from typing import Any

from memlens.experiments import experiment as ex
from memlens.index.reader import Index

SCHEMA = ex.schema("layer:int32 memories:int64", "triggers")


def compute(index: Index, model: Any = None, **settings: Any) -> list[ex.Row]:
    query = "SELECT layer, count(*) AS n FROM {triggers} WHERE \"end\" = 'top' GROUP BY layer"
    found = {row["layer"]: row["n"] for row in index.sql(query)}
    memories = {layer: index.memories(layer) for layer in index.layers}
    return [{"layer": n, "memories": count, "triggers": found[n] / count} for n, count in memories.items()]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments import charts

    own = charts.with_depth([{**row, "value": row["triggers"]} for row in rows], model.layers)
    chart = charts.bars(own, "triggers per memory", ".1f", model.layers)
    return [charts.panel("toy", chart, "Triggers per memory, by depth", rows, "triggers")]


def judge(evidence: ex.Evidence) -> ex.Judgement:
    return ex.Judgement("as many as were kept", "", ex.APPEARS, "It has what was kept.")


TABLE = ex.ResultTable(
    "toy", SCHEMA, compute, draw=draw, question="How many triggers has a memory?",
    lead="Fewer only where it fires on fewer prefixes.", how="Rows of the table of triggers over memories.",
)  # fmt: skip
EXPERIMENT = ex.Experiment(
    "toy",
    "beyond the paper",
    "Triggers that a memory has",
    (TABLE,),
    claims=(ex.Claim("toy", "A toy memory has triggers", "nothing", "Appears always.", judge),),
    picture=ex.Picture((ex.Column("triggers", "triggers", ex.short),), {"triggers": "triggers"}),
)
