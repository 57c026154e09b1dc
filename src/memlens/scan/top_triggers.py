"""TopTriggers: the best prefixes of every memory of one layer, exactly, in any order of arrival.

`update`, `merge` and `result` are associative and commutative: the order is total (higher coefficient, then lower
sentence, then lower position), so any batch split, any worker and any merge tree give the same lists. The bottom end is
the same structure with the sign turned. This module knows nothing of models, text or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.errors import SettingError
from memlens.scan.blocks import Candidates, Sums, collect_
from memlens.scan.lists import FloatArray, IntArray, Lists, merge_


@dataclass(frozen=True)
class TriggerLists:
    """Sorted triggers of one layer at one end; rows beyond `filled[m]` are empty."""

    coefficients: NDArray[np.float32]  # [memories, top]
    sentences: NDArray[np.int64]  # [memories, top]
    positions: IntArray  # [memories, top]
    filled: IntArray  # [memories]


class TopTriggers:
    """The top, and if wanted the bottom, triggers of one layer."""

    def __init__(self, memories: int, top: int, *, per_sentence: str = "best", bottom: bool = False) -> None:
        if top < 1:
            raise SettingError(f"--top is {top}; it must be 1 or more")
        self.one_a_sentence = per_sentence == "best"
        self.keeps_bottom = bottom
        self.top_lists = Lists.empty(memories, top)
        self.bottom_lists = Lists.empty(memories if bottom else 1, top)

    def update(self, coefficients: FloatArray, sentences: IntArray, positions: IntArray) -> None:
        """Offer prefixes: coefficients [n, memories] with the sentence and position of each row."""
        block = np.ascontiguousarray(coefficients, np.float32)
        self.collect(block, make_candidates(np.arange(len(block)), sentences, positions), Sums.empty(block.shape[1]))

    def collect(self, block: FloatArray, candidates: Candidates, sums: Sums, first: int = 0, last: int = -1) -> None:
        """The hot path: also adds to `sums`; columns [first, last) only, so that threads can share a block."""
        end = block.shape[1] if last < 0 else last
        bottom, best = self.keeps_bottom, self.one_a_sentence
        collect_(block, candidates, first, end, self.top_lists, self.bottom_lists, bottom, best, sums)

    def merge(self, other: TopTriggers) -> None:
        """Take in another part's lists; the two must come from the same settings."""
        if (other.one_a_sentence, other.keeps_bottom, other.top_lists.keys.shape) != (
            self.one_a_sentence,
            self.keeps_bottom,
            self.top_lists.keys.shape,
        ):
            raise SettingError(
                "these partial scans were made with different settings; scan all parts with the same ones"
            )
        merge_(self.top_lists, other.top_lists, self.one_a_sentence)
        if self.keeps_bottom:
            merge_(self.bottom_lists, other.bottom_lists, self.one_a_sentence)

    def result(self) -> dict[str, TriggerLists]:
        """`top` and, where kept, `bottom`."""
        ends = {"top": _as_triggers(self.top_lists, 1)}
        if self.keeps_bottom:
            ends["bottom"] = _as_triggers(self.bottom_lists, -1)
        return ends

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The state as plain arrays, to be saved."""
        saved: dict[str, NDArray[Any]] = {}
        for end, lists in (("top", self.top_lists), ("bottom", self.bottom_lists)):
            saved |= {f"{end}.{name}": array for name, array in lists._asdict().items()}
        return saved

    def restore_(self, saved: dict[str, NDArray[Any]]) -> None:
        for end, lists in (("top", self.top_lists), ("bottom", self.bottom_lists)):
            for name, array in lists._asdict().items():
                array[:] = saved[f"{end}.{name}"]


def _as_triggers(lists: Lists, sign: int) -> TriggerLists:
    return TriggerLists(
        lists.scores() * np.float32(sign), lists.sentences(), lists.positions.copy(), lists.filled.copy()
    )


def make_candidates(rows: IntArray, sentences: IntArray, positions: IntArray) -> Candidates:
    """Rows of a block as the hot path wants them: by sentence, then position."""
    order = np.lexsort((positions, sentences))
    rows, sentences, positions = rows[order], np.asarray(sentences)[order], np.asarray(positions)[order]
    if len(sentences) and not 0 <= int(sentences[0]) <= int(sentences[-1]) < 2**32 - 1:
        raise SettingError("a scan holds at most 4,294,967,294 sentences; split the corpus into several indexes")
    starts = np.flatnonzero(np.r_[True, sentences[1:] != sentences[:-1], True]) if len(sentences) else np.zeros(1)
    return Candidates(
        rows.astype(np.int64), sentences.astype(np.int64), positions.astype(np.int32), starts.astype(np.int64)
    )
