"""The token after each top trigger: what values are compared with.

The last prefix of a sentence has no next token, and a memory that never fires has no trigger; both are -1 here and take
no part in what is computed from next tokens. This module knows the triggers table, but no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.index.reader import Index


@dataclass(frozen=True, eq=False)
class NextTokens:
    """The next tokens of the top triggers of one layer's memories."""

    layer: int
    tokens: NDArray[np.int32]  # [memories, triggers]; -1 where there is no next token or no trigger
    filled: NDArray[np.int64]  # [memories]: how many top triggers a memory has

    @property
    def targets(self) -> NDArray[np.int32]:
        """The token after the top-1 trigger, -1 for none. [memories]"""
        return self.tokens[:, 0]

    @property
    def without_trigger(self) -> NDArray[np.bool_]:
        """Memories that have no top trigger. [memories]"""
        return self.filled == 0

    @property
    def ended(self) -> NDArray[np.bool_]:
        """Memories whose top-1 trigger is the last prefix of its sentence. [memories]"""
        return (self.filled > 0) & (self.targets < 0)


def read_next_tokens(index: Index, layer: int) -> NextTokens:
    """All memories of a scanned layer."""
    memories = index.memories(layer)
    rows = index.table(
        "triggers",
        columns=["memory", "rank", "next_token"],
        filters=[("layer", "=", layer), ("end", "=", "top")],
    )
    memory, rank = (rows.column(name).to_numpy() for name in ("memory", "rank"))
    following: NDArray[Any] = rows.column("next_token").fill_null(-1).to_numpy()
    tokens = np.full((memories, max(int(rank.max(initial=0)) + 1, 1)), -1, np.int32)
    tokens[memory, rank] = following
    return NextTokens(layer, tokens, np.bincount(memory, minlength=memories))
