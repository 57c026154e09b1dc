"""Composition (Figure 8): how often a layer's prediction is none of its memories' predictions.

A prefix has zero agreement where top(y) differs from the top token of every value of the layer (`zero`), or of every
value whose memory is active, m > 0 (`zero_active`). y is read as the values table reads values. Among the other
prefixes: the share whose target is a stop word and the share of prefixes shorter than 5 tokens, with the same shares
among all prefixes to compare with. Prefixes at the end of a sentence have no target and are left out of the first.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memlens.experiments import experiment as ex
from memlens.stats import generator, rate_interval, wilson
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import Aggregate

SHORT = 5  # tokens
SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 zero:int64 rate low high",
    "zero_active:int64 rate_active low_active high_active",
    "stop_words short",  # shares among the prefixes that are not zero; null without any
    "stop_words_all short_all",  # the same among all prefixes
    "without_target:int64",  # of all prefixes
)


def compute(seen: "Aggregate", seed: int) -> list[ex.Row]:
    """Counts and rates with intervals, layer by layer."""
    stops = seen.prefixes.column("stop_word").to_pylist()
    known = np.array([stop is not None for stop in stops])
    is_stop = np.array([bool(stop) for stop in stops])
    is_short = seen.prefixes.column("position").to_numpy() + 1 < SHORT
    everything = np.ones(len(stops), bool)
    rows = []
    for layer, columns in seen.by_layer():
        some = np.asarray(columns["promoted"])
        prefixes, zero = len(some), int((~some).sum())
        zero_active = int((~np.asarray(columns["promoted_active"])).sum())
        random = generator(seed, "composition", layer)
        low, high = rate_interval(zero, prefixes, random)
        low_active, high_active = rate_interval(zero_active, prefixes, random)
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
    return rows


def _share(hits: NDArray[np.bool_], among: NDArray[np.bool_]) -> float | None:
    count = int(among.sum())
    return int((hits & among).sum()) / count if count else None


def published() -> list[ex.Row]:
    # The plotted bars are whole numbers over 4,096, though the text speaks of 4,000 prefixes.
    return [
        {"layer": layer, "prefixes": 4096, "zero": zero, "rate": zero / 4096}
        for layer, zero in enumerate(ex.paper_figures()["fig8_implied_counts"])
    ]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments.charts import share_panel

    title = "outputs that match no single memory"
    text = "Share of outputs that match no memory's value, by depth"
    return [share_panel("composition", rows, published(), "zero", title, text, model)]


def outputs_are_compositions(evidence: ex.Evidence) -> ex.Judgement:
    rows = [row for row in evidence.rows if row["prefixes"]]
    if not rows:
        return ex.NOT_MEASURED
    intervals = [wilson(row["zero"], row["prefixes"]) for row in rows]
    shares = [row["zero"] / row["prefixes"] for row in rows]
    least = shares.index(min(shares))
    if any(high < 0.68 for _, high in intervals):
        verdict = ex.ABSENT
    else:
        verdict = ex.APPEARS if all(low > 0.5 for low, _ in intervals) else ex.UNCLEAR
    yours = f"least {percent(shares[least])}, in layer {rows[least]['layer']}"
    return ex.Judgement(yours, ex.as_span(*intervals[least]), verdict)


EXPERIMENT = ex.prefix_experiment(
    "composition",
    "Figure 8",
    "Layers that predict what none of their memories predicts",
    ex.ResultTable(
        "composition",
        SCHEMA,
        compute,
        question="Is a layer’s output the word of any one memory?",
        lead="The higher, the more often a layer’s prediction is a mixture that no single memory of it would make.",
        how="The share of sampled prefixes for which the top token of the layer’s output y differs from the top token "
        "of the value of every memory in the layer; both are read alike. The table also counts against the active "
        "memories alone. The paper’s bars are whole numbers over 4,096 although its text says 4,000 prefixes. "
        "Intervals: bootstrap over prefixes, and Wilson’s where the share is 0 or 1.",
        draw=draw,
        published=published,
        contract=("layer", "prefixes", "zero", "rate", "zero_active"),
    ),
    claims=(
        ex.Claim(
            "composition",
            "In every layer at least 68% of outputs match no single memory",
            "67% to 96% (68% in the text)",
            "Appears if the 95% interval of every layer reaches 68% and stays above one half; does not if that of any "
            "layer ends below 68%.",
            outputs_are_compositions,
        ),
    ),
    picture=ex.Picture(
        (
            ex.Column("no memory", "rate", interval=("low", "high")),
            ex.Column("no active one", "rate_active", interval=("low_active", "high_active")),
        ),
        {"rate": "no memory", "rate_active": "active only"},
    ),
)
