"""Scans batches of sentences into a state, in this process or on a pool.

1. Windows (`settings.WINDOW` sentences) are cut into batches. A batch depends only on its window and on the settings.
2. A batch is one forward pass without the LM head. The coefficients of its prefixes update the state, on the CPU
   through the module `layer` and on another device through the module `device`.
3. In this process, all batches update one state. On a pool, the batches are grouped into segments. A worker scans a
   segment into a state, and the driver merges the states. The order does not change the bits.
4. The driver saves its state as a part file at intervals and when the scan stops. Only the driver writes to the index.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from memlens.corpus.sentences import Batch, ScanSentence, cut_batches
from memlens.models.groups import CoefficientBlock
from memlens.models.memory_model import MemoryModel
from memlens.pool import Pool
from memlens.scanner.device import DeviceScan
from memlens.scanner.kernels import Candidates, make_candidates, warm_up
from memlens.scanner.state import BatchRange, LayerShape, PartFolder, ScanState
from memlens.settings import ScanSettings
from memlens.signals import Stopper

FIRST_PREFIXES, FIRST_PREFIXES_PER_TRIGGER = 8192, 128  # blocks of these first prefixes are copied from the device
SAVE_SECONDS = 15.0  # minimum time between two saves
SAVE_RATIO = 50  # minimum time between two saves, as a multiple of the duration of a save
_SEGMENT_SECONDS = 60.0
_OPERATIONS, _GPU_OPERATIONS = 2e10, 1e14  # operations per second of a worker on a CPU and on a GPU
_BATCH_SECONDS = 0.01  # fixed time per batch
_BYTES = 1e8  # bytes of a state that are sent and merged per second
_SEND_RATIO = 20  # minimum time of a segment, as a multiple of the time to send and merge its state
_SEGMENTS = 8  # minimum number of segments, so that a few workers share a short corpus evenly


class ScanBatch(NamedTuple):
    """A batch and its place in the plan."""

    window: int
    number: int  # number of the batch in its window
    batch: Batch
    fresh_from: NDArray[np.int64]  # [batch]: first new position; shorter prefixes occurred in earlier sentences


class Scanner:
    """Scans batches into a state.

    If `on_device` is true, coefficients are filtered on the model's device. The default is false only for the CPU.
    """

    def __init__(
        self, model: MemoryModel, settings: ScanSettings, state: ScanState, on_device: bool | None = None
    ) -> None:
        self.model, self.settings, self.state = model, settings, state
        self.bos = bos_to_feed(model, settings)
        self.on_device = model.device.type != "cpu" if on_device is None else on_device
        self._device_scan: DeviceScan | None = None

    def scan(self, batches: Iterable[ScanBatch], after_batch: Callable[[Batch], None] = lambda batch: None) -> None:
        """Scan batches. `after_batch` is called after each batch and may raise an exception to stop.

        The state is complete when this method returns. `after_batch` must call `complete` before it uses the state.
        """
        with torch.inference_mode(), _use_threads(self.settings.threads) as pool:
            try:
                for window, number, batch, fresh_from in batches:
                    self._scan_batch(batch, fresh_from, pool)
                    self.state.done.add(window, number, number + 1)
                    after_batch(batch)
                self.complete()
            finally:
                if self._device_scan is not None:
                    self._device_scan.close()
                    self._device_scan = None

    def complete(self) -> None:
        """Wait until the state includes all batches that a device is still working on."""
        if self._device_scan is not None:
            self._device_scan.finish()

    def _scan_batch(self, batch: Batch, fresh_from: NDArray[np.int64], pool: ThreadPoolExecutor | None) -> None:
        candidates = self._candidates(batch, fresh_from)

        def update(layer: int, block: CoefficientBlock) -> None:
            self.state.layers[layer].update(block, candidates, pool)

        tokens = torch.from_numpy(batch.tokens)
        # most coefficients reach the low thresholds of the first prefixes, so whole blocks are copied
        if self.on_device and self.state.prefixes >= max(
            FIRST_PREFIXES, FIRST_PREFIXES_PER_TRIGGER * self.settings.top
        ):
            self._device_scan = self._device_scan or DeviceScan(self.model, self.state.layers)
            self._device_scan.scan(tokens, candidates)
        else:
            with self.model.watch(update, list(self.state.layers)):
                self.model.run_body(tokens.to(self.model.device))
        self.state.prefixes += len(candidates.rows)
        self.state.tokens += int(batch.lengths.sum())

    def _candidates(self, batch: Batch, fresh_from: NDArray[np.int64]) -> Candidates:
        """Return the rows of the flattened batch [batch * pos] that are candidate prefixes."""
        width, shift = batch.tokens.shape[1], 0 if self.bos is None else 1
        rows, sentences, positions = [], [], []
        columns = (batch.sentences.tolist(), batch.lengths.tolist(), fresh_from.tolist())
        for row, (sentence, length, fresh) in enumerate(zip(*columns, strict=True)):
            first, last = candidate_range(length, fresh, self.settings, self.bos)
            position = np.arange(first, last)
            positions.append(position)
            rows.append(row * width + shift + position)
            sentences.append(np.full(last - first, sentence))
        return make_candidates(np.concatenate(rows), np.concatenate(sentences), np.concatenate(positions))


def bos_to_feed(model: MemoryModel, settings: ScanSettings) -> int | None:
    """Return the id of the BOS token that the scan puts before every sentence, or None if it adds none."""
    is_fed = model.tokenizer.adds_bos if settings.bos == "auto" else settings.bos == "yes"
    return model.tokenizer.bos if is_fed else None


def plan_batches(
    number: int, sentences: Sequence[ScanSentence], settings: ScanSettings, bos: int | None
) -> list[ScanBatch]:
    """Cut window `number` into batches. Sentences without a new prefix are left out."""
    fresh_from: dict[int, int] = {}
    fed = []
    for sentence in sentences:
        first, last = candidate_range(len(sentence.tokens), sentence.fresh_from, settings, bos)
        if last > first:
            fed.append((sentence.id, sentence.tokens))
            fresh_from[sentence.id] = sentence.fresh_from
    batches = cut_batches(fed, settings.batch_tokens, bos)
    return [
        ScanBatch(number, place, batch, np.array([fresh_from[id_] for id_ in batch.sentences.tolist()], np.int64))
        for place, batch in enumerate(batches)
    ]


def candidate_range(length: int, fresh_from: int, settings: ScanSettings, bos: int | None) -> tuple[int, int]:
    """Return the first and the last (exclusive) candidate position of a sentence.

    Position -1 is the BOS token alone.
    """
    first = -1 if settings.bos_prefix and bos is not None and fresh_from == 0 else fresh_from
    return first, length - (0 if settings.whole_sentence else 1)


def planned_batches(
    ranges: Iterable[BatchRange],
    window: Callable[[int], Sequence[ScanSentence]],
    settings: ScanSettings,
    bos: int | None,
) -> Iterator[ScanBatch]:
    """Yield the batches in the ranges. `window(number)` returns the sentences of a window."""
    for number, window_ranges in groupby(ranges, lambda batches: batches.window):
        batches = plan_batches(number, window(number), settings, bos)
        for part in window_ranges:
            yield from batches[part.first : part.stop]


@contextmanager
def _use_threads(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """Run torch with this number of threads. Yields a thread pool for the compiled loops, or None for one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    pool = ThreadPoolExecutor(count) if count > 1 else None
    try:
        yield pool
    finally:
        if pool is not None:
            pool.shutdown()
        torch.set_num_threads(before)


class PartSaver:
    """Saves a state as one part, at intervals that keep the cost low."""

    def __init__(self, parts: PartFolder, name: str, seconds: float = SAVE_SECONDS) -> None:
        self.parts, self.name, self.seconds = parts, name, seconds
        self.next_save = time.monotonic() + seconds
        self._saved = -1  # number of batches in the saved state

    def is_due(self) -> bool:
        return time.monotonic() >= self.next_save

    def save(self, state: ScanState) -> None:
        """Save the state if it has changed since the last save."""
        began = time.monotonic()
        if len(state.done) not in (0, self._saved):
            self.parts.save(self.name, state.arrays())
            self._saved = len(state.done)
        now = time.monotonic()
        self.next_save = now + max(self.seconds, SAVE_RATIO * (now - began))


def scan_here(
    scanner: Scanner,
    batches: Iterable[ScanBatch],
    saver: PartSaver,
    on_tokens: Callable[[int], None],
    stop: Stopper,
) -> None:
    """Scan batches in this process.

    Args:
        scanner: Holds the model and the state, which may contain earlier batches.
        batches: The batches to scan.
        saver: Saves the state at intervals, at the end, and before the scan stops.
        on_tokens: Called with the number of tokens of each batch.
        stop: Ends the scan after the current batch if a stop was requested.
    """

    def after_batch(batch: Batch) -> None:
        on_tokens(int(batch.lengths.sum()))
        if stop.stopped or saver.is_due():
            scanner.complete()
            saver.save(scanner.state)
        stop.check()

    scanner.scan(batches, after_batch)
    saver.save(scanner.state)


def scan_on_pool(
    pool: Pool,
    state: ScanState,
    shapes: Mapping[int, LayerShape],
    settings: ScanSettings,
    batches: Iterable[ScanBatch],
    size: int,
    saver: PartSaver,
    on_tokens: Callable[[int], None],
) -> None:
    """Scan batches on a pool and merge the results into a state.

    If the scan stops, unfinished segments are lost. Everything else is saved.

    Args:
        pool: The pool that scans segments.
        state: The state, which may contain earlier batches.
        shapes: The layers of the state.
        settings: Options of the scan.
        batches: The batches to scan.
        size: Number of batches in a segment (see `segment_size`).
        saver: Saves the state at intervals and at the end.
        on_tokens: Called with the number of tokens of each segment.
    """
    warm_up()  # compile here, so that workers load the result from the cache
    remaining = iter(batches)
    segments = iter(lambda: list(islice(remaining, size)), [])
    try:
        for arrays in pool.map(SegmentScan(settings, tuple(shapes)), segments):
            segment = ScanState.empty(shapes, settings)
            segment.restore_(arrays)
            state.merge(segment)
            on_tokens(segment.tokens)
            if saver.is_due():
                saver.save(state)
    finally:
        saver.save(state)


@dataclass(frozen=True)
class SegmentScan:
    """A picklable function that scans a segment on a worker."""

    settings: ScanSettings
    layers: tuple[int, ...]

    def __call__(self, model: MemoryModel, segment: Sequence[ScanBatch]) -> dict[str, NDArray[Any]]:
        scanner = Scanner(model, self.settings, ScanState.start(model, self.layers, self.settings))
        scanner.scan(segment)
        return scanner.state.arrays()


def segment_size(
    model: MemoryModel, settings: ScanSettings, state: ScanState, batches: int, on_gpus: bool = False
) -> int:
    """Return the number of batches per segment for a plan of `batches` batches.

    A segment takes about a minute, and longer if its state is large, so that sending and merging the state costs at
    most a twentieth of the work. A short corpus has smaller segments.
    """
    weights = sum(weight.numel() for weight in model.network.parameters())
    operations = _GPU_OPERATIONS if on_gpus else _OPERATIONS
    batch_seconds = _BATCH_SECONDS + 2 * weights * settings.batch_tokens / operations
    state_seconds = sum(array.nbytes for array in state.arrays().values()) / _BYTES
    least = min(_SEND_RATIO * state_seconds / batch_seconds, batches / 2)
    return max(1, round(max(least, min(_SEGMENT_SECONDS / batch_seconds, batches / _SEGMENTS))))
