"""The device path of a scan: coefficients stay on the device, and the CPU receives only those that reach a list.

1. Sort the rows of a block by expert and range of positions, and cut them into strips of rows with the same expert and
   range (`make_strips`). The order is computed on the device, because the router's choices are there.
2. Compute maximum, minimum, sum and count of positive coefficients of each memory in each strip, and the same for each
   sign quadrant of gated memories. Compare the extremes with the thresholds of the lists (`strip_statistics`). On CUDA,
   torch.compile fuses these operations.
3. Add the statistics to totals of the layer on the device (`Source.add`). Sums are whole numbers, so the order of
   additions does not change them.
4. Only strips that reach a threshold are read again. Their prefixes are appended to a buffer of fixed size, with a
   counter (`Source.find_hits`).
5. After the batch, all buffers of a device are copied to the CPU at once, on another stream. While the device computes
   the next batches, a thread inserts the prefixes into the lists and computes new thresholds.

Only step 5 waits for the device, once per batch. A threshold that is some batches old is lower, so more prefixes reach
it and none is lost: lists, counts, extremes, histograms and examples have the same bytes as those of the
compiled loops. If a buffer overflows, its layer is run again for that batch. Only sums may differ: the compiled loops
round them to float32 in each sentence, and this path in each strip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.models.experts import stacked_experts
from memlens.models.groups import CoefficientBlock, MemoryGroup, RoutedBlock
from memlens.models.memory_model import MemoryModel
from memlens.scanner.kernels import (
    BUCKETS,
    UNIT,
    Candidates,
    IntArray,
    Lists,
    count_reach_,
    insert_all_,
    sample_block_,
    sampled_candidates,
)
from memlens.scanner.layer import LayerScan

ROWS = 32  # rows of a strip; strips of experts have half as many, because experts have fewer rows
_WAITING = 2  # maximum number of batches that wait for insertion into the lists
_ROOM = 1024  # minimum number of strips that a buffer of hits has room for
_FRACTION = 2**24  # sums are kept in fixed point: number of parts per UNIT
_LARGEST = 2.0**62 * UNIT  # larger sums raise ModelError
# limits of torch.compile for computing an intermediate result again instead of storing it
FUSION: dict[str, Any] = {
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 1000,
    "realize_acc_reads_threshold": 64,
}
_EXACT = ("highest", "lowest", "fired", "quadrants", "reaches")  # statistics that do not depend on the order of sums
_SMALLEST_SCORE = np.float32(1e-45)


class Strips(NamedTuple):
    """The rows of a block in strips. Rows that are not candidate prefixes form an extra group, which is the last."""

    rows: Tensor  # [strips, ROWS]: row of the block; the last row of a group is repeated until its strip is full
    is_row: Tensor  # [strips, ROWS]: False where a row is repeated
    groups: Tensor  # [strips]: expert * BUCKETS + range of positions
    experts: Tensor  # [strips]


def make_strips(keys: Tensor, groups: int, height: int) -> Strips:
    """Return strips of rows with the same key. Keys [n] are below `groups`; rows with the key `groups` are ignored."""
    count, device = len(keys), keys.device
    ordered, order = torch.sort(keys, stable=True)
    edges = torch.searchsorted(ordered, torch.arange(groups + 2, device=device))  # first row of each group
    strip_edges = torch.zeros_like(edges)
    torch.cumsum((edges.diff() + height - 1).div(height, rounding_mode="floor"), 0, out=strip_edges[1:])
    numbers = torch.arange(count // height + groups + 1, device=device)  # at least as many as there are strips
    group = torch.searchsorted(strip_edges[1:], numbers, right=True).clamp(max=groups)
    first = edges[group] + (numbers - strip_edges[group]) * height
    places = first[:, None] + torch.arange(height, device=device)
    last = edges[group + 1][:, None] - 1
    is_row = places <= last
    rows = order[torch.minimum(places, last).clamp(0, count - 1)]
    experts = group.div(BUCKETS, rounding_mode="floor")
    return Strips(rows, is_row, group, experts)


class StripStatistics(NamedTuple):
    """Statistics of the memories of a block in each strip, [strips, size]."""

    highest: Tensor  # float32
    lowest: Tensor  # float32
    units: Tensor  # int64: whole UNITs of the sum
    parts: Tensor  # int64: the rest of the sum in parts (1/_FRACTION) of a UNIT
    sizes: Tensor  # float32: |sum|
    fired: Tensor  # int32: number of positive coefficients
    quadrants: Tensor  # [4 or 0, strips, size] int32: number of coefficients in each quadrant
    reaches: Tensor  # [kinds, strips, size]: whether a coefficient reaches the threshold of the kind (see `Source`)


def strip_statistics(
    block: Tensor, gates: Tensor | None, strips: Strips, thresholds: Tensor, keeps_bottom: bool
) -> StripStatistics:
    """Read the strips of a block [n, size]. No operation of this function waits for the device.

    Args:
        block: The coefficients.
        gates: The gates [n, size], or None if quadrants are not kept.
        strips: The strips of the block.
        thresholds: Thresholds of each kind, [kinds, experts + 1, size] (see `Source`).
        keeps_bottom: True if bottom triggers are collected. The second kind is then the bottom end.
    """
    shape = (*strips.rows.shape, block.shape[1])
    x = block.index_select(0, strips.rows.reshape(-1)).view(shape)
    own = torch.where(strips.is_row[:, :, None], x, 0)  # repeated rows do not count
    sums, fired = own.sum(1, dtype=torch.float32), (own > 0).sum(1, dtype=torch.int32)
    lowest, highest = x.amin(1).float(), x.amax(1).float()
    scores, quadrants = [highest, *([-lowest] if keeps_bottom else [])], list[Tensor]()
    if gates is not None:
        is_open = gates.index_select(0, strips.rows.reshape(-1)).view(shape) > 0
        for half in (torch.where(is_open, own, 0), torch.where(is_open, 0, own)):
            scores += [half.amax(1).float(), -half.amin(1).float()]
            quadrants += [(half > 0).sum(1, dtype=torch.int32), (half < 0).sum(1, dtype=torch.int32)]
    reaches = [score >= own.index_select(0, strips.experts) for score, own in zip(scores, thresholds, strict=True)]
    counts = torch.stack(quadrants) if quadrants else fired[:0]
    return StripStatistics(highest, lowest, *_split_units(sums), sums.abs(), fired, counts, torch.stack(reaches))


@cache
def strip_reader(device: torch.device) -> Callable[..., StripStatistics]:
    """Return `strip_statistics`, compiled if the device is a GPU on which torch.compile works."""
    return compile_reader(device) or strip_statistics if device.type == "cuda" else strip_statistics


def compile_reader(device: torch.device) -> Callable[..., StripStatistics] | None:
    """Return `strip_statistics` compiled for a device, or None if compiling fails or changes results on an example."""
    compiled = torch.compile(strip_statistics, dynamic=True, options=FUSION)
    random = torch.Generator().manual_seed(0)
    block, gates = torch.randn(2, 100, 40, generator=random).to(device)
    strips = make_strips(torch.arange(100, device=device) % BUCKETS, BUCKETS, ROWS)
    arguments = block, gates, strips, torch.ones(6, 2, 40, device=device), True
    try:
        actual = compiled(*arguments)
    except Exception:  # for example, no compiler is installed
        return None
    expected = strip_statistics(*arguments)
    exact = [torch.equal(getattr(actual, name), getattr(expected, name)) for name in _EXACT]
    return compiled if all(exact) else None


class Hits(NamedTuple):
    """The prefixes of one block that reach a threshold, in buffers that are copied to the CPU."""

    counts: Tensor  # [2]: number of strips and of prefixes that reach a threshold; the buffers may hold only the first
    lists: Tensor  # [room] int32: kind * memories of the layer + memory
    tokens: Tensor  # [room] int32: row of the flattened batch; -1 in empty places
    scores: Tensor  # [room] float32


class _Batch(NamedTuple):
    tokens: Tensor  # [batch, pos]
    candidates: Candidates
    ranges: Tensor  # [batch * pos]: range of positions of each candidate; BUCKETS for other rows
    places: IntArray  # [batch * pos]: index of each row in the arrays of `candidates`


class Source:
    """Totals and thresholds of one dense block or shared expert, or of all experts behind a router, on their device.

    A kind is one end of the ranking (top or bottom) or one of the four sign quadrants. Rows that are not candidates
    belong to an additional expert, whose thresholds are infinite.
    """

    def __init__(self, scan: LayerScan, groups: Sequence[MemoryGroup]) -> None:
        self.scan, self.groups = scan, groups
        self.start, self.experts, self.size = groups[0].start, len(groups), groups[0].size
        self.gated = groups[0].gated and scan.quadrants is not None
        self.is_routed = groups[0].kind == "routed"
        self.device, self.room = groups[0].values.device, _ROOM
        self.memories = len(scan.totals.total)
        if self.gated and scan.quadrants is not None:
            scan.quadrants.turns[self.start : self.start + self.experts * self.size] = groups[0].gate_turns
        signs = [sign for sign, _, _ in self.kinds()]
        self.signs = to_device(torch.tensor(signs, dtype=torch.float32), self.device)
        self.new_thresholds: Tensor | None = self.host_thresholds()
        self.reset()

    def reset(self) -> None:
        """Set all totals to their values before the first prefix."""
        shape = (self.experts + 1, self.size)

        def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        self.units = filled(0, torch.int64, *shape)
        self.fired = filled(0, torch.int32, (self.experts + 1) * BUCKETS, self.size)
        self.highest = filled(-torch.inf, torch.float32, *shape)
        self.lowest = filled(torch.inf, torch.float32, *shape)
        self.quadrants = filled(0, torch.int32, 4, *shape)
        self.sizes = filled(0, torch.float32, *shape)  # largest sum of |sums of strips| in a block

    def kinds(self) -> list[tuple[int, Lists, int]]:
        """Return (sign of the scores, lists, quadrant) of each kind. The quadrant of the kinds top and bottom is -1."""
        triggers, quadrants = self.scan.triggers, self.scan.quadrants
        kinds = [(1, triggers.top_lists, -1)]
        if triggers.keeps_bottom:
            kinds.append((-1, triggers.bottom_lists, -1))
        if self.gated and quadrants is not None:
            kinds += [(1 - 2 * (quadrant % 2), quadrants.lists, quadrant) for quadrant in range(4)]
        return kinds

    def host_thresholds(self) -> Tensor:
        """Return the scores [kinds, experts + 1, size] that a prefix must reach to enter the current lists."""
        first, stop = self.start, self.start + self.experts * self.size
        thresholds = []
        for _, lists, quadrant in self.kinds():
            last = lists.keys[first:stop, -1] if quadrant < 0 else lists.keys[4 * first + quadrant : 4 * stop : 4, -1]
            scores = (last >> np.uint64(32)).astype(np.uint32).view(np.float32)
            thresholds.append(np.maximum(scores, _SMALLEST_SCORE).reshape(self.experts, self.size))
        return torch.from_numpy(np.pad(np.stack(thresholds), ((0, 0), (0, 1), (0, 0)), constant_values=np.inf))

    def take_thresholds(self) -> None:
        """Copy the latest thresholds to the device if they have changed."""
        if (thresholds := self.new_thresholds) is not None:
            self.thresholds, self.new_thresholds = to_device(thresholds, self.device), None

    def add(self, statistics: StripStatistics, strips: Strips) -> None:
        """Add the statistics of a block to the totals."""
        self.fired.index_add_(0, strips.groups, statistics.fired)
        if self.gated:
            self.quadrants.index_add_(1, strips.experts, statistics.quadrants)
        index = strips.experts[:, None].expand(-1, self.size)
        self.highest.scatter_reduce_(0, index, statistics.highest, "amax")
        self.lowest.scatter_reduce_(0, index, statistics.lowest, "amin")
        units, parts = torch.zeros_like(self.units), torch.zeros_like(self.units)
        units.index_add_(0, strips.experts, statistics.units)
        parts.index_add_(0, strips.experts, statistics.parts)
        self.units += _round_units(units, parts)
        sizes = torch.zeros_like(self.sizes).index_add_(0, strips.experts, statistics.sizes)
        self.sizes = torch.maximum(self.sizes, sizes)  # NaN if one of the two is NaN

    def find_hits(self, block: Tensor, gates: Tensor | None, reaches: Tensor, strips: Strips, tokens: Tensor) -> Hits:
        """Return the prefixes that reach a threshold. `tokens` [n] maps rows of the block to the flattened batch."""
        room, height, size = self.room, strips.rows.shape[1], self.size
        pairs = first_places(reaches.view(-1), room)
        is_pair, pairs = pairs >= 0, pairs.clamp(min=0)
        column, strip = pairs % size, pairs.div(size, rounding_mode="floor") % len(strips.rows)
        kind = pairs.div(size * len(strips.rows), rounding_mode="floor")
        thresholds = self.thresholds[kind, strips.experts[strip], column]
        rows = strips.rows[strip]  # [room, height]
        scores = self.signs[kind][:, None] * block[rows, column[:, None]].float()
        is_hit = (scores >= thresholds[:, None]) & strips.is_row[strip] & is_pair[:, None]
        if gates is not None:
            quadrant = kind - (len(self.signs) - 4)
            is_open = gates[rows, column[:, None]] > 0
            is_hit &= (quadrant < 0)[:, None] | (is_open == (quadrant < 2)[:, None])
        hits = first_places(is_hit.view(-1), 2 * room)
        is_used, hits = hits >= 0, hits.clamp(min=0)
        pair = hits.div(height, rounding_mode="floor")
        memory = self.start + strips.experts[strip[pair]] * size + column[pair]
        numbers = kind[pair] * self.memories + memory
        places = torch.where(is_used, tokens[rows.view(-1)[hits]], -1)
        counts = torch.stack([reaches.sum(), is_hit.sum()])
        return Hits(counts, numbers.to(torch.int32), places.to(torch.int32), scores.view(-1)[hits])

    def insert(self, batch: _Batch, numbers: IntArray, tokens: IntArray, scores: NDArray[np.float32]) -> None:
        """Insert hits into the lists."""
        candidates, places = batch.candidates, batch.places
        kinds, memories = np.divmod(numbers.astype(np.int64), self.memories)
        for number, (_, lists, quadrant) in enumerate(self.kinds()):
            is_own = kinds == number
            place = places[tokens[is_own]]
            rows = memories[is_own] if quadrant < 0 else 4 * memories[is_own] + quadrant
            insert_all_(
                lists, rows, scores[is_own], candidates.sentences[place], candidates.positions[place],
                self.scan.triggers.one_a_sentence,
            )  # fmt: skip

    def insert_sample(self, batch: _Batch, sample: Tensor, tokens: Tensor, experts: Tensor) -> None:
        """Add sampled prefixes to histograms and examples."""
        candidates = batch.candidates
        coefficients, place, expert = sample.float().numpy(), batch.places[tokens.numpy()], experts.numpy()
        for number in np.unique(expert).tolist():
            own = place[expert == number]
            chosen = Candidates(
                np.arange(len(own)), candidates.sentences[own], candidates.positions[own], candidates.buckets[own],
                candidates.starts,
            )  # fmt: skip
            start = self.start + number * self.size
            sample_block_(self.scan.sample, coefficients[expert == number], chosen, 0, self.size, start)

    def count_reach(self, batch: _Batch, routing: Sequence[Tensor]) -> None:
        """Count the prefixes that reached the memories."""
        if routing:
            tokens, experts, weights = (tensor.numpy() for tensor in routing)
            edges = np.searchsorted(experts, np.arange(self.experts + 1))
            for group, (first, stop) in zip(self.groups, pairwise(edges), strict=True):
                if stop > first:
                    self.scan.count_routed(
                        group, tokens[first:stop], weights[first:stop], len(batch.places), batch.candidates
                    )
        elif self.start == 0:
            count_reach_(self.scan.reach, 0, batch.candidates)

    def collect(self) -> None:
        """Add the totals on the device to those of the layer, and reset the former. Waits for the device.

        Raises:
            ModelError: A coefficient is NaN, infinite or absurdly large.
        """
        scan, columns = self.scan, slice(self.start, self.start + self.experts * self.size)

        def flat(totals: Tensor) -> NDArray[Any]:
            array: NDArray[Any] = totals[..., : self.experts, :].cpu().numpy()
            return array.reshape(*array.shape[:-2], -1)

        sizes = flat(self.sizes)
        bad = np.flatnonzero(~np.isfinite(sizes))
        if len(bad) or (sizes > _LARGEST).any():
            group, column = (self.groups[bad[0] // self.size], bad[0] % self.size) if len(bad) else (self.groups[0], -2)
            scan.check_status(group, int(column))
        totals = scan.totals
        totals.total[columns] += flat(self.units)
        np.maximum(totals.highest[columns], flat(self.highest) + np.float32(0), out=totals.highest[columns])
        np.minimum(totals.lowest[columns], flat(self.lowest) + np.float32(0), out=totals.lowest[columns])
        fired = self.fired.view(self.experts + 1, BUCKETS, self.size).transpose(0, 1)
        totals.fired[columns] += flat(fired).T
        if self.gated and scan.quadrants is not None:
            scan.quadrants.counts[columns] += flat(self.quadrants).T
        self.reset()


def _split_units(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums as whole UNITs and the rest as parts of a UNIT, both int64."""
    units = sums / UNIT  # exact: UNIT is a power of two
    whole = units.trunc()
    return whole.to(torch.int64), ((units - whole) * _FRACTION).to(torch.int64)


def _round_units(units: Tensor, parts: Tensor) -> Tensor:
    """Round to whole UNITs. A sum halfway between two whole numbers is rounded to the even one."""
    rounded = units + (parts + _FRACTION // 2).div(_FRACTION, rounding_mode="floor")
    is_tie = parts.remainder(_FRACTION) == _FRACTION // 2
    return rounded - (is_tie & (rounded % 2 == 1)).to(torch.int64)


def first_places(mask: Tensor, count: int) -> Tensor:
    """Return the places of the first `count` true entries, padded with -1, without waiting for the device."""
    if mask.device.type in ("cpu", "cuda"):
        return torch.nonzero_static(mask, size=count, fill_value=-1)[:, 0]
    return _first_places_by_sums(mask, count)


def _first_places_by_sums(mask: Tensor, count: int) -> Tensor:
    number = mask.cumsum(0) - 1
    target = torch.where(mask & (number < count), number, count)
    places = torch.full((count + 1,), -1, dtype=torch.int64, device=mask.device)
    return places.scatter_(0, target, torch.arange(len(mask), device=mask.device))[:count]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def copy_to_host(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start copying tensors of one device to the CPU. Returns a function that waits for the copies and returns them."""
    filled = [i for i, tensor in enumerate(tensors) if tensor.numel()]
    order = sorted(filled, key=lambda i: -tensors[i].element_size())  # keeps all parts aligned
    joined = torch.cat([tensors[i].reshape(-1).view(torch.uint8) for i in order])
    if joined.device.type == "cuda":
        stream = _copy_stream(joined.device)
        stream.wait_stream(torch.cuda.current_stream(joined.device))
        with torch.cuda.stream(stream):
            copied = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True)
            copied.copy_(joined, non_blocking=True)
            joined.record_stream(stream)
            wait = stream.record_event().synchronize
    else:
        copied, wait = joined.cpu(), lambda: None

    def receive() -> list[Tensor]:
        wait()
        parts, first = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors], 0
        for i in order:
            size = tensors[i].numel() * tensors[i].element_size()
            parts[i] = copied[first : first + size].view(tensors[i].dtype).view(tensors[i].shape)
            first += size
        return parts

    return receive


@cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


class _Sent(NamedTuple):
    """The results that one source sends to the CPU after a batch. `token` means a row of the flattened batch."""

    source: Source
    hits: Hits
    sample: tuple[Tensor, ...]  # coefficients [sampled, size], and the token and expert of each row
    routing: tuple[Tensor, ...]  # token, expert and weight of each row of a RoutedBlock


class DeviceScan:
    """Scans batches of a model on a device. The state is complete after `finish`."""

    def __init__(self, model: MemoryModel, layers: Mapping[int, LayerScan]) -> None:
        self.model, self.layers = model, layers
        self.sources: dict[tuple[int, int], Source] = {}  # by layer and first memory
        for number, scan in layers.items():
            layer = model.layers[number]
            groups: list[Sequence[MemoryGroup]] = [(group,) for group in layer.groups if group.kind != "routed"]
            groups += [[experts.groups[e] for e in sorted(experts.groups)] for experts in stacked_experts(layer)]
            for own in groups:
                self.sources[number, own[0].start] = Source(scan, own)
        self._thread = ThreadPoolExecutor(1, "memlens-lists")
        self._waiting = deque[tuple[_Batch, Future[list[Source]]]]()

    def scan(self, tokens: Tensor, candidates: Candidates) -> None:
        """Scan a batch [batch, pos]. A thread inserts its prefixes into the lists later."""
        while self._waiting and (len(self._waiting) == _WAITING or self._waiting[0][1].done()):
            self._finish_one()
        ranges, places = np.full((2, tokens.numel()), BUCKETS, np.int64)
        ranges[candidates.rows], places[candidates.rows] = candidates.buckets, np.arange(len(candidates.rows))
        batch = _Batch(tokens, candidates, torch.from_numpy(ranges), places)
        self._waiting.append((batch, self._thread.submit(self._insert, batch, self._run(batch))))

    def finish(self) -> None:
        """Wait for all batches and complete the state."""
        while self._waiting:
            self._finish_one()
        for source in self.sources.values():
            source.collect()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _finish_one(self) -> None:
        batch, future = self._waiting.popleft()
        while overflowing := future.result():  # `_insert` has enlarged their buffers
            future = self._thread.submit(self._insert, batch, self._run(batch, overflowing))

    def _run(self, batch: _Batch, again: Sequence[Source] = ()) -> list[Callable[[], list[_Sent]]]:
        """Run the model on a batch and start copying its results. `again` limits this to the given sources."""
        ranges: dict[torch.device, Tensor] = {}
        strips: dict[torch.device, Strips] = {}  # strips of dense blocks
        sent: dict[torch.device, list[_Sent]] = {}
        for source in self.sources.values():
            source.take_thresholds()
            if source.device not in ranges:
                ranges[source.device] = to_device(batch.ranges, source.device)
                strips[source.device] = make_strips(ranges[source.device], BUCKETS, ROWS)

        def take(layer: int, block: CoefficientBlock | RoutedBlock) -> None:
            source = self.sources[
                layer, (block.group if isinstance(block, CoefficientBlock) else block.groups[0]).start
            ]
            if again and source not in again:
                return
            # lists hold float32, so float64 coefficients are rounded before they are compared
            fine = block.coefficients.dtype == torch.float64
            coefficients = block.coefficients.float() if fine else block.coefficients
            gates, routing = block.gates if source.gated else None, tuple[Tensor, ...]()
            own_strips, tokens = strips[source.device], torch.arange(len(coefficients), device=source.device)
            if isinstance(block, RoutedBlock):
                tokens, nothing = block.rows, source.experts * BUCKETS
                own = ranges[source.device][tokens]
                own_strips = make_strips(
                    torch.where(own < BUCKETS, block.experts * BUCKETS + own, nothing), nothing, ROWS // 2
                )
                routing = (tokens, block.experts, block.weights.float())
            statistics = strip_reader(source.device)(
                coefficients, gates, own_strips, source.thresholds, source.scan.triggers.keeps_bottom
            )
            hits = source.find_hits(coefficients, gates, statistics.reaches, own_strips, tokens)
            sample = tuple[Tensor, ...]()
            if not again:
                source.add(statistics, own_strips)
                sample = _draw_sample(source, batch, coefficients, block)
            sent.setdefault(source.device, []).append(_Sent(source, hits, sample, () if again else routing))

        with self.model.watch(
            take, sorted({source.scan.layer for source in again or self.sources.values()}), split=False
        ):
            self.model.run_body(batch.tokens)
        return [_send(parts) for parts in sent.values()]

    def _insert(self, batch: _Batch, received: Sequence[Callable[[], list[_Sent]]]) -> list[Source]:
        """Add the results of a batch to the state. Returns the sources whose buffers overflowed, and enlarges them."""
        overflowing = []
        for sent in [sent for receive in received for sent in receive()]:
            source, hits = sent.source, sent.hits
            strips, prefixes = hits.counts.tolist()
            room = len(hits.scores) // 2
            source.room = _ROOM * -(-2 * max(strips, prefixes // 2, 1) // _ROOM)
            if strips > room or prefixes > 2 * room:
                overflowing.append(source)
            else:
                source.insert(batch, *(part[:prefixes].numpy() for part in hits[1:]))
                source.new_thresholds = source.host_thresholds()
            if sent.sample:
                source.insert_sample(batch, *sent.sample)
                source.count_reach(batch, sent.routing)
        return overflowing


def _draw_sample(
    source: Source, batch: _Batch, coefficients: Tensor, block: CoefficientBlock | RoutedBlock
) -> tuple[Tensor, ...]:
    """Return the coefficients of the sampled prefixes, and their tokens and experts."""
    sampled = batch.candidates.rows[sampled_candidates(source.scan.sample, batch.candidates)]
    if isinstance(block, RoutedBlock):
        is_sampled = np.zeros(batch.tokens.numel(), np.bool_)
        is_sampled[sampled] = True
        mask = to_device(torch.from_numpy(is_sampled), source.device)[block.rows]
        places = first_places(mask, len(sampled) * (len(block.rows) // len(is_sampled)))
        return coefficients[places], block.rows[places], block.experts[places]
    tokens = to_device(torch.from_numpy(sampled), source.device)
    return coefficients[tokens], tokens, torch.zeros_like(tokens)


def _send(parts: list[_Sent]) -> Callable[[], list[_Sent]]:
    """Start copying the results of the sources of one device."""
    receive_tensors = copy_to_host([tensor for sent in parts for tensor in (*sent.hits, *sent.sample, *sent.routing)])

    def receive() -> list[_Sent]:
        tensors = iter(receive_tensors())
        return [
            _Sent(
                sent.source,
                Hits(*islice(tensors, len(sent.hits))),
                tuple(islice(tensors, len(sent.sample))),
                tuple(islice(tensors, len(sent.routing))),
            )
            for sent in parts
        ]

    return receive
