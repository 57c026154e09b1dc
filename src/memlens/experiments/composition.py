"""Composition (Figure 8): how often a layer's output has a top token that is the top token of none of its values.

A prefix counts as `zero` if top(y) differs from the top token of every value of the layer, and as `zero_active` if it
differs from the top token of every value whose memory is active (m > 0). y is read in the same way as values.

On all other prefixes, a memory agrees: the top token of its value is top(y). The table has the share of these prefixes
whose target is a stop word, the share that is shorter than 5 tokens, and both shares among all prefixes. Prefixes at
the end of a sentence have no target and are excluded from the shares of stop words.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memlens.experiments import experiment as ex
from memlens.stats import Estimate, critical, generator, mean_estimate, wilson
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

SHORT = 5  # prefixes with fewer tokens are short
SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 zero:int64 rate low high",
    "zero_active:int64 rate_active low_active high_active",
    "stop_words short",  # shares of stop words and short prefixes where a memory agrees; null if there are none
    "stop_words_all short_all",  # shares of stop words and short prefixes among all prefixes
    "without_target:int64",  # number of prefixes without a target
    # over all layers, equal in all rows: share of stop words among prefixes where a memory agrees; this share minus the
    # share among all prefixes
    "stop_words_pooled stop_words_excess stop_words_excess_low stop_words_excess_high",
    "short_pooled short_excess short_excess_low short_excess_high",
)


def compute(tables: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return one row per layer with counts, rates and intervals."""
    stops = tables.prefixes.column("stop_word").to_pylist()
    has_target = np.array([stop is not None for stop in stops])
    is_stop = np.array([bool(stop) for stop in stops])
    is_short = tables.prefixes.column("position").to_numpy() + 1 < SHORT
    everything = np.ones(len(stops), bool)
    agreeing = np.zeros(len(stops))  # for each prefix, the number of layers in which a memory agrees
    rows: list[ex.Row] = []
    for layer, columns in tables.by_layer():
        agrees = np.asarray(columns["promoted"])
        prefixes, zero = len(agrees), int((~agrees).sum())
        zero_active = int((~np.asarray(columns["promoted_active"])).sum())
        agreeing += agrees
        row: ex.Row = {
            "layer": layer,
            "prefixes": prefixes,
            "zero": zero,
            **ex.share_columns(zero, prefixes),
            "zero_active": zero_active,
            **ex.share_columns(zero_active, prefixes, ("rate_active", "low_active", "high_active")),
            "stop_words": _share(is_stop, agrees & has_target),
            "short": _share(is_short, agrees),
            "stop_words_all": _share(is_stop, has_target),
            "short_all": _share(is_short, everything),
            "without_target": int((~has_target).sum()),
        }
        rows.append(row)
    pooled = _excess("stop_words", is_stop[has_target], agreeing[has_target], seed)
    pooled |= _excess("short", is_short, agreeing, seed)
    return [row | pooled for row in rows]


def _excess(name: str, holds: NDArray[np.bool_], times: NDArray[np.float64], seed: int) -> ex.Row:
    """Return how often a property holds where a memory agrees, and its excess over all prefixes, as columns.

    `holds` [n] is whether a prefix has the property. `times` [n] is the number of layers in which a memory agrees.
    """
    whole = float(times.sum())
    if not whole:
        return {f"{name}_pooled": None} | ex.estimate_columns(f"{name}_excess", None)
    share, base = float((holds * times).sum()) / whole, float(holds.mean())
    # the influence of each prefix on the difference: as their mean, the difference gets the interval of a mean
    moves = share - base + (holds - share) * times * (len(times) / whole) - (holds - base)
    excess = mean_estimate(moves, generator(seed, f"composition {name}"))
    return {f"{name}_pooled": share} | ex.estimate_columns(f"{name}_excess", excess)


def _share(hits: NDArray[np.bool_], among: NDArray[np.bool_]) -> float | None:
    count = int(among.sum())
    return int((hits & among).sum()) / count if count else None


def published() -> list[ex.Row]:
    # the bars in the paper are multiples of 1/4,096, although its text states 4,000 prefixes
    return [
        {"layer": layer, "prefixes": 4096, "zero": zero, "rate": zero / 4096}
        for layer, zero in enumerate(ex.paper_figures()["fig8_implied_counts"])
    ]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments.charts import share_panel

    title = "share of outputs that match no single memory"
    text = "Share of outputs that match no memory's value, by depth"
    return [share_panel("composition", rows, published(), "zero", title, text, model)]


def outputs_are_compositions(evidence: ex.Evidence) -> ex.Judgement:
    rows = ex.known_rows(evidence.rows, ("rate",), "prefixes")
    if not rows:
        return ex.NOT_MEASURED
    bar = ex.paper_statement("no_single_memory")
    z = critical(len(rows))
    shares = {
        row["layer"]: Estimate(row["zero"] / row["prefixes"], *wilson(row["zero"], row["prefixes"], z)) for row in rows
    }
    below = [layer for layer, share in shares.items() if share.high < bar]
    above_half = [layer for layer, share in shares.items() if share.low > 0.5]
    least = min(shares, key=lambda layer: shares[layer].value)
    verdict = ex.ABSENT if below else ex.APPEARS if len(above_half) == len(shares) else ex.UNCLEAR
    where = f"{len(below)} of {len(shares)} layers" if below else "no layer"
    published = min(row["rate"] for row in evidence.published)
    return ex.Judgement(
        f"lowest {percent(shares[least].value)}, in layer {least}",
        ex.as_span(shares[least].low, shares[least].high),
        verdict,
        f"The share is below {percent(bar, 0)} in {where}, with intervals that hold for all {len(shares)} layers at "
        f"once; the lowest is {percent(shares[least].value)}, published {percent(published)}.",
        shares[least],
    )


def _judge_excess(name: str, what: str) -> Callable[[ex.Evidence], ex.Judgement]:
    def judged(evidence: ex.Evidence) -> ex.Judgement:
        rows = ex.known_rows(evidence.rows, (), "prefixes")
        excess, published = ex.prefix_estimate(rows, f"{name}_excess"), ex.paper_statement(name)
        if excess is None:
            return ex.NOT_MEASURED
        share = rows[0][f"{name}_pooled"]
        base = share - excess.value
        theirs = published - base  # the paper states no base rate, so this model's is used
        if theirs <= 0:
            verdict = ex.UNCLEAR
            where = f"cannot be compared, because the base rate of {percent(base)} exceeds the published share"
        else:
            verdict = ex.direction(excess, theirs)
            where = ex.DIRECTIONS[verdict]
        return ex.Judgement(
            f"{percent(share)}, base rate {percent(base)}",
            f"{ex.write_span(excess)} relative to the base rate",
            verdict,
            f"When a memory agrees, {what} in {percent(share)} of cases. The excess over all prefixes is "
            f"{ex.as_points(excess.value)}, and {ex.as_points(theirs)} in the paper ({percent(published, 0)} minus the "
            f"base rate of this text). The 95% interval {where}.",
            excess,
        )

    return judged


EXPERIMENT = ex.prefix_experiment(
    "composition",
    "Figure 8",
    "Layer outputs that match no single memory",
    ex.ResultTable(
        "composition",
        SCHEMA,
        compute,
        question="Does a layer’s output match a single memory?",
        lead="High values mean that a layer’s prediction is a mixture that no single memory produces.",
        how="The share of sampled prefixes for which the top token of the layer’s output y differs from the top token "
        "of every value in the layer; both are read in the same way. The table also has the share for active memories "
        "only. The bars of the paper are multiples of 1/4,096, although its text states 4,000 prefixes. Intervals are "
        "Wilson intervals.",
        draw=draw,
        published=published,
    ),
    claims=(
        ex.Claim(
            "composition",
            "In every layer, at least 68% of outputs match no single memory",
            "67% to 96% (68% in the text)",
            "Wilson intervals hold for all layers at once (Bonferroni). The claim appears if every interval reaches "
            "68% and lies above one half, and does not appear if any interval ends below 68%."
            + ex.rule_of_enough("prefixes"),
            outputs_are_compositions,
            curve="rate",
            write=percent,
        ),
        ex.Claim(
            "stop-words",
            "When a single memory agrees, the target is often a stop word",
            "60%",
            "Excess: the share of stop words among the targets of prefixes where a memory agrees, over all layers, "
            "minus the share among all prefixes, with a 95% interval over prefixes. The published excess is 60% "
            "minus the share among all prefixes of this text. The claim appears if the interval lies above 0, and in "
            "part if it also ends below a tenth of the published excess. It does not appear if the interval lies "
            "below 0, or if it contains 0 and ends below that tenth." + ex.rule_of_enough("prefixes"),
            _judge_excess("stop_words", "the target is a stop word"),
        ),
        ex.Claim(
            "short-prefixes",
            "When a single memory agrees, the prefix is often short",
            "43% shorter than 5 tokens",
            "The same rule as for stop words, with prefixes shorter than 5 tokens.",
            _judge_excess("short", "the prefix is shorter than 5 tokens"),
        ),
    ),
    picture=ex.Picture(
        (
            ex.Column("no memory", "rate", interval=("low", "high")),
            ex.Column("no active", "rate_active", interval=("low_active", "high_active")),
        ),
        {"rate": "no memory", "rate_active": "no active"},
    ),
)
