"""Active memories (Figure 7): the share of a layer's memories with m > 0, by prefix.

With GELU, SiLU and gated blocks, m > 0 is only a sign, so the table also has the effective number of memories:
(sum a)^2 / sum a^2 with a_i = |m_i| ||v_i||.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memlens.experiments import experiment as ex
from memlens.stats import Estimate, generator, mean_estimate, median_interval, wilson
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 memories:int64",
    "q1 median q3 low high",  # quartiles of the share of memories with m > 0; interval of its median
    "effective_q1 effective_median effective_q3",  # quartiles of the effective number of memories
    *ex.kind_columns("median", "low", "high"),  # in a mixture: share of the memories that a prefix reaches
    "drop drop_low drop_high",  # mean share: middle third minus lower third without layer 0; equal in all rows
)


def compute(seen: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return quartiles over the prefixes, by layer."""
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
    """Return the middle third minus the lower third without layer 0, paired over prefixes."""
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
    title = "share with m > 0 of the memories reached, by kind"
    kinds = ex.draw_kinds("active", rows, "median", title, ".0%", "Share of active memories", model)
    return [charts.panel("active", chart, "Share of active memories, by depth", rows, "median", "%"), *kinds]


def only_for_relu(judge: Callable[[ex.Evidence], ex.Judgement]) -> Callable[[ex.Evidence], ex.Judgement]:
    """Restrict a claim to models whose memories are silent at 0. For other models, it does not apply."""

    def judged(evidence: ex.Evidence) -> ex.Judgement:
        return judge(evidence) if evidence.rests_at_zero else _OF_ANOTHER_KIND

    return judged


_OF_ANOTHER_KIND = ex.Judgement(
    "m > 0 is only a sign",
    "",
    ex.NOT_APPLICABLE,
    "With GELU, SiLU or a gate, coefficients are rarely 0, so m > 0 is only a sign. See the effective number of "
    "memories.",
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
        f"outside in {len(outside)} of {len(medians)} layers",
        verdict,
        f"The median lies outside 10% to 50% in {len(outside)} of {len(medians)} layers{where}, with intervals that "
        f"hold for all layers at once (published: 1 of 16); layer 0: {percent(evidence.first('median'), 0)}.",
        Estimate(1 - share, *wilson(len(medians) - len(outside), len(medians))),
    )


@only_for_relu
def active_drops_toward_the_middle(evidence: ex.Evidence) -> ex.Judgement:
    yours, theirs = (_middle_less_lower(source) for source in (evidence, evidence.theirs))
    first = percent(evidence.first("median"), 0)
    return ex.judge_difference(yours, theirs, -1, first, "from the lower to the middle third")


def _middle_less_lower(evidence: ex.Evidence) -> Estimate | None:
    """Return the difference from the table, or compute it from the medians if the rows lack it (the paper's rows)."""
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
    "Active memories per prefix",
    ex.ResultTable(
        "active",
        SCHEMA,
        compute,
        question="How many memories are active?",
        lead="Line: median over prefixes; band: quartiles.",
        how="For each sampled prefix, the share of a layer’s memories with a coefficient above 0. Coefficients of "
        "GELU, SiLU and gated blocks are rarely 0, so the table also has the effective number of memories: the "
        "participation ratio of |m| times the norm of the value.",
        draw=draw,
        published=published,
        contract=("layer", *ex.QUARTILES),
    ),
    claims=(
        ex.Claim(
            "active",
            "Between 10% and 50% of a layer’s memories are active",
            "medians from 12% to 55%, inside in 15 of 16 layers",
            "For ReLU models only. Appears if the median share of memories with m > 0 is outside 10% to 50% (with "
            "intervals that hold for all layers at once) in at most a tenth of the layers, in part if in at most half, "
            "otherwise it does not appear." + ex.rule_of_enough("prefixes"),
            few_memories_are_active,
            write=lambda share: f"{percent(share, 0)} of layers inside",
        ),
        ex.Claim(
            "active-middle",
            "Fewer memories are active in the middle of the model",
            "55% in layer 1, 12% in layer 9",
            "For ReLU models only. Mean share of active memories, middle third minus lower third without layer 0, "
            "paired over prefixes. Appears if the 95% interval lies below 0, in part if the drop is less than a tenth "
            "of the published one, does not appear if it lies above 0 or within that tenth."
            + ex.rule_of_enough("prefixes"),
            active_drops_toward_the_middle,
            sign=-1,
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
