"""The top triggers of every memory as one matrix of prefix numbers. Reads the triggers table; knows no text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from memlens.index.reader import Index


@dataclass(frozen=True, eq=False)
class TriggerRows:
    """Memories that have triggers, and the distinct prefixes that are some memory's trigger."""

    layer: NDArray[np.int32]  # [memories]
    memory: NDArray[np.int32]  # [memories]
    rows: NDArray[np.int64]  # [memories, t]: numbers of prefixes by rank, -1 for none
    following: NDArray[np.int32]  # [memories, t]: next tokens, -1 for none
    sentences: NDArray[np.int64]  # [prefixes]
    positions: NDArray[np.int64]  # [prefixes]

    @property
    def filled(self) -> NDArray[np.int64]:
        """How many triggers each memory has. [memories]"""
        counts: NDArray[np.int64] = (self.rows >= 0).sum(1)
        return counts

    def one_a_sentence(self) -> NDArray[np.int64]:
        """`rows` with only the best prefix of a sentence: two of one sentence are alike by nature."""
        sentences = np.where(self.rows >= 0, self.sentences[np.maximum(self.rows, 0)], -1)
        found = self.rows.copy()
        for rank in range(1, found.shape[1]):
            repeats = (sentences[:, :rank] == sentences[:, rank, None]).any(1)
            found[repeats, rank] = -1
        return found


def read_trigger_rows(index: Index, top: int) -> TriggerRows:
    columns = ["layer", "memory", "rank", "sentence", "position", "next_token"]
    filters = [("end", "=", "top"), ("rank", "<", top)]
    table = index.table("triggers", columns, filters)
    layer, memory, rank, sentence, position = (table.column(name).to_numpy() for name in columns[:-1])
    following = pc.fill_null(table.column("next_token"), -1).to_numpy()
    names, owner = np.unique(layer.astype(np.int64) << 32 | memory.astype(np.int64), return_inverse=True)
    places, prefix = np.unique(sentence.astype(np.int64) << 24 | (position.astype(np.int64) + 1), return_inverse=True)
    width = max(int(rank.max(initial=-1)) + 1, 1)
    rows = np.full((len(names), width), -1, np.int64)
    rows[owner, rank] = prefix
    next_tokens = np.full((len(names), width), -1, np.int32)
    next_tokens[owner, rank] = following
    return TriggerRows(
        (names >> 32).astype(np.int32),
        (names & 0xFFFFFFFF).astype(np.int32),
        rows,
        next_tokens,
        places >> 24,
        (places & 0xFFFFFF) - 1,
    )
