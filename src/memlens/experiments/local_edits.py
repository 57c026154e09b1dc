"""Local edits (Figure 3): how a coefficient changes if the first, the last or a random token is removed.

1. For each sampled memory and each of its top 50 triggers, run the prefix without one token. m' is the coefficient at
   the new last position.
2. The change is (m' - m) / m, averaged over the prefixes of a memory, then over memories. m is read from the index, so
   unedited prefixes are not run again.
3. `beside_last` is the change minus the change for the edit "last". It is computed for each memory, because all edits
   use the same memories.

BOS is never removed. A prefix of one token cannot be edited, so it is skipped and counted in `left_out`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memlens.experiments import experiment as ex
from memlens.experiments.edited_prefixes import EditedPrefixes
from memlens.index.reader import Index
from memlens.pool import Pool, SerialPool
from memlens.progress import Progress, no_progress
from memlens.stats import Estimate, draw as draw_sample, generator, mean_estimate
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

TRIGGERS = 50
# Estimated number of tokens to run per trigger for all edits: 28 were measured with 8 memories per layer, and 14 with
# 100 memories, which share more prefixes. The estimate is higher, because small batches run more slowly.
EDITED_TOKENS = 30
EDITS = ("first", "last", "random")

SCHEMA = ex.schema(
    "layer:int32 edit:string change low high",  # change: mean over memories, with its interval
    "median",  # median over memories; a coefficient near zero can dominate the mean
    "memories:int64 prefixes:int64 left_out:int64",  # left_out: number of prefixes of one token
    "beside_last beside_last_low beside_last_high",  # change minus the change for the edit "last"
)


@dataclass(frozen=True, eq=False)
class _EditableTriggers:
    """The triggers of one layer's sampled memories that have more than one token."""

    memory: NDArray[np.int64]  # [n]: number of the memory
    coefficient: NDArray[np.float64]  # [n]: coefficient of the unedited prefix
    prefixes: NDArray[np.int64]  # [n, edits]: ids of the edited prefixes
    left_out: int


def compute(
    index: Index,
    model: MemoryModel,
    *,
    seed: int = 0,
    sample: int | None = 100,
    progress: Progress = no_progress,
    pool: Pool | None = None,
) -> list[ex.Row]:
    """Return one row per layer and edit, computed from `sample` memories of the layer or from all with triggers."""
    import torch

    edited, batch_tokens = EditedPrefixes(), index.manifest.settings.batch_tokens
    triggers = {layer: _edit_triggers(index, layer, seed, sample, edited) for layer in index.layers}
    edited_coefficients = edited.coefficients(
        SerialPool(model) if pool is None else pool,
        {layer: (np.repeat(own.memory, len(EDITS)), own.prefixes.reshape(-1)) for layer, own in triggers.items()},
        threads=torch.get_num_threads(),
        bos=index.manifest.model.bos,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    rows = []
    for layer, own in triggers.items():
        changes = edited_coefficients[layer].reshape(-1, len(EDITS)) / own.coefficient[:, None] - 1
        means = _average_by_memory(own, changes)
        random, paired = (generator(seed, f"local-edits {name}", layer) for name in ("intervals", "paired"))
        counts = {"memories": len(means), "prefixes": len(own.memory), "left_out": own.left_out}
        for edit, change in zip(EDITS, means.T, strict=True):
            median = float(np.median(change)) if len(change) else None
            row = {"layer": layer, "edit": edit, "median": median} | counts
            row |= dict(zip(("change", "low", "high"), mean_estimate(change, random) or (None,) * 3, strict=True))
            beside = mean_estimate(change - means[:, EDITS.index("last")], paired)
            rows.append(row | ex.estimate_columns("beside_last", beside))
    return rows


def _edit_triggers(
    index: Index, layer: int, seed: int, sample: int | None, edited: EditedPrefixes
) -> _EditableTriggers:
    """Draw memories of a layer and add the edits of their triggers to `edited`."""
    random = generator(seed, "local-edits", layer)
    triggers = index.table(
        "triggers",
        columns=["memory", "coefficient", "sentence", "position"],
        filters=[("layer", "=", layer), ("end", "=", "top"), ("rank", "<", TRIGGERS)],
    )
    columns = [triggers.column(name).to_numpy() for name in triggers.column_names]
    is_sampled = np.isin(columns[0], draw_sample(np.unique(columns[0]), sample, random))
    memory, coefficient, sentence, position = (column[is_sampled] for column in columns)
    editable = position > 0
    query = "SELECT sentence, tokens FROM {corpus} WHERE sentence IN (SELECT unnest($1::BIGINT[]))"
    rows = index.sql(query, [np.unique(sentence[editable]).tolist()])
    sentences = {row["sentence"]: np.array(row["tokens"], np.int64) for row in rows}
    removed = random_positions(position[editable] + 1, random)
    prefixes = [
        [edited.add(np.delete(sentences[number][: last + 1], place)) for place in (0, last, where)]
        for number, last, where in zip(sentence[editable].tolist(), position[editable].tolist(), removed, strict=True)
    ]
    return _EditableTriggers(
        memory[editable].astype(np.int64),
        coefficient[editable].astype(np.float64),
        np.array(prefixes, np.int64).reshape(-1, len(EDITS)),
        int((~editable).sum()),
    )


def random_positions(lengths: NDArray[Any], random: np.random.Generator) -> list[int]:
    """Return the position of a random token to remove from each prefix."""
    places: list[int] = random.integers(0, lengths).tolist()
    return places


def _average_by_memory(triggers: _EditableTriggers, changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean change over the prefixes of each memory, [memories, edits]."""
    _, owner, counts = np.unique(triggers.memory, return_inverse=True, return_counts=True)
    sums = [np.bincount(owner, changes[:, number], len(counts)) for number in range(len(EDITS))]
    means: NDArray[np.float64] = np.stack(sums, 1) / counts[:, None]
    return means


def published() -> list[ex.Row]:
    return [
        {"layer": layer, "edit": edit, "change": change / 100}
        for edit in EDITS
        for layer, change in enumerate(ex.paper_figures()["fig3_pct"][edit])
    ]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments import charts

    both = charts.beside_paper(rows, published(), model, "change", ("low", "high", "edit"))
    order = ("first", "random", "last")
    chart = charts.grouped_curves(both, "edit", order, "mean change of the coefficient", ".0%", model.layers)
    last = [row for row in rows if row["edit"] == "last"]
    text = "Change of the coefficient without the first, a random or the last token, by depth; without the last"
    return [charts.panel("local-edits", chart, text, last, "change", "%")]


def by_layer(rows: Sequence[ex.Row]) -> list[ex.Row]:
    """Return one row per layer with one column per edit."""
    layers: dict[int, ex.Row] = {}
    for row in rows:
        edit, layer = row["edit"], layers.setdefault(row["layer"], {"layer": row["layer"]})
        layer |= {edit: row["change"], f"{edit}_low": row.get("low"), f"{edit}_high": row.get("high")}
        layer |= {column: row[column] for column in ("memories", "prefixes", "left_out") if column in row}
    return list(layers.values())


def last_token_matters_most(evidence: ex.Evidence) -> ex.Judgement:
    leads, theirs = (_leads(source.rows) for source in (evidence, evidence.theirs))
    if not leads:
        return ex.NOT_MEASURED
    mean, published = (ex.mean_of(list(by_layer.values())) for by_layer in (leads, theirs))
    certain = sum(lead.widened(len(leads)).low > 0 for lead in leads.values())
    opposite = [layer for layer, lead in leads.items() if lead.widened(len(leads)).high < 0]
    verdict = ex.direction(mean, published.value)
    verdict = ex.PARTLY if verdict == ex.APPEARS and opposite else verdict
    layers = f"this is certain in {certain} of {len(leads)} layers, with intervals that hold for all layers at once"
    layers += f", and the opposite is certain in layer {', '.join(map(str, opposite))}" if opposite else ""
    first = f"; layer 0: {ex.as_points(leads[0].value)}" if 0 in leads else ""
    return ex.Judgement(
        f"{ex.as_points(mean.value)} more than the next edit",
        ex.write_span(mean),
        verdict,
        "On average over layers, removing the last token lowers the coefficient by "
        f"{ex.as_points(mean.value)} more than removing the first or a random token ({ex.as_points(published.value)} "
        f"published); {layers}{first}.",
        mean,
    )


def _leads(rows: list[ex.Row]) -> dict[int, Estimate]:
    """Return, by layer, how much more the last token matters than the first and a random token (the smaller lead)."""
    layers: dict[int, dict[str, ex.Row]] = {}
    for row in ex.known_rows(rows, ("change",), "memories"):
        layers.setdefault(row["layer"], {})[row["edit"]] = row
    leads = {}
    for layer, edits in layers.items():
        estimates = [estimate for edit in ("first", "random") if (estimate := _beside(edits, edit))]
        if len(estimates) == 2:
            leads[layer] = min(estimates, key=lambda estimate: estimate.value)
    return leads


def _beside(edits: dict[str, ex.Row], edit: str) -> Estimate | None:
    """Return how much more removing the last token lowers coefficients than `edit`.

    The paper reports only means, so its difference has no interval.
    """
    if not edits.keys() >= {edit, "last"}:
        return None
    lead = edits[edit]["change"] - edits["last"]["change"]
    return ex.prefix_estimate([edits[edit]], "beside_last", lambda: Estimate(lead, lead, lead))


def last_token_matters_less_with_depth(evidence: ex.Evidence) -> ex.Judgement:
    measured = ex.known_rows(evidence.rows, ("change",), "memories")
    both = [
        replace(source, rows=[row for row in rows if row["edit"] == "last"])
        for source, rows in ((evidence, measured), (evidence.theirs, evidence.published))
    ]
    yours, theirs = (source.trend("change") for source in both)
    return ex.judge_trend(yours, theirs, 1, percent(both[0].first("change"), 0))


EXPERIMENT = ex.Experiment(
    "local-edits",
    "Figure 3",
    "How a coefficient changes when one token of the prefix is removed",
    (
        ex.ResultTable(
            "local-edits",
            SCHEMA,
            compute,
            question="Which part of a trigger matters?",
            lead="Each trigger prefix is run again without one token. The further below zero, the more that token "
            "mattered.",
            how="For a random choice of memories in each layer, the first, the last or a random token of each top "
            "trigger prefix is removed and the model is run again. The change is (m′ − m) / m, with m′ the "
            "coefficient at the new last position. It is averaged over a memory’s prefixes, then over memories. BOS "
            "is never removed, and a prefix of one token is left out. Intervals are over memories: t-intervals for "
            "fewer than 30 memories, bootstrap intervals otherwise. beside_last is the change minus the change for "
            "the last token, over the same memories.",
            draw=draw,
            published=published,
        ),
    ),
    sample=100,
    uses_model=True,
    maps=True,
    tokens_run=TRIGGERS * EDITED_TOKENS,
    claims=(
        ex.Claim(
            "last-token",
            "Removing the last token of a trigger hurts most",
            "largest drop in all 16 layers, by 47 points more than the next",
            "Change without the first or a random token (whichever is closer) minus the change without the last token, "
            "over the same memories. The claim appears if the 95% interval of the mean over layers lies above 0 and no "
            "layer shows the opposite, with intervals that hold for all layers at once. It appears in part if a layer "
            "shows the opposite, and does not appear if the mean lies below 0." + ex.rule_of_enough("memories"),
            last_token_matters_most,
            curve="last",
        ),
        ex.Claim(
            "last-token-depth",
            "The last token matters less with depth",
            "−72% in layer 0, −45 to −50% in layers 13–15",
            "Mean change without the last token, by layer. " + ex.RULE_OF_TRENDS + ex.rule_of_enough("memories"),
            last_token_matters_less_with_depth,
            write=ex.as_points_per_layer,
            curve="last",
        ),
    ),
    picture=ex.Picture(
        tuple(ex.Column(edit, edit, ex.signed, (f"{edit}_low", f"{edit}_high")) for edit in EDITS),
        {edit: edit for edit in EDITS},
        by_layer,
    ),
)
