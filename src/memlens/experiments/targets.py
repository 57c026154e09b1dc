"""Values beside the tokens that follow their top-1 triggers: what agreement, rank and Figure 6 count.

A memory without a top trigger, or whose top-1 trigger ends its sentence, has no target: it takes no part and is
counted. This module knows the values table, but no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from memlens.experiments.bootstrap import draw
from memlens.index.reader import Index


@dataclass(frozen=True, eq=False)
class Targets:
    """Memories of one layer that have a target, and how many have none."""

    layer: int
    memories: NDArray[Any]  # [n] ids
    max_p: NDArray[Any]  # [n]
    argmax: NDArray[Any]  # [n] token
    target: NDArray[Any]  # [n] token
    rank: NDArray[Any]  # [n] of the target in p(v), from 1
    no_trigger: int
    no_next: int

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """Is the value's top token the target? [n]"""
        agrees: NDArray[np.bool_] = self.argmax == self.target
        return agrees


_COLUMNS = ("memory", "max_p", "argmax", "target", "target_rank")


def read_targets(
    index: Index, layer: int, sample: int | None = None, random: np.random.Generator | None = None
) -> Targets:
    """All memories of a layer, or `sample` of those that have a target."""
    table = index.table("values", [*_COLUMNS, "trigger_p"], [("layer", "=", layer)])
    memory, max_p, argmax, target, rank = (table.column(name).fill_null(-1).to_numpy() for name in _COLUMNS)
    triggers = pc.list_value_length(table.column("trigger_p")).to_numpy()
    chosen = np.flatnonzero(target >= 0)
    if random is not None:
        chosen = draw(chosen, sample, random)
    return Targets(
        layer,
        memory[chosen],
        max_p[chosen],
        argmax[chosen],
        target[chosen],
        rank[chosen],
        no_trigger=int((triggers == 0).sum()),
        no_next=int(((triggers > 0) & (target < 0)).sum()),
    )
