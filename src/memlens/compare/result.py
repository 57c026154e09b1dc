"""What a comparison found, as plain frozen data that needs no index to be read, printed or written as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memlens.memory import MemoryId

ASPECTS = ("triggers", "values", "patterns")


@dataclass(frozen=True)
class Overlap:
    """Two lists as sets: what they share. Two empty lists are equal."""

    shared: int
    a: int  # distinct entries of a's list
    b: int
    jaccard: float
    weighted: float  # sum of the lesser weights by sum of the greater ones; a missing entry weighs nothing


@dataclass(frozen=True)
class Side:
    """One memory as one index knows it."""

    memory: MemoryId
    coefficient: float | None  # of its best trigger; None without triggers
    triggers: tuple[tuple[str, str], ...]  # the best prefixes: what stands before the last token, and that token
    promotes: tuple[str, ...]  # the first tokens its value promotes; none without a values table
    max_p: float | None
    name: str | None  # of names.parquet
    kind: str | None  # none, shallow, semantic or both; None without a patterns table


@dataclass(frozen=True)
class Change:
    """One memory and its partner."""

    change: float  # 0 for nothing, 1 for everything
    triggers: Overlap  # prefixes by text and position; weights are |coefficients|
    endings: Overlap  # last tokens by text, as often as they occur
    values: Overlap | None  # promoted tokens; weights are p
    patterns: Overlap | None  # weights are confidences
    before: Side
    after: Side

    def to_json(self) -> dict[str, Any]:
        sides = {side: asdict(own) | {"memory": str(own.memory)} for side, own in self._sides()}
        return asdict(self) | sides

    def _sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        return ("before", self.before), ("after", self.after)


@dataclass(frozen=True)
class LayerSummary:
    """All pairs of one layer of a."""

    layer: int
    other: int  # the layer of b
    memories: int
    matched: int  # memories that have a partner
    mean_change: float | None  # of those; None where there are none
    unchanged: int  # change 0
    replaced: int  # change 1


@dataclass(frozen=True)
class Comparison:
    """Two indexes, or two layers, beside each other."""

    by: str  # one of ASPECTS
    measure: str  # whose Jaccard index `change` is 1 minus: prefixes, endings, tokens or patterns
    a: str  # the indexes' folders
    b: str
    models: tuple[str, str]
    same_model: bool
    same_corpus: bool
    layers: tuple[LayerSummary, ...]
    changes: tuple[Change, ...]  # the first of them

    @property
    def memories(self) -> int:
        return sum(layer.memories for layer in self.layers)

    @property
    def matched(self) -> int:
        return sum(layer.matched for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for json.dumps."""
        totals = {"memories": self.memories, "matched": self.matched}
        return asdict(self) | totals | {"changes": [change.to_json() for change in self.changes]}

    def __repr__(self) -> str:
        first = f"; most: {self.changes[0].before.memory} ({self.changes[0].change:.2f})" if self.changes else ""
        return f"<Comparison of {self.a} and {self.b} by {self.by}: {self.matched:,} pairs{first}>"
