"""Agreement (Figure 4): the share of memories whose value's top token is the token after their top-1 trigger.

There are two baselines. A random token agrees with probability 1 / vocabulary. The other baseline shuffles the layer's
targets among its memories, which shows how much agreement results from frequent tokens alone. This baseline is the
exact mean over all shuffles.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from memlens.experiments import experiment as ex
from memlens.index.reader import Index
from memlens.progress import Progress, no_progress
from memlens.stats import Estimate, draw as draw_sample, generator, wilson
from memlens.text import percent

BASELINES = {"shuffled": "this model, shuffled targets", "baseline": "a random token"}  # column -> label in charts
_COLUMNS = ("memory", "max_p", "argmax", "target", "target_rank", "shuffled_rank")
SCHEMA = ex.schema(
    "layer:int32 memories:int64 agree:int64",  # number of memories with a target; how many of them agree
    "rate low high baseline shuffled",
    "no_trigger:int64 no_next:int64",  # excluded memories: without a trigger, without a next token
    *ex.kind_columns("memories:int64", "agree:int64", "rate", "low", "high"),  # per kind of memory, in a mixture
)


@dataclass(frozen=True, eq=False)
class Targets:
    """Memories of one layer, the tokens that follow their top-1 triggers, and counts of excluded memories."""

    memories: NDArray[Any]  # [n]: numbers of the memories
    max_p: NDArray[Any]  # [n]: highest probability in p(v)
    argmax: NDArray[Any]  # [n]: top token of the value
    target: NDArray[Any]  # [n]: token after the top-1 trigger
    rank: NDArray[Any]  # [n]: rank of the target in p(v), from 1
    shuffled_rank: NDArray[Any]  # [n]: rank of another memory's target in p(v)
    no_trigger: int
    no_next: int  # number of memories whose top-1 trigger is the end of a sentence

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """Whether the target of each memory is its value's top token. [n]"""
        agrees: NDArray[np.bool_] = self.argmax == self.target
        return agrees

    def among(self, memories: range) -> "Targets":
        """Return the targets of a range of memories. The counts of excluded memories are set to 0."""
        mask = (self.memories >= memories.start) & (self.memories < memories.stop)
        columns = ("memories", "max_p", "argmax", "target", "rank", "shuffled_rank")
        return replace(self, **{name: getattr(self, name)[mask] for name in columns}, no_trigger=0, no_next=0)


def read_targets(
    index: Index, layer: int, sample: int | None = None, random: np.random.Generator | None = None
) -> Targets:
    """Return the memories of a layer that have a target, or a random `sample` of them."""
    table = index.table("values", [*_COLUMNS, "trigger_p"], [("layer", "=", layer)])
    columns = {name: table.column(name).fill_null(-1).to_numpy() for name in _COLUMNS}
    triggers = pc.list_value_length(table.column("trigger_p")).to_numpy()
    rows = np.flatnonzero(columns["target"] >= 0)
    if random is not None:
        rows = draw_sample(rows, sample, random)
    no_next = int(((triggers > 0) & (columns["target"] < 0)).sum())
    memory, max_p, argmax, target, rank, shuffled = (columns[name][rows] for name in _COLUMNS)
    return Targets(memory, max_p, argmax, target, rank, shuffled, int((triggers == 0).sum()), no_next)


def compute(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> list[ex.Row]:
    """Return one row per layer, computed from `sample` random memories of the layer or, if it is None, from all."""
    rows = []
    for layer in ex.layers_of(index, "agreement", progress):
        random = generator(seed, "agreement", layer)
        targets = read_targets(index, layer, sample, random)
        kinds = ex.kind_spans(index.names, layer).items()
        by_kind = [ex.of_kind(kind, _agreement(targets.among(span))) for kind, span in kinds]
        rows.append(
            {
                "layer": layer,
                **_agreement(targets),
                "baseline": 1 / index.manifest.value_tokens,
                "shuffled": shuffled_rate(targets),
                "no_trigger": targets.no_trigger,
                "no_next": targets.no_next,
                **{name: value for columns in by_kind for name, value in columns.items()},
            }
        )
    return rows


def _agreement(targets: Targets) -> ex.Row:
    memories, agree = len(targets.memories), int(targets.agrees.sum())
    return {"memories": memories, "agree": agree} | ex.share_columns(agree, memories)


def shuffled_rate(targets: Targets) -> float | None:
    """Return the mean agreement over all permutations of the layer's targets."""
    memories = len(targets.memories)
    if memories == 0:
        return None
    promoted, promoters = np.unique(targets.argmax, return_counts=True)
    wanted, times = np.unique(targets.target, return_counts=True)
    _, left, right = np.intersect1d(promoted, wanted, return_indices=True)
    return float((promoters[left] * times[right]).sum() / memories**2)


def published() -> list[ex.Row]:
    return [
        {"layer": layer, "memories": ex.PAPER_MEMORIES, "agree": agree, "rate": agree / ex.PAPER_MEMORIES}
        for layer, agree in enumerate(ex.paper_figures()["fig4_counts_of_4096"])
    ]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments import charts

    chance = [
        {"baseline": label, "layer": row["layer"], "value": row.get(column)}
        for column, label in BASELINES.items()
        for row in rows
        if row.get(column) is not None
    ]
    both = charts.beside_paper(rows, published(), model, "rate")
    baselines = charts.with_depth(chance, model.layers)
    chart = charts.curves(both, "share of memories that agree", ".1%", model.layers, baselines=baselines)
    text = "Share of memories whose value's top token follows their top trigger, by depth"
    kinds = ex.draw_kinds(
        "agreement", rows, "rate", "share that agrees, by kind", ".1%", "Share of memories that agree", model
    )
    return [charts.panel("agreement", chart, text, rows, "rate", "%"), *kinds]


def agreement_rises(evidence: ex.Evidence) -> ex.Judgement:
    yours, theirs = evidence.trend("rate"), evidence.theirs.trend("rate")
    return ex.judge_trend(yours, theirs, 1, percent(evidence.first("rate"), 2))


def agreement_beats_chance(evidence: ex.Evidence) -> ex.Judgement:
    rows = [row for row in evidence.rows if row["memories"]]
    if not rows:
        return ex.NOT_MEASURED
    agree, memories = ex.pooled(rows, "agree", "memories")
    share = Estimate(agree / memories, *wilson(agree, memories))
    shuffled = sum((row.get("shuffled") or 0) * row["memories"] for row in rows) / memories
    random = sum((row.get("baseline") or 0) * row["memories"] for row in rows) / memories
    chance = max(shuffled, random)
    theirs = [row for row in evidence.published if row["memories"]]
    published = ex.pooled(theirs, "agree", "memories")[0] / ex.pooled(theirs, "agree", "memories")[1]
    yours = f"{agree:,} of {memories:,}, {percent(share.value, 2)}"
    baseline = "the rate with shuffled targets" if shuffled >= random else "the rate of a random token"
    judged = ex.judge_share(share, chance, baseline, published, yours)
    return replace(judged, measure=share.minus(chance))


EXPERIMENT = ex.Experiment(
    "agreement",
    "Figure 4",
    "Values that promote the token after their top trigger",
    (
        ex.ResultTable(
            "agreement",
            SCHEMA,
            compute,
            question="Do values predict the next token of their triggers?",
            lead="A memory agrees if the top token of its value is the token that follows its strongest trigger.",
            how="For each memory, argmax p(v) is compared with the token that follows the prefix with the highest "
            "coefficient. The chart shows the share of memories for which both are equal, by layer. Memories that are "
            "never active, and those whose strongest trigger ends its sentence, are excluded. Wilson intervals.",
            draw=draw,
            published=published,
        ),
    ),
    needs=("values",),
    claims=(
        ex.Claim(
            "agreement",
            "Agreement of values with the next token grows with depth",
            "about 0 in layers 0–9, then up to 3.5%",
            "Share of memories that agree, by layer. " + ex.RULE_OF_TRENDS,
            agreement_rises,
            write=ex.as_points_per_layer,
            curve="rate",
        ),
        ex.Claim(
            "agreement-chance",
            "Agreement is above chance",
            "0.7% of all memories; 0.0004% for a random token",
            "Share of memories that agree over all layers, with a Wilson interval. It is compared with the larger of "
            "two chance levels: the layer’s targets shuffled among its memories, and a random token. The claim appears "
            "if the interval lies above the chance level, and does not appear if it lies below.",
            agreement_beats_chance,
        ),
    ),
    picture=ex.Picture(
        (
            ex.Column("agree", "rate", interval=("low", "high")),
            ex.Column("shuffled", "shuffled"),
            ex.Column("memories", "memories", ex.count),
        ),
        {"rate": "agree"},
    ),
)
