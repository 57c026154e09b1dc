"""Local edits (Figure 3): the change of a coefficient when the first, the last or a random token is removed.

1. For each sampled memory and each of its top 50 triggers, run the prefix without one token. m' is the coefficient at
   the new last position.
2. The change is (m' - m) / m, averaged over the prefixes of a memory, then over memories. m is the coefficient in the
   index, so whole prefixes are not run again.
3. `beside_last` is the change minus the change of the edit "last", computed memory by memory, because all edits use the
   same memories.

BOS is never removed. A prefix of one token cannot be edited. It is skipped and counted in `left_out`.
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
# Tokens run per trigger, for all edits together. Measured: 28 with 8 memories per layer, and 14 with 100, because they
# share more prefixes. Batches are smaller than those of a scan and therefore slower.
EDITED_TOKENS = 30
EDITS = ("first", "last", "random")

SCHEMA = ex.schema(
    "layer:int32 edit:string change low high",  # change: mean over memories, with its interval
    "median",  # median over memories, because a coefficient near zero can dominate the mean
    "memories:int64 prefixes:int64 left_out:int64",  # left_out: number of prefixes of one token
    "beside_last beside_last_low beside_last_high",  # change minus that of the edit "last", over the same memories
)


@dataclass(frozen=True, eq=False)
class _EditableTriggers:
    """The editable triggers of one layer's sampled memories."""

    memory: NDArray[np.int64]  # [n]: number of the memory
    coefficient: NDArray[np.float64]  # [n]: coefficient of the whole prefix
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
    """Return three rows per layer, for `sample` memories per layer (None: all memories with triggers)."""
    import torch

    edited, batch_tokens = EditedPrefixes(), index.manifest.settings.batch_tokens
    wanted = {layer: _edit_triggers(index, layer, seed, sample, edited) for layer in index.layers}
    edited_coefficients = edited.coefficients(
        SerialPool(model) if pool is None else pool,
        {layer: (np.repeat(want.memory, len(EDITS)), want.prefixes.reshape(-1)) for layer, want in wanted.items()},
        threads=torch.get_num_threads(),
        bos=index.manifest.model.bos,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    rows = []
    for layer, want in wanted.items():
        changes = edited_coefficients[layer].reshape(-1, len(EDITS)) / want.coefficient[:, None] - 1
        means = _by_memory(want, changes)
        random, paired = (generator(seed, f"local-edits {name}", layer) for name in ("intervals", "paired"))
        counts = {"memories": len(means), "prefixes": len(want.memory), "left_out": want.left_out}
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
    sentences = _tokens_of(index, np.unique(sentence[editable]))
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
    """Return the position of the token to remove, for each prefix."""
    places: list[int] = random.integers(0, lengths).tolist()
    return places


def _tokens_of(index: Index, sentences: NDArray[Any]) -> dict[int, NDArray[np.int64]]:
    rows = index.sql(
        "SELECT sentence, tokens FROM {corpus} WHERE sentence IN (SELECT unnest($1::BIGINT[]))", [sentences.tolist()]
    )
    return {row["sentence"]: np.array(row["tokens"], np.int64) for row in rows}


def _by_memory(want: _EditableTriggers, changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means over the prefixes of each memory, [memories, edits]."""
    _, owner, counts = np.unique(want.memory, return_inverse=True, return_counts=True)
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
    """Return one row per layer with its edits as columns."""
    layers: dict[int, ex.Row] = {}
    for row in rows:
        edit, layer = row["edit"], layers.setdefault(row["layer"], {"layer": row["layer"]})
        layer |= {edit: row["change"], f"{edit}_low": row.get("low"), f"{edit}_high": row.get("high")}
        layer |= {column: row[column] for column in ("memories", "prefixes", "left_out") if column in row}
    return list(layers.values())


def last_token_matters_most(evidence: ex.Evidence) -> ex.Judgement:
    nearest, theirs = (_leads(one.rows) for one in (evidence, evidence.theirs))
    if not nearest:
        return ex.NOT_MEASURED
    mean, published = (ex.mean_of(list(one.values())) for one in (nearest, theirs))
    certain = sum(one.widened(len(nearest)).low > 0 for one in nearest.values())
    against = [layer for layer, one in nearest.items() if one.widened(len(nearest)).high < 0]
    verdict = ex.direction(mean, published.value)
    verdict = ex.PARTLY if verdict == ex.APPEARS and against else verdict
    words = f"in {certain} of {len(nearest)} layers it does beyond doubt, counted for all layers at once"
    words += f", and not in layer {', '.join(map(str, against))}" if against else ""
    first = f"; layer 0: {ex.as_points(nearest[0].value)}" if 0 in nearest else ""
    return ex.Judgement(
        f"{ex.as_points(mean.value)} more than the next edit",
        f"{ex.as_points(mean.low)} to {ex.as_points(mean.high)}",
        verdict,
        f"On average over layers the last token costs {ex.as_points(mean.value)} more than the first or a random one "
        f"({ex.as_points(published.value)} published); {words}{first}.",
        mean,
    )


def _leads(rows: list[ex.Row]) -> dict[int, Estimate]:
    """Return, by layer, how much more the last token matters than the first or a random one (the minimum)."""
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
    """Return the drop for the edit "last" minus the drop for another edit. The paper reports only the means."""
    if not edits.keys() >= {edit, "last"}:
        return None
    lead = edits[edit]["change"] - edits["last"]["change"]
    return ex.prefix_estimate([edits[edit]], "beside_last", lambda: Estimate(lead, lead, lead))


def last_token_matters_less_with_depth(evidence: ex.Evidence) -> ex.Judgement:
    known = ex.known_rows(evidence.rows, ("change",), "memories")
    both = [
        replace(one, rows=[row for row in rows if row["edit"] == "last"])
        for one, rows in ((evidence, known), (evidence.theirs, evidence.published))
    ]
    yours, theirs = (one.trend("change") for one in both)
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
            "trigger prefix is removed and the model is run again. The change is (m′ − m) / m, with m′ the coefficient "
            "at the new last position; it is averaged over a memory’s prefixes, then over memories. BOS is never "
            "removed, and a prefix of one token is left out. Intervals: over memories (Student’s for few, a bootstrap "
            "else); beside_last is the change less that of the last token, of the same memories.",
            draw=draw,
            published=published,
            contract=("layer", "edit", "change", "low", "high"),
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
            "Change without the first or a random token, whichever is nearer, less that without the last, of the same "
            "memories. Appears if the 95% interval of the mean over layers lies above 0 and no layer shows the "
            "opposite (intervals that hold for all layers at once); in part if one does; does not if the mean lies "
            "below 0." + ex.rule_of_enough("memories"),
            last_token_matters_most,
        ),
        ex.Claim(
            "last-token-depth",
            "The last token matters less with depth",
            "−72% in layer 0, −45 to −50% in layers 13–15",
            "Mean change without the last token, by layer. " + ex.RULE_OF_TRENDS + ex.rule_of_enough("memories"),
            last_token_matters_less_with_depth,
        ),
    ),
    picture=ex.Picture(
        tuple(ex.Column(edit, edit, ex.signed, (f"{edit}_low", f"{edit}_high")) for edit in EDITS),
        {edit: edit for edit in EDITS},
        by_layer,
    ),
)
