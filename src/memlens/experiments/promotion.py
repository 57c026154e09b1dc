"""Promotion (beyond the paper): whether a memory's value gives the tokens after its triggers high or low scores.

The standing of a token in a value is the share of other tokens with a lower score: 1 at the top and 0 at the bottom.
Each row describes one memory: the mean standing of the tokens after its top 50 triggers, and how many of them are in
the top and in the bottom tenth. The chance level is the mean standing of the tokens after the triggers of another
memory. A memory promotes the next token if the tokens after its triggers have a higher standing than the chance level,
and suppresses the next token if their standing is lower.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memlens.experiments import experiment as ex
from memlens.index.reader import Index
from memlens.progress import Progress, no_progress
from memlens.stats import draw as draw_sample, generator, mean_estimate

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

TRIGGERS = 50
_TENTH = 0.1
SCHEMA = ex.schema(
    "layer:int32 memory:int32 triggers:int64",  # number of triggers with a next token
    "standing shuffled",  # mean standing of the memory's next tokens; mean standing of another memory's
    "top:int64 bottom:int64",  # number of next tokens in the top tenth and in the bottom tenth
    # equal in all rows of a layer: mean standing over its memories, and mean of standing minus shuffled
    "layer_standing layer_standing_low layer_standing_high layer_beside layer_beside_low layer_beside_high",
)


def compute(
    index: Index, model: "MemoryModel", *, seed: int = 0, sample: int | None = 100, progress: Progress = no_progress
) -> list[ex.Row]:
    """Return one row for each of `sample` memories per layer, or for all memories that have a next token."""
    import torch

    from memlens.vocab.table import read_next_tokens
    from memlens.vocab.tokens import tokens_read

    rows: list[ex.Row] = []
    reading, kept = index.manifest.values.reading or None, tokens_read(index)
    for layer in ex.layers_of(index, "promotion", progress):
        next_tokens = read_next_tokens(index, layer)
        next_tokens = next_tokens if kept is None else next_tokens.among(kept, model.vocabulary)
        following = next_tokens.tokens[:, :TRIGGERS]
        candidates = np.flatnonzero((following >= 0).any(1))
        sampled = draw_sample(candidates, sample, generator(seed, "promotion", layer))
        others = np.roll(sampled, -1)
        values = model.layers[layer].values[torch.from_numpy(sampled).to(model.device)]
        of_layer: list[ex.Row] = []
        for place, (memory, other) in enumerate(zip(sampled.tolist(), others.tolist(), strict=True)):
            scores = model.lens.value_scores(values[place : place + 1], layer, reading)[0].cpu().numpy()
            scores = scores if kept is None else scores[kept]
            standings, shuffled = (_standings(scores, following[number]) for number in (memory, other))
            of_layer.append(
                {
                    "layer": layer,
                    "memory": memory,
                    "triggers": len(standings),
                    "standing": float(standings.mean()),
                    "shuffled": float(shuffled.mean()) if other != memory else None,
                    "top": int((standings >= 1 - _TENTH).sum()),
                    "bottom": int((standings <= _TENTH).sum()),
                }
            )
        means = _layer_means(of_layer, layer, seed)
        rows += [row | means for row in of_layer]
    return rows


def _layer_means(rows: Sequence[ex.Row], layer: int, seed: int) -> ex.Row:
    standing, random = np.array([row["standing"] for row in rows]), generator(seed, "promotion standing", layer)
    columns = ex.estimate_columns("layer_standing", mean_estimate(standing, random))
    beside, random = _beside(rows), generator(seed, "promotion beside", layer)
    return columns | ex.estimate_columns("layer_beside", mean_estimate(beside, random))


def _beside(rows: Sequence[ex.Row]) -> NDArray[np.float64]:
    """Return the standing minus the chance level of each memory that has a chance level. [n]"""
    return np.array([row["standing"] - row["shuffled"] for row in rows if row["shuffled"] is not None])


def _standings(scores: NDArray[Any], tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return, for each token [n], the share of other tokens with a lower score. Entries of -1 are left out."""
    ordered = np.sort(scores)
    lower = np.searchsorted(ordered, scores[tokens[tokens >= 0]], side="left")
    standings: NDArray[np.float64] = lower / max(len(scores) - 1, 1)
    return standings


def by_layer(rows: Sequence[ex.Row]) -> list[ex.Row]:
    """Return one row per layer with means over its memories and the share that promotes the next token."""
    by_layer_rows = []
    for layer in sorted({row["layer"] for row in rows}):
        layer_rows = [row for row in rows if row["layer"] == layer]
        beside = _beside(layer_rows)
        promote, suppress = int((beside > 0).sum()), int((beside < 0).sum())
        triggers = sum(row["triggers"] for row in layer_rows)
        by_layer_rows.append(
            {"layer": layer, "memories": len(layer_rows), "standing": layer_rows[0]["layer_standing"]}
            | {"low": layer_rows[0]["layer_standing_low"], "high": layer_rows[0]["layer_standing_high"]}
            | {"shuffled": layer_rows[0]["layer_standing"] - float(beside.mean()) if len(beside) else None}
            | {f"beside{edge}": layer_rows[0][f"layer_beside{edge}"] for edge in ("", "_low", "_high")}
            | ex.share_columns(promote, promote + suppress, ("promote", "promote_low", "promote_high"))
            | {end: sum(row[end] for row in layer_rows) / triggers for end in ("top", "bottom")}
        )
    return by_layer_rows


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot the mean standing by depth, with the chance level."""
    import altair as alt

    from memlens.experiments import charts

    layers = by_layer(rows)
    points = charts.with_depth(
        [{"whose": charts.YOURS, "value": row["standing"], **row} for row in layers], model.layers
    )
    chance = [
        {"baseline": "tokens of other memories", "layer": row["layer"], "value": row["shuffled"]}
        for row in layers
        if row["shuffled"] is not None
    ]
    baselines = charts.with_depth(chance, model.layers)
    scale = alt.Scale(zero=False)
    chart = charts.curves(
        points, "standing of the next token (1 = top)", ".2f", model.layers, scale=scale, baselines=baselines
    )
    text = "Mean standing of the next tokens in the value, by depth"
    return [charts.panel("promotion", chart, text, layers, "standing")]


def describe_direction(index: Index, rows: list[ex.Row]) -> tuple[str, str] | None:
    """Return a label, and a sentence on which layers' values promote and which suppress the next token."""
    layers = [row for row in by_layer(rows) if row["beside"] is not None]
    if not layers:
        return None
    estimates = {
        row["layer"]: estimate.widened(len(layers))
        for row in layers
        if (estimate := ex.prefix_estimate([row], "beside"))
    }
    promoting = [layer for layer, estimate in estimates.items() if estimate.low > 0]
    suppressing = [layer for layer, estimate in estimates.items() if estimate.high < 0]
    where = f" (layers {', '.join(map(str, suppressing))})" if suppressing else ""
    return (
        "direction",
        f"Values promote the next token in {len(promoting)} of {len(estimates)} layers and suppress it in "
        f"{len(suppressing)}{where}, with intervals that hold for all layers at once.",
    )


EXPERIMENT = ex.Experiment(
    "promotion",
    "beyond the paper",
    "Values that promote or suppress the next token of their triggers",
    (
        ex.ResultTable(
            "promotion",
            SCHEMA,
            compute,
            question="Do values promote or suppress the next token?",
            lead="Above the thin line, values promote the tokens that follow their triggers; below it, they suppress "
            "them.",
            how="The standing of the tokens that follow a memory’s triggers among all tokens, by the scores of its "
            "value: 1 is the top, and 0 is the bottom. It is computed for random memories of each layer. The thin line "
            "is the standing of the tokens that follow another memory’s triggers, which reflects only how frequent "
            "tokens are. Intervals are over memories.",
            draw=draw,
            note=describe_direction,
        ),
    ),
    sample=100,
    needs=("values",),
    uses_model=True,
    picture=ex.Picture(
        (
            ex.Column("standing", "standing", ex.short),
            ex.Column("shuffled", "shuffled", ex.short),
            ex.Column("promote", "promote", interval=("promote_low", "promote_high")),
            ex.Column("top 10%", "top"),
            ex.Column("bottom 10%", "bottom"),
        ),
        {"standing": "standing"},
        by_layer,
    ),
)
