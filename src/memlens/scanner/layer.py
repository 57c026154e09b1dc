"""The state of one layer of a scan: exact triggers, statistics, and a sample of ordinary prefixes.

TopTriggers is associative and commutative: its order is total (higher coefficient, then lower sentence, then lower
position), so any cut into batches, any worker and any merge tree give the same lists. The bottom end is the same with
the sign turned. Whether a prefix is in the sample depends on seed, sentence and position only. Coefficients on this
machine's processor go through the compiled pass; those on another device are filtered there, so that only the ones
that reach a list travel.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import uint64
from numpy.typing import NDArray

from memlens.errors import ModelError, SettingError
from memlens.parallel import compiled
from memlens.scanner.kernels import Candidates, FloatArray, IntArray, KeyArray, Lists, Sums, collect_, merge_, offer_
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


EXAMPLES = 8  # drawn per memory; those that turn out to be triggers are left out when the index is written
SMALLEST, LARGEST = -10, 5  # exponents of two: |m| below 2^-10 is the middle bin, from 2^5 on the outermost
SIDE = LARGEST - SMALLEST + 1
BINS = 2 * SIDE + 1
_COLUMNS = 16  # one cache line of a row


def bin_edges() -> list[float]:
    """The finite edges between the bins, from the most negative to the most positive."""
    magnitudes = [2.0**e for e in range(SMALLEST, LARGEST + 1)]
    return [-x for x in reversed(magnitudes)] + magnitudes


@compiled
def _mix(x: int) -> int:
    """A 64-bit finaliser (splitmix64): equal inputs give equal, well spread outputs on every machine."""
    x = uint64(x) + uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@compiled
def prefix_hashes(seed: int, sentences: IntArray, positions: IntArray) -> KeyArray:
    """One hash per prefix, [n]."""
    hashes = np.empty(sentences.shape[0], np.uint64)
    for i in range(sentences.shape[0]):
        hashes[i] = _mix(_mix(_mix(uint64(seed)) ^ uint64(sentences[i])) ^ uint64(positions[i] + 1))
    return hashes


class Examples(NamedTuple):
    """For every memory the prefixes with the lowest hashes among those it fires on."""

    hashes: KeyArray  # [memories, EXAMPLES]; all ones in empty places
    coefficients: FloatArray
    sentences: IntArray
    positions: IntArray


@compiled
def _keep_(examples: Examples, m: int, hash_: int, coefficient: np.float32, sentence: int, position: int) -> None:
    place = EXAMPLES
    while place > 0 and hash_ < examples.hashes[m, place - 1]:
        if place < EXAMPLES:
            examples.hashes[m, place] = examples.hashes[m, place - 1]
            examples.coefficients[m, place] = examples.coefficients[m, place - 1]
            examples.sentences[m, place] = examples.sentences[m, place - 1]
            examples.positions[m, place] = examples.positions[m, place - 1]
        place -= 1
    if place < EXAMPLES:
        examples.hashes[m, place] = hash_
        examples.coefficients[m, place] = coefficient
        examples.sentences[m, place] = sentence
        examples.positions[m, place] = position


@compiled
def _draw_(
    block: FloatArray, rows: IntArray, hashes: KeyArray, sentences: IntArray, positions: IntArray, counts: IntArray,
    examples: Examples,
) -> None:  # fmt: skip
    bits, highest = block.view(np.int32), examples.hashes
    memories = block.shape[1]
    for tile in range(0, memories, _COLUMNS):  # so that the counts of a few memories stay close while all rows pass
        for i in range(rows.shape[0]):
            for m in range(tile, min(tile + _COLUMNS, memories)):
                value = block[rows[i], m]
                # The exponent field is floor(log2 |value|) + 127, exactly; zero and denormals lie far below.
                exponent = ((bits[rows[i], m] >> 23) & 0xFF) - 127
                away = min(max(exponent - SMALLEST + 1, 0), SIDE)
                counts[m, SIDE + (away if value > 0 else -away)] += 1
                hash_ = _mix(hashes[i] ^ uint64(m))
                if value > 0 and hash_ < highest[m, EXAMPLES - 1]:
                    _keep_(examples, m, hash_, value, sentences[i], positions[i])


@compiled
def _merge_(examples: Examples, others: Examples) -> None:
    empty = uint64(0xFFFFFFFFFFFFFFFF)
    for m in range(others.hashes.shape[0]):
        for i in range(EXAMPLES):
            if others.hashes[m, i] != empty:
                _keep_(
                    examples, m, others.hashes[m, i], others.coefficients[m, i], others.sentences[m, i],
                    others.positions[m, i],
                )  # fmt: skip


class OrdinarySample:
    """Histogram and example prefixes of one layer's memories."""

    def __init__(self, memories: int, seed: int, every: int) -> None:
        self.seed = seed
        self.limit = np.uint64((2**64 - 1) // every)
        self.counts = np.zeros((memories, BINS), np.int64)
        shape = (memories, EXAMPLES)
        self.examples = Examples(
            np.full(shape, 2**64 - 1, np.uint64),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
        )

    def drawn(self, candidates: Candidates) -> IntArray:
        """Which of the candidates are in the sample, as indices."""
        hashes = prefix_hashes(self.seed, candidates.sentences, candidates.positions)
        return np.flatnonzero(hashes <= self.limit)

    def update(self, block: FloatArray, candidates: Candidates) -> None:
        """Draw from a block [rows, memories]."""
        drawn = self.drawn(candidates)
        if len(drawn):
            rows, sentences = candidates.rows[drawn], candidates.sentences[drawn]
            positions = candidates.positions[drawn]
            hashes = prefix_hashes(self.seed, sentences, positions)
            _draw_(block, rows, hashes, sentences, positions, self.counts, self.examples)

    def merge(self, other: OrdinarySample) -> None:
        self.counts += other.counts
        _merge_(self.examples, other.examples)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"sample.counts": self.counts} | {f"sample.{n}": a for n, a in self.examples._asdict().items()}

    def restore_(self, saved: dict[str, NDArray[Any]]) -> None:
        for name, array in self.arrays().items():
            array[:] = saved[name]


# Sums are added as whole multiples of this unit: integers add up to the same bits in any order, floats do not.
UNIT = 2.0**-20
_DENSE = 16  # when more than one coefficient in so many reaches a list, sending the whole block is cheaper


class LayerScan:
    """Everything that a scan keeps of one layer."""

    def __init__(self, layer: int, memories: int, bottom: bool, settings: ScanSettings) -> None:
        self.layer = layer
        self.triggers = TopTriggers(memories, settings.top, per_sentence=settings.per_sentence, bottom=bottom)
        # Each layer draws its own sample, as the same prefixes in all of them would be.
        self.sample = OrdinarySample(memories, settings.seed * 1_000_003 + layer, settings.sample_every)
        self.total = np.zeros(memories, np.int64)  # in UNITs
        self.positive = np.zeros(memories, np.int64)
        self.highest = np.full(memories, -np.inf, np.float32)
        self.lowest = np.full(memories, np.inf, np.float32)

    def update(self, block: torch.Tensor, candidates: Candidates, pool: ThreadPoolExecutor | None = None) -> None:
        """Take in the coefficients [rows, memories] of one batch."""
        if block.device.type == "cpu":
            self._update_here(block.to(torch.float32).contiguous().numpy(), candidates, pool)
        else:
            self._update_on_device(block, candidates)

    def _update_here(self, block: NDArray[np.float32], candidates: Candidates, pool: ThreadPoolExecutor | None) -> None:
        memories = block.shape[1]
        sums = Sums.empty(memories)
        if pool is None:
            self.triggers.collect(block, candidates, sums)
        else:
            edges = np.linspace(0, memories, pool._max_workers + 1).astype(int).tolist()
            columns = [(a, b) for a, b in pairwise(edges) if b > a]
            list(pool.map(lambda own: self.triggers.collect(block, candidates, sums, *own), columns))
        self._add(sums, len(candidates.rows))
        self.sample.update(block, candidates)

    def _update_on_device(self, block: torch.Tensor, candidates: Candidates) -> None:
        rows = torch.from_numpy(candidates.rows).to(block.device)
        chosen = block.index_select(0, rows).to(torch.float32)  # [n, memories]
        if not len(candidates.rows):
            return
        found = {1: _reaches(chosen, self.triggers.top_lists)}
        if self.triggers.keeps_bottom:
            found[-1] = _reaches(-chosen, self.triggers.bottom_lists)
        if sum(int(mask.count_nonzero()) for mask in found.values()) * _DENSE > chosen.numel():
            self._update_here(chosen.cpu().numpy(), candidates._replace(rows=np.arange(len(chosen))), None)
            return
        for sign, mask in found.items():
            row, memory = (index.cpu().numpy() for index in mask.nonzero(as_tuple=True))
            scores = (sign * chosen[mask]).cpu().numpy()
            lists = self.triggers.top_lists if sign > 0 else self.triggers.bottom_lists
            sentences, positions = candidates.sentences[row], candidates.positions[row]
            offer_(lists, memory, scores, sentences, positions, self.triggers.one_a_sentence)
        total, positive = chosen.sum(0, dtype=torch.float64), (chosen > 0).sum(0)
        extremes = (chosen.amax(0), chosen.amin(0))
        self._add(Sums(*(x.cpu().numpy() for x in (total, positive, *extremes))), len(chosen))
        self._sample_on_device(chosen, candidates)

    def _sample_on_device(self, chosen: torch.Tensor, candidates: Candidates) -> None:
        drawn = self.sample.drawn(candidates)
        part = chosen.index_select(0, torch.from_numpy(drawn).to(chosen.device)).cpu().numpy()
        self.sample.update(part, _subset(candidates, drawn))

    def _add(self, sums: Sums, rows: int) -> None:
        if rows == 0:
            return
        if not np.isfinite(sums.total).all():
            worst = int(np.flatnonzero(~np.isfinite(sums.total))[0])
            raise ModelError(
                f"memory L{self.layer}N{worst} has a coefficient that is NaN or infinite; "
                "the weights are damaged or the dtype is too small: try --dtype float32"
            )
        if np.abs(sums.total).max() > 2.0**62 * UNIT:
            raise ModelError(
                f"layer {self.layer} has coefficients beyond 1e12; no trained model has: check the weights"
            )
        self.total += np.rint(sums.total / UNIT).astype(np.int64)
        self.positive += sums.positive
        np.maximum(self.highest, sums.highest, out=self.highest)
        np.minimum(self.lowest, sums.lowest, out=self.lowest)

    def merge(self, other: LayerScan) -> None:
        self.triggers.merge(other.triggers)
        self.sample.merge(other.sample)
        self.total += other.total
        self.positive += other.positive
        np.maximum(self.highest, other.highest, out=self.highest)
        np.minimum(self.lowest, other.lowest, out=self.lowest)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The state as plain arrays, to be saved."""
        return {
            **self.triggers.arrays(),
            **self.sample.arrays(),
            "total": self.total,
            "positive": self.positive,
            "highest": self.highest,
            "lowest": self.lowest,
        }

    def restore_(self, saved: dict[str, NDArray[Any]]) -> None:
        self.triggers.restore_(saved)
        self.sample.restore_(saved)
        self.total[:], self.positive[:] = saved["total"], saved["positive"]
        self.highest[:], self.lowest[:] = saved["highest"], saved["lowest"]


def _reaches(scores: torch.Tensor, lists: Lists) -> torch.Tensor:
    """Which scores [n, memories] are above zero and at least as high as the last place of their list."""
    bars = torch.from_numpy(lists.scores()[:, -1].copy()).to(scores.device)
    return (scores >= bars) & (scores > 0)


def _subset(candidates: Candidates, chosen: IntArray) -> Candidates:
    """Chosen candidates, their rows renumbered from 0 (the sample does not look at `starts`)."""
    return candidates._replace(
        rows=np.arange(len(chosen)), sentences=candidates.sentences[chosen], positions=candidates.positions[chosen]
    )
