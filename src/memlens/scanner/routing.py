"""Experts behind a router in a scan: how often each is chosen, and prefixes that are sent to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from memlens.parallel import compiled
from memlens.scanner.lists import Candidates, FloatArray, IntArray, Lists, insert_, make_key, merge_
from memlens.scanner.sample import prefix_hash

if TYPE_CHECKING:
    import torch  # loops are compiled in a process that has none

# Sums are added as whole multiples of this unit: integers add up to the same bits in any order, floats do not.
UNIT = 2.0**-20
DRAWN = 100  # prefixes drawn at random for every expert


@compiled
def among_rows(candidates: Candidates, rows: IntArray, tokens: int) -> Candidates:
    """The candidates among some rows of a flattened batch of so many tokens, as rows of a block of only those rows."""
    place = np.full(tokens, -1, np.int64)
    for at in range(rows.shape[0]):
        place[rows[at]] = at
    most = min(rows.shape[0], candidates.rows.shape[0])
    found, sentences, starts = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most + 1, np.int64)
    positions, buckets = np.empty(most, np.int32), np.empty(most, np.int32)
    count, groups = 0, 0
    for i in range(candidates.rows.shape[0]):
        at = place[candidates.rows[i]]
        if at < 0:
            continue
        if count == 0 or candidates.sentences[i] != sentences[count - 1]:
            starts[groups] = count
            groups += 1
        found[count], sentences[count], positions[count] = at, candidates.sentences[i], candidates.positions[i]
        buckets[count] = candidates.buckets[i]
        count += 1
    starts[groups] = count
    return Candidates(found[:count], sentences[:count], positions[:count], buckets[:count], starts[: groups + 1])


@compiled
def _route_(
    expert: int, seed: int, weights: FloatArray, candidates: Candidates, chosen: IntArray, weight: IntArray,
    heaviest: Lists, drawn: Lists,
) -> None:  # fmt: skip
    chosen[expert] += candidates.rows.shape[0]
    for i in range(candidates.rows.shape[0]):
        own, sentence, position = weights[candidates.rows[i]], candidates.sentences[i], candidates.positions[i]
        weight[expert] += np.int64(np.rint(np.float64(own) / UNIT))
        if own > 0:
            insert_(heaviest, expert, make_key(own, sentence), position, True)
        score = np.float32((prefix_hash(seed, sentence, position) >> uint64(40)) + uint64(1))  # 24 bits, held exactly
        insert_(drawn, expert, make_key(score, sentence), position, False)


class Routing:
    """The experts of one layer."""

    def __init__(self, experts: int, top: int, seed: int) -> None:
        self.seed = seed
        self.chosen = np.zeros(experts, np.int64)  # candidate prefixes that were sent to each
        self.weight = np.zeros(experts, np.int64)  # the sum of their weights, in UNITs
        self.heaviest = Lists.empty(experts, top)  # the prefixes with the largest weights
        self.drawn = Lists.empty(experts, DRAWN)  # a random sample: those with the highest hashes

    def update(self, expert: int, weights: torch.Tensor, candidates: Candidates) -> None:
        """Take in the weights [n] of one expert's tokens in one batch."""
        own = weights.detach().cpu().float().numpy()
        _route_(expert, self.seed + expert, own, candidates, self.chosen, self.weight, self.heaviest, self.drawn)

    def merge(self, other: Routing) -> None:
        self.chosen += other.chosen
        self.weight += other.weight
        merge_(self.heaviest, other.heaviest, True)
        merge_(self.drawn, other.drawn, False)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The state as plain arrays, to be saved."""
        saved: dict[str, NDArray[Any]] = {"routing.chosen": self.chosen, "routing.weight": self.weight}
        for kind, lists in (("heaviest", self.heaviest), ("drawn", self.drawn)):
            saved |= {f"routing.{kind}.{name}": array for name, array in lists._asdict().items()}
        return saved

    def restore_(self, saved: dict[str, NDArray[Any]]) -> None:
        for name, array in self.arrays().items():
            array[:] = saved[name]
