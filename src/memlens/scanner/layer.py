"""The state of a scan for one layer: exact triggers, statistics and a sample of prefixes.

Coefficients come in blocks, one per group of memories and batch. The block of an expert has only the tokens routed to
the expert. On the CPU, `kernels.add_block_` adds a block to the state. On another device, the block is filtered there,
and only the coefficients that reach a list are copied. Both ways give the same lists.

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

from memlens.errors import ModelError, SettingError
from memlens.memory import MemoryId
from memlens.models.groups import CoefficientBlock, MemoryGroup
from memlens.scanner.kernels import (
    BUCKETS,
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
    Sums,
    Totals,
    add_block_,
    add_sums_,
    count_reach_,
    count_routed_,
    insert_all_,
    make_candidates,
    merge_examples_,
    merge_lists_,
    sample_block_,
    sampled_candidates,
    scan_block_,
    select_rows,
    worse_status,
)
from memlens.settings import ScanSettings

_DENSE = 16  # if more than one coefficient in 16 reaches a list, copying the whole block is faster


@dataclass(frozen=True)
class TriggerLists:
    """Sorted triggers of one layer at one end. Entries from `filled[m]` on are empty."""

    coefficients: NDArray[np.float32]  # [memories, top]
    sentences: NDArray[np.int64]  # [memories, top]
    positions: IntArray  # [memories, top]
    filled: IntArray  # [memories]: number of entries


class TopTriggers:
    """The top triggers of one layer, and optionally the bottom ones."""

    def __init__(self, memories: int, top: int, *, per_sentence: str = "best", bottom: bool = False) -> None:
        if top < 1:
            raise SettingError(f"--top is {top}; it must be 1 or more")
        self.one_a_sentence = per_sentence == "best"
        self.keeps_bottom = bottom
        self.top_lists = Lists.empty(memories, top)
        self.bottom_lists = Lists.empty(memories if bottom else 1, top)

    def update(self, coefficients: FloatArray, sentences: IntArray, positions: IntArray) -> None:
        """Add prefixes: coefficients [n, memories] with the sentence and position of each row."""
        block = np.ascontiguousarray(coefficients, np.float32)
        candidates, memories = make_candidates(np.arange(len(block)), sentences, positions), block.shape[1]
        scan_block_(
            block, candidates, 0, memories, 0, self.top_lists, self.bottom_lists, self.keeps_bottom,
            self.one_a_sentence, Totals.empty(memories), NO_GATES, Quadrants.empty(0), False,
        )  # fmt: skip

    def merge(self, other: TopTriggers) -> None:
        """Add the lists of another part. Raises SettingError if it was made with other settings."""
        if (other.one_a_sentence, other.keeps_bottom, other.top_lists.keys.shape) != (
            self.one_a_sentence,
            self.keeps_bottom,
            self.top_lists.keys.shape,
        ):
            raise SettingError(
                "these partial scans were made with different settings; scan all parts with the same ones"
            )
        merge_lists_(self.top_lists, other.top_lists, self.one_a_sentence)
        if self.keeps_bottom:
            merge_lists_(self.bottom_lists, other.bottom_lists, self.one_a_sentence)

    def result(self) -> dict[str, TriggerLists]:
        """Return the triggers of the end "top" and, if kept, "bottom"."""
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
        memories: Number of memories. Those of routed experts are the last ones.
        bottom: Keep the most negative triggers.
        experts: Number of experts behind a router.
        size: Number of memories of such an expert.
        gated: Keep sign quadrants.
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
        self._has_turns = set[int]()  # first memories of the groups whose `quadrants.turns` are set
        self._arrays = LayerArrays(
            self.triggers.top_lists, self.triggers.bottom_lists, self.totals,
            Quadrants.empty(0) if self.quadrants is None else self.quadrants, self.sample,
        )  # fmt: skip

    def update(self, block: CoefficientBlock, candidates: Candidates, pool: ThreadPoolExecutor | None = None) -> None:
        """Add the coefficients of one group of memories in one batch.

        A token is a candidate for an expert's memories only if it was sent to that expert.
        """
        group = block.group
        if block.rows is not None:
            candidates = select_rows(candidates, block.rows.cpu().numpy(), block.shape[0] * block.shape[1])
            if self.routing is not None and block.weights is not None:
                weights = block.weights.detach().cpu().float().numpy()
                count_routed_(self.routing, group.expert, self.seed + group.expert, weights, candidates)
            count_reach_(self.reach, 1 + group.expert, candidates)
        elif group.start == 0:  # without a router, every token reaches all groups
            count_reach_(self.reach, 0, candidates)
        gates = block.gates if self.quadrants is not None else None
        if self.quadrants is not None and gates is not None and group.start not in self._has_turns:
            self.quadrants.turns[group.columns] = group.gate_turns
            self._has_turns.add(group.start)
        if block.coefficients.device.type == "cpu":
            coefficients = block.coefficients.to(torch.float32).contiguous().numpy()
            self._update_on_cpu(group, coefficients, gates, candidates, pool)
        else:
            self._update_on_device(group, block.coefficients, gates, candidates)

    def _update_on_cpu(
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
            self._check_status(group, add((0, memories)))
        else:
            edges = np.linspace(0, memories, pool._max_workers + 1).astype(int).tolist()
            self._check_status(group, *pool.map(add, [(a, b) for a, b in pairwise(edges) if b > a]))

    def _update_on_device(
        self, group: MemoryGroup, block: torch.Tensor, gates: torch.Tensor | None, candidates: Candidates
    ) -> None:
        if not len(candidates.rows):
            return
        rows = torch.from_numpy(candidates.rows).to(block.device)
        coefficients = block.index_select(0, rows).to(torch.float32)  # [n, size]
        gates = None if gates is None else gates.index_select(0, rows)
        lists = {1: self.triggers.top_lists.part(group.columns)}
        if self.triggers.keeps_bottom:
            lists[-1] = self.triggers.bottom_lists.part(group.columns)
        masks = {sign: _reaches(sign * coefficients, own.scores()[:, -1]) for sign, own in lists.items()}
        if sum(int(mask.count_nonzero()) for mask in masks.values()) * _DENSE > coefficients.numel():
            copied = candidates._replace(rows=np.arange(len(coefficients)))
            self._update_on_cpu(group, coefficients.cpu().numpy(), None if gates is None else gates.cpu(), copied, None)
            return
        for sign, mask in masks.items():
            self._insert(lists[sign], sign * coefficients, mask, candidates)
        if self.quadrants is not None and gates is not None:
            quadrants, is_open = self.quadrants.part(group.columns), gates > 0
            for quadrant in range(4):
                scores = (1 - 2 * (quadrant % 2)) * coefficients * (is_open if quadrant < 2 else ~is_open)
                quadrants.counts[:, quadrant] += (scores > 0).sum(0).cpu().numpy()
                mask = _reaches(scores, quadrants.lists.scores()[quadrant::4, -1])
                self._insert(quadrants.lists, scores, mask, candidates, 4, quadrant)
        buckets = torch.from_numpy(candidates.buckets).to(block.device, torch.int64)
        fired = torch.zeros(BUCKETS, coefficients.shape[1], dtype=torch.int64, device=block.device)
        fired.index_add_(0, buckets, (coefficients > 0).to(torch.int64))
        sums = (coefficients.sum(0, dtype=torch.float64), fired, coefficients.amax(0), coefficients.amin(0))
        status = add_sums_(self.totals, Sums(*(x.cpu().numpy() for x in sums)), group.start, coefficients.shape[1])
        self._check_status(group, status)
        sampled = sampled_candidates(self.sample, candidates)
        part = coefficients.index_select(0, torch.from_numpy(sampled).to(block.device)).cpu().numpy()
        chosen = candidates._replace(  # `starts` is not used by the sample
            rows=np.arange(len(sampled)),
            sentences=candidates.sentences[sampled],
            positions=candidates.positions[sampled],
        )
        sample_block_(self.sample, part, chosen, 0, part.shape[1], group.start)

    def _insert(
        self, lists: Lists, scores: torch.Tensor, mask: torch.Tensor, candidates: Candidates, step: int = 1,
        offset: int = 0,
    ) -> None:  # fmt: skip
        """Insert the scores [n, memories] selected by a mask. The list of memory m has the number m * step + offset."""
        row, memory = (index.cpu().numpy() for index in mask.nonzero(as_tuple=True))
        insert_all_(
            lists, memory * step + offset, scores[mask].cpu().numpy(), candidates.sentences[row],
            candidates.positions[row], self.triggers.one_a_sentence,
        )  # fmt: skip

    def _check_status(self, group: MemoryGroup, *statuses: int) -> None:
        """Raise ModelError if the coefficients of a column of the group cannot be summed."""
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
        """Add the state of other batches."""
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
        """Return rows of `reach.prefixes` or `reach.sentences` for each memory, [memories, BUCKETS]."""
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
        """Replace the state by saved arrays."""
        for name, array in self.arrays().items():
            array[:] = saved[name]
        self._has_turns.clear()


_COUNTS = {  # arrays that a merge adds up
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


def _reaches(scores: torch.Tensor, thresholds: NDArray[np.float32]) -> torch.Tensor:
    """Return a mask of the scores [n, memories] that are positive and reach the threshold of their list."""
    return (scores >= torch.from_numpy(thresholds.copy()).to(scores.device)) & (scores > 0)
