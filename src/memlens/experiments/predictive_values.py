"""Predictive values (Figure 6 and Table 2): are confident values right about what follows their triggers?

Table 2: the values with the highest max p, and for each its Precision@50: the share of its top 50 triggers (fewer if
the scan kept fewer) whose next token is the value's top token; triggers that end their sentence take no part. A value
agrees if that holds for at least one. Memories without any such trigger are not candidates. `chance` is how likely it
would agree if its triggers were followed by tokens drawn at random from those that follow all triggers of its layer:
1 - (1 - f)^n for n triggers and a share f of the value's top token among these tokens.
Figure 6: agreement with the top-1 trigger by max p, in bins that are equally wide: on a log scale, since max p spans
orders of magnitude in most models, or linear as in the paper where the index was made with one of its presets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.experiments.charts import HEIGHT, WIDTH
from memlens.experiments.targets import read_targets
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress
from memlens.stats import generator, rate_interval
from memlens.vocab.table import default_reading, read_next_tokens

TRIGGERS, BINS = 50, 8

SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memory", pa.int32()),
        ("max_p", pa.float32()),
        ("token", pa.int32()),  # the value's top token
        ("precision", pa.float64()),
        ("agrees", pa.bool_()),
        ("triggers", pa.int64()),  # that take part
        ("no_next", pa.int64()),  # left out: triggers that end their sentence
        ("chance", pa.float64()),  # to agree, with tokens drawn at random from those after the layer's triggers
    ]
)
BINS_SCHEMA = pa.schema(
    [
        ("bin", pa.int32()),
        ("from_p", pa.float64()),
        ("to_p", pa.float64()),
        ("memories", pa.int64()),
        ("agree", pa.int64()),
        ("rate", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
    ]
)


def compute(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = 100, progress: Progress = no_progress
) -> pa.Table:
    """The `sample` most confident values (all for None), most confident first, then by layer and memory."""
    parts = []
    for done, layer in enumerate(index.layers):
        progress("predictive-values", done, len(index.layers))
        parts.append(_precisions(index, layer))
    progress("predictive-values", len(index.layers), len(index.layers))
    table = pa.concat_tables(parts)
    order = np.argsort(-table.column("max_p").to_numpy(), kind="stable")  # layers and memories come in order
    return table.take(order if sample is None else order[:sample])


def _precisions(index: Index, layer: int) -> pa.Table:
    """Every candidate of a layer."""

    values = index.table("values", ["max_p", "argmax"], [("layer", "=", layer)])
    max_p, argmax = values.column("max_p").to_numpy(), values.column("argmax").to_numpy()  # by memory
    following = read_next_tokens(index, layer)
    next_tokens = following.tokens[:, :TRIGGERS]
    taking_part = (next_tokens >= 0).sum(1)
    matches = (next_tokens == argmax[:, None]).sum(1)
    chosen = np.flatnonzero(taking_part)
    listed = np.minimum(following.filled, TRIGGERS)
    return pa.table(
        {
            "layer": np.full(len(chosen), layer),
            "memory": chosen,
            "max_p": max_p[chosen],
            "token": argmax[chosen],
            "precision": matches[chosen] / taking_part[chosen],
            "agrees": matches[chosen] > 0,
            "triggers": taking_part[chosen],
            "no_next": (listed - taking_part)[chosen],
            "chance": _chance(next_tokens, argmax, taking_part)[chosen],
        },
        SCHEMA,
    )


def _chance(next_tokens: NDArray[Any], argmax: NDArray[Any], taking_part: NDArray[np.int64]) -> NDArray[np.float64]:
    """[memories]; next tokens [memories, triggers], -1 for none."""
    pool = next_tokens[next_tokens >= 0].astype(np.int64)
    times = np.bincount(pool, minlength=int(argmax.max(initial=-1)) + 1)
    shares = times[argmax] / max(len(pool), 1)
    found: NDArray[np.float64] = 1 - (1 - shares) ** taking_part
    return found


def compute_bins(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> pa.Table:
    """All memories with a target by max p; `sample` is not used."""
    targets = [read_targets(index, layer) for layer in index.layers]
    max_p = np.concatenate([layer.max_p for layer in targets]).astype(np.float64)
    agrees = np.concatenate([layer.agrees for layer in targets])
    if not len(max_p):
        return BINS_SCHEMA.empty_table()
    edges = bin_edges(max_p, logarithmic=default_reading(index) != "raw")
    numbers = np.clip(np.searchsorted(edges, max_p, side="right") - 1, 0, BINS - 1)
    return pa.Table.from_pylist(
        [_bin(number, edges, agrees[numbers == number], seed) for number in range(BINS)], BINS_SCHEMA
    )


def bin_edges(max_p: NDArray[np.float64], logarithmic: bool) -> NDArray[np.float64]:
    """BINS + 1 edges from the lowest to the highest; a bin holds its lower edge, the last one also its upper."""
    space = np.geomspace if logarithmic else np.linspace
    return np.asarray(space(max_p.min(), max_p.max(), BINS + 1), np.float64)


def _bin(number: int, edges: NDArray[np.float64], agrees: NDArray[np.bool_], seed: int) -> dict[str, Any]:
    count, agree = len(agrees), int(agrees.sum())
    low, high = rate_interval(agree, count, generator(seed, "predictive-values", number))
    return {
        "bin": number,
        "from_p": edges[number],
        "to_p": edges[number + 1],
        "memories": count,
        "agree": agree,
        "rate": agree / count if count else None,
        "low": low,
        "high": high,
    }


def chart(table: pa.Table) -> Any:
    """Where the most confident values sit, and how many of them agree."""
    import altair as alt

    bars = (
        alt.Chart(table)
        .mark_bar()
        .encode(
            x=alt.X("layer:O", title="layer"),
            y=alt.Y("count():Q", title="most confident values"),
            color=alt.Color("agrees:N", title="agrees with a trigger"),
        )
    )
    return bars.properties(width=WIDTH, height=HEIGHT)


def chart_bins(table: pa.Table) -> Any:
    """Agreement by confidence."""
    import altair as alt

    base = alt.Chart(table).transform_calculate(
        range="format(datum.from_p, '.2g') + ' to ' + format(datum.to_p, '.2g')"
    )
    x = alt.X("range:O", title="max p of the value", sort=alt.SortField("bin"))
    bars = base.mark_bar(opacity=0.7).encode(
        x=x,
        y=alt.Y("rate:Q", title="memories that agree", axis=alt.Axis(format="%")),
        tooltip=["memories:Q", "agree:Q"],
    )
    whiskers = base.mark_rule().encode(x=x, y="low:Q", y2="high:Q")
    return alt.layer(bars, whiskers).properties(width=WIDTH, height=HEIGHT)
