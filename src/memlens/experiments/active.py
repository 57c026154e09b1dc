"""Active memories (Figure 7): the share of a layer's memories with m > 0, prefix by prefix.

For GELU, SiLU and gated blocks m > 0 is a matter of sign rather than of silence, so the effective number of memories
stands beside it: (sum a)^2 / sum a^2 with a_i = |m_i| ||v_i||.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memlens.experiments import experiment as ex
from memlens.stats import Estimate, generator, mean_estimate, median_interval
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 memories:int64",
    "q1 median q3 low high",  # of the share of memories with m > 0; low and high of its median
    "effective_q1 effective_median effective_q3",  # of the effective number of memories
    *ex.kind_columns("median", "low", "high"),  # of the share of those that a prefix reaches, of a mixture
    "drop drop_low drop_high",  # mean share, middle third less lower third without layer 0; the same in every row
)


def compute(seen: "PrefixTables", seed: int) -> list[ex.Row]:
    """Quartiles over the prefixes, layer by layer."""
    rows, layers = [], len(seen.index.manifest.model.memories)
    shares: dict[int, NDArray[np.float64]] = {}
    for layer, columns in seen.by_layer():
        memories = seen.memories[layer]
        shares[layer] = np.asarray(columns["active"], np.float64) / memories
        low, high = median_interval(shares[layer])
        effective = ex.quartiles(columns["effective"])
        rows.append(
            {"layer": layer, "prefixes": len(shares[layer]), "memories": memories, "low": low, "high": high}
            | ex.quartiles(shares[layer])
            | {f"effective_{name}": number for name, number in effective.items()}
        )
        for kind in ex.kind_spans(seen.index.names, layer):
            active = np.asarray([share for share in columns.get(f"{kind}_active", ()) if share is not None], np.float64)
            low, high = median_interval(active)
            median = float(np.median(active)) if len(active) else None
            rows[-1] |= ex.of_kind(kind, {"median": median, "low": low, "high": high})
    drop = _drop(shares, layers, seed)
    return [row | drop for row in rows]


def _drop(shares: Mapping[int, NDArray[np.float64]], layers: int, seed: int) -> ex.Row:
    """Middle third less lower third, prefix by prefix, layer 0 left out."""
    thirds = [[share for layer, share in shares.items() if layer and ex.third(layer, layers) == which]
              for which in ("middle", "lower")]  # fmt: skip
    if not all(thirds):
        return ex.estimate_columns("drop", None)
    middle, lower = (np.mean(third, axis=0) for third in thirds)
    return ex.estimate_columns("drop", mean_estimate(middle - lower, generator(seed, "active drop")))


def published() -> list[ex.Row]:
    return ex.paper_quartiles("fig7_pct", 0.01)


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments import charts

    both = charts.quartiles_beside_paper(rows, published(), model)
    chart = charts.bands(both, "memories with m > 0", ".0%", model.layers)
    title = "m > 0 among those reached, by kind"
    kinds = ex.draw_kinds("active", rows, "median", title, ".0%", "Share of active memories", model)
    return [charts.panel("active", chart, "Share of active memories, by depth", rows, "median", "%"), *kinds]


def only_for_relu(judge: Callable[[ex.Evidence], ex.Judgement]) -> Callable[[ex.Evidence], ex.Judgement]:
    """The rule of a claim about memories that rest at 0; to a model with others the claim does not apply."""

    def judged(evidence: ex.Evidence) -> ex.Judgement:
        return judge(evidence) if evidence.rests_at_zero else _OF_ANOTHER_KIND

    return judged


_OF_ANOTHER_KIND = ex.Judgement(
    "m > 0 is a sign here",
    "",
    ex.NOT_APPLICABLE,
    "With GELU, SiLU or a gate a memory is hardly ever exactly 0, so that m > 0 tells its sign and not whether it "
    "takes part; see the effective number of memories.",
)


@only_for_relu
def few_memories_are_active(evidence: ex.Evidence) -> ex.Judgement:
    rows = ex.known_rows(evidence.rows, ("median",), "prefixes")
    medians = {row["layer"]: median.widened(len(rows)) for row in rows if (median := ex.estimate_of(row, "median"))}
    if not medians:
        return ex.NOT_MEASURED
    outside = [layer for layer, median in medians.items() if median.high < 0.1 or median.low > 0.5]
    values = [median.value for median in medians.values()]
    share = len(outside) / len(medians)
    verdict = ex.APPEARS if share <= 0.1 else ex.ABSENT if share > 0.5 else ex.PARTLY
    where = f" (layers {', '.join(map(str, outside))})" if outside else ""
    return ex.Judgement(
        f"medians from {percent(min(values), 0)} to {percent(max(values), 0)}",
        f"surely outside in {len(outside)} of {len(medians)} layers",
        verdict,
        f"The median lies surely outside 10% to 50% in {len(outside)} of {len(medians)} layers{where}, counted for all "
        f"layers at once, in the paper in 1 of 16; layer 0 by itself: {percent(evidence.first('median'), 0)}.",
    )


@only_for_relu
def active_drops_towards_the_middle(evidence: ex.Evidence) -> ex.Judgement:
    yours, theirs = (_middle_less_lower(source) for source in (evidence, evidence.theirs))
    first = percent(evidence.first("median"), 0)
    return ex.judge_trend(yours, theirs, -1, ex.as_points, first, where="from the lower to the middle third")


def _middle_less_lower(evidence: ex.Evidence) -> Estimate | None:
    """The difference as the table has it; that of the medians where it has none, as in the paper's rows."""
    rows = ex.known_rows(evidence.rows, ("median",), "prefixes")

    def of_medians() -> Estimate | None:
        thirds = [[row["median"] for row in ex.in_third(rows, which, evidence.layers) if row["layer"]]
                  for which in ("middle", "lower")]  # fmt: skip
        if not all(thirds):
            return None
        middle, lower = (sum(third) / len(third) for third in thirds)
        return Estimate(middle - lower, middle - lower, middle - lower)

    return ex.prefix_estimate(rows, "drop", of_medians)


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
            "For ReLU models only. Appears if the median share of memories with m > 0 is surely outside 10% to 50% (an "
            "interval that holds for all layers at once) in at most a tenth of the layers; in part if in at most half; "
            "does not else." + ex.rule_of_enough("prefixes"),
            few_memories_are_active,
        ),
        ex.Claim(
            "active-middle",
            "Fewer memories are active towards the middle of the model",
            "55% in layer 1, 12% in layer 9",
            "For ReLU models only. Mean share of active memories, middle third less lower third without layer 0, "
            "prefix by prefix. Appears if the 95% interval lies below 0, in part if it ends before a tenth of the "
            "published drop; does not if it lies above 0 or within that tenth." + ex.rule_of_enough("prefixes"),
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
