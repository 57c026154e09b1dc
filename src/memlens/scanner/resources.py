"""The number of workers and threads of a scan, and the memory and time that a scan takes on this machine.

If the user does not set the number of workers and threads, it is chosen as follows:

0. A scan on GPUs uses one worker per GPU. This process is the first worker, and with a device map the only one.
1. A scan that takes less than about two minutes, or has a single core, runs in one process with all cores.
2. A longer scan uses one worker per core, with one thread each. Threads of one worker would wait for each other.
   If memory is short, there are fewer workers with more threads each.
3. A resumed scan keeps its number of threads, because the number of threads affects the last bits of the results.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from memlens.corpus.readers import list_files
from memlens.corpus.sentences import ScanSentence
from memlens.errors import SettingError
from memlens.models.memory_model import MemoryModel
from memlens.pool import usable_cores
from memlens.scanner.scan import Scanner, plan_batches
from memlens.scanner.state import LayerShape, ScanState, shapes_of
from memlens.settings import CorpusSettings, ScanRunSettings, ScanSettings, is_hub_source

BATCH_TOKENS = {"cuda": 16_384, "mps": 8192}  # default tokens per batch on devices, on which small batches are slow
_SHORT_SECONDS = 120.0  # longest scan that uses no workers by default
_OPERATIONS = 1e10  # operations per second, assumed for every machine
_FREE_SHARE = 0.8  # share of the free memory that workers may use
_PROGRAM_BYTES = 700 << 20  # size of a process with its libraries and buffers
_BYTES_PER_TOKEN, _COMPRESSION = 4, 4  # bytes of plain text per token, and assumed compression ratio
_BYTES_PER_TRIGGER = 24  # a key and a position, and a copy of both while saving, merging or writing
_PROBE_LENGTH, _PROBE_TOKENS = 32, 2048


def choose_workers(
    run: ScanRunSettings,
    model: MemoryModel,
    settings: ScanSettings,
    corpus: CorpusSettings,
    recorded: int | None,
    is_complete: bool,
) -> tuple[int, int]:
    """Return the number of workers and of threads per worker, by the rules at the top of this module.

    0 workers on a Ray cluster means as many as fit on it.

    Args:
        run: Options of the run.
        model: The loaded model.
        settings: Options of the scan.
        corpus: The corpus.
        recorded: Number of threads of the scan that is resumed, or None for a new scan.
        is_complete: True if the index is already complete, so nothing will be scanned.
    """
    threads, cores = run.threads or recorded, usable_cores()
    if run.executor == "ray":
        return run.workers or 0, threads or 1
    if run.workers is not None:
        return run.workers, threads or max(1, cores // run.workers)
    uses_all_gpus = model.device.type == "cuda" and not model.device.index  # cuda:1 names a single GPU
    if uses_all_gpus and run.device_map is None and not is_complete:
        gpus = torch.cuda.device_count()
        return gpus, threads or max(1, cores // gpus)
    if is_complete or run.threads is not None or cores == 1 or model.device.type != "cpu":
        return 1, threads or cores
    weights = sum(weight.numel() for weight in model.network.parameters())
    operations = 2 * approximate_tokens(corpus, settings.max_tokens) * weights
    room = max(1, int(_FREE_SHARE * free_memory()) // worker_bytes(model, settings))
    if operations / _OPERATIONS < _SHORT_SECONDS or room == 1:
        return 1, threads or cores
    workers = max(1, min(room, cores // (threads or 1)))
    return workers, threads or cores // workers


def worker_bytes(model: MemoryModel, settings: ScanSettings) -> int:
    """Return the approximate memory use of one worker in bytes: weights, state, and the program itself."""
    weights = sum(weight.numel() * weight.element_size() for weight in model.network.parameters())
    memories = sum(block.memories for block in model.layers)
    return weights + memories * (_BYTES_PER_TRIGGER * settings.top + 600) + _PROGRAM_BYTES


def approximate_tokens(corpus: CorpusSettings, limit: int | None) -> int:
    """Estimate the number of tokens of a corpus from its file sizes. A Hub dataset is assumed to be very large."""
    size = 0.0
    for source in corpus.sources:
        if is_hub_source(source):
            size += 1e12
            continue
        for file in list_files(source):
            is_compressed = file.compression or file.kind == ".parquet"
            size += file.path.stat().st_size * (_COMPRESSION if is_compressed else 1)
    return int(min(size / _BYTES_PER_TOKEN, limit or size))


def free_memory() -> int:
    """Return the bytes that are free now, half of the memory on a Mac, or a very large number on other systems."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 1 << 62


def check_list_memory(shapes: Mapping[int, LayerShape], settings: ScanSettings, together: int | None = None) -> None:
    """Raise SettingError if trigger lists would use more than half of the free memory.

    Args:
        shapes: The shapes of the layers to scan.
        settings: Options of the scan.
        together: Number of layers scanned in one pass, or None if all layers are scanned in one pass.
    """
    lists = sorted((shape.memories * (2 if shape.bottom else 1) for shape in shapes.values()), reverse=True)
    needed = sum(lists[:together]) * settings.top * _BYTES_PER_TRIGGER
    if needed > free_memory() // 2:
        raise SettingError(
            f"--top is {settings.top}: trigger lists of this length use {needed / 1e9:,.1f} GB, more than half of the "
            f"{free_memory() / 1e9:,.1f} GB that are free; use a lower --top, fewer --layers or --layer-budget"
        )


@dataclass(frozen=True)
class ScanEstimate:
    """The approximate cost of a scan on this machine."""

    threads: int
    tokens_per_second: float
    probe_tokens: int  # number of tokens in the measured batch
    weights_bytes: int
    lists_bytes: int  # size of triggers, statistics and samples
    batch_bytes: int  # size of the coefficients and states of one layer

    @property
    def seconds_per_million(self) -> float:
        return 1e6 / self.tokens_per_second

    @property
    def memory_bytes(self) -> int:
        return self.weights_bytes + self.lists_bytes + self.batch_bytes


def estimate_scan(model: MemoryModel, settings: ScanSettings) -> ScanEstimate:
    """Estimate the cost of a scan from a batch of random tokens. A short batch first loads the compiled loops.

    Raises:
        SettingError: The trigger lists would not fit in memory.
    """
    if not model.has_tokenizer:
        settings = replace(settings, bos="no")
    layers = range(len(model.layers))
    check_list_memory(shapes_of(model, layers, settings), settings)
    scanner = Scanner(model, settings, ScanState.start(model, layers, settings))
    length = min(_PROBE_LENGTH, (model.context or _PROBE_LENGTH + 1) - 1) or 1
    vocabulary = min(model.vocabulary, model.tokenizer.size) if model.has_tokenizer else model.vocabulary
    tokens = np.random.default_rng(settings.seed).integers(0, vocabulary, length)
    rows = max(1, min(settings.batch_tokens, _PROBE_TOKENS) // (length + 1))
    seconds = 0.0
    # All sentences are equal, so the lists are soon full and take few new entries, as in a long scan.
    for window, count in enumerate((1, rows, rows)):
        sentences = [ScanSentence(window * rows + row, tokens) for row in range(count)]
        began = time.monotonic()
        scanner.scan(plan_batches(window, sentences, settings, scanner.bos))
        seconds = max(time.monotonic() - began, 1e-9)
    return ScanEstimate(
        threads=settings.threads,
        tokens_per_second=rows * length / seconds,
        probe_tokens=rows * length,
        weights_bytes=sum(weight.numel() * weight.element_size() for weight in model.network.parameters()),
        lists_bytes=sum(array.nbytes for array in scanner.state.arrays().values()),
        batch_bytes=_batch_bytes(model, settings),
    )


def _batch_bytes(model: MemoryModel, settings: ScanSettings) -> int:
    """Return the bytes that one layer needs for a batch: coefficients before and after activation, gates and states."""
    widest = max(group.size for layer in model.layers for group in layer.groups)
    copies = 3 if model.first.gated else 2
    return settings.batch_tokens * (copies * widest + 8 * model.width) * model.dtype.itemsize
