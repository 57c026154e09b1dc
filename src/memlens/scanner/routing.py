"""Experts behind a router in a scan: how often each is chosen, and prefixes that are sent to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memlens.parallel import compiled
from memlens.scanner.lists import Candidates, IntArray, Lists, merge_, offer_
from memlens.scanner.sample import prefix_hashes

# Sums are added as whole multiples of this unit: integers add up to the same bits in any order, floats do not.
UNIT = 2.0**-20
DRAWN = 100  # prefixes drawn at random for every expert


@compiled
def _among_(candidates: Candidates, place: IntArray, found: Candidates) -> tuple[int, int]:
    rows, sentences, positions, buckets, starts = found
    count, groups = 0, 0
    for i in range(candidates.rows.shape[0]):
        at = place[candidates.rows[i]]
        if at < 0:
            continue
        if count == 0 or candidates.sentences[i] != sentences[count - 1]:
            starts[groups] = count
            groups += 1
        rows[count], sentences[count], positions[count] = at, candidates.sentences[i], candidates.positions[i]
        buckets[count] = candidates.buckets[i]
        count += 1
    starts[groups] = count
    return count, groups


def among_rows(candidates: Candidates, rows: IntArray, tokens: int) -> Candidates:
    """The candidates among some rows of a flattened batch of so many tokens, as rows of a block of only those rows."""
    place = np.full(tokens, -1, np.int64)
    place[rows] = np.arange(len(rows))
    most = min(len(rows), len(candidates.rows))
    found = Candidates(
        rows=np.empty(most, np.int64),
        sentences=np.empty(most, np.int64),
        positions=np.empty(most, np.int32),
        buckets=np.empty(most, np.int32),
        starts=np.empty(most + 1, np.int64),
    )
    count, groups = _among_(candidates, place, found)
    rows, sentences, positions, buckets, starts = found
    return Candidates(rows[:count], sentences[:count], positions[:count], buckets[:count], starts[: groups + 1])


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
        own = weights.detach().to("cpu", torch.float32).numpy()[candidates.rows]
        self.chosen[expert] += len(own)
        self.weight[expert] += np.rint(own.astype(np.float64) / UNIT).astype(np.int64).sum()
        experts = np.full(len(own), expert)
        offer_(self.heaviest, experts, own, candidates.sentences, candidates.positions, True)
        hashes = prefix_hashes(self.seed + expert, candidates.sentences, candidates.positions)
        scores = ((hashes >> np.uint64(40)) + np.uint64(1)).astype(np.float32)  # 24 bits, which a float32 holds exactly
        offer_(self.drawn, experts, scores, candidates.sentences, candidates.positions, False)

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
