"""Agreement (Figure 4): the share of memories whose value's top token is the token after their top-1 trigger.

Two baselines: a token drawn at random, 1 / vocabulary; and the targets of the layer shuffled among its memories, as the
exact mean over all shuffles, which shows how much of the agreement comes from frequent tokens alone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from memlens.experiments import experiment as ex
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress
from memlens.stats import draw as draw_sample, generator, rate_interval, share_difference
from memlens.text import percent

BASELINES = {"shuffled": "this model, targets shuffled", "baseline": "a random token"}  # columns, as the chart says it
_COLUMNS = ("memory", "max_p", "argmax", "target", "target_rank")
SCHEMA = ex.schema(
    "layer:int32 memories:int64 agree:int64",  # memories that take part
    "rate low high baseline shuffled",
    "no_trigger:int64 no_next:int64",  # left out
)


@dataclass(frozen=True, eq=False)
class Targets:
    """Memories of one layer beside the tokens that follow their top-1 triggers, and how many have none."""

    memories: NDArray[Any]  # [n] ids
    max_p: NDArray[Any]  # [n]
    argmax: NDArray[Any]  # [n] token
    target: NDArray[Any]  # [n] token
    rank: NDArray[Any]  # [n] of the target in p(v), from 1
    no_trigger: int
    no_next: int  # whose top-1 trigger ends its sentence

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """Is the value's top token the target? [n]"""
        agrees: NDArray[np.bool_] = self.argmax == self.target
        return agrees


def read_targets(
    index: Index, layer: int, sample: int | None = None, random: np.random.Generator | None = None
) -> Targets:
    """All memories of a layer, or `sample` of those that have a target."""
    table = index.table("values", [*_COLUMNS, "trigger_p"], [("layer", "=", layer)])
    memory, max_p, argmax, target, rank = (table.column(name).fill_null(-1).to_numpy() for name in _COLUMNS)
    triggers = pc.list_value_length(table.column("trigger_p")).to_numpy()
    chosen = np.flatnonzero(target >= 0)
    if random is not None:
        chosen = draw_sample(chosen, sample, random)
    return Targets(
        memory[chosen],
        max_p[chosen],
        argmax[chosen],
        target[chosen],
        rank[chosen],
        no_trigger=int((triggers == 0).sum()),
        no_next=int(((triggers > 0) & (target < 0)).sum()),
    )


def compute(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> list[ex.Row]:
    """One row a layer; `sample` memories of each, or all."""
    rows = []
    for layer in ex.layers_of(index, "agreement", progress):
        random = generator(seed, "agreement", layer)
        targets = read_targets(index, layer, sample, random)
        memories, agree = len(targets.memories), int(targets.agrees.sum())
        low, high = rate_interval(agree, memories, random)
        rows.append(
            {
                "layer": layer,
                "memories": memories,
                "agree": agree,
                "rate": agree / memories if memories else None,
                "low": low,
                "high": high,
                "baseline": 1 / index.manifest.model.vocabulary,
                "shuffled": shuffled_rate(targets),
                "no_trigger": targets.no_trigger,
                "no_next": targets.no_next,
            }
        )
    return rows


def shuffled_rate(targets: Targets) -> float | None:
    """Mean agreement over all ways to deal the layer's targets out to its memories."""
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
    chart = charts.curves(both, "memories that agree", ".1%", model.layers, baselines=baselines)
    text = "Share of memories that agree with what follows, by depth"
    return [charts.panel("agreement", chart, text, rows, "rate", "%")]


def agreement_rises(evidence: ex.Evidence) -> ex.Judgement:
    agree, memories, low_agree, low_memories = (
        sum(row[column] for row in evidence.third(which))
        for which in ("upper", "lower")
        for column in ("agree", "memories")
    )
    if not memories or not low_memories:
        return ex.NOT_MEASURED
    low, high = share_difference(agree, memories, low_agree, low_memories)
    below, above = percent(low_agree / low_memories, 2), percent(agree / memories, 2)
    yours = f"{below} in the lower third, {above} in the upper"
    return ex.Judgement(yours, ex.as_points(low, high), ex.judge_difference(low, high, least=0.005))


EXPERIMENT = ex.Experiment(
    "agreement",
    "Figure 4",
    "Values that promote what follows their top trigger",
    (
        ex.ResultTable(
            "agreement",
            SCHEMA,
            compute,
            question="Do values predict what follows their triggers?",
            lead="A memory agrees when the token its value promotes most is the very token that follows its strongest "
            "trigger.",
            how="For each memory, argmax p(v) is compared with the token that follows the prefix with the highest "
            "coefficient; the share of memories where both are equal is shown by layer. Memories that never fire, and "
            "those whose strongest trigger ends its sentence, take no part. Intervals: bootstrap over memories. By "
            "chance one in a vocabulary agrees.",
            draw=draw,
            published=published,
            contract=("layer", "memories", "agree", "rate", "low", "high", "baseline"),
        ),
    ),
    needs=("values",),
    claims=(
        ex.Claim(
            "agreement",
            "Values agree with what follows their keys’ triggers more often with depth",
            "about 0 in layers 0–9, then up to 3.5%",
            "Share of agreeing memories, upper third minus lower third. " + ex.rule_of_difference("0.5 points"),
            agreement_rises,
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
