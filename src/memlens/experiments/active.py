"""Active memories (Figure 7): the share of a layer's memories with m > 0 on a prefix.

In GELU, SiLU and gated blocks, coefficients are rarely exactly 0, so m > 0 tells only their sign. The table therefore
also has the effective number of memories: (sum a)^2 / sum a^2 with a_i = |m_i| ||v_i||.
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
    "q1 median q3 low high",  # quartiles of the share of memories with m > 0; interval of the median
    "effective_q1 effective_median effective_q3",  # quartiles of the effective number of memories
    *ex.kind_columns("median", "low", "high"),  # by kind of memory: active share of the memories that a prefix reaches
    "drop drop_low drop_high",  # mean share in the middle third of layers minus the lower third; equal in all rows
)


def compute(tables: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return one row per layer with quartiles over the prefixes."""
    rows, layers = [], len(tables.index.manifest.model.memories)
    shares: dict[int, NDArray[np.float64]] = {}
    for layer, columns in tables.by_layer():
        memories = tables.index.memories(layer)
        shares[layer] = np.asarray(columns["active"], np.float64) / memories
        effective = ex.quartiles(columns["effective"])
        rows.append(
            {"layer": layer, "prefixes": len(shares[layer]), "memories": memories}
            | ex.quartile_columns(shares[layer])
            | {f"effective_{name}": number for name, number in effective.items()}
        )
        for kind in ex.kind_spans(tables.index.names, layer):
            active = np.asarray([share for share in columns.get(f"{kind}_active", ()) if share is not None], np.float64)
            low, high = median_interval(active)
            median = float(np.median(active)) if len(active) else None
            rows[-1] |= ex.of_kind(kind, {"median": median, "low": low, "high": high})
    drop = _drop(shares, layers, seed)
    return [row | drop for row in rows]


def _drop(shares: Mapping[int, NDArray[np.float64]], layers: int, seed: int) -> ex.Row:
    """Return how much the mean share in the middle third of the layers exceeds the lower third, paired over prefixes.

    Layer 0 is left out.
    """
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

    both = charts.beside_paper(rows, published(), model, keep=ex.QUARTILES)
    chart = charts.bands(both, "memories with m > 0", ".0%", model.layers)
    title = "active share of the memories reached, by kind"
    kinds = ex.draw_kinds("active", rows, "median", title, ".0%", "Share of active memories", model)
    return [charts.panel("active", chart, "Share of active memories, by depth", rows, "median", "%"), *kinds]


def only_for_relu(judge: Callable[[ex.Evidence], ex.Judgement]) -> Callable[[ex.Evidence], ex.Judgement]:
    """Wrap `judge` so that the claim is not applicable to models whose inactive memories have nonzero coefficients."""

    def judged(evidence: ex.Evidence) -> ex.Judgement:
        return judge(evidence) if evidence.rests_at_zero else _NOT_RELU

    return judged


_NOT_RELU = ex.Judgement(
    "m > 0 is only a sign",
    "",
    ex.NOT_APPLICABLE,
    "Coefficients of GELU, SiLU and gated blocks are rarely 0, and m > 0 is only their sign. See the effective number "
    "of memories instead.",
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
    layers = f" (layers {', '.join(map(str, outside))})" if outside else ""
    return ex.Judgement(
        f"medians from {percent(min(values), 0)} to {percent(max(values), 0)}",
        f"outside in {len(outside)} of {len(medians)} layers",
        verdict,
        f"The median lies outside 10% to 50% in {len(outside)} of {len(medians)} layers{layers}, with intervals that "
        f"hold for all layers at once (published: 1 of 16); layer 0: {percent(evidence.first('median'), 0)}.",
        Estimate(1 - share, *wilson(len(medians) - len(outside), len(medians))),
    )


@only_for_relu
def active_drops_toward_the_middle(evidence: ex.Evidence) -> ex.Judgement:
    yours, theirs = (_middle_less_lower(source) for source in (evidence, evidence.theirs))
    first = percent(evidence.first("median"), 0)
    return ex.judge_difference(yours, theirs, -1, first, "from the lower to the middle third")


def _middle_less_lower(evidence: ex.Evidence) -> Estimate | None:
    """Return the share in the middle third of the layers minus that in the lower third.

    The paper's rows lack this difference, so it is computed from their medians.
    """
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
        lead="The line is the median over prefixes, and the band shows the quartiles.",
        how="The share of a layer’s memories with a coefficient above 0, for each sampled prefix. Coefficients of "
        "GELU, SiLU and gated blocks are rarely 0, so the table also has the effective number of memories: the "
        "participation ratio of |m| times the norm of the value.",
        draw=draw,
        published=published,
    ),
    claims=(
        ex.Claim(
            "active",
            "Between 10% and 50% of a layer’s memories are active",
            "medians from 12% to 55%, inside in 15 of 16 layers",
            "For ReLU models only. The median share of memories with m > 0 is compared with 10% to 50%, with intervals "
            "that hold for all layers at once. The claim appears if the median is outside in at most a tenth of the "
            "layers, and in part if it is outside in at most half of them. Otherwise it does not appear."
            + ex.rule_of_enough("prefixes"),
            few_memories_are_active,
            curve="median",
            write=lambda share: f"{percent(share, 0)} of layers inside",
        ),
        ex.Claim(
            "active-middle",
            "Fewer memories are active in the middle of the model",
            "55% in layer 1, 12% in layer 9",
            "For ReLU models only. Mean share of active memories in the middle third of the layers minus that in the "
            "lower third without layer 0, paired over prefixes. The claim appears if the 95% interval lies below 0, "
            "and in part if it excludes a drop of a tenth of the published one. It does not appear if the interval "
            "lies above 0, or if it contains 0 and excludes such a drop." + ex.rule_of_enough("prefixes"),
            active_drops_toward_the_middle,
            curve="median",
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
