"""Patterns (Figure 2): which kinds of pattern the trigger prefixes of a layer contain.

A prefix is shallow, semantic, both or not covered, by the patterns that are listed for it. The machine's patterns are
counted for all memories (or a sample), people's for the memories they have labelled, each person on their own and only
once they have finished. Intervals resample memories, since the prefixes of one memory belong together; where a kind has
no prefix or all, they are Wilson's with the memories as observations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.annotations.store import Annotations, has_annotations
from memlens.experiments.charts import HEIGHT, WIDTH
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress
from memlens.stats import RESAMPLES, draw, generator, wilson

KINDS = ("shallow", "semantic", "both", "not_covered")
# told apart by people who see few colours, too
COLOURS = {"shallow": "#0072b2", "both": "#009e73", "semantic": "#d55e00", "not_covered": "#bbbbbb"}
_TOP = 25

_COLUMNS = [
    ("layer", pa.int32()),
    ("memories", pa.int64()),
    ("patterned_memories", pa.int64()),  # with at least one pattern
    ("patterns", pa.int64()),
    ("prefixes", pa.int64()),
    *((kind, pa.int64()) for kind in KINDS),
    *((f"{kind}_{edge}", pa.float64()) for kind in KINDS for edge in ("low", "high")),
]
SCHEMA = pa.schema(_COLUMNS)
PEOPLE_SCHEMA = pa.schema([("annotator", pa.string()), *_COLUMNS])

Listed = tuple[str, Iterable[int]]  # class and trigger ranks of a pattern


def compute(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> pa.Table:
    """The machine's patterns: one row a layer; `sample` memories of each, or all that have triggers."""
    top = index.manifest.patterns.top if index.manifest.patterns else _TOP
    rows = []
    for done, layer in enumerate(index.layers):
        progress("patterns", done, len(index.layers))
        random = generator(seed, "patterns", layer)
        filled = _filled(index, layer, top)
        chosen = draw(np.array(sorted(filled), np.int64), sample, random).tolist()
        query = "SELECT memory, kind, prefixes FROM {patterns} WHERE layer = $1"
        listed: dict[int, list[Listed]] = {memory: [] for memory in chosen}
        for row in index.stream(query, [layer]):
            if row["memory"] in listed:
                listed[row["memory"]].append((row["kind"], row["prefixes"]))
        rows.append({"layer": layer, **_summary([(filled[m], own) for m, own in listed.items()], random)})
    progress("patterns", len(index.layers), len(index.layers))
    return pa.Table.from_pylist(rows, SCHEMA)


def compute_people(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> pa.Table:
    """People's patterns: one row a person who has finished and layer; empty where nobody has."""
    if not has_annotations(index):
        return PEOPLE_SCHEMA.empty_table()
    with Annotations(index) as notes:
        labels, drawn = notes.labels(), notes.sample()
    top = drawn.top if drawn else _TOP
    rows = []
    for number, person in enumerate(sorted({label.annotator for label in labels})):
        for layer in index.layers:
            own = [label for label in labels if label.annotator == person and label.memory.layer == layer]
            if own:
                filled = _filled(index, layer, top)
                memories: list[tuple[int, list[Listed]]] = [
                    (filled.get(label.memory.memory, 0), [(p.kind, p.prefixes) for p in label.patterns])
                    for label in own
                ]
                random = generator(seed, f"patterns-people-{number}", layer)
                rows.append({"annotator": person, "layer": layer, **_summary(memories, random)})
    return pa.Table.from_pylist(rows, PEOPLE_SCHEMA)


def _filled(index: Index, layer: int, top: int) -> dict[int, int]:
    """Memories of a layer that have triggers -> how many of the first `top`."""
    query = (
        """SELECT memory, count(*) AS n FROM {triggers} WHERE layer = $1 AND "end" = 'top' AND rank < $2 GROUP BY 1"""
    )
    return {row["memory"]: row["n"] for row in index.sql(query, [layer, top])}


def _summary(memories: list[tuple[int, list[Listed]]], random: np.random.Generator) -> dict[str, Any]:
    counts = np.array([_kinds(filled, listed) for filled, listed in memories], np.int64).reshape(-1, len(KINDS))
    low, high = _intervals(counts, random)
    found: dict[str, Any] = {
        "memories": len(memories),
        "patterned_memories": sum(bool(listed) for _, listed in memories),
        "patterns": sum(len(listed) for _, listed in memories),
        "prefixes": int(counts.sum()),
    }
    for place, kind in enumerate(KINDS):
        found |= {kind: int(counts[:, place].sum()), f"{kind}_low": low[place], f"{kind}_high": high[place]}
    return found


def _kinds(filled: int, listed: list[Listed]) -> list[int]:
    """How many of a memory's prefixes are of each kind, in the order of KINDS."""
    has = {kind: {rank for own, ranks in listed if own == kind for rank in ranks} for kind in ("shallow", "semantic")}
    shallow, semantic = has["shallow"], has["semantic"]
    covered = [len(shallow - semantic), len(semantic - shallow), len(shallow & semantic)]
    return [*covered, filled - sum(covered)]


def _intervals(counts: NDArray[np.int64], random: np.random.Generator) -> tuple[list[Any], list[Any]]:
    """95% intervals of the shares; counts [memories, kinds]."""
    if counts.sum() == 0:
        return [None] * len(KINDS), [None] * len(KINDS)
    drawn = (counts[random.integers(0, len(counts), len(counts))].sum(0) for _ in range(RESAMPLES))
    shares = np.array([own / max(own.sum(), 1) for own in drawn])
    low, high = np.percentile(shares, [2.5, 97.5], axis=0)
    for kind, share in enumerate(counts.sum(0) / counts.sum()):
        if share in (0, 1):  # every memory is alike: nothing to resample
            low[kind], high[kind] = wilson(share * len(counts), len(counts))
    return low.tolist(), high.tolist()


def chart(table: pa.Table) -> Any:
    """Shares of the four kinds by layer, stacked."""
    return _stacked(table)


def chart_people(table: pa.Table) -> Any:
    """The same for each person."""
    return _stacked(table, row="annotator:N") if table.num_rows else _stacked(table)


def _stacked(table: pa.Table, **facet: Any) -> Any:
    import altair as alt

    rows = [
        {
            **{name: row[name] for name in ("annotator", "layer") if name in row},
            "kind": kind,
            "prefixes": row[kind],
            "share": row[kind] / row["prefixes"] if row["prefixes"] else None,
            "order": order,
        }
        for row in table.to_pylist()
        for order, kind in enumerate(COLOURS)
    ]
    colours = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            x=alt.X("layer:O", title="layer"),
            y=alt.Y("share:Q", title="prefixes", axis=alt.Axis(format="%")),
            color=alt.Color("kind:N", title=None, scale=colours),
            order="order:Q",
            tooltip=["layer:O", "kind:N", "prefixes:Q", alt.Tooltip("share:Q", format=".1%")],
            **facet,
        )
        .properties(width=WIDTH, height=HEIGHT)
    )
