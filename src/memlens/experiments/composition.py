"""Composition (Figure 8): how often a layer's top token is the top token of none of its memories.

A prefix counts as zero if top(y) differs from the top token of every value of the layer (`zero`), or of every value
whose memory is active, m > 0 (`zero_active`). y is read in the same way as values. For the other prefixes, the table
has the share whose target is a stop word and the share shorter than 5 tokens, and the same shares of all prefixes.
Prefixes at the end of a sentence have no target and are excluded from the first of these shares.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memlens.experiments import experiment as ex
from memlens.stats import Estimate, critical, generator, mean_estimate, share_interval, wilson
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

SHORT = 5  # prefixes with fewer tokens are short
SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 zero:int64 rate low high",
    "zero_active:int64 rate_active low_active high_active",
    "stop_words short",  # shares of stop words and short prefixes among prefixes that are not zero; null if none
    "stop_words_all short_all",  # shares of stop words and short prefixes among all prefixes
    "without_target:int64",  # number of prefixes without a target
    # over all layers, equal in all rows: share among agreeing prefixes minus the share among all prefixes
    "stop_words_pooled stop_words_excess stop_words_excess_low stop_words_excess_high",
    "short_pooled short_excess short_excess_low short_excess_high",
)


def compute(seen: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return counts and rates with intervals, by layer."""
    stops = seen.prefixes.column("stop_word").to_pylist()
    known = np.array([stop is not None for stop in stops])
    is_stop = np.array([bool(stop) for stop in stops])
    is_short = seen.prefixes.column("position").to_numpy() + 1 < SHORT
    everything = np.ones(len(stops), bool)
    agreeing = np.zeros(len(stops))  # number of layers in which a memory agrees, by prefix
    rows: list[ex.Row] = []
    for layer, columns in seen.by_layer():
        some = np.asarray(columns["promoted"])
        prefixes, zero = len(some), int((~some).sum())
        zero_active = int((~np.asarray(columns["promoted_active"])).sum())
        low, high = share_interval(zero, prefixes)
        low_active, high_active = share_interval(zero_active, prefixes)
        agreeing += some
        row: ex.Row = {
            "layer": layer,
            "prefixes": prefixes,
            "zero": zero,
            "rate": zero / prefixes,
            "low": low,
            "high": high,
            "zero_active": zero_active,
            "rate_active": zero_active / prefixes,
            "low_active": low_active,
            "high_active": high_active,
            "stop_words": _share(is_stop, some & known),
            "short": _share(is_short, some),
            "stop_words_all": _share(is_stop, known),
            "short_all": _share(is_short, everything),
            "without_target": int((~known).sum()),
        }
        rows.append(row)
    every = _excess("stop_words", is_stop[known], agreeing[known], seed) | _excess("short", is_short, agreeing, seed)
    return [row | every for row in rows]


def _excess(name: str, holds: NDArray[np.bool_], times: NDArray[np.float64], seed: int) -> ex.Row:
    """Return the share of prefixes [n] where a memory agrees, over all layers, and its excess over all prefixes."""
    whole = float(times.sum())
    if not whole:
        return {f"{name}_pooled": None} | ex.estimate_columns(f"{name}_excess", None)
    share, base = float((holds * times).sum()) / whole, float(holds.mean())
    # contribution of each prefix, so that the difference is a mean over prefixes
    moves = share - base + (holds - share) * times * (len(times) / whole) - (holds - base)
    excess = mean_estimate(moves, generator(seed, f"composition {name}"))
    return {f"{name}_pooled": share} | ex.estimate_columns(f"{name}_excess", excess)


def _share(hits: NDArray[np.bool_], among: NDArray[np.bool_]) -> float | None:
    count = int(among.sum())
    return int((hits & among).sum()) / count if count else None


def published() -> list[ex.Row]:
    # The plotted bars are multiples of 1/4,096, although the text states 4,000 prefixes.
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
    reach = [layer for layer, share in shares.items() if share.low > 0.5]
    least = min(shares, key=lambda layer: shares[layer].value)
    verdict = ex.ABSENT if below else ex.APPEARS if len(reach) == len(shares) else ex.UNCLEAR
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
        theirs = published - base  # the paper states no base rate
        if theirs <= 0:
            verdict, where = ex.UNCLEAR, f"cannot be compared, for the base rate {percent(base)} exceeds the published"
        else:
            verdict = ex.direction(excess, theirs)
            where = ex.DIRECTIONS[verdict]
        return ex.Judgement(
            f"{percent(share)}, base rate {percent(base)}",
            f"{ex.as_points(excess.low)} to {ex.as_points(excess.high)} relative to the base rate",
            verdict,
            f"When a memory agrees, {what} in {percent(share)} of cases, {ex.as_points(excess.value)} compared with "
            f"all prefixes, and {ex.as_points(theirs)} in the paper (published: {percent(published, 0)}, less the base "
            f"rate here); the 95% interval {where}.",
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
        lead="High values mean that a layer’s prediction is a mixture that no single memory makes.",
        how="The share of sampled prefixes for which the top token of the layer’s output y differs from the top token "
        "of every value in the layer; both are read in the same way. The table also has the share for active memories "
        "only. The paper’s bars are integers over 4,096, although its text states 4,000 prefixes. Wilson intervals.",
        draw=draw,
        published=published,
        contract=("layer", "prefixes", "zero", "rate", "zero_active"),
    ),
    claims=(
        ex.Claim(
            "composition",
            "In every layer, at least 68% of outputs match no single memory",
            "67% to 96% (68% in the text)",
            "Wilson intervals that hold for all layers at once (Bonferroni). Appears if every interval reaches 68% and "
            "lies above one half, does not appear if any interval ends below 68%." + ex.rule_of_enough("prefixes"),
            outputs_are_compositions,
            write=percent,
        ),
        ex.Claim(
            "stop-words",
            "When a single memory agrees, the target is often a stop word",
            "60%",
            "Share of stop words among the targets of prefixes where a memory agrees, over all layers, minus that of "
            "all prefixes; the interval resamples prefixes. Appears if it lies above 0, in part if it ends below a "
            "tenth of the published excess (60% minus the base rate here), does not appear if it lies below 0 or ends "
            "below that tenth." + ex.rule_of_enough("prefixes"),
            _judge_excess("stop_words", "the target is a stop word"),
        ),
        ex.Claim(
            "short-prefixes",
            "When a single memory agrees, the prefix is often short",
            "43% shorter than 5 tokens",
            "As for stop words, with prefixes shorter than 5 tokens.",
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
