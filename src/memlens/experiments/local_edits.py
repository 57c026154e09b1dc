"""Prefixes that are in no sentence, each run once, and the coefficients of chosen memories at their last positions.

This module knows a model and batches, but not why a prefix is wanted.

Local edits (Figure 3): how much a coefficient changes when the first, the last or a random token is removed.

For each sampled memory and each of its top 50 triggers the prefix without one token is run, and m' is the coefficient
at its new last position; the change is (m' - m) / m. It is averaged over the prefixes of a memory, then over memories.
m is the index's own, from the scan, so that whole prefixes are not run again; from a new run it would differ by the
rounding of another batch shape, as m' does. BOS is never removed and stays in front; a prefix of one token has nothing
left and is left out (counted). Equal edited prefixes are run once, whichever memories want them.
How much less a token matters than the last one (`beside_last`) is taken memory by memory, since the memories are the
same; its interval resamples memories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from memlens.corpus.batches import Batch, cut_batches
from memlens.errors import ModelError
from memlens.experiments.charts import HEIGHT, WIDTH
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.parallel import Progress, no_progress
from memlens.stats import draw, generator, interval

Wanted = tuple[NDArray[np.int64], NDArray[np.int64]]  # memories [n] of a layer and the prefix [n] for each


class EditedPrefixes:
    """A growing set of prefixes."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._prefixes: list[NDArray[np.int64]] = []

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, tokens: NDArray[np.int64]) -> int:
        """The prefix's id; an equal one keeps the id it has."""
        number = self._ids.setdefault(tokens.tobytes(), len(self._prefixes))
        if number == len(self._prefixes):
            self._prefixes.append(tokens)
        return number

    def coefficients(
        self,
        model: MemoryModel,
        wanted: Mapping[int, Wanted],
        *,
        bos: int | None,
        batch_tokens: int,
        progress: Progress = no_progress,
    ) -> dict[int, NDArray[np.float64]]:
        """For each layer the coefficients [n] that are wanted, in their order."""
        batches = cut_batches(list(enumerate(self._prefixes)), batch_tokens, bos)
        places = _Places(batches, len(self), bos)
        found = {layer: np.empty(len(memories), np.float64) for layer, (memories, _) in wanted.items()}
        by_batch = {layer: places.by_batch(prefixes, len(batches)) for layer, (_, prefixes) in wanted.items()}
        done = 0
        progress("local-edits", 0, len(self))
        for number, batch in enumerate(batches):

            def take(layer: int, block: torch.Tensor, number: int = number) -> None:  # [batch, pos, memories]
                chosen = by_batch[layer][number]
                memories, prefixes = (column[chosen] for column in wanted[layer])
                where = (places.row[prefixes], places.last[prefixes], memories)
                found[layer][chosen] = block[tuple(torch.from_numpy(i) for i in where)].double().cpu().numpy()

            with torch.inference_mode(), model.watch(take, list(wanted)):
                model.run_body(torch.from_numpy(batch.tokens))
            done += len(batch.sentences)
            progress("local-edits", done, len(self))
        return found


class _Places:
    """Where each prefix lies in its batch."""

    def __init__(self, batches: list[Batch], count: int, bos: int | None) -> None:
        self.batch, self.row, self.last = (np.empty(count, np.int64) for _ in range(3))
        shift = 0 if bos is None else 1
        for number, batch in enumerate(batches):
            self.batch[batch.sentences] = number
            self.row[batch.sentences] = np.arange(len(batch.sentences))
            self.last[batch.sentences] = shift + batch.lengths - 1

    def by_batch(self, prefixes: NDArray[np.int64], batches: int) -> list[NDArray[Any]]:
        """For each batch which of the wanted prefixes [n] are in it."""
        order = np.argsort(self.batch[prefixes], kind="stable")
        edges = np.searchsorted(self.batch[prefixes][order], np.arange(batches + 1))
        return [order[edges[number] : edges[number + 1]] for number in range(batches)]


TRIGGERS = 50
EDITS = ("first", "last", "random")

SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("edit", pa.string()),
        ("change", pa.float64()),  # mean over memories
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("median", pa.float64()),  # over memories; a coefficient near zero can make a mean wild
        ("memories", pa.int64()),
        ("prefixes", pa.int64()),
        ("left_out", pa.int64()),  # prefixes of one token
        ("beside_last", pa.float64()),  # change less that of the edit "last", mean over the same memories
        ("beside_last_low", pa.float64()),
        ("beside_last_high", pa.float64()),
    ]
)


@dataclass(frozen=True, eq=False)
class _Wanted:
    """The triggers of one layer's sampled memories that can be edited."""

    memory: NDArray[np.int64]  # [n]
    coefficient: NDArray[np.float64]  # [n]
    prefixes: NDArray[np.int64]  # [n, edits] ids of the edited prefixes
    left_out: int


def compute(
    index: Index,
    model: MemoryModel | None = None,
    *,
    seed: int = 0,
    sample: int | None = 100,
    progress: Progress = no_progress,
) -> pa.Table:
    """Three rows a layer; `sample` memories of each (all that have triggers for None)."""
    if model is None:
        raise ModelError("local-edits runs the model; pass the one that was scanned")
    edited = EditedPrefixes()
    wanted = {layer: _edit_triggers(index, layer, seed, sample, edited) for layer in index.layers}
    found = edited.coefficients(
        model,
        {layer: (np.repeat(want.memory, len(EDITS)), want.prefixes.reshape(-1)) for layer, want in wanted.items()},
        bos=index.manifest.model.bos,
        batch_tokens=index.manifest.settings.batch_tokens,
        progress=progress,
    )
    rows = []
    for layer, want in wanted.items():
        changes = found[layer].reshape(-1, len(EDITS)) / want.coefficient[:, None] - 1
        means = _by_memory(want, changes)
        random, paired = (generator(seed, f"local-edits {name}", layer) for name in ("intervals", "paired"))
        for number, edit in enumerate(EDITS):
            row = _row(layer, edit, want, means[:, number], random)
            rows.append(row | _beside_last(means[:, number] - means[:, EDITS.index("last")], paired))
    return pa.Table.from_pylist(rows, SCHEMA)


def _edit_triggers(index: Index, layer: int, seed: int, sample: int | None, edited: EditedPrefixes) -> _Wanted:
    random = generator(seed, "local-edits", layer)
    triggers = index.table(
        "triggers",
        columns=["memory", "coefficient", "sentence", "position"],
        filters=[("layer", "=", layer), ("end", "=", "top"), ("rank", "<", TRIGGERS)],
    )
    columns = [triggers.column(name).to_numpy() for name in triggers.column_names]
    chosen = np.isin(columns[0], draw(np.unique(columns[0]), sample, random))
    memory, coefficient, sentence, position = (column[chosen] for column in columns)
    editable = position > 0
    sentences = _tokens_of(index, np.unique(sentence[editable]))
    removed = random_positions(position[editable] + 1, random)
    prefixes = [
        [edited.add(np.delete(sentences[number][: last + 1], place)) for place in (0, last, where)]
        for number, last, where in zip(sentence[editable].tolist(), position[editable].tolist(), removed, strict=True)
    ]
    return _Wanted(
        memory[editable].astype(np.int64),
        coefficient[editable].astype(np.float64),
        np.array(prefixes, np.int64).reshape(-1, len(EDITS)),
        int((~editable).sum()),
    )


def random_positions(lengths: NDArray[Any], random: np.random.Generator) -> list[int]:
    """For each prefix the place of the token to remove."""
    places: list[int] = random.integers(0, lengths).tolist()
    return places


def _tokens_of(index: Index, sentences: NDArray[Any]) -> dict[int, NDArray[np.int64]]:
    rows = index.sql(
        "SELECT sentence, tokens FROM {corpus} WHERE sentence IN (SELECT unnest($1::BIGINT[]))", [sentences.tolist()]
    )
    return {row["sentence"]: np.array(row["tokens"], np.int64) for row in rows}


def _by_memory(want: _Wanted, changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """[memories, edits]: means over the prefixes of each memory."""
    _, owner, counts = np.unique(want.memory, return_inverse=True, return_counts=True)
    sums = [np.bincount(owner, changes[:, number], len(counts)) for number in range(len(EDITS))]
    means: NDArray[np.float64] = np.stack(sums, 1) / counts[:, None]
    return means


def _row(
    layer: int, edit: str, want: _Wanted, means: NDArray[np.float64], random: np.random.Generator
) -> dict[str, Any]:
    low, high = interval(means, np.mean, random)
    return {
        "layer": layer,
        "edit": edit,
        "change": float(means.mean()) if len(means) else None,
        "low": low,
        "high": high,
        "median": float(np.median(means)) if len(means) else None,
        "memories": len(means),
        "prefixes": len(want.memory),
        "left_out": want.left_out,
    }


def _beside_last(differences: NDArray[np.float64], random: np.random.Generator) -> dict[str, float | None]:
    low, high = interval(differences, np.mean, random)
    mean = float(differences.mean()) if len(differences) else None
    return {"beside_last": mean, "beside_last_low": low, "beside_last_high": high}


def chart(table: pa.Table) -> Any:
    """Mean change by layer, one line an edit, with intervals."""
    import altair as alt

    color = alt.Color("edit:N", title="removed token", sort=list(EDITS))
    base = alt.Chart(table).encode(x=alt.X("layer:O", title="layer"), color=color)
    title = "change of the coefficient"
    line = base.mark_line(point=True).encode(
        y=alt.Y("change:Q", title=title, axis=alt.Axis(format="%")), tooltip=list(table.column_names)
    )
    whiskers = base.mark_rule(opacity=0.6).encode(y=alt.Y("low:Q", title=title), y2="high:Q")
    return alt.layer(line, whiskers).properties(width=WIDTH, height=HEIGHT)
