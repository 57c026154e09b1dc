"""Active memories (Figure 7): the share of a layer's memories with m > 0, prefix by prefix.

For GELU, SiLU and gated blocks m > 0 is a matter of sign rather than of silence, so the effective number of memories
stands beside it: (sum a)^2 / sum a^2 with a_i = |m_i| ||v_i||.
"""

from typing import TYPE_CHECKING

import numpy as np

from memlens.experiments import experiment as ex
from memlens.stats import generator, interval
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import Aggregate

SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 memories:int64",
    "q1 median q3 low high",  # of the share of memories with m > 0; low and high of its median
    "effective_q1 effective_median effective_q3",  # of the effective number of memories
)


def compute(seen: "Aggregate", seed: int) -> list[ex.Row]:
    """Quartiles over the prefixes, layer by layer."""
    rows = []
    for layer, columns in seen.by_layer():
        memories = seen.memories[layer]
        shares = np.asarray(columns["active"], np.float64) / memories
        low, high = interval(shares, np.median, generator(seed, "active", layer))
        effective = ex.quartiles(columns["effective"])
        rows.append(
            {"layer": layer, "prefixes": len(shares), "memories": memories, "low": low, "high": high}
            | ex.quartiles(shares)
            | {f"effective_{name}": number for name, number in effective.items()}
        )
    return rows


def published() -> list[ex.Row]:
    return ex.paper_quartiles("fig7_pct", 0.01)


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments import charts

    both = charts.quartiles_beside_paper(rows, published(), model)
    chart = charts.bands(both, "memories with m > 0", ".0%", model.layers)
    return [charts.panel("active", chart, "Share of active memories, by depth", rows, "median", "%")]


def few_memories_are_active(evidence: ex.Evidence) -> ex.Judgement:
    medians = [row["median"] for row in ex.known_rows(evidence.rows, ("median",), "prefixes")]
    if not medians:
        return ex.NOT_MEASURED
    inside = sum(0.1 <= median <= 0.5 for median in medians)
    verdict = ex.APPEARS if inside >= 0.9 * len(medians) else ex.ABSENT if inside < 0.5 * len(medians) else ex.UNCLEAR
    yours = f"medians from {percent(min(medians), 0)} to {percent(max(medians), 0)}"
    return ex.Judgement(yours, f"inside in {inside} of {len(medians)} layers", verdict)


def active_drops_towards_the_middle(evidence: ex.Evidence) -> ex.Judgement:
    thirds = [ex.known_rows(evidence.third(which), ex.QUARTILES, "prefixes") for which in ("lower", "middle")]
    if not all(thirds):
        return ex.NOT_MEASURED
    lower, middle = ({name: sum(row[name] for row in rows) / len(rows) for name in ex.QUARTILES} for rows in thirds)
    if middle["median"] >= lower["median"]:
        verdict = ex.ABSENT
    else:
        verdict = ex.APPEARS if middle["q3"] < lower["q1"] else ex.UNCLEAR
    yours = f"{percent(lower['median'])} in the lower third, {percent(middle['median'])} in the middle"
    spread = f"middle half {ex.as_span(lower['q1'], lower['q3'])}, then {ex.as_span(middle['q1'], middle['q3'])}"
    return ex.Judgement(yours, spread, verdict)


EXPERIMENT = ex.prefix_experiment(
    "active",
    "Figure 7",
    "Memories that are active for a prefix",
    ex.ResultTable(
        "active",
        SCHEMA,
        compute,
        question="How many memories take part?",
        lead="Line: the median prefix; band: the middle half of the prefixes.",
        how="For each sampled prefix, the share of a layer’s memories whose coefficient is greater than 0. That is "
        "sparse for ReLU; GELU, SiLU and gated blocks are rarely exactly zero, so the effective number of memories, "
        "the participation ratio of |m| times the value’s norm, stands beside it in the table.",
        draw=draw,
        published=published,
        contract=("layer", *ex.QUARTILES),
    ),
    claims=(
        ex.Claim(
            "active",
            "Between 10% and 50% of a layer’s memories are active",
            "medians from 12% to 55%, inside in 15 of 16 layers",
            "Appears if the median share of memories with m > 0 is between 10% and 50% in at least nine tenths of the "
            "layers; does not if in fewer than half." + ex.rule_of_enough("prefixes"),
            few_memories_are_active,
        ),
        ex.Claim(
            "active-middle",
            "Fewer memories are active towards the middle of the model",
            "49% in layer 0, 12% in layer 9",
            "Quartiles averaged over thirds. Appears if the middle third's upper quartile lies below the lower third's "
            "lower quartile; does not if its median is no lower." + ex.rule_of_enough("prefixes"),
            active_drops_towards_the_middle,
        ),
    ),
    picture=ex.Picture(
        (
            ex.Column("median", "median", interval=("low", "high")),
            ex.Column("q1", "q1"),
            ex.Column("q3", "q3"),
            ex.Column("effective memories", "effective_median", ex.count),
            ex.Column("of", "memories", ex.count),
        ),
        {"median": "median"},
    ),
)
