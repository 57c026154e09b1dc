"""Last layer: 100 random prefixes whose last layer is a composition, for people to judge how far the word moved.

Both words, the prefix, and the memories that pushed the change: those with the largest m_i (score of the output's token
less score of the residual's token), scores at the final norm's scale for the layer's output. The cosine of the two
words' output embeddings is a hint, not a verdict. People's verdicts are kept in the history of the index (see
index/verdicts); how many say related and how many distant stands beside the hint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from memlens.annotations.store import CHOICES, Annotations, LastLayerChange, has_annotations
from memlens.errors import IndexFolderError
from memlens.experiments.charts import HEIGHT, WIDTH
from memlens.experiments.prefix_pass import Aggregate, on_prefixes
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.stats import draw, generator

EXAMPLES = 100
SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("prefix", pa.int32()),  # in experiments/prefixes
        ("sentence", pa.int64()),
        ("position", pa.int32()),
        ("text", pa.string()),
        ("residual", pa.int32()),  # token before
        ("residual_text", pa.string()),
        ("output", pa.int32()),  # token after
        ("output_text", pa.string()),
        ("cosine", pa.float32()),
        ("memories", pa.list_(pa.int32())),  # strongest first
        ("pushes", pa.list_(pa.float32())),
        ("compositions", pa.int64()),  # in the whole sample
        ("example", pa.string()),  # its name, for verdicts
        ("related", pa.int64()),  # people who say that the words are related
        ("distant", pa.int64()),
    ]
)


def compute(index: Index, model: MemoryModel, **options: Any) -> pa.Table:
    """At most 100 rows, in the order of the prefixes, with people's verdicts."""
    return with_verdicts(_examples(index, model, **options), index)


def with_verdicts(table: pa.Table, index: Index) -> pa.Table:
    """The table with what people say now."""
    said: Counter[tuple[str, str]] = Counter()
    if has_annotations(index):
        with Annotations(index) as notes:
            said.update((one.subject, one.verdict) for one in notes.verdicts())
    names = table.column("example").to_pylist()
    for choice in CHOICES:
        place = table.schema.get_field_index(choice)
        counts = pa.array([said[name, choice] for name in names], pa.int64())
        table = table.set_column(place, SCHEMA.field(choice), counts)
    return table


@dataclass(frozen=True)
class VerdictSummary:
    """How people judge the examples of a table, by majority, beside the mean cosine of each group."""

    examples: int
    related: int
    distant: int
    split: int  # as many say one as the other
    cosine_related: float | None
    cosine_distant: float | None

    def __str__(self) -> str:
        judged = self.related + self.distant + self.split
        words = f"people judged {judged} of {self.examples}: {self.distant} distant, {self.related} related"
        words += f", {self.split} undecided" if self.split else ""
        groups = ((self.cosine_distant, "distant"), (self.cosine_related, "related"))
        means = [f"{cosine:.2f} where {name}" for cosine, name in groups if cosine is not None]
        return words + (f"; mean cosine {', '.join(means)}" if means else "")


def summarize_verdicts(rows: Sequence[Mapping[str, Any]]) -> VerdictSummary | None:
    """None where nobody has judged anything."""
    judged = [(row, row["related"] - row["distant"]) for row in rows if row.get("related") or row.get("distant")]
    if not judged:
        return None
    related = [row["cosine"] for row, lead in judged if lead > 0]
    distant = [row["cosine"] for row, lead in judged if lead < 0]
    means = (sum(own) / len(own) if own else None for own in (related, distant))
    return VerdictSummary(len(rows), len(related), len(distant), len(judged) - len(related) - len(distant), *means)


@on_prefixes
def _examples(seen: Aggregate, seed: int) -> pa.Table:
    layers = dict(seen.by_layer())
    if seen.last_layer not in layers:
        raise IndexFolderError(
            f"the model's last layer, {seen.last_layer}, was not scanned into this index; scan with it in --layers"
        )
    columns = layers[seen.last_layer]
    compositions = np.array([row for row, memories in enumerate(columns["pushers"]) if memories is not None], np.int64)
    places = seen.prefixes.select(["prefix", "sentence", "position", "text"]).to_pylist()
    rows = []
    for row in draw(compositions, EXAMPLES, generator(seed, "last-layer")).tolist():
        before, after = int(columns["residual_token"][row]), int(columns["output_token"][row])
        words = {
            "layer": seen.last_layer,
            **places[row],
            "residual": before,
            "residual_text": seen.vocabulary[before],
            "output": after,
            "output_text": seen.vocabulary[after],
        }
        rows.append(
            {
                **words,
                "example": LastLayerChange.of(words).name,
                "cosine": columns["cosine"][row],
                "memories": columns["pushers"][row],
                "pushes": columns["pushes"][row],
                "compositions": len(compositions),
            }
        )
    return pa.Table.from_pylist(rows, SCHEMA)


def chart(table: pa.Table) -> Any:
    """How alike the two words are, as a histogram."""
    import altair as alt

    return (
        alt.Chart(table.select(["cosine"]))
        .mark_bar()
        .encode(
            x=alt.X("cosine:Q", bin=alt.Bin(maxbins=20), title="cosine of the two words in E"),
            y=alt.Y("count()", title="prefixes"),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )
