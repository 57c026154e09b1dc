"""The state of a scan for one layer: exact triggers, statistics and a sample of prefixes.

Coefficients come in blocks, one for each group of memories and each batch. The block of an expert contains only the
tokens routed to the expert. On the CPU, `kernels.add_block_` adds a block to the state. On another device, the module
`device` filters the block on that device.

States of disjoint batches can be merged in any order with the same result (see `kernels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memlens.errors import ModelError
from memlens.memory import MemoryId
from memlens.models.groups import CoefficientBlock, MemoryGroup
from memlens.scanner.kernels import (
    NO_GATES,
    TOO_LARGE,
    Candidates,
    FloatArray,
    Gates,
    IntArray,
    LayerArrays,
    Lists,
    Quadrants,
    Reach,
    Routing,
    Sample,
    Totals,
    add_block_,
    count_reach_,
    count_routed_,
    merge_examples_,
    merge_lists_,
    select_rows,
    worse_status,
)
from memlens.settings import ScanSettings


@dataclass(frozen=True)
class TriggerLists:
    """The sorted top or bottom triggers of one layer. For memory m, entries from `filled[m]` on are empty."""

    coefficients: NDArray[np.float32]  # [memories, top]
    sentences: NDArray[np.int64]  # [memories, top]
    positions: IntArray  # [memories, top]
    filled: IntArray  # [memories]: number of entries


class TopTriggers:
    """The top triggers of one layer, and optionally the bottom ones."""

    def __init__(self, memories: int, top: int, *, per_sentence: str = "best", bottom: bool = False) -> None:
        self.one_a_sentence = per_sentence == "best"
        self.keeps_bottom = bottom
        self.top_lists = Lists.empty(memories, top)
        self.bottom_lists = Lists.empty(memories if bottom else 1, top)

    def merge(self, other: TopTriggers) -> None:
        """Add the triggers of other batches of the same scan."""
        merge_lists_(self.top_lists, other.top_lists, self.one_a_sentence)
        if self.keeps_bottom:
            merge_lists_(self.bottom_lists, other.bottom_lists, self.one_a_sentence)

    def result(self) -> dict[str, TriggerLists]:
        """Return the top triggers as "top" and the bottom triggers, if they are collected, as "bottom"."""
        ends = {"top": (self.top_lists, 1)} | ({"bottom": (self.bottom_lists, -1)} if self.keeps_bottom else {})
        return {
            end: TriggerLists(
                lists.scores() * np.float32(sign), lists.sentences(), lists.positions.copy(), lists.filled.copy()
            )
            for end, (lists, sign) in ends.items()
        }


class LayerScan:
    """The state of a scan for one layer.

    Args:
        layer: Number of the layer.
        memories: Number of memories. The memories of routed experts come last.
        bottom: Also collect bottom triggers, the prefixes with the most negative coefficients.
        experts: Number of experts behind a router.
        size: Number of memories of each routed expert.
        gated: Collect the sign quadrants of gated memories.
        settings: Settings of the scan.
    """

    def __init__(
        self, layer: int, memories: int, bottom: bool, experts: int = 0, size: int = 0, gated: bool = False, *,
        settings: ScanSettings,
    ) -> None:  # fmt: skip
        self.layer, self.size = layer, size
        self.triggers = TopTriggers(memories, settings.top, per_sentence=settings.per_sentence, bottom=bottom)
        self.totals = Totals.empty(memories)
        self.reach = Reach.empty(experts)
        self.quadrants = Quadrants.empty(memories) if gated else None
        self.seed = settings.seed * 1_000_003 + layer  # each layer samples different prefixes
        self.sample = Sample.empty(memories, self.seed, settings.sample_every)
        self.routing = Routing.empty(experts, settings.top) if experts else None
        self._has_turns = set[int]()  # first memory of each group whose `quadrants.turns` have been set
        self._arrays = LayerArrays(
            self.triggers.top_lists, self.triggers.bottom_lists, self.totals,
            Quadrants.empty(0) if self.quadrants is None else self.quadrants, self.sample,
        )  # fmt: skip

    def update(self, block: CoefficientBlock, candidates: Candidates, pool: ThreadPoolExecutor | None = None) -> None:
        """Add the coefficients of one group of memories in one batch. Coefficients on a device are copied to the CPU.

        A token is a candidate for an expert's memories only if it was sent to that expert.
        """
        group = block.group
        if block.rows is not None:
            weights = None if block.weights is None else block.weights.detach().cpu().float().numpy()
            count = block.shape[0] * block.shape[1]
            candidates = self.count_routed(group, block.rows.cpu().numpy(), weights, count, candidates)
        elif group.start == 0:  # without a router, every token reaches all groups
            count_reach_(self.reach, 0, candidates)
        gates = block.gates.cpu() if self.quadrants is not None and block.gates is not None else None
        if self.quadrants is not None and gates is not None and group.start not in self._has_turns:
            self.quadrants.turns[group.columns] = group.gate_turns
            self._has_turns.add(group.start)
        coefficients = block.coefficients.cpu().to(torch.float32).contiguous().numpy()
        self._add_block(group, coefficients, gates, candidates, pool)

    def count_routed(
        self, group: MemoryGroup, rows: IntArray, weights: FloatArray | None, count: int, candidates: Candidates
    ) -> Candidates:
        """Count the candidates that were sent to an expert, and return them with their row numbers in its block.

        Args:
            group: The memories of the expert.
            rows: Rows of the flattened batch that were sent to the expert.
            weights: The router's weights for these rows.
            count: Number of rows of the flattened batch.
            candidates: The candidates in the flattened batch.
        """
        candidates = select_rows(candidates, rows, count)
        if self.routing is not None and weights is not None:
            count_routed_(self.routing, group.expert, self.seed + group.expert, weights, candidates)
        count_reach_(self.reach, 1 + group.expert, candidates)
        return candidates

    def _add_block(
        self, group: MemoryGroup, block: NDArray[np.float32], gates: torch.Tensor | None, candidates: Candidates,
        pool: ThreadPoolExecutor | None,
    ) -> None:  # fmt: skip
        memories, bottom, best = block.shape[1], self.triggers.keeps_bottom, self.triggers.one_a_sentence
        gate_array, has_gates = (NO_GATES, False) if gates is None else (Gates.of(gates), True)

        def add(columns: tuple[int, int]) -> int:
            status: int = add_block_(
                self._arrays, block, gate_array, candidates, *columns, group.start, bottom, best, has_gates
            )
            return status

        if pool is None or not len(candidates.rows):
            self.check_status(group, add((0, memories)))
        else:
            edges = np.linspace(0, memories, pool._max_workers + 1).astype(int).tolist()
            self.check_status(group, *pool.map(add, [(a, b) for a, b in pairwise(edges) if b > a]))

    def check_status(self, group: MemoryGroup, *statuses: int) -> None:
        """Raise ModelError if the coefficients of a memory of the group are not finite or too large."""
        status = reduce(worse_status, statuses)
        if status >= 0:
            raise ModelError(
                f"memory {MemoryId(self.layer, status, group.kind, group.expert)} has a coefficient that is NaN or "
                "infinite; the weights are damaged or the dtype is too small: try --dtype float32"
            )
        if status == TOO_LARGE:
            raise ModelError(
                f"layer {self.layer} has coefficients beyond 1e12, unlike any trained model; check the weights"
            )

    def merge(self, other: LayerScan) -> None:
        """Add the state of a scan of other batches."""
        best = self.triggers.one_a_sentence
        self.triggers.merge(other.triggers)
        np.maximum(self.totals.highest, other.totals.highest, out=self.totals.highest)
        np.minimum(self.totals.lowest, other.totals.lowest, out=self.totals.lowest)
        merge_examples_(self.sample.examples, other.sample.examples)
        if self.quadrants is not None and other.quadrants is not None:
            self.quadrants.turns[:] |= other.quadrants.turns
            merge_lists_(self.quadrants.lists, other.quadrants.lists, best)
        if self.routing is not None and other.routing is not None:
            merge_lists_(self.routing.heaviest, other.routing.heaviest, True)
            merge_lists_(self.routing.drawn, other.routing.drawn, False)
        added = other.arrays()
        for name, array in self.arrays().items():
            if name in _COUNTS:
                array += added[name]

    def by_memory(self, counts: IntArray) -> IntArray:
        """Expand `counts`, an array of `reach` with one row per set of memories, to [memories, BUCKETS]."""
        routed = np.repeat(counts[1:], self.size, axis=0)
        return np.concatenate([np.repeat(counts[:1], len(self.totals.total) - len(routed), axis=0), routed])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as named arrays, for saving."""
        state = {
            "top": self.triggers.top_lists,
            "bottom": self.triggers.bottom_lists,
            "totals": self.totals,
            "reach": self.reach,
            "sample": self.sample,
            "quadrants": self.quadrants,
            "routing": self.routing,
        }
        return {name: array for key, record in state.items() if record for name, array in _flatten(key, record)}

    def restore_(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Replace the state with saved arrays."""
        for name, array in self.arrays().items():
            array[:] = saved[name]
        self._has_turns.clear()


_COUNTS = {  # arrays that are added up in a merge
    "totals.total",
    "totals.fired",
    "reach.prefixes",
    "reach.sentences",
    "sample.counts",
    "quadrants.counts",
    "routing.chosen",
    "routing.weight",
}


def _flatten(name: str, record: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of a named tuple and of its nested tuples, with dotted names."""
    for field, value in record._asdict().items():
        if isinstance(value, np.ndarray):
            yield f"{name}.{field}", value
        elif hasattr(value, "_asdict"):
            yield from _flatten(f"{name}.{field}", value)
