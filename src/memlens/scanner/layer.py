"""The state of one layer of a scan: exact triggers, statistics, and a sample of ordinary prefixes.

TopTriggers is associative and commutative: its order is total (higher coefficient, then lower sentence, then lower
position), so any cut into batches, any worker and any merge tree give the same lists. The bottom end is the same with
the sign turned. Coefficients come group by group, those of an expert only where its router sent a token there; on this
machine's processor they go through the compiled pass, on another device they are filtered there, so that only the ones
that reach a list travel.
"""

from __future__ import annotations

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
from memlens.scanner.block import LayerArrays, take_block_
from memlens.scanner.kernels import TOO_LARGE, Sums, Totals, add_, collect_, worse
from memlens.scanner.lists import BUCKETS, Candidates, FloatArray, IntArray, Lists, make_candidates, merge_, offer_
from memlens.scanner.positions import PositionCounts
from memlens.scanner.quadrants import NO_GATES, Gates, Quadrants
from memlens.scanner.routing import Routing, among_rows
from memlens.scanner.sample import OrdinarySample, draw_, drawn_of
from memlens.settings import ScanSettings


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
        candidates, memories = make_candidates(np.arange(len(block)), sentences, positions), block.shape[1]
        collect_(
            block, candidates, 0, memories, 0, self.top_lists, self.bottom_lists, self.keeps_bottom,
            self.one_a_sentence, Totals.empty(np.zeros((memories, BUCKETS), np.int64)), NO_GATES, Quadrants.empty(0),
            False,
        )  # fmt: skip

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


_DENSE = 16  # when more than one coefficient in so many reaches a list, sending the whole block is cheaper


class LayerScan:
    """Everything that a scan keeps of one layer."""

    def __init__(
        self, layer: int, memories: int, bottom: bool, experts: int = 0, size: int = 0, gated: bool = False, *,
        settings: ScanSettings,
    ) -> None:  # fmt: skip
        self.layer, self.size = layer, size  # `size`: memories of one expert
        self.triggers = TopTriggers(memories, settings.top, per_sentence=settings.per_sentence, bottom=bottom)
        # Each layer draws its own sample, as the same prefixes in all of them would be.
        seed = settings.seed * 1_000_003 + layer
        self.sample = OrdinarySample(memories, seed, settings.sample_every)
        self.routing = Routing(experts, settings.top, seed) if experts else None
        self.positions = PositionCounts(memories, experts)
        self.quadrants = Quadrants.empty(memories) if gated else None
        self._turned = set[int]()  # the groups, by their first memory, of which the sign of a shut gate is noted
        self.totals = Totals.empty(self.positions.fired)
        self._arrays = LayerArrays(
            self.triggers.top_lists, self.triggers.bottom_lists, self.totals,
            Quadrants.empty(0) if self.quadrants is None else self.quadrants, self.sample.kept(),
        )  # fmt: skip

    def update(self, block: CoefficientBlock, candidates: Candidates, pool: ThreadPoolExecutor | None = None) -> None:
        """Take in the coefficients of one group of memories in one batch.

        A token that is not sent to an expert is no candidate for its memories: nothing was computed there.
        """
        if block.rows is not None:
            candidates = among_rows(candidates, block.rows.cpu().numpy(), block.shape[0] * block.shape[1])
            if self.routing is not None and block.weights is not None:
                self.routing.update(block.group.expert, block.weights, candidates)
        if block.rows is not None or block.group.start == 0:  # what all tokens reach is counted once
            self.positions.add_prefixes(0 if block.rows is None else 1 + block.group.expert, candidates)
        gates = block.gates if self.quadrants is not None else None
        if self.quadrants is not None and gates is not None and block.group.start not in self._turned:
            self.quadrants.turns[block.group.columns] = block.group.gate_turns
            self._turned.add(block.group.start)
        if block.coefficients.device.type == "cpu":
            coefficients = block.coefficients.to(torch.float32).contiguous().numpy()
            self._update_here(block.group, coefficients, gates, candidates, pool)
        else:
            self._update_on_device(block.group, block.coefficients, gates, candidates)

    def _update_here(
        self, group: MemoryGroup, block: NDArray[np.float32], gates: torch.Tensor | None, candidates: Candidates,
        pool: ThreadPoolExecutor | None,
    ) -> None:  # fmt: skip
        memories, bottom, best = block.shape[1], self.triggers.keeps_bottom, self.triggers.one_a_sentence
        signs, has_gates = (NO_GATES, False) if gates is None else (Gates.of(gates), True)

        def take(columns: tuple[int, int]) -> int:
            return take_block_(self._arrays, block, signs, candidates, *columns, group.start, bottom, best, has_gates)

        if pool is None or not len(candidates.rows):
            self._check(group, take((0, memories)))
        else:
            edges = np.linspace(0, memories, pool._max_workers + 1).astype(int).tolist()
            self._check(group, *pool.map(take, [(a, b) for a, b in pairwise(edges) if b > a]))

    def _update_on_device(
        self, group: MemoryGroup, block: torch.Tensor, gates: torch.Tensor | None, candidates: Candidates
    ) -> None:
        rows = torch.from_numpy(candidates.rows).to(block.device)
        chosen = block.index_select(0, rows).to(torch.float32)  # [n, size]
        signs = None if gates is None else gates.index_select(0, rows)
        if not len(candidates.rows):
            return
        lists = {1: self.triggers.top_lists.part(group.columns)}
        if self.triggers.keeps_bottom:
            lists[-1] = self.triggers.bottom_lists.part(group.columns)
        found = {sign: _reaches(sign * chosen, own) for sign, own in lists.items()}
        if sum(int(mask.count_nonzero()) for mask in found.values()) * _DENSE > chosen.numel():
            here = candidates._replace(rows=np.arange(len(chosen)))
            self._update_here(group, chosen.cpu().numpy(), None if signs is None else signs.cpu(), here, None)
            return
        for sign, mask in found.items():
            self._offer(lists[sign], sign * chosen, mask, candidates)
        if signs is not None:
            self._quadrants_on_device(group, chosen, signs > 0, candidates)
        buckets = torch.from_numpy(candidates.buckets).to(block.device, torch.int64)
        fired = torch.zeros(BUCKETS, chosen.shape[1], dtype=torch.int64, device=block.device)
        fired.index_add_(0, buckets, (chosen > 0).to(torch.int64))
        sums = (chosen.sum(0, dtype=torch.float64), fired, chosen.amax(0), chosen.amin(0))
        added = add_(self.totals, Sums(*(x.cpu().numpy() for x in sums)), group.start, chosen.shape[1])
        self._check(group, added)
        drawn = drawn_of(self._arrays.sample, candidates)
        part = chosen.index_select(0, torch.from_numpy(drawn).to(chosen.device)).cpu().numpy()
        draw_(self._arrays.sample, part, _subset(candidates, drawn), 0, chosen.shape[1], group.start)

    def _offer(
        self,
        lists: Lists,
        scores: torch.Tensor,
        mask: torch.Tensor,
        candidates: Candidates,
        rows: tuple[int, int] = (1, 0),
    ) -> None:
        """Offer the scores [n, memories] of a mask; `rows`: (a, b) where memory m has list a m + b."""
        row, memory = (index.cpu().numpy() for index in mask.nonzero(as_tuple=True))
        sentences, positions = candidates.sentences[row], candidates.positions[row]
        best = self.triggers.one_a_sentence
        offer_(lists, memory * rows[0] + rows[1], scores[mask].cpu().numpy(), sentences, positions, best)

    def _quadrants_on_device(
        self, group: MemoryGroup, chosen: torch.Tensor, is_open: torch.Tensor, candidates: Candidates
    ) -> None:
        if self.quadrants is None:
            return
        own = self.quadrants.part(group.columns)
        for place in range(4):
            scores = (1 - 2 * (place % 2)) * chosen * (is_open if place < 2 else ~is_open)
            own.counts[:, place] += (scores > 0).sum(0).cpu().numpy()
            bars = torch.from_numpy(own.lists.scores()[place::4, -1].copy()).to(chosen.device)
            self._offer(own.lists, scores, (scores >= bars) & (scores > 0), candidates, (4, place))

    def _check(self, group: MemoryGroup, *answers: int) -> None:
        """Refuse coefficients that cannot be added up, by what `add_` says of some columns of the group."""
        status = reduce(worse, answers)
        if status >= 0:
            raise ModelError(
                f"memory {MemoryId(self.layer, status, group.kind, group.expert)} has a coefficient that is NaN or "
                "infinite; the weights are damaged or the dtype is too small: try --dtype float32"
            )
        if status == TOO_LARGE:
            raise ModelError(
                f"layer {self.layer} has coefficients beyond 1e12; no trained model has: check the weights"
            )

    def merge(self, other: LayerScan) -> None:
        self.triggers.merge(other.triggers)
        self.sample.merge(other.sample)
        self.positions.merge(other.positions)
        if self.quadrants is not None and other.quadrants is not None:
            self.quadrants.merge(other.quadrants, self.triggers.one_a_sentence)
        np.add(self.totals.total, other.totals.total, out=self.totals.total)
        np.maximum(self.totals.highest, other.totals.highest, out=self.totals.highest)
        np.minimum(self.totals.lowest, other.totals.lowest, out=self.totals.lowest)
        if self.routing is not None and other.routing is not None:
            self.routing.merge(other.routing)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The state as plain arrays, to be saved."""
        return {
            **self.triggers.arrays(),
            **self.sample.arrays(),
            **self.positions.arrays(),
            **({} if self.quadrants is None else self.quadrants.arrays()),
            "total": self.totals.total,
            "highest": self.totals.highest,
            "lowest": self.totals.lowest,
            **({} if self.routing is None else self.routing.arrays()),
        }

    def restore_(self, saved: dict[str, NDArray[Any]]) -> None:
        self.triggers.restore_(saved)
        self.sample.restore_(saved)
        self.positions.restore_(saved)
        if self.quadrants is not None:
            self.quadrants.restore_(saved)
            self._turned.clear()
        self.totals.total[:] = saved["total"]
        self.totals.highest[:], self.totals.lowest[:] = saved["highest"], saved["lowest"]
        if self.routing is not None:
            self.routing.restore_(saved)


def _reaches(scores: torch.Tensor, lists: Lists) -> torch.Tensor:
    """A mask of the scores [n, memories] that are above zero and reach the last place of their list."""
    bars = torch.from_numpy(lists.scores()[:, -1].copy()).to(scores.device)
    return (scores >= bars) & (scores > 0)


def _subset(candidates: Candidates, chosen: IntArray) -> Candidates:
    """Chosen candidates, their rows renumbered from 0 (the sample does not look at `starts`)."""
    return candidates._replace(
        rows=np.arange(len(chosen)), sentences=candidates.sentences[chosen], positions=candidates.positions[chosen]
    )
